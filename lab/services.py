# SPDX-License-Identifier: Apache-2.0
"""What a service of the lab is, declared.

A service says what it runs, which files it needs, when it is ready, what it
waits for and how it ends. The control plane and the nodes each have a list
of them; adding Glance or another target daemon is adding a declaration.
"""

import dataclasses
import pathlib
import signal
from typing import Any
from typing import Callable
from typing import Iterable
from typing import Mapping

from lab import errors
from lab import layout

Options = Mapping[str, Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a service runs: the control plane, or one node."""

    name: str
    address: str
    directory: pathlib.Path
    layout: layout.Layout
    # Sections of the OpenStack configuration the user of the lab set.
    options: Options = dataclasses.field(default_factory=dict)
    # Those of a node
    backends: 'tuple[Backend, ...]' = ()
    # The user that cinder-volume runs as, or nobody but root
    account: str = ''
    # What is put around the command of cinder-volume, one after another
    around: 'tuple[Around, ...]' = ()

    @property
    def binaries(self) -> pathlib.Path:
        """Commands of the Python environment."""
        return self.layout.environment / 'bin'

    def log(self, service: str) -> pathlib.Path:
        """Log file of a service here."""
        return self.layout.log(self.name, service)

    @property
    def environment(self) -> dict[str, str]:
        """What every process here finds in its environment."""
        return {'PATH': f'{self.binaries}:/usr/local/sbin:/usr/local/bin:'
                        '/usr/sbin:/usr/bin:/sbin:/bin',
                'LANG': 'C.UTF-8', 'HOME': '/root',
                'PYTHONWARNINGS': 'ignore'}


# A command, and the same in other surroundings
Around = Callable[[Place, list[str]], list[str]]


@dataclasses.dataclass(frozen=True)
class Backend:
    """What a node's cinder-volume has on some disks, and its volume type."""

    name: str
    options: Callable[[Place], Mapping[str, Any]]
    # Whether its volume group has a thin pool
    thin: bool = False
    # Of how many the group is made
    disks: int = 1

    @property
    def group(self) -> str:
        """The volume group on its disks."""
        return f'cinder-{self.name}'


@dataclasses.dataclass(frozen=True)
class Link:
    """A symbolic link among the files of a service."""

    target: str


@dataclasses.dataclass(frozen=True)
class Api:
    """An API as Keystone's catalog has it, and the user of its service."""

    name: str
    type: str
    url: Callable[[layout.Layout], str]


@dataclasses.dataclass(frozen=True)
class Setup:
    """A command that fills empty databases, once for all later labs."""

    name: str
    command: Callable[[Place], list[str]]
    after: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Account:
    """A user of the system on a node, with a group of that name."""

    name: str
    number: int


def nothing(place: Place) -> dict[str, Any]:
    """Of files or environment: none."""
    return {}


@dataclasses.dataclass(frozen=True)
class Service:
    """One long-running process."""

    name: str
    command: Callable[[Place], list[str]]
    # Without one it is ready if it is still there.
    ready: 'Callable[[Place], Probe] | None' = None
    environment: Callable[[Place], Mapping[str, str]] = nothing
    # Absolute path -> text. In a node a path of its root file system, in
    # the control plane one below the lab's directory.
    files: Callable[[Place], Mapping[str, str | Link]] = nothing
    after: tuple[str, ...] = ()
    # Commands run once the service is ready, before who waits for it.
    follow_up: Callable[[Place], list[list[str]]] = lambda place: []
    # Called on this machine just before the start.
    prepare: Callable[[Place], None] | None = None
    stop_signal: int = signal.SIGTERM
    stop_timeout: float = 15
    start_timeout: float = 90
    # Of one in a node: so often it is started once more when it says that it
    # can't work.
    restarts: int = 0


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of the cloud: all that is there for one purpose.

    What it needs of this machine is a program's path -> the Debian package
    that has it.
    """

    # On the control plane
    programs: Mapping[str, str] = dataclasses.field(default_factory=dict)
    control: tuple[Service, ...] = ()
    databases: tuple[str, ...] = ()
    # Those of a part may wait for each other and for those before it.
    setup: tuple[Setup, ...] = ()
    # Python packages and files of the lab that shape the databases
    packages: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    apis: tuple[Api, ...] = ()
    # In the nodes
    nodes: tuple[Service, ...] = ()
    backends: tuple[Backend, ...] = ()
    # Directories that outlive a power cut, on a disk of this many bytes
    kept: tuple[str, ...] = ()
    state_size: int = 0
    # Of a node that nobody wants to be smaller or larger, in bytes
    memory: int = 0
    accounts: tuple[Account, ...] = ()
    # The one of them that cinder-volume runs as, or nobody but root
    account: str = ''
    around: tuple[Around, ...] = ()
    files: Callable[[Place], Mapping[str, str | Link]] = nothing

    def __add__(self, other: 'Part') -> 'Part':
        """Both of them in one cloud."""
        return Part(
            programs={**self.programs, **other.programs},
            control=self.control + other.control,
            databases=self.databases + other.databases,
            setup=self.setup + other.setup,
            packages=self.packages + other.packages,
            sources=self.sources + other.sources,
            apis=self.apis + other.apis,
            nodes=self.nodes + other.nodes,
            backends=self.backends + other.backends,
            kept=self.kept + other.kept,
            state_size=max(self.state_size, other.state_size),
            memory=max(self.memory, other.memory),
            accounts=self.accounts + other.accounts,
            account=self.account or other.account,
            around=self.around + other.around,
            files=lambda place: {**self.files(place), **other.files(place)})


@dataclasses.dataclass(frozen=True)
class Probe:
    """How to tell that a service is ready; what is given must hold."""

    # Something accepts connections at this address and port.
    listens: tuple[str, int] | None = None
    # Its log has this in so many lines since the last start.
    says: str | None = None
    times: int = 1
    # A line of the log with this means that it will never be ready.
    fails: str | None = None

    def judge(self, log: pathlib.Path, since: int,
              connects: Callable[[str, int], bool]) -> bool:
        """Whether it holds; the log counts from this offset on."""
        if self.says or self.fails:
            try:
                with open(log, 'rb') as file:
                    file.seek(since)
                    text = file.read().decode(errors='replace')
            except FileNotFoundError:
                return False
            if self.fails and self.fails in text:
                raise NeverReady(f'its log says "{self.fails}"')
            if self.says and text.count(self.says) < self.times:
                return False
        return self.listens is None or connects(*self.listens)


class NeverReady(Exception):
    """A service has said that it cannot work."""


def named(services: Iterable[Service], name: str) -> Service:
    """The declaration with this name."""
    services = list(services)
    for service in services:
        if service.name == name:
            return service
    raise errors.NotFound(
        f'There is no service "{name}" here, but '
        f'{", ".join(service.name for service in services)}.')


def render_ini(sections: Options) -> str:
    """An oslo.config file; None leaves an option at its default."""
    lines = []
    for section, options in sections.items():
        lines.append(f'[{section}]')
        for option, value in options.items():
            if value is None:
                continue
            values = value if isinstance(value, (list, tuple)) else [value]
            lines += [f'{option} = {item}' for item in values]
        lines.append('')
    return '\n'.join(lines)


def merged(*layers: Options) -> dict[str, dict[str, Any]]:
    """Sections laid over each other, the later ones win."""
    result: dict[str, dict[str, Any]] = {}
    for layer in layers:
        for section, options in layer.items():
            result.setdefault(section, {}).update(options)
    return result
