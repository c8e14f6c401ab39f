# SPDX-License-Identifier: Apache-2.0
"""Steps that wait for each other, run side by side."""

import dataclasses
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

    The first failure is raised, steps that wait for a failed one are left
    out, those already running are waited for.
    """

    def __init__(self, progress: Progress | None = None) -> None:
        self._steps: dict[str, _Step] = {}
        self._progress = progress or (lambda name, what, seconds: None)
        self._errors: list[BaseException] = []

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
        threads = []
        for step in self._steps.values():
            self._progress(step.name, 'waiting', 0)
            threads.append(threading.Thread(target=self._perform,
                                            args=(step,), name=step.name,
                                            daemon=True))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._errors:
            raise self._errors[0]

    def _perform(self, step: _Step) -> None:
        try:
            for name in step.after:
                self._steps[name].done.wait()
            if self._errors or any(self._steps[name].failed
                                   for name in step.after):
                step.failed = True
                return
            self._progress(step.name, 'running', 0)
            start = time.monotonic()
            try:
                step.action()
            except BaseException as error:
                step.failed = True
                self._errors.append(error)
            self._progress(step.name, 'failed' if step.failed else 'done',
                           time.monotonic() - start)
        finally:
            step.done.set()
