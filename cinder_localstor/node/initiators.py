# SPDX-License-Identifier: Apache-2.0
"""Connects source copies through os-brick's iSCSI connector."""

import dataclasses
import functools
import glob
import ipaddress
import os
import socket
from typing import Any

from cinder.volume import volume_utils
from os_brick import exception as brick_exception
from oslo_concurrency import processutils
from oslo_log import log as logging
import psutil

from cinder_localstor import exception
from cinder_localstor.node import commands
from cinder_localstor.node import interface
from cinder_localstor.node import secrets

LOG = logging.getLogger(__name__)

LOGGED_IN = 'LOGGED_IN'
SESSIONS = '/sys/class/iscsi_session'
# Seconds to wait for the portal before open-iscsi is asked: its own patience
# with a dead one is minutes.
PORTAL_TIMEOUT = 3


def parse_serial(page: bytes) -> str:
    """Unit serial number of a vital product data page 0x80 (SPC-4 7.8.15).

    :raises ValueError: the page is too short or another one
    """
    if len(page) < 4 or page[1] != 0x80:
        raise ValueError('no page 0x80')
    length = int.from_bytes(page[2:4], 'big')
    if len(page) < 4 + length:
        raise ValueError('the page is cut short')
    return page[4:4 + length].decode('ascii', 'replace').strip('\0 ')


@dataclasses.dataclass(frozen=True)
class Session:
    """A session as sysfs shows it; `disk` is '' if it has none."""

    disk: str
    state: str


def sessions(root: str = SESSIONS) -> dict[str, Session]:
    """All iSCSI sessions by the target's IQN."""
    found = {}
    for session in glob.glob(os.path.join(root, 'session*')):
        try:
            with open(os.path.join(session, 'targetname')) as file:
                iqn = file.read().strip()
            with open(os.path.join(session, 'state')) as file:
                state = file.read().strip()
        except OSError:
            continue  # gone in the meantime
        disks = glob.glob(os.path.join(session, 'device', 'target*',
                                       '*:*:*:*', 'block', '*'))
        found[iqn] = Session(
            '/dev/' + os.path.basename(disks[0]) if disks else '', state)
    return found


def own_addresses() -> list[str]:
    """The addresses of this node that others can see."""
    found = set()
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family in (socket.AF_INET, socket.AF_INET6):
                parsed = ipaddress.ip_address(address.address.split('%')[0])
                if not parsed.is_loopback and not parsed.is_link_local:
                    found.add(str(parsed))
    return sorted(found)


class BrickInitiator(interface.Initiator):
    """The open-iscsi initiator of this node."""

    def __init__(self, command: commands.Commands) -> None:
        self.host = socket.gethostname()
        self._command = command

    @functools.cached_property
    def _connector(self) -> Any:
        # Made when it is needed: it looks for tools and host adapters.
        return volume_utils.brick_get_connector('ISCSI',
                                                device_scan_attempts=5)

    @functools.cache
    def name(self) -> str:
        return self._connector.get_initiator()

    def address_towards(self, portal: str) -> str:
        address, port = _split(portal)
        family = socket.AF_INET6 if ':' in address else socket.AF_INET
        # Nothing is sent: the kernel only chooses the route.
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, port))
            return probe.getsockname()[0]

    def connected(self) -> dict[str, str]:
        return {iqn: session.disk for iqn, session in sessions().items()
                if session.disk and session.state == LOGGED_IN}

    def connect(self, export: interface.Export) -> str:
        secrets.hide(export.password)
        device = self.connected().get(export.iqn)
        if not device:
            self._knock(export)
            if export.iqn in sessions():
                # open-iscsi does not get over every loss of a target by
                # itself and fails what waits for it in the end.
                self.disconnect(export)
            try:
                self._connector.connect_volume(_properties(export))
            except (brick_exception.BrickException,
                    processutils.ProcessExecutionError) as error:
                raise exception.SourceUnreachable(
                    host=self.host, iqn=export.iqn, portal=export.portal,
                    reason=secrets.mask(str(error))) from error
            device = self.connected().get(export.iqn)
        if not device:
            raise exception.SourceUnreachable(
                host=self.host, iqn=export.iqn, portal=export.portal,
                reason='the session has no disk')
        self._verify(device, export)
        return device

    def _knock(self, export: interface.Export) -> None:
        try:
            socket.create_connection(_split(export.portal),
                                     PORTAL_TIMEOUT).close()
        except OSError as error:
            raise exception.SourceUnreachable(
                host=self.host, iqn=export.iqn, portal=export.portal,
                reason=error) from error

    def _verify(self, device: str, export: interface.Export) -> None:
        """A recycled device name must never pass as the source (H17).

        That the disk hangs on the session of the move's own IQN is known
        from sysfs; a target that can also tells the move's id as serial.
        """
        if not export.serial:
            return
        page = '/sys/class/block/%s/device/vpd_pg80' % os.path.basename(device)
        try:
            with open(page, 'rb') as file:
                serial = parse_serial(file.read())
        except (OSError, ValueError) as error:
            serial = str(error)
        if serial != export.serial:
            raise exception.StaleSession(
                device=device, host=self.host, found=serial,
                expected=export.serial, iqn=export.iqn)

    def disconnect(self, export: interface.Export) -> None:
        """Log out and forget the target.

        Not through os-brick: it would flush a disk that is never written, and
        take the source node on top of it for a multipath device of its own.
        """
        target = ('iscsiadm', '--mode', 'node', '--targetname', export.iqn,
                  '--portal', export.portal)
        if export.iqn in sessions():
            self._command.run(*target, '--logout')
        try:
            # Without a session too: it would be logged in to at the next
            # boot, and it holds the secret.
            self._command.run(*target, '--op', 'delete')
        except exception.CommandTimedOut:
            raise
        except exception.CommandFailed as error:
            if 'No records found' not in str(error):
                raise


def _split(portal: str) -> tuple[str, int]:
    address, port = portal.rsplit(':', 1)
    return address.strip('[]'), int(port)


def _properties(export: interface.Export) -> dict[str, Any]:
    return {'target_discovered': False,
            'target_portal': export.portal,
            'target_iqn': export.iqn,
            'target_lun': export.lun,
            'auth_method': 'CHAP',
            'auth_username': export.username,
            'auth_password': export.password,
            'discard': False}
