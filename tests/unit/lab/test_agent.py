# SPDX-License-Identifier: Apache-2.0

import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from unittest import mock

import fixtures
from oslotest import base

from lab import agent
from lab import errors
from lab import processes
from lab import remote


class FrameReaderTest(base.BaseTestCase):

    def test_frames_cut_anywhere_come_out_whole(self):
        stream = agent.frame(b'O', b'hello') + agent.frame(b'I')
        stream += agent.frame(b'X', b'{}')

        for size in range(1, len(stream) + 1):
            reader = agent.FrameReader()
            frames = []
            for start in range(0, len(stream), size):
                frames += reader.feed(stream[start:start + size])
            self.assertEqual([(b'O', b'hello'), (b'I', b''), (b'X', b'{}')],
                             frames)

    def test_a_stranger_is_turned_away(self):
        self.assertRaises(ValueError, agent.FrameReader().feed,
                          b'GET / HTTP/1.1\r\n')


class AgentTest(base.BaseTestCase):
    """Both ends of the protocol, on this machine."""

    def setUp(self):
        super().setUp()
        with socket.create_server(('127.0.0.1', 0)) as taken:
            port = taken.getsockname()[1]
        process = subprocess.Popen(
            [sys.executable, '-ISE', agent.__file__, '127.0.0.1', str(port)])
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)

        def connect(address, _port, timeout):
            for _ in range(3000):
                try:
                    return socket.create_connection((address, port), timeout)
                except ConnectionRefusedError:
                    time.sleep(0.01)
            self.fail('the agent does not listen')

        self.agent = remote.Agent('node1', '127.0.0.1',
                                  mock.Mock(connect=connect))
        self.environment = {'PATH': os.environ['PATH']}

    def run_command(self, *argv, **options):
        return self.agent.run(list(argv), self.environment, **options)

    def test_output_error_and_status(self):
        result = self.run_command(
            'sh', '-c', 'echo out; echo err >&2; exit 7', check=False)

        self.assertEqual((7, 'out\n', 'err\n'),
                         (result.returncode, result.stdout, result.stderr))

    def test_a_failure_is_raised_with_what_it_said(self):
        error = self.assertRaises(errors.CommandFailed, self.run_command,
                                  'sh', '-c', 'echo no disk >&2; exit 5')

        self.assertEqual(5, error.returncode)
        self.assertIn('no disk', str(error))

    def test_no_such_command(self):
        error = self.assertRaises(errors.CommandFailed, self.run_command,
                                  '/no/such/command')

        self.assertEqual(127, error.returncode)

    def test_much_input_and_output_at_once(self):
        text = 'x' * 5_000_000

        self.assertEqual(text, self.run_command('cat', data=text).stdout)

    def test_input_that_nobody_reads(self):
        result = self.run_command('true', data='x' * 5_000_000)

        self.assertEqual(0, result.returncode)

    def test_without_input_it_ends_at_once(self):
        self.assertEqual('', self.run_command('cat').stdout)

    def test_a_daemon_left_behind_does_not_hold_the_caller(self):
        start = time.monotonic()

        result = self.run_command('sh', '-c', 'sleep 60 & echo $!')

        os.kill(int(result.stdout), signal.SIGKILL)
        self.assertLess(time.monotonic() - start, 30)

    def test_timeout_kills_the_whole_group(self):
        told = pathlib.Path(
            self.useFixture(fixtures.TempDir()).path, 'told')

        self.assertRaises(
            errors.CommandTimeout, self.run_command, 'sh', '-c',
            f'sleep 60 & echo $! >{told}; wait', timeout=2)

        for _ in range(3000):
            found = processes.read_stat(int(told.read_text()))
            if found is None or found.dead:
                return
            time.sleep(0.01)
        self.fail('what it has started goes on')

    def test_a_signal_shows_in_the_status(self):
        result = self.run_command('sh', '-c', 'kill -9 $$', check=False)

        self.assertEqual(-signal.SIGKILL, result.returncode)

    def test_a_command_gets_a_terminal(self):
        out = []

        code = self.agent.stream(
            ['sh', '-c', 'tty; stty size'],
            self.environment | {'TERM': 'dumb'}, out.append, out.append,
            data=b'', terminal=(24, 80))

        self.assertEqual(0, code)
        self.assertIn('/dev/pts', b''.join(out).decode())
        self.assertIn('24 80', b''.join(out).decode())

    def test_a_service_lives_until_it_is_stopped(self):
        log = self.useFixture(fixtures.TempDir()).path + '/log'
        state = self.agent.request(
            do='service-start', name='it', log=log,
            environment=self.environment,
            argv=['sh', '-c', 'echo started; exec sleep 60'])
        self.assertEqual('running', state['state'])
        self.assertEqual(0, state['log_offset'])

        again = self.agent.request(
            do='service-start', name='it', log=log,
            environment=self.environment, argv=['true'])
        self.assertEqual(state['pid'], again['pid'])

        self.agent.request(do='service-stop', name='it',
                           signal=int(signal.SIGTERM), grace=5)
        states = self.agent.request(do='service-status', names=['it'])
        self.assertEqual({'it': {'state': 'stopped'}}, states['services'])

    def test_a_service_that_ends_by_itself_has_failed(self):
        log = self.useFixture(fixtures.TempDir()).path + '/log'
        self.agent.request(do='service-start', name='it', log=log,
                           environment=self.environment,
                           argv=['sh', '-c', 'exit 3'])
        for _ in range(3000):
            state = self.agent.request(do='service-status', names=['it']
                                       )['services']['it']
            if state['state'] != 'running':
                break
            time.sleep(0.01)

        self.assertEqual({'state': 'failed', 'returncode': 3}, state)
