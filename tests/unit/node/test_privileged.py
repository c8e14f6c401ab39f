# SPDX-License-Identifier: Apache-2.0

import os
import socket
import stat
import tempfile
import threading
import time
import unittest
from unittest import mock

import ddt
from eventlet import patcher

from cinder_localstor.node import privileged

ZERO = b'\0'


class PrivilegedTestCase(unittest.TestCase):
    """Without the daemon, and with programs that are scripts of ours."""

    def setUp(self):
        self.addCleanup(privileged.CONTEXT.set_client_mode,
                        privileged.CONTEXT.client_mode)
        privileged.CONTEXT.set_client_mode(False)
        # The daemon is a process of its own, without eventlet's patches,
        # which Cinder's fixtures bring into this one.
        original = mock.patch.object(privileged, 'subprocess',
                                     patcher.original('subprocess'))
        original.start()
        self.addCleanup(original.stop)
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = directory.name
        path = mock.patch.dict('os.environ', {
            'PATH': self.directory + os.pathsep + os.environ['PATH'],
            'TELLTALE': 'x'})
        path.start()
        self.addCleanup(path.stop)

    def path(self, name):
        return os.path.join(self.directory, name)

    def program(self, name, text):
        with open(self.path(name), 'w') as file:
            file.write('#!/bin/sh\n' + text)
        os.chmod(self.path(name), stat.S_IRWXU)


@ddt.ddt
class RunTest(PrivilegedTestCase):

    def test_status_and_both_outputs(self):
        self.program('lvs', 'echo "out $1"; echo err >&2; exit 5')
        self.assertEqual((5, 'out x y\n', 'err\n'),
                         privileged.run(['lvs', 'x y'], 10))

    @ddt.data('sh', 'rm', '/usr/sbin/lvs', '../lvs', '')
    def test_other_programs_are_refused(self, name):
        self.program('rm', 'exit 0')
        self.assertRaises(ValueError, privileged.run, [name, '-c', 'true'],
                          10)

    def test_no_shell_reads_the_arguments(self):
        self.program('lvs', 'echo "$1"')
        self.assertEqual((0, '$(id); x\n', ''),
                         privileged.run(['lvs', '$(id); x'], 10))

    def test_output_is_that_of_the_c_locale(self):
        self.program('lvs', 'echo $LC_ALL $TELLTALE')
        self.assertEqual('C\n', privileged.run(['lvs'], 10)[1])

    def test_output_that_is_no_text(self):
        self.program('lvs', r"printf '\377'")
        self.assertEqual(1, len(privileged.run(['lvs'], 10)[1]))

    def test_input_is_empty(self):
        self.program('lvs', 'cat')
        self.assertEqual((0, '', ''), privileged.run(['lvs'], 10))

    def run_hanging(self, text):
        self.program('lvs', text)
        before = time.monotonic()
        result = privileged.run(['lvs'], 0.3)
        self.assertLess(time.monotonic() - before, 5)
        self.assertEqual((privileged.TIMED_OUT, '', ''), result)

    def assert_dead(self, pid):
        for _try in range(50):
            try:
                with open('/proc/%d/stat' % pid) as file:
                    if file.read().split(') ')[1][0] == 'Z':
                        return
            except FileNotFoundError:
                return
            time.sleep(0.05)
        self.fail('%d lives' % pid)

    def pid(self, name):
        with open(self.path(name)) as file:
            return int(file.read())

    def test_hanging_command_is_killed(self):
        self.run_hanging('echo $$ > %s; exec sleep 60' % self.path('pid'))
        self.assert_dead(self.pid('pid'))

    def test_its_children_are_killed_too(self):
        self.run_hanging('sleep 60 & echo $! > %s; wait' % self.path('pid'))
        self.assert_dead(self.pid('pid'))

    def test_command_that_ignores_signals_is_killed(self):
        self.run_hanging('trap "" TERM INT HUP; sleep 60 & sleep 60')

    def test_child_that_keeps_the_output_open_does_not_block(self):
        self.run_hanging('setsid sleep 2 & exec sleep 60')


