# SPDX-License-Identifier: Apache-2.0

import ddt

from cinder_localstor import exception
from cinder_localstor.moves import abandon
from cinder_localstor.moves import table
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

    @ddt.data(base.A, base.B)
    def test_node_that_has_what_no_other_has_is_waited_for(self, lost):
        self.cloud.move(self.volume)
        self.cloud.watch()
        self.lose(lost)
        error = self.assertRaises(exception.NotAbandoned, self.abandon)
        self.assertIn(lost, str(error))
        self.assertIn('backup', str(error))
        self.assertEqual(table.State.MIGRATING, self.move().state)

    def test_move_between_nodes_that_are_up_ends_by_itself(self):
        self.cloud.move(self.volume)
        error = self.assertRaises(exception.NotAbandoned, self.abandon)
        self.assertIn('by itself', str(error))

    def test_move_that_nobody_knows(self):
        self.assertRaises(exception.NoSuchMove, abandon.abandon, self.ctxt,
                          'nonsense')
