# SPDX-License-Identifier: Apache-2.0
"""With a model of what rtslib makes of the kernel's configuration."""

import json
import os
import shutil
import stat
import tempfile
from unittest import mock

from oslo_concurrency import lockutils
import rtslib_fb

from cinder_localstor.node import interface
from cinder_localstor.node import lio
from tests.unit import base

IQN = 'iqn.2010-10.org.openstack:localstor-1'
OTHER = 'iqn.2010-10.org.openstack:volume-2'
DEVICE = '/dev/mapper/v-handle'
EXPORT = interface.Export(
    portal='[2001:db8::1]:3261', iqn=IQN, lun=0, serial='move-1',
    initiator='iqn.1993-08.org.debian:01:b', address='2001:db8::2',
    username='user', password='secret')


class Part:
    """A directory of configfs, in `parts` by its path."""

    parts: dict[str, 'Part'] = {}
    # What there was when the target began to answer
    at_start: dict[str, dict] = {}
    # What comes of making the next ones, None if nothing goes wrong
    failures: list[BaseException | None] = []

    @classmethod
    def all(cls):
        return {path: vars(part).copy() for path, part in cls.parts.items()}

    def __init__(self, path, mode, **values):
        found = self.parts.get(path)
        if found is None and mode == 'lookup':
            raise rtslib_fb.RTSLibNotInCFSError(path)
        if found is not None and mode == 'create':
            raise rtslib_fb.RTSLibError('%s exists' % path)
        if found is None:
            if self.failures and (failure := self.failures.pop(0)):
                raise failure
            self.__dict__.update(values, path=path)
            self.parts[path] = self
        else:
            self.__dict__ = found.__dict__

    def below(self, kind):
        return [part for path, part in sorted(self.parts.items())
                if path.startswith(self.path + '/')
                and isinstance(part, kind)]

    def delete(self):
        for path in list(self.parts):
            if path == self.path or path.startswith(self.path + '/'):
                del self.parts[path]


class BlockStorageObject(Part):

    def __init__(self, name, dev=None, wwn=None, readonly=False):
        super().__init__('core/' + name, 'create' if dev else 'lookup',
                         dev=dev, wwn=wwn, readonly=readonly)


class Target(Part):

    def __init__(self, fabric, iqn, mode='any'):
        super().__init__('%s/%s' % (fabric, iqn), mode)


class TPG(Part):

    def __init__(self, target, tag, mode='any'):
        super().__init__('%s/%d' % (target.path, tag), mode, enabled=False,
                         attributes={})

    @property
    def enable(self):
        return self.enabled

    @enable.setter
    def enable(self, value):
        self.enabled = value
        Part.at_start = self.all()

    @property
    def luns(self):
        return self.below(LUN)

    def set_attribute(self, name, value):
        self.attributes[name] = value


class LUN(Part):

    def __init__(self, group, number, storage_object):
        super().__init__('%s/lun_%d' % (group.path, number), 'create',
                         storage=storage_object)

    @property
    def storage_object(self):
        if self.storage.path not in self.parts:
            raise rtslib_fb.RTSLibBrokenLink(self.path)
        return self.storage


class NodeACL(Part):

    def __init__(self, group, initiator, mode='any'):
        super().__init__('%s/acl_%s' % (group.path, initiator), mode)

    @property
    def mapped_luns(self):
        return self.below(MappedLUN)


class MappedLUN(Part):

    def __init__(self, admitted, number, lun, write_protect):
        super().__init__('%s/mapped_%d' % (admitted.path, number), 'create',
                         write_protect=write_protect,
                         tpg_lun=self.parts['%s/lun_%d' % (
                             admitted.path.rpartition('/')[0], lun)])


class NetworkPortal(Part):

    def __init__(self, group, address, port):
        super().__init__('%s/%s:%d' % (group.path, address, port), 'any')


