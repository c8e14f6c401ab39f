# SPDX-License-Identifier: Apache-2.0

from unittest import mock

from cinder import exception as cinder_exception
from cinder import objects
from cinder.tests.unit import utils as cinder_test_utils
import ddt
from oslo_concurrency import lockutils
from oslo_utils import units
import tenacity

from cinder_localstor.datapath import copies
from cinder_localstor.datapath import handles
from cinder_localstor.datapath import snapshots
from cinder_localstor.datapath import wipes
from cinder_localstor import exception
from cinder_localstor.moves import exports
from cinder_localstor.moves import facts
from cinder_localstor.moves import table
from cinder_localstor.node import interface
from cinder_localstor.node import simulated
from cinder_localstor import rows
from tests.unit import base
from tests.unit.moves import test_keeper


class CopierTestCase(test_keeper.KeeperTestCase):
    """Volumes that are made of others, as Cinder's manager has them made."""

    def new_row(self, host, size=1, **fields):
        """What the scheduler leaves to a node."""
        return cinder_test_utils.create_volume(
            self.ctxt, host=host + '#local', size=size, status='creating',
            **fields)

    def make(self, host, of, size=1):
        """A new volume on a node, of a snapshot or a volume."""
        volume = self.new_row(host, size)
        copier = self.cloud.running[host].copier
        snapshot = isinstance(of, objects.Snapshot)
        volume.status = 'error'
        try:
            volume.update((copier.from_snapshot if snapshot
                           else copier.from_volume)(self.ctxt, volume, of))
            volume.status = 'available'
            self.cloud.content[volume.id] = {
                **dict.fromkeys(range(16 * size), ''),
                **self.cloud.content[of.id]}
        except simulated.Crash as crash:
            self.cloud.lose(crash.host)
        except cinder_exception.CinderException as error:
            self.error = error
        volume.save()
        return volume

    def arrives(self, volume):
        """States of what a volume arrives by."""
        return [move.state for move in rows.for_volume(self.ctxt, volume.id)]

    def assert_made(self, *volumes):
        """All of it is there, now and when it has arrived, and no more."""
        for _time in range(2):
            for volume in volumes:
                self.assert_content(volume)
            self.cloud.settle()
        self.assertEqual([], self.cloud.leftovers([self.volume, *volumes]))

    def assert_content(self, volume):
        there = self.cloud.read(volume)
        self.assertEqual(
            {number: content for number, content
             in self.cloud.content[volume.id].items() if content},
            {number: content for number, content in there.items()
             if content and content != simulated.OLD_CONTENT})

    def delete_volume(self, volume):
        """As the driver does it; whether it is gone."""
        volume = self.cloud.refresh(volume)
        mover = self.cloud.movers[self.cloud.host_of(volume)]
        if mover.discard(self.ctxt, volume.id):
            mover._handles.delete(self.cloud.refresh(volume).name)
        volume.destroy()


