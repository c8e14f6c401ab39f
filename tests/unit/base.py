# SPDX-License-Identifier: Apache-2.0
"""What the unit tests stand on: Cinder's fixtures, with its SQLite database,
and a cloud of simulated nodes.
"""

import logging
import threading
import time
from typing import NamedTuple
from unittest import mock

from cinder import context
from cinder.db import api as db
from cinder.db import models
from cinder import exception as cinder_exception
from cinder import objects
from cinder.objects import base as objects_base
from cinder.objects import fields
from cinder.tests.unit import test
from cinder.tests.unit import utils as cinder_test_utils
from cinder.volume import configuration
from cinder.volume import driver
from cinder.volume import rpcapi
import fixtures
from oslo_utils import timeutils
from oslo_utils import units
import sqlalchemy as sa

from cinder_localstor.datapath import copies
from cinder_localstor.datapath import destination
from cinder_localstor.datapath import engines
from cinder_localstor.datapath import handles
from cinder_localstor import exception
from cinder_localstor.moves import executor
from cinder_localstor.moves import report
from cinder_localstor.moves import scheduler
from cinder_localstor.moves import service
from cinder_localstor.moves import table
from cinder_localstor.node import interface
from cinder_localstor.node import simulated
from cinder_localstor import opts
from cinder_localstor import rows

A, B, C = 'a@local', 'b@local', 'c@local'
INSTANCE = '11111111-1111-1111-1111-111111111111'
REGION_KIB = simulated.REGION * interface.SECTOR // units.Ki


def snapshot_path(node, snapshot_id):
    """The device that a snapshot is read by on its node, None while there is
    none.
    """
    name = rows.snapshot_copy_name(snapshot_id)
    if handles.handle_name(name) in node.device_mapper.nodes:
        return node.device_mapper.path(handles.handle_name(name))
    if (copies.Label(node.volumes.disks[name].tags).move_id
            and name + '-regions' in node.volumes.disks):
        return None
    return node.volumes.path(name)


class TestCase(test.TestCase):
    """A test with a database and our options.

    What both sides of a move do at the same time is done in turn, whatever
    becomes of the first, so that everything happens again in the same order.
    """

    data_path = 'clone'
    # The source's part comes first.
    source_first = True
    # Where the native helper is installed
    hydrator_on = (A, B, C)

    def setUp(self):
        super().setUp()
        self.ctxt = context.get_admin_context()
        self.configuration = configuration.Configuration(
            driver.volume_opts + opts.driver_options(), config_group='local')
        # Cinder's tests have them, its users by default have not.
        self.override_config('driver', [],
                             group='oslo_messaging_notifications')
        self.override('localstor_region_size', REGION_KIB)
        self.override('localstor_data_path', self.data_path)
        self.override('iscsi_target_flags', 'direct')
        self.override('volume_backend_name', 'local')
        self.override('target_ip_address', '192.0.2.1')
        self.useFixture(fixtures.MockPatchObject(executor, 'at_once',
                                                 self.in_turn))

    def in_turn(self, calls):
        errors = []
        for call in calls if self.source_first else reversed(calls):
            try:
                call()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def forget_log(self):
        """What was logged before is not told: that of thousands of histories
        would be more than stestr keeps of a test, 4 MiB.
        """
        # See StandardLogging of Cinder's fixtures.
        stream = logging.getLogger().handlers[0].stream
        stream.seek(0)
        stream.truncate()

    def share_database(self):
        """Let all threads of a test have its database.

        SQLite's in memory is that of one connection, and each thread has
        one.  So only one thread may be in a transaction at a time.
        """
        engine = db.main_context_manager.writer.get_engine()
        connection = engine.raw_connection().driver_connection
        self.useFixture(fixtures.MockPatchObject(
            engine, 'pool', sa.pool.StaticPool(lambda: connection,
                                               dialect=engine.dialect)))

    def override(self, name, value):
        self.override_config(name, value, group='local')

    def make_service(self, host):
        service = objects.Service(
            self.ctxt, host=host, binary='cinder-volume',
            topic='cinder-volume', report_count=1, disabled=False,
            availability_zone='nova', modified_at=timeutils.utcnow(),
            rpc_current_version=rpcapi.VolumeAPI.RPC_API_VERSION,
            object_current_version=objects_base.OBJ_VERSIONS.get_current())
        service.create()
        return objects.Service.get_by_id(self.ctxt, service.id)


