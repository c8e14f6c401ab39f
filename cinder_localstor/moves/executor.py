# SPDX-License-Identifier: Apache-2.0
"""Walks moves through the table, one recorded step at a time."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterable
import itertools
from typing import Any

from cinder import context
from oslo_concurrency import lockutils
from oslo_log import log as logging

from cinder_localstor.datapath import destination
from cinder_localstor.datapath import engine
from cinder_localstor.datapath import source
from cinder_localstor.datapath import transfer
from cinder_localstor import exception
from cinder_localstor.moves import table
from cinder_localstor.node import interface
from cinder_localstor import rows

LOG = logging.getLogger(__name__)

Devices = dict[str, interface.Device]
RunOnPeer = Callable[[str, transfer.Transfer, list[str]], None]
AskPeer = Callable[[str, transfer.Transfer], bool]


class StepRunner:
    """Runs the steps that this node has in a move."""

    def __init__(self, on_source: source.Source,
                 on_destination: destination.Destination) -> None:
        self._sides = {table.Side.SOURCE: on_source,
                       table.Side.DESTINATION: on_destination}
        self._steps = {step.name: step.side
                       for rules in table.TABLE.values()
                       for step in (*rules.steps, *table.SERVE)}

    def run(self, ctxt: context.RequestContext, move: transfer.Transfer,
            names: list[str]) -> None:
        """Run steps in turn.

        One caller at a time: a repeated request waits for the first, and
        then finds everything done.  A late one is refused, so that it can't
        bring back what the move has taken away since.

        :raises MoveChanged: the move has ended, or is in a state that has no
            such steps
        :raises LocalStorException: a step failed; those after it are not run
        """
        with lockutils.lock('localstor-steps-' + move.move_id):
            now = rows.get(ctxt, move.move_id)
            if now is None or not table.steps_of(
                    table.State(now.state)).issuperset(names):
                raise exception.StepTooLate(
                    move_id=move.move_id, steps=', '.join(names),
                    state=now.state if now else 'over')
            for name in names:
                LOG.info('Move %(move)s of volume %(volume)s: %(step)s',
                         {'move': move.move_id, 'volume': move.volume_id,
                          'step': name})
                getattr(self._sides[self._steps[name]], name)(move)


class Executor:
    """Drives the moves that this node owns."""

    def __init__(self, host: str, steps: StepRunner,
                 arriving: destination.Destination,
                 devices: Callable[[], Devices], run_on_peer: RunOnPeer,
                 is_source_used: AskPeer) -> None:
        """:param host: ``host@backend`` of this node
        :param arriving: the destination side here, asked for progress
        :param devices: the device-mapper nodes of this node
        :param run_on_peer: runs steps on another backend
        :param is_source_used: asks another backend whether anybody has the
            handle of a move's source open
        """
        self.host = host
        self._steps = steps
        self._arriving = arriving
        self._devices = devices
        self._run_on_peer = run_on_peer
        self._is_source_used = is_source_used

    def owns(self, move: rows.Move) -> bool:
        """Whether this node drives a move in its present state."""
        rules = table.TABLE[table.State(move.state)]
        return self._host_of(move, rules.owner) == self.host

    def drive(self, ctxt: context.RequestContext, move_id: str,
              devices: Devices | None = None) -> table.State | None:
        """Take a move as far as it goes now.

        :param devices: the node's devices if they are known already
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
                after = self._advance(ctxt, move, devices)
                if after in table.FINAL or after == state:
                    return after
                devices = None

    def _advance(self, ctxt: context.RequestContext, move: rows.Move,
                 devices: Devices | None) -> table.State:
        state = table.State(move.state)
        rules = table.TABLE[state]
        transition = self._transition(
            ctxt, move, [found for found in rules.transitions
                         if found.at_once], devices)
        if transition is None:
            if rules.serves:
                move = self._serve(ctxt, move, devices or self._devices())
                devices = None
            move = self._run_steps(ctxt, move, rules.steps)
            transition = self._transition(ctxt, move, rules.transitions,
                                          devices)
        if transition is None:
            return state
        if 'all_local' in transition.facts:
            # What counts as local from here on has to be so after a power
            # cut as well.
            self._arriving.settle(move.transfer)
        LOG.info('Move %(move)s of volume %(volume)s: %(state)s -> %(to)s',
                 {'move': move.move_id, 'volume': move.volume_id,
                  'state': state.value, 'to': transition.to.value})
        if transition.to in table.FINAL:
            rows.forget(ctxt, move)
        else:
            rows.change_state(
                ctxt, move, transition.to.value,
                swap=transition.identity is table.Identity.SWITCHES)
        return transition.to

    def _run_steps(self, ctxt: context.RequestContext, move: rows.Move,
                   steps: tuple[table.Step, ...]) -> rows.Move:
        todo = [step for step in steps if step.name not in move.done]
        # Steps of one side that follow each other go in one request.
        for (side, when), group in itertools.groupby(
                todo, lambda step: (step.side, step.when)):
            if when and not self._facts(ctxt, move, None).holds(when):
                break
            names = [step.name for step in group]
            self._run(ctxt, move, side, names)
            move = rows.record_done(ctxt, move, (*move.done, *names))
        return move

    def _run(self, ctxt: context.RequestContext, move: rows.Move,
             side: table.Side, names: list[str]) -> None:
        host = self._host_of(move, side)
        if host == self.host:
            self._steps.run(ctxt, move.transfer, names)
        else:
            self._run_on_peer(host, move.transfer, names)

    def _serve(self, ctxt: context.RequestContext, move: rows.Move,
               devices: Devices) -> rows.Move:
        """Build again what a restart of this node took away."""
        progress = self._arriving.progress(move.transfer, devices)
        if progress.hydration is engine.Hydration.MISSING:
            for step in table.SERVE:
                self._run(ctxt, move, step.side, [step.name])
            progress = self._arriving.progress(move.transfer,
                                               self._devices())
        elif (progress.hydration is not engine.Hydration.DONE
                and not self._arriving.is_connected(move.transfer,
                                                    devices)):
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
                and 'start_hydration' in move.done):
            return rows.record_done(ctxt, move, tuple(
                name for name in move.done if name != 'start_hydration'))
        return move

    def _transition(self, ctxt: context.RequestContext, move: rows.Move,
                    transitions: Iterable[table.Transition],
                    devices: Devices | None) -> table.Transition | None:
        facts = self._facts(ctxt, move, devices)
        for transition in transitions:
            if all(facts.holds(name) for name in transition.facts):
                return transition
        return None

    def _facts(self, ctxt: context.RequestContext, move: rows.Move,
               devices: Devices | None) -> 'Facts':
        return Facts(ctxt, move, self._arriving, devices, self._devices,
                     self._is_source_used)

    def undo(self, ctxt: context.RequestContext, move: rows.Move) -> None:
        """Take a move back that failed before its volume was used.

        What can't be undone now, because the peer is away, is by and by.
        """
        aborting = rows.change_state(ctxt, move, table.State.ABORTING.value)
        try:
            self.drive(ctxt, aborting.move_id)
        except Exception as error:
            LOG.warning('Move %(move)s is undone later: %(error)s',
                        {'move': move.move_id, 'error': error})
            rows.record_problem(ctxt, aborting, str(error))

    def discard(self, ctxt: context.RequestContext, move: rows.Move) -> bool:
        """End a move whose volume is being deleted.

        What can't be done now is done later: the source is away, or the
        session to it does not end while its requests wait for another node.

        :returns: whether the destination's copy is gone
        :raises VolumeInUse: somebody has opened it meanwhile
        """
        discarding = move
        if move.state != table.State.DISCARDING:
            discarding = rows.change_state(ctxt, move,
                                           table.State.DISCARDING.value)
        try:
            self.drive(ctxt, move.move_id)
        except exception.VolumeInUse as error:
            rows.record_problem(ctxt, discarding, str(error))
            raise
        except Exception as error:
            LOG.warning('What is left of move %(move)s is removed later: '
                        '%(error)s', {'move': move.move_id, 'error': error})
        after = rows.get(ctxt, move.move_id)
        return after is None or 'delete_destination' in after.done

    def _host_of(self, move: rows.Move, side: table.Side) -> str:
        return (move.transfer.source_host if side is table.Side.SOURCE
                else move.transfer.destination_host)


