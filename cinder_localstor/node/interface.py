# SPDX-License-Identifier: Apache-2.0
"""What a node can do: the interface that the data path is built on.

There are two implementations: :mod:`cinder_localstor.node.real`, with the
tools of the node, and :mod:`cinder_localstor.node.simulated`, in memory, which
can fail, crash or hang at any call.

Every method is idempotent: what is there already is not made again, and what
is gone already is not missed.  Sizes are in bytes, positions in device-mapper
tables in sectors of 512 bytes.
"""

import abc
from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import dataclasses
from typing import Any
from typing import NamedTuple

from cinder import context

from cinder_localstor import exception

SECTOR = 512
# Seconds that guests wait at most for what is done while nodes are held.  What
# reads a disk over iSCSI has 30 (the kernel's SD_TIMEOUT).
HOLD = 20
# How the data of a move travels
ISCSI, NVME = 'iscsi', 'nvme-tcp'


@dataclasses.dataclass(frozen=True)
class LogicalVolume:
    """A logical volume.

    :ivar size: bytes
    :ivar used: bytes that it has of its pool
    :ivar origin: of a thick snapshot, the logical volume that it reads what
        has not changed since from; '' of all others, a thin snapshot among
        them
    :ivar is_valid: whether it reads what it should; a thick snapshot does not
        any more that could not note a change
    :ivar room: bytes that a thick snapshot should have, so that it can note
        all that its origin can change; 0 of all others
    :ivar taken_of: of any snapshot, a thin one too, what it was taken of
    :ivar unfit: why a volume of Cinder's can't lie on it, and what to do; ''
        where one can
    :ivar ailment: what is wrong with the disks that it lies on; '' if nothing
        is
    """

    name: str
    size: int
    tags: frozenset[str] = frozenset()
    is_open: bool = False
    used: int = 0
    origin: str = ''
    is_valid: bool = True
    room: int = 0
    taken_of: str = ''
    unfit: str = ''
    ailment: str = ''


def snapshots_on(name: str, volumes: Mapping[str, LogicalVolume]
                 ) -> list[str]:
    """Names of the thick snapshots that lie on a logical volume.

    :param volumes: all of its group
    """
    return sorted(volume.name for volume in volumes.values()
                  if volume.origin == name)


def check_no_snapshots(group: str, name: str,
                       volumes: Mapping[str, LogicalVolume]) -> None:
    """:raises SnapshotsLeft: thick snapshots lie on a logical volume"""
    snapshots = snapshots_on(name, volumes)
    if snapshots:
        raise exception.SnapshotsLeft(group=group, name=name,
                                      snapshots=', '.join(snapshots))


@dataclasses.dataclass(frozen=True)
class Pool:
    """A thin pool.

    :ivar name: with its group's
    :ivar size: bytes for data
    :ivar data: the share of them that is used, from 0 to 1
    :ivar metadata: the share of the space for metadata that is used
    :ivar volumes: what is in it
    """

    name: str
    size: int
    data: float
    metadata: float
    volumes: dict[str, LogicalVolume]


@dataclasses.dataclass(frozen=True)
class Capacity:
    """Space of a volume group, in bytes.

    `provisioned` is what all volumes could grow to, `free` what is not used
    yet; with thin provisioning both speak of the pool.  Nothing is free while
    a disk is missing.  With mirrors each byte counts once.
    """

    total: int
    free: int
    provisioned: int
    volumes: int
    thin: bool


@dataclasses.dataclass(frozen=True)
class Segment:
    """One line of a device-mapper table; `start` and `length` in sectors."""

    start: int
    length: int
    target: str
    arguments: str

    def __str__(self) -> str:
        return '%d %d %s %s' % (self.start, self.length, self.target,
                                self.arguments)


@dataclasses.dataclass(frozen=True)
class Device:
    """A device-mapper node of ours as it is now.

    `status` holds what each segment's target says of itself, `under` the
    names of the devices that the segments lie on, in order.
    """

    name: str
    open_count: int
    suspended: bool
    read_only: bool
    status: tuple[Segment, ...] = ()
    under: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class NewNode:
    """A device-mapper node that is to be made."""

    name: str
    table: tuple[Segment, ...]
    read_only: bool = False


class NewSnapshot(NamedTuple):
    """A snapshot that is to be made; `origin` is a logical volume."""

    name: str
    origin: str
    tags: frozenset[str]


