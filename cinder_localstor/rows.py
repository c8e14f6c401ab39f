# SPDX-License-Identifier: Apache-2.0
"""The rows of Cinder's database that hold a move.

A move is the row of its shadow volume: ``migration_status`` is
``target:<id of the user's volume>``, which hides it from users and is Cinder's
own mark of a temporary volume, and its admin metadata hold the rest.  The
user's row stays clean, so that all of Cinder's API works at any moment.

Every change is one transaction, which names the state that it starts from: of
two that ask for the same only one gets it, and nothing is noted of a move that
has gone on, or has ended.

What never changes of a move is one text, in as few rows as hold it; what is
looked for, or changes, has a row of its own.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Mapping
import dataclasses
import datetime
import json
import typing
from typing import Any
import uuid

from cinder import context
from cinder.db import api as db
from cinder.db import models
from cinder import objects
from cinder.objects import fields
from cinder.volume import volume_utils
from oslo_db import api as oslo_db_api
from oslo_db import exception as db_exception
from oslo_utils import timeutils
from oslo_utils import units
import sqlalchemy as sa

from cinder_localstor.datapath import copies
from cinder_localstor.datapath import transfer
from cinder_localstor import exception
from cinder_localstor.node import interface

# Before the id of the user's volume, in a shadow row's migration_status
TARGET = 'target:'
PREFIX = 'localstor:'
# Before the id of a move, with the volume that it is of
MOVE = PREFIX + 'move:'
# Before the number of a part of what never changes of a move
PACKED = PREFIX + 'packed'
STATE = PREFIX + 'state'
SINCE = PREFIX + 'since'
DONE = PREFIX + 'done'
PROBLEM = PREFIX + 'problem'
LEAVING = PREFIX + 'leaving'
SHOWN = PREFIX + 'shown'
SOURCE_HOST = PREFIX + 'source_host'
DESTINATION_HOST = PREFIX + 'destination_host'
GENERATION = PREFIX + 'generation'
CONNECTING = PREFIX + 'connecting'
GIVEN_TO = PREFIX + 'given_to'
MIGRATED_FROM = PREFIX + 'migrated_from'
REVERTED = PREFIX + 'reverted'

# The state of a move whose source is kept, as the table has it
KEEPING = 'keeping'

# Fields that say where a copy is
PLACE = ('host', 'cluster_name', 'service_uuid', 'availability_zone')
# Fields of both rows that change places with the identity
IDENTITY = (*PLACE, 'provider_id', 'provider_location', 'provider_auth',
            'provider_geometry')
# Longest value that a metadata row holds
MOST_CHARACTERS = 255
# What is raised while the database does not answer, or takes nobody more
UNREACHABLE = (db_exception.DBConnectionError, sa.exc.OperationalError)
# What of an attachment's id is kept where many have to fit into one row
SHORT_ID = 8
FIRST_GENERATION = 1
# What Cinder's volumes are while a backend migrates them
MIGRATING = 'migrating'
# What Cinder's own migration leaves behind when it is over
MIGRATION_OVER = (None, '', 'success', 'error')
# Their status meanwhile, where Cinder lets nobody use them
LOCKED = ('maintenance', 'retyping')
# What Cinder's volumes are while their copies are made or deleted, come or go
PASSING = ('creating', 'deleting', 'managing', 'error_managing',
           'error_managing_deleting', 'unmanaging')
# What its snapshots are that stand as they are
STANDING_SNAPSHOTS = ('available', 'backing-up', 'restoring')
# Digits that the ids of a volume's moves share with its own
STEM = 8
FIRST_ID = '00000000-0000-0000-0000-000000000000'
LAST_ID = 'ffffffff-ffff-ffff-ffff-ffffffffffff'

# As Cinder has it for its own transactions: with Galera any of them can be
# refused at its commit, for another one's sake.
_retried = oslo_db_api.wrap_db_retry(max_retries=5, retry_on_deadlock=True)


@dataclasses.dataclass(frozen=True)
class Move:
    """A move as the database has it.

    :ivar state: a state of :mod:`cinder_localstor.moves.table`
    :ivar since: when it came into that state, UTC
    :ivar done: names of the steps of that state that are done
    :ivar leaving: ids of the attachments that the source had at the start
    :ivar is_migration: whether an administrator migrates the volume, so that
        it goes though no instance waits for it
    :ivar problem: what is wrong, '' if nothing is
    :ivar shown: whether a guest may ever have used the destination's copy
    """

    transfer: transfer.Transfer
    state: str
    since: datetime.datetime
    done: tuple[str, ...] = ()
    leaving: tuple[str, ...] = ()
    is_migration: bool = False
    problem: str = ''
    shown: bool = True

    @property
    def move_id(self) -> str:
        return self.transfer.move_id

    @property
    def volume_id(self) -> str:
        return self.transfer.volume_id


def future_copy_name(move_id: str) -> str:
    """Name of the logical volume that a move will make."""
    return db.CONF.volume_name_template % move_id


def snapshot_copy_name(snapshot_id: str) -> str:
    """Name of the logical volume of a snapshot, as Cinder's LVM driver has
    it: LVM keeps names that begin with 'snapshot' for itself.
    """
    name = db.CONF.snapshot_name_template % snapshot_id
    return '_' + name if name.startswith('snapshot') else name


def generation_of(ctxt: context.RequestContext, volume_id: str) -> int:
    """How often a volume has moved, plus one."""
    return int(_noted(ctxt, volume_id).get(GENERATION, FIRST_GENERATION))


def _noted(ctxt: context.RequestContext, volume_id: str) -> dict[str, str]:
    """What is noted of a user's volume."""
    # Cinder's own way asks for the volume first.
    row = models.VolumeAdminMetadata
    with db.main_context_manager.reader.using(ctxt.elevated()) as session:
        return dict(session.query(row.key, row.value).filter(
            row.volume_id == volume_id, row.deleted == sa.false()).all())


