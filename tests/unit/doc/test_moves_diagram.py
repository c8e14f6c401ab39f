# SPDX-License-Identifier: Apache-2.0

import pathlib
import re
from xml.etree import ElementTree

from oslotest import base

from cinder_localstor.moves import table

DIAGRAM = (pathlib.Path(__file__).parents[3]
           / 'doc' / 'source' / '_static' / 'moves.svg')
SVG = '{http://www.w3.org/2000/svg}'
SWITCH = '⇄'
# How the diagram tells by colour who drives a move, and that it has ended
COLOURS = {table.Side.SOURCE: '#ffe7b8', table.Side.DESTINATION: '#dcebf8',
           None: '#cfe8cf'}


class MovesDiagramTest(base.BaseTestCase):
    """The diagram of states shows what the table says, and no more."""

    def setUp(self):
        super().setUp()
        self.root = ElementTree.parse(DIAGRAM).getroot()

    def groups(self, kind):
        return {group.get('id'): group for group in self.root.iter(SVG + 'g')
                if group.get('class') == kind}

    def words(self, group):
        return ' '.join(''.join(text.itertext())
                        for text in group.iter(SVG + 'text'))

    def test_states(self):
        shown = {name: self.words(group)
                 for name, group in self.groups('state').items()}
        self.assertEqual({state.value: state.value for state in table.State},
                         shown)

    def test_colours_tell_who_drives(self):
        for state in table.State:
            rules = table.TABLE.get(state)
            box = self.groups('state')[state.value].find(SVG + 'rect')
            self.assertEqual(COLOURS[rules.owner if rules else None],
                             box.get('fill'), state)

    def test_transitions(self):
        expected = {}
        for state, rules in table.TABLE.items():
            for transition in rules.transitions:
                name = '%s--%s' % (state.value, transition.to.value)
                expected.setdefault(name, []).append(transition)
        shown = self.groups('transition')
        self.assertEqual(set(expected), set(shown))
        facts = {fact for transitions in expected.values()
                 for transition in transitions for fact in transition.facts}
        for name, transitions in expected.items():
            words = self.words(shown[name])
            named = re.findall('|'.join(sorted(facts, key=len, reverse=True)),
                               words)
            self.assertEqual(
                sorted(fact for transition in transitions
                       for fact in transition.facts), sorted(named), name)
            switches = [transition for transition in transitions
                        if transition.identity is table.Identity.SWITCHES]
            self.assertEqual(len(switches), words.count(SWITCH), name)

    def test_what_a_failure_undoes(self):
        self.assertEqual(
            {'%s--%s' % (state.value, undone.value)
             for state, undone in table.UNDONE_BY_FAILURE.items()},
            set(self.groups('failure')))