def without_defaults(record: Any) -> dict[str, Any]:
    """The fields of a dataclass that have no default, or another value.

    Peers of an earlier version know no fields but those that they need.
    """
    return {field.name: value for field in dataclasses.fields(record)
            if (value := getattr(record, field.name)) != field.default}


@dataclasses.dataclass(frozen=True)
class Export:
    """Where a source copy can be reached and how to prove who asks.

    `initiator`, from `address`, is the only one that is admitted; `serial` is
    what the disk says of itself, '' in moves begun by a version that let LIO
    make one up.  `iqn` is the name of an NVMe subsystem, and `initiator` that
    of a host, if the source is read over NVMe/TCP.  `block_size` are the bytes
    of a logical block of the disk that tgtd shows, which it makes up; others
    show what their device has.  A disk that is in use can't change it.
    """

    portal: str
    iqn: str
    lun: int
    serial: str
    initiator: str
    address: str
    username: str
    password: str = dataclasses.field(repr=False)
    block_size: int = SECTOR

    def as_dict(self) -> dict[str, Any]:
        """A form that RPC can carry."""
        return without_defaults(self)

    @property
    def transport(self) -> str:
        """What the source is read by, as the name of its target tells."""
        return NVME if self.iqn.startswith('nqn.') else ISCSI


# Of what is read on its own node alone
NO_EXPORT = Export('', '', 0, '', '', '', '', '')


def split_portal(portal: str) -> tuple[str, int]:
    """Address and port; an address of IPv6 without its brackets."""
    address, _colon, port = portal.rpartition(':')
    return address.strip('[]'), int(port)


class VolumeGroup(abc.ABC):
    """The logical volumes of one volume group.

    What a method has changed outlives a power cut as soon as it returns.
    """

    name: str

    @property
    @abc.abstractmethod
    def thin(self) -> bool:
        """Whether logical volumes read zeros where they were not written."""

    @abc.abstractmethod
    def check(self) -> None:
        """:raises VolumeGroupMissing: there is no such group
        :raises LVMLooksIntoVolumes: guests' groups could be activated
        :raises PoolDoesNotZero: volumes would show what others have left
        :raises PoolIsNotMirrored: thin volumes can't be mirrored one by one
        """

    @abc.abstractmethod
    def logical_volumes(self) -> dict[str, LogicalVolume]:
        """All logical volumes by name, from a single call."""

    def find(self, name: str) -> LogicalVolume:
        """One logical volume.

        :raises LogicalVolumeMissing: there is none
        """
        try:
            return self.logical_volumes()[name]
        except KeyError:
            raise exception.LogicalVolumeMissing(
                group=self.name, name=name, host='this node') from None

    @abc.abstractmethod
    def capacity(self) -> Capacity:
        """Space of the group."""

    @abc.abstractmethod
    def missing_disks(self) -> int:
        """How many disks of the group are not there, or answer nothing."""

    @abc.abstractmethod
    def pool(self) -> Pool | None:
        """The thin pool with its volumes, from a single call.

        None, without a call, of a thick group.
        """

    @abc.abstractmethod
    def block_size(self) -> int:
        """Bytes of a logical block of the disks, as :meth:`check` saw."""

    @abc.abstractmethod
    def path(self, name: str) -> str:
        """The device of a logical volume."""

    @abc.abstractmethod
    def mapped_name(self, name: str) -> str:
        """The name that device-mapper knows a logical volume by."""

    @abc.abstractmethod
    def is_active(self, name: str) -> bool:
        """Whether the device of a logical volume is there; no command.

        It is not when a thin pool has lost what LVM knows of.
        """

    @abc.abstractmethod
    def activate(self, name: str) -> bool:
        """Make the device of a logical volume; False if that can't be.

        A thin pool may have lost what LVM knows of, and a mirrored volume was
        never whole whose command was killed: nothing is on either.
        """

    @abc.abstractmethod
    def keep_active(self, name: str) -> None:
        """Let a logical volume be active whenever its group is.  LVM makes
        thin snapshots that are not.
        """

    @abc.abstractmethod
    def active_names(self) -> set[str]:
        """Names of all logical volumes whose device is there; no command."""

    @abc.abstractmethod
    def create(self, name: str, size: int, tags: frozenset[str]) -> bool:
        """Make a logical volume; whether it was not there before.

        Only ever before it is first used: one whose content a power cut has
        taken, as it was made, is made anew.

        :raises NotEnoughSpace: the group is too full, or a disk is missing
        """

    def create_snapshot(self, name: str, origin: str, tags: frozenset[str]
                        ) -> None:
        """Make one snapshot as :meth:`create_snapshots` does."""
        self.create_snapshots([NewSnapshot(name, origin, tags)])

    @abc.abstractmethod
    def create_snapshots(self, wanted: Sequence[NewSnapshot],
                         moment: contextlib.AbstractContextManager[None]
                         = contextlib.nullcontext()) -> None:
        """Make snapshots of logical volumes, which may be written meanwhile:
        what was answered before is in one, what begins later is not.

        A thick one has as much space as its origin, so it is never full.

        :param moment: entered when nothing else changes the group any more,
            and left when the last of them is made
        :raises NotEnoughSpace: the group is too full; some may be there
        """

    @abc.abstractmethod
    def split_snapshot(self, name: str) -> None:
        """Let a thick snapshot be one no more.

        What it has of its origin is left, to be wiped.
        """

    @abc.abstractmethod
    def extend(self, name: str, size: int) -> None:
        """Grow a logical volume to `size` bytes.

        One that thick snapshots lie on is not active for a moment.

        :raises NotEnoughSpace: the group is too full, or a disk is missing
        """

    @abc.abstractmethod
    def zero(self, name: str, size: int) -> None:
        """Write zeros to the first `size` bytes, durably."""

    @abc.abstractmethod
    def copy(self, name: str, to: str) -> None:
        """Copy what the disk has of a small logical volume to another of its
        size, durably.
        """

    @abc.abstractmethod
    def clear(self, name: str) -> None:
        """Wipe the content as the option volume_clear says."""

    @abc.abstractmethod
    def retag(self, name: str, add: frozenset[str],
              remove: frozenset[str]) -> None:
        """Change the tags of a logical volume."""

    @abc.abstractmethod
    def rename(self, name: str, new: str) -> None:
        """Give a logical volume another name that no other has.

        :raises NotEnoughSpace: a disk of the group is missing
        """

    @abc.abstractmethod
    def remove(self, name: str) -> None:
        """Remove a logical volume.

        :raises SnapshotsLeft: thick snapshots lie on it
        """

    @abc.abstractmethod
    def suspended(self) -> set[str]:
        """Names of the logical volumes that answer nothing at the moment.

        Their thin pool counts as one of them.  No command.
        """

    @abc.abstractmethod
    def resume_abandoned(self) -> None:
        """Resume what a command has left suspended that is no more.

        One that runs resumes by itself what it has suspended, and is left
        alone.
        """


