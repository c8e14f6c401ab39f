# SPDX-License-Identifier: Apache-2.0

import os
import tempfile
import unittest
from unittest import mock

import ddt
from os_brick.encryptors import luks
from os_brick import privileged

from cinder_localstor import exception
from cinder_localstor.node import dmsetup
from cinder_localstor.node import interface
from tests.unit.node import fakes

TABLE = [interface.Segment(0, 8, 'linear', '/dev/disks/volume-1 0')]


@ddt.ddt
class ParseSegmentsTest(unittest.TestCase):

    def parse(self, text):
        return dmsetup.parse_segments(text, 'dmsetup status')

    @ddt.data(
        ('', {}),
        ('No devices found\n', {}),
        ('a: 0 8 linear \n', {'a': [(0, 8, 'linear', '')]}),
        ('a: 0 8 linear\n', {'a': [(0, 8, 'linear', '')]}),
        ('a: 0 8 linear 7:0 0\na: 8 8 linear 7:1 0\nb: 0 1 error\n',
         {'a': [(0, 8, 'linear', '7:0 0'), (8, 8, 'linear', '7:1 0')],
          'b': [(0, 1, 'error', '')]}),
        ('x: 0 8 clone 8 9/1024 128 3/16 1 1 no_hydration 4 '
         'hydration_threshold 16 hydration_batch_size 8 rw\n',
         {'x': [(0, 8, 'clone', '8 9/1024 128 3/16 1 1 no_hydration 4 '
                 'hydration_threshold 16 hydration_batch_size 8 rw')]}),
        ('empty:\nother: \n', {'empty': [], 'other': []}),
        ('a:b: 0 8 linear 7:0 0\n', {'a:b': [(0, 8, 'linear', '7:0 0')]}))
    @ddt.unpack
    def test_lines(self, text, expected):
        self.assertEqual(
            {name: [interface.Segment(*values) for values in segments]
             for name, segments in expected.items()}, self.parse(text))

    @ddt.data('a', 'a: 0', 'a: 0 8', 'a: x 8 linear', 'a 0 8 linear 7:0 0',
              'a: 0 8 linear 7:0 0\ngarbage', ': 0 8 linear', '\0\0\0')
    def test_corrupt_line_is_refused(self, text):
        with self.assertRaises(exception.OutputNotUnderstood) as caught:
            self.parse(text)
        self.assertIn('dmsetup status', str(caught.exception))


@ddt.ddt
class ParseInfoTest(unittest.TestCase):

    def test_ours_and_others(self):
        devices, names = dmsetup.parse_info(
            'v-handle|LOCALSTOR-v-handle|253|3|1|Active|Writeable\n'
            'w-handle|LOCALSTOR-w-handle|253|4|0|Suspended|Read-only\n'
            'disks-v|LVM-xyz|253|0|1|Active|Writeable\n'
            'nobody||253|1|0|Active|Writeable\n')
        self.assertEqual(
            {'v-handle': interface.Device('v-handle', 1, False, False),
             'w-handle': interface.Device('w-handle', 0, True, True)},
            devices)
        self.assertEqual({'253:0': 'disks-v', '253:1': 'nobody',
                          '253:3': 'v-handle', '253:4': 'w-handle'}, names)

    @ddt.data('', '\n', 'No devices found\n')
    def test_nothing(self, text):
        self.assertEqual(({}, {}), dmsetup.parse_info(text))

    @ddt.data('v', 'v|LOCALSTOR-v|253|3|1|Active',
              'v|LOCALSTOR-v|253|3|1|Active|Writeable|more',
              'v|LOCALSTOR-v|x|3|1|Active|Writeable',
              'v|LOCALSTOR-v|253|3|many|Active|Writeable',
              'v|LOCALSTOR-v|253|3|1|Asleep|Writeable',
              'v|LOCALSTOR-v|253|3|1|Active|Maybe')
    def test_corrupt_line_is_refused(self, line):
        self.assertRaises(exception.OutputNotUnderstood,
                          dmsetup.parse_info, line)


class DmsetupTestCase(unittest.TestCase):

    def setUp(self):
        self.command = fakes.FakeCommands()
        self.mapper = dmsetup.DmsetupDeviceMapper(self.command)


