# SPDX-License-Identifier: Apache-2.0

import unittest
from unittest import mock

import ddt

from cinder_localstor import exception
from cinder_localstor.node import commands
from cinder_localstor.node import privileged


@ddt.ddt
class CommandsTest(unittest.TestCase):

    def setUp(self):
        patched = mock.patch.object(privileged, 'run',
                                    return_value=(0, 'out', ''))
        self.ran = patched.start()
        self.addCleanup(patched.stop)
        self.command = commands.Commands(60)

    def test_output_is_returned(self):
        self.assertEqual('out', self.command.run('vgs', 'disks'))
        self.ran.assert_called_once_with(['vgs', 'disks'], 60)

    def test_time_of_one_command(self):
        self.command.run('vgs', timeout=5)
        self.ran.assert_called_once_with(['vgs'], 5)

    @ddt.data((5, 'no such group\n', 'no such group'), (5, ' \n', '5'),
              (-9, '', '-9'))
    @ddt.unpack
    def test_failure_names_command_node_and_reason(self, status, err, reason):
        self.ran.return_value = (status, '', err)
        with self.assertRaises(exception.CommandFailed) as caught:
            self.command.run('lvs', 'my group')
        text = str(caught.exception)
        for part in ("lvs 'my group'", self.command.host, reason):
            self.assertIn(part, text)
        self.assertNotIsInstance(caught.exception, exception.CommandTimedOut)

    def test_command_that_still_runs_names_its_process(self):
        self.ran.return_value = (privileged.STILL_RUNS, '4711', '')
        with self.assertRaises(exception.CommandStillRuns) as caught:
            self.command.run('lvcreate', 'x', timeout=7)
        for part in ('lvcreate x', '7 seconds', '/proc/4711/stack'):
            self.assertIn(part, str(caught.exception))
        # Nothing is known of what it does.
        self.assertIsInstance(caught.exception, exception.CommandTimedOut)

    def test_time_out_names_command_and_time(self):
        self.ran.return_value = (privileged.TIMED_OUT, '', '')
        with self.assertRaises(exception.CommandTimedOut) as caught:
            self.command.run('dmsetup', 'info', timeout=7)
        for part in ('dmsetup info', '7 seconds'):
            self.assertIn(part, str(caught.exception))


class InTurnTest(unittest.TestCase):

    def setUp(self):
        patched = mock.patch.object(privileged, 'run_in_turn',
                                    return_value=(0, '', ''))
        self.ran = patched.start()
        self.addCleanup(patched.stop)
        self.command = commands.Commands(60)

    def run_in_turn(self):
        self.command.run_in_turn('tgtadm, for x', [
            ('tgtadm', '--password', 'a secret'), ('tgtadm', '--op', 'bind')])

    def test_all_of_them_are_run(self):
        self.run_in_turn()
        self.ran.assert_called_once_with(
            [['tgtadm', '--password', 'a secret'],
             ['tgtadm', '--op', 'bind']], 60)

    def test_neither_error_nor_log_has_their_arguments(self):
        self.ran.return_value = (22, '', 'refused')
        with self.assertLogs('cinder_localstor.node.commands',
                             'DEBUG') as logged:
            with self.assertRaises(exception.CommandFailed) as caught:
                self.run_in_turn()
        for text in (str(caught.exception), '\n'.join(logged.output)):
            self.assertIn('tgtadm, for x', text)
            self.assertNotIn('a secret', text)


class GuardTest(unittest.TestCase):
    """Nodes that are suspended."""

    def setUp(self):
        self.command = commands.Commands(60)
        self.answers = {'hold': (0, '4711', ''), 'let_go': (0, '', '')}
        self.asked = []
        for name in self.answers:
            patched = mock.patch.object(privileged, name, self.answer(name))
            patched.start()
            self.addCleanup(patched.stop)

    def answer(self, name):
        def ask(*arguments):
            self.asked.append((name, *arguments))
            return self.answers[name]
        return ask

    def test_guard_is_known_by_its_process(self):
        guard = self.command.hold(('a', 'b'), 20)
        self.command.let_go(guard)
        self.assertEqual([('hold', ['a', 'b'], 20, 60), ('let_go', 4711, 60)],
                         self.asked)

    def test_failure_names_the_nodes(self):
        self.answers['hold'] = (4, '', 'Device b not found')
        with self.assertRaises(exception.CommandFailed) as caught:
            self.command.hold(['a', 'b'], 20)
        for part in ('dmsetup suspend a b', 'not found'):
            self.assertIn(part, str(caught.exception))

    def test_guard_that_was_early_or_does_not_end_is_a_failure(self):
        for status in (3, privileged.TIMED_OUT):
            self.answers['let_go'] = (status, '', 'the time was over')
            self.assertRaises(exception.CommandFailed, self.command.let_go,
                              4711)