class DeviceMapper(abc.ABC):
    """The device-mapper nodes of the driver."""

    @abc.abstractmethod
    def check_target(self, target: str) -> None:
        """:raises NoDataPath: the kernel has no such target"""

    @abc.abstractmethod
    def devices(self) -> dict[str, Device]:
        """All nodes of ours by name, from as many calls for a thousand as
        for one.
        """

    def above(self, name: str) -> list[str]:
        """Names of our nodes that lie on a node, of ours or not.

        :param name: of a logical volume it is
            :meth:`VolumeGroup.mapped_name`
        """
        return sorted(device.name for device in self.devices().values()
                      if name in device.under)

    @abc.abstractmethod
    def path(self, name: str) -> str:
        """The device of a node."""

    @abc.abstractmethod
    def link(self, name: str) -> str:
        """Make a symbolic link to the device of a node, and tell where it is.

        Whoever gets it may replace it.  It goes when the node is removed, and
        when the host boots.
        """

    @abc.abstractmethod
    def exists(self, name: str) -> bool:
        """Whether there is a node of this name; no command."""

    @abc.abstractmethod
    def in_flight(self, name: str) -> int:
        """Requests to a node that are not answered yet; no command."""

    @abc.abstractmethod
    def create(self, name: str, table: list[Segment],
               read_only: bool = False) -> None:
        """Make a node unless there is one of this name."""

    @abc.abstractmethod
    def create_all(self, nodes: Sequence[NewNode]) -> None:
        """Make nodes of which there is none yet, many with one call.

        :raises CommandFailed: not all of them were made, but some may be
        """

    @abc.abstractmethod
    def reload(self, name: str, table: list[Segment],
               read_only: bool = False, keep_queued: bool = False) -> None:
        """Swap the table of a living node.

        The old table stays live if anything fails.

        :param keep_queued: requests that wait in the old table go to the new
            one; without it the swap waits for them
        """

    @abc.abstractmethod
    def make_read_only(self, name: str) -> None:
        """Let a living node take no more writes; it lies on what it lay on.
        """

    @abc.abstractmethod
    def suspend(self, name: str) -> None:
        """Let a node answer nothing more until :meth:`resume`; what is under
        way has ended then.
        """

    @abc.abstractmethod
    def resume(self, name: str) -> None:
        """Let a node go on that was suspended, or was not."""

    @abc.abstractmethod
    def held(self, names: Sequence[str]
             ) -> contextlib.AbstractContextManager[None]:
        """Let nodes answer nothing while something is done, and no longer
        than HOLD seconds; what is under way has ended before.

        They go on whatever becomes of this process.

        :raises NotHeld: they have gone on before it was done
        :raises CommandFailed: they can't be suspended
        """

    @abc.abstractmethod
    def abandoned(self) -> set[str]:
        """Names of nodes of ours that are suspended and that nobody holds
        any more.  No command.
        """

    @abc.abstractmethod
    def message(self, name: str, text: str) -> None:
        """Send a message to the target of a node."""

    @abc.abstractmethod
    def remove(self, name: str) -> None:
        """Remove a node.

        :raises VolumeInUse: somebody has it open
        """

    @abc.abstractmethod
    def flush(self, device: str) -> None:
        """Make all that was written to a device durable."""

    @abc.abstractmethod
    def forget_cached(self, device: str) -> None:
        """Drop what the page cache holds of a device."""

    @abc.abstractmethod
    def refuse_discards(self, device: str) -> None:
        """Let a device, and what is stacked on it later, take no discards."""


