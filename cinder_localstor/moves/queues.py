# SPDX-License-Identifier: Apache-2.0
"""Work that waits for a worker, in queues that don't wait for each other."""

from __future__ import annotations

import collections
from collections.abc import Callable
import threading
from typing import Any

import futurist


class Queue:
    """Work of one kind, so much of it at a time.

    A peer that hangs takes half of the workers at most, so that what needs
    another goes on.
    """

    def __init__(self, workers: int, pool: Any = None) -> None:
        """:param workers: how many there are
        :param pool: where they come from, a pool of threads if it is None
        """
        self._pool = pool or futurist.ThreadPoolExecutor(workers)
        self._share = max(1, workers // 2)
        self._lock = threading.Lock()
        self._waiting: list[tuple[str, Callable[[], None]]] = []
        self._running: collections.Counter[str] = collections.Counter()

    def submit(self, peer: str, work: Callable[[], None]) -> None:
        """Have something done as soon as there is a worker.

        :param peer: whom it may have to wait for, '' for nobody
        """
        with self._lock:
            self._waiting.append((peer, work))
        self._pool.submit(self._work)

    def _work(self) -> None:
        """Do what waits.

        What is left, because its peer has its share of the workers, is taken
        up by the first of them that is done.
        """
        while (found := self._take()) is not None:
            peer, work = found
            try:
                work()
            finally:
                with self._lock:
                    self._running[peer] -= 1

    def _take(self) -> tuple[str, Callable[[], None]] | None:
        with self._lock:
            for place, (peer, _work) in enumerate(self._waiting):
                if not peer or self._running[peer] < self._share:
                    self._running[peer] += 1
                    return self._waiting.pop(place)
        return None
