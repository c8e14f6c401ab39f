# SPDX-License-Identifier: Apache-2.0

from cinder import exception as cinder_exception
import ddt
import tenacity

from cinder_localstor import exception
from cinder_localstor.moves import gate
from cinder_localstor.moves import table
from cinder_localstor import rows
from tests.unit import base

ERRORS = {gate.Answer.DELETED: exception.VolumeIsDiscarded,
          gate.Answer.WAITS: exception.VolumeIsMoving,
          gate.Answer.SEALS: exception.VolumeIsMoving,
          gate.Answer.ARRIVES: exception.VolumeIsMoving,
          gate.Answer.ENDS: exception.VolumeIsMoving,
          gate.Answer.UNDECIDED: exception.VolumeIsMoving,
          gate.Answer.MOVES: exception.VolumeIsMoving}


@ddt.ddt
class GateTest(base.TestCase):

    def setUp(self):
        super().setUp()
        self.cloud = base.Cloud(self)
        self.volume = self.cloud.create_volume()
        self.gate = gate.Gate(base.A, 1)
        self.patch('tenacity.stop_after_delay',
                   return_value=tenacity.stop_after_attempt(2))
        self.patch('tenacity.stop_never', tenacity.stop_after_attempt(2))
        self.nap = self.patch('tenacity.nap.time')

    def move_in(self, state):
        """Let a move of the volume be in a state, and the volume here, or
        where it is deleted.
        """
        self.cloud.move(self.volume)
        move, = rows.for_volume(self.ctxt, self.volume.id)
        deleted = state is table.State.DISCARDING
        if deleted:
            self.gate = gate.Gate(base.B, 1)
        return rows.change_state(self.ctxt, move, state.value,
                                 swap=not deleted)

    def test_every_operation_has_an_answer_for_every_state(self):
        self.assertEqual(set(gate.Operation), set(gate.TABLE))
        for answers in gate.TABLE.values():
            self.assertEqual(['standing', *table.TABLE], list(answers))

    @ddt.data(*table.TABLE)
    def test_answer_is_that_of_the_table(self, state):
        self.move_in(state)
        for operation, answers in gate.TABLE.items():
            expected = ERRORS.get(answers[state])
            if expected is exception.VolumeIsMoving:
                expected = gate.TOO_EARLY.get(operation, expected)
            for ask in (self.gate.check, self.enter):
                if expected is None:
                    self.assertEqual(self.volume.id, ask(
                        self.ctxt, self.volume.id, operation).id)
                else:
                    self.assertRaises(expected, ask, self.ctxt,
                                      self.volume.id, operation)

    def test_copy_that_was_passed_on_is_as_one_of_an_aborted_move(self):
        self.cloud.move(self.volume)
        move, = rows.for_volume(self.ctxt, self.volume.id)
        rows.change_state(self.ctxt, move, table.State.DISCARDING.value,
                          swap=True)
        for operation, answers in gate.TABLE.items():
            if answers[table.State.ABORTING] is gate.Answer.YES:
                self.gate.check(self.ctxt, self.volume.id, operation)
            else:
                error = self.assertRaises(
                    gate.TOO_EARLY.get(operation, exception.VolumeIsMoving),
                    self.gate.check, self.ctxt, self.volume.id, operation)
                self.assertIn(move.move_id, str(error))

    def enter(self, *arguments):
        with self.gate.enter(*arguments) as volume:
            return volume

    def test_standing_volume_may_do_everything(self):
        for operation in gate.Operation:
            self.gate.check(self.ctxt, self.volume.id, operation)

    def test_refusal_says_when_it_will_work(self):
        self.move_in(table.State.STARTING)
        error = self.assertRaises(
            exception.VolumeIsMoving, self.gate.check, self.ctxt,
            self.volume.id, gate.Operation.MOVE)
        for part in (self.volume.id, base.B, 'starting', 'one node only',
                     'attach it on another node'):
            self.assertIn(part, str(error))

    def test_what_waits_goes_on_when_it_can(self):
        self.move_in(table.State.PREPARING)
        move, = rows.for_volume(self.ctxt, self.volume.id)
        self.nap.sleep.side_effect = lambda _seconds: rows.change_state(
            self.ctxt, move, table.State.MIGRATING.value)
        self.assertEqual(self.volume.id, self.enter(
            self.ctxt, self.volume.id, gate.Operation.EXTEND).id)

    def test_what_waits_for_all_to_arrive_needs_no_end_of_the_move(self):
        self.move_in(table.State.COMPLETING)
        move, = rows.for_volume(self.ctxt, self.volume.id)
        error = self.assertRaises(
            exception.VolumeIsMoving, self.gate.check, self.ctxt,
            self.volume.id, gate.Operation.SNAPSHOT)
        self.assertIn('when all of it has arrived', str(error))
        self.nap.sleep.side_effect = lambda _seconds: rows.record_done(
            self.ctxt, move, (table.KEEP_DESTINATION.name,))
        self.assertEqual(self.volume.id, self.enter(
            self.ctxt, self.volume.id, gate.Operation.SNAPSHOT).id)

    def test_what_waits_for_the_seal_needs_nothing_more(self):
        move = self.move_in(table.State.MIGRATING)
        error = self.assertRaises(
            exception.VolumeIsMoving, self.gate.check, self.ctxt,
            self.volume.id, gate.Operation.SNAPSHOT)
        self.assertIn('comes from has answered', str(error))
        rows.record_done(self.ctxt, move, (table.SEAL_SOURCE.name,))
        self.gate.check(self.ctxt, self.volume.id, gate.Operation.SNAPSHOT)

    def test_volume_that_lives_elsewhere_is_asked_for_there(self):
        there = gate.Gate(base.B, 1)
        self.assertRaises(exception.VolumeElsewhere, there.check, self.ctxt,
                          self.volume.id, gate.Operation.LOCAL)
        for operation in (gate.Operation.DELETE, gate.Operation.UNMANAGE):
            self.assertRaises(cinder_exception.VolumeIsBusy, there.check,
                              self.ctxt, self.volume.id, operation)
        there.check(self.ctxt, self.volume.id, gate.Operation.DETACH)

    def test_row_is_read_anew(self):
        stale = self.volume
        fresh = self.cloud.refresh(self.volume)
        fresh.size = 3
        fresh.save()
        self.assertEqual(1, stale.size)
        with self.gate.enter(self.ctxt, stale.id,
                             gate.Operation.EXTEND) as volume:
            self.assertEqual(3, volume.size)

    @ddt.data(('group_id', '11111111-1111-1111-1111-111111111111', True),
              ('migration_status', 'migrating', True),
              ('migration_status', 'target:x', True),
              ('migration_status', 'success', False),
              ('migration_status', 'error', False),
              ('migration_status', None, False))
    @ddt.unpack
    def test_what_is_bound_to_its_node(self, field, value, expected):
        setattr(self.volume, field, value)
        self.assertEqual(expected, gate.is_bound(self.volume))
