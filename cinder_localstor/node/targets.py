# SPDX-License-Identifier: Apache-2.0
"""Exports through tgt, LIO or nvmet: of source copies, and of whole volumes.

The export of a source copy belongs to one move: it has an IQN and a CHAP
secret of its own, admits the one initiator of the destination and refuses
writes.
"""

from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Iterable
import contextlib
import copy
import functools
import glob
import os
import re
from typing import Any

from cinder import context
from cinder.volume.targets import iscsi
from cinder.volume import volume_utils
from oslo_concurrency import lockutils
from oslo_privsep import comm
from oslo_privsep import daemon
from oslo_utils import fileutils
from oslo_utils import importutils
import rtslib_fb

from cinder_localstor import exception
from cinder_localstor.node import commands
from cinder_localstor.node import dmsetup
from cinder_localstor.node import interface
from cinder_localstor.node import lio
from cinder_localstor.node import nvme
from cinder_localstor.node import nvmet
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

    def describe(self, move_id: str, initiator: str, address: str,
                 transports: Collection[str] = (interface.ISCSI,)
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


# A target of device-mapper that can fail writes and let reads through
# (Linux, Documentation/admin-guide/device-mapper/dm-flakey.rst): up for 0
# seconds, down for 1, and so on.
GUARDING_TARGET = 'flakey'
GUARDED = '%s 0 0 1 1 error_writes'
GUARD = '-guard'


def guard_name(move_id: str) -> str:
    """The device-mapper name of the node that is exported over NVMe/TCP."""
    return move_id + GUARD


class NvmeSourceTarget(interface.SourceTarget):
    """Exports over NVMe/TCP, through the kernel's target (nvmet).

    nvmet opens a device for writing or not at all, and lets hosts write it.
    So what it gets is a node of ours on top of the source, its *guard*, that
    fails every write.  A source that is read-only already can be opened for
    nothing else: the guard lies on what the source lies on until nvmet has
    opened it, and nobody is admitted before it lies on the source itself.

    Only kernels that authenticate hosts are used.
    """

    def __init__(self, configuration: Any, command: commands.Commands,
                 device_mapper: dmsetup.DmsetupDeviceMapper) -> None:
        self._configuration = configuration
        self._command = command
        self._device_mapper = device_mapper

    def check(self) -> None:
        """:raises NoTransport: the kernel can't export so"""
        self._load()
        try:
            self._device_mapper.check_target(GUARDING_TARGET)
            with self._one_backend():
                missing = self._ask(nvmet.what_is_missing)
        except exception.LocalStorException as error:
            missing = str(error)
        if missing:
            raise exception.NoTransport(
                transport=interface.NVME, host=self._command.host,
                reason=missing)

    @staticmethod
    def _one_backend() -> contextlib.AbstractContextManager[Any]:
        """One backend of the node at a time; they start together."""
        return lockutils.lock('nvmet', 'cinder-', external=True)

    def _load(self) -> None:
        with contextlib.suppress(exception.CommandFailed):
            # It may be built in.
            self._command.run('modprobe', '--quiet', nvmet.MODULE)

    def warm_up(self) -> None:
        self.exported()

    def portal(self) -> str:
        return '%s:%d' % (
            volume_utils.sanitize_host(self._configuration.target_ip_address),
            self._configuration.localstor_nvme_port)

    def describe(self, move_id: str, initiator: str, address: str,
                 transports: Collection[str] = (interface.NVME,)
                 ) -> interface.Export:
        return interface.Export(
            portal=self.portal(), iqn=nvme.NAME + move_id,
            lun=nvme.NAMESPACE, serial=move_id,
            initiator=nvme.HOST_NAME + move_id, address=address,
            username='', password=nvme.make_secret())

    def export(self, move_id: str, device: str, export: interface.Export
               ) -> None:
        secrets.hide(export.iqn, export.password)
        with _one_at_a_time(move_id):
            if move_id in self.exported():
                return
            if not nvmet.is_there():
                self._load()
            if move_id in self.remains():
                self._take_away(move_id)
            self._put_guard(move_id, device, export)
            # Two that look for a port would make two.
            with self._one_backend():
                self._ask(nvmet.admit, export.iqn,
                          *interface.split_portal(export.portal))

    def _put_guard(self, move_id: str, device: str, export: interface.Export
                   ) -> None:
        guard = guard_name(move_id)
        under = self._device_mapper.table(os.path.basename(device))
        self._device_mapper.create(guard, under)
        self._ask(nvmet.make, export.iqn, self._device_mapper.path(guard),
                  move_id, export.initiator, export.password)
        self._device_mapper.reload(guard, [interface.Segment(
            0, sum(segment.length for segment in under), GUARDING_TARGET,
            GUARDED % device)], read_only=True)

    def unexport(self, move_id: str) -> None:
        if move_id in self.remains():
            with _one_at_a_time(move_id):
                self._take_away(move_id)
        secrets.forget(nvme.NAME + move_id)

    def _take_away(self, move_id: str) -> None:
        self._ask(nvmet.remove, nvme.NAME + move_id, nvme.HOST_NAME + move_id)
        self._device_mapper.remove(guard_name(move_id))

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """:raises CommandFailed: nvmet can't, or does not answer in time"""
        try:
            return function(*arguments)
        except (OSError, comm.PrivsepTimeout,
                daemon.FailedToDropPrivileges) as error:
            raise exception.CommandFailed(
                command='nvmet: ' + function.__name__,
                host=self._command.host,
                reason=secrets.mask(str(error) or type(error).__name__)
            ) from error

    def exported(self) -> set[str]:
        return nvmet.exported()

    def nodes(self, export: interface.Export) -> tuple[str, ...]:
        return (guard_name(export.serial),)

    def remains(self) -> set[str]:
        return (nvmet.remains()
                | {os.path.basename(path).removesuffix(GUARD)
                   for path in glob.glob(self._device_mapper.path(
                       '*' + GUARD))})


def _one_at_a_time(move_id: str) -> contextlib.AbstractContextManager[Any]:
    return lockutils.lock('localstor-nvmet-' + move_id)


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


# In Cinder's file about a target of tgt, see targets.conf(5)
_BACKING_STORE = 'backing-store %(path)s'
_LARGE_BLOCKS = '<%s>\n    block-size %d\n</backing-store>'
_BLOCK_SIZE = re.compile(r'^\s*block-size (\d+)$', re.MULTILINE)


class CinderRemoteTarget(interface.RemoteTarget):
    """Ordinary connections by Cinder's target driver.

    tgt reads and writes a device directly, and so by whole logical blocks.  It
    has to be told to show a disk that has the same; LIO does so by itself.
    """

    def __init__(self, configuration: Any, volumes: interface.VolumeGroup
                 ) -> None:
        self._configuration = configuration
        self._volumes = volumes

    @functools.cache
    def _driver(self) -> Any:
        # Not before it is needed: that of LIO runs a command to look whether
        # it can work.
        return importutils.import_object(
            REMOTE_TARGETS[self._configuration.target_helper],
            configuration=self._configuration)

    def _exporter(self, block_size: int) -> Any:
        """The driver that makes disks with logical blocks of so many bytes."""
        exporter = copy.copy(self._driver())
        if (self._configuration.target_helper == 'tgtadm'
                and block_size != interface.SECTOR):
            exporter.VOLUME_CONF = exporter.VOLUME_CONF.replace(
                _BACKING_STORE, _LARGE_BLOCKS % (_BACKING_STORE, block_size))
        return exporter

    def _shown_block_size(self, volume: Any) -> int:
        """Bytes of a logical block of the disk of an export that was made.

        Whoever has it goes on to count by them, and earlier versions showed
        all disks with those of a sector.
        """
        path = os.path.join(self._configuration.volumes_dir, volume['name'])
        try:
            with open(path) as file:
                told = _BLOCK_SIZE.search(file.read())
        except FileNotFoundError:
            return self._volumes.block_size()
        return int(told[1]) if told else interface.SECTOR

    def check(self) -> None:
        self._driver()

    def describe(self, ctxt: context.RequestContext, volume: Any
                 ) -> dict[str, str]:
        # As ISCSITarget.create_export composes them. The number of the target,
        # which tgt chooses, is of no use to anybody.
        driver, configuration = self._driver(), self._configuration
        number, lun = driver._get_target_and_lun(ctxt, volume)
        chap = driver._get_target_chap_auth(ctxt, volume) or (
            volume_utils.generate_username(),
            volume_utils.generate_password())
        return {
            'provider_location': driver._iscsi_location(
                configuration.target_ip_address, number,
                configuration.target_prefix + volume['name'], lun,
                configuration.target_secondary_ip_addresses),
            'provider_auth': driver._iscsi_authentication('CHAP', *chap)}

    def export(self, ctxt: context.RequestContext, volume: Any, device: str
               ) -> dict[str, str]:
        data = self._exporter(self._volumes.block_size()).create_export(
            ctxt, volume, device)
        return {'provider_location': data['location'],
                'provider_auth': data['auth']}

    def ensure(self, ctxt: context.RequestContext, volume: Any, device: str,
               connectors: Iterable[dict[str, Any]]) -> None:
        # Cinder's driver of LIO does nothing where there is any target, a
        # move's too.  Where there is none it restores what it has once saved:
        # the exports of moves that have ended since among that.
        iscsi.ISCSITarget.ensure_export(
            self._exporter(self._shown_block_size(volume)), ctxt, volume,
            device)
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
