# SPDX-License-Identifier: Apache-2.0
"""What Cinder's operators bring into its care, and take out of it again.

Nothing that was there before is ever wiped because Cinder did not get it
entirely.  Cinder tells nobody when it has.  But it notes when a volume could
first be used: until then a deletion gives back what was taken, and so does a
start of the service.
"""

from __future__ import annotations

import contextlib
from typing import Any

from cinder import context
from cinder.db import api as db
from cinder import exception as cinder_exception
from cinder import objects
from cinder.objects import fields
from cinder.volume import volume_utils
from oslo_concurrency import lockutils
from oslo_config import cfg
from oslo_log import log as logging
from oslo_utils import excutils
from oslo_utils import units

from cinder_localstor.datapath import copies
from cinder_localstor.datapath import foreign
from cinder_localstor.datapath import handles
from cinder_localstor.datapath import wipes
from cinder_localstor import exception
from cinder_localstor.moves import gate
from cinder_localstor.moves import keeper
from cinder_localstor.moves import registry
from cinder_localstor.moves import table
from cinder_localstor.node import interface
from cinder_localstor.peers import rpc
from cinder_localstor import rows

LOG = logging.getLogger(__name__)

# The key of what names a logical volume, as Cinder's LVM driver has it
SOURCE_NAME = 'source-name'
MANAGING = 'managing'
FAILED = 'error_managing'
# From what failed Cinder goes on to this when it is deleted.
FAILED_DELETING = 'error_managing_deleting'
UNMANAGING = 'unmanaging'
# What a peer that says no has left of a snapshot as it was
REFUSALS: dict[str, type[cinder_exception.SnapshotIsBusy]] = {
    rpc.UNSUPPORTED: exception.SnapshotElsewhere,
    'SnapshotIsNeeded': exception.SnapshotIsNeeded,
    'SnapshotArrives': exception.SnapshotArrives}
# Roles of what users have
USERS = (copies.Role.STANDING, copies.Role.SNAPSHOT, copies.Role.PASSING)

Reference = dict[str, str] | str


