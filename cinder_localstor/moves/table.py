# SPDX-License-Identifier: Apache-2.0
"""States of a move, as a table.

======================= ========= ===========================================
fact                    known by  is true when
======================= ========= ===========================================
``ready``               steps     all steps of the state are done
``source_left``         database  no attachment of before the move is left
``destination_left``    database  no other attachment is left
``untouched``           engine    the destination's copy was never written
``all_local``           engine    every region has arrived
======================= ========= ===========================================

The owner drives the move: it runs its own steps and asks the peer for the
others.  It is the node that the user's volume lives on, so no two nodes drive
one move.  A state is recorded before its first step; every step is idempotent
and is recorded when it is done.
"""

import dataclasses
import enum


class State(str, enum.Enum):
    """Where a move is; the value is what the database holds."""

    PREPARING = 'preparing'
    STARTING = 'starting'
    MIGRATING = 'migrating'
    COMPLETING = 'completing'
    ABORTING = 'aborting'
    DISCARDING = 'discarding'
    # The shadow row is gone.
    SUCCESS = 'success'
    ABORTED = 'aborted'
    DISCARDED = 'discarded'


class Side(str, enum.Enum):
    """One of the two nodes of a move."""

    SOURCE = 'source'
    DESTINATION = 'destination'


class Identity(str, enum.Enum):
    """What happens to the two rows in the transaction that enters a state."""

    STAYS = 'stays'
    SWITCHES = 'switches'


@dataclasses.dataclass(frozen=True)
class Step:
    """Something that one side does, by the name of its method there."""

    side: Side
    name: str


@dataclasses.dataclass(frozen=True)
class Transition:
    """Where to go when all `facts` are true.

    :ivar identity: whether user's row and shadow row change places
    """

    to: State
    facts: tuple[str, ...]
    identity: Identity = Identity.STAYS


@dataclasses.dataclass(frozen=True)
class Rules:
    """What holds for a move in a state.

    :ivar owner: the side that drives it
    :ivar steps: done in this order, once each
    :ivar transitions: the first whose facts are all true is taken
    :ivar serves: whether the destination's handle lies on an engine that has
        to be there, and is built again where it is not
    """

    owner: Side
    steps: tuple[Step, ...]
    transitions: tuple[Transition, ...]
    serves: bool = False


def _source(*names: str) -> tuple[Step, ...]:
    return tuple(Step(Side.SOURCE, name) for name in names)


def _destination(*names: str) -> tuple[Step, ...]:
    return tuple(Step(Side.DESTINATION, name) for name in names)


# What a restart of the destination takes away and brings back.
SERVE = (*_source('export_source'),
         *_destination('connect_source', 'build_engine', 'build_handle'))

# What a source that was away needs before it can be read again.
RECONNECT = (*_source('export_source'), *_destination('connect_source'))

# Everything that the destination has of a move but its copy.  The session
# ends first, because an engine can't be removed while it waits for a source
# that is away.
DISMANTLE = _destination('remove_handle', 'disconnect_source',
                         'remove_engine', 'remove_map')

TABLE: dict[State, Rules] = {
    State.PREPARING: Rules(
        owner=Side.SOURCE,
        steps=(*_source('export_source'),
               *_destination('create_destination', 'create_map',
                             'connect_source', 'build_engine',
                             'build_handle')),
        transitions=(
            Transition(State.MIGRATING, ('ready', 'source_left'),
                       Identity.SWITCHES),
            Transition(State.STARTING, ('ready',), Identity.SWITCHES))),
    State.STARTING: Rules(
        owner=Side.DESTINATION,
        steps=(),
        transitions=(
            # Never a copy that was written: it may be the only one of what
            # the guest wrote after the switch-over.
            Transition(State.ABORTING, ('destination_left', 'untouched'),
                       Identity.SWITCHES),
            Transition(State.MIGRATING, ('source_left',))),
        serves=True),
    State.MIGRATING: Rules(
        owner=Side.DESTINATION,
        steps=(*_source('seal_source'), *_destination('start_hydration')),
        transitions=(Transition(State.COMPLETING, ('ready', 'all_local')),),
        serves=True),
    State.COMPLETING: Rules(
        owner=Side.DESTINATION,
        steps=(*_destination('stand_alone', 'remove_engine',
                             'disconnect_source', 'remove_map',
                             'keep_destination'),
               *_source('unexport_source', 'delete_source')),
        transitions=(Transition(State.SUCCESS, ('ready',)),)),
    State.ABORTING: Rules(
        owner=Side.SOURCE,
        steps=(*DISMANTLE, *_destination('delete_destination'),
               *_source('unexport_source')),
        transitions=(Transition(State.ABORTED, ('ready',)),)),
    State.DISCARDING: Rules(
        owner=Side.DESTINATION,
        steps=(*DISMANTLE, *_destination('delete_destination'),
               *_source('unexport_source', 'delete_source')),
        transitions=(Transition(State.DISCARDED, ('ready',)),)),
}

# From where a failure leads back to the volume as it was before the move
UNDONE_BY_FAILURE = (State.PREPARING,)

FINAL = (State.SUCCESS, State.ABORTED, State.DISCARDED)
