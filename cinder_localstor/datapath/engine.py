# SPDX-License-Identifier: Apache-2.0
"""The interface of an engine: what serves a volume while it moves."""

import abc
import contextlib
import dataclasses
import enum

from cinder_localstor.datapath import transfer
from cinder_localstor import exception
from cinder_localstor.node import interface


class Hydration(str, enum.Enum):
    """What the background copy does."""

    OFF = 'off'
    RUNNING = 'running'
    # Some of it was copied twice and differs from the source still.
    DIFFERS = 'differs'
    DONE = 'done'
    # The engine has met an error that it can't get over.
    FAILED = 'failed'
    # There is no engine node.
    MISSING = 'missing'


@dataclasses.dataclass(frozen=True)
class Rates:
    """Bytes per second that are copied at most, None for no limit, and at
    least, whatever a guest does.
    """

    limit: int | None = None
    minimum: int = 0


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a move is; `local` and `total` in bytes.

    `rate`, in bytes per second, is what the engine measures itself.

    :ivar verified: bytes that were compared with the source since the engine
        was started, None if none are to be
    :ivar differing: blocks that differ although they were copied again
    :ivar first_differing: where the first of them is, in bytes
    :ivar rates: that the engine is held to
    """

    hydration: Hydration
    local: int = 0
    total: int = 0
    rate: int | None = None
    verified: int | None = None
    differing: int = 0
    first_differing: int | None = None
    rates: Rates = Rates()


class Engine(abc.ABC):
    """Builds, inspects and removes the node under a moving handle."""

    name: str
    # Bytes of zeros at whose sight it takes a map for a new one
    blank: int
    # It can compare what it has copied with the source.
    verifies = False
    # Zeros that it copies take no space of a thin pool.
    keeps_holes = False

    def __init__(self, node: interface.Node) -> None:
        self._node = node

    @abc.abstractmethod
    def check(self) -> None:
        """:raises NoDataPath: this node can't run the engine"""

    @abc.abstractmethod
    def node_name(self, copy: str) -> str:
        """The device-mapper name of the engine of a copy."""

    @abc.abstractmethod
    def map_size(self, move: transfer.Transfer) -> int:
        """Bytes of the region map."""

    def create_map(self, move: transfer.Transfer) -> None:
        """Make the region map, which says that nothing has arrived.

        Only ever before the move's volume is first used.

        :raises NotEnoughSpace: its volume group is too full
        """
        group, name = self._node.metadata, self._map_name(move)
        if group.create(name, self.map_size(move),
                        transfer.tags(map=move.move_id)):
            group.zero(name, self.blank)

    @abc.abstractmethod
    def build(self, move: transfer.Transfer, source: str) -> None:
        """Make the engine's node over an existing map, hydration off.

        :param source: device of the source copy
        :raises MetadataMissing: there is no map
        """

    @abc.abstractmethod
    def start_hydration(self, move: transfer.Transfer) -> None:
        """Begin to copy in the background."""

    @abc.abstractmethod
    def progress(self, move: transfer.Transfer,
                 devices: dict[str, interface.Device]) -> Progress:
        """How far the move is, from the devices of the node."""

    @abc.abstractmethod
    def throttle(self, move: transfer.Transfer, rates: Rates) -> None:
        """Copy at such rates from now on.

        A limit of 0 stops every engine, also one that knows no other rate.
        """

    def settle(self, move: transfer.Transfer) -> None:
        """Make all that has arrived durable, and the map that says so.

        A flush of its node does that with every engine: dm-clone flushes the
        logical volume first and commits the map then (commit_metadata in
        dm-clone-target.c), for the helper see hydrator/core/FORMAT.md.
        """
        device_mapper = self._node.device_mapper
        device_mapper.flush(device_mapper.path(
            self.node_name(move.destination_name)))

    @abc.abstractmethod
    def frozen(self, copy: str) -> contextlib.AbstractContextManager[None]:
        """Let a copy and its map be as they are meanwhile; guests wait.

        :raises SourceBusy: the source does not answer
        :raises CommandFailed: at the end, they were not
        """

    @abc.abstractmethod
    def copy_map(self, move: transfer.Transfer) -> None:
        """Let a snapshot that arrives have the map of the copy that it is of,
        which is frozen.
        """

    def thaw(self, copy: str, devices: dict[str, interface.Device]) -> None:
        """End what a process has frozen that has died."""

    @abc.abstractmethod
    def remove(self, move: transfer.Transfer) -> None:
        """Remove the engine's node; the map stays."""

    def remove_map(self, move: transfer.Transfer) -> None:
        """Wipe the region map as volume_clear says, and remove it.

        It has nothing of a guest's, but its space is a volume's next, of which
        zeros are read where nobody has written.
        """
        group, name = self._node.metadata, self._map_name(move)
        group.clear(name)
        group.remove(name)

    @staticmethod
    def _map_name(move: transfer.Transfer) -> str:
        return _map_of(move.destination_name)

    @staticmethod
    def _map_name_of_volume(move: transfer.Transfer) -> str:
        """The map of the copy that a snapshot is of."""
        return _map_of(move.source_name)

    def _check_map(self, move: transfer.Transfer) -> None:
        group, name = self._node.metadata, self._map_name(move)
        if not group.is_active(name):
            raise exception.MetadataMissing(
                name='%s/%s' % (group.name, name), move_id=move.move_id,
                host=move.destination_host)


def _map_of(copy: str) -> str:
    return copy + '-regions'
