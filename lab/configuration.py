# SPDX-License-Identifier: Apache-2.0
"""Configuration of the OpenStack services, as sections of options."""

import shlex
from typing import Any
import urllib.parse

from lab import layout
from lab import services
from lab import unprivileged

PASSWORD = 'lab'
REGION = 'RegionOne'
DATABASE_USER = 'openstack'
MESSAGE_USER = 'openstack'

KEYSTONE_PORT = 5000
CINDER_PORT = 8776
RABBITMQ_PORT = 5672
DATABASE_PORT = 3306

# The first in which an administrator may name a host for a new instance
COMPUTE_VERSION = '2.74'

Sections = dict[str, dict[str, Any]]

# The backends of the driver of this repository
BACKENDS = ('local', 'thin')
DEFAULT_DRIVER = 'cinder_localstor.driver.LocalStorDriver'
# Of a node's
CINDER_STATE = '/var/lib/cinder'

# Of every service, so that its log tells what it does and not how
LOG_LEVELS = ','.join((
    'amqp=WARN', 'amqplib=WARN', 'sqlalchemy=WARN', 'oslo.messaging=INFO',
    'oslo_messaging=INFO', 'keystonemiddleware=WARN',
    'routes.middleware=WARN', 'stevedore=WARN', 'taskflow=WARN',
    'urllib3=WARN', 'oslo_service=INFO', 'dogpile=WARN', 'keystoneauth=WARN',
    'eventlet=INFO'))
# They notice a cut soon.
MESSAGING = {'heartbeat_timeout_threshold': 15, 'heartbeat_rate': 3,
             'kombu_reconnect_delay': 1}


def pool(node: str, backend: str) -> str:
    """What Cinder's scheduler calls the backend of a node."""
    return f'{node}@{backend}#{backend}'


def fleet_node(number: int) -> str:
    """What a simulated node is called, the first one being 1."""
    return f'n{number:03}'


def keystone_url(place: layout.Layout) -> str:
    """Where Keystone answers."""
    return f'http://{place.address("control")}:{KEYSTONE_PORT}/v3'


def cinder_url(place: layout.Layout) -> str:
    """Where Cinder answers, without a project."""
    return f'http://{place.address("control")}:{CINDER_PORT}/v3'


def database_url(place: layout.Layout, name: str) -> str:
    """SQLAlchemy's address of one database."""
    password = urllib.parse.quote(PASSWORD)
    return (f'mysql+pymysql://{DATABASE_USER}:{password}@'
            f'{place.address("database")}:{DATABASE_PORT}/{name}'
            f'?charset=utf8mb4')


def transport_url(place: layout.Layout) -> str:
    """oslo.messaging's address of the message bus."""
    return (f'rabbit://{MESSAGE_USER}:{PASSWORD}@'
            f'{place.address("rabbitmq")}:{RABBITMQ_PORT}/')


def database(place: layout.Layout, name: str) -> dict[str, Any]:
    """Options of a service that has a database of this name."""
    return {'connection': database_url(place, name),
            # Come back by itself when the database does.
            'max_retries': -1, 'retry_interval': 2}


def credentials(place: layout.Layout, user: str = 'admin',
                project: str = 'admin') -> dict[str, str]:
    """OS_* variables of a user."""
    return {'OS_AUTH_URL': keystone_url(place), 'OS_USERNAME': user,
            'OS_PASSWORD': PASSWORD, 'OS_PROJECT_NAME': project,
            'OS_USER_DOMAIN_ID': 'default',
            'OS_PROJECT_DOMAIN_ID': 'default',
            'OS_IDENTITY_API_VERSION': '3', 'OS_REGION_NAME': REGION,
            'OS_VOLUME_API_VERSION': '3.70',
            'OS_COMPUTE_API_VERSION': COMPUTE_VERSION}


def service_user(place: layout.Layout, user: str) -> dict[str, Any]:
    """Options with which a service finds Keystone and is known there."""
    return {'auth_type': 'password', 'auth_url': keystone_url(place),
            'username': user, 'password': PASSWORD,
            'project_name': 'service', 'user_domain_id': 'default',
            'project_domain_id': 'default', 'region_name': REGION}


def keystone(place: services.Place) -> Sections:
    """keystone.conf."""
    keys = place.directory / 'keys'
    return {
        'DEFAULT': {'debug': False, 'use_stderr': True},
        'database': {'connection': database_url(place.layout, 'keystone')},
        'token': {'provider': 'fernet', 'expiration': 86400},
        'fernet_tokens': {'key_repository': keys},
        'fernet_receipts': {'key_repository': keys},
        'credential': {'key_repository': keys},
        # With those of a real cloud most of a test's time goes into hashes:
        # each user of Tempest's has a password.
        'identity': {'password_hash_rounds': 4},
        # The cache lives in each process and would go stale in others.
        'cache': {'enabled': False},
        'oslo_policy': {'policy_file': place.directory / 'none.yaml'},
    }


