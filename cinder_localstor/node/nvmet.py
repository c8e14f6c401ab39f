# SPDX-License-Identifier: Apache-2.0
"""Exports over NVMe/TCP by the kernel's target, nvmet, through configfs.

The privileged daemon that configures LIO does this, too: nvmet waits for
sessions, which may wait for disks, and nothing else shall wait with it.
"""

import contextlib
import glob
import os
import re

from cinder_localstor.node import lio
from cinder_localstor.node import nvme

MODULE = 'nvmet-tcp'
CONFIGFS = '/sys/kernel/config'
# Seconds, for each call
TIMEOUT = 60
# Numbers of ports, see nvmet_ports_make() in drivers/nvme/target/configfs.c
MOST_PORTS = 1 << 16

_MOVE = re.compile('(?:%s|%s)(?P<move_id>[0-9a-f-]{36})' % (
    re.escape(nvme.NAME), re.escape(nvme.HOST_NAME)))


def is_there() -> bool:
    """Whether the module is loaded."""
    return os.path.isdir(_path())


def exported() -> set[str]:
    """The ids of all moves whose source can be reached."""
    return _moves(_path('ports', '*', 'subsystems', '*'))


def remains() -> set[str]:
    """The ids of all moves of which there is a subsystem or a host."""
    return _moves(_path('subsystems', '*')) | _moves(_path('hosts', '*'))


def _moves(pattern: str) -> set[str]:
    return {match['move_id'] for path in glob.glob(pattern)
            if (match := _MOVE.fullmatch(os.path.basename(path)))}


def _path(*parts: str) -> str:
    return os.path.join(CONFIGFS, 'nvmet', *parts)


@lio.CONTEXT.entrypoint_with_timeout(TIMEOUT)
def what_is_missing() -> str:
    """Why this kernel can't export, '' if it can.

    :raises OSError: configfs does not let us
    """
    if not is_there():
        return 'it has no %s, or no configfs at %s' % (MODULE, CONFIGFS)
    probe = _path('hosts', nvme.HOST_NAME + 'probe')
    # Who died in the middle has left it.
    with contextlib.suppress(FileExistsError):
        os.mkdir(probe)
    try:
        if not os.path.exists(os.path.join(probe, 'dhchap_key')):
            return ('its target does not authenticate hosts '
                    '(CONFIG_NVME_TARGET_AUTH)')
    finally:
        os.rmdir(probe)
    return ''


@lio.CONTEXT.entrypoint_with_timeout(TIMEOUT)
def make(name: str, device: str, serial: str, host: str, secret: str) -> None:
    """Make a subsystem that a host may reach when it is in a port.

    :param serial: a UUID, which the namespace will say is its own
    """
    host_path, subsystem = _path('hosts', host), _path('subsystems', name)
    os.mkdir(host_path)
    _write(secret, host_path, 'dhchap_key')
    os.mkdir(subsystem)
    _write('0', subsystem, 'attr_allow_any_host')
    _write(serial.replace('-', '')[:20], subsystem, 'attr_serial')
    namespace = os.path.join(subsystem, 'namespaces', str(nvme.NAMESPACE))
    os.mkdir(namespace)
    _write(device, namespace, 'device_path')
    _write(serial, namespace, 'device_uuid')
    _write('1', namespace, 'enable')
    os.symlink(host_path, os.path.join(subsystem, 'allowed_hosts', host))


@lio.CONTEXT.entrypoint_with_timeout(TIMEOUT)
def admit(name: str, address: str, service: int) -> None:
    """Offer a subsystem at an address, through the port that is there or
    through a new one.
    """
    wanted = {'addr_trtype': 'tcp', 'addr_traddr': address,
              'addr_trsvcid': str(service),
              'addr_adrfam': 'ipv6' if ':' in address else 'ipv4'}
    taken = set()
    for port in glob.glob(_path('ports', '*')):
        if all(_read(port, attribute) == value
               for attribute, value in wanted.items()):
            break
        taken.add(int(os.path.basename(port)))
    else:
        number = next(number for number in range(1, MOST_PORTS)
                      if number not in taken)
        port = _path('ports', str(number))
        os.mkdir(port)
        for attribute, value in wanted.items():
            _write(value, port, attribute)
    os.symlink(_path('subsystems', name),
               os.path.join(port, 'subsystems', name))


@lio.CONTEXT.entrypoint_with_timeout(TIMEOUT)
def remove(name: str, host: str) -> None:
    """Take a subsystem away with its sessions, or what there is of it.

    A port stays: the kernel listens there no more when it offers nothing.
    """
    for link in (*glob.glob(_path('ports', '*', 'subsystems', name)),
                 *glob.glob(_path('subsystems', name, 'allowed_hosts', '*'))):
        os.unlink(link)
    for folder in (*glob.glob(_path('subsystems', name, 'namespaces', '*')),
                   _path('subsystems', name), _path('hosts', host)):
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(folder)


def _write(value: str, *path: str) -> None:
    with open(os.path.join(*path), 'w') as file:
        file.write(value)


def _read(*path: str) -> str:
    with open(os.path.join(*path)) as file:
        return file.read().strip()
