# SPDX-License-Identifier: Apache-2.0
"""What is on a node, and what is wrong with it.

:func:`look` reads the facts of one backend and changes nothing;
:func:`report` compares what is with what should be, and does nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
import dataclasses
import datetime
import enum
import re
from typing import TypeVar

from cinder import context
from oslo_utils import timeutils

from cinder_localstor.datapath import destination
from cinder_localstor.datapath import engine
from cinder_localstor.datapath import handles
from cinder_localstor.datapath import transfer
from cinder_localstor.datapath import wipes
from cinder_localstor.moves import table
from cinder_localstor.node import interface
from cinder_localstor.peers import directory
from cinder_localstor import rows

Answer = TypeVar('Answer')
# Backend, copy and problem
Finding = tuple[str, str, str]

# In the IQN of each source, see node.targets
SESSION = re.compile(r':localstor-(?P<move_id>[0-9a-f-]{36})$')
# A number by itself, not a part of a name
FIGURE = re.compile(r'\b\d+(?:\.\d+)?\b')
# The user's volume is the source copy still, or again.
BEFORE_IDENTITY = (table.State.PREPARING, table.State.ABORTING)
NEVER = datetime.datetime.min
UNKNOWN = 'no volume and no move knows of it'


class Role(str, enum.Enum):
    """What a copy of a volume is to this node."""

    STANDING = 'standing'
    SOURCE = 'source'
    ARRIVING = 'arriving'
    # It was given up, and is wiped.
    WIPING = 'wiping'
    # Nobody knows of it.
    LEFTOVER = 'leftover'


@dataclasses.dataclass(frozen=True)
class Facts:
    """A backend as it was at one moment.

    What could not be read is None, and `failures` says why.

    :ivar passing: names of copies that are being made or deleted
    :ivar maps: logical volumes of the group for region maps, if it is
        another
    :ivar down: hosts of volume services that are down
    :ivar pool: the thin pool, if there is one
    :ivar suspended: full names of logical volumes that answer nothing
    """

    host: str
    at: datetime.datetime
    standing: list[handles.Standing]
    passing: set[str]
    moves: list[rows.Move]
    down: set[str]
    volumes: dict[str, interface.LogicalVolume] | None
    maps: dict[str, interface.LogicalVolume]
    devices: dict[str, interface.Device] | None
    exported: set[str] | None
    connected: dict[str, str] | None
    pool: interface.Pool | None = None
    suspended: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Running:
    """A move as one of its nodes sees it.

    :ivar peer: ``host@backend`` of the other node
    :ivar done: steps of the present state that are done, of `steps`
    :ivar progress: None where only the peer knows
    :ivar rate: bytes per second as the engine measures it, or else on
        average since hydration began; None when it is not known
    :ivar stalled: whether what has not arrived waits for a source that is
        away
    """

    move_id: str
    peer: str
    state: str
    since: datetime.datetime
    done: int
    steps: int
    progress: engine.Progress | None = None
    rate: float | None = None
    stalled: bool = False

    @property
    def remaining(self) -> float | None:
        """Seconds until all has arrived, None when nobody can tell."""
        if self.progress is None or not self.rate or self.stalled:
            return None
        return (self.progress.total - self.progress.local) / self.rate


@dataclasses.dataclass(frozen=True)
class Copy:
    """A copy of a volume on this node.

    :ivar volume_id: '' where it is not known
    :ivar size: bytes of the logical volume, None if there is none
    :ivar under: names of the devices that the handle lies on
    """

    name: str
    volume_id: str
    role: Role
    size: int | None = None
    under: tuple[str, ...] = ()
    open_count: int | None = None
    move: Running | None = None
    problems: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Backend:
    """All copies of one backend, and what is wrong with it as a whole."""

    host: str
    copies: tuple[Copy, ...] = ()
    problems: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Report:
    """All backends of a node.

    :ivar problems: what is wrong with the node and with no backend alone
    """

    at: datetime.datetime
    backends: tuple[Backend, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def is_well(self) -> bool:
        """Whether nothing is wrong."""
        return not self.found()

    def found(self) -> set[Finding]:
        """Everything that is wrong."""
        found: set[Finding] = {('', '', text) for text in self.problems}
        for backend in self.backends:
            found |= {(backend.host, '', text) for text in backend.problems}
            found |= {(backend.host, copy.name, text)
                      for copy in backend.copies for text in copy.problems}
        return found


def look(ctxt: context.RequestContext, host: str, node: interface.Node
         ) -> Facts:
    """Read the facts of a backend.

    A tool that fails is told as a problem, and the others are asked still.
    """
    failures: list[str] = []

    def ask(question: Callable[[], Answer]) -> Answer | None:
        try:
            return question()
        except Exception as error:
            failures.append(str(error))
            return None

    moves = rows.for_host(ctxt, host)
    standing = [handles.Standing(name, volume_id, generation)
                for name, volume_id, generation
                in rows.standing_copies(ctxt, host)]
    # Only where a move needs it: to ask a target can take long.
    exports = any(move.transfer.source_host == host for move in moves)
    maps = None
    if node.metadata is not node.volumes:
        maps = ask(node.metadata.logical_volumes)
    return Facts(
        host=host, at=timeutils.utcnow(), standing=standing, moves=moves,
        down=directory.down(ctxt),
        volumes=ask(node.volumes.logical_volumes), maps=maps or {},
        devices=ask(node.device_mapper.devices),
        exported=ask(node.target.exported) if exports else set(),
        connected=ask(node.initiator.connected),
        passing=rows.passing_copies(ctxt, host),
        pool=ask(node.volumes.pool),
        suspended=tuple('%s/%s' % (group.name, name)
                        for group in {node.volumes, node.metadata}
                        for name in sorted(group.suspended())),
        failures=tuple(failures))


def report(backends: Iterable[tuple[Facts, interface.Node,
                                    destination.Destination]]) -> Report:
    """What is on a node, and what is wrong with it.

    :param backends: facts of each, its node, which is asked for names and
        never for more, and the destination side of moves there
    """
    judges = [_Judge(*backend) for backend in backends]
    known: set[str] = set()
    moves: set[str] = set()
    for judge in judges:
        known |= judge.device_names()
        moves |= {move.move_id for move in judge.facts.moves}
    strays = []
    for facts in [judge.facts for judge in judges][:1]:
        # Nodes and sessions are those of all backends.
        strays += ['device %s: %s' % (name, UNKNOWN)
                   for name in sorted(set(facts.devices or ()) - known)]
        strays += ['iSCSI session %s: %s' % (iqn, UNKNOWN)
                   for iqn in sorted(facts.connected or ())
                   if (match := SESSION.search(iqn))
                   and match['move_id'] not in moves]
    return Report(at=timeutils.utcnow(), problems=tuple(strays),
                  backends=tuple(judge.backend() for judge in judges))


def lasting(earlier: Report, later: Report) -> Report:
    """The later report with the problems only that the earlier has too.

    Whoever looks in the middle of a step sees half of it.  A problem is the
    same one when only its figures have changed.
    """
    known = {(host, name, _without_figures(text))
             for host, name, text in earlier.found()}

    def both(texts: tuple[str, ...], host: str = '', name: str = ''
             ) -> tuple[str, ...]:
        return tuple(text for text in texts
                     if (host, name, _without_figures(text)) in known)

    def of_backend(backend: Backend) -> Backend:
        copies = [dataclasses.replace(
            copy, problems=both(copy.problems, backend.host, copy.name))
            for copy in backend.copies]
        return dataclasses.replace(
            backend, problems=both(backend.problems, backend.host),
            copies=tuple(copy for copy in copies
                         if copy.problems or copy.role is not Role.LEFTOVER))

    return dataclasses.replace(
        later, problems=both(later.problems),
        backends=tuple(map(of_backend, later.backends)))


def _without_figures(text: str) -> str:
    return FIGURE.sub('', text)


class _Judge:
    """Compares the facts of a backend with what should be."""

    def __init__(self, facts: Facts, node: interface.Node,
                 arriving: destination.Destination) -> None:
        self.facts = facts
        self._group = node.volumes
        self._arriving = arriving

    def _comes(self, move: rows.Move) -> bool:
        return move.transfer.destination_host == self.facts.host

    def _leaves(self, move: rows.Move) -> bool:
        return move.transfer.source_host == self.facts.host

    def _copy_names(self) -> set[str]:
        facts = self.facts
        return {copy.name for copy in facts.standing} | facts.passing | {
            name for move in facts.moves for name in (
                move.transfer.source_name, move.transfer.destination_name)}

    def _arriving_names(self) -> set[str]:
        return {move.transfer.destination_name for move in self.facts.moves
                if self._comes(move)}

    def device_names(self) -> set[str]:
        """Names of all nodes that may be here."""
        names = set(map(handles.handle_name, self._copy_names()))
        for move in self.facts.moves:
            names.update(self._arriving.node_names(move.transfer))
        return names

    def backend(self) -> Backend:
        facts = self.facts
        standing = {copy.name: copy for copy in facts.standing}
        copies = []
        for move in facts.moves:
            if self._comes(move):
                standing.pop(move.transfer.destination_name, None)
                copies.append(self._arriving_copy(move))
            if self._leaves(move):
                standing.pop(move.transfer.source_name, None)
                copies.append(self._source_copy(move))
        copies += [self._copy(copy.name, copy.volume_id, Role.STANDING,
                              self._problems_of_standing(copy))
                   for copy in standing.values()]
        copies += self._leftovers()
        problems = [*facts.failures, *map(_suspended_volume,
                                          facts.suspended)]
        if facts.pool and (full := self._arriving.space.problem(facts.pool)):
            problems.append(full)
        return Backend(host=facts.host, problems=tuple(problems),
                       copies=tuple(sorted(copies, key=_order)))

    def _copy(self, name: str, volume_id: str, role: Role,
              problems: Iterable[str], move: Running | None = None) -> Copy:
        volume = (self.facts.volumes or {}).get(name)
        handle = self._device(handles.handle_name(name))
        return Copy(name=name, volume_id=volume_id, role=role,
                    problems=tuple(problems), move=move,
                    size=volume.size if volume else None,
                    under=handle.under if handle else (),
                    open_count=handle.open_count if handle else None)

    def _device(self, name: str) -> interface.Device | None:
        return (self.facts.devices or {}).get(name)

    # Copies that stand

    def _problems_of_standing(self, copy: handles.Standing) -> Iterator[str]:
        yield from self._problems_of_volume(copy)
        yield from self._problems_of_handle(copy)

    def _problems_of_volume(self, copy: handles.Standing) -> Iterator[str]:
        if self.facts.volumes is None:
            return
        full_name = '%s/%s' % (self._group.name, copy.name)
        volume = self.facts.volumes.get(copy.name)
        if volume is None:
            yield 'logical volume %s is missing' % full_name
            return
        if not self._group.is_active(copy.name):
            yield _inactive(full_name)
        tags = transfer.read_tags(volume.tags)
        generation = transfer.read_generation(tags, copy.volume_id,
                                              copy.generation)
        if 'move' in tags:
            yield 'the copy never arrived, of move %s' % tags['move']
        if generation < copy.generation:
            yield ('the copy is an old one: generation %d, the present one '
                   'is %d' % (generation, copy.generation))
        superseded = transfer.read_number(tags, handles.SEALED, 0)
        newest = copy.newest or copy.generation
        if superseded > newest:
            yield ('the volume has moved on as generation %d, the database '
                   'says that generation %d is the present one'
                   % (superseded, newest))

    def _problems_of_handle(self, copy: handles.Standing,
                            engine_node: str = '', sealed: bool = False
                            ) -> Iterator[str]:
        """:param engine_node: what the handle begins on if not on the volume
        :param sealed: whether nobody may write it any more
        """
        if self.facts.devices is None:
            return
        name = handles.handle_name(copy.name)
        handle = self._device(name)
        if handle is None:
            yield 'it has no handle'
            return
        volume = self._group.mapped_name(copy.name)
        expected = (engine_node or volume,)
        # Behind the engine's node is what the volume was extended by.
        if handle.under not in (expected, (*expected, volume)):
            yield ('the handle lies on %s instead of %s'
                   % (' + '.join(handle.under) or 'nothing', expected[0]))
        if handle.read_only and copy.newest <= copy.generation:
            yield 'the handle is read-only'
        if sealed and not handle.read_only:
            yield 'the volume has moved on, and this copy can be written'
        yield from self._suspended(name)

    def _suspended(self, name: str) -> Iterator[str]:
        device = self._device(name)
        if device is not None and device.suspended:
            yield ("%s is suspended, all I/O to it waits: run 'dmsetup "
                   "resume %s'" % (name, name))

    def _leftovers(self) -> Iterator[Copy]:
        """Logical volumes of ours that belong to nothing any more."""
        names = self._copy_names()
        moves = {move.move_id for move in self.facts.moves}
        found = {**self.facts.maps, **(self.facts.volumes or {})}
        for name, volume in found.items():
            tags = transfer.read_tags(volume.tags)
            if wipes.former_name(name) is not None:
                yield self._copy(name, tags.get('volume', ''), Role.WIPING,
                                 [])
            elif tags and name not in names and tags.get('map') not in moves:
                copy = self._copy(name, tags.get('volume', ''),
                                  Role.LEFTOVER, [UNKNOWN])
                yield dataclasses.replace(copy, size=volume.size)

    # Copies of moves

    def _running(self, move: rows.Move) -> Running:
        steps = table.TABLE[table.State(move.state)].steps
        progress = rate = None
        stalled = False
        peer = move.transfer.destination_host
        if self._comes(move):
            peer = move.transfer.source_host
            if self.facts.devices is not None:
                progress = self._arriving.progress(move.transfer,
                                                   self.facts.devices)
                rate = self._average(move, progress)
                stalled = self._is_stalled(move, progress)
        return Running(move_id=move.move_id, peer=peer, state=move.state,
                       since=move.since,
                       done=sum(step.is_done(move) for step in steps),
                       steps=len(steps), progress=progress, rate=rate,
                       stalled=stalled)

    def _is_stalled(self, move: rows.Move, progress: engine.Progress) -> bool:
        return (table.TABLE[table.State(move.state)].serves
                and self.facts.devices is not None
                and self.facts.connected is not None
                and progress.hydration in (engine.Hydration.OFF,
                                           engine.Hydration.RUNNING)
                and not self._arriving.is_connected(
                    move.transfer, self.facts.devices, self.facts.connected))

    def _average(self, move: rows.Move, progress: engine.Progress
                 ) -> float | None:
        seconds = (self.facts.at - move.since).total_seconds()
        if (move.state != table.State.MIGRATING or seconds <= 0
                or progress.hydration is not engine.Hydration.RUNNING):
            return None
        if progress.rate is not None:
            return progress.rate
        return progress.local / seconds

    def _problems_of_move(self, move: rows.Move, peer: str) -> Iterator[str]:
        if move.problem:
            yield move.problem
        if peer in self.facts.down:
            yield 'cinder-volume of %s is down' % peer

    def _arriving_copy(self, move: rows.Move) -> Copy:
        running = self._running(move)
        copy = handles.Standing(move.transfer.destination_name,
                                move.volume_id, move.transfer.generation,
                                newest=self._newest(move))
        problems = [*self._problems_of_move(move, running.peer)]
        if table.TABLE[table.State(move.state)].serves:
            problems += self._problems_of_serving(move, copy)
            problems += self._problems_of_hydration(move, running.progress)
        elif table.STAND_ALONE.is_done(move):
            problems += self._problems_of_handle(copy)
        return self._copy(copy.name, copy.volume_id, Role.ARRIVING, problems,
                          running)

    def _newest(self, move: rows.Move) -> int:
        """The generation that a move's destination may have moved on to."""
        return max((other.transfer.generation for other in self.facts.moves
                    if other.transfer.source_name
                    == move.transfer.destination_name), default=0)

    def _problems_of_serving(self, move: rows.Move, copy: handles.Standing
                             ) -> Iterator[str]:
        facts = self.facts
        full_name = '%s/%s' % (self._group.name, copy.name)
        if facts.volumes is not None and copy.name not in facts.volumes:
            yield 'logical volume %s is missing' % full_name
        elif not self._group.is_active(copy.name):
            yield _inactive(full_name)
        iqn = move.transfer.export.iqn
        if facts.connected is not None and iqn not in facts.connected:
            yield 'there is no working session with the source, %s' % iqn
        if facts.devices is not None:
            nodes = self._arriving.node_names(move.transfer)
            yield from ('device %s is missing' % name for name in nodes
                        if name not in facts.devices)
            yield from self._problems_of_handle(copy, nodes[-1])
            for name in nodes:
                yield from self._suspended(name)

    def _problems_of_hydration(self, move: rows.Move,
                               progress: engine.Progress | None
                               ) -> Iterator[str]:
        hydration = progress.hydration if progress else None
        if progress and hydration is engine.Hydration.DIFFERS:
            name = move.transfer.destination_name
            yield ('%d blocks of 4 KiB, the first at byte %d, differ from the '
                   'source although they were copied again. They are read '
                   'from there, and the move does not end. Look for errors '
                   "of the disk with 'dmesg' and mend it, then restart the "
                   "helper: 'kill' with the pid that 'localstor-hydrator "
                   "status /run/localstor/%s' tells. Or attach the volume on "
                   'another node' % (progress.differing,
                                     progress.first_differing or 0, name))
        elif hydration is engine.Hydration.FAILED:
            yield 'hydration has failed: the region map can not be written'
        elif (hydration is engine.Hydration.OFF
              and table.START_HYDRATION.is_done(move)):
            yield 'hydration has stopped'

    def _source_copy(self, move: rows.Move) -> Copy:
        running = self._running(move)
        generation = move.transfer.generation
        state = table.State(move.state)
        serves = table.TABLE[state].serves
        copy = handles.Standing(move.transfer.source_name, move.volume_id,
                                generation - 1,
                                newest=generation if serves else 0)
        problems = [*self._problems_of_move(move, running.peer)]
        # In other states it is being taken away.  A copy that is arriving
        # itself is judged as such.
        if ((serves or state in BEFORE_IDENTITY)
                and copy.name not in self._arriving_names()):
            problems += self._problems_of_volume(copy)
            problems += self._problems_of_handle(
                copy, sealed=table.SEAL_SOURCE.is_done(move))
        if ((serves or table.EXPORT_SOURCE.is_done(move))
                and self.facts.exported is not None
                and move.move_id not in self.facts.exported):
            problems.append('the source is not exported to %s'
                            % running.peer)
        return self._copy(copy.name, copy.volume_id, Role.SOURCE, problems,
                          running)


def _inactive(name: str) -> str:
    return ("logical volume %s is not active: run 'lvchange --activate y %s'. "
            "When that says 'No data available', the thin pool has lost it in "
            "a power cut: delete the volume, or restore it from a backup"
            % (name, name))


def _suspended_volume(name: str) -> str:
    return ("logical volume %s is suspended, all I/O to it waits. "
            "cinder-volume resumes it as soon as no command of LVM works in "
            "the group; by hand: 'lvchange --refresh %s'" % (name, name))


def _order(copy: Copy) -> tuple[bool, bool, str]:
    """Troubled ones first, then moves."""
    return (not copy.problems, copy.move is None, copy.name)
