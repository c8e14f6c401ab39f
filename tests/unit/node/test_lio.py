# SPDX-License-Identifier: Apache-2.0
"""With a model of what rtslib makes of the kernel's configuration."""

import os
import tempfile
from unittest import mock

import rtslib_fb

from cinder_localstor.node import interface
from cinder_localstor.node import lio
from cinder_localstor.node import privileged
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

    def __init__(self, path, mode, **values):
        found = self.parts.get(path)
        if found is None and mode == 'lookup':
            raise rtslib_fb.RTSLibNotInCFSError(path)
        if found is not None and mode == 'create':
            raise rtslib_fb.RTSLibError('%s exists' % path)
        if found is None:
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
        super().__init__('%s/%d' % (target.path, tag), mode, enable=False,
                         attributes={})

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
        self.addCleanup(privileged.CONTEXT.set_client_mode,
                        privileged.CONTEXT.client_mode)
        privileged.CONTEXT.set_client_mode(False)
        Part.parts = {}
        for kind in (BlockStorageObject, Target, TPG, LUN, NodeACL,
                     MappedLUN, NetworkPortal):
            self.patch('rtslib_fb.' + kind.__name__, kind)
        self.patch('rtslib_fb.FabricModule', lambda name: name)
        self.root = mock.Mock()
        self.patch('rtslib_fb.RTSRoot', return_value=self.root)
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.saved = os.path.join(directory.name, 'saveconfig.json')
        self.patch('rtslib_fb.root.default_save_file', self.saved)

    def save(self, text):
        with open(self.saved, 'w') as file:
            file.write(text)

    def part(self, path=''):
        return Part.parts['iscsi/%s/1%s' % (IQN, path)]

    def test_export_is_read_only_and_admits_one_initiator(self):
        lio.export(EXPORT, DEVICE)
        storage = Part.parts['core/' + IQN]
        self.assertEqual((DEVICE, 'move-1', True),
                         (storage.dev, storage.wwn, storage.readonly))
        self.assertEqual({'authentication': '1'}, self.part().attributes)
        self.assertTrue(self.part().enable)
        self.assertEqual(storage, self.part('/lun_0').storage)
        admitted = self.part('/acl_' + EXPORT.initiator)
        self.assertEqual(('user', 'secret'), (admitted.chap_userid,
                                              admitted.chap_password))
        mapped, = admitted.mapped_luns
        self.assertTrue(mapped.write_protect)
        self.part('/[2001:db8::1]:3261')

    def test_export_that_is_whole_is_left_alone(self):
        lio.export(EXPORT, DEVICE)
        before = dict(Part.parts)
        lio.export(EXPORT, DEVICE)
        self.assertEqual(before, Part.parts)

    def test_export_that_was_broken_off_anywhere_is_made_anew(self):
        for kind in (Target, TPG, LUN, NodeACL, MappedLUN, NetworkPortal):
            with self.subTest(kind), mock.patch.object(
                    kind, '__init__', side_effect=OSError('no memory')):
                self.assertRaises(OSError, lio.export, EXPORT, DEVICE)
            lio.export(EXPORT, DEVICE)
            self.assertTrue(self.part().enable)
            lio.unexport(IQN)

    def test_export_that_came_back_without_its_device_is_made_anew(self):
        lio.export(EXPORT, DEVICE)
        Part.parts['core/' + IQN].delete()
        lio.export(EXPORT, DEVICE)
        self.assertEqual(DEVICE, self.part('/lun_0').storage_object.dev)

    def test_what_others_made_meanwhile_is_seen(self):
        lio.export(EXPORT, DEVICE)
        self.root.invalidate_caches.assert_called_once_with()

    def test_unexport_leaves_nothing_but_others(self):
        lio.export(EXPORT, DEVICE)
        other = Target('iscsi', OTHER)
        lio.unexport(IQN)
        self.assertEqual({other.path: other}, Part.parts)
        lio.unexport(IQN)

    def test_export_that_others_saved_does_not_come_back(self):
        self.save('{"targets": [{"wwn": "%s"}]}' % IQN)
        lio.unexport(IQN)
        self.root.save_to_file.assert_called_once_with()

    def test_nothing_is_saved_that_was_not(self):
        self.save('{"targets": [{"wwn": "%s"}]}' % OTHER)
        lio.unexport(IQN)
        self.root.save_to_file.assert_not_called()

    def test_prepare_asks_for_the_modules(self):
        self.patch('rtslib_fb.RTSRoot', side_effect=rtslib_fb.RTSLibError)
        self.assertRaises(rtslib_fb.RTSLibError, lio.prepare)
