# SPDX-License-Identifier: Apache-2.0

import threading

import ddt
from eventlet import patcher
from oslo_concurrency import lockutils

from tests.unit import base
from tests.unit import interleavings

A = 'a@local'


class Counter:
    """What two operations read and write, one step each."""

    def __init__(self):
        self.value = 0
        self.run = None

    def read(self):
        self.run.point(interleavings.on_node(A, 'read', writes=False))
        return self.value

    def write(self, value):
        self.run.point(interleavings.on_node(A, 'write'))
        self.value = value


@ddt.ddt
class ExplorerTest(base.TestCase):

    def explorer(self, operations, judge, preemptions=1):
        """Tries operations on a counter."""
        counter = Counter()

        def perform(schedule, is_known):
            run = counter.run = interleavings.Run(
                [interleavings.Operation(act.__name__, lambda act=act: act(
                    counter), [A]) for act in operations],
                schedule, is_known)
            return run, lambda: str(counter.value), lambda: judge(counter)
        return interleavings.Explorer(preemptions, perform)

    def test_lost_update_is_found_with_its_schedule(self):
        def add(counter):
            counter.write(counter.read() + 1)

        def judge(counter):
            self.assertEqual(2, counter.value)

        explorer = self.explorer([add, add], judge)
        finding = self.assertRaises(interleavings.Finding, explorer.explore)
        found, = (line.partition(': ')[2] for line in str(finding).split('\n')
                  if line.startswith('Schedule: '))
        schedule = interleavings.read_schedule(found)
        self.assertRaises(interleavings.Finding, explorer.replay, schedule)
        self.explorer([add, add], judge, preemptions=0).explore()

    def test_update_under_a_lock_is_not_lost(self):
        def add(counter):
            with lockutils.lock('localstor-add'):
                counter.write(counter.read() + 1)

        explorer = self.explorer(
            [add, add], lambda counter: self.assertEqual(2, counter.value), 2)
        explorer.explore()
        self.assertGreater(explorer.runs, 1)

    def test_lock_of_another_process_is_another_lock(self):
        def add(counter):
            with lockutils.lock('localstor-add'):
                counter.write(counter.read() + 1)

        def add_elsewhere(counter):
            with counter.run.on('b@local'):
                add(counter)

        self.assertRaises(interleavings.Finding, self.explorer(
            [add, add_elsewhere],
            lambda counter: self.assertEqual(2, counter.value)).explore)

    def test_deadlock_is_found(self):
        def forth(counter):
            with lockutils.lock('localstor-one'):
                with lockutils.lock('localstor-two'):
                    counter.read()

        def back(counter):
            with lockutils.lock('localstor-two'):
                with lockutils.lock('localstor-one'):
                    counter.read()

        finding = self.assertRaises(
            interleavings.Finding,
            self.explorer([forth, back], lambda counter: None).explore)
        self.assertIn('deadlock: forth waits for lock localstor-two',
                      str(finding))

    # One lets eventlet's loop wait, the other is what runs.
    @ddt.data(lambda: threading.Event().wait(),
              lambda: patcher.original('time').sleep(60))
    def test_operation_that_waits_for_ever_is_told(self, for_ever):
        self.patch('tests.unit.interleavings.PATIENCE', 3)

        def wait(counter):
            for_ever()

        finding = self.assertRaises(
            interleavings.Finding,
            self.explorer([wait], lambda counter: None).explore)
        self.assertIn('in wait', str(finding))

    @ddt.data((0, {'abxy', 'xyab'}),
              (1, {'abxy', 'xyab', 'axyb', 'xaby'}),
              (2, {'abxy', 'xyab', 'axyb', 'xaby', 'axby', 'xayb'}))
    @ddt.unpack
    def test_all_orders_within_the_bound_and_no_others(self, preemptions,
                                                       expected):
        orders = set()

        def judge(counter):
            orders.add(counter.value)

        def write(text):
            def act(counter):
                for letter in text:
                    counter.run.point(interleavings.on_node(A, letter))
                    counter.value = str(counter.value or '') + letter
            return act

        explorer = self.explorer([write('ab'), write('xy')], judge,
                                 preemptions)
        explorer.explore()
        self.assertEqual(expected, explorer.ends)

    def test_orders_that_are_the_same_are_tried_once(self):
        def look(counter):
            for _time in range(5):
                counter.read()

        explorer = self.explorer([look, look], lambda counter: None, 4)
        explorer.explore()
        self.assertEqual({'0'}, explorer.ends)
        self.assertLess(explorer.runs, 100)

    def test_schedule_is_read_as_it_was_written(self):
        schedule = [0, 0, 1, 0, 1, 1, 1]
        text = interleavings.write_schedule(schedule)
        self.assertEqual('0x2 1x1 0x1 1x3', text)
        self.assertEqual(schedule, interleavings.read_schedule(text))

    def test_operation_that_fails_does_not_keep_the_other(self):
        def fail(counter):
            raise KeyError(counter.read())

        def look(counter):
            counter.read()

        explorer = self.explorer([fail, look], lambda counter: None)
        explorer.explore()
        self.assertEqual({'0'}, explorer.ends)
