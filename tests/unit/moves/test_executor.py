# SPDX-License-Identifier: Apache-2.0

import threading
import time
from unittest import mock

import ddt

from cinder_localstor.datapath import source
from cinder_localstor import exception
from cinder_localstor.moves import executor
from cinder_localstor.moves import facts
from cinder_localstor.moves import table
from cinder_localstor.node import simulated
from cinder_localstor import rows
from tests.unit import base


# Seconds
PATIENCE = 10
A_WHILE = 0.1

# Of the module, which tests of moves replace
AT_ONCE = executor.at_once


class SidesTest(base.TestCase):

    def test_calls_overlap(self):
        barrier = threading.Barrier(2, timeout=PATIENCE)
        AT_ONCE([barrier.wait, barrier.wait])

    def test_error_of_one_is_told_when_the_others_have_ended(self):
        ended = []

        def fail():
            raise exception.LocalStorException(reason='first')

        def end():
            time.sleep(A_WHILE)
            ended.append(True)

        for calls in [fail, end], [end, fail]:
            self.assertRaisesRegex(exception.LocalStorException, 'first',
                                   AT_ONCE, calls)
        self.assertEqual([True, True], ended)


@ddt.ddt
class StagesTest(base.TestCase):

    @ddt.data(*table.TABLE)
    def test_every_step_is_in_one_stage_and_in_turn(self, state):
        steps = table.TABLE[state].steps
        stages = executor._stages(steps)
        self.assertEqual(list(steps), sum(stages, []))
        for stage in stages:
            self.assertEqual(1, len({step.when for step in stage}))

    def test_destination_is_made_while_its_source_is_exported(self):
        self.assertEqual(
            [[table.EXPORT_SOURCE, table.CREATE_DESTINATION],
             [table.CREATE_MAP, table.CONNECT_SOURCE, table.BUILD_ENGINE,
              table.BUILD_HANDLE]],
            executor._stages(table.TABLE[table.State.PREPARING].steps))

    @ddt.data(table.State.PREPARING, table.State.CREATING)
    def test_map_is_made_while_the_source_is_connected(self, state):
        *_others, stage = executor._stages(table.TABLE[state].steps)
        self.assertEqual(
            [[table.CREATE_MAP, table.CONNECT_SOURCE], [table.BUILD_ENGINE],
             [table.BUILD_HANDLE]],
            executor._together(stage[-4:]))

    def test_nothing_else_is_done_beside_something(self):
        for state, rules in table.TABLE.items():
            if state is not table.State.PREPARING:
                for stage in executor._stages(rules.steps):
                    self.assertEqual(1, len({step.side for step in stage}))


class ExecutorTest(base.TestCase):

    def setUp(self):
        super().setUp()
        self.cloud = base.Cloud(self)
        self.volume = self.cloud.create_volume()

    def executor(self, host):
        return self.cloud.running[host].executor

    def begun(self):
        self.cloud.move(self.volume)
        return rows.for_volume(self.ctxt, self.volume.id)[0]

    def test_a_move_has_one_owner_in_every_state(self):
        move = self.begun()
        for state, rules in table.TABLE.items():
            changed = rows.dataclasses.replace(move, state=state.value)
            self.assertEqual(
                {base.A: rules.owner is table.Side.SOURCE,
                 base.B: rules.owner is table.Side.DESTINATION},
                {host: self.executor(host).owns(changed)
                 for host in self.cloud.nodes})

    def test_move_of_somebody_else_is_left_alone(self):
        move = self.begun()
        self.assertIsNone(self.executor(base.A).drive(self.ctxt,
                                                      move.move_id))

    def test_move_that_has_ended_is_left_alone(self):
        move = self.begun()
        rows.forget(self.ctxt, move)
        self.assertIsNone(self.executor(base.B).drive(self.ctxt,
                                                      move.move_id))

    def test_step_that_is_done_is_not_done_again(self):
        move = self.begun()
        self.cloud.watch()
        runner = self.executor(base.B)._steps
        with mock.patch.object(runner, 'run') as run:
            self.executor(base.B).drive(self.ctxt, move.move_id)
        run.assert_not_called()

    def test_steps_after_one_that_failed_are_not_done(self):
        move = self.begun()
        faults = self.cloud.nodes[base.A].faults
        faults.forget()
        faults.plan = simulated.Call('SimulatedTarget.export', 0,
                                     simulated.Fault.ERROR)
        self.assertRaises(exception.LocalStorException,
                          self.executor(base.A)._steps.run, self.ctxt,
                          move.transfer, ['export_source', 'seal_source'])
        self.assertEqual('SimulatedTarget.export', faults.seen[-1][0])

    def test_step_of_another_state_is_refused(self):
        # A late one could bring back what the move has taken away since.
        move = self.begun()
        for name in ('__init__', 'progress', 'nonsense', 'create_destination',
                     'delete_source'):
            error = self.assertRaises(
                exception.StepTooLate, self.executor(base.A)._steps.run,
                self.ctxt, move.transfer, [name])
            self.assertIn(name, str(error))

    def test_step_of_a_move_that_has_ended_is_refused(self):
        move = self.begun()
        self.cloud.settle()
        self.assertRaises(
            exception.StepTooLate, self.executor(base.A)._steps.run,
            self.ctxt, move.transfer, ['export_source'])
        self.assertEqual(set(), self.cloud.nodes[base.A].target.exported())

    def test_steps_of_a_stage_are_one_request(self):
        asked = []
        peers = self.cloud.movers[base.A]._peers
        run = peers.run
        peers.run = lambda peer, move, steps, patient=True: (
            asked.append(steps), run(peer, move, steps, patient))
        self.begun()
        self.assertEqual([
            ['create_destination'],
            ['create_map', 'connect_source', 'build_engine',
             'build_handle']], asked)

    def test_map_is_settled_before_the_source_may_go(self):
        move = self.begun()
        self.cloud.watch()
        self.cloud.hydrate()
        arriving = self.executor(base.B)._destination
        order = []
        settle, change = arriving.settle, rows.change_state
        with mock.patch.object(arriving, 'settle', lambda *args: (
                order.append('settle'), settle(*args))), \
            mock.patch.object(rows, 'change_state', lambda *args, **more: (
                order.append(args[2]), change(*args, **more))[1]):
            self.executor(base.B).drive(self.ctxt, move.move_id)
        self.assertEqual(['settle', 'completing'], order)


