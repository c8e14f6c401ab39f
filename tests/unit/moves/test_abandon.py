# SPDX-License-Identifier: Apache-2.0

import ddt
from oslo_utils import units

from cinder_localstor import exception
from cinder_localstor.moves import abandon
from cinder_localstor.moves import gate
from cinder_localstor.moves import table
from cinder_localstor.node import simulated
from cinder_localstor import rows
from tests.unit import base


@ddt.ddt
class AbandonTest(base.TestCase):
    """A node never comes back."""

    def setUp(self):
        super().setUp()
        self.cloud = base.Cloud(self)
        self.volume = self.cloud.create_volume()
        self.patch('cinder_localstor.peers.directory.down',
                   side_effect=lambda ctxt: self.cloud.down)

    def move(self):
        return rows.for_volume(self.ctxt, self.volume.id)[0]

    def lose(self, host):
        self.cloud.down.add(host)
        self.cloud.watch()

    def abandon(self, **kwargs):
        abandon.abandon(self.ctxt, self.move().move_id, **kwargs)
        self.cloud.watch()

    def live_migrate(self):
        self.first = self.cloud.reserve(self.volume, {'host': 'a'})
        self.second = self.cloud.reserve(self.volume)
        self.cloud.move(self.volume)

    def assert_stands_on(self, host):
        self.assertEqual([], rows._moves(self.ctxt))
        self.assertEqual(host, self.cloud.host_of(self.volume))
        self.assertEqual(self.cloud.content[self.volume.id],
                         self.cloud.read(self.volume))

    def arrive_without_source(self):
        self.cloud.move(self.volume)
        self.cloud.watch()
        self.cloud.hydrate()
        self.lose(base.A)

    def test_source_is_lost_after_all_has_arrived(self):
        self.arrive_without_source()
        self.abandon()
        self.assert_stands_on(base.B)

    def test_source_that_comes_back_all_the_same_is_not_activated(self):
        self.arrive_without_source()
        self.abandon()
        self.cloud.nodes[base.A].cut_power()
        with self.assertLogs('cinder_localstor', 'WARNING') as logs:
            self.cloud.boot(base.A)
        self.assertEqual({}, self.cloud.nodes[base.A].device_mapper.nodes)
        self.assertIn('generation 1 of volume ' + self.volume.id,
                      ' '.join(logs.output))

    def test_destination_is_lost_while_a_migration_is_taken_back(self):
        self.live_migrate()
        rows.change_state(self.ctxt, self.move(), 'aborting', swap=True)
        self.lose(base.B)
        self.abandon()
        self.assert_stands_on(base.A)

    def test_destination_is_lost_before_the_guest_ran_there(self):
        self.live_migrate()
        self.lose(base.B)
        error = self.assertRaises(exception.NotAbandoned, self.abandon)
        self.assertIn('--written-is-lost', str(error))
        self.assertEqual(base.B, self.cloud.host_of(self.volume))
        self.abandon(written_is_lost=True)
        self.assert_stands_on(base.A)

    def assert_refused(self, *words, **kwargs):
        state = self.move().state
        error = self.assertRaises(exception.NotAbandoned, self.abandon,
                                  **kwargs)
        for word in words:
            self.assertIn(word, str(error))
        self.assertEqual(state, self.move().state)

    def test_source_that_has_what_no_other_has_is_waited_for(self):
        self.cloud.move(self.volume)
        self.cloud.watch()
        self.lose(base.A)
        self.assert_refused(base.A, 'backup', written_is_lost=True)

    def test_destination_that_has_all_is_waited_for(self):
        self.cloud.move(self.volume)
        self.cloud.watch()
        self.cloud.hydrate()
        self.cloud.nodes[base.A].cut_power()
        self.cloud.down.add(base.A)
        self.cloud.watch()
        self.assertEqual(table.State.COMPLETING, self.move().state)
        self.cloud.boot(base.A)
        self.lose(base.B)
        self.assert_refused(base.B, 'backup', written_is_lost=True)

    def test_move_between_nodes_that_are_up_ends_by_itself(self):
        self.cloud.move(self.volume)
        error = self.assertRaises(exception.NotAbandoned, self.abandon)
        self.assertIn('by itself', str(error))

    def test_move_that_nobody_knows(self):
        self.assertRaises(exception.NoSuchMove, abandon.abandon, self.ctxt,
                          'nonsense')


