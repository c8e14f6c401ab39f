# SPDX-License-Identifier: Apache-2.0
"""Names, paths and addresses of one lab.

Everything that could collide with another lab on the same machine is derived
here from the lab's name and the repository it belongs to.
"""

import hashlib
import ipaddress
import pathlib
import re
import sys

from lab import errors

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
NETWORK = ipaddress.ip_network('10.77.0.0/24')
# Of nodes alone: a unique local one (RFC 4193)
IPV6_NETWORK = ipaddress.ip_network('fd77::/64')
MAX_NODES = 64

# Host part of the address of each place in the control plane. "console" is
# where the lab itself speaks from when it talks to a node: no cut ever
# touches it, so a node that is cut off from everything can be watched.
PLACES = {'control': 1, 'rabbitmq': 2, 'database': 3, 'console': 254}
FIRST_NODE = 11

_NAME = re.compile(r'[a-z0-9][a-z0-9-]{0,31}')
_RESERVED = ('cache',)
# These end a word or an option on a kernel command line or in mount options.
_UNSAFE = re.compile(r'[\s,:\\"\'$`]')


class Layout:
    """Where one lab keeps its things and what they are called."""

    def __init__(self, name: str = 'default',
                 repository: pathlib.Path = REPOSITORY) -> None:
        if not _NAME.fullmatch(name) or name in _RESERVED:
            raise errors.LabError(
                f'"{name}" is no name for a lab: use up to 32 lower case '
                f'letters, digits and "-", and none of '
                f'{", ".join(_RESERVED)}.')
        if _UNSAFE.search(str(repository)):
            raise errors.LabError(
                f'The lab cannot run from "{repository}": a node takes the '
                f'path on its kernel command line, so it must have no '
                f'blanks, commas, colons, quotes, "$" or "\\".')
        self.name = name
        self.repository = repository
        seed = f'{repository}\0{name}'.encode()
        self.identity = hashlib.sha256(seed).hexdigest()[:8]
        self.namespace = f'localstor-{self.identity}'
        self.directory = repository / '.lab' / name
        self.cache = repository / '.lab' / 'cache'
        self.lock = repository / '.lab' / f'{name}.lock'
        # Sockets go here: their paths are limited to 107 characters, and
        # nobody knows how deep the repository lies.
        self.runtime = pathlib.Path('/run/cinder-localstor-lab',
                                    self.identity)
        self.logs = self.directory / 'logs'
        self.processes = self.directory / 'processes'
        self.environment = pathlib.Path(sys.prefix)

    def address(self, place: str) -> str:
        """Address of a node or of a place in the control plane."""
        if place in PLACES:
            return str(NETWORK[PLACES[place]])
        number = self.node_number(place)
        return str(NETWORK[FIRST_NODE + number - 1])

    def ipv6_address(self, node: str) -> str:
        """Further address of a node."""
        return str(IPV6_NETWORK[FIRST_NODE + self.node_number(node) - 1])

    @staticmethod
    def node_name(number: int) -> str:
        """Name of the node with this number; numbers begin with 1."""
        return f'node{number}'

    @staticmethod
    def node_number(name: str) -> int:
        """Number of the node with this name."""
        match = re.fullmatch(r'node([1-9][0-9]?)', name)
        if not match or int(match[1]) > MAX_NODES:
            raise errors.NotFound(
                f'There is no "{name}" in a lab: places are '
                f'{", ".join(p for p in PLACES if p != "console")}, '
                f'node1, node2 and so on.')
        return int(match[1])

    def node_directory(self, name: str) -> pathlib.Path:
        """State of one node: its disks, configuration and boot script."""
        return self.directory / 'nodes' / name

    def log(self, place: str, service: str) -> pathlib.Path:
        """Log file of a service in a place."""
        return self.logs / place / f'{service}.log'

    @property
    def namespace_file(self) -> pathlib.Path:
        """The file that stands for the lab's network namespace."""
        return pathlib.Path('/run/netns', self.namespace)
