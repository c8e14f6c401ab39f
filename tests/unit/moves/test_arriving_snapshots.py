# SPDX-License-Identifier: Apache-2.0
"""Snapshots and clones of a volume that still arrives."""

from unittest import mock

import ddt
from oslo_utils import units

from cinder_localstor.datapath import copies
from cinder_localstor import exception
from cinder_localstor.moves import table
from cinder_localstor import rows
from tests.unit import base
from tests.unit.moves import test_copier
from tests.unit.moves import test_keeper


class ArrivingTestCase(test_copier.CopierTestCase):

    def setUp(self):
        super().setUp()
        self.node = self.cloud.nodes[base.B]
        self.arrive(self.volume)

    def arrive(self, volume):
        """Let a volume have arrived in part, and have been written there."""
        self.cloud.move(volume, to=base.B)
        self.cloud.watch()
        self.cloud.nodes[base.B].hydrate(most=3)
        self.cloud.write(volume, 9, 'written on the way')

    def arrivals(self):
        """What brings snapshots the rest of them, by state."""
        return [move.state for move in rows.snapshots_arriving(
            self.ctxt, self.volume.id)]

    def be_impatient(self):
        """Let nobody wait for long."""
        self.patch('tenacity.nap.time')
        self.override('localstor_peer_timeout', 1)
        self.cloud.boot(base.B)

    def assert_gone(self, *volumes):
        """Nothing is left but these volumes."""
        for _time in range(3):
            self.cloud.watch()
        self.assert_whole(*volumes)


