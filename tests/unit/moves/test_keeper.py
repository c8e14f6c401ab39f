# SPDX-License-Identifier: Apache-2.0

import contextlib
from unittest import mock

from cinder import exception as cinder_exception
import ddt
from oslo_utils import units

from cinder_localstor import exception
from cinder_localstor.moves import abandon
from cinder_localstor.moves import table
from cinder_localstor.node import simulated
from cinder_localstor import rows
from tests.unit import base
from tests.unit.moves import test_mover

# What Cinder's manager does with an error of the driver
REFUSALS = (cinder_exception.CinderException,)


class KeeperTestCase(test_mover.MoverTestCase):

    thin = False

    def setUp(self):
        super().setUp()
        if self.thin:
            for node in self.cloud.nodes.values():
                node.volumes.pool_size = 64 * units.Gi

    def keeper(self, volume):
        return self.cloud.running[self.cloud.host_of(volume)].keeper

    @contextlib.contextmanager
    def asked(self, snapshot, failure):
        """What the manager makes of it, but where its process dies."""
        try:
            yield
        except simulated.Crash as crash:
            self.cloud.down.add(crash.host)
        except REFUSALS:
            self.change(snapshot, failure)

    def change(self, snapshot, status):
        snapshot.refresh()
        snapshot.status = status
        snapshot.save()

    def take(self, volume=None):
        volume = volume or self.volume
        snapshot = self.cloud.snapshot_row(volume)
        with self.asked(snapshot, 'error'):
            snapshot.update(self.keeper(volume).create(self.ctxt, snapshot))
            self.change(snapshot, 'available')
        return snapshot

    def delete(self, snapshot, volume=None):
        """Whether a snapshot is gone."""
        self.change(snapshot, 'deleting')
        with self.asked(snapshot, 'error_deleting'):
            self.keeper(volume or self.volume).delete(self.ctxt, snapshot)
            snapshot.destroy()
            return True
        return False

    def assert_as_then(self, snapshot):
        snapshot.refresh()
        if snapshot.status == 'available':
            self.assertEqual(self.cloud.content[snapshot.id],
                             self.cloud.read_snapshot(snapshot))


@ddt.ddt
class KeptTest(KeeperTestCase):
    """A source copy that thick snapshots lie on."""

    def setUp(self):
        super().setUp()
        self.snapshot = self.take()
        self.cloud.move(self.volume)
        self.cloud.settle()
        self.node = self.cloud.nodes[base.A]

    def kept(self):
        return [move.transfer.source_name for move
                in rows.for_volume(self.ctxt, self.volume.id)
                if move.state == table.State.KEEPING]

    def test_it_has_no_handle_any_more_nor_after_a_restart(self):
        for _time in range(2):
            self.assertEqual({}, self.node.device_mapper.nodes)
            self.assertEqual([self.volume.name], self.kept())
            self.restart(base.A)
        self.assert_as_then(self.snapshot)

    def test_node_is_asked_nothing_for_it_in_a_period(self):
        for node in self.cloud.nodes.values():
            node.faults.forget()
        self.cloud.watch()
        self.assertEqual([], [node.faults.seen for node
                              in self.cloud.nodes.values()
                              if node.faults.seen])

    def test_no_index_is_missed_for_it_in_a_period(self):
        self.cloud.watch()
        with mock.patch.object(rows, 'for_host') as search:
            self.cloud.watch()
        search.assert_not_called()

    def test_node_that_the_volume_went_to_is_not_needed_for_its_end(self):
        self.cloud.move(self.volume, to=base.C)
        self.cloud.settle()
        self.cloud.down.add(base.B)
        self.assertTrue(self.delete(self.snapshot))
        for _time in range(3):
            self.cloud.watch()
        self.assertEqual([], self.kept())
        self.assert_whole()

    def test_it_stays_until_the_last_snapshot_is_gone(self):
        self.cloud.move(self.volume, to=base.A)
        self.cloud.settle()
        later = self.take()
        self.assertTrue(self.delete(later))
        self.cloud.settle()
        self.assertEqual([self.volume.name], self.kept())
        self.assert_as_then(self.snapshot)

    def test_volume_with_snapshots_elsewhere_is_passed_on(self):
        for host in (base.C, base.A, base.B):
            self.cloud.move(self.volume, to=host)
            self.cloud.write(self.volume, 3, 'on ' + host)
        self.assert_reads(self.volume)
        self.cloud.settle()
        self.assert_reads(self.volume)
        self.assert_as_then(self.snapshot)
        self.assertEqual([], self.cloud.leftovers([self.volume]))
        self.assertTrue(self.delete(self.snapshot))
        self.cloud.settle()
        self.assert_whole()

    def test_source_with_snapshots_in_the_middle_of_a_chain(self):
        # The first move is passed on: what has arrived is discarded, and the
        # source is kept all the same.
        volume = self.cloud.create_volume()
        snapshot = self.take(volume)
        self.cloud.move(volume)
        self.cloud.nodes[base.B].hydrate = lambda: None
        self.cloud.move(volume, to=base.C)
        self.cloud.settle()
        self.assertEqual([table.State.KEEPING], [
            move.state for move in rows.for_volume(self.ctxt, volume.id)])
        self.assert_reads(volume)
        self.assert_as_then(snapshot)
        self.assertEqual([], self.cloud.leftovers([self.volume, volume]))

    def test_peer_of_an_older_release_deletes_no_origin(self):
        move, = rows.for_volume(self.ctxt, self.volume.id)
        old = rows.change_state(self.ctxt, move,
                                table.State.COMPLETING.value)
        error = self.assertRaises(
            exception.SnapshotsLeft, self.cloud.running[base.A].answers.run,
            self.ctxt, old.transfer.as_dict(), ['delete_source'])
        self.assertIn(self.snapshot.id, str(error))
        self.assert_as_then(self.snapshot)

    def test_lost_snapshots_are_abandoned_with_their_node(self):
        self.cloud.down.add(base.A)
        self.patch('cinder_localstor.peers.directory.down',
                   side_effect=lambda ctxt: self.cloud.down)
        move, = rows.for_volume(self.ctxt, self.volume.id)
        abandon.abandon(self.ctxt, move.move_id)
        self.cloud.watch()
        self.assertEqual([], rows.for_volume(self.ctxt, self.volume.id))
        self.assert_reads(self.volume)

    @ddt.data(base.A, base.B)
    def test_deleted_volume_leaves_nothing(self, host):
        self.cloud.move(self.volume, to=base.C)
        if host == base.A:
            self.cloud.settle()
        self.assertTrue(self.delete(self.snapshot))
        self.assertTrue(self.cloud.movers[base.C].discard(
            self.ctxt, self.volume.id))
        if host == base.A:
            self.cloud.movers[base.C]._handles.delete(
                self.cloud.row(self.volume).name)
        self.cloud.refresh(self.volume).destroy()
        self.cloud.settle()
        self.cloud.watch()
        self.assertEqual([], self.cloud.leftovers([]))


