# SPDX-License-Identifier: Apache-2.0
"""What the guest's device is made of: a logical volume, or an engine on it.

Each stack is built on fresh metadata and removed without a trace. dm-clone is
built by the driver's own code, once as the proposal has it and once with the
driver's defaults.
"""

import abc
import dataclasses
import json
import pathlib
import shlex
import time
import types
from typing import Any
import uuid

from cinder_localstor.datapath import clone
from cinder_localstor.datapath import regions
from cinder_localstor.node import dmsetup
from cinder_localstor.node import interface
from cinder_localstor import opts
from lab.bench import disks
from lab import errors
from lab import layout
from lab import node as nodes

HYDRATOR = (layout.REPOSITORY / 'hydrator' / 'target' / 'release'
            / 'localstor-hydrator')
HANDLE = 'bench-handle'
# Seconds, for a device to appear and for one to go
PATIENCE = 60
_END = 10


class _Commands:
    """The driver's way to run a command, on a node of the lab."""

    def __init__(self, node: nodes.Node) -> None:
        self._node = node
        self.host = node.name

    def run(self, *arguments: str, timeout: float | None = None) -> str:
        return self._node.run(list(arguments), timeout=timeout or 60).stdout


class DeviceMapper(dmsetup.DmsetupDeviceMapper):
    """The driver's device-mapper, on a node of the lab."""

    def __init__(self, node: nodes.Node) -> None:
        super().__init__(_Commands(node))  # type: ignore[arg-type]
        self._node = node

    def flush(self, device: str) -> None:
        """Have all that was written to it on the disk."""
        self._node.run(['sync', device])

    def remove(self, name: str) -> None:
        """Remove a node, as soon as no probe of udev's has it open."""
        self._node.run(['dmsetup', 'remove', '--retry', name])

    def refuse_discards(self, device: str) -> None:
        """Nobody sends any here."""


def sweep(disk: disks.Disk) -> None:
    """Remove whatever a step that failed has left over a disk.

    What comes next would find it busy, or take it for its own.
    """
    # A handle is removed before the engine that it lies on.
    disk.node.run(['bash', '-c', '\n'.join([
        "pkill -9 -f 'localstor-hydrator run'",
        f'rm -rf {_Hydrator.runtime}',
        'udevadm settle --timeout=10',
        *(f'dmsetup info {name} > /dev/null 2>&1'
          f' && dmsetup remove --retry --force {name}'
          for name in (HANDLE, _Clone.engine_node)),
        ':'])])
    disk.clear()


@dataclasses.dataclass(frozen=True)
class Hydrated:
    """How far a hydration came: bytes, and the seconds that it took."""

    size: int
    seconds: float

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.size / self.seconds


class Stack(abc.ABC):
    """A device for the guest, over a disk."""

    name: str
    label: str

    def __init__(self, disk: disks.Disk) -> None:
        self.disk = disk
        self.node = disk.node
        self.device_mapper = DeviceMapper(disk.node)

    def build(self, size: int) -> None:
        """Make the device for a new move of a volume of `size` MiB."""
        self.size = size
        self.device = self._build()

    @abc.abstractmethod
    def _build(self) -> str:
        """Make the device."""

    def start_hydration(self) -> None:
        """Begin to copy in the background."""

    def local(self) -> int:
        """Bytes that are on the destination."""
        return 0

    @abc.abstractmethod
    def hydrate(self, limit: float) -> Hydrated:
        """Copy all in at most `limit` seconds, without a guest."""

    def settle(self) -> None:
        """What the driver does before it leaves the engine."""
        self.device_mapper.flush(self.device)

    @abc.abstractmethod
    def remove(self) -> None:
        """Take away what `build` has made."""

    def flush(self) -> None:
        """Have what was written on the disk, and noted."""
        self.device_mapper.flush(self.device)
        # What is noted in the background
        time.sleep(0.3)

    # Set by build; the size in MiB
    device = ''
    size = 0

    # The handle, as the driver makes it: linear over the engine, then over
    # the logical volume

    def lay_handle(self) -> str:
        """A linear node over the device."""
        self.device_mapper.create(HANDLE, [self._linear(self.device)])
        return self.device_mapper.path(HANDLE)

    def swap_handle(self) -> None:
        """Put the handle over the logical volume alone."""
        self.device_mapper.reload(HANDLE, [self._linear(self.disk.data)])

    def _linear(self, device: str) -> interface.Segment:
        return interface.Segment(0, self.size * disks.MIB // interface.SECTOR,
                                 'linear', f'{device} 0')

    def remove_handle(self) -> None:
        """Take it away."""
        self.device_mapper.remove(HANDLE)

    def _timed(self, script: str, timeout: float) -> float:
        """Seconds that a script takes on the node, without its start."""
        printed = self.node.run(
            ['bash', '-c', f'begin=$EPOCHREALTIME\n{script}\n'
                           'echo $begin $EPOCHREALTIME'],
            timeout=timeout).stdout
        begin, end = printed.split()
        return float(end) - float(begin)


