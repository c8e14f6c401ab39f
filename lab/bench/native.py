# SPDX-License-Identifier: Apache-2.0
"""What needs no kernel device, and so no node: measured on the machine."""

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

_WORKSPACE = stacks.HYDRATOR.parents[2]
# Seconds
_PATIENCE = 60
# Room for map and journal of the largest volume here, in bytes
_METADATA = 256 << 20


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
        cwd=_WORKSPACE, env=environment, capture_output=True, text=True)
    if ended.returncode:
        raise errors.LabError(f'"cargo bench" in {_WORKSPACE} ended with '
                              f'{ended.returncode}: {ended.stderr[-500:]}')
    return {'request': read_estimates(_WORKSPACE / 'target' / 'criterion')}


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
    # Beside the repository: a file system in memory may not know O_DIRECT.
    with tempfile.TemporaryDirectory(dir=_WORKSPACE / 'target') as folder:
        place = pathlib.Path(folder)
        for name, length in (('data', size), ('source', size),
                             ('metadata', _METADATA)):
            with open(place / name, 'wb') as file:
                file.truncate(length)
        with open(place / 'log', 'w') as log:
            process = subprocess.Popen(
                [stacks.HYDRATOR, 'run', '--runtime', place / 'runtime',
                 '--move', str(uuid.uuid4()), '--new', '--frontend', 'socket',
                 '--data', place / 'data', '--source', place / 'source',
                 '--metadata', place / 'metadata'], stderr=log)
        try:
            _wait_for(place, process)
            yield process
        finally:
            process.terminate()
            process.wait(_PATIENCE)


def _wait_for(place: pathlib.Path, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + _PATIENCE
    while process.poll() is None and time.monotonic() < deadline:
        answer = subprocess.run(
            [stacks.HYDRATOR, 'status', place / 'runtime'],
            capture_output=True, text=True)
        if not answer.returncode and json.loads(answer.stdout)['device']:
            return
        time.sleep(0.1)
    raise errors.LabError('the helper shows no socket: '
                          + (place / 'log').read_text())
