# SPDX-License-Identifier: Apache-2.0
"""A whole site in memory: simulated nodes with the driver on them, Cinder's
API and volume manager around it, and instances whose guests use the volumes.

What Cinder does is told from its ``volume/manager.py`` and ``volume/api.py``
(29.0.0), in the order in which it calls the driver and changes its rows; one
request at a time.
"""

import collections
from collections.abc import Callable
import contextlib
import copy
import dataclasses
import json
from typing import Any

from cinder.db import api as db
from cinder.db import models
from cinder import exception as cinder_exception
from cinder import objects
from cinder.objects import fields
from cinder.tests.unit import utils as cinder_test_utils
import tenacity

from cinder_localstor.datapath import handles
from cinder_localstor.datapath import snapshots
from cinder_localstor.datapath import transfer
from cinder_localstor.driver import localstor
from cinder_localstor import exception
from cinder_localstor.moves import table
from cinder_localstor.node import simulated
from cinder_localstor.peers import directory
from cinder_localstor import rows
from tests.unit import base
from tests.unit import model

HOSTS = (base.A, base.B, base.C)
# Regions that guests write: first, next, one in the middle, last
REGIONS = (0, 1, 9, 15)
# A call that hangs is one that fails, to the driver.
DEADLY = (simulated.Fault.CRASH, simulated.Fault.CRASH_AFTER)
FAULTS = (simulated.Fault.ERROR, simulated.Fault.ERROR_AFTER, *DEADLY)
# Periods of the periodic task in which everything has to end that can
PERIODS = 20


class NoAnswer(Exception):
    """A volume service is down, or its answer was lost."""


# What a user of the API may be told
REFUSALS = (NoAnswer, cinder_exception.CinderException)


@dataclasses.dataclass
class Strike:
    """A call that goes wrong; with `power` its node goes off as it dies."""

    fault: simulated.Fault
    power: bool = False

    def __str__(self) -> str:
        return self.fault.name + (' with the power' if self.power else '')


class Script:
    """Which calls go wrong, by their number over all nodes.

    :ivar struck: what went wrong, and where
    """

    def __init__(self, strikes: dict[int, Strike] | None = None,
                 early: bool = False) -> None:
        """:param early: whether calls count from the first beginning"""
        self._planned = strikes or {}
        self._early = early
        self.strikes: dict[int, Strike] = {}
        self.struck: list[str] = []
        self.calls = 0
        self.power = False

    def begin_early(self) -> None:
        """What comes from here on is common to several histories."""
        if self._early:
            self._begin()

    def begin(self) -> None:
        """What comes from here on is of this history alone."""
        if not self._early:
            self._begin()

    def _begin(self) -> None:
        self.calls, self.strikes = 0, dict(self._planned)

    def choose(self, host: str, name: str) -> simulated.Fault | None:
        """What becomes of a call, see :class:`simulated.Faults`."""
        strike = self.strikes.pop(self.calls, None)
        self.calls += 1
        if strike is None:
            return None
        self.struck.append('%s: %s on %s' % (strike, name, host))
        self.power = strike.power
        return strike.fault

    def after(self, calls: int, strike: Strike) -> None:
        """Let a call from now go wrong, and none before or after it."""
        self.strikes = {self.calls + calls: strike}


@dataclasses.dataclass
class Opened:
    """A handle that a guest has open."""

    name: str
    mapped: simulated.Mapped


@dataclasses.dataclass
class Snapshot:
    """A snapshot, and what it holds.

    :ivar is_good: whether it is available
    """

    row: objects.Snapshot
    contents: model.Contents
    is_good: bool