def home(ctxt: context.RequestContext, volume_id: str) -> str:
    """The ``host@backend`` that a user's volume lives on."""
    volume = db.volume_get(ctxt.elevated(), volume_id)
    return volume_utils.extract_host(volume.host)


def exported(ctxt: context.RequestContext, host: str, idle: bool = False
             ) -> set[str]:
    """Ids of the users' volumes on a backend that have ordinary exports.

    :param host: ``host@backend``
    :param idle: only of those that nobody has, nor works at
    """
    row = models.Volume
    with db.main_context_manager.reader.using(ctxt) as session:
        query = session.query(row.id).filter(
            row.deleted == sa.false(), _lives_on(host),
            row.provider_location.is_not(None), *_is_idle() if idle else ())
        return {volume_id for volume_id, in query}


def idle(ctxt: context.RequestContext, host: str) -> set[str]:
    """Ids of the users' volumes on a backend that nobody has, nor works at.

    :param host: ``host@backend``
    """
    row = models.Volume
    with db.main_context_manager.reader.using(ctxt) as session:
        return {volume_id for volume_id, in session.query(row.id).filter(
            row.deleted == sa.false(), _lives_on(host), *_is_idle())}


def _is_idle() -> tuple[Any, ...]:
    row, attachment = models.Volume, models.VolumeAttachment
    backup = models.Backup
    return (row.status.in_(('available', 'in-use')),
            sa.or_(row.migration_status.is_(None),
                   row.migration_status.in_(MIGRATION_OVER)),
            # A clone of one that is in use, without an attachment
            ~sa.exists().where(backup.temp_volume_id == row.id,
                               backup.deleted == sa.false()),
            ~sa.exists().where(attachment.volume_id == row.id,
                               attachment.deleted == sa.false()))


def types_of(ctxt: context.RequestContext, volume_ids: Collection[str],
             prefix: str) -> dict[str, tuple[str, dict[str, str]]]:
    """The types of volumes that have extra specs whose keys have a prefix.

    :returns: by the id of each volume the name of its type, and those specs
    """
    volume, kind, spec = (models.Volume, models.VolumeType,
                          models.VolumeTypeExtraSpecs)
    found: dict[str, tuple[str, dict[str, str]]] = {}
    with db.main_context_manager.reader.using(ctxt) as session:
        for volume_id, name, key, value in session.query(
                volume.id, kind.name, spec.key, spec.value).filter(
                volume.id.in_(volume_ids), kind.id == volume.volume_type_id,
                spec.volume_type_id == kind.id, spec.deleted == sa.false(),
                spec.key.startswith(prefix, autoescape=True)):
            found.setdefault(volume_id, (name, {}))[1][key] = value
    return found


def _lives_on(host: str, column: Any = models.Volume.host) -> Any:
    """The condition that a row belongs to any pool of ``host@backend``."""
    # Escaped, because '_' is usual in host names and LIKE takes it for any
    # character.
    return (column.startswith(host + '#', autoescape=True)
            | (column == host))


def in_states(ctxt: context.RequestContext, host: str,
              states: Mapping[str, Collection[str]],
              since: datetime.datetime) -> list[tuple[str, str]]:
    """What on a backend is in some states and has not changed for long.

    All is asked in one question, because every node asks it all the time.

    :param states: by the names of Cinder's objects: Volume, Snapshot, Group,
        GroupSnapshot
    :param since: UTC without a zone
    :returns: such a name and an id
    """
    volume, group = models.Volume, models.Group
    hosts = {'Snapshot': (volume, models.Snapshot.volume_id),
             'GroupSnapshot': (group, models.GroupSnapshot.group_id)}
    selects = []
    for name, wanted in states.items():
        row = getattr(models, name)
        select = sa.select(sa.literal(name), row.id).where(
            row.deleted == sa.false(), row.status.in_(wanted),
            sa.func.coalesce(row.updated_at, row.created_at) < since)
        if name in hosts:
            owner, reference = hosts[name]
            select = select.join(owner, owner.id == reference).where(
                owner.deleted == sa.false())
        else:
            owner = row
        selects.append(select.where(_lives_on(host, owner.host)))
    with db.main_context_manager.reader.using(ctxt.elevated()) as session:
        return [(name, found) for name, found
                in session.execute(sa.union_all(*selects))]


def allocated(ctxt: context.RequestContext, host: str) -> int:
    """GiB of all copies on a backend, those of moves and snapshots among
    them.

    :param host: ``host@backend``
    """
    snapshot = models.Snapshot
    with db.main_context_manager.reader.using(ctxt) as session:
        volumes = session.query(sa.func.sum(models.Volume.size)).filter(
            models.Volume.deleted == sa.false(), _lives_on(host)).scalar()
        snapshots = session.query(sa.func.sum(snapshot.volume_size)).filter(
            snapshot.deleted == sa.false(),
            snapshot.provider_location == host).scalar()
    return int(volumes or 0) + int(snapshots or 0)


