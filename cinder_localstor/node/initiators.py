# SPDX-License-Identifier: Apache-2.0
"""Connects source copies through open-iscsi, or by the kernel over NVMe/TCP.

os-brick is asked for the node's name only.  Its connector holds one lock for
all connections of a node while it logs in, and has six minutes of patience
with a source that goes away in the middle: nothing else could be attached on
the node meanwhile (hazard H9).  It would also flush a disk that is never
written, and take the source node on top of it for a multipath device of its
own.
"""

import abc
from collections.abc import Callable
import dataclasses
import functools
import glob
import ipaddress
import os
import socket

from cinder.volume import volume_utils
from oslo_privsep import comm
import psutil
import tenacity

from cinder_localstor import exception
from cinder_localstor.node import commands
from cinder_localstor.node import fabrics
from cinder_localstor.node import interface
from cinder_localstor.node import secrets

LOGGED_IN = 'LOGGED_IN'
SESSIONS = '/sys/class/iscsi_session'
# Seconds to wait for the portal before open-iscsi is asked, and for the disk
# after it has logged in
PORTAL_TIMEOUT = 3
DISK_TIMEOUT = 10
# How often iscsid tries again to log in for the first time, see iscsid.conf:
# each time takes up to 15 s by default, and whoever has called tries again.
LOGIN_RETRIES = 1
# What iscsiadm ends with, done or not, when the record of another target is
# removed while it reads all of them (ISCSI_ERR_IDBM, usr/iscsi_err.c of
# open-iscsi), and how often that is taken for a reason to run it again
RECORD_WENT = 'iSCSI database failure'
RECORD_ATTEMPTS = 10
# Of NVMe/TCP: seconds until a source that does not answer counts as away,
# between two tries to connect again, and that requests wait meanwhile
KEEP_ALIVE = 5
RECONNECT_DELAY = 2
FAIL_AFTER = 10
# Of one controller; by default there are as many as processors
QUEUES = 4


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


def knock(export: interface.Export, host: str) -> None:
    """Look whether anybody is at the portal of an export.

    :param host: this node, for the error
    :raises SourceUnreachable: nobody is
    """
    try:
        socket.create_connection(interface.split_portal(export.portal),
                                 PORTAL_TIMEOUT).close()
    except OSError as error:
        raise exception.SourceUnreachable(
            host=host, iqn=export.iqn, portal=export.portal,
            reason=error) from error


class Connector(abc.ABC):
    """Connects source copies, whatever they are read by."""

    # This node, for errors
    host: str

    @abc.abstractmethod
    def connected(self) -> dict[str, str]:
        """See :meth:`interface.Initiator.connected`."""

    def connect(self, export: interface.Export) -> str:
        """See :meth:`interface.Initiator.connect`."""
        secrets.hide(export.iqn, export.password)
        device = self.connected().get(export.iqn)
        if not device:
            knock(export, self.host)
            self._end_broken(export)
            self._log_in(export)
            device = self._wait_for_disk(export)
        if not device:
            raise self._unreachable(export, 'the session has no disk')
        self._verify(device, export)
        return device

    def disconnect(self, export: interface.Export) -> None:
        """Log out and forget the target, with its secret."""
        self._log_out(export)
        secrets.forget(export.iqn)

    @abc.abstractmethod
    def _end_broken(self, export: interface.Export) -> None:
        """End a session that does not work, if there is one."""

    @abc.abstractmethod
    def _log_in(self, export: interface.Export) -> None:
        """:raises SourceUnreachable: nothing is left of the attempt"""

    @abc.abstractmethod
    def _log_out(self, export: interface.Export) -> None:
        pass

    @abc.abstractmethod
    def _verify(self, device: str, export: interface.Export) -> None:
        """A recycled device name must never pass as the source (H17).

        :raises StaleSession: it is not
        """

    def _wait_for_disk(self, export: interface.Export) -> str | None:
        wait = tenacity.Retrying(
            retry=tenacity.retry_if_result(lambda disk: not disk),
            wait=tenacity.wait_fixed(0.05),
            stop=tenacity.stop_after_delay(DISK_TIMEOUT),
            retry_error_callback=lambda _state: None)
        return wait(lambda: self.connected().get(export.iqn))

    def _unreachable(self, export: interface.Export, reason: str
                     ) -> exception.SourceUnreachable:
        return exception.SourceUnreachable(
            host=self.host, iqn=export.iqn, portal=export.portal,
            reason=reason)


