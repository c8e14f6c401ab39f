# SPDX-License-Identifier: Apache-2.0

import dataclasses
import os
import pathlib
import signal
import time

import fixtures
from oslotest import base

from lab import processes


class ProcessTableTest(base.BaseTestCase):

    def setUp(self):
        super().setUp()
        self.directory = pathlib.Path(
            self.useFixture(fixtures.TempDir()).path)
        self.log = self.directory / 'log'
        self.table = processes.ProcessTable(self.directory / 'processes')

    def start(self, script='sleep 60'):
        process = self.table.start('it', ['sh', '-c', script], self.log,
                                   {'PATH': os.environ['PATH']})
        self.addCleanup(process.kill)
        return process

    def wait_for_log(self, text):
        for _ in range(3000):
            if text in self.log.read_text():
                return
            time.sleep(0.01)
        self.fail('the log has no "%s"' % text)

    def test_another_table_finds_the_process(self):
        started = self.start()

        found = processes.ProcessTable(self.directory / 'processes').get('it')

        self.assertEqual(started, found)
        self.assertTrue(found.alive)

    def test_it_has_its_time_before_others(self):
        group = pathlib.Path(f'/proc/{self.start().pid}/autogroup')
        if not group.exists():
            self.skipTest('this kernel does not group processes by sessions')

        self.assertTrue(group.read_text().endswith(' nice -10\n'))

    def test_a_reused_pid_is_not_ours(self):
        ours = self.start()
        stranger = dataclasses.replace(ours, start_time=ours.start_time - 1)

        self.assertFalse(stranger.alive)
        self.assertEqual([], stranger.members())
        stranger.signal(signal.SIGKILL)
        self.assertTrue(ours.alive)

    def test_kill_ends_children_too(self):
        process = self.start('sleep 60 & echo started; wait')
        self.wait_for_log('started')
        self.assertGreater(len(process.members()), 1)

        process.kill()

        self.assertEqual([], process.members())
        self.assertFalse(self.table.get('it').alive)

    def test_kill_ends_children_whose_parent_died(self):
        process = self.start('sleep 60 & echo started')
        self.wait_for_log('started')
        for _ in range(3000):
            if not self.table.get('it').alive:
                break
            time.sleep(0.01)

        process.kill()

        self.assertEqual([], process.members())

    def test_stop_asks_first(self):
        self.start('trap "echo asked; exit" TERM; echo started;'
                   ' while :; do sleep 0.05; done')
        self.wait_for_log('started')

        self.table.stop('it')

        self.assertIn('asked', self.log.read_text())
        self.assertIsNone(self.table.get('it'))

    def test_stop_kills_who_does_not_listen(self):
        process = self.start('trap "" TERM; echo started;'
                             ' while :; do sleep 0.05; done')
        self.wait_for_log('started')

        self.table.stop('it', timeout=0.2)

        self.assertEqual([], process.members())

    def test_nothing_to_stop(self):
        self.table.stop('nobody')

    def test_the_shells_environment_stays_out(self):
        self.useFixture(fixtures.EnvironmentVariable('http_proxy', 'http://x'))
        self.start('env; echo end')
        self.wait_for_log('end')

        self.assertNotIn('http_proxy', self.log.read_text())


class TailTest(base.BaseTestCase):

    def setUp(self):
        super().setUp()
        self.log = pathlib.Path(
            self.useFixture(fixtures.TempDir()).path) / 'log'

    def test_last_lines_without_the_kernels_traces(self):
        self.log.write_text('a\nb\nc\n [<6069f497>] ? dump_stack_lvl\nd\n')

        self.assertEqual('c\nd', processes.tail(self.log, 2))

    def test_no_log(self):
        self.assertEqual('', processes.tail(self.log))
