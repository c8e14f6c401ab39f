# SPDX-License-Identifier: Apache-2.0
"""What is on a node, and what is wrong with it.

:func:`look` sees what there is of one backend and changes nothing;
:func:`report` compares what is with what should be, and does nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
import dataclasses
import datetime
import re
from typing import TypeVar

from cinder import context
from oslo_utils import timeutils

from cinder_localstor.datapath import copies
from cinder_localstor.datapath import destination
from cinder_localstor.datapath import engine
from cinder_localstor.datapath import handles
from cinder_localstor.datapath import snapshots
from cinder_localstor.datapath import wipes
from cinder_localstor.moves import registry
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
NEVER = datetime.datetime.min
UNKNOWN = 'no volume and no move knows of it'


@dataclasses.dataclass(frozen=True)
class Observed:
    """A backend as it was at one moment.

    What could not be read is None, and `failures` says why.

    :ivar wanted: the copies that should be there
    :ivar maps: logical volumes of the group for region maps, if it is
        another
    :ivar idle: ids of the volumes that nobody has, by what Cinder knows
    :ivar down: hosts of volume services that are down
    :ivar pool: the thin pool, if there is one
    :ivar suspended: full names of logical volumes that answer nothing
    :ivar missing: how many disks are not there, by the group's name
    """

    host: str
    at: datetime.datetime
    wanted: registry.Registry
    idle: set[str]
    down: set[str]
    volumes: dict[str, interface.LogicalVolume] | None
    maps: dict[str, interface.LogicalVolume]
    devices: dict[str, interface.Device] | None
    exported: set[str] | None
    connected: dict[str, str] | None
    pool: interface.Pool | None = None
    suspended: tuple[str, ...] = ()
    missing: Mapping[str, int] = dataclasses.field(default_factory=dict)
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
class Entry:
    """What is told of a copy on this node.

    :ivar volume_id: '' where it is not known
    :ivar size: bytes of the logical volume, None if there is none
    :ivar under: names of the devices that the handle lies on
    """

    name: str
    volume_id: str
    role: copies.Role
    size: int | None = None
    under: tuple[str, ...] = ()
    open_count: int | None = None
    move: Running | None = None
    problems: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Backend:
    """All copies of one backend, and what is wrong with it as a whole."""

    host: str
    copies: tuple[Entry, ...] = ()
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
         ) -> Observed:
    """See what there is of a backend.

    A tool that fails is told as a problem, and the others are asked still.
    """
    failures: list[str] = []

    def ask(question: Callable[[], Answer]) -> Answer | None:
        try:
            return question()
        except Exception as error:
            failures.append(str(error))
            return None

    wanted = registry.read(ctxt, host)
    groups = {node.volumes, node.metadata}
    maps = None
    if node.metadata is not node.volumes:
        maps = ask(node.metadata.logical_volumes)
    return Observed(
        host=host, at=timeutils.utcnow(), wanted=wanted,
        idle=rows.idle(ctxt, host), down=directory.down(ctxt),
        volumes=ask(node.volumes.logical_volumes), maps=maps or {},
        devices=ask(node.device_mapper.devices),
        # Only where a move needs it: to ask a target can take long.
        exported=ask(node.target.exported) if wanted.sources else set(),
        connected=ask(node.initiator.connected),
        pool=ask(node.volumes.pool),
        suspended=tuple('%s/%s' % (group.name, name)
                        for group in groups
                        for name in sorted(group.suspended())),
        missing={group.name: ask(group.missing_disks) or 0
                 for group in groups},
        failures=tuple(failures))


def report(backends: Iterable[tuple[Observed, interface.Node,
                                    destination.Destination]]) -> Report:
    """What is on a node, and what is wrong with it.

    :param backends: what was seen of each, its node, which is asked for names
        and never for more, and the destination side of moves there
    """
    judges = [_Judge(*backend) for backend in backends]
    known: set[str] = set()
    moves: set[str] = set()
    for judge in judges:
        known |= judge.device_names()
        moves |= {move.move_id for move in judge.observed.wanted.moves}
    strays = []
    for observed in [judge.observed for judge in judges][:1]:
        # Nodes and sessions are those of all backends.
        strays += ['device %s: %s' % (name, UNKNOWN)
                   for name in sorted(set(observed.devices or ()) - known)]
        strays += ['session with %s: %s' % (iqn, UNKNOWN)
                   for iqn in sorted(observed.connected or ())
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
        entries = [dataclasses.replace(
            entry, problems=both(entry.problems, backend.host, entry.name))
            for entry in backend.copies]
        return dataclasses.replace(
            backend, problems=both(backend.problems, backend.host),
            copies=tuple(entry for entry in entries if entry.problems
                         or entry.role is not copies.Role.LEFTOVER))

    return dataclasses.replace(
        later, problems=both(later.problems),
        backends=tuple(map(of_backend, later.backends)))


def _without_figures(text: str) -> str:
    return FIGURE.sub('', text)


class _Judge:
    """Compares what was seen of a backend with what should be."""

    def __init__(self, observed: Observed, node: interface.Node,
                 on_destination: destination.Destination) -> None:
        self.observed = observed
        self._wanted = observed.wanted
        self._group = node.volumes
        self._target = node.target
        self._destination = on_destination

    def device_names(self) -> set[str]:
        """Names of all nodes that may be here."""
        names = set(map(handles.handle_name, self._wanted.names()))
        for copy in self._wanted.read:
            names.add(snapshots.reader_name(
                self._wanted.move_of(copy).transfer.destination_name))
        for copy in self._wanted.arriving:
            names.update(self._destination.node_names(
                self._wanted.move_of(copy).transfer))
        for move in self._wanted.moves:
            names.update(self._target.nodes(move.transfer.export))
        return names

    def backend(self) -> Backend:
        observed = self.observed
        entries = [*map(self._arriving_copy, self._wanted.arriving),
                   *map(self._source_copy, self._wanted.sources),
                   *map(self._standing_copy, self._wanted.standing()),
                   *map(self._snapshot, self._wanted.snapshots),
                   *map(self._read_snapshot, self._wanted.of_no_user()),
                   *self._leftovers()]
        problems = [*observed.failures,
                    *map(_suspended_volume, observed.suspended),
                    *(_missing_disks(group, count) for group, count
                      in sorted(observed.missing.items()) if count)]
        if observed.pool and (full := self._destination.space.problem(
                observed.pool)):
            problems.append(full)
        return Backend(host=observed.host, problems=tuple(problems),
                       copies=tuple(sorted(entries, key=_order)))

    def _entry(self, name: str, volume_id: str, role: copies.Role,
               problems: Iterable[str], move: Running | None = None) -> Entry:
        volume = (self.observed.volumes or {}).get(name)
        handle = self._device(handles.handle_name(name))
        return Entry(name=name, volume_id=volume_id, role=role,
                     problems=tuple(problems), move=move,
                     size=volume.size if volume else None,
                     under=handle.under if handle else (),
                     open_count=handle.open_count if handle else None)

    def _device(self, name: str) -> interface.Device | None:
        return (self.observed.devices or {}).get(name)

    # Snapshots, and what is kept for them

    def _snapshot(self, copy: copies.Copy) -> Entry:
        problems = ([] if copy.role is copies.Role.PASSING
                    else self._problems_of_snapshot(copy))
        return self._entry(copy.name, copy.volume_id, copy.role, problems)

    def _read_snapshot(self, copy: copies.Copy) -> Entry:
        move = self._wanted.move_of(copy)
        problems = ([] if table.DELETE_SOURCE.is_done(move)
                    else self._problems_of_snapshot(copy))
        return self._entry(copy.name, copy.volume_id, copy.role, problems)

    def _problems_of_snapshot(self, copy: copies.Copy) -> Iterator[str]:
        if self.observed.volumes is None:
            return
        volume = self.observed.volumes.get(copy.name)
        if volume is None:
            yield self._missing(copy)
            return
        yield from self._ailment(volume)
        if not volume.is_valid:
            yield ('snapshot %s/%s is invalid: its space was full or could '
                   "not be written (look with 'dmesg'). What it had is lost: "
                   'delete it' % (self._group.name, copy.name))
        elif not self._group.is_active(copy.name):
            yield _inactive('%s/%s' % (self._group.name, copy.name))
        elif volume.size < volume.room:
            yield ('snapshot %(name)s has less room than its volume can '
                   "change, and will be lost. Run 'lvextend --size %(room)db "
                   "%(name)s'" % {'room': volume.room, 'name': '%s/%s' % (
                       self._group.name, copy.name)})
        origin = copy.depends_on
        # One that was given up waits, under another name, for what reads it.
        if (origin is not None and origin.name != (
                wipes.former_name(volume.origin) or volume.origin)):
            yield ('logical volume %s/%s is no snapshot of %s: a deletion '
                   'has begun, and what it had is lost. Delete it'
                   % (self._group.name, copy.name, origin.name))

    def _ailment(self, volume: interface.LogicalVolume) -> Iterator[str]:
        if volume.ailment:
            yield ("%(ailment)s: see 'lvs --all --options "
                   "+devices,lv_health_status %(group)s'. A mirrored volume "
                   "is whole again after 'lvconvert --repair "
                   "%(group)s/%(name)s', or 'lvchange --refresh' where the "
                   "disk is back" % {'ailment': volume.ailment,
                                     'group': self._group.name,
                                     'name': volume.name})

    def _missing(self, copy: copies.Copy) -> str:
        return 'logical volume %s/%s is missing' % (self._group.name,
                                                    copy.name)

    def _kept_copy(self, copy: copies.Copy) -> Entry:
        move = self._wanted.move_of(copy)
        problems = [move.problem] if move.problem else []
        if (self.observed.volumes is not None
                and copy.name not in self.observed.volumes
                and not table.DELETE_SOURCE.is_done(move)):
            problems.append(self._missing(copy))
        return self._entry(copy.name, copy.volume_id, copy.role, problems)

    # Copies that do not move

    def _standing_copy(self, copy: copies.Copy) -> Entry:
        return self._entry(copy.name, copy.volume_id, copy.role,
                           [*self._problems_of_volume(copy),
                            *self._problems_of_handle(copy),
                            *self._forgotten_user(copy)])

    def _forgotten_user(self, copy: copies.Copy) -> Iterator[str]:
        name = handles.handle_name(copy.name)
        handle = self._device(name)
        if (copy.volume_id in self.observed.idle
                and handle and handle.open_count):
            yield ("it is open, and Cinder knows of nobody who has it: a "
                   "guest that Nova has forgotten, perhaps. Nobody else is "
                   "given the volume. Find who it is with 'lsof "
                   "/dev/mapper/%s' and 'dmsetup ls --tree'" % name)

    def _problems_of_volume(self, copy: copies.Copy) -> Iterator[str]:
        if self.observed.volumes is None:
            return
        full_name = '%s/%s' % (self._group.name, copy.name)
        volume = self.observed.volumes.get(copy.name)
        if volume is None:
            yield self._missing(copy)
            return
        yield from self._ailment(volume)
        if not self._group.is_active(copy.name):
            yield _inactive(full_name)
        label = copies.Label(volume.tags)
        generation = label.generation_of(copy)
        if label.move_id:
            yield 'the copy never arrived, of move %s' % label.move_id
        if generation < copy.generation:
            yield ('the copy is an old one: generation %d, the present one '
                   'is %d' % (generation, copy.generation))
        newest = copy.newest or copy.generation
        if label.superseded > newest:
            yield ('the volume has moved on as generation %d, the database '
                   'says that generation %d is the present one'
                   % (label.superseded, newest))

    def _problems_of_handle(self, copy: copies.Copy,
                            engine_node: str = '', sealed: bool = False
                            ) -> Iterator[str]:
        """:param engine_node: what the handle begins on if not on the volume
        :param sealed: whether nobody may write it any more
        """
        if self.observed.devices is None:
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
        if (handle.read_only and not sealed
                and copy.newest <= copy.generation):
            yield 'the handle is read-only'
        if sealed and not handle.read_only:
            yield 'this copy can be written, as none may that is a snapshot ' \
                'or that the volume has moved on from'
        yield from self._suspended(name)

    def _suspended(self, name: str) -> Iterator[str]:
        device = self._device(name)
        if device is not None and device.suspended:
            yield ("%s is suspended, all I/O to it waits: run 'dmsetup "
                   "resume %s'" % (name, name))

    def _leftovers(self) -> Iterator[Entry]:
        """Logical volumes of ours that belong to nothing any more."""
        names = self._wanted.names()
        moves = {move.move_id for move in self._wanted.moves}
        found = {**self.observed.maps, **(self.observed.volumes or {})}
        for name, volume in found.items():
            label = copies.Label(volume.tags)
            if wipes.former_name(name) is not None:
                yield self._entry(name, label.volume_id, copies.Role.WIPING,
                                  [])
            elif label and name not in names and label.map_of not in moves:
                entry = self._entry(name, label.volume_id,
                                    copies.Role.LEFTOVER, [UNKNOWN])
                yield dataclasses.replace(entry, size=volume.size)

    # Copies of moves

    def _running(self, move: rows.Move) -> Running:
        steps = table.TABLE[table.State(move.state)].steps
        progress = rate = None
        stalled = False
        peer = move.transfer.destination_host
        if move.transfer.destination_host == self.observed.host:
            peer = move.transfer.source_host
            if self.observed.devices is not None:
                progress = self._destination.progress(move.transfer,
                                                      self.observed.devices)
                rate = self._average(move, progress)
                stalled = self._is_stalled(move, progress)
        return Running(move_id=move.move_id, peer=peer, state=move.state,
                       since=move.since,
                       done=sum(step.is_done(move) for step in steps),
                       steps=len(steps), progress=progress, rate=rate,
                       stalled=stalled)

    def _is_stalled(self, move: rows.Move, progress: engine.Progress) -> bool:
        return (table.TABLE[table.State(move.state)].serves
                and self.observed.devices is not None
                and self.observed.connected is not None
                and progress.hydration in (engine.Hydration.OFF,
                                           engine.Hydration.RUNNING)
                and not self._destination.is_connected(
                    move.transfer, self.observed.devices,
                    self.observed.connected))

    def _average(self, move: rows.Move, progress: engine.Progress
                 ) -> float | None:
        seconds = (self.observed.at - move.since).total_seconds()
        if (move.state != table.State.MIGRATING or seconds <= 0
                or progress.hydration is not engine.Hydration.RUNNING):
            return None
        if progress.rate is not None:
            return progress.rate
        return progress.local / seconds

    def _problems_of_move(self, move: rows.Move, peer: str) -> Iterator[str]:
        if move.problem:
            yield move.problem
        if peer in self.observed.down:
            yield 'cinder-volume of %s is down' % peer

    def _arriving_copy(self, copy: copies.Copy) -> Entry:
        move = self._wanted.move_of(copy)
        running = self._running(move)
        problems = [*self._problems_of_move(move, running.peer)]
        if table.TABLE[table.State(move.state)].serves:
            problems += self._problems_of_serving(move, copy)
            problems += self._problems_of_hydration(move, running.progress)
        elif (table.STAND_ALONE.is_done(move)
                and not move.transfer.is_snapshot):
            problems += self._problems_of_handle(copy)
        # What others arrive from is open for these, and so are snapshots.
        if (not move.transfer.is_snapshot and copy.name not in {
                source.name for source in self._wanted.sources}):
            problems += self._forgotten_user(copy)
        return self._entry(copy.name, copy.volume_id, copy.role, problems,
                           running)

    def _problems_of_serving(self, move: rows.Move, copy: copies.Copy
                             ) -> Iterator[str]:
        observed = self.observed
        full_name = '%s/%s' % (self._group.name, copy.name)
        volume = (observed.volumes or {}).get(copy.name)
        if volume is not None:
            yield from self._ailment(volume)
        if observed.volumes is not None and volume is None:
            yield self._missing(copy)
        elif not self._group.is_active(copy.name):
            yield _inactive(full_name)
        iqn = move.transfer.export.iqn
        if (observed.connected is not None and not move.transfer.is_local
                and iqn not in observed.connected):
            yield 'there is no working session with the source, %s' % iqn
        if observed.devices is not None:
            nodes = self._destination.node_names(move.transfer)
            yield from ('device %s is missing' % name for name in nodes
                        if name not in observed.devices)
            yield from self._problems_of_handle(
                copy, nodes[-1], sealed=move.transfer.is_snapshot)
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

    def _source_copy(self, copy: copies.Copy) -> Entry:
        if copy.role is copies.Role.KEPT:
            return self._kept_copy(copy)
        move = self._wanted.move_of(copy)
        running = self._running(move)
        state = table.State(move.state)
        serves = table.TABLE[state].serves
        problems = [*self._problems_of_move(move, running.peer)]
        # In other states it is being taken away.  A copy that is arriving
        # itself is judged as such.
        if ((serves or state in registry.BEFORE_IDENTITY)
                and copy.name not in {arriving.name for arriving
                                      in self._wanted.arriving}):
            problems += self._problems_of_volume(copy)
            problems += self._problems_of_handle(
                copy, sealed=table.SEAL_SOURCE.is_done(move))
        if ((serves or table.EXPORT_SOURCE.is_done(move))
                and self.observed.exported is not None
                and move.move_id not in self.observed.exported):
            problems.append('the source is not exported to %s'
                            % running.peer)
        return self._entry(copy.name, copy.volume_id, copy.role, problems,
                           running)


def _inactive(name: str) -> str:
    return ("logical volume %s is not active: run 'lvchange --activate y %s'. "
            "When that says 'No data available', the thin pool has lost it in "
            "a power cut: delete the volume, or restore it from a backup"
            % (name, name))


def _missing_disks(group: str, count: int) -> str:
    return ("%(count)d of the disks of volume group %(group)s are missing: "
            "what is on the others can be used, and nothing new be made. See "
            "'pvs --options +pv_missing', and 'When a disk dies' in the "
            "documentation" % {'count': count, 'group': group})


def _suspended_volume(name: str) -> str:
    return ("logical volume %s is suspended, all I/O to it waits. "
            "cinder-volume resumes it as soon as no command of LVM works in "
            "the group; by hand: 'lvchange --refresh %s'" % (name, name))


def _order(copy: Entry) -> tuple[bool, bool, str]:
    """Troubled ones first, then moves."""
    return (not copy.problems, copy.move is None, copy.name)
