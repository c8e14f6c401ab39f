# SPDX-License-Identifier: Apache-2.0
"""A backend of Cinder's own driver of LVM gets this driver; by Cinder's own
volume managers.
"""

from cinder.db import api as db
from cinder.volume import rpcapi
import ddt
from oslo_utils import units

from cinder_localstor.datapath import handles
from cinder_localstor.datapath import transfer
from cinder_localstor.node import simulated
from cinder_localstor import rows
from tests.unit import base
from tests.unit import services

A, B = base.A, base.B


class AdoptionTestCase(base.TestCase):

    def setUp(self):
        super().setUp()
        self.cloud = services.Services(self)
        self.node = self.cloud.nodes[A]
        self.volume = self.cloud.create()

    @property
    def disks(self):
        return self.node.volumes.disks

    def disk_of(self, snapshot):
        return self.disks[rows.snapshot_copy_name(snapshot.id)]

    def forget(self, *snapshots):
        """Let what there is be what Cinder's own driver would have left."""
        for disk in self.disks.values():
            disk.tags = frozenset()
        for snapshot in snapshots:
            rows.forget_place(self.ctxt, snapshot.id)
        self.node.device_mapper.nodes.clear()

    def restart(self):
        self.cloud.boot(A)

    def assert_ours(self, name, **values):
        self.assertEqual({'localstor.%s=%s' % value
                          for value in values.items()}, self.disks[name].tags)


class VolumeTest(AdoptionTestCase):

    def test_volume_is_ours(self):
        self.forget()
        self.restart()
        self.assert_ours(self.volume.name, volume=self.volume.id,
                         generation=1)
        self.assertEqual(self.cloud.content[self.volume.id],
                         self.cloud.read(self.volume))
        self.cloud.arrive(self.volume)
        self.assertEqual(B, self.cloud.host_of(self.volume))
        self.assertEqual(self.cloud.content[self.volume.id],
                         self.cloud.read(self.volume))

    def test_volume_that_is_deleted_leaves_nothing(self):
        self.forget()
        self.restart()
        self.assertTrue(self.cloud.delete(self.volume))
        self.assertEqual([], self.cloud.leftovers([]))

    def test_one_that_fails_keeps_no_other(self):
        other = self.cloud.create()
        self.forget()
        self.node.faults.plan = simulated.Call(
            'SimulatedVolumeGroup.retag', 0, simulated.Fault.ERROR)
        with self.assertLogs('cinder_localstor', 'ERROR') as logs:
            self.restart()
        self.assertIn('is not taken over', logs.output[0])
        self.assertEqual(1, sum(bool(disk.tags)
                                for disk in self.disks.values()))
        # Both can be used all the same.
        for volume in (self.volume, other):
            self.cloud.read(volume)
        self.restart()
        for volume in (self.volume, other):
            self.assert_ours(volume.name, volume=volume.id, generation=1)

    def test_nothing_else_is(self):
        self.node.volumes.create('somebody-elses', units.Gi, frozenset())
        self.cloud.arrive(self.volume)
        # Of a former life of the volume, as from a backup of LVM's metadata
        self.node.volumes.create('volume-' + self.volume.id, units.Gi,
                                 frozenset())
        self.restart()
        for name in ('somebody-elses', 'volume-' + self.volume.id):
            self.assertEqual(frozenset(), self.disks[name].tags)
            self.assertNotIn(handles.handle_name(name),
                             self.node.device_mapper.nodes)


class ConnectedTest(AdoptionTestCase):
    """Its guest is connected from its own node as from any other."""

    def setUp(self):
        super().setUp()
        self.attachment = self.cloud.reserve(
            self.volume, self.cloud.connector(A))
        self.attachment.connection_info = {'driver_volume_type': 'iscsi'}
        self.attachment.save()
        self.cloud.set_status(self.volume, 'in-use')
        self.cloud.driver(self.volume)._export(self.ctxt, self.volume.id)
        self.forget()

    def disconnect(self):
        rpcapi.VolumeAPI().attachment_delete(
            self.ctxt, self.attachment.id, self.cloud.refresh(self.volume))
        db.volume_detached(self.ctxt, self.volume.id, self.attachment.id)

    @property
    def is_exported(self):
        return self.volume.name in self.node.remote.exports

    def test_its_export_stays_as_long_as_it_is_connected(self):
        self.restart()
        driver = self.cloud.driver(self.volume)
        driver.remove_export(self.ctxt, self.cloud.refresh(self.volume))
        self.assertTrue(self.is_exported)
        self.assertEqual({self.cloud.connector(A)['initiator']},
                         self.node.remote.admitted[self.volume.name])
        self.disconnect()
        self.assertFalse(self.is_exported)
        self.cloud.arrive(self.volume)
        self.assertEqual(B, self.cloud.host_of(self.volume))

    def test_handle_is_made_when_nobody_is_connected_any_more(self):
        """LIO lets nothing else open a logical volume."""
        def refuse(_host, name):
            busy = self.is_exported and 'DeviceMapper.create' in name
            return simulated.Fault.ERROR if busy else None
        self.node.faults.choose = refuse
        with self.assertLogs('cinder_localstor', 'WARNING') as logs:
            self.restart()
            for _time in range(3):
                self.cloud.driver(self.volume)._watch_moves()
        self.assertEqual(1, sum('is not exported yet' in line
                                for line in logs.output), logs.output)
        name = handles.handle_name(self.volume.name)
        self.assertNotIn(name, self.node.device_mapper.nodes)
        self.disconnect()
        self.assertIn(name, self.node.device_mapper.nodes)
        self.assertEqual(self.cloud.content[self.volume.id],
                         self.cloud.read(self.volume))


