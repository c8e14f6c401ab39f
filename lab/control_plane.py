# SPDX-License-Identifier: Apache-2.0
"""The control plane: its services, and the database they start from.

Everything here runs natively in the lab's network namespace.
"""

import base64
import hashlib
import importlib.metadata
import importlib.util
import os
import pathlib
import shutil
import signal
import subprocess
import sysconfig
from typing import Any

from lab import configuration
from lab import errors
from lab import layout
from lab import services

NAME = 'control'

# What the control plane needs of this machine, and the Debian package it is
# in.
PROGRAMS = {
    '/usr/sbin/mariadbd': 'mariadb-server',
    '/usr/bin/mariadb-install-db': 'mariadb-server',
    '/usr/lib/rabbitmq/bin/rabbitmq-server': 'rabbitmq-server',
    '/usr/bin/epmd': 'erlang-base',
    '/usr/sbin/ip': 'iproute2',
    '/usr/sbin/nft': 'nftables',
    '/usr/bin/nsenter': 'util-linux',
}


def _etc(place: services.Place) -> pathlib.Path:
    return place.directory / 'etc'


# -- MariaDB ----------------------------------------------------------------

def database_directory(place: services.Place) -> pathlib.Path:
    """MariaDB's data directory."""
    return place.directory / 'database'


def _database_files(place: services.Place) -> dict[str, str]:
    user = f"'{configuration.DATABASE_USER}'@'%'"
    lines = [f'CREATE DATABASE IF NOT EXISTS {name} '
             f'CHARACTER SET utf8mb4;' for name in configuration.DATABASES]
    lines += [f'CREATE USER IF NOT EXISTS {user} '
              f"IDENTIFIED BY '{configuration.PASSWORD}';",
              f'GRANT ALL ON *.* TO {user};']
    return {'database.sql': '\n'.join(lines) + '\n'}


def _database_command(place: services.Place) -> list[str]:
    return ['/usr/sbin/mariadbd', '--no-defaults', '--user=root',
            f'--datadir={database_directory(place)}',
            f'--init-file={_etc(place)}/database.sql',
            f'--socket={place.layout.runtime}/database.sock',
            f'--pid-file={place.layout.runtime}/database.pid',
            f'--bind-address={place.layout.address("database")}',
            f'--port={configuration.DATABASE_PORT}',
            '--skip-name-resolve', '--max-connections=1000',
            # A node without power never ends the one that it was in.
            '--idle-transaction-timeout=60',
            '--innodb-buffer-pool-size=64M', '--innodb-log-file-size=16M',
            '--innodb-flush-log-at-trx-commit=0',
            '--character-set-server=utf8mb4', '--skip-performance-schema']


# -- RabbitMQ ---------------------------------------------------------------

def _rabbitmq_files(place: services.Place) -> dict[str, str]:
    address = place.layout.address('rabbitmq')
    return {
        'rabbitmq.conf':
            f'listeners.tcp.1 = {address}:{configuration.RABBITMQ_PORT}\n'
            f'default_user = {configuration.MESSAGE_USER}\n'
            f'default_pass = {configuration.PASSWORD}\n'
            'loopback_users = none\n'
            'log.console = true\nlog.file = false\n'
            # A lab on a nearly full disk should still pass messages.
            'disk_free_limit.absolute = 50MB\n',
        'rabbitmq-plugins': '[].\n'}


def _rabbitmq_environment(place: services.Place) -> dict[str, str]:
    home = place.directory / 'rabbitmq'
    return {
        'HOME': str(home),
        'RABBITMQ_NODENAME': 'rabbit@localhost',
        'RABBITMQ_MNESIA_BASE': str(home / 'mnesia'),
        'RABBITMQ_LOG_BASE': str(home / 'log'),
        'RABBITMQ_CONFIG_FILE': str(_etc(place) / 'rabbitmq'),
        'RABBITMQ_ENABLED_PLUGINS_FILE':
            str(_etc(place) / 'rabbitmq-plugins'),
        'ERL_EPMD_ADDRESS': '127.0.0.1',
        'RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS':
            '+S 1:1 -kernel inet_dist_use_interface {127,0,0,1}'}


def _rabbitmq_prepare(place: services.Place) -> None:
    (place.directory / 'rabbitmq').mkdir(exist_ok=True)


# -- OpenStack --------------------------------------------------------------

def _python(place: services.Place) -> str:
    return str(place.binaries / 'python')