def copies_on(ctxt: context.RequestContext, host: str) -> list[copies.Copy]:
    """The copies of all users' volumes that live on a backend.

    :param host: ``host@backend``
    """
    row = models.Volume
    passing = row.status.in_(PASSING)
    # Others are the shadows of moves, and what Cinder itself migrates to.
    users = sa.or_(row.migration_status.is_(None),
                   sa.not_(row.migration_status.startswith(TARGET)))
    with db.main_context_manager.reader.using(ctxt) as session:
        generation = sa.orm.aliased(models.VolumeAdminMetadata)
        query = session.query(
            row.id, row._name_id, row.status, row.size, generation.value
        ).outerjoin(generation, sa.and_(
            generation.volume_id == row.id, generation.key == GENERATION,
            generation.deleted == sa.false())
        ).filter(row.deleted == sa.false(), _lives_on(host), passing | users)
        return [copies.Copy(
            host=host, volume_id=volume_id, size=size * units.Gi,
            name=db.CONF.volume_name_template % (name_id or volume_id),
            generation=int(value or FIRST_GENERATION), state=status,
            role=(copies.Role.PASSING if status in PASSING
                  else copies.Role.STANDING))
                for volume_id, name_id, status, size, value in query]


def snapshots_on(ctxt: context.RequestContext, host: str
                 ) -> list[copies.Copy]:
    """The snapshots that lie on a backend, wherever their volumes are.

    :param host: ``host@backend``
    """
    row = models.Snapshot
    with db.main_context_manager.reader.using(ctxt) as session:
        query = session.query(row.id, row.volume_id, row.volume_size,
                              row.status, row.provider_id).filter(
            row.deleted == sa.false(), row.provider_location == host)
        return [copies.Copy(
            host=host, name=snapshot_copy_name(snapshot_id),
            volume_id=volume_id, generation=0, size=size * units.Gi,
            state=status, snapshot_id=snapshot_id,
            role=(copies.Role.SNAPSHOT if status in STANDING_SNAPSHOTS
                  else copies.Role.PASSING),
            depends_on=copies.Origin(host, origin) if origin else None)
            for snapshot_id, volume_id, size, status, origin in query]


def unplaced(ctxt: context.RequestContext, host: str) -> list[copies.Copy]:
    """The snapshots of volumes on a backend of which no row says where they
    lie; each depends on the volume's copy.
    """
    row, volume = models.Snapshot, models.Volume
    with db.main_context_manager.reader.using(ctxt) as session:
        query = session.query(row.id, row.volume_id, row.volume_size,
                              row.status, volume._name_id)
        query = query.join(volume, volume.id == row.volume_id).filter(
            row.deleted == sa.false(), row.provider_location.is_(None),
            volume.deleted == sa.false(), _lives_on(host))
        return [copies.Copy(
            host=host, name=snapshot_copy_name(snapshot_id),
            volume_id=volume_id, generation=FIRST_GENERATION,
            size=size * units.Gi, role=copies.Role.SNAPSHOT, state=status,
            snapshot_id=snapshot_id,
            depends_on=copies.Origin(
                host, db.CONF.volume_name_template % (name_id or volume_id)))
                for snapshot_id, volume_id, size, status, name_id in query]


def origins(ctxt: context.RequestContext, host: str,
            moves: Iterable[Move] | None = None) -> set[str]:
    """Names of the copies on a backend that snapshots depend on, those that
    only copies read among them.

    :param moves: that the backend has a part in, if they are known
    """
    if moves is None:
        moves = for_host(ctxt, host)
    return {snapshot.depends_on.name for snapshot in snapshots_on(ctxt, host)
            if snapshot.depends_on} | {
        move.transfer.origin for move in moves
        if move.transfer.origin and move.transfer.source_host == host}


def is_snapshot_held(ctxt: context.RequestContext, host: str, name: str
                     ) -> bool:
    """Whether a user has the snapshot of a name, and wants to keep it."""
    return any(snapshot.name == name and snapshot.state != 'deleting'
               for snapshot in snapshots_on(ctxt, host))


def record_place(ctxt: context.RequestContext, snapshot: copies.Copy
                 ) -> dict[str, str | None]:
    """Note where a snapshot lies, and what it depends on there.

    :returns: the fields of its row that say so
    """
    place = {'provider_location': snapshot.host,
             'provider_id': (snapshot.depends_on.name if snapshot.depends_on
                             else None)}
    db.snapshot_update(ctxt, snapshot.snapshot_id, place)
    return place


def forget_place(ctxt: context.RequestContext, snapshot_id: str) -> None:
    """Note that there is nothing of a snapshot anywhere."""
    db.snapshot_update(ctxt, snapshot_id, {'provider_location': None,
                                           'provider_id': None})


def give_up_snapshot(ctxt: context.RequestContext, snapshot_id: str) -> None:
    """Note that nothing is left of a snapshot, which can only be deleted."""
    db.snapshot_update(ctxt, snapshot_id, {
        'status': 'error', 'provider_location': None, 'provider_id': None})


@_retried
def give_up_volume(ctxt: context.RequestContext, volume_id: str, host: str,
                   heir: objects.Service) -> bool:
    """Let a volume of a lost backend be one of another, as an error: there
    its users can delete it.

    :param host: ``host@backend`` that is lost
    :returns: whether it was there still
    """
    with db.main_context_manager.writer.using(ctxt.elevated()) as session:
        row = session.get(models.Volume, volume_id, with_for_update=True)
        if row.deleted or volume_utils.extract_host(row.host) != host:
            return False
        row.host = volume_utils.append_host(
            heir.host, volume_utils.extract_host(row.host, 'pool'))
        row.cluster_name = heir.cluster_name
        row.service_uuid = heir.uuid
        row.availability_zone = heir.availability_zone
        row.provider_location = row.provider_auth = None
        row.migration_status = None
        row.status = 'error'
        return True