@ddt.ddt
class LostInMidMoveTest(base.TestCase):
    """The node that a volume was arriving at never comes back: the volume is
    as it was when it left.
    """

    def setUp(self):
        super().setUp()
        self.cloud = base.Cloud(self)
        self.patch('cinder_localstor.peers.directory.down',
                   side_effect=lambda ctxt: self.cloud.down)

    def lose(self, volume):
        """Lose the node, to which a guest has written; the move."""
        self.before = dict(self.cloud.content[volume.id])
        self.cloud.move(volume)
        self.cloud.watch()
        self.cloud.write(volume, 3, 'written there')
        self.cloud.nodes[base.B].cut_power()
        self.cloud.down.add(base.B)
        move, = rows.for_volume(self.ctxt, volume.id)
        self.assertEqual(table.State.MIGRATING, move.state)
        return move

    def abandon(self, move):
        return abandon.abandon(self.ctxt, move.move_id, True)

    def assert_is_as_before(self, volume):
        """And goes on from there, on the only node that is left."""
        self.assertEqual([], rows._moves(self.ctxt))
        self.assertEqual(base.A, self.cloud.host_of(volume))
        found = self.cloud.read(volume)
        self.assertEqual(self.before, {
            number: found[number] for number in self.before})
        self.cloud.write(volume, 5, 'goes on')
        self.assertEqual('goes on', self.cloud.read(volume)[5])
        self.assertEqual([], [left for left in self.cloud.leftovers([volume])
                              if left[0] == base.A])

    def test_it_is_back(self):
        volume = self.cloud.create_volume()
        move = self.lose(volume)
        error = self.assertRaises(exception.NotAbandoned, abandon.abandon,
                                  self.ctxt, move.move_id)
        self.assertIn('--written-is-lost', str(error))
        # By which an operator finds out what a backup would save
        self.assertIn(move.since.strftime('%Y-%m-%d %H:%M:%S'), str(error))
        self.assertEqual(table.State.RETURNING, self.abandon(move).state)
        # Once more changes nothing.
        self.assertEqual(table.State.RETURNING, self.abandon(move).state)
        self.cloud.watch()
        self.assert_is_as_before(volume)

    def test_status_tells_of_nothing_wrong_with_it_meanwhile(self):
        self.abandon(self.lose(self.cloud.create_volume()))
        found, = self.cloud.report(base.A).backends
        self.assertEqual([], [
            problem for copy in found.copies for problem in copy.problems
            if 'is down' not in problem])

    def test_it_is_as_large_as_it_has_grown(self):
        volume = self.cloud.create_volume()
        move = self.lose(volume)
        volume.size = 3
        volume.save()
        self.abandon(move)
        self.cloud.watch()
        self.assert_is_as_before(volume)
        self.cloud.write(volume, 47, 'the last')

    def test_nobody_has_it_before_it_is_as_large(self):
        volume = self.cloud.create_volume()
        move = self.lose(volume)
        volume.size = 3
        volume.save()
        self.abandon(move)
        group = self.cloud.nodes[base.A].volumes
        total, group.total = group.total, 2 * units.Gi
        self.cloud.watch()
        now, = rows.for_volume(self.ctxt, volume.id)
        self.assertEqual(table.State.RETURNING, now.state)
        self.assertIn('Free some space', now.problem)
        error = self.assertRaises(
            exception.VolumeIsMoving, gate.check_moves, self.ctxt, volume.id,
            gate.Operation.LOCAL)
        self.assertIn('on its way to a@local', str(error))
        group.total = total
        self.cloud.watch()
        self.assert_is_as_before(volume)

    def test_it_can_leave_again(self):
        volume = self.cloud.create_volume()
        self.abandon(self.lose(volume))
        self.cloud.watch()
        self.cloud.nodes[base.B].volumes.disks.clear()
        self.cloud.boot(base.B)
        self.cloud.move(volume)
        self.cloud.settle()
        self.assertEqual(base.B, self.cloud.host_of(volume))
        self.cloud.content[volume.id] = self.before
        found = self.cloud.read(volume)
        self.assertEqual(self.before, {
            number: found[number] for number in self.before})

    def test_nothing_is_activated_of_a_node_that_comes_back(self):
        volume = self.cloud.create_volume()
        self.abandon(self.lose(volume))
        self.cloud.watch()
        self.cloud.boot(base.B)
        self.assertEqual({}, self.cloud.nodes[base.B].device_mapper.nodes)
        self.cloud.watch()
        self.assert_is_as_before(volume)

    def test_source_that_starts_meanwhile(self):
        volume = self.cloud.create_volume()
        move = self.lose(volume)
        self.cloud.nodes[base.A].cut_power()
        self.abandon(move)
        with self.assertNoLogs('cinder_localstor', 'ERROR'):
            self.cloud.boot(base.A)
            self.cloud.watch()
        self.assert_is_as_before(volume)

    @ddt.data(*simulated.Fault)
    def test_each_call_goes_wrong_once(self, fault):
        node = self.cloud.nodes[base.A]
        calls = self.return_once()
        self.assertGreater(len(calls), 5)
        for name, nth in calls:
            self.return_once(simulated.Call(name, nth, fault))
            if node.faults.plan is not None:
                raise AssertionError('%s #%d was not called' % (name, nth))

    def return_once(self, plan=None):
        """Let a volume come back, whatever goes wrong; the calls."""
        volume = self.cloud.create_volume()
        move = self.lose(volume)
        volume.size = 2
        volume.save()
        self.abandon(move)
        node = self.cloud.nodes[base.A]
        node.faults.forget()
        node.faults.plan = plan
        self.cloud.watch()
        seen = list(node.faults.seen)
        if base.A in self.cloud.down:
            node.cut_power()
            self.cloud.boot(base.A)
        self.cloud.watch()
        self.assert_is_as_before(volume)
        self.cloud.write(volume, 31, 'the last')
        self.cloud.down.discard(base.B)
        self.cloud.nodes[base.B].volumes.disks.clear()
        self.cloud.boot(base.B)
        rows.db.volume_destroy(self.ctxt, volume.id)
        self.cloud.nodes[base.A].volumes.disks.clear()
        self.cloud.nodes[base.A].device_mapper.nodes.clear()
        return seen


