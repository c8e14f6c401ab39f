# SPDX-License-Identifier: Apache-2.0
"""What users are told of failures that they would see as a status only.

They read it with ``openstack volume message list``.  Cinder's API shows a
message as an action and a detail of two fixed lists, so that nothing of an
error's own text reaches a user.  There is no detail for most of what can
happen here; the nearest that is true is taken.

Cinder tells of some failures by itself: extensions, snapshots, volumes without
a source, backups.  Of those nothing is said here.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import datetime
import threading
import time

from cinder import context
from cinder.db import api as db
from cinder import exception as cinder_exception
from cinder.message import api as message_api
from cinder.message import message_field
from cinder import objects
from oslo_context import context as oslo_context
from oslo_log import log as logging
from oslo_utils import excutils

from cinder_localstor import exception
from cinder_localstor.moves import table
from cinder_localstor import rows

LOG = logging.getLogger(__name__)

# Of Cinder's lists: what a user reads before the colon, and after it
Action = tuple[str, str]
Detail = tuple[str, str]
ERROR, WARNING = 'ERROR', 'WARNING'

# Seconds for which a volume that arrives has to wait before its user is told.
# A node may start anew meanwhile; then Linux begins to complain in the guest.
PATIENCE = 120

# Another node is away: it will work when that is back.
AWAY = (exception.PeerDown, exception.SourceUnreachable)
# What is lost does not come back by itself.
LOST = (exception.SnapshotInvalid, exception.SnapshotLost,
        exception.CopyLost, exception.MetadataMissing, exception.EngineFailed)


def detail_of(error: Exception, otherwise: Detail) -> Detail:
    """The detail of Cinder's that comes next to an error.

    :param otherwise: what is true of all errors of an action
    """
    kind = exception.kind_of(error)
    if issubclass(kind, AWAY):
        return message_field.Detail.DRIVER_NOT_INITIALIZED
    if issubclass(kind, cinder_exception.InvalidVolume):
        return message_field.Detail.VOLUME_INVALID_STATE
    return otherwise


def tell(what: objects.Volume | objects.Snapshot, action: Action,
         detail: Detail, level: str = ERROR) -> None:
    """Leave a message for the project of a volume or a snapshot."""
    asked = oslo_context.get_current()
    message_api.API().create(
        context.RequestContext(
            project_id=what.project_id, is_admin=True, overwrite=False,
            request_id=asked.request_id if asked else None),
        action, resource_uuid=what.id, detail=detail, level=level,
        resource_type=(message_field.Resource.VOLUME_SNAPSHOT
                       if isinstance(what, objects.Snapshot)
                       else message_field.Resource.VOLUME))


@contextlib.contextmanager
def told(what: objects.Volume | objects.Snapshot, action: Action,
         otherwise: Detail, when: Callable[[], bool]) -> Iterator[None]:
    """Let a user know of an error that is on its way to Cinder.

    :param otherwise: see :func:`detail_of`
    :param when: whether a user waits for it, and nobody else tells
    """
    try:
        yield
    except Exception as error:
        with excutils.save_and_reraise_exception():
            try:
                if when():
                    tell(what, action, detail_of(error, otherwise))
            except Exception:
                LOG.exception('The user of %s is not told', what.id)


class Waiting:
    """Knows which volumes that arrive have to wait, and tells it once.

    Since when they wait is of this process alone; what was told stands in
    the database.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Of the clock that never goes back, by the moves' ids
        self._since: dict[str, float] = {}
        self._told: set[str] = set()

    def goes_on(self, move: rows.Move) -> None:
        """A move has nothing that it has to wait for."""
        with self._lock:
            self._since.pop(move.move_id, None)
            self._told.discard(move.move_id)

    def waits(self, ctxt: context.RequestContext, move: rows.Move,
              error: Exception) -> None:
        """A move has failed to go on, and is tried again."""
        if not table.TABLE[table.State(move.state)].serves:
            # No guest has to wait.
            self.goes_on(move)
        elif self._is_due(move):
            try:
                self._tell_once(ctxt, move, error)
            except Exception:
                LOG.exception('The user of volume %s is not told yet',
                              move.volume_id)
            else:
                with self._lock:
                    self._told.add(move.move_id)

    def _is_due(self, move: rows.Move) -> bool:
        now = time.monotonic()
        with self._lock:
            since = self._since.setdefault(move.move_id, now)
            return now - since >= PATIENCE and move.move_id not in self._told

    def _tell_once(self, ctxt: context.RequestContext, move: rows.Move,
                   error: Exception) -> None:
        action, otherwise = (
            (message_field.Action.CREATE_VOLUME_FROM_BACKEND,
             message_field.Detail.DRIVER_FAILED_CREATE)
            if move.transfer.is_copy
            else (message_field.Action.ATTACH_VOLUME,
                  message_field.Detail.UNKNOWN_ERROR))
        is_lost = issubclass(exception.kind_of(error), LOST)
        detail = otherwise if is_lost else detail_of(
            error, message_field.Detail.UNKNOWN_ERROR)
        level = ERROR if is_lost else WARNING
        # Another process may have told it before, and databases may keep
        # whole seconds only.
        since = move.since - datetime.timedelta(seconds=1)
        if not any(row['created_at'] >= since for row in db.message_get_all(
                ctxt.elevated(), {
                    'resource_uuid': move.volume_id, 'action_id': action[0],
                    'detail_id': detail[0], 'message_level': level})):
            tell(objects.Volume.get_by_id(ctxt, move.volume_id), action,
                 detail, level)