class Raw(Stack):
    """The logical volume alone."""

    name = 'raw'
    label = 'raw LV'

    def _build(self) -> str:
        return self.disk.data

    def hydrate(self, limit: float) -> Hydrated:
        """A plain sequential copy, by dd."""
        source, data = self.disk.source, self.disk.data
        seconds = self._timed(
            f'dd if={source} of={data} bs=1M count={self.size} iflag=direct'
            ' oflag=direct conv=fsync,notrunc status=none', PATIENCE)
        return Hydrated(self.size * disks.MIB, seconds)

    def remove(self) -> None:
        self.disk.clear()


class _Clone(Stack):

    engine_node = 'bench-clone'

    def _build(self) -> str:
        self._make_node(self.size * disks.MIB)
        return self.device_mapper.path(self.engine_node)

    @abc.abstractmethod
    def _make_node(self, size: int) -> None:
        """Make the engine's node, for so many bytes."""

    def _progress(self) -> Any:
        line = self.node.run(['dmsetup', 'status', '--noflush',
                              self.engine_node]).stdout
        return clone.parse_status(line.split(' clone ', 1)[1])

    def start_hydration(self) -> None:
        self.device_mapper.message(self.engine_node, 'enable_hydration')

    def local(self) -> int:
        return self._progress().local

    def hydrate(self, limit: float) -> Hydrated:
        # dm-clone tells of the last region by an event.
        node = self.engine_node
        seconds = self._timed(
            f'dmsetup message {node} 0 enable_hydration\n'
            f'timeout {limit:g} dmsetup wait --noflush {node} 0 > /dev/null',
            limit + PATIENCE)
        return Hydrated(self.local(), seconds)

    def remove(self) -> None:
        self.device_mapper.remove(self.engine_node)
        self.disk.clear()


class ProposedClone(_Clone):
    """dm-clone as the proposal sets it: a table to the letter."""

    name = 'clone-proposal'
    label = 'dm-clone, proposal'

    def _make_node(self, size: int) -> None:
        disk = self.disk
        self.device_mapper.create(self.engine_node, [interface.Segment(
            0, size // interface.SECTOR, clone.TARGET,
            f'{disk.map} {disk.data} {disk.source} 8 1 no_hydration')])


class DriversClone(_Clone):
    """dm-clone as the driver builds it, with the defaults of its options."""

    name = 'clone'
    label = 'dm-clone, ours'

    def _make_node(self, size: int) -> None:
        defaults = {option.name: option.default
                    for option in opts.LOCALSTOR_OPTS}
        disk = self.disk
        node: Any = types.SimpleNamespace(
            device_mapper=self.device_mapper,
            volumes=types.SimpleNamespace(path=lambda name: disk.data),
            metadata=types.SimpleNamespace(path=lambda name: disk.map,
                                           is_active=lambda name: True))
        move: Any = types.SimpleNamespace(
            destination_name='bench', size=size,
            region_sectors=regions.region_sectors(
                size, defaults['localstor_region_size']),
            threshold=defaults['localstor_hydration_threshold'],
            batch=defaults['localstor_hydration_batch'])
        clone.CloneEngine(node).build(move, disk.source)


