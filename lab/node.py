# SPDX-License-Identifier: Apache-2.0
"""A node: a User Mode Linux kernel with disks, and what runs in it."""

import json
import os
import pathlib
import shlex
import shutil
import signal
import sys
import time
from typing import Any
from typing import Mapping

from lab import agent
from lab import errors
from lab import kernel
from lab import layout
from lab import network
from lab import node_services
from lab import partitions
from lab import parts
from lab import processes
from lab import remote
from lab import services
from lab import sizes
from lab import volatile

_SOURCE = pathlib.Path(__file__).resolve().parent


class NodeService:
    """A service on a node: start it, stop it, kill it."""

    def __init__(self, node: 'Node', declared: services.Service) -> None:
        self._node = node
        self._service = declared
        self.name = declared.name

    @property
    def log(self) -> pathlib.Path:
        """Its log."""
        return self._node.place.log(self.name)

    def status(self) -> dict[str, Any]:
        """State, and pid and uptime if it runs."""
        return self._node.service_states([self.name])[self.name]

    def start(self, wait: bool = True) -> None:
        """Start it, and wait until it is ready."""
        place = self._node.place
        self._node.write_files(self._service)
        if self._service.prepare:
            self._service.prepare(place)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._node.agent.request(
            do='service-start', name=self.name,
            argv=self._service.command(place), log=str(self.log),
            environment=place.environment | dict(
                self._service.environment(place)) | self._node.environment)
        if wait:
            self.wait_ready()
            for command in self._service.follow_up(place):
                self._node.run(command)

    def stop(self) -> None:
        """End it in the orderly way."""
        self._stop(self._service.stop_signal, self._service.stop_timeout)

    def kill(self) -> None:
        """End it and its children with SIGKILL."""
        self._stop(signal.SIGKILL, 0)

    def restart(self) -> None:
        """Stop and start it."""
        self.stop()
        self.start()

    def _stop(self, number: int, timeout: float) -> None:
        self._node.agent.request(timeout=timeout + 30, do='service-stop',
                                 name=self.name, signal=int(number),
                                 grace=timeout)

    def wait_ready(self) -> None:
        """Wait until a service that was started is ready.

        :raises StartFailed: it ended, can't work, or takes too long
        """
        place = self._node.place
        probe = (self._service.ready(place) if self._service.ready
                 else services.Probe())
        restarts = self._service.restarts
        deadline = time.monotonic() + self._service.start_timeout
        while True:
            state = self.status()
            if state['state'] != 'running':
                raise self._failure(
                    f'it ended with status {state.get("returncode")}')
            try:
                if probe.judge(self.log, state['log_offset'],
                               self._node.listens):
                    return
            except services.NeverReady as error:
                if not restarts:
                    raise self._failure(str(error)) from None
                restarts -= 1
                self.kill()
                self.start(wait=False)
            if time.monotonic() > deadline:
                raise self._failure(
                    f'it was not ready after '
                    f'{self._service.start_timeout:g} s')
            time.sleep(0.1)

    def _failure(self, reason: str) -> errors.StartFailed:
        return errors.StartFailed(f'{self.name} on {self._node.name}',
                                  reason, self.log,
                                  processes.tail(self.log))


