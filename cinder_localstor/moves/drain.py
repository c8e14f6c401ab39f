# SPDX-License-Identifier: Apache-2.0
"""Empties a backend, so that its node can be replaced.

Cinder itself migrates the volumes that nobody uses, as by ``openstack volume
migrate``: its scheduler says whether one may go where it is sent.  What Cinder
does not migrate stays until somebody does something about it.

Nothing is recorded but by these migrations.  What is on the backend is read
anew at each look, so a run that is broken off is begun again.
"""

from __future__ import annotations

from collections.abc import Iterable
import dataclasses
from typing import Any

# The first, because it registers Cinder's objects.
from cinder_localstor import opts  # noqa: F401

from cinder.common import constants
from cinder import context
from cinder import exception as cinder_exception
from cinder import objects
from cinder.scheduler import rpcapi
from cinder.volume import api
from cinder.volume import volume_utils
import oslo_messaging
from oslo_utils import units

from cinder_localstor import exception
from cinder_localstor.moves import registry
from cinder_localstor.moves import table
from cinder_localstor.peers import directory
from cinder_localstor import rows

# Volumes that leave at the same time, if nothing else is asked for
AT_ONCE = 4
# What Cinder's volumes are while they are migrated by it
LEAVING = ('starting', 'migrating', 'completing')
FAILED = 'error'


@dataclasses.dataclass(frozen=True)
class Going:
    """A volume that moves, or whose copies do.

    :ivar size: bytes
    :ivar problem: what keeps it from going on, '' if nothing does
    """

    volume_id: str
    size: int
    problem: str = ''


@dataclasses.dataclass(frozen=True)
class Staying:
    """What stays, and what can be done about it.

    :ivar kind: what users call it
    """

    kind: str
    identity: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Look:
    """What there is on a backend at one moment.

    :ivar size: bytes of all copies
    :ivar ready: volumes that can be migrated
    """

    size: int = 0
    ready: tuple[objects.Volume, ...] = ()
    going: tuple[Going, ...] = ()
    staying: tuple[Staying, ...] = ()

    @property
    def is_over(self) -> bool:
        """Whether there is nothing to begin or to wait for."""
        return not self.ready and not self.going


