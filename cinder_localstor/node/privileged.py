# SPDX-License-Identifier: Apache-2.0
"""The few things that need root, one tiny entry point each.

They run in a privsep daemon of our own.  What the capabilities are for:
CAP_SYS_ADMIN for the ioctls of device-mapper and block devices,
CAP_DAC_OVERRIDE for /dev, /run/lvm and sysfs, CAP_NET_ADMIN for talking to
tgtd and udevd, CAP_SYS_RAWIO for LVM's direct I/O, CAP_IPC_OWNER and
CAP_MKNOD for device-mapper's udev cookies and nodes, CAP_SYS_NICE because
lvm raises its priority while devices are suspended.
"""

from collections.abc import Callable
import fcntl
import os
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from typing import cast
from typing import IO
from typing import NamedTuple

from oslo_config import cfg
from oslo_privsep import capabilities
from oslo_privsep import priv_context

from cinder_localstor.node import suspension

CONTEXT = priv_context.PrivContext(
    'cinder_localstor',
    cfg_section='localstor_privileged',
    pypath=__name__ + '.CONTEXT',
    capabilities=[capabilities.CAP_SYS_ADMIN,
                  capabilities.CAP_DAC_OVERRIDE,
                  capabilities.CAP_IPC_OWNER,
                  capabilities.CAP_IPC_LOCK,
                  capabilities.CAP_MKNOD,
                  capabilities.CAP_NET_ADMIN,
                  capabilities.CAP_SYS_NICE,
                  capabilities.CAP_SYS_RAWIO],
)

# So many calls at a time: one that hangs keeps no other waiting.  By default
# there are as many as the node has processors.
THREADS = 64
cfg.CONF.set_default('thread_pool_size', THREADS, group='localstor_privileged')

# linux/fs.h: _IO(0x12, 97), drop the cached pages of a block device
BLKFLSBUF = 0x1261

HYDRATOR = 'localstor-hydrator'

# Those that write LVM's metadata.  Killed in a critical section they leave
# devices suspended, with all I/O to them waiting.
WRITERS = frozenset(('lvchange', 'lvconvert', 'lvcreate', 'lvextend',
                     'lvremove', 'lvrename', 'vgchange'))
PROGRAMS = WRITERS | {'dd', 'dmsetup', 'iscsiadm', HYDRATOR, 'lvmconfig',
                      'lvs', 'modprobe', 'tgtadm', 'udevadm', 'vgs'}
# Where LVM keeps what it has known of each volume group last; see lvm.conf(5)
BACKUPS = '/etc/lvm/backup'
# Seconds in which one that was asked to end leaves its critical section
PATIENCE = 30

# Where the native helpers are found; it must not outlive a reboot.
RUNTIME = '/run/localstor'
# systemd(1) runs on this node if this is there, see sd_booted(3).
SYSTEMD = '/run/systemd/system'
# The name of the first process that we see
FIRST_PROCESS = '/proc/1/comm'

# proc(5); in a container it lacks what others have locked.
LOCKS = '/proc/locks'

# Isolated: the folder that it is in has modules of its own.
GUARD = [sys.executable, '-I', suspension.__file__]
# Guards by their process ids.  Each ends with this process: it has the other
# end of their input.
_guards: dict[int, subprocess.Popen[str]] = {}

# Bytes of a file or a device that are written at once
CHUNK = 1 << 20

# No exit status, and no signal's number
TIMED_OUT = -1000
STILL_RUNS = -1001


@CONTEXT.entrypoint
def run(arguments: list[str], timeout: float) -> tuple[int, str, str]:
    """Run one of the PROGRAMS; its exit status, output and error output.

    :param timeout: seconds; a command that takes longer is killed with its
        children and TIMED_OUT is returned as its status.  One of the WRITERS
        is asked to end; one that does not within PATIENCE goes on, and its
        status is STILL_RUNS and its output its process id.
    """
    return _run_allowed(arguments, timeout)


@CONTEXT.entrypoint
def run_in_turn(lines: list[list[str]], timeout: float
                ) -> tuple[int, str, str]:
    """Run commands as :func:`run` does, until one does not succeed; what came
    of the last.

    :param timeout: seconds for each
    """
    result = 0, '', ''
    for arguments in lines:
        result = _run_allowed(arguments, timeout)
        if result[0]:
            break
    return result


def _run_allowed(arguments: list[str], timeout: float
                 ) -> tuple[int, str, str]:
    if arguments[0] not in PROGRAMS:
        raise ValueError('%s is not a program to run here' % arguments[0])
    return _run(arguments, timeout)


