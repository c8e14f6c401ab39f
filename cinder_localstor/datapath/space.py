# SPDX-License-Identifier: Apache-2.0
"""The space of a thin pool that volumes arrive in (hazard H30).

All volumes of a node suffer when it is full.  A thick group has no such thing:
there a volume has its space as soon as it is made.
"""

from typing import Any

from oslo_utils import units

from cinder_localstor.datapath import copies
from cinder_localstor import exception
from cinder_localstor.node import interface


class Space:
    """What may still arrive in the thin pool of a group, if it has one.

    :ivar full: what was wrong at the last look, '' if there was space
    """

    def __init__(self, volumes: interface.VolumeGroup, configuration: Any
                 ) -> None:
        self._volumes = volumes
        self._configuration = configuration
        self._looked = False
        self.full = ''

    @property
    def _limit(self) -> float:
        return self._configuration.localstor_pool_limit / 100

    def look(self) -> None:
        """See how full the pool is, with one command at most."""
        pool = self._volumes.pool()
        self.full = self.problem(pool) if pool else ''
        self._looked = True

    def has_room(self) -> bool:
        """Whether there was space at the last look."""
        if not self._looked:
            self.look()
        return not self.full

    def problem(self, pool: interface.Pool) -> str:
        """What is wrong with the space in a pool, '' if there is enough."""
        if max(pool.data, pool.metadata) < self._limit:
            return ''
        # It has to fit into a row of metadata.
        return ('thin pool %s is full: data %.1f %%, metadata %.1f %%; from '
                "%d %% on nothing is copied to it. Extend it with 'lvextend' "
                "(metadata: '--poolmetadatasize'), or delete volumes"
                % (pool.name, pool.data * 100, pool.metadata * 100,
                   self._limit * 100))

    def check(self, name: str, needed: int) -> None:
        """Whether `needed` bytes more may arrive, as copy `name`.

        What moves that are under way will still bring counts as used.

        :raises NotEnoughSpace: the pool would be too full
        """
        pool = self._volumes.pool()
        if pool is None or name in pool.volumes:
            return
        free = int(pool.size * (self._limit - pool.data)) - _promised(pool)
        if needed > free or self.problem(pool):
            raise exception.NotEnoughSpace(
                group=pool.name, host='this node', name=name,
                free=_gibibytes(max(free, 0)), needed=_gibibytes(needed))


def _promised(pool: interface.Pool) -> int:
    """Bytes that are still to come in a pool."""
    promised = 0
    for volume in pool.volumes.values():
        label = copies.Label(volume.tags)
        if label.move_id:
            promised += max(0, label.needs(volume.size) - volume.used)
    return promised


def _gibibytes(size: int) -> str:
    return '%.2f GiB' % (size / units.Gi)