class HydratorTest(PrivilegedTestCase):

    def setUp(self):
        super().setUp()
        for name in ('RUNTIME', 'SYSTEMD'):
            patched = mock.patch.object(privileged, name, self.path(name))
            patched.start()
            self.addCleanup(patched.stop)

    def start(self):
        return privileged.start_hydrator('volume-1', ['--size', '5'], 10)

    def arguments(self):
        return ('run --detach --runtime %(runtime)s/volume-1 '
                '--marks %(runtime)s/devices --size 5'
                % {'runtime': self.path('RUNTIME')})

    def test_it_is_started_in_the_background(self):
        self.program('localstor-hydrator', 'echo "$*"')
        self.assertEqual((0, self.arguments() + '\n', ''), self.start())

    def test_it_gets_a_scope_of_its_own_where_systemd_runs(self):
        os.mkdir(self.path('SYSTEMD'))
        self.program('systemd-run', 'echo "$*"')
        self.assertEqual(
            (0, '--quiet --scope --collect localstor-hydrator %s\n'
             % self.arguments(), ''), self.start())

    def serve(self, answer):
        """Answer one line on the socket of a helper; what was asked."""
        directory = os.path.join(self.path('RUNTIME'), 'volume-1')
        os.makedirs(directory)
        listener = socket.socket(socket.AF_UNIX)
        self.addCleanup(listener.close)
        listener.bind(os.path.join(directory, 'control'))
        listener.listen()
        asked = []

        def run():
            connection = listener.accept()[0]
            asked.append(connection.recv(4096))
            connection.sendall(answer)
            connection.close()
        thread = threading.Thread(target=run)
        thread.start()
        self.addCleanup(thread.join)
        return asked

    def ask(self):
        return privileged.ask_hydrator('volume-1', '{"command": "x"}', 5)

    def test_question_and_answer_are_lines(self):
        asked = self.serve(b'{"ok": true}\nnot this')
        self.assertEqual('{"ok": true}\n', self.ask())
        self.assertEqual([b'{"command": "x"}\n'], asked)

    def test_nobody_answers(self):
        self.assertRaises(OSError, self.ask)


class FileTest(PrivilegedTestCase):

    def make(self, content=b''):
        path = self.path('device')
        with open(path, 'wb') as file:
            file.write(content)
        return path

    def read(self, path):
        with open(path, 'rb') as file:
            return file.read()

    def test_zeros_are_written_to_the_end_and_no_further(self):
        size = privileged.CHUNK + 100
        path = self.make(b'x' * (size + 50))
        privileged.zero(path, size)
        self.assertEqual(ZERO * size + b'x' * 50, self.read(path))

    def test_zeros_are_durable(self):
        path = self.make(b'x' * 4096)
        with mock.patch('os.fsync') as synced:
            privileged.zero(path, 4096)
        synced.assert_called_once()

    def test_missing_device_is_no_file_to_make(self):
        self.assertRaises(FileNotFoundError, privileged.zero,
                          self.path('absent'), 4096)
        self.assertFalse(os.path.exists(self.path('absent')))

    def test_flush(self):
        with mock.patch('os.fsync') as synced:
            privileged.flush(self.make())
        synced.assert_called_once()

    def test_descriptors_are_closed_after_a_failure(self):
        path = self.make(b'x')
        before = len(os.listdir('/proc/self/fd'))
        with mock.patch('os.fsync', side_effect=OSError):
            self.assertRaises(OSError, privileged.flush, path)
            self.assertRaises(OSError, privileged.zero, path, 1)
        # A file is no block device.
        self.assertRaises(OSError, privileged.forget_cached, path)
        self.assertEqual(before, len(os.listdir('/proc/self/fd')))

    def test_rules_are_replaced_as_a_whole(self):
        path = self.path('run/rules.d/56.rules')
        privileged.install_udev_rules(path, 'text')
        with mock.patch('os.replace', side_effect=OSError):
            self.assertRaises(OSError, privileged.install_udev_rules, path,
                              'other')
        self.assertEqual(b'text', self.read(path))
        privileged.install_udev_rules(path, 'other')
        self.assertEqual(b'other', self.read(path))
