# SPDX-License-Identifier: Apache-2.0
"""Walks moves through the table, one recorded step at a time."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Container
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from concurrent import futures
import contextlib
import dataclasses
import functools
from typing import Any

from cinder import context
from cinder import objects
from oslo_concurrency import lockutils
from oslo_log import log as logging
from oslo_utils import timeutils

from cinder_localstor.datapath import destination
from cinder_localstor.datapath import engine
from cinder_localstor.datapath import source
from cinder_localstor.datapath import transfer
from cinder_localstor import exception
from cinder_localstor.moves import facts as facts_of
from cinder_localstor.moves import messages
from cinder_localstor.moves import notifications
from cinder_localstor.moves import table
from cinder_localstor import rows

LOG = logging.getLogger(__name__)

RunOnPeer = Callable[[str, transfer.Transfer, list[str]], None]


def at_once(calls: Sequence[Callable[[], None]]) -> None:
    """Do several things at the same time; returns when all have ended.

    :raises Exception: one failed, the first of those that did
    """
    if len(calls) == 1:
        calls[0]()
        return
    # Leaving it waits for all: what is undone after an error must not meet
    # what is still being done.
    with futures.ThreadPoolExecutor(len(calls)) as pool:
        running = [pool.submit(call) for call in calls]
    for future in running:
        future.result()


def _grouped(steps: Iterable[table.Step],
             joins: Callable[[table.Step, list[table.Step]], bool]
             ) -> list[list[table.Step]]:
    """Steps, in turn, each with those before it that it joins."""
    groups: list[list[table.Step]] = []
    for step in steps:
        if groups and joins(step, groups[-1]):
            groups[-1].append(step)
        else:
            groups.append([step])
    return groups


def _stages(steps: Iterable[table.Step]) -> list[list[table.Step]]:
    """Steps, in turn, with those together that are run together.

    Steps of one side that follow each other are, and a step of the other side
    if it needs none of them.
    """
    return _grouped(steps, lambda step, stage: (
        step.when == stage[0].when and all(
            step.side is before.side or before in step.beside
            for before in stage)))


def _together(steps: Iterable[table.Step]) -> list[list[table.Step]]:
    """Steps of one side, in turn, with those together that need not wait for
    each other.
    """
    return _grouped(steps, lambda step, group: all(
        before in step.beside for before in group))


class StepRunner:
    """Runs the steps that this node has in a move."""

    def __init__(self, on_source: source.Source,
                 on_destination: destination.Destination,
                 turns: facts_of.Turns) -> None:
        """:param turns: who may hydrate here"""
        self._source = on_source
        self._destination = on_destination
        self._turns = turns

    def run(self, ctxt: context.RequestContext, move: transfer.Transfer,
            names: list[str]) -> None:
        """Run steps in turn, or together where the table lets them.

        One caller at a time: a repeated request waits for the first, and
        then finds everything done.  A late one is refused, so that it can't
        bring back what the move has taken away since.

        :raises MoveChanged: the move has ended, or is in a state that has no
            such steps
        :raises LocalStorException: a step failed; those after it are not run
        """
        with lockutils.lock('localstor-steps-' + move.move_id):
            now = rows.get(ctxt, move.move_id)
            steps = table.steps_of(table.State(now.state)) if now else {}
            if now is None or not steps.keys() >= set(names):
                raise exception.StepTooLate(
                    move_id=move.move_id, steps=', '.join(names),
                    state=now.state if now else 'over')
            is_awaited = now.state in table.UNDONE_BY_FAILURE
            with (self._turns.held_back() if is_awaited
                  else contextlib.nullcontext()):
                for group in _together(steps[name] for name in names):
                    at_once([functools.partial(self._run_timed, step, move,
                                               now.shown) for step in group])

    def _run_timed(self, step: table.Step, move: transfer.Transfer,
                   shown: bool) -> None:
        described = {'move': move.move_id, 'volume': move.volume_id,
                     'step': step.name}
        LOG.info('Move %(move)s of volume %(volume)s: %(step)s', described)
        with timeutils.StopWatch() as watch:
            self._run(step, move, shown)
        LOG.info('Move %(move)s of volume %(volume)s: %(step)s took '
                 '%(seconds).2f s', {**described, 'seconds': watch.elapsed()})

    def _run(self, step: table.Step, move: transfer.Transfer, shown: bool
             ) -> None:
        if isinstance(step, table.SourceStep):
            step.do(self._source, move)
        elif step.unused is not None and not shown:
            step.unused(self._destination, move)
        else:
            step.do(self._destination, move)


class Executor:
    """Drives the moves that this node owns."""

    def __init__(self, steps: StepRunner,
                 on_destination: destination.Destination,
                 tools: facts_of.Tools, run_on_peer: RunOnPeer,
                 notified: notifications.Notifications,
                 waiting: messages.Waiting) -> None:
        """:param on_destination: the destination side here
        :param tools: what facts are read with
        :param run_on_peer: runs steps on another backend
        :param notified: is told what becomes of moves
        :param waiting: is told which can't go on
        """
        self.host = tools.host
        self._steps = steps
        self._destination = on_destination
        self._tools = tools
        self._run_on_peer = run_on_peer
        self._notifications = notified
        self._waiting = waiting

    def owns(self, move: rows.Move) -> bool:
        """Whether this node drives a move in its present state."""
        return self.owner(move) == self.host

    def owner(self, move: rows.Move) -> str:
        """The ``host@backend`` that drives a move in its present state."""
        return self._host_of(move, table.owner(move))

    def look(self, ctxt: context.RequestContext, moves: Iterable[rows.Move],
             whole: bool = False) -> facts_of.Look:
        """A new look at the node, see :class:`facts.Look`."""
        return facts_of.Look(ctxt, self._tools, moves, whole)

    def has_work(self, move: rows.Move, look: facts_of.Look) -> bool:
        """Whether there may be anything to do for a move; asks for no more
        than what one look at the node tells of all its moves.

        :raises Exception: a fact can't be read
        """
        rules = table.TABLE[table.State(move.state)]
        if rules.serves and self._misses_something(move, look):
            return True
        if self._transition(move, rules.at_once, look) is not None:
            return True
        for step in rules.steps:
            if not step.is_done(move):
                if self._may_be_due(step, move, look):
                    return True
                break
        return self._transition(move, rules.transitions, look) is not None

    @staticmethod
    def _may_be_due(step: table.Step, move: rows.Move, look: facts_of.Look
                    ) -> bool:
        """Whether a step may be done now, as :meth:`has_work` asks."""
        if table.Fact.TURN in step.when:
            return look.has_turn(move)
        return (table.Fact.SOURCE_FREE not in step.when
                or not look.is_kept(move))

    def _misses_something(self, move: rows.Move, look: facts_of.Look) -> bool:
        """Whether :meth:`_serve` has something to do, or to tell."""
        hydration = look.progress(move).hydration
        if hydration is engine.Hydration.OFF:
            return (table.START_HYDRATION.is_done(move)
                    or not look.is_connected(move))
        return (hydration not in (engine.Hydration.RUNNING,
                                  engine.Hydration.DONE)
                or hydration is engine.Hydration.RUNNING
                and not look.is_connected(move))

    def begin(self, ctxt: context.RequestContext, volume: objects.Volume,
              move: transfer.Transfer, state: table.State,
              destination: objects.Service, leaving: tuple[str, ...] = (),
              migrated_to: str = '',
              connecting: Collection[dict[str, Any]] | None = None
              ) -> rows.Move:
        """Record that a move begins, see :func:`rows.begin`."""
        begun = rows.begin(ctxt, volume, move, state.value, destination,
                           leaving, migrated_to, connecting)
        self._notifications.entered(begun)
        return begun

    def change_state(self, ctxt: context.RequestContext, move: rows.Move,
                     state: table.State,
                     identity: table.Identity = table.Identity.STAYS,
                     problem: str = '') -> rows.Move:
        """Record that a move is in another state.

        :param problem: why, if it failed
        :raises MoveChanged: it is not in the state any more that `move` says
        """
        after = rows.change_state(
            ctxt, move, state.value,
            swap=identity is table.Identity.SWITCHES,
            begins=identity is table.Identity.BEGINS,
            done=table.lost(move))
        self._notifications.entered(after, move, problem)
        return after

    def announce(self, move: rows.Move) -> None:
        """Tell of a move that has come into its state beside another one."""
        self._notifications.entered(move)

    def fail(self, ctxt: context.RequestContext, move: rows.Move,
             error: Exception) -> None:
        """Leave a move that an error keeps from going on; it is tried again.
        """
        self._note_problem(ctxt, move, str(error))
        self._waiting.waits(ctxt, move, error)

    def _note_problem(self, ctxt: context.RequestContext, move: rows.Move,
                      problem: str) -> None:
        """Record what keeps a move from going on, '' for nothing."""
        after = rows.record_problem(ctxt, move, problem)
        if after.problem and not move.problem:
            self._notifications.troubled(after)

    def rest(self, ctxt: context.RequestContext, move: rows.Move,
             look: facts_of.Look) -> None:
        """Leave a move that has nothing to do now, but maybe to arrive."""
        self._note_problem(ctxt, move, self._lack_of_space(move))
        self._waiting.goes_on(move)
        if move.state == table.State.MIGRATING:
            self._notifications.progressed(move, look.progress(move))

    def _lack_of_space(self, move: rows.Move) -> str:
        """What is wrong with the space that a move needs, '' if nothing is.
        """
        space = self._destination.space
        if move.state != table.State.MIGRATING or space.has_room():
            return ''
        return space.full

    def drive(self, ctxt: context.RequestContext, move_id: str,
              states: Container[table.State] = table.TABLE
              ) -> table.State | None:
        """Take a move as far as it goes now.

        :param states: those to leave; it stops where another begins
        :returns: the state it is in then; None when it is not ours to drive
        :raises Exception: a step failed; the move is as it was, and goes on
            from there the next time
        """
        with lockutils.lock('localstor-drive-' + move_id):
            while True:
                move = rows.get(ctxt, move_id)
                if move is None or not self.owns(move):
                    return None
                state = table.State(move.state)
                if state not in states:
                    return state
                after = self._advance(ctxt, move)
                if after in table.FINAL or after == state:
                    return after

    @contextlib.contextmanager
    def held(self, ctxt: context.RequestContext, move: rows.Move
             ) -> Iterator[None]:
        """Let nobody drive a move meanwhile.

        :raises MoveChanged: it is not in the state any more that `move` says
        """
        with lockutils.lock('localstor-drive-' + move.move_id):
            now = rows.get(ctxt, move.move_id)
            if now is None or now.state != move.state:
                raise exception.MoveChanged(move_id=move.move_id,
                                            state=move.state)
            yield

    def _advance(self, ctxt: context.RequestContext, move: rows.Move
                 ) -> table.State:
        state = table.State(move.state)
        rules = table.TABLE[state]
        look = self.look(ctxt, [move])
        transition = self._transition(move, rules.at_once, look)
        if transition is None:
            before = move
            if rules.serves:
                move = self._serve(ctxt, move, look)
            move = self._run_steps(ctxt, move, rules.steps)
            if move != before or rules.serves:
                look = self.look(ctxt, [move])
            transition = self._transition(move, rules.transitions, look)
        if transition is None:
            self.rest(ctxt, move, look)
            return state
        if table.Fact.ALL_LOCAL in transition.facts:
            # What counts as local from here on has to be so after a power
            # cut as well.
            self._destination.settle(move.transfer)
        LOG.info('Move %(move)s of volume %(volume)s: %(state)s -> %(to)s',
                 {'move': move.move_id, 'volume': move.volume_id,
                  'state': state.value, 'to': transition.to.value})
        self._waiting.goes_on(move)
        if transition.to in table.FINAL:
            rows.forget(ctxt, move)
            self._notifications.entered(dataclasses.replace(
                move, state=transition.to.value), move)
        else:
            self.change_state(ctxt, move, transition.to, transition.identity)
        return transition.to

    def _run_steps(self, ctxt: context.RequestContext, move: rows.Move,
                   steps: tuple[table.Step, ...]) -> rows.Move:
        todo = [step for step in steps if not step.is_done(move)]
        for stage in _stages(todo):
            if stage[0].when:
                facts = facts_of.Facts(move, self.look(ctxt, [move]))
                if not all(map(facts.holds, stage[0].when)):
                    break
            self._run_stage(ctxt, move, stage)
            move = rows.record_done(ctxt, move, (
                *move.done, *(step.name for step in stage)))
        return move

    def _run_stage(self, ctxt: context.RequestContext, move: rows.Move,
                   stage: list[table.Step]) -> None:
        """Run the steps of each side in one request, both at the same time.
        """
        at_once([functools.partial(
            self._run, ctxt, move, side,
            [step.name for step in stage if step.side is side])
            for side in dict.fromkeys(step.side for step in stage)])

    def _run(self, ctxt: context.RequestContext, move: rows.Move,
             side: table.Side, names: list[str]) -> None:
        """Run steps of one side, wherever that is."""
        host = self._host_of(move, side)
        if host == self.host:
            self._steps.run(ctxt, move.transfer, names)
        else:
            self._run_on_peer(host, move.transfer, names)

    def _serve(self, ctxt: context.RequestContext, move: rows.Move,
               look: facts_of.Look) -> rows.Move:
        """Build again what a restart of this node took away."""
        progress = look.progress(move)
        if progress.hydration is engine.Hydration.MISSING:
            for step in table.SERVE:
                self._run(ctxt, move, step.side, [step.name])
            progress = self.look(ctxt, [move]).progress(move)
        elif (progress.hydration is not engine.Hydration.DONE
                and not look.is_connected(move)):
            for step in table.RECONNECT:
                self._run(ctxt, move, step.side, [step.name])
        if progress.hydration is engine.Hydration.FAILED:
            raise exception.EngineFailed(
                engine=move.transfer.engine, move_id=move.move_id,
                host=self.host, name=move.transfer.destination_name)
        if progress.hydration is engine.Hydration.DIFFERS:
            LOG.error("Move %(move)s of volume %(volume)s does not end: what "
                      "was copied to %(name)s differs from the source. "
                      "'cinder-localstor status' on this node says more",
                      {'move': move.move_id, 'volume': move.volume_id,
                       'name': move.transfer.destination_name})
        if (progress.hydration is engine.Hydration.OFF
                and table.START_HYDRATION.is_done(move)):
            return rows.record_done(ctxt, move, tuple(
                name for name in move.done
                if name != table.START_HYDRATION.name))
        return move

    def undo(self, ctxt: context.RequestContext, move: rows.Move, why: str
             ) -> rows.Move:
        """Decide to take a move back that failed before its volume was used.

        Whoever looks after the moves does what that needs.

        :param why: what has failed
        """
        return self.change_state(
            ctxt, move, table.UNDONE_BY_FAILURE[table.State(move.state)],
            problem=why)

    def unexport_aborted(self, ctxt: context.RequestContext, volume_id: str
                         ) -> None:
        """Let aborted moves whose peer is away be in nobody's way.

        What is left on the peer is removed when it comes back.  But an
        export keeps the copy in use, and LIO exports no device twice.
        """
        for move in rows.for_volume(ctxt, volume_id):
            if (move.state == table.State.ABORTING
                    and move.transfer.source_host == self.host):
                with contextlib.suppress(exception.StepTooLate):
                    self._steps.run(ctxt, move.transfer,
                                    [table.UNEXPORT_SOURCE.name])

    @staticmethod
    def _transition(move: rows.Move, transitions: Iterable[table.Transition],
                    look: facts_of.Look) -> table.Transition | None:
        facts = facts_of.Facts(move, look)
        for transition in transitions:
            if all(map(facts.holds, transition.facts)):
                return transition
        return None

    def discard(self, ctxt: context.RequestContext, move: rows.Move) -> bool:
        """Take away what is left of a move whose volume is deleted.

        What can't be done now is done later: the source is away, the session
        to it does not end while its requests wait for another node, or
        somebody has opened the copy meanwhile.  It is recorded, so no error
        takes it back.

        :returns: whether the destination's copy is gone
        """
        try:
            self.drive(ctxt, move.move_id)
        except Exception as error:
            LOG.warning('What is left of move %(move)s is removed later: '
                        '%(error)s', {'move': move.move_id, 'error': error})
            self.fail(ctxt, move, error)
        after = rows.get(ctxt, move.move_id)
        return after is None or table.DELETE_DESTINATION.is_done(after)

    def _host_of(self, move: rows.Move, side: table.Side) -> str:
        return (move.transfer.source_host if side is table.Side.SOURCE
                else move.transfer.destination_host)
