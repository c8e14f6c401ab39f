# SPDX-License-Identifier: Apache-2.0
"""What the lab has so that instances run in its nodes.

Natively Placement, Nova's API, conductor and scheduler; in the nodes libvirtd
and nova-compute.
"""

import dataclasses
import functools
from typing import Mapping
import uuid

from lab import configuration
from lab import control_plane
from lab import layout
from lab import node_services
from lab import services

PROGRAMS = {
    '/usr/sbin/libvirtd': 'libvirt-daemon',
    '/usr/bin/virsh': 'libvirt-clients',
    '/usr/bin/qemu-system-x86_64': 'qemu-system-x86',
}

COMPUTE_PORT = 8774
PLACEMENT_PORT = 8778
LIBVIRT_PORT = 16509

STATE = '/var/lib/nova'
# To ask QEMU what it can do takes 12 s in a node.
KEPT = (STATE, '/etc/libvirt/qemu', '/var/lib/libvirt/qemu',
        '/var/cache/libvirt')
# libvirtd does not start without it.
ACCOUNTS = (services.Account('libvirt-qemu', 64055),)

NOVA, PLACEMENT = 'nova', 'placement'
# What knows of local volumes when a node is chosen
_CHOICE = 'cinder_localstor.nova.scheduler.'


def _url(port: int, path: str, place: layout.Layout) -> str:
    return f'http://{place.address("control")}:{port}{path}'


APIS = (
    services.Api(NOVA, 'compute',
                 functools.partial(_url, COMPUTE_PORT, '/v2.1')),
    services.Api(PLACEMENT, 'placement',
                 functools.partial(_url, PLACEMENT_PORT, '')),
)

# -- Databases --------------------------------------------------------------

_API, _CELL, _CELL0 = 'nova_api', 'nova', 'nova_cell0'
DATABASES = (_API, _CELL, _CELL0, PLACEMENT)


def _create_cell(place: services.Place) -> list[str]:
    url = configuration.database_url(place.layout, _CELL)
    return control_plane.manage(
        place, NOVA, 'cell_v2', 'create_cell', '--name', 'cell1',
        '--database_connection', url, '--transport-url',
        configuration.transport_url(place.layout))


SETUP = (
    services.Setup('placement-db-sync', lambda place: control_plane.manage(
        place, PLACEMENT, 'db', 'sync')),
    services.Setup('nova-api-db-sync', lambda place: control_plane.manage(
        place, NOVA, 'api_db', 'sync')),
    services.Setup('nova-map-cell0', lambda place: control_plane.manage(
        place, NOVA, 'cell_v2', 'map_cell0', '--database_connection',
        configuration.database_url(place.layout, _CELL0)),
        ('nova-api-db-sync',)),
    services.Setup('nova-create-cell', _create_cell, ('nova-map-cell0',)),
    # Both cells
    services.Setup('nova-db-sync', lambda place: control_plane.manage(
        place, NOVA, 'db', 'sync'), ('nova-create-cell',)),
)


# -- Configuration ----------------------------------------------------------

def _nova(place: services.Place) -> configuration.Sections:
    """What nova.conf says everywhere."""
    lab = place.layout
    user = configuration.service_user(lab, NOVA)
    return {
        'DEFAULT': {
            'debug': True, 'use_stderr': True,
            # A thousand lines, which nova-compute takes seconds to say
            'log_options': False,
            'host': place.name, 'my_ip': place.address,
            'transport_url': configuration.transport_url(lab),
            'service_down_time': 20, 'report_interval': 5,
            'rpc_response_timeout': 60,
            'default_log_levels': configuration.LOG_LEVELS},
        'keystone_authtoken': user | {
            'www_authenticate_uri': configuration.keystone_url(lab)},
        'service_user': user | {'send_service_user_token': True},
        'placement': user, 'glance': user, 'neutron': user,
        'cinder': user | {'catalog_info': 'volumev3::publicURL'},
        # Which is asked for encrypted volumes only
        'key_manager': {'backend': 'barbican'},
        'barbican': {'auth_endpoint': configuration.keystone_url(lab)},
        'vnc': {'enabled': False},
        # What a guest boots begins as a partition table does, and is none.
        'workarounds': {'disable_deep_image_inspection': True},
        'oslo_messaging_rabbit': configuration.MESSAGING,
    }