class OpenISCSIInitiator(Connector, interface.Initiator):
    """The open-iscsi initiator of this node."""

    def __init__(self, command: commands.Commands) -> None:
        self.host = socket.gethostname()
        self._command = command

    @functools.cache
    def name(self) -> str:
        return volume_utils.brick_get_connector('ISCSI').get_initiator()

    def addresses(self) -> list[str]:
        found = set()
        for addresses in psutil.net_if_addrs().values():
            for address in addresses:
                if address.family in (socket.AF_INET, socket.AF_INET6):
                    parsed = ipaddress.ip_address(
                        address.address.split('%')[0])
                    if not parsed.is_loopback and not parsed.is_link_local:
                        found.add(str(parsed))
        return sorted(found)

    def address_towards(self, portal: str) -> str:
        address, port = interface.split_portal(portal)
        family = socket.AF_INET6 if ':' in address else socket.AF_INET
        # Nothing is sent: the kernel only chooses the route.
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, port))
            return probe.getsockname()[0]

    def connected(self) -> dict[str, str]:
        return {iqn: session.disk for iqn, session in sessions().items()
                if session.disk and session.state == LOGGED_IN}

    def _end_broken(self, export: interface.Export) -> None:
        # open-iscsi does not get over every loss of a target by itself and
        # fails what waits for it in the end.
        if export.iqn in sessions():
            self._log_out(export)

    def _log_in(self, export: interface.Export) -> None:
        target = _target(export)
        try:
            self._run(*target, '--op', 'new')
            self._run(*target, '--op', 'update',
                      *_assignments(_record(export)))
            self._run(*target, '--login',
                      is_done=lambda: export.iqn in sessions())
        except exception.CommandFailed as error:
            reason = secrets.mask(str(error))
        else:
            return
        # The record holds the secret. The error may not: it goes to the peer.
        self._log_out(export)
        raise self._unreachable(export, reason)

    @tenacity.retry(
        retry=tenacity.retry_if_exception(
            lambda error: RECORD_WENT in str(error)),
        stop=tenacity.stop_after_attempt(RECORD_ATTEMPTS),
        wait=tenacity.wait_random(0, 0.2), reraise=True)
    def _run(self, *arguments: str,
             is_done: Callable[[], bool] = lambda: False) -> None:
        """Run iscsiadm, and again when others disturb it.

        :param is_done: whether it has done its work, so that to run it again
            would fail
        """
        try:
            self._command.run(*arguments)
        except exception.CommandFailed as error:
            if RECORD_WENT not in str(error) or not is_done():
                raise

    def _verify(self, device: str, export: interface.Export) -> None:
        # That the disk hangs on the session of the move's own IQN is known
        # from sysfs; its serial number is the move's id.
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

    def _log_out(self, export: interface.Export) -> None:
        target = _target(export)
        if export.iqn in sessions():
            self._run(*target, '--logout',
                      is_done=lambda: export.iqn not in sessions())
        try:
            # Without a session too: it would be logged in to at the next
            # boot, and it holds the secret.
            self._run(*target, '--op', 'delete')
        except exception.CommandTimedOut:
            raise
        except exception.CommandFailed as error:
            if 'No records found' not in str(error):
                raise