def _run(arguments: list[str], timeout: float) -> tuple[int, str, str]:
    process = _start(arguments, subprocess.DEVNULL)
    try:
        out, err = process.communicate(timeout=timeout)
        return process.returncode, out, err
    except subprocess.TimeoutExpired:
        if arguments[0] in WRITERS:
            return _ask_to_end(process)
        _kill(process)
        return TIMED_OUT, '', ''


def _start(arguments: list[str], stdin: int) -> subprocess.Popen[str]:
    return subprocess.Popen(arguments, stdin=stdin, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE,
                            env={'PATH': _path(),
                                 'LC_ALL': 'C',
                                 # What LVM says in the middle of a report is
                                 # no part of it.
                                 'LVM_OUT_FD': '2',
                                 'LVM_SUPPRESS_FD_WARNINGS': '1'},
                            start_new_session=True, text=True,
                            errors='replace')


def _ask_to_end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """End a command of LVM between its critical sections, or not at all."""
    # It alone: what it has started it waits for itself.
    process.terminate()
    try:
        out, err = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        # What it prints is read, so that nothing but its work holds it up.
        _wait_later(process.communicate)
        return STILL_RUNS, str(process.pid), ''
    if process.returncode == 0:
        return 0, out, err
    return TIMED_OUT, '', ''


