# SPDX-License-Identifier: Apache-2.0
"""What the destination node of a move does."""

from collections.abc import Container
from collections.abc import Iterator
import contextlib
import re
from typing import Any

from oslo_concurrency import lockutils

from cinder_localstor.datapath import engine
from cinder_localstor.datapath import engines
from cinder_localstor.datapath import handles
from cinder_localstor.datapath import regions
from cinder_localstor.datapath import snapshots
from cinder_localstor.datapath import space
from cinder_localstor.datapath import transfer
from cinder_localstor.datapath import wipes
from cinder_localstor import exception
from cinder_localstor.node import interface


# A source that is away makes requests wait and not fail: multipath with one
# path does that (Linux, drivers/md/dm-mpath.c, queue_if_no_path).
WAITING_TARGET = 'multipath'
ONE_PATH = '%s 0 1 1 round-robin 0 1 1 %s 1'
FEATURES = {
    interface.ISCSI: '1 queue_if_no_path',
    # The kernel puts a multipath disk of its own over NVMe's, which takes bios
    # and no requests.
    interface.NVME: '3 queue_if_no_path queue_mode bio'}


# A path in the status of a multipath target (dm-mpath.c, multipath_status)
FAILED_PATH = re.compile(r'\b\d+:\d+ F\b')


