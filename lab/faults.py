# SPDX-License-Identifier: Apache-2.0
"""Faults: what breaks in a lab, and how it is mended."""

import dataclasses
import random
import threading
from typing import Any
from typing import Callable

from lab import cloud as clouds
from lab import errors
from lab import journal as journals
from lab import mirrors
from lab import node as nodes
from lab import releases

WHO = 'faults'
# Seconds
REST = (8, 30)
# Long enough for what goes wrong then to be nobody's fault but the driver's
CALM = (150, 240)
CALMS = 0.08
OVERLAP = 0.3


@dataclasses.dataclass(frozen=True)
class Fault:
    """One thing that breaks.

    :ivar subject: what no other fault may break at the same time
    :ivar hold: for how long, from and to, in seconds
    """

    name: str
    subject: str
    hold: tuple[float, float]
    begin: Callable[[], Any]
    end: Callable[[], None]


class Faults:
    """Breaks things, by a seed, until told to stop; then mends everything."""

    def __init__(self, cloud: clouds.Cloud, journal: journals.Journal,
                 seed: int) -> None:
        self._cloud = cloud
        self._journal = journal
        self._random = random.Random('%d faults' % seed)
        self._nodes = cloud.nodes
        self._instances = any(
            declared.name == 'nova-compute'
            for declared in self._nodes[0].declarations)
        self._mirrored = any(
            backend.disks > 1 for backend in self._nodes[0].place.backends)
        self._owed = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def join(self) -> None:
        """Wait until everything is mended that was broken."""
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._journal.over.wait(self._rest()):
                with self._journal.breaking:
                    self._strike()
            if not self._journal.failures:
                with self._journal.breaking:
                    self.heal()
        except Exception as error:
            self._journal.fail('The lab could not be mended: %s' % error)

    def _rest(self) -> float:
        calm = self._random.random() < CALMS
        return self._random.uniform(*(CALM if calm else REST))

    def _strike(self) -> None:
        """One fault, or two that overlap."""
        first, second = self._choose(), self._choose()
        overlap = self._random.random() < OVERLAP
        holds = [self._random.uniform(*fault.hold)
                 for fault in (first, second)]
        with self._journal.fault(first.name):
            self._begin(first)
            if overlap and second.subject != first.subject:
                self._journal.over.wait(holds[0] / 2)
                with self._journal.fault(second.name):
                    self._begin(second)
                    self._journal.over.wait(holds[0] / 2)
                    # What can't start before the second is over must not keep
                    # that from ending.
                    ending = threading.Thread(target=self._end, args=(first,),
                                              daemon=True)
                    ending.start()
                    self._journal.over.wait(holds[1])
                    self._end(second)
                    ending.join()
            else:
                self._journal.over.wait(holds[0])
                self._end(first)
        if self._owed and not self._journal.failures:
            self.heal()

    def _begin(self, fault: Fault) -> None:
        self._journal.note(WHO, fault.name)
        fault.begin()

    def _end(self, fault: Fault) -> None:
        if self._journal.failures:
            return  # to be looked at as it is
        try:
            fault.end()
            self._journal.note(WHO, fault.name + ': mended')
        except errors.LabError as error:
            # Another fault may keep it from starting.
            self._owed = True
            self._journal.note(WHO, '%s: not mended yet: %s' % (
                fault.name, str(error).splitlines()[0]))

    def heal(self) -> None:
        """Bring back all that is away."""
        with self._journal.fault('healing'):
            self._cloud.heal()
            for node in self._nodes:
                if not node.powered:
                    node.start()
                    continue
                for name, state in node.service_states().items():
                    service = node.service(name)
                    if state['state'] != 'running':
                        service.start()
                    # A start that took too long goes on by itself.
                    service.wait_ready()
            if self._mirrored:
                for node in self._nodes:
                    mirrors.mend(node)
        self._owed = False
        self._journal.note(WHO, 'all is mended')

    # What there is

    def _choose(self) -> Fault:
        kinds: list[tuple[int, Callable[[], Fault]]] = [
            (5, lambda: self._service('cinder-volume', (0, 15))),
            (2, self._orderly_restart),
            (3, lambda: self._service('tgtd', (0, 20))),
            (3, lambda: self._service('iscsid', (0, 20))),
            (3, self._helpers),
            (4, self._power_cut),
            (4, self._cut_nodes),
            (2, lambda: self._cut_off('rabbitmq')),
            (2, lambda: self._cut_off('database')),
            (1, self._cut_control),
        ]
        if self._instances:
            kinds += [
                (3, lambda: self._service('nova-compute', (0, 20))),
                (2, lambda: self._service('libvirtd', (0, 20))),
                (2, self._emulators),
            ]
        if self._mirrored:
            kinds.append((4, self._disk))
        if any(map(releases.is_former, self._nodes)):
            kinds.append((5, self._upgrade))
        make = self._random.choices([make for _weight, make in kinds],
                                    [weight for weight, _make in kinds])[0]
        return make()

    def _node(self) -> nodes.Node:
        return self._random.choice(self._nodes)

    def _service(self, name: str, hold: tuple[float, float]) -> Fault:
        node = self._node()
        service = node.service(name)
        return Fault(f'{name} on {node.name} killed', node.name, hold,
                     service.kill, service.start)

    def _orderly_restart(self) -> Fault:
        node = self._node()
        service = node.service('cinder-volume')
        return Fault(f'cinder-volume on {node.name} restarted', node.name,
                     (0, 1), service.stop, service.start)

    def _upgrade(self) -> Fault:
        node = self._random.choice(
            list(filter(releases.is_former, self._nodes)))
        service = node.service('cinder-volume')

        def begin() -> None:
            service.stop()
            releases.choose(node)
        return Fault(f'driver of {node.name} upgraded', node.name, (0, 1),
                     begin, service.start)

    def _helpers(self) -> Fault:
        node = self._node()
        return Fault(f'native helpers on {node.name} killed', node.name,
                     (0, 1), lambda: node.run(
                         ['pkill', '-9', '-f', 'localstor-hydrator run'],
                         check=False), lambda: None)

    def _emulators(self) -> Fault:
        node = self._node()
        return Fault(f'QEMU on {node.name} killed', node.name, (0, 1),
                     lambda: node.run(['pkill', '-9', 'qemu-system'],
                                      check=False), lambda: None)

    def _power_cut(self) -> Fault:
        node = self._node()
        seed = self._random.getrandbits(32)
        return Fault(f'power of {node.name} cut, seed {seed}', node.name,
                     (0, 45), lambda: node.kill(seed), node.start)

    def _disk(self) -> Fault:
        node = self._node()
        mend, how = self._random.choice((
            (mirrors.bring_back, 'and comes back'),
            (mirrors.replace, 'and is replaced')))
        # The node's power may fail meanwhile.
        return Fault(f'a disk of {node.name} dies {how}',
                     f'a disk of {node.name}', (5, 60),
                     lambda: mirrors.disk(node).fail(), lambda: mend(node))

    def _cut_nodes(self) -> Fault:
        first, second = self._random.sample(self._nodes, 2)
        # Some of them longer than iSCSI's timeouts
        return self._cut(first.name, second.name,
                         self._random.choice(((5, 60), (5, 60), (125, 180))))

    def _cut_off(self, place: str) -> Fault:
        return self._cut(self._node().name, place, (5, 45))

    def _cut_control(self) -> Fault:
        return self._cut('control', self._random.choice(
            ('rabbitmq', 'database')), (5, 20))

    def _cut(self, first: str, second: str, hold: tuple[float, float]
             ) -> Fault:
        # All cuts are healed at once, so there is one at a time.
        return Fault(f'network cut between {first} and {second}', 'network',
                     hold, lambda: self._cloud.cut(first, second),
                     self._cloud.heal)
