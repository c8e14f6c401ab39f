# SPDX-License-Identifier: Apache-2.0
"""What arrives of a source that is far, beside what it gives to anybody.

A volume is attached on another node, to which every packet takes longer than
it does here (tc-netem(8)).  On that node the source is a disk of open-iscsi's,
and what is read of it there is compared with what a user reads of the volume,
and with how fast the volume arrives.  All read what nobody has read before.
"""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import dataclasses
import statistics
import time

from oslo_utils import units
from rich import console as consoles
from rich import table as tables

from lab import arrival
from lab import cloud as clouds
from lab import errors
from lab import node as nodes
from lab import user as users

# Whose data path is the native helper, and whose is dm-clone
HELPER, CLONE = 'local', 'thin'
OPTIONS = {HELPER: {'localstor_data_path': 'hydrator'},
           CLONE: {'localstor_data_path': 'clone'}}
# Seconds
PATIENCE = 600
# MiB of a volume, and where those begin that readers have
SIZE = 1024
READ_FROM = 512
# Bytes per second that arrive beside a reader: what a busy guest leaves
MINIMUM = 10 * units.Mi
# Reads of 1 MiB at once, which fill the line
THREADS = 8


@dataclasses.dataclass(frozen=True)
class Reader:
    """Somebody who reads on.

    :ivar block: KiB of each read
    :ivar size: MiB in all
    """

    name: str
    flags: str
    block: int
    size: int


READERS = (Reader('reads of 1 MiB', 'iflag=direct', 1024, 64),
           Reader('reads of 128 KiB', 'iflag=direct', 128, 32),
           Reader('reads through the page cache', '', 1024, 64))


@dataclasses.dataclass(frozen=True)
class Rate:
    """How fast something was, in bytes per second.

    :ivar delay: milliseconds that each packet takes longer, either way
    :ivar source: of the source as any disk of open-iscsi's
    """

    delay: int
    what: str
    source: float
    ours: float


def run(cloud: clouds.Cloud, delays: list[int], rounds: int,
        say: Callable[[str], None]) -> Iterator[Rate]:
    """Measure each delay so often, in turn.

    :raises LabError: a command on a node fails, or a volume does not arrive
    """
    for number in range(rounds):
        for delay in delays:
            for backend in OPTIONS:
                say(f'round {number + 1}: {backend}, {delay} ms')
                yield from _arrives(cloud, backend, delay)


def _arrives(cloud: clouds.Cloud, backend: str, delay: int) -> Iterator[Rate]:
    """A volume that arrives, with readers where its engine can be held."""
    here, there = cloud.nodes[:2]
    user = users.User(cloud)
    volume = user.create_volume(SIZE // 1024, backend, here.name)
    attachment = user.attach(volume, here)
    here.run(['dd', 'if=/dev/urandom', 'of=' + attachment.device, 'bs=1M',
              f'count={SIZE}', 'oflag=direct', 'status=none'],
             timeout=PATIENCE)
    user.detach(attachment)
    with _longer([here, there] if delay else [], delay):
        attachment = user.attach(volume, there)
        device = attachment.device
        arrival.wait_until_hydrating(there, device, PATIENCE)
        arrival.throttle(there, device, MINIMUM)
        source = _source(there)
        skip = READ_FROM
        if backend == HELPER:
            for reader in READERS:
                yield Rate(delay, reader.name,
                           _read(there, source, reader, skip),
                           _read(there, device, reader, skip + reader.size))
                skip += 2 * reader.size
        most = _read_at_once(there, source, skip)
        arrival.throttle(there, device)
        yield Rate(delay, 'arrives by ' + OPTIONS[backend]
                   ['localstor_data_path'], most, _arrival(there, device))
    user.detach(attachment)
    user.delete_volume(volume)


@contextlib.contextmanager
def _longer(found: list[nodes.Node], delay: int) -> Iterator[None]:
    """Let each packet of these nodes take so many milliseconds longer."""
    for node in found:
        node.run(['tc', 'qdisc', 'add', 'dev', 'vec0', 'root', 'netem',
                  'delay', f'{delay}ms', 'limit', '100000'])
    try:
        yield
    finally:
        for node in found:
            node.run(['tc', 'qdisc', 'del', 'dev', 'vec0', 'root'])


def _source(node: nodes.Node) -> str:
    """The disk of the only source of a node."""
    disk, = node.run(['sh', '-c', 'ls -d /sys/block/sd*']).stdout.split()
    return disk.replace('/sys/block', '/dev')


def _read(node: nodes.Node, device: str, reader: Reader, skip: int) -> float:
    """Bytes per second of a reader that begins at so many MiB."""
    count = reader.size * 1024 // reader.block
    return _timed(node, reader.size,
                  f'dd if={device} of=/dev/null bs={reader.block}K '
                  f'count={count} skip={skip * 1024 // reader.block} '
                  f'{reader.flags} status=none')


def _read_at_once(node: nodes.Node, device: str, skip: int) -> float:
    """The same of many at once."""
    size = (SIZE - skip) // THREADS
    return _timed(node, size * THREADS,
                  f'for thread in $(seq 0 {THREADS - 1}); do dd if={device} '
                  f'of=/dev/null bs=1M count={size} iflag=direct status=none '
                  f'skip=$(({skip} + thread * {size})) & done; wait')


def _timed(node: nodes.Node, size: int, command: str) -> float:
    """Bytes per second of what reads so many MiB."""
    node.run(['sh', '-c', 'echo 3 > /proc/sys/vm/drop_caches'])
    began = time.monotonic()
    node.run(['sh', '-c', command], timeout=PATIENCE)
    return size * units.Mi / (time.monotonic() - began)


def _arrival(node: nodes.Node, device: str) -> float:
    """Bytes per second that arrive until a volume is whole."""
    first = last = arrival.look(node, device)
    began = ended = time.monotonic()
    while (found := arrival.look(node, device)) and found.local < found.total:
        last, ended = found, time.monotonic()
        time.sleep(0.1)
        if ended - began > PATIENCE:
            break
    if not first or not last or ended == began:
        raise errors.LabError(f'{device} on {node.name} had arrived before '
                              f'it was looked at')
    return (last.local - first.local) / (ended - began)


def show(found: list[Rate], console: consoles.Console) -> None:
    """Print medians."""
    table = tables.Table('Delay', 'What', 'Source, MiB/s', 'Ours, MiB/s',
                         'Ratio')
    for delay, what in dict.fromkeys((one.delay, one.what) for one in found):
        same = [one for one in found if (one.delay, one.what) == (delay, what)]
        table.add_row(f'{delay} ms', what, *(
            f'{statistics.median(rates) / units.Mi:.1f}' for rates in (
                [one.source for one in same], [one.ours for one in same])),
            f'{statistics.median(one.ours / one.source for one in same):.2f}')
    console.print(table)
