# SPDX-License-Identifier: Apache-2.0
"""With a model of nvmet's part of configfs."""

from concurrent import futures
import os
import shutil
import subprocess
import tempfile
import time
from unittest import mock

from oslo_privsep import comm
from oslo_privsep import daemon

from cinder_localstor import exception
from cinder_localstor.node import dmsetup
from cinder_localstor.node import lio
from cinder_localstor.node import nvme
from cinder_localstor.node import nvmet
from cinder_localstor.node import secrets
from cinder_localstor.node import targets
from tests.unit import base
from tests.unit.node import fakes

MOVE = '6f9619ff-8b86-4d01-b42d-00cf4fc964ff'
OTHER = '6f9619ff-8b86-4d01-b42d-00cf4fc964fe'
DEVICE = '/dev/mapper/v-handle'
TABLE = '0 2048 linear 253:1 0\n2048 8 linear 253:2 0\n'
FOREIGN = 'nqn.2014-08.org.nvmexpress:somebody'

# What the kernel puts into a directory that is made in one of these
ATTRIBUTES = {
    'hosts': ['dhchap_key', 'dhchap_ctrl_key', 'dhchap_hash'],
    'subsystems': ['attr_allow_any_host', 'attr_serial'],
    'namespaces': ['device_path', 'device_uuid', 'device_nguid', 'enable'],
    'ports': ['addr_trtype', 'addr_adrfam', 'addr_traddr', 'addr_trsvcid']}
FOLDERS = {'subsystems': ['namespaces', 'allowed_hosts'],
           'ports': ['subsystems', 'referrals']}


class Configfs:
    """mkdir(2), rmdir(2) and symlink(2) as nvmet answers them."""

    def __init__(self, case):
        self._mkdir, self._symlink = os.mkdir, os.symlink
        self._unlink = os.unlink
        folder = tempfile.mkdtemp()
        case.addCleanup(shutil.rmtree, folder)
        self.root = os.path.join(folder, 'nvmet')
        for kind in ('hosts', 'subsystems', 'ports'):
            os.makedirs(os.path.join(self.root, kind))
        self.authenticates = True
        # What fails: the beginning of its call, as `done` has it
        self.failing = None
        self.done = []
        case.patch('cinder_localstor.node.nvmet.CONFIGFS', folder)
        for name in ('mkdir', 'rmdir', 'symlink', 'unlink'):
            case.patch('os.' + name, self.inside(getattr(os, name),
                                                 getattr(self, name)))
        write = nvmet._write
        case.patch('cinder_localstor.node.nvmet._write',
                   lambda value, *path: self.write(write, value, *path))

    def inside(self, real, modelled):
        def call(*arguments, **keywords):
            inside = str(arguments[-1]).startswith(self.root)
            return (modelled if inside else real)(*arguments, **keywords)
        return call

    def note(self, *words):
        done = ' '.join(os.path.relpath(word, self.root)
                        if word.startswith(self.root) else word
                        for word in words)
        if self.failing and done.startswith(self.failing):
            raise OSError(16, 'Device or resource busy', words[-1])
        self.done.append(done)

    def mkdir(self, path):
        self.note('mkdir', path)
        self._mkdir(path)
        kind = os.path.basename(os.path.dirname(path))
        for name in ATTRIBUTES[kind]:
            if self.authenticates or not name.startswith('dhchap'):
                open(os.path.join(path, name), 'w').close()
        for name in FOLDERS.get(kind, ()):
            self._mkdir(os.path.join(path, name))

    def rmdir(self, path):
        if not os.path.exists(path):
            raise FileNotFoundError(path)
        self.note('rmdir', path)
        links = [os.path.realpath(os.path.join(folder, name))
                 for folder, names, _files in os.walk(self.root)
                 for name in names
                 if os.path.islink(os.path.join(folder, name))]
        assert path not in links, '%s is linked to' % path
        for folder in ('namespaces', 'allowed_hosts'):
            assert not os.path.isdir(os.path.join(path, folder)) or (
                not os.listdir(os.path.join(path, folder))), path
        self._rmtree(path)

    def _rmtree(self, path):
        # shutil asks os, which is this
        subprocess.run(['rm', '-r', path], check=True)

    def unlink(self, path):
        self.note('unlink', path)
        self._unlink(path)

    def symlink(self, target, path):
        self.note('symlink', target, path)
        self._symlink(target, path)

    def write(self, write, value, *path):
        self.note('write', os.path.join(*path), value)
        assert os.path.exists(os.path.join(*path)), 'there is no %s' % (path,)
        if path[-1] == 'enable':
            with open(os.path.join(*path[:-1], 'device_path')) as file:
                assert file.read(), 'there is no device yet'
        write(value, *path)

    def tree(self):
        return sorted(os.path.relpath(os.path.join(folder, name), self.root)
                      for folder, names, _files in os.walk(self.root)
                      for name in names)

    def read(self, *path):
        with open(os.path.join(self.root, *path)) as file:
            return file.read()