def _nova_control(place: services.Place) -> configuration.Sections:
    """nova.conf of the API, the conductor and the scheduler."""
    lab = place.layout
    state = place.directory / NOVA
    return services.merged(_nova(place), {
        'DEFAULT': {'state_path': state},
        'api_database': configuration.database(lab, _API),
        'database': configuration.database(lab, _CELL),
        'wsgi': {'api_paste_config': _paste(place)},
        'conductor': {'workers': 1},
        'scheduler': {'workers': 1, 'discover_hosts_in_cells_interval': 2},
        'filter_scheduler': {
            'available_filters': ['nova.scheduler.filters.all_filters',
                                  _CHOICE + 'LocalVolumeFilter'],
            # Nova's own, and ours
            'enabled_filters': 'ComputeFilter,ComputeCapabilitiesFilter,'
                               'ImagePropertiesFilter,'
                               'ServerGroupAntiAffinityFilter,'
                               'ServerGroupAffinityFilter,LocalVolumeFilter',
            'weight_classes': 'nova.scheduler.weights.all_weighers,'
                              + _CHOICE + 'LocalVolumeWeigher'},
        # Whoever asks for this many is no user of a lab.
        'quota': {'instances': -1, 'cores': -1, 'ram': -1},
        'oslo_concurrency': {'lock_path': state / 'locks'},
    })


def _nova_compute(place: services.Place) -> configuration.Sections:
    """nova.conf of a node."""
    return services.merged(_nova(place), {
        'DEFAULT': {
            'compute_driver': 'libvirt.LibvirtDriver',
            'state_path': STATE,
            # A node's one CPU translates what its guests run, and shares its
            # memory among them.  Their disks are holes, but for a small image.
            'initial_cpu_allocation_ratio': 16,
            'initial_ram_allocation_ratio': 4,
            'initial_disk_allocation_ratio': 16,
            'reserved_host_memory_mb': 0,
            'resume_guests_state_on_host_boot': True,
            # Seconds that a guest has to end
            'shutdown_timeout': 3,
            # Seconds for an image, for each GiB: the processors are busy.
            'reimage_timeout_per_gb': 120,
            'pointer_model': 'ps2mouse',
            # There are no networks.
            'heal_instance_info_cache_interval': -1},
        'libvirt': {
            'virt_type': 'qemu', 'cpu_mode': 'none', 'images_type': 'qcow2',
            'hw_machine_type': 'x86_64=pc',
            # MiB of translated code for each guest
            'tb_cache_size': 32,
            'mem_stats_period_seconds': 0,
            'wait_soft_reboot_seconds': 5,
            'live_migration_scheme': 'tcp',
            'live_migration_inbound_addr': place.address},
        'oslo_concurrency': {'lock_path': f'{STATE}/locks'},
    })


def _placement(place: services.Place) -> configuration.Sections:
    """placement.conf."""
    return {
        'DEFAULT': {'debug': False, 'use_stderr': True},
        'placement_database': configuration.database(place.layout, PLACEMENT),
        'keystone_authtoken': configuration.service_user(place.layout,
                                                         PLACEMENT) | {
            'www_authenticate_uri': configuration.keystone_url(place.layout)},
    }


def _paste(place: services.Place) -> str:
    return str(place.layout.environment / 'etc' / 'nova' / 'api-paste.ini')


# -- The control plane ------------------------------------------------------

def _nova_files(place: services.Place) -> dict[str, str]:
    return {'nova.conf': services.render_ini(_nova_control(place))}


def _nova_prepare(place: services.Place) -> None:
    (place.directory / NOVA / 'locks').mkdir(parents=True, exist_ok=True)


def _nova_api_environment(place: services.Place) -> Mapping[str, str]:
    files = (_paste(place), str(control_plane.etc(place) / 'nova.conf'))
    return control_plane.lab_on_path(place) | {
        'OS_NOVA_CONFIG_FILES': ';'.join(files)}


def _joined(place: services.Place) -> services.Probe:
    """Ready when Nova's other services can know of it."""
    return services.Probe(says='Join ServiceGroup membership')


def _worker(name: str, *after: str) -> services.Service:
    """A service of Nova's that takes its work from the queue."""
    return services.Service(
        name=name,
        command=lambda place: [
            control_plane.python(place), str(place.binaries / name),
            '--config-file', str(control_plane.etc(place) / 'nova.conf')],
        environment=control_plane.lab_on_path,
        files=_nova_files,
        prepare=_nova_prepare,
        after=('database', 'rabbitmq', *after),
        ready=_joined)


