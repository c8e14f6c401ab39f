# SPDX-License-Identifier: Apache-2.0
"""A node in memory that fails, crashes and hangs on demand.

It stands beside the real node, to test what reality can't be made to do at a
given moment: every call of every adapter can go wrong, before or after it has
done its work.  Volumes have content, in blocks of one region of REGION sectors
each, so that a test can see what a guest would read after all of it.

What a power cut takes is in memory here too (device-mapper nodes, exports and
sessions) and what it leaves is not (logical volumes and their content).
"""

from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
import dataclasses
import enum
import functools
from typing import Any
import uuid

from cinder import context
from oslo_utils import units

from cinder_localstor import exception
from cinder_localstor.node import interface


# Sectors: sixteen regions a GiB keep simulated hydration quick.
REGION = 64 * units.Mi // interface.SECTOR
# What a thick volume holds before anybody has written to it.
OLD_CONTENT = 'an old tenant'
# Bytes that LVM needs beside the changes that a thick snapshot may have
TABLES = 4 * units.Mi


class Fault(enum.Enum):
    """What goes wrong with a call, and whether it had its effect."""

    ERROR = 'fails without effect'
    ERROR_AFTER = 'has its effect and fails'
    HANG = 'is killed after its time without effect'
    HANG_AFTER = 'has its effect and is killed after its time'
    CRASH = 'the process dies before it'
    CRASH_AFTER = 'the process dies after it'


# These have had their effect.
LATE = (Fault.ERROR_AFTER, Fault.HANG_AFTER, Fault.CRASH_AFTER)


class Crash(BaseException):
    """The process of the driver has died: nothing in it may catch this."""

    def __init__(self, host: str, name: str) -> None:
        super().__init__('%s died in %s' % (host, name))
        self.host = host


@dataclasses.dataclass
class Call:
    """A call that is to go wrong; `nth` counts from 0."""

    name: str
    nth: int
    fault: Fault


class Faults:
    """Counts the calls of a node and lets the planned ones go wrong.

    :ivar plan: the call that is to go wrong next
    :ivar choose: asked at each call that is not planned, by host and name,
        whether and how it goes wrong
    :ivar observe: called after each call
    :ivar hang: what happens on the node while a call hangs
    """

    def __init__(self, host: str) -> None:
        self.host = host
        self.seen: list[tuple[str, int]] = []
        self.plan: Call | None = None
        self.choose: Callable[[str, str], Fault | None] = (
            lambda _host, _name: None)
        self.observe: Callable[[str, str], None] = (
            lambda _host, _name: None)
        self.hang: Callable[[], None] = lambda: None
        self._counts: dict[str, int] = {}

    def forget(self) -> None:
        """Begin to count anew, with nothing planned."""
        self.seen, self.plan, self._counts = [], None, {}

    def around(self, name: str, act: Callable[[], Any]) -> Any:
        """Make a call, or not, as planned."""
        nth = self._counts.get(name, 0)
        self._counts[name] = nth + 1
        self.seen.append((name, nth))
        fault = self._fault(name, nth)
        if fault is None or fault in LATE:
            answer = act()
            self.observe(self.host, name)
            if fault is None:
                return answer
        if fault in (Fault.CRASH, Fault.CRASH_AFTER):
            raise Crash(self.host, name)
        if fault in (Fault.HANG, Fault.HANG_AFTER):
            self.hang()
            raise exception.CommandTimedOut(command=name, host=self.host,
                                            seconds=60)
        raise exception.CommandFailed(command=name, host=self.host,
                                      reason='injected')

    def _fault(self, name: str, nth: int) -> Fault | None:
        plan = self.plan
        if plan is None or (plan.name, plan.nth) != (name, nth):
            return self.choose(self.host, name)
        self.plan = None
        return plan.fault


