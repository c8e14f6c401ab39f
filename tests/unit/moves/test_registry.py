# SPDX-License-Identifier: Apache-2.0

from cinder_localstor.datapath import copies
from cinder_localstor.moves import registry
from cinder_localstor import rows
from tests.unit import base

Role = copies.Role


class RegistryTest(base.TestCase):
    """Every copy of a backend, in each state of a move."""

    def setUp(self):
        super().setUp()
        self.cloud = base.Cloud(self, (base.A, base.B, base.C))
        self.volume = self.cloud.create_volume()

    def on(self, host):
        return registry.read(self.ctxt, host)

    def restored(self, host):
        return [(copy.name, copy.role) for copy in self.on(host).restored()]

    def begun(self):
        self.cloud.move(self.volume)
        move, = rows.for_volume(self.ctxt, self.volume.id)
        return move

    def test_volume_that_does_not_move(self):
        copy, = self.on(base.A)
        self.assertEqual(copies.Copy(
            host=base.A, name=self.volume.name, volume_id=self.volume.id,
            generation=1, size=1 << 30, role=Role.STANDING,
            state='available'), copy)
        self.assertEqual([(self.volume.name, Role.STANDING)],
                         self.restored(base.A))

    def test_volume_that_cinder_makes_or_deletes_is_known(self):
        self.cloud.set_status(self.volume, 'deleting')
        found = self.on(base.A)
        self.assertEqual({self.volume.name}, found.names())
        self.assertEqual(([], []), (found.restored(), found.standing()))

    def test_arriving_copy_depends_on_its_source(self):
        move = self.begun()
        arriving, = self.on(base.B).arriving
        self.assertEqual(
            (Role.ARRIVING, 2, 1 << 30, 'migrating', move.move_id,
             copies.Origin(base.A, self.volume.name)),
            (arriving.role, arriving.generation, arriving.size,
             arriving.state, arriving.move_id, arriving.depends_on))
        self.assertEqual([], self.restored(base.B))

    def test_source_is_there_until_it_is_superseded(self):
        move = self.begun()
        self.assertEqual([(self.volume.name, Role.SOURCE)],
                         self.restored(base.A))
        source, = self.on(base.A).sources
        self.assertEqual((1, 2, None), (source.generation, source.newest,
                                        source.depends_on))
        rows.change_state(self.ctxt, move, 'completing')
        self.assertEqual([], self.restored(base.A))
        self.assertEqual([self.volume.name], [
            copy.name for copy in self.on(base.A).superseded()])

    def test_copy_that_has_arrived_depends_on_nothing(self):
        move = rows.change_state(self.ctxt, self.begun(), 'completing')
        self.assertIsNone(self.on(base.B).arriving[0].depends_on)
        self.assertEqual([], self.restored(base.B))
        rows.record_done(self.ctxt, move, ('stand_alone',
                                           'keep_destination'))
        self.assertEqual([(move.transfer.destination_name, Role.STANDING)],
                         self.restored(base.B))
        # Its move is not over, so it is not reported as standing yet.
        self.assertEqual([], self.on(base.B).standing())

    def test_source_that_the_volume_goes_back_to_is_its_newest_copy(self):
        rows.change_state(self.ctxt, self.begun(), 'aborting', swap=True)
        source, = self.on(base.A).sources
        self.assertEqual(0, source.newest)
        self.assertEqual([(self.volume.name, Role.SOURCE)],
                         self.restored(base.A))

    def test_middle_of_a_chain_arrives_and_is_read(self):
        first = self.begun()
        self.cloud.watch()
        self.cloud.move(self.volume, base.C)
        middle = first.transfer.destination_name
        found = self.on(base.B)
        self.assertEqual([(middle, Role.SOURCE), (middle, Role.ARRIVING)],
                         [(copy.name, copy.role) for copy in found])
        self.assertEqual(3, found.arriving[0].newest)
        self.assertEqual([], found.restored())
