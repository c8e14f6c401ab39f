# SPDX-License-Identifier: Apache-2.0

import threading
from unittest import mock

from cinder.db import api as db
import ddt
import sqlalchemy as sa

from cinder_localstor.datapath import wipes
from cinder_localstor import exception
from cinder_localstor.moves import queues
from cinder_localstor.moves import scheduler
from cinder_localstor.moves import table
from cinder_localstor import rows
from tests.unit import base

# Seconds in which something happens that must
PATIENCE = 30


class SchedulerTestCase(base.TestCase):

    def setUp(self):
        super().setUp()
        self.cloud = base.Cloud(self, (base.A, base.B, base.C))
        self.scheduler = self.cloud.running[base.B].scheduler

    def arrive(self, count, periods=2):
        for _number in range(count):
            self.cloud.move(self.cloud.create_volume())
        for _time in range(periods):
            self.cloud.watch()

    def cost(self, host=base.B):
        """Calls of the node and statements of a period."""
        node = self.cloud.nodes[host]
        node.faults.forget()
        with base.Statements() as statements:
            self.cloud.running[host].scheduler.watch()
        return [name for name, _nth in node.faults.seen], statements.texts


class CostTest(SchedulerTestCase):

    def costs(self, host):
        found = []
        for more in (1, 9, 40):
            self.arrive(more)
            found.append(self.cost(host))
        return found

    def test_period_costs_the_same_whatever_arrives(self):
        costs = self.costs(base.B)
        self.assertEqual(50, len(rows.for_host(self.ctxt, base.B)))
        for calls, statements in costs:
            self.assertEqual(['SimulatedDeviceMapper.devices'], calls)
            self.assertEqual(len(costs[0][1]), len(statements))
        # The moves, and what the types of their volumes want
        self.assertEqual(2, len(costs[0][1]))

    def test_period_costs_the_same_whatever_leaves(self):
        costs = self.costs(base.A)
        for calls, statements in costs:
            self.assertEqual([], calls)
            self.assertEqual(1, len(statements))

    def test_node_without_moves_asks_nobody(self):
        self.cloud.watch()
        self.assertEqual(([], []), self.cost())

    def test_wipes_of_a_peer_are_asked_for_at_once(self):
        self.patch('cinder_localstor.datapath.wipes.Wipes.wipe')
        self.arrive(5)
        self.cloud.hydrate()
        for _time in range(2):
            self.cloud.watch()
        self.assertEqual({table.State.COMPLETING}, {
            move.state for move in rows.for_host(self.ctxt, base.B)})
        calls, statements = self.cost()
        self.assertEqual(['Peers.remaining'], calls)
        # The moves: what was given up is kept for no snapshot.
        self.assertEqual(1, len(statements))

    def test_rows_are_found_by_their_ids(self):
        self.arrive(3)
        _calls, statements = self.cost()
        for statement in statements:
            with db.main_context_manager.reader.using(self.ctxt) as session:
                plan = session.execute(sa.text(
                    'EXPLAIN QUERY PLAN ' + statement.replace('?', "'x'")))
                steps = [row[3] for row in plan]
            self.assertEqual([], [step for step in steps if 'SCAN' in step])


class KnownTest(SchedulerTestCase):

    def test_move_that_nobody_has_told_of_is_found_in_time(self):
        self.arrive(1)
        self.scheduler._known.clear()
        self.cloud.hydrate()
        for _time in range(scheduler.SEARCH_EVERY + 2):
            self.scheduler.watch()
        self.cloud.watch()
        self.assertEqual([], rows._moves(self.ctxt))

    def test_move_that_has_ended_is_forgotten(self):
        self.arrive(1)
        self.cloud.settle()
        self.cloud.watch()
        self.assertEqual(set(), self.scheduler._known)