class SourceTarget(abc.ABC):
    """Exports of source copies, read-only, for one initiator each."""

    def check(self) -> None:
        """:raises NoTransport: this node can't export as it is told to"""

    @abc.abstractmethod
    def warm_up(self) -> None:
        """Start what the first export would wait for."""

    @abc.abstractmethod
    def portal(self) -> str:
        """Where the exports are found, as address:port."""

    @abc.abstractmethod
    def describe(self, move_id: str, initiator: str, address: str,
                 transports: Collection[str] = (ISCSI,)) -> Export:
        """What the export of a move will be; makes up the secret.

        :param initiator: IQN of the destination, for iSCSI
        :param transports: what the destination can read it by
        """

    @abc.abstractmethod
    def export(self, move_id: str, device: str, export: Export) -> None:
        """Export a device under the IQN of the move."""

    @abc.abstractmethod
    def unexport(self, move_id: str) -> None:
        """Take the export away, with its sessions."""

    @abc.abstractmethod
    def exported(self) -> set[str]:
        """The ids of all moves whose source is exported here."""

    def remains(self) -> set[str]:
        """The ids of all moves of which anything is left here."""
        return self.exported()

    def nodes(self, export: Export) -> tuple[str, ...]:
        """Names of the device-mapper nodes that an export has of its own."""
        return ()


class RemoteTarget(abc.ABC):
    """Ordinary connections to volumes of this node, from anywhere.

    Volumes are Cinder's, objects or rows.
    """

    @abc.abstractmethod
    def check(self) -> None:
        """:raises Exception: nothing can be exported here"""

    @abc.abstractmethod
    def describe(self, ctxt: context.RequestContext, volume: Any
                 ) -> dict[str, str]:
        """The provider fields of an export that is to be made: what there is
        of it can be taken away by them.
        """

    @abc.abstractmethod
    def export(self, ctxt: context.RequestContext, volume: Any, device: str
               ) -> dict[str, str]:
        """Export a device; the provider fields that the row gets.

        :param volume: whose row has the fields that :meth:`describe` has given
        """

    @abc.abstractmethod
    def ensure(self, ctxt: context.RequestContext, volume: Any, device: str,
               connectors: Iterable[dict[str, Any]]) -> None:
        """Export a device as the provider fields say, to all of these."""

    @abc.abstractmethod
    def unexport(self, ctxt: context.RequestContext, volume: Any) -> None:
        """Take an export away."""

    @abc.abstractmethod
    def connect(self, volume: Any, connector: dict[str, Any]
                ) -> dict[str, Any]:
        """Admit a connector; the connection info it gets."""

    @abc.abstractmethod
    def disconnect(self, volume: Any, connector: dict[str, Any]) -> None:
        """Admit a connector no longer."""


