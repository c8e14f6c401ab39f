# SPDX-License-Identifier: Apache-2.0
"""States of a move, as a table.

======================= ========= ===========================================
fact                    known by  is true when
======================= ========= ===========================================
``ready``               steps     all steps of the state are done
``wanted``              database  somebody waits for it at the destination
``source_left``         database  no attachment of before the move is left
``destination_left``    database  no other attachment is left
``untouched``           engine    the destination's copy was never written
``written``             engine    it was
``source_unused``       source    only the export has its handle open
``all_local``           engine    every region has arrived
``may_copy``            both      no copy further back can be written, and
                                  there is space for what comes
``turn``                node      it is among as many as may hydrate at a time
``source_free``         database  no other move uses the source's copy
``source_gone``         source    its copy is wiped and removed
``destination_gone``    node      so is the destination's
``passed_on``           database  the volume has arrived at a third node and
                                  has given its source, this copy, back
======================= ========= ===========================================

The owner drives the move: it runs its own steps and asks the peer for the
others.  It is the node that the user's volume lives on, or lived on before it
moved on, so no two nodes drive one move.  A state is recorded before its first
step; every step is idempotent and is recorded when it is done.

A volume may move on, or back, while it still arrives: then its moves form a
chain, each the source of the next.  What is in the middle is passed on as soon
as all of it has arrived at the end.
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
    """Something that one side does, by the name of its method there.

    :ivar when: facts that it waits for, asked for in this order
    :ivar unused: the method that takes its place as long as no guest was
        shown the destination's copy
    """

    side: Side
    name: str
    when: tuple[str, ...] = ()
    unused: str = ''


@dataclasses.dataclass(frozen=True)
class Transition:
    """Where to go when all `facts` are true.

    :ivar identity: whether user's row and shadow row change places
    :ivar at_once: whether it is looked at before the steps, too
    """

    to: State
    facts: tuple[str, ...]
    identity: Identity = Identity.STAYS
    at_once: bool = False


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

    @property
    def at_once(self) -> tuple[Transition, ...]:
        """The transitions that don't wait for the steps."""
        return tuple(found for found in self.transitions if found.at_once)


def _source(*names: str) -> tuple[Step, ...]:
    return tuple(Step(Side.SOURCE, name) for name in names)


def _destination(*names: str) -> tuple[Step, ...]:
    return tuple(Step(Side.DESTINATION, name) for name in names)


# What a restart of the destination takes away and brings back.
SERVE = (*_source('export_source'),
         *_destination('connect_source', 'build_engine', 'restore_handle'))

# What a source that was away needs before it can be read again.
RECONNECT = (*_source('export_source'), *_destination('connect_source'))

# Everything that the destination has of a move but its copy.  The session
# ends first, because an engine can't be removed while it waits for a source
# that is away.
DISMANTLE = _destination('remove_handle', 'disconnect_source',
                         'remove_engine', 'remove_map')

# What is copied through a chain comes from its first copy.
START_HYDRATION = Step(Side.DESTINATION, 'start_hydration',
                       when=('may_copy', 'turn'))

# A copy that another move arrives at, or reads, is not in the way of the
# volume: it can wait.
DELETE_SOURCE = Step(Side.SOURCE, 'delete_source', when=('source_free',))

# What was never written needs no wipe.
DELETE_DESTINATION = Step(Side.DESTINATION, 'delete_destination',
                          unused='remove_unused')

TABLE: dict[State, Rules] = {
    State.PREPARING: Rules(
        owner=Side.SOURCE,
        steps=(*_source('export_source'),
               *_destination('create_destination', 'create_map',
                             'connect_source', 'build_engine',
                             'build_handle')),
        transitions=(
            Transition(State.MIGRATING, ('ready', 'wanted', 'source_left'),
                       Identity.SWITCHES),
            Transition(State.STARTING, ('ready', 'wanted'),
                       Identity.SWITCHES))),
    State.STARTING: Rules(
        owner=Side.DESTINATION,
        steps=(),
        transitions=(
            # Never a copy that was written: it may be the only one of what
            # the guest wrote after the switch-over.
            Transition(State.ABORTING, ('destination_left', 'untouched'),
                       Identity.SWITCHES),
            Transition(State.MIGRATING, ('source_left',)),
            # The guest runs on the destination, though nobody said so.
            Transition(State.MIGRATING, ('written', 'source_unused'))),
        serves=True),
    State.MIGRATING: Rules(
        owner=Side.DESTINATION,
        steps=(*_source('seal_source'), START_HYDRATION),
        transitions=(
            Transition(State.DISCARDING, ('passed_on',), at_once=True),
            Transition(State.COMPLETING, ('ready', 'all_local'))),
        serves=True),
    State.COMPLETING: Rules(
        owner=Side.DESTINATION,
        steps=(*_destination('stand_alone', 'remove_engine',
                             'disconnect_source', 'remove_map',
                             'keep_destination'),
               *_source('unexport_source'), DELETE_SOURCE),
        transitions=(Transition(State.SUCCESS, ('ready', 'source_gone')),)),
    State.ABORTING: Rules(
        owner=Side.SOURCE,
        steps=(*DISMANTLE, DELETE_DESTINATION, *_source('unexport_source')),
        transitions=(Transition(State.ABORTED,
                                ('ready', 'destination_gone')),)),
    State.DISCARDING: Rules(
        owner=Side.DESTINATION,
        steps=(*DISMANTLE, DELETE_DESTINATION, *_source('unexport_source'),
               DELETE_SOURCE),
        transitions=(Transition(State.DISCARDED,
                                ('ready', 'destination_gone',
                                 'source_gone')),)),
}

# In these a guest has the volume, or is about to: they go before all others.
URGENT = tuple(state for state, rules in TABLE.items() if rules.serves)

# From where a failure leads back to the volume as it was before the move
UNDONE_BY_FAILURE = (State.PREPARING,)

FINAL = (State.SUCCESS, State.ABORTED, State.DISCARDED)

# The side whose loss for good an operator may take for granted, by state.  In
# others the lost node holds what no other node has.
ABANDONABLE = {State.STARTING: Side.DESTINATION,
               State.ABORTING: Side.DESTINATION,
               State.COMPLETING: Side.SOURCE,
               State.DISCARDING: Side.SOURCE}

# The fact that is taken for granted with the steps of a lost node
LOST = {Side.SOURCE: 'source_gone', Side.DESTINATION: 'destination_gone'}

# Steps after which a move has no more to do with its destination's copy
LETS_GO = ('keep_destination', 'delete_destination')


def steps_of(state: State) -> frozenset[str]:
    """Names of all steps that a move may run in a state."""
    rules = TABLE[state]
    return frozenset(step.name for step in rules.steps
                     + ((*SERVE, *RECONNECT) if rules.serves else ()))
