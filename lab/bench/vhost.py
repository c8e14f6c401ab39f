# SPDX-License-Identifier: Apache-2.0
"""vhost-user-blk beside qemu-storage-daemon, on the machine itself.

No server polls but the one that says so, each serves one queue, and the guest
is the same for all.
"""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import dataclasses
import json
import os
import pathlib
import shlex
import shutil
import socket
import subprocess

from lab.bench import native
from lab.bench import results as results_
from lab.bench import stacks
from lab import errors

QEMU = 'qemu-storage-daemon'
_EXAMPLES = native.WORKSPACE / 'target' / 'release' / 'examples'
# Bytes
_MIB = 1 << 20
_SIZE = 256 * _MIB
_METADATA = 4 * _MIB
# Seconds
_PATIENCE = 60
# Microseconds
_POLL_TIME = 20


@dataclasses.dataclass(frozen=True)
class Load:
    """What the guest does: requests to random places.

    :ivar way: "read" or "write"
    :ivar block: bytes of a request
    :ivar depth: requests at a time
    """

    way: str
    block: int
    depth: int

    @property
    def key(self) -> str:
        """How samples of it are called."""
        return f'vhost-{self.way}-{self.block}-{self.depth}'

    @property
    def label(self) -> str:
        """How it is called where figures are shown."""
        return f'depth {self.depth} {self.block >> 10}k random {self.way}'


LOADS = (*(Load(way, 4096, depth)
           for depth in (1, 32) for way in ('read', 'write')),
         *(Load(way, 128 << 10, 4) for way in ('read', 'write')))


def _null(place: pathlib.Path) -> native.Command:
    return [_EXAMPLES / 'null', str(_SIZE), place / 'socket']


def _file(place: pathlib.Path) -> native.Command:
    return [_EXAMPLES / 'linear', place / 'data', 'vhost', place / 'socket']


