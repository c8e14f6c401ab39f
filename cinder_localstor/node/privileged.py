# SPDX-License-Identifier: Apache-2.0
"""The few things that need root, one tiny entry point each.

They run in a privsep daemon of our own.  What the capabilities are for:
CAP_SYS_ADMIN for the ioctls of device-mapper and block devices,
CAP_DAC_OVERRIDE for /dev, /run/lvm and sysfs, CAP_NET_ADMIN for talking to
tgtd and udevd, CAP_SYS_RAWIO for LVM's direct I/O, CAP_IPC_OWNER and
CAP_MKNOD for device-mapper's udev cookies and nodes, CAP_SYS_NICE because
lvm raises its priority while devices are suspended.
"""

import fcntl
import os
import signal
import subprocess

from oslo_privsep import capabilities
from oslo_privsep import priv_context

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

# linux/fs.h: _IO(0x12, 97), drop the cached pages of a block device
BLKFLSBUF = 0x1261

PROGRAMS = frozenset(('dmsetup', 'iscsiadm', 'lvchange', 'lvcreate',
                      'lvextend', 'lvremove', 'lvs', 'modprobe', 'tgtadm',
                      'udevadm', 'vgchange', 'vgs'))

# Bytes of a file or a device that are written at once
CHUNK = 1 << 20

# No exit status, and no signal's number
TIMED_OUT = -1000


@CONTEXT.entrypoint
def run(arguments: list[str], timeout: float) -> tuple[int, str, str]:
    """Run one of the PROGRAMS; its exit status, output and error output.

    :param timeout: seconds; a command that takes longer is killed with its
        children and TIMED_OUT is returned as its status
    """
    if arguments[0] not in PROGRAMS:
        raise ValueError('%s is not a program to run here' % arguments[0])
    with subprocess.Popen(arguments, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          env={'PATH': os.environ.get('PATH', os.defpath),
                               'LC_ALL': 'C',
                               'LVM_SUPPRESS_FD_WARNINGS': '1'},
                          start_new_session=True, text=True,
                          errors='replace') as process:
        try:
            out, err = process.communicate(timeout=timeout)
            return process.returncode, out, err
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            # A process in uninterruptible sleep outlives its kill: don't
            # wait for it, or one hanging disk would hang the daemon.
            for stream in (process.stdout, process.stderr):
                if stream:
                    stream.close()
            process.poll()
            process.returncode = process.returncode or TIMED_OUT
            return TIMED_OUT, '', ''


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
def protect_mapped_luns(iqn: str, initiator: str) -> None:
    """Let LIO refuse every write of an initiator to a target."""
    base = ('/sys/kernel/config/target/iscsi/%s/tpgt_1/acls/%s'
            % (os.path.basename(iqn), os.path.basename(initiator)))
    for entry in os.listdir(base):
        if entry.startswith('lun_'):
            with open(os.path.join(base, entry, 'write_protect'), 'w') as file:
                file.write('1')


@CONTEXT.entrypoint
def install_udev_rules(path: str, text: str) -> bool:
    """Put rules where udevd reads them; whether they were new."""
    try:
        with open(path) as file:
            if file.read() == text:
                return False
    except FileNotFoundError:
        pass
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, 'w') as file:
        file.write(text)
    return True