def _fallible(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        name = '%s.%s' % (type(self).__name__, method.__name__)
        return self.faults.around(
            name, lambda: method(self, *args, **kwargs))
    return wrapper


@dataclasses.dataclass
class Disk:
    """Content of a logical volume by region.

    What is in `regions` and not in `durable` is in the disk's cache.  `origin`
    is that of a thick snapshot, see :class:`interface.LogicalVolume`, and
    `tables` are bytes of its size that it has for LVM and its device has not.
    `room`, `taken_of` and `unfit` are those of
    :class:`interface.LogicalVolume`, and `is_open` is whether somebody has it
    open who is none of ours.  One that `is_skipped` is not active with its
    group.
    """

    size: int
    tags: frozenset[str]
    regions: dict[int, str] = dataclasses.field(default_factory=dict)
    durable: dict[int, str] = dataclasses.field(default_factory=dict)
    origin: str = ''
    is_valid: bool = True
    tables: int = 0
    room: int = 0
    taken_of: str = ''
    unfit: str = ''
    ailment: str = ''
    is_open: bool = False
    is_skipped: bool = False

    @property
    def used(self) -> int:
        """Bytes of a thin pool; zeros need none, and maps hardly any."""
        if any('.map=' in tag for tag in self.tags):
            return 0
        return (sum(map(bool, self.regions.values()))
                * REGION * interface.SECTOR)

    def flush(self) -> None:
        """Empty the cache to the disk."""
        self.durable = dict(self.regions)

    def lose_cache(self, survives: Callable[[], bool] = lambda: False
                   ) -> None:
        """What a power cut does.

        :param survives: asked for each region that was not flushed whether
            it happens to be on the disk all the same
        """
        cached = {number: content for number, content in self.regions.items()
                  if self.durable.get(number) != content}
        # The map of a clone is written when it is committed and never else.
        if not any('.map=' in tag for tag in self.tags):
            self.durable.update(
                (number, content) for number, content in cached.items()
                if survives())
        self.regions = dict(self.durable)


class SimulatedVolumeGroup(interface.VolumeGroup):
    """Logical volumes in memory."""

    def __init__(self, name: str, total: int, faults: Faults,
                 is_used: Callable[[str], bool]) -> None:
        """:param is_used: whether something lies on a device"""
        self.name = name
        self.total = total
        self._is_used = is_used
        self.faults = faults
        self.logical_block = interface.SECTOR
        self.disks: dict[str, Disk] = {}
        # What a command that has died has left behind
        self.abandoned: set[str] = set()
        # What LVM knows and the thin pool does not
        self.lost: set[str] = set()
        # How many of its disks are not there.  LVM changes little then.
        self.missing = 0
        # Bytes of a thin pool, if there is one, and how full its metadata are
        self.pool_size = 0
        self.pool_metadata = 0.0

    def check(self) -> None:
        self.resume_abandoned()

    @_fallible
    def logical_volumes(self) -> dict[str, interface.LogicalVolume]:
        return self._volumes()

    def _volumes(self) -> dict[str, interface.LogicalVolume]:
        return {name: interface.LogicalVolume(
            name, disk.size, disk.tags, used=disk.used, origin=disk.origin,
            is_valid=disk.is_valid, room=disk.room, taken_of=disk.taken_of,
            unfit=disk.unfit, ailment=disk.ailment,
            is_open=disk.is_open or self._is_used(self.path(name)))
            for name, disk in self.disks.items()}

    @property
    def thin(self) -> bool:
        return bool(self.pool_size)

    @_fallible
    def _look_at_pool(self) -> interface.Pool:
        volumes = self._volumes()
        used = sum(volume.used for volume in volumes.values())
        return interface.Pool(
            self.name + '/pool', self.pool_size, used / self.pool_size,
            self.pool_metadata, volumes)

    def pool(self) -> interface.Pool | None:
        return self._look_at_pool() if self.thin else None

    def capacity(self) -> interface.Capacity:
        used = sum(disk.size for disk in self.disks.values())
        free = 0 if self.missing else self.total - used
        return interface.Capacity(self.total, free, used, len(self.disks),
                                  thin=False)

    @_fallible
    def missing_disks(self) -> int:
        return self.missing

    def block_size(self) -> int:
        return self.logical_block

    def path(self, name: str) -> str:
        return '/dev/%s/%s' % (self.name, name)

    def mapped_name(self, name: str) -> str:
        return '%s-%s' % (self.name, name)

    def is_active(self, name: str) -> bool:
        return name in self.active_names()

    @_fallible
    def activate(self, name: str) -> bool:
        return self.is_active(name)

    @_fallible
    def keep_active(self, name: str) -> None:
        self.disks[name].is_skipped = False

    def active_names(self) -> set[str]:
        return {name for name, disk in self.disks.items()
                if not disk.is_skipped} - self.lost

    @_fallible
    def create(self, name: str, size: int, tags: frozenset[str]) -> bool:
        if self.is_active(name):
            return False
        if name in self.lost:
            self.lost.remove(name)
            del self.disks[name]
        self._take(name, size)
        # What the disk held before belongs to somebody else.
        self.disks[name] = Disk(size, tags, {
            number: OLD_CONTENT for number in range(64) if not self.thin})
        self.disks[name].flush()
        return True

    def _take(self, name: str, size: int) -> None:
        """:raises NotEnoughSpace: the group is too full"""
        self._check_whole(name)
        free = self.capacity().free
        if size > free and not self.thin:
            raise exception.NotEnoughSpace(
                group=self.name, host=self.faults.host, name=name,
                free=free, needed=size)

    @_fallible
    def create_snapshot(self, name: str, origin: str, tags: frozenset[str]
                        ) -> None:
        if name in self.disks:
            return
        found = self.disks[origin]
        self._take(name, found.size)
        # It is flushed with what LVM notes of it.
        found.flush()
        self.disks[name] = Disk(
            found.size, tags, dict(found.regions), dict(found.regions),
            origin='' if self.thin else origin, taken_of=origin)
        if not self.thin:
            self.disks[name].tables = TABLES
            self.disks[name].size += TABLES

    def create_snapshots(self, wanted: Sequence[interface.NewSnapshot],
                         moment: contextlib.AbstractContextManager[None]
                         = contextlib.nullcontext()) -> None:
        with moment:
            for snapshot in wanted:
                self.create_snapshot(*snapshot)

    @_fallible
    def split_snapshot(self, name: str) -> None:
        self._check_whole(name)
        if name in self.disks:
            if self.disks[name].origin:
                # What is left are the chunks that its origin had changed.
                self.disks[name].regions = {0: 'chunks of a snapshot'}
                self.disks[name].flush()
            self.disks[name].origin = self.disks[name].taken_of = ''
            self.disks[name].tables = 0

    @_fallible
    def extend(self, name: str, size: int) -> None:
        if interface.snapshots_on(name, self._volumes()):
            self._check_unused('deactivate', name)
        self._take(name, size - self.disks[name].size)
        self.disks[name].size = max(self.disks[name].size, size)

    @_fallible
    def zero(self, name: str, size: int) -> None:
        self.disks[name].regions.clear()
        self.disks[name].flush()

    @_fallible
    def copy(self, name: str, to: str) -> None:
        found = self.disks[name].durable
        self.disks[to].regions = dict(found)
        self.disks[to].flush()

    @_fallible
    def clear(self, name: str) -> None:
        if name in self.disks:
            self.disks[name].regions.clear()

    @_fallible
    def retag(self, name: str, add: frozenset[str],
              remove: frozenset[str]) -> None:
        disk = self.disks[name]
        disk.tags = (disk.tags | add) - remove

    @_fallible
    def rename(self, name: str, new: str) -> None:
        self._check_unused('rename', name)
        self._check_whole(name)
        assert new not in self.disks, new
        self.disks[new] = self.disks.pop(name)
        for disk in self.disks.values():
            if disk.origin == name:
                disk.origin = new
            if disk.taken_of == name:
                disk.taken_of = new

    @_fallible
    def remove(self, name: str) -> None:
        self._check_unused('remove', name)
        interface.check_no_snapshots(self.name, name, self._volumes())
        if not self.thin and name in self.disks:
            left = set(self.disks[name].regions.values()) - {OLD_CONTENT}
            assert not left, 'the next to have the space of %s finds %s' % (
                name, left)
        self.disks.pop(name, None)
        self.lost.discard(name)

    def _check_unused(self, command: str, name: str) -> None:
        if self._is_used(self.path(name)):
            raise exception.CommandFailed(
                command='%s %s' % (command, self.path(name)),
                host=self.faults.host,
                reason='it is used by another device')

    def _check_whole(self, name: str) -> None:
        """:raises DiskMissing: LVM changes nothing in the group"""
        if self.missing:
            raise exception.DiskMissing(
                group=self.name, host=self.faults.host, name=name,
                reason='Cannot change VG while PVs are missing')

    def suspended(self) -> set[str]:
        return set(self.abandoned)

    def resume_abandoned(self) -> None:
        self.abandoned.clear()


@dataclasses.dataclass
class Arrival:
    """What a clone or a native helper serves: a copy, and its source where
    the map does not say that a region has arrived.

    `map`, `copy` and `source` are devices, `total` counts regions.
    """

    node: 'SimulatedNode'
    map: str
    copy: str
    source: str
    total: int

    @property
    def _mapped(self) -> dict[int, str]:
        return self.node.disk(self.map).regions

    def local(self) -> int:
        """How many regions have arrived."""
        return sum(1 for number in self._mapped if number < self.total)

    def read(self, number: int) -> str:
        """What a region reads."""
        local = number in self._mapped
        return self.node.read(self.copy if local else self.source, number)

    def write(self, number: int, content: str) -> None:
        """Write a region, which is local then."""
        self.node.write(self.copy, number, content)
        self._mapped[number] = 'local'

    def flush(self) -> None:
        """Make the copy durable, and then the map."""
        self.node.flush(self.copy)
        self.node.flush(self.map)

    def hydrate(self, most: int) -> None:
        """Copy regions, as many as `most`, unless the source is away."""
        missing = [number for number in range(self.total)
                   if number not in self._mapped]
        try:
            for number in missing[:most]:
                self.write(number, self.node.read(self.source, number))
        except exception.SourceUnreachable:
            pass  # the copy waits


@dataclasses.dataclass
class Mapped:
    """A device-mapper node."""

    table: list[interface.Segment]
    read_only: bool
    open_count: int = 0
    hydrating: bool = False
    suspended: bool = False
    in_flight: int = 0


class SimulatedDeviceMapper(interface.DeviceMapper):
    """Device-mapper nodes in memory, with linear and clone targets."""

    def __init__(self, node: 'SimulatedNode', faults: Faults) -> None:
        self._node = node
        self.faults = faults
        self.nodes: dict[str, Mapped] = {}
        # What a guard holds at the moment
        self.holds: set[str] = set()

    def check_target(self, target: str) -> None:
        pass

    @_fallible
    def devices(self) -> dict[str, interface.Device]:
        return {name: self._describe(name, node)
                for name, node in self.nodes.items()}

    def in_flight(self, name: str) -> int:
        return self.nodes[name].in_flight if name in self.nodes else 0

    def _describe(self, name: str, node: Mapped) -> interface.Device:
        under = tuple(self._mapped_name(device)
                      for device in self._devices_of(node))
        return interface.Device(
            name=name, open_count=self._open_count(name),
            suspended=node.suspended,
            read_only=node.read_only,
            status=tuple(self._status(segment, node.hydrating)
                         for segment in node.table),
            under=under)

    def _open_count(self, name: str) -> int:
        path = self.path(name)
        above = sum(path in self._devices_of(node)
                    for node in self.nodes.values())
        exported = sum(device == path for _export, device
                       in self._node.target.exports.values())
        exported += list(self._node.remote.exports.values()).count(path)
        return self.nodes[name].open_count + above + exported

    def _mapped_name(self, path: str) -> str:
        _dev, group, name = path.strip('/').split('/')
        return name if group == 'mapper' else '%s-%s' % (group, name)

    def lies_on(self, path: str) -> bool:
        """Whether a node lies on a device."""
        return any(path in self._devices_of(node)
                   for node in self.nodes.values())

    def under(self, name: str) -> list[str]:
        """Paths of the devices that a node lies on."""
        return self._devices_of(self.nodes[name])

    def _devices_of(self, node: Mapped) -> list[str]:
        return [word for segment in node.table
                for word in segment.arguments.split() if '/' in word]

    def _status(self, segment: interface.Segment, hydrating: bool
                ) -> interface.Segment:
        if segment.target != 'clone':
            return dataclasses.replace(segment, arguments='')
        arrival = self._arrival(segment)
        feature = '0' if hydrating else '1 no_hydration'
        return dataclasses.replace(
            segment, arguments='8 1/64 %d %d/%d 0 %s 0 rw'
            % (int(segment.arguments.split()[3]), arrival.local(),
               arrival.total, feature))

    def _arrival(self, segment: interface.Segment) -> Arrival:
        mapped, copy, source, sectors = segment.arguments.split()[:4]
        return Arrival(self._node, mapped, copy, source,
                       -(-segment.length // int(sectors)))

    def path(self, name: str) -> str:
        return '/dev/mapper/' + name

    def link(self, name: str) -> str:
        return '/dev/link/' + name

    def exists(self, name: str) -> bool:
        return name in self.nodes

    @_fallible
    def create(self, name: str, table: list[interface.Segment],
               read_only: bool = False) -> None:
        if name not in self.nodes:
            self._open(table)
            self.nodes[name] = Mapped(table, read_only)

    @_fallible
    def create_all(self, nodes: Sequence[interface.NewNode]) -> None:
        for node in nodes:
            if node.name in self.nodes:
                raise exception.CommandFailed(
                    command='dmsetup create', host=self.faults.host,
                    reason='Device or resource busy')
            self._open(list(node.table))
            self.nodes[node.name] = Mapped(list(node.table), node.read_only)

    def _open(self, table: list[interface.Segment]) -> None:
        for segment in table:
            for word in segment.arguments.split():
                if '/' in word:
                    self._node.check_device(word)
            if segment.target == 'linear':
                device, start = segment.arguments.split()
                self._node.check_end(device, int(start) + segment.length)

    @_fallible
    def reload(self, name: str, table: list[interface.Segment],
               read_only: bool = False, keep_queued: bool = False) -> None:
        node = self.nodes[name]
        assert node.table[0].target != 'clone', 'hazard H26'
        self._open(table)
        node.table, node.read_only = table, read_only

    @_fallible
    def make_read_only(self, name: str) -> None:
        self.nodes[name].read_only = True

    @_fallible
    def suspend(self, name: str) -> None:
        node = self.nodes[name]
        self._arrival(node.table[0]).flush()
        node.suspended = True

    @contextlib.contextmanager
    def held(self, names: Sequence[str]) -> Iterator[None]:
        try:
            self._hold(names)
            yield
            self._check_held(names)
        finally:
            # The guard, which outlives the process
            self.let_all_go()

    @_fallible
    def _hold(self, names: Sequence[str]) -> None:
        assert not self.holds, 'two guards at once'
        for name in names:
            assert name in self.nodes, 'No such device'
            self.nodes[name].suspended = True
            self.holds.add(name)
            self.faults.observe(self.faults.host, 'suspend ' + name)

    @_fallible
    def _check_held(self, names: Sequence[str]) -> None:
        if not self.holds.issuperset(names):
            raise exception.NotHeld(names=', '.join(names),
                                    host=self.faults.host,
                                    seconds=interface.HOLD)

    def let_all_go(self) -> None:
        """What the guard does when its time is over."""
        for name in self.holds:
            self.nodes[name].suspended = False
        self.holds.clear()

    def abandoned(self) -> set[str]:
        return {name for name, node in self.nodes.items()
                if node.suspended and name not in self.holds}

    @_fallible
    def resume(self, name: str) -> None:
        self.nodes[name].suspended = False

    @_fallible
    def message(self, name: str, text: str) -> None:
        assert text in ('enable_hydration', 'disable_hydration',
                        'fail_if_no_path'), text
        if name not in self.nodes:
            raise exception.CommandFailed(
                command='message ' + name, host=self.faults.host,
                reason='No such device')
        if text != 'fail_if_no_path':
            self.nodes[name].hydrating = text == 'enable_hydration'

    @_fallible
    def remove(self, name: str) -> None:
        if name not in self.nodes:
            return
        if self._open_count(name):
            raise exception.VolumeInUse(
                volume_name=name, host=self.faults.host,
                device=self.path(name))
        del self.nodes[name]

    @_fallible
    def flush(self, device: str) -> None:
        self._node.check_device(device)
        self._node.flush(device)

    @_fallible
    def forget_cached(self, device: str) -> None:
        self._node.check_device(device)

    @_fallible
    def refuse_discards(self, device: str) -> None:
        self._node.check_device(device)

    def hydrate(self, most: int) -> None:
        """What the kernel's background copy does in a while.

        :param most: regions that each clone may copy
        """
        for node in self.nodes.values():
            if (node.table[0].target == 'clone' and node.hydrating
                    and not node.suspended):
                self._arrival(node.table[0]).hydrate(most)

    def read(self, name: str, number: int) -> str:
        """What a region of a node reads."""
        node = self.nodes[name]
        if node.table[0].target == 'clone':
            return self._arrival(node.table[0]).read(number)
        return self._node.read(self._below(node, number), number)

    def _below(self, node: Mapped, number: int) -> str:
        """What a region of a node lies on that is no clone."""
        sector = number * REGION
        for segment in node.table:
            if segment.start <= sector < segment.start + segment.length:
                return next(word for word in segment.arguments.split()
                            if '/' in word)
        raise AssertionError('region %d is beyond the end' % number)

    def write(self, name: str, number: int, content: str) -> None:
        """Write a region of a node."""
        node = self.nodes[name]
        assert not node.read_only, 'a sealed copy is written'
        assert not node.suspended, 'a guest waits'
        if node.table[0].target == 'clone':
            self._arrival(node.table[0]).write(number, content)
        else:
            self._node.write(self._below(node, number), number, content)

    def flush_node(self, name: str) -> None:
        """What a flush of a node flushes."""
        node = self.nodes[name]
        if node.table[0].target == 'clone':
            self._arrival(node.table[0]).flush()
        else:
            for device in self._devices_of(node):
                self._node.flush(device)


class SimulatedTarget(interface.SourceTarget):
    """Exports in memory; a device has one, as with LIO."""

    def __init__(self, node: 'SimulatedNode', faults: Faults) -> None:
        self._node = node
        self.faults = faults
        self.exports: dict[str, tuple[interface.Export, str]] = {}

    def warm_up(self) -> None:
        pass

    def portal(self) -> str:
        return self.faults.host

    def describe(self, move_id: str, initiator: str, address: str,
                 transports: Collection[str] = (interface.ISCSI,)
                 ) -> interface.Export:
        kind = 'nqn' if interface.NVME in transports else 'iqn'
        return interface.Export(
            portal=self.faults.host, iqn=kind + '.2010-10.org.openstack:' +
            move_id, lun=1, serial=move_id, initiator=initiator,
            address=address,
            username='user', password='secret of ' + move_id)

    @_fallible
    def export(self, move_id: str, device: str, export: interface.Export
               ) -> None:
        if any(other != move_id and taken == device
               for other, (_export, taken) in self.exports.items()):
            raise exception.CommandFailed(
                command='export', host=self.faults.host,
                reason='%s is already in use' % device)
        self.exports.setdefault(move_id, (export, device))
        # What is there already is not looked at again, and a target without
        # a disk stays one, as with the real ones.
        self._node.check_device(device)

    @_fallible
    def unexport(self, move_id: str) -> None:
        self.exports.pop(move_id, None)

    def exported(self) -> set[str]:
        return set(self.exports)


class SimulatedRemoteTarget(interface.RemoteTarget):
    """Exports for ordinary connections in memory, devices by volume's name.
    """

    def __init__(self, node: 'SimulatedNode', faults: Faults) -> None:
        self._node = node
        self.faults = faults
        self.exports: dict[str, str] = {}
        # The initiators that an export is for, by the name of its volume
        self.admitted: dict[str, set[str]] = {}
        # What they have to know
        self.secrets: dict[str, str] = {}

    def check(self) -> None:
        pass

    def describe(self, ctxt: context.RequestContext, volume: Any
                 ) -> dict[str, str]:
        # As Cinder's, whose is the volume's row
        auth = volume['provider_auth'] or 'CHAP user %s' % uuid.uuid4().hex
        return {'provider_location': 'iscsi %s' % volume['name'],
                'provider_auth': auth}

    def export(self, ctxt: context.RequestContext, volume: Any, device: str
               ) -> dict[str, str]:
        fields = self.describe(ctxt, volume)
        self._serve(volume, device, fields['provider_auth'], ())
        return fields

    def ensure(self, ctxt: context.RequestContext, volume: Any, device: str,
               connectors: Iterable[dict[str, Any]]) -> None:
        self._serve(volume, device, volume['provider_auth'], connectors)

    @_fallible
    def _serve(self, volume: Any, device: str, auth: str,
               connectors: Iterable[dict[str, Any]]) -> None:
        self._node.check_device(device)
        self.exports[volume['name']] = device
        self.secrets[volume['name']] = auth
        self.admitted.setdefault(volume['name'], set()).update(
            connector['initiator'] for connector in connectors)

    @_fallible
    def unexport(self, ctxt: context.RequestContext, volume: Any) -> None:
        self.exports.pop(volume['name'], None)
        self.admitted.pop(volume['name'], None)
        self.secrets.pop(volume['name'], None)

    @_fallible
    def connect(self, volume: Any, connector: dict[str, Any]
                ) -> dict[str, Any]:
        path = self.exports[volume['name']]
        self.admitted.setdefault(volume['name'], set()).add(
            connector['initiator'])
        return {'driver_volume_type': 'iscsi', 'data': {
            'device_path': path, 'auth': volume['provider_auth']}}

    @_fallible
    def disconnect(self, volume: Any, connector: dict[str, Any]) -> None:
        self.admitted.get(volume['name'], set()).discard(
            connector['initiator'])


class SimulatedInitiator(interface.Initiator):
    """Sessions in memory; `network` finds the node behind a portal."""

    def __init__(self, network: dict[str, 'SimulatedNode'], faults: Faults
                 ) -> None:
        self.network = network
        self.faults = faults
        self.sessions: dict[str, interface.Export] = {}
        # Portals that a cut in the network keeps away
        self.unreachable: set[str] = set()
        # Sessions that the loss of the source has broken for good
        self.broken: set[str] = set()
        self.known: tuple[str, ...] = (interface.ISCSI,)

    def transports(self) -> tuple[str, ...]:
        return self.known

    def name(self) -> str:
        return 'iqn.1993-08.org.debian:' + self.faults.host

    def addresses(self) -> list[str]:
        return []

    def address_towards(self, portal: str) -> str:
        return '192.0.2.1'

    @_fallible
    def connect(self, export: interface.Export) -> str:
        source = self.network.get(export.portal)
        if export.portal in self.unreachable:
            source = None
        if source is None or not any(
                export == found for found, _device
                in source.target.exports.values()):
            raise exception.SourceUnreachable(
                host=self.faults.host, iqn=export.iqn, portal=export.portal,
                reason='no such export')
        self.sessions[export.iqn] = export
        self.broken.discard(export.iqn)
        return '/dev/iscsi/' + export.serial

    def connected(self) -> dict[str, str]:
        return {iqn: '/dev/iscsi/' + export.serial
                for iqn, export in self.sessions.items()
                if iqn not in self.broken}

    @_fallible
    def disconnect(self, export: interface.Export) -> None:
        self.sessions.pop(export.iqn, None)
        self.broken.discard(export.iqn)

    def block_size(self, move_id: str) -> int:
        """Bytes of a logical block of a connected disk."""
        return next(export.block_size for export in self.sessions.values()
                    if export.serial == move_id)

    def find(self, move_id: str) -> tuple['SimulatedNode', str]:
        """The node and the device behind a connected disk."""
        for export in self.sessions.values():
            if (export.serial == move_id and export.iqn not in self.broken
                    and export.portal not in self.unreachable):
                source = self.network[export.portal]
                if move_id in source.target.exports:
                    return source, source.target.exports[move_id][1]
        raise exception.SourceUnreachable(
            host=self.faults.host, iqn=move_id, portal='', reason='cut off')


@dataclasses.dataclass
class Process:
    """A native helper."""

    arrival: Arrival
    started: bool
    minimum: int
    limit: int | None = None
    paused: bool = False


class SimulatedHydrators(interface.Hydrators):
    """Native helpers in memory; they outlive the driver and no power cut."""

    # The block of the metadata that says whether hydration has begun
    SUPERBLOCK = 1 << 40

    def __init__(self, node: 'SimulatedNode', faults: Faults) -> None:
        self._node = node
        self.faults = faults
        self.installed = True
        self.processes: dict[str, Process] = {}

    def check(self) -> None:
        if not self.installed:
            raise exception.HydratorMissing(host=self.faults.host,
                                            reason='not installed')

    @staticmethod
    def path(copy: str) -> str:
        """The device of a copy's helper."""
        return '/dev/hydrated/' + copy

    @_fallible
    def start(self, copy: str, hydrator: interface.Hydrator) -> str:
        if copy not in self.processes:
            for device in (hydrator.data, hydrator.metadata,
                           hydrator.source):
                self._node.check_device(device)
            self._check_blocks(hydrator)
            regions = hydrator.size // (REGION * interface.SECTOR)
            self.processes[copy] = Process(
                Arrival(self._node, hydrator.metadata, hydrator.data,
                        hydrator.source, regions),
                self.SUPERBLOCK in self._node.disk(hydrator.metadata).regions,
                hydrator.minimum)
        return self.path(copy)

    def _check_blocks(self, hydrator: interface.Hydrator) -> None:
        source, data = (self._node.block_size(device) for device
                        in (hydrator.source, hydrator.data))
        if source != data:
            raise exception.CommandFailed(
                command='localstor-hydrator', host=self.faults.host,
                reason='%s has logical blocks of %d bytes, %s of %d' % (
                    hydrator.source, source, hydrator.data, data))

    def status(self, copy: str) -> interface.HydratorStatus | None:
        process = self.processes.get(copy)
        if process is None:
            return None
        local, total = process.arrival.local(), process.arrival.total
        state = ('done' if local == total
                 else 'migrating' if process.started else 'starting')
        return interface.HydratorStatus(
            state, local * REGION * interface.SECTOR, rate=0,
            limit=process.limit, minimum=process.minimum)

    @_fallible
    def hydrate(self, copy: str) -> None:
        process = self.processes[copy]
        process.started = True
        metadata = self._node.disk(process.arrival.map)
        for content in (metadata.regions, metadata.durable):
            content[self.SUPERBLOCK] = 'started'

    @_fallible
    def throttle(self, copy: str, limit: int | None, minimum: int) -> None:
        if copy not in self.processes:
            raise exception.CommandFailed(
                command='throttle ' + copy, host=self.faults.host,
                reason='nobody answers')
        self.processes[copy].limit = limit
        self.processes[copy].minimum = minimum

    @_fallible
    def pause(self, copy: str, seconds: int) -> None:
        self.processes[copy].paused = True

    @_fallible
    def resume(self, copy: str) -> None:
        if copy not in self.processes or not self.processes[copy].paused:
            raise exception.CommandFailed(
                command='resume ' + copy, host=self.faults.host,
                reason='it was not paused any more')
        self.processes[copy].paused = False

    @_fallible
    def copy_metadata(self, metadata: str, move_id: str, to: str,
                      new_move_id: str) -> None:
        disk = self._node.disk(to)
        disk.regions = {
            number: content for number, content
            in self._node.disk(metadata).regions.items()
            if number != self.SUPERBLOCK}
        disk.flush()

    def served(self, copy: str) -> Arrival:
        """What a guest finds; it may have to wait until a pause has ended."""
        self.processes[copy].paused = False
        return self.processes[copy].arrival

    @_fallible
    def end(self, copy: str) -> None:
        if self._node.device_mapper.lies_on(self.path(copy)):
            raise exception.VolumeInUse(
                volume_name=copy, host=self.faults.host,
                device=self.path(copy))
        self.processes.pop(copy, None)

    def lie_on(self, path: str) -> bool:
        """Whether a helper has a device open."""
        return any(path in (process.arrival.map, process.arrival.copy,
                            process.arrival.source)
                   for process in self.processes.values())

    def copy_in_background(self, most: int) -> None:
        """What the helpers copy in a while, see `SimulatedNode.hydrate`; a
        pause ends by itself in it.
        """
        for process in self.processes.values():
            if process.paused:
                process.paused = False
            elif process.started and process.limit != 0:
                process.arrival.hydrate(most)


class SimulatedNode:
    """A node in memory; it has what :class:`interface.Node` has."""

    def __init__(self, host: str, network: dict[str, 'SimulatedNode'],
                 total: int = 1 << 40) -> None:
        """:param network: all nodes by host; this one is added
        :param total: bytes of the volume group
        """
        self.host = host
        self.faults = Faults(host)
        self.volumes = SimulatedVolumeGroup('group', total, self.faults,
                                            self.is_used)
        self.metadata = self.volumes
        self.device_mapper = SimulatedDeviceMapper(self, self.faults)
        self.target = SimulatedTarget(self, self.faults)
        self.remote = SimulatedRemoteTarget(self, self.faults)
        self.initiator = SimulatedInitiator(network, self.faults)
        self.hydrators = SimulatedHydrators(self, self.faults)
        self.faults.hang = self.device_mapper.let_all_go
        network[host] = self

    def cut_power(self, survives: Callable[[], bool] = lambda: False
                  ) -> None:
        """Lose all that is not on a disk, see :meth:`Disk.lose_cache`."""
        for disk in self.volumes.disks.values():
            disk.lose_cache(survives)
        self.device_mapper.nodes.clear()
        self.device_mapper.holds.clear()
        self.hydrators.processes.clear()
        for export, _device in self.target.exports.values():
            for node in self.initiator.network.values():
                if export.iqn in node.initiator.sessions:
                    node.initiator.broken.add(export.iqn)
        self.target.exports.clear()
        self.remote.exports.clear()
        self.initiator.sessions.clear()

    def hydrate(self, most: int = 1 << 32) -> None:
        """What is copied in the background in a while.

        :param most: regions that are copied of each volume
        """
        self.device_mapper.hydrate(most)
        self.hydrators.copy_in_background(most)

    def disk(self, path: str) -> Disk:
        """The logical volume with a path."""
        return self.volumes.disks[path.rsplit('/', 1)[1]]

    def is_used(self, path: str) -> bool:
        """Whether something of the node lies on a device."""
        return (self.device_mapper.lies_on(path)
                or self.hydrators.lie_on(path))

    def check_device(self, path: str) -> None:
        """:raises CommandFailed: there is no such device"""
        _dev, group, name = path.strip('/').split('/')
        there = {
            'mapper': set(self.device_mapper.nodes),
            'link': set(self.device_mapper.nodes),
            'group': set(self.volumes.disks) - self.volumes.lost,
            'hydrated': set(self.hydrators.processes),
            'iscsi': {export.serial for export
                      in self.initiator.sessions.values()}}
        if name not in there[group]:
            raise exception.CommandFailed(
                command='open ' + path, host=self.host,
                reason='No such device')

    def block_size(self, path: str) -> int:
        """Bytes of a logical block of a device."""
        _dev, group, name = path.strip('/').split('/')
        if group == 'mapper':
            return max(map(self.block_size, self.device_mapper.under(name)),
                       default=interface.SECTOR)
        if group == 'iscsi':
            return self.initiator.block_size(name)
        return self.volumes.block_size()

    def check_end(self, path: str, sectors: int) -> None:
        """:raises CommandFailed: a device is smaller, if that is known"""
        _dev, group, name = path.strip('/').split('/')
        disk = self.volumes.disks.get(name) if group == 'group' else None
        if disk and sectors * interface.SECTOR > disk.size - disk.tables:
            raise exception.CommandFailed(
                command='dmsetup load', host=self.host,
                reason='device-mapper: reload ioctl on %s failed: Invalid '
                       'argument' % path)

    def flush(self, path: str) -> None:
        """Make what was written to a device durable."""
        _dev, group, name = path.strip('/').split('/')
        if group == 'mapper':
            self.device_mapper.flush_node(name)
        elif group == 'hydrated':
            self.hydrators.served(name).flush()
        elif group == self.volumes.name:
            self.disk(path).flush()

    def read(self, path: str, number: int) -> str:
        """What a region of a device reads."""
        _dev, group, name = path.strip('/').split('/')
        if group == 'mapper':
            return self.device_mapper.read(name, number)
        if group == 'hydrated':
            return self.hydrators.served(name).read(number)
        if group == 'iscsi':
            node, device = self.initiator.find(name)
            return node.read(device, number)
        return self.disk(path).regions.get(number, '')

    def write(self, path: str, number: int, content: str) -> None:
        """Write a region of a device, to the disk's cache."""
        _dev, group, name = path.strip('/').split('/')
        assert group != 'iscsi', 'a source is written from another node'
        if group == 'mapper':
            self.device_mapper.write(name, number, content)
        elif group == 'hydrated':
            self.hydrators.served(name).write(number, content)
        else:
            self.disk(path).regions[number] = content
