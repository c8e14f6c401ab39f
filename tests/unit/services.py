# SPDX-License-Identifier: Apache-2.0
"""Volume services: Cinder's own volume manager, with our driver, on each of
the simulated nodes.

Nothing that Cinder does is told again here.  A request travels as it does in
reality: through Cinder's RPC interface and its serializer, so that whoever is
asked has a copy of the object as it was when it was sent.  What is simulated
is the node beneath the driver, what exports and imports disks for Cinder, and
dd.
"""

import collections
import contextlib
import functools
from unittest import mock

from cinder import context
from cinder.db import api as db
from cinder import exception as cinder_exception
from cinder.group import api as groups
from cinder.message import message_field
from cinder import objects
from cinder.objects import fields
from cinder.scheduler import manager as scheduler
from cinder.transfer import api as transfer
from cinder.volume import api
from cinder.volume import manager
from cinder.volume import rpcapi
from oslo_log import log as logging
from oslo_serialization import jsonutils
from oslo_utils import units

from cinder_localstor.datapath import handles
from tests.unit import base

LOG = logging.getLogger(__name__)

DRIVER = 'cinder_localstor.driver.LocalStorDriver'
REGION_MIB = 64
Backend = collections.namedtuple('Backend',
                                 'host cluster_name capabilities')


class Client:
    """An RPC client whose requests are answered before they return."""

    def __init__(self, cloud, target, serializer):
        self._cloud = cloud
        self._topic = target.topic
        self._serializer = serializer

    def can_send_version(self, version=None):
        return True

    def prepare(self, topic=None, **_kwargs):
        prepared = Client(self._cloud, self, self._serializer)
        prepared._topic = topic or self._topic
        return prepared

    topic = property(lambda self: self._topic)

    def call(self, ctxt, method, **arguments):
        name, _dot, host = self._topic.partition('.')
        sender = context.RequestContext.from_dict(ctxt.to_dict())
        if name == 'cinder-scheduler':
            ask = functools.partial(self._cloud.ask_scheduler, sender)
        elif name == 'cinder-volume' and host:
            ask = functools.partial(self._cloud.serve, host, sender)
        else:
            return None  # everybody
        sent = {key: jsonutils.loads(jsonutils.dumps(
            self._serializer.serialize_entity(ctxt, value)))
            for key, value in arguments.items()}
        return ask(method, **{
            key: self._serializer.deserialize_entity(ctxt, value)
            for key, value in sent.items()})

    def cast(self, ctxt, method, **arguments):
        def do():
            # Nobody hears of what becomes of it.
            try:
                self.call(ctxt, method, **arguments)
            except Exception as error:
                LOG.exception('%s fails', method)
                self._cloud.failures.append(error)
        if method == 'delete_volume':
            # Cinder relies on that it takes its time.
            self._cloud.later(do)
        else:
            do()


class Connector:
    """What Cinder itself connects disks with."""

    def __init__(self, cloud):
        self._cloud = cloud

    def connect_volume(self, data):
        self._cloud.mapped(data['device_path']).open_count += 1
        return {'path': data['device_path']}

    def disconnect_volume(self, data, *_args, **_kwargs):
        self._cloud.mapped(data['device_path']).open_count -= 1

    def check_valid_device(self, *_args):
        return True