def snapshots_of(ctxt: context.RequestContext, volume_id: str) -> list[str]:
    """Ids of the snapshots of a volume that lie on any backend."""
    row = models.Snapshot
    with db.main_context_manager.reader.using(ctxt) as session:
        return sorted(found for found, in session.query(row.id).filter(
            row.deleted == sa.false(), row.volume_id == volume_id,
            row.provider_location.is_not(None)))


def place_of(ctxt: context.RequestContext, snapshot_id: str) -> str | None:
    """The ``host@backend`` that a snapshot lies on, None for no one."""
    return db.snapshot_get(ctxt, snapshot_id).provider_location


def find_snapshot(ctxt: context.RequestContext, snapshot_id: str
                  ) -> copies.Copy | None:
    """A snapshot, None if it lies nowhere."""
    host = place_of(ctxt, snapshot_id)
    found = snapshots_on(ctxt, host) if host else []
    return next((snapshot for snapshot in found
                 if snapshot.snapshot_id == snapshot_id), None)


@_retried
def begin(ctxt: context.RequestContext, volume: objects.Volume,
          move: transfer.Transfer, state: str,
          destination: objects.Service, leaving: tuple[str, ...] = (),
          migrated_to: str = '',
          connecting: Collection[dict[str, Any]] | None = None) -> Move:
    """Make the shadow row of a move, with all that the move is.

    It stands for the copy that the volume's own row does not: that of a copy
    from a snapshot stands for the snapshot, if no user has that and it is on
    the same node.

    :param migrated_to: ``host@backend#pool`` that an administrator migrates
        the volume to, '' where it follows an instance
    :param connecting: what to note with it, see :func:`note_connecting`
    """
    now = timeutils.utcnow()
    host = migrated_to or volume_utils.append_host(
        move.destination_host, volume_utils.extract_host(volume.host, 'pool'))
    with db.main_context_manager.writer.using(ctxt.elevated()) as session:
        _add(session, volume, move, {STATE: state, SINCE: now.isoformat(),
                                     **_pack(move, leaving,
                                             bool(migrated_to))},
             host=host, cluster_name=destination.cluster_name,
             service_uuid=destination.uuid,
             availability_zone=destination.availability_zone)
        if connecting is not None:
            _note_connecting(session, volume.id, connecting)
    return Move(transfer=move, state=state, since=now, leaving=leaving,
                is_migration=bool(migrated_to), shown=False)


def _add(session: Any, volume: objects.Volume | models.Volume,
         move: transfer.Transfer, values: dict[str, str],
         **place: str | None) -> None:
    """Add the rows of a move.

    :param values: its metadata
    :param place: the fields of the shadow row that say where its copy is
    """
    shadow = models.Volume()
    shadow.update({
        'id': move.move_id,
        'user_id': volume.user_id,
        'project_id': volume.project_id,
        'size': (volume.size if not move.is_copy
                 else move.size // units.Gi
                 if move.taken_of and move.is_local else 0),
        'volume_type_id': volume.volume_type_id,
        'encryption_key_id': volume.encryption_key_id,
        **place,
        'status': 'maintenance',
        'attach_status': fields.VolumeAttachStatus.DETACHED,
        'use_quota': False,
        'migration_status': TARGET + volume.id,
        'display_name': '%s of %s' % ('copy' if move.is_copy else 'move',
                                      volume.id),
    })
    session.add(shadow)
    session.flush()
    _make(session, move.move_id, {
        SOURCE_HOST: move.source_host,
        DESTINATION_HOST: move.destination_host, **values})


def _make(session: Any, volume_id: str, values: dict[str, str]) -> None:
    """Make rows of metadata, with one statement."""
    session.execute(sa.insert(models.VolumeAdminMetadata), [
        {'volume_id': volume_id, 'key': key, 'value': value}
        for key, value in values.items()])


def _pack(move: transfer.Transfer, leaving: tuple[str, ...],
          is_migration: bool) -> dict[str, str]:
    """What never changes of a move, in as few rows as it takes."""
    text = json.dumps({
        'leaving': leaving, 'migration': is_migration,
        'transfer': {key: value for key, value in move.as_dict().items()
                     if key not in ('move_id', 'volume_id')}})
    return {'%s%d' % (PACKED, start // MOST_CHARACTERS):
            text[start:start + MOST_CHARACTERS]
            for start in range(0, len(text), MOST_CHARACTERS)}


def _unpack(move_id: str, volume_id: str, metadata: dict[str, str]) -> Move:
    parts = [key for key in metadata if key.startswith(PACKED)]
    if not parts:
        return _read_first_version(volume_id, metadata)
    packed = json.loads(''.join(metadata[key]
                                for key in sorted(parts, key=_number)))
    return Move(
        transfer=transfer.Transfer.from_dict({
            **packed['transfer'], 'move_id': move_id,
            'volume_id': volume_id}),
        leaving=tuple(packed['leaving']),
        # An earlier version does not know of any.
        is_migration=packed.get('migration', False), shown=SHOWN in metadata,
        **_progress(metadata))


def _number(part: str) -> int:
    return int(part.removeprefix(PACKED))


def _progress(metadata: dict[str, str]) -> dict[str, Any]:
    return {'state': metadata[STATE],
            'since': datetime.datetime.fromisoformat(metadata[SINCE]),
            'done': _words(metadata.get(DONE, '')),
            'problem': metadata.get(PROBLEM, '')}


def _read_first_version(volume_id: str, metadata: dict[str, str]) -> Move:
    """A move of the first version, which had a row for each of its fields."""
    values = _read(transfer.Transfer, metadata, PREFIX)
    export = _read(interface.Export, metadata, PREFIX + 'export_')
    return Move(
        transfer=transfer.Transfer(export=interface.Export(**export), **{
            **values, 'volume_id': volume_id}),
        leaving=_words(metadata.get(LEAVING, '')),
        # It did not always say.
        shown=metadata.get(SHOWN) != 'no', **_progress(metadata))


def _read(kind: type, metadata: dict[str, str], prefix: str
          ) -> dict[str, Any]:
    """The fields of a dataclass that are plain words or numbers."""
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name](metadata[prefix + field.name])
            for field in dataclasses.fields(kind)
            if hints[field.name] in (str, int)
            and (prefix + field.name in metadata
                 or field.default is dataclasses.MISSING)}


