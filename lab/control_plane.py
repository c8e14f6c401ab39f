# SPDX-License-Identifier: Apache-2.0
"""The control plane: its services, and the database they start from.

Everything here runs natively in the lab's network namespace.
"""

import base64
import errno
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
from typing import Callable
from typing import Iterable

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


def etc(place: services.Place) -> pathlib.Path:
    """Where the files of services are."""
    return place.directory / 'etc'


# -- MariaDB ----------------------------------------------------------------

def database_directory(place: services.Place) -> pathlib.Path:
    """MariaDB's data directory."""
    return place.directory / 'database'


def _first_statements(place: services.Place) -> pathlib.Path:
    # Beside the data, with which it is kept
    return database_directory(place) / 'lab.sql'


def _database_command(place: services.Place) -> list[str]:
    return ['/usr/sbin/mariadbd', '--no-defaults', '--user=root',
            f'--datadir={database_directory(place)}',
            f'--init-file={_first_statements(place)}',
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
        'RABBITMQ_CONFIG_FILE': str(etc(place) / 'rabbitmq'),
        'RABBITMQ_ENABLED_PLUGINS_FILE':
            str(etc(place) / 'rabbitmq-plugins'),
        'ERL_EPMD_ADDRESS': '127.0.0.1',
        'RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS':
            '+S 1:1 -kernel inet_dist_use_interface {127,0,0,1}'}


def _rabbitmq_prepare(place: services.Place) -> None:
    (place.directory / 'rabbitmq').mkdir(exist_ok=True)


# -- OpenStack --------------------------------------------------------------

def python(place: services.Place) -> str:
    """The interpreter of the Python environment."""
    return str(place.binaries / 'python')


def lab_on_path(place: services.Place) -> dict[str, str]:
    """Environment in which Python finds the lab."""
    return {'PYTHONPATH': str(place.layout.repository)}


def _keystone_environment(place: services.Place) -> dict[str, str]:
    return lab_on_path(place) | {
        'OS_KEYSTONE_CONFIG_FILES': str(etc(place) / 'keystone.conf')}


def wsgi(place: services.Place, module: str, port: int,
         *arguments: str) -> list[str]:
    """The command that serves an API of the control plane."""
    return [python(place), '-m', 'lab.wsgi', module, place.address,
            str(port), *arguments]


def _cinder_prepare(place: services.Place) -> None:
    (place.directory / 'cinder' / 'locks').mkdir(parents=True,
                                                 exist_ok=True)


def _cinder_files(place: services.Place) -> dict[str, str]:
    return {'cinder.conf': services.render_ini(
        configuration.cinder_control(place))}


def listens(place_name: str, port: int
            ) -> Callable[[services.Place], services.Probe]:
    """Ready when something accepts connections in a place."""
    return lambda place: services.Probe(
        listens=(place.layout.address(place_name), port))


