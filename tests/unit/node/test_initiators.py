# SPDX-License-Identifier: Apache-2.0

import dataclasses
import os
import socket
import tempfile
import traceback
import unittest
from unittest import mock

import ddt

from cinder_localstor import exception
from cinder_localstor.node import initiators
from cinder_localstor.node import interface
from cinder_localstor.node import secrets
from tests.unit.node import fakes

IQN = 'iqn.2010-10.org.openstack:localstor-x'
SERIAL = '6f9619ff-8b86-4d01-b42d-00cf4fc964ff'
PASSWORD = 'Hush-5678'
EXPORT = interface.Export(
    portal='192.0.2.1:3260', iqn=IQN, lun=1, serial=SERIAL,
    initiator='iqn.b', address='192.0.2.2', username='user',
    password=PASSWORD)


def page(serial, code=0x80):
    return bytes([0, code]) + len(serial).to_bytes(2, 'big') + serial


@ddt.ddt
class SerialTest(unittest.TestCase):

    @ddt.data((page(b'abc'), 'abc'), (page(b'abc\0\0'), 'abc'),
              (page(b'  abc'), 'abc'), (page(b''), ''),
              (page(b'abc') + b'more', 'abc'), (page(b'\xff'), '\ufffd'))
    @ddt.unpack
    def test_page(self, data, expected):
        self.assertEqual(expected, initiators.parse_serial(data))

    @ddt.data(b'', b'\0', b'\0\x80\0', page(b'abc', 0x83), page(b'abc')[:-1],
              b'\0\x80\xff\xff')
    def test_corrupt_page_is_refused(self, data):
        self.assertRaises(ValueError, initiators.parse_serial, data)


class AddressesTest(unittest.TestCase):

    def test_addresses_that_others_can_see(self):
        found = {name: [mock.Mock(family=family, address=address)]
                 for name, family, address in (
                     ('eth0', socket.AF_INET, '192.0.2.1'),
                     ('eth1', socket.AF_INET6, '2001:db8::1%eth1'),
                     ('eth2', socket.AF_INET6, 'fe80::1%eth2'),
                     ('eth3', socket.AF_PACKET, '00:11:22:33:44:55'),
                     ('lo', socket.AF_INET, '127.0.0.1'),
                     ('lo6', socket.AF_INET6, '::1'))}
        with mock.patch('psutil.net_if_addrs', return_value=found):
            self.assertEqual(['192.0.2.1', '2001:db8::1'],
                             initiators.OpenISCSIInitiator(
                                 mock.Mock()).addresses())


class SessionsTest(unittest.TestCase):

    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.root = directory.name

    def session(self, number, disk='', **files):
        path = os.path.join(self.root, 'session%d' % number)
        os.makedirs(os.path.join(path, 'device'))
        for name, text in files.items():
            with open(os.path.join(path, name), 'w') as file:
                file.write(text + '\n')
        if disk:
            os.makedirs(os.path.join(path, 'device', 'target7:0:0',
                                     '7:0:0:1', 'block', disk))

    def test_no_sessions(self):
        self.assertEqual({}, initiators.sessions(self.root))
        self.assertEqual({}, initiators.sessions('/absent'))

    def test_disk_and_state(self):
        self.session(1, 'sdb', targetname=IQN, state='LOGGED_IN')
        self.session(2, targetname='other', state='FAILED')
        self.assertEqual(
            {IQN: initiators.Session('/dev/sdb', 'LOGGED_IN'),
             'other': initiators.Session('', 'FAILED')},
            initiators.sessions(self.root))

    def test_session_that_is_gone_in_the_meantime(self):
        self.session(1, targetname=IQN)
        self.assertEqual({}, initiators.sessions(self.root))


