# SPDX-License-Identifier: Apache-2.0
"""The guest: fio(1).

The options are those of the six commands that seasoned people measure
storage with (libaio, direct, invalidate); ``sync`` is the proposal's
``-sync=1``, an O_SYNC write which libaio makes one write with FUA, ``fsync``
is ``-fsync=1``, a flush after each write.
"""

from collections.abc import Iterator
import dataclasses
import json
import pathlib
from typing import Any

from lab import errors


@dataclasses.dataclass(frozen=True)
class Job:
    """What a guest does.

    :ivar pattern: fio's ``rw``: ``randwrite``, ``read`` and so on
    :ivar block: size of a request, as fio takes it
    :ivar depth: requests in flight
    :ivar sync: each write is durable when it completes
    :ivar fsync: each write is followed by a flush
    :ivar offset: where on the device it begins, in MiB
    :ivar size: how much of the device it uses, in MiB; all if None
    :ivar again: go on from the beginning when all was used
    :ivar pause: microseconds between two requests
    """

    pattern: str
    block: str = '4k'
    depth: int = 1
    sync: bool = False
    fsync: bool = False
    offset: int = 0
    size: int | None = None
    again: bool = False
    pause: int = 0

    @property
    def writes(self) -> bool:
        """Whether it writes at all."""
        return 'write' in self.pattern

    def command(self, device: str, seconds: float, seed: int,
                log: str | None = None) -> list[str]:
        """The command that does it for so long.

        :param seed: of the addresses; another seed, other addresses
        :param log: prefix of a file that gets the latency of each request
        """
        command = ['fio', '-ioengine=libaio', '-direct=1', '-invalidate=1',
                   '-name=guest', f'-bs={self.block}',
                   f'-iodepth={self.depth}', f'-rw={self.pattern}',
                   f'-runtime={seconds:g}', f'-filename={device}',
                   f'-randseed={seed}', '-output-format=json']
        if self.sync:
            command.append('-sync=1')
        if self.fsync:
            command.append('-fsync=1')
        if self.offset:
            command.append(f'-offset={self.offset}m')
        if self.size is not None:
            command.append(f'-size={self.size}m')
        if self.again:
            command.append('-time_based')
        if self.pause:
            command.append(f'-thinktime={self.pause}')
        if log:
            command += [f'-write_lat_log={log}', '-log_unix_epoch=1']
        return command


@dataclasses.dataclass(frozen=True)
class Figures:
    """What fio saw.

    :ivar iops: requests per second; with ``fsync`` a request is a write and
        its flush
    :ivar bandwidth: bytes per second
    :ivar latency: mean seconds of a request, without the flush of ``fsync``
    :ivar p50: seconds in which half of the requests completed
    :ivar p99: seconds in which 99 of 100 requests completed
    :ivar worst: seconds of the longest request
    :ivar requests: how many there were
    :ivar bytes: how much was read or written
    """

    iops: float
    bandwidth: float
    latency: float
    p50: float
    p99: float
    worst: float
    requests: int
    bytes: int


def parse(text: str) -> Figures:
    """What fio's JSON says of its only job.

    What fio prints before the JSON is passed over.

    :raises LabError: the job failed, did nothing or said nothing
    """
    try:
        job = json.loads(text[text.index('{'):])['jobs'][0]
        if job['error']:
            raise errors.LabError(f'fio ended with error {job["error"]} '
                                  f'(an errno): its device failed a request')
        done: dict[str, Any] = max(job['read'], job['write'],
                                   key=lambda way: way['total_ios'])
        if not done['total_ios']:
            raise errors.LabError('fio did nothing in its time: the device '
                                  'did not complete one request')
        percentiles = done['clat_ns']['percentile']
        return Figures(
            iops=done['iops'], bandwidth=done['bw_bytes'],
            latency=done['lat_ns']['mean'] / 1e9,
            p50=percentiles['50.000000'] / 1e9,
            p99=percentiles['99.000000'] / 1e9,
            worst=done['lat_ns']['max'] / 1e9,
            requests=done['total_ios'], bytes=done['io_bytes'])
    except (ValueError, KeyError, IndexError) as error:
        raise errors.LabError(f'fio printed something else than its report: '
                              f'{text[:200]!r}') from error


@dataclasses.dataclass(frozen=True)
class Request:
    """One request of a latency log, in seconds; ``end`` since 1970."""

    end: float
    latency: float


def parse_log(text: str) -> Iterator[Request]:
    """The requests of a log of ``write_lat_log``.

    Its lines begin with milliseconds and nanoseconds (fio(1), LOG FILE
    FORMATS).
    """
    for line in text.splitlines():
        milliseconds, nanoseconds, _rest = line.split(',', 2)
        yield Request(int(milliseconds) / 1e3, int(nanoseconds) / 1e9)


def log_file(prefix: str) -> pathlib.PurePosixPath:
    """Where fio puts the latency of each request of its first job."""
    return pathlib.PurePosixPath(f'{prefix}_lat.1.log')