@ddt.ddt
class FromSnapshotTest(CopierTestCase):

    @ddt.data(base.A, base.B)
    def test_it_can_be_used_at_once_on_any_node(self, host):
        snapshot = self.take()
        self.cloud.write(self.volume, 3, 'after the snapshot')
        volume = self.make(host, snapshot)
        self.assert_content(volume)
        self.assertEqual(
            [] if self.thin and host == base.A else [table.State.MIGRATING],
            self.arrives(volume))
        self.cloud.write(volume, 5, 'in the new volume')
        self.assert_made(volume)
        self.assert_as_then(snapshot)
        self.assert_reads(self.volume)

    @ddt.data(base.A, base.B)
    def test_a_larger_one_is_written_behind_the_snapshots_end(self, host):
        volume = self.make(host, self.take(), size=2)
        self.assertEqual(2 * units.Gi, self.cloud.nodes[host].volumes.disks[
            self.cloud.row(volume).name].size)
        self.cloud.write(volume, 20, 'behind the end of the snapshot')
        self.assert_made(volume)

    @ddt.data(base.A, base.B)
    def test_disks_may_all_have_large_blocks(self, host):
        for node in self.cloud.nodes.values():
            node.volumes.logical_block = 4096
        self.assert_made(self.make(host, self.take()))

    @ddt.data(None, '00000000-0000-0000-0000-000000000001')
    def test_encrypted_one_waits_for_its_source(self, key):
        snapshot = self.take()
        new_row = self.new_row
        self.new_row = lambda *arguments: new_row(
            *arguments, encryption_key_id=key)
        move, = rows.for_volume(self.ctxt, self.make(base.B, snapshot).id)
        self.assertEqual(bool(key), move.transfer.waits)

    def test_it_is_not_made_where_blocks_are_larger(self):
        snapshot = self.take()
        self.cloud.nodes[base.B].volumes.logical_block = 4096
        self.make(base.B, snapshot)
        self.assertIsInstance(self.error, exception.BlockSizesDiffer)
        self.assertIn('4096', str(self.error))

    def test_what_stays_on_its_node_is_never_exported(self):
        for move in [move for host in (base.A, base.B)
                     for move in rows.for_volume(self.ctxt, self.make(
                         host, self.take()).id)]:
            described = move.transfer
            self.assertEqual(
                described.destination_host == base.B,
                exports.Exports(base.A, None, None).serves_from_here(move))

    def test_snapshot_is_read_over_what_the_node_knows(self):
        self.cloud.nodes[base.B].initiator.known = (interface.NVME,
                                                    interface.ISCSI)
        volume = self.make(base.B, self.take())
        move, = rows.for_volume(self.ctxt, volume.id)
        self.assertEqual(interface.NVME, move.transfer.export.transport)
        self.assert_made(volume)

    def test_several_at_once_read_the_same_snapshot(self):
        snapshot = self.take()
        self.assert_made(*[self.make(host, snapshot) for host in
                           (base.A, base.B, base.A, base.B)])
        self.assert_as_then(snapshot)

    @ddt.data(base.A, base.B)
    def test_snapshot_that_is_deleted_meanwhile_goes_at_the_end(self, host):
        snapshot = self.take()
        volumes = [self.make(host, snapshot) for _number in range(2)]
        self.assertTrue(self.delete(snapshot))
        self.assert_made(*volumes)

    def test_source_stays_as_long_as_another_copy_reads_it(self):
        snapshot = self.take()
        volumes = [self.make(base.B, snapshot) for _number in range(2)]
        self.assertTrue(self.delete(snapshot))
        first, second = [move for volume in volumes
                         for move in rows.for_volume(self.ctxt, volume.id)]
        self.assertTrue(self.source_stays(first))
        second = rows.change_state(self.ctxt, second,
                                   table.State.COMPLETING.value)
        self.assertTrue(self.source_stays(first))
        rows.record_done(self.ctxt, second, ('unexport_source',))
        self.assertFalse(self.source_stays(first))

    @ddt.data(base.A, base.B)
    def test_report_knows_all_that_belongs_to_it(self, host):
        snapshot = self.take()
        self.make(host, snapshot)
        for delete in (lambda: self.delete(snapshot),
                       lambda: self.delete_volume(self.volume), None):
            for each in (base.A, base.B):
                self.assertEqual(set(), self.cloud.report(each).found())
            if delete:
                delete()
        if self.thin and host == base.A:
            return
        backend, = self.cloud.report(base.A).backends
        self.assertIn((rows.snapshot_copy_name(snapshot.id),
                       copies.Role.READ),
                      [(entry.name, entry.role) for entry in backend.copies])

    def source_stays(self, move):
        look = self.cloud.running[base.B].executor.look(self.ctxt, [move])
        return facts.Facts(move, look).holds(table.Fact.SOURCE_STAYS)

    @ddt.data(base.A, base.B)
    def test_volume_of_the_snapshot_can_be_deleted_with_it(self, host):
        snapshot = self.take()
        volume = self.make(host, snapshot)
        self.assertTrue(self.delete(snapshot))
        self.delete_volume(self.volume)
        self.assert_content(volume)
        self.cloud.settle()
        self.assert_content(volume)
        # The scheduler looks at the wipes once a period.
        self.cloud.watch()
        self.assertEqual([], self.cloud.leftovers([volume]))

    def test_snapshot_lies_where_the_volume_has_been(self):
        snapshot = self.take()
        self.cloud.move(self.volume)
        volume = self.make(base.B, snapshot)
        self.assert_made(volume)

    @ddt.data(base.A, base.B)
    def test_it_moves_on_while_it_arrives(self, host):
        volume = self.make(host, self.take())
        for there in (base.C, base.A, base.B):
            if self.cloud.host_of(volume) != there:
                self.cloud.move(volume, to=there)
                self.cloud.write(volume, 7, 'on ' + there)
        self.assert_made(volume)

    @ddt.data(base.A, base.B)
    def test_it_is_deleted_while_it_arrives(self, host):
        snapshot = self.take()
        volume = self.make(host, snapshot)
        self.cloud.write(volume, 5, 'by a guest, and to be wiped')
        self.delete_volume(volume)
        self.cloud.settle()
        self.assertEqual([], self.cloud.leftovers([self.volume]))
        self.assert_as_then(snapshot)

    @ddt.data(base.A, base.B)
    def test_restart_of_a_node_while_it_arrives(self, host):
        snapshot = self.take()
        volume = self.make(base.B, snapshot)
        self.cloud.write(volume, 5, 'in the new volume')
        self.restart(host)
        self.cloud.watch()
        self.assert_made(volume)
        self.assert_as_then(snapshot)

    def test_service_that_dies_in_mid_creation_leaves_nothing(self):
        snapshot = self.take()
        faults = self.cloud.nodes[base.B].faults
        faults.plan = simulated.Call('SimulatedDeviceMapper.create', 2,
                                     simulated.Fault.CRASH)
        volume = self.make(base.B, snapshot)
        self.assertEqual([table.State.CREATING], self.arrives(volume))
        self.cloud.settle()
        self.assertEqual([], self.arrives(volume))
        self.assertEqual([], self.cloud.leftovers([self.volume]))

    @ddt.data(base.A, base.B)
    def test_it_arrives_before_the_row_of_a_deleted_snapshot_is_gone(self,
                                                                     host):
        snapshot = self.take()
        volume = self.make(host, snapshot)
        self.change(snapshot, 'deleting')
        self.keeper(self.volume).delete(self.ctxt, snapshot)
        self.cloud.settle()
        snapshot.destroy()
        self.assert_made(volume)

    @ddt.data(base.A, base.B)
    def test_nothing_is_made_of_what_is_being_deleted(self, host):
        snapshot = self.take()
        self.change(snapshot, 'deleting')
        volume = self.make(host, snapshot)
        self.assertIsInstance(self.error, exception.SnapshotLost)
        if not self.thin:
            # The service has died in the middle of it.
            self.cloud.nodes[base.A].volumes.split_snapshot(
                rows.snapshot_copy_name(snapshot.id))
            self.change(snapshot, 'available')
            volume = self.make(host, snapshot)
            self.assertIn('is invalid', str(self.error))
        self.assertEqual([], self.arrives(volume))

    def test_volume_that_is_deleted_while_it_is_made_leaves_nothing(self):
        snapshot = self.take()
        volume = self.new_row(base.B)
        build = handles.Handles.create_on_engine

        def build_late(*arguments):
            build(*arguments)
            volume.destroy()

        with mock.patch.object(handles.Handles, 'create_on_engine',
                               build_late):
            self.assertRaises(
                exception.MoveChanged,
                self.cloud.running[base.B].copier.from_snapshot, self.ctxt,
                volume, snapshot)
        self.cloud.settle()
        self.assertEqual([], self.cloud.leftovers([self.volume]))
        self.assert_as_then(snapshot)

    @ddt.data(base.A, base.B)
    def test_volume_that_is_made_twice_is_there_once(self, host):
        snapshot = self.take()
        volume = self.make(host, snapshot)
        volume.update(self.cloud.running[host].copier.from_snapshot(
            self.ctxt, volume, snapshot))
        volume.save()
        self.assert_made(volume)

    def test_copy_that_is_not_looked_after_at_once_is_made(self):
        snapshot = self.take()
        with mock.patch.object(
                self.cloud.running[base.B].scheduler, 'look_after',
                side_effect=exception.LocalStorException(reason='later')):
            volume = self.make(base.B, snapshot)
        self.assertEqual('available', volume.status)
        self.assert_made(volume)

    def test_peer_is_asked_whether_it_knows_of_copies(self):
        volume = self.make(base.B, self.take())
        with mock.patch.object(base.Peers, 'examine',
                               side_effect=exception.PeerFailed(
                                   peer=base.C, about='the volume',
                                   step='examine', reason='too old')) as ask:
            self.assertRaises(exception.PeerFailed, self.cloud.move, volume,
                              base.C)
        self.assertIs(True, ask.call_args.kwargs['is_copy'])

    def test_failure_is_recorded_before_it_is_told(self):
        snapshot = self.take()
        self.cloud.nodes[base.B].volumes.total = units.Mi
        with mock.patch.object(self.cloud.running[base.B].scheduler,
                               'look_after'):
            volume = self.make(base.B, snapshot)
        self.assertEqual([table.State.UNDOING], self.arrives(volume))

    def test_without_space_there_is_none(self):
        snapshot = self.take()
        self.cloud.nodes[base.B].volumes.total = units.Mi
        volume = self.make(base.B, snapshot)
        self.assertIsInstance(self.error, exception.NotEnoughSpace)
        self.cloud.settle()
        self.assertEqual([], self.arrives(volume))
        self.assertEqual([], self.cloud.leftovers([self.volume]))

    def test_node_of_the_snapshot_is_down(self):
        snapshot = self.take()
        self.cloud.down.add(base.A)
        self.make(base.B, snapshot)
        self.assertIsInstance(self.error, exception.PeerDown)

    def test_snapshot_that_was_never_taken(self):
        self.make(base.A, self.cloud.snapshot_row(self.volume))
        self.assertIsInstance(self.error, exception.SnapshotLost)

    def test_snapshot_that_has_lost_what_it_had(self):
        snapshot = self.take()
        name = rows.snapshot_copy_name(snapshot.id)
        self.cloud.nodes[base.A].volumes.disks[name].is_valid = False
        for host in (base.A, base.B):
            volume = self.make(host, snapshot)
            self.assertIn('is invalid', str(self.error))
            self.assertEqual([], self.arrives(volume))


