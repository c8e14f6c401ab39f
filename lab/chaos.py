# SPDX-License-Identifier: Apache-2.0
"""Users play in a lab that breaks; in the end nothing may be lost or left."""

from collections.abc import Sequence
import contextlib
import dataclasses
import functools
import threading
import time
from typing import Callable
from typing import Iterator
from typing import TextIO

from rich import console as consoles
from rich import live
from rich import progress as bars
from rich import table as tables

from lab import actor
from lab import cloud as clouds
from lab import configuration
from lab import faults
from lab import instance_player
from lab import journal as journals
from lab import leftovers
from lab import player
from lab import releases

# Seconds
REFRESH = 0.5
PATIENCE = 300
# One node with native threads, the others with eventlet
ENVIRONMENT = {'node2': {'OS_CINDER_DISABLE_EVENTLET_PATCHING': '1'}}


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run does.

    :ivar minutes: for how long users act and things break
    :ivar rate: requests a second of each guest, unless Nova runs it
    :ivar instances: whether users have instances of Nova's
    :ivar backends: those of the volumes, in turn
    :ivar former: the revision whose driver all nodes but the first begin
        with, '' for the present one everywhere
    """

    minutes: float
    seed: int
    players: int = 4
    rate: float = 30
    instances: bool = False
    backends: Sequence[str] = configuration.BACKENDS
    former: str = ''


def run(cloud: clouds.Cloud, plan: Plan, stream: TextIO) -> journals.Journal:
    """Play; the journal tells what has failed."""
    journal = journals.Journal(
        cloud.layout.directory / 'chaos.log',
        instance_player.AFTERMATH if plan.instances else journals.AFTERMATH)
    journal.note('chaos', '%g minutes, seed %d, %d users, nodes %s' % (
        plan.minutes, plan.seed, plan.players,
        ', '.join(node.name for node in cloud.nodes)))
    for node in cloud.nodes[1:] if plan.former else ():
        releases.choose(node, plan.former)
        node.service('cinder-volume').restart()
    before = leftovers.everything(cloud)
    players = [_player(cloud, plan, number, journal)
               for number in range(plan.players)]
    with _shown(journal, plan, stream):
        _play(cloud, plan, players, journal)
        if not journal.failures:
            _side_by_side([one.finish for one in players])
        if not journal.failures:
            _check_leftovers(cloud, before, journal)
    journal.note('chaos', 'over: %s' % summary(journal))
    return journal


def _player(cloud: clouds.Cloud, plan: Plan, number: int,
            journal: journals.Journal) -> actor.Actor:
    name = 'user%d' % (number + 1)
    # Each has sessions of his own with the API.
    own = clouds.Cloud(cloud.name)
    backend = plan.backends[number % len(plan.backends)]
    if plan.instances:
        return instance_player.InstancePlayer(name, own, plan.seed, backend,
                                              journal)
    return player.Player(name, own, plan.seed, backend, journal, plan.rate)


def _play(cloud: clouds.Cloud, plan: Plan, players: Sequence[actor.Actor],
          journal: journals.Journal) -> None:
    breaking = faults.Faults(cloud, journal, plan.seed)
    timer = threading.Timer(60 * plan.minutes, journal.over.set)
    timer.daemon = True
    timer.start()
    breaking.start()
    _side_by_side([one.play for one in players])
    timer.cancel()
    breaking.join()


def _side_by_side(actions: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=action, daemon=True)
               for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _check_leftovers(cloud: clouds.Cloud, before: dict[str, list[str]],
                     journal: journals.Journal) -> None:
    journal.under_way['chaos'] = 'looks for leftovers'
    end = time.monotonic() + PATIENCE
    while True:
        changed = leftovers.difference(before, leftovers.everything(cloud))
        if not changed:
            journal.note('chaos', 'nothing is left on any node')
            return
        if time.monotonic() > end:
            for kind, names in changed.items():
                journal.fail('%s: %s' % (kind, names))
            return
        time.sleep(2)


def summary(journal: journals.Journal) -> str:
    """The counters in a line."""
    return ', '.join('%d %s' % (number, kind) for kind, number
                     in sorted(journal.counts.items()))


@contextlib.contextmanager
def _shown(journal: journals.Journal, plan: Plan, stream: TextIO
           ) -> Iterator[None]:
    """A bar, what is under way and the counters, live on a terminal."""
    console = consoles.Console(file=stream, highlight=False)
    if not console.is_terminal:
        yield
        return
    bar = bars.Progress(bars.TextColumn('chaos, seed %d' % plan.seed),
                        bars.BarColumn(), bars.TaskProgressColumn(),
                        bars.TimeElapsedColumn(), console=console)
    task = bar.add_task('', total=60 * plan.minutes)
    with live.Live(console=console, auto_refresh=True,
                   refresh_per_second=1 / REFRESH,
                   get_renderable=functools.partial(
                       _picture, journal, bar, task)):
        yield


def _picture(journal: journals.Journal, bar: bars.Progress,
             task: bars.TaskID) -> tables.Table:
    bar.update(task, completed=time.monotonic() - journal.start)
    picture = tables.Table.grid(padding=(0, 2))
    picture.add_row('', bar)
    for who, what in sorted(journal.under_way.items()):
        picture.add_row(who, what)
    picture.add_row('[dim]so far', '[dim]' + summary(journal))
    for failure in journal.failures:
        picture.add_row('[red]failed', failure)
    return picture
