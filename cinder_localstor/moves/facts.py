# SPDX-License-Identifier: Apache-2.0
"""What is true of moves, as the table asks for it."""

from __future__ import annotations

import collections
from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Iterator
import contextlib
import dataclasses
import threading
import time
from typing import Any
from typing import TypeVar

from cinder import context

from cinder_localstor.datapath import destination
from cinder_localstor.datapath import engine
from cinder_localstor.datapath import transfer
from cinder_localstor.moves import table
from cinder_localstor.node import interface
from cinder_localstor import rows

Answer = TypeVar('Answer')
# Ids of moves that copy to a node, and of those that could
Hydrations = tuple[set[str], set[str]]
Devices = dict[str, interface.Device]
# Seconds that a move lets those go first that users wait for
COURTESY = 30


class Turns:
    """When moves begin to hydrate on a node, and how many at the same time.

    A volume whose move waits for its turn is used as any other; only the
    background copy has not begun.
    """

    def __init__(self, most: int) -> None:
        """:param most: how many may, 0 for any number"""
        self._most = most
        self._lock = threading.Lock()
        # Whose hydration begins, but is not recorded yet
        self._given: set[str] = set()
        # How many volumes are being prepared here
        self._preparing = 0
        # Since when moves have been held back, by the monotonic clock
        self._held_back: dict[str, float] = {}

    @contextlib.contextmanager
    def held_back(self) -> Iterator[None]:
        """Let no move begin to hydrate that has not waited for long: a user
        waits for a volume that is being prepared.
        """
        with self._lock:
            self._preparing += 1
        try:
            yield
        finally:
            with self._lock:
                self._preparing -= 1

    def _is_held_back(self, move_id: str) -> bool:
        if not self._preparing:
            self._held_back.clear()
            return False
        now = time.monotonic()
        return now < self._held_back.setdefault(move_id, now) + COURTESY

    def are_free(self, move_id: str, hydrations: Callable[[], Hydrations]
                 ) -> bool:
        """Whether a move would get a turn, see :meth:`take`."""
        return self._ask(move_id, hydrations, take=False)

    def take(self, move_id: str, hydrations: Callable[[], Hydrations]) -> bool:
        """Give a move its turn, if there is one.

        :param hydrations: ids of the moves that copy, and of those that could
            but have not begun
        """
        return self._ask(move_id, hydrations, take=True)

    def _ask(self, move_id: str, hydrations: Callable[[], Hydrations],
             take: bool) -> bool:
        if self._is_held_back(move_id):
            return False
        if not self._most:
            return True
        hydrating, waiting = hydrations()
        with self._lock:
            self._given &= waiting | {move_id}
            free = (move_id in self._given
                    or len(hydrating | self._given) < self._most)
            if free and take:
                self._given.add(move_id)
            return free


@dataclasses.dataclass(frozen=True)
class Tools:
    """What facts are read with.

    :ivar host: ``host@backend`` of this node
    :ivar on_destination: the destination side here, asked for progress
    :ivar devices: the device-mapper nodes of this node
    :ivar sessions: IQNs of the sessions that work
    :ivar is_source_used: asks a backend whether anybody has the handle of a
        move's source open
    :ivar remaining: asks a backend which of some copies it has still
    :ivar turns: who of the moves that arrive here may hydrate
    """

    host: str
    on_destination: destination.Destination
    devices: Callable[[], Devices]
    sessions: Callable[[], Collection[str]]
    is_source_used: Callable[[str, transfer.Transfer], bool]
    remaining: Callable[[str, Collection[str]], set[str]]
    turns: Turns