def _lab_on_path(place: services.Place) -> dict[str, str]:
    return {'PYTHONPATH': str(place.layout.repository)}


def _keystone_environment(place: services.Place) -> dict[str, str]:
    return _lab_on_path(place) | {
        'OS_KEYSTONE_CONFIG_FILES': str(_etc(place) / 'keystone.conf')}


def _wsgi(place: services.Place, module: str, port: int,
          *arguments: str) -> list[str]:
    return [_python(place), '-m', 'lab.wsgi', module, place.address,
            str(port), *arguments]


def _cinder_prepare(place: services.Place) -> None:
    (place.directory / 'cinder' / 'locks').mkdir(parents=True,
                                                 exist_ok=True)


def _cinder_files(place: services.Place) -> dict[str, str]:
    return {'cinder.conf': services.render_ini(
        configuration.cinder_control(place))}


def _listens(place_name: str, port: int) -> Any:
    return lambda place: services.Probe(
        listens=(place.layout.address(place_name), port))


SERVICES = (
    services.Service(
        name='database',
        command=_database_command,
        files=_database_files,
        ready=_listens('database', configuration.DATABASE_PORT)),
    services.Service(
        # RabbitMQ would start this itself, as a daemon nobody owns.
        name='epmd',
        command=lambda place: ['/usr/bin/epmd', '-address', '127.0.0.1'],
        ready=lambda place: services.Probe(listens=('127.0.0.1', 4369))),
    services.Service(
        name='rabbitmq',
        command=lambda place: ['/usr/lib/rabbitmq/bin/rabbitmq-server'],
        environment=_rabbitmq_environment,
        files=_rabbitmq_files,
        prepare=_rabbitmq_prepare,
        after=('epmd',),
        # Its state is thrown away with the lab.
        stop_signal=signal.SIGKILL,
        ready=_listens('rabbitmq', configuration.RABBITMQ_PORT)),
    services.Service(
        name='keystone',
        command=lambda place: _wsgi(place, 'keystone.wsgi.api',
                                    configuration.KEYSTONE_PORT),
        environment=_keystone_environment,
        files=lambda place: {'keystone.conf': services.render_ini(
            configuration.keystone(place))},
        after=('database',),
        ready=_listens(NAME, configuration.KEYSTONE_PORT)),
    services.Service(
        name='cinder-api',
        command=lambda place: _wsgi(
            place, 'cinder.wsgi.api', configuration.CINDER_PORT,
            '--config-file', str(_etc(place) / 'cinder.conf')),
        environment=lambda place: _lab_on_path(place) | {
            # The API is served by threads.
            'OS_CINDER_DISABLE_EVENTLET_PATCHING': '1'},
        files=_cinder_files,
        prepare=_cinder_prepare,
        after=('database', 'rabbitmq'),
        ready=_listens(NAME, configuration.CINDER_PORT)),
    services.Service(
        name='cinder-scheduler',
        command=lambda place: [
            _python(place), str(place.binaries / 'cinder-scheduler'),
            '--config-file', str(_etc(place) / 'cinder.conf')],
        files=_cinder_files,
        prepare=_cinder_prepare,
        after=('database', 'rabbitmq'),
        ready=lambda place: services.Probe(
            says='Starting cinder-scheduler node')),
)


def write_files(service: services.Service, place: services.Place) -> None:
    """Write the files of a service."""
    for name, content in service.files(place).items():
        if isinstance(content, services.Link):
            raise TypeError(f'{service.name}: links are for nodes')
        path = _etc(place) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def compile_environment(place: services.Place) -> None:
    """Byte-compile the Python environment unless that was done before.

    The nodes can't write there; without it each start of a service in them
    takes a minute.
    """
    spec = importlib.util.find_spec('cinder')
    source = spec.origin if spec else None
    if source is None:
        raise errors.LabError(
            f'There is no Cinder in {place.layout.environment}: run the lab '
            f'with the Python of an environment that has it.')
    compiled = pathlib.Path(importlib.util.cache_from_source(source))
    if not compiled.exists():
        subprocess.run([_python(place), '-m', 'compileall', '-q', '-j', '0',
                        sysconfig.get_path('purelib')],
                       check=False, stdout=subprocess.DEVNULL)


# -- The template -----------------------------------------------------------

