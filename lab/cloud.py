# SPDX-License-Identifier: Apache-2.0
"""The whole lab: control plane, nodes and network."""

from collections.abc import Collection
import contextlib
import fcntl
import functools
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import time
from typing import Any
from typing import Iterator
from typing import Mapping

from lab import configuration
from lab import control_plane
from lab import errors
from lab import http
from lab import kernel as kernels
from lab import layout
from lab import network
from lab import node as node_module
from lab import nova_setup
from lab import parts
from lab import plan
from lab import processes
from lab import services
from lab import sizes
from lab import volatile


class ControlService:
    """A service of the control plane."""

    def __init__(self, cloud: 'Cloud', declared: services.Service) -> None:
        self._cloud = cloud
        self._service = declared
        self.name = declared.name

    @property
    def log(self) -> pathlib.Path:
        """Its log."""
        return self._cloud.place.log(self.name)

    def status(self) -> dict[str, Any]:
        """State, and pid and uptime if it runs."""
        process = self._cloud.processes.get(self.name)
        if process is None:
            return {'state': 'stopped'}
        if not process.alive:
            return {'state': 'failed'}
        return {'state': 'running', 'pid': process.pid,
                'uptime': process.uptime}

    def start(self, wait: bool = True) -> None:
        """Start it, and wait until it is ready."""
        if self.status()['state'] == 'running':
            return
        place = self._cloud.place
        control_plane.write_files(self._service, place)
        if self._service.prepare:
            self._service.prepare(place)
        since = self.log.stat().st_size if self.log.exists() else 0
        self._cloud.processes.start(
            self.name,
            self._cloud.network.wrap(self._service.command(place)),
            self.log, place.environment | dict(
                self._service.environment(place)))
        if wait:
            self._wait(since)

    def stop(self) -> None:
        """End it in the orderly way."""
        self._cloud.processes.stop(self.name, self._service.stop_signal,
                                   self._service.stop_timeout)

    def kill(self) -> None:
        """End it and its children with SIGKILL."""
        self._cloud.processes.stop(self.name, signal.SIGKILL)

    def restart(self) -> None:
        """Stop and start it."""
        self.stop()
        self.start()

    def _wait(self, since: int) -> None:
        place = self._cloud.place
        probe = (self._service.ready(place) if self._service.ready
                 else services.Probe())
        deadline = time.monotonic() + self._service.start_timeout
        while True:
            process = self._cloud.processes.get(self.name)
            if process is None or not process.alive:
                raise self._failure('it ended')
            try:
                if probe.judge(self.log, since, self._cloud.listens):
                    return
            except services.NeverReady as error:
                raise self._failure(str(error)) from None
            if time.monotonic() > deadline:
                raise self._failure(
                    f'it was not ready after '
                    f'{self._service.start_timeout:g} s')
            time.sleep(0.05)

    def _failure(self, reason: str) -> errors.StartFailed:
        return errors.StartFailed(self.name, reason, self.log,
                                  processes.tail(self.log))