class Initiator(abc.ABC):
    """Connects source copies of other nodes."""

    def check(self) -> None:
        """:raises NoTransport: this node can't connect as it is told to"""

    def transports(self) -> tuple[str, ...]:
        """What sources can be read by here, the best first."""
        return (ISCSI,)

    @abc.abstractmethod
    def name(self) -> str:
        """The IQN of this node's initiator."""

    @abc.abstractmethod
    def addresses(self) -> list[str]:
        """The addresses of this node that others can see."""

    @abc.abstractmethod
    def address_towards(self, portal: str) -> str:
        """The address that this node connects to a portal from."""

    @abc.abstractmethod
    def connect(self, export: Export) -> str:
        """Log in and return the device of the source copy.

        :raises SourceUnreachable: nobody answers there
        :raises StaleSession: the device is not that of the export
        """

    @abc.abstractmethod
    def connected(self) -> dict[str, str]:
        """The name of each target whose session works, with its device.

        No command.
        """

    @abc.abstractmethod
    def disconnect(self, export: Export) -> None:
        """Log out and forget the target."""


# What a helper is told when nothing is to be compared
NOT_VERIFIED = 'off'


@dataclasses.dataclass(frozen=True)
class Hydrator:
    """What a localstor-hydrator is started with.

    :ivar move_id: id of the move, a UUID
    :ivar data: device of the destination's copy
    :ivar metadata: device of its map and journal
    :ivar source: device of the source's copy
    :ivar size: bytes
    :ivar zeroed: whether `data` reads zeros where it was never written
    :ivar minimum: bytes per second that it copies whatever the guest does
    :ivar source_timeout: seconds that a read waits for a source that is away
        before it fails; 0 for ever
    :ivar verify: how much of what it copies it compares with the source:
        `off`, `sample` or `full`
    :ivar poll_time: microseconds that it looks for what is next before it
        sleeps; 0 to sleep at once
    """

    move_id: str
    data: str
    metadata: str
    source: str
    size: int
    zeroed: bool
    minimum: int
    source_timeout: int
    verify: str
    poll_time: int


@dataclasses.dataclass(frozen=True)
class HydratorStatus:
    """How far a localstor-hydrator is; `state` as it says it itself.

    :ivar local: bytes that are on the destination
    :ivar rate: bytes per second that arrive
    :ivar verify: how much is compared with the source, see `Hydrator`
    :ivar verified: bytes that were compared since it was started
    :ivar differing: blocks that differ although they were copied again
    :ivar first_differing: where the first of them is, in bytes
    :ivar limit: bytes per second that it copies at most, None for no limit
    :ivar minimum: bytes per second that it copies at least
    """

    state: str
    local: int
    rate: int
    verify: str = NOT_VERIFIED
    verified: int = 0
    differing: int = 0
    first_differing: int | None = None
    limit: int | None = None
    minimum: int = 0


class Hydrators(abc.ABC):
    """The processes that serve arriving copies, by the name of the copy."""

    @abc.abstractmethod
    def check(self) -> None:
        """:raises NoDataPath: this node can't run them"""

    @abc.abstractmethod
    def start(self, copy: str, hydrator: Hydrator) -> str:
        """Start one unless it runs; its device, when that can be used."""

    @abc.abstractmethod
    def status(self, copy: str) -> HydratorStatus | None:
        """How far one is; None when none answers.  No command."""

    @abc.abstractmethod
    def hydrate(self, copy: str) -> None:
        """Let one begin to copy; recorded when this returns."""

    @abc.abstractmethod
    def throttle(self, copy: str, limit: int | None, minimum: int) -> None:
        """Let one copy at most, and at least, so many bytes per second."""

    @abc.abstractmethod
    def pause(self, copy: str, seconds: int) -> None:
        """Let one write nothing, and answer no guest, until :meth:`resume`,
        and no longer than so many seconds.

        What is on its disks is then what its death would leave.
        """

    @abc.abstractmethod
    def resume(self, copy: str) -> None:
        """Let one go on.

        :raises CommandFailed: it was not paused any more
        """

    @abc.abstractmethod
    def copy_metadata(self, metadata: str, move_id: str, to: str,
                      new_move_id: str) -> None:
        """Copy the metadata of one that is paused, to be those of another
        move.

        :param metadata: device
        :param to: device of the same size
        """

    @abc.abstractmethod
    def end(self, copy: str) -> None:
        """End one and remove its device; what has arrived stays.

        :raises VolumeInUse: somebody has its device open
        """


@dataclasses.dataclass(frozen=True)
class Node:
    """The tools of one node.

    `metadata` is where region maps go; it may be the same group as `volumes`.
    """

    volumes: VolumeGroup
    metadata: VolumeGroup
    device_mapper: DeviceMapper
    target: SourceTarget
    remote: RemoteTarget
    initiator: Initiator
    hydrators: Hydrators