class Custodian:
    """Manages and unmanages the logical volumes of one backend."""

    def __init__(self, host: str, node: interface.Node,
                 volume_gate: gate.Gate, peers: rpc.PeerAPI) -> None:
        """:param host: ``host@backend`` of this node"""
        self.host = host
        self._peers = peers
        self._group = node.volumes
        self._handles = handles.Handles(node)
        self._foreign = foreign.Foreign(node)
        self._gate = volume_gate
        # Ids of what this process has begun with, and the GiB that Cinder was
        # told. What else is half done was broken off with another one.
        self._begun: dict[str, int] = {}

    # Volumes

    def size(self, ctxt: context.RequestContext, volume: objects.Volume,
             reference: Reference) -> int:
        """GiB that a logical volume would have as a volume.

        :raises NotManageable: it can't be one
        """
        self._begun[volume.id] = _gibibytes(
            self._find(ctxt, reference).size)
        return self._begun[volume.id]

    def manage(self, ctxt: context.RequestContext, volume: objects.Volume,
               reference: Reference) -> None:
        """Make a logical volume a volume of Cinder's, or leave it as it was.

        Its size grows to whole GiB, for Cinder knows no others.

        :raises NotManageable: it can't be one
        :raises NotEnoughSpace: the volume group is too full to let it grow
        """
        with self._gate.lock(volume.id), self._lock():
            found = self._find(ctxt, reference)
            size = _gibibytes(found.size)
            present = objects.Volume.get_by_id(ctxt, volume.id)
            if (present.status != MANAGING
                    or self._begun.setdefault(volume.id, size) != size):
                raise self._refusal(
                    found.name, 'Volume %s was given up, or its size has '
                    'changed. Ask for it again' % volume.id)
            with self._taking(volume.id):
                self._foreign.take(found, copies.Copy(
                    host=self.host, name=volume.name, volume_id=volume.id,
                    generation=rows.FIRST_GENERATION, size=size * units.Gi))

    def unmanage(self, ctxt: context.RequestContext, volume: objects.Volume
                 ) -> None:
        """Let a volume be Cinder's no more; its logical volume stays.

        :raises SnapshotsRemain: it has snapshots
        :raises UnmanagedTooEarly: it moves; it is as it was
        :raises VolumeIsRead: copies read it; it is as it was
        :raises VolumeInUse: somebody has it open
        """
        if snapshots := rows.snapshots_of(ctxt, volume.id):
            raise exception.SnapshotsRemain(volume_id=volume.id,
                                            snapshots=', '.join(snapshots))
        self._begun.setdefault(volume.id, 0)
        with self._gate.enter(ctxt, volume.id,
                              gate.Operation.UNMANAGE) as present:
            self._let_go(present.name, _plain_name(volume.id), volume.id)

    def give_back(self, ctxt: context.RequestContext, volume: objects.Volume
                  ) -> bool:
        """Give back what is deleted and was never Cinder's entirely.

        :returns: whether it was such a volume, so that nothing is to be wiped
        :raises VolumeInUse: somebody has it open
        """
        if volume.launched_at is not None:
            return False
        return (self._give_back(volume.id)
                or volume.status == FAILED_DELETING)

    # Snapshots

    def snapshot_size(self, ctxt: context.RequestContext,
                      snapshot: objects.Snapshot, reference: Reference
                      ) -> int:
        """GiB that a logical volume would have as a snapshot of a volume.

        :raises NotManageable: it can't be one
        """
        volume = objects.Volume.get_by_id(ctxt, snapshot.volume_id)
        found = self._find_snapshot(ctxt, reference, volume)
        self._begun[snapshot.id] = self._snapshot_size(found, volume.size)
        return self._begun[snapshot.id]

    @staticmethod
    def _snapshot_size(found: interface.LogicalVolume, size: int) -> int:
        # What LVM tells of a thick one is its room for changes.
        return size if found.origin else _gibibytes(found.size)

    def manage_snapshot(self, ctxt: context.RequestContext,
                        snapshot: objects.Snapshot, reference: Reference
                        ) -> dict[str, str | None]:
        """Make a logical volume a snapshot of Cinder's, or leave it as it
        was.

        :returns: the fields of its row that say where it lies. Until Cinder
            has saved them, there is no snapshot to delete.
        :raises NotManageable: it can't be one
        :raises VolumeIsMoving: some of the volume is still elsewhere
        """
        with self._gate.enter(ctxt, snapshot.volume_id,
                              gate.Operation.MANAGE) as volume, self._lock():
            found = self._find_snapshot(ctxt, reference, volume)
            size = self._snapshot_size(found, volume.size)
            if self._begun.setdefault(snapshot.id, size) != size:
                raise self._refusal(found.name, 'Its size has changed. Ask '
                                    'for it again')
            with self._taking(volume.id, snapshot.id):
                self._foreign.take(found, copies.Copy(
                    host=self.host, volume_id=volume.id,
                    name=rows.snapshot_copy_name(snapshot.id),
                    snapshot_id=snapshot.id, role=copies.Role.SNAPSHOT,
                    generation=rows.generation_of(ctxt, volume.id),
                    size=size * units.Gi))
        return {'provider_location': self.host,
                'provider_id': found.origin or None}

    def unmanage_snapshot(self, ctxt: context.RequestContext,
                          snapshot: objects.Snapshot) -> None:
        """Let a snapshot be Cinder's no more, wherever it lies; its logical
        volume stays.

        :raises SnapshotElsewhere: its node knows no such request
        :raises: what :func:`keeper.ask_there` and
            :meth:`unmanage_snapshot_here` raise
        """
        self._begun.setdefault(snapshot.id, 0)
        host = rows.place_of(ctxt, snapshot.id)
        if host == self.host:
            self.unmanage_snapshot_here(ctxt, snapshot.volume_id, snapshot.id)
        elif host is not None:  # else it was never taken, or is let go
            self._unmanage_snapshot_there(ctxt, host, snapshot)

    def _unmanage_snapshot_there(self, ctxt: context.RequestContext,
                                 host: str, snapshot: objects.Snapshot
                                 ) -> None:
        try:
            keeper.ask_there(ctxt, self._peers, host, snapshot, 'unmanage',
                             self._peers.unmanage_snapshot)
        except exception.PeerFailed as error:
            if error.kind not in REFUSALS:
                raise
            raise REFUSALS[error.kind](snapshot_id=snapshot.id,
                                       host=host) from error

    def unmanage_snapshot_here(self, ctxt: context.RequestContext,
                               volume_id: str, snapshot_id: str) -> None:
        """Let a snapshot go that lies on this node.

        :raises SnapshotIsNeeded: a copy reads it
        :raises SnapshotArrives: some of it is on another node
        """
        name = rows.snapshot_copy_name(snapshot_id)
        with self._gate.lock(volume_id):
            if table.readers(rows.for_host(ctxt, self.host), self.host, name):
                raise exception.SnapshotIsNeeded(snapshot_id=snapshot_id)
            if any(move.transfer.snapshot_id == snapshot_id for move
                   in rows.snapshots_arriving(ctxt, volume_id)):
                raise exception.SnapshotArrives(snapshot_id=snapshot_id)
            self._let_go(name, name, snapshot_id)
            rows.forget_place(ctxt, snapshot_id)

    def give_back_snapshot(self, ctxt: context.RequestContext,
                           snapshot: objects.Snapshot) -> bool:
        """As :meth:`give_back`, of a snapshot."""
        return (rows.place_of(ctxt, snapshot.id) is None
                and self._give_back(snapshot.volume_id, snapshot.id))

    # Both

    def _let_go(self, name: str, plain: str, identity: str) -> None:
        with self._lock():
            self._foreign.let_go(name, plain, identity)
        LOG.info('%(id)s is not managed any more; its logical volume is '
                 '%(group)s/%(name)s', {
                     'id': identity, 'group': self._group.name,
                     'name': plain})

    @contextlib.contextmanager
    def _taking(self, volume_id: str, snapshot_id: str = '') -> Any:
        """Leave what can't be taken as it was, if that can be."""
        try:
            yield
        except exception.CommandTimedOut:
            raise  # it may yet be done
        except Exception:
            with excutils.save_and_reraise_exception():
                try:
                    self._give_back_taken(volume_id, snapshot_id)
                except Exception as error:
                    LOG.error('What was taken for %(id)s is given back when '
                              'that is deleted: %(error)s',
                              {'id': snapshot_id or volume_id,
                               'error': error})

    def _give_back(self, volume_id: str, snapshot_id: str = '') -> bool:
        with self._gate.lock(volume_id), self._lock():
            return self._give_back_taken(volume_id, snapshot_id)

    def _give_back_taken(self, volume_id: str, snapshot_id: str) -> bool:
        """Whether there was something to give back."""
        taken = self._foreign.find_taken(volume_id, snapshot_id)
        if taken is None:
            return False
        self._foreign.give_back(taken)
        LOG.warning('%(id)s was never managed entirely, and what was taken '
                    'for it is given back: its former name is %(name)s',
                    {'id': snapshot_id or volume_id,
                     'name': copies.Label(taken.tags).former})
        return True

    def _lock(self) -> contextlib.AbstractContextManager:
        """What no logical volume is taken or let go under."""
        return lockutils.lock('localstor-custodian-' + self.host)

    # What was broken off

    def settle_volume(self, ctxt: context.RequestContext,
                      volume: objects.Volume) -> bool:
        """Settle a volume that another process was about to manage or to
        unmanage; whether it has.

        One that was not let go yet is as it was.
        """
        if volume.id in self._begun:
            return False
        before = volume.status
        with self._gate.lock(volume.id), self._lock():
            if before == MANAGING:
                self._give_back_taken(volume.id, '')
                after = FAILED
            elif self._foreign.is_whole(volume.name, volume.id):
                self._handles.load(volume.name)
                after = 'available'
            else:
                # Somebody may have begun to use it.
                self._foreign.let_go(volume.name, _plain_name(volume.id),
                                     volume.id)
                after = 'error'
            return bool(volume.conditional_update({'status': after},
                                                  {'status': before}))

    def settle_snapshot(self, ctxt: context.RequestContext,
                        snapshot: objects.Snapshot) -> bool:
        """As :meth:`settle_volume`, of a snapshot; one that is merely taken
        is not for us.
        """
        if snapshot.id in self._begun:
            return False
        before = snapshot.status
        if before == fields.SnapshotStatus.CREATING:
            if not self._give_back(snapshot.volume_id, snapshot.id):
                return False
            rows.forget_place(ctxt, snapshot.id)
        return bool(snapshot.conditional_update(
            {'status': fields.SnapshotStatus.ERROR}, {'status': before}))

    # Which can be managed

    def manageable_volumes(self, ctxt: context.RequestContext
                           ) -> list[dict[str, Any]]:
        """All logical volumes but snapshots, as Cinder lists them."""
        volumes, known = self._look(ctxt)
        return [self._entry(ctxt, volume, known, _gibibytes(volume.size))
                for volume in volumes.values()
                if not _is_snapshot(volume)]

    def manageable_snapshots(self, ctxt: context.RequestContext
                             ) -> list[dict[str, Any]]:
        """All snapshots, as Cinder lists them."""
        volumes, known = self._look(ctxt)
        return [{**self._entry(ctxt, volume, known, _gibibytes(
            (volumes.get(volume.origin) or volume).size)),
            'source_reference': {SOURCE_NAME: volume.taken_of}}
            for volume in volumes.values() if _is_snapshot(volume)]

    def _look(self, ctxt: context.RequestContext
              ) -> tuple[dict[str, interface.LogicalVolume],
                         dict[str, copies.Copy]]:
        """All logical volumes, and what Cinder has them for, by name."""
        wanted = list(registry.read(ctxt, self.host))
        # Whose they are comes first, what moves do with them later.
        return (self._group.logical_volumes(),
                {copy.name: copy for copy in reversed(wanted)})

    def _entry(self, ctxt: context.RequestContext,
               volume: interface.LogicalVolume,
               known: dict[str, copies.Copy], size: int) -> dict[str, Any]:
        reason = self._reason(ctxt, volume, known)
        copy = known.get(volume.name)
        return {'reference': {SOURCE_NAME: volume.name}, 'size': size,
                'safe_to_manage': not reason,
                'reason_not_safe': reason or None,
                'cinder_id': (copy.snapshot_id or copy.volume_id
                              if copy and copy.role in USERS else None),
                'extra_info': None}

    def _find(self, ctxt: context.RequestContext, reference: Reference
              ) -> interface.LogicalVolume:
        """The logical volume that becomes a volume.

        :raises NotManageable: it can't
        """
        found = self._find_any(ctxt, reference)
        if found.origin:
            raise self._refusal(
                found.name, "it is a thick snapshot of '%s', and lost with "
                'it. Manage it as a snapshot' % found.origin)
        return found

    def _find_snapshot(self, ctxt: context.RequestContext,
                       reference: Reference, volume: objects.Volume
                       ) -> interface.LogicalVolume:
        """The logical volume that becomes a snapshot of a volume.

        :raises NotManageable: it can't
        """
        found = self._find_any(ctxt, reference)
        if found.taken_of != volume.name:
            raise self._refusal(
                found.name, "it is no snapshot of '%s', which volume %s is "
                'on this node' % (volume.name, volume.id))
        return found

    def _find_any(self, ctxt: context.RequestContext, reference: Reference
                  ) -> interface.LogicalVolume:
        name = (reference.get(SOURCE_NAME) if isinstance(reference, dict)
                else reference)
        volumes, known = self._look(ctxt)
        if not isinstance(name, str) or name not in volumes:
            raise self._refusal(
                name, "there is none. Name one that 'lvs %s' shows, by %s" % (
                    self._group.name, SOURCE_NAME))
        if reason := self._reason(ctxt, volumes[name], known):
            raise self._refusal(name, reason)
        return volumes[name]

    def _refusal(self, name: str | None, reason: str
                 ) -> exception.NotManageable:
        return exception.NotManageable(group=self._group.name, name=name,
                                       host=self.host, reason=reason)

    def _reason(self, ctxt: context.RequestContext,
                volume: interface.LogicalVolume,
                known: dict[str, copies.Copy]) -> str:
        """Why Cinder can't have a logical volume, '' if it can."""
        name, label = volume.name, copies.Label(volume.tags)
        if wipes.former_name(name) is not None:
            return 'Cinder has given it up, and it is being wiped'
        if copy := known.get(name):
            return ('Cinder has it already, as a copy (%s) of volume %s'
                    % (copy.role.value, copy.volume_id))
        if label and not self._is_given_up(ctxt, name, label):
            return ("its tags say that it is part of volume %s, of which it "
                    "may be the only copy. Look with 'cinder-localstor "
                    "status' on all nodes" % (label.volume_id or 'a move'))
        if volume_utils.check_already_managed_volume(
                volume_utils.extract_id_from_volume_name(name)):
            return 'Cinder has a volume of that name, of another backend'
        if volume.unfit:
            return volume.unfit
        if volume.is_open:
            return ("somebody has it open, a guest or a file system. Find it "
                    "with 'lsof /dev/%s/%s' and 'dmsetup ls --tree', and end "
                    'that first' % (self._group.name, name))
        return ''

    @staticmethod
    def _is_given_up(ctxt: context.RequestContext, name: str,
                     label: copies.Label) -> bool:
        """Whether Cinder began to take a logical volume, and wants it no
        more.
        """
        if label.former != name:
            return False
        try:
            if label.snapshot_id:
                return (db.snapshot_get(ctxt, label.snapshot_id).status
                        == fields.SnapshotStatus.ERROR)
            return (db.volume_get(ctxt, label.volume_id).status
                    in (FAILED, FAILED_DELETING))
        except (cinder_exception.VolumeNotFound,
                cinder_exception.SnapshotNotFound):
            return True


def _plain_name(volume_id: str) -> str:
    """What a volume is called when Cinder has let it go, as with Cinder's LVM
    driver; what it is called before changes with each move.
    """
    return str(cfg.CONF.volume_name_template % volume_id)


def _is_snapshot(volume: interface.LogicalVolume) -> bool:
    label = copies.Label(volume.tags)
    # A thin volume that was made from another one is none.
    return bool(volume.origin or label.snapshot_id
                or volume.taken_of and not label)


def _gibibytes(size: int) -> int:
    """Whole GiB that so many bytes have room in."""
    return -(-size // units.Gi)
