# SPDX-License-Identifier: Apache-2.0
"""What needs no kernel device, and so no node: measured on the machine."""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import json
import os
import pathlib
import subprocess
import tempfile
import time
from typing import Any
import uuid

from lab.bench import stacks
from lab import errors
from lab import sizes

WORKSPACE = stacks.HYDRATOR.parents[2]
# Seconds
_PATIENCE = 60
# Room for map and journal of the largest volume here, in bytes
_METADATA = 256 << 20

Command = list[str | pathlib.Path]


def requests() -> dict[str, Any]:
    """Processor time of the core for a request, by its own benchmark.

    :raises LabError: it did not run to its end
    """
    environment = {name: value for name, value in os.environ.items()
                   if name != 'CARGO_TARGET_DIR'}
    ended = subprocess.run(
        ['cargo', 'bench', '--locked', '-p', 'localstor-hydrator-core',
         '--bench', 'requests', '--', '--noplot', '--warm-up-time', '1',
         '--measurement-time', '3'],
        cwd=WORKSPACE, env=environment, capture_output=True, text=True)
    if ended.returncode:
        raise errors.LabError(f'"cargo bench" in {WORKSPACE} ended with '
                              f'{ended.returncode}: {ended.stderr[-500:]}')
    return {'request': read_estimates(WORKSPACE / 'target' / 'criterion')}


def read_estimates(folder: pathlib.Path) -> dict[str, dict[str, float]]:
    """What criterion has found: nanoseconds, the median and its interval.

    :raises LabError: there is nothing
    """
    found = {}
    for path in sorted(folder.glob('*/new/estimates.json')):
        name = json.loads((path.parent / 'benchmark.json').read_text())
        median = json.loads(path.read_text())['median']
        interval = median['confidence_interval']
        found[name['full_id']] = {
            'median': median['point_estimate'],
            'low': interval['lower_bound'],
            'high': interval['upper_bound']}
    if not found:
        raise errors.LabError(f'criterion has left no estimates below '
                              f'{folder}')
    return found


def memory() -> dict[str, Any]:
    """Bytes that the helper keeps, for a small volume and for a large one.

    :raises LabError: the helper did not come up
    """
    return {'memory': {str(size): _memory_of(size)
                       for size in (sizes.GIB, 1024 * sizes.GIB)}}


def _memory_of(size: int) -> dict[str, int]:
    with _helper(size) as process:
        return read_memory(pathlib.Path(
            f'/proc/{process.pid}/status').read_text())


def read_memory(text: str) -> dict[str, int]:
    """Bytes that are resident and locked, from proc(5), status."""
    found = {}
    for line in text.splitlines():
        name, _colon, rest = line.partition(':')
        if name in ('VmRSS', 'VmLck', 'VmHWM'):
            found[name] = int(rest.split()[0]) << 10
    return found


@contextlib.contextmanager
def _helper(size: int) -> Iterator[subprocess.Popen]:
    """A helper for a volume of this size, over sparse files."""
    with folder() as place:
        for name, length in (('data', size), ('source', size),
                             ('metadata', _METADATA)):
            with open(place / name, 'wb') as file:
                file.truncate(length)
        with served(helper(place, 'socket'), place) as process:
            wait_until(process, place, lambda: status(place).get('device'))
            yield process


@contextlib.contextmanager
def folder() -> Iterator[pathlib.Path]:
    """For disks, as long as they are used."""
    # Beside the repository: a file system in memory may not know O_DIRECT.
    with tempfile.TemporaryDirectory(dir=WORKSPACE / 'target') as made:
        yield pathlib.Path(made)


def helper(place: pathlib.Path, frontend: str) -> Command:
    """How to start a helper over the files "data", "source" and "metadata"."""
    return [stacks.HYDRATOR, 'run', '--runtime', place / 'runtime',
            '--move', str(uuid.uuid4()), '--new', '--frontend', frontend,
            '--data', place / 'data', '--source', place / 'source',
            '--metadata', place / 'metadata']


def status(place: pathlib.Path) -> dict[str, Any]:
    """What the helper says of itself; nothing if it does not answer."""
    try:
        answer = subprocess.run([stacks.HYDRATOR, 'status', place / 'runtime'],
                                capture_output=True, text=True, check=True,
                                timeout=_PATIENCE)
        return json.loads(answer.stdout)
    except (subprocess.SubprocessError, ValueError):
        return {}


@contextlib.contextmanager
def served(command: Command, place: pathlib.Path
           ) -> Iterator[subprocess.Popen]:
    """A process that leaves the file "log", ended afterwards.

    :raises LabError: it can't be started, or does not end
    """
    with open(place / 'log', 'w') as log:
        try:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        except OSError as error:
            raise errors.LabError(f'{command[0]} can\'t be run: {error}')
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise errors.LabError(f'{command[0]} did not end')


def wait_until(process: subprocess.Popen, place: pathlib.Path,
               ready: Callable[[], Any]) -> None:
    """Wait for a process as far as it is needed.

    :raises LabError: it ended before, or took too long
    """
    deadline = time.monotonic() + _PATIENCE
    while process.poll() is None and time.monotonic() < deadline:
        if ready():
            return
        time.sleep(0.1)
    raise errors.LabError(f'{process.args[0]} does not get ready: '
                          + (place / 'log').read_text())
