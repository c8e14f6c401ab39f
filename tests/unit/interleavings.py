# SPDX-License-Identifier: Apache-2.0
"""All interleavings of a few operations, up to a number of preemptions.

Each operation runs in a greenlet.  Control may change hands at a *point*:
before a call of a simulated node, before a transaction, and where a lock is
taken.  What happens between two points of an operation is one step.  A
schedule says who takes the next step at each point; given the same one,
everything happens again in the same order.

An operation is preempted where it could have gone on.  Most errors of this
kind need one or two preemptions, so all schedules with that few are tried, and
none twice: two schedules that differ only in the order of steps that do not
touch the same thing are the same (as the checkers CHESS and DPOR have it).
Each runs in a process of its own, forked from where everything is prepared.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
import dataclasses
import gc
import itertools
import os
import pickle
import random
import signal
import traceback
import types
from typing import Any
from typing import IO
from unittest import mock

from eventlet import patcher
import greenlet
from oslo_db.sqlalchemy import enginefacade

from cinder_localstor.node import simulated

# Seconds for a run, which takes less than one
PATIENCE = 300
# What steps touch besides single nodes and locks.  What is altered on one node
# is in order with what is on another, since the judge looks at all of them.
NODES, DATABASE = 'nodes', 'database'

# Calls of a node that only look; some of them can't fail.
LOOKS = frozenset({'SimulatedVolumeGroup.logical_volumes',
                   'SimulatedVolumeGroup.missing_disks',
                   'SimulatedDeviceMapper.devices'})
UNFAILING_LOOKS = ((simulated.SimulatedVolumeGroup, 'is_active'),
                   (simulated.SimulatedDeviceMapper, 'exists'),
                   (simulated.SimulatedTarget, 'exported'),
                   (simulated.SimulatedInitiator, 'connected'),
                   (simulated.SimulatedHydrators, 'status'))


class Hung(Exception):
    """No operation can go on."""


@dataclasses.dataclass(frozen=True)
class Step:
    """What an operation is about to do.

    :ivar what: a name that is the same in each run
    :ivar things: what it touches
    """

    what: str
    things: tuple[str, ...]
    writes: bool = True


def on_node(host: str, name: str, writes: bool = True) -> Step:
    """A step on a node."""
    return Step('%s on %s' % (name, host),
                (host, NODES) if writes else (host,), writes)


@dataclasses.dataclass
class Operation:
    """One of several that happen at the same time.

    :ivar hosts: the node that its code runs on, and where it has come from
    :ivar waits: the lock that it waits for
    :ivar seen: stands for all that it can know
    """

    name: str
    act: Callable[[], None]
    hosts: list[str]
    step: Step | None = None
    waits: tuple[str, str] | None = None
    done: bool = False
    error: BaseException | None = None
    seen: int = 0
    thread: Any = None


@dataclasses.dataclass
class Choice:
    """A point at which control could change hands.

    :ivar runnable: who could have gone on
    :ivar before: who had taken the last step, if it could have gone on
    :ivar chosen: who took the next
    :ivar state: stands for everything up to here
    """

    runnable: tuple[int, ...]
    before: int | None
    chosen: int
    state: int


class Run:
    """One schedule of some operations, and what became of it.

    :ivar trace: all steps in their order
    """

    def __init__(self, operations: Sequence[Operation],
                 schedule: Sequence[int],
                 is_known: Callable[[int, int | None, int], bool]) -> None:
        """:param schedule: who takes the first steps; whoever is at it goes
            on after that
        :param is_known: whether all that can follow from a state has been
            tried, see :class:`Explorer`
        """
        self.operations = operations
        self._schedule = schedule
        self._is_known = is_known
        self._held: set[tuple[str, str]] = set()
        self._hub = greenlet.getcurrent()
        self._last: int | None = None
        # What wrote each thing last, and what has read it since
        self._written: dict[str, int] = {}
        self._read: dict[str, set[int]] = {}
        self._preemptions = 0
        self._looks = False
        self.choices: list[Choice] = []
        self.trace: list[str] = []
        self.cut = False
        self.hung = False

    def go(self) -> None:
        """Run all operations to their end.

        :raises Hung: they do not come to it
        """
        for operation in self.operations:
            operation.thread = greenlet.greenlet(
                lambda operation=operation: self._begin(operation))
        self._hand_over()
        if self.hung:
            raise Hung('deadlock: ' + '; '.join(
                '%s waits for lock %s of %s' % (one.name, one.waits[1],
                                                one.waits[0])
                for one in self.operations if one.waits))

    def _begin(self, operation: Operation) -> None:
        try:
            operation.act()
        except BaseException as error:
            operation.error = error
        operation.done = True
        self._hand_over()

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """What a test looks at between two steps is none itself."""
        before, self._looks = self._looks, True
        try:
            yield
        finally:
            self._looks = before

    def current(self) -> Operation | None:
        """The operation that calls, if any does."""
        if self._looks:
            return None
        here = greenlet.getcurrent()
        return next((one for one in self.operations
                     if one.thread is here), None)

    def point(self, step: Step) -> None:
        """Let another operation take a step before this one."""
        operation = self.current()
        if operation is None:
            return
        operation.step = step
        self._hand_over()
        self._note(operation, step)

    def _note(self, operation: Operation, step: Step) -> None:
        """Remember in what order the steps on one thing were taken."""
        self.trace.append('%s: %s' % (operation.name, step.what))
        before = [operation.name, operation.seen, step.what]
        for thing in step.things:
            before.append(self._written.get(thing, 0))
            if step.writes:
                before += sorted(self._read.pop(thing, ()))
        operation.seen = hash(tuple(before))
        for thing in step.things:
            if step.writes:
                self._written[thing] = operation.seen
            else:
                self._read.setdefault(thing, set()).add(operation.seen)

    def _hand_over(self) -> None:
        chosen = self._choose()
        target = self._hub if chosen is None else (
            self.operations[chosen].thread)
        if target is not greenlet.getcurrent():
            target.switch()

    def _choose(self) -> int | None:
        runnable = tuple(
            number for number, one in enumerate(self.operations)
            if not one.done and one.waits not in self._held)
        if not runnable:
            self.hung = not all(one.done for one in self.operations)
            return None
        before = self._last if self._last in runnable else None
        state = hash(tuple((one.seen, one.done) for one in self.operations))
        place = len(self.choices)
        if place < len(self._schedule):
            chosen = self._schedule[place]
            assert chosen in runnable, 'not the run that was recorded'
        else:
            if self._is_known(state, before, self._preemptions):
                self.cut = True
                return None
            chosen = runnable[0] if before is None else before
        self._preemptions += before is not None and chosen != before
        self.choices.append(Choice(runnable, before, chosen, state))
        self._last = chosen
        return chosen

    @contextlib.contextmanager
    def lock(self, name: str, *_arguments: Any, **_options: Any
             ) -> Iterator[None]:
        """Stands in for :func:`lockutils.lock`: a lock of one process."""
        operation = self.current()
        if operation is None:
            yield
            return
        key = (operation.hosts[-1], name)
        operation.waits = key
        # Without the id in it, which is another one in each run
        what = 'lock %s of %s' % (name[:15], key[0])
        self.point(Step(what, (what,)))
        operation.waits = None
        self._held.add(key)
        try:
            yield
        finally:
            self._held.discard(key)

    def wait_for(self, lock: tuple[str, str]) -> None:
        """Wait until nobody holds a lock; control may change hands only if
        somebody does.
        """
        operation = self.current()
        if operation is not None and lock in self._held:
            operation.waits = lock
            self._hand_over()
            operation.waits = None
        self._held.add(lock)

    def release(self, lock: tuple[str, str]) -> None:
        self._held.discard(lock)

    @contextlib.contextmanager
    def on(self, host: str) -> Iterator[None]:
        """What runs on another node takes locks there."""
        operation = self.current()
        if operation is None:
            yield
            return
        operation.hosts.append(host)
        try:
            yield
        finally:
            operation.hosts.pop()

    def call(self, host: str, name: str) -> None:
        """A point before a call of a node, see `simulated.Faults.choose`."""
        if not name.startswith('Peers.'):
            self.point(on_node(host, name, name not in LOOKS))

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Let transactions, locks and looks of this process be points."""
        scope = enginefacade._TransactionContextManager._transaction_scope
        by_thread = enginefacade._transaction_contexts_by_thread

        def transaction(manager: Any, ctxt: Any) -> Any:
            if getattr(by_thread(ctxt), 'current', None) is None:
                writes = manager._mode is enginefacade._WRITER
                self.point(Step('write rows' if writes else 'read rows',
                                (DATABASE,), writes))
            return scope(manager, ctxt)

        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(
                enginefacade._TransactionContextManager,
                '_transaction_scope', transaction))
            stack.enter_context(mock.patch(
                'oslo_concurrency.lockutils.lock', self.lock))
            stack.enter_context(mock.patch(
                'cinder_localstor.moves.facts.threading',
                types.SimpleNamespace(Lock=lambda: _ThreadsLock(self))))
            for kind, name in UNFAILING_LOOKS:
                stack.enter_context(mock.patch.object(
                    kind, name, self._looking(kind, name)))
            yield

    def _looking(self, kind: type, name: str) -> Callable[..., Any]:
        method = getattr(kind, name)

        def look(node: Any, *arguments: Any) -> Any:
            self.point(on_node(node.faults.host, '%s.%s' % (
                kind.__name__, name), writes=False))
            return method(node, *arguments)
        return look


