# SPDX-License-Identifier: Apache-2.0
"""What a guest gets of a disk by each of QEMU's ways to do I/O.

These are what ``local_volume_io`` can be (:doc:`nova`).  The guest's disk is
what libvirt makes of a local volume: virtio-blk, without the host's page
cache, served by QEMU's main loop.  A file takes the place of the handle, and
what the same requests get of the file itself stands beside.  Without KVM each
of the guest's instructions is translated, which is most of what a request
costs: only the ways can be compared, and only with each other.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
import dataclasses
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import tempfile

from oslo_utils import units
from rich import console as consoles
from rich import table as tables

from lab.bench import fio
from lab import errors
from lab import shell_image

WAYS = ('threads', 'native', 'io_uring')
RAW = 'raw'
JOBS = {f'{pattern}, depth {depth}': fio.Job(pattern, depth=depth, again=True)
        for pattern in ('randread', 'randwrite') for depth in (1, 32)}
# Bytes of the disk
SIZE = units.Gi
# Seconds in which a guest has to boot, and to power off
PATIENCE = 120

_FIO = 'fio'
_RESULTS = '/dev/ttyS1'
# Between fio's reports
_MARK = '=== end of a report ==='


@dataclasses.dataclass(frozen=True)
class Rate:
    """Requests per second of a job, once; `way` is one of QEMU's, or raw."""

    job: str
    way: str
    iops: float


def run(rounds: int, seconds: float, say: Callable[[str], None]
        ) -> Iterator[Rate]:
    """Measure every job in every way, in turn.

    :param seconds: of each job
    :raises LabError: something that is needed is not there, or fails
    """
    programs = _program(_FIO)
    image = shell_image.fetched()
    # A file system in memory may not know O_DIRECT.
    with tempfile.TemporaryDirectory(dir='.') as name:
        folder = pathlib.Path(name)
        disk = folder / 'disk'
        # Whole: what is allocated when it is written is no disk.
        with open(disk, 'wb') as file:
            for _number in range(SIZE // units.Mi):
                file.write(os.urandom(units.Mi))
        for number in range(rounds):
            say(f'Round {number + 1} of {rounds}')
            for job, what in JOBS.items():
                yield Rate(job, RAW, fio.parse(_output(
                    what.command(str(disk), seconds, number),
                    seconds + PATIENCE)).iops)
            initramfs = folder / 'initramfs'
            initramfs.write_bytes(shell_image.initramfs(
                image, work(seconds, number), programs))
            for way in WAYS:
                reports = _boot(folder, image.kernel, way,
                                len(JOBS) * seconds + PATIENCE)
                for job, report in zip(JOBS, reports, strict=True):
                    yield Rate(job, way, fio.parse(report).iops)


def work(seconds: float, seed: int) -> str:
    """The script of a guest that does all jobs and tells what fio says."""
    lines = ['mkdir -p /tmp', 'export LD_LIBRARY_PATH=/lib']
    for job in JOBS.values():
        command = ' '.join(job.command('/dev/vda', seconds, seed))
        lines += [f'/bin/{command} > /tmp/report 2>&1',
                  f'cat /tmp/report > {_RESULTS}',
                  f'echo "{_MARK}" > {_RESULTS}']
    return '\n'.join(lines) + '\n'


def show(found: list[Rate], console: consoles.Console) -> None:
    """Print medians, and of QEMU's ways what each is to the first one."""
    table = tables.Table('IOPS, 4 KiB', RAW, *WAYS)
    for job in JOBS:
        rates = {way: statistics.median(
            one.iops for one in found if (one.job, one.way) == (job, way))
            for way in (RAW, *WAYS)}
        table.add_row(job, f'{rates[RAW]:.0f}', *(
            f'{rates[way]:.0f} ({rates[way] / rates[WAYS[0]]:.2f})'
            for way in WAYS))
    console.print(table)


def _boot(folder: pathlib.Path, kernel: pathlib.Path, way: str,
          patience: float) -> list[str]:
    """The reports of a guest's work."""
    results = folder / 'results'
    _output(['qemu-system-x86_64', '-nodefaults', '-no-reboot', '-display',
             'none', '-machine', 'q35,accel=tcg', '-m', '768M',
             '-drive', f'file={folder / "disk"},format=raw,if=none,id=disk,'
             f'cache.direct=on,aio={way}',
             '-device', 'virtio-blk-pci,drive=disk',
             '-serial', f'file:{folder / "console"}',
             '-serial', f'file:{results}', '-kernel', str(kernel),
             '-initrd', str(folder / 'initramfs'),
             '-append', 'console=ttyS0 quiet panic=-1'], patience)
    reports = results.read_text().split(_MARK)[:-1]
    if len(reports) != len(JOBS):
        raise errors.LabError(
            f'A guest has ended after {len(reports)} of {len(JOBS)} jobs: '
            + (folder / 'console').read_text(errors='replace')[-500:])
    return reports


def _output(command: list[str], patience: float) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True,
                              check=True, timeout=patience).stdout
    except subprocess.CalledProcessError as error:
        raise errors.LabError(
            f'{command[0]} ended with {error.returncode}: '
            f'{error.stderr[-500:]}') from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise errors.LabError(f'{command[0]}: {error}') from None


def _program(name: str) -> Mapping[str, bytes]:
    """A program of this machine with its libraries, which are all in /lib.

    :raises LabError: it is not there
    """
    found = shutil.which(name)
    if found is None:
        raise errors.LabError(f'There is no {name}: "make setup" installs it.')
    files = {f'bin/{name}': pathlib.Path(found).read_bytes()}
    for path in re.findall(r'(/\S+) \(0x', _output(['ldd', found], PATIENCE)):
        # What loads the others is looked for where the program says.
        library = pathlib.Path(path)
        place = path if 'ld-linux' in path else f'/lib/{library.name}'
        files[place.lstrip('/')] = library.read_bytes()
    return files