class Facts:
    """What is true of a move, read when it is asked for and only then."""

    def __init__(self, ctxt: context.RequestContext, move: rows.Move,
                 arriving: destination.Destination, devices: Devices | None,
                 look: Callable[[], Devices], is_source_used: AskPeer
                 ) -> None:
        self._ctxt = ctxt
        self._move = move
        self._arriving = arriving
        self._devices = devices
        self._look = look
        self._is_source_used = is_source_used
        self._found: dict[str, Any] = {}

    def holds(self, name: str) -> bool:
        """Whether a fact of the table is true."""
        if name not in self._found:
            self._found[name] = getattr(self, '_' + name)()
        return self._found[name]

    def _ready(self) -> bool:
        steps = table.TABLE[table.State(self._move.state)].steps
        return all(step.name in self._move.done for step in steps)

    def _attachments(self) -> set[str]:
        return {row['id'] for row in rows.attachments(self._ctxt,
                                                      self._move.volume_id)}

    def _wanted(self) -> bool:
        return not self._destination_left()

    def _source_left(self) -> bool:
        return not self._attachments().intersection(self._move.leaving)

    def _destination_left(self) -> bool:
        return not self._attachments().difference(self._move.leaving)

    def _progress(self) -> engine.Progress:
        if self._devices is None:
            self._devices = self._look()
        return self._arriving.progress(self._move.transfer, self._devices)

    def _untouched(self) -> bool:
        progress = self._progress()
        return (progress.hydration is engine.Hydration.OFF
                and progress.local == 0)

    def _all_local(self) -> bool:
        return self._progress().hydration is engine.Hydration.DONE

    def _written(self) -> bool:
        return self._progress().local > 0

    def _source_unused(self) -> bool:
        return not self._is_source_used(self._move.transfer.source_host,
                                        self._move.transfer)

    def _others(self) -> list[rows.Move]:
        return [other for other in rows.for_volume(self._ctxt,
                                                   self._move.volume_id)
                if other.move_id != self._move.move_id]

    def _may_copy(self) -> bool:
        sealed = all('seal_source' in other.done for other in self._others()
                     if other.state == table.State.MIGRATING
                     and other.transfer.generation
                     < self._move.transfer.generation)
        return sealed and self._arriving.space.has_room()

    def _source_free(self) -> bool:
        copy = self._move.transfer.source_name
        arrives = any(other.transfer.destination_name == copy
                      and not set(table.LETS_GO).intersection(other.done)
                      for other in self._others())
        read = any(other.transfer.source_name == copy
                   and 'unexport_source' not in other.done
                   for other in self._others())
        return not arrives and not read

    def _passed_on(self) -> bool:
        copy = self._move.transfer.destination_name
        return any(other.transfer.source_name == copy
                   and other.state in (table.State.COMPLETING,
                                       table.State.DISCARDING)
                   and 'unexport_source' in other.done
                   for other in self._others())
