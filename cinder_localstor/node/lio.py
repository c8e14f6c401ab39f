# SPDX-License-Identifier: Apache-2.0
"""Exports by LIO, the kernel's target, with rtslib.

Cinder's program for it, cinder-rtstool, opens a device for writing: after a
restart of its node the source of a move, which is read-only by then, would
never be exported again.  And each call of it imports all of Cinder.
"""

import contextlib
import glob
import os

from cinder import utils
import rtslib_fb
from rtslib_fb import root as rtslib_root

from cinder_localstor.node import interface
from cinder_localstor.node import privileged

CONFIGFS = '/sys/kernel/config/target'
LUN = 0
# Seconds; what is removed waits for its sessions to end.
TIMEOUT = 60
# The only portal group of a target
GROUP = 1

# Of those who make backstores at once, rtslib gives two the same index.
# Cinder's driver takes this lock, too.
_alone = utils.synchronized('lioadm', external=True)


def targets() -> list[str]:
    """IQNs of all iSCSI targets."""
    try:
        return os.listdir(os.path.join(CONFIGFS, 'iscsi'))
    except FileNotFoundError:
        return []  # the module is not loaded: nothing was exported


def remains(ending: str) -> set[str]:
    """IQNs with such an ending of which there is a target or a backstore."""
    return {os.path.basename(path)
            for folder in ('iscsi', 'core/iblock_*')
            for path in glob.glob(os.path.join(CONFIGFS, folder,
                                               '*' + glob.escape(ending)))}


@_alone
def prepare() -> None:
    """Load the kernel's modules."""
    _prepare()


@_alone
def export(export_: interface.Export, device: str) -> None:
    """Export a device, read-only, to one initiator."""
    address, _colon, port = export_.portal.rpartition(':')
    _export(export_.iqn, device, export_.serial, address, int(port),
            export_.initiator, export_.username, export_.password)


@_alone
def unexport(iqn: str) -> None:
    """Take an export away, or what there is of it."""
    _unexport(iqn)


@privileged.CONTEXT.entrypoint_with_timeout(TIMEOUT)
def _prepare() -> None:
    rtslib_fb.RTSRoot()


@privileged.CONTEXT.entrypoint_with_timeout(TIMEOUT)
def _export(iqn: str, device: str, serial: str, address: str, port: int,
            initiator: str, username: str, password: str) -> None:
    # Others may have made or removed backstores since the last call.
    rtslib_fb.RTSRoot().invalidate_caches()
    if _is_whole(iqn, initiator):
        return
    _remove(iqn)
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
            mapped.tpg_lun.storage_object for mapped in admitted.mapped_luns)
    except (rtslib_fb.RTSLibNotInCFSError, rtslib_fb.RTSLibBrokenLink):
        return False


def _remove(iqn: str) -> None:
    with contextlib.suppress(rtslib_fb.RTSLibNotInCFSError):
        rtslib_fb.Target(rtslib_fb.FabricModule('iscsi'), iqn,
                         'lookup').delete()
    with contextlib.suppress(rtslib_fb.RTSLibNotInCFSError):
        rtslib_fb.BlockStorageObject(iqn).delete()


@privileged.CONTEXT.entrypoint_with_timeout(TIMEOUT)
def _unexport(iqn: str) -> None:
    root = rtslib_fb.RTSRoot()
    root.invalidate_caches()
    _remove(iqn)
    # Who saves an export of his own saves all that there are.
    with contextlib.suppress(FileNotFoundError):
        with open(rtslib_root.default_save_file) as saved:
            found = iqn in saved.read()
        if found:
            root.save_to_file()