class Node:
    """One virtual machine of the lab."""

    def __init__(self, name: str, lab: layout.Layout, net: network.Network,
                 table: processes.ProcessTable,
                 settings: Mapping[str, Any]) -> None:
        self.name = name
        self.address = lab.address(name)
        self.directory = lab.node_directory(name)
        self._layout = lab
        self._network = net
        self._table = table
        self._settings = settings
        self.agent = remote.Agent(name, self.address, net)

    # -- Power --------------------------------------------------------------

    @property
    def process(self) -> processes.Process | None:
        """The kernel, if it was ever powered on."""
        return self._table.get(self.name)

    @property
    def powered(self) -> bool:
        """Whether the power is on."""
        process = self.process
        return process is not None and process.alive

    @property
    def console_log(self) -> pathlib.Path:
        """What the kernel and the boot script said."""
        return self._layout.log(self.name, 'console')

    def boot(self, timeout: float = 180) -> None:
        """Power on and wait for the agent; starts no service."""
        if self.powered:
            raise errors.LabError(f'Node "{self.name}" is already on.')
        self._table.forget(self.name)
        self._prepare()
        runtime = self._layout.runtime / self.name
        # A socket of the former life would be in the way.
        shutil.rmtree(runtime, ignore_errors=True)
        self._network.add_node(self.name)
        argv = ['taskset', '--cpu-list', str(self._cpu),
                f'{_SOURCE}/pulse.sh', str(self._kernel.image),
                f'mem={self._settings["memory"]}',
                f'umid={self.name}', f'uml_dir={self._layout.runtime}',
                'rootfstype=hostfs', 'rootflags=/', 'root=/dev/root', 'ro',
                'init=/bin/sh', 'con=null', 'con0=null,fd:1',
                f'vec0:transport=tap,ifname={network.tap_name(self.name)},'
                f'depth=128,gro=1,mac={self._mac}']
        argv += self._plug_in_disks()
        # What follows the dashes are arguments of the first process.
        argv += [f'lab_node={self.directory}', '--', f'{_SOURCE}/boot.sh']
        self._table.start(self.name, self._network.wrap(argv),
                          self.console_log,
                          {'PATH': '/usr/sbin:/usr/bin:/sbin:/bin',
                           'TMPDIR': str(self._memory_directory()),
                           **self._kernel.environment})
        self._wait_for_agent(timeout)

    def start(self, wait: bool = True, timeout: float = 180) -> None:
        """Power on and start every service, as a machine does.

        :param timeout: seconds that the boot may take
        """
        self.boot(timeout)
        for declared in self.declarations:
            self.service(declared.name).start(wait=wait)

    def kill(self, seed: int | None = None, lose: str = 'random'
             ) -> volatile.PowerCut | None:
        """Cut the power: everything stops in mid-air, disks stay.

        Volatile disks lose what was not flushed, in the way ``lose`` says
        and as the seed decides, one by chance if it is None. What they have
        lost is returned; plain disks lose nothing.
        """
        process = self.process
        if process is None:
            raise errors.LabError(f'Node "{self.name}" is not on.')
        if seed is None:
            seed = volatile.choose_seed()
        process.kill()
        self._table.get(self.name)
        self._table.forget(self.name)
        # The node is dead when the first disk loses power, so that all lose
        # it at the same moment of the node's life.
        disks = self.volatile_disks
        return volatile.PowerCut(seed, lose, {
            disk.name: disk.cut_power(seed, lose)
            for disk in disks}) if disks else None

    def wait_ready(self, timeout: float = 180) -> None:
        """Wait until a node is ready that was started without waiting.

        The timeout is that of the boot; services have their own.
        """
        self._wait_for_agent(timeout)
        for declared in self.declarations:
            self.service(declared.name).wait_ready()

    def disk(self, name: str) -> pathlib.Path:
        """The file behind one of its disks."""
        return self.directory / f'{name}.disk'

    @property
    def volatile_disks(self) -> list[volatile.VolatileDisk]:
        """Its disks, if they lose their cache with the power."""
        if self._settings['disks'] != 'volatile':
            return []
        return [volatile.VolatileDisk(
            self.name, disk.name, self.disk(disk.name), self._layout,
            self._network, self._table, self._block_size)
            for disk in self._disks()]

    def _plug_in_disks(self) -> list[str]:
        """What the kernel has to be told of its disks."""
        disks = self.volatile_disks
        for disk in disks:
            disk.start()
        return [disk.kernel_argument for disk in disks] or [
            f'ubd{number}={self.disk(disk.name)}'
            for number, disk in enumerate(self._disks())]

    # -- Commands and services ----------------------------------------------

    def run(self, argv: list[str], *, check: bool = True,
            timeout: float | None = 60, input: str | bytes | None = None,
            environment: Mapping[str, str] | None = None,
            directory: str | None = None) -> remote.Result:
        """Run a command and wait for its end.

        Its whole process group is killed after the timeout.
        """
        return self.agent.run(
            argv, self.place.environment | dict(environment or {}),
            check=check, timeout=timeout, data=input, directory=directory)

    def service(self, name: str) -> NodeService:
        """One of its services."""
        return NodeService(self, services.named(self.declarations, name))

    @property
    def declarations(self) -> tuple[services.Service, ...]:
        """The services that it has."""
        return self._part.nodes

    def service_states(self, names: list[str] | None = None
                       ) -> dict[str, dict[str, Any]]:
        """State of the services."""
        names = names or [service.name for service in self.declarations]
        return self.agent.request(do='service-status', names=names,
                                  timeout=10)['services']

    def listens(self, address: str, port: int) -> bool:
        """Whether something accepts connections on the node."""
        try:
            self._network.connect(address, port, timeout=1).close()
        except OSError:
            return False
        return True

    # -- Configuration ------------------------------------------------------

    @property
    def place(self) -> services.Place:
        """Where its services run, for their declarations."""
        return services.Place(
            self.name, self.address, self.directory, self._layout,
            services.merged(self._settings['options'], self._options()),
            self._part.backends, self._part.account, self._part.around)

    def configure(self, sections: services.Options | None = None,
                  environment: Mapping[str, str] | None = None) -> None:
        """Set options of its cinder.conf; None goes back to the default.

        ``environment`` adds to what services find in theirs. Both take
        effect when the service is started the next time.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        merged = services.merged(self._options(), sections or {})
        self._save('options.json', {
            section: {key: value for key, value in options.items()
                      if value is not None}
            for section, options in merged.items()})
        self._save('environment.json',
                   self.environment | dict(environment or {}))
        self.write_files(services.named(self.declarations, 'cinder-volume'))

    @property
    def environment(self) -> dict[str, str]:
        """What ``configure`` added to the services' environment."""
        return self._load('environment.json')

    def _options(self) -> dict[str, dict[str, Any]]:
        return self._load('options.json')

    def _save(self, name: str, value: Any) -> None:
        (self.directory / name).write_text(json.dumps(value))

    def _load(self, name: str) -> dict[str, Any]:
        try:
            return json.loads((self.directory / name).read_text())
        except FileNotFoundError:
            return {}

    def write_files(self, declared: services.Service) -> None:
        """Write what a service needs; root files are copied at boot."""
        self._write(declared.files(self.place))

    def _write(self, files: Mapping[str, str | services.Link]) -> None:
        root = self.directory / 'files'
        for name, content in files.items():
            path = pathlib.Path(name)
            if not path.is_relative_to(self.directory):
                path = root / name.lstrip('/')
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, services.Link):
                path.unlink(missing_ok=True)
                path.symlink_to(content.target)
                continue
            # Whole or not at all: the node may be reading it.
            draft = path.with_name(path.name + '.new')
            draft.write_text(content)
            if content.startswith('#!'):
                draft.chmod(0o755)
            draft.rename(path)

    def _prepare(self) -> None:
        """Make the disks and write what the boot script wants."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self._layout.runtime.mkdir(parents=True, exist_ok=True)
        script = ['set -e']
        kind = 'vd' if self._settings['disks'] == 'volatile' else 'ubd'
        for letter, disk in zip('abcdefgh', self._disks()):
            path = self.disk(disk.name)
            if not path.exists():
                with open(path, 'wb') as file:
                    if disk.partitioned:
                        file.write(partitions.table(disk.size,
                                                    self._block_size))
                    file.truncate(disk.size)
            script.append(disk.use(f'/dev/{kind}{letter}'
                                   + '1' * disk.partitioned))
        place = self.place
        names = {other: self._layout.address(other)
                 for other in self._settings['nodes']}
        self._write(node_services.base_files(place, names,
                                             self._part.accounts))
        self._write(self._part.files(place))
        for declared in self.declarations:
            self.write_files(declared)
        # The state directory last: it may lie below one of the others.
        readable = [self._layout.repository]
        for prefix in (sys.prefix, sys.base_prefix):
            path = pathlib.Path(prefix)
            # The system's own Python lies below what never changes.
            if path.is_relative_to('/usr'):
                continue
            if not any(path.is_relative_to(other) for other in readable):
                readable.append(path)
        variables = {
            'LAB_NAME': self.name,
            'LAB_NODE': self.directory,
            'LAB_DIRECTORY': self._layout.directory,
            'LAB_READABLE': ' '.join(map(str, readable)),
            'LAB_ADDRESS': f'{self.address}/{layout.NETWORK.prefixlen}',
            'LAB_IPV6_ADDRESS': f'{self._layout.ipv6_address(self.name)}/'
                                f'{layout.IPV6_NETWORK.prefixlen}',
            'LAB_PORT': agent.PORT,
            'LAB_PYTHON': os.path.realpath(sys.executable),
            'LAB_SOURCE': _SOURCE,
            'LAB_MODULES': ' '.join(node_services.MODULES),
            'LAB_KERNEL_MODULES': self._kernel.modules,
        }
        lines = [f'{name}={shlex.quote(str(value))}'
                 for name, value in variables.items()]
        self._write({str(self.directory / 'boot.env'):
                     '\n'.join(lines) + '\n',
                     str(self.directory / 'disks.sh'):
                     '\n'.join(script) + '\n'})

    @property
    def _part(self) -> services.Part:
        return parts.of(self._settings['parts'])

    @property
    def _kernel(self) -> kernel.Kernel:
        return kernel.named(self._settings['kernel'])

    def _memory_directory(self) -> pathlib.Path:
        # The node's memory is an unlinked file here. In a container there
        # may be hardly any shared memory, and a node that finds the file
        # system full dies of SIGBUS.
        shared = pathlib.Path('/dev/shm')
        try:
            free = shutil.disk_usage(shared).free
        except FileNotFoundError:
            free = 0
        wanted = sizes.parse(self._settings['memory'])
        return shared if free > 1.1 * wanted else self.directory

    @property
    def _cpu(self) -> int:
        # A node has one CPU, but every system call and page fault in it
        # passes between two processes of the machine. Kept on one CPU they
        # do that twice as fast as across two.
        usable = sorted(os.sched_getaffinity(0))
        return usable[(self._layout.node_number(self.name) - 1)
                      % len(usable)]

    @property
    def _mac(self) -> str:
        # A new one at each boot would not be believed: the others remember
        # the old one for a minute.
        number = self._layout.node_number(self.name)
        return f'02:00:00:00:00:{number:02x}'

    @property
    def _block_size(self) -> int:
        """Bytes of a logical block of its disks."""
        return self._settings['block_sizes'].get(self.name, 512)

    def _disks(self) -> tuple[node_services.Disk, ...]:
        return node_services.disks(self._settings['disk_size'], self._part)

    def _wait_for_agent(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while True:
            if not self.powered:
                raise errors.StartFailed(
                    f'node "{self.name}"', 'its kernel ended',
                    self.console_log, processes.tail(self.console_log))
            if self.listens(self.address, agent.PORT):
                self.agent.request(do='ping')
                return
            if time.monotonic() > deadline:
                raise errors.StartFailed(
                    f'node "{self.name}"',
                    f'its agent did not answer within {timeout:g} s',
                    self.console_log, processes.tail(self.console_log))
            time.sleep(0.05)
