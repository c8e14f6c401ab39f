# SPDX-License-Identifier: Apache-2.0
"""Exports through tgt or LIO: of source copies, and of whole volumes.

The export of a source copy belongs to one move: it has an IQN and a CHAP
secret of its own, admits the one initiator of the destination and refuses
writes.
"""

from collections.abc import Callable
from collections.abc import Iterable
import functools
import os
import re
from typing import Any

from cinder import context
from cinder.volume.targets import iscsi
from cinder.volume import volume_utils
from oslo_concurrency import lockutils
from oslo_privsep import comm
from oslo_utils import fileutils
from oslo_utils import importutils
import rtslib_fb

from cinder_localstor import exception
from cinder_localstor.node import commands
from cinder_localstor.node import interface
from cinder_localstor.node import lio
from cinder_localstor.node import secrets
from cinder_localstor.node import tgt

# An IQN must not be reused by anything else: the name says whose it is, and
# the node's udev rules know the destination's disks by it.
PREFIX = 'localstor-'

EXPORT_NAME = re.compile(re.escape(PREFIX) + r'(?P<move_id>[0-9a-f-]{36})')


def parse_targets(text: str) -> set[str]:
    """Ids of the moves that are named in a list of targets.

    :param text: names of targets; others' and anything else are passed over
    """
    return {match['move_id'] for match in EXPORT_NAME.finditer(text)}


class _IscsiTarget(interface.SourceTarget):
    """What tgt and LIO have in common."""

    lun: int

    def __init__(self, configuration: Any, command: commands.Commands
                 ) -> None:
        self._configuration = configuration
        self._command = command

    def portal(self) -> str:
        return '%s:%d' % (
            volume_utils.sanitize_host(
                self._configuration.target_ip_address),
            self._configuration.target_port)

    def _iqn(self, move_id: str) -> str:
        return self._configuration.target_prefix + PREFIX + move_id

    def describe(self, move_id: str, initiator: str, address: str
                 ) -> interface.Export:
        return interface.Export(
            portal=self.portal(),
            iqn=self._iqn(move_id),
            lun=self.lun, serial=move_id,
            initiator=initiator, address=address,
            username=volume_utils.generate_username(),
            password=volume_utils.generate_password())


class TgtSourceTarget(_IscsiTarget):
    """Exports through tgtd.

    tgtd is told of them and of nothing that outlives it: one that starts
    before the handle is there would offer a target without a disk, and the
    destination's reads would fail instead of waiting.
    """

    lun = tgt.LUN

    def warm_up(self) -> None:
        self.exported()

    def export(self, move_id: str, device: str, export: interface.Export
               ) -> None:
        secrets.hide(export.iqn, export.password)
        for target in self._targets(move_id):
            if target.is_whole:
                return
            tgt.remove(self._command, target)
        tgt.make(self._command, export, device)

    def unexport(self, move_id: str) -> None:
        # An earlier version was in the middle of an export.
        fileutils.delete_if_exists(os.path.join(
            self._configuration.volumes_dir, PREFIX + move_id))
        for target in self._targets(move_id):
            tgt.remove(self._command, target)
        secrets.forget(self._iqn(move_id))

    def _targets(self, move_id: str) -> list[tgt.Target]:
        return [target for target in tgt.targets(self._command)
                if parse_targets(target.iqn) == {move_id}]

    def exported(self) -> set[str]:
        return parse_targets(' '.join(
            target.iqn for target in tgt.targets(self._command)
            if target.is_whole))

    def remains(self) -> set[str]:
        return parse_targets(' '.join(
            target.iqn for target in tgt.targets(self._command)))


class LioSourceTarget(_IscsiTarget):
    """Exports through the kernel's target (LIO)."""

    lun = lio.LUN

    def warm_up(self) -> None:
        self._ask(lio.prepare)

    def export(self, move_id: str, device: str, export: interface.Export
               ) -> None:
        secrets.hide(export.iqn, export.password)
        self._ask(lio.export, export, device)

    def unexport(self, move_id: str) -> None:
        for iqn in lio.remains():
            if iqn.endswith(PREFIX + move_id):
                self._ask(lio.unexport, iqn)
        secrets.forget(self._iqn(move_id))

    def _ask(self, function: Callable[..., None], *arguments: Any) -> None:
        """:raises CommandFailed: LIO can't, or does not answer in time"""
        try:
            function(*arguments)
        except (rtslib_fb.RTSLibError, OSError, comm.PrivsepTimeout,
                lockutils.AcquireLockFailedException) as error:
            raise exception.CommandFailed(
                command='rtslib: ' + function.__name__,
                host=self._command.host,
                reason=str(error) or type(error).__name__) from error

    def exported(self) -> set[str]:
        return parse_targets(' '.join(lio.targets()))

    def remains(self) -> set[str]:
        return parse_targets(' '.join(lio.remains()))


SOURCE_TARGETS = {'tgtadm': TgtSourceTarget, 'lioadm': LioSourceTarget}
# Cinder's target drivers
REMOTE_TARGETS = {'tgtadm': 'cinder.volume.targets.tgt.TgtAdm',
                  'lioadm': 'cinder.volume.targets.lio.LioAdm'}


def source_target(configuration: Any, command: commands.Commands
                  ) -> interface.SourceTarget:
    """The exporter that the option target_helper names."""
    try:
        kind = SOURCE_TARGETS[configuration.target_helper]
    except KeyError as error:
        raise exception.LocalStorException(
            reason="target_helper = %s can't export moving volumes; set it "
                   'to one of %s.' % (configuration.target_helper,
                                      ', '.join(SOURCE_TARGETS))) from error
    return kind(configuration, command)


class CinderRemoteTarget(interface.RemoteTarget):
    """Ordinary connections by Cinder's target driver."""

    def __init__(self, configuration: Any) -> None:
        self._configuration = configuration

    @functools.cache
    def _driver(self) -> Any:
        # Not before it is needed: that of LIO runs a command to look whether
        # it can work.
        return importutils.import_object(
            REMOTE_TARGETS[self._configuration.target_helper],
            configuration=self._configuration)

    def check(self) -> None:
        self._driver()

    def export(self, ctxt: context.RequestContext, volume: Any, device: str
               ) -> dict[str, str]:
        data = self._driver().create_export(ctxt, volume, device)
        return {'provider_location': data['location'],
                'provider_auth': data['auth']}

    def ensure(self, ctxt: context.RequestContext, volume: Any, device: str,
               connectors: Iterable[dict[str, Any]]) -> None:
        # Cinder's driver of LIO does nothing where there is any target, a
        # move's too.  Where there is none it restores what it has once saved:
        # the exports of moves that have ended since among that.
        iscsi.ISCSITarget.ensure_export(self._driver(), ctxt, volume, device)
        for connector in connectors:
            self._driver().initialize_connection(volume, connector)

    def unexport(self, ctxt: context.RequestContext, volume: Any) -> None:
        self._driver().remove_export(ctxt, volume)

    def connect(self, volume: Any, connector: dict[str, Any]
                ) -> dict[str, Any]:
        self._driver().validate_connector(connector)
        return self._driver().initialize_connection(volume, connector)

    def disconnect(self, volume: Any, connector: dict[str, Any]) -> None:
        self._driver().terminate_connection(volume, connector)