class NvmetTestCase(base.TestCase):

    def setUp(self):
        super().setUp()
        self.addCleanup(lio.CONTEXT.set_client_mode, lio.CONTEXT.client_mode)
        lio.CONTEXT.set_client_mode(False)
        self.addCleanup(secrets.forget, nvme.NAME + MOVE)
        self.override('target_ip_address', '192.0.2.1')
        self.configfs = Configfs(self)
        self.command = fakes.FakeCommands()
        self.command.answer('dmsetup table v-handle', TABLE)
        # In one order with what configfs is asked
        self.command.ran = self.configfs.done
        self.target = targets.NvmeSourceTarget(
            self.configuration, self.command,
            dmsetup.DmsetupDeviceMapper(self.command))
        self.described = self.describe(MOVE)

    def describe(self, move_id):
        return self.target.describe(move_id, 'iqn.b', '192.0.2.2')


class ExportTest(NvmetTestCase):

    def export(self, move_id=MOVE):
        self.target.export(move_id, DEVICE, self.describe(move_id)
                           if move_id != MOVE else self.described)

    def test_description(self):
        self.assertEqual('192.0.2.1:4420', self.described.portal)
        self.assertEqual((MOVE, 1), (self.described.serial,
                                     self.described.lun))
        self.assertNotEqual(self.described.password,
                            self.describe(MOVE).password)
        self.assertNotEqual(self.described.initiator,
                            self.describe(OTHER).initiator)

    def test_one_host_is_admitted_by_its_secret(self):
        self.export()
        subsystem = os.path.join('subsystems', self.described.iqn)
        self.assertEqual('0', self.configfs.read(subsystem,
                                                 'attr_allow_any_host'))
        self.assertEqual([self.described.initiator], os.listdir(os.path.join(
            self.configfs.root, subsystem, 'allowed_hosts')))
        self.assertEqual(self.described.password, self.configfs.read(
            'hosts', self.described.initiator, 'dhchap_key'))

    def test_namespace_is_the_guard_and_says_whose_it_is(self):
        self.export()
        namespace = os.path.join('subsystems', self.described.iqn,
                                 'namespaces', '1')
        self.assertEqual('/dev/mapper/%s-guard' % MOVE,
                         self.configfs.read(namespace, 'device_path'))
        self.assertEqual(MOVE, self.configfs.read(namespace, 'device_uuid'))

    def test_nobody_gets_at_it_before_writes_fail(self):
        self.export()
        done = self.configfs.done
        order = [next(number for number, line in enumerate(done)
                      if line.startswith(words)) for words in (
            'dmsetup create %s-guard' % MOVE,
            'write subsystems/%s/namespaces/1/enable' % self.described.iqn,
            'dmsetup load %s-guard' % MOVE,
            'dmsetup resume --nolockfs %s-guard' % MOVE,
            'symlink subsystems/%s ports' % self.described.iqn)]
        self.assertEqual(sorted(order), order)
        self.assertIn('--table 0 2056 flakey %s 0 0 1 1 error_writes '
                      '--readonly' % DEVICE, done[order[2]])

    def test_exports_share_a_port(self):
        self.export()
        self.export(OTHER)
        self.assertEqual(['1'], os.listdir(os.path.join(self.configfs.root,
                                                        'ports')))
        self.assertEqual({MOVE, OTHER}, self.target.exported())

    def test_port_of_somebody_else_is_left_alone(self):
        port = os.path.join(self.configfs.root, 'ports', '1')
        self.configfs.mkdir(port)
        for name, value in (('addr_trtype', 'tcp'), ('addr_adrfam', 'ipv4'),
                            ('addr_traddr', '192.0.2.1'),
                            ('addr_trsvcid', '4421')):
            with open(os.path.join(port, name), 'w') as file:
                file.write(value)
        self.export()
        self.assertEqual([], os.listdir(os.path.join(port, 'subsystems')))
        self.assertEqual({MOVE}, self.target.exported())

    def test_address_of_ipv6(self):
        self.override('target_ip_address', '2001:db8::1')
        self.described = self.describe(MOVE)
        self.export()
        self.assertEqual('ipv6', self.configfs.read('ports', '1',
                                                    'addr_adrfam'))
        self.assertEqual('2001:db8::1', self.configfs.read(
            'ports', '1', 'addr_traddr'))

    def test_export_that_is_there_is_left_alone(self):
        self.export()
        del self.configfs.done[:]
        self.export()
        self.assertEqual([], self.configfs.done)

    def test_unexport_leaves_nothing_but_the_port(self):
        self.export()
        with mock.patch.object(self.target, 'remains', return_value={MOVE}):
            self.target.unexport(MOVE)
        self.assertEqual(['hosts', 'ports', 'ports/1', 'ports/1/referrals',
                          'ports/1/subsystems', 'subsystems'],
                         self.configfs.tree())
        self.assertIn('dmsetup remove %s-guard' % MOVE, self.configfs.done)
        self.assertEqual(self.described.password,
                         secrets.mask(self.described.password))

    def test_unexport_of_what_is_not_there_runs_nothing(self):
        self.target.unexport(MOVE)
        self.assertEqual([], self.configfs.done)

    def test_guard_that_is_left_is_removed(self):
        # As when a process dies between it and the subsystem.
        self.patch('cinder_localstor.node.dmsetup.DmsetupDeviceMapper.path',
                   lambda _mapper, name: os.path.join(self.dev, name))
        self.dev = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.dev)
        open(os.path.join(self.dev, MOVE + '-guard'), 'w').close()
        self.assertEqual({MOVE}, self.target.remains())
        self.export()
        removed = self.configfs.done.index('dmsetup remove %s-guard' % MOVE)
        created = next(number for number, line
                       in enumerate(self.configfs.done)
                       if line.startswith('dmsetup create'))
        self.assertLess(removed, created)

    def test_what_others_export_is_left_alone(self):
        self.configfs.mkdir(os.path.join(self.configfs.root, 'subsystems',
                                         FOREIGN))
        self.export()
        self.assertEqual({MOVE}, self.target.exported())
        self.assertEqual({MOVE}, self.target.remains())
        self.target.unexport(MOVE)
        self.assertIn('subsystems/' + FOREIGN, self.configfs.tree())

    def test_export_that_was_broken_off_anywhere_is_made_anew(self):
        self.export()
        # The port stays.
        for call in [line for line in self.configfs.done
                     if line.split()[0] in ('mkdir', 'write', 'symlink')
                     and line.split()[1].split('/')[0] != 'ports']:
            self.target.unexport(MOVE)
            self.configfs.failing = call
            self.assertRaises(exception.CommandFailed, self.export)
            self.assertEqual(set(), self.target.exported(), call)
            self.configfs.failing = None
            self.export()
            self.assertEqual({MOVE}, self.target.exported(), call)

    def test_export_whose_guard_could_not_be_put_is_made_anew(self):
        self.export()
        calls = [line for line in self.configfs.done
                 if line.startswith('dmsetup')]
        self.assertEqual(
            ['table', 'create', 'load', 'resume'],
            [line.split()[1] for line in calls])
        self.devices_of_guards()
        for call in calls:
            self.target.unexport(MOVE)
            self.command.fail(call, 'no memory')
            self.assertRaises(exception.CommandFailed, self.export)
            # Whoever would be let in could write the source.
            self.assertEqual(set(), self.target.exported(), call)
            self.command.answer(call, TABLE if call == calls[0] else '')
            del self.configfs.done[:]
            self.export()
            self.assertEqual({MOVE}, self.target.exported(), call)
            if call != calls[0]:
                self.assertIn('dmsetup remove %s-guard' % MOVE,
                              self.configfs.done, call)

    def devices_of_guards(self):
        """Let a guard's device be there when dmsetup has been asked for it.
        """
        folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, folder)
        guard = os.path.join(folder, MOVE + '-guard')
        reply = self.command.reply

        def made(line):
            if line.startswith('dmsetup create'):
                open(guard, 'w').close()
            elif line.startswith('dmsetup remove') and os.path.exists(guard):
                os.remove(guard)
            return reply(line)

        self.command.reply = made
        self.patch('cinder_localstor.node.dmsetup.DmsetupDeviceMapper.path',
                   lambda _mapper, name: os.path.join(folder, name))

    def test_unexport_that_was_broken_off_anywhere_goes_on(self):
        self.export()
        del self.configfs.done[:]
        self.target.unexport(MOVE)
        for call in list(self.configfs.done):
            if call.startswith('dmsetup'):
                continue
            self.export()
            self.configfs.failing = call
            self.assertRaises(exception.CommandFailed, self.target.unexport,
                              MOVE)
            self.configfs.failing = None
            self.assertEqual({MOVE}, self.target.remains(), call)
            self.target.unexport(MOVE)
            self.assertEqual(set(), self.target.remains())

    def test_error_has_no_secret(self):
        self.configfs.failing = 'write hosts'
        error = self.assertRaises(exception.CommandFailed, self.export)
        self.assertNotIn(self.described.password, str(error))
        self.assertIn('node1', str(error))

    def test_daemon_that_does_not_answer(self):
        self.patch('cinder_localstor.node.nvmet.make',
                   mock.Mock(side_effect=comm.PrivsepTimeout,
                             __name__='make'))
        error = self.assertRaises(exception.CommandFailed, self.export)
        self.assertIn('nvmet: make', str(error))