def _kill(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    for stream in (process.stdout, process.stderr):
        if stream:
            stream.close()
    # A process in uninterruptible sleep outlives its kill: one hanging disk
    # must not hang the daemon.
    _wait_later(process.wait)


def _wait_later(wait: Callable[[], object]) -> None:
    """Let nothing be left of a process when it ends."""
    threading.Thread(target=wait, daemon=True).start()


def _path() -> str:
    """Where programs are found; our own may be in a virtual environment."""
    return os.pathsep.join((os.environ.get('PATH', os.defpath),
                            os.path.dirname(sys.executable)))


# Stands for a command that proc(5) does not show
UNSEEN = '(not to be seen here)'


class Holder(NamedTuple):
    """A process that has locked a file; `seconds` since the file is there.

    Its process id is 0 outside of the container that we are in.
    """

    pid: int
    command: str
    seconds: float

    def __str__(self) -> str:
        if not self.pid:
            return ("a process outside of our container ('lslocks' on the "
                    "node tells which)")
        return "'%s' (process %d, see /proc/%d/stack)" % (
            self.command, self.pid, self.pid)


@CONTEXT.entrypoint
def lock_holder(path: str) -> tuple[int, str, float] | None:
    """Who has locked a file by flock(2) for itself alone, as a Holder has it.

    None when nobody has.
    """
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    file = '%02x:%02x:%d' % (os.major(found.st_dev), os.minor(found.st_dev),
                             found.st_ino)
    with open(LOCKS) as locks:
        pids = [int(words[4]) for words in map(str.split, locks)
                if words[1] == 'FLOCK' and words[3] == 'WRITE'
                and words[5] == file]
    if not pids and not _is_locked(path):
        return None
    pid = pids[0] if pids else 0
    try:
        with open('/proc/%d/cmdline' % pid) as arguments:
            command = arguments.read().replace('\0', ' ').strip()
    except OSError:
        # It is outside of our container, or has left the lock to a child.
        command = UNSEEN
    return pid, command, time.time() - found.st_mtime


def _is_locked(path: str) -> bool:
    """Whether anybody has locked a file for itself alone."""
    try:
        with open(path) as file:
            # For a moment nobody else gets it: LVM and our guards wait.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            # Of two that let go at once LVM leaves the file there, and we may
            # be one of them.  Who gets the lock next has not had it so long.
            os.utime(file.fileno())
            fcntl.flock(file, fcntl.LOCK_UN)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        pass
    return False


def suspension_lock() -> str:
    """The file that a guard has locked as long as it lives."""
    return os.path.join(RUNTIME, 'suspension')


def runtime_directory(copy: str) -> str:
    """Where the helper of a copy is found."""
    return os.path.join(RUNTIME, os.path.basename(copy))


@CONTEXT.entrypoint
def start_hydrator(copy: str, arguments: list[str], timeout: float
                   ) -> tuple[int, str, str]:
    """Start the helper of a copy in the background, as :func:`run` does."""
    return _run([*_scope(), HYDRATOR, 'run', '--detach',
                 '--runtime', runtime_directory(copy),
                 '--marks', os.path.join(RUNTIME, 'devices'), *arguments],
                timeout)


def _scope() -> list[str]:
    """Before a command: it outlives whoever has started it."""
    # systemd ends what is in the scope of cinder-volume with it.
    return (['systemd-run', '--quiet', '--scope', '--collect']
            if _has_systemd() else [])


def _has_systemd() -> bool:
    """Whether there is a systemd that can be asked for a scope."""
    if not (os.path.isdir(SYSTEMD)
            and shutil.which('systemd-run', path=_path())):
        return False
    try:
        with open(FIRST_PROCESS) as name:
            # A container may have the node's /run.  What it asks a scope for
            # are process ids, and the node's systemd would take processes
            # of the node for them.
            return name.read().strip() == 'systemd'
    except OSError:
        # It is hidden (proc(5), hidepid).
        return True


@CONTEXT.entrypoint
def hold(names: list[str], seconds: float, timeout: float
         ) -> tuple[int, str, str]:
    """Suspend device-mapper nodes, as :func:`run` does; the output is the
    process id of their guard (:mod:`cinder_localstor.node.suspension`).

    :param seconds: after which they go on, whatever happens
    :param timeout: seconds that it may take to suspend them
    """
    _make_directory(RUNTIME)
    guard = _start([*_scope(), *GUARD, suspension_lock(), str(seconds),
                    *names], subprocess.PIPE)
    told = cast(IO[str], guard.stdout)
    if (select.select([told], [], [], timeout)[0]
            and told.readline() == suspension.HELD):
        _guards[guard.pid] = guard
        return 0, str(guard.pid), ''
    status, _out, err = _dismiss(guard, timeout)
    # It may have said it a moment later.
    return status or TIMED_OUT, '', err


def _make_directory(path: str) -> None:
    """For root alone to write in; the umask of a privsep daemon is 0."""
    os.makedirs(path, 0o755, exist_ok=True)
    os.chmod(path, stat.S_IMODE(os.stat(path).st_mode) & ~0o022)


@CONTEXT.entrypoint
def let_go(guard: int, timeout: float) -> tuple[int, str, str]:
    """Let the nodes of a guard go on; its exit status is 0 if it has held
    them until now.

    :param timeout: seconds to wait for it
    """
    return _dismiss(_guards.pop(guard), timeout)


def _dismiss(guard: subprocess.Popen[str], timeout: float
             ) -> tuple[int, str, str]:
    try:
        # Closes its input.
        _out, err = guard.communicate(timeout=timeout)
        return guard.returncode, '', err
    except subprocess.TimeoutExpired:
        _wait_later(guard.communicate)
        return TIMED_OUT, '', ''


@CONTEXT.entrypoint
def ask_hydrator(copy: str, request: str, timeout: float) -> str:
    """What the helper of a copy answers, a line for a line.

    :param timeout: seconds to wait for it
    :raises OSError: nobody answers
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout)
        connection.connect(os.path.join(runtime_directory(copy), 'control'))
        connection.sendall(request.encode() + b'\n')
        with connection.makefile() as lines:
            return lines.readline()


@CONTEXT.entrypoint
def zero(device: str, size: int) -> None:
    """Write `size` bytes of zeros to a block device and make them durable."""
    descriptor = os.open(device, os.O_WRONLY | os.O_CLOEXEC)
    try:
        chunk = bytes(CHUNK)
        position = 0
        while position < size:
            position += os.pwrite(descriptor, chunk[:size - position],
                                  position)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@CONTEXT.entrypoint
def has_backup(group: str) -> bool:
    """Whether there was a volume group of this name on the node, which nobody
    has removed.
    """
    return os.path.exists(os.path.join(BACKUPS, group))


@CONTEXT.entrypoint
def flush(device: str) -> None:
    """Make all that was written to a block device durable."""
    descriptor = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@CONTEXT.entrypoint
def forget_cached(device: str) -> None:
    """Drop the cached pages of a block device after writing dirty ones."""
    descriptor = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.ioctl(descriptor, BLKFLSBUF)
    finally:
        os.close(descriptor)


@CONTEXT.entrypoint
def refuse_discards(device: str) -> None:
    """Let a block device, and all that is stacked on it, take no discards."""
    name = os.path.basename(os.path.realpath(device))
    path = '/sys/class/block/%s/queue/discard_max_bytes' % name
    with open(path, 'w') as limit:
        limit.write('0')


@CONTEXT.entrypoint
def install_udev_rules(path: str, text: str) -> None:
    """Put rules where udevd reads them: all of them or none."""
    _make_directory(os.path.dirname(path))
    # Backends of a node start together, and install the same.
    descriptor, new = tempfile.mkstemp(dir=os.path.dirname(path))
    try:
        with open(descriptor, 'w') as file:
            os.fchmod(file.fileno(), 0o644)
            file.write(text)
        os.replace(new, path)
    except BaseException:
        os.unlink(new)
        raise
