# SPDX-License-Identifier: Apache-2.0
"""What a node is made of: its disks, kernel modules and services."""

import compileall
import dataclasses
import functools
import pathlib
import pwd
import signal
from typing import Callable
from typing import Iterable
from typing import Iterator
from typing import Mapping

from lab import configuration
from lab import services

# What a machine keeps when its power fails lies on this disk.
STATE_MOUNT = '/var/lib/node'
KEPT = (configuration.CINDER_STATE, '/etc/iscsi', '/etc/target',
        '/etc/lvm/archive', '/etc/lvm/backup')

DRIVER_PACKAGES = ('cinder_localstor',)

# What the nodes need of this machine, and the Debian package it is in.
PROGRAMS = {
    '/usr/bin/linux.uml': 'user-mode-linux',
    '/usr/sbin/modprobe': 'kmod',
    '/usr/bin/taskset': 'util-linux',
    '/lib/systemd/systemd-udevd': 'udev',
    '/usr/sbin/lvm': 'lvm2',
    '/usr/sbin/thin_check': 'thin-provisioning-tools',
    '/usr/sbin/dmsetup': 'dmsetup',
    '/usr/sbin/tgtd': 'tgt',
    '/usr/sbin/iscsid': 'open-iscsi',
    '/usr/sbin/mkfs.ext4': 'e2fsprogs',
}

MODULES = (
    'virtio_blk', 'configfs', 'dm-mod', 'dm-clone', 'dm-thin-pool',
    'dm-snapshot', 'dm-flakey', 'sg', 'sd_mod', 'iscsi_tcp',
    'nbd', 'target_core_mod', 'target_core_iblock', 'target_core_file',
    'iscsi_target_mod')


@dataclasses.dataclass(frozen=True)
class Disk:
    """One disk of a node, and what is on it after the first boot."""

    name: str
    size: int
    # Shell commands, given the device; they run at every boot. What they
    # make is flushed: a machine's installation outlives its first power cut.
    use: Callable[[str], str]
    # Whether a partition of it is used, and not the whole disk
    partitioned: bool = False


def _state(device: str, kept_paths: Iterable[str]) -> str:
    lines = [f'blkid -p {device} > /dev/null ||'
             f' {{ mkfs.ext4 -q -E lazy_itable_init=1 {device};'
             f' sync {device}; }}',
             f'mkdir -p {STATE_MOUNT}',
             f'mount -t ext4 {device} {STATE_MOUNT}']
    for path in kept_paths:
        kept = STATE_MOUNT + path
        lines += [f'mkdir -p {path}',
                  f'[ -e {kept} ] || {{ mkdir -p {kept};'
                  f' cp -a {path}/. {kept}; }}',
                  f'mount --bind {kept} {path}']
    lines += ['mkdir -p /var/lib/cinder/volumes /var/lib/cinder/locks',
              'mkdir -p /etc/target/alua /etc/target/backup']
    return '\n'.join(lines)


def _group(backend: services.Backend) -> Callable[[str], str]:
    """The volume group of a backend, made at the first boot."""
    name = backend.group
    # Cinder looks for a pool of this name.
    made_once = [f'lvcreate -q --type thin-pool --extents 95%FREE'
                 f' --name {name}-pool {name}'] if backend.thin else []
    # Whether there is a group is asked, and not seen in a failure to activate
    # it: after a power cut one volume of many may be beyond LVM's reach, and
    # the node goes on with the others, as a real machine does.
    return lambda device: '\n'.join([
        f'vgs -q {name} > /dev/null 2>&1 || {{',
        f'    vgcreate -q {name} {device}',
        *(f'    {command}' for command in made_once),
        f'    sync {device}; }}',
        f'vgchange -q -ay {name} ||'
        f' echo "lab: not every volume of {name} can be used; going on"'])


def _further_disk(backend: services.Backend, number: int
                  ) -> Callable[[str], str]:
    """A disk that the group has beside so many others."""
    name = backend.group
    # One that is missing counts, too.
    return lambda device: '\n'.join([
        f'[ "$(vgs --noheadings -o pv_count {name})" -gt {number} ] || {{',
        f'    vgextend -q {name} {device}',
        f'    sync {device}; }}'])


def _disks_of(backend: services.Backend, size: int) -> Iterator[Disk]:
    # Real ones are of both kinds.
    yield Disk(backend.name, size, _group(backend), partitioned=backend.thin)
    for number in range(1, backend.disks):
        yield Disk(f'{backend.name}-{number + 1}', size,
                   _further_disk(backend, number))


def disks(size: int, part: services.Part) -> tuple[Disk, ...]:
    """The disks of a node; the kernel names them in this order."""
    return (*(disk for backend in part.backends
              for disk in _disks_of(backend, size)),
            Disk('state', part.state_size,
                 lambda device: _state(device, part.kept)))


