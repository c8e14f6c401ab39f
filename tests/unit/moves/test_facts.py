# SPDX-License-Identifier: Apache-2.0

from unittest import mock

import ddt
import fixtures

from cinder_localstor.datapath import engine
from cinder_localstor.moves import facts
from cinder_localstor.moves import table
from cinder_localstor import rows
from tests.unit import base

OFF, RUNNING, DIFFERS, DONE, FAILED, MISSING = (
    engine.Hydration.OFF, engine.Hydration.RUNNING,
    engine.Hydration.DIFFERS, engine.Hydration.DONE,
    engine.Hydration.FAILED, engine.Hydration.MISSING)

Fact = table.Fact


@ddt.ddt
class FactsTest(base.TestCase):

    def facts(self, hydration=OFF, local=0, attached=(), leaving=(),
              state='migrating', done=(), used=True, left=(),
              is_migration=False):
        arriving = mock.Mock()
        arriving.progress.return_value = engine.Progress(hydration, local,
                                                         100)
        self.patch('cinder_localstor.rows.attached', return_value={
            'the volume': set(attached)})
        self.devices = mock.Mock(return_value={})
        self.remaining = mock.Mock(return_value=set(left))
        tools = facts.Tools(base.B, arriving, self.devices, list,
                            lambda host, move: used, self.remaining,
                            facts.Turns(0))
        move = mock.Mock(state=state, done=done, leaving=leaving,
                         is_migration=is_migration,
                         volume_id='the volume', transfer=mock.Mock(
                             source_host=base.A, source_name='old copy',
                             destination_host=base.B,
                             destination_name='new copy'))
        return facts.Facts(move, facts.Look(self.ctxt, tools, [move]))

    @ddt.data(((), (), True, True), (('old',), ('old',), False, True),
              (('new',), ('old',), True, False),
              (('old', 'new'), ('old',), False, False),
              (('new',), (), True, False), ((), ('old',), True, True))
    @ddt.unpack
    def test_who_has_left(self, attached, leaving, source, destination):
        found = self.facts(attached=attached, leaving=leaving)
        self.assertEqual((source, destination), (
            found.holds(Fact.SOURCE_LEFT), found.holds(Fact.DESTINATION_LEFT)))

    @ddt.data((('old',), ('old',), False), (('new',), ('old',), True),
              (('new',), (), True), ((), (), False))
    @ddt.unpack
    def test_wanted(self, attached, leaving, expected):
        found = self.facts(attached=attached, leaving=leaving)
        self.assertEqual(expected, found.holds(Fact.WANTED))

    def test_migration_waits_for_nobody(self):
        self.assertTrue(self.facts(is_migration=True).holds(Fact.WANTED))

    @ddt.data((0, False), (1, True))
    @ddt.unpack
    def test_written(self, local, expected):
        self.assertEqual(expected, self.facts(OFF, local).holds(Fact.WRITTEN))

    @ddt.data(True, False)
    def test_source_unused(self, used):
        self.assertEqual(not used,
                         self.facts(used=used).holds(Fact.SOURCE_UNUSED))

    @ddt.data((OFF, 0, True), (OFF, 1, False), (RUNNING, 0, False),
              (MISSING, 0, False), (FAILED, 0, False), (DONE, 100, False))
    @ddt.unpack
    def test_untouched(self, hydration, local, expected):
        self.assertEqual(expected,
                         self.facts(hydration, local).holds(Fact.UNTOUCHED))

    @ddt.data((OFF, False), (RUNNING, False), (DIFFERS, False), (DONE, True),
              (FAILED, False), (MISSING, False))
    @ddt.unpack
    def test_all_local(self, hydration, expected):
        # Bytes that say 100% of a broken engine are no arrival.
        self.assertEqual(expected,
                         self.facts(hydration, 100).holds(Fact.ALL_LOCAL))

    @ddt.data(((), False), (('seal_source',), False),
              (('seal_source', 'start_hydration'), True))
    @ddt.unpack
    def test_ready(self, done, expected):
        self.assertEqual(expected, self.facts(done=done).holds(Fact.READY))

    def test_state_without_steps_is_ready(self):
        self.assertTrue(self.facts(state='starting').holds(Fact.READY))

    def test_fact_is_read_once_and_only_when_asked_for(self):
        found = self.facts()
        self.devices.assert_not_called()
        for _time in range(2):
            found.holds(Fact.ALL_LOCAL)
        self.devices.assert_called_once_with()
        rows.attached.assert_not_called()

    @ddt.data(((), (), False), (('delete_source',), ('old copy',), False),
              (('delete_source',), (), True),
              # What an operator says of a node that is lost
              (('source_gone',), ('old copy',), True))
    @ddt.unpack
    def test_source_gone(self, done, left, expected):
        found = self.facts(state='completing', done=done, left=left)
        self.assertEqual(expected, found.holds(Fact.SOURCE_GONE))

    def test_all_copies_of_a_peer_are_asked_for_at_once(self):
        found = self.facts(state='discarding', done=(
            'delete_source', 'delete_destination'), left=('new copy',))
        self.assertFalse(found.holds(Fact.DESTINATION_GONE))
        self.assertTrue(found.holds(Fact.SOURCE_GONE))
        self.assertEqual([mock.call(base.B, ['new copy']),
                          mock.call(base.A, ['old copy'])],
                         self.remaining.call_args_list)