def cinder(place: services.Place) -> Sections:
    """What cinder.conf says everywhere."""
    lab = place.layout
    etc = lab.environment / 'etc' / 'cinder'
    return {
        'DEFAULT': {
            'debug': True,
            'use_stderr': True,
            'host': place.name,
            'my_ip': place.address,
            'transport_url': transport_url(lab),
            'auth_strategy': 'keystone',
            'api_paste_config': etc / 'api-paste.ini',
            'resource_query_filters_file': etc / 'resource_filters.json',
            'rootwrap_config': etc / 'rootwrap.conf',
            'default_volume_type': BACKENDS[0],
            'service_down_time': 20,
            'report_interval': 5,
            'rpc_response_timeout': 60,
            'quota_volumes': -1, 'quota_gigabytes': -1,
            # Until then the scheduler takes no request; what it waits for
            # is a first report of the volume services.
            'scheduler_driver_init_wait_time': 3,
            'default_log_levels': LOG_LEVELS,
        },
        'database': database(lab, 'cinder'),
        'keystone_authtoken': service_user(lab, 'cinder') | {
            'www_authenticate_uri': keystone_url(lab),
            'service_token_roles': 'service',
            'service_token_roles_required': True},
        'service_user': service_user(lab, 'cinder') | {
            'send_service_user_token': True},
        'nova': service_user(lab, 'cinder'),
        'glance': service_user(lab, 'cinder'),
        # Which is asked for encrypted volumes only
        'key_manager': {'backend': 'barbican'},
        'barbican': {'auth_endpoint': keystone_url(lab)},
        'oslo_messaging_rabbit': MESSAGING,
    }


def cinder_control(place: services.Place) -> Sections:
    """cinder.conf of the API and the scheduler."""
    state = place.directory / 'cinder'
    return services.merged(cinder(place), {
        'DEFAULT': {'state_path': state,
                    # A node of the lab takes minutes where a machine is busy.
                    'rpc_response_timeout': 150,
                    'osapi_volume_listen': place.address,
                    'osapi_volume_listen_port': CINDER_PORT,
                    # The last but one lets a user name a node, and the last
                    # an instance.
                    'scheduler_default_filters':
                        'AvailabilityZoneFilter,CapacityFilter,'
                        'CapabilitiesFilter,JsonFilter,'
                        'InstanceLocalityFilter',
                    'scheduler_default_weighers':
                        'CapacityWeigher,LocalStorWeigher'},
        'oslo_concurrency': {'lock_path': state / 'locks'},
        'coordination': {'backend_url': f'file://{state}/coordination'},
    }, place.options)


def privsep_helper(place: services.Place, config: str) -> str:
    """The command that starts a privileged daemon of a node's service."""
    helper = [str(place.binaries / 'privsep-helper'), '--config-file', config]
    return shlex.join(['sudo', *helper] if place.account else helper)


def cinder_volume(place: services.Place, config: str) -> Sections:
    """cinder.conf of a node."""
    state = CINDER_STATE
    helper = privsep_helper(place, config)
    backends = {backend.name: {'volume_backend_name': backend.name,
                               'volume_group': backend.group,
                               **backend.options(place)}
                for backend in place.backends}
    return services.merged(cinder(place), {
        'DEFAULT': {'enabled_backends': ','.join(backends),
                    'state_path': state,
                    'rootwrap_config': unprivileged.ROOTWRAP,
                    'volume_clear_size': 0},
        'oslo_concurrency': {'lock_path': f'{state}/locks'},
        'coordination': {'backend_url': f'file://{state}/coordination'},
        'cinder_sys_admin': {'helper_command': helper},
        'privsep_osbrick': {'helper_command': helper},
        'localstor_privileged': {'helper_command': helper},
        'localstor_lio_privileged': {'helper_command': helper},
        **backends,
    }, place.options)


def _exported_by_tgt(place: services.Place) -> dict[str, Any]:
    return {'target_ip_address': place.address,
            'volumes_dir': f'{CINDER_STATE}/volumes',
            'target_helper': 'tgtadm', 'target_port': 3260}


def local(place: services.Place) -> dict[str, Any]:
    """The driver of this repository, with thick volumes and tgt."""
    return _exported_by_tgt(place) | {
        'volume_driver': DEFAULT_DRIVER,
        'lvm_type': 'default',
        # tgtd then reads its backing store past the page cache.
        'iscsi_target_flags': 'direct',
        # It is the lab that makes Nova's calls.
        'localstor_online_extend': True,
    }


def thin(place: services.Place) -> dict[str, Any]:
    """The driver of this repository, with a thin pool and LIO."""
    return local(place) | {
        'lvm_type': 'thin', 'target_helper': 'lioadm', 'target_port': 3261}


def mirrored(place: services.Place) -> dict[str, Any]:
    """The driver of this repository, with volumes that outlive a disk."""
    return local(place) | {'lvm_mirrors': 1}


def _over_ipv6(place: services.Place) -> dict[str, Any]:
    return {'target_ip_address': place.layout.ipv6_address(place.name)}


def ipv6(place: services.Place) -> dict[str, Any]:
    """As :func:`local`, and who reads a volume does it over IPv6."""
    return local(place) | _over_ipv6(place)


def thin_ipv6(place: services.Place) -> dict[str, Any]:
    """As :func:`thin`, and who reads a volume does it over IPv6."""
    return thin(place) | _over_ipv6(place)


def in_tree(place: services.Place) -> dict[str, Any]:
    """Cinder's own driver of LVM, with thick volumes and tgt."""
    return _exported_by_tgt(place) | {
        'volume_driver': 'cinder.volume.drivers.lvm.LVMVolumeDriver',
        'lvm_type': 'default',
    }
