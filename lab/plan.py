# SPDX-License-Identifier: Apache-2.0
"""Steps that wait for each other, run side by side."""

import dataclasses
import queue
import threading
import time
from typing import Any
from typing import Callable
from typing import Iterable

# step, what happened to it ("waiting", "running", "done", "failed"), seconds
Progress = Callable[[str, str, float], None]


@dataclasses.dataclass
class _Step:
    name: str
    action: Callable[[], Any]
    after: tuple[str, ...]
    done: threading.Event = dataclasses.field(
        default_factory=threading.Event)
    failed: bool = False


class Plan:
    """A set of named steps; each runs as soon as those before it are done.

    The first failure is raised at once and no further step is begun. Those
    that are running then go on until what they wait for is taken from them;
    :meth:`join` waits for that.
    """

    def __init__(self, progress: Progress | None = None) -> None:
        self._steps: dict[str, _Step] = {}
        self._progress = progress or (lambda name, what, seconds: None)
        self._threads: list[threading.Thread] = []
        # The errors of failed steps; None at the end of each thread.
        self._ends: queue.Queue[BaseException | None] = queue.Queue()
        self._stopped = False

    def add(self, name: str, action: Callable[[], Any],
            after: Iterable[str] = ()) -> None:
        """Add a step; those it waits for must be there already."""
        after = tuple(after)
        missing = [other for other in after if other not in self._steps]
        if missing or name in self._steps:
            raise ValueError(f'step {name}: {missing or "given twice"}')
        self._steps[name] = _Step(name, action, after)

    def run(self) -> None:
        """Run every step."""
        for step in self._steps.values():
            self._progress(step.name, 'waiting', 0)
            self._threads.append(threading.Thread(
                target=self._perform, args=(step,), name=step.name,
                daemon=True))
        try:
            for thread in self._threads:
                thread.start()
            for _ in self._threads:
                error = self._ends.get()
                if error is not None:
                    raise error
        finally:
            self._stopped = True

    def join(self, timeout: float) -> None:
        """Wait for steps that were running when another one failed."""
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            if thread.is_alive():
                thread.join(max(0, deadline - time.monotonic()))

    def _perform(self, step: _Step) -> None:
        end: BaseException | None = None
        try:
            for name in step.after:
                self._steps[name].done.wait()
            if self._stopped or any(self._steps[name].failed
                                    for name in step.after):
                step.failed = True
                return
            start = time.monotonic()
            try:
                self._progress(step.name, 'running', 0)
                step.action()
            except BaseException as error:
                step.failed = True
                end = error
            # What fails after another step has is its consequence.
            if not self._stopped:
                self._progress(step.name,
                               'failed' if step.failed else 'done',
                               time.monotonic() - start)
        finally:
            self._ends.put(end)
            step.done.set()