@ddt.ddt
class DevicesTest(DmsetupTestCase):

    def setUp(self):
        super().setUp()
        self.command.answer(
            'dmsetup info',
            'v-handle|LOCALSTOR-v-handle|253|3|1|Active|Writeable\n'
            'v-clone|LOCALSTOR-v-clone|253|2|1|Active|Writeable\n'
            'disks-v|LVM-xyz|253|0|1|Active|Writeable\n')
        self.command.answer(
            'dmsetup status',
            'v-handle: 0 16 linear \nv-clone: 0 16 clone 8 1/2 8 1/2 0\n'
            'disks-v: 0 16 linear\n')
        self.command.answer(
            'dmsetup table',
            'v-handle: 0 8 linear 253:2 0\nv-handle: 8 8 linear 253:0 8\n'
            'v-clone: 0 16 clone 253:9 253:0 8:16 8 1 no_hydration\n')

    def test_device_knows_what_it_lies_on(self):
        devices = self.mapper.devices()
        self.assertEqual({'v-handle', 'v-clone'}, set(devices))
        self.assertEqual(('v-clone', 'disks-v'), devices['v-handle'].under)
        # A device without a name is shown by its numbers.
        self.assertEqual(('253:9', 'disks-v', '8:16'),
                         devices['v-clone'].under)

    def test_status_is_that_of_the_target(self):
        status = self.mapper.devices()['v-clone'].status
        self.assertEqual('8 1/2 8 1/2 0', status[0].arguments)

    def test_three_commands_and_no_flush(self):
        self.mapper.devices()
        self.assertEqual(3, len(self.command.ran))
        self.assertIn('dmsetup status --noflush', self.command.ran)

    def test_device_that_is_gone_in_the_meantime(self):
        self.command.answer('dmsetup status', 'disks-v: 0 16 linear\n')
        self.command.answer('dmsetup table', 'disks-v: 0 16 linear 8:0 0\n')
        device = self.mapper.devices()['v-handle']
        self.assertEqual(((), ()), (device.status, device.under))

    @ddt.data(('info', 'Device does not exist.'),
              ('status', 'Device does not exist.'),
              ('table', 'device-mapper: table ioctl on other  failed: '
               'No such device or address'))
    @ddt.unpack
    def test_any_node_that_goes_while_all_are_asked_for(self, asked, words):
        expected = self.mapper.devices()
        command = 'dmsetup ' + asked
        told = self.command.reply(command)
        gone = exception.CommandFailed(command=command, host='node1',
                                       reason=words + '\nCommand failed.')
        self.command.answer(command, gone, gone, told)
        self.assertEqual(expected, self.mapper.devices())

        self.command.answer(command, gone)
        with self.assertRaisesRegex(exception.CommandFailed, words):
            self.mapper.devices()

    def test_other_failure_is_told_at_once(self):
        self.command.fail('dmsetup table', 'Permission denied')
        del self.command.ran[:]
        self.assertRaises(exception.CommandFailed, self.mapper.devices)
        self.assertEqual(1, len(self.command.ran_of('dmsetup table')))


class LinkTest(DmsetupTestCase):

    def setUp(self):
        super().setUp()
        self.addCleanup(privileged.default.set_client_mode,
                        privileged.default.client_mode)
        privileged.default.set_client_mode(False)
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        link = mock.patch.object(
            dmsetup, 'LINK', os.path.join(directory.name, 'localstor-%s'))
        link.start()
        self.addCleanup(link.stop)

    def test_os_brick_replaces_the_link_and_not_the_handle(self):
        path = self.mapper.link('v-handle')
        self.assertEqual(self.mapper.path('v-handle'), os.readlink(path))
        keys, ran = mock.Mock(), []
        keys.get.return_value.get_encoded.return_value = b'key'

        def execute(*command, **_options):
            ran.append(command)
            return '', ''
        luks.LuksEncryptor(
            'sudo', {'data': {'device_path': path, 'volume_id': 'v'}},
            keys, execute=execute).attach_volume(mock.Mock())
        opened, replaced = ran
        device, decrypted = opened[-2:]
        self.assertEqual(self.mapper.path('v-handle'), device)
        self.assertNotEqual('v-handle', decrypted)
        self.assertEqual(('/dev/mapper/' + decrypted, path), replaced[-2:])

    def test_link_is_made_again_after_it_was_replaced(self):
        path = self.mapper.link('v-handle')
        os.unlink(path)
        os.symlink('/dev/mapper/crypt-localstor-v-handle', path)
        self.assertEqual(path, self.mapper.link('v-handle'))
        self.assertEqual(self.mapper.path('v-handle'), os.readlink(path))

    def test_link_goes_with_the_node(self):
        path = self.mapper.link('v-handle')
        self.mapper.remove('v-handle')
        self.assertFalse(os.path.lexists(path))
        self.mapper.remove('v-handle')


