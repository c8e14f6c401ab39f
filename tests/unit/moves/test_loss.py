# SPDX-License-Identifier: Apache-2.0
"""A node never comes back, and users of its volumes and snapshots go on; by
Cinder's own volume managers.
"""

import ddt

from cinder_localstor import exception
from cinder_localstor.moves import abandon
from cinder_localstor.moves import loss
from cinder_localstor.moves import table
from cinder_localstor.node import simulated
from cinder_localstor import rows
from tests.unit import base
from tests.unit import services

A, B = base.A, base.B


@ddt.ddt
class LossTest(base.TestCase):

    def setUp(self):
        super().setUp()
        self.cloud = services.Services(self)
        self.volume = self.cloud.create()
        self.patch('cinder_localstor.peers.directory.down',
                   side_effect=lambda ctxt: self.cloud.down)

    def lose(self, host=A):
        self.cloud.nodes[host].cut_power()
        self.cloud.down.add(host)
        self.disable(host)

    def disable(self, host, disabled=True):
        service = self.cloud.services[host]
        service.disabled = disabled
        service.save()

    def declare(self, **kwargs):
        return loss.declare(self.ctxt, A, **kwargs)

    def give_up(self):
        return loss.give_up_volumes(self.ctxt, A, B)

    def come_back(self):
        with self.assertLogs('cinder_localstor', 'WARNING') as logs:
            self.cloud.boot(A)
        return '\n'.join(logs.output)

    def test_snapshots_can_be_deleted_and_then_their_volume(self):
        snapshot = self.cloud.take_snapshot(self.volume)
        attachment = self.cloud.attach(self.volume, B)
        self.cloud.settle()
        self.lose()
        self.cloud.detach(self.volume, attachment)
        self.assertEqual('available', self.cloud.delete_snapshot(snapshot))

        found = self.declare()

        self.assertEqual(((snapshot.id,), ()),
                         (found.snapshots, found.volumes))
        self.assertEqual('error',
                         self.cloud.refresh_snapshot(snapshot).status)
        self.assertIsNone(self.cloud.delete_snapshot(snapshot))
        self.cloud.settle()
        self.assertTrue(self.cloud.delete(self.volume))

    def test_lost_snapshot_makes_no_volume(self):
        snapshot = self.cloud.take_snapshot(self.volume)
        self.cloud.detach(self.volume, self.cloud.arrive(self.volume))
        self.lose()
        self.declare()
        made = self.cloud.create_from(snapshot, B)
        self.assertEqual('error', made.status)
        self.assertTrue(self.cloud.delete(made))

    def test_moves_that_need_nothing_more_of_it_end(self):
        self.cloud.attach(self.volume, B)
        self.cloud.watch()
        self.cloud.hydrate()
        self.lose()
        self.cloud.watch()
        move, = rows.for_volume(self.ctxt, self.volume.id)
        self.assertEqual(table.State.COMPLETING, move.state)

        found = self.declare()

        self.assertEqual([move.move_id],
                         [one.move_id for one in found.moves])
        # Once more, before it has ended
        self.assertEqual(1, len(self.declare().moves))
        done = rows.get(self.ctxt, move.move_id).done
        self.assertEqual(len(set(done)), len(done), done)
        self.cloud.watch()
        self.assertEqual([], rows.for_volume(self.ctxt, self.volume.id))
        self.assertEqual(self.cloud.content[self.volume.id],
                         self.cloud.read(self.volume))

    def test_move_that_ends_meanwhile_is_none_of_them(self):
        self.cloud.attach(self.volume, B)
        move, = rows.for_volume(self.ctxt, self.volume.id)
        self.cloud.settle()
        self.lose()
        self.patch('cinder_localstor.rows.for_host', return_value=[move])
        found = self.declare()
        self.assertEqual(((), (), ()),
                         (found.moves, found.waiting, found.snapshots))

    def test_volume_that_has_not_arrived_waits(self):
        self.cloud.attach(self.volume, B)
        self.cloud.watch()
        self.lose()
        found = self.declare()
        self.assertEqual((), found.moves)
        (move, reason), = found.waiting
        self.assertEqual(self.volume.id, move.volume_id)
        self.assertIn('restore the volume from a backup', reason)

    def test_volumes_can_be_deleted_that_it_alone_had(self):
        other = self.cloud.create()
        attachment = self.cloud.attach(other, A)
        self.lose()
        self.assertEqual({self.volume.id, other.id},
                         set(self.declare().volumes))
        self.assertEqual({self.volume.id, other.id}, set(self.give_up()))
        self.assertEqual([], self.give_up())
        volume = self.cloud.refresh(self.volume)
        self.assertEqual(('error', 'b@local#local'),
                         (volume.status, volume.host))
        self.assertTrue(self.cloud.delete(volume))
        # Its server is deleted.
        self.cloud.detach(other, attachment)
        self.assertTrue(self.cloud.delete(other))

    def test_volume_that_waits_is_not_given_up(self):
        attachment = self.cloud.attach(self.volume, B)
        self.cloud.watch()
        self.lose(B)
        found = loss.declare(self.ctxt, B)
        self.assertEqual(1, len(found.waiting))
        self.assertEqual((), found.volumes)
        self.assertEqual([], loss.give_up_volumes(self.ctxt, B, A))
        self.assertIsNotNone(attachment)

    def left_on(self, host, *volumes):
        return [left for left in self.cloud.leftovers(volumes)
                if left[0] == host]

    def test_volume_that_was_arriving_is_back_where_it_came_from(self):
        before = dict(self.cloud.content[self.volume.id])
        attachment = self.cloud.attach(self.volume, B)
        self.cloud.watch()
        self.cloud.write(self.volume, 3, 'written there')
        self.lose(B)
        (_move, reason), = loss.declare(self.ctxt, B).waiting
        self.assertIn('--written-is-lost', reason)

        found = loss.declare(self.ctxt, B, written_is_lost=True)

        self.assertEqual(((), ()), (found.waiting, found.volumes))
        self.cloud.watch()
        self.assertEqual([], self.left_on(A, self.volume))
        # Its server is evacuated.
        self.cloud.detach(self.volume, attachment)
        self.cloud.attach(self.volume, A)
        self.assertEqual(before, self.cloud.read(self.volume))
        self.cloud.write(self.volume, 3, 'goes on')
        self.assertEqual('goes on', self.cloud.read(self.volume)[3])

    def test_volume_is_back_though_its_export_is_still_held(self):
        """As tgt does until TCP gives up a connection to a dead node."""
        before = dict(self.cloud.content[self.volume.id])
        self.cloud.attach(self.volume, B)
        self.cloud.watch()
        self.lose(B)
        faults = self.cloud.nodes[A].faults
        faults.choose = lambda _host, name: (
            simulated.Fault.ERROR if name == 'SimulatedTarget.unexport'
            else None)
        loss.declare(self.ctxt, B, written_is_lost=True)
        self.cloud.watch()
        move, = rows.for_volume(self.ctxt, self.volume.id)
        self.assertEqual(table.State.ABORTING, move.state)
        self.assertIn('SimulatedTarget.unexport', move.problem)
        self.assertEqual(before, self.cloud.read(self.volume))
        self.cloud.write(self.volume, 3, 'goes on')
        faults.choose = lambda _host, _name: None
        self.cloud.watch()
        self.assertEqual([], rows._moves(self.ctxt))
        self.assertEqual([], self.left_on(A, self.volume))

    @ddt.data(None, simulated.Fault.CRASH, simulated.Fault.CRASH_AFTER)
    def test_volume_with_snapshots_is_back_as_large_as_it_has_grown(
            self, fault):
        """Also when the power fails as the export is taken away for that."""
        snapshot = self.cloud.take_snapshot(self.volume)
        made = self.cloud.attach(self.volume, B)
        self.cloud.watch()
        volume = self.cloud.refresh(self.volume)
        volume.size = 2
        volume.save()
        self.lose(B)
        loss.declare(self.ctxt, B, written_is_lost=True)
        node = self.cloud.nodes[A]
        if fault:
            node.faults.forget()
            node.faults.plan = simulated.Call('SimulatedTarget.unexport', 0,
                                              fault)
        self.cloud.watch()
        self.assertIsNone(node.faults.plan)
        if fault:
            node.cut_power()
            self.cloud.boot(A)
            self.cloud.watch()
        self.assertEqual([], rows._moves(self.ctxt))
        self.cloud.detach(self.volume, made)
        self.cloud.attach(self.volume, A)
        self.cloud.write(self.volume, 31, 'the last')
        self.assertEqual(self.cloud.content[snapshot.id],
                         self.cloud.read_snapshot(snapshot))
        content, found = (self.cloud.content[self.volume.id],
                          self.cloud.read(self.volume))
        self.assertEqual(content, {number: found[number]
                                   for number in content})

    def test_volume_is_back_though_a_snapshot_of_it_was_arriving_too(self):
        before = dict(self.cloud.content[self.volume.id])
        self.cloud.attach(self.volume, B)
        self.cloud.watch()
        snapshot = self.cloud.take_snapshot(self.volume)
        self.cloud.watch()
        moves = rows.for_host(self.ctxt, B)
        self.assertEqual([False, True], sorted(
            move.transfer.is_snapshot for move in moves))
        self.lose(B)
        move = next(move for move in moves if not move.transfer.is_snapshot)
        error = self.assertRaises(
            exception.NotAbandoned, abandon.abandon, self.ctxt, move.move_id,
            True)
        self.assertIn(snapshot.id, str(error))

        found = loss.declare(self.ctxt, B, written_is_lost=True)

        self.assertEqual((), found.waiting)
        self.cloud.watch()
        self.assertEqual([], rows._moves(self.ctxt))
        self.assertEqual([], self.left_on(A, self.volume))
        self.assertEqual(before, self.cloud.read(self.volume))
        self.assertIsNone(self.cloud.delete_snapshot(snapshot))

    def test_clone_that_was_arriving_lets_its_source_go(self):
        clone = self.cloud.create_from(self.volume, B)
        self.cloud.watch()
        self.lose(B)
        found = loss.declare(self.ctxt, B)
        (_move, reason), = found.waiting
        self.assertIn('the new volume', reason)

        loss.declare(self.ctxt, B, written_is_lost=True)
        for _period in range(2):
            self.cloud.watch()

        self.assertEqual([], rows._moves(self.ctxt))
        self.assertEqual([], self.left_on(A, self.volume))
        self.assertEqual([clone.id], loss.give_up_volumes(self.ctxt, B, A))
        self.assertTrue(self.cloud.delete(clone))
        self.assertTrue(self.cloud.delete(self.volume))

    def test_clone_is_not_activated_on_a_node_that_comes_back(self):
        for driven in (False, True):
            clone = self.cloud.create_from(self.volume, B)
            self.cloud.watch()
            self.lose(B)
            loss.declare(self.ctxt, B, written_is_lost=True)
            for _period in range(2 * driven):
                self.cloud.watch()
            self.assertEqual(not driven, bool(rows._moves(self.ctxt)))
            self.cloud.boot(B)
            self.assertEqual({}, self.cloud.nodes[B].device_mapper.nodes)
            self.disable(B, False)
            self.assertEqual('available', self.cloud.refresh(clone).status)
            for _period in range(2):
                self.cloud.watch()
            self.assertEqual([], rows._moves(self.ctxt))

    def test_volume_of_a_snapshot_that_was_arriving_leaves_the_snapshot(self):
        snapshot = self.cloud.take_snapshot(self.volume)
        made = self.cloud.create_from(snapshot, B)
        self.cloud.watch()
        self.lose(B)
        loss.declare(self.ctxt, B, written_is_lost=True)
        self.cloud.watch()
        self.assertEqual([], rows._moves(self.ctxt))
        self.assertEqual([], self.left_on(A, self.volume))
        self.assertEqual(self.cloud.content[snapshot.id],
                         self.cloud.read_snapshot(snapshot))
        self.assertEqual([made.id], loss.give_up_volumes(self.ctxt, B, A))

    def test_clone_that_arrives_within_the_lost_node(self):
        clone = self.cloud.create_from(self.volume, A)
        self.cloud.watch()
        self.assertEqual(1, len(rows.for_volume(self.ctxt, clone.id)))
        self.lose()
        self.assertEqual(1, len(self.declare().waiting))
        self.assertEqual((), self.declare(written_is_lost=True).waiting)
        self.assertEqual({self.volume.id, clone.id}, set(self.give_up()))
        self.assertTrue(self.cloud.delete(clone))

    def test_what_is_deleted_lets_its_source_go(self):
        attachment = self.cloud.attach(self.volume, B)
        self.cloud.watch()
        self.cloud.detach(self.volume, attachment)
        move, = rows.for_volume(self.ctxt, self.volume.id)
        # The deletion is recorded, and no more.
        rows.change_state(self.ctxt, move, table.State.DISCARDING.value)
        self.lose(B)
        self.assertEqual((), loss.declare(self.ctxt, B).waiting)
        for _period in range(2):
            self.cloud.watch()
        self.assertEqual([], rows._moves(self.ctxt))
        self.assertEqual([], self.left_on(A))

    def test_nothing_is_activated_of_a_node_that_comes_back(self):
        self.lose()
        self.declare()
        self.give_up()
        self.assertIn('volume ' + self.volume.id, self.come_back())
        self.assertEqual({}, self.cloud.nodes[A].device_mapper.nodes)

    def test_node_that_is_up(self):
        for ask in (self.declare, self.give_up):
            self.assertIn('is up', str(
                self.assertRaises(exception.NotLost, ask)))
        self.assertEqual('available', self.cloud.refresh(self.volume).status)

    def test_node_that_may_come_back(self):
        self.lose()
        self.disable(A, False)
        for ask in (self.declare, self.give_up):
            self.assertIn('--disable-reason', str(
                self.assertRaises(exception.NotLost, ask)))
        self.assertEqual(A, self.cloud.host_of(self.volume))

    def test_name_that_nobody_has(self):
        error = self.assertRaises(exception.NotLost, loss.declare, self.ctxt,
                                  'c@local')
        self.assertIn('service list', str(error))