@ddt.ddt
class SnapshotTest(AdoptionTestCase):

    def setUp(self):
        super().setUp()
        self.snapshot = self.cloud.take_snapshot(self.volume)
        self.cloud.write(self.volume, 3, 'later')

    def adopt(self):
        self.forget(self.snapshot)
        self.restart()

    def assert_adopted(self, origin):
        self.assert_ours(rows.snapshot_copy_name(self.snapshot.id),
                         volume=self.volume.id, generation=1,
                         snapshot=self.snapshot.id)
        row = self.cloud.refresh_snapshot(self.snapshot)
        self.assertEqual((A, origin), (row.provider_location,
                                       row.provider_id))

    def test_snapshot_is_ours(self):
        self.adopt()
        self.assert_adopted(self.volume.name)
        self.assertEqual(self.cloud.content[self.snapshot.id],
                         self.cloud.read_snapshot(self.snapshot))

    def test_it_stays_when_its_volume_leaves(self):
        self.adopt()
        self.cloud.arrive(self.volume)
        copy = self.cloud.create_from(self.snapshot, B)
        self.cloud.settle()
        self.assertEqual(self.cloud.content[self.snapshot.id],
                         self.cloud.read(copy))
        self.assertIsNone(self.cloud.delete_snapshot(self.snapshot))
        self.cloud.settle()
        self.assertEqual([], self.cloud.leftovers([self.volume, copy]))

    def test_one_that_could_not_be_deleted_can_be(self):
        self.cloud.set_snapshot_status(self.snapshot, 'error_deleting')
        self.adopt()
        self.assertIsNone(self.cloud.delete_snapshot(self.snapshot))
        self.assertEqual([], self.cloud.leftovers([self.volume]))

    def test_one_that_was_being_managed_is_given_back(self):
        disk = self.disk_of(self.snapshot)
        self.cloud.set_snapshot_status(self.snapshot, 'error')
        self.forget(self.snapshot)
        disk.tags = transfer.tags(
            volume=self.volume.id, snapshot=self.snapshot.id, generation=1,
            former='mine')
        self.restart()
        self.assertIsNone(self.cloud.delete_snapshot(self.snapshot))
        self.assertIs(disk, self.disks['mine'])

    def test_it_gets_room_for_all_that_can_change(self):
        disk = self.disk_of(self.snapshot)
        disk.room = disk.size + 8 * units.Mi
        self.adopt()
        self.assertEqual(disk.room, disk.size)

    def test_without_space_for_that_it_is_as_it_was(self):
        disk = self.disk_of(self.snapshot)
        before, disk.room = disk.size, 2 * self.node.volumes.total
        with self.assertLogs('cinder_localstor', 'WARNING') as logs:
            self.adopt()
        self.assertIn('as it was before', '\n'.join(logs.output))
        self.assertEqual(before, disk.size)
        self.assert_adopted(self.volume.name)

    def test_thin_one_is_there_after_a_restart(self):
        self.cloud.delete_snapshot(self.snapshot)
        self.cloud.delete(self.volume)
        self.node.volumes.pool_size = 64 * units.Gi
        self.volume = self.cloud.create()
        self.snapshot = self.cloud.take_snapshot(self.volume)
        self.disk_of(self.snapshot).is_skipped = True
        self.adopt()
        self.assert_adopted(None)
        self.assertEqual(self.cloud.content[self.snapshot.id],
                         self.cloud.read_snapshot(self.snapshot))

    def test_snapshot_of_another_volume_is_not(self):
        self.disk_of(self.snapshot).taken_of = 'somebody-elses'
        self.adopt()
        self.assertIsNone(rows.place_of(self.ctxt, self.snapshot.id))
        self.assertEqual(frozenset(), self.disk_of(self.snapshot).tags)

    @ddt.data(simulated.Fault.ERROR, simulated.Fault.ERROR_AFTER,
              simulated.Fault.CRASH, simulated.Fault.CRASH_AFTER)
    def test_broken_off_anywhere_it_is_ours_after_the_next_start(self, fault):
        disk = self.disk_of(self.snapshot)
        disk.room = disk.size + 8 * units.Mi
        disk.is_skipped = True
        for name in ('retag', 'keep_active', 'extend'):
            for nth in range(2 if name == 'retag' else 1):
                with self.subTest(name=name, nth=nth):
                    disk.size, disk.is_skipped = units.Gi, True
                    self.forget(self.snapshot)
                    self.node.faults.forget()
                    self.node.faults.plan = simulated.Call(
                        'SimulatedVolumeGroup.' + name, nth, fault)
                    try:
                        self.restart()
                    except (simulated.Crash, AssertionError):
                        self.node.cut_power()
                    self.assertIsNone(self.node.faults.plan)
                    self.restart()
                    self.assert_adopted(self.volume.name)
                    self.assertEqual((disk.room, False),
                                     (disk.size, disk.is_skipped))
                    self.assert_ours(self.volume.name, generation=1,
                                     volume=self.volume.id)