@_retried
def note_migration(ctxt: context.RequestContext, volume_id: str, host: str
                   ) -> None:
    """Note which backend migrates a volume, for its next start to know.

    :param host: ``host@backend`` whose volume manager does it
    """
    with db.main_context_manager.writer.using(ctxt.elevated()) as session:
        _put(session, volume_id, {MIGRATED_FROM: host})


@_retried
def note_revert(ctxt: context.RequestContext, volume_id: str, move_id: str
                ) -> None:
    """Note what a volume becomes when it is reverted, for the next start to
    know.

    :param move_id: '' when that is over
    """
    with db.main_context_manager.writer.using(ctxt.elevated()) as session:
        _put(session, volume_id, {REVERTED: move_id})


def is_reverted(ctxt: context.RequestContext, volume_id: str) -> bool:
    """Whether a volume is what it is being reverted to."""
    volume = db.volume_get(ctxt.elevated(), volume_id)
    return volume._name_id is not None and (
        volume._name_id == _noted(ctxt, volume_id).get(REVERTED))


def end_migrations(ctxt: context.RequestContext, host: str) -> dict[str, str]:
    """End what a backend was migrating when its service ended.

    Where Cinder itself copies a volume, to a row that is no move, it is left
    to Cinder.

    :returns: how each migration has ended, by the volume's id
    """
    row, mark = models.Volume, models.VolumeAdminMetadata
    with db.main_context_manager.reader.using(ctxt.elevated()) as session:
        marked = session.query(row).join(mark, mark.volume_id == row.id
                                         ).filter(
            row.deleted == sa.false(), row.migration_status == MIGRATING,
            mark.key == MIGRATED_FROM, mark.value == host,
            mark.deleted == sa.false()).all()
        copied = {status.removeprefix(TARGET) for status, in session.query(
            row.migration_status).outerjoin(mark, sa.and_(
                mark.volume_id == row.id, mark.key == STATE)).filter(
            row.deleted == sa.false(), mark.id.is_(None),
            row.migration_status.in_([TARGET + volume.id
                                      for volume in marked]))}
    return {volume.id: _end_migration(ctxt, volume.id, (
        'error' if volume_utils.extract_host(volume.host) == host
        else 'success')) for volume in marked if volume.id not in copied}


@_retried
def _end_migration(ctxt: context.RequestContext, volume_id: str, end: str
                   ) -> str:
    row = models.Volume
    with db.main_context_manager.writer.using(ctxt.elevated()) as session:
        session.query(row).filter_by(
            id=volume_id, migration_status=MIGRATING).update(
            {'migration_status': end, 'status': sa.case(
                (row.status.in_(LOCKED), row.previous_status),
                else_=row.status)}, synchronize_session=False)
    return end


@_retried
def link(ctxt: context.RequestContext, moves: Iterable[Move]) -> None:
    """Let volumes name those of their moves whose ids do not tell, see
    :func:`new_move_id`.
    """
    with db.main_context_manager.writer.using(ctxt.elevated()) as session:
        for move in moves:
            if not move.move_id.startswith(_stem(move.volume_id)):
                _put(session, move.volume_id,
                     {MOVE + move.move_id: move.move_id})


def _words(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(',')))


# What is asked for in every period, and at every step, is put together once:
# that takes longer than the question itself.
_ROW, _SHADOW = models.VolumeAdminMetadata, models.Volume
_OF_HOST = sa.orm.aliased(models.Volume)
# A row that is deleted has no migration_status any more; to ask for those that
# are not would lead databases to the wrong index.
_MOVES = sa.select(
    _SHADOW.id, _SHADOW.migration_status, _ROW.key, _ROW.value
).join(_ROW, _ROW.volume_id == _SHADOW.id).where(
    _ROW.deleted == sa.false(), _SHADOW.migration_status.startswith(TARGET),
    _ROW.key.startswith(PREFIX))
_MOVE = _MOVES.where(_SHADOW.id == sa.bindparam('move_id'))
_SOME_MOVES = _MOVES.where(
    _SHADOW.id.in_(sa.bindparam('move_ids', expanding=True)))
# From the volumes that there are: metadata are kept of those that were.
_MOVES_OF_HOST = _MOVES.where(_SHADOW.id.in_(
    sa.select(_OF_HOST.id).join(_ROW, _ROW.volume_id == _OF_HOST.id).where(
        _OF_HOST.deleted == sa.false(),
        _OF_HOST.migration_status.startswith(TARGET),
        _ROW.key.in_((SOURCE_HOST, DESTINATION_HOST)),
        _ROW.value == sa.bindparam('host'), _ROW.deleted == sa.false())))
_OWN_MOVES = _MOVES.where(
    _SHADOW.migration_status == sa.bindparam('target'))