SERVICES = (
    services.Service(
        name=PLACEMENT,
        command=lambda place: control_plane.wsgi(
            place, 'placement.wsgi.api', PLACEMENT_PORT),
        environment=lambda place: control_plane.lab_on_path(place) | {
            'OS_PLACEMENT_CONFIG_DIR': str(control_plane.etc(place))},
        files=lambda place: {'placement.conf': services.render_ini(
            _placement(place))},
        after=('database',),
        ready=control_plane.listens(control_plane.NAME, PLACEMENT_PORT)),
    services.Service(
        name='nova-api',
        command=lambda place: control_plane.wsgi(
            place, 'nova.wsgi.osapi_compute', COMPUTE_PORT),
        environment=_nova_api_environment,
        files=_nova_files,
        prepare=_nova_prepare,
        after=('database', 'rabbitmq'),
        ready=control_plane.listens(control_plane.NAME, COMPUTE_PORT)),
    _worker('nova-conductor'),
    _worker('nova-scheduler', PLACEMENT),
)


# -- The nodes --------------------------------------------------------------

def node_files(place: services.Place) -> dict[str, str | services.Link]:
    """What a node has for its guests, whatever runs."""
    shell = place.layout.repository / 'lab' / 'shell.py'
    return {
        # libvirtd asks every QEMU that it finds what it can do.
        '/usr/bin/qemu-system-i386': services.Link('/nonexistent'),
        # Nova makes folders and files on the node that an instance moves to.
        '/usr/local/bin/ssh':
            f'#!/bin/sh\nexec {control_plane.python(place)} -ISE {shell}'
            ' "$@"\n',
        '/usr/local/bin/scp': _SCP,
        f'{STATE}/instances/.keep': '',
        f'{STATE}/locks/.keep': '',
    }


# Takes a file from here to another node, which is all that Nova does with it.
_SCP = '''\
#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
exec ssh "${2%%:*}" cat ">" "${2#*:}" < "$1"
'''


def _compute_config(place: services.Place) -> str:
    return str(place.directory / 'nova.conf')


def manage_on_node(place: services.Place, *arguments: str) -> list[str]:
    """A command of nova-manage's, as it is run on a node."""
    return [control_plane.python(place), str(place.binaries / 'nova-manage'),
            '--config-file', _compute_config(place), *arguments]


def _libvirt_files(place: services.Place) -> dict[str, str]:
    identity = uuid.uuid5(uuid.NAMESPACE_DNS,
                          f'{place.name}.{place.layout.identity}')
    return {
        '/etc/libvirt/libvirtd.conf':
            f'listen_tls = 0\nlisten_tcp = 1\nlisten_addr = "{place.address}"'
            '\nauth_tcp = "none"\nauth_unix_rw = "none"\n'
            f'host_uuid = "{identity}"\nlog_outputs = "3:stderr"\n',
        '/etc/libvirt/qemu.conf':
            'user = "root"\ngroup = "root"\ndynamic_ownership = 0\n'
            'security_driver = "none"\nnamespaces = []\n'
            'cgroup_controllers = []\nstdio_handler = "file"\n'
            f'migration_address = "{place.address}"\n'
            f'migration_host = "{place.address}"\n'
            # Saves some hundred questions for each guest.
            'capability_filters = ["cpu-unavailable-features"]\n',
    }


NODE_SERVICES = (
    services.Service(
        name='libvirtd',
        command=lambda place: ['/usr/sbin/libvirtd', '--listen'],
        files=_libvirt_files,
        ready=lambda place: services.Probe(
            listens=(place.address, LIBVIRT_PORT))),
    services.Service(
        name='nova-compute',
        command=lambda place: [
            control_plane.python(place), '-m', 'lab.nova_compute',
            '--config-file', _compute_config(place)],
        environment=node_services.repository_on_path,
        files=lambda place: {_compute_config(place): services.render_ini(
            _nova_compute(place))},
        after=('libvirtd',),
        ready=lambda place: dataclasses.replace(
            _joined(place), fails='Unhandled error: '),
        stop_timeout=20,
        start_timeout=900,
        # It stops at a reboot that it is to finish and can't, and takes that
        # back.
        restarts=1),
)