@ddt.ddt
class OpenISCSITest(unittest.TestCase):

    def setUp(self):
        self.addCleanup(secrets.forget, IQN)
        self.command = fakes.FakeCommands()
        self.initiator = initiators.OpenISCSIInitiator(self.command)
        self.sessions = {}
        for name, value in (('sessions', lambda: self.sessions),):
            patched = mock.patch.object(initiators, name, value)
            patched.start()
            self.addCleanup(patched.stop)
        patched = mock.patch('socket.create_connection')
        self.knock = patched.start()
        self.addCleanup(patched.stop)
        self.serial = SERIAL.encode()
        patched = mock.patch('builtins.open', side_effect=self.open)
        patched.start()
        self.addCleanup(patched.stop)
        patched = mock.patch('tenacity.nap.time.sleep', self.sleep)
        patched.start()
        self.addCleanup(patched.stop)

    def sleep(self, _seconds):
        """The session has a disk a moment after the login."""
        self.log_in()

    def open(self, path, mode='r'):
        self.assertEqual('/sys/class/block/sdb/device/vpd_pg80', path)
        return mock.mock_open(read_data=page(self.serial))()

    def log_in(self, disk='/dev/sdb', state='LOGGED_IN'):
        self.sessions[IQN] = initiators.Session(disk, state)

    def connect(self):
        return self.initiator.connect(EXPORT)

    def actions(self):
        """What open-iscsi was asked to do with the target."""
        start = ('iscsiadm --mode node --targetname %s --portal '
                 '192.0.2.1:3260 ' % IQN)
        return [line.removeprefix(start) for line in self.command.ran]

    def test_connect(self):
        self.assertEqual('/dev/sdb', self.connect())
        new, update, login = self.actions()
        self.assertEqual(('--op new', '--login'), (new, login))
        for name, value in (('authmethod', 'CHAP'), ('username', 'user'),
                            ('password', PASSWORD)):
            self.assertIn('--name node.session.auth.%s --value %s' % (
                name, value), update)

    def test_login_is_not_tried_for_minutes(self):
        self.connect()
        self.assertIn('--name node.session.initial_login_retry_max --value 1',
                      self.actions()[1])

    @ddt.data('node.session.nr_sessions --value 1',
              'node.session.scan --value auto',
              'node.conn[0].tcp.window_size --value 0',
              'node.startup --value manual')
    def test_what_others_may_have_configured_does_not_matter(self, setting):
        self.connect()
        self.assertIn('--name ' + setting, self.actions()[1])

    def test_connected_disk_is_not_connected_again(self):
        self.log_in()
        self.assertEqual('/dev/sdb', self.connect())
        self.assertEqual([], self.command.ran)

    def test_session_that_does_not_work_is_ended_first(self):
        for disk, state in (('/dev/sda', 'FAILED'), ('', 'LOGGED_IN')):
            self.command.ran.clear()
            self.log_in(disk=disk, state=state)
            self.connect()
            self.assertEqual(['--logout', '--op delete', '--op new'],
                             self.actions()[:3])

    def test_dead_portal_is_noticed_soon(self):
        self.knock.side_effect = OSError('No route to host')
        with self.assertRaises(exception.SourceUnreachable) as caught:
            self.connect()
        for part in ('192.0.2.1:3260', 'No route', IQN):
            self.assertIn(part, str(caught.exception))
        self.assertEqual([], self.command.ran)
        self.knock.assert_called_once_with(('192.0.2.1', 3260),
                                           initiators.PORTAL_TIMEOUT)

    def test_address_of_version_6(self):
        self.initiator.connect(dataclasses.replace(
            EXPORT, portal='[2001:db8::1]:3260'))
        self.assertEqual(('2001:db8::1', 3260), self.knock.call_args.args[0])

    def fail_at(self, action, *answers):
        self.command.answer(
            'iscsiadm --mode node --targetname %s --portal 192.0.2.1:3260 %s'
            % (IQN, action), *answers)

    @ddt.data('--op new', '--op update', '--login')
    def test_failure_leaves_no_record_and_names_no_secret(self, action):
        self.fail_at(action, exception.CommandFailed(
            command='iscsiadm --value ' + PASSWORD, host='node1',
            reason='no'))
        with self.assertRaises(exception.SourceUnreachable) as caught:
            self.connect()
        self.assertIn(IQN, str(caught.exception))
        self.assertEqual('--op delete', self.actions()[-1])
        self.assertNotIn(PASSWORD, ''.join(
            traceback.format_exception(caught.exception)))

    def disturbed(self, action, *after):
        """Let a record of others be removed while an action looks at all."""
        self.fail_at(action, exception.CommandFailed(
            command='iscsiadm', host='node1', reason='iscsiadm: Could not '
            'execute operation on all records: encountered iSCSI database '
            'failure'), *after)

    @ddt.data('--op new', '--op update', '--login')
    def test_action_that_others_disturb_is_repeated(self, action):
        self.disturbed(action, '')
        self.assertEqual('/dev/sdb', self.connect())
        self.assertEqual(2, sum(line.startswith(action)
                                for line in self.actions()))

    def test_login_that_is_disturbed_when_it_is_done_is_not_repeated(self):
        self.disturbed('--login')
        run = self.command.run

        def log_in_and_run(*arguments):
            if '--login' in arguments:
                self.log_in()
            return run(*arguments)

        with mock.patch.object(self.command, 'run', log_in_and_run):
            self.assertEqual('/dev/sdb', self.connect())
        self.assertEqual(1, self.actions().count('--login'))

    def test_logout_that_is_disturbed_when_it_is_done_is_not_repeated(self):
        self.log_in()
        self.disturbed('--logout')
        run = self.command.run

        def log_out_and_run(*arguments):
            self.sessions.clear()
            return run(*arguments)

        with mock.patch.object(self.command, 'run', log_out_and_run):
            self.initiator.disconnect(EXPORT)
        self.assertEqual(['--logout', '--op delete'], self.actions())

    def test_what_others_disturb_is_given_up_some_day(self):
        self.disturbed('--op new')
        self.assertRaises(exception.SourceUnreachable, self.connect)
        self.assertEqual(initiators.RECORD_ATTEMPTS,
                         self.actions().count('--op new'))

    def test_session_without_a_disk_is_no_source(self):
        clock = iter(range(1000))
        with mock.patch('tenacity.nap.time.sleep'), \
                mock.patch('time.monotonic', lambda: next(clock)):
            self.assertRaises(exception.SourceUnreachable, self.connect)

    @ddt.data(b'another', b'')
    def test_disk_of_another_volume_is_never_taken(self, serial):
        self.log_in()
        self.serial = serial
        with self.assertRaises(exception.StaleSession) as caught:
            self.connect()
        self.assertIn('iscsiadm -m node -T %s --logout' % IQN,
                      str(caught.exception))

    def test_disk_that_does_not_tell_is_never_taken(self):
        with mock.patch('builtins.open', side_effect=OSError('gone')):
            self.assertRaises(exception.StaleSession, self.connect)

    def test_target_without_serial_numbers_is_believed(self):
        self.serial = b'made up'
        export = dataclasses.replace(EXPORT, serial='')
        self.assertEqual('/dev/sdb', self.initiator.connect(export))

    @ddt.data('LOGGED_IN', 'FAILED')
    def test_disconnect_ends_a_session_in_any_state(self, state):
        self.log_in(state=state)
        self.initiator.disconnect(EXPORT)
        self.assertEqual([True, True], [
            line.endswith(end) for line, end
            in zip(self.command.ran, ('--logout', '--op delete'))])

    def test_secret_is_hidden_till_the_end_of_the_connection(self):
        self.log_in(state='FAILED')
        self.connect()
        self.assertNotIn(PASSWORD, secrets.mask(PASSWORD))
        self.initiator.disconnect(EXPORT)
        self.assertEqual(PASSWORD, secrets.mask(PASSWORD))

    def test_disconnect_forgets_a_target_without_a_session(self):
        self.initiator.disconnect(EXPORT)
        self.assertEqual(1, len(self.command.ran))
        self.assertTrue(self.command.ran[0].endswith('--op delete'))

    def test_disconnect_of_what_is_gone_does_nothing(self):
        self.command.fail('iscsiadm', 'iscsiadm: No records found')
        self.initiator.disconnect(EXPORT)

    def test_disconnect_that_fails_or_hangs_says_so(self):
        self.command.fail('iscsiadm', 'iscsiadm: something else')
        self.assertRaises(exception.CommandFailed,
                          self.initiator.disconnect, EXPORT)
        self.command.hang('iscsiadm')
        self.assertRaises(exception.CommandTimedOut,
                          self.initiator.disconnect, EXPORT)

    def test_address_is_that_of_the_route_to_the_portal(self):
        self.assertEqual('127.0.0.1',
                         self.initiator.address_towards('127.0.0.1:3260'))

    def test_only_what_works_is_connected(self):
        self.log_in(state='FAILED')
        self.assertEqual({}, self.initiator.connected())
        self.log_in()
        self.assertEqual({IQN: '/dev/sdb'}, self.initiator.connected())

    def test_name_is_asked_once(self):
        with mock.patch('cinder.volume.volume_utils.brick_get_connector'
                        ) as connector:
            connector.return_value.get_initiator.return_value = 'iqn.a'
            for _time in range(2):
                self.assertEqual('iqn.a', self.initiator.name())
        connector.assert_called_once_with('ISCSI')