class CheckTest(NvmetTestCase):

    def setUp(self):
        super().setUp()
        self.patch('cinder_localstor.node.udev.hide_devices')
        self.command.answer('dmsetup targets', 'flakey v1.5.0\n')

    def test_kernel_that_has_all(self):
        self.target.check()
        self.assertEqual(['hosts', 'ports', 'subsystems'],
                         self.configfs.tree())

    def test_backends_that_start_together_look_in_turn(self):
        looking, most = [], []

        def look():
            looking.append(None)
            most.append(len(looking))
            time.sleep(0.05)
            looking.pop()
            return ''

        self.patch('cinder_localstor.node.nvmet.what_is_missing', look)
        with futures.ThreadPoolExecutor() as backends:
            for checked in [backends.submit(self.target.check)
                            for _backend in range(3)]:
                checked.result()
        self.assertEqual([1, 1, 1], most)

    def refuses(self, *words):
        error = self.assertRaises(exception.NoTransport, self.target.check)
        for word in ('node1', 'localstor_transport', *words):
            self.assertIn(word, str(error))

    def test_kernel_without_authentication(self):
        self.configfs.authenticates = False
        self.refuses('CONFIG_NVME_TARGET_AUTH')
        self.assertEqual(['hosts', 'ports', 'subsystems'],
                         self.configfs.tree())

    def test_kernel_without_nvmet(self):
        self.patch('cinder_localstor.node.nvmet.CONFIGFS', '/absent')
        self.refuses('nvmet-tcp')

    def test_daemon_that_sudo_does_not_let_start(self):
        self.patch('cinder_localstor.node.nvmet.what_is_missing', mock.Mock(
            side_effect=daemon.FailedToDropPrivileges('sudo'),
            __name__='what_is_missing'))
        self.refuses('sudo')

    def test_kernel_without_what_guards(self):
        self.command.answer('dmsetup targets', 'linear v1.4.0\n')
        self.refuses('dm-flakey')
