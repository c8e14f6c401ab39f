# SPDX-License-Identifier: Apache-2.0

import configparser
import inspect
import pathlib
import re

from cinder.message import message_field
from oslotest import base

from cinder_localstor import exception
from cinder_localstor.moves import notifications
from cinder_localstor.moves import properties
from cinder_localstor.moves import table
from cinder_localstor.node import privileged
from cinder_localstor import opts
from lab import cli

ROOT = pathlib.Path(__file__).parents[3]
SOURCE = ROOT / 'doc' / 'source'
PAGES = [ROOT / 'README.rst', *sorted(SOURCE.glob('*.rst'))]

LITERAL = re.compile(r'``([^`\n]+)``')
CLASS = re.compile(r'[A-Z][a-z]+(?:[A-Z][a-z]+)+')
OPTION = re.compile(r'\blocalstor_(?!(?:lio_)?privileged)[a-z]\w*')
FILE = re.compile(r'(?:cinder_localstor|doc|lab|tests|releasenotes)/[\w./-]+')
# What a page calls by a name of ours that is no option: the package
PACKAGE = re.compile(r'cinder_localstor[\w.]*')


class NamesTest(base.BaseTestCase):
    """What the documentation names is there, under this name."""

    def page(self, name):
        return (SOURCE / name).read_text()

    def literals(self):
        for path in PAGES:
            for found in LITERAL.findall(path.read_text()):
                yield path.name, found

    def test_errors_and_what_nova_is_given(self):
        known = {name for name, found in vars(exception).items()
                 if inspect.isclass(found)}
        # Nova can't be imported beside Cinder.
        known.update(re.findall(r'^class (\w+)\(', (
            ROOT / 'cinder_localstor' / 'nova' / 'scheduler.py').read_text(),
            re.MULTILINE))
        named = {(page, text) for page, text in self.literals()
                 if CLASS.fullmatch(text)}
        self.assertTrue(named)
        self.assertEqual([], [(page, text) for page, text in sorted(named)
                              if text not in known])

    def test_options(self):
        known = {opt.name for _section, found in opts.list_opts()
                 for opt in found}
        for path in PAGES:
            text = PACKAGE.sub('', path.read_text())
            self.assertEqual(set(), set(OPTION.findall(text)) - known,
                             path.name)

    def test_extra_specs(self):
        named = re.findall(r'^``(localstor:\w+)``$',
                           self.page('options.rst'), re.MULTILINE)
        self.assertEqual(list(properties.PROPERTIES), named)

    def test_options_of_cinder(self):
        page = self.page('options.rst')
        for name in opts.CINDER_OPTS + opts.LVM_OPTS:
            self.assertIn('``%s``' % name, page)

    def test_events(self):
        page = self.page('notifications.rst')
        for prefix in (notifications.MOVE, notifications.COPY):
            self.assertIn('``%s<event>``' % prefix, page)
        for directive in ('events', 'payload'):
            self.assertIn('.. localstor-%s::' % directive, page)

    def test_sequences_of_events(self):
        tell = notifications.EVENTS
        known = {(tell[state].value, tell[after.to].value)
                 for state, rules in table.TABLE.items() if state in tell
                 for after in rules.transitions}
        known |= {(tell[state].value, tell[after].value)
                  for state, after in table.UNDONE_BY_FAILURE.items()}
        # While it is usable, and by a user's delete
        known |= {('usable', 'progress'), ('progress', 'arrived'),
                  ('usable', 'discarding')}
        shown, = re.findall(r'(?s)\n=+ =+\n(.*)\n=+ =+\n',
                            self.page('notifications.rst'))
        # A line that is indented goes on with the sequence.
        used = [LITERAL.findall(row)
                for row in re.split(r'\n(?=\S)', shown)]
        self.assertEqual(
            set(), {pair for words in used for pair
                    in zip(words, words[1:], strict=False)} - known)
        self.assertEqual(
            {event.value for event in notifications.Event} - {'error'},
            {word for words in used for word in words})

    def test_messages(self):
        page = self.page('notifications.rst')
        shown = set(re.findall(r'``([a-z ]+:[A-Z][^`]+)``', page))
        known = {'%s:%s' % (action[1], detail[1])
                 for action in message_field.Action.ALL
                 for detail in message_field.Detail.ALL}
        self.assertEqual(set(), shown - known)
        used = {getattr(message_field, kind).__dict__[name][1]
                for path in (ROOT / 'cinder_localstor').rglob('*.py')
                for kind, name in re.findall(
                    r'message_field\.(Action|Detail)\.(\w+)',
                    path.read_text())}
        self.assertTrue(used)
        self.assertEqual(set(), used - {
            part for text in shown for part in text.split(':')})

    def test_files(self):
        for page, text in self.literals():
            if FILE.fullmatch(text):
                self.assertTrue((ROOT / text).exists(),
                                '%s: %s' % (page, text))

    def test_privileged_context(self):
        for name in ('README.rst', 'doc/source/security.rst'):
            self.assertIn(privileged.CONTEXT.pypath,
                          (ROOT / name).read_text())

    def test_tests(self):
        named = re.findall(r'``(tests[\w.]+)\.(\w+)``',
                           self.page('testing.rst'))
        self.assertTrue(named)
        for module, name in named:
            path = ROOT / (module.replace('.', '/') + '.py')
            self.assertRegex(path.read_text(), r'(?m)^class %s\(' % name)

    def test_commands_of_the_lab(self):
        described = re.findall(r'^``(\w[\w-]*)`` +\w', self.page('lab.rst'),
                               re.MULTILINE)
        self.assertEqual(sorted(cli._COMMANDS), sorted(described))

    def test_commands_used_with_the_lab(self):
        used = re.findall(r'^ +[#$] lab (\w[\w-]*)', self.page('lab.rst'),
                          re.MULTILINE)
        self.assertTrue(used)
        self.assertEqual(set(), set(used) - set(cli._COMMANDS))

    def test_commands_of_the_operator(self):
        setup = configparser.ConfigParser()
        setup.read(ROOT / 'setup.cfg')
        known = {line.partition('=')[0].strip() for line in
                 setup['entry_points']['cinder_localstor.commands']
                 .splitlines() if line.strip()}
        used = {found for path in PAGES for found in re.findall(
            r'(?:``|# |/bin/)cinder-localstor ([a-z]+)', path.read_text())}
        self.assertEqual(known, used)

    def test_make_targets(self):
        makefile = ROOT / 'Makefile'
        if not makefile.exists():
            self.skipTest('there is no Makefile in this tree')
        known = set(re.findall(r'^([\w-]+):', makefile.read_text(),
                               re.MULTILINE))
        used = {found for path in PAGES for found in re.findall(
            r'``make ([\w-]+)``', path.read_text())}
        self.assertEqual(set(), used - known)


class GeneratedTablesTest(base.BaseTestCase):
    """The tables that are made from the code have something to show."""

    def test_every_step_is_described(self):
        for rules in table.TABLE.values():
            for step in rules.steps:
                self.assertTrue(step.do.__doc__, step)

    def test_every_state_is_told_and_every_event_comes_from_one(self):
        self.assertEqual(set(table.State) - {table.State.RETURNING},
                         set(notifications.EVENTS))
        self.assertEqual(
            set(notifications.Event) - {notifications.Event.PROGRESS,
                                        notifications.Event.ERROR},
            set(notifications.EVENTS.values()))

    def test_every_event_and_field_is_described_once(self):
        for described in (notifications.Event, notifications.FIELDS):
            texts = [found.meaning for found in described]
            self.assertEqual(sorted(set(texts)), sorted(texts))
            self.assertTrue(all(texts))

    def test_every_error_has_a_message_of_its_own(self):
        messages = [str(found.message) for found in vars(exception).values()
                    if inspect.isclass(found)
                    and found.__module__ == exception.__name__]
        self.assertEqual(sorted(set(messages)), sorted(messages))
        self.assertTrue(all(messages))
