# SPDX-License-Identifier: Apache-2.0
"""The kernel's NVMe controllers, without any command.

What is written to ``/dev/nvme-fabrics`` makes one, see nvmf_parse_options() in
drivers/nvme/host/fabrics.c.
"""

import dataclasses
import glob
import os

from cinder_localstor.node import privileged

MODULE = 'nvme-tcp'
FABRICS = '/dev/nvme-fabrics'
CONTROLLERS = '/sys/class/nvme'
DISKS = '/sys/block'
LIVE = 'live'
# Seconds, for each call
TIMEOUT = 30


@dataclasses.dataclass(frozen=True)
class Controller:
    """A controller as sysfs shows it, `nvme0` and so on."""

    name: str
    state: str


def controllers() -> dict[str, Controller]:
    """All controllers by their subsystem's NQN."""
    found = {}
    for path in glob.glob(os.path.join(CONTROLLERS, 'nvme*')):
        try:
            found[_read(path, 'subsysnqn')] = Controller(
                os.path.basename(path), _read(path, 'state'))
        except OSError:
            continue  # gone in the meantime
    return found


def disks() -> dict[str, str]:
    """The device of each namespace's disk by its subsystem's NQN."""
    found = {}
    for path in glob.glob(os.path.join(DISKS, 'nvme*')):
        try:
            # A path of several, which nobody can open, is no disk.
            if _read(path, 'hidden') == '0':
                found[_read(path, 'device', 'subsysnqn')] = (
                    '/dev/' + os.path.basename(path))
        except OSError:
            continue  # gone in the meantime
    return found


def uuid(device: str) -> str:
    """What a namespace's disk says of itself.

    :raises OSError: it says nothing
    """
    return _read(DISKS, os.path.basename(device), 'uuid')


def _read(*path: str) -> str:
    with open(os.path.join(*path)) as file:
        return file.read().strip()


@privileged.CONTEXT.entrypoint_with_timeout(TIMEOUT)
def options() -> str:
    """The options that the kernel knows, as their names with `=`s."""
    with open(FABRICS) as file:
        return file.read()


@privileged.CONTEXT.entrypoint_with_timeout(TIMEOUT)
def connect(options: str) -> None:
    """Make a controller, and wait until it is connected.

    :raises OSError: the target does not answer, or admits nobody so
    """
    descriptor = os.open(FABRICS, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.write(descriptor, options.encode())
    finally:
        os.close(descriptor)


@privileged.CONTEXT.entrypoint_with_timeout(TIMEOUT)
def remove(name: str) -> None:
    """Remove a controller, with its disks.

    :raises OSError: there is none
    """
    path = os.path.join(CONTROLLERS, os.path.basename(name),
                        'delete_controller')
    with open(os.open(path, os.O_WRONLY), 'w') as file:
        file.write('1')