class LioTest(base.TestCase):

    def setUp(self):
        super().setUp()
        self.addCleanup(lio.CONTEXT.set_client_mode, lio.CONTEXT.client_mode)
        lio.CONTEXT.set_client_mode(False)
        Part.parts, Part.at_start, Part.failures = {}, {}, []
        for kind in (BlockStorageObject, Target, TPG, LUN, NodeACL,
                     MappedLUN, NetworkPortal):
            self.patch('rtslib_fb.' + kind.__name__, kind)
        self.patch('rtslib_fb.FabricModule', lambda name: name)
        self.root = mock.Mock()
        self.patch('rtslib_fb.RTSRoot', return_value=self.root)
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.configfs = directory.name
        self.patch('cinder_localstor.node.lio.CONFIGFS', self.configfs)
        self.saved = os.path.join(directory.name, 'target', 'saveconfig.json')
        self.patch('rtslib_fb.root.default_save_file', self.saved)

    def save(self, *iqns):
        os.makedirs(os.path.dirname(self.saved))
        with open(self.saved, 'w') as file:
            json.dump({'storage_objects': [{'name': iqn} for iqn in iqns],
                       'targets': [{'wwn': iqn} for iqn in iqns],
                       'fabric_modules': []}, file)

    def make(self, *names, content=''):
        path = os.path.join(self.configfs, *names)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, 'w') as file:
            file.write(content)

    def part(self, path=''):
        return Part.parts['iscsi/%s/1%s' % (IQN, path)]

    def test_export_is_read_only_and_admits_one_initiator(self):
        lio.export(EXPORT, DEVICE)
        storage = Part.parts['core/' + IQN]
        self.assertEqual((DEVICE, 'move-1', True),
                         (storage.dev, storage.wwn, storage.readonly))
        self.assertEqual({'authentication': '1'}, self.part().attributes)
        self.assertTrue(self.part().enable)
        self.assertEqual(storage.path, self.part('/lun_0').storage.path)
        admitted = self.part('/acl_' + EXPORT.initiator)
        self.assertEqual(('user', 'secret'), (admitted.chap_userid,
                                              admitted.chap_password))
        mapped, = admitted.mapped_luns
        self.assertTrue(mapped.write_protect)
        self.part('/[2001:db8::1]:3261')

    def test_target_answers_when_all_of_it_is_there(self):
        lio.export(EXPORT, DEVICE)
        self.assertEqual(Part.at_start, Part.all())

    def test_export_that_is_whole_is_left_alone(self):
        lio.export(EXPORT, DEVICE)
        before = dict(Part.parts)
        lio.export(EXPORT, DEVICE)
        self.assertEqual(before, Part.parts)

    def broken_off(self, error):
        """Let an export fail at each part that it makes."""
        lio.export(EXPORT, DEVICE)
        whole = set(Part.parts)
        for number in range(len(whole)):
            lio.unexport(IQN)
            Part.failures = [None] * number + [error]
            self.assertRaises(type(error), lio.export, EXPORT, DEVICE)
            yield whole

    def test_export_that_fails_anywhere_leaves_nothing(self):
        for _whole in self.broken_off(OSError('no memory')):
            self.assertEqual({}, Part.parts)

    def test_export_whose_maker_died_anywhere_is_made_anew(self):
        for whole in self.broken_off(SystemExit()):
            lio.export(EXPORT, DEVICE)
            self.assertEqual(whole, set(Part.parts))
            self.assertEqual(Part.at_start, Part.all())

    def test_export_that_can_be_written_is_made_anew(self):
        lio.export(EXPORT, DEVICE)
        mapped, = self.part('/acl_' + EXPORT.initiator).mapped_luns
        mapped.write_protect = False
        lio.export(EXPORT, DEVICE)
        mapped, = self.part('/acl_' + EXPORT.initiator).mapped_luns
        self.assertTrue(mapped.write_protect)

    def test_what_others_made_meanwhile_is_seen(self):
        lio.export(EXPORT, DEVICE)
        self.root.invalidate_caches.assert_called_once_with()

    def test_unexport_leaves_nothing_but_others(self):
        lio.export(EXPORT, DEVICE)
        other = Target('iscsi', OTHER)
        lio.unexport(IQN)
        self.assertEqual({other.path: other}, Part.parts)
        lio.unexport(IQN)

    def test_half_a_backstore_is_in_nobodys_way(self):
        self.make('core', 'iblock_0', OTHER, 'udev_path')
        os.makedirs(os.path.join(self.configfs, 'core', 'iblock_1'))
        lio.unexport(IQN)
        self.assertEqual(['iblock_0'], os.listdir(
            os.path.join(self.configfs, 'core')))

    def test_export_that_others_saved_does_not_come_back(self):
        self.save(IQN, OTHER)
        lio.unexport(IQN)
        with open(self.saved) as file:
            self.assertEqual({'storage_objects': [{'name': OTHER}],
                              'targets': [{'wwn': OTHER}],
                              'fabric_modules': []}, json.load(file))
        self.assertEqual(0o600, stat.S_IMODE(os.stat(self.saved).st_mode))

    def test_export_that_can_not_be_removed_is_not_saved_any_more(self):
        self.save(IQN)
        lio.export(EXPORT, DEVICE)
        with mock.patch.object(Part, 'delete', side_effect=OSError('busy')):
            self.assertRaises(OSError, lio.unexport, IQN)
        with open(self.saved) as file:
            self.assertNotIn(IQN, file.read())

    def test_what_others_saved_is_left_alone(self):
        self.save(OTHER)
        before = os.stat(self.saved)
        lio.unexport(IQN)
        self.assertEqual(before, os.stat(self.saved))

    def test_saved_garbage_is_left_alone(self):
        self.make('target', 'saveconfig.json', content='garbage')
        lio.unexport(IQN)
        with open(self.saved) as file:
            self.assertEqual('garbage', file.read())

    def test_only_a_target_with_a_disk_is_an_export(self):
        for enable, disk, expected in (('1', True, {IQN}), ('0', True, set()),
                                       ('1', False, set())):
            shutil.rmtree(os.path.join(self.configfs, 'iscsi'),
                          ignore_errors=True)
            self.make('iscsi', IQN, 'tpgt_1', 'enable', content=enable + '\n')
            if disk:
                self.make('iscsi', IQN, 'tpgt_1', 'lun', 'lun_0', 'link',
                          'udev_path')
            self.assertEqual(expected, lio.targets())

    def test_target_and_backstore_are_remains(self):
        self.make('iscsi', IQN, 'fabric_statistics')
        self.make('core', 'iblock_7', OTHER, 'udev_path')
        self.make('core', 'iblock_7', 'hba_info')
        self.assertEqual({IQN, OTHER}, lio.remains())

    def test_nothing_is_there_without_the_module(self):
        self.assertEqual((set(), set()), (lio.targets(), lio.remains()))

    def test_it_is_never_done_beside_others(self):
        self.patch('cinder_localstor.node.lio.TIMEOUT', 0.2)
        with lockutils.lock('lioadm', 'cinder-', external=True):
            for call in (lio.prepare, lambda: lio.export(EXPORT, DEVICE),
                         lambda: lio.unexport(IQN)):
                self.assertRaises(lockutils.AcquireLockFailedException, call)
        self.root.assert_not_called()
        lio.export(EXPORT, DEVICE)

    def test_prepare_asks_for_the_modules(self):
        self.patch('rtslib_fb.RTSRoot', side_effect=rtslib_fb.RTSLibError)
        self.assertRaises(rtslib_fb.RTSLibError, lio.prepare)
        self.assertTrue(os.path.isdir(os.path.dirname(self.saved)))
