# SPDX-License-Identifier: Apache-2.0
"""The lab's processes: started, recorded, ended.

A process is known by its pid *and* the time it was started at, so that a
number the kernel has given to somebody else is never mistaken for ours.
"""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import time

# What services see of the environment: a proxy or a Python setting of the
# shell the lab was started from is none of their business.
BASE_ENVIRONMENT = {'LANG': 'C.UTF-8', 'HOME': '/root', 'TERM': 'dumb'}
# Of sessions to each other, as nice(2) is of the processes of one: see
# "The autogroup feature" in sched(7).
_PRIORITY = -10


@dataclasses.dataclass(frozen=True)
class Stat:
    """What the kernel says about a process."""

    state: str
    session: int
    start_time: int

    @property
    def dead(self) -> bool:
        """Whether only its exit status is left."""
        return self.state in 'ZX'


def read_stat(pid: int) -> Stat | None:
    """State of a process; None if there is no such process."""
    try:
        text = pathlib.Path(f'/proc/{pid}/stat').read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command's name stands in parentheses and may contain any.
    fields = text.rpartition(')')[2].split()
    return Stat(fields[0], int(fields[3]), int(fields[19]))


@dataclasses.dataclass(frozen=True)
class Process:
    """A process the lab started, leader of a session of its own."""

    name: str
    pid: int
    start_time: int
    started: float
    command: list[str]

    @property
    def alive(self) -> bool:
        """Whether this very process still runs."""
        stat = read_stat(self.pid)
        return (stat is not None and not stat.dead
                and stat.start_time == self.start_time)

    @property
    def uptime(self) -> float:
        """Seconds since the start."""
        return time.time() - self.started

    def members(self) -> list[int]:
        """Living processes of its session, also when the leader is gone."""
        leader = read_stat(self.pid)
        if leader and leader.start_time != self.start_time:
            # The kernel keeps a number busy as long as a session bears it,
            # so if it is somebody else's now, nothing of ours is left.
            return []
        found = []
        for entry in os.listdir('/proc'):
            if entry.isdigit():
                stat = read_stat(int(entry))
                if stat and stat.session == self.pid and not stat.dead \
                        and stat.start_time >= self.start_time:
                    found.append(int(entry))
        return found

    def signal(self, number: int) -> None:
        """Send a signal to the leader, if it is still ours."""
        if self.alive:
            send_signal(self.pid, number)

    def kill(self, timeout: float = 10) -> None:
        """Kill the whole session and wait until it is gone."""
        deadline = time.monotonic() + timeout
        while members := self.members():
            for pid in members:
                send_signal(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f'processes {members} of {self.name} survived SIGKILL')
            time.sleep(0.01)


def send_signal(pid: int, number: int) -> None:
    """Send a signal; a process that is gone does not matter."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


class ProcessTable:
    """Records of the lab's processes, one file each."""

    def __init__(self, directory: pathlib.Path) -> None:
        self._directory = directory
        # Held so that children who end while we live are reaped.
        self._children: dict[int, subprocess.Popen] = {}

    def start(self, name: str, argv: list[str], log: pathlib.Path,
              environment: dict[str, str]) -> Process:
        """Start a process in a session of its own and record it."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, 'ab', buffering=0) as output:
            child = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=output,
                stderr=output, cwd='/', start_new_session=True,
                env=BASE_ENVIRONMENT | environment)
        stat = read_stat(child.pid)
        # We are its parent: even if it has ended, it is there until we look.
        assert stat is not None
        _prefer(child.pid)
        process = Process(name, child.pid, stat.start_time, time.time(),
                          argv)
        self._directory.mkdir(parents=True, exist_ok=True)
        record = self._directory / f'{name}.json'
        draft = record.with_suffix('.new')
        draft.write_text(json.dumps(dataclasses.asdict(process)))
        draft.rename(record)
        self._children[child.pid] = child
        return process

    def get(self, name: str) -> Process | None:
        """The record of a process, whether it still runs or not."""
        try:
            text = (self._directory / f'{name}.json').read_text()
        except FileNotFoundError:
            return None
        process = Process(**json.loads(text))
        self._reap(process)
        return process

    def all(self) -> list[Process]:
        """Every record."""
        names = [path.stem for path in self._directory.glob('*.json')]
        return [process for name in sorted(names)
                if (process := self.get(name))]

    def forget(self, name: str) -> None:
        """Remove a record."""
        (self._directory / f'{name}.json').unlink(missing_ok=True)

    def stop(self, name: str, number: int = signal.SIGTERM,
             timeout: float = 10) -> None:
        """Ask a process to end, kill what is left after the timeout."""
        process = self.get(name)
        if process is None:
            return
        if number != signal.SIGKILL:
            process.signal(number)
            deadline = time.monotonic() + timeout
            while process.alive and time.monotonic() < deadline:
                self._reap(process)
                time.sleep(0.02)
        process.kill()
        self._reap(process)
        self.forget(name)

    def _reap(self, process: Process) -> None:
        child = self._children.get(process.pid)
        if child is not None and child.poll() is not None:
            del self._children[process.pid]


def _prefer(session: int) -> None:
    """Let a session have its time before others have theirs.

    Whoever waits for a node waits for seconds; what compiles beside it does
    not notice.
    """
    try:
        pathlib.Path(f'/proc/{session}/autogroup').write_text(str(_PRIORITY))
    except OSError:
        pass  # it has ended, or the kernel does not group


def tail(log: pathlib.Path, lines: int = 15) -> str:
    """The end of a log."""
    try:
        with open(log, 'rb') as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 16384))
            text = file.read().decode(errors='replace')
    except FileNotFoundError:
        return ''
    # A kernel that panics ends with pages of this.
    kept = [line for line in text.splitlines()
            if not line.startswith(' [<')]
    return '\n'.join(kept[-lines:])