class Look:
    """One look at a node and at all that its moves need to know.

    Each thing is read when it is first asked for, for all moves at once, and
    never again; many may ask at the same time.
    """

    def __init__(self, ctxt: context.RequestContext, tools: Tools,
                 moves: Iterable[rows.Move], whole: bool = False) -> None:
        """:param moves: that will be asked about
        :param whole: whether they are all that this node has a part in
        """
        self._ctxt = ctxt
        self.tools = tools
        self._moves = list(moves)
        self._whole = whole
        self._answers: dict[Any, Any] = {}
        self._locks: dict[Any, threading.Lock] = collections.defaultdict(
            threading.Lock)
        self._lock = threading.Lock()

    def _once(self, question: Any, ask: Callable[[], Answer]) -> Answer:
        with self._lock:
            lock = self._locks[question]
        with lock:
            if question not in self._answers:
                self._answers[question] = ask()
            return self._answers[question]

    def devices(self) -> Devices:
        """The device-mapper nodes of this node."""
        return self._once('devices', self.tools.devices)

    def sessions(self) -> Collection[str]:
        """IQNs of the sessions that work."""
        return self._once('sessions', self.tools.sessions)

    def attachments(self, volume_id: str) -> set[str]:
        """Ids of the attachments of a volume."""
        wanted = {move.volume_id for move in self._moves}
        return self._once('attachments', lambda: rows.attached(
            self._ctxt, wanted)).get(volume_id, set())

    def others(self, move: rows.Move) -> list[rows.Move]:
        """The other moves of a move's volume."""
        found = self._once(('moves', move.volume_id), lambda: rows.for_volume(
            self._ctxt, move.volume_id))
        return [other for other in found if other.move_id != move.move_id]

    def beside(self, move: rows.Move) -> list[rows.Move]:
        """As :meth:`others`, those of this node at least."""
        if not self._whole:
            return self.others(move)
        return [other for other in self._moves
                if other.volume_id == move.volume_id
                and other.move_id != move.move_id
                and not other.transfer.is_snapshot]

    def arriving_snapshots(self, host: str) -> list[rows.Move]:
        """What brings a backend the rest of snapshots."""
        moves = (self._moves if self._whole and host == self.tools.host
                 else self._once(('moves of', host), lambda: (
                     rows.for_host(self._ctxt, host))))
        return [move for move in moves if move.transfer.is_snapshot]

    def is_kept(self, move: rows.Move) -> bool:
        """Whether thick snapshots lie on a move's source copy."""
        return self.is_origin(move.transfer.source_host,
                              move.transfer.source_name)

    def is_origin(self, host: str, name: str) -> bool:
        """Whether thick snapshots lie on a copy."""
        known = self._whole and host == self.tools.host
        return name in self._once(
            ('origins', host), lambda: rows.origins(
                self._ctxt, host, self._moves if known else None))

    def is_snapshot_wanted(self, move: rows.Move) -> bool:
        """Whether anybody needs a copy's source beside it.

        A copy that has recorded that it reads no more counts no more.  So of
        two that end at the same time, or of one and a deletion, one at least
        gives the source up.
        """
        host = move.transfer.source_host
        name = move.transfer.source_name
        return self._once(('wanted', host, name, move.move_id), lambda: (
            rows.is_snapshot_held(self._ctxt, host, name)
            or bool(table.readers(rows.for_host(self._ctxt, host), host, name)
                    - {move.move_id})))

    def is_snapshot_needed(self, move: rows.Move) -> bool:
        """Whether anybody needs the snapshot that a move brings."""
        host = move.transfer.destination_host
        name = move.transfer.destination_name

        def ask() -> bool:
            # In this order: who reads one that was deleted, did so before.
            if any(snapshot.name == name for snapshot
                   in rows.snapshots_on(self._ctxt, host)):
                return True
            moves = (self._moves if self._whole
                     else rows.for_host(self._ctxt, host))
            return bool(table.readers(moves, host, name))
        return self._once(('needed', host, name), ask)

    def progress(self, move: rows.Move) -> engine.Progress:
        """How far a move is that arrives here."""
        return self._once(
            ('progress', move.move_id),
            lambda: self.tools.on_destination.progress(move.transfer,
                                                       self.devices()))

    def is_connected(self, move: rows.Move) -> bool:
        """Whether the source of a move that arrives here can be read."""
        return self.tools.on_destination.is_connected(
            move.transfer, self.devices(), self.sessions())

    def is_source_used(self, move: rows.Move) -> bool:
        """Whether anybody but the target has the source's handle open."""
        return self.tools.is_source_used(move.transfer.source_host,
                                         move.transfer)

    def is_left(self, host: str, name: str) -> bool:
        """Whether a backend has a copy still, or has not wiped it yet."""
        names = {name}
        for move in self._moves:
            described = move.transfer
            names |= {copy for copy, at, step in (
                (described.source_name, described.source_host,
                 table.DELETE_SOURCE),
                (described.destination_name, described.destination_host,
                 table.DELETE_DESTINATION))
                if at == host and step.is_done(move)}
        return name in self._once(
            ('remaining', host),
            lambda: self.tools.remaining(host, sorted(names)))

    def _hydrations(self) -> Hydrations:
        return self._once('hydrations', self._find_hydrations)

    def _find_hydrations(self) -> Hydrations:
        moves = self._moves if self._whole else rows.for_host(
            self._ctxt, self.tools.host)
        hydrating: set[str] = set()
        waiting: set[str] = set()
        for move in moves:
            if (move.state == table.State.MIGRATING
                    and move.transfer.destination_host == self.tools.host
                    and self.is_connected(move)):
                started = table.START_HYDRATION.is_done(move)
                (hydrating if started else waiting).add(move.move_id)
        return hydrating, waiting

    def hydrating(self) -> set[str]:
        """Ids of the moves that copy to this node, and could now."""
        return self._hydrations()[0]

    def has_turn(self, move: rows.Move) -> bool:
        """Whether a move would get its turn to hydrate."""
        return self.tools.turns.are_free(move.move_id, self._hydrations)

    def take_turn(self, move: rows.Move) -> bool:
        """Give a move its turn to hydrate, if there is one."""
        return self.tools.turns.take(move.move_id, self._hydrations)