class TurnsTest(base.TestCase):

    def take(self, turns, move_id, hydrating=(), waiting=()):
        return turns.take(move_id, lambda: (set(hydrating), set(waiting)))

    def test_without_a_limit_nobody_is_counted(self):
        self.assertTrue(facts.Turns(0).take('one', mock.Mock(
            side_effect=AssertionError)))

    def test_turn_counts_before_it_is_recorded(self):
        turns = facts.Turns(1)
        for _time in range(2):
            self.assertTrue(self.take(turns, 'one', (), ('one', 'two')))
        self.assertFalse(self.take(turns, 'two', (), ('one', 'two')))

    def test_of_two_that_ask_at_once_one_gets_the_last_turn(self):
        turns = facts.Turns(1)
        waiting = ('one', 'two')
        turns._lock = mock.MagicMock()
        answers = []

        def another(*_error):
            turns._lock = mock.MagicMock()
            answers.append(self.take(turns, 'two', (), waiting))
        turns._lock.__exit__.side_effect = another
        answers.append(self.take(turns, 'one', (), waiting))
        self.assertEqual([False, True], answers)

    def test_none_begins_while_a_user_waits_for_a_volume(self):
        turns = facts.Turns(0)
        with turns.held_back():
            with turns.held_back():
                self.assertFalse(self.take(turns, 'one'))
            self.assertFalse(self.take(turns, 'one'))
        self.assertTrue(self.take(turns, 'one'))

    def test_move_waits_so_long_for_what_users_wait_for(self):
        clock = self.useFixture(fixtures.MockPatchObject(
            facts.time, 'monotonic', return_value=1000)).mock
        turns = facts.Turns(0)
        with turns.held_back():
            self.assertFalse(self.take(turns, 'one'))
            clock.return_value += facts.COURTESY - 1
            self.assertFalse(self.take(turns, 'one'))
            self.assertFalse(self.take(turns, 'two'))
            clock.return_value += 1
            self.assertTrue(self.take(turns, 'one'))
            self.assertFalse(self.take(turns, 'two'))

    def test_move_that_waits_for_users_again_begins_to_wait_anew(self):
        clock = self.useFixture(fixtures.MockPatchObject(
            facts.time, 'monotonic', return_value=1000)).mock
        turns = facts.Turns(1)
        with turns.held_back():
            self.assertFalse(self.take(turns, 'one'))
        self.assertFalse(self.take(turns, 'one', ('two',)))
        clock.return_value += facts.COURTESY
        with turns.held_back():
            self.assertFalse(self.take(turns, 'one'))

    def test_turn_that_is_recorded_counts_once(self):
        turns = facts.Turns(2)
        self.take(turns, 'one', (), ('one', 'two'))
        self.assertTrue(self.take(turns, 'two', ('one',), ('two',)))

    def test_move_that_has_ended_or_lost_its_source_gives_its_turn_back(self):
        turns = facts.Turns(1)
        self.take(turns, 'one', (), ('one', 'two'))
        self.assertTrue(self.take(turns, 'two', (), ('two',)))