@ddt.ddt
class ArrivingTest(ArrivingTestCase):

    def test_snapshot_is_of_the_moment_at_once_and_when_it_has_arrived(self):
        snapshot = self.take()
        self.assertEqual('available', snapshot.status)
        for number in range(16):
            self.cloud.write(self.volume, number, 'later %d' % number)
        self.assertEqual([table.State.MIGRATING], self.arrivals())
        self.assert_as_then(snapshot)
        self.cloud.settle()
        self.assertEqual([], self.arrivals())
        self.assert_as_then(snapshot)
        self.assert_reads(self.volume)
        self.assertTrue(self.delete(snapshot))
        self.assert_gone()

    def test_volume_goes_on_arriving(self):
        self.take()
        self.node.hydrate(most=2)
        progress, = [self.cloud.running[base.B].on_destination.progress(
            move.transfer, self.node.device_mapper.devices())
            for move in rows.for_volume(self.ctxt, self.volume.id)]
        self.assertEqual(6, progress.local // (64 * units.Mi))

    def test_source_stays_until_the_snapshot_has_arrived_too(self):
        snapshot = self.take()
        with mock.patch.object(self.node, 'hydrate', self.hydrate_volume):
            for _time in range(5):
                self.cloud.watch()
                self.cloud.hydrate()
        self.assertEqual(table.State.MIGRATING, self.state())
        self.assert_as_then(snapshot)
        self.cloud.settle()
        self.assertIsNone(self.state())
        self.assert_as_then(snapshot)

    def hydrate_volume(self):
        """Nothing of snapshots is copied."""
        name = self.cloud.row(self.volume).name
        for process, helper in self.node.hydrators.processes.items():
            if process == name:
                helper.arrival.hydrate(32)
        mapped = self.node.device_mapper.nodes.get(name + '-clone')
        if mapped:
            self.node.device_mapper._arrival(mapped.table[0]).hydrate(32)

    def test_several_of_one_volume(self):
        taken = []
        for number in range(3):
            taken.append(self.take())
            self.cloud.write(self.volume, 5, 'after snapshot %d' % number)
            self.node.hydrate(most=2)
        for snapshot in taken:
            self.assert_as_then(snapshot)
        self.assertTrue(self.delete(taken[1]))
        self.cloud.settle()
        for snapshot in (taken[0], taken[2]):
            self.assert_as_then(snapshot)
            self.assertTrue(self.delete(snapshot))
        self.assert_gone()

    @ddt.data(True, False)
    def test_it_is_deleted_while_it_arrives(self, restarted):
        snapshot = self.take()
        if restarted:
            self.restart(base.B)
            self.cloud.watch()
            self.cloud.watch()
        self.assertTrue(self.delete(snapshot))
        self.assertNotIn(table.State.MIGRATING, self.arrivals())
        self.cloud.settle()
        self.assert_gone()

    @ddt.data(base.A, base.B)
    def test_power_of_a_node_fails_while_it_arrives(self, host):
        snapshot = self.take()
        self.cloud.write(self.volume, 3, 'later')
        self.restart(host)
        self.cloud.settle()
        self.assert_as_then(snapshot)
        self.assert_reads(self.volume)
        self.assertTrue(self.delete(snapshot))
        self.assert_gone()

    @ddt.data(base.A, base.C)
    def test_volume_moves_on_and_leaves_it_behind(self, host):
        snapshot = self.take()
        self.cloud.move(self.volume, to=host)
        self.cloud.write(self.volume, 3, 'on the next node')
        self.assert_as_then(snapshot)
        self.cloud.settle()
        self.assertEqual(base.B, rows.place_of(self.ctxt, snapshot.id))
        self.assert_as_then(snapshot)
        self.assert_reads(self.volume)
        self.assertEqual([], self.cloud.leftovers([self.volume]))
        self.assertTrue(self.delete(snapshot))
        self.cloud.settle()
        self.assert_gone()

    def test_snapshot_at_the_end_of_a_chain(self):
        self.cloud.move(self.volume, to=base.C)
        self.cloud.watch()
        self.cloud.write(self.volume, 3, 'on the next node')
        snapshot = self.take()
        self.cloud.write(self.volume, 3, 'later')
        self.assert_as_then(snapshot)
        self.cloud.settle()
        self.assert_as_then(snapshot)
        self.assertTrue(self.delete(snapshot))
        self.assert_gone()

    def test_snapshot_of_a_copy_that_arrives(self):
        volume = self.make(base.C, self.take())
        self.cloud.watch()
        self.cloud.write(volume, 5, 'in the new volume')
        snapshot = self.take(volume)
        self.cloud.write(volume, 5, 'later')
        self.assert_as_then(snapshot)
        self.cloud.settle()
        self.assert_as_then(snapshot)
        self.assert_content(volume)

    @ddt.data(base.A, base.B, base.C)
    def test_volume_of_it_can_be_used_at_once(self, host):
        snapshot = self.take()
        self.cloud.write(self.volume, 3, 'later')
        volume = self.make(host, snapshot)
        self.cloud.write(volume, 5, 'in the new volume')
        self.assert_content(volume)
        self.cloud.settle()
        self.assert_content(volume)
        self.assert_as_then(snapshot)
        self.assert_reads(self.volume)

    @ddt.data(base.A, base.B, base.C)
    def test_volume_of_it_arrives_though_it_is_deleted(self, host):
        snapshot = self.take()
        volume = self.make(host, snapshot)
        self.assertTrue(self.delete(snapshot))
        self.assert_content(volume)
        self.restart(base.B)
        self.cloud.settle()
        self.assert_content(volume)
        self.assert_gone(self.volume, volume)

    @ddt.data(base.A, base.B, base.C)
    def test_volume_is_cloned_on_any_node(self, host):
        volume = self.make(host, self.volume)
        self.cloud.write(self.volume, 3, 'later')
        self.cloud.write(volume, 5, 'in the clone')
        self.assert_content(volume)
        for each in (base.A, base.B, base.C):
            self.assertEqual(set(), self.cloud.report(each).found())
        again = self.make(host, volume) if host != base.B else None
        self.cloud.settle()
        self.assert_content(volume)
        if again:
            self.assert_content(again)
            self.delete_volume(again)
        self.delete_volume(volume)
        self.cloud.settle()
        self.assert_gone()

    @ddt.data(base.A, base.B)
    def test_clone_is_deleted_while_all_arrives(self, host):
        self.delete_volume(self.make(host, self.volume))
        self.cloud.settle()
        self.assert_gone()

    @ddt.data(base.A, base.B)
    def test_power_of_a_node_fails_while_a_clone_arrives(self, host):
        volume = self.make(base.C, self.volume)
        self.cloud.write(volume, 5, 'in the clone')
        self.restart(host)
        self.cloud.settle()
        self.assert_content(volume)
        self.assert_reads(self.volume)

    def test_volume_of_a_snapshot_that_is_read_is_not_deleted(self):
        snapshot = self.take()
        volume = self.make(base.C, snapshot)
        self.assertTrue(self.delete(snapshot))
        self.be_impatient()
        self.assertRaises(exception.DeletedTooEarly, self.delete_volume,
                          self.volume)
        self.cloud.settle()
        self.delete_volume(self.volume)
        self.cloud.settle()
        self.assert_content(volume)

    def test_volume_is_deleted_when_what_its_clone_reads_has_arrived(self):
        volume = self.make(base.B, self.volume)
        self.patch('tenacity.nap.time').sleep.side_effect = (
            lambda _seconds: self.cloud.settle())
        self.delete_volume(self.volume)
        self.cloud.settle()
        self.assert_content(volume)

    def test_it_waits_until_nobody_can_write_the_source(self):
        other = self.cloud.create_volume()
        self.cloud.move(other)
        self.be_impatient()
        snapshot = self.take(other)
        self.assertEqual('error', snapshot.status)
        self.cloud.watch()
        self.assertEqual('available', self.take(other).status)

    def test_lease_of_the_helper_that_ends_too_soon(self):
        if self.data_path != 'hydrator':
            self.skipTest('dm-clone has none')
        self.node.faults.observe = lambda host, name: (
            self.cloud.write(self.volume, 3, 'while it is taken')
            if name == 'SimulatedVolumeGroup.create_snapshot' else None)
        self.assertEqual('error', self.take().status)
        self.node.faults.observe = lambda host, name: None
        self.cloud.settle()
        self.assert_gone()

    def test_extended_volume(self):
        self.cloud.movers[base.B].extend(
            self.ctxt, self.cloud.refresh(self.volume), 2 * units.Gi)
        volume = self.cloud.refresh(self.volume)
        volume.size = 2
        volume.save()
        self.cloud.write(self.volume, 20, 'behind the former end')
        snapshot = self.take()
        self.cloud.write(self.volume, 20, 'later')
        self.assert_as_then(snapshot)
        self.cloud.settle()
        self.assert_as_then(snapshot)

    def test_volume_with_it_grows_when_it_can(self):
        self.be_impatient()
        self.take()
        volume = self.cloud.refresh(self.volume)
        extend = self.cloud.movers[base.B].extend
        if self.thin:
            extend(self.ctxt, volume, 2 * units.Gi)
            return
        error = self.assertRaises(exception.OriginArrives, extend, self.ctxt,
                                  volume, 2 * units.Gi)
        self.assertIn('before it has arrived', str(error))
        self.assert_reads(self.volume)
        self.cloud.settle()
        extend(self.ctxt, self.cloud.refresh(self.volume), 2 * units.Gi)

    def test_report_knows_all_that_belongs_to_it(self):
        snapshot = self.take()
        self.make(base.B, snapshot)
        for delete in (lambda: self.delete(snapshot), None):
            for host in (base.A, base.B):
                self.assertEqual(set(), self.cloud.report(host).found())
            if delete:
                delete()

    def test_it_is_not_unmanaged_before_it_has_arrived(self):
        snapshot = self.take()
        custodian = self.cloud.running[base.B].custodian
        self.assertRaises(exception.SnapshotArrives,
                          custodian.unmanage_snapshot, self.ctxt, snapshot)

    def test_its_space_is_counted_once(self):
        self.take()
        self.assertEqual(2, rows.allocated(self.ctxt, base.B))

    def test_rest_of_it_is_reserved_in_the_pool(self):
        snapshot = self.take()
        label = copies.Label(self.node.volumes.disks[
            rows.snapshot_copy_name(snapshot.id)].tags)
        if self.thin:
            self.assertEqual(12 * 64 * units.Mi, label.needs(0))


class ThinArrivingTest(ArrivingTest):

    thin = True


class HydratorArrivingTest(ArrivingTest):

    data_path = 'hydrator'

    def test_volume_goes_on_arriving_where_nobody_ends_the_pause(self):
        # The service has died in it, and no guest reads or writes.
        self.node.hydrators.pause(self.cloud.row(self.volume).name, 20)
        self.cloud.settle()
        self.assertIsNone(self.state())
        self.assert_reads(self.volume)


class ThinHydratorArrivingTest(ThinArrivingTest):

    data_path = 'hydrator'


class FaultTestCase(test_copier.CopierTestCase, test_keeper.FaultTestCase):
    """Each call in a history with a volume that arrives goes wrong once."""

    least = 20

    def setUp(self):
        super().setUp()
        self.forget_volume(self.volume)

    def begin(self):
        volume = self.cloud.create_volume()
        self.cloud.move(volume, to=base.B)
        self.cloud.watch()
        self.cloud.nodes[base.B].hydrate(most=3)
        self.cloud.write(volume, 9, 'written on the way')
        return volume

    def come_back(self):
        """What has died, and lost its power if that is tried, is back."""
        for host in tuple(self.cloud.down):
            if self.power:
                self.cloud.nodes[host].cut_power()
            self.cloud.boot(host)
            self.cloud.watch()
            self.cloud.watch()


class FaultTest(FaultTestCase):
    """A snapshot is taken, arrives and is deleted."""

    parts = ('take', 'arrive', 'delete')

    def live(self):
        volume = self.begin()
        with self.part('take'):
            snapshot = self.take(volume)
        self.come_back()
        self.cloud.write(volume, 3, 'written later')
        self.judge(snapshot, broken_off='creating')
        with self.part('arrive'):
            self.cloud.hydrate()
            self.cloud.watch()
            self.cloud.watch()
        self.judge(snapshot)
        with self.part('delete'):
            gone = self.delete(snapshot, volume)
            self.cloud.watch()
        self.come_back()
        if not gone:
            self.assertTrue(self.delete(snapshot, volume))
        self.cloud.settle()
        if self.plan:
            self.assert_whole(volume)
        self.forget_volume(volume)

    def judge(self, snapshot, broken_off=None):
        self.come_back()
        if not snapshot.deleted:
            snapshot.refresh()
            if snapshot.status == broken_off:
                self.change(snapshot, 'error')
            self.assert_as_then(snapshot)

    def test_snapshot_is_right_or_not_there(self):
        self.try_calls()


class HydratorFaultTest(FaultTest):

    data_path = 'hydrator'


class ThinFaultTest(FaultTest):

    thin = True


class CloneFaultTest(FaultTestCase):
    """A clone is made, and arrives."""

    parts = ('clone', 'arrive')
    there = base.B

    def live(self):
        volume = self.begin()
        with self.part('clone'):
            clone = self.make(self.there, volume)
        self.come_back()
        self.cloud.write(volume, 3, 'written later')
        with self.part('arrive'):
            for _time in range(2):
                self.cloud.hydrate()
                self.cloud.watch()
        self.cloud.settle(power=self.power)
        self.assert_reads(volume)
        if clone.status == 'available':
            self.assert_content(clone)
        self.delete_volume(clone)
        self.cloud.settle()
        self.cloud.watch()
        if self.plan:
            self.assert_whole(volume)
        self.forget_volume(volume)

    def test_clone_is_right_or_not_there(self):
        self.try_calls()


class CloneElsewhereFaultTest(CloneFaultTest):

    there = base.C


class CloneDeletedFaultTest(FaultTestCase):
    """A clone is deleted, and what it reads, before anything has arrived."""

    parts = ('delete',)
    least = 10

    def live(self):
        volume = self.begin()
        clone = self.make(base.C, volume)
        self.assertEqual('available', clone.status)
        with self.part('delete'), self.asked(clone, 'error_deleting'):
            self.delete_volume(clone)
            for _period in range(3):
                self.cloud.watch()
        self.come_back()
        if not self.cloud.row(clone).status.startswith('deleted'):
            self.delete_volume(clone)
        for _period in range(6):
            self.cloud.watch()
        self.assertEqual([], rows.snapshots_arriving(self.ctxt, volume.id))
        self.assertEqual([table.State.MIGRATING], [
            move.state for move in rows.for_volume(self.ctxt, volume.id)])
        self.assert_reads(volume)
        self.cloud.settle()
        if self.plan:
            self.assert_whole(volume)
        self.forget_volume(volume)

    def test_nothing_is_left_of_either(self):
        self.try_calls()