@ddt.ddt
class AtOnceTest(base.TestCase):
    """Several threads, as the RPC server and the periodic task are."""

    def setUp(self):
        super().setUp()
        self.inside = base.Inside()
        self.turns = facts.Turns(0)
        self.move = mock.Mock(move_id='m', source_name='copy', is_copy=False,
                              is_snapshot=False, state='migrating', done=())
        # The database of the tests is that of one thread.
        self.get = self.patch('cinder_localstor.rows.get',
                              return_value=self.move)

    def runner(self, export):
        node = mock.Mock()
        node.target.export.side_effect = export
        return executor.StepRunner(source.Source(node, mock.Mock()),
                                   mock.Mock(), self.turns)

    def test_repeated_request_waits_for_the_first(self):
        runner = self.runner(self.inside)
        errors = base.at_once(*2 * [lambda: runner.run(
            self.ctxt, self.move, ['export_source'])])
        self.assertEqual(([None, None], 1), (errors, self.inside.most))

    def test_repeated_request_finds_what_has_changed_meanwhile(self):
        def export(*_args):
            self.inside()
            self.get.return_value = None

        runner = self.runner(export)
        errors = base.at_once(*2 * [lambda: runner.run(
            self.ctxt, self.move, ['export_source'])])
        self.assertEqual({type(None), exception.StepTooLate},
                         set(map(type, errors)))

    @ddt.data(('creating', False), ('preparing', False), ('migrating', True))
    @ddt.unpack
    def test_no_other_move_begins_to_hydrate_while_a_user_waits(
            self, state, begins):
        self.move.state = state
        taken = []
        self.runner(lambda *_args: taken.append(
            self.turns.take('another', set))).run(
            self.ctxt, self.move, ['export_source'])
        self.assertEqual([begins], taken)
        self.assertTrue(self.turns.take('another', set))

    def test_steps_that_need_not_wait_for_each_other_do_not(self):
        self.move.state = 'preparing'
        meeting = threading.Barrier(2, timeout=PATIENCE)
        with mock.patch.object(executor, 'at_once', AT_ONCE), \
            mock.patch.object(executor.StepRunner, '_run',
                              lambda *_args: meeting.wait()):
            self.runner(mock.Mock()).run(
                self.ctxt, self.move, ['create_map', 'connect_source'])

    def test_steps_of_two_moves_do_not_wait_for_each_other(self):
        runner = self.runner(self.inside)
        base.at_once(*[lambda move_id=move_id: runner.run(
            self.ctxt, mock.Mock(move_id=move_id, source_name='copy',
                                 is_copy=False, is_snapshot=False),
            ['export_source'])
            for move_id in 'mn'])
        self.assertEqual(2, self.inside.most)

    def test_a_move_is_driven_by_one_at_a_time(self):
        driver = executor.Executor(None, None, mock.Mock(host=base.A), None,
                                   None, None)
        driver.owns = lambda _move: True
        driver._advance = lambda *_args: (
            self.inside(), table.State.MIGRATING)[1]
        errors = base.at_once(*2 * [lambda: driver.drive(self.ctxt, 'm')])
        self.assertEqual(([None, None], 1), (errors, self.inside.most))
