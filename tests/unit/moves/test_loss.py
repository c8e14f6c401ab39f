# SPDX-License-Identifier: Apache-2.0
"""A node never comes back, and users of its volumes and snapshots go on; by
Cinder's own volume managers.
"""

from cinder_localstor import exception
from cinder_localstor.moves import loss
from cinder_localstor.moves import table
from cinder_localstor import rows
from tests.unit import base
from tests.unit import services

A, B = base.A, base.B


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
