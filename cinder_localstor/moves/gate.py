# SPDX-License-Identifier: Apache-2.0
"""What may be done with a volume while it moves, as a table.

Whatever Cinder asks comes through :class:`Gate` first.  It reads the volume's
row and its moves as they are now, under the volume's lock: what Cinder gives
may be from before the volume moved.  A volume with several moves may do what
all of them allow.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import enum

from cinder import context
from cinder import exception as cinder_exception
from cinder import objects
from cinder.volume import volume_utils
from oslo_concurrency import lockutils
import tenacity

from cinder_localstor import exception
from cinder_localstor.moves import table
from cinder_localstor import rows

# Seconds between two looks at a volume that is waited for
SOON = 1


class Operation(str, enum.Enum):
    """What Cinder asks for; the value is what users are told."""

    LOCAL = 'attach it where it lives'
    MOVE = 'attach it on another node'
    REMOTE = 'connect to it from afar'
    DETACH = 'detach it'
    EXTEND = 'extend it'
    DELETE = 'delete it'
    UNMANAGE = 'unmanage it'
    SNAPSHOT = 'take a snapshot of it'
    MANAGE = 'manage a snapshot of it'
    CLONE = 'clone it'
    REVERT = 'revert it to a snapshot'
    BACKUP = 'back it up'
    SEND = 'migrate it to a peer'
    MIGRATE = 'migrate it'
    RETYPE = 'retype it'
    GROUP = 'add it to a group'
    GROUP_SNAPSHOT = 'take a snapshot of its group'


class Answer(str, enum.Enum):
    """What becomes of it; the value is what the documentation shows."""

    YES = 'yes'
    WAITS = 'waits until decided'
    SEALS = 'waits until its source is sealed'
    ARRIVES = 'waits until it has arrived'
    ENDS = 'waits until the end'
    UNDECIDED = 'no, until decided'
    MOVES = 'no, until the end'
    DELETED = 'no'


# When it will work
ONE_NODE = 'it is attached on one node only, for it may yet go back'
WHEN = {Answer.WAITS: ONE_NODE,
        Answer.SEALS: 'the node that it comes from has answered',
        Answer.ARRIVES: 'all of it has arrived',
        Answer.ENDS: 'the move has ended',
        Answer.UNDECIDED: ONE_NODE,
        Answer.MOVES: 'the move has ended'}

# The column of a volume that does not move
STANDING = 'standing'
COLUMNS = (STANDING, *table.TABLE)


def _answers(*answers: Answer) -> dict[str, Answer]:
    return dict(zip(COLUMNS, answers, strict=True))


# Those that are worth waiting for
PATIENT = (Answer.WAITS, Answer.SEALS, Answer.ARRIVES, Answer.ENDS)

_YES, _WAITS, _SEALS, _ARRIVES, _ENDS, _UNDECIDED, _MOVES, _DELETED = Answer

# standing, creating, preparing, starting, migrating, completing, keeping,
# returning, aborting, undoing, discarding
TABLE: dict[Operation, dict[str, Answer]] = {
    Operation.LOCAL: _answers(
        _YES, _UNDECIDED, _UNDECIDED, _YES, _YES, _YES, _YES, _MOVES, _YES,
        _YES, _DELETED),
    Operation.MOVE: _answers(
        _YES, _UNDECIDED, _UNDECIDED, _UNDECIDED, _YES, _YES, _YES, _MOVES,
        _YES, _YES, _DELETED),
    Operation.SEND: _answers(
        _YES, _UNDECIDED, _UNDECIDED, _UNDECIDED, _YES, _YES, _YES, _MOVES,
        _YES, _YES, _DELETED),
    Operation.REMOTE: _answers(
        _YES, _UNDECIDED, _UNDECIDED, _UNDECIDED, _YES, _YES, _YES, _MOVES,
        _YES, _YES, _DELETED),
    # Who has left is never told to come back.
    Operation.DETACH: _answers(
        _YES, _YES, _YES, _YES, _YES, _YES, _YES, _YES, _YES, _YES, _YES),
    # The other copy does not grow.
    Operation.EXTEND: _answers(
        _YES, _UNDECIDED, _WAITS, _WAITS, _YES, _YES, _YES, _ENDS, _YES, _YES,
        _DELETED),
    # What is recorded is carried out: it can be asked for again.
    Operation.DELETE: _answers(
        _YES, _WAITS, _WAITS, _YES, _YES, _YES, _YES, _ENDS, _YES, _YES, _YES),
    # There would be two to give away, or a half.
    Operation.UNMANAGE: _answers(
        _YES, _UNDECIDED, _MOVES, _MOVES, _MOVES, _MOVES, _MOVES, _MOVES,
        _MOVES, _YES, _DELETED),
    # It arrives itself then.
    Operation.SNAPSHOT: _answers(
        _YES, _UNDECIDED, _WAITS, _WAITS, _SEALS, _ARRIVES, _YES, _ENDS, _YES,
        _YES, _DELETED),
    Operation.CLONE: _answers(
        _YES, _UNDECIDED, _WAITS, _WAITS, _SEALS, _ARRIVES, _YES, _ENDS, _YES,
        _YES, _DELETED),
    # What it has until then is left behind as in a move.
    Operation.REVERT: _answers(
        _YES, _UNDECIDED, _WAITS, _WAITS, _SEALS, _ARRIVES, _YES, _ENDS, _YES,
        _YES, _DELETED),
    # What is on another node still would not be in it.
    Operation.MANAGE: _answers(
        _YES, _UNDECIDED, _WAITS, _WAITS, _ARRIVES, _ARRIVES, _YES, _ENDS,
        _YES, _YES, _DELETED),
    Operation.BACKUP: _answers(
        _YES, _UNDECIDED, _UNDECIDED, _UNDECIDED, _YES, _YES, _YES, _MOVES,
        _YES, _YES, _DELETED),
    # The two rows would change places under the move.
    Operation.MIGRATE: _answers(
        _YES, _UNDECIDED, _MOVES, _MOVES, _ENDS, _ENDS, _MOVES, _ENDS, _ENDS,
        _YES, _DELETED),
    # Cinder then writes once more where it is.
    Operation.RETYPE: _answers(
        _YES, _UNDECIDED, _UNDECIDED, _UNDECIDED, _YES, _YES, _YES, _MOVES,
        _YES, _YES, _DELETED),
    # A group is on one node.
    Operation.GROUP: _answers(
        _YES, _UNDECIDED, _UNDECIDED, _UNDECIDED, _YES, _YES, _YES, _MOVES,
        _YES, _YES, _DELETED),
    # No other volume of the group waits meanwhile.
    Operation.GROUP_SNAPSHOT: _answers(
        _YES, _UNDECIDED, _UNDECIDED, _UNDECIDED, _MOVES, _MOVES, _YES, _MOVES,
        _YES, _YES, _DELETED),
}

# Cinder leaves a volume as it was where one of these is told.
TOO_EARLY: dict[Operation, type[cinder_exception.VolumeIsBusy]] = {
    Operation.DELETE: exception.DeletedTooEarly,
    Operation.UNMANAGE: exception.UnmanagedTooEarly}

# Who asks for one of these waits for hours anyway, while Cinder copies.
UNHURRIED = (Operation.MIGRATE,)


def is_bound(volume: objects.Volume) -> bool:
    """Whether a volume may not leave its node.

    A group is on one node and can be deleted only while its volumes are
    there, too.  What Cinder itself migrates or copies to changes places with
    another row in the end, and a move would be left with the wrong one.
    """
    return bool(volume.group_id) or (
        volume.migration_status not in rows.MIGRATION_OVER)


def _answer(move: rows.Move, operation: Operation, name: str) -> Answer:
    state = table.State(move.state)
    if (state is table.State.DISCARDING
            and move.transfer.destination_name != name):
        # In the middle of a chain another move has taken the volume on. What
        # is removed is a copy that it is no more, as in an abort.
        state = table.State.ABORTING
    answer = TABLE[operation][state]
    if (answer is Answer.ARRIVES and table.has_released(move)
            or answer is Answer.SEALS and table.SEAL_SOURCE.is_done(move)):
        return Answer.YES
    return answer


def refusal(move: rows.Move, operation: Operation, name: str
            ) -> Exception | None:
    """What a user is told whose operation a move does not allow now.

    :param name: of the copy that the volume is
    """
    answer = _answer(move, operation, name)
    if answer is Answer.DELETED:
        return exception.VolumeIsDiscarded(
            volume_id=move.volume_id, action=operation.value,
            move_id=move.move_id)
    if answer not in WHEN:
        return None
    goes_to = (move.transfer.source_host
               if move.state == table.State.RETURNING
               else move.transfer.destination_host)
    if operation in TOO_EARLY:
        return TOO_EARLY[operation](
            volume_id=move.volume_id, reason='is on its way to %s (move '
            '%s, %s)' % (goes_to, move.move_id, move.state))
    return exception.VolumeIsMoving(
        volume_id=move.volume_id, move_id=move.move_id, state=move.state,
        action=operation.value, when=WHEN[answer], destination=goes_to)


class _Waits(Exception):
    """It will work by and by."""

    def __init__(self, refusal: Exception) -> None:
        super().__init__()
        self.refusal = refusal


def check_moves(ctxt: context.RequestContext, volume_id: str,
                operation: Operation) -> None:
    """:raises: a :func:`refusal` by any of a volume's moves"""
    try:
        _check_moves(ctxt, objects.Volume.get_by_id(ctxt, volume_id),
                     operation)
    except _Waits as waits:
        raise waits.refusal from None


