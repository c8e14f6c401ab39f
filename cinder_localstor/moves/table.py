# SPDX-License-Identifier: Apache-2.0
"""States of a move, as a table.

A *copy* is a move whose source stays: a new volume arrives from a snapshot, or
a snapshot from what its volume arrives from.  It begins in a state of its own,
and goes the way of a move from there.

The owner drives the move: it runs its own steps and asks the peer for the
others.  It is the node that the user's volume lives on, or lived on before it
moved on, so no two nodes drive one move.  A state is recorded before its first
step; every step is idempotent and is recorded when it is done.

A volume may move on, or back, while it still arrives: then its moves form a
chain, each the source of the next.  What is in the middle is passed on as soon
as all of it has arrived at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterable
import dataclasses
import enum
from typing import ClassVar

from cinder_localstor.datapath import destination
from cinder_localstor.datapath import source
from cinder_localstor.datapath import transfer
from cinder_localstor import rows


class State(str, enum.Enum):
    """Where a move is; the value is what the database holds."""

    CREATING = 'creating'
    PREPARING = 'preparing'
    STARTING = 'starting'
    MIGRATING = 'migrating'
    COMPLETING = 'completing'
    KEEPING = 'keeping'
    RETURNING = 'returning'
    ABORTING = 'aborting'
    UNDOING = 'undoing'
    DISCARDING = 'discarding'
    # The shadow row is gone.
    SUCCESS = 'success'
    ABORTED = 'aborted'
    UNDONE = 'undone'
    DISCARDED = 'discarded'


class Side(str, enum.Enum):
    """One of the two nodes of a move."""

    SOURCE = 'source'
    DESTINATION = 'destination'


class Identity(str, enum.Enum):
    """What happens to the two rows in the transaction that enters a state."""

    STAYS = 'stays'
    SWITCHES = 'switches'
    # The new volume's row says which copy it is.
    BEGINS = 'begins'


class Fact(str, enum.Enum):
    """What may be true of a move: its word, by whom it is known, and when it
    is true.

    :mod:`facts` finds it out.
    """

    known_by: str
    meaning: str

    READY = 'ready', 'steps', 'all steps of the state are done'
    WANTED = ('wanted', 'database', 'somebody waits for it at the '
              'destination, or an administrator migrates it')
    SOURCE_LEFT = ('source_left', 'database',
                   'no attachment of before the move is left')
    DESTINATION_LEFT = ('destination_left', 'database',
                        'no other attachment is left')
    UNTOUCHED = ('untouched', 'engine',
                 "the destination's copy was never written")
    WRITTEN = 'written', 'engine', 'it was'
    SOURCE_UNUSED = ('source_unused', 'source',
                     'only the export has its handle open')
    ALL_LOCAL = ('all_local', 'engine', 'every region has arrived, those of '
                 'snapshots that were taken meanwhile too')
    MAY_COPY = ('may_copy', 'both', 'no copy further back can be written, and '
                'there is space for what comes')
    TURN = ('turn', 'node',
            'it is among as many as may hydrate at a time, and no volume is '
            'prepared there that a user waits for')
    UNEXPORTED = ('unexported', 'steps',
                  "the source's copy is not exported any more")
    KEPT = ('kept', 'database', "thick snapshots lie on the source's copy, "
            'which has arrived')
    SOURCE_WHOLE = ('source_whole', 'database', "the source's copy has all of "
                    'its content, or needs it no more')
    SOURCE_FREE = ('source_free', 'database', 'no other move uses the '
                   "source's copy, and no thick snapshot lies on it")
    SOURCE_STAYS = ('source_stays', 'database', 'the source is a snapshot '
                    'that a user has, or that another copy reads; or it is '
                    "that of a snapshot's volume")
    SOURCE_GONE = ('source_gone', 'source', 'its copy is wiped and removed')
    DESTINATION_GONE = ('destination_gone', 'node',
                        "so is the destination's")
    PASSED_ON = ('passed_on', 'database', 'the volume has arrived at a third '
                 'node and has given its source, this copy, back; and no '
                 'snapshot needs it')
    UNNEEDED = ('unneeded', 'database', 'what arrives is a snapshot that no '
                'user has, and no copy reads')

    def __new__(cls, word: str, known_by: str, meaning: str) -> Fact:
        fact = str.__new__(cls, word)
        fact._value_ = word
        fact.known_by, fact.meaning = known_by, meaning
        return fact


class _Step:
    """What steps of both sides have in common."""

    do: Callable[..., None]
    side: ClassVar[Side]
    beside: tuple[_Step, ...] = ()

    @property
    def name(self) -> str:
        """That of its method.

        It is recorded when the step is done, and peers ask for the step by
        it, so it never changes.
        """
        return self.do.__name__

    def is_done(self, move: rows.Move) -> bool:
        """Whether a move has done it in its present state, or needs it no
        more because its node is lost for good.
        """
        return self.name in move.done or is_lost(move, self.side)


@dataclasses.dataclass(frozen=True)
class SourceStep(_Step):
    """Something that the source does.

    :ivar when: facts that it waits for, asked for in this order
    """

    side: ClassVar[Side] = Side.SOURCE
    do: Callable[[source.Source, transfer.Transfer], None]
    when: tuple[Fact, ...] = ()


@dataclasses.dataclass(frozen=True)
class DestinationStep(_Step):
    """Something that the destination does.

    :ivar when: facts that it waits for, asked for in this order
    :ivar unused: what is done in its place as long as no guest was shown the
        destination's copy
    :ivar beside: steps before it that it does not need: it may be done while
        they are
    """

    side: ClassVar[Side] = Side.DESTINATION
    do: Callable[[destination.Destination, transfer.Transfer], None]
    when: tuple[Fact, ...] = ()
    beside: tuple[_Step, ...] = ()
    unused: Callable[[destination.Destination, transfer.Transfer],
                     None] | None = None


Step = SourceStep | DestinationStep


@dataclasses.dataclass(frozen=True)
class Transition:
    """Where to go when all `facts` are true.

    :ivar identity: whether user's row and shadow row change places
    :ivar at_once: whether it is looked at before the steps, too
    """

    to: State
    facts: tuple[Fact, ...]
    identity: Identity = Identity.STAYS
    at_once: bool = False


@dataclasses.dataclass(frozen=True)
class Rules:
    """What holds for a move in a state.

    :ivar owner: the side that drives it, unless its node is lost for good
    :ivar steps: done in this order, once each
    :ivar transitions: the first whose facts are all true is taken
    :ivar serves: whether the destination's handle lies on an engine that has
        to be there, and is built again where it is not
    """

    owner: Side
    steps: tuple[Step, ...]
    transitions: tuple[Transition, ...]
    serves: bool = False

    @property
    def at_once(self) -> tuple[Transition, ...]:
        """The transitions that don't wait for the steps."""
        return tuple(found for found in self.transitions if found.at_once)


