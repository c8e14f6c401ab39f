# SPDX-License-Identifier: Apache-2.0
"""Snapshots on one node.

A snapshot is a logical volume of the node that its volume was on then, and
stays there.  LVM suspends the volume under its handle for a moment, so that
what a guest was answered is in the snapshot, and what it asks for later is
not; the handle needs no suspending of its own.  Snapshots of several volumes
are of one moment if all of their handles are suspended from before the first
until after the last: then no write that any of them lacks has been answered
before one that another has was begun.

A thin snapshot needs nothing else.  A thick one has what its origin has
changed since, and reads the rest there: the origin has to stay.

Each copy reads a snapshot through a node of its own, its *reader*: LIO exports
no device twice.

A snapshot of a copy that still arrives does so itself: it has what had arrived
by then, with a copy of the map that says so, and an engine and a handle of its
own.  What is missing it reads where its volume does, through a reader.
"""

from collections.abc import Mapping
import contextlib
from typing import Any

from oslo_concurrency import lockutils

from cinder_localstor.datapath import copies
from cinder_localstor.datapath import handles
from cinder_localstor.datapath import space
from cinder_localstor.datapath import transfer
from cinder_localstor.datapath import wipes
from cinder_localstor import exception
from cinder_localstor.node import interface


READER = '-reader'


def reader_name(copy: str) -> str:
    """The device-mapper name of the node that a copy reads a snapshot by."""
    return copy + READER


