# SPDX-License-Identifier: Apache-2.0

import threading

from cinder_localstor.moves import queues
from tests.unit import base

# Seconds in which something happens that must
PATIENCE = 10


class QueueTest(base.TestCase):

    def setUp(self):
        super().setUp()
        self.queue = queues.Queue(4)
        self.ended = threading.Event()
        self.addCleanup(self.ended.set)

    def hang(self, peer, times):
        """Let a peer hang in some work; the semaphore counts what began."""
        begun = threading.Semaphore(0)

        def work():
            begun.release()
            self.ended.wait(PATIENCE)
        for _time in range(times):
            self.queue.submit(peer, work)
        return begun

    def do(self, peer):
        done = threading.Event()
        self.queue.submit(peer, done.set)
        return done

    def test_peer_that_hangs_leaves_workers_to_others(self):
        begun = self.hang('b', 10)
        self.assertTrue(begun.acquire(timeout=PATIENCE))
        self.assertTrue(begun.acquire(timeout=PATIENCE))
        self.assertTrue(self.do('c').wait(PATIENCE))
        self.assertTrue(self.do('').wait(PATIENCE))
        self.assertFalse(begun.acquire(blocking=False))

    def test_what_waits_for_its_peer_is_done_when_that_is_back(self):
        self.hang('b', 10)
        last = self.do('b')
        self.assertFalse(last.is_set())
        self.ended.set()
        self.assertTrue(last.wait(PATIENCE))

    def test_work_that_fails_keeps_no_worker(self):
        for _time in range(10):
            self.queue.submit('b', lambda: 1 / 0)
        self.assertTrue(self.do('b').wait(PATIENCE))