class Facts:
    """What is true of a move, read when it is asked for and only then."""

    def __init__(self, move: rows.Move, look: Look) -> None:
        self._move = move
        self._look = look
        self._found: dict[table.Fact, bool] = {}

    def holds(self, fact: table.Fact) -> bool:
        """Whether a fact of the table is true."""
        if fact not in self._found:
            self._found[fact] = self._read(fact)
        return self._found[fact]

    def _read(self, fact: table.Fact) -> bool:
        move, look = self._move, self._look
        match fact:
            case table.Fact.READY:
                steps = table.TABLE[table.State(move.state)].steps
                return all(step.is_done(move) for step in steps)
            case table.Fact.WANTED:
                return move.is_migration or bool(
                    self._attachments() - set(move.leaving))
            case table.Fact.DESTINATION_LEFT:
                return not self._attachments() - set(move.leaving)
            case table.Fact.SOURCE_LEFT:
                return not self._attachments() & set(move.leaving)
            case table.Fact.UNTOUCHED:
                progress = look.progress(move)
                return (progress.hydration is engine.Hydration.OFF
                        and progress.local == 0)
            case table.Fact.WRITTEN:
                return look.progress(move).local > 0
            case table.Fact.ALL_LOCAL:
                return (look.progress(move).hydration is engine.Hydration.DONE
                        and not self._is_source_shared())
            case table.Fact.SOURCE_UNUSED:
                return not look.is_source_used(move)
            case table.Fact.MAY_COPY:
                return self._may_copy()
            case table.Fact.TURN:
                return look.take_turn(move)
            case table.Fact.UNEXPORTED:
                return table.has_unexported(move)
            case table.Fact.KEPT:
                # What was given up is kept for nobody.
                return (not table.DELETE_SOURCE.is_done(move)
                        and look.is_kept(move)
                        and not self._does_source_arrive())
            case table.Fact.SOURCE_WHOLE:
                return not self._does_source_arrive()
            case table.Fact.SOURCE_FREE:
                return (not self.holds(table.Fact.SOURCE_STAYS)
                        and not look.is_kept(move)
                        and self._is_source_free())
            case table.Fact.SOURCE_STAYS:
                if move.transfer.is_snapshot:
                    return True  # its volume has its own move
                # As with what is kept
                return (move.transfer.is_copy
                        and not table.DELETE_SOURCE.is_done(move)
                        and look.is_snapshot_wanted(move))
            case table.Fact.PASSED_ON:
                return self._is_passed_on()
            case table.Fact.UNNEEDED:
                return (move.transfer.is_snapshot
                        and not look.is_snapshot_needed(move))
            case table.Fact.SOURCE_GONE:
                return self._is_gone(fact, table.DELETE_SOURCE,
                                     move.transfer.source_host,
                                     move.transfer.source_name)
            case table.Fact.DESTINATION_GONE:
                return self._is_gone(fact, table.DELETE_DESTINATION,
                                     move.transfer.destination_host,
                                     move.transfer.destination_name)

    def _attachments(self) -> set[str]:
        return self._look.attachments(self._move.volume_id)

    def _may_copy(self) -> bool:
        sealed = all(table.SEAL_SOURCE.is_done(other)
                     for other in self._look.others(self._move)
                     if other.state == table.State.MIGRATING
                     and other.transfer.generation
                     <= self._move.transfer.generation)
        return sealed and self._look.tools.on_destination.space.has_room()

    def _is_source_free(self) -> bool:
        """Whether no other move uses the source's copy."""
        copy = self._move.transfer.source_name
        read = any(other.transfer.source_name == copy
                   and not table.has_unexported(other)
                   for other in self._look.others(self._move))
        return not read and not self._does_source_arrive()

    def _does_source_arrive(self) -> bool:
        """Whether the source's copy has not all of its content yet."""
        described = self._move.transfer
        arriving = (self._look.arriving_snapshots(described.source_host)
                    if described.is_copy else self._look.others(self._move))
        return any(other.transfer.destination_name == described.source_name
                   and not table.has_released(other) for other in arriving)

    def _is_source_shared(self) -> bool:
        """Whether snapshots of the destination's copy need the source, too.
        """
        return any(other.transfer.snapshot_of == self._move.move_id
                   and not table.has_unexported(other)
                   for other in self._look.arriving_snapshots(
                       self._move.transfer.destination_host))

    def _is_passed_on(self) -> bool:
        copy, host = (self._move.transfer.destination_name,
                      self._move.transfer.destination_host)
        given_back = any(other.transfer.source_name == copy
                         and other.state in (table.State.COMPLETING,
                                             table.State.KEEPING,
                                             table.State.DISCARDING)
                         and table.has_unexported(other)
                         for other in self._look.beside(self._move))
        # What snapshots lie on, or still read, arrives as a whole.
        return (given_back and not self._is_source_shared()
                and not self._look.is_origin(host, copy))

    def _is_gone(self, fact: table.Fact, given_up: table.Step, host: str,
                 name: str) -> bool:
        # An operator may have said so, of a node that is lost for good.
        return (fact.value in self._move.done
                or given_up.is_done(self._move)
                and not self._look.is_left(host, name))
