# SPDX-License-Identifier: Apache-2.0

import socket
import subprocess
import sys
import threading
import time

from oslotest import base

from lab import agent
from lab import shell


class ParseTest(base.BaseTestCase):

    def test_a_command_as_nova_gives_it_to_ssh(self):
        self.assertEqual(
            ('10.77.0.12', ['mkdir', '-p', '/var/lib/nova/instances/a']),
            shell.parse(['-o', 'BatchMode=yes', '10.77.0.12', 'mkdir', '-p',
                         '/var/lib/nova/instances/a']))


class RunTest(base.BaseTestCase):
    """The program and an agent, on this machine."""

    def setUp(self):
        super().setUp()
        with socket.create_server(('127.0.0.1', 0)) as taken:
            self.port = taken.getsockname()[1]
        process = subprocess.Popen([
            sys.executable, '-ISE', agent.__file__, '127.0.0.1',
            str(self.port)])
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        for _ in range(3000):
            try:
                return socket.create_connection(
                    ('127.0.0.1', self.port)).close()
            except ConnectionRefusedError:
                time.sleep(0.01)
        self.fail('the agent does not listen')

    def run_there(self, *command, given=''):
        script = (f'import sys; sys.path[:0] = {sys.path!r};'
                  f'from lab import agent, shell;'
                  f'agent.PORT = {self.port};'
                  f'sys.exit(shell.run("127.0.0.1", {list(command)!r}))')
        done = subprocess.run([sys.executable, '-c', script],
                              capture_output=True, text=True, check=False,
                              input=given, timeout=60)
        return done.returncode, done.stdout, done.stderr

    def test_output_and_status_come_back(self):
        self.assertEqual((3, 'out\n', 'err\n'), self.run_there(
            'echo', 'out;', 'echo', 'err', '>&2;', 'exit', '3'))

    def test_input_goes_there(self):
        given = 'x' * (3 * agent.CHUNK)

        self.assertEqual((0, given, ''), self.run_there('cat', given=given))

    def test_a_command_that_is_not_there(self):
        status, _, error = self.run_there('there-is-no-such-command')

        self.assertEqual(127, status)
        self.assertIn('not found', error)

    def test_an_agent_that_hangs_up(self):
        with socket.create_server(('127.0.0.1', 0)) as server:
            self.port = server.getsockname()[1]
            thread = threading.Thread(
                target=lambda: server.accept()[0].close())
            thread.start()
            status, _, error = self.run_there('true')
            thread.join()

        self.assertEqual(255, status)
        self.assertIn('127.0.0.1', error)
