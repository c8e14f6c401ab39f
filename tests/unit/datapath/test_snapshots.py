# SPDX-License-Identifier: Apache-2.0

from oslo_utils import units

from cinder_localstor.datapath import copies
from cinder_localstor.datapath import snapshots
from cinder_localstor.datapath import transfer
from cinder_localstor.datapath import wipes
from cinder_localstor import exception
from cinder_localstor.node import simulated
from tests.unit import base

SNAPSHOT = copies.Copy(
    host=base.A, name='_snapshot-1', volume_id='v', generation=3,
    size=units.Gi, role=copies.Role.SNAPSHOT, snapshot_id='1')


class SnapshotsTest(base.TestCase):

    def setUp(self):
        super().setUp()
        self.node = simulated.SimulatedNode(base.A, {})
        self.group = self.node.volumes
        self.group.create('volume-1', units.Gi, transfer.tags(volume='v'))
        self.snapshots = snapshots.Snapshots(self.node, self.configuration)

    def names(self):
        return sorted(self.group.disks)

    def test_tags_tell_what_it_is_without_the_database(self):
        self.snapshots.create(SNAPSHOT, 'volume-1')
        label = copies.Label(self.group.disks['_snapshot-1'].tags)
        self.assertEqual(('v', '1', '3'), (label.volume_id, label.snapshot_id,
                                           label.generation))

    def test_thick_one_depends_on_its_origin(self):
        self.assertEqual(copies.Origin(base.A, 'volume-1'),
                         self.snapshots.origin(base.A, 'volume-1'))
        self.snapshots.create(SNAPSHOT, 'volume-1')
        self.assertEqual('volume-1', self.group.disks['_snapshot-1'].origin)

    def test_thin_one_depends_on_nothing(self):
        self.group.pool_size = 9 * units.Gi
        self.assertIsNone(self.snapshots.origin(base.A, 'volume-1'))
        self.snapshots.create(SNAPSHOT, 'volume-1')
        self.group.remove('volume-1')
        self.assertEqual(['_snapshot-1'], self.names())

    def test_copy_that_arrives_is_refused_whatever_the_database_says(self):
        self.group.retag('volume-1', transfer.tags(move='m'), frozenset())
        error = self.assertRaises(exception.StillArrives,
                                  self.snapshots.create, SNAPSHOT, 'volume-1')
        for part in ('volume-1', 'volume v'):
            self.assertIn(part, str(error))
        self.assertEqual(['volume-1'], self.names())

    def test_copy_that_is_gone_is_named(self):
        self.assertRaises(exception.LogicalVolumeMissing,
                          self.snapshots.create, SNAPSHOT, 'volume-2')

    def test_pool_that_is_as_full_as_it_may_be(self):
        self.group.pool_size = units.Gi
        error = self.assertRaises(
            exception.NotEnoughSpace, self.snapshots.create, SNAPSHOT,
            'volume-1')
        for part in ('_snapshot-1', 'group/pool is full', 'lvextend'):
            self.assertIn(part, str(error))

    def test_deleted_one_is_no_snapshot_and_is_to_be_wiped(self):
        self.snapshots.create(SNAPSHOT, 'volume-1')
        for _time in range(2):
            self.snapshots.delete('_snapshot-1')
            wiped, = set(self.names()) - {'volume-1'}
            self.assertRegex(wiped, 'localstor-wipe-_snapshot-1.*')
            self.assertEqual('', self.group.disks[wiped].origin)

    def test_one_that_is_read_stays(self):
        self.snapshots.create(SNAPSHOT, 'volume-1')
        for _time in range(2):
            path = self.snapshots.open('_snapshot-1', 'volume-2', units.Gi)
            self.assertEqual('/dev/mapper/volume-2-reader', path)
        self.snapshots.open('_snapshot-1', 'volume-3', units.Gi)
        for copy in ('volume-2', 'volume-3'):
            error = self.assertRaises(exception.SnapshotIsRead,
                                      self.snapshots.delete, '_snapshot-1')
            self.assertIn('_snapshot-1', str(error))
            for _time in range(2):
                self.snapshots.close(copy)
        self.snapshots.delete('_snapshot-1')
        self.assertRaises(exception.LogicalVolumeMissing, self.snapshots.open,
                          '_snapshot-1', 'volume-2', units.Gi)

    def test_nobody_writes_one_that_is_read(self):
        self.snapshots.create(SNAPSHOT, 'volume-1')
        self.snapshots.open('_snapshot-1', 'volume-2', units.Gi)
        reader = self.node.device_mapper.nodes['volume-2-reader']
        self.assertTrue(reader.read_only)

    def test_one_that_no_user_has_any_more_does_not_hold_its_origin(self):
        self.snapshots.create(SNAPSHOT, 'volume-1')
        given_up = wipes.Wipes(self.group).give_up
        self.assertRaises(exception.SnapshotsLeft, given_up, 'volume-1')
        for _time in range(2):
            self.snapshots.disown('_snapshot-1')
        given_up('volume-1')
        self.assertEqual(
            'volume-1', wipes.former_name(
                self.group.disks['_snapshot-1'].origin))
