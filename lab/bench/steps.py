# SPDX-License-Identifier: Apache-2.0
"""How each thing is measured, on a stack that was built for it."""

import abc
import concurrent.futures
import dataclasses
import time
from typing import Any

from lab.bench import disks
from lab.bench import fio
from lab.bench import stacks

# What one measurement yields, by the name of the quantity. Times are in
# seconds, sizes in bytes.
Figures = dict[str, float]

_LOG = '/tmp/bench'


@dataclasses.dataclass(frozen=True)
class Round:
    """What all steps of a round go by.

    :ivar seconds: how long a guest works
    :ivar number: another one in each round, so that addresses differ
    """

    seconds: float
    number: int


@dataclasses.dataclass(frozen=True)
class Step(abc.ABC):
    """Something done to a stack; with a key if its figures are kept."""

    key: str = ''

    @abc.abstractmethod
    def perform(self, stack: stacks.Stack, now: Round) -> Figures:
        """Do it."""


@dataclasses.dataclass(frozen=True)
class Fill(Step):
    """Write the first `size` MiB, and have it settled if `flushed`."""

    size: int = 16
    flushed: bool = True

    def perform(self, stack: stacks.Stack, now: Round) -> Figures:
        stack.node.run(['dd', 'if=/dev/zero', f'of={stack.device}', 'bs=1M',
                        f'count={self.size}', 'oflag=direct', 'status=none'])
        if self.flushed:
            stack.flush()
        return {}


@dataclasses.dataclass(frozen=True)
class Flush(Step):
    """Have what was written settled."""

    def perform(self, stack: stacks.Stack, now: Round) -> Figures:
        stack.flush()
        return {}


@dataclasses.dataclass(frozen=True)
class Guest(Step):
    """The guest works; nothing is copied in the background."""

    job: fio.Job = fio.Job('randread')

    def perform(self, stack: stacks.Stack, now: Round) -> Figures:
        before = stack.disk.counters()
        figures = _guest(stack, stack.device, self.job, now, now.seconds)
        if self.job.writes:
            # What is noted later belongs to it.
            stack.flush()
        done = stack.disk.counters() - before
        answer = _as_figures(figures, self.job)
        if self.job.writes:
            answer['amplification'] = done.written / figures.bytes
        answer['operations'] = (done.reads + done.writes) / figures.requests
        return answer


@dataclasses.dataclass(frozen=True)
class GuestAndHydration(Step):
    """The guest works, and from its first second on hydration does.

    `warm_up` seconds of the guest are not counted; hydration begins in them.
    """

    job: fio.Job = fio.Job('randread')
    warm_up: float = 2

    def perform(self, stack: stacks.Stack, now: Round) -> Figures:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            guest = pool.submit(_guest, stack, stack.device, self.job, now,
                                now.seconds, self.warm_up)
            time.sleep(self.warm_up - 0.5)
            stack.start_hydration()
            before, begin = stack.local(), time.monotonic()
            time.sleep(now.seconds - 0.5)
            after, end = stack.local(), time.monotonic()
            answer = _as_figures(guest.result(), self.job)
        answer['hydration'] = (after - before) / (end - begin)
        answer['local'] = after / (stack.size * disks.MIB)
        return answer


@dataclasses.dataclass(frozen=True)
class Hydration(Step):
    """All is copied, without a guest; given up after `limit` seconds."""

    limit: float = 6

    def perform(self, stack: stacks.Stack, now: Round) -> Figures:
        done = stack.hydrate(self.limit)
        return {'hydration': done.rate,
                'local': done.size / (stack.size * disks.MIB)}


@dataclasses.dataclass(frozen=True)
class Swap(Step):
    """The handle is put over the logical volume, under a guest's writes."""

    job: fio.Job = fio.Job('randwrite')

    def perform(self, stack: stacks.Stack, now: Round) -> Figures:
        handle = stack.lay_handle()
        try:
            stack.hydrate(60)
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                guest = pool.submit(_guest, stack, handle, self.job, now, 3,
                                    log=_LOG)
                time.sleep(1.5)
                begin, began = time.monotonic(), _node_time(stack)
                stack.local()
                known = time.monotonic()
                stack.settle()
                settled = time.monotonic()
                stack.swap_handle()
                end, ended = time.monotonic(), _node_time(stack)
                guest.result()
            log = list(fio.parse_log(stack.node.run(
                ['cat', str(fio.log_file(_LOG))]).stdout))
        finally:
            stack.remove_handle()
        return {
            'ask': known - begin, 'settle': settled - known,
            'load_and_resume': end - settled, 'linear': end - known,
            'pause': longest(log, began, ended),
            'elsewhere': max(longest(log, 0, began),
                             longest(log, ended, float('inf')))}


def longest(log: list[fio.Request], begin: float, end: float) -> float:
    """Seconds of the longest request that was in flight in this time."""
    return max((request.latency for request in log
                if request.end >= begin
                and request.end - request.latency <= end), default=0.0)


def _guest(stack: stacks.Stack, device: str, job: fio.Job, now: Round,
           seconds: float, warm_up: float = 0, log: str | None = None
           ) -> fio.Figures:
    command = job.command(device, seconds, now.number, log)
    if warm_up:
        command.append(f'-ramp_time={warm_up:g}')
    return fio.parse(stack.node.run(command,
                                    timeout=seconds + warm_up + 60).stdout)


def _as_figures(figures: fio.Figures, job: fio.Job) -> dict[str, Any]:
    answer = {'iops': figures.iops, 'bandwidth': figures.bandwidth}
    if not job.fsync:
        # fio leaves the flush out of these.
        answer |= {'latency': figures.latency, 'p50': figures.p50,
                   'p99': figures.p99, 'worst': figures.worst}
    return answer


def _node_time(stack: stacks.Stack) -> float:
    return float(stack.node.run(['date', '+%s.%N']).stdout)