class Snapshots:
    """The snapshots of one node; every method is idempotent."""

    def __init__(self, node: interface.Node, configuration: Any) -> None:
        self._volumes = node.volumes
        self._device_mapper = node.device_mapper
        self._handles = handles.Handles(node)
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
        if self._volumes.is_active(snapshot.name):
            return
        self._check_whole(snapshot, self._volumes.find(name))
        self._check_space(snapshot.name)
        self._volumes.create_snapshots([self._wanted(snapshot, name)])

    def create_together(self, of: Mapping[str, copies.Copy]) -> None:
        """Make snapshots of copies that have all of their content, and all
        of the same moment.  Guests wait as long as that takes.

        :param of: the snapshots by the names of these copies
        :raises NotHeld: they are not of one moment; some may be there
        :raises AlreadyThere: one is of another moment
        :raises: what :meth:`create` raises; some may be there
        """
        found = self._volumes.logical_volumes()
        for name, snapshot in of.items():
            if snapshot.name in found:
                raise exception.AlreadyThere(name=snapshot.name,
                                             volume_id=snapshot.volume_id)
            self._handles.check_there(name)
            self._check_whole(snapshot,
                              found.get(name) or self._volumes.find(name))
        self._check_space(', '.join(sorted(
            snapshot.name for snapshot in of.values())))
        self._volumes.create_snapshots(
            [self._wanted(snapshot, name) for name, snapshot in of.items()],
            self._handles.held(list(of)))

    @staticmethod
    def _wanted(snapshot: copies.Copy, name: str) -> interface.NewSnapshot:
        return interface.NewSnapshot(snapshot.name, name, transfer.tags(
            volume=snapshot.volume_id, snapshot=snapshot.snapshot_id or None,
            generation=snapshot.generation))

    @staticmethod
    def _check_whole(snapshot: copies.Copy, of: interface.LogicalVolume
                     ) -> None:
        """:raises StillArrives: what it is of has not got all of its content
        """
        if copies.Label(of.tags).move_id:
            raise exception.StillArrives(name=of.name,
                                         volume_id=snapshot.volume_id)

    def arrives(self, name: str) -> bool:
        """Whether some of a snapshot is still elsewhere.

        :raises LogicalVolumeMissing: there is no such snapshot
        """
        return bool(copies.Label(self._volumes.find(name).tags).move_id)

    def check(self, name: str) -> None:
        """Whether a snapshot holds what it should.

        :raises LogicalVolumeMissing: there is no such snapshot
        :raises LogicalVolumeInactive: it is not there for the kernel
        :raises SnapshotInvalid: it has lost what it had
        """
        found = self._volumes.find(name)
        # A deletion may have been broken off when it was one no more.
        if not found.is_valid or not (self._volumes.thin or found.origin):
            raise exception.SnapshotInvalid(group=self._volumes.name,
                                            name=name)
        if not self._volumes.is_active(name):
            raise exception.LogicalVolumeInactive(
                group=self._volumes.name, name=name,
                volume_id=copies.Label(found.tags).volume_id)

    def _check_space(self, name: str) -> None:
        """:raises NotEnoughSpace: the thin pool takes nothing more"""
        pool = self._volumes.pool()
        if pool and (full := self._space.problem(pool)):
            raise exception.NotEnoughSpace(
                'There will be no snapshot %s: %s' % (name, full))

    def open(self, name: str, copy: str, size: int) -> str:
        """Let a copy read a snapshot; the device that it is read by.

        :param size: bytes of the snapshot; LVM tells those that a thick one
            has for changes
        :raises LogicalVolumeMissing: there is no such snapshot
        :raises SnapshotInvalid: it has lost what it had
        :raises HandleMissing: it still arrives, and is not served yet
        """
        with self._lock(name):
            self.check(name)
            path = self._volumes.path(name)
            if self.arrives(name):
                self._handles.check_there(name)
                path = self._handles.path(name)
            return self._read(path, copy, size)

    def open_source(self, of: str, copy: str, size: int) -> str:
        """Let a snapshot that arrives read what the copy that it is of
        arrives from; the device that it is read by.

        :param of: the name of that copy
        :param size: bytes of the source
        :raises HandleMissing: that copy is not served yet
        """
        source = transfer.source_node(of)
        if not self._device_mapper.exists(source):
            raise exception.HandleMissing(name=of)
        return self._read(self._device_mapper.path(source), copy, size)

    def _read(self, path: str, copy: str, size: int) -> str:
        reader = reader_name(copy)
        if not self._device_mapper.exists(reader):
            self._device_mapper.create(
                reader, self._table(path, size), read_only=True)
        return self._device_mapper.path(reader)

    @staticmethod
    def _table(path: str, size: int) -> list[interface.Segment]:
        return [interface.Segment(0, size // interface.SECTOR, 'linear',
                                  path + ' 0')]

    def stand_alone(self, name: str, size: int) -> None:
        """Let what reads a snapshot do so without its handle; all of it has
        arrived, and its tags say so.

        :param size: bytes of the snapshot
        """
        handle = handles.handle_name(name)
        with self._lock(name):
            for reader in self._device_mapper.above(handle):
                self._device_mapper.reload(
                    reader, self._table(self._volumes.path(name), size),
                    read_only=True)
            self._handles.remove(name)

    def close(self, copy: str) -> None:
        """Let a copy read no more.

        :raises VolumeInUse: it still has the reader open
        """
        self._device_mapper.remove(reader_name(copy))

    def delete(self, name: str) -> None:
        """Give a snapshot up: its content is wiped and removed by and by.

        :raises SnapshotIsRead: a copy reads it
        """
        with self._lock(name):
            above = self._device_mapper.above(
                self._volumes.mapped_name(name))
            if above:
                raise exception.SnapshotIsRead(name=name,
                                               reader=', '.join(above))
            self._volumes.split_snapshot(name)
            self._wipes.give_up(name)

    def disown(self, name: str) -> None:
        """Let a snapshot be one of no user any more, but there for what reads
        it.
        """
        volume = self._volumes.logical_volumes().get(name)
        if volume is not None:
            self._volumes.retag(name, add=frozenset(), remove=transfer.tags(
                snapshot=copies.Label(volume.tags).snapshot_id or None))

    @staticmethod
    def _lock(name: str) -> contextlib.AbstractContextManager:
        return lockutils.lock('localstor-snapshot-' + name)