class _Hydrator(Stack):

    frontend: str
    runtime = pathlib.PurePosixPath('/run/bench')
    log = '/run/bench.log'
    program = HYDRATOR

    def _build(self) -> str:
        command = [str(self.program), 'run', '--runtime', str(self.runtime),
                   '--move', str(uuid.uuid4()), '--data', self.disk.data,
                   '--metadata', self.disk.map, '--source', self.disk.source,
                   '--size', f'{self.size}M', '--new', '--frontend',
                   self.frontend]
        self.node.run(['bash', '-c', (
            f'exec setsid {shlex.join(command)} > {self.log} 2>&1 < /dev/null'
            f' & echo $! > {self.runtime}.pid')])
        return self._wait_for_device()

    def _wait_for_device(self) -> str:
        deadline = time.monotonic() + PATIENCE
        while not (status := self._status())['device']:
            if time.monotonic() > deadline:
                raise errors.LabError('the helper shows no device; its log: '
                                      + self._read_log())
        return status['device']

    def _ask(self, verb: str, check: bool = True,
             timeout: float = PATIENCE) -> Any:
        return self.node.run([str(self.program), verb, str(self.runtime)],
                             check=check, timeout=timeout)

    def _status(self) -> dict[str, Any]:
        answer = self._ask('status', check=False)
        return json.loads(answer.stdout) if not answer.returncode \
            else {'device': None}

    def _read_log(self) -> str:
        return self.node.run(['tail', '-n', '20', self.log]).stdout

    def start_hydration(self) -> None:
        self._ask('start')

    def local(self) -> int:
        return self._status()['local']

    def hydrate(self, limit: float) -> Hydrated:
        seconds = self._timed(
            f'{self.program} start {self.runtime} > /dev/null\n'
            f'timeout {limit:g} sh -c "tail -n +1 -f {self.log}'
            ' | grep -q -m 1 \'everything is local\'"', limit + PATIENCE)
        return Hydrated(self.local(), seconds)

    def remove(self) -> None:
        self.node.run(['udevadm', 'settle', '--timeout=10'])
        try:
            self._ask('abort', timeout=_END)
            self.node.run(['bash', '-c', (
                f'while kill -0 $(cat {self.runtime}.pid) 2> /dev/null;'
                ' do sleep 0.05; done')], timeout=_END)
        except errors.LabError:
            # What comes next must not suffer from this one.
            self.node.run(['bash', '-c',
                           f'kill -9 $(cat {self.runtime}.pid);'
                           f' rm -rf {self.runtime}'])
            raise
        finally:
            self.disk.clear()


class UblkHydrator(_Hydrator):
    """The native helper, shown through ublk."""

    name = 'ublk'
    label = 'hydrator, ublk'
    frontend = 'ublk'


class NbdHydrator(_Hydrator):
    """The native helper, shown through the kernel's NBD client."""

    name = 'nbd'
    label = 'hydrator, NBD'
    frontend = 'nbd'

    def _build(self) -> str:
        # While the helper sets its device up, a read of udev's would have it
        # wait for itself.
        self.node.run(['udevadm', 'control', '--stop-exec-queue'])
        try:
            return super()._build()
        finally:
            self.node.run(['udevadm', 'control', '--start-exec-queue'])
            self.node.run(['udevadm', 'settle', '--timeout=10'])


ALL: tuple[type[Stack], ...] = (Raw, ProposedClone, DriversClone,
                                UblkHydrator, NbdHydrator)
