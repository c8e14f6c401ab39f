# SPDX-License-Identifier: Apache-2.0
"""Disks that lose their cache with the power: processes of ``lab/disk``.

What a node writes to a plain disk is in the page cache of this machine and
survives every death of the node. A volatile disk keeps what was not flushed
to itself; when the power is cut, a seed decides which of it is lost. Its
control socket is described in ``lab/disk/src/control.rs``.
"""

from collections.abc import Collection
from collections.abc import Mapping
import dataclasses
import json
import os
import pathlib
import secrets
import signal
import socket
import time
from typing import Any

from lab import errors
from lab import layout
from lab import network
from lab import processes

PROGRAM = (pathlib.Path(__file__).resolve().parent
           / 'disk/target/release/localstor-lab-disk')
LOSE = ('keep', 'drop', 'tear', 'random')
# Bytes of a logical block that a disk may have
BLOCK_SIZES = (512, 4096)
# Seconds
PATIENCE = 20
# The kind of device that virtio calls a block device
_VIRTIO_BLOCK = 2


@dataclasses.dataclass(frozen=True)
class PowerCut:
    """What decided over unflushed writes, and what became of them.

    :ivar losses: numbers of writes that were ``kept``, ``dropped`` and
        ``torn``, by name of the disk
    """

    seed: int
    lose: str
    losses: dict[str, dict[str, int]]

    def __str__(self) -> str:
        disks = '; '.join(
            f'{name}: {", ".join(f"{n} {what}" for what, n in found.items())}'
            for name, found in self.losses.items())
        return f'seed {self.seed}, lose {self.lose}; {disks}'


def check() -> None:
    """LabError if the program of these disks is not there."""
    if not os.access(PROGRAM, os.X_OK):
        raise errors.LabError(
            f'The program of volatile disks is not built: run "make '
            f'lab-programs". It is looked for at {PROGRAM}.')


def check_block_sizes(block_sizes: Mapping[str, int], disks: str,
                      nodes: Collection[str]) -> None:
    """LabError if a lab can't have disks with such logical blocks.

    :param block_sizes: bytes of a block, by the name of the node
    :param disks: what they are, ``plain`` or ``volatile``
    :param nodes: names of all nodes
    """
    if block_sizes and disks != 'volatile':
        raise errors.LabError('Plain disks have logical blocks of 512 bytes; '
                              'volatile ones may have others.')
    if strange := set(block_sizes).difference(nodes):
        raise errors.NotFound(
            f'Blocks are given a size on {", ".join(sorted(strange))}, but '
            f'the lab is to have {", ".join(nodes) or "no node"}.')


def choose_seed() -> int:
    """A seed by chance."""
    return secrets.randbelow(1 << 32)


class VolatileDisk:
    """One disk of a node, powered as long as its process runs."""

    def __init__(self, node: str, name: str, file: pathlib.Path,
                 place: layout.Layout, net: network.Network,
                 table: processes.ProcessTable, block_size: int) -> None:
        """:param file: what of it is durable
        :param block_size: bytes of a logical block
        """
        self.name = name
        self._process_name = f'{node}.{name}'
        self._file = file
        self._network = net
        self._table = table
        self._block_size = block_size
        self._log = place.log(node, f'disk-{name}')
        self._socket = place.runtime / f'{self._process_name}.disk'
        self._control = place.runtime / f'{self._process_name}.control'

    @property
    def kernel_argument(self) -> str:
        """What lets a node's kernel find it."""
        return f'virtio_uml.device={self._socket}:{_VIRTIO_BLOCK}'

    def start(self) -> None:
        """Start it, unless it runs; what it holds outlives the node."""
        process = self._table.get(self._process_name)
        if process is not None and process.alive:
            return
        self._table.start(
            self._process_name, self._network.wrap([
                str(PROGRAM), f'--file={self._file}',
                f'--socket={self._socket}', f'--control={self._control}',
                f'--id={self.name}', f'--block-size={self._block_size}']),
            self._log, {})
        deadline = time.monotonic() + PATIENCE
        while not self._control.exists() or not self._answers():
            process = self._table.get(self._process_name)
            if process is None or not process.alive \
                    or time.monotonic() > deadline:
                raise errors.StartFailed(
                    f'disk "{self.name}"', 'it does not answer', self._log,
                    processes.tail(self._log))
            time.sleep(0.02)

    def stop(self) -> None:
        """Let it make everything durable and end."""
        self._table.stop(self._process_name, signal.SIGTERM, PATIENCE)

    def status(self) -> dict[str, Any]:
        """What it tells of itself."""
        return self._tell(command='status')

    def cut_power(self, seed: int, lose: str) -> dict[str, int]:
        """Lose what was not flushed, as the seed decides."""
        answer = self._tell(command='power-cut', seed=seed, lose=lose)
        return {what: answer[what] for what in ('kept', 'dropped', 'torn')}

    def obey_flushes(self, value: bool) -> None:
        """Let flushes do what they promise, or let the disk lie."""
        self._tell(command='obey-flushes', value=value)

    def fail(self, value: bool = True) -> None:
        """Let it die, so that whatever is asked for fails, or work again."""
        self._tell(command='fail', value=value)

    def _answers(self) -> bool:
        try:
            self.status()
        except errors.LabError:
            return False
        return True

    def _tell(self, **command: Any) -> dict[str, Any]:
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(PATIENCE)
                connection.connect(str(self._control))
                connection.sendall(json.dumps(command).encode() + b'\n')
                with connection.makefile() as lines:
                    answer = json.loads(lines.readline())
        except (OSError, ValueError) as error:
            raise errors.LabError(
                f'Disk "{self.name}" does not answer at {self._control}: '
                f'{error}') from error
        if 'error' in answer:
            raise errors.LabError(
                f'Disk "{self.name}" refused: {answer["error"]}')
        return answer
