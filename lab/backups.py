# SPDX-License-Identifier: Apache-2.0
"""What the lab has so that volumes are backed up: cinder-backup in the nodes.

What it makes is in one directory of the lab for all nodes, as on a file system
that they share.
"""

import pathlib

from lab import configuration
from lab import node_services
from lab import services
from lab import sizes

_NAME = 'cinder-backup'


def _directory(place: services.Place) -> pathlib.Path:
    return place.layout.directory / 'backups'


def _config(place: services.Place) -> str:
    return str(place.directory / 'cinder-backup.conf')


def _options(place: services.Place) -> configuration.Sections:
    """What the service has besides the node's cinder.conf."""
    return {'DEFAULT': {
        'backup_driver': 'cinder.backup.drivers.posix.PosixBackupDriver',
        'backup_posix_path': _directory(place),
        # It has this much of a volume in its memory, twice for each backup
        # that it works on. A process of a node has one mapping for each page
        # at worst, and Linux lets it have 65,530 (vm.max_map_count).
        'backup_file_size': sizes.GIB // 32, 'backup_max_operations': 2}}


def _prepare(place: services.Place) -> None:
    _directory(place).mkdir(exist_ok=True)


SERVICES = (
    services.Service(
        name=_NAME,
        command=lambda place: [
            str(place.binaries / 'python'), str(place.binaries / _NAME),
            '--config-file', node_services.cinder_config(place),
            '--config-file', _config(place)],
        files=lambda place: {_config(place): services.render_ini(
            _options(place))},
        environment=node_services.repository_on_path,
        prepare=_prepare,
        after=('iscsid',),
        ready=lambda place: services.Probe(
            says=f'Creating RPC server for service {_NAME}'),
        stop_timeout=20,
        start_timeout=900),
)
