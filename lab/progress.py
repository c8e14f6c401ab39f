# SPDX-License-Identifier: Apache-2.0
"""Shows how far a plan has come."""

import contextlib
import threading
from typing import Iterator
from typing import TextIO

from rich import console as consoles
from rich import progress as bars

from lab import plan


@contextlib.contextmanager
def shown(stream: TextIO) -> Iterator[plan.Progress]:
    """A line for every step: live on a terminal, else as each one ends."""
    console = consoles.Console(file=stream, highlight=False)
    if not console.is_terminal:
        yield _plain(stream)
        return
    columns = (bars.SpinnerColumn(finished_text='[green]✓'),
               bars.TextColumn('{task.description}'),
               bars.TimeElapsedColumn())
    with bars.Progress(*columns, console=console) as display:
        tasks: dict[str, bars.TaskID] = {}

        def report(name: str, what: str, seconds: float) -> None:
            if what == 'waiting':
                tasks[name] = display.add_task(f'[dim]{name}', start=False,
                                               total=1)
            elif what == 'running':
                display.update(tasks[name], description=name)
                display.start_task(tasks[name])
            elif what == 'done':
                display.update(tasks[name], completed=1)
            else:
                display.update(tasks[name], description=f'[red]{name} '
                                                        'failed')
                display.stop_task(tasks[name])

        yield report


def _plain(stream: TextIO) -> plan.Progress:
    lock = threading.Lock()

    def report(name: str, what: str, seconds: float) -> None:
        if what in ('done', 'failed'):
            with lock:
                stream.write(f'{name}: {what} ({seconds:.1f} s)\n')
                stream.flush()
    return report