TAKE_SNAPSHOT = SourceStep(source.Source.take_snapshot)
EXPORT_SOURCE = SourceStep(source.Source.export_source)
SEAL_SOURCE = SourceStep(source.Source.seal_source)
UNEXPORT_SOURCE = SourceStep(source.Source.unexport_source)
TAKE_BACK_SOURCE = SourceStep(source.Source.take_back_source)
# That of a volume that is reverted may still arrive.
HIDE_SOURCE = SourceStep(source.Source.hide_source,
                         when=(Fact.SOURCE_WHOLE,))
# A copy that another move arrives at or reads, or that has snapshots, is not
# in the way of the volume: it can wait.
DELETE_SOURCE = SourceStep(source.Source.delete_source,
                           when=(Fact.SOURCE_FREE,))

CREATE_DESTINATION = DestinationStep(
    destination.Destination.create_destination, beside=(EXPORT_SOURCE,))
CREATE_MAP = DestinationStep(destination.Destination.create_map)
# LVM makes one logical volume at a time, and a login mostly waits.
CONNECT_SOURCE = DestinationStep(destination.Destination.connect_source,
                                 beside=(CREATE_MAP,))
BUILD_ENGINE = DestinationStep(destination.Destination.build_engine)
BUILD_HANDLE = DestinationStep(destination.Destination.build_handle)
RESTORE_HANDLE = DestinationStep(destination.Destination.restore_handle)
# What is copied through a chain comes from its first copy.
START_HYDRATION = DestinationStep(destination.Destination.start_hydration,
                                  when=(Fact.MAY_COPY, Fact.TURN))
