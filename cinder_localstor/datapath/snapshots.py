# SPDX-License-Identifier: Apache-2.0
"""Snapshots on one node.

A snapshot is a logical volume of the node that its volume was on then, and
stays there.  LVM suspends the volume under its handle for a moment, so that
what a guest was answered is in the snapshot, and what it asks for later is
not; the handle needs no suspending of its own.

A thin snapshot needs nothing else.  A thick one has what its origin has
changed since, and reads the rest there: the origin has to stay.
"""

from typing import Any

from cinder_localstor.datapath import copies
from cinder_localstor.datapath import space
from cinder_localstor.datapath import transfer
from cinder_localstor.datapath import wipes
from cinder_localstor import exception
from cinder_localstor.node import interface


class Snapshots:
    """The snapshots of one node; every method is idempotent."""

    def __init__(self, node: interface.Node, configuration: Any) -> None:
        self._volumes = node.volumes
        self._space = space.Space(node.volumes, configuration)
        self._wipes = wipes.Wipes(node.volumes)

    def origin(self, host: str, name: str) -> copies.Origin | None:
        """What a snapshot of a copy could not do without.

        :param host: ``host@backend`` of this node
        """
        return None if self._volumes.thin else copies.Origin(host, name)

    def create(self, snapshot: copies.Copy, name: str) -> None:
        """Make a snapshot of a copy that has all of its content.

        :param name: of the copy
        :raises NotEnoughSpace: the volume group or the pool is too full
        :raises StillArrives: some of the content is on another node
        """
        found = self._volumes.logical_volumes().get(name)
        if found is None:
            raise exception.LogicalVolumeMissing(
                group=self._volumes.name, name=name, host='this node')
        if copies.Label(found.tags).move_id:
            raise exception.StillArrives(name=name,
                                         volume_id=snapshot.volume_id)
        self._check_space(snapshot.name)
        self._volumes.create_snapshot(snapshot.name, name, transfer.tags(
            volume=snapshot.volume_id, snapshot=snapshot.snapshot_id,
            generation=snapshot.generation))

    def _check_space(self, name: str) -> None:
        """:raises NotEnoughSpace: the thin pool takes nothing more"""
        pool = self._volumes.pool()
        if pool and (full := self._space.problem(pool)):
            raise exception.NotEnoughSpace(
                'There will be no snapshot %s: %s' % (name, full))

    def delete(self, name: str) -> None:
        """Give a snapshot up: its content is wiped and removed by and by."""
        self._volumes.split_snapshot(name)
        self._wipes.give_up(name)