class ChangeTest(DmsetupTestCase):

    def test_create_gives_our_uuid(self):
        self.mapper.create('v-handle', TABLE)
        self.assertEqual(['dmsetup create v-handle --uuid LOCALSTOR-v-handle '
                          '--table 0 8 linear /dev/disks/volume-1 0'],
                         self.command.ran)

    def test_create_read_only(self):
        self.mapper.create('v-handle', TABLE, read_only=True)
        self.assertTrue(self.command.ran[0].endswith('--readonly'))

    def test_create_of_what_is_there_changes_nothing(self):
        self.command.fail('dmsetup create', 'Device or resource busy')
        self.command.answer('dmsetup info', 'v-handle|LOCALSTOR-v-handle|253'
                            '|3|1|Active|Writeable\n')
        self.command.answer('dmsetup status', 'v-handle: 0 8 linear \n')
        self.mapper.create('v-handle', TABLE)
        self.assertNotIn('dmsetup load', ' '.join(self.command.ran))

    def test_node_that_has_no_table_yet_gets_it(self):
        self.command.fail('dmsetup create', 'Device or resource busy')
        self.command.answer('dmsetup info', 'v-handle|LOCALSTOR-v-handle|253'
                            '|3|0|Active|Writeable\n')
        self.command.answer('dmsetup status', 'v-handle: \n')
        self.mapper.create('v-handle', TABLE, read_only=True)
        self.assertEqual(['dmsetup load v-handle --table 0 8 linear '
                          '/dev/disks/volume-1 0 --readonly',
                          'dmsetup resume --nolockfs v-handle'],
                         self.command.ran[-2:])

    def test_create_over_a_busy_device_fails(self):
        self.command.fail('dmsetup create', 'Device or resource busy')
        self.assertRaises(exception.CommandFailed, self.mapper.create,
                          'v-handle', TABLE)

    def test_time_out_of_create_is_one(self):
        self.command.hang('dmsetup create')
        self.assertRaises(exception.CommandTimedOut, self.mapper.create,
                          'v-handle', TABLE)
        self.assertEqual(1, len(self.command.ran))

    def test_reload_is_load_and_resume(self):
        self.mapper.reload('v-handle', TABLE)
        self.assertEqual(['dmsetup load v-handle --table 0 8 linear '
                          '/dev/disks/volume-1 0',
                          'dmsetup resume --nolockfs v-handle'],
                         self.command.ran)

    def test_failed_load_suspends_nothing(self):
        self.command.fail('dmsetup load', 'no')
        self.assertRaises(exception.CommandFailed, self.mapper.reload,
                          'v-handle', TABLE)
        self.assertEqual(1, len(self.command.ran))

    def test_failed_resume_clears_the_new_table(self):
        for prepare in (lambda: self.command.fail('dmsetup resume', 'no'),
                        lambda: self.command.hang('dmsetup resume')):
            self.command.ran.clear()
            prepare()
            self.assertRaises(exception.CommandFailed, self.mapper.reload,
                              'v-handle', TABLE)
            self.assertEqual('dmsetup clear v-handle', self.command.ran[-1])

    def test_message(self):
        self.mapper.message('v-clone', 'enable_hydration')
        self.assertEqual(['dmsetup message v-clone 0 enable_hydration'],
                         self.command.ran)

    def test_what_is_suspended_takes_no_part_of_its_file_system(self):
        self.mapper.suspend('v-clone')
        self.mapper.resume('v-clone')
        self.assertEqual(['dmsetup suspend --nolockfs v-clone',
                          'dmsetup resume v-clone'], self.command.ran)


