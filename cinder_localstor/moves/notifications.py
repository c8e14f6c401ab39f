# SPDX-License-Identifier: Apache-2.0
"""What the message bus is told of moves, for those who watch a cloud.

The names are ``localstor.move.<event>`` and ``localstor.copy.<event>``.  What
begins with ``volume.`` is Cinder's own: those who match ``volume.*``, as
telemetry does, would take ours for something that they know.

The payload is flat as Cinder's is, and what is of the volume has the names
that Cinder gives it.  It is not Cinder's own payload, because that has the
attachments with their connections, and these have CHAP secrets.

A notification says what a transaction has made true before.  One may be lost,
and after a crash one may come twice or be left out, so who has to be sure
reads the volume.  No move waits for one, or fails of one: they are sent by a
thread of their own.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import enum
import functools
import threading
from typing import Any

from cinder import context
from cinder import objects
from cinder import rpc
from cinder import utils
from oslo_config import cfg
from oslo_log import log as logging

from cinder_localstor.datapath import engine
from cinder_localstor.moves import queues
from cinder_localstor.moves import table
from cinder_localstor import rows

LOG = logging.getLogger(__name__)

MOVE, COPY = 'localstor.move.', 'localstor.copy.'
# The publisher is this and the host, as with Cinder's own about volumes.
PUBLISHER = 'volume'
# Those that wait to be sent; more are lost.
BACKLOG = 1000
# By default oslo.messaging tries for ever to reach a broker that is away, and
# would hold up the end of the service.
RETRIES = 2
# Progress is told so many times for each move at most, the end of it included.
PARTS = 10


class Event(str, enum.Enum):
    """What has happened: the last word of its name, and what it says."""

    meaning: str

    START = 'start', 'It has begun: what it is stands in the database.'
    USABLE = ('usable', 'The volume can be used on the destination, and lives '
              'there from now on.')
    PROGRESS = 'progress', 'Another tenth of it has arrived, or several.'
    ARRIVED = ('arrived', 'All of it has arrived: the volume needs the source '
               'no more.')
    END = 'end', 'It has ended, and all is removed that it had to remove.'
    KEPT = ('kept', 'All is done but to remove the source copy, which stays '
            'until no snapshot lies on it.')
    ERROR = ('error', 'Something keeps it from going on in its state. It is '
             'tried again until it succeeds; what keeps it may be another '
             'thing by then.')
    ABORTING = ('aborting', 'The volume stays on the source, or is back '
                'there. What is on the destination is being removed.')
    ABORTED = ('aborted', 'The volume is on the source, and nothing is left '
               'on the destination.')
    UNDOING = ('undoing', 'The volume could not be made. What there is of it '
               'is being removed.')
    UNDONE = 'undone', 'Nothing is left of the volume that failed.'
    DISCARDING = ('discarding', 'The volume was deleted, or has moved on and '
                  'arrived at a third node. The copies are being removed.')
    DISCARDED = 'discarded', 'Nothing is left of it.'

    def __new__(cls, word: str, meaning: str) -> Event:
        event = str.__new__(cls, word)
        event._value_ = word
        event.meaning = meaning
        return event


# What a move tells when it comes into a state; an operator's command takes it
# to RETURNING, and tells nothing.
EVENTS = {
    table.State.CREATING: Event.START,
    table.State.PREPARING: Event.START,
    table.State.STARTING: Event.USABLE,
    table.State.MIGRATING: Event.USABLE,
    table.State.COMPLETING: Event.ARRIVED,
    table.State.KEEPING: Event.KEPT,
    table.State.ABORTING: Event.ABORTING,
    table.State.UNDOING: Event.UNDOING,
    table.State.DISCARDING: Event.DISCARDING,
    table.State.SUCCESS: Event.END,
    table.State.ABORTED: Event.ABORTED,
    table.State.UNDONE: Event.UNDONE,
    table.State.DISCARDED: Event.DISCARDED,
}


@dataclasses.dataclass(frozen=True)
class Notice:
    """What is to be told of a move.

    :ivar move: as the transaction has left it
    :ivar problem: why, '' where nothing is wrong
    :ivar arrived: bytes, None where they were not looked at
    """

    event: Event
    move: rows.Move
    problem: str = ''
    arrived: int | None = None

    @property
    def name(self) -> str:
        """The event type on the bus."""
        return ((COPY if self.move.transfer.is_copy else MOVE)
                + self.event.value)

    @property
    def harmless_problem(self) -> str:
        """The problem without the secret of the move.

        Errors have none.  But they tell what tools have said.
        """
        secret = self.move.transfer.export.password
        return self.problem.replace(secret, '***') if secret else self.problem


@dataclasses.dataclass(frozen=True)
class Field:
    """A field of the payload, and what it says."""

    name: str
    meaning: str
    read: Callable[[Notice, objects.Volume], Any]


FIELDS = (
    Field('tenant_id', 'Id of the project that has the volume',
          lambda notice, volume: volume.project_id),
    Field('user_id', 'Id of the user who has made it',
          lambda notice, volume: volume.user_id),
    Field('volume_id', 'Id of the volume, which a move does not change',
          lambda notice, volume: notice.move.volume_id),
    Field('display_name', 'Its name',
          lambda notice, volume: volume.display_name),
    Field('volume_type', 'Id of its type',
          lambda notice, volume: volume.volume_type_id),
    Field('size', 'Its size in GiB', lambda notice, volume: volume.size),
    Field('status', 'Its status', lambda notice, volume: volume.status),
    Field('availability_zone', 'Its availability zone',
          lambda notice, volume: volume.availability_zone),
    Field('host', 'Where it lives, ``host@backend#pool``',
          lambda notice, volume: volume.host),
    Field('move_id', 'Id of the move or the copy',
          lambda notice, volume: notice.move.move_id),
    Field('state', 'The state that it is in, as above',
          lambda notice, volume: str(table.State(notice.move.state).value)),
    Field('generation', 'How often the volume has moved with it, plus one',
          lambda notice, volume: notice.move.transfer.generation),
    Field('source_host', 'Where it comes from, ``host@backend``',
          lambda notice, volume: notice.move.transfer.source_host),
    Field('destination_host', 'Where it goes, ``host@backend``',
          lambda notice, volume: notice.move.transfer.destination_host),
    Field('engine', 'What serves the volume meanwhile: ``clone`` or '
          '``hydrator``',
          lambda notice, volume: notice.move.transfer.engine),
    Field('transfer_bytes', 'Bytes that have to arrive',
          lambda notice, volume: notice.move.transfer.size),
    Field('arrived_bytes', 'Bytes that have arrived, what guests have '
          'written meanwhile among them; null but with ``progress`` and '
          '``arrived``', lambda notice, volume: notice.arrived),
    Field('problem', 'What is wrong, with ``error``, ``aborting`` and '
          '``undoing``; empty otherwise',
          lambda notice, volume: notice.harmless_problem),
)


class Notifications:
    """Tells the bus of the moves that one backend drives."""

    def __init__(self, host: str, queue: queues.Queue) -> None:
        """:param host: ``host@backend`` of this node
        :param queue: does the sending; it keeps the order if it has one worker
        """
        self._host = host
        self._queue = queue
        self._room = threading.BoundedSemaphore(BACKLOG)
        # How many parts of each move have arrived, as far as was told
        self._parts: dict[str, int] = {}

    def entered(self, move: rows.Move, before: rows.Move | None = None,
                problem: str = '') -> None:
        """A move has come into the state that it is in.

        :param before: the move until then, None where it has begun
        :param problem: why, if it failed
        """
        self._parts.pop(move.move_id, None)
        event = EVENTS[table.State(move.state)]
        if before is None or event is not EVENTS.get(
                table.State(before.state)):
            self._tell(Notice(event, move, problem, move.transfer.size
                              if event is Event.ARRIVED else None))

    def progressed(self, move: rows.Move, progress: engine.Progress) -> None:
        """So much of a move has arrived, which is told in ten parts.

        What has arrived at the first look of a process is told by nobody: at
        a restart all moves would tell it again.
        """
        arrived = min(progress.local, move.transfer.size)
        parts = PARTS * arrived // move.transfer.size
        told = self._parts.setdefault(move.move_id, parts)
        if told < parts < PARTS:
            self._parts[move.move_id] = parts
            self._tell(Notice(Event.PROGRESS, move, arrived=arrived))

    def troubled(self, move: rows.Move) -> None:
        """Something keeps a move from going on that nothing did before."""
        self._tell(Notice(Event.ERROR, move, move.problem))

    def _tell(self, notice: Notice) -> None:
        try:
            if not utils.notifications_enabled(cfg.CONF):
                return
            if not self._room.acquire(blocking=False):
                LOG.warning('%(event)s of move %(move)s is not told: '
                            '%(count)d notifications wait for the bus', {
                                'event': notice.name, 'count': BACKLOG,
                                'move': notice.move.move_id})
                return
            self._queue.submit('', functools.partial(self._send, notice))
        except Exception:
            LOG.exception('%(event)s of move %(move)s is not told', {
                'event': notice.name, 'move': notice.move.move_id})

    def _send(self, notice: Notice) -> None:
        try:
            ctxt = context.get_admin_context(read_deleted='yes')
            volume = objects.Volume.get_by_id(ctxt, notice.move.volume_id)
            notifier = rpc.get_notifier(PUBLISHER, self._host).prepare(
                retry=RETRIES)
            send = (notifier.error if notice.event is Event.ERROR
                    else notifier.info)
            send(ctxt, notice.name, {
                field.name: field.read(notice, volume) for field in FIELDS})
        except Exception:
            LOG.exception('%(event)s of move %(move)s is not told', {
                'event': notice.name, 'move': notice.move.move_id})
        finally:
            self._room.release()