class Destination:
    """The destination side of moves on this node.

    Every method is idempotent.
    """

    def __init__(self, node: interface.Node, all_engines: engines.Engines
                 ) -> None:
        self._node = node
        self._engines = all_engines
        self._handles = handles.Handles(node)
        self._snapshots = snapshots.Snapshots(node, all_engines.configuration)
        self.space = space.Space(node.volumes, all_engines.configuration)
        self._wipes = wipes.Wipes(node.volumes)

    def check(self) -> None:
        """:raises NoDataPath: volumes can't move to this node"""
        self._engines.chosen()
        self._node.device_mapper.check_target(WAITING_TARGET)

    def examine(self, block_size: int, portal: str, host: str,
                data_path: str = '') -> dict[str, Any]:
        """Whether a volume can move here; what the source has to know.

        No command is run for it, but one where there is a thin pool.  Whether
        there is space enough is seen when the volume is made.

        :param block_size: bytes of a logical block at the source
        :param portal: where the source will be found
        :param data_path: what the volume's type has in place of the option, ''
            for nothing
        :returns: `initiator`, the IQN that will ask for the source, the
            `address` that it will ask from, the `engine` that the move will
            get, the `transports` that it can read the source by, that it can
            be told that a move `waits`, and whether the pool is `thin`, if it
            is: then it needs to know how much comes
        :raises BlockSizesDiffer: the disks here have other blocks
        :raises NoDataPath: the type wants what this node can't run
        :raises NotVerifiable: the same, as the option localstor_verify is
        :raises NotEnoughSpace: the thin pool takes nothing more
        """
        group = self._node.volumes
        found = group.block_size()
        if found != block_size:
            raise exception.BlockSizesDiffer(
                group=group.name, host=host, found=found,
                expected=block_size)
        self.space.check('', 0)
        initiator = self._node.initiator
        return {'initiator': initiator.name(),
                'address': initiator.address_towards(portal),
                'engine': self._engines.chosen(data_path).name,
                'transports': list(initiator.transports()), 'waits': 'yes',
                **({'thin': 'yes'} if group.thin else {})}

    def create_destination(self, move: transfer.Transfer) -> None:
        """Make the logical volume that the data will arrive on.

        Its tags say how much of a thin pool is to come, so that of two moves
        that begin together the second sees what the first will need.

        A snapshot is taken when its map is made.

        :raises NotEnoughSpace: there is too little for it
        """
        if move.is_snapshot:
            return
        with self._space_for(move):
            self._node.volumes.create(
                move.destination_name, move.destination_size,
                self._arriving_tags(move))

    @contextlib.contextmanager
    def _space_for(self, move: transfer.Transfer) -> Iterator[None]:
        """:raises NotEnoughSpace: there is too little for it"""
        with lockutils.lock('localstor-space-' + self._node.volumes.name):
            self.space.check(move.destination_name,
                             self._needed(move)
                             if self._node.volumes.thin else 0)
            yield

    def _arriving_tags(self, move: transfer.Transfer) -> frozenset[str]:
        return transfer.tags(
            volume=move.volume_id, snapshot=move.snapshot_id or None,
            generation=move.generation, move=move.move_id,
            needs=self._needed(move) if self._node.volumes.thin else None)

    def _needed(self, move: transfer.Transfer) -> int:
        """Bytes that a move brings at most, but for what a guest writes."""
        if move.content >= 0 and (move.is_snapshot
                                  or self._engine(move).keeps_holes):
            return move.content
        return move.size

    def create_map(self, move: transfer.Transfer) -> None:
        """Make the region map; only before the volume is first used.

        That of a snapshot says what the snapshot has, which is taken with it.

        :raises SourceBusy: the source of its volume does not answer
        :raises NotEnoughSpace: there is too little for it
        """
        self._engine(move).create_map(move)
        if move.is_snapshot:
            self._freeze(move)

    def _freeze(self, move: transfer.Transfer) -> None:
        """Take a snapshot, and a copy of the map, of one moment."""
        volumes, name = self._node.volumes, move.destination_name
        if name in volumes.logical_volumes():
            # Nobody has seen it yet, and its map may be of another moment.
            self._snapshots.delete(name)
        with (self._space_for(move),
              self._engine(move).frozen(move.source_name)):
            volumes.create_snapshot(name, move.source_name,
                                    self._arriving_tags(move))
            self._engine(move).copy_map(move)

    def thaw(self, move: transfer.Transfer,
             devices: dict[str, interface.Device]) -> None:
        """Let a guest go on that a process has let wait, and has died."""
        self._engine(move).thaw(move.destination_name, devices)

    def _engine(self, move: transfer.Transfer) -> engine.Engine:
        return self._engines.named(move.engine)

    def node_names(self, move: transfer.Transfer) -> tuple[str, ...]:
        """The private nodes under a moving handle, from the bottom up."""
        names = (move.source_node,
                 self._engine(move).node_name(move.destination_name))
        if move.is_local:
            return (snapshots.reader_name(move.destination_name), *names)
        return names

    def connect_source(self, move: transfer.Transfer) -> None:
        """Connect the source copy and put the source node over it."""
        device_mapper = self._node.device_mapper
        name = move.source_node
        sectors = move.size // interface.SECTOR
        if move.is_local:
            reader = device_mapper.path(
                snapshots.reader_name(move.destination_name))
            table = [interface.Segment(0, sectors, 'linear', reader + ' 0')]
        else:
            disk = self._node.initiator.connect(move.export)
            table = [interface.Segment(0, sectors, WAITING_TARGET, ONE_PATH % (
                FEATURES[move.export.transport], disk))]
        if device_mapper.exists(name):
            # The disk may have come back under another name.
            device_mapper.reload(name, table, read_only=True,
                                 keep_queued=True)
        else:
            device_mapper.create(name, table, read_only=True)

    def is_connected(self, move: transfer.Transfer,
                     devices: dict[str, interface.Device],
                     sessions: Container[str] | None = None) -> bool:
        """Whether the source can be read.

        :param sessions: IQNs of the sessions that work, None to look

        A session that came back by itself is not enough: the source node
        gives a path up for good that failed once.
        """
        source = devices.get(move.source_node)
        if move.is_local:
            return source is not None
        if sessions is None:
            sessions = self._node.initiator.connected()
        return (move.export.iqn in sessions
                and source is not None
                and not any(FAILED_PATH.search(segment.arguments)
                            for segment in source.status))

    def build_engine(self, move: transfer.Transfer) -> None:
        """Make the engine's node, hydration off.

        :raises CopyLost: there is nothing to put it over
        """
        volumes = self._node.volumes
        if not volumes.is_active(move.destination_name):
            raise exception.CopyLost(
                group=volumes.name, name=move.destination_name,
                source=move.source_host)
        self._engine(move).build(
            move, self._node.device_mapper.path(move.source_node))

    def build_handle(self, move: transfer.Transfer) -> None:
        """Make the handle over the engine's node."""
        if move.is_snapshot:
            self.restore_handle(move)
            return
        self._handles.create_on_engine(
            move.destination_name, move.destination_size,
            self._backing(move))

    def restore_handle(self, move: transfer.Transfer) -> None:
        """Make the handle again of a volume that is in use already.

        It may have been extended, or moved on, since it came here.
        """
        self._handles.load(move.destination_name, self._backing(move),
                           move.destination_size if move.is_snapshot else None)

    def _backing(self, move: transfer.Transfer) -> handles.Backing:
        return handles.Backing(
            self._node.device_mapper.path(
                self._engine(move).node_name(move.destination_name)),
            move.size // interface.SECTOR)

    def start_hydration(self, move: transfer.Transfer) -> None:
        """Begin to copy in the background.

        What was read of the source before may be stale (hazard H2).
        """
        self.seal_replaced(move)
        device_mapper = self._node.device_mapper
        device_mapper.forget_cached(
            self._handles.path(move.destination_name))
        device_mapper.forget_cached(
            device_mapper.path(move.source_node))
        self._engine(move).start_hydration(move)

    def throttle(self, move: transfer.Transfer, rates: engine.Rates) -> None:
        """Set the rates of a move, see Engine.throttle."""
        self._engine(move).throttle(move, rates)

    def settle(self, move: transfer.Transfer) -> None:
        """Make all that has arrived durable."""
        self._engine(move).settle(move)

    def progress(self, move: transfer.Transfer,
                 devices: dict[str, interface.Device]) -> engine.Progress:
        """How far the move is.

        A node whose handle does not lie on the engine counts as missing it.
        """
        handle = devices.get(handles.handle_name(move.destination_name))
        node_name = self._engine(move).node_name(move.destination_name)
        if handle is None or handle.under[:1] != (node_name,):
            return engine.Progress(engine.Hydration.MISSING)
        return self._engine(move).progress(move, devices)

    def share(self, move: transfer.Transfer) -> None:
        """Make the logical volume with the blocks of the snapshot that the
        volume is reverted to, so that nothing has to arrive.

        :raises NotEnoughSpace: the pool takes nothing more
        """
        self.space.check(move.destination_name, 0)
        volumes = self._node.volumes
        volumes.create_snapshot(move.destination_name, move.source_name,
                                self._arriving_tags(move))
        volumes.extend(move.destination_name, move.destination_size)

    def seal_replaced(self, move: transfer.Transfer) -> None:
        """Let nobody write what the volume was before it was reverted."""
        if move.replaced:
            self._handles.seal_left(move.replaced, move.generation)

    def stand_alone(self, move: transfer.Transfer) -> None:
        """Let the handle lie on the logical volume; all has arrived."""
        self.seal_replaced(move)
        self._handles.load(
            move.destination_name, snapshot_size=move.destination_size
            if move.is_snapshot else None)

    def remove_engine(self, move: transfer.Transfer) -> None:
        """Remove the engine's node and the source node under it."""
        device_mapper = self._node.device_mapper
        source = move.source_node
        if device_mapper.exists(source) and not move.is_local:
            # Nobody waits any more for what a lost source owes.
            device_mapper.message(source, 'fail_if_no_path')
        self._engine(move).remove(move)
        device_mapper.remove(source)

    def disconnect_source(self, move: transfer.Transfer) -> None:
        """Log out of the source."""
        if not move.is_local:
            self._node.initiator.disconnect(move.export)

    def remove_map(self, move: transfer.Transfer) -> None:
        """Remove the region map."""
        self._engine(move).remove_map(move)

    def keep_destination(self, move: transfer.Transfer) -> None:
        """Let the logical volume's tags say that it is complete."""
        volumes = self._node.volumes
        needed = self._needed(move) if volumes.thin else None
        volumes.retag(move.destination_name, add=frozenset(),
                      remove=transfer.tags(move=move.move_id, needs=needed))
        if move.is_snapshot:
            self._snapshots.stand_alone(move.destination_name,
                                        move.destination_size)

    def remove_handle(self, move: transfer.Transfer) -> None:
        """Remove the handle.

        :raises VolumeInUse: somebody has it open
        """
        self._handles.remove(move.destination_name)

    def delete_destination(self, move: transfer.Transfer) -> None:
        """Give the copy up that did not arrive: it is wiped and removed by
        and by, and at once if it was never used.
        """
        if move.is_snapshot:
            self._snapshots.delete(move.destination_name)
        else:
            self._wipes.give_up(move.destination_name)

    def remove_unused(self, move: transfer.Transfer) -> None:
        """Remove the copy that no guest was ever shown: nothing is on it,
        unless it is a snapshot.
        """
        if move.is_snapshot:
            self._snapshots.delete(move.destination_name)
        else:
            self._node.volumes.remove(move.destination_name)


def choose_regions(size: int, configuration: Any) -> dict[str, Any]:
    """Region size, threshold and batch of a move that begins now.

    They are kept with the move: the map has a meaning only with its region
    size, whatever the options say tomorrow (hazard H10).
    """
    sectors = regions.region_sectors(size,
                                     configuration.localstor_region_size)
    return {'region_sectors': sectors,
            'threshold': configuration.localstor_hydration_threshold,
            'batch': configuration.localstor_hydration_batch}
