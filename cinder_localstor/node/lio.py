# SPDX-License-Identifier: Apache-2.0
"""Exports by LIO, the kernel's target, with rtslib.

Cinder's program for it, cinder-rtstool, opens a device for writing: after a
restart of its node the source of a move, which is read-only by then, would
never be exported again.  And each call of it imports all of Cinder.

A privileged daemon of its own calls rtslib: LIO waits for sessions, which may
wait for disks, and nothing else shall wait with it.  CAP_SYS_ADMIN is for
mounting configfs and for the secrets in it, CAP_DAC_OVERRIDE for the rest.
"""

from collections.abc import Iterator
import contextlib
import glob
import json
import os

from oslo_concurrency import lockutils
from oslo_config import cfg
from oslo_privsep import capabilities
from oslo_privsep import priv_context
import rtslib_fb
from rtslib_fb import root as rtslib_root
import tenacity

from cinder_localstor.node import interface

CONTEXT = priv_context.PrivContext(
    'cinder_localstor',
    cfg_section='localstor_lio_privileged',
    pypath=__name__ + '.CONTEXT',
    capabilities=[capabilities.CAP_SYS_ADMIN,
                  capabilities.CAP_DAC_OVERRIDE],
)

# As many calls at a time as privileged.py has: one that waits for a session
# over NVMe/TCP keeps no other waiting.
cfg.CONF.set_default('thread_pool_size', 64,
                     group='localstor_lio_privileged')

CONFIGFS = '/sys/kernel/config/target'
LUN = 0
# The only portal group of a target
GROUP = 1
# Seconds, for the lock and for the call
TIMEOUT = 60


def targets() -> set[str]:
    """IQNs of the iSCSI targets that offer a disk."""
    return {iqn for iqn in _names('iscsi')
            if _is_enabled(iqn) and glob.glob(os.path.join(
                CONFIGFS, 'iscsi', glob.escape(iqn), 'tpgt_%d' % GROUP,
                'lun', 'lun_%d' % LUN, '*', 'udev_path'))}


def remains() -> set[str]:
    """IQNs of which there is a target, or a backstore that holds a device."""
    return _names('iscsi') | _names('core/iblock_*')


def _names(folder: str) -> set[str]:
    return {os.path.basename(path)
            for path in glob.glob(os.path.join(CONFIGFS, folder, 'iqn.*'))}


def _is_enabled(iqn: str) -> bool:
    try:
        with open(os.path.join(CONFIGFS, 'iscsi', iqn, 'tpgt_%d' % GROUP,
                               'enable')) as file:
            return file.read().strip() == '1'
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Of those who make backstores at once, rtslib gives two the same index.

    Cinder's driver takes this lock, too.
    """
    with contextlib.ExitStack() as held:
        for attempt in tenacity.Retrying(
                retry=tenacity.retry_if_exception_type(
                    lockutils.AcquireLockFailedException),
                wait=tenacity.wait_fixed(0.1),
                stop=tenacity.stop_after_delay(TIMEOUT), reraise=True):
            with attempt:
                held.enter_context(lockutils.lock(
                    'lioadm', 'cinder-', external=True, blocking=False))
        yield


def prepare() -> None:
    """Start the daemon, and load what the kernel needs for any target."""
    with _alone():
        _prepare()


def export(export_: interface.Export, device: str) -> None:
    """Export a device, read-only, to one initiator."""
    address, _colon, port = export_.portal.rpartition(':')
    with _alone():
        _export(export_.iqn, device, export_.serial, address, int(port),
                export_.initiator, export_.username, export_.password)


def unexport(iqn: str) -> None:
    """Take an export away, or what there is of it."""
    with _alone():
        _unexport(iqn)


@CONTEXT.entrypoint_with_timeout(TIMEOUT)
def _prepare() -> None:
    _open()


@CONTEXT.entrypoint_with_timeout(TIMEOUT)
def _export(iqn: str, device: str, serial: str, address: str, port: int,
            initiator: str, username: str, password: str) -> None:
    _open()
    if _is_whole(iqn, initiator):
        return
    _remove(iqn)
    try:
        _make(iqn, device, serial, address, port, initiator, username,
              password)
    except Exception:
        _remove(iqn)
        raise


@CONTEXT.entrypoint_with_timeout(TIMEOUT)
def _unexport(iqn: str) -> None:
    _open()
    # First: of what is gone from the kernel nobody asks for the rest.
    _forget_saved(iqn)
    _remove(iqn)


def _open() -> None:
    # LIO keeps reservations there, and rtslib insists on it.
    os.makedirs(os.path.dirname(rtslib_root.default_save_file), 0o755,
                exist_ok=True)
    # Others may have made or removed backstores since the last call.
    rtslib_fb.RTSRoot().invalidate_caches()


def _make(iqn: str, device: str, serial: str, address: str, port: int,
          initiator: str, username: str, password: str) -> None:
    storage = rtslib_fb.BlockStorageObject(iqn, dev=device,
                                           wwn=serial or None, readonly=True)
    group = rtslib_fb.TPG(
        rtslib_fb.Target(rtslib_fb.FabricModule('iscsi'), iqn), GROUP)
    group.set_attribute('authentication', '1')
    rtslib_fb.LUN(group, LUN, storage_object=storage)
    admitted = rtslib_fb.NodeACL(group, initiator)
    admitted.chap_userid = username
    admitted.chap_password = password
    rtslib_fb.MappedLUN(admitted, LUN, LUN, write_protect=True)
    rtslib_fb.NetworkPortal(group, address, port)
    group.enable = True


def _is_whole(iqn: str, initiator: str) -> bool:
    """Whether nothing is left to do.

    What somebody saved may have come back at the node's start without the
    device, which was not there yet.
    """
    try:
        group = rtslib_fb.TPG(rtslib_fb.Target(
            rtslib_fb.FabricModule('iscsi'), iqn, 'lookup'), GROUP, 'lookup')
        admitted = rtslib_fb.NodeACL(group, initiator, 'lookup')
        return group.enable and any(
            mapped.write_protect and mapped.tpg_lun.storage_object
            for mapped in admitted.mapped_luns)
    except (rtslib_fb.RTSLibNotInCFSError, rtslib_fb.RTSLibBrokenLink):
        return False


def _remove(iqn: str) -> None:
    with contextlib.suppress(rtslib_fb.RTSLibNotInCFSError):
        rtslib_fb.Target(rtslib_fb.FabricModule('iscsi'), iqn,
                         'lookup').delete()
    with contextlib.suppress(rtslib_fb.RTSLibNotInCFSError):
        rtslib_fb.BlockStorageObject(iqn).delete()
    # Who dies between the two directories of a backstore leaves the first,
    # and rtslib would stumble over it for ever.
    for path in glob.glob(os.path.join(CONFIGFS, 'core', 'iblock_*')):
        if not glob.glob(os.path.join(path, '*', '')):
            os.rmdir(path)


def _forget_saved(iqn: str) -> None:
    """Who saves an export of his own saves all that there are."""
    path = rtslib_root.default_save_file
    try:
        with open(path) as file:
            saved = json.load(file)
    except (FileNotFoundError, ValueError):
        return
    kept = saved | {kind: [one for one in saved.get(kind, ())
                           if one.get(name) != iqn]
                    for kind, name in (('storage_objects', 'name'),
                                       ('targets', 'wwn'))}
    if kept == saved:
        return
    new = path + '.localstor'
    with contextlib.suppress(FileNotFoundError):
        os.unlink(new)
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600),
              'w') as file:
        json.dump(kept, file, sort_keys=True, indent=2)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)