@ddt.ddt
class CloneTest(CopierTestCase):

    def test_it_holds_what_its_volume_held_at_that_moment(self):
        volume = self.make(base.A, self.volume)
        self.cloud.write(self.volume, 3, 'after the clone')
        self.cloud.write(volume, 4, 'in the clone')
        self.assert_made(volume)
        self.assert_reads(self.volume)

    def test_its_volume_moves_on(self):
        volume = self.make(base.A, self.volume)
        self.cloud.move(self.volume)
        self.assert_made(volume)
        self.assert_reads(self.volume)

    def test_its_volume_is_deleted(self):
        volume = self.make(base.A, self.volume)
        self.delete_volume(self.volume)
        self.assert_content(volume)
        if not self.thin:
            self.assert_not_wiped(self.volume)
        self.cloud.settle()
        self.assert_content(volume)
        self.cloud.watch()
        self.assertEqual([], self.cloud.leftovers([volume]))

    def assert_not_wiped(self, volume):
        """The logical volume of a deleted volume has what is read of it."""
        self.cloud.watch()
        disk, = [disk for name, disk
                 in self.cloud.nodes[base.A].volumes.disks.items()
                 if wipes.former_name(name) == volume.name]
        self.assertLessEqual(self.cloud.content[volume.id].items(),
                             disk.regions.items())

    def test_no_index_is_missed_while_what_was_read_is_wiped(self):
        self.patch('cinder_localstor.datapath.wipes.Wipes.wipe')
        volume = self.make(base.A, self.volume)
        for _time in range(3):
            self.cloud.hydrate()
            self.cloud.watch()
        self.assertEqual([] if self.thin else [table.State.COMPLETING],
                         self.arrives(volume))
        with mock.patch.object(rows, 'for_host') as search:
            self.cloud.watch()
        search.assert_not_called()

    def test_clones_of_clones(self):
        first = self.make(base.A, self.volume)
        self.cloud.settle()
        second = self.make(base.A, first)
        self.delete_volume(first)
        self.assert_made(second)

    def test_volume_that_has_grown_since_is_not_cloned(self):
        self.cloud.movers[base.A].extend(self.ctxt, self.volume, 2 * units.Gi)
        grown = self.cloud.refresh(self.volume)
        grown.size = 2
        grown.save()
        volume = self.make(base.A, self.volume)
        self.assertIsInstance(self.error, exception.VolumeHasGrown)
        self.assertEqual([], self.arrives(volume))

    def test_its_volume_grows_when_all_has_arrived(self):
        if self.thin:
            self.skipTest('thin ones share, and grow at any time')
        self.patch('tenacity.stop_after_delay',
                   return_value=tenacity.stop_after_attempt(1))
        volume = self.make(base.A, self.volume)
        mover = self.cloud.movers[base.A]
        error = self.assertRaises(exception.OriginIsRead, mover.extend,
                                  self.ctxt, self.volume, 2 * units.Gi)
        self.assertIn(self.volume.name, str(error))
        self.assert_made(volume)
        mover.extend(self.ctxt, self.volume, 2 * units.Gi)

    def test_its_volume_waits_for_what_a_failed_clone_has_left(self):
        # Its user has no snapshot, so must not be told to delete one.
        if self.thin:
            self.skipTest('thin ones share, and grow at any time')
        self.patch('tenacity.stop_after_delay',
                   return_value=tenacity.stop_after_attempt(1))
        with (mock.patch.object(
                handles.Handles, 'create_on_engine',
                side_effect=exception.LocalStorException(reason='no')),
              mock.patch.object(self.cloud.running[base.A].scheduler,
                                'look_after')):
            volume = self.make(base.A, self.volume)
        with mock.patch.object(
                snapshots.Snapshots, 'delete',
                side_effect=exception.LocalStorException(reason='busy')):
            self.cloud.watch()
        self.assertEqual([table.State.UNDOING], self.arrives(volume))
        device = self.cloud.nodes[base.A].device_mapper.nodes[
            handles.handle_name(self.volume.name)]
        device.open_count = 1
        self.assertRaises(exception.OriginIsRead,
                          self.cloud.movers[base.A].extend, self.ctxt,
                          self.volume, 2 * units.Gi)
        self.cloud.settle()
        self.cloud.movers[base.A].extend(self.ctxt, self.volume, 2 * units.Gi)

    def test_volume_that_is_still_made_grows_as_soon_as_it_can(self):
        # As Cinder does it: what it has downloaded, it clones for others.
        self.patch('tenacity.stop_after_delay',
                   return_value=tenacity.stop_after_attempt(1))
        self.patch('cinder_localstor.moves.gate.SOON', 0)
        volume = self.make(base.A, self.volume)
        periods = []

        def pass_by(_seconds):
            periods.append(self.arrives(volume))
            self.cloud.hydrate()
            self.cloud.watch()
        self.patch('tenacity.nap.time').sleep.side_effect = pass_by
        self.volume.refresh()
        self.volume.status = 'downloading'
        self.cloud.movers[base.A].extend(self.ctxt, self.volume, 2 * units.Gi)
        if not self.thin:
            self.assertIn([table.State.MIGRATING], periods)
        self.assertEqual(2 * units.Gi, self.cloud.nodes[base.A].volumes.disks[
            self.volume.name].size)

    def test_volume_that_is_copied_keeps_its_old_copy_for_so_long(self):
        self.cloud.nodes[base.A].device_mapper.hydrate = lambda most: None
        volume = self.make(base.A, self.volume)
        self.cloud.move(self.volume)
        for _time in range(4):
            self.cloud.hydrate()
            self.cloud.watch()
        self.assertEqual([] if self.thin else [table.State.KEEPING],
                         self.arrives(self.volume))
        self.assert_content(volume)
        self.assert_reads(self.volume)
        del self.cloud.nodes[base.A].device_mapper.hydrate
        self.assert_made(volume)

    def test_what_may_yet_be_written_elsewhere_is_not_cloned(self):
        self.cloud.move(self.volume)
        self.patch('tenacity.stop_after_delay',
                   return_value=tenacity.stop_after_attempt(1))
        volume = self.make(base.B, self.volume)
        self.assertIsInstance(self.error, exception.VolumeIsMoving)
        self.assertIn('clone it', str(self.error))
        self.assertEqual([], self.arrives(volume))

    def test_volume_that_has_left_is_cloned_from_where_it_is(self):
        volume = self.cloud.refresh(self.volume)
        self.cloud.move(self.volume)
        self.cloud.settle()
        self.assert_made(self.make(base.A, volume))

    # Volumes of other nodes

    def test_clone_on_another_node_can_be_used_at_once(self):
        volume = self.make(base.B, self.volume, 2)
        self.assertEqual([table.State.MIGRATING], self.arrives(volume))
        self.cloud.write(self.volume, 0, 'later')
        self.assert_made(volume)

    def test_report_knows_what_a_clone_on_another_node_reads(self):
        volume = self.make(base.B, self.volume)
        for host in (base.A, base.B):
            self.assertEqual(set(), self.cloud.report(host).found())
        self.assertEqual(1, len(self.cloud.nodes[base.A].target.exported()))
        self.assert_made(volume)

    def test_clones_on_several_nodes_read_one_volume(self):
        self.assert_made(*(self.make(host, self.volume)
                           for host in (base.B, base.C, base.B)))

    def test_volume_that_is_cloned_elsewhere_moves_on(self):
        self.cloud.nodes[base.B].device_mapper.hydrate = lambda most: None
        volume = self.make(base.B, self.volume)
        self.cloud.move(self.volume, base.C)
        for _time in range(4):
            self.cloud.hydrate()
            self.cloud.watch()
        # A thin snapshot needs no origin.
        self.assertEqual([] if self.thin else [table.State.KEEPING],
                         self.arrives(self.volume))
        del self.cloud.nodes[base.B].device_mapper.hydrate
        self.assert_made(volume)

    def test_volume_that_is_cloned_elsewhere_is_deleted(self):
        volume = self.make(base.B, self.volume)
        self.delete_volume(self.volume)
        self.assert_content(volume)
        self.cloud.settle()
        self.assert_content(volume)
        self.assertEqual([], self.cloud.leftovers([volume]))

    def assert_not_made(self, volume, kind):
        self.assertEqual(kind.__name__, self.error.kind)
        self.cloud.settle()
        self.volume.refresh()
        self.delete_volume(volume)
        self.assertEqual([], self.cloud.leftovers([self.volume]))

    def test_what_may_yet_be_written_elsewhere_is_not_cloned_there(self):
        self.cloud.move(self.volume)
        self.patch('tenacity.stop_after_delay',
                   return_value=tenacity.stop_after_attempt(1))
        self.assert_not_made(self.make(base.A, self.volume),
                             exception.VolumeIsMoving)

    def change_before_it_is_taken(self, change):
        run = base.Peers.run

        def and_change(peers, peer, move, steps, patient=True):
            if table.TAKE_SNAPSHOT.name in steps:
                change()
            return run(peers, peer, move, steps, patient)
        self.patch('tests.unit.base.Peers.run', and_change)

    def test_volume_that_grows_meanwhile_is_not_cloned_elsewhere(self):
        def grow():
            self.volume.refresh()
            self.volume.size = 2
            self.volume.save()
        self.change_before_it_is_taken(grow)
        volume = self.make(base.B, self.volume)
        self.volume.size = 1
        self.volume.save()
        self.assert_not_made(volume, exception.VolumeHasChanged)

    def test_volume_that_comes_back_meanwhile_is_not_cloned_elsewhere(self):
        # As another copy: what the first one was, it is no more.
        def go_and_come_back():
            self.patch('tests.unit.base.Peers.run', run)
            for host in (base.B, base.A):
                self.cloud.move(self.volume, host)
                for _time in range(4):
                    self.cloud.hydrate()
                    self.cloud.watch()
        run = base.Peers.run
        self.change_before_it_is_taken(go_and_come_back)
        volume = self.make(base.B, self.volume)
        self.assert_not_made(volume, exception.VolumeHasChanged)

    def test_nothing_happens_to_a_volume_while_it_is_cloned_elsewhere(self):
        create = snapshots.Snapshots.create
        held = []

        def look_and_create(*arguments):
            lock = lockutils.internal_lock(
                'localstor-volume-' + self.volume.id)
            held.append(not lock.acquire(blocking=False))
            return create(*arguments)
        self.patch('cinder_localstor.datapath.snapshots.Snapshots.create',
                   look_and_create)
        self.assert_made(self.make(base.B, self.volume))
        self.assertEqual([True], held)