class Statements:
    """Notes the statements that reach the database, and their values."""

    def __init__(self):
        self.asked = []
        self._engine = db.get_engine()

    @property
    def texts(self):
        return [text for text, _values in self.asked]

    def _note(self, _connection, _cursor, text, values, *_more):
        if not text.startswith(('BEGIN', 'SAVEPOINT', 'RELEASE')):
            self.asked.append((text, values))

    def __enter__(self):
        sa.event.listen(self._engine, 'before_cursor_execute', self._note)
        return self

    def __exit__(self, *_error):
        sa.event.remove(self._engine, 'before_cursor_execute', self._note)


class Inside:
    """Stands for a piece of code; knows how many were in it at once."""

    def __init__(self):
        self.most = self._now = 0

    def __call__(self, *_args, **_kwargs):
        self._now += 1
        self.most = max(self.most, self._now)
        # Long enough for whoever may to come in
        time.sleep(0.02)
        self._now -= 1


def at_once(*functions):
    """Call functions in threads of their own that begin together.

    :returns: the errors that they have ended with, None for none
    """
    meeting = threading.Barrier(len(functions), timeout=10)
    errors = [None] * len(functions)

    def run(number, function):
        meeting.wait()
        try:
            function()
        except Exception as error:
            errors[number] = error

    threads = [threading.Thread(target=run, args=each)
               for each in enumerate(functions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    return errors


class Row(NamedTuple):
    """What a volume's row says of where it is."""

    host: str
    name: str
    status: str
    size: int


class Peers:
    """The RPC between simulated nodes: requests and replies can get lost."""

    def __init__(self, cloud, host):
        self._cloud = cloud
        self._faults = cloud.nodes[host].faults

    def _call(self, peer, method, *arguments):
        def act():
            if peer in self._cloud.down:
                raise exception.PeerDown(peer=peer, about='-', host='-',
                                         reason='down')
            try:
                return getattr(self._cloud.running[peer].answers, method)(
                    self._cloud.ctxt, *arguments)
            except cinder_exception.CinderException as error:
                raise exception.PeerFailed(
                    peer=peer, about='-', step=method, reason=str(error),
                    kind=type(error).__name__)
            except simulated.Crash as crash:
                if crash.host != peer:
                    raise
                self._cloud.lose(peer)
                raise exception.PeerDown(peer=peer, about='-', host='-',
                                         reason='no answer')
        try:
            return self._faults.around('Peers.' + method, act)
        except exception.CommandFailed as error:
            raise exception.PeerDown(peer=peer, about='-', host='-',
                                     reason='a lost message') from error

    def identify(self, peer):
        return self._call(peer, 'identify')

    def examine(self, peer, volume_id, block_size, portal, is_copy=False,
                data_path='', is_revert=False):
        return self._call(peer, 'examine', block_size, portal, data_path)

    def run(self, peer, move, steps, patient=True):
        return self._call(peer, 'run', move.as_dict(), steps)

    def is_source_used(self, peer, move):
        return self._call(peer, 'is_source_used', move.as_dict())

    def remaining(self, peer, names):
        return set(self._call(peer, 'remaining', sorted(names)))

    def is_up(self, ctxt, peer):
        return peer not in self._cloud.down

    def offer(self, peer, volume_id, move_id, name, initiator, transports,
              is_clone, is_revert=False):
        return self._call(peer, 'offer', move_id, name, initiator, transports)

    def delete_snapshot(self, peer, volume_id, snapshot_id):
        self._call(peer, 'delete_snapshot', volume_id, snapshot_id)

    def unmanage_snapshot(self, peer, volume_id, snapshot_id):
        self._call(peer, 'unmanage_snapshot', volume_id, snapshot_id)

    def nudge(self, peer, move_id):
        pass  # lost: the periodic task has to do


class Inline:
    """Runs what is submitted at once, and lets a crash through."""

    def submit(self, function, *arguments):
        function(*arguments)


class Cloud:
    """Simulated nodes, with what each does about moves, over one database.
    """

    def __init__(self, case, hosts=(A, B), total=1 << 40):
        self.ctxt = case.ctxt
        self._configuration = case.configuration
        self.nodes = {}
        for host in hosts:
            node = simulated.SimulatedNode(host, self.nodes, total)
            node.hydrators.installed = host in case.hydrator_on
        self.services = {host: case.make_service(host) for host in hosts}
        self.down = set()
        self.running = {}
        # What every volume holds, by volume id and region
        self.content = {}
        for host in hosts:
            self.boot(host)

    def boot(self, host):
        """Start the driver of a node, as cinder-volume does."""
        node = self.nodes[host]
        self.running[host] = service.make(
            host, node, engines.Engines(node, self._configuration),
            Peers(self, host), self._configuration, Inline())
        self.down.discard(host)
        self.running[host].recovery.recover()

    @property
    def movers(self):
        """What users ask of moves, by host."""
        return {host: running.mover
                for host, running in self.running.items()}

    def lose(self, host):
        """The process of the driver has died on a node."""
        self.down.add(host)

    def create_volume(self, host=A):
        """A volume of 1 GiB with something written to each region."""
        volume = cinder_test_utils.create_volume(
            self.ctxt, host=host + '#local', size=1, status='available')
        node = self.nodes[host]
        handles.Handles(node).create(copies.Copy(
            host=host, name=volume.name, volume_id=volume.id, generation=1,
            size=units.Gi))
        path = handles.Handles(node).path(volume.name)
        self.content[volume.id] = {number: 'first %d' % number
                                   for number in range(16)}
        for number, content in self.content[volume.id].items():
            node.write(path, number, content)
        node.flush(path)
        return volume

    def make_foreign(self, name, size=units.Gi, host=A, **more):
        """A logical volume with something on it that Cinder knows nothing of.

        :returns: it; its content is that of its regions
        """
        regions = {number: '%s %d' % (name, number) for number
                   in range(size // simulated.REGION // interface.SECTOR)}
        disk = simulated.Disk(size, frozenset(['mine']), regions, **more)
        disk.flush()
        self.nodes[host].volumes.disks[name] = disk
        return disk

    def refresh(self, volume):
        return objects.Volume.get_by_id(self.ctxt, volume.id)

    def row(self, volume):
        """Host, name, status and size of a volume, cheaper than an object.
        """
        row = models.Volume
        with db.main_context_manager.reader.using(self.ctxt) as session:
            host, name_id, status, size = session.query(
                row.host, row._name_id, row.status, row.size).filter_by(
                id=volume.id).one()
        return Row(host.split('#')[0], db.CONF.volume_name_template % (
            name_id or volume.id), status, size)

    def host_of(self, volume):
        return self.row(volume).host

    def handle(self, volume):
        return '/dev/mapper/' + handles.handle_name(self.row(volume).name)

    def write(self, volume, number, content, host=None):
        """Write a region as a guest with O_SYNC does, by default where the
        volume is.
        """
        node = self.nodes[host or self.host_of(volume)]
        node.write(self.handle(volume), number, content)
        node.flush(self.handle(volume))
        self.content[volume.id][number] = content

    def snapshot_row(self, volume):
        """What Cinder's API makes of a request for a snapshot."""
        snapshot = objects.Snapshot(
            self.ctxt, volume_id=volume.id, status='creating', use_quota=False,
            volume_size=self.row(volume).size, volume_type_id=None,
            project_id='project', user_id='user')
        snapshot.create()
        self.content[snapshot.id] = dict(self.content[volume.id])
        return snapshot

    def read_snapshot(self, snapshot):
        """What a snapshot holds, wherever it is."""
        node = self.nodes[rows.place_of(self.ctxt, snapshot.id)]
        path = snapshot_path(node, snapshot.id)
        return {number: node.read(path, number)
                for number in self.content[snapshot.id]}

    def read(self, volume):
        node, path = self.nodes[self.host_of(volume)], self.handle(volume)
        return {number: node.read(path, number)
                for number in range(16 * self.refresh(volume).size)}

    def reserve(self, volume, connector=None, instance=INSTANCE):
        """An attachment as the API makes it for an instance."""
        attachment = objects.VolumeAttachment(
            self.ctxt, volume_id=volume.id,
            instance_uuid=instance,
            attach_status=fields.VolumeAttachStatus.ATTACHED if connector
            else fields.VolumeAttachStatus.RESERVED)
        if connector:
            attachment.connector = connector
        attachment.create()
        return attachment

    def move(self, volume, to=B):
        """What attaching the volume on a peer does."""
        volume = self.refresh(volume)
        if not rows.attachments(self.ctxt, volume.id):
            self.reserve(volume)
        self.movers[self.host_of(volume)].begin(self.ctxt, volume,
                                                self.services[to])

    def hydrate(self):
        for node in self.nodes.values():
            node.hydrate()

    def watch(self):
        """One period on every node that is up; one may crash in it."""
        for host in self.nodes:
            if host in self.down:
                continue
            try:
                self.running[host].scheduler.watch()
            except simulated.Crash as crash:
                self.lose(crash.host)
            except exception.LocalStorException:
                pass  # logged by the driver, which looks again later

    def settle(self, rounds=20, power=False):
        """Let everything that is down come back and all moves end.

        :param power: what is down has lost power, not its process only
        :raises AssertionError: a move does not end
        """
        for _round in range(rounds):
            for host in sorted(self.down):
                if power:
                    self.nodes[host].cut_power()
                self.boot(host)
            self.hydrate()
            self.watch()
            if not self.down and all(
                    self.is_kept(move) for host in self.nodes
                    for move in rows.for_host(self.ctxt, host)):
                return
        raise AssertionError('moves do not end: %s' % [
            (move.state, move.done, move.problem)
            for host in self.nodes
            for move in rows.for_host(self.ctxt, host)])

    def is_kept(self, move):
        """Whether a move has to wait until snapshots are deleted."""
        described = move.transfer
        return (move.state == table.State.KEEPING
                and table.HIDE_SOURCE.is_done(move)
                and described.source_name in rows.origins(
                    self.ctxt, described.source_host))

    def report(self, *hosts):
        """What the operator is told of backends, on one machine."""
        return report.report([
            (report.look(self.ctxt, host, self.nodes[host]),
             self.nodes[host], destination.Destination(
                 self.nodes[host],
                 engines.Engines(self.nodes[host], self._configuration)))
            for host in hosts])

    def set_status(self, volume, status):
        with db.main_context_manager.writer.using(self.ctxt) as session:
            session.query(models.Volume).filter_by(id=volume.id).update(
                {'status': status})

    def leftovers(self, volumes):
        """All that is on the nodes beyond what these volumes and all snapshots
        need.
        """
        found = []
        for host, node in self.nodes.items():
            names = {row.name for row in map(self.row, volumes)
                     if row.host == host}
            wanted = {handles.handle_name(name) for name in names}
            snapshots = {snapshot.name for snapshot
                         in rows.snapshots_on(self.ctxt, host)}
            found += [(host, 'volume', name)
                      for name in set(node.volumes.disks) ^ (
                          names | snapshots | rows.origins(self.ctxt, host))]
            found += [(host, 'node', name)
                      for name in set(node.device_mapper.nodes) ^ wanted]
            found += [(host, 'export', name)
                      for name in node.target.exported()]
            found += [(host, 'remote export', name)
                      for name in set(node.remote.exports) - names]
            found += [(host, 'session', name)
                      for name in node.initiator.connected()]
            found += [(host, 'tag', name, tag)
                      for name, disk in node.volumes.disks.items()
                      for tag in disk.tags if 'move' in tag]
        return found


def no_pause():
    """Don't wait between a call and the look at what it has changed."""
    return mock.patch.object(scheduler, 'SOON', 0)
