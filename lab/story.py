# SPDX-License-Identifier: Apache-2.0
"""How a demo tells its story: chapters, checks, figures, a table at its end.

Exit status 0 means that every check held.
"""

import abc
import argparse
from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import dataclasses
import sys
import time
from typing import Any

import rich.console
import rich.panel
import rich.progress
import rich.table

from lab import arrival
from lab import cloud as clouds
from lab import errors
from lab import instances
from lab import node as nodes
from lab import progress
from lab import user as users

# Seconds
PATIENCE = 300


@dataclasses.dataclass
class Check:
    """Something that has to hold, and what was seen."""

    claim: str
    held: bool
    seen: str = ''


class Story(abc.ABC):
    """One run of a demo.

    :cvar name: of its lab
    :cvar title: what it is about, in a few lines
    :cvar also: what its cloud has besides volumes
    """

    name: str
    title: str
    also: tuple[str, ...] = ()

    def __init__(self, cloud: clouds.Cloud, console: rich.console.Console
                 ) -> None:
        self.cloud = cloud
        self.console = console
        self.user = users.User(cloud)
        self.checks: list[Check] = []
        self.measured: list[tuple[str, str]] = []

    @abc.abstractmethod
    def tell(self) -> None:
        """All of it."""

    def chapter(self, text: str) -> None:
        """A headline."""
        self.console.rule('[bold]' + text, align='left')

    def say(self, text: str) -> None:
        """A line of the story."""
        self.console.print('  ' + text, highlight=False, soft_wrap=True)

    def check(self, claim: str, held: bool, seen: str = '') -> None:
        """Note a check and show how it came out."""
        self.checks.append(Check(claim, held, seen))
        mark = '[green]✓[/]' if held else '[red]✗[/]'
        self.say('%s %s%s' % (mark, claim,
                              '  [dim]%s[/]' % seen if seen else ''))

    def eventually(self, claim: str, holds: Callable[[], bool]) -> None:
        """Check something that may still take a moment."""
        end = time.monotonic() + PATIENCE
        while not holds() and time.monotonic() < end:
            time.sleep(0.5)
        self.check(claim, holds())

    def gone(self, what: str, node: nodes.Node, argv: list[str], name: str
             ) -> None:
        """Check that a command does not show a name any more."""
        out = node.run(argv, check=False).stdout
        self.check('%s is gone from %s' % (what, node.name),
                   name not in out, '$ ' + ' '.join(argv))

    def measure(self, what: str, value: str) -> None:
        """Note a figure for the table at the end."""
        self.measured.append((what, value))
        self.say('%s: [bold]%s[/]' % (what, value))

    @contextlib.contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Measure how long something takes."""
        start = time.monotonic()
        yield
        self.measure(what, '%.1f s' % (time.monotonic() - start))

    def arrived(self, node: nodes.Node, device: str
                ) -> tuple[int, int] | None:
        """MiB that are here and that there are; None if all has arrived."""
        found = arrival.look(node, device)
        return found and (found.local >> 20, found.total >> 20)

    def watch_arrive(self, node: nodes.Node, device: str) -> int:
        """Show how a volume arrives; MiB that it has, 0 if it was there."""
        bar = rich.progress.Progress(
            rich.progress.TextColumn('  arriving'), rich.progress.BarColumn(),
            rich.progress.TaskProgressColumn(),
            rich.progress.TextColumn('{task.completed:.0f} of '
                                     '{task.total:.0f} MiB'),
            rich.progress.TimeRemainingColumn(), console=self.console)
        end = time.monotonic() + PATIENCE
        total = 0
        with bar:
            task = bar.add_task('arriving', total=1024)
            while time.monotonic() < end:
                found = self.arrived(node, device)
                if found is None:
                    bar.update(task, completed=total or 1024)
                    break
                total = found[1]
                bar.update(task, completed=found[0], total=total)
                time.sleep(0.5)
        return total

    def summary(self) -> bool:
        """The table at the end; whether every check held."""
        self.console.print()
        table = rich.table.Table('measured', 'value', title='What was seen')
        for row in self.measured:
            table.add_row(*row)
        held = sum(check.held for check in self.checks)
        table.add_section()
        table.add_row('checks that held', '%d of %d' % (held,
                                                        len(self.checks)))
        self.console.print(table)
        for check in self.checks:
            if not check.held:
                self.console.print('[red]did not hold:[/] %s %s' % (
                    check.claim, check.seen))
        return held == len(self.checks)


def main(kind: type[Story], argv: list[str] | None = None) -> int:
    """Bring a lab up and tell a story; the exit status."""
    parser = argparse.ArgumentParser(description=kind.__doc__)
    parser.add_argument('--name', default=kind.name, help='name of the lab')
    options = parser.parse_args(argv)
    console = rich.console.Console(highlight=False)
    console.print(rich.panel.Panel(kind.title, title='cinder-localstor'))
    cloud = clouds.Cloud(options.name)
    # dm-clone is there, too; this is the data path to recommend.
    settings: dict[str, Any] = {'local': {'localstor_data_path': 'hydrator'}}
    start = time.monotonic()
    try:
        with progress.shown(sys.stdout) as shown:
            cloud.up(nodes=2, progress=shown, options=settings,
                     also=kind.also)
        story = kind(cloud, console)
        story.measure('the cloud came up in',
                      '%.0f s' % (time.monotonic() - start))
        story.tell()
    except (errors.LabError, users.VolumeError,
            instances.InstanceError) as error:
        console.print('[red]%s[/]' % error)
        return 1
    held = story.summary()
    console.print('The lab is still up: .venv/bin/python -m lab --name %s '
                  'status; "make lab-down" ends it.' % options.name)
    return 0 if held else 1
