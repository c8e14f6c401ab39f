# SPDX-License-Identifier: Apache-2.0
"""What users of Nova wait for: this driver beside Cinder's own for LVM.

Both serve one lab, each a backend of its own on each node, and are measured in
turn.  Nothing here judges a figure.
"""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import dataclasses
import statistics
import time

from lab import cloud as clouds
from lab import instances
from lab import node as nodes
from lab import services
from lab import user as users

OURS, THEIRS = 'local', 'thin'
# The second backend of a node, with the same target as the first
OPTIONS: services.Options = {
    OURS: {'localstor_data_path': 'hydrator'},
    THEIRS: {'volume_driver': 'cinder.volume.drivers.lvm.LVMVolumeDriver',
             'lvm_type': 'default', 'target_helper': 'tgtadm',
             'target_port': 3260}}
# Seconds
PATIENCE = 300


@dataclasses.dataclass(frozen=True)
class Compared:
    """What users waited for, in seconds; None where there is no such thing."""

    what: str
    ours: float | None
    theirs: float | None

    @property
    def ratio(self) -> float | None:
        """Ours to theirs."""
        if self.ours is None or not self.theirs:
            return None
        return self.ours / self.theirs


class Samples:
    """Seconds by what was waited for, in the order of the first of each."""

    def __init__(self) -> None:
        self.found: dict[str, list[float]] = {}

    def add(self, what: str, seconds: float | None) -> None:
        """One more; None says nothing."""
        if seconds is not None:
            self.found.setdefault(what, []).append(seconds)

    @contextlib.contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """One more: how long something takes."""
        start = time.monotonic()
        yield
        self.add(what, time.monotonic() - start)

    def median(self, what: str) -> float | None:
        """None if there are none."""
        found = self.found.get(what)
        return statistics.median(found) if found else None


def run(cloud: clouds.Cloud, rounds: int, say: Callable[[str], None]
        ) -> list[Compared]:
    """Measure both drivers in so many rounds; medians.

    :raises InstanceError: an instance failed
    :raises VolumeError: a volume failed
    """
    samples = {kind: Samples() for kind in (OURS, THEIRS)}
    for number in range(rounds):
        home, away = cloud.nodes[::-1] if number % 2 else cloud.nodes
        for kind, found in samples.items():
            say('round %d of %d: %s' % (number + 1, rounds, kind))
            _Server(cloud, kind, home, away, found).live()
    ours, theirs = samples.values()
    return [Compared(what, ours.median(what), theirs.median(what))
            for what in ours.found]


class _Server:
    """One server that does what users do, and is gone."""

    def __init__(self, cloud: clouds.Cloud, kind: str, home: nodes.Node,
                 away: nodes.Node, samples: Samples) -> None:
        self._cloud = cloud
        self._user = users.User(cloud)
        self._kind = kind
        self._home = home
        self._away = away
        self._timed = samples.timed
        self._samples = samples
        self._volumes: list[str] = []

    def live(self) -> None:
        """Boot, use, migrate, delete."""
        root = self._create(self._home, instances.image(self._cloud))
        with self._timed('boot from a volume'):
            server = instances.boot(self._cloud, root, self._home)
        for node, where in ((self._home, 'own'), (self._away, 'other')):
            self._plug(server, self._create(node), where)
        self._migrate_live(server, root)
        with self._timed('cold migration'):
            server.act('migrate', {'host': self._home.name})
            server.wait_for('VERIFY_RESIZE')
        server.act('confirmResize')
        server.wait_for('ACTIVE')
        with self._timed('delete a server'):
            server.delete()
        for volume in self._volumes:
            self._user.wait_for_status(volume, 'available')
            self._user.delete_volume(volume)

    def _create(self, node: nodes.Node, image: str | None = None) -> str:
        volume = self._user.create_volume(1, self._kind, node.name, image)
        self._volumes.append(volume)
        return volume

    def _plug(self, server: instances.Instance, volume: str, where: str
              ) -> None:
        with self._timed('attach, a volume of the %s node' % where):
            server.attach(volume)
        with self._timed('detach, a volume of the %s node' % where):
            server.detach(volume)
            server.wait_for_report('gone', volume)
            self._user.wait_for_status(volume, 'available')

    def _migrate_live(self, server: instances.Instance, root: str) -> None:
        start = time.monotonic()
        with self._timed('live migration'):
            server.live_migrate(self._away)
        self._samples.add("live migration, the guest's pause",
                          server.downtime())
        if self._kind == OURS:
            self._wait_until_local(root)
            self._samples.add('live migration, until all is local',
                              time.monotonic() - start)
        if server.panicked:
            server.reboot()
            server.wait_for_stamps(root)
        server.assert_alive()

    def _wait_until_local(self, volume: str) -> None:
        """:raises VolumeError: it takes more than 300 s"""
        end = time.monotonic() + PATIENCE
        while any(found['migration_status']
                  for found in self._user.volumes()):
            if time.monotonic() > end:
                raise users.VolumeError('volume %s does not arrive' % volume)
            time.sleep(0.2)
