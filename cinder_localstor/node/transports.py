# SPDX-License-Identifier: Apache-2.0
"""How the data of a move travels: over iSCSI or over NVMe/TCP.

The option localstor_transport says what moves that begin now get.  A move
keeps what it began with, and is told by the name of its target; so both are
there whatever the option says.
"""

from collections.abc import Callable
from collections.abc import Collection

from oslo_log import log as logging

from cinder_localstor import exception
from cinder_localstor.node import initiators
from cinder_localstor.node import interface

LOG = logging.getLogger(__name__)

AUTO = 'auto'


class SourceTargets(interface.SourceTarget):
    """Exports over what both nodes of a move have."""

    def __init__(self, choice: str, iscsi: interface.SourceTarget,
                 over_nvme: interface.SourceTarget) -> None:
        """:param choice: as the option localstor_transport has it"""
        self._choice = choice
        self._iscsi = iscsi
        self._nvme = over_nvme
        self._offers_nvme = False

    def check(self) -> None:
        self._offers_nvme = _has_nvme(self._choice, self._nvme.check)

    def warm_up(self) -> None:
        self._iscsi.warm_up()

    def portal(self) -> str:
        return self._iscsi.portal()

    def describe(self, move_id: str, initiator: str, address: str,
                 transports: Collection[str] = (interface.ISCSI,)
                 ) -> interface.Export:
        target = (self._nvme if self._offers_nvme
                  and interface.NVME in transports else self._iscsi)
        return target.describe(move_id, initiator, address, transports)

    def export(self, move_id: str, device: str, export: interface.Export
               ) -> None:
        self._of(export).export(move_id, device, export)

    def unexport(self, move_id: str) -> None:
        is_over_nvme = move_id in self._nvme.remains()
        self._nvme.unexport(move_id)
        if not is_over_nvme:
            self._iscsi.unexport(move_id)

    def exported(self) -> set[str]:
        return self._iscsi.exported() | self._nvme.exported()

    def remains(self) -> set[str]:
        return self._iscsi.remains() | self._nvme.remains()

    def nodes(self, export: interface.Export) -> tuple[str, ...]:
        return self._of(export).nodes(export)

    def _of(self, export: interface.Export) -> interface.SourceTarget:
        return (self._nvme if export.transport == interface.NVME
                else self._iscsi)


class Initiators(interface.Initiator):
    """Connects sources over what their exports say."""

    def __init__(self, choice: str, iscsi: initiators.OpenISCSIInitiator,
                 over_nvme: initiators.NvmeInitiator) -> None:
        """:param choice: as the option localstor_transport has it"""
        self._choice = choice
        self._iscsi = iscsi
        self._nvme = over_nvme
        self._transports: tuple[str, ...] = (interface.ISCSI,)

    def check(self) -> None:
        if _has_nvme(self._choice, self._nvme.check):
            self._transports = (interface.NVME, interface.ISCSI)

    def transports(self) -> tuple[str, ...]:
        return self._transports

    def name(self) -> str:
        return self._iscsi.name()

    def addresses(self) -> list[str]:
        return self._iscsi.addresses()

    def address_towards(self, portal: str) -> str:
        return self._iscsi.address_towards(portal)

    def connect(self, export: interface.Export) -> str:
        return self._of(export).connect(export)

    def connected(self) -> dict[str, str]:
        return self._iscsi.connected() | self._nvme.connected()

    def disconnect(self, export: interface.Export) -> None:
        self._of(export).disconnect(export)

    def _of(self, export: interface.Export) -> initiators.Connector:
        return (self._nvme if export.transport == interface.NVME
                else self._iscsi)


def _has_nvme(choice: str, check: Callable[[], None]) -> bool:
    """Whether moves that begin now may be over NVMe/TCP.

    :raises NoTransport: they should be, and can't
    """
    if choice == interface.ISCSI:
        return False
    try:
        check()
    except exception.NoTransport as error:
        if choice != AUTO:
            raise
        LOG.info('Volumes move over iSCSI: %s', error)
        return False
    return True
