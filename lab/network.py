# SPDX-License-Identifier: Apache-2.0
"""The lab's network: a namespace, a bridge, a tap per node, and cuts.

The bridge carries every address of the control plane, so what the services
there say to each other passes the loopback device and what they say to a
node passes the bridge. A cut drops packets silently in both directions; how
depends on where the two ends are, see :func:`render_cuts`.
"""

import contextlib
import ctypes
import itertools
import json
import os
import socket
import subprocess
from typing import Iterator

from lab import errors
from lab import layout

BRIDGE = 'lab0'
_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)

Cut = tuple[str, str]


def tap_name(node: str) -> str:
    """Name of a node's network device on the lab's side."""
    return f'{node}-tap'


def render_cuts(cuts: list[Cut], place: layout.Layout) -> str:
    """The packet filter that makes these cuts, as one nft transaction.

    Two nodes meet in the bridge's forward hook, a node and the control plane
    in the IP layer's input and output. Two places of the control plane
    share a machine: the kernel gives a connection between local addresses
    the *destination's* address on both ends, so there the only thing to go by
    is that the service's address is spoken to over loopback.
    """
    forward = []
    local = []
    for pair in cuts:
        addresses = [place.address(end) for end in pair]
        in_control = [end for end in pair if end in layout.PLACES]
        if not in_control:
            for source, destination in itertools.permutations(addresses):
                forward.append(
                    f'ip saddr {source} ip daddr {destination} drop')
            for source, destination in itertools.permutations(
                    map(place.ipv6_address, pair)):
                forward.append(
                    f'ip6 saddr {source} ip6 daddr {destination} drop')
        elif len(in_control) == 1:
            for source, destination in itertools.permutations(addresses):
                local.append(
                    f'ip saddr {source} ip daddr {destination} drop')
        else:
            for end in pair:
                if end != 'control':
                    address = place.address(end)
                    local.append(f'iif lo ip daddr {address} drop')
                    local.append(f'iif lo ip saddr {address} drop')
    lines = ['table bridge lab {}', 'delete table bridge lab',
             'table inet lab {}', 'delete table inet lab']
    if forward:
        lines += ['table bridge lab {', ' chain forward {',
                  '  type filter hook forward priority 0;',
                  *(f'  {rule}' for rule in forward), ' }', '}']
    if local:
        # Input alone would do for packets, but a sender whose packets
        # vanish on the way out learns nothing either.
        incoming = [f'  {rule}' for rule in local]
        outgoing = [f'  {rule}' for rule in local
                    if not rule.startswith('iif')]
        lines += ['table inet lab {', ' chain input {',
                  '  type filter hook input priority 0;', *incoming, ' }',
                  ' chain output {',
                  '  type filter hook output priority 0;', *outgoing, ' }',
                  '}']
    return '\n'.join(lines) + '\n'


class Network:
    """The network of one lab."""

    def __init__(self, place: layout.Layout) -> None:
        self._layout = place
        self._cuts = place.directory / 'cuts.json'

    @property
    def exists(self) -> bool:
        """Whether the namespace is there."""
        return self._layout.namespace_file.exists()

    def create(self) -> None:
        """Make the namespace with its bridge and addresses."""
        name = self._layout.namespace
        _run(['ip', 'netns', 'add', name])
        lines = ['link set lo up', f'link add {BRIDGE} type bridge',
                 f'link set {BRIDGE} up']
        lines += [f'address add {self._layout.address(place)}/'
                  f'{layout.NETWORK.prefixlen} dev {BRIDGE}'
                  for place in layout.PLACES]
        _run(['ip', '-netns', name, '-batch', '-'], '\n'.join(lines))

    def add_node(self, node: str) -> None:
        """Plug a node in; the tap stays when the node is powered off."""
        tap = tap_name(node)
        shown = subprocess.run(
            ['ip', '-netns', self._layout.namespace, 'link', 'show', tap],
            capture_output=True, check=False)
        if shown.returncode == 0:
            return
        _run(['ip', '-netns', self._layout.namespace, '-batch', '-'],
             f'tuntap add mode tap name {tap}\n'
             f'link set {tap} master {BRIDGE} up\n')

    def delete(self) -> None:
        """Remove the namespace and all that is in it."""
        if self.exists:
            _run(['ip', 'netns', 'delete', self._layout.namespace])

    def members(self) -> list[int]:
        """Every process that runs in the namespace."""
        if not self.exists:
            return []
        found = _run(['ip', 'netns', 'pids', self._layout.namespace])
        return [int(pid) for pid in found.split()]

    def wrap(self, argv: list[str]) -> list[str]:
        """The command that runs this one inside the namespace."""
        return ['nsenter', f'--net={self._layout.namespace_file}', '--',
                *argv]

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Put the calling thread into the namespace for a while.

        A socket belongs for ever to the namespace it was made in, so it is
        enough to make it in here.
        """
        with open('/proc/thread-self/ns/net') as before, \
                open(self._layout.namespace_file) as ours:
            _set_namespace(ours.fileno())
            try:
                yield
            finally:
                _set_namespace(before.fileno())

    def connect(self, address: str, port: int,
                timeout: float | None = None) -> socket.socket:
        """A TCP connection to an address of the lab, never cut."""
        with self.entered():
            connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(timeout)
            connection.bind((self._layout.address('console'), 0))
            connection.connect((address, port))
        except BaseException:
            connection.close()
            raise
        return connection

    @property
    def cuts(self) -> list[Cut]:
        """The cuts in force."""
        try:
            return [(first, second) for first, second
                    in json.loads(self._cuts.read_text())]
        except FileNotFoundError:
            return []

    def cut(self, first: str, second: str) -> None:
        """Let nothing pass between two places any more."""
        if first == second:
            raise errors.LabError(f'"{first}" cannot be cut from itself.')
        pair = (min(first, second), max(first, second))
        if pair == ('database', 'rabbitmq'):
            raise errors.LabError(
                'The database and rabbitmq never speak to each other: cut '
                'one of them from "control" or from a node.')
        self._apply(sorted({*self.cuts, pair}))

    def heal(self) -> None:
        """Remove every cut."""
        self._apply([])

    def _apply(self, cuts: list[Cut]) -> None:
        _run(self.wrap(['nft', '-f', '-']), render_cuts(cuts, self._layout))
        self._cuts.write_text(json.dumps(cuts))


def _set_namespace(descriptor: int) -> None:
    if _libc.setns(descriptor, _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _run(argv: list[str], script: str | None = None) -> str:
    done = subprocess.run(argv, input=script, capture_output=True, text=True,
                          check=False)
    if done.returncode:
        raise errors.CommandFailed('this machine', argv, done.returncode,
                                   done.stdout, done.stderr)
    return done.stdout