_LINK = sa.orm.aliased(models.VolumeAdminMetadata)
_MOVES_OF_VOLUME = sa.union_all(
    _OWN_MOVES.where(_SHADOW.id.between(sa.bindparam('first_id'),
                                        sa.bindparam('last_id'))),
    # Metadata of a volume that was deleted are asked, too.
    _OWN_MOVES.where(_SHADOW.id.in_(sa.select(_LINK.value).where(
        _LINK.volume_id == sa.bindparam('volume_id'),
        _LINK.key.startswith(MOVE),
        ~_LINK.value.between(sa.bindparam('first_id'),
                             sa.bindparam('last_id'))))))


def _moves(ctxt: context.RequestContext, statement: sa.SelectBase = _MOVES,
           **values: Any) -> list[Move]:
    metadata: dict[tuple[str, str], dict[str, str]] = {}
    with db.main_context_manager.reader.using(ctxt.elevated()) as session:
        for move_id, status, key, value in session.execute(statement, values):
            metadata.setdefault(
                (move_id, status.removeprefix(TARGET)), {})[key] = value
    moves = [_unpack(*ids, found) for ids, found in metadata.items()
             if STATE in found]
    return sorted(moves, key=lambda move: move.since)


def get(ctxt: context.RequestContext, move_id: str) -> Move | None:
    """The move with an id; None when it has ended."""
    moves = _moves(ctxt, _MOVE, move_id=move_id)
    return moves[0] if moves else None


def for_volume(ctxt: context.RequestContext, volume_id: str) -> list[Move]:
    """The running moves of a user's volume, in the order of its travels.

    Snapshots of it that arrive are none, see :func:`snapshots_arriving`.
    """
    return sorted((move for move in _of_volume(ctxt, volume_id)
                   if not move.transfer.is_snapshot),
                  key=lambda move: move.transfer.generation)


def reading(ctxt: context.RequestContext, volume_id: str, name: str
            ) -> list[str]:
    """Ids of a volume's moves that have one of its copies as their source."""
    return [move.move_id for move in for_volume(ctxt, volume_id)
            if move.transfer.source_name == name]


def snapshots_arriving(ctxt: context.RequestContext, volume_id: str
                       ) -> list[Move]:
    """What brings the rest of a volume's snapshots that were taken while it
    arrived itself.
    """
    return [move for move in _of_volume(ctxt, volume_id)
            if move.transfer.is_snapshot]


def _of_volume(ctxt: context.RequestContext, volume_id: str) -> list[Move]:
    stem = _stem(volume_id)
    return _moves(ctxt, _MOVES_OF_VOLUME, volume_id=volume_id,
                  target=TARGET + volume_id,
                  first_id=stem + FIRST_ID[STEM:],
                  last_id=stem + LAST_ID[STEM:])


def for_host(ctxt: context.RequestContext, host: str) -> list[Move]:
    """The running moves that have their source or destination on a backend.

    :param host: ``host@backend``
    """
    return _moves(ctxt, _MOVES_OF_HOST, host=host)


def by_ids(ctxt: context.RequestContext, move_ids: Collection[str]
           ) -> list[Move]:
    """Those of some moves that have not ended, oldest first."""
    if not move_ids:
        return []
    return _moves(ctxt, _SOME_MOVES, move_ids=list(move_ids))


@_retried
def change_state(ctxt: context.RequestContext, move: Move, state: str,
                 swap: bool = False, begins: bool = False,
                 done: tuple[str, ...] = ()) -> Move:
    """Take a move to another state.

    :param swap: whether the identities change places
    :param begins: whether the volume's row gets the name of what arrives,
        if that is a volume; what it has been until then is kept from here on
    :param done: what counts as done in that state
    :raises MoveChanged: it is not in the state any more that `move` says
    """
    now = timeutils.utcnow()
    with db.main_context_manager.writer.using(ctxt.elevated()) as session:
        _enter(session, move, state, now, done)
        if swap:
            _swap(session, move)
        if begins and not move.transfer.is_snapshot:
            _give(session, move, now)
        if swap or begins:
            _put(session, move.move_id, {SHOWN: 'yes'})
    return dataclasses.replace(move, state=state, since=now, done=done,
                               problem='', shown=move.shown or swap or begins)


@_retried
def come_back(ctxt: context.RequestContext, move: Move, state: str,
              done: tuple[str, ...]) -> Move:
    """Take a move to a state in which its volume is the source's copy again,
    which then has to be as large as the volume is by now.

    :param done: what counts as done in that state
    :raises MoveChanged: it is not in the state any more that `move` says, or
        the volume is not the destination's copy
    """
    now = timeutils.utcnow()
    with db.main_context_manager.writer.using(ctxt.elevated()) as session:
        _enter(session, move, state, now, done)
        volume = session.get(models.Volume, move.volume_id,
                             with_for_update=True)
        if (volume is None or volume.deleted
                or _name(volume) != move.transfer.destination_name):
            raise exception.MoveChanged(move_id=move.move_id,
                                        state=move.state)
        back = dataclasses.replace(move.transfer,
                                   comes_back=volume.size * units.Gi)
        _put(session, move.move_id,
             _pack(back, move.leaving, move.is_migration))
        _swap(session, move)
    return dataclasses.replace(move, transfer=back, state=state, since=now,
                               done=done, problem='')


def _enter(session: Any, move: Move, state: str, now: datetime.datetime,
           done: tuple[str, ...]) -> None:
    """Let a move be in a state from now on.

    :raises MoveChanged: it is not in the state any more that `move` says
    """
    _hold(session, move, state)
    _put(session, move.move_id, {SINCE: now.isoformat(),
                                 DONE: ','.join(done), PROBLEM: ''})