STAND_ALONE = DestinationStep(destination.Destination.stand_alone)
REMOVE_HANDLE = DestinationStep(destination.Destination.remove_handle)
REMOVE_ENGINE = DestinationStep(destination.Destination.remove_engine)
DISCONNECT_SOURCE = DestinationStep(
    destination.Destination.disconnect_source)
REMOVE_MAP = DestinationStep(destination.Destination.remove_map)
KEEP_DESTINATION = DestinationStep(destination.Destination.keep_destination)
# What was never written needs no wipe.
DELETE_DESTINATION = DestinationStep(
    destination.Destination.delete_destination,
    unused=destination.Destination.remove_unused)

# What a restart of the destination takes away and brings back.
SERVE: tuple[Step, ...] = (EXPORT_SOURCE, CONNECT_SOURCE, BUILD_ENGINE,
                           RESTORE_HANDLE)

# What a source that was away needs before it can be read again.
RECONNECT: tuple[Step, ...] = (EXPORT_SOURCE, CONNECT_SOURCE)

# Everything that the destination has of a move but its copy.  The session
# ends first, because an engine can't be removed while it waits for a source
# that is away.
DISMANTLE: tuple[Step, ...] = (REMOVE_HANDLE, DISCONNECT_SOURCE,
                               REMOVE_ENGINE, REMOVE_MAP)

TABLE: dict[State, Rules] = {
    # The node that Cinder asks for the new volume drives it.
    State.CREATING: Rules(
        owner=Side.DESTINATION,
        steps=(TAKE_SNAPSHOT, EXPORT_SOURCE, CREATE_DESTINATION, CREATE_MAP,
               CONNECT_SOURCE, BUILD_ENGINE, BUILD_HANDLE),
        transitions=(
            Transition(State.MIGRATING, (Fact.READY,), Identity.BEGINS),)),
    State.PREPARING: Rules(
        owner=Side.SOURCE,
        steps=(EXPORT_SOURCE, CREATE_DESTINATION, CREATE_MAP, CONNECT_SOURCE,
               BUILD_ENGINE, BUILD_HANDLE),
        transitions=(
            Transition(State.MIGRATING,
                       (Fact.READY, Fact.WANTED, Fact.SOURCE_LEFT),
                       Identity.SWITCHES),
            Transition(State.STARTING, (Fact.READY, Fact.WANTED),
                       Identity.SWITCHES))),
    State.STARTING: Rules(
        owner=Side.DESTINATION,
        steps=(),
        transitions=(
            # Never a copy that was written: it may be the only one of what
            # the guest wrote after the switch-over.
            Transition(State.ABORTING,
                       (Fact.DESTINATION_LEFT, Fact.UNTOUCHED),
                       Identity.SWITCHES),
            Transition(State.MIGRATING, (Fact.SOURCE_LEFT,)),
            # The guest runs on the destination, though nobody said so.
            Transition(State.MIGRATING,
                       (Fact.WRITTEN, Fact.SOURCE_UNUSED))),
        serves=True),
    State.MIGRATING: Rules(
        owner=Side.DESTINATION,
        steps=(SEAL_SOURCE, START_HYDRATION),
        transitions=(
            Transition(State.DISCARDING, (Fact.PASSED_ON,), at_once=True),
            Transition(State.DISCARDING, (Fact.UNNEEDED,), at_once=True),
            Transition(State.COMPLETING, (Fact.READY, Fact.ALL_LOCAL))),
        serves=True),
    State.COMPLETING: Rules(
        owner=Side.DESTINATION,
        steps=(STAND_ALONE, REMOVE_ENGINE, DISCONNECT_SOURCE, REMOVE_MAP,
               KEEP_DESTINATION, UNEXPORT_SOURCE, DELETE_SOURCE),
        transitions=(Transition(State.SUCCESS,
                                (Fact.READY, Fact.SOURCE_GONE)),
                     Transition(State.SUCCESS,
                                (Fact.UNEXPORTED, Fact.SOURCE_STAYS)),
                     Transition(State.KEEPING,
                                (Fact.UNEXPORTED, Fact.KEPT)))),
    # The volume has nothing to do with it any more, nor has its node.
    State.KEEPING: Rules(
        owner=Side.SOURCE,
        steps=(HIDE_SOURCE, DELETE_SOURCE),
        transitions=(Transition(State.SUCCESS,
                                (Fact.READY, Fact.SOURCE_GONE)),)),
    # The destination is lost for good, with what was written there.
    State.RETURNING: Rules(
        owner=Side.SOURCE,
        steps=(TAKE_BACK_SOURCE,),
        transitions=(Transition(State.ABORTING, (Fact.READY,)),)),
    State.ABORTING: Rules(
        owner=Side.SOURCE,
        steps=(*DISMANTLE, DELETE_DESTINATION, UNEXPORT_SOURCE),
        transitions=(Transition(State.ABORTED,
                                (Fact.READY, Fact.DESTINATION_GONE)),)),
    State.UNDOING: Rules(
        owner=Side.DESTINATION,
        steps=(*DISMANTLE, DELETE_DESTINATION, UNEXPORT_SOURCE,
               DELETE_SOURCE),
        transitions=(Transition(State.UNDONE,
                                (Fact.READY, Fact.DESTINATION_GONE,
                                 Fact.SOURCE_GONE)),
                     Transition(State.UNDONE,
                                (Fact.UNEXPORTED, Fact.DESTINATION_GONE,
                                 Fact.SOURCE_STAYS)))),
    State.DISCARDING: Rules(
        owner=Side.DESTINATION,
        steps=(*DISMANTLE, DELETE_DESTINATION, UNEXPORT_SOURCE,
               DELETE_SOURCE),
        transitions=(Transition(State.DISCARDED,
                                (Fact.READY, Fact.DESTINATION_GONE,
                                 Fact.SOURCE_GONE)),
                     Transition(State.DISCARDED,
                                (Fact.UNEXPORTED, Fact.DESTINATION_GONE,
                                 Fact.SOURCE_STAYS)),
                     Transition(State.KEEPING,
                                (Fact.UNEXPORTED, Fact.DESTINATION_GONE,
                                 Fact.KEPT)))),
}

