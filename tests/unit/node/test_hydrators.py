# SPDX-License-Identifier: Apache-2.0

import dataclasses
import json
import unittest
from unittest import mock

import ddt

from cinder_localstor import exception
from cinder_localstor.node import hydrators
from cinder_localstor.node import interface
from cinder_localstor.node import privileged
from tests.unit.node import fakes

HYDRATOR = interface.Hydrator(
    move_id='m', data='/dev/g/v', metadata='/dev/g/v-regions',
    source='/dev/mapper/v-source', size=1 << 30, zeroed=False, minimum=10,
    source_timeout=0, verify='off', poll_time=0)


class Commands(fakes.FakeCommands):

    def start_hydrator(self, copy, arguments):
        return self.reply(' '.join(('start', copy, *arguments)))


class HydratorsTestCase(unittest.TestCase):

    def setUp(self):
        self.command = Commands()
        self.hydrators = hydrators.ProcessHydrators(self.command)
        self.there = set()
        self.patch('os.path.exists', side_effect=self.there.__contains__)
        self.ask = self.patch('cinder_localstor.node.privileged.'
                              'ask_hydrator', return_value='{"ok": true}\n')

    def patch(self, name, **kwargs):
        patched = mock.patch(name, **kwargs)
        self.addCleanup(patched.stop)
        return patched.start()

    def asked(self):
        copy, request, timeout = self.ask.call_args.args
        self.assertEqual(60, timeout)
        return copy, json.loads(request)


@ddt.ddt
class CheckTest(HydratorsTestCase):

    @ddt.data(hydrators.UBLK, hydrators.NBD)
    def test_kernel_that_has_one_of_both(self, sign):
        self.there.add(sign)
        self.hydrators.check()

    def test_module_is_loaded(self):
        def run(*arguments, timeout=None):
            if 'ublk_drv' in arguments:
                self.there.add(hydrators.UBLK)
        self.command.run = run
        self.hydrators.check()

    def test_kernel_that_has_neither(self):
        self.command.fail('modprobe', 'not found')
        with self.assertRaises(exception.NoUserBlockDevices) as caught:
            self.hydrators.check()
        for part in ('node1', 'ublk_drv', 'nbd', 'clone'):
            self.assertIn(part, str(caught.exception))

    @ddt.data(FileNotFoundError(2, 'No such file or directory'),
              exception.CommandFailed(command='x', host='y', reason='bad CPU'))
    def test_program_that_does_not_run(self, error):
        self.command.answer('localstor-hydrator', error)
        with self.assertRaises(exception.HydratorMissing) as caught:
            self.hydrators.check()
        for part in ('node1', 'pip install', 'clone'):
            self.assertIn(part, str(caught.exception))


@ddt.ddt
class RunTest(HydratorsTestCase):

    def test_start_returns_the_device(self):
        self.command.answer('start', '/dev/ublkb0\n')
        self.assertEqual('/dev/ublkb0', self.hydrators.start('v', HYDRATOR))
        self.assertEqual(
            ['start v --move m --data /dev/g/v --metadata /dev/g/v-regions '
             '--source /dev/mapper/v-source --size 1073741824 --new '
             '--minimum 10'], self.command.ran)

    def test_thin_volume_and_limited_patience(self):
        self.hydrators.start('v', interface.Hydrator(
            **{**vars(HYDRATOR), 'zeroed': True, 'source_timeout': 30}))
        self.assertIn('--zeroed --source-timeout 30', self.command.ran[0])

    def test_helper_that_looks_before_it_sleeps(self):
        self.hydrators.start('v', dataclasses.replace(HYDRATOR, poll_time=20))
        self.assertIn('--minimum 10 --poll 20', self.command.ran[0])

    @ddt.data(None, 9)
    def test_status(self, limit):
        self.ask.return_value = json.dumps(
            {'state': 'migrating', 'local': 5, 'rate': 6, 'pid': 7,
             'limit': limit, 'minimum': 8})
        self.assertEqual(interface.HydratorStatus(
            'migrating', 5, 6, limit=limit, minimum=8),
            self.hydrators.status('v'))
        self.assertEqual(('v', {'command': 'status'}), self.asked())

    @ddt.data('sample', 'full')
    def test_verification(self, verify):
        self.hydrators.start('v', interface.Hydrator(
            **{**vars(HYDRATOR), 'verify': verify}))
        self.assertIn('--verify ' + verify, self.command.ran[0])

    @ddt.data(None, 8192)
    def test_status_of_verification(self, first):
        self.ask.return_value = json.dumps(
            {'state': 'differing', 'local': 5, 'rate': 6, 'limit': None,
             'minimum': 0, 'verify': 'full',
             'verified': 4, 'differing_blocks': 3, 'first_differing': first})
        self.assertEqual(
            interface.HydratorStatus('differing', 5, 6, 'full', 4, 3, first),
            self.hydrators.status('v'))

    @ddt.data(FileNotFoundError(), ConnectionRefusedError(), TimeoutError())
    def test_nobody_answers(self, error):
        self.ask.side_effect = error
        self.assertIsNone(self.hydrators.status('v'))

    @ddt.data('', '{', '[]', '{}', '{"state": "done", "local": "x"}')
    def test_answer_that_is_no_status(self, text):
        self.ask.return_value = text
        self.assertRaises(exception.OutputNotUnderstood,
                          self.hydrators.status, 'v')

    def test_start_of_hydration(self):
        self.hydrators.hydrate('v')
        self.assertEqual(('v', {'command': 'start'}), self.asked())

    def test_throttle(self):
        self.hydrators.throttle('v', None, 10)
        self.assertEqual(('v', {'command': 'throttle', 'limit': None,
                                'minimum': 10}), self.asked())

    def test_pause_ends_by_itself(self):
        self.hydrators.pause('v', 20)
        self.assertEqual(('v', {'command': 'pause', 'seconds': 20}),
                         self.asked())
        self.hydrators.resume('v')
        self.assertEqual(('v', {'command': 'resume'}), self.asked())

    @ddt.data('{"error": "the volume is not open yet"}', '')
    def test_refusal_is_told(self, answer):
        self.ask.return_value = answer
        with self.assertRaises(exception.CommandFailed) as caught:
            self.hydrators.hydrate('v')
        self.assertIn('start v', str(caught.exception))

    def test_nobody_to_tell(self):
        self.ask.side_effect = ConnectionRefusedError(111, 'refused')
        self.assertRaises(exception.CommandFailed, self.hydrators.hydrate,
                          'v')


class EndTest(HydratorsTestCase):

    DIRECTORY = '/run/localstor/v'

    def test_end(self):
        self.there.add(self.DIRECTORY)
        self.hydrators.end('v')
        self.assertEqual(['localstor-hydrator abort ' + self.DIRECTORY],
                         self.command.ran)

    def test_what_was_never_there_has_ended(self):
        self.hydrators.end('v')
        self.assertEqual([], self.command.ran)

    def test_device_in_use(self):
        self.there.add(self.DIRECTORY)
        self.command.fail('localstor-hydrator',
                          '/dev/ublkb0 is in use by dm-3')
        self.assertRaises(exception.VolumeInUse, self.hydrators.end, 'v')

    def test_other_failures(self):
        self.there.add(self.DIRECTORY)
        self.command.fail('localstor-hydrator', 'kernel says no')
        self.assertRaises(exception.CommandFailed, self.hydrators.end, 'v')


class DirectoryTest(unittest.TestCase):

    def test_it_is_never_outside_of_ours(self):
        self.assertEqual('/run/localstor/v',
                         privileged.runtime_directory('../../etc/v'))