@dataclasses.dataclass
class Instance:
    """An instance with its one volume.

    :ivar attachments: ids by host, as long as Nova knows of them
    :ivar opened: handles by host
    :ivar home: where the guest runs or would be started again
    :ivar runs: whether it runs
    :ivar doomed: whether the volume is as good as deleted
    :ivar locked: whether it is being migrated, and nobody may use it
    :ivar snapshots: by their ids
    """

    volume: objects.Volume
    contents: model.Contents
    attachments: dict[str, str] = dataclasses.field(default_factory=dict)
    opened: dict[str, Opened] = dataclasses.field(default_factory=dict)
    home: str | None = None
    runs: bool = False
    doomed: bool = False
    locked: bool = False
    snapshots: dict[str, Snapshot] = dataclasses.field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Whether the volume can be used."""
        return (bool(self.contents.regions()) and not self.doomed
                and not self.locked)


class Queue:
    """Work that a service leaves to its pool of threads."""

    def __init__(self, site: 'Site', host: str) -> None:
        self._site = site
        self._host = host

    def submit(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._site.queue.append(
            (self._host, self._site.starts[self._host],
             lambda: function(*arguments)))


class Peers(base.Peers):
    """As the base, and nudges arrive after what is under way."""

    def nudge(self, peer: str, move_id: str) -> None:
        Queue(self._cloud, peer).submit(
            lambda: self._cloud.running[peer].answers.drive(
                self._cloud.ctxt, move_id))


class Site(base.Cloud):
    """Nodes, services, instances, and what must be true of them always."""

    def __init__(self, case: base.TestCase, hosts: tuple[str, ...] = HOSTS,
                 script: Script | None = None) -> None:
        self.script = script or Script()
        self.instances: list[Instance] = []
        self.off: set[str] = set()
        self.starts = collections.Counter[str]()
        self.queue: collections.deque[tuple[str, int, Callable[[], None]]] = (
            collections.deque())
        # Copies as they were when they were sealed, by host and name
        self._sealed: dict[tuple[str, str], dict[int, str]] = {}
        self._stamps = 0
        self.survives: Callable[[], bool] = lambda: False
        self.drivers: dict[str, localstor.LocalStorDriver] = {}
        case.site = self
        _empty_database(case.ctxt)
        case.forget_log()
        super().__init__(case, hosts)
        for node in self.nodes.values():
            node.faults.choose = self.script.choose
            node.faults.observe = self.observe

    # Nodes and services

    def boot(self, host: str) -> None:
        """Start the volume service of a node, as far as it starts."""
        self.starts[host] += 1
        self.down.add(host)
        self.off.discard(host)
        with self._dying():
            driver = localstor.LocalStorDriver(
                configuration=self._configuration, host=host,
                make_node=lambda _configuration: self.nodes[host],
                workers=Queue(self, host))
            driver.do_setup(self.ctxt)
            self.running[host] = driver._service
            self.drivers[host] = driver
            try:
                driver.check_for_setup_error()
            except exception.LocalStorException:
                return  # uninitialized until it is started again
            self.down.discard(host)
            self._clean_up(driver)

    def _clean_up(self, driver: localstor.LocalStorDriver) -> None:
        """What the manager's start does with what was broken off."""
        for instance in list(self.instances):
            row = self.row(instance.volume)
            instance.locked &= row.status == 'maintenance'
            if row.host != driver.host:
                continue
            if row.status == 'creating':
                self.set_status(instance.volume, 'error')
            elif row.status == 'deleting':
                with contextlib.suppress(*REFUSALS):
                    self._delete(driver, instance)

    @contextlib.contextmanager
    def _dying(self):
        """A process that dies here is down afterwards."""
        try:
            yield
        except simulated.Crash as crash:
            self.lose(crash.host)
        except Broken as broken:
            raise AssertionError(*broken.args) from broken

    def lose(self, host: str) -> None:
        super().lose(host)
        if self.script.power:
            self.script.power = False
            self.cut_power(host)

    def cut_power(self, host: str) -> None:
        """Switch a node off, with the guests on it."""
        self.down.add(host)
        self.off.add(host)
        self.nodes[host].cut_power(self.survives)
        for instance in self.instances:
            if host in instance.opened:
                # A migration that is under way fails with it.
                lost = instance.home == host
                del instance.opened[host]
                if lost:
                    self._stop(instance)
                    instance.contents.lose_cache()
            elif not instance.runs:
                instance.contents.lose_cache()

    def cut_network(self, one: str, other: str) -> None:
        """Let two nodes not reach each other's disks any more."""
        self.nodes[one].initiator.unreachable.add(other)
        self.nodes[other].initiator.unreachable.add(one)

    def mend_network(self) -> None:
        for node in self.nodes.values():
            node.initiator.unreachable.clear()

    def give_up_sessions(self) -> None:
        """A cut has lasted longer than iSCSI waits."""
        for node in self.nodes.values():
            initiator = node.initiator
            initiator.broken |= {
                iqn for iqn, export in initiator.sessions.items()
                if export.portal in initiator.unreachable}

    @property
    def is_healthy(self) -> bool:
        """Whether everything is up and nothing is about to go wrong."""
        return not (self.down or self.script.strikes or self.is_cut)

    @property
    def is_cut(self) -> bool:
        """Whether a disk of another node can't be reached."""
        return any(node.initiator.unreachable or node.initiator.broken
                   for node in self.nodes.values())

    def period(self, host: str) -> None:
        """One look of the periodic task of a service."""
        if host not in self.down:
            with self._dying():
                self.drivers[host]._watch_moves()
        self.run_queue()

    def watch(self) -> None:
        for host in self.nodes:
            self.period(host)

    def run_queue(self) -> None:
        """Let the services' threads do what was left to them."""
        while self.queue:
            host, start, work = self.queue.popleft()
            if host not in self.down and self.starts[host] == start:
                with self._dying(), contextlib.suppress(
                        exception.LocalStorException):
                    work()

    def moves(self) -> list[rows.Move]:
        return rows._moves(self.ctxt)

    def settle(self, rounds: int = PERIODS, power: bool = False) -> None:
        """Let everything come back, and all moves end that can.

        :raises AssertionError: one does not
        """
        self.mend_network()
        for _round in range(rounds):
            for host in sorted(self.down):
                self.boot(host)
            self.hydrate()
            self.watch()
            if not self.down and all(map(self._waits, self.moves())):
                return
        raise AssertionError('moves do not end: %s' % [
            (move.state, move.done, move.problem) for move in self.moves()])

    def _waits(self, move: rows.Move) -> bool:
        """Whether a move can't go on before Nova has ended a migration, or a
        user has deleted snapshots.
        """
        return (move.state == table.State.STARTING
                and len(rows.attachments(self.ctxt, move.volume_id)) > 1
                or self.is_kept(move))

    # Cinder

    def _ask(self, volume: objects.Volume,
             work: Callable[[localstor.LocalStorDriver], Any]) -> Any:
        """Ask the service of a volume.

        :raises NoAnswer: it is down, or dies of it
        """
        host = self.host_of(volume)
        if host in self.down:
            raise NoAnswer(host)
        with self._dying():
            return work(self.drivers[host])
        raise NoAnswer(host)

    def create(self, host: str) -> Instance | None:
        """A new volume, written and flushed once; None if that fails."""
        volume = cinder_test_utils.create_volume(
            self.ctxt, host=host + '#local', size=1, status='creating')
        instance = Instance(volume, model.Contents())
        self.instances.append(instance)
        try:
            self._ask(volume, lambda driver: driver.create_volume(volume))
        except REFUSALS:
            self.set_status(volume, 'error')
            return None
        self.set_status(volume, 'available')
        path = handles.Handles(self.nodes[host]).path(volume.name)
        for number in REGIONS:
            self._write(instance, host, path, number)
        self._flush(instance, host, path)
        return instance

    def attach(self, instance: Instance, host: str) -> bool:
        """Attach a volume on a node; whether it worked.

        With another attachment there this is how a live migration begins.
        """
        volume = self.refresh(instance.volume)
        moving = rows.for_volume(self.ctxt, volume.id)
        healthy = self.is_healthy and volume.status != 'extending'
        attachment = self.reserve(volume)
        instance.attachments[host] = attachment.id
        try:
            path = self._ask(volume, lambda driver: self._connect(
                driver, volume, attachment, host))
        except REFUSALS as error:
            assert moving or not healthy, 'attach fails: %s' % error
            self.run_queue()
            return False
        self._open(instance, host, path)
        if not instance.runs:
            instance.home, instance.runs = host, True
        self.check(instance)
        self.run_queue()
        return True

    def _connect(self, driver: localstor.LocalStorDriver,
                 volume: objects.Volume,
                 attachment: objects.VolumeAttachment, host: str) -> str:
        """What Cinder does for an attachment; the path of a local device, ''
        where the connection is over iSCSI.
        """
        connector = {'host': host.split('@')[0], 'ip': '192.0.2.1',
                     'initiator': self.nodes[host].initiator.name()}
        driver.validate_connector(connector)
        update = driver.create_export(self.ctxt, volume, connector)
        if update:
            volume.update(update)
            volume.save()
        try:
            answer = driver.initialize_connection(volume, connector)
        except Exception:
            driver.remove_export(self.ctxt, volume)
            raise
        db.volume_attachment_update(self.ctxt, attachment.id, {
            'attach_status': fields.VolumeAttachStatus.ATTACHING,
            'connector': json.dumps(connector)})
        db.volume_attached(self.ctxt, attachment.id, attachment.instance_uuid,
                           connector['host'], 'na')
        return (answer['data']['device_path']
                if answer['driver_volume_type'] == localstor.LOCAL else '')

    def detach(self, instance: Instance, host: str, lost: str = '') -> bool:
        """Delete an attachment; whether Cinder says that it is gone.

        :param lost: what of it does not arrive, 'request' or 'answer'
        """
        if lost == 'request':
            return False
        self._close(instance, host)
        volume = self.refresh(instance.volume)
        try:
            attachment = objects.VolumeAttachment.get_by_id(
                self.ctxt, instance.attachments[host])
        except cinder_exception.NotFound:
            del instance.attachments[host]  # it came twice
            return True
        try:
            if attachment.attach_status != fields.VolumeAttachStatus.RESERVED:
                self._ask(volume, lambda driver: self._disconnect(
                    driver, volume, attachment.connector))
        except REFUSALS:
            return False
        db.volume_detached(self.ctxt, volume.id, attachment.id)
        self.run_queue()
        if lost == 'answer':
            return False
        del instance.attachments[host]
        return True

    def _disconnect(self, driver: localstor.LocalStorDriver,
                    volume: objects.Volume,
                    connector: dict[str, Any] | None, force: bool = False
                    ) -> None:
        if not driver.terminate_connection(volume, connector, force=force):
            driver.remove_export(self.ctxt, volume)

    def force_detach(self, instance: Instance) -> bool:
        """An admin's os-force_detach of a stopped guest's volume."""
        volume = self.refresh(instance.volume)
        try:
            self._ask(volume, lambda driver: self._disconnect(
                driver, volume, None, force=True))
        except REFUSALS:
            return False
        for row in rows.attachments(self.ctxt, volume.id):
            db.volume_detached(self.ctxt, volume.id, row['id'])
        instance.attachments.clear()
        self.run_queue()
        return True

    def send(self, instance: Instance, host: str, may_fail: bool = False
             ) -> bool:
        """An admin migrates a volume that nobody uses; whether it worked."""
        volume = self.refresh(instance.volume)
        moving = rows.for_volume(self.ctxt, volume.id)
        healthy = self.is_healthy
        if self.host_of(volume) in {host, *self.down}:
            return False
        locked = {'previous_status': volume.status, 'status': 'maintenance'}
        volume.update({'migration_status': 'migrating', **locked})
        volume.save()
        instance.locked, ended = True, {'status': volume.previous_status}
        try:
            self._ask(volume, lambda driver: driver.migrate_volume(
                self.ctxt, volume, {'host': host + '#local', 'capabilities': {
                    'location_info': directory.LOCATION % (host, 'vg')}}))
        except NoAnswer:
            return False  # until the service starts again
        except REFUSALS as error:
            assert may_fail or moving or not healthy, (
                'migration fails: %s' % error)
            ended['migration_status'] = 'error'
        else:
            ended.update(migration_status='success', host=host + '#local')
        volume.update(ended)
        volume.save()
        instance.locked = False
        self.run_queue()
        return ended['migration_status'] == 'success'

    def reset_state(self, instance: Instance, status: str) -> None:
        """An admin's reset-state."""
        self.set_status(instance.volume, status)

    def extend(self, instance: Instance) -> bool:
        """Grow a volume by one GiB; whether it worked."""
        row = self.row(instance.volume)
        before, size = row.status, row.size + 1
        moving = rows.for_volume(self.ctxt, instance.volume.id)
        healthy = self.is_healthy
        self.set_status(instance.volume, 'extending')
        volume = self.refresh(instance.volume)
        try:
            self._ask(volume, lambda driver: driver.extend_volume(volume,
                                                                  size))
        except REFUSALS as error:
            # LVM extends no volume in use that has thick snapshots, and none
            # with snapshots that are read.
            assert (moving or instance.snapshots or not healthy
                    or isinstance(error, exception.OriginIsRead)), (
                        'extend fails: %s' % error)
            self.set_status(volume, 'error_extending')
            self.reset_state(instance, before)
            return False
        volume.update({'size': size, 'status': before})
        volume.save()
        return True

    def take_snapshot(self, instance: Instance, may_fail: bool = False
                      ) -> bool:
        """Take a snapshot of a volume; whether it worked."""
        volume = self.refresh(instance.volume)
        moving = rows.for_volume(self.ctxt, volume.id)
        healthy = self.is_healthy
        row = objects.Snapshot(
            self.ctxt, volume_id=volume.id, status='creating',
            use_quota=False, volume_size=volume.size)
        row.create()
        contents = copy.deepcopy(instance.contents)
        try:
            row.update(self._ask(
                volume, lambda driver: driver.create_snapshot(row)))
        except REFUSALS as error:
            assert may_fail or moving or not healthy, (
                'snapshot fails: %s' % error)
            row.status = 'error'
            row.save()
        else:
            row.status = 'available'
            row.save()
        instance.snapshots[row.id] = Snapshot(
            row, contents, row.status == 'available')
        return row.status == 'available'

    def create_from_snapshot(self, instance: Instance, host: str,
                             may_fail: bool = False,
                             snapshot: Snapshot | None = None) -> bool:
        """Make a volume of a snapshot, or of one that is good; whether it
        worked.
        """
        snapshot = snapshot or next(
            found for found in instance.snapshots.values() if found.is_good)
        return self._create_from(
            host, copy.deepcopy(snapshot.contents), instance,
            lambda driver, volume: driver.create_volume_from_snapshot(
                volume, snapshot.row), may_fail)

    def clone(self, instance: Instance, host: str = '',
              may_fail: bool = False) -> bool:
        """Clone a volume, where it is or on a node; whether it worked."""
        cloned = self.refresh(instance.volume)
        return self._create_from(
            host or self.host_of(cloned), copy.deepcopy(instance.contents),
            instance,
            lambda driver, volume: driver.create_cloned_volume(volume,
                                                               cloned),
            may_fail)

    def _create_from(self, host: str, contents: model.Contents,
                     instance: Instance, make: Callable[..., Any],
                     may_fail: bool = False) -> bool:
        moving = rows.for_volume(self.ctxt, instance.volume.id)
        healthy = self.is_healthy
        volume = cinder_test_utils.create_volume(
            self.ctxt, host=host + '#local', status='creating',
            size=self.row(instance.volume).size)
        made = Instance(volume, model.Contents())
        self.instances.append(made)
        try:
            volume.update(self._ask(volume,
                                    lambda driver: make(driver, volume)))
        except REFUSALS as error:
            assert may_fail or moving or not healthy, (
                'creation fails: %s' % error)
            self.set_status(volume, 'error')
            return False
        volume.save()
        # What it is made from was flushed.
        contents.flush()
        made.contents = contents
        self.set_status(volume, 'available')
        return True

    def revert(self, instance: Instance) -> bool:
        """Let a volume be what its newest good snapshot is; whether it is.

        Another copy tells that it is.
        """
        snapshot = [found for found in instance.snapshots.values()
                    if found.is_good][-1]
        volume = self.refresh(instance.volume)
        moving = rows.for_volume(self.ctxt, volume.id)
        healthy, before = self.is_healthy, volume.name
        if volume.size != snapshot.row.volume_size:
            return False  # Cinder's API refuses it
        self.set_status(volume, 'reverting')
        snapshot.row.status = 'restoring'
        snapshot.row.save()
        told = False
        try:
            self._ask(volume, lambda driver: driver.revert_to_snapshot(
                self.ctxt, volume, snapshot.row))
        except REFUSALS as error:
            assert moving or not healthy, 'revert fails: %s' % error
            told = True
        snapshot.row.status = 'available'
        snapshot.row.save()
        self.set_status(volume, 'available')
        if self.row(volume).name == before:
            assert told, 'nobody says that %s is not reverted' % volume.id
            return False
        if healthy and self.is_healthy:
            self._check_usable(instance)
        instance.contents = copy.deepcopy(snapshot.contents)
        # What it is made from was flushed.
        instance.contents.flush()
        return True

    def delete_snapshot(self, instance: Instance, may_fail: bool = False
                        ) -> bool:
        """Delete the oldest snapshot of a volume; whether it is gone."""
        snapshot_id, snapshot = next(iter(instance.snapshots.items()))
        healthy = self.is_healthy
        try:
            self._ask(instance.volume, lambda driver: self._delete_snapshot(
                driver, snapshot))
        except REFUSALS as error:
            assert may_fail or not healthy, (
                'deletion of a snapshot fails: %s' % error)
            return False
        snapshot.row.destroy()
        del instance.snapshots[snapshot_id]
        self.run_queue()
        return True

    @staticmethod
    def _delete_snapshot(driver: localstor.LocalStorDriver,
                         snapshot: Snapshot) -> None:
        was, snapshot.is_good = snapshot.is_good, False
        try:
            driver.delete_snapshot(snapshot.row)
        except cinder_exception.SnapshotIsBusy:
            snapshot.is_good = was
            raise

    def delete(self, instance: Instance) -> bool:
        """Delete a volume without attachments; whether it is gone."""
        healthy, moving = self.is_healthy, self.moves()
        self.set_status(instance.volume, 'deleting')
        try:
            self._ask(instance.volume,
                      lambda driver: self._delete(driver, instance))
        except REFUSALS as error:
            assert moving or not healthy, 'delete fails: %s' % error
        self.run_queue()
        return instance not in self.instances

    def _delete(self, driver: localstor.LocalStorDriver, instance: Instance
                ) -> None:
        if self.host_of(instance.volume) != driver.host:
            return  # it stays 'deleting' until that service starts
        volume = self.refresh(instance.volume)
        try:
            driver.remove_export(self.ctxt, volume)
            instance.doomed = True
            driver.delete_volume(volume)
        except cinder_exception.VolumeIsBusy:
            instance.doomed = False
            self.set_status(volume, 'available')
            return
        except Exception:
            self.set_status(volume, 'error_deleting')
            raise
        volume.destroy()
        self.instances.remove(instance)

    # Guests

    def _open(self, instance: Instance, host: str, path: str) -> None:
        name = path.rsplit('/', 1)[1]
        mapped = self.nodes[host].device_mapper.nodes[name]
        mapped.open_count += 1
        instance.opened[host] = Opened(name, mapped)

    def _close(self, instance: Instance, host: str) -> None:
        opened = instance.opened.pop(host, None)
        if opened:
            opened.mapped.open_count -= 1

    def _stop(self, instance: Instance) -> None:
        """The guest dies, without a flush."""
        for host in list(instance.opened):
            self._close(instance, host)
        instance.runs = False

    def stop(self, instance: Instance, flush: bool = True) -> None:
        """End a guest."""
        if flush:
            self.flush(instance)
        self._stop(instance)

    def resume(self, instance: Instance) -> bool:
        """Start a guest again where it was; whether its disk is there."""
        row = self.row(instance.volume)
        name = handles.handle_name(row.name)
        node = self.nodes[instance.home]
        attached = {found['id'] for found in rows.attachments(
            self.ctxt, instance.volume.id)}
        if (instance.home in self.off or row.host != instance.home
                or instance.attachments[instance.home] not in attached
                or name not in node.device_mapper.nodes):
            return False
        self._open(instance, instance.home, node.device_mapper.path(name))
        instance.runs = True
        self.check(instance)
        return True

    def switch(self, instance: Instance, host: str) -> None:
        """A live migration goes over to the other node."""
        self.flush(instance)
        self._close(instance, instance.home)
        instance.home = host

    def write(self, instance: Instance, number: int) -> None:
        """A guest writes a region, to the cache of the disk."""
        self._write(instance, instance.home, self._path(instance), number)

    def _path(self, instance: Instance) -> str:
        return ('/dev/mapper/' + instance.opened[instance.home].name)

    def _write(self, instance: Instance, host: str, path: str, number: int
               ) -> None:
        self._stamps += 1
        stamp = 'stamp %d' % self._stamps
        self.nodes[host].write(path, number, stamp)
        instance.contents.write(number, stamp)

    def flush(self, instance: Instance) -> None:
        """A guest flushes its disk."""
        self._flush(instance, instance.home, self._path(instance))

    def _flush(self, instance: Instance, host: str, path: str) -> None:
        self.nodes[host].flush(path)
        instance.contents.flush()

    # What must be true

    def observe(self, host: str, name: str) -> None:
        """Look at everything after a call.

        :raises AssertionError: something may not be as it is
        """
        try:
            self.look()
        except Exception as error:
            # What is told to the driver as an error, it would get over.
            raise Broken('after %s on %s: %r' % (name, host, error)
                         ) from error

    def look(self) -> None:
        """:raises AssertionError: something may not be as it is"""
        for instance in self.instances:
            self.check(instance)
            for snapshot in instance.snapshots.values():
                self._check_snapshot(snapshot)
        self._check_writers()
        self._check_sources()

    def check(self, instance: Instance) -> None:
        """A guest has its disk, and reads from it what it may."""
        for host, opened in instance.opened.items():
            node = self.nodes[host]
            assert node.device_mapper.nodes.get(opened.name) is (
                opened.mapped), '%s goes away under a guest' % opened.name
            if host == instance.home:
                assert not opened.mapped.read_only, (
                    '%s is sealed under a guest' % opened.name)
            for number in instance.contents.regions():
                try:
                    found = node.read(node.device_mapper.path(opened.name),
                                      number)
                except exception.SourceUnreachable:
                    continue  # it waits
                instance.contents.read(number, found)

    def _check_usable(self, instance: Instance) -> None:
        """A guest could have the volume now."""
        volume = self.refresh(instance.volume)
        mapped = self.nodes[self.host_of(volume)].device_mapper.nodes
        assert handles.handle_name(volume.name) in mapped, (
            '%s has no handle yet' % volume.name)

    def _check_snapshot(self, snapshot: Snapshot) -> None:
        """A snapshot holds what its volume held then, on a node that is on and
        serves it.
        """
        if not snapshot.is_good:
            return
        place = rows.place_of(self.ctxt, snapshot.row.id)
        if place in self.off:
            return
        node = self.nodes[place]
        path = base.snapshot_path(node, snapshot.row.id)
        for number in snapshot.contents.regions() if path else ():
            with contextlib.suppress(exception.SourceUnreachable):
                snapshot.contents.read(number, node.read(path, number))

    def _check_writers(self) -> None:
        """No two copies of a volume can be written.

        The destination of a live migration may be there already, as long as
        nothing is copied to it.
        """
        writable = collections.defaultdict(list)
        for host, node in self.nodes.items():
            nodes = node.device_mapper.nodes
            for name, disk in node.volumes.disks.items():
                handle = nodes.get(handles.handle_name(name))
                tags = transfer.read_tags(disk.tags)
                if (handle and not handle.read_only
                        and not self._awaits(node, handle)):
                    writable[tags.get('volume')].append((host, name))
        for volume_id, copies in writable.items():
            assert len(copies) == 1, 'volume %s has two writable copies: ' \
                '%s' % (volume_id, copies)

    @staticmethod
    def _awaits(node: simulated.SimulatedNode, handle: simulated.Mapped
                ) -> bool:
        """Whether a handle lies on an engine that copies nothing yet."""
        below = handle.table[0].arguments.split()[0].rsplit('/', 1)[1]
        engine = node.device_mapper.nodes.get(below)
        if engine is None:
            return False
        helper = node.hydrators.processes.get(
            below.removesuffix('-hydrator'))
        return not (helper.started if helper else engine.hydrating)

    def _check_sources(self) -> None:
        """What was sealed is not altered before it is wiped."""
        for host, node in self.nodes.items():
            for name, handle in node.device_mapper.nodes.items():
                if handle.read_only and name.endswith(
                        (handles.SUFFIX, snapshots.READER)):
                    before = self._sealed.setdefault((host, name), {})
                    for number in REGIONS:
                        with contextlib.suppress(
                                exception.SourceUnreachable):
                            found = node.device_mapper.read(name, number)
                            assert found == before.setdefault(
                                number, found), (
                                'source copy %s is altered' % name)

    def end(self) -> None:
        """Everything heals, is read and goes; nothing is left behind.

        :raises AssertionError: something does not
        """
        self.script.strikes.clear()
        self.settle()
        assert not any(instance.locked for instance in self.instances), (
            'a migration does not end')
        for instance in list(self.instances):
            self._finish(instance)
            while instance.snapshots:
                assert self.delete_snapshot(instance), 'a snapshot stays'
        self.settle()
        for instance in list(self.instances):
            if not instance.is_whole:
                assert self.delete(instance), 'a failed volume stays'
        assert [] == self.moves(), 'moves are left: %s' % self.moves()
        left = self.leftovers([instance.volume
                               for instance in self.instances])
        assert [] == left, 'left behind: %s' % left
        for instance in list(self.instances):
            assert self.attach(instance, self.host_of(instance.volume))
            self._finish(instance)
            assert self.delete(instance), 'a volume is not deleted'
        left = self.leftovers([])
        assert [] == left, 'left behind by deletes: %s' % left
        with db.main_context_manager.reader.using(self.ctxt) as session:
            shadows = session.query(models.Volume).filter_by(
                deleted=False).all()
            assert [] == shadows, 'rows are left: %s' % shadows

    def _finish(self, instance: Instance) -> None:
        """Stop a guest and delete its attachments."""
        self._stop(instance)
        for host in list(instance.attachments):
            assert self.detach(instance, host), 'detach fails'
        if self.row(instance.volume).status != 'error':
            self.set_status(instance.volume, 'available')


class Broken(BaseException):
    """What must be true is not: nothing in the driver may catch this."""


def _empty_database(ctxt) -> None:
    with db.main_context_manager.writer.using(ctxt) as session:
        for table_of_rows in (models.VolumeAdminMetadata,
                              models.VolumeAttachment, models.Snapshot,
                              models.Volume, models.Service):
            session.query(table_of_rows).delete()


class TestCase(base.TestCase):
    """A test with sites, one after the other."""

    # A chain has engines of both kinds.
    data_path = 'auto'
    hydrator_on = (base.B,)
    site: Site

    def setUp(self):
        super().setUp()
        self.patch('cinder_localstor.peers.rpc.PeerAPI',
                   side_effect=lambda host, _time: Peers(self.site, host))
        self.patch('cinder_localstor.peers.directory.own_identity',
                   return_value=[])
        self.patch('cinder_localstor.moves.scheduler.SOON', 0)
        # Their services beat once, and many schedules take minutes.
        self.override_config('service_down_time', 24 * 3600)
        # What has to wait is refused at once.
        self.patch('tenacity.stop_after_delay',
                   side_effect=lambda _seconds: tenacity.stop_after_attempt(
                       1))
