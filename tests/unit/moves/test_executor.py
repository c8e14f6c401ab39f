# SPDX-License-Identifier: Apache-2.0

from unittest import mock

import ddt

from cinder_localstor.datapath import engine
from cinder_localstor import exception
from cinder_localstor.moves import executor
from cinder_localstor.moves import table
from cinder_localstor import rows
from tests.unit import base

OFF, RUNNING, DIFFERS, DONE, FAILED, MISSING = (
    engine.Hydration.OFF, engine.Hydration.RUNNING,
    engine.Hydration.DIFFERS, engine.Hydration.DONE,
    engine.Hydration.FAILED, engine.Hydration.MISSING)


@ddt.ddt
class FactsTest(base.TestCase):

    def facts(self, hydration=OFF, local=0, attached=(), leaving=(),
              state='migrating', done=(), used=True):
        self.arriving = mock.Mock()
        self.arriving.progress.return_value = engine.Progress(
            hydration, local, 100)
        self.patch('cinder_localstor.rows.attachments', return_value=[
            {'id': name} for name in attached])
        self.look = mock.Mock(return_value={})
        move = mock.Mock(state=state, done=done, leaving=leaving)
        return executor.Facts(self.ctxt, move, self.arriving, None,
                              self.look, lambda host, move: used)

    @ddt.data(((), (), True, True), (('old',), ('old',), False, True),
              (('new',), ('old',), True, False),
              (('old', 'new'), ('old',), False, False),
              (('new',), (), True, False), ((), ('old',), True, True))
    @ddt.unpack
    def test_who_has_left(self, attached, leaving, source, destination):
        facts = self.facts(attached=attached, leaving=leaving)
        self.assertEqual((source, destination), (
            facts.holds('source_left'), facts.holds('destination_left')))

    @ddt.data((('old',), ('old',), False), (('new',), ('old',), True),
              (('new',), (), True), ((), (), False))
    @ddt.unpack
    def test_wanted(self, attached, leaving, expected):
        facts = self.facts(attached=attached, leaving=leaving)
        self.assertEqual(expected, facts.holds('wanted'))

    @ddt.data((0, False), (1, True))
    @ddt.unpack
    def test_written(self, local, expected):
        self.assertEqual(expected, self.facts(OFF, local).holds('written'))

    @ddt.data(True, False)
    def test_source_unused(self, used):
        self.assertEqual(not used,
                         self.facts(used=used).holds('source_unused'))

    @ddt.data((OFF, 0, True), (OFF, 1, False), (RUNNING, 0, False),
              (MISSING, 0, False), (FAILED, 0, False), (DONE, 100, False))
    @ddt.unpack
    def test_untouched(self, hydration, local, expected):
        self.assertEqual(expected,
                         self.facts(hydration, local).holds('untouched'))

    @ddt.data((OFF, False), (RUNNING, False), (DIFFERS, False), (DONE, True),
              (FAILED, False), (MISSING, False))
    @ddt.unpack
    def test_all_local(self, hydration, expected):
        # Bytes that say 100% of a broken engine are no arrival.
        self.assertEqual(expected,
                         self.facts(hydration, 100).holds('all_local'))

    @ddt.data(((), False), (('seal_source',), False),
              (('seal_source', 'start_hydration'), True))
    @ddt.unpack
    def test_ready(self, done, expected):
        self.assertEqual(expected, self.facts(done=done).holds('ready'))

    def test_state_without_steps_is_ready(self):
        self.assertTrue(self.facts(state='starting').holds('ready'))

    def test_fact_is_read_once_and_only_when_asked_for(self):
        facts = self.facts()
        self.look.assert_not_called()
        for _time in range(2):
            facts.holds('all_local')
        self.look.assert_called_once_with()
        rows.attachments.assert_not_called()


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
        runner = self.executor(base.A)._steps
        ran = []

        def fail(_move):
            ran.append('export_source')
            raise exception.LocalStorException(reason='no')
        source = runner._sides[table.Side.SOURCE]
        with mock.patch.object(source, 'export_source', fail), \
                mock.patch.object(source, 'seal_source', ran.append):
            self.assertRaises(exception.LocalStorException, runner.run,
                              self.ctxt, move.transfer,
                              ['export_source', 'seal_source'])
        self.assertEqual(['export_source'], ran)

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

    def test_steps_of_one_side_are_one_request(self):
        asked = []
        peers = self.cloud.movers[base.A]._peers
        run = peers.run
        peers.run = lambda peer, move, steps, patient=True: (
            asked.append(steps), run(peer, move, steps, patient))
        self.begun()
        self.assertEqual([['create_destination', 'create_map',
                           'connect_source', 'build_engine',
                           'build_handle']], asked)

    def test_map_is_settled_before_the_source_may_go(self):
        move = self.begun()
        self.cloud.watch()
        self.cloud.hydrate()
        arriving = self.executor(base.B)._arriving
        order = []
        settle, change = arriving.settle, rows.change_state
        with mock.patch.object(arriving, 'settle', lambda *args: (
                order.append('settle'), settle(*args))), \
            mock.patch.object(rows, 'change_state', lambda *args, **more: (
                order.append(args[2]), change(*args, **more))[1]):
            self.executor(base.B).drive(self.ctxt, move.move_id)
        self.assertEqual(['settle', 'completing'], order)