class LostInChainTest(base.TestCase):
    """A volume has moved on, and one of its nodes never comes back."""

    def setUp(self):
        super().setUp()
        self.cloud = base.Cloud(self, hosts=(base.A, base.B, base.C))
        self.patch('cinder_localstor.peers.directory.down',
                   side_effect=lambda ctxt: self.cloud.down)
        self.volume = self.cloud.create_volume()
        self.before = dict(self.cloud.content[self.volume.id])
        self.cloud.move(self.volume, base.B)
        self.cloud.watch()
        self.cloud.write(self.volume, 3, 'written on the way')
        self.before[3] = 'written on the way'
        self.cloud.move(self.volume, base.C)
        self.cloud.watch()
        self.first, self.last = sorted(
            rows.for_volume(self.ctxt, self.volume.id),
            key=lambda move: move.transfer.generation)

    def lose(self, host):
        self.cloud.nodes[host].cut_power()
        self.cloud.down.add(host)

    def test_last_node(self):
        self.cloud.write(self.volume, 4, 'written at the end')
        self.lose(base.C)
        abandon.abandon(self.ctxt, self.last.move_id, True)
        for _period in range(3):
            self.cloud.watch()
            self.cloud.hydrate()
        self.cloud.watch()
        self.assertEqual([], rows._moves(self.ctxt))
        self.assertEqual(base.B, self.cloud.host_of(self.volume))
        found = self.cloud.read(self.volume)
        self.assertEqual(self.before, {
            number: found[number] for number in self.before})
        self.cloud.write(self.volume, 5, 'goes on')

    def test_last_node_while_the_one_before_starts_without_its_source(self):
        """What has not arrived yet is nobody's before its source is back."""
        self.lose(base.C)
        abandon.abandon(self.ctxt, self.last.move_id, True)
        self.lose(base.A)
        self.lose(base.B)
        self.cloud.boot(base.B)
        self.cloud.watch()
        self.assertEqual({}, {
            name: node for name, node in self.cloud.nodes[
                base.B].device_mapper.nodes.items()
            if name.endswith('handle')})
        self.cloud.boot(base.A)
        self.cloud.watch()
        found = self.cloud.read(self.volume)
        self.assertEqual(self.before, {
            number: found[number] for number in self.before})

    def test_volume_that_moves_on_meanwhile_stays_where_it_is(self):
        self.assertRaises(exception.MoveChanged, rows.come_back, self.ctxt,
                          self.first, 'returning', ())
        self.assertEqual(base.C, self.cloud.host_of(self.volume))
        self.assertEqual('migrating', rows.get(
            self.ctxt, self.first.move_id).state)

    def test_node_in_the_middle(self):
        self.lose(base.B)
        for move in (self.first, self.last):
            error = self.assertRaises(exception.NotAbandoned,
                                      abandon.abandon, self.ctxt,
                                      move.move_id, True)
            self.assertIn('backup', str(error))
        self.assertEqual(base.C, self.cloud.host_of(self.volume))