SERVICES = (
    services.Service(
        name='database',
        command=_database_command,
        ready=listens('database', configuration.DATABASE_PORT)),
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
        ready=listens('rabbitmq', configuration.RABBITMQ_PORT)),
    services.Service(
        name='keystone',
        command=lambda place: wsgi(place, 'lab.identity',
                                   configuration.KEYSTONE_PORT),
        environment=_keystone_environment,
        files=lambda place: {'keystone.conf': services.render_ini(
            configuration.keystone(place))},
        after=('database',),
        ready=listens(NAME, configuration.KEYSTONE_PORT)),
    services.Service(
        name='cinder-api',
        command=lambda place: wsgi(
            place, 'cinder.wsgi.api', configuration.CINDER_PORT,
            '--config-file', str(etc(place) / 'cinder.conf')),
        environment=lambda place: lab_on_path(place) | {
            # The API is served by threads.
            'OS_CINDER_DISABLE_EVENTLET_PATCHING': '1'},
        files=_cinder_files,
        prepare=_cinder_prepare,
        after=('database', 'rabbitmq'),
        ready=listens(NAME, configuration.CINDER_PORT)),
    services.Service(
        name='cinder-scheduler',
        command=lambda place: [
            python(place), str(place.binaries / 'cinder-scheduler'),
            '--config-file', str(etc(place) / 'cinder.conf')],
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
        path = etc(place) / name
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
        subprocess.run([python(place), '-m', 'compileall', '-q', '-j', '0',
                        sysconfig.get_path('purelib')],
                       check=False, stdout=subprocess.DEVNULL)


# -- The template -----------------------------------------------------------

def template_directory(place: layout.Layout, part: services.Part
                       ) -> pathlib.Path:
    """Where the initialised databases of this very recipe are kept."""
    digest = hashlib.sha256()
    for package in (*part.packages, 'SQLAlchemy', 'oslo.db'):
        digest.update(importlib.metadata.version(package).encode() + b'\0')
    version = subprocess.run(['/usr/sbin/mariadbd', '--version'],
                             capture_output=True, check=True)
    digest.update(version.stdout)
    for source in (*part.sources, configuration.__file__, layout.__file__):
        digest.update(pathlib.Path(source).read_bytes())
    kind = '-'.join(('database', *part.packages))
    return place.cache / f'{kind}-{digest.hexdigest()[:16]}'


def install_database(place: services.Place, databases: Iterable[str]
                     ) -> None:
    """Make a data directory of empty databases, and Keystone's keys."""
    directory = database_directory(place)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    subprocess.run(
        ['/usr/bin/mariadb-install-db', '--no-defaults', '--user=root',
         '--auth-root-authentication-method=normal', '--skip-test-db',
         '--skip-name-resolve', '--innodb-log-file-size=16M',
         f'--datadir={directory}'],
        check=True, capture_output=True)
    user = f"'{configuration.DATABASE_USER}'@'%'"
    _first_statements(place).write_text('\n'.join([
        *(f'CREATE DATABASE IF NOT EXISTS {name} CHARACTER SET utf8mb4;'
          for name in databases),
        f'CREATE USER IF NOT EXISTS {user} '
        f"IDENTIFIED BY '{configuration.PASSWORD}';",
        f'GRANT ALL ON *.* TO {user};\n']))
    keys = place.directory / 'keys'
    keys.mkdir(mode=0o700, exist_ok=True)
    # What "keystone-manage fernet_setup" would write, without importing
    # Keystone for it.
    for number in ('0', '1'):
        key = keys / number
        key.touch(mode=0o600)
        key.write_bytes(base64.urlsafe_b64encode(os.urandom(32)))


def manage(place: services.Place, service: str, *arguments: str
           ) -> list[str]:
    """A command of a service's own tool."""
    return [python(place), str(place.binaries / f'{service}-manage'),
            '--config-file', str(etc(place) / f'{service}.conf'), *arguments]


def _bootstrap(place: services.Place) -> list[str]:
    url = configuration.keystone_url(place.layout)
    return manage(
        place, 'keystone', 'bootstrap',
        '--bootstrap-username', 'admin',
        '--bootstrap-password', configuration.PASSWORD,
        '--bootstrap-project-name', 'admin',
        '--bootstrap-region-id', configuration.REGION,
        '--bootstrap-admin-url', url,
        '--bootstrap-internal-url', url,
        '--bootstrap-public-url', url)


BOOTSTRAP = 'keystone-bootstrap'
SETUP = (
    services.Setup('keystone-db-sync',
                   lambda place: manage(place, 'keystone', 'db_sync')),
    services.Setup('cinder-db-sync',
                   lambda place: manage(place, 'cinder', 'db', 'sync')),
    services.Setup(BOOTSTRAP, _bootstrap, ('keystone-db-sync',)),
)


def register(identity: Any, place: layout.Layout,
             apis: Iterable[services.Api]) -> None:
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
    demo = create('user', name='demo', domain_id='default',
                  password=configuration.PASSWORD)
    grant(demo_project, demo, 'member')
    for api in apis:
        user = create('user', name=api.name, domain_id='default',
                      password=configuration.PASSWORD)
        grant(service_project, user, 'admin', 'service')
        registered = create('service', name=api.name, type=api.type)
        for interface in ('public', 'internal', 'admin'):
            create('endpoint', service_id=registered, interface=interface,
                   region_id=configuration.REGION, url=api.url(place))


def save_template(place: services.Place, template: pathlib.Path) -> None:
    """Keep the databases, which must be at rest, for the next lab."""
    draft = template.with_name(f'{template.name}.{place.name}')
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    for name in ('database', 'keys'):
        _copy(place.directory / name, draft / name)
    try:
        draft.rename(template)
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise
        # Another lab has come up at the same time.
        shutil.rmtree(draft)
    kind = template.name.rpartition('-')[0]
    for old in template.parent.glob(f'{kind}-{"[0-9a-f]" * 16}'):
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