class NvmeInitiator(Connector):
    """Source copies that this node reads over NVMe/TCP.

    A controller never gives its source up by itself: it connects again for as
    long as it is there.  Requests wait for it for some seconds only, and then
    in the source node on top of it, which can be given another disk.
    """

    def __init__(self, command: commands.Commands) -> None:
        self.host = command.host
        self._command = command

    def check(self) -> None:
        """:raises NoTransport: the kernel can't connect so"""
        try:
            self._load()
            known = fabrics.options()
        except (OSError, comm.PrivsepTimeout,
                exception.CommandFailed) as error:
            reason = str(error) or type(error).__name__
        else:
            if 'dhchap_secret' in known:
                return
            reason = ('it does not authenticate to targets '
                      '(CONFIG_NVME_HOST_AUTH)')
        raise exception.NoTransport(
            transport=interface.NVME, host=self.host, reason=reason)

    def _load(self) -> None:
        if not os.path.exists(fabrics.FABRICS):
            self._command.run('modprobe', '--quiet', fabrics.MODULE)

    def connected(self) -> dict[str, str]:
        live = {name for name, controller in fabrics.controllers().items()
                if controller.state == fabrics.LIVE}
        return {name: disk for name, disk in fabrics.disks().items()
                if name in live}

    def _end_broken(self, export: interface.Export) -> None:
        self._log_out(export)

    def _log_in(self, export: interface.Export) -> None:
        address, port = interface.split_portal(export.portal)
        try:
            self._load()
            fabrics.connect(','.join('%s=%s' % option for option in {
                'transport': 'tcp', 'traddr': address, 'trsvcid': port,
                'nqn': export.iqn, 'hostnqn': export.initiator,
                # The kernel wants another one for each host's name.
                'hostid': export.serial,
                'dhchap_secret': export.password,
                'keep_alive_tmo': KEEP_ALIVE,
                'reconnect_delay': RECONNECT_DELAY,
                'ctrl_loss_tmo': -1,
                'fast_io_fail_tmo': FAIL_AFTER,
                'nr_io_queues': QUEUES}.items()))
        except (OSError, comm.PrivsepTimeout,
                exception.CommandFailed) as error:
            # It must not go on by itself.
            self._log_out(export)
            raise self._unreachable(
                export, secrets.mask(str(error) or type(error).__name__)
            ) from error

    def _verify(self, device: str, export: interface.Export) -> None:
        try:
            found = fabrics.uuid(device)
        except OSError as error:
            found = str(error)
        if found != export.serial:
            raise exception.StaleSession(
                device=device, host=self.host, found=found,
                expected=export.serial, iqn=export.iqn)

    def _log_out(self, export: interface.Export) -> None:
        """:raises CommandFailed: the kernel does not in time"""
        controller = fabrics.controllers().get(export.iqn)
        if controller is None:
            return
        try:
            fabrics.remove(controller.name)
        except FileNotFoundError:
            pass  # gone in the meantime
        except (OSError, comm.PrivsepTimeout) as error:
            raise exception.CommandFailed(
                command='delete_controller of ' + controller.name,
                host=self.host,
                reason=str(error) or type(error).__name__) from error


def _target(export: interface.Export) -> tuple[str, ...]:
    return ('iscsiadm', '--mode', 'node', '--targetname', export.iqn,
            '--portal', export.portal)


def _record(export: interface.Export) -> dict[str, str]:
    """What open-iscsi is told of a target; the rest is as iscsid.conf says."""
    return {'node.session.auth.authmethod': 'CHAP',
            'node.session.auth.username': export.username,
            'node.session.auth.password': export.password,
            'node.session.initial_login_retry_max': str(LOGIN_RETRIES),
            'node.session.nr_sessions': '1',
            'node.session.scan': 'auto',
            # As large as the kernel finds it useful (tcp_rmem); 512 KiB, which
            # are open-iscsi's own and cut to net.core.rmem_max, make a line to
            # a source that is far a slow one.
            'node.conn[0].tcp.window_size': '0',
            # The driver logs in after a boot, when it knows what for.
            'node.startup': 'manual'}


def _assignments(settings: dict[str, str]) -> list[str]:
    return [word for name, value in settings.items()
            for word in ('--name', name, '--value', value)]