def _hold(session: Any, move: Move, state: str) -> None:
    """Let a move be in a state for the rest of a transaction.

    :raises MoveChanged: it is not in the state any more that `move` says
    """
    row = models.VolumeAdminMetadata
    changed = session.query(row).filter(
        row.volume_id == move.move_id, row.key == STATE,
        row.value == move.state, row.deleted == sa.false()
    ).update({'value': state}, synchronize_session=False)
    if changed != 1:
        raise exception.MoveChanged(move_id=move.move_id, state=move.state)


@_retried
def hand_over(ctxt: context.RequestContext, moves: list[Move],
              volume_id: str) -> None:
    """Let moves be those of another user's volume."""
    with db.main_context_manager.writer.using(ctxt.elevated()) as session:
        for move in moves:
            session.query(models.Volume).filter_by(id=move.move_id).update(
                {'migration_status': TARGET + volume_id},
                synchronize_session=False)
            _unlink(session, move)
            _put(session, volume_id, {MOVE + move.move_id: move.move_id})


def _unlink(session: Any, move: Move) -> None:
    # For good: a volume may move a thousand times.
    session.query(models.VolumeAdminMetadata).filter_by(
        volume_id=move.volume_id, key=MOVE + move.move_id).delete(
        synchronize_session=False)


def _swap(session: Any, move: Move) -> None:
    """Let the user's row and the shadow row change places.

    They share nothing but what is listed here: neither the name that the
    user sees nor the status.
    """
    user = session.get(models.Volume, move.volume_id, with_for_update=True)
    shadow = session.get(models.Volume, move.move_id, with_for_update=True)
    for field in IDENTITY:
        ours, theirs = getattr(user, field), getattr(shadow, field)
        setattr(user, field, theirs)
        setattr(shadow, field, ours)
    ours = user._name_id or user.id
    theirs = shadow._name_id or shadow.id
    user._name_id = None if theirs == user.id else theirs
    shadow._name_id = None if ours == shadow.id else ours
    forward = theirs == move.move_id
    generation = move.transfer.generation - (0 if forward else 1)
    _put(session, move.volume_id, {GENERATION: str(generation)})


def _give(session: Any, move: Move, now: datetime.datetime) -> None:
    """Let a volume have the copy that arrives.

    :raises MoveChanged: it was deleted while that was made
    """
    volume = session.get(models.Volume, move.volume_id, with_for_update=True)
    if volume is None or volume.deleted:
        raise exception.MoveChanged(move_id=move.move_id, state=move.state)
    replaced = move.transfer.replaced
    if replaced and (_name(volume), volume_utils.extract_host(volume.host)
                     ) != (replaced, move.transfer.destination_host):
        raise exception.MoveChanged(move_id=move.move_id, state=move.state)
    volume._name_id = move.move_id
    if replaced:
        _put(session, volume.id, {GENERATION: str(move.transfer.generation)})
        kept = move.transfer.kept(new_move_id(volume.id),
                                  volume.size * units.Gi)
        _add(session, volume, kept, {
            STATE: KEEPING, SINCE: now.isoformat(), SHOWN: 'yes',
            **_pack(kept, (), False)}, **{field: getattr(volume, field)
                                          for field in PLACE})


def _name(volume: models.Volume) -> str:
    return db.CONF.volume_name_template % (volume._name_id or volume.id)


def _put(session: Any, volume_id: str, values: dict[str, str]) -> None:
    """Let rows of metadata have values; those that are missing are made,
    unless they would be empty.
    """
    row = models.VolumeAdminMetadata
    present = session.query(row).filter(
        row.volume_id == volume_id, row.key.in_(values),
        row.deleted == sa.false())
    changed = present.update({'value': sa.case(values, value=row.key)},
                             synchronize_session=False)
    if changed == len(values):
        return
    known = {key for key, in present.with_entities(row.key)} if changed else ()
    missing = {key: value for key, value in values.items()
               if value and key not in known}
    if missing:
        _make(session, volume_id, missing)


def record_done(ctxt: context.RequestContext, move: Move,
                done: tuple[str, ...]) -> Move:
    """Note that steps of the present state are done, and nothing is wrong.

    :raises MoveChanged: it is not in the state any more that `move` says
    """
    _record(ctxt, move, {DONE: ','.join(done),
                         **({PROBLEM: ''} if move.problem else {})})
    return dataclasses.replace(move, done=done, problem='')


def record_problem(ctxt: context.RequestContext, move: Move, problem: str
                   ) -> Move:
    """Note what keeps a move from going on in its state.

    Nothing but this is ever cut to fit.

    :returns: the move as it is then, unchanged if it has gone on: what has
        gone on has other problems, or none
    """
    problem = problem[:MOST_CHARACTERS]
    if problem != move.problem:
        try:
            _record(ctxt, move, {PROBLEM: problem})
        except exception.MoveChanged:
            return move
    return dataclasses.replace(move, problem=problem)


@_retried
def _record(ctxt: context.RequestContext, move: Move, values: dict[str, str]
            ) -> None:
    with db.main_context_manager.writer.using(ctxt.elevated()) as session:
        _hold(session, move, move.state)
        _put(session, move.move_id, values)


