# SPDX-License-Identifier: Apache-2.0
"""What was broken off with cinder-volume, and what Cinder leaves as it was.

Cinder takes up deletions again when its service starts, and ends creations
with an error.  An extension or a change of type that dies with the service
stays ``extending`` or ``retyping`` for ever, and the user can do nothing with
the volume.  Here it is settled by what is true on the node.

- The logical volume has grown: the extension is done, and the row says so.
- It has not: the volume is as it was before, and the user is told by a
  message of Cinder's (``openstack volume message list``).

So does a migration.  Where the volume lives tells how it has ended.

A volume that was ``reverting`` is as it was before, or as its snapshot, and
nothing in between.  It is ``available``, and so is the snapshot; if it is as
it was, the user is told.

A snapshot of a group that was being taken stays ``creating``, and so do those
of its volumes.  They become ``error``: what there is of them is of no moment.

A snapshot that was being deleted stays ``deleting``, and so does one of a
group.  It becomes ``error``, and the user is told: whatever was done, it can
be deleted again.

A group whose volumes were being changed stays ``updating``.  It becomes
``available``: the volumes themselves say whether they belong to it.

What stays ``managing`` is given back and becomes ``error_managing``.  What
stays ``unmanaging`` is ``available`` if nothing of it was let go yet, and else
``error``: it is unmanaged again then.

What a message of the bus may yet begin is not broken off.  The service has to
have run for a while, so that it has taken what waited for it, and the row must
not have changed for as long.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
import contextlib
import datetime
import threading
from typing import Any
from typing import TypeAlias

from cinder import compute
from cinder import context
from cinder.db import api as db
from cinder.db import models
from cinder import exception as cinder_exception
from cinder.message import message_field
from cinder import objects
from cinder.objects import fields
from cinder import quota
from oslo_log import log as logging
from oslo_utils import timeutils
from oslo_utils import units
import sqlalchemy as sa

from cinder_localstor import exception
from cinder_localstor.moves import custodian
from cinder_localstor.moves import messages
from cinder_localstor.node import interface
from cinder_localstor import rows

LOG = logging.getLogger(__name__)

# Seconds for which nothing has happened to what counts as broken off
PATIENCE = 60
# Seconds between two looks
INTERVAL = 30
# The API makes the reservation of an extension right after it has changed the
# volume's status. Databases may keep whole seconds only.
_RESERVED_WITHIN = (datetime.timedelta(seconds=-2),
                    datetime.timedelta(seconds=10))

# In which states something is in the middle of something, by Cinder's classes
STATES = {
    'Volume': ('extending', 'retyping', 'reverting', custodian.MANAGING,
               custodian.UNMANAGING),
    'Snapshot': ('restoring', 'deleting', 'creating', custodian.UNMANAGING),
    'GroupSnapshot': ('creating', 'deleting'),
    'Group': ('updating',)}

# What previous_status says from then on, until Cinder's API writes its own
GIVEN_UP = 'extending'

# Cinder's objects are registered after this module is imported.
Managed: TypeAlias = 'objects.Volume | objects.Snapshot'
Changed: TypeAlias = (
    'objects.Volume | objects.Snapshot | objects.GroupSnapshot | '
    'objects.Group')
Extend = Callable[[context.RequestContext, 'objects.Volume', int], None]


def is_given_up(ctxt: context.RequestContext, volume_id: str) -> bool:
    """Whether an extension that still comes to be is not wanted any more.

    Its message may have waited for a scheduler that was down for long.  Its
    reservation is gone, and the user has been told.
    """
    volume = objects.Volume.get_by_id(ctxt, volume_id)
    return volume.status != 'extending' and (
        volume.previous_status == GIVEN_UP)


class Unfinished:
    """Settles what was broken off on the volumes of one backend."""

    def __init__(self, host: str, volumes: interface.VolumeGroup,
                 extend: Extend, keeps: custodian.Custodian) -> None:
        """:param host: ``host@backend``
        :param extend: grows a volume and its handle to so many bytes, or
            finds that it has; raises LocalStorException
        """
        self._host = host
        self._volumes = volumes
        self._extend = extend
        self._custodian = keeps
        # Ids of what this process works on, once for each request: one may
        # come twice
        self._under_way: list[str] = []
        # Held while something joins these, and while a row changes of what
        # is not among them
        self._lock = threading.Lock()
        # Ids of all snapshots of groups that this process was asked to take or
        # to delete, with their states: it says itself what has become of them
        self._asked_for: set[tuple[str, str]] = set()

    @contextlib.contextmanager
    def under_way(self, what_id: str) -> Iterator[None]:
        """Leave a volume, a snapshot or a group to who works on it, however
        long that takes: it may have to wait.

        What was settled before has its new state by then.
        """
        with self._lock:
            self._under_way.append(what_id)
        try:
            yield
        finally:
            self._under_way.remove(what_id)

    def leave_group_snapshot(self, taken: objects.GroupSnapshot) -> None:
        """Leave to Cinder what it does with a snapshot of a group, for as long
        as this process lives.
        """
        self._asked_for.add((taken.id, taken.status))

    def _change(self, what: Changed, after: Mapping[str, int | str],
                before: Mapping[str, str]) -> bool:
        """Change the row of what nobody works on; whether it was so, and as
        it had been.
        """
        with self._lock:
            return what.id not in self._under_way and bool(
                what.conditional_update(after, before))

    def settle(self, ctxt: context.RequestContext) -> None:
        """Settle what there is; what can't be yet is left for the next look.
        """
        found = self._find(ctxt)

        def broken_off(name: str, *states: str) -> Iterator[Any]:
            # This process may have begun to work at one since the look.
            return (what for state in states for what in found[name, state]
                    if what.id not in self._under_way)

        self._settle_extensions(ctxt, list(broken_off('Volume', 'extending')))
        for volume in broken_off('Volume', 'retyping'):
            # While Cinder copies, it is the migration that has to end first.
            if volume.migration_status in rows.MIGRATION_OVER:
                self._rest(volume)
        for volume in broken_off('Volume', 'reverting'):
            self._settle_revert(ctxt, volume)
        # Whoever has settled the volume may have died before this.
        for snapshot in broken_off('Snapshot', 'restoring'):
            if snapshot.volume.status != 'reverting':
                self._change(snapshot, {'status': 'available'},
                             {'status': 'restoring'})
        for volume in broken_off('Volume', custodian.MANAGING,
                                 custodian.UNMANAGING):
            self._settle_managing(ctxt, volume, self._custodian.settle_volume)
        for snapshot in broken_off('Snapshot', 'deleting'):
            # Those of a volume that is deleted with them wait for each other,
            # and so do those of a group.
            if (snapshot.volume.status != 'deleting'
                    and (snapshot.group_snapshot_id, 'deleting')
                    not in self._asked_for):
                self._break_off_deletion(snapshot)
        for taken in broken_off('GroupSnapshot', *STATES['GroupSnapshot']):
            if (taken.id, taken.status) not in self._asked_for:
                self._break_off_group_snapshot(taken)
        for group in broken_off('Group', 'updating'):
            self._break_off_update(group)
        for snapshot in broken_off('Snapshot', 'creating',
                                   custodian.UNMANAGING):
            self._settle_managing(
                ctxt, snapshot, self._custodian.settle_snapshot)

    def _find(self, ctxt: context.RequestContext
              ) -> Mapping[tuple[str, str], list[Any]]:
        """What has not changed for long, by the name of its class and its
        state.
        """
        found: dict[tuple[str, str], list[Any]] = collections.defaultdict(list)
        for name, identity in rows.in_states(ctxt, self._host, STATES,
                                             _long_ago()):
            try:
                present = getattr(objects, name).get_by_id(ctxt, identity)
            except cinder_exception.NotFound:
                continue  # it was deleted meanwhile
            if _changed_at(present) < _long_ago():
                found[name, present.status].append(present)
        return found

    @staticmethod
    def _settle_managing(ctxt: context.RequestContext, what: Managed,
                         settle: Callable[..., bool]) -> None:
        before = what.status
        try:
            if settle(ctxt, what):
                LOG.warning('%(id)s was %(before)s when the service ended, '
                            'and is %(status)s now',
                            {'id': what.id, 'before': before,
                             'status': what.status})
        except (exception.LocalStorException,
                cinder_exception.CinderException) as error:
            LOG.warning('%(id)s was %(before)s when the service ended, and '
                        'can not be settled yet: %(error)s',
                        {'id': what.id, 'before': before, 'error': error})

    def end_migrations(self, ctxt: context.RequestContext) -> None:
        """End what this backend was migrating when its service ended.

        Before it serves anybody: what the former process has begun no other
        can write any more.
        """
        for volume_id, end in rows.end_migrations(ctxt, self._host).items():
            LOG.warning('Volume %(volume)s was being migrated when the '
                        'service ended: %(end)s',
                        {'volume': volume_id, 'end': end})

    def _break_off_deletion(self, snapshot: objects.Snapshot) -> None:
        if not self._change(snapshot, {'status': 'error'},
                            {'status': 'deleting'}):
            return
        LOG.warning('Snapshot %s was being deleted when the service ended; '
                    'it can be deleted again', snapshot.id)
        messages.tell(snapshot, message_field.Action.SNAPSHOT_DELETE,
                      message_field.Detail.SNAPSHOT_DELETE_ERROR)

    @staticmethod
    def _break_off_group_snapshot(taken: objects.GroupSnapshot) -> None:
        before = taken.status
        broken_off = ({'status': fields.SnapshotStatus.ERROR},
                      {'status': before})
        # Last of all the one by which it is found
        for what in taken.snapshots:
            what.conditional_update(*broken_off)
        if taken.conditional_update(*broken_off):
            LOG.warning('Snapshot %(id)s of a group was %(status)s when the '
                        'service ended. It is of no use, and can be deleted',
                        {'id': taken.id, 'status': before})

    def _break_off_update(self, group: objects.Group) -> None:
        if self._change(group, {'status': fields.GroupStatus.AVAILABLE},
                        {'status': fields.GroupStatus.UPDATING}):
            LOG.warning('Volumes of group %s were being changed when the '
                        'service ended. It has those that say so', group.id)

    def _settle_revert(self, ctxt: context.RequestContext,
                       volume: objects.Volume) -> None:
        reverted = rows.is_reverted(ctxt, volume.id)
        if not self._rest(volume):
            return
        rows.note_revert(ctxt, volume.id, '')
        if not reverted:
            messages.tell(
                volume, message_field.Action.CREATE_VOLUME_FROM_BACKEND,
                message_field.Detail.DRIVER_FAILED_CREATE)

    def _settle_extensions(self, ctxt: context.RequestContext,
                           extending: list[objects.Volume]) -> None:
        if not extending:
            return
        there = self._volumes.logical_volumes()
        for volume in extending:
            try:
                self._settle_extension(ctxt, volume, there)
            except (exception.LocalStorException,
                    cinder_exception.CinderException) as error:
                LOG.warning('The extension of volume %(volume)s was broken '
                            'off and can not be settled yet: %(error)s',
                            {'volume': volume.id, 'error': error})

    def _settle_extension(self, ctxt: context.RequestContext,
                          volume: objects.Volume,
                          there: Mapping[str, interface.LogicalVolume]
                          ) -> None:
        if volume.name not in there:
            raise exception.LogicalVolumeMissing(
                group=self._volumes.name, name=volume.name, host=self._host)
        size = there[volume.name].size // units.Gi
        if size > volume.size:
            try:
                self._complete(ctxt, volume, size)
                return
            except cinder_exception.OverQuota:
                LOG.warning('Volume %(volume)s has grown to %(size)d GiB, for '
                            'which there is no quota any more; it counts as '
                            '%(before)d GiB', {
                                'volume': volume.id, 'size': size,
                                'before': volume.size})
        self._take_back(ctxt, volume)

    def _complete(self, ctxt: context.RequestContext, volume: objects.Volume,
                  size: int) -> None:
        """Let the row say what is true.

        :param size: GiB
        :raises OverQuota: the reservation has expired and can't be had again
        """
        # The logical volume grows first, and the handle may not have.
        self._extend(ctxt, volume, size * units.Gi)
        project = volume.project_id
        found = self._reservations(ctxt, volume, size - volume.size)
        if not found and self._is_expired(volume):
            found = quota.QUOTAS.reserve(
                ctxt, project_id=project,
                **self._resources(ctxt, volume, size - volume.size))
        # As Cinder does it: what is committed twice counts once, and when
        # nothing is left to commit that was done before the crash.
        if found:
            quota.QUOTAS.commit(ctxt, found, project_id=project)
        if self._rest(volume, size=size):
            servers = [attachment.instance_uuid
                       for attachment in volume.volume_attachment
                       if attachment.instance_uuid]
            if servers:
                compute.API().extend_volume(ctxt, servers, volume.id)

    def _take_back(self, ctxt: context.RequestContext, volume: objects.Volume
                   ) -> None:
        """Let the volume be as it was before, and tell the user."""
        found = self._reservations(ctxt, volume)
        if not self._rest(volume, previous_status=GIVEN_UP):
            return
        if found:
            quota.QUOTAS.rollback(ctxt, found, project_id=volume.project_id)
        messages.tell(volume, message_field.Action.EXTEND_VOLUME,
                      message_field.Detail.DRIVER_FAILED_EXTEND)

    def _rest(self, volume: objects.Volume, **changes: int | str) -> bool:
        """Take a volume to a state of rest; whether nobody else has, nor
        works on it.
        """
        before = volume.status
        status = 'in-use' if volume.volume_attachment else 'available'
        changed = self._change(volume, {'status': status, **changes},
                               {'status': before})
        if changed:
            LOG.warning('Volume %(volume)s was %(before)s when the service '
                        'ended, and is %(status)s now; its size is %(size)d '
                        'GiB', {'volume': volume.id, 'before': before,
                                'status': status,
                                'size': changes.get('size', volume.size)})
        return changed

    # The quota

    @staticmethod
    def _resources(ctxt: context.RequestContext, volume: objects.Volume,
                   gigabytes: int) -> dict[str, int]:
        """What an extension reserves, as Cinder's API has it."""
        resources = {'gigabytes': gigabytes}
        quota.QUOTAS.add_volume_type_opts(ctxt, resources,
                                          volume.volume_type_id)
        return resources

    def _reservations(self, ctxt: context.RequestContext,
                      volume: objects.Volume, gigabytes: int | None = None
                      ) -> list[str]:
        """Ids of what was reserved for an extension and is still open.

        Nothing in the rows connects them but the project, the time and, if
        it is known by how much the volume has grown, the amount.  What is not
        found is released by Cinder itself (``reservation_expire``).
        """
        row = models.Reservation
        began = _changed_at(volume)
        resources = self._resources(ctxt, volume, gigabytes or 0)
        with db.main_context_manager.reader.using(ctxt) as session:
            found = session.query(
                row.uuid, row.resource, row.delta, row.created_at).filter(
                row.deleted == sa.false(), row.project_id == volume.project_id,
                row.resource.in_(resources), row.delta > 0,
                row.created_at >= began + _RESERVED_WITHIN[0],
                row.created_at <= began + _RESERVED_WITHIN[1],
            ).order_by(row.created_at, row.id).all()
        chosen: dict[str, str] = {}
        for uuid, resource, delta, _created in found:
            gigabytes = gigabytes or delta
            if delta == gigabytes:
                chosen.setdefault(resource, uuid)
        return list(chosen.values())

    @staticmethod
    def _is_expired(volume: objects.Volume) -> bool:
        """Whether Cinder has released the reservation in the meantime."""
        return _changed_at(volume) + datetime.timedelta(
            seconds=quota.CONF.reservation_expire) < timeutils.utcnow()


def _changed_at(what: Changed) -> datetime.datetime:
    """When a row has changed, UTC without a zone as the database has it."""
    return timeutils.normalize_time(what.updated_at or what.created_at)


def _long_ago() -> datetime.datetime:
    """What has not changed since then is not under way."""
    return timeutils.utcnow() - datetime.timedelta(seconds=PATIENCE)