class CreateAllTest(DmsetupTestCase):

    def create(self, count):
        self.mapper.create_all([
            interface.NewNode('v%d-handle' % number, tuple(TABLE),
                              read_only=bool(number % 2))
            for number in range(count)])
        return self.command.ran

    def test_many_nodes_are_one_command(self):
        self.assertEqual(
            ['dmsetup create --concise v0-handle,LOCALSTOR-v0-handle,,rw,'
             '%s;v1-handle,LOCALSTOR-v1-handle,,ro,%s' % (TABLE[0], TABLE[0])],
            self.create(2))

    def test_command_is_never_too_long(self):
        commands = self.create(1000)
        self.assertEqual(20, len(commands))
        for command in commands:
            self.assertLess(len(command), 128 * 1024)

    def test_command_that_fails_keeps_no_other_from_its_nodes(self):
        self.command.fail('dmsetup create --concise v0-handle', 'busy')
        self.assertRaises(exception.CommandFailed, self.create, 120)
        self.assertEqual(3, len(self.command.ran))

    def test_separators_in_a_name_are_escaped(self):
        self.mapper.create_all([interface.NewNode('a,b;c', tuple(TABLE))])
        self.assertIn('a\\,b\\;c,', self.command.ran[0])


class MakeReadOnlyTest(DmsetupTestCase):

    def test_table_stays_what_it_is(self):
        table = '0 8 linear 254:3 0\n8 8 linear 254:4 8'
        self.command.answer('dmsetup table', table + '\n')
        self.mapper.make_read_only('v-handle')
        self.assertEqual(['dmsetup table v-handle', 'dmsetup load v-handle '
                          '--table %s --readonly' % table,
                          'dmsetup resume --nolockfs v-handle'],
                         self.command.ran)


class HeldTest(DmsetupTestCase):
    """Nodes that answer nothing while something is done."""

    HOLD = 'hold a b %d' % interface.HOLD

    def setUp(self):
        super().setUp()
        self.suspended = {'a': 'LOCALSTOR-a', 'b': 'LOCALSTOR-b'}
        self.holder = None
        for what, answer in (
                ('suspension.suspended', lambda: self.suspended),
                ('privileged.lock_holder', lambda _path: self.holder)):
            patched = mock.patch('cinder_localstor.node.' + what, new=answer)
            patched.start()
            self.addCleanup(patched.stop)

    def hold(self, work=lambda: None):
        with self.mapper.held(['a', 'b']):
            work()

    def assert_not_held(self, *parts, work=lambda: None):
        with self.assertRaises(exception.NotHeld) as caught:
            self.hold(work)
        for part in parts:
            self.assertIn(part, str(caught.exception))

    def test_work_is_done_while_they_are(self):
        self.hold(lambda: self.command.reply('work'))
        self.assertEqual([self.HOLD, 'work', 'let go 4711'],
                         self.command.ran)

    def test_nothing_is_done_where_they_can_not_be(self):
        self.command.fail('hold', 'b not found')
        with self.assertRaises(exception.CommandFailed):
            self.hold(self.fail)
        self.assertEqual([self.HOLD], self.command.ran)

    def test_work_that_fails_lets_them_go_on(self):
        with self.assertRaises(ZeroDivisionError):
            self.hold(lambda: 1 / 0)
        self.assertEqual('let go 4711', self.command.ran[-1])

    def test_failure_of_the_work_is_what_is_told(self):
        self.command.fail('let go', 'the time was over')
        with self.assertRaises(ZeroDivisionError):
            self.hold(lambda: 1 / 0)

    def test_time_that_was_over_before_is_told(self):
        for answer in (self.command.fail, lambda words, _reason:
                       self.command.hang(words)):
            answer('let go', 'the time was over')
            self.assert_not_held('a, b', 'node1')

    def fail_as_if_it_were_ended(self):
        raise exception.CommandFailed(command='lvcreate', host='node1',
                                      reason=-15)

    def test_command_that_was_ended_with_the_time_is_told_as_that(self):
        self.command.fail('let go', 'the time was over')
        self.assert_not_held('a, b', 'node1',
                             work=self.fail_as_if_it_were_ended)

    def test_command_that_failed_in_time_is_told_as_it_is(self):
        with self.assertRaises(exception.CommandFailed):
            self.hold(self.fail_as_if_it_were_ended)
        self.assertEqual('let go 4711', self.command.ran[-1])

    def test_one_that_somebody_has_resumed_is_told(self):
        # The guard, which does not know, held them to the end.
        self.assert_not_held('node1, b could', work=lambda: (
            self.suspended.pop('b')))
        self.assertEqual('let go 4711', self.command.ran[-1])

    def test_those_of_a_guard_that_lives_are_not_abandoned(self):
        self.holder = (4711, 'guard', 1)
        self.assertEqual(set(), self.mapper.abandoned())

    def test_those_of_one_that_is_no_more_are(self):
        self.suspended['disks-x'] = 'LVM-x'
        self.assertEqual({'a', 'b'}, self.mapper.abandoned())

    def test_those_that_a_guard_has_let_go_meanwhile_are_not(self):
        with mock.patch('cinder_localstor.node.privileged.lock_holder',
                        side_effect=lambda _path: self.suspended.pop('a') and
                        None):
            self.assertEqual({'b'}, self.mapper.abandoned())

    def test_nobody_is_asked_where_nothing_is_suspended(self):
        self.suspended = {'disks-x': 'LVM-x'}
        with mock.patch('cinder_localstor.node.privileged.lock_holder'
                        ) as asked:
            self.assertEqual(set(), self.mapper.abandoned())
        asked.assert_not_called()