@ddt.ddt
class TurnTest(SchedulerTestCase):

    def hydrating(self):
        return [move.move_id for move in rows.for_host(self.ctxt, base.B)
                if 'start_hydration' in move.done]

    @ddt.data(1, 2)
    def test_so_many_copy_at_a_time_and_all_arrive(self, most):
        self.override('localstor_max_moves', most)
        self.cloud.boot(base.B)
        self.arrive(4)
        self.assertEqual(most, len(self.hydrating()))
        self.cloud.settle()
        self.assertEqual([], rows._moves(self.ctxt))

    def test_none_begins_while_another_volume_is_prepared(self):
        first = self.cloud.create_volume()
        self.cloud.move(first)
        seen = []

        def look(_host, name):
            if name == 'SimulatedInitiator.connect':
                self.scheduler.watch()
                seen.append(self.hydrating())

        self.cloud.nodes[base.B].faults.observe = look
        self.cloud.move(self.cloud.create_volume())
        self.assertEqual([[]], seen)
        self.cloud.watch()
        self.assertEqual(2, len(self.hydrating()))

    def test_volume_whose_source_is_away_takes_no_turn(self):
        self.override('localstor_max_moves', 1)
        self.cloud.boot(base.B)
        self.arrive(1)
        self.cloud.nodes[base.A].cut_power()
        self.cloud.down.add(base.A)
        self.cloud.move(self.cloud.create_volume(base.C))
        self.cloud.watch()
        self.assertEqual(2, len(self.hydrating()))
        self.cloud.settle()
        self.assertEqual([], rows._moves(self.ctxt))

    def test_waiting_costs_nothing(self):
        self.override('localstor_max_moves', 1)
        self.cloud.boot(base.B)
        self.arrive(5)
        calls, statements = self.cost()
        self.assertEqual(['SimulatedDeviceMapper.devices'], calls)
        self.assertEqual(2, len(statements))


class WipeTest(SchedulerTestCase):

    def test_wipe_that_was_broken_off_goes_on_after_a_restart(self):
        volume = self.cloud.create_volume(base.B)
        self.cloud.running[base.B].mover._handles.delete(volume.name)
        node = self.cloud.nodes[base.B]
        for power in (False, True):
            with mock.patch.object(node.volumes, 'clear',
                                   side_effect=exception.CommandFailed(
                                       command='dd', host='b', reason='no')):
                self.scheduler.watch()
            self.assertEqual(1, len(node.volumes.disks))
            if power:
                node.cut_power()
            self.cloud.boot(base.B)
        self.cloud.running[base.B].scheduler.watch()
        self.assertEqual({}, node.volumes.disks)

    def test_move_waits_for_the_wipe_and_no_request_does(self):
        wipe = wipes.Wipes.wipe
        with mock.patch.object(wipes.Wipes, 'wipe'):
            self.arrive(1)
            self.cloud.hydrate()
            for _time in range(3):
                self.cloud.watch()
            [move] = rows.for_host(self.ctxt, base.B)
            self.assertEqual(table.State.COMPLETING, move.state)
            self.assertIn('delete_source', move.done)
            self.assertEqual('', move.problem)
        self.assertIs(wipe, wipes.Wipes.wipe)
        for _time in range(2):
            self.cloud.watch()
        self.assertEqual([], rows._moves(self.ctxt))

    def test_report_tells_of_it(self):
        volume = self.cloud.create_volume(base.B)
        self.cloud.running[base.B].mover._handles.delete(volume.name)
        volume.destroy()
        found = self.cloud.report(base.B)
        [copy] = found.backends[0].copies
        self.assertEqual(('wiping', volume.id, ()),
                         (copy.role.value, copy.volume_id, copy.problems))
        self.assertTrue(found.is_well)


class NothingUrgentWaitsTest(SchedulerTestCase):
    """Eight wipes at once, and eight deletes, while a volume arrives."""

    def test_volume_is_sealed_while_the_disks_are_wiped(self):
        ended, began = threading.Event(), threading.Semaphore(0)
        self.addCleanup(ended.set)

        def wipe(_self, _name):
            began.release()
            ended.wait(PATIENCE)
        self.patch('cinder_localstor.datapath.wipes.Wipes.wipe', wipe)
        mover = self.cloud.running[base.B].mover
        made = self.cloud.running[base.B].scheduler
        # Pools of threads, as in reality
        made._wiping = queues.Queue(scheduler.WIPERS)
        for _number in range(8):
            mover._handles.delete(self.cloud.create_volume(base.B).name)
        ninth = self.cloud.create_volume()
        self.cloud.move(ninth)
        made._urgent = queues.Queue(scheduler.URGENT_WORKERS)
        made._slow = queues.Queue(scheduler.SLOW_WORKERS)
        sealed = threading.Event()
        drive = made._executor.drive

        def tell(*args, **kwargs):
            state = drive(*args, **kwargs)
            sealed.set()
            return state
        self.mock_object(made._executor, 'drive', tell)
        made.watch()
        for _worker in range(scheduler.WIPERS):
            self.assertTrue(began.acquire(timeout=PATIENCE))
        self.assertTrue(sealed.wait(PATIENCE))
        self.assertFalse(ended.is_set())
        [move] = rows.for_volume(self.ctxt, ninth.id)
        self.assertEqual({'seal_source', 'start_hydration'}, set(move.done))
