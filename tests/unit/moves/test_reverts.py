# SPDX-License-Identifier: Apache-2.0

from unittest import mock

from cinder import exception as cinder_exception
from cinder import objects
import ddt
from oslo_utils import units
from oslo_utils import uuidutils
import tenacity

from cinder_localstor.datapath import handles
from cinder_localstor import exception
from cinder_localstor.moves import abandon
from cinder_localstor.moves import table
from cinder_localstor.node import simulated
from cinder_localstor import rows
from tests.unit import base
from tests.unit.moves import test_copier
from tests.unit.moves import test_keeper


class RevertTestCase(test_copier.CopierTestCase):
    """Volumes that are reverted to their snapshots, as the driver does it."""

    def leave(self):
        """Whoever had the volume has it no more."""
        for row in objects.VolumeAttachmentList.get_all_by_volume_id(
                self.ctxt, self.volume.id):
            row.destroy()

    def revert(self, snapshot):
        self.leave()
        volume = self.cloud.refresh(self.volume)
        copier = self.cloud.running[self.cloud.host_of(volume)].copier
        self.change(snapshot, 'restoring')
        self.change(volume, 'reverting')
        try:
            copier.revert(self.ctxt, volume, snapshot)
        finally:
            self.change(volume, 'available')
        self.change(snapshot, 'available')
        self.cloud.content[volume.id] = dict(self.cloud.content[snapshot.id])

    def states(self):
        return [move.state for move
                in rows.for_volume(self.ctxt, self.volume.id)]

    def come_to(self, host):
        if self.cloud.host_of(self.volume) != host:
            self.cloud.move(self.volume, to=host)
            self.cloud.settle()

    def assert_as_it_was(self, snapshot):
        """A revert that failed has changed nothing, and leaves nothing."""
        self.change(snapshot, 'available')
        for _time in range(2):
            self.assert_reads(self.volume)
            self.assert_as_then(snapshot)
            self.cloud.settle()
        self.assertEqual([], self.states())
        self.assertEqual([], self.cloud.leftovers([self.volume]))


