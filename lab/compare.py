# SPDX-License-Identifier: Apache-2.0
"""What instances wait for: this driver beside Cinder's own, in one cloud.

Both do the same in turn, in the same minutes.  Whatever is measured ends when
the guest has said that it uses its disk, or when Nova has done its part; both
are looked at every half second.
"""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import dataclasses
import statistics
import time

from keystoneauth1 import exceptions

from lab import cloud as clouds
from lab import configuration
from lab import instances
from lab import leftovers
from lab import node as nodes
from lab import nova_setup
from lab import parts
from lab import sizes
from lab import user as users

OURS = configuration.BACKENDS[0]
THEIRS = parts.IN_TREE.backends[0].name
# Seconds
PATIENCE = 900
# GiB
SIZE = 1

BOOT = 'boot from a volume, until the guest uses it'
ATTACH_HERE = "attach a volume of the instance's node"
ATTACH_THERE = 'attach a volume of the other node'
DETACH = 'detach'
MIGRATE = 'live migration'
PAUSE = "the guest's pause in it"
LOCAL = 'after it, until all is local'
COLD = 'cold migration, until it can be confirmed'
# In the order of the table
STEPS = (BOOT, ATTACH_HERE, ATTACH_THERE, DETACH, MIGRATE, PAUSE, LOCAL, COLD)


@dataclasses.dataclass(frozen=True)
class Figure:
    """One measurement.

    :ivar driver: the backend's name
    """

    driver: str
    step: str
    seconds: float


@dataclasses.dataclass(frozen=True)
class Compared:
    """The two drivers' medians of a step, in seconds; None: not measured."""

    step: str
    ours: float | None
    theirs: float | None

    @property
    def ratio(self) -> float | None:
        """Ours by theirs."""
        if self.ours is None or not self.theirs:
            return None
        return self.ours / self.theirs


def disk_size(volumes: int) -> int:
    """Bytes that a backend's disk must have at least.

    All volumes of a round may come to lie on one node, the root and the two
    that are attached one by one among them; LVM and the moves' maps have some
    of the rest.
    """
    return (volumes + 4) * SIZE * sizes.GIB


def run(cloud: clouds.Cloud, rounds: int, volumes: int,
        say: Callable[[str], None]) -> Iterator[Figure]:
    """Measure both drivers, in turn.

    A round that fails is told, and what it had measured until then counts.

    :param volumes: how many an instance has that migrates live
    :param say: told what is under way
    """
    for number in range(rounds):
        # Who is first finds colder caches, or less to clean up.
        for driver in (OURS, THEIRS)[::1 if number % 2 else -1]:
            say('round %d of %d: %s' % (number + 1, rounds, driver))
            turn = _Round(cloud, driver, volumes)
            try:
                turn.measure()
            except (instances.InstanceError, users.VolumeError,
                    exceptions.HttpError) as error:
                say('cut short: %s' % error)
            yield from turn.figures
            turn.clear_up()


def compare(figures: list[Figure]) -> list[Compared]:
    """Medians of all rounds, side by side."""
    def median(driver: str, step: str) -> float | None:
        found = [figure.seconds for figure in figures
                 if (figure.driver, figure.step) == (driver, step)]
        return statistics.median(found) if found else None
    return [Compared(step, median(OURS, step), median(THEIRS, step))
            for step in STEPS]


class _Round:
    """One instance's life with volumes of one driver."""

    def __init__(self, cloud: clouds.Cloud, driver: str, volumes: int
                 ) -> None:
        self._cloud = cloud
        self._driver = driver
        self._user = users.User(cloud)
        self._here, self._there = cloud.nodes[:2]
        self._more = volumes - 1
        self._volumes: list[str] = []
        self._instances: list[instances.Instance] = []
        self.figures: list[Figure] = []

    def measure(self) -> None:
        """Do each of the steps once; what took how long is in `figures`.

        :raises InstanceError:
        :raises VolumeError:
        :raises HttpError: it could not go on
        """
        root = self._create(self._here, instances.image(self._cloud))
        data = [self._create(node) for node in (self._here, self._there)]
        more = [self._create(self._here) for _number in range(self._more)]
        with self._timed(BOOT):
            instance = instances.request(
                self._cloud, nova_setup.GUEST, root, self._here)
            self._instances.append(instance)
            instance.wait_until_booted(root)
        for step, volume in zip((ATTACH_HERE, ATTACH_THERE), data):
            with self._timed(step):
                instance.attach(volume)
        self._wait_until_local()
        for volume in data:
            with self._timed(DETACH):
                instance.detach(volume)
        for volume in more:
            instance.attach(volume)
        self._migrate(instance)
        for volume in more:
            instance.detach(volume)
        with self._timed(COLD):
            instance.act('migrate', {'host': self._here.name})
            instance.wait_for('VERIFY_RESIZE')
        instance.act('confirmResize')
        instance.wait_for('ACTIVE')
        self._wait_until_local()

    def clear_up(self) -> None:
        """Delete all that it had."""
        for instance in self._instances:
            instance.delete()
        for volume in self._volumes:
            self._user.delete_volume(volume, PATIENCE)

    def _migrate(self, instance: instances.Instance) -> None:
        with self._timed(MIGRATE):
            instance.live_migrate(self._there)
        paused = instance.downtime()
        if paused is not None:
            self.figures.append(Figure(self._driver, PAUSE, paused))
        if self._driver == OURS:
            with self._timed(LOCAL):
                self._wait_until_local()
        instance.go_on()

    def _create(self, node: nodes.Node, image: str | None = None) -> str:
        volume = self._user.create_volume(SIZE, self._driver, node.name, image)
        self._volumes.append(volume)
        return volume

    def _wait_until_local(self) -> None:
        """:raises VolumeError: a move does not end"""
        leftovers.wait_until_local(self._cloud, PATIENCE)

    @contextlib.contextmanager
    def _timed(self, step: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.figures.append(Figure(self._driver, step,
                                   time.monotonic() - start))