class ThinFromSnapshotTest(FromSnapshotTest):

    thin = True

    def test_without_space_there_is_none(self):
        self.skipTest('a pool is too full: see test_destination')

    def test_failure_is_recorded_before_it_is_told(self):
        self.skipTest('a pool is too full: see test_destination')

    def test_snapshot_that_has_lost_what_it_had(self):
        self.skipTest('no thin one is ever full')


class HydratorFromSnapshotTest(FromSnapshotTest):

    data_path = 'hydrator'


class ThinCloneTest(CloneTest):

    thin = True

    def test_full_pool_takes_no_more(self):
        self.cloud.nodes[base.A].volumes.pool_metadata = 1.0
        volume = self.make(base.A, self.volume)
        self.assertIsInstance(self.error, exception.NotEnoughSpace)
        self.assertIn(volume.name, str(self.error))
        self.assertEqual([], self.cloud.leftovers([self.volume]))


class FaultTestCase(CopierTestCase, test_keeper.FaultTestCase):
    """Each call in which a copy has a part goes wrong once, in each way."""

    host = base.B
    parts = ('make', 'arrive')
    least = 20

    def setUp(self):
        super().setUp()
        self.of = self.prepare()

    def prepare(self):
        return self.take()

    def live(self):
        """Whatever goes wrong, there is a whole volume or none."""
        with self.part('make'):
            volume = self.make(self.host, self.of)
        self.settle_after('make')
        with self.part('arrive'):
            for _time in range(4):
                self.cloud.watch()
                self.cloud.hydrate()
        self.settle_after('arrive')
        self.cloud.settle(power=self.power)
        volumes = [self.volume]
        if volume.status == 'available':
            self.assert_content(volume)
            volumes.append(volume)
        else:
            self.delete_volume(volume)
            self.cloud.settle()
        self.cloud.watch()
        self.assertEqual([], self.cloud.leftovers(volumes))
        self.assert_reads(self.volume)
        if volume.status == 'available':
            self.delete_volume(volume)
            self.cloud.watch()
        if not self.plan:
            self.assertEqual('available', volume.status)

    def settle_after(self, part):
        if self.plan and self.plan[0] == part:
            self.cloud.settle(power=self.power)


class FaultTest(FaultTestCase):

    def test_volume_is_whole_or_not_there(self):
        self.try_calls()


class ThinFaultTest(FaultTest):

    thin = True


class CloneFaultTest(FaultTest):

    host = base.A

    def prepare(self):
        return self.volume


class CloneElsewhereFaultTest(CloneFaultTest):

    host = base.B
