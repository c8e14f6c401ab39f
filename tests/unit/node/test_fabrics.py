# SPDX-License-Identifier: Apache-2.0

import os
import shutil
import tempfile
from unittest import mock

from oslo_privsep import comm

from cinder_localstor import exception
from cinder_localstor.node import initiators
from cinder_localstor.node import interface
from cinder_localstor.node import nvme
from cinder_localstor.node import secrets
from tests.unit import base
from tests.unit.node import fakes

MOVE = '6f9619ff-8b86-4d01-b42d-00cf4fc964ff'
SECRET = nvme.make_secret()
EXPORT = interface.Export(
    portal='[2001:db8::1]:4420', iqn=nvme.NAME + MOVE, lun=1, serial=MOVE,
    initiator=nvme.HOST_NAME + MOVE, address='2001:db8::2', username='',
    password=SECRET)


class FabricsTestCase(base.TestCase):
    """sysfs in a folder; the kernel's answers as `connect` and `remove`."""

    def setUp(self):
        super().setUp()
        self.addCleanup(secrets.forget, EXPORT.iqn)
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.sysfs = directory.name
        for name in ('CONTROLLERS', 'DISKS'):
            self.patch('cinder_localstor.node.fabrics.' + name,
                       os.path.join(self.sysfs, name))
        self.patch('cinder_localstor.node.fabrics.FABRICS', self.sysfs)
        self.patch('cinder_localstor.node.initiators.DISK_TIMEOUT', 0)
        self.connect = self.patch('cinder_localstor.node.fabrics.connect')
        self.remove = self.patch('cinder_localstor.node.fabrics.remove')
        self.knock = self.patch('cinder_localstor.node.initiators.knock')
        self.initiator = initiators.NvmeInitiator(fakes.FakeCommands())

    def put(self, *path, text):
        path = os.path.join(self.sysfs, *path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, 'w') as file:
            file.write(text + '\n')

    def controller(self, name='nvme0', nqn=EXPORT.iqn, state='live'):
        self.put('CONTROLLERS', name, 'subsysnqn', text=nqn)
        self.put('CONTROLLERS', name, 'state', text=state)

    def disk(self, name='nvme0n1', nqn=EXPORT.iqn, uuid=MOVE, hidden='0'):
        self.put('DISKS', name, 'device', 'subsysnqn', text=nqn)
        self.put('DISKS', name, 'uuid', text=uuid)
        self.put('DISKS', name, 'hidden', text=hidden)


class ConnectedTest(FabricsTestCase):

    def test_nothing(self):
        self.assertEqual({}, self.initiator.connected())

    def test_disk_of_a_controller_that_lives(self):
        self.controller()
        self.disk()
        self.assertEqual({EXPORT.iqn: '/dev/nvme0n1'},
                         self.initiator.connected())

    def test_source_that_is_away(self):
        self.controller(state='connecting')
        self.disk()
        self.assertEqual({}, self.initiator.connected())

    def test_path_of_several_is_no_disk(self):
        self.controller()
        self.disk('nvme0c0n1', hidden='1')
        self.assertEqual({}, self.initiator.connected())

    def test_what_goes_in_the_meantime(self):
        self.put('CONTROLLERS', 'nvme0', 'subsysnqn', text=EXPORT.iqn)
        self.put('DISKS', 'nvme0n1', 'hidden', text='0')
        self.assertEqual({}, self.initiator.connected())