class Services(base.Cloud):
    """Simulated nodes with a volume service on each.

    :ivar managers: Cinder's managers by ``host@backend``
    :ivar nova_extends: how Nova is told that volumes have grown
    :ivar failures: of requests that nobody waited for
    """

    def __init__(self, case, hosts=(base.A, base.B)):
        self.case = case
        self.managers = {}
        self.failures = []
        # What guests have open, by their attachments
        self._opened = {}
        # Whose process it is that runs
        self._processes = []
        self._queue = []
        patch = case.patch
        patch('cinder.rpc.get_client',
              side_effect=lambda target, version_cap=None, serializer=None:
              Client(self, target, serializer))
        patch('cinder_localstor.node.real.node',
              side_effect=lambda _configuration: self.nodes[self.here])
        patch('cinder_localstor.peers.rpc.PeerAPI',
              side_effect=lambda host, _time: base.Peers(self, host))
        patch('cinder_localstor.peers.rpc.serve')
        patch('cinder_localstor.peers.directory.own_identity',
              return_value=[])
        patch('oslo_service.loopingcall.FixedIntervalLoopingCall')
        patch('cinder_localstor.moves.scheduler.Scheduler.warm_up')
        patch('cinder_localstor.moves.scheduler.SOON', 0)
        patch('cinder_localstor.moves.queues.futurist').ThreadPoolExecutor = (
            lambda _workers: base.Inline())
        patch('cinder.volume.volume_utils.brick_get_connector',
              side_effect=lambda *_args, **_kwargs: Connector(self))
        patch('cinder.volume.volume_utils.brick_get_connector_properties',
              side_effect=lambda *_args: self.connector(self.here))
        patch('cinder.volume.volume_utils.copy_volume', side_effect=self._dd)
        patch('cinder.manager.ThreadPoolManager._add_to_threadpool')
        self.nova_extends = patch('cinder.compute.nova.API.extend_volume')
        super().__init__(case, hosts)

    @property
    def here(self):
        return self._processes[-1]

    @contextlib.contextmanager
    def process(self, host):
        """In the process of a service."""
        self._processes.append(host)
        try:
            yield
        finally:
            self._processes.pop()

    def boot(self, host):
        """Start a service, as cinder-volume does."""
        with self.process(host):
            made = manager.VolumeManager(
                volume_driver=DRIVER, service_name='local', host=host)
            made.init_host(service_id=self.services[host].id)
            assert made.driver.initialized, 'the driver does not start'
        self.managers[host] = made
        self.running[host] = made.driver._service
        self.down.discard(host)

    def reboot(self, host):
        """Cut the power of a node and start its service again."""
        self.nodes[host].cut_power()
        self.boot(host)

    def later(self, work):
        """Do something when all that is under way has ended."""
        self._queue.append(work)
        if not self._processes:
            self._run_queue()

    def _run_queue(self):
        while self._queue:
            self._queue.pop(0)()

    def ask(self, host, method, /, **arguments):
        """Let a service do something for an administrator."""
        return self.serve(host, self.ctxt, method, **arguments)

    def serve(self, host, ctxt, method, /, **arguments):
        """Let a service do something for whoever asks."""
        try:
            with self.process(host):
                return getattr(self.managers[host], method)(ctxt, **arguments)
        finally:
            if not self._processes:
                self._run_queue()

    @functools.cached_property
    def _scheduler(self):
        return scheduler.SchedulerManager()

    def ask_scheduler(self, ctxt, method, /, **arguments):
        """Let the scheduler do something."""
        return getattr(self._scheduler, method)(ctxt, **arguments)

    def driver(self, volume):
        return self.managers[self.host_of(volume)].driver

    def connector(self, host):
        return {'host': host.split('@')[0], 'ip': '192.0.2.1',
                'initiator': self.nodes[host].initiator.name()}

    def _dd(self, source, destination, mebibytes, *_args, **_kwargs):
        def node_of(path):
            return next(node for node in self.nodes.values()
                        if path.rsplit('/', 1)[1]
                        in node.device_mapper.nodes)
        for number in range(mebibytes // REGION_MIB):
            node_of(destination).write(
                destination, number, node_of(source).read(source, number))
        node_of(destination).flush(destination)

    # What Cinder's API asks of its services

    def create(self, host=base.A, **values):
        """A volume of 1 GiB with something written to each region."""
        volume = self._create(host, 1, values)
        self.content[volume.id] = {}
        if volume.status == 'available':
            for number in range(16):
                self.write(volume, number, 'first %d' % number)
        return volume

    def create_of_image(self, image, content, host=base.A, size=1):
        """A volume of an image of 1 GiB; whether that was downloaded.

        :param image: what Glance tells of it
        :param content: what it holds
        """
        downloads = []

        def download(driver, _ctxt, volume, *_arguments):
            downloads.append(volume.id)
            path = driver.local_path(volume)
            for number, written in content.items():
                self.nodes[self.here].write(path, number, written)
            self.nodes[self.here].flush(path)
        service = mock.Mock()
        service.show.return_value = image
        with mock.patch('cinder.image.glance.get_remote_image_service',
                        return_value=(service, image['id'])), \
                mock.patch('cinder.image.image_utils.TemporaryImages'), \
                mock.patch('cinder.image.image_utils.qemu_img_info',
                           return_value=mock.Mock(virtual_size=units.Gi)), \
                mock.patch('cinder.volume.volume_utils.copy_image_to_volume',
                           side_effect=download):
            volume = self._create(host, size, {}, image_id=image['id'])
        self.content[volume.id] = dict(content)
        return volume, bool(downloads)

    def _create(self, host, size, values, **asked):
        volume = objects.Volume(
            self.ctxt, host=host + '#local', size=size, status='creating',
            availability_zone='nova', use_quota=False,
            project_id='project', user_id='user',
            attach_status=fields.VolumeAttachStatus.DETACHED,
            **{'volume_type_id': self.case.vt['id'], **values})
        volume.create()
        rpcapi.VolumeAPI().create_volume(
            self.ctxt, volume, objects.RequestSpec(**asked) if asked else None,
            None, allow_reschedule=False)
        volume.refresh()
        return volume

    def create_from(self, source, host=base.A, size=1):
        """A volume of a snapshot, or a clone of a volume."""
        what = ('snapshot_id' if isinstance(source, objects.Snapshot)
                else 'source_volid')
        content = dict(self.content[source.id])
        volume = self._create(host, size, {what: source.id})
        self.content[volume.id] = content
        return volume

    def order(self, **hints):
        """A volume of 1 GiB, wherever the scheduler has it made."""
        self._publish()
        return self.refresh(api.API().create(
            self._operator(), 1, 'ordered', '', volume_type=self.case.vt,
            scheduler_hints=hints))

    def manage(self, name, host=base.A):
        """Ask for a logical volume as a volume; its row afterwards."""
        self._publish()
        volume = api.API().manage_existing(
            self._operator(), host + '#local', None, {'source-name': name},
            volume_type=self.case.vt)
        self._read_no_deleted()
        return self.refresh(volume)

    def unmanage(self, volume):
        """Ask for a volume to be Cinder's no more; its status afterwards,
        None if it is gone.
        """
        return self._delete(volume, unmanage_only=True)

    def delete_failed(self, volume):
        """As an operator does with what could not be managed."""
        return self._delete(volume)

    def _delete(self, volume, **how):
        api.API().delete(self._operator(), self.refresh(volume), **how)
        try:
            return self.refresh(volume).status
        except cinder_exception.VolumeNotFound:
            return None

    def manageable(self, host=base.A, **page):
        """What Cinder lists of a backend: the size and whether and why not it
        can be managed, by name.
        """
        found = api.API().get_manageable_volumes(
            self._operator(), host, None, limit=page.pop('limit', 100),
            sort_keys=['reference'], sort_dirs=['asc'], **page)
        return {entry['reference']['source-name']: entry for entry in found}

    def manage_snapshot(self, name, volume):
        """Ask for a logical volume as a snapshot; its row afterwards."""
        self._publish()
        snapshot = api.API().manage_existing_snapshot(
            self._operator(), {'source-name': name}, self.refresh(volume))
        self._read_no_deleted()
        return self.refresh_snapshot(snapshot)

    def unmanage_snapshot(self, snapshot):
        """As :meth:`unmanage`, of a snapshot."""
        api.API().delete_snapshot(
            self._operator(), self.refresh_snapshot(snapshot),
            unmanage_only=True)
        try:
            return self.refresh_snapshot(snapshot).status
        except cinder_exception.SnapshotNotFound:
            return None

    def manageable_snapshots(self, host=base.A):
        """As :meth:`manageable`, of snapshots."""
        found = api.API().get_manageable_snapshots(
            self._operator(), host, None, limit=100,
            sort_keys=['size'], sort_dirs=['desc'])
        return {entry['reference']['source-name']: entry for entry in found}

    def snapshot_group(self, group):
        """Take a snapshot of a group; its row afterwards."""
        taken = groups.API().create_group_snapshot(
            self._operator(), group, 'morning', '')
        return objects.GroupSnapshot.get_by_id(self.case.ctxt, taken.id)

    def delete_group_snapshot(self, snapshot):
        """Delete the snapshot of a group."""
        groups.API().delete_group_snapshot(self._operator(), snapshot)

    def make_group(self, group_snapshot_id=None, source_group_id=None):
        """Make a group of a snapshot or of a group; its row afterwards."""
        made = groups.API().create_from_src(
            self._operator(), 'made', group_snapshot_id=group_snapshot_id,
            source_group_id=source_group_id)
        return objects.Group.get_by_id(self.case.ctxt, made.id)

    def change_group(self, group, add='', remove=''):
        """Let a group have other volumes; their ids, separated by commas."""
        groups.API().update(self._operator(), group, None, None, add, remove)

    @staticmethod
    def _operator():
        return context.RequestContext('operator', 'project', is_admin=True)

    def attach(self, volume, host, kind='local', instance=base.INSTANCE):
        """Attach a volume to an instance on a host; its attachment."""
        attachment = self.reserve(volume, instance=instance)
        connection = rpcapi.VolumeAPI().attachment_update(
            self.ctxt, self.refresh(volume), self.connector(host),
            attachment.id)
        assert connection['driver_volume_type'] == kind, connection
        if kind == 'iscsi':
            self.log_in(volume, connection)
        # Nova says that it has the disk.
        self.set_status(volume, 'in-use')
        mapped = self.mapped(connection['device_path'])
        mapped.open_count += 1
        self._opened[attachment.id] = mapped
        return attachment

    def log_in(self, volume, connection):
        """As who connects does at a target, with what he was told."""
        secrets = self.nodes[self.host_of(volume)].remote.secrets
        assert connection['auth'] == secrets[self.row(volume).name]

    def mapped(self, path):
        """The node of device-mapper that a device is."""
        name = path.rsplit('/', 1)[1]
        return next(node.device_mapper.nodes[name]
                    for node in self.nodes.values()
                    if name in node.device_mapper.nodes)

    def open_count(self, volume, change):
        """A guest opens the handle of a volume, or closes it."""
        name = handles.handle_name(self.row(volume).name)
        self.nodes[self.host_of(volume)].device_mapper.nodes[
            name].open_count += change

    def detach(self, volume, attachment):
        """As Cinder's API does when an attachment is deleted."""
        self.leave(volume, attachment)
        db.volume_detached(self.ctxt, volume.id, attachment.id)

    def leave(self, volume, attachment):
        """The first half of :meth:`detach`: its row is still there."""
        self._opened.pop(attachment.id).open_count -= 1
        rpcapi.VolumeAPI().attachment_delete(
            self.ctxt, attachment.id, self.refresh(volume))

    def migrate(self, volume, to=base.B, force=True):
        """Cinder's own migration."""
        volume = self.refresh(volume)
        volume.update({'status': 'maintenance',
                       'previous_status': volume.status,
                       'migration_status': 'starting'})
        volume.save()
        rpcapi.VolumeAPI().migrate_volume(
            self.ctxt, volume, Backend(to + '#local', None, {}), force)
        return self.refresh(volume)

    def send(self, volume, to=base.B):
        """Let an administrator migrate a volume, which nobody may use
        meanwhile; its row afterwards.
        """
        self._publish()
        api.API().migrate_volume(
            context.get_admin_context(), self.refresh(volume), to + '#local',
            None, False, True)
        return self.refresh(volume)

    def retype(self, volume, new_type):
        """Let a user have a volume of another type, wherever that is; its row
        afterwards.
        """
        self._publish()
        volume = self.refresh(volume)
        api.API().retype(self._user(volume), volume, new_type['id'],
                         'on-demand')
        return self.refresh(volume)

    @staticmethod
    def _user(volume):
        """Somebody who may do with a volume what its users may."""
        return context.RequestContext('user', volume.project_id,
                                      roles=['member'])

    def extend(self, volume, size):
        """Grow a volume to `size` GiB and fill it; its row afterwards."""
        self._publish()
        volume = self.refresh(volume)
        before = volume.size
        user = self._user(volume)
        if volume.status == 'in-use':
            api.API().extend_attached_volume(user, volume, size)
        else:
            api.API().extend(user, volume, size)
        volume.refresh()
        for number in range(16 * before, 16 * volume.size):
            self.write(volume, number, 'grown %d' % number)
        return volume

    def messages(self, volume):
        """What the user of a volume is told: to do what failed, and why."""
        return [(message_field.translate_action(row['action_id']),
                 message_field.translate_detail(row['detail_id']))
                for row in db.message_get_all(self.ctxt)
                if row['resource_uuid'] == volume.id]

    def _publish(self):
        """Let the scheduler know what the services can do."""
        for host, service in self.managers.items():
            with self.process(host):
                service.publish_service_capabilities(self.ctxt)

    def give_away(self, volume, project):
        """Transfer a volume to another project; its row afterwards."""
        transfers = transfer.API()
        offered = transfers.create(self.ctxt, volume.id, 'a present')
        transfers.accept(
            context.RequestContext('somebody', project, is_admin=True),
            offered['id'], offered['auth_key'])
        return self.refresh(volume)

    def copy(self, volume, to):
        """Write the content of a volume to another."""
        for number, content in self.content[volume.id].items():
            self.write(to, number, content)

    def swap_begins(self, volume, to):
        """Cinder's own migration of a volume in use, till Nova is asked.

        :returns: the volume that Nova is asked to use, None if it is not
        """
        with mock.patch('cinder.compute.nova.API.update_server_volume'
                        ) as ask:
            volume = self.refresh(volume)
            volume.update({'previous_status': volume.status,
                           'migration_status': 'starting'})
            volume.save()
            rpcapi.VolumeAPI().migrate_volume(
                self.ctxt, volume, Backend(to + '#local', None, {}), True)
        if not ask.called:
            return None
        new = objects.Volume.get_by_id(self.ctxt, ask.call_args[0][3])
        self.content[new.id] = {}
        return new

    def swap_ends(self, volume, new):
        """Nova has copied a volume and uses the other."""
        rpcapi.VolumeAPI().migrate_volume_completion(
            self.ctxt, self.refresh(volume), self.refresh(new), False)

    def take_snapshot(self, volume):
        """A snapshot of a volume, in use or not; its row afterwards."""
        snapshot = self.snapshot_row(volume)
        rpcapi.VolumeAPI().create_snapshot(self.ctxt, self.refresh(volume),
                                           snapshot)
        return self.refresh_snapshot(snapshot)

    def revert(self, volume, snapshot):
        """Let a volume be what it was when a snapshot of it was taken."""
        snapshot.status = 'restoring'
        snapshot.save()
        self.set_status(volume, 'reverting')
        rpcapi.VolumeAPI().revert_to_snapshot(self.ctxt, self.refresh(volume),
                                              snapshot)
        self._read_no_deleted()
        self.content[volume.id] = dict(self.content[snapshot.id])
        return self.refresh(volume)

    def _read_no_deleted(self):
        # Cinder sees to it that deleted rows are read, too, when it notifies.
        self.ctxt.read_deleted = 'no'

    def refresh_snapshot(self, snapshot):
        return objects.Snapshot.get_by_id(self.ctxt, snapshot.id)

    def set_snapshot_status(self, snapshot, status):
        """As an operator does."""
        snapshot = self.refresh_snapshot(snapshot)
        snapshot.status = status
        snapshot.save()

    def delete_snapshot(self, snapshot):
        """Delete a snapshot; its status afterwards, None if it is gone."""
        snapshot = self.refresh_snapshot(snapshot)
        snapshot.status = 'deleting'
        snapshot.save()
        rpcapi.VolumeAPI().delete_snapshot(self.ctxt, snapshot)
        try:
            return self.refresh_snapshot(snapshot).status
        except cinder_exception.SnapshotNotFound:
            return None

    def delete(self, volume):
        """Delete a volume; whether its row is gone."""
        volume = self.refresh(volume)
        volume.status = 'deleting'
        volume.save()
        rpcapi.VolumeAPI().delete_volume(self.ctxt, volume)
        return volume.id not in [found.id for found in
                                 objects.VolumeList.get_all(self.ctxt)]

    def arrive(self, volume, to=base.B):
        """Bring a volume to a node by an attachment, to the end."""
        attachment = self.attach(volume, to)
        self.settle()
        return attachment
