# SPDX-License-Identifier: Apache-2.0
"""What an attachment takes: this driver beside Cinder's own, in one cloud.

There is no Nova: Cinder's API is asked as Nova does, and then os-brick opens
the volume on the node (:mod:`lab.opener`).  Drivers take turns, and nothing
else is under way when one is measured.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from concurrent import futures
import dataclasses
import datetime
import itertools
import json
import operator
import re
import statistics
import sys
import time
import uuid

from keystoneauth1 import exceptions
from rich import bar
from rich import console as consoles
from rich import table as tables

from lab import cloud as clouds
from lab import compare
from lab import configuration
from lab import errors
from lab import leftovers
from lab import node as nodes
from lab import sizes
from lab import user as users

DRIVERS = (*configuration.BACKENDS, compare.THEIRS)
# Seconds
PATIENCE = 900
# GiB
SIZE = 1
# Bytes of each node's disks: as many volumes as come at once, and their copies
DISK_SIZE = 24 * sizes.GIB

OWN = "on the volume's node"
OTHER = 'on another node'
PLACES = (OWN, OTHER)

# What keeps one measurement from its end
_FAILED = (users.VolumeError, exceptions.HttpError, errors.LabError)

_FORKS = re.compile(r'^processes (?P<number>\d+)$', re.MULTILINE)
_STEP = re.compile(
    r'^(?P<when>[\d-]+ [\d:.]+) .* Move (?P<move>[0-9a-f-]{36}) of volume '
    r'\S+: (?P<word>\w+)(?: took (?P<seconds>[\d.]+) s)?(?P<left> -> \w+)?')


@dataclasses.dataclass(frozen=True)
class Attached:
    """One attachment.

    :ivar driver: the backend's name
    :ivar api: seconds until Cinder has answered
    :ivar opened: seconds until os-brick had a device
    :ivar started: processes and threads that both nodes have started for it
    """

    driver: str
    place: str
    api: float
    opened: float
    started: int

    @property
    def seconds(self) -> float:
        """All that a user waits for."""
        return self.api + self.opened


@dataclasses.dataclass(frozen=True)
class Storm:
    """Attachments on another node, all asked for at once.

    :ivar seconds: for each that succeeded, until Cinder had answered
    :ivar failures: why the others did not
    """

    driver: str
    seconds: list[float]
    failures: list[str]


def middle(values: Iterable[float]) -> float:
    """The median; not a number where there are none."""
    return statistics.median([*values] or [float('nan')])


def almost_all(values: Iterable[float]) -> float:
    """What 95 of 100 don't exceed: of fewer than 20 the highest."""
    found = sorted(values)
    return found[-1 - len(found) // 20] if found else float('nan')


def show(found: list[Attached], at_once: list[Storm], lines: Iterable[str],
         console: consoles.Console) -> None:
    """Print tables and bars.

    :param lines: as :func:`steps` takes them
    """
    attached = tables.Table('Driver', 'Attached', 'Seconds', '95 of 100',
                            'Cinder', 'os-brick', 'Processes', 'Ratio', '')
    longest = max((one.seconds for one in found), default=1)
    for place in PLACES:
        theirs = middle(one.seconds for one in found
                        if (one.driver, one.place) == (compare.THEIRS, place))
        for driver in DRIVERS:
            chosen = [one for one in found
                      if (one.driver, one.place) == (driver, place)]
            if not chosen:
                continue
            seconds = [one.seconds for one in chosen]
            attached.add_row(
                driver, place, f'{middle(seconds):.2f}',
                f'{almost_all(seconds):.2f}',
                f'{middle(one.api for one in chosen):.2f}',
                f'{middle(one.opened for one in chosen):.2f}',
                f'{middle(one.started for one in chosen):.0f}',
                f'{middle(seconds) / theirs:.2f}',
                bar.Bar(longest, 0, middle(seconds), width=30))
    console.print(attached)
    taken = tables.Table('Step of a move that is prepared', 'Seconds')
    for step, median in steps(lines).items():
        taken.add_row(step, f'{median:.2f}')
    console.print(taken)
    asked = tables.Table('Driver', 'At once', 'Failed', 'Seconds',
                         '95 of 100')
    for one in at_once:
        asked.add_row(one.driver, str(len(one.seconds) + len(one.failures)),
                      str(len(one.failures)), f'{middle(one.seconds):.2f}',
                      f'{almost_all(one.seconds):.2f}')
    console.print(asked)


def run(cloud: clouds.Cloud, rounds: int, say: Callable[[str], None]
        ) -> Iterator[Attached]:
    """Attach a volume of each driver on both nodes, and again.

    What fails is told, and spoils nothing else.

    :param say: told what is under way
    """
    bench = _Bench(cloud)
    for number, driver, place in itertools.product(
            range(rounds), DRIVERS, PLACES):
        try:
            found = bench.attach(driver, place)
        except _FAILED as error:
            say(f'{driver}, {place}: failed: {error}')
        else:
            say(f'round {number + 1} of {rounds}: {driver}, {place}: '
                f'{found.seconds:.2f} s')
            yield found


def storms(cloud: clouds.Cloud, number: int, say: Callable[[str], None]
           ) -> Iterator[Storm]:
    """Attach so many volumes of one node on another, all at once; those of
    each driver in turn.

    :param say: told what is under way
    """
    for driver in DRIVERS:
        say(f'{number} at once: {driver}')
        try:
            found = _Bench(cloud).storm(driver, number)
        except _FAILED as error:
            say(f'{driver}: failed: {error}')
        else:
            for failure in found.failures:
                say(failure)
            yield found


def steps(lines: Iterable[str]) -> dict[str, float]:
    """Medians of the seconds that the steps of preparing moves took, and, by
    the state's name, that all of them took: some are done at the same time.

    The clocks of two nodes differ by some tenths of a second, so that the
    order of what they have logged says little.

    :param lines: what cinder-volume has logged, on all nodes
    """
    # Brings Cinder with it, and is only wanted here
    from cinder_localstor.moves import table

    names = {step.name for step in
             table.TABLE[table.State.PREPARING].steps}
    moves: dict[str, list[re.Match[str]]] = {}
    for match in filter(None, map(_STEP.match, lines)):
        moves.setdefault(match['move'], []).append(match)
    taken: dict[str, list[float]] = {}
    for events in moves.values():
        events.sort(key=operator.itemgetter('when'))
        for event in events:
            if event['left'] and event['word'] == table.State.PREPARING.value:
                taken.setdefault(event['word'], []).append(
                    (_time(event['when'])
                     - _time(events[0]['when'])).total_seconds())
            if event['seconds'] and event['word'] in names:
                taken.setdefault(event['word'], []).append(
                    float(event['seconds']))
    return {step: middle(seconds) for step, seconds in taken.items()}


def _time(text: str) -> datetime.datetime:
    return datetime.datetime.strptime(text, '%Y-%m-%d %H:%M:%S.%f')


class _Bench:

    def __init__(self, cloud: clouds.Cloud) -> None:
        self._cloud = cloud
        self._user = users.User(cloud)
        self._home, self._other = cloud.nodes[:2]

    def attach(self, driver: str, place: str) -> Attached:
        """One attachment, and the end of all that it has begun."""
        volume = self._user.create_volume(SIZE, driver, self._home.name)
        node = self._home if place == OWN else self._other
        looked = self._started()
        before = self._started()
        seconds, attachment = self._connect(volume, node)
        opened = float(node.run(
            [sys.executable, '-W', 'ignore', '-m', 'lab.opener'],
            input=json.dumps({
                'driver_volume_type':
                    attachment.connection['driver_volume_type'],
                'data': attachment.connection}),
            environment={'PYTHONPATH': str(self._cloud.layout.repository)},
            timeout=users.PATIENCE).stdout)
        # A look starts some itself.
        started = self._started() - before - (before - looked)
        self._clear_up([volume], [attachment])
        return Attached(driver, place, seconds, opened, started)

    def _started(self) -> int:
        """Processes and threads that the nodes have started since they
        booted, see proc(5).
        """
        return sum(int(match['number']) for node in (self._home, self._other)
                   for match in _FORKS.finditer(
                       node.run(['cat', '/proc/stat']).stdout))

    def storm(self, driver: str, number: int) -> Storm:
        """So many at once, and the end of all that they have begun."""
        volumes = [self._user.create_volume(SIZE, driver, self._home.name)
                   for _number in range(number)]
        result = Storm(driver, [], [])
        attachments = []
        with futures.ThreadPoolExecutor(number) as pool:
            for asked in [pool.submit(self._connect, volume, self._other)
                          for volume in volumes]:
                try:
                    seconds, attachment = asked.result()
                except exceptions.HttpError as error:
                    result.failures.append(str(error))
                else:
                    result.seconds.append(seconds)
                    attachments.append(attachment)
        self._clear_up(volumes, attachments)
        return result

    def _connect(self, volume: str, node: nodes.Node
                 ) -> tuple[float, users.Attachment]:
        reserved = self._user.reserve(volume, str(uuid.uuid4()))
        start = time.monotonic()
        attachment = self._user.connect(reserved, node)
        return time.monotonic() - start, attachment

    def _clear_up(self, volumes: list[str],
                  attachments: list[users.Attachment]) -> None:
        for attachment in attachments:
            self._user.detach(attachment)
        for volume in volumes:
            self._user.delete_volume(volume, PATIENCE)
        leftovers.wait_until_local(self._cloud, PATIENCE)