@ddt.ddt
class RevertTest(RevertTestCase):

    def settle_and_delete(self, snapshot):
        self.assert_reads(self.volume)
        self.assert_as_then(snapshot)
        self.cloud.write(self.volume, 6, 'after it was reverted')
        self.cloud.settle()
        self.assert_reads(self.volume)
        self.assert_as_then(snapshot)
        self.assertTrue(self.delete(snapshot))
        self.cloud.settle()
        self.assert_whole()

    @ddt.data(base.A, base.B)
    def test_volume_is_as_then_at_once_wherever_it_is_by_now(self, host):
        snapshot = self.take()
        self.come_to(host)
        self.cloud.write(self.volume, 3, 'not wanted')
        self.revert(snapshot)
        self.assertEqual(host, self.cloud.host_of(self.volume))
        self.settle_and_delete(snapshot)

    def test_what_it_was_is_kept_for_its_thick_snapshots_alone(self):
        snapshot = self.take()
        self.revert(snapshot)
        self.cloud.settle()
        self.assertEqual([] if self.thin else [table.State.KEEPING],
                         self.states())
        # It counts for the scheduler, too: volume, snapshot and what is kept.
        self.assertEqual(2 if self.thin else 3,
                         rows.allocated(self.ctxt, base.A))
        self.revert(snapshot)
        self.cloud.settle()
        self.assertEqual([] if self.thin else [table.State.KEEPING],
                         self.states())
        self.assert_reads(self.volume)

    def test_it_is_reverted_again_and_moves_meanwhile(self):
        snapshot = self.take()
        for number, host in enumerate((base.A, base.B, base.C, base.A)):
            self.come_to(host)
            self.cloud.write(self.volume, number, 'not wanted')
            self.revert(snapshot)
            self.assert_reads(self.volume)
        self.settle_and_delete(snapshot)

    @ddt.data(base.A, base.B)
    def test_it_moves_on_while_it_arrives(self, host):
        snapshot = self.take()
        self.come_to(host)
        self.revert(snapshot)
        for there in (base.C, base.A, base.B):
            if self.cloud.host_of(self.volume) != there:
                self.cloud.move(self.volume, to=there)
                self.cloud.write(self.volume, 7, 'on ' + there)
                self.assert_reads(self.volume)
        self.settle_and_delete(snapshot)

    @ddt.data(base.A, base.B)
    def test_it_is_deleted_with_its_snapshot_while_it_arrives(self, host):
        snapshot = self.take()
        self.come_to(host)
        self.revert(snapshot)
        self.assertTrue(self.delete(snapshot))
        self.delete_volume(self.volume)
        self.cloud.settle()
        self.cloud.watch()
        self.assertEqual([], self.cloud.leftovers([]))

    @ddt.data(base.A, base.B)
    def test_restart_of_its_node_while_it_arrives(self, host):
        snapshot = self.take()
        self.come_to(host)
        self.revert(snapshot)
        self.cloud.write(self.volume, 5, 'after it was reverted')
        self.restart(host)
        self.cloud.watch()
        self.assert_reads(self.volume)
        self.cloud.settle()
        self.assert_reads(self.volume)
        self.assert_as_then(snapshot)

    @ddt.data(base.A, base.B)
    def test_report_knows_all_that_belongs_to_it(self, host):
        snapshot = self.take()
        self.come_to(host)
        self.revert(snapshot)
        for _time in range(2):
            for each in (base.A, base.B):
                self.assertEqual(set(), self.cloud.report(each).found())
            self.cloud.settle()

    def test_clone_that_reads_what_it_was_is_whole(self):
        snapshot = self.take()
        clone = self.make(base.B, self.volume)
        self.revert(snapshot)
        self.assert_content(clone)
        self.cloud.settle()
        self.assert_content(clone)
        self.assert_reads(self.volume)
        self.assertTrue(self.delete(snapshot))
        self.cloud.settle()
        self.assertEqual([], self.cloud.leftovers([self.volume, clone]))

    def assert_is_reverted_while_it_arrives(self, snapshot):
        self.cloud.write(self.volume, 3, 'not wanted')
        self.revert(snapshot)
        self.assertEqual([table.State.MIGRATING, table.State.MIGRATING],
                         sorted(self.states())[-2:])
        self.settle_and_delete(snapshot)

    def test_what_still_arrives_is_reverted_to_what_it_was_before(self):
        snapshot = self.take()
        self.cloud.move(self.volume)
        self.cloud.watch()
        self.assert_is_reverted_while_it_arrives(snapshot)

    def test_what_still_arrives_is_reverted_to_what_arrives_itself(self):
        self.cloud.move(self.volume)
        self.cloud.watch()
        snapshot = self.take()
        self.assert_is_reverted_while_it_arrives(snapshot)

    def test_what_still_arrives_by_a_chain_is_reverted(self):
        snapshot = self.take()
        self.cloud.move(self.volume)
        self.cloud.watch()
        self.cloud.move(self.volume, to=base.C)
        self.cloud.watch()
        self.assert_is_reverted_while_it_arrives(snapshot)

    def test_deleted_volume_takes_its_own_copy_with_it(self):
        # The move that it came by before ends later than its own.
        self.come_to(base.B)
        snapshot = self.take()
        self.come_to(base.A)
        self.cloud.move(self.volume)
        self.cloud.watch()
        self.revert(snapshot)
        with mock.patch.object(
                self.cloud.nodes[base.B].initiator, 'disconnect',
                side_effect=exception.LocalStorException(reason='hangs')):
            for _time in range(3):
                self.cloud.hydrate()
                self.cloud.watch()
            self.assertEqual([table.State.DISCARDING], [
                state for state in self.states()
                if state != table.State.KEEPING])
            self.assertTrue(self.delete(snapshot))
            self.cloud.watch()
            self.delete_volume(self.volume)
        self.cloud.settle()
        self.cloud.watch()
        self.assertEqual([], self.cloud.leftovers([]))

    def test_aborted_move_whose_node_is_away_is_in_nobodys_way(self):
        snapshot = self.take()
        former = handles.handle_name(self.volume.name)
        self.lose_destination_of_an_aborted_move()
        self.cloud.watch()
        self.revert(snapshot)
        self.assert_reads(self.volume)
        self.restart(base.A)
        self.assertNotIn(former,
                         self.cloud.nodes[base.A].device_mapper.nodes)
        self.cloud.watch()
        self.assert_reads(self.volume)

    def test_what_is_kept_on_a_lost_node_is_abandoned(self):
        if self.thin:
            self.skipTest('nothing is kept')
        snapshot = self.take()
        self.revert(snapshot)
        self.cloud.settle()
        self.come_to(base.B)
        self.cloud.down.add(base.A)
        self.patch('cinder_localstor.peers.directory.down',
                   return_value={base.A})
        for move in rows.for_volume(self.ctxt, self.volume.id):
            abandon.abandon(self.ctxt, move.move_id)
        for _time in range(3):
            self.cloud.watch()
        self.assertEqual([], self.states())
        self.assert_reads(self.volume)

    def test_its_snapshots_replace_nothing(self):
        snapshot = self.take()
        self.come_to(base.B)
        self.revert(snapshot)
        self.cloud.watch()
        self.take()
        self.assertEqual([''], [
            move.transfer.replaced for move
            in rows.snapshots_arriving(self.ctxt, self.volume.id)])

    def test_volume_that_has_become_another_copy_is_not_reverted(self):
        snapshot = self.take()
        self.come_to(base.B)
        build = handles.Handles.create_on_engine
        former = self.cloud.refresh(self.volume)._name_id

        def become(name_id):
            volume = self.cloud.refresh(self.volume)
            volume._name_id = name_id
            volume.save()

        def and_change(*arguments):
            build(*arguments)
            become(uuidutils.generate_uuid())
        with mock.patch.object(handles.Handles, 'create_on_engine',
                               and_change):
            self.assertRaises(exception.MoveChanged, self.revert, snapshot)
        become(former)
        self.cloud.settle()
        self.assertEqual([], self.cloud.leftovers([self.volume]))

    # What can't be done

    def refused(self, snapshot, kind):
        self.cloud.write(self.volume, 3, 'written later')
        error = self.assertRaises(kind, self.revert, snapshot)
        self.assert_as_it_was(snapshot)
        self.assertIs(False, rows.is_reverted(self.ctxt, self.volume.id))
        return str(error)

    def test_volume_that_is_open_is_as_it_was(self):
        snapshot = self.take()
        handle = self.cloud.nodes[base.A].device_mapper.nodes[
            self.volume.name + '-handle']
        handle.open_count = 1
        self.refused(snapshot, exception.VolumeInUse)

    def test_without_space_it_is_as_it_was(self):
        snapshot = self.take()
        volumes = self.cloud.nodes[base.A].volumes
        if self.thin:
            volumes.pool_metadata = 1.0
        else:
            volumes.total = 2 * units.Gi
        self.refused(snapshot, exception.NotEnoughSpace)

    def test_node_of_the_snapshot_is_down(self):
        snapshot = self.take()
        self.come_to(base.B)
        self.cloud.down.add(base.A)
        self.cloud.write(self.volume, 3, 'written later')
        self.assertRaises(exception.PeerDown, self.revert, snapshot)
        self.assert_reads(self.volume)

    def test_lost_snapshot_is_named(self):
        snapshot = self.cloud.snapshot_row(self.volume)
        error = self.assertRaises(exception.SnapshotLost, self.revert,
                                  snapshot)
        self.assertIn(snapshot.id, str(error))

    def test_nobody_gets_it_while_it_is_not_decided(self):
        snapshot = self.take()
        self.patch('tenacity.stop_after_delay',
                   return_value=tenacity.stop_after_attempt(1))
        refused = []
        create = self.cloud.running[base.A].executor.change_state

        def attach_first(*arguments, **options):
            refused.append(self.assertRaises(
                exception.VolumeIsMoving, self.cloud.movers[base.A].stay,
                self.ctxt, self.volume.id))
            return create(*arguments, **options)
        self.cloud.running[base.A].copier._executor.change_state = attach_first
        self.revert(snapshot)
        self.assertEqual(1, len(refused))


