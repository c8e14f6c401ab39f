# SPDX-License-Identifier: Apache-2.0
"""What hundreds of nodes cost a cloud that they share.

Message bus, database, scheduler and API are those of the lab; the volume
services are real, and their nodes simulated (:mod:`lab.fleet_member`). All of
it shares this machine's processors, so that the figures say what is asked of
whom, and what gives way first, rather than how fast a cloud is.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import concurrent.futures
import dataclasses
import re
import time
import uuid

from keystoneauth1 import exceptions
import psutil
import tenacity

from lab import attach
from lab import cloud as clouds
from lab import configuration
from lab import control_plane
from lab import errors
from lab import leftovers
from lab import services
from lab import user as users

# Unless somebody says otherwise: nodes, attachments a second, and for how many
# seconds.  Two processors have room for that.
SIZES = (10, 50, 100)
RATE = 2
SECONDS = 45
# Volume services of one process, of the first and of all others: with too many
# in one a small fleet waits for one processor
IN_A_PROCESS = 5
IN_OTHERS = 50
FIRST = 50
# Connections to the database that a service may have, beside its pool's
CONNECTIONS = 50
BACKEND = configuration.BACKENDS[0]
# Seconds
START_TIMEOUT = 600
IDLE = 60
PATIENCE = 600
# Requests of the storm that may wait for their answer
ASKED_AT_ONCE = 200
# Volumes that are asked for at once
MADE_AT_ONCE = 8

# Who takes processors
WHO = {'database': ('database',), 'bus': ('rabbitmq',),
       'API': ('cinder-api', 'keystone'), 'scheduler': ('cinder-scheduler',),
       'nodes': ('fleet',)}
HEADINGS = (
    'Nodes', 'Start, s', 'Queries/s', 'Messages/s',
    *(f'Processors: {who}' for who in WHO),
    'Storm: queries/s', 'Messages/s in it',
    *(f'Processors in it: {who}' for who in WHO),
    'Attached, s', '95 of 100, s', 'Failed')

_RECEIVED = re.compile(r'messages_received_total => (\d+)')
_COUNTERS = 'rabbit_global_counters:overview().'


@dataclasses.dataclass(frozen=True)
class Count:
    """What was asked of all so far.

    :ivar when: seconds of the monotonic clock
    :ivar processors: seconds of a processor, by who took them
    """

    when: float
    queries: int
    messages: int
    processors: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Load:
    """What is asked of all in a second.

    :ivar processors: how many of them each takes
    """

    queries: float
    messages: float
    processors: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Measured:
    """A fleet of so many nodes.

    :ivar start: seconds until the nodes that came last were up
    :ivar idle: while nothing moves
    :ivar storm: while volumes are attached
    :ivar attached: for each attachment that succeeded, the seconds from when
        it was due to when Cinder had answered
    :ivar failures: why the others did not
    """

    nodes: int
    start: float
    idle: Load
    storm: Load
    attached: list[float]
    failures: list[str]


def options(state: str) -> services.Options:
    """What a process of the fleet has in its cinder.conf beside what all have.

    The intervals are Cinder's own, not those of the lab.
    """
    return {
        'DEFAULT': {'enabled_backends': BACKEND, 'debug': False,
                    'report_interval': 10, 'service_down_time': 60,
                    'state_path': state},
        'oslo_concurrency': {'lock_path': f'{state}/locks'},
        'coordination': {'backend_url': f'file://{state}/coordination'},
        # Services of one process share a pool; those of nodes have their own.
        'database': {'max_overflow': CONNECTIONS * IN_OTHERS},
        BACKEND: {'volume_driver': 'lab.simulated_driver.SimulatedDriver',
                  'volume_backend_name': BACKEND, 'lvm_type': 'default',
                  'iscsi_target_flags': 'direct'},
    }


def run(cloud: clouds.Cloud, sizes: Sequence[int], rate: float,
        seconds: float, say: Callable[[str], None]) -> Iterator[Measured]:
    """Measure growing fleets of a cloud that has no other nodes.

    :param sizes: how many nodes, ascending
    :param rate: attachments a second in the storm, which lasts `seconds`
    :param say: told what is under way
    :raises LabError: not all nodes came up in START_TIMEOUT seconds
    """
    fleet = _Fleet(cloud)
    number = round(rate * seconds)
    for size in sizes:
        say(f'{size} nodes: starting them')
        start = fleet.grow(size)
        fleet.make_volumes(number, min(sizes), say)
        say(f'{size} nodes: {IDLE} s in which nothing moves')
        idle = fleet.measure(lambda: time.sleep(IDLE))
        say(f'{size} nodes: {number} attachments, {rate:g} a second')
        attached: list[float] = []
        failures: list[str] = []
        storm = fleet.measure(
            lambda: fleet.attach_all(rate, attached, failures))
        for failure in sorted(set(failures)):
            say(failure)
        found = Measured(size, start, idle, storm, attached, failures)
        say(', '.join(f'{heading} {figure}' for heading, figure
                      in zip(HEADINGS, row(found))))
        yield found
        fleet.detach_all()


def node_of(volume: int, nodes: int, number: int) -> int:
    """Where one of so many volumes is put, so that nodes take part alike.

    :param volume: the first one is 0
    :returns: the first node is 0
    """
    return volume * max(1, nodes // number) % nodes


def load(before: Count, after: Count) -> Load:
    """What was asked between two counts."""
    seconds = after.when - before.when
    return Load(
        (after.queries - before.queries) / seconds,
        (after.messages - before.messages) / seconds,
        {who: (taken - before.processors.get(who, 0)) / seconds
         for who, taken in after.processors.items()})


def received(counters: str) -> int:
    """Messages that the bus has taken, as its global counters say."""
    return sum(map(int, _RECEIVED.findall(counters)))


class _Fleet:

    def __init__(self, cloud: clouds.Cloud) -> None:
        self._cloud = cloud
        self._user = users.User(cloud)
        self._size = 0
        self._volumes: list[str] = []
        self._attachments: list[str] = []

    # Nodes

    def grow(self, size: int) -> float:
        """Have so many nodes; the seconds until all are up."""
        begin = time.monotonic()
        while self._size < size:
            last = min(size, self._size + (
                IN_A_PROCESS if self._size < FIRST else IN_OTHERS))
            self._start(self._size + 1, last)
            self._size = last
            # A service that starts for the first time writes to the rows of
            # all volumes, and they wait for each other's locks.
            self._wait_until_up(time.monotonic() + START_TIMEOUT)
        return time.monotonic() - begin

    def _start(self, first: int, last: int) -> None:
        cloud = self._cloud
        place = cloud.place
        name = f'fleet-{first}'
        state = cloud.layout.directory / name
        (state / 'locks').mkdir(parents=True)
        config = state / 'cinder.conf'
        config.write_text(services.render_ini(services.merged(
            configuration.cinder(place), options(str(state)))))
        cloud.processes.start(
            name, cloud.network.wrap([
                control_plane.python(place), '-W', 'ignore', '-m',
                'lab.fleet_member', str(config), str(first), str(last)]),
            place.log(name),
            place.environment | control_plane.lab_on_path(place))

    def _wait_until_up(self, end: float) -> None:
        """Until the scheduler would choose any of them."""
        while True:
            known = self._known()
            if known >= self._size:
                return
            if time.monotonic() > end:
                raise errors.LabError(
                    f'{known} of {self._size} volume services are up after '
                    f'{START_TIMEOUT} s. See the logs "fleet-...".')
            time.sleep(1)

    def _known(self) -> int:
        """How many are up, and have told the scheduler of their space."""
        api = self._cloud.volume_api
        services = api.get('/os-services?binary=cinder-volume').json()
        up = sum(found['state'] == 'up' for found in services['services'])
        if up < self._size:
            return up
        return len(api.get('/scheduler-stats/get_pools').json()['pools'])

    # What is asked of all

    def measure(self, act: Callable[[], None]) -> Load:
        """What is asked while something is done."""
        before = self._count()
        act()
        return load(before, self._count())

    def _count(self) -> Count:
        counters = self._rabbitmqctl('eval', _COUNTERS)
        [line] = leftovers.select(
            self._cloud, "SHOW GLOBAL STATUS LIKE 'Questions'")
        return Count(time.monotonic(), int(line.split()[1]),
                     received(counters),
                     self._processors())

    def _rabbitmqctl(self, *words: str) -> str:
        place = self._cloud.place
        declared = services.named(control_plane.SERVICES, 'rabbitmq')
        return self._cloud.run(
            ['/usr/bin/env', *(f'{name}={value}' for name, value
                               in declared.environment(place).items()),
             '/usr/lib/rabbitmq/bin/rabbitmqctl', *words]).stdout

    def _processors(self) -> dict[str, float]:
        taken: dict[str, float] = {}
        for record in self._cloud.processes.all():
            who = record.name.partition('-')[0] if record.name.startswith(
                'fleet') else record.name
            for pid in record.members():
                try:
                    times = psutil.Process(pid).cpu_times()
                except psutil.NoSuchProcess:
                    continue
                taken[who] = taken.get(who, 0) + times.user + times.system
        return taken

    # Volumes

    def make_volumes(self, number: int, nodes: int,
                     say: Callable[[str], None]) -> None:
        """Have so many volumes, on the nodes that there are first."""
        if self._volumes:
            return
        say(f'making {number} volumes')
        begin = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(MADE_AT_ONCE) as pool:
            self._volumes = list(pool.map(
                lambda which: self._user.create_volume(
                    1, BACKEND, configuration.fleet_node(
                        node_of(which, nodes, number) + 1)),
                range(number)))
        say(f'made in {time.monotonic() - begin:.0f} s')

    def attach_all(self, rate: float, attached: list[float],
                   failures: list[str]) -> None:
        """Attach each volume to another node than its own, so many a second,
        however long the answers take.
        """
        homes = {volume['id']: volume['os-vol-host-attr:host']
                 for volume in self._user.volumes()}
        begin = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
            asked = [pool.submit(self._attach, volume, homes[volume], which,
                                 begin + which / rate)
                     for which, volume in enumerate(self._volumes)]
            for answer in concurrent.futures.as_completed(asked):
                try:
                    attached.append(answer.result())
                except exceptions.HttpError as error:
                    failures.append(str(error.response.text))

    def _attach(self, volume: str, home: str, which: int, due: float
                ) -> float:
        time.sleep(max(0, due - time.monotonic()))
        # As far away as can be, for it would be a neighbour's often
        there = (node_of(which, self._size, len(self._volumes))
                 + self._size // 2) % self._size
        node = configuration.fleet_node(there + 1)
        if node == home.partition('@')[0]:
            node = configuration.fleet_node((there + 1) % self._size + 1)
        created = self._cloud.volume_api.post('/attachments', json={
            'attachment': {
                'volume_uuid': volume, 'instance_uuid': str(uuid.uuid4()),
                'connector': {
                    'host': node, 'ip': '192.0.2.1', 'multipath': False,
                    'initiator': f'iqn.1993-08.org.debian:{node}',
                    'os_type': 'linux', 'platform': 'x86_64'}}})
        self._attachments.append(created.json()['attachment']['id'])
        return time.monotonic() - due

    def detach_all(self) -> None:
        """End all attachments, and wait until nothing moves."""
        with concurrent.futures.ThreadPoolExecutor(MADE_AT_ONCE) as pool:
            list(pool.map(self._detach, self._attachments))
        self._attachments = []
        leftovers.wait_until_local(self._cloud, PATIENCE)

    @tenacity.retry(stop=tenacity.stop_after_attempt(3), reraise=True,
                    retry=tenacity.retry_if_exception_type(
                        exceptions.ClientException))
    def _detach(self, attachment: str) -> None:
        self._cloud.volume_api.delete('/attachments/' + attachment)


def share(found: Load, *names: str) -> float:
    """How many processors those with such names take together."""
    return sum(taken for who, taken in found.processors.items()
               if who in names)


def row(found: Measured) -> tuple[str, ...]:
    """A line of the table, see HEADINGS."""
    return (
        str(found.nodes), f'{found.start:.0f}',
        f'{found.idle.queries:.0f}', f'{found.idle.messages:.1f}',
        *(f'{share(found.idle, *names):.2f}' for names in WHO.values()),
        f'{found.storm.queries:.0f}', f'{found.storm.messages:.0f}',
        *(f'{share(found.storm, *names):.2f}' for names in WHO.values()),
        f'{attach.middle(found.attached):.2f}',
        f'{attach.almost_all(found.attached):.2f}',
        str(len(found.failures)))
