# SPDX-License-Identifier: Apache-2.0
"""What the source node of a move does."""

from collections.abc import Collection
import dataclasses
from typing import Any

from cinder_localstor.datapath import copies
from cinder_localstor.datapath import handles
from cinder_localstor.datapath import snapshots
from cinder_localstor.datapath import transfer
from cinder_localstor import exception
from cinder_localstor.node import interface


class Source:
    """The source side of moves and copies on this node; every method is
    idempotent.

    The source of a move is a handle, that of a copy a snapshot, see
    :class:`cinder_localstor.datapath.snapshots.Snapshots`.
    """

    def __init__(self, node: interface.Node, configuration: Any) -> None:
        self._node = node
        self._handles = handles.Handles(node)
        self._snapshots = snapshots.Snapshots(node, configuration)

    def portal(self) -> str:
        """Where sources are found on this node, as address:port."""
        return self._node.target.portal()

    def describe_export(self, move_id: str, initiator: str, address: str,
                        transports: Collection[str]) -> interface.Export:
        """Where a move's source will be found; makes up its secret.

        :param transports: what the destination can read it by
        """
        return dataclasses.replace(
            self._node.target.describe(move_id, initiator, address,
                                       transports),
            block_size=self._node.volumes.block_size())

    def check_snapshot(self, name: str) -> None:
        """See :meth:`cinder_localstor.datapath.snapshots.Snapshots.check`."""
        self._snapshots.check(name)

    def does_snapshot_arrive(self, name: str) -> bool:
        """See :meth:`cinder_localstor.datapath.snapshots.Snapshots.arrives`.
        """
        return self._snapshots.arrives(name)

    def offer(self, move_id: str, name: str, initiator: str,
              transports: Collection[str]) -> dict[str, Any]:
        """What a node has to know that a snapshot is copied to.

        :param name: of the snapshot, or of the copy that it is to be taken of
        :returns: the `export`, whose `address` is left to the one who asks;
            `block_size` in bytes; `content`, see :meth:`content`; whether
            the snapshot `depends` on that copy
        """
        export = self.describe_export(move_id, initiator, '', transports)
        return {'export': export.as_dict(),
                'block_size': self._node.volumes.block_size(),
                'content': self.content(name),
                'depends': not self._node.volumes.thin}

    def content(self, name: str) -> int:
        """Bytes of a copy that were ever written, -1 if that is not known.

        Of one that arrives itself most may be still to come.
        """
        pool = self._node.volumes.pool()
        volume = pool.volumes.get(name) if pool else None
        if volume is None or copies.Label(volume.tags).move_id:
            return -1
        return volume.used

    def take_snapshot(self, move: transfer.Transfer) -> None:
        """Take the snapshot that a copy reads, unless a user has taken it.

        :raises StillArrives: some of the volume's content is on another node
        """
        if move.taken_of:
            self._snapshots.create(copies.Copy(
                host=move.source_host, name=move.source_name,
                volume_id=move.volume_id, generation=move.generation,
                size=move.size), move.taken_of)

    def export_source(self, move: transfer.Transfer) -> None:
        """Export the source, read-only, to the destination's initiator.

        The handle and not what lies under it: whoever writes goes through
        the same device that the target reads (hazard H1).

        :raises HandleMissing: there is none; a target would be left without
            a disk, and taken for one that is well
        :raises LogicalVolumeMissing: there is no such snapshot
        :raises SnapshotInvalid: it has lost what it had
        """
        if move.is_snapshot:
            self._snapshots.open_source(
                move.source_name, move.destination_name, move.size)
            return
        if move.is_copy:
            path = self._snapshots.open(
                move.source_name, move.destination_name, move.size)
            if move.is_local:
                return
        else:
            self._handles.check_there(move.source_name)
            path = self._handles.path(move.source_name)
        # A guest that died has left something in the disk's cache, perhaps.
        # Its successor reads that, and knows of no power cut here.
        self._node.device_mapper.flush(path)
        self._node.target.export(move.move_id, path, move.export)

    def seal_source(self, move: transfer.Transfer) -> None:
        """Let nobody write the source any more: the volume has moved on.

        Nobody ever writes a snapshot.
        """
        if not move.is_copy:
            self._handles.seal(move.source_name, move.generation)

    def take_back_source(self, move: transfer.Transfer) -> None:
        """Let the source be the volume once more: where it had moved on to is
        lost.

        :raises NotEnoughSpace: it had grown there, and can't here
        :raises OriginIsRead: the same, since copies read its snapshots
        """
        # As long as it is not as large nobody is to have it.
        try:
            self._handles.extend(move.source_name, move.comes_back)
        except exception.OriginInUse:
            # By the export.  Not before it has to be: tgt keeps one until TCP
            # gives the connection to a dead node up.
            self.unexport_source(move)
            self._handles.extend(move.source_name, move.comes_back)
        self._handles.unseal(move.source_name)

    def is_used(self, name: str, move_ids: Collection[str]) -> bool:
        """Whether anybody but the target has a copy's handle open.

        :param move_ids: of the moves whose source it is
        """
        return self._handles.open_count(name) > len(
            self._node.target.exported().intersection(move_ids))

    def unexport_source(self, move: transfer.Transfer) -> None:
        """Take the export away.

        :raises RequestsWait: what reads the copy waits for the node that the
            copy itself comes from
        """
        if not move.is_copy:
            self._handles.check_answered(move.source_name)
        if not move.is_local:
            self._node.target.unexport(move.move_id)
        if move.is_copy:
            self._snapshots.close(move.destination_name)

    def hide_source(self, move: transfer.Transfer) -> None:
        """Let the source copy be there for its snapshots, and nobody else.

        :raises VolumeInUse: somebody has the handle open
        """
        self._handles.remove(move.source_name)

    def delete_source(self, move: transfer.Transfer) -> None:
        """Give the source copy up: it is wiped and removed by and by."""
        if move.is_copy:
            self._snapshots.delete(move.source_name)
        else:
            self._handles.delete(move.source_name)