class Cloud:
    """A lab of a given name in this repository."""

    def __init__(self, name: str = 'default') -> None:
        self.layout = layout.Layout(name)
        self.name = name
        self.network = network.Network(self.layout)
        self.processes = processes.ProcessTable(self.layout.processes)

    # -- The lab as a whole -------------------------------------------------

    @property
    def running(self) -> bool:
        """Whether there is a lab, be it complete or not."""
        return self._settings_file.exists() and self.network.exists

    def up(self, nodes: int = 2, progress: plan.Progress | None = None, *,
           driver: str | None = None, options: services.Options | None = None,
           disk_size: int = 8 * sizes.GIB, disks: str = 'plain',
           memory: str | None = None,
           environment: Mapping[str, Mapping[str, str]] | None = None,
           block_sizes: Mapping[str, int] | None = None,
           kernel: str = 'stock', also: Collection[str] = (),
           bare: bool = False, keep: bool = False) -> bool:
        """Bring everything up; False if it was up already.

        ``driver`` is the volume driver of the backends that are ours,
        ``options`` are further sections of every cinder.conf, and ``also`` are
        optional parts (:data:`lab.parts.OPTIONAL`); ``disks`` are ``plain``
        or ``volatile`` (:mod:`lab.volatile`), and these have logical blocks
        of as many bytes as ``block_sizes`` says by the node's name, or of 512.
        ``environment`` is what
        the services of a node find in theirs, by its name. ``kernel`` is what
        the nodes run, ``stock`` or ``own``. A node has the ``memory`` that
        its parts need, unless it is given. A ``bare`` lab is
        its nodes alone, without any service. With ``keep`` a lab that did not
        come up is left as it is, to look at.
        """
        if not 0 <= nodes <= layout.MAX_NODES:
            raise errors.LabError(
                f'A lab has up to {layout.MAX_NODES} nodes, not {nodes}.')
        if os.geteuid() != 0:
            raise errors.LabError(
                'The lab needs root: it makes a network namespace and '
                'devices in it.')
        block_sizes = dict(block_sizes or {})
        names = [layout.Layout.node_name(number + 1)
                 for number in range(nodes)]
        volatile.check_block_sizes(block_sizes, disks, names)
        part = parts.of(also)
        self._check_programs(part)
        kernels.named(kernel)
        if disks == 'volatile':
            volatile.check()
        if 'nova' in also:
            nova_setup.check()
        with self._locked():
            if self.running and self._settings().get('complete', True):
                return False
            # What a crashed lab may have left.
            self._take_down()
            settings = {
                'nodes': names,
                'disk_size': disk_size, 'disks': disks,
                'block_sizes': block_sizes,
                'parts': sorted(also),
                'memory': memory or f'{part.memory >> 20}M',
                'complete': False,
                'kernel': kernel, 'bare': bare,
                'options': self._node_options(driver, options or {})}
            shutil.rmtree(self.layout.directory, ignore_errors=True)
            steps = plan.Plan(progress)
            try:
                self._bring_up(settings, steps, environment or {})
            except BaseException:
                if keep:
                    raise
                # Steps under way fail when their processes are gone, but
                # they may have started some in the meantime.
                self._take_down()
                steps.join(30)
                self._take_down()
                raise
        return True

    def down(self) -> bool:
        """End everything the lab started; False if there was nothing.

        Logs are kept until the next start.
        """
        with self._locked():
            return self._take_down()

    def status(self) -> list[dict[str, Any]]:
        """One row for every service and node."""
        self._require()
        rows: list[dict[str, Any]] = []
        for declared in self._part.control:
            rows.append({'place': 'control', 'service': declared.name,
                         'address': self._service_address(declared.name),
                         **self.service(declared.name).status()})
        for node in self.nodes:
            process = node.process
            on = process is not None and process.alive
            row: dict[str, Any] = {
                'place': node.name, 'service': 'power',
                'address': node.address, 'state': 'on' if on else 'off'}
            rows.append(row)
            if process is None or not on:
                continue
            row['pid'] = process.pid
            row['uptime'] = process.uptime
            try:
                states = node.service_states()
            except errors.NodeUnreachable:
                states = {'agent': {'state': 'unreachable'}}
            rows += [{'place': node.name, 'service': name,
                      'address': node.address, **state}
                     for name, state in states.items()]
        return rows

    # -- Its parts ----------------------------------------------------------

    @property
    def nodes(self) -> list[node_module.Node]:
        """All nodes."""
        settings = self._settings()
        return [self._node(name, settings) for name in settings['nodes']]

    def node(self, name: str) -> node_module.Node:
        """One node."""
        settings = self._settings()
        if name not in settings['nodes']:
            raise errors.NotFound(
                f'Lab "{self.name}" has no node "{name}", but '
                f'{", ".join(settings["nodes"]) or "none at all"}.')
        return self._node(name, settings)

    def service(self, name: str) -> ControlService:
        """A service of the control plane."""
        return ControlService(
            self, services.named(self._part.control, name))

    @property
    def place(self) -> services.Place:
        """Where the control plane runs, for its declarations."""
        return services.Place(control_plane.NAME,
                              self.layout.address(control_plane.NAME),
                              self.layout.directory, self.layout,
                              self._settings()['options'])

    # -- Faults -------------------------------------------------------------

    def cut(self, first: str, second: str) -> None:
        """Drop everything between two of nodes, control, rabbitmq, database.

        Commands of the lab still reach a node that is cut off.
        """
        self._require()
        known = ('control', 'rabbitmq', 'database',
                 *self._settings()['nodes'])
        for place in (first, second):
            if place not in known:
                raise errors.NotFound(
                    f'Lab "{self.name}" has no place "{place}" to cut '
                    f'from, but {", ".join(known)}.')
        self.network.cut(first, second)

    def heal(self) -> None:
        """Remove all cuts."""
        self._require()
        self.network.heal()

    # -- Using the cloud ----------------------------------------------------

    def run(self, argv: list[str], *, check: bool = True,
            timeout: float | None = 60, user: str = 'admin',
            input: str | None = None) -> subprocess.CompletedProcess:
        """Run a command natively in the namespace, as a user of the cloud.

        :raises CommandFailed: its exit status was not 0, with `check`
        :raises CommandTimeout: it was killed after so many seconds
        """
        self._require()
        try:
            done = subprocess.run(
                self.network.wrap(argv), env=self.environment(user),
                capture_output=True, text=True, timeout=timeout, input=input,
                check=False)
        except subprocess.TimeoutExpired as error:
            raise errors.CommandTimeout('control', argv, error.timeout
                                        ) from error
        if check and done.returncode:
            raise errors.CommandFailed('control', argv, done.returncode,
                                       done.stdout, done.stderr)
        return done

    def openstack(self, *arguments: str, user: str = 'admin',
                  timeout: float = 120) -> Any:
        """Run the openstack command; returns what it answers, parsed.

        For a command that answers nothing the result is None.
        """
        argv = ['openstack', *arguments]
        try:
            done = self.run([*argv, '-f', 'json'], user=user,
                            timeout=timeout)
        except errors.CommandFailed as error:
            # Commands that show nothing do not know the option, and say so
            # before they do anything.
            if 'unrecognized arguments: -f json' not in error.stderr:
                raise
            done = self.run(argv, user=user, timeout=timeout)
        return json.loads(done.stdout) if done.stdout.strip() else None

    def environment(self, user: str = 'admin') -> dict[str, str]:
        """Environment of a command run as a user of the cloud."""
        return self.place.environment | configuration.credentials(
            self.layout, user, self._project(user))

    def session(self, user: str = 'admin',
                service_token: bool = False) -> Any:
        """A keystoneauth session that reaches into the namespace.

        Works from any process and thread. With ``service_token`` requests
        also bear the token of the service user, as Nova's do.
        """
        return http.session(self.layout, self.network, user,
                            self._project(user), service_token)

    def endpoint(self, service: str) -> str:
        """Base address of an API, for instance ``volumev3``."""
        urls = {'identity': configuration.keystone_url(self.layout)} | {
            api.type: api.url(self.layout) for api in self._part.apis}
        try:
            return urls[service]
        except KeyError:
            raise errors.NotFound(
                f'The lab has no API "{service}", but '
                f'{", ".join(urls)}.') from None

    @functools.cached_property
    def volume_api(self) -> http.Api:
        """Cinder's API as the administrator, microversion 3.70."""
        return http.Api(self.session(service_token=True),
                        self.endpoint('volumev3'),
                        {'OpenStack-API-Version': 'volume 3.70'})

    @functools.cached_property
    def compute_api(self) -> http.Api:
        """Nova's API as the administrator."""
        return http.Api(self.session(), self.endpoint('compute'), {
            'OpenStack-API-Version':
                f'compute {configuration.COMPUTE_VERSION}'})

    @functools.cached_property
    def key_api(self) -> http.Api:
        """Barbican's API as the administrator."""
        return http.Api(self.session(), self.endpoint('key-manager'), {})

    @functools.cached_property
    def image_api(self) -> http.Api:
        """Glance's API as the administrator."""
        return http.Api(self.session(), self.endpoint('image'), {})

    def wait_for_backends(self, nodes: list[node_module.Node]) -> None:
        """Wait until the scheduler would choose any backend of these nodes.

        :raises StartFailed: it does not within 60 s
        """
        expected = {f'{node.name}@{backend.name}' for node in nodes
                    for backend in self._part.backends}
        deadline = time.monotonic() + 60
        while True:
            answer = self.volume_api.get('/os-services')
            up = {service['host'] for service in answer.json()['services']
                  if service['state'] == 'up'}
            pools = {pool['name'].partition('#')[0] for pool in
                     self.volume_api.get('/scheduler-stats/get_pools')
                     .json()['pools']}
            missing = expected - (up & pools)
            if not missing:
                return
            if time.monotonic() > deadline:
                raise errors.StartFailed(
                    ', '.join(sorted(missing)),
                    'the scheduler has not heard of it',
                    self.layout.log('control', 'cinder-scheduler'))
            time.sleep(0.2)

    def listens(self, address: str, port: int) -> bool:
        """Whether something accepts connections at an address of the lab."""
        with self.network.entered():
            probe = socket.socket()
        with probe:
            probe.settimeout(1)
            return probe.connect_ex((address, port)) == 0

    # -- Inside -------------------------------------------------------------

    @property
    def _settings_file(self) -> pathlib.Path:
        return self.layout.directory / 'lab.json'

    def _settings(self) -> dict[str, Any]:
        try:
            return json.loads(self._settings_file.read_text())
        except FileNotFoundError:
            raise errors.LabNotRunning(self.name) from None

    @property
    def _part(self) -> services.Part:
        return parts.of(self._settings()['parts'])

    def _save_settings(self, settings: dict[str, Any]) -> None:
        draft = self._settings_file.with_suffix('.new')
        draft.write_text(json.dumps(settings, indent=1))
        draft.rename(self._settings_file)

    def _require(self) -> None:
        if not self.running:
            raise errors.LabNotRunning(self.name)

    def _node(self, name: str,
              settings: Mapping[str, Any]) -> node_module.Node:
        return node_module.Node(name, self.layout, self.network,
                                self.processes, settings)

    @staticmethod
    def _project(user: str) -> str:
        return {'cinder': 'service'}.get(user, user)

    def _service_address(self, name: str) -> str:
        place = name if name in layout.PLACES else control_plane.NAME
        return self.layout.address(place)

    @staticmethod
    def _node_options(driver: str | None,
                      options: services.Options) -> services.Options:
        drivers = {}
        if driver:
            drivers = {backend: {'volume_driver': driver}
                       for backend in configuration.BACKENDS}
        return services.merged(drivers, options)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Let one process at a time bring the lab up or down."""
        self.layout.lock.parent.mkdir(parents=True, exist_ok=True)
        with open(self.layout.lock, 'w') as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    @staticmethod
    def _check_programs(part: services.Part) -> None:
        missing = {package for path, package in part.programs.items()
                   if not os.access(path, os.X_OK)}
        if missing:
            raise errors.LabError(
                f'The lab needs programs this machine lacks: "apt-get '
                f'install {" ".join(sorted(missing))}".')

    def _bring_up(self, settings: dict[str, Any], steps: plan.Plan,
                  environment: Mapping[str, Mapping[str, str]]) -> None:
        self.layout.directory.mkdir(parents=True)
        self.layout.runtime.mkdir(parents=True, exist_ok=True)
        self._save_settings(settings)
        nodes = [self._node(name, settings) for name in settings['nodes']]
        for node in nodes:
            if node.name in environment:
                node.configure(environment=environment[node.name])
        steps.add('network', self.network.create)
        if settings['bare']:
            for node in nodes:
                steps.add(f'{node.name} boot', node.boot, ('network',))
        else:
            self._plan_cloud(steps, nodes)
        steps.run()
        self._save_settings(settings | {'complete': True})

    def _plan_cloud(self, steps: plan.Plan,
                    nodes: list[node_module.Node]) -> None:
        part = self._part
        template = control_plane.template_directory(self.layout, part)
        steps.add('byte code',
                  lambda: control_plane.compile_environment(self.place))
        if template.exists():
            steps.add('database template',
                      lambda: control_plane.load_template(self.place,
                                                          template))
        else:
            self._plan_template(steps, template)
        before = ('network', 'byte code', 'database template')
        # Nodes first: what they do takes longest.
        for node in nodes:
            steps.add(f'{node.name} boot', node.boot, before)
        for declared in part.control:
            steps.add(declared.name, self.service(declared.name).start,
                      before + declared.after)
        for node in nodes:
            for declared in part.nodes:
                steps.add(
                    f'{node.name} {declared.name}',
                    node.service(declared.name).start,
                    [f'{node.name} boot', 'database', 'rabbitmq',
                     *(f'{node.name} {name}' for name in declared.after)])
        steps.add('volume types', self._create_types,
                  ['cinder-api', 'keystone'])
        steps.add('backends reported', lambda: self.wait_for_backends(nodes),
                  ['volume types', 'cinder-scheduler',
                   *(f'{node.name} cinder-volume' for node in nodes)])
        if 'nova' in self._settings()['parts']:
            self._plan_instances(steps, nodes)

    def _plan_instances(self, steps: plan.Plan,
                        nodes: list[node_module.Node]) -> None:
        steps.add('flavor',
                  lambda: nova_setup.create_flavors(self.compute_api),
                  ['nova-api', 'keystone'])
        steps.add('guest image',
                  lambda: nova_setup.upload_image(self.image_api),
                  ['glance', 'keystone'])
        names = [node.name for node in nodes]
        steps.add('hypervisors reported',
                  lambda: nova_setup.wait_for_hypervisors(
                      self.compute_api, names,
                      self.service('nova-scheduler').log),
                  ['flavor', 'nova-scheduler', 'nova-conductor',
                   *(f'{name} nova-compute' for name in names)])

    def _plan_template(self, steps: plan.Plan,
                       template: pathlib.Path) -> None:
        """Initialise the databases once, for this lab and later ones."""
        place = self.place
        part = self._part
        database = self.service('database')
        keystone = self.service('keystone')

        def install() -> None:
            control_plane.install_database(place, part.databases)
            # What the commands read.
            for declared in part.control:
                control_plane.write_files(declared, place)
            database.start()

        def command(name: str, argv: list[str]) -> None:
            log = self.layout.log('control', name)
            log.parent.mkdir(parents=True, exist_ok=True)
            with open(log, 'wb') as output:
                done = subprocess.run(
                    self.network.wrap(argv), env=place.environment,
                    stdout=output, stderr=output, check=False)
            if done.returncode:
                raise errors.StartFailed(
                    name, f'it ended with status {done.returncode}', log,
                    processes.tail(log))

        def register() -> None:
            keystone.start()
            control_plane.register(
                http.Api(self.session(), self.endpoint('identity'), {}),
                self.layout, part.apis)

        def save() -> None:
            keystone.stop()
            database.stop()
            control_plane.save_template(place, template)

        steps.add('install database', install, ['network', 'byte code'])
        for setup in part.setup:
            steps.add(setup.name, functools.partial(
                command, setup.name, setup.command(place)),
                ['install database', *setup.after])
        steps.add('register users and services', register,
                  [control_plane.BOOTSTRAP])
        steps.add('database template', save,
                  ['register users and services',
                   *(setup.name for setup in part.setup)])

    def _create_types(self) -> None:
        api = self.volume_api
        present = {kind['name'] for kind in
                   api.get('/types').json()['volume_types']}
        for backend in self._part.backends:
            if backend.name not in present:
                api.post('/types', json={'volume_type': {
                    'name': backend.name, 'extra_specs': {
                        'volume_backend_name': backend.name}}})

    def _take_down(self) -> bool:
        """End every process of the lab, remove all but its logs."""
        found = self.network.exists or self.layout.runtime.exists()
        records = self.processes.all()
        # Orderly ends take time and save nothing: the lab is thrown away.
        for record in records:
            found = found or record.alive
            record.kill()
            self.processes.forget(record.name)
        self._sweep()
        self.network.delete()
        shutil.rmtree(self.layout.runtime, ignore_errors=True)
        if self.layout.directory.exists():
            for path in self.layout.directory.iterdir():
                if path == self.layout.logs or path.suffix == '.log':
                    continue
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
        return found

    def _sweep(self) -> None:
        """End what nobody recorded but lives in the lab's own namespace.

        Only what the lab started gets in there. This process and those
        above it are spared: "down" may be called from within.
        """
        spared = set()
        pid = os.getpid()
        while pid > 1:
            spared.add(pid)
            pid = _parent(pid)
        deadline = time.monotonic() + 10
        while members := set(self.network.members()) - spared:
            for pid in members:
                processes.send_signal(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise errors.LabError(
                    f'Processes {sorted(members)} of lab "{self.name}" '
                    f'survived SIGKILL.')
            time.sleep(0.02)


def _parent(pid: int) -> int:
    text = pathlib.Path(f'/proc/{pid}/stat').read_text()
    return int(text.rpartition(')')[2].split()[1])
