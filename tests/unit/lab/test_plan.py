# SPDX-License-Identifier: Apache-2.0

import threading

from oslotest import base

from lab import plan


class PlanTest(base.BaseTestCase):

    def setUp(self):
        super().setUp()
        self.events = []
        self.plan = plan.Plan(
            lambda name, what, seconds: self.events.append((name, what)))

    def test_a_step_begins_when_those_before_it_are_done(self):
        order = []
        self.plan.add('first', lambda: order.append('first'))
        self.plan.add('second', lambda: order.append('second'), ['first'])
        self.plan.add('third', lambda: order.append('third'), ['second'])

        self.plan.run()

        self.assertEqual(['first', 'second', 'third'], order)
        self.assertEqual([('third', 'waiting'), ('third', 'running'),
                          ('third', 'done')],
                         [event for event in self.events
                          if event[0] == 'third'])

    def test_independent_steps_run_side_by_side(self):
        meeting = threading.Barrier(2, timeout=10)
        self.plan.add('one', meeting.wait)
        self.plan.add('other', meeting.wait)

        self.plan.run()

    def test_a_failure_is_raised_and_what_waits_for_it_left_out(self):
        def fail():
            raise ZeroDivisionError
        self.plan.add('bad', fail)
        self.plan.add('after', lambda: None, ['bad'])

        self.assertRaises(ZeroDivisionError, self.plan.run)

        self.plan.join(10)
        self.assertIn(('bad', 'failed'), self.events)
        self.assertNotIn(('after', 'running'), self.events)

    def test_a_step_that_can_not_be_told_of_is_not_taken_for_done(self):
        def tell(name, what, seconds):
            if what == 'running':
                raise BrokenPipeError

        began = []
        told = plan.Plan(tell)
        told.add('untold', lambda: began.append('untold'))
        told.add('after', lambda: began.append('after'), ['untold'])

        self.assertRaises(BrokenPipeError, told.run)

        told.join(10)
        self.assertEqual([], began)

    def test_a_failure_does_not_wait_for_a_step_that_runs(self):
        release = threading.Event()
        begun = threading.Event()

        def slow():
            begun.set()
            release.wait(10)

        def fail():
            begun.wait(10)
            raise ZeroDivisionError
        self.plan.add('slow', slow)
        self.plan.add('bad', fail)
        self.plan.add('next', lambda: None, ['slow'])

        self.assertRaises(ZeroDivisionError, self.plan.run)

        release.set()
        self.plan.join(10)
        self.assertNotIn(('next', 'running'), self.events)

    def test_a_step_waits_for_steps_that_exist(self):
        self.assertRaises(ValueError, self.plan.add, 'step', print, ['none'])

    def test_a_name_is_given_once(self):
        self.plan.add('step', print)

        self.assertRaises(ValueError, self.plan.add, 'step', print)
