# SPDX-License-Identifier: Apache-2.0
"""Which device-mapper nodes are suspended, and the guard of those that we do.

Guests wait for a node that is suspended, and whoever has suspended it may die.
So that is done by a program that has nothing else to do, the *guard*::

    python3 suspension.py LOCK SECONDS NAME...

It is started before anything is suspended.  It says HELD when all of the nodes
are, and lets them go on when its input ends, because whoever has started it is
done or has died; or when SECONDS have passed since it began.  As long as it
lives it has LOCK locked (flock(2)), so that nobody else resumes what it holds,
and a second guard waits for it.

It runs without anything but Python and dmsetup(8): no library has to be read
from a disk that may be busy.
"""

from collections.abc import Sequence
import contextlib
import errno
import fcntl
import os
import select
import signal
import subprocess
import sys
import time

BLOCK = '/sys/block'
HELD = 'held\n'
# Exit statuses of the guard, beside 0: its time was over, or a node can't be
# suspended
EARLY, FAILED = 3, 4
# Seconds between two looks at what is being suspended or resumed
TICK = 0.05


def suspended() -> dict[str, str]:
    """UUIDs of the nodes that are suspended, by name; no command.

    :raises OSError: that can't be known
    """
    found = {}
    for device in os.listdir(BLOCK):
        try:
            if device.startswith('dm-') and _read(device, 'suspended') == '1':
                found[_read(device, 'name')] = _read(device, 'uuid')
        except OSError as error:
            # It has just gone.  Whoever can't be looked at may be suspended.
            if error.errno not in (errno.ENOENT, errno.ENODEV):
                raise
    return found


def _read(device: str, name: str) -> str:
    with open('%s/%s/dm/%s' % (BLOCK, device, name)) as file:
        return file.read().strip()


def _input_ends(seconds: float) -> bool:
    """Whether that is so within some seconds."""
    return bool(select.select([sys.stdin], [], [], max(seconds, 0))[0])


def _dmsetup(*arguments: str) -> subprocess.Popen[bytes]:
    command = ['dmsetup', *arguments]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL,
                            stdout=subprocess.DEVNULL)


def _hold(names: Sequence[str], seconds: float) -> int:
    """Hold nodes until the input ends; an exit status."""
    end = time.monotonic() + seconds
    # It waits for what is under way.  There is no file system to freeze.
    suspending = _dmsetup('suspend', '--nolockfs', *names)
    try:
        while suspending.poll() is None:
            if _input_ends(TICK) or time.monotonic() > end:
                return EARLY
        if suspending.returncode:
            return FAILED
        print(HELD, end='', flush=True)
        return 0 if _input_ends(end - time.monotonic()) else EARLY
    finally:
        _let_go(names, suspending)


def _let_go(names: Sequence[str], suspending: subprocess.Popen[bytes]
            ) -> None:
    """Resume nodes; it ends when all of them go on."""
    # A suspend that waits is interrupted by that, and leaves the node live.
    suspending.kill()
    resuming: dict[str, subprocess.Popen[bytes]] = {}
    while True:
        # What is still being suspended can't be resumed.
        ended = suspending.poll() is not None
        waiting = _waiting(names)
        if ended and not waiting:
            return
        for name in waiting:
            if name not in resuming or resuming[name].poll() is not None:
                # There may be no memory for it at the moment.
                with contextlib.suppress(OSError, MemoryError):
                    # Guests may go on before udev has done anything.
                    resuming[name] = _dmsetup('resume', '--noudevsync', name)
        time.sleep(TICK)


def _waiting(names: Sequence[str]) -> set[str]:
    """Those of some nodes that are suspended, or may be."""
    try:
        return suspended().keys() & set(names)
    except (OSError, MemoryError):
        # The machine is out of files or memory at the moment.
        return set(names)


def main(lock: str, seconds: str, *names: str) -> int:
    """Be a guard."""
    # It ends soon enough, and not before all nodes go on.
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # Whoever may open it may lock it, and stop all guards.
    locked = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    with open(locked, 'w') as held:
        os.fchmod(locked, 0o600)
        fcntl.flock(held, fcntl.LOCK_EX)
        # Nobody may wait for it any more.
        status = EARLY if _input_ends(0) else _hold(names, float(seconds))
    if status == EARLY:
        print('the time of %s seconds was over' % seconds, file=sys.stderr)
    return status


if __name__ == '__main__':
    sys.exit(main(*sys.argv[1:]))