@ddt.ddt
@mock.patch('time.sleep', new=mock.Mock())
class RemoveTest(DmsetupTestCase):

    @ddt.data('Device v-handle not found', 'No such device or address')
    def test_what_is_gone_is_not_missed(self, reason):
        self.command.fail('dmsetup remove', reason)
        self.mapper.remove('v-handle')
        self.assertEqual(1, len(self.command.ran))

    def test_short_probe_is_waited_for(self):
        busy = exception.CommandFailed(command='dmsetup remove', host='h',
                                       reason='Device or resource busy')
        self.command.answer('dmsetup remove', busy, busy, '')
        self.mapper.remove('v-handle')
        self.assertEqual(3, len(self.command.ran))

    def test_user_is_told_who_has_it_open(self):
        self.command.fail('dmsetup remove', 'Device or resource busy')
        with self.assertRaises(exception.VolumeInUse) as caught:
            self.mapper.remove('v-handle')
        self.assertIn('lsof /dev/mapper/v-handle', str(caught.exception))

    def test_time_out_is_not_tried_again(self):
        self.command.hang('dmsetup remove')
        self.assertRaises(exception.CommandTimedOut, self.mapper.remove,
                          'v-handle')
        self.assertEqual(1, len(self.command.ran))

    def test_other_failure_is_passed_on(self):
        self.command.fail('dmsetup remove', 'Permission denied')
        self.assertRaises(exception.CommandFailed, self.mapper.remove, 'v')


class CheckTargetTest(DmsetupTestCase):

    def setUp(self):
        super().setUp()
        patched = mock.patch('cinder_localstor.node.udev.hide_devices')
        self.hide = patched.start()
        self.addCleanup(patched.stop)
        self.command.answer('dmsetup targets', 'clone v1.0.0\n\n'
                            'linear v1.4.0\n')

    def test_target_that_is_there(self):
        self.mapper.check_target('clone')
        self.hide.assert_called_once_with(self.command)

    def test_built_in_target_has_no_module(self):
        self.command.fail('modprobe', 'not found')
        self.mapper.check_target('clone')

    def test_missing_target_says_what_to_do(self):
        with self.assertRaises(exception.NoDataPath) as caught:
            self.mapper.check_target('era')
        self.assertIn('modprobe dm-era', str(caught.exception))

    def test_part_of_a_name_is_no_target(self):
        self.assertRaises(exception.NoDataPath, self.mapper.check_target,
                          'clo')


class SegmentTest(unittest.TestCase):

    def test_line_that_was_written_is_read_again(self):
        text = 'v: ' + str(TABLE[0])
        self.assertEqual({'v': TABLE},
                         dmsetup.parse_segments(text, 'dmsetup table'))