class FaultTestCase(KeeperTestCase):
    """Each call in parts of a history goes wrong once, in each way.

    :cvar parts: in which calls go wrong
    :cvar least: how many calls there are at least
    :cvar is_sampled: whether in one way, unless there is time for all
    """

    parts: tuple[str, ...] = ()
    least = 0
    is_sampled = False

    def setUp(self):
        super().setUp()
        self.plan, self.power = None, False
        # Calls by the part of the history that they are made in
        self.seen = {}

    def live(self):
        """The history, and what holds in it whatever goes wrong."""
        raise NotImplementedError

    def forget_volume(self, volume):
        host = self.cloud.host_of(volume)
        self.cloud.movers[host]._handles.delete(
            self.cloud.refresh(volume).name)
        self.cloud.watch()
        self.cloud.refresh(volume).destroy()

    @contextlib.contextmanager
    def part(self, name):
        for node in self.cloud.nodes.values():
            node.faults.forget()
        if self.plan and self.plan[0] == name:
            self.cloud.nodes[self.plan[1]].faults.plan = self.plan[2]
        yield
        if not self.plan:
            self.seen[name] = [(host, *call) for host, node
                               in self.cloud.nodes.items()
                               for call in node.faults.seen]
        for node in self.cloud.nodes.values():
            node.faults.forget()

    def try_calls(self):
        """Each call goes wrong in one way, or in all of them if there is time.
        """
        calls = self.calls_in_parts()
        for way in test_mover.WAYS:
            self.go_wrong(test_mover.sample(calls, *way), *way)

    def try_every_call(self, fault, power=False):
        calls = self.calls_in_parts()
        self.go_wrong(test_mover.sample(calls, fault, power)
                      if self.is_sampled else calls, fault, power)

    def calls_in_parts(self):
        """The history goes right, and tells what can go wrong in it."""
        self.live()
        calls = [(part, *call) for part in self.parts
                 for call in self.seen[part]]
        self.assertGreater(len(calls), self.least)
        return calls

    def go_wrong(self, calls, fault, power):
        self.power = power
        for part, host, name, nth in calls:
            self.plan = (part, host, simulated.Call(name, nth, fault))
            self.forget_log()
            try:
                self.live()
            except Exception as error:
                raise AssertionError('%s of %s #%d on %s in %s: %s' % (
                    fault.name, name, nth, host, part, error)) from error


@ddt.ddt
class FaultTest(FaultTestCase):
    """Each call in which a snapshot has a part goes wrong once, in each way.

    A volume with a snapshot moves, and its snapshot is deleted from afar.
    """

    parts = ('take', 'keep', 'delete')
    least = 8

    def setUp(self):
        super().setUp()
        self.forget_volume(self.volume)

    def live(self):
        volume = self.take_and_delete()
        if self.plan:
            self.assert_whole(volume)
        self.forget_volume(volume)

    def take_and_delete(self):
        """Whatever goes wrong, a snapshot that is available holds what the
        volume held.
        """
        volume = self.cloud.create_volume()
        with self.part('take'):
            snapshot = self.take(volume)
        self.settle(snapshot, broken_off='creating')
        self.cloud.write(volume, 3, 'written later')
        self.cloud.move(volume)
        self.cloud.watch()
        self.cloud.hydrate()
        with self.part('keep'):
            self.cloud.watch()
            self.cloud.watch()
        self.settle(snapshot)
        self.cloud.write(volume, 4, 'written elsewhere')
        with self.part('delete'):
            gone = self.delete(snapshot, volume)
            self.cloud.watch()
        self.settle(snapshot)
        if not gone:
            self.assertTrue(self.delete(snapshot, volume))
            self.cloud.settle()
        return volume

    def settle(self, snapshot, broken_off=None):
        """Let come back what has died; a creation has failed then."""
        self.cloud.settle(power=self.power)
        if not snapshot.deleted:
            snapshot.refresh()
            if snapshot.status == broken_off:
                self.change(snapshot, 'error')
            self.assert_as_then(snapshot)

    @ddt.data(*simulated.Fault)
    def test_snapshot_is_right_or_not_there(self, fault):
        self.try_every_call(fault)

    @ddt.data(simulated.Fault.CRASH, simulated.Fault.CRASH_AFTER)
    def test_power_cut_at_every_call(self, fault):
        self.try_every_call(fault, power=True)


class ThinFaultTest(FaultTest):

    thin = True
    is_sampled = True
    # Nothing is kept.
    parts = ('take', 'delete')
