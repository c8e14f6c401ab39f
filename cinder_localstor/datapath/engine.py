# SPDX-License-Identifier: Apache-2.0
"""The interface of an engine: what serves a volume while it moves."""

import abc
import dataclasses
import enum

from cinder_localstor.datapath import transfer
from cinder_localstor.node import interface


class Hydration(str, enum.Enum):
    """What the background copy does."""

    OFF = 'off'
    RUNNING = 'running'
    DONE = 'done'
    # The engine has met an error that it can't get over.
    FAILED = 'failed'
    # There is no engine node.
    MISSING = 'missing'


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a move is; `local` and `total` in bytes."""

    hydration: Hydration
    local: int = 0
    total: int = 0


class Engine(abc.ABC):
    """Builds, inspects and removes the node under a moving handle."""

    name: str

    @abc.abstractmethod
    def check(self) -> None:
        """:raises NoDataPath: this node can't run the engine"""

    @abc.abstractmethod
    def node_name(self, copy: str) -> str:
        """The device-mapper name of the engine of a copy."""

    @abc.abstractmethod
    def create_map(self, move: transfer.Transfer) -> None:
        """Make the region map, which says that nothing has arrived.

        Only ever before the move's volume is first used.

        :raises NotEnoughSpace: its volume group is too full
        """

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
    def settle(self, move: transfer.Transfer) -> None:
        """Make all that has arrived durable, and the map that says so."""

    @abc.abstractmethod
    def remove(self, move: transfer.Transfer) -> None:
        """Remove the engine's node; the map stays."""

    @abc.abstractmethod
    def remove_map(self, move: transfer.Transfer) -> None:
        """Remove the region map."""
