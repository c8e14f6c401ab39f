# SPDX-License-Identifier: Apache-2.0
"""What happens in a chaos run: the log, the counters, the first failure."""

import collections
import contextlib
import dataclasses
import pathlib
import threading
import time
from typing import Iterator

# Seconds for which a fault that has ended still excuses what goes wrong, where
# nobody says otherwise
AFTERMATH = 90


@dataclasses.dataclass
class Journal:
    """The record of a run; every thread writes to it."""

    path: pathlib.Path
    aftermath: float = AFTERMATH
    counts: collections.Counter[str] = dataclasses.field(
        default_factory=collections.Counter)
    # Who -> what is under way there
    under_way: dict[str, str] = dataclasses.field(default_factory=dict)
    failures: list[str] = dataclasses.field(default_factory=list)
    # No new action begins: the time is over, or something has failed.
    over: threading.Event = dataclasses.field(
        default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.start = time.monotonic()
        self._lock = threading.Lock()
        # Whoever takes power, services or networks away, until they are back
        self.breaking = threading.Lock()
        self._faults: set[str] = set()
        self._last_fault = float('-inf')
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text('')

    def note(self, who: str, what: str) -> None:
        """A line in the log."""
        with self._lock, open(self.path, 'a') as log:
            log.write('%s %7.1f s  %-8s %s\n' % (
                time.strftime('%H:%M:%S'), time.monotonic() - self.start,
                who, what))

    def count(self, kind: str, number: int = 1) -> None:
        """So many more of these."""
        with self._lock:
            self.counts[kind] += number

    def fail(self, what: str) -> None:
        """This must not be: the run ends."""
        self.note('FAILURE', what)
        with self._lock:
            self.failures.append(what)
        self.over.set()

    # Faults

    @contextlib.contextmanager
    def fault(self, what: str) -> Iterator[None]:
        """While this goes on, things may go wrong."""
        with self._lock:
            self._faults.add(what)
        self.count('faults')
        self.under_way['faults'] = ', '.join(sorted(self._faults))
        try:
            yield
        finally:
            with self._lock:
                self._faults.discard(what)
                self._last_fault = time.monotonic()
            self.under_way['faults'] = ', '.join(sorted(self._faults))

    def disturbed(self, since: float) -> bool:
        """Whether a fault may be to blame for what went wrong.

        :param since: when it began, on the monotonic clock
        """
        with self._lock:
            return bool(self._faults) or (
                self._last_fault + self.aftermath > since)
