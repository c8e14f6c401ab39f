# SPDX-License-Identifier: Apache-2.0
"""From a connector to the peer whose node it comes from.

Nova's, Cinder's and the kernel's idea of a host's name may all differ
(hazard H19), so a connector is matched by what the operator says, by name,
and by the addresses and names that the peers tell of themselves.
"""

from __future__ import annotations

from collections.abc import Callable
import socket
import time
from typing import Any

from cinder import context
from cinder import objects
from oslo_log import log as logging

from cinder_localstor import exception
from cinder_localstor.node import initiators

LOG = logging.getLogger(__name__)

# Seconds that what a peer said of itself is believed
IDENTITY_LIFETIME = 300


def own_identity(extra: tuple[str, ...] = ()) -> list[str]:
    """Names and addresses that a connector from this node may carry."""
    names = {socket.gethostname(), socket.getfqdn(), *extra,
             *initiators.own_addresses()}
    return sorted(name for name in names
                  if name and not name.startswith('localhost'))


def _backend(host: str) -> str:
    """What all peers have in common: ``@backend``, or nothing."""
    return ''.join(host.partition('@')[1:])


def down(ctxt: context.RequestContext) -> set[str]:
    """Hosts of the volume services that are down."""
    return {service.host for service in objects.ServiceList.get_all(
        ctxt.elevated(), {'binary': 'cinder-volume'}) if not service.is_up}


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
        self._identities: dict[str, tuple[float, list[str]]] = {}

    def services(self, ctxt: context.RequestContext
                 ) -> dict[str, objects.Service]:
        """All volume services with this backend by ``host@backend``."""
        found = objects.ServiceList.get_all(
            ctxt.elevated(), {'binary': 'cinder-volume'})
        return {service.host: service for service in found
                if _backend(service.host) == self._backend}

    def find(self, ctxt: context.RequestContext, connector: dict[str, Any]
             ) -> str | None:
        """The ``host@backend`` that a connector comes from, None for none.

        :raises InvalidConnector: it names neither a host nor an address
        """
        wanted = [value for value in (connector.get('host'),
                                      connector.get('ip')) if value]
        if not wanted:
            raise exception.InvalidConnector()
        services = self.services(ctxt)
        for value in wanted:
            peer = self._host_map.get(value, value) + self._backend
            if peer in services:
                return peer
        for peer, service in services.items():
            if set(wanted) & set(self._identity(peer, service)):
                return peer
        return None

    def _identity(self, peer: str, service: objects.Service) -> list[str]:
        asked, names = self._identities.get(peer, (0.0, []))
        if asked and time.monotonic() - asked < IDENTITY_LIFETIME:
            return names
        if not service.is_up and peer != self.host:
            return names
        try:
            names = self._ask(peer)
        except exception.LocalStorException as error:
            LOG.warning('%s', error)
            return names
        self._identities[peer] = (time.monotonic(), names)
        return names