class Drain:
    """Empties one backend."""

    def __init__(self, host: str, name: str, at_once: int = AT_ONCE) -> None:
        """:param host: ``host@backend``
        :param name: its ``volume_backend_name``; volumes go to backends of
            the same one
        :param at_once: how many volumes leave at the same time
        """
        self.host = host
        self._name = name
        self._at_once = at_once
        self._volumes = api.API()
        self._scheduler = rpcapi.SchedulerAPI()
        # Pools that volumes were sent to, and why they did not get there
        self._tried: dict[str, dict[str, str]] = {}
        # GiB that were sent to a pool, which may not know of them yet
        self._sent: dict[str, int] = {}
        # As the scheduler knows them at one look
        self._pools: list[dict[str, Any]] = []

    def check(self, ctxt: context.RequestContext) -> None:
        """:raises NotDisabled: new volumes would come
        :raises NotUp: nobody hands the volumes out
        """
        service = objects.Service.get_by_args(ctxt, self.host,
                                              constants.VOLUME_BINARY)
        if not service.disabled:
            raise exception.NotDisabled(host=self.host)
        if not service.is_up:
            raise exception.NotUp(host=self.host)

    def advance(self, ctxt: context.RequestContext) -> Look:
        """Let as many volumes leave as may at the same time.

        :returns: what was there before
        :raises NoScheduler: nobody says where they can go
        """
        found = self.look(ctxt)
        for volume in found.ready[:max(self._at_once - len(found.going), 0)]:
            pool = self._choose(volume)
            if pool is not None:
                self._send(ctxt, volume, pool)
        return found

    def look(self, ctxt: context.RequestContext) -> Look:
        """What there is now.

        :raises NoScheduler: nobody says where volumes can go
        """
        self._pools = self._find_pools(ctxt)
        present = registry.read(ctxt, self.host)
        going = {move.volume_id: Going(
            move.volume_id, move.transfer.size, move.problem)
            for move in present.moves if self._ends(move, present)}
        shadows = {move.move_id for move in present.moves}
        users = rows.users_on(ctxt, self.host)
        with_snapshots = rows.with_snapshots(ctxt, self.host)
        ready, staying = [], []
        for volume in objects.VolumeList.get_all_by_host(ctxt, self.host):
            if volume.id in going or volume.id in shadows:
                continue
            if _is_under_way(volume):
                going[volume.id] = Going(volume.id, volume.size * units.Gi)
                continue
            self._note_failure(volume)
            reason = self._why_not(volume, users.get(volume.id, ()),
                                   volume.id in with_snapshots)
            if reason:
                staying.append(Staying('volume', volume.id, reason))
            else:
                ready.append(volume)
        staying += [Staying('snapshot', snapshot.snapshot_id,
                            'It is one of volume %s, and stays where it was '
                            'taken. Make a volume of it elsewhere if you want '
                            'to keep it, and delete it.' % snapshot.volume_id)
                    for snapshot in present.snapshots]
        sizes = {copy.name: copy.size for copy in present}
        return Look(sum(sizes.values()), tuple(ready), tuple(going.values()),
                    tuple(staying))

    def _ends(self, move: rows.Move, present: registry.Registry) -> bool:
        """Whether a move ends by itself and leaves nothing here.

        A source is kept for as long as thick snapshots lie on it.
        """
        if move.state != table.State.KEEPING:
            return True
        return move.transfer.source_host == self.host and not any(
            snapshot.depends_on.name == move.transfer.source_name
            for snapshot in present.snapshots if snapshot.depends_on)

    def _why_not(self, volume: objects.Volume, users: Iterable[str],
                 has_snapshots: bool) -> str:
        """Why a volume can't be migrated, '' if it can."""
        if users:
            return ('It is attached to %s. It goes with a server that is '
                    'migrated; detach it from all else.'
                    % ', '.join(sorted(users)))
        if volume.status != 'available':
            return 'It is %s, not available.' % volume.status
        if has_snapshots:
            return ('It has snapshots, and Cinder does not migrate such a '
                    'volume. Delete them, or attach it on another node.')
        if volume.group_id:
            return ('It is in group %s, and Cinder does not migrate such a '
                    'volume. Remove it from the group.' % volume.group_id)
        if self._choose(volume) is not None:
            return ''
        tried = self._tried.get(volume.id)
        if not tried:
            return ('There is no backend %s of this driver on another node '
                    'that is up and enabled.' % self._name)
        return 'It can not go: ' + '; '.join(
            '%s: %s' % refusal for refusal in tried.items())

    def _note_failure(self, volume: objects.Volume) -> None:
        for pool, reason in self._tried.get(volume.id, {}).items():
            if not reason and volume.migration_status == FAILED:
                self._tried[volume.id][pool] = (
                    'refused, as the logs of cinder-scheduler and of '
                    'cinder-volume here tell')

    def _choose(self, volume: objects.Volume) -> str | None:
        """The pool that has most room of those that have not refused a
        volume; None if there is none.
        """
        tried = self._tried.get(volume.id, {})
        rooms = {pool['name']: self._room(pool) for pool in self._pools
                 if pool['name'] not in tried}
        return max(rooms, key=rooms.__getitem__, default=None)

    def _room(self, pool: dict[str, Any]) -> float:
        return (float(pool['capabilities'].get('free_capacity_gb') or 0)
                - self._sent.get(pool['name'], 0))

    def _find_pools(self, ctxt: context.RequestContext
                    ) -> list[dict[str, Any]]:
        """The pools on other nodes that volumes can go to.

        The scheduler is not asked for those of the volume's type: Cinder
        29.0.0 fails at that where one of them is thin.
        """
        try:
            found = self._scheduler.get_pools(ctxt, {
                'volume_backend_name': self._name})
        except oslo_messaging.MessagingException as error:
            raise exception.NoScheduler(
                reason=str(error) or type(error).__name__) from error
        node = volume_utils.extract_host(self.host, 'host')
        return [pool for pool in found
                if volume_utils.extract_host(pool['name'], 'host') != node
                and str(pool['capabilities'].get('location_info')).startswith(
                    directory.LOCATION.partition('%')[0])]

    def _send(self, ctxt: context.RequestContext, volume: objects.Volume,
              pool: str) -> None:
        tried = self._tried.setdefault(volume.id, {})
        tried[pool] = ''
        try:
            self._volumes.migrate_volume(ctxt, volume, pool, None,
                                         force_copy=False, lock_volume=False)
        except cinder_exception.CinderException as error:
            tried[pool] = str(error)
        else:
            self._sent[pool] = self._sent.get(pool, 0) + volume.size


def _is_under_way(volume: objects.Volume) -> bool:
    """Whether Cinder migrates a volume, or makes it to take another's place.
    """
    status = volume.migration_status or ''
    return (status in LEAVING or volume.status in rows.LOCKED
            or status.startswith(rows.TARGET)
            and not volume.status.startswith('error'))
