# SPDX-License-Identifier: Apache-2.0

import inspect
import unittest

import ddt

from cinder_localstor.datapath import destination
from cinder_localstor.datapath import source
from cinder_localstor.moves import facts
from cinder_localstor.moves import table

SIDES = {table.Side.SOURCE: source.Source,
         table.Side.DESTINATION: destination.Destination}
# From where a state is entered by a call and not by a transition
BY_CALL = {table.State.ABORTING, table.State.DISCARDING}
STATES = sorted(table.TABLE)


@ddt.ddt
class TableTest(unittest.TestCase):

    def test_every_state_has_rules_unless_it_is_final(self):
        self.assertEqual(set(table.State),
                         set(table.TABLE) | set(table.FINAL))
        self.assertEqual(set(), set(table.TABLE) & set(table.FINAL))

    def test_every_state_is_reached(self):
        reached = {table.State.PREPARING} | BY_CALL
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

    @ddt.data(*STATES)
    def test_every_step_is_a_method_of_its_side(self, state):
        for step in (*table.TABLE[state].steps, *table.SERVE,
                     *table.RECONNECT):
            method = getattr(SIDES[step.side], step.name)
            self.assertEqual(['self', 'move'],
                             list(inspect.signature(method).parameters))

    def test_a_step_belongs_to_one_side(self):
        sides = {}
        for rules in table.TABLE.values():
            for step in (*rules.steps, *table.SERVE, *table.RECONNECT):
                self.assertEqual(step.side,
                                 sides.setdefault(step.name, step.side))

    @ddt.data(*STATES)
    def test_a_step_is_taken_once_in_a_state(self, state):
        names = [step.name for step in table.TABLE[state].steps]
        self.assertEqual(len(names), len(set(names)))

    @ddt.data(*STATES)
    def test_every_state_has_one_owner(self, state):
        self.assertIn(table.TABLE[state].owner, SIDES)

    @ddt.data(*STATES)
    def test_steps_of_a_state_that_serves_build_it_again(self, state):
        serving = {step.name for step in table.SERVE + table.RECONNECT}
        self.assertEqual(table.TABLE[state].serves,
                         serving <= table.steps_of(state))

    @ddt.data(*STATES)
    def test_owner_changes_with_the_identity(self, state):
        # The owner is the node that the user's volume lives on.
        for found in table.TABLE[state].transitions:
            if found.to in table.FINAL:
                continue
            changes = table.TABLE[found.to].owner != table.TABLE[state].owner
            self.assertEqual(
                changes, found.identity is table.Identity.SWITCHES, found)

    @ddt.data(*STATES)
    def test_every_fact_can_be_read(self, state):
        rules = table.TABLE[state]
        for names in ([found.facts for found in rules.transitions]
                      + [step.when for step in rules.steps]):
            for name in names:
                self.assertTrue(callable(getattr(facts.Facts,
                                                 '_' + name)))

    @ddt.data(*STATES)
    def test_state_with_steps_is_left_when_they_are_done(self, state):
        rules = table.TABLE[state]
        if rules.steps:
            for found in rules.transitions:
                self.assertTrue('ready' in found.facts or found.at_once)

    def test_hydration_starts_after_the_source_is_sealed(self):
        names = [step.name for step
                 in table.TABLE[table.State.MIGRATING].steps]
        self.assertLess(names.index('seal_source'),
                        names.index('start_hydration'))

    def test_hydration_never_starts_while_the_source_is_attached(self):
        for state, rules in table.TABLE.items():
            for found in rules.transitions:
                if found.to is table.State.MIGRATING:
                    self.assertTrue(
                        {'source_left', 'source_unused'}.intersection(
                            found.facts), state)

    def test_source_is_deleted_last_and_only_when_all_is_local(self):
        for state, rules in table.TABLE.items():
            names = [step.name for step in rules.steps]
            if 'delete_source' in names:
                self.assertEqual('delete_source', names[-1])
                self.assertIn(state, (table.State.COMPLETING,
                                      table.State.DISCARDING))
        for rules in table.TABLE.values():
            for found in rules.transitions:
                if found.to is table.State.COMPLETING:
                    self.assertIn('all_local', found.facts)

    def test_mark_of_an_arriving_copy_is_taken_off_when_it_stands(self):
        names = [step.name for step
                 in table.TABLE[table.State.COMPLETING].steps]
        self.assertLess(names.index('stand_alone'),
                        names.index('keep_destination'))
