# SPDX-License-Identifier: Apache-2.0
"""When the moves of one backend are looked after, and by how many at once."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import time
from typing import Any

from cinder import context
import futurist
from oslo_log import log as logging
from oslo_utils import units

from cinder_localstor.datapath import destination
from cinder_localstor import exception
from cinder_localstor.moves import executor
from cinder_localstor.moves import exports
from cinder_localstor.moves import table
from cinder_localstor.node import interface
from cinder_localstor import rows

LOG = logging.getLogger(__name__)

# Moves that are looked after at the same time.  Most of it is waiting for
# peers, so one that is away must not keep the others waiting.
WORKERS = 8
# Seconds
SOON = 1
# Stands among the busy moves for the look at all exports.
EXPORTS = 'exports'
# And for that at suspended logical volumes
SUSPENDED = 'suspended'


def _is_hydrating(move: rows.Move) -> bool:
    return table.START_HYDRATION.name in move.done


class Scheduler:
    """Looks after the moves that this node drives."""

    def __init__(self, host: str, node: interface.Node,
                 arriving: destination.Destination,
                 walker: executor.Executor, exported: exports.Exports,
                 configuration: Any, workers: Any = None) -> None:
        """:param host: ``host@backend`` of this node
        :param workers: where moves are looked after, a pool of its own if
            it is None
        """
        self.host = host
        self._node = node
        self._arriving = arriving
        self._executor = walker
        self._exports = exported
        self._configuration = configuration
        self._workers = workers or futurist.ThreadPoolExecutor(WORKERS)
        self._busy: set[str] = set()
        # Moves that a user waits for; another that is still preparing has
        # been broken off.
        self._beginning: set[str] = set()
        # Moves that no full pool holds up, as far as this process knows
        self._flowing: set[str] = set()

    @contextlib.contextmanager
    def beginning(self, move_id: str) -> Iterator[None]:
        """Leave a move to whoever begins it."""
        self._beginning.add(move_id)
        try:
            yield
        finally:
            self._beginning.discard(move_id)

    def warm_up(self) -> None:
        """Start in the background what the first move would wait for.

        That is the privileged daemons of the target and of os-brick.
        """
        for start in (self._node.target.warm_up, self._node.initiator.name):
            self._workers.submit(self._warm_up, start)

    def _warm_up(self, start: Callable[[], Any]) -> None:
        try:
            start()
        except Exception as error:
            LOG.warning('The first move will have to wait, or fail: %s',
                        error)

    def watch(self) -> None:
        """Take all moves that this node drives as far as they go.

        The facts of all are read at once; then each is looked after on its
        own, so that one which fails or hangs does not hold up the others.
        """
        ctxt = context.get_admin_context()
        self._tend_suspended()
        moves = rows.for_host(ctxt, self.host)
        if any(map(self._exports.serves_from_here, moves)):
            self.tend_exports()
        owned = [move for move in moves if self._executor.owns(move)]
        moves = [move for move in owned if move.move_id not in self._busy]
        if not moves:
            return
        limit = self._share_of_rate(owned)
        self._look_at_space(owned)
        devices = self._node.device_mapper.devices()
        for move in moves:
            self._busy.add(move.move_id)
            self._workers.submit(self.look_after, move.move_id, devices,
                                 limit)

    def _share_of_rate(self, owned: list[rows.Move]) -> int | None:
        """Bytes per second that each volume may arrive with, None for no
        limit.
        """
        rate = self._configuration.localstor_hydration_rate * units.Mi
        arriving = sum(map(_is_hydrating, owned))
        return rate // arriving if rate and arriving else None

    def _look_at_space(self, owned: list[rows.Move]) -> None:
        if any(move.state == table.State.MIGRATING for move in owned):
            try:
                self._arriving.space.look()
            except exception.LocalStorException as error:
                LOG.error('How full the thin pool is can not be read: %s',
                          error)

    def _pace(self, move: rows.Move, limit: int | None) -> rows.Move:
        """Let a move copy as fast as it may now."""
        if not self._arriving.space.has_room():
            self._flowing.discard(move.move_id)
            self._throttle(move, 0)
        elif self._node.volumes.thin and move.move_id not in self._flowing:
            # A helper that was stopped does not know why.
            self._throttle(move, limit)
            self._flowing.add(move.move_id)
            return rows.record_problem(context.get_admin_context(), move, '')
        elif limit is not None:
            self._throttle(move, limit)
        return move

    def _tell_of_space(self, ctxt: context.RequestContext, move_id: str
                       ) -> None:
        move = rows.get(ctxt, move_id)
        if move is not None and not self._arriving.space.has_room():
            rows.record_problem(ctxt, move, self._arriving.space.full)

    def _throttle(self, move: rows.Move, limit: int | None) -> None:
        try:
            self._arriving.throttle(move.transfer, limit)
        except exception.LocalStorException as error:
            LOG.warning('Move %(move)s goes on at its former rate: %(error)s',
                        {'move': move.move_id, 'error': error})

    def _tend_suspended(self) -> None:
        """Resume in the background what a dead command left suspended."""
        if SUSPENDED not in self._busy:
            self._busy.add(SUSPENDED)
            self._workers.submit(self._resume_abandoned)

    def _resume_abandoned(self) -> None:
        try:
            for group in {self._node.volumes, self._node.metadata}:
                group.resume_abandoned()
        except Exception as error:
            LOG.error('What is suspended is not resumed: %s', error)
        finally:
            self._busy.discard(SUSPENDED)

    def tend_exports(self) -> None:
        """Let the target export what it should, in the background."""
        if EXPORTS not in self._busy:
            self._busy.add(EXPORTS)
            self._workers.submit(self._put_exports_right)

    def _put_exports_right(self) -> None:
        try:
            self._exports.put_right()
        finally:
            self._busy.discard(EXPORTS)

    def look_after(self, move_id: str, devices: executor.Devices | None = None,
                   limit: int | None = None) -> None:
        """Take a move as far as it goes, and record what is in its way."""
        ctxt = context.get_admin_context()
        try:
            move = rows.get(ctxt, move_id)
            if move is None or move_id in self._beginning:
                return
            if _is_hydrating(move):
                move = self._pace(move, limit)
            if (move.state in table.UNDONE_BY_FAILURE
                    and self._executor.owns(move)):
                self._executor.undo(ctxt, move)
            else:
                state = self._executor.drive(ctxt, move_id, devices)
                if state is table.State.MIGRATING:
                    self._tell_of_space(ctxt, move_id)
        except exception.MoveChanged as error:
            LOG.info('%s', error)
        except Exception as error:
            LOG.warning('Move %(move)s waits: %(error)s',
                        {'move': move_id, 'error': error})
            move = rows.get(ctxt, move_id)
            if move is not None:
                rows.record_problem(ctxt, move, str(error))
        finally:
            self._busy.discard(move_id)

    def look_soon(self, move: rows.Move) -> None:
        """Look after a move when the call that is under way has ended.

        Cinder removes an attachment's row only after it has told us.
        """
        def look() -> None:
            time.sleep(SOON)
            self.look_after(move.move_id)
        self._workers.submit(look)