@_retried
def forget(ctxt: context.RequestContext, move: Move) -> None:
    """Remove the shadow row: the move has ended.

    :raises MoveChanged: it is not in the state any more that `move` says
    """
    ended = {'deleted': True, 'deleted_at': timeutils.utcnow()}
    with db.main_context_manager.writer.using(ctxt.elevated()) as session:
        _hold(session, move, move.state)
        _unlink(session, move)
        # Not by Cinder's volume_destroy, which would be tried again alone
        # after a deadlock, without what it depends on.
        for row in db.VOLUME_DEPENDENT_MODELS:
            session.query(row).filter_by(
                volume_id=move.move_id, deleted=False).update(
                ended, synchronize_session=False)
        session.query(models.Volume).filter_by(id=move.move_id).update(
            {'status': 'deleted', 'migration_status': None, **ended},
            synchronize_session=False)


def record_export(ctxt: context.RequestContext, volume_id: str,
                  export: dict[str, str]) -> None:
    """Note how remote connections to a user's volume are made.

    :param export: ``provider_location`` and ``provider_auth``
    """
    db.volume_update(ctxt.elevated(), volume_id, export)


def forget_export(ctxt: context.RequestContext, volume_id: str) -> None:
    """Note that a user's volume has no remote connection any more."""
    db.volume_update(ctxt.elevated(), volume_id,
                     {'provider_location': None, 'provider_auth': None})


def attachments(ctxt: context.RequestContext, volume_id: str
                ) -> list[dict[str, Any]]:
    """`id`, `instance_uuid`, `status`, `mountpoint`, `connector` and `kind` of
    all attachments; the last is the ``driver_volume_type`` of its connection,
    '' as long as Cinder has not noted that.
    """
    return [{'id': row.id, 'instance_uuid': row.instance_uuid,
             'status': row.attach_status, 'mountpoint': row.mountpoint,
             'connector': json.loads(row.connector) if row.connector else {},
             'kind': json.loads(row.connection_info or '{}').get(
                 'driver_volume_type', '')}
            for row in db.volume_attachment_get_all_by_volume_id(
                ctxt.elevated(), volume_id)]


def attached(ctxt: context.RequestContext, volume_ids: Collection[str]
             ) -> dict[str, set[str]]:
    """Ids of the attachments of many volumes, by the volume's."""
    found: dict[str, set[str]] = {}
    row = models.VolumeAttachment
    with db.main_context_manager.reader.using(ctxt.elevated()) as session:
        for volume_id, attachment_id in session.query(
                row.volume_id, row.id).filter(
                row.volume_id.in_(volume_ids), row.deleted == sa.false()):
            found.setdefault(volume_id, set()).add(attachment_id)
    return found


def users_on(ctxt: context.RequestContext, host: str
             ) -> dict[str, set[str]]:
    """Who has the volumes of a backend: by the volume's id instances' ids,
    and names of hosts where no instance is known.

    :param host: ``host@backend``
    """
    found: dict[str, set[str]] = {}
    row = models.VolumeAttachment
    with db.main_context_manager.reader.using(ctxt.elevated()) as session:
        for volume_id, instance, node in session.query(
                row.volume_id, row.instance_uuid, row.attached_host).join(
                models.Volume, models.Volume.id == row.volume_id).filter(
                row.deleted == sa.false(), _lives_on(host)):
            found.setdefault(volume_id, set()).add(
                instance or node or 'a host that has not said its name')
    return found


def with_snapshots(ctxt: context.RequestContext, host: str) -> set[str]:
    """Ids of the volumes on a backend that have snapshots, wherever these
    lie.

    :param host: ``host@backend``
    """
    row = models.Snapshot
    with db.main_context_manager.reader.using(ctxt) as session:
        return {volume_id for volume_id, in session.query(
            row.volume_id).join(
            models.Volume, models.Volume.id == row.volume_id).filter(
            row.deleted == sa.false(), _lives_on(host)).distinct()}


@_retried
def note_connecting(ctxt: context.RequestContext, volume_id: str,
                    unconnected: Collection[dict[str, Any]]) -> None:
    """Note that one of these attachments is being given a connection, and
    whose they are.

    The driver is not told which one, and Cinder records its connector only
    when the driver has answered.

    :param unconnected: as :func:`attachments` has them; without any the volume
        counts as given to whom it was before
    """
    with db.main_context_manager.writer.using(ctxt.elevated()) as session:
        _note_connecting(session, volume_id, unconnected)


def _note_connecting(session: Any, volume_id: str,
                     unconnected: Collection[dict[str, Any]]) -> None:
    ids = {row['id'][:SHORT_ID] for row in unconnected}
    instances = {row['instance_uuid'] or '' for row in unconnected}
    _put(session, volume_id, {
        key: ','.join(sorted(words))[:MOST_CHARACTERS] for key, words in (
            (CONNECTING, ids), (GIVEN_TO, instances))
        if words or key == CONNECTING})


def connecting(ctxt: context.RequestContext, volume_id: str,
               unconnected: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those attachments that :func:`note_connecting` has noted last."""
    noted = _words(_noted(ctxt, volume_id).get(CONNECTING, ''))
    return [row for row in unconnected if row['id'][:SHORT_ID] in noted]


def given_to(ctxt: context.RequestContext, volume_id: str) -> set[str]:
    """Ids of the instances that were given a volume last."""
    return set(_words(_noted(ctxt, volume_id).get(GIVEN_TO, '')))


def new_move_id(volume_id: str) -> str:
    """An id that no other move has.

    It begins as the volume's, so that the moves of a volume are found by the
    table's primary key.  No more of it does: two of them may be on one node,
    where the native helper tells ublk devices apart by the first 16 digits.
    """
    return _stem(volume_id) + str(uuid.uuid4())[STEM:]


def _stem(volume_id: str) -> str:
    """What the ids of a volume's moves begin with."""
    return volume_id[:STEM]