class ThinRevertTest(RevertTest):

    thin = True

    def test_on_its_own_node_nothing_is_copied(self):
        snapshot = self.take()
        self.cloud.write(self.volume, 3, 'not wanted')
        self.revert(snapshot)
        self.assertNotIn(table.State.MIGRATING, self.states())
        for _time in range(3):
            self.cloud.watch()
        self.assertEqual([], self.states())
        self.assert_reads(self.volume)


class HydratorRevertTest(RevertTest):

    data_path = 'hydrator'


class FaultTestCase(RevertTestCase, test_keeper.FaultTestCase):
    """Each call in which a revert has a part goes wrong once, in each way."""

    host = base.B
    parts = ('revert', 'arrive', 'delete')
    least = 30

    def setUp(self):
        super().setUp()
        self.forget_volume(self.volume)

    def live(self):
        """The volume is as then or as it was, and never anything else."""
        self.volume = self.cloud.create_volume()
        self.cloud.write(self.volume, 2, 'as then')
        snapshot = self.take_and_go()
        self.cloud.write(self.volume, 3, 'written later')
        before = dict(self.cloud.content[self.volume.id])
        with self.part('revert'):
            self.try_to_revert(snapshot)
        self.settle_after('revert')
        self.change(snapshot, 'available')
        reverted = bool(rows.is_reverted(self.ctxt, self.volume.id))
        self.cloud.content[self.volume.id] = dict(
            self.cloud.content[snapshot.id] if reverted else before)
        if not self.plan:
            self.assertTrue(reverted)
        self.assert_reads(self.volume)
        with self.part('arrive'):
            for _time in range(4):
                self.cloud.watch()
                self.cloud.hydrate()
        self.settle_after('arrive')
        self.cloud.settle()
        self.assert_reads(self.volume)
        self.assert_as_then(snapshot)
        with self.part('delete'):
            gone = self.delete(snapshot)
            self.cloud.watch()
        self.settle_after('delete')
        if not gone:
            self.assertTrue(self.delete(snapshot))
        self.cloud.settle(power=self.power)
        self.assert_whole()
        self.forget_volume(self.volume)

    def take_and_go(self):
        """A snapshot of a volume that is on the right node afterwards."""
        snapshot = self.take()
        self.come_to(self.host)
        return snapshot

    def try_to_revert(self, snapshot):
        try:
            self.revert(snapshot)
        except simulated.Crash as crash:
            self.cloud.lose(crash.host)
        except cinder_exception.CinderException:
            self.assertIs(False,
                          rows.is_reverted(self.ctxt, self.volume.id))

    def settle_after(self, part):
        if self.plan and self.plan[0] == part:
            self.cloud.settle(power=self.power)


class FaultTest(FaultTestCase):

    def test_volume_is_as_then_or_as_it_was(self):
        self.try_calls()


class OwnNodeFaultTest(FaultTest):

    host = base.A


class ThinOwnNodeFaultTest(OwnNodeFaultTest):

    thin = True
    least = 15


class ArrivingFaultTest(FaultTest):
    """A volume that still arrives is reverted to what it was before."""

    def take_and_go(self):
        snapshot = self.take()
        self.cloud.move(self.volume)
        self.cloud.watch()
        return snapshot


class ArrivingSnapshotFaultTest(FaultTest):
    """Its snapshot still arrives, too."""

    def take_and_go(self):
        self.cloud.move(self.volume)
        self.cloud.watch()
        return self.take()


class ThinArrivingSnapshotFaultTest(ArrivingSnapshotFaultTest):

    thin = True