# In these a guest has the volume, or is about to: they go before all others.
URGENT = tuple(state for state, rules in TABLE.items() if rules.serves)

# In these a user waits for the volume; a failure leads back to it as it was
# before, or to none.
UNDONE_BY_FAILURE = {State.PREPARING: State.ABORTING,
                     State.CREATING: State.UNDOING}

# In these a move says nothing of where its volume is.
ASIDE = (State.KEEPING, State.RETURNING, State.ABORTING, State.UNDOING)

FINAL = (State.SUCCESS, State.ABORTED, State.UNDONE, State.DISCARDED)

# The fact that is taken for granted with the steps of a lost node.  It stays
# recorded whatever state comes.
LOST = {Side.SOURCE: Fact.SOURCE_GONE,
        Side.DESTINATION: Fact.DESTINATION_GONE}


def is_lost(move: rows.Move, side: Side) -> bool:
    """Whether an operator has said that a node of a move is lost for good."""
    return LOST[side].value in move.done


def lost(move: rows.Move) -> tuple[str, ...]:
    """What stays recorded of a move's lost nodes."""
    return tuple(LOST[side].value for side in Side if is_lost(move, side))


def owner(move: rows.Move) -> Side:
    """The side that drives a move in its present state."""
    side = TABLE[State(move.state)].owner
    if not is_lost(move, side):
        return side
    return next(other for other in Side if other is not side)


def has_released(move: rows.Move) -> bool:
    """Whether a move has no more to do with its destination's copy."""
    return (move.state == State.KEEPING or KEEP_DESTINATION.is_done(move)
            or DELETE_DESTINATION.is_done(move))


def has_unexported(move: rows.Move) -> bool:
    """Whether a move has read its source's copy for the last time."""
    return move.state == State.KEEPING or UNEXPORT_SOURCE.is_done(move)


def readers(moves: Iterable[rows.Move], host: str, name: str) -> set[str]:
    """Ids of the copies that still read a snapshot.

    :param moves: those of the backend that has the snapshot
    """
    return {move.move_id for move in moves
            if move.transfer.is_copy and not move.transfer.is_snapshot
            and not has_unexported(move)
            and move.transfer.source_host == host
            and move.transfer.source_name == name}


def steps_of(state: State) -> dict[str, Step]:
    """All steps that a move may run in a state, by name."""
    rules = TABLE[state]
    return {step.name: step for step in rules.steps
            + ((*SERVE, *RECONNECT) if rules.serves else ())}
