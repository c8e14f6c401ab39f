# SPDX-License-Identifier: Apache-2.0
"""From a connector to the peer whose node it comes from.

Nova's, Cinder's and the kernel's idea of a host's name may all differ
(hazard H19), so a connector is matched by what the operator says, by name,
and by the addresses and names that the peers tell of themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
from concurrent import futures
import dataclasses
import ipaddress
import math
import socket
import time
from typing import Any

from cinder.common import constants
from cinder import context
from cinder import exception as cinder_exception
from cinder import objects
from oslo_log import log as logging

from cinder_localstor import exception

LOG = logging.getLogger(__name__)

Names = frozenset[str]
# Of a backend, and its volume group: what the capabilities of ours say
LOCATION = 'LocalStorDriver:%s:%s'
# Seconds that what a peer said of itself is believed
IDENTITY_LIFETIME = 300
# Seconds that a peer is not asked again that did not answer
SILENCE = 30
# Most of them take no time, and a few all of theirs.
ASKED_AT_ONCE = 16


def own_identity(known: tuple[str, ...] = ()) -> list[str]:
    """Names and addresses that a connector from this node may carry.

    :param known: those that it is known to have, with its addresses
    """
    names = {socket.gethostname(), socket.getfqdn(), *known}
    return sorted(name for name in names
                  if name and not name.startswith('localhost'))


def _backend(host: str) -> str:
    """What all peers have in common: ``@backend``, or nothing."""
    return ''.join(host.partition('@')[1:])


def _as_told(name: str) -> str:
    """A name as it is, an address as :func:`own_identity` has it: of IPv6
    there are many ways to write one.
    """
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        return name


def down(ctxt: context.RequestContext) -> set[str]:
    """Hosts of the volume services that are down."""
    return {service.host for service in _all(ctxt) if not service.is_up}


def _all(ctxt: context.RequestContext) -> objects.ServiceList:
    return objects.ServiceList.get_all(
        ctxt.elevated(), {'binary': constants.VOLUME_BINARY})


def service(ctxt: context.RequestContext, host: str
            ) -> objects.Service | None:
    """The volume service with a host, None if there is none.

    A cloud has as many as it has nodes, and they are asked for at each
    connection.
    """
    try:
        found = objects.Service.get_by_args(ctxt.elevated(), host,
                                            constants.VOLUME_BINARY)
    except cinder_exception.ServiceNotFound:
        return None
    # Cinder looks for a pattern, too, which a connector may have in its name.
    return found if found.host == host else None


@dataclasses.dataclass(frozen=True)
class _Identity:
    """What a peer said of itself last; it is not asked again before `until`,
    by the monotonic clock.
    """

    names: Names = frozenset()
    until: float = -math.inf


class Directory:
    """Finds the peers of a backend."""

    def __init__(self, host: str, host_map: dict[str, str],
                 ask: Callable[[str], list[str]]) -> None:
        """:param host: ``host@backend`` of this node, or ``host``
        :param host_map: hosts of volume services by connector host or ip
        :param ask: what a peer says of itself, see :func:`own_identity`
        """
        self.host = host
        self._backend = _backend(host)
        self._host_map = host_map
        self._ask = ask
        self._identities: dict[str, _Identity] = {}

    def services(self, ctxt: context.RequestContext
                 ) -> dict[str, objects.Service]:
        """All volume services with this backend by ``host@backend``."""
        return {found.host: found for found in _all(ctxt)
                if _backend(found.host) == self._backend}

    def find(self, ctxt: context.RequestContext, connector: dict[str, Any]
             ) -> str | None:
        """The ``host@backend`` that a connector comes from, None for none.

        :raises InvalidConnector: it names neither a host nor an address
        """
        wanted = [value for value in (connector.get('host'),
                                      connector.get('ip')) if value]
        if not wanted:
            raise exception.InvalidConnector()
        silent = None
        for value in wanted:
            peer = self._host_map.get(value, value) + self._backend
            found = (service(ctxt, peer) if _backend(peer) == self._backend
                     else None)
            if found and self._answers(found):
                return peer
            silent = silent or (found and peer)
        # Whoever is down may be what is left of a service that has got another
        # name since.
        return self._find_by_identity(set(map(_as_told, wanted)), {
            peer for peer, found in self.services(ctxt).items()
            if self._answers(found)}) or silent

    def _answers(self, found: objects.Service) -> bool:
        return bool(found.is_up or found.host == self.host)

    def _find_by_identity(self, wanted: set[str], peers: set[str]
                          ) -> str | None:
        """The one of some peers that answers to a name or an address.

        Who did before is asked alone, and the others only if it was another.
        """
        known = {peer for peer in peers
                 if wanted.intersection(self._identity(peer).names)}
        for asked in (known, peers - known):
            for peer, names in self._ask_all(asked):
                if wanted.intersection(names):
                    return peer
        return None

    def _identity(self, peer: str) -> _Identity:
        return self._identities.get(peer, _Identity())

    def _ask_all(self, peers: set[str]) -> Iterator[tuple[str, Names]]:
        """What peers say of themselves, as soon as each has said it."""
        now = time.monotonic()
        old = [peer for peer in sorted(peers)
               if self._identity(peer).until <= now]
        for peer in peers.difference(old):
            yield peer, self._identity(peer).names
        if not old:
            return
        pool = futures.ThreadPoolExecutor(min(len(old), ASKED_AT_ONCE))
        try:
            asked = {pool.submit(self._ask_one, peer): peer for peer in old}
            for answer in futures.as_completed(asked):
                yield asked[answer], answer.result()
        finally:
            # Whoever is found needs no answer of the others.
            pool.shutdown(wait=False, cancel_futures=True)

    def _ask_one(self, peer: str) -> Names:
        names, lifetime = self._identity(peer).names, SILENCE
        try:
            names, lifetime = frozenset(self._ask(peer)), IDENTITY_LIFETIME
        except exception.LocalStorException as error:
            LOG.warning('%s', error)
        self._identities[peer] = _Identity(names,
                                           time.monotonic() + lifetime)
        return names