def _check_moves(ctxt: context.RequestContext, volume: objects.Volume,
                 operation: Operation) -> None:
    for move in rows.for_volume(ctxt, volume.id):
        refused = refusal(move, operation, volume.name)
        if refused is None:
            continue
        if _answer(move, operation, volume.name) in PATIENT:
            raise _Waits(refused)
        raise refused


class Gate:
    """Lets an operation happen, or says when it can."""

    def __init__(self, host: str, patience: float) -> None:
        """:param host: ``host@backend`` of this node
        :param patience: seconds that an operation waits that may wait
        """
        self.host = host
        self._patience = patience

    def check(self, ctxt: context.RequestContext, volume_id: str,
              operation: Operation) -> objects.Volume:
        """The row of a volume as it is now, if the operation may happen now.

        Nothing is waited for.

        :raises VolumeIsMoving: it can't yet
        :raises VolumeIsDiscarded: the volume is as good as deleted
        :raises VolumeElsewhere: it lives on another node
        :raises DeletedTooEarly: the same, for a volume that is deleted
        :raises UnmanagedTooEarly: the same, for one that is unmanaged
        """
        try:
            with self.lock(volume_id):
                return self._check(ctxt, volume_id, operation)
        except _Waits as waits:
            raise waits.refusal from None

    @contextlib.contextmanager
    def enter(self, ctxt: context.RequestContext, volume_id: str,
              operation: Operation) -> Iterator[objects.Volume]:
        """Hold a volume's lock while the operation happens, on its row as it
        is now; what may wait is waited for, if that is :data:`UNHURRIED` as
        long as it takes.

        :raises: what :meth:`check` raises
        """
        with contextlib.ExitStack() as held:
            try:
                for attempt in tenacity.Retrying(
                        retry=tenacity.retry_if_exception_type(_Waits),
                        stop=(tenacity.stop_never
                              if operation in UNHURRIED else
                              tenacity.stop_after_delay(self._patience)),
                        wait=tenacity.wait_fixed(SOON), reraise=True):
                    with attempt, contextlib.ExitStack() as trying:
                        trying.enter_context(self.lock(volume_id))
                        volume = self._check(ctxt, volume_id, operation)
                        held.enter_context(trying.pop_all())
            except _Waits as waits:
                raise waits.refusal from None
            yield volume

    @staticmethod
    def lock(volume_id: str) -> contextlib.AbstractContextManager:
        """What no operation begins under."""
        return lockutils.lock('localstor-volume-' + volume_id)

    def _check(self, ctxt: context.RequestContext, volume_id: str,
               operation: Operation) -> objects.Volume:
        volume = objects.Volume.get_by_id(ctxt, volume_id)
        _check_moves(ctxt, volume, operation)
        home = volume_utils.extract_host(volume.host)
        if home != self.host and operation is not Operation.DETACH:
            if operation in TOO_EARLY:
                raise TOO_EARLY[operation](
                    volume_id=volume_id, reason='lives on %s by now' % home)
            raise exception.VolumeElsewhere(volume_id=volume_id, host=home,
                                            asked=self.host)
        return volume