class ConnectTest(FabricsTestCase):

    def appear(self, **what):
        def connect(_options):
            self.controller()
            self.disk(**what)
        self.connect.side_effect = connect

    def options(self):
        return dict(option.split('=', 1) for option
                    in self.connect.call_args.args[0].split(','))

    def test_what_the_kernel_is_told(self):
        self.appear()
        self.assertEqual('/dev/nvme0n1', self.initiator.connect(EXPORT))
        self.assertEqual(
            {'transport': 'tcp', 'traddr': '2001:db8::1', 'trsvcid': '4420',
             'nqn': EXPORT.iqn, 'hostnqn': EXPORT.initiator, 'hostid': MOVE,
             'dhchap_secret': SECRET, 'ctrl_loss_tmo': '-1'},
            {name: value for name, value in self.options().items()
             if name not in ('keep_alive_tmo', 'reconnect_delay',
                             'fast_io_fail_tmo', 'nr_io_queues')})

    def test_what_is_connected_is_left_alone(self):
        self.controller()
        self.disk()
        self.assertEqual('/dev/nvme0n1', self.initiator.connect(EXPORT))
        self.connect.assert_not_called()
        self.remove.assert_not_called()

    def test_controller_that_is_away_is_made_anew(self):
        self.controller('nvme7', state='connecting')
        self.remove.side_effect = lambda name: shutil.rmtree(
            os.path.join(self.sysfs, 'CONTROLLERS', name))
        self.appear()
        self.initiator.connect(EXPORT)
        self.remove.assert_called_once_with('nvme7')

    def test_nobody_at_the_portal(self):
        self.controller('nvme7', state='connecting')
        self.knock.side_effect = exception.SourceUnreachable(
            host='h', iqn='i', portal='p', reason='r')
        self.assertRaises(exception.SourceUnreachable,
                          self.initiator.connect, EXPORT)
        # It goes on trying.
        self.remove.assert_not_called()
        self.connect.assert_not_called()

    def test_refusal_leaves_nothing_and_tells_no_secret(self):
        for error in (OSError(5, 'refused ' + SECRET),
                      comm.PrivsepTimeout()):
            with self.subTest(error=error):
                def connect(_options, error=error):
                    self.controller(state='connecting')
                    raise error
                self.connect.side_effect = connect
                raised = self.assertRaises(exception.SourceUnreachable,
                                           self.initiator.connect, EXPORT)
                self.assertNotIn(SECRET, str(raised))
                self.remove.assert_called_with('nvme0')

    def test_controller_without_a_disk(self):
        self.connect.side_effect = lambda _options: self.controller()
        error = self.assertRaises(exception.SourceUnreachable,
                                  self.initiator.connect, EXPORT)
        self.assertIn('no disk', str(error))

    def test_another_disk_is_refused(self):
        self.appear(uuid='another')
        error = self.assertRaises(exception.StaleSession,
                                  self.initiator.connect, EXPORT)
        self.assertIn(EXPORT.iqn, str(error))


class DisconnectTest(FabricsTestCase):

    def test_controller_and_secret_are_forgotten(self):
        self.controller('nvme3')
        secrets.hide(EXPORT.iqn, SECRET)
        self.initiator.disconnect(EXPORT)
        self.remove.assert_called_once_with('nvme3')
        self.assertEqual(SECRET, secrets.mask(SECRET))

    def test_nothing_to_do(self):
        self.controller('nvme3', nqn='nqn.2014-08.org.nvmexpress:another')
        self.initiator.disconnect(EXPORT)
        self.remove.assert_not_called()

    def test_controller_that_goes_by_itself(self):
        self.controller()
        self.remove.side_effect = FileNotFoundError
        self.initiator.disconnect(EXPORT)

    def test_kernel_that_does_not_answer(self):
        self.controller()
        self.remove.side_effect = comm.PrivsepTimeout
        error = self.assertRaises(exception.CommandFailed,
                                  self.initiator.disconnect, EXPORT)
        self.assertIn('nvme0', str(error))


class CheckTest(FabricsTestCase):

    def test_kernel_that_authenticates(self):
        self.patch('cinder_localstor.node.fabrics.options',
                   return_value='transport=%s,dhchap_secret=%s\n')
        self.initiator.check()

    def test_kernel_that_does_not(self):
        for answer in (mock.Mock(return_value='transport=%s\n'),
                       mock.Mock(side_effect=FileNotFoundError(2, 'None'))):
            self.patch('cinder_localstor.node.fabrics.options', answer)
            error = self.assertRaises(exception.NoTransport,
                                      self.initiator.check)
            self.assertIn('node1', str(error))

    def test_module_is_loaded_first(self):
        self.patch('cinder_localstor.node.fabrics.FABRICS', '/absent')
        command = fakes.FakeCommands()
        command.fail('modprobe', 'not found')
        self.assertRaises(exception.NoTransport,
                          initiators.NvmeInitiator(command).check)
        self.assertEqual(['modprobe --quiet nvme-tcp'], command.ran)
