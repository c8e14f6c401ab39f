# SPDX-License-Identifier: Apache-2.0
"""When the moves of one backend are looked after, and by how many at once."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import functools
import time
from typing import Any

from cinder import context
from oslo_log import log as logging
from oslo_utils import units

from cinder_localstor.datapath import copies
from cinder_localstor.datapath import destination
from cinder_localstor.datapath import engine
from cinder_localstor.datapath import handles
from cinder_localstor.datapath import wipes
from cinder_localstor import exception
from cinder_localstor.moves import executor
from cinder_localstor.moves import exports
from cinder_localstor.moves import facts
from cinder_localstor.moves import properties
from cinder_localstor.moves import queues
from cinder_localstor.moves import table
from cinder_localstor.node import interface
from cinder_localstor.peers import rpc
from cinder_localstor import rows

LOG = logging.getLogger(__name__)

# Workers of each queue.  Most of their work is waiting for peers.
URGENT_WORKERS = 8
SLOW_WORKERS = 8
# A disk that is wiped serves guests, too.
WIPERS = 2
# Seconds
SOON = 1
# Periods between two searches for moves that nobody has told us of: all other
# queries find their rows by an index.
SEARCH_EVERY = 60
# Why a move is undone that nobody works at any more
BROKEN_OFF = 'The service that began it has ended meanwhile.'
# Stand among the busy moves for what is no move
EXPORTS, RATES, SUSPENDED = 'exports', 'rates', 'suspended'


class Scheduler:
    """Looks after the moves that this node drives, and wipes its copies.

    There are three queues, and none of them waits for another: *urgent* is
    what a guest may wait for or what keeps its data safe (seal, connect again,
    export again, switch), *slow* is what comes before and after, *wipes* can
    take hours.
    """

    def __init__(self, host: str, node: interface.Node,
                 on_destination: destination.Destination,
                 background: executor.Executor, exported: exports.Exports,
                 peers: rpc.PeerAPI, configuration: Any, workers: Any = None
                 ) -> None:
        """:param host: ``host@backend`` of this node
        :param workers: where all work is done, pools of its own if it is None
        """
        self.host = host
        self._node = node
        self._destination = on_destination
        self._executor = background
        self._exports = exported
        self._peers = peers
        self._configuration = configuration
        self._wipes = wipes.Wipes(node.volumes)
        self._handles = handles.Handles(node)
        self._urgent = queues.Queue(URGENT_WORKERS, workers)
        self._slow = queues.Queue(SLOW_WORKERS, workers)
        self._wiping = queues.Queue(WIPERS, workers)
        self._busy: set[str] = set()
        # Moves that a user waits for; another that is still preparing has
        # been broken off.
        self._beginning: set[str] = set()
        # Ids of the moves that this node has a part in
        self._known: set[str] = set()
        self._periods = 0
        # What helpers were told last, by move, None where it failed; None
        # before the first look
        self._rates: dict[str, engine.Rates | None] | None = None

    @contextlib.contextmanager
    def beginning(self, move_id: str) -> Iterator[None]:
        """Leave a move to whoever begins it."""
        self.learn(move_id)
        self._beginning.add(move_id)
        try:
            yield
        finally:
            self._beginning.discard(move_id)

    def learn(self, move_id: str) -> None:
        """Hear of a move that this node has a part in."""
        self._known.add(move_id)

    def warm_up(self) -> None:
        """Start in the background what the first move would wait for.

        That is the privileged daemons of the target and of os-brick.
        """
        for start in (self._node.target.warm_up, self._node.initiator.name):
            self._slow.submit('', functools.partial(self._warm_up, start))

    def _warm_up(self, start: Callable[[], Any]) -> None:
        try:
            start()
        except Exception as error:
            LOG.warning('The first move will have to wait, or fail: %s',
                        error)

    # The periodic task

    def watch(self) -> None:
        """Take all moves that this node drives as far as they go.

        What is to be known of all of them is read at once; then each is looked
        after on its own, so that one which fails or hangs does not hold up the
        others.
        """
        ctxt = context.get_admin_context()
        self._tend_suspended()
        self.tend_wipes()
        moves = self._moves(ctxt)
        if any(map(self._exports.serves_from_here, moves)):
            self.tend_exports(moves)
        owned = [move for move in moves if self._executor.owns(move)]
        if not owned:
            # Whatever arrives from now on was not there before this process.
            self._rates = {}
            return
        look = self._executor.look(ctxt, moves, whole=True)
        self._look_at_space(owned)
        self._tend_pace(owned, look)
        for move in owned:
            self._submit(move, look)

    def _moves(self, ctxt: context.RequestContext) -> list[rows.Move]:
        """The moves that this node has a part in, oldest first."""
        asked = self._known - self._beginning
        if self._periods % SEARCH_EVERY == 0:
            moves = rows.for_host(ctxt, self.host)
        else:
            moves = rows.by_ids(ctxt, set(self._known))
        self._periods += 1
        found = {move.move_id for move in moves}
        self._known -= asked - found
        self._known |= found
        return moves

    def _submit(self, move: rows.Move, look: facts.Look | None = None
                ) -> None:
        """Have a move looked after, in the queue that its state belongs to.
        """
        if move.move_id in self._busy:
            return
        self._busy.add(move.move_id)
        urgent = move.state in table.URGENT
        peer = (move.transfer.source_host
                if move.transfer.destination_host == self.host
                else move.transfer.destination_host)
        (self._urgent if urgent else self._slow).submit(
            peer, functools.partial(self._work, move, urgent, look))

    def _submit_alone(self, queue: queues.Queue, name: str,
                      work: Callable[[], None]) -> None:
        """Have something done that is no move, once at a time."""
        if name in self._busy:
            return
        self._busy.add(name)

        def run() -> None:
            try:
                work()
            except Exception:
                # Nobody else would hear of it.
                LOG.exception('Work at %s has failed', name)
            finally:
                self._busy.discard(name)
        queue.submit('', run)

    def _work(self, move: rows.Move, urgent: bool, look: facts.Look | None
              ) -> None:
        after = None
        try:
            after = self._look_after(move, urgent, look)
        finally:
            self._busy.discard(move.move_id)
        if after is not None:
            self._submit(after)

    def _look_after(self, move: rows.Move, urgent: bool,
                    look: facts.Look | None) -> rows.Move | None:
        """Take a move as far as it goes in one queue.

        :returns: the move if it goes on in the other
        """
        ctxt = context.get_admin_context()
        try:
            if move.move_id in self._beginning:
                return None
            broken_off = table.State(move.state) in table.UNDONE_BY_FAILURE
            if (look is not None and not broken_off
                    and not self._executor.has_work(move, look)):
                self._executor.rest(ctxt, move, look)
                return None
            if broken_off:
                move = self._executor.undo(ctxt, move, BROKEN_OFF)
            after = self._executor.drive(ctxt, move.move_id, [
                state for state in table.TABLE
                if (state in table.URGENT) == urgent])
            self.tend_wipes()
            if after is None or after in table.FINAL or (
                    after in table.URGENT) == urgent:
                return None
            return rows.get(ctxt, move.move_id)
        except exception.MoveChanged as error:
            LOG.info('%s', error)
        except Exception as error:
            LOG.warning('Move %(move)s waits: %(error)s',
                        {'move': move.move_id, 'error': error})
            found = rows.get(ctxt, move.move_id)
            if found is not None:
                self._executor.fail(ctxt, found, error)
        return None

    def look_after(self, move_id: str) -> None:
        """Have a move looked after now, and not at the next period."""
        self.learn(move_id)
        move = rows.get(context.get_admin_context(), move_id)
        if move is not None and self._executor.owns(move):
            self._submit(move)

    def look_soon(self, move: rows.Move) -> None:
        """Look after a move when the call that is under way has ended.

        Cinder removes an attachment's row only after it has told us.
        """
        def look() -> None:
            time.sleep(SOON)
            self.look_after(move.move_id)
        self._slow.submit('', look)

    # Rates, and the space of a thin pool

    def _look_at_space(self, owned: list[rows.Move]) -> None:
        if any(move.state == table.State.MIGRATING for move in owned):
            try:
                self._destination.space.look()
            except exception.LocalStorException as error:
                LOG.error('How full the thin pool is can not be read: %s',
                          error)

    def _tend_pace(self, owned: list[rows.Move], look: facts.Look) -> None:
        """Let what arrives have the same share of what the option allows, no
        volume more than its type does, and nothing arrive in a full pool.
        """
        moves = [move for move in owned
                 if table.START_HYDRATION.is_done(move)]
        if not moves or RATES in self._busy:
            return
        rate = self._configuration.localstor_hydration_rate * units.Mi
        share = rate // max(1, len(look.hydrating())) if rate else None
        self._submit_alone(self._urgent, RATES, functools.partial(
            self._set_rates, moves, share, look))

    def _set_rates(self, moves: list[rows.Move], share: int | None,
                   look: facts.Look) -> None:
        wishes = properties.of_volumes(context.get_admin_context(),
                                       {move.volume_id for move in moves})
        former, self._rates = self._rates, {}
        for move in moves:
            # An engine that was there before this process may have any rates.
            told = (None if former is None
                    else former.get(move.move_id, self._initial_rates()))
            rates = self._rates_of(wishes.get(move.volume_id,
                                              properties.NONE), share)
            self._rates[move.move_id] = (
                rates if self._throttle(move, rates, told, look) else None)

    def _initial_rates(self) -> engine.Rates:
        """What an engine has that was just started."""
        return engine.Rates(minimum=(
            self._configuration.localstor_hydration_min_rate * units.Mi))

    def _rates_of(self, wishes: properties.Wishes, share: int | None
                  ) -> engine.Rates:
        """What a move may have now.

        :param share: bytes per second that the option leaves it, None for all
        """
        limits = [limit for limit in (wishes.rate, share)
                  if limit is not None]
        if not self._destination.space.has_room():
            limits = [0]
        minimum = (self._initial_rates().minimum if wishes.minimum is None
                   else wishes.minimum)
        return engine.Rates(min(limits, default=None), minimum)

    def _throttle(self, move: rows.Move, rates: engine.Rates,
                  told: engine.Rates | None, look: facts.Look) -> bool:
        """Let a move go on at such rates; whether it does, as far as this
        process decides it.

        What an operator has told a helper since then is left as it is. But a
        helper that was started again has forgotten all.
        """
        try:
            progress = look.progress(move)
            if (progress.hydration is not engine.Hydration.MISSING
                    and progress.rates != rates
                    and (told != rates
                         or progress.rates == self._initial_rates())):
                self._destination.throttle(move.transfer, rates)
            return True
        except exception.LocalStorException as error:
            LOG.warning('Move %(move)s goes on at its former rate: %(error)s',
                        {'move': move.move_id, 'error': error})
            return False

    # What a command that died has left suspended

    def _tend_suspended(self) -> None:
        self._submit_alone(self._urgent, SUSPENDED, self._resume_abandoned)

    def _resume_abandoned(self) -> None:
        try:
            self._handles.resume_abandoned()
            for group in {self._node.volumes, self._node.metadata}:
                group.resume_abandoned()
        except Exception as error:
            LOG.error('What is suspended is not resumed: %s', error)

    # Exports

    def tend_exports(self, moves: list[rows.Move]) -> None:
        """Let the target export what it should, in the background.

        :param moves: that this node has a part in
        """
        self._submit_alone(self._urgent, EXPORTS, functools.partial(
            self._exports.put_right, moves))

    # Wipes

    def tend_wipes(self) -> None:
        """Have the copies wiped that were given up."""
        for name in self._wipes.recorded():
            self._submit_alone(self._wiping, name,
                               functools.partial(self._wipe, name))

    def _wipe(self, name: str) -> None:
        try:
            volumes = self._node.volumes.logical_volumes()
            volume = volumes.get(name)
            # Copies still read snapshots of it.
            if volume is None or interface.snapshots_on(name, volumes):
                return
            LOG.info('Logical volume %s is wiped', name)
            self._wipes.wipe(name)
            LOG.info('Logical volume %s is wiped and removed', name)
            self._tell_that_it_is_gone(volume)
        except Exception as error:
            LOG.error('Logical volume %(name)s is not wiped yet: %(error)s',
                      {'name': name, 'error': error})

    def _tell_that_it_is_gone(self, volume: interface.LogicalVolume) -> None:
        """Let those look at once who would ask at their next period."""
        ctxt = context.get_admin_context()
        volume_id = copies.Label(volume.tags).volume_id
        for move in rows.for_volume(ctxt, volume_id):
            owner = self._executor.owner(move)
            if owner == self.host:
                self._submit(move)
            else:
                self._peers.nudge(owner, move.move_id)