def _helper(place: pathlib.Path) -> native.Command:
    _write(place / 'metadata', bytes(_MIB), _METADATA // _MIB)
    shutil.rmtree(place / 'runtime', ignore_errors=True)
    return native.helper(place, 'vhost-user-blk')


def _polling(place: pathlib.Path) -> native.Command:
    return [*_helper(place), '--poll', str(_POLL_TIME)]


def _qemu(place: pathlib.Path, disk: str) -> native.Command:
    return [QEMU, '--blockdev', f'node-name=disk,{disk}', '--export',
            'type=vhost-user-blk,id=export,node-name=disk,writable=on,'
            f'num-queues=1,addr.type=unix,addr.path={place}/socket']


def _null_of_qemu(place: pathlib.Path) -> native.Command:
    return _qemu(place, f'driver=null-co,size={_SIZE},read-zeroes=on')


def _file_of_qemu(place: pathlib.Path) -> native.Command:
    return _qemu(place, f'driver=file,filename={place}/data,'
                        'cache.direct=on,aio=io_uring')


@dataclasses.dataclass(frozen=True)
class Server:
    """Who serves the guest.

    :ivar label: how it is called where figures are shown
    :ivar beside: name of the server of QEMU's that does the same; None if it
        is one of QEMU's
    :ivar command: how to start it, with what is in a folder; makes what only
        this server needs there
    :ivar socket: where it listens, in that folder
    :ivar copied: the helper has made all blocks local before
    :ivar once: a block changes when it is used, so a load has each of them
        once, and begins with a new server
    """

    name: str
    label: str
    beside: str | None
    command: Callable[[pathlib.Path], native.Command]
    socket: str = 'socket'
    copied: bool = False
    once: bool = False


SERVERS = (
    Server('vhost-null', 'frontend, null', 'qemu-null', _null),
    Server('qemu-null', 'QEMU, null', None, _null_of_qemu),
    Server('vhost-file', 'frontend, file', 'qemu-file', _file),
    Server('qemu-file', 'QEMU, file', None, _file_of_qemu),
    Server('vhost-settled', 'helper, settled', 'qemu-file', _helper,
           'runtime/vhost', copied=True),
    Server('vhost-polling', 'helper, settled, polling', 'qemu-file',
           _polling, 'runtime/vhost', copied=True),
    Server('vhost-remote', 'helper, remote', 'qemu-file', _helper,
           'runtime/vhost', once=True),
)


def measure(rounds: int, seconds: float, found: results_.Results) -> None:
    """Add samples of all loads on all servers; what fails is noted.

    :param seconds: how long each load goes on
    :raises LabError, OSError: there can't be any
    """
    servers = SERVERS
    if shutil.which(QEMU):
        found.environment[QEMU] = _run([QEMU, '--version']).split('\n')[0]
    else:
        found.failures.append(f'vhost-user-blk: there is no {QEMU}; Debian has'
                              ' it in qemu-system-common')
        servers = tuple(server for server in SERVERS if server.beside)
    with native.folder() as place:
        for name in ('data', 'source'):
            # Nothing is left to be allocated, and the helper copies no zeros.
            _write(place / name, os.urandom(_MIB), _SIZE // _MIB)
        for number in range(1, rounds + 1):
            # Each has its turn at another place in each round.
            shift = (number - 1) % len(servers)
            for server in servers[shift:] + servers[:shift]:
                try:
                    _take(server, place, number, seconds, found)
                except errors.LabError as error:
                    found.failures.append(
                        f'round {number}, vhost-user-blk, {server.label}: '
                        f'{error}')


def _write(path: pathlib.Path, content: bytes, times: int) -> None:
    with open(path, 'wb') as file:
        for _time in range(times):
            file.write(content)
        os.fsync(file.fileno())


def _take(server: Server, place: pathlib.Path, number: int, seconds: float,
          found: results_.Results) -> None:
    """All loads on a server, in one round."""
    for loads in [[load] for load in LOADS] if server.once else [LOADS]:
        with _served(server, place) as process:
            for load in loads:
                busy = os.getloadavg()[0]
                figures = _guest(server, place, process.pid, load, seconds)
                found.samples.append(results_.Sample(
                    load.key, None, server.name, number, busy, figures))


@contextlib.contextmanager
def _served(server: Server, place: pathlib.Path
            ) -> Iterator[subprocess.Popen]:
    # That of one that had to be killed is still there.
    (place / server.socket).unlink(missing_ok=True)
    with native.served(server.command(place), place) as process:
        native.wait_until(process, place,
                          lambda: _listens(place / server.socket))
        if server.copied:
            _run([stacks.HYDRATOR, 'start', place / 'runtime'])
            native.wait_until(process, place, lambda: native.status(place)
                              .get('state') == 'done')
        yield process


def _listens(path: pathlib.Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        return not client.connect_ex(str(path))


def _guest(server: Server, place: pathlib.Path, process: int, load: Load,
           seconds: float) -> dict[str, float]:
    return parse(_run([
        _EXAMPLES / 'guest', place / server.socket, str(process),
        str(seconds), 'once' if server.once else 'again', load.way,
        str(load.block), str(load.depth)]))


def _run(command: native.Command) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True,
                              check=True, timeout=_PATIENCE).stdout
    except subprocess.CalledProcessError as error:
        reason = error.stderr
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    words = shlex.join(str(word) for word in command)
    raise errors.LabError(f'{words}: {reason}')


def parse(text: str) -> dict[str, float]:
    """Figures from what the guest has printed; times are in seconds.

    :raises LabError: it is something else
    """
    try:
        told = json.loads(text)
        return {
            'requests': told['requests'],
            'seconds': told['seconds'],
            'processor': told['processor'],
            'p50': told['p50'] / 1e9,
            'p99': told['p99'] / 1e9,
            'iops': told['requests'] / told['seconds'],
            'iops_per_core': told['requests'] / told['processor'],
        }
    except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise errors.LabError(f'the guest printed something else: {text!r}'
                              ) from error
