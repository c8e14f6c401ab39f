# SPDX-License-Identifier: Apache-2.0

import unittest

import ddt

from cinder_localstor.moves import table

# From where a state is entered by a call and not by a transition
BY_CALL = {table.State.RETURNING, table.State.ABORTING, table.State.UNDOING,
           table.State.DISCARDING}
STATES = sorted(table.TABLE)


@ddt.ddt
class TableTest(unittest.TestCase):

    def test_every_state_has_rules_unless_it_is_final(self):
        self.assertEqual(set(table.State),
                         set(table.TABLE) | set(table.FINAL))
        self.assertEqual(set(), set(table.TABLE) & set(table.FINAL))

    def test_every_state_is_reached(self):
        reached = {table.State.PREPARING, table.State.CREATING} | BY_CALL
        for rules in table.TABLE.values():
            reached.update(found.to for found in rules.transitions)
        self.assertEqual(set(table.State), reached)

    @ddt.data(*STATES)
    def test_every_state_has_an_end(self, state):
        ends, todo = set(), [state]
        seen = set()
        while todo:
            at = todo.pop()
            if at in table.FINAL:
                ends.add(at)
            elif at not in seen:
                seen.add(at)
                todo += [found.to for found in table.TABLE[at].transitions]
        self.assertTrue(ends)

    def test_steps_have_the_names_that_are_recorded_and_sent(self):
        # Moves that are under way at an upgrade have some of them done, and
        # peers of the last release ask for them.
        steps = {step.name: step.side for rules in table.TABLE.values()
                 for step in (*rules.steps, *table.SERVE, *table.RECONNECT)}
        self.assertEqual(
            {name: table.Side.SOURCE for name in (
                'take_snapshot', 'export_source', 'seal_source',
                'unexport_source', 'take_back_source', 'hide_source',
                'delete_source')}
            | {name: table.Side.DESTINATION for name in (
                'create_destination', 'create_map', 'connect_source',
                'build_engine', 'build_handle', 'restore_handle',
                'start_hydration', 'stand_alone', 'remove_handle',
                'remove_engine', 'disconnect_source', 'remove_map',
                'keep_destination', 'delete_destination')}, steps)

    @ddt.data(*STATES)
    def test_a_step_is_taken_once_in_a_state(self, state):
        names = [step.name for step in table.TABLE[state].steps]
        self.assertEqual(len(names), len(set(names)))

    @ddt.data(*STATES)
    def test_steps_of_a_state_that_serves_build_it_again(self, state):
        serving = {step.name for step in table.SERVE + table.RECONNECT}
        self.assertEqual(table.TABLE[state].serves,
                         serving <= table.steps_of(state).keys())

    @ddt.data(*STATES)
    def test_owner_changes_with_the_identity(self, state):
        # The owner is the node that the user's volume lives on, and of what is
        # kept for snapshots alone the node that has it.
        for found in table.TABLE[state].transitions:
            if found.to in (*table.FINAL, table.State.KEEPING):
                continue
            changes = table.TABLE[found.to].owner != table.TABLE[state].owner
            self.assertEqual(
                changes, found.identity is table.Identity.SWITCHES, found)

    def test_every_fact_is_asked_for(self):
        asked = {fact for rules in table.TABLE.values()
                 for wanted in (*rules.transitions, *rules.steps)
                 for fact in getattr(wanted, 'facts', None) or wanted.when}
        self.assertEqual(set(table.Fact), asked)

    @ddt.data(*STATES)
    def test_state_with_steps_is_left_when_they_are_done(self, state):
        rules = table.TABLE[state]
        if rules.steps:
            for found in rules.transitions:
                self.assertTrue(table.Fact.READY in found.facts
                                or found.at_once
                                or table.Fact.UNEXPORTED in found.facts)

    def test_source_is_kept_or_stays_when_nothing_else_is_left(self):
        for state, rules in table.TABLE.items():
            for found in rules.transitions:
                if {table.Fact.KEPT, table.Fact.SOURCE_STAYS} & set(
                        found.facts):
                    self.assertEqual((table.UNEXPORT_SOURCE,
                                      table.DELETE_SOURCE), rules.steps[-2:])
                    self.assertIn(table.Fact.UNEXPORTED, found.facts)

    def test_hydration_starts_after_the_source_is_sealed(self):
        steps = table.TABLE[table.State.MIGRATING].steps
        self.assertLess(steps.index(table.SEAL_SOURCE),
                        steps.index(table.START_HYDRATION))

    def test_hydration_never_starts_while_the_source_is_attached(self):
        for state, rules in table.TABLE.items():
            # Nobody attaches a snapshot.
            if state is table.State.CREATING:
                continue
            for found in rules.transitions:
                if found.to is table.State.MIGRATING:
                    self.assertTrue(
                        {table.Fact.SOURCE_LEFT, table.Fact.SOURCE_UNUSED}
                        .intersection(found.facts), state)

    def test_source_is_deleted_last_and_only_when_all_is_local(self):
        for state, rules in table.TABLE.items():
            if table.DELETE_SOURCE in rules.steps:
                self.assertEqual(table.DELETE_SOURCE, rules.steps[-1])
                self.assertIn(state, (table.State.COMPLETING,
                                      table.State.KEEPING,
                                      table.State.UNDOING,
                                      table.State.DISCARDING))
        for rules in table.TABLE.values():
            for found in rules.transitions:
                if found.to is table.State.COMPLETING:
                    self.assertIn(table.Fact.ALL_LOCAL, found.facts)

    def test_mark_of_an_arriving_copy_is_taken_off_when_it_stands(self):
        steps = table.TABLE[table.State.COMPLETING].steps
        self.assertLess(steps.index(table.STAND_ALONE),
                        steps.index(table.KEEP_DESTINATION))