def template_directory(place: layout.Layout) -> pathlib.Path:
    """Where the initialised database of this very recipe is kept."""
    digest = hashlib.sha256()
    for package in ('keystone', 'cinder', 'SQLAlchemy', 'oslo.db'):
        digest.update(importlib.metadata.version(package).encode() + b'\0')
    version = subprocess.run(['/usr/sbin/mariadbd', '--version'],
                             capture_output=True, check=True)
    digest.update(version.stdout)
    for module in (__file__, configuration.__file__, layout.__file__):
        digest.update(pathlib.Path(module).read_bytes())
    return place.cache / f'database-{digest.hexdigest()[:16]}'


def install_database(place: services.Place) -> None:
    """Make an empty data directory and Keystone's keys."""
    directory = database_directory(place)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    subprocess.run(
        ['/usr/bin/mariadb-install-db', '--no-defaults', '--user=root',
         '--auth-root-authentication-method=normal', '--skip-test-db',
         '--skip-name-resolve', '--innodb-log-file-size=16M',
         f'--datadir={directory}'],
        check=True, capture_output=True)
    keys = place.directory / 'keys'
    keys.mkdir(mode=0o700, exist_ok=True)
    # What "keystone-manage fernet_setup" would write, without importing
    # Keystone for it.
    for number in ('0', '1'):
        key = keys / number
        key.touch(mode=0o600)
        key.write_bytes(base64.urlsafe_b64encode(os.urandom(32)))


def setup_commands(place: services.Place) -> dict[str, list[str]]:
    """What fills the empty databases; the first two may run side by side."""
    keystone = [_python(place), str(place.binaries / 'keystone-manage'),
                '--config-file', str(_etc(place) / 'keystone.conf')]
    url = configuration.keystone_url(place.layout)
    return {
        'keystone-db-sync': [*keystone, 'db_sync'],
        'cinder-db-sync': [
            _python(place), str(place.binaries / 'cinder-manage'),
            '--config-file', str(_etc(place) / 'cinder.conf'),
            'db', 'sync'],
        'keystone-bootstrap': [
            *keystone, 'bootstrap',
            '--bootstrap-username', 'admin',
            '--bootstrap-password', configuration.PASSWORD,
            '--bootstrap-project-name', 'admin',
            '--bootstrap-region-id', configuration.REGION,
            '--bootstrap-admin-url', url,
            '--bootstrap-internal-url', url,
            '--bootstrap-public-url', url],
    }


def register(identity: Any, place: layout.Layout) -> None:
    """Tell Keystone who else there is; takes a session of its admin."""
    def create(kind: str, **values: Any) -> str:
        answer = identity.post(f'/{kind}s', json={kind: values})
        return answer.json()[kind]['id']

    def role(name: str) -> str:
        found = identity.get('/roles', params={'name': name})
        roles = found.json()['roles']
        return roles[0]['id'] if roles else create('role', name=name)

    def grant(project: str, user: str, *names: str) -> None:
        for name in names:
            identity.put(f'/projects/{project}/users/{user}/roles/'
                         f'{role(name)}')

    service_project = create('project', name='service', domain_id='default')
    demo_project = create('project', name='demo', domain_id='default')
    cinder = create('user', name='cinder', domain_id='default',
                    password=configuration.PASSWORD)
    demo = create('user', name='demo', domain_id='default',
                  password=configuration.PASSWORD)
    grant(service_project, cinder, 'admin', 'service')
    grant(demo_project, demo, 'member')
    volume = create('service', name='cinder', type='volumev3',
                    description='Block storage')
    for interface in ('public', 'internal', 'admin'):
        create('endpoint', service_id=volume, interface=interface,
               region_id=configuration.REGION,
               url=configuration.cinder_url(place))


def save_template(place: services.Place, template: pathlib.Path) -> None:
    """Keep the databases, which must be at rest, for the next lab."""
    draft = template.with_name(template.name + '.new')
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    for name in ('database', 'keys'):
        _copy(place.directory / name, draft / name)
    draft.rename(template)
    for old in template.parent.glob('database-*'):
        if old != template:
            shutil.rmtree(old, ignore_errors=True)


def load_template(place: services.Place, template: pathlib.Path) -> None:
    """Start from the databases of an earlier lab."""
    for name in ('database', 'keys'):
        shutil.rmtree(place.directory / name, ignore_errors=True)
        _copy(template / name, place.directory / name)


def _copy(source: pathlib.Path, destination: pathlib.Path) -> None:
    subprocess.run(['cp', '-a', '--reflink=auto', '--sparse=always',
                    str(source), str(destination)], check=True)