class _ThreadsLock:
    """Stands in for :class:`threading.Lock` where that is held while a node
    is asked.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._key = ('threads', str(id(self)))

    def __enter__(self) -> None:
        self._run.wait_for(self._key)

    def __exit__(self, *_error: object) -> None:
        self._run.release(self._key)


@dataclasses.dataclass
class Outcome:
    """What the process of a run tells.

    :ivar end: the state that it has led to, '' if it was cut short
    :ivar finding: what is wrong, '' if nothing is
    """

    choices: list[Choice]
    trace: list[str]
    end: str
    finding: str


class Finding(AssertionError):
    """A schedule after which something is wrong, and how to repeat it."""


def write_schedule(choices: Sequence[int]) -> str:
    """As words: `0x12 1x3` is twelve steps of the first, three of the
    other.
    """
    return ' '.join('%dx%d' % (who, len(list(turns)))
                    for who, turns in itertools.groupby(choices))


def read_schedule(text: str) -> list[int]:
    """The inverse of :func:`write_schedule`."""
    return [int(who) for word in text.split()
            for who, times in [word.split('x')]
            for _time in range(int(times))]


class Explorer:
    """Tries all schedules of some operations.

    :ivar runs: how many were tried
    :ivar ends: the states that they led to, each judged once
    """

    def __init__(self, preemptions: int,
                 perform: Callable[[Sequence[int],
                                    Callable[[int, int | None, int], bool]],
                                   tuple[Run, Callable[[], str],
                                         Callable[[], None]]]) -> None:
        """:param perform: makes a run; returns it with what describes the
            state that it has led to, and what judges that
        """
        self._most = preemptions
        self.ends: set[str] = set()
        self._perform = perform
        # Fewest preemptions that led to a state
        self._known: dict[tuple[int, int | None], int] = {}
        self.runs = 0

    def _is_known(self, state: int, before: int | None, preemptions: int
                  ) -> bool:
        return self._known.get((state, before), self._most + 1) <= preemptions

    def explore(self, sample: int = 0, chance: random.Random | None = None
                ) -> None:
        """Try all schedules, or so many of them that chance takes.

        :raises Finding: after one of the schedules something is wrong
        """
        waiting: list[list[int]] = [[]]
        while waiting and (not sample or self.runs < sample):
            schedule = waiting.pop(
                chance.randrange(len(waiting)) if chance else -1)
            outcome = self.replay(schedule)
            if outcome.end:
                self.ends.add(outcome.end)
            waiting += self._alternatives(outcome.choices, len(schedule))

    def _alternatives(self, choices: list[Choice], place: int
                      ) -> Iterator[list[int]]:
        """Schedules that leave a run after its first `place` choices."""
        chosen = [choice.chosen for choice in choices]
        preemptions = 0
        for number, choice in enumerate(choices):
            if number >= place:
                key = (choice.state, choice.before)
                self._known[key] = min(
                    preemptions, self._known.get(key, preemptions))
                if choice.before is None or preemptions < self._most:
                    yield from (chosen[:number] + [other]
                                for other in choice.runnable
                                if other != choice.chosen)
            preemptions += (choice.before is not None
                            and choice.chosen != choice.before)

    def replay(self, schedule: Sequence[int]) -> Outcome:
        """Run one schedule in a process of its own.

        :raises Finding: something is wrong after it
        """
        self.runs += 1
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            # It would touch, and so copy, all that the processes share.
            gc.disable()
            try:
                os.close(reader)
                with os.fdopen(writer, 'wb') as pipe, _watched(schedule,
                                                               pipe):
                    pickle.dump(self._perform_one(schedule), pipe)
            finally:
                os._exit(0)
        os.close(writer)
        with os.fdopen(reader, 'rb') as pipe:
            told = pipe.read()
        os.waitpid(child, 0)
        assert told, 'a run has died: ' + write_schedule(schedule)
        outcome = pickle.loads(told)
        if outcome.finding:
            raise Finding('%s\nSchedule: %s\n%s' % (
                outcome.finding, write_schedule(
                    [choice.chosen for choice in outcome.choices]),
                '\n'.join(outcome.trace)))
        return outcome

    def _perform_one(self, schedule: Sequence[int]) -> Outcome:
        end = finding = ''
        run, describe, judge = self._perform(schedule, self._is_known)
        try:
            with run.installed():
                run.go()
            if not run.cut:
                end = describe()
                if end not in self.ends:
                    judge()
        except BaseException as error:
            finding = ''.join(traceback.format_exception(error))
        return Outcome(run.choices, run.trace, end, finding)


@contextlib.contextmanager
def _watched(schedule: Sequence[int], pipe: IO[bytes]) -> Iterator[None]:
    """Tell where an operation is that waits for something outside of all."""
    def tell(_number: int, frame: types.FrameType | None) -> None:
        frames = [frame, *(found.gr_frame for found in gc.get_objects()
                           if isinstance(found, greenlet.greenlet))]
        stacks = [''.join(traceback.format_stack(one))
                  for one in frames if one]
        # Eventlet's would wait in the loop that is waiting already.
        patcher.original('os').write(pipe.fileno(), pickle.dumps(Outcome(
            [], [], '', 'hangs after schedule %s:\n%s' % (
                write_schedule(schedule), '\n'.join(stacks)))))
        os._exit(0)

    signal.signal(signal.SIGALRM, tell)
    signal.alarm(PATIENCE)
    yield
    signal.alarm(0)