def base_files(place: services.Place, names: Mapping[str, str],
               accounts: Iterable[services.Account]
               ) -> dict[str, str | services.Link]:
    """Files every node has, whatever runs on it."""
    hosts = ['127.0.0.1 localhost']
    hosts += [f'{address} {name}' for name, address in names.items()]
    return _account_files(accounts) | {
        '/etc/hostname': place.name + '\n',
        '/etc/hosts': '\n'.join(hosts) + '\n',
        '/etc/lvm/lvm.conf': _LVM,
        # There is no sudo on a bare machine and everything runs as root.
        # Filtering commands is not what the lab is about, and it costs a
        # start of Python each time.
        '/usr/local/bin/sudo': _SUDO,
        # LIO settles where its state is when its module is loaded.
        '/etc/target/pr/.keep': '',
    }


def _account_files(accounts: Iterable[services.Account]
                   ) -> dict[str, str | services.Link]:
    """The machine's own accounts, and those that it lacks."""
    missing = [account for account in accounts
               if account.name not in {entry.pw_name
                                       for entry in pwd.getpwall()}]
    if not missing:
        return {}
    # With "x" PAM would look for what /etc/shadow says.
    users = [f'{account.name}:*:{account.number}:{account.number}::'
             f'/nonexistent:/usr/sbin/nologin\n' for account in missing]
    groups = [f'{account.name}:x:{account.number}:\n' for account in missing]
    return {path: pathlib.Path(path).read_text() + ''.join(lines)
            for path, lines in (('/etc/passwd', users),
                                ('/etc/group', groups))}


_LVM = '''\
devices {
    # LVM does not know this kind of disk.
    types = [ "ubd", 16 ]
    # Only the node's own disks: never what is inside a volume.
    global_filter = [ "a|^/dev/(ubd|vd)[a-z]1?$|", "r|.*|" ]
    use_devicesfile = 0
    issue_discards = 0
}
activation {
    udev_sync = 1
    udev_rules = 1
}
global {
    event_activation = 0
}
'''

_SUDO = '''\
#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
case "${1##*/}" in cinder-rootwrap|glance-rootwrap) shift 2;; esac
exec "$@"
'''


def cinder_config(place: services.Place) -> str:
    """The node's cinder.conf."""
    # On the machine's side, so that it can be rewritten at any time.
    return str(place.directory / 'cinder.conf')


def _cinder_volume(place: services.Place) -> list[str]:
    return functools.reduce(
        lambda command, around: around(place, command), place.around,
        [str(place.binaries / 'python'), str(place.binaries / 'cinder-volume'),
         '--config-file', cinder_config(place)])


def _cinder_prepare(place: services.Place) -> None:
    # A node reads the repository but cannot write there, and to compile the
    # driver anew at every start is slow in it.
    for package in DRIVER_PACKAGES:
        compileall.compile_dir(place.layout.repository / package, quiet=2)


def _tgtd_files(place: services.Place) -> dict[str, str]:
    return {'/etc/tgt/targets.conf':
            'default-driver iscsi\ninclude /var/lib/cinder/volumes/*\n'}


def _iscsid_files(place: services.Place) -> dict[str, str]:
    return {'/etc/iscsi/initiatorname.iscsi':
            f'InitiatorName=iqn.2010-10.org.openstack:lab-'
            f'{place.layout.identity}-{place.name}\n'}


def repository_on_path(place: services.Place) -> dict[str, str]:
    """Environment with the driver of this repository, wherever one is
    installed.
    """
    return {'PYTHONPATH': f'{place.layout.repository / "lab" / "site"}:'
                          f'{place.layout.repository}'}


BACKENDS = (services.Backend('local', configuration.local),
            services.Backend('thin', configuration.thin, thin=True))
SERVICES = (
    services.Service(
        name='iscsid',
        command=lambda place: ['/usr/sbin/iscsid', '-f'],
        files=_iscsid_files,
        stop_signal=signal.SIGTERM),
    services.Service(
        name='tgtd',
        command=lambda place: [
            '/usr/sbin/tgtd', '-f', '--iscsi',
            f'portal={place.address}:3260,'
            f'portal=[{place.layout.ipv6_address(place.name)}]:3260'],
        files=_tgtd_files,
        ready=lambda place: services.Probe(listens=(place.address, 3260)),
        # Loads what Cinder has exported before; starting Perl for nothing
        # would cost a node a second.
        follow_up=lambda place: [[
            '/bin/sh', '-c',
            'for file in /var/lib/cinder/volumes/*; do [ -e "$file" ] &&'
            ' exec tgt-admin -e -c /etc/tgt/targets.conf; done; :']],
        # tgtd ignores SIGTERM while it has targets.
        stop_signal=signal.SIGKILL),
    services.Service(
        name='cinder-volume',
        command=_cinder_volume,
        files=lambda place: {
            cinder_config(place): services.render_ini(
                configuration.cinder_volume(place, cinder_config(place))),
            '/etc/cinder/cinder.conf': services.Link(
                cinder_config(place))},
        environment=repository_on_path,
        prepare=_cinder_prepare,
        after=('iscsid', 'tgtd'),
        ready=lambda place: services.Probe(
            says='Driver post RPC initialization completed successfully',
            times=len(place.backends),
            fails='Failed to initialize driver'),
        stop_timeout=20,
        # Many commands, each of them slow on a machine that is busy; one that
        # fails or ends is not waited for.
        start_timeout=900),
)
