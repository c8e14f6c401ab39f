# SPDX-License-Identifier: Apache-2.0
"""The volume driver: decides what happens, and lets the layers below do it."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
import contextlib
import enum
import functools
from typing import Any

from cinder.common import constants
from cinder import context
from cinder import exception as cinder_exception
from cinder import interface
from cinder.message import message_field
from cinder import objects
from cinder.objects import fields
from cinder.volume import driver
from cinder.volume import volume_utils
from oslo_concurrency import lockutils
from oslo_config import cfg
from oslo_log import log as logging
from oslo_service import loopingcall
from oslo_utils import excutils
from oslo_utils import units

from cinder_localstor.datapath import copies
from cinder_localstor.datapath import engines
from cinder_localstor.datapath import handles
from cinder_localstor.driver import unfinished
from cinder_localstor import exception
from cinder_localstor.moves import custodian
from cinder_localstor.moves import gate
from cinder_localstor.moves import messages
from cinder_localstor.moves import properties
from cinder_localstor.moves import service
from cinder_localstor.node import real
from cinder_localstor import opts
from cinder_localstor.peers import directory
from cinder_localstor.peers import rpc
from cinder_localstor import rows

LOG = logging.getLogger(__name__)

opts.register()

LOCAL = 'local'


class Connection(enum.Enum):
    """Which connection a connector gets."""

    LOCAL = 'the handle on this node'
    MOVE = 'the handle on a peer, which the volume moves to'
    REMOTE = 'an ordinary remote connection'


OPERATIONS = {Connection.LOCAL: gate.Operation.LOCAL,
              Connection.MOVE: gate.Operation.MOVE,
              Connection.REMOTE: gate.Operation.REMOTE}


class Pool(dict):
    """The statistics of a backend's one pool.

    The volume manager counts what it creates and deletes, which is no move,
    and puts its sum over what a driver says.
    """

    def update(self, *others: Any, **values: Any) -> None:
        """Take all of it but the manager's sum."""
        super().update(*others, **{
            **values, 'allocated_capacity_gb': self['allocated_capacity_gb']})


def _try_each(tasks: Mapping[str, Callable[[], None]]) -> None:
    """Do what is to be done periodically, what fails at the next period.

    An error would end the loop for good, and keep what comes after it waiting.

    :param tasks: by what the log says that they could not do
    """
    for name, task in tasks.items():
        try:
            task()
        except rows.UNREACHABLE as error:
            # Every few seconds, and never for a reason that is in this code
            LOG.error('Could not %(task)s: %(error)s',
                      {'task': name, 'error': str(error).partition('\n')[0]})
        except Exception:
            LOG.exception('Could not %s', name)


@interface.volumedriver
class LocalStorDriver(driver.VolumeDriver):
    """Volumes on local disks that follow their instance from node to node.

    Version history:

    .. code-block:: none

        0.1.0 - Local volumes, moves with dm-clone
    """

    VERSION = '0.1.0'
    CI_WIKI_NAME = 'cinder-localstor'

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.configuration.append_config_values(opts.driver_options())
        self._backend_name = (
            self.configuration.safe_get('volume_backend_name')
            or opts.BACKEND_NAME)
        # Tests put a simulated node under the driver, and other workers.
        self._make_node = kwargs.get('make_node', real.node)
        self._workers = kwargs.get('workers')
        self._rpc_server = None
        # Volumes with a remote connection that are not exported yet, with the
        # reason that was told
        self._unexported: dict[str, str] = {}
        # Shared volumes that were exported to nobody at the last look
        self._idle_exports: set[str] = set()
        self._watch: loopingcall.FixedIntervalLoopingCall | None = None
        self._settling: loopingcall.FixedIntervalLoopingCall | None = None

    @staticmethod
    def get_driver_options() -> list[cfg.Opt]:
        return opts.driver_options()

    # Start and end

    def do_setup(self, ctxt: context.RequestContext) -> None:
        configuration = self.configuration
        if (configuration.target_helper == 'tgtadm'
                and 'direct' not in configuration.iscsi_target_flags):
            raise exception.BufferedExport(backend=self._backend_name)
        self._node = self._make_node(configuration)
        self._remote = self._node.remote
        self._handles = handles.Handles(self._node)
        self._gate = gate.Gate(self.host,
                               configuration.localstor_peer_timeout)
        self._peers = rpc.PeerAPI(self.host,
                                  configuration.localstor_peer_timeout)
        self._directory = directory.Directory(
            self.host, configuration.localstor_host_map,
            self._peers.identify)
        self._service = service.make(
            self.host, self._node,
            engines.Engines(self._node, configuration), self._peers,
            configuration, self._workers)
        self._mover = self._service.mover
        self._unfinished = unfinished.Unfinished(
            self.host, self._node.volumes, self._mover.extend,
            self._service.custodian)

    def check_for_setup_error(self) -> None:
        self._node.volumes.check()
        if self._node.metadata is not self._node.volumes:
            self._node.metadata.check()
        self._remote.check()
        self._node.target.check()
        self._node.initiator.check()
        self._service.on_destination.check()
        self._service.recovery.recover()
        self._unfinished.end_migrations(context.get_admin_context())

    def set_initialized(self) -> None:
        super().set_initialized()
        # Cinder asks for the exports of what is in use and of no other.
        for volume_id in rows.exported(context.get_admin_context(),
                                       self.host):
            self._unexported.setdefault(volume_id, '')
        self._rpc_server = rpc.serve(self.host, self._service.answers)
        self._service.scheduler.warm_up()
        self._watch = loopingcall.FixedIntervalLoopingCall(self._watch_moves)
        self._watch.start(self.configuration.localstor_monitor_interval)
        self._settling = loopingcall.FixedIntervalLoopingCall(
            self._settle_unfinished)
        self._settling.start(unfinished.INTERVAL,
                             initial_delay=unfinished.PATIENCE)

    def _watch_moves(self) -> None:
        _try_each({
            'look after the moves': self._service.scheduler.watch,
            'export what had no handle': self._export_again})

    def _settle_unfinished(self) -> None:
        _try_each({
            'settle what was broken off': functools.partial(
                self._unfinished.settle, context.get_admin_context()),
            'end exports that nobody has': self._end_exports})

    def _end_exports(self) -> None:
        """Remove exports that nobody has any more.

        When the last two of a shared volume leave at once, each sees the
        other; and what dies while it connects leaves one that no attachment
        tells of.
        """
        ctxt = context.get_admin_context()
        idle = rows.exported(ctxt, self.host, idle=True)
        _try_each({
            'end the export of volume ' + volume_id:
                functools.partial(self._end_export, ctxt, volume_id)
            for volume_id in idle & self._idle_exports})
        self._idle_exports = idle

    def _end_export(self, ctxt: context.RequestContext, volume_id: str
                    ) -> None:
        self.remove_export(ctxt, objects.Volume.get_by_id(ctxt, volume_id))

    # Volumes

    def create_volume(self, volume: objects.Volume) -> None:
        properties.check_volume(context.get_admin_context(), volume.id)
        if volume.is_migration_target():
            self._check_swap(volume.migration_status.partition(':')[2])
        self._handles.create(copies.Copy(
            host=self.host, name=volume.name, volume_id=volume.id,
            generation=rows.FIRST_GENERATION, size=volume.size * units.Gi))

    @staticmethod
    def _check_swap(volume_id: str) -> None:
        """Refuse to take the place of a volume in use that moves: before that
        is copied Cinder asks nobody else.
        """
        ctxt = context.get_admin_context()
        if objects.VolumeAttachmentList.get_all_by_volume_id(ctxt, volume_id):
            gate.check_moves(ctxt, volume_id, gate.Operation.MIGRATE)

    def delete_volume(self, volume: objects.Volume) -> None:
        ctxt = context.get_admin_context()
        if self._service.custodian.give_back(ctxt, volume):
            return
        # Cinder deletes a volume with its snapshots even where one of these
        # could not be deleted.
        if snapshots := rows.snapshots_of(ctxt, volume.id):
            raise exception.SnapshotsRemain(volume_id=volume.id,
                                            snapshots=', '.join(snapshots))
        self._mover.adopt(ctxt, volume)
        if self._mover.discard(ctxt, volume.id):
            # What Cinder has of it may be from before it came home.
            volume = objects.Volume.get_by_id(ctxt, volume.id)
            self._handles.delete(volume.name)
        self._service.scheduler.tend_wipes()

    def extend_volume(self, volume: objects.Volume, new_size: int) -> None:
        ctxt = context.get_admin_context()
        with self._unfinished.under_way(volume.id):
            if unfinished.is_given_up(ctxt, volume.id):
                raise exception.GivenUp(volume_id=volume.id, size=new_size)
            self._mover.extend(ctxt, volume, new_size * units.Gi)

    def migrate_volume(self, ctxt: context.RequestContext,
                       volume: objects.Volume, host: dict[str, Any]
                       ) -> tuple[bool, None]:
        """Bring a volume to another of our backends, where it is usable when
        this returns.

        To any other backend Cinder copies it.
        """
        # A user may ask for it, by another type.
        ctxt = ctxt.elevated()
        backend = volume_utils.extract_host(host['host'])
        location = str(host['capabilities'].get('location_info'))
        if (backend == self.host
                or not location.startswith(
                    directory.LOCATION % (backend, ''))):
            self._wait_for_end(ctxt, volume)
            return False, None
        volume = objects.Volume.get_by_id(ctxt, volume.id)
        self._check_no_export(volume)
        rows.note_migration(ctxt, volume.id, self.host)
        self._mover.begin(
            ctxt, volume, objects.Service.get_by_args(
                ctxt, backend, constants.VOLUME_BINARY), host['host'])
        return True, None

    def before_volume_copy(self, ctxt: context.RequestContext,
                           src_vol: objects.Volume, dest_vol: objects.Volume,
                           remote: str | None = None) -> None:
        """Let the moves of a volume end that Cinder is going to copy."""
        self._wait_for_end(ctxt.elevated(), src_vol)

    def _wait_for_end(self, ctxt: context.RequestContext,
                      volume: objects.Volume) -> None:
        with self._gate.enter(ctxt, volume.id, gate.Operation.MIGRATE):
            pass  # it is bound by its migration_status

    def retype(self, ctxt: context.RequestContext, volume: objects.Volume,
               new_type: objects.VolumeType, diff: dict[str, Any],
               host: dict[str, Any]) -> tuple[bool, None]:
        """Let a volume of this backend be of another type of it.

        Nothing of it changes here.  Limits are heeded where it is used.
        """
        properties.check(new_type.name, new_type.extra_specs or {})
        with self._unfinished.under_way(volume.id):
            self._gate.check(ctxt, volume.id, gate.Operation.RETYPE)
        return True, None

    def update_migrated_volume(self, ctxt: context.RequestContext,
                               volume: objects.Volume,
                               new_volume: objects.Volume,
                               original_volume_status: str
                               ) -> dict[str, str | None]:
        """Cinder has copied a volume to a new one, which takes its place.

        The new copy is the volume's from here on, of its generation.
        """
        self._handles.belong(copies.Copy(
            host=self.host, name=new_volume.name, volume_id=volume.id,
            generation=rows.generation_of(ctxt, volume.id),
            size=volume.size * units.Gi))
        return {'_name_id': new_volume.name_id,
                'provider_location': new_volume.provider_location}

    def local_path(self, volume: objects.Volume) -> str:
        return self._handles.path(volume.name)

    def _update_volume_stats(self) -> None:
        capacity = self._node.volumes.capacity()
        total = round(capacity.total / units.Gi, 2)
        self._stats = {
            'volume_backend_name': self._backend_name,
            'vendor_name': 'Open Source',
            'driver_version': self.VERSION,
            'storage_protocol': constants.ISCSI,
            'shared_targets': False,
            # What one node has in its cache of images, all can clone.
            'clone_across_pools': True,
            'pools': [Pool({
                'pool_name': self._backend_name,
                'total_capacity_gb': total,
                'allocated_capacity_gb': rows.allocated(
                    context.get_admin_context(), self.host),
                'free_capacity_gb': int(capacity.free / units.Gi * 100) / 100,
                'provisioned_capacity_gb': round(
                    capacity.provisioned / units.Gi, 2),
                'reserved_percentage':
                    self.configuration.reserved_percentage,
                'max_over_subscription_ratio':
                    self.configuration.max_over_subscription_ratio,
                'thin_provisioning_support': capacity.thin,
                'thick_provisioning_support': not capacity.thin,
                'total_volumes': capacity.volumes,
                'multiattach': True,
                'consistent_group_snapshot_enabled': True,
                'QoS_support': False,
                'online_extend_support':
                    self.configuration.localstor_online_extend,
                'filter_function': self.get_filter_function(),
                'goodness_function': self.get_goodness_function(),
                'location_info': directory.LOCATION % (
                    self.host, self.configuration.volume_group),
                'backend_state': 'up',
            })],
        }

    def _init_vendor_properties(self) -> tuple[dict[str, Any], str]:
        """What Cinder's API tells operators of our extra specs."""
        return {key: known.described() for key, known
                in properties.PROPERTIES.items()}, properties.VENDOR

    # Groups and backups

    def update_group(self, ctxt: context.RequestContext, group: objects.Group,
                     add_volumes: list[objects.Volume] | None = None,
                     remove_volumes: list[objects.Volume] | None = None
                     ) -> tuple[None, None, None]:
        """Take no volume into a group that may yet leave the node."""
        with self._unfinished.under_way(group.id):
            for volume in add_volumes or ():
                self._gate.check(ctxt, volume.id, gate.Operation.GROUP)
        return None, None, None

    def create_group_snapshot(
            self, ctxt: context.RequestContext,
            group_snapshot: objects.GroupSnapshot,
            snapshots: objects.SnapshotList
    ) -> tuple[dict[str, str], list[dict[str, Any]]]:
        """Take snapshots of one moment of all volumes of a group.

        Where the group's type does not want that, Cinder takes one after the
        other.
        """
        self._unfinished.leave_group_snapshot(group_snapshot)
        if not volume_utils.is_group_a_cg_snapshot_type(group_snapshot):
            raise NotImplementedError
        ctxt = context.get_admin_context()
        with self._group_snapshot_told(snapshots):
            places = self._service.keeper.create_together(ctxt, snapshots)
        status = fields.SnapshotStatus.AVAILABLE
        return {'status': status}, [
            {'id': snapshot_id, 'status': status, **place}
            for snapshot_id, place in places.items()]

    def delete_group_snapshot(
            self, ctxt: context.RequestContext,
            group_snapshot: objects.GroupSnapshot,
            snapshots: objects.SnapshotList
    ) -> tuple[dict[str, str], list[dict[str, Any]]]:
        """Let Cinder delete one snapshot after the other."""
        self._unfinished.leave_group_snapshot(group_snapshot)
        raise NotImplementedError

    def delete_consistencygroup(
            self, ctxt: context.RequestContext, group: Any,
            volumes: list[objects.Volume]
    ) -> tuple[dict[str, str], list[dict[str, Any]]]:
        """Let a group go of Cinder's type for those of former releases.

        The driver makes none, so that it has no volumes.
        """
        return {'status': fields.GroupStatus.DELETED}, []

    @staticmethod
    @contextlib.contextmanager
    def _group_snapshot_told(snapshots: objects.SnapshotList
                             ) -> Iterator[None]:
        """Tell the users of snapshots that none of them was taken.

        Cinder does that only for those of no group.
        """
        with contextlib.ExitStack() as users:
            for snapshot in snapshots:
                users.enter_context(messages.told(
                    snapshot, message_field.Action.SNAPSHOT_CREATE,
                    message_field.Detail.SNAPSHOT_CREATE_ERROR,
                    lambda: True))
            try:
                yield
            except cinder_exception.CinderException:
                raise
            except Exception as error:
                # Cinder would leave the group as it is, or, by
                # NotImplementedError, take one after the other.
                raise exception.LocalStorException(reason=error) from error

    def get_backup_device(self, ctxt: context.RequestContext,
                          backup: objects.Backup) -> tuple[Any, bool]:
        volume = self._gate.check(ctxt, backup.volume_id,
                                  gate.Operation.BACKUP)
        if volume.previous_status == 'in-use' and not backup.snapshot_id:
            # Cinder reads a clone of it.
            self._gate.check(ctxt, volume.id, gate.Operation.CLONE)
        return super().get_backup_device(ctxt, backup)

    # Snapshots

    def create_snapshot(self, snapshot: objects.Snapshot
                        ) -> dict[str, str | None]:
        return self._service.keeper.create(context.get_admin_context(),
                                           snapshot)

    def delete_snapshot(self, snapshot: objects.Snapshot) -> None:
        ctxt = context.get_admin_context()
        if self._service.custodian.give_back_snapshot(ctxt, snapshot):
            return
        with self._unfinished.under_way(snapshot.id), self._busy_told():
            self._service.keeper.delete(ctxt, snapshot)

    def snapshot_revert_use_temp_snapshot(self) -> bool:
        # The volume is as it was until it can be used as it is to be.
        return False

    def revert_to_snapshot(self, ctxt: context.RequestContext,
                           volume: objects.Volume, snapshot: objects.Snapshot
                           ) -> None:
        ctxt = context.get_admin_context()
        with (self._unfinished.under_way(volume.id),
              self._reverted_or_as_it_was(ctxt, volume)):
            self.remove_export(ctxt,
                               objects.Volume.get_by_id(ctxt, volume.id))
            self._service.copier.revert(ctxt, volume, snapshot)

    @staticmethod
    @contextlib.contextmanager
    def _reverted_or_as_it_was(ctxt: context.RequestContext,
                               volume: objects.Volume) -> Iterator[None]:
        """Let a user go on with a volume that could not be reverted.

        Cinder would let it be in error, though nothing was done to it.
        """
        with messages.told(
                volume, message_field.Action.CREATE_VOLUME_FROM_BACKEND,
                message_field.Detail.DRIVER_FAILED_CREATE, lambda: True):
            before = objects.Volume.get_by_id(ctxt, volume.id).name
            try:
                yield
            except Exception as error:
                if objects.Volume.get_by_id(ctxt, volume.id).name != before:
                    LOG.warning(
                        'Volume %(volume)s is reverted; then %(error)s',
                        {'volume': volume.id, 'error': error})
                    return
                # Cinder's own line does not come to be then.
                LOG.error('Volume %(volume)s could not be reverted, and is '
                          'as it was: %(error)s',
                          {'volume': volume.id, 'error': error})
                volume.update_single_status_where('available', 'reverting')
                if isinstance(error, (NotImplementedError, AttributeError)):
                    # For Cinder these say that it is to copy itself.
                    raise exception.LocalStorException(
                        reason=error) from error
                raise
            finally:
                rows.note_revert(ctxt, volume.id, '')

    @staticmethod
    @contextlib.contextmanager
    def _busy_told() -> Iterator[None]:
        """Let Cinder's user hear of a snapshot that stays as it was."""
        try:
            yield
        except cinder_exception.SnapshotIsBusy as error:
            # Cinder logs that it is busy and no more, and finds what it tells
            # the user by the very name of this class.
            LOG.warning('%s', error)
            raise cinder_exception.SnapshotIsBusy(str(error)) from error

    def create_volume_from_snapshot(self, volume: objects.Volume,
                                    snapshot: objects.Snapshot
                                    ) -> dict[str, str]:
        ctxt = context.get_admin_context()
        by_user = volume.snapshot_id == snapshot.id
        with self._creation_told(volume, by_user):
            if by_user:
                properties.check_volume(ctxt, volume.id)
            return self._service.copier.from_snapshot(ctxt, volume, snapshot)

    def create_cloned_volume(self, volume: objects.Volume,
                             src_vref: objects.Volume) -> dict[str, str]:
        ctxt = context.get_admin_context()
        by_user = volume.source_volid == src_vref.id
        with self._creation_told(volume, by_user):
            if by_user:
                properties.check_volume(ctxt, volume.id)
            return self._service.copier.from_volume(ctxt, volume, src_vref)

    @staticmethod
    def _creation_told(volume: objects.Volume, by_user: bool
                       ) -> contextlib.AbstractContextManager:
        """Tell the user of a volume that it could not be made.

        What Cinder makes for a while, to revert or to back a volume up, has no
        user.  Neither has what it makes of its own copies of images, and loads
        the image where that fails.
        """
        return messages.told(
            volume, message_field.Action.CREATE_VOLUME_FROM_BACKEND,
            message_field.Detail.DRIVER_FAILED_CREATE, lambda: by_user)

    # What is managed and unmanaged

    def manage_existing_get_size(self, volume: objects.Volume,
                                 existing_ref: custodian.Reference) -> int:
        return self._service.custodian.size(
            context.get_admin_context(), volume, existing_ref)

    def manage_existing(self, volume: objects.Volume,
                        existing_ref: custodian.Reference) -> None:
        ctxt = context.get_admin_context()
        properties.check_volume(ctxt, volume.id)
        self._service.custodian.manage(ctxt, volume, existing_ref)

    def unmanage(self, volume: objects.Volume) -> None:
        self._service.custodian.unmanage(context.get_admin_context(), volume)

    def get_manageable_volumes(
            self, cinder_volumes: objects.VolumeList,
            marker: dict[str, str] | str | None, limit: int,
            offset: int | None, sort_keys: list[str], sort_dirs: list[str],
    ) -> list[dict[str, Any]]:
        return volume_utils.paginate_entries_list(
            self._service.custodian.manageable_volumes(
                context.get_admin_context()),
            marker, limit, offset, sort_keys, sort_dirs)

    def manage_existing_snapshot_get_size(
            self, snapshot: objects.Snapshot,
            existing_ref: custodian.Reference) -> int:
        return self._service.custodian.snapshot_size(
            context.get_admin_context(), snapshot, existing_ref)

    def manage_existing_snapshot(self, snapshot: objects.Snapshot,
                                 existing_ref: custodian.Reference
                                 ) -> dict[str, str | None]:
        return self._service.custodian.manage_snapshot(
            context.get_admin_context(), snapshot, existing_ref)

    def unmanage_snapshot(self, snapshot: objects.Snapshot) -> None:
        with self._busy_told():
            self._service.custodian.unmanage_snapshot(
                context.get_admin_context(), snapshot)

    def get_manageable_snapshots(
            self, cinder_snapshots: objects.SnapshotList,
            marker: dict[str, str] | str | None, limit: int,
            offset: int | None, sort_keys: list[str], sort_dirs: list[str],
    ) -> list[dict[str, Any]]:
        return volume_utils.paginate_entries_list(
            self._service.custodian.manageable_snapshots(
                context.get_admin_context()),
            marker, limit, offset, sort_keys, sort_dirs)

    # Connections

    def validate_connector(self, connector: dict[str, Any]) -> None:
        ctxt = context.get_admin_context()
        if (self._directory.find(ctxt, connector) is None
                and self.configuration.localstor_unknown_host == 'refuse'):
            raise exception.UnknownHost(
                missing='host', host=connector.get('host'),
                ip=connector.get('ip'),
                backend=self._backend_name,
                known=', '.join(sorted(self._directory.services(ctxt))))

    def _choose(self, volume: objects.Volume, connector: dict[str, Any]
                ) -> tuple[Connection, str | None]:
        ctxt = context.get_admin_context()
        peer = self._directory.find(ctxt, connector)
        if peer == self.host:
            return Connection.LOCAL, peer
        if (peer is None or gate.is_bound(volume)
                or self._is_shared(ctxt, volume)
                or not self._is_for_instance(ctxt, volume)):
            return Connection.REMOTE, peer
        return Connection.MOVE, peer

    @staticmethod
    def _is_shared(ctxt: context.RequestContext, volume: objects.Volume
                   ) -> bool:
        """Whether several instances have a volume, so that it can't follow
        one of them.
        """
        return volume.multiattach and (
            bool(volume.provider_location) or 1 < len({
                row['instance_uuid']
                for row in rows.attachments(ctxt, volume.id)}))

    @staticmethod
    def _is_for_instance(ctxt: context.RequestContext, volume: objects.Volume
                         ) -> bool:
        """Whether an instance waits for a connection.

        A backup or an image upload connects without an attachment, others
        attach without an instance. What an instance gets that is shelved
        counts as attached, as Nova completes it, and has been nowhere; a
        client of the API that knows no attachments notes no connector
        either, but a mountpoint.
        """
        waits = (fields.VolumeAttachStatus.RESERVED,
                 fields.VolumeAttachStatus.ATTACHING)
        return any(row['instance_uuid'] and (
            row['status'] in waits
            or not row['connector'] and not row['mountpoint'])
            for row in rows.attachments(ctxt, volume.id))

    def create_export(self, ctxt: context.RequestContext,
                      volume: objects.Volume, connector: dict[str, Any]
                      ) -> dict[str, str] | None:
        # Refused here and not in initialize_connection: after a failure there
        # Cinder takes the volume's export away, under whoever uses it.
        with self._attachment_told(volume):
            return self._create_export(ctxt, volume, connector)

    def _attachment_told(self, volume: objects.Volume
                         ) -> contextlib.AbstractContextManager:
        """Tell the user of a volume that it could not be attached.

        What connects without an instance tells of it in its own way.
        """
        return messages.told(
            volume, message_field.Action.ATTACH_VOLUME,
            message_field.Detail.ATTACH_ERROR,
            lambda: self._is_for_instance(context.get_admin_context(),
                                          volume))

    def _create_export(self, ctxt: context.RequestContext,
                       volume: objects.Volume, connector: dict[str, Any]
                       ) -> dict[str, str] | None:
        volume = objects.Volume.get_by_id(ctxt, volume.id)
        kind, peer = self._choose(volume, connector)
        operation = OPERATIONS[kind]
        if kind is Connection.LOCAL and self._is_shared(ctxt, volume):
            # It may yet leave with an instance that another one would stay
            # without.
            operation = gate.Operation.REMOTE
        volume = self._gate.check(ctxt, volume.id, operation)
        if kind is Connection.MOVE and peer:
            self._check_move(ctxt, volume, peer)
        if kind is Connection.REMOTE:
            return self._export(ctxt, volume.id)
        return None

    def _export(self, ctxt: context.RequestContext, volume_id: str
                ) -> dict[str, str]:
        """Export a volume for ordinary connections; the fields of its row
        that say how.

        They are recorded before: nobody would find the export of a process
        that dies after it has made it, and Cinder, which records them only
        after us, would have another secret made for whoever comes meanwhile.
        """
        with self._export_lock(volume_id):
            volume = objects.Volume.get_by_id(ctxt, volume_id)
            is_new = not volume.provider_location
            if is_new:
                planned = self._remote.describe(ctxt, volume)
                rows.record_export(ctxt, volume_id, planned)
                volume.update(planned)
            try:
                self._bring_back_handle(ctxt, volume)
                export = self._remote.export(ctxt, volume,
                                             self.local_path(volume))
            except Exception:
                with excutils.save_and_reraise_exception():
                    if is_new:
                        self._unexport(ctxt, volume)
            rows.record_export(ctxt, volume_id, export)
        return export

    @staticmethod
    def _export_lock(volume_id: str) -> contextlib.AbstractContextManager:
        """What no export is made or removed under."""
        return lockutils.lock('localstor-export-' + volume_id)

    def ensure_export(self, ctxt: context.RequestContext,
                      volume: objects.Volume) -> None:
        if not volume.provider_location:
            return
        if self._mover.is_arriving(ctxt, volume):
            # Its handle is built when its source is there again.
            self._unexported.setdefault(volume.id, '')
        else:
            self._ensure(ctxt, volume)

    def _ensure(self, ctxt: context.RequestContext, volume: objects.Volume
                ) -> None:
        """Export a volume as before a restart, to who was connected then."""
        with self._export_lock(volume.id):
            # Who has left meanwhile has taken it away.
            volume = objects.Volume.get_by_id(ctxt, volume.id)
            if not volume.provider_location:
                return
            connected = self._remote_ones(ctxt,
                                          rows.attachments(ctxt, volume.id))
            self._remote.ensure(ctxt, volume, self.local_path(volume),
                                [row['connector'] for row in connected])

    def _export_again(self) -> None:
        """Export what had to wait for its handle at the start."""
        ctxt = context.get_admin_context()
        for volume_id in tuple(self._unexported):
            try:
                volume = objects.Volume.get_by_id(ctxt, volume_id)
                if (volume.provider_location
                        and volume_utils.extract_host(volume.host)
                        == self.host):
                    self._handles.check_there(volume.name)
                    self._ensure(ctxt, volume)
            except cinder_exception.VolumeNotFound:
                pass  # it was deleted
            except Exception as error:
                if self._unexported[volume_id] != str(error):
                    self._unexported[volume_id] = str(error)
                    LOG.warning('Volume %(volume)s is not exported yet: '
                                '%(error)s',
                                {'volume': volume_id, 'error': error})
                continue
            del self._unexported[volume_id]

    def remove_export(self, ctxt: context.RequestContext,
                      volume: objects.Volume) -> None:
        # Cinder wants it gone whenever a connection has failed or an image was
        # uploaded, though others may be connected, or about to be.
        if not volume.provider_location:
            return
        with self._export_lock(volume.id):
            attachments = rows.attachments(ctxt, volume.id)
            coming = [row for row in attachments
                      if volume.multiattach and not row['connector']]
            if not self._remote_ones(ctxt, attachments) and len(coming) < 2:
                self._unexport(ctxt, volume)

    def _unexport(self, ctxt: context.RequestContext, volume: objects.Volume
                  ) -> None:
        self._remote.unexport(ctxt, volume)
        # Cinder gives a row and no object where it has the id only, as after a
        # backup; a row does not save itself.
        rows.forget_export(ctxt, volume.id)
        volume.provider_location = None
        volume.provider_auth = None
        # What Cinder's own driver has exported by LIO nobody else could open.
        self._bring_back_handle(ctxt, volume)

    def _bring_back_handle(self, ctxt: context.RequestContext,
                           volume: objects.Volume) -> None:
        """Make the handle of a volume that lives here, if it is missing."""
        if not self._handles.is_there(volume.name):
            self._service.recovery.restore(ctxt, volume.id)

    def _remote_ones(self, ctxt: context.RequestContext,
                     attachments: list[dict[str, Any]]
                     ) -> list[dict[str, Any]]:
        """Those of some attachments that are connected from elsewhere, or
        from here as from elsewhere: by Cinder's own driver.
        """
        return [row for row in attachments if row['connector'] and (
            row['kind'] not in ('', LOCAL)
            or self._directory.find(ctxt, row['connector']) != self.host)]

    def initialize_connection(self, volume: objects.Volume,
                              connector: dict[str, Any], **kwargs: Any
                              ) -> dict[str, Any]:
        with self._attachment_told(volume):
            return self._connect(volume, connector)

    def _connect(self, volume: objects.Volume, connector: dict[str, Any]
                 ) -> dict[str, Any]:
        present = objects.Volume.get_by_id(context.get_admin_context(),
                                           volume.id)
        kind, peer = self._choose(present, connector)
        if kind is Connection.REMOTE:
            if present.provider_location:
                return self._remote.connect(present, connector)
            # It was another kind when Cinder had it exported.
            if self._is_for_instance(context.get_admin_context(), present):
                # Another instance has come since.
                return self._connect_late(volume, connector)
            # Whoever waited has gone since.
            raise exception.NotWanted(volume_id=volume.id, host=self.host,
                                      peer=connector.get('host'))
        # What kept it from being made when the node started, or when an
        # export ended, may be over.
        self._bring_back_handle(context.get_admin_context(), present)
        copy = present.name
        if kind is Connection.LOCAL:
            copy = self._mover.stay(context.get_admin_context(), volume.id)
            self._handles.check_there(copy)
        if kind is Connection.MOVE and peer:
            try:
                copy = self._move(present, peer)
            except (exception.NotEnoughSpace, exception.PeerFailed) as error:
                if not self._connects_instead(error):
                    raise
                LOG.warning('Volume %(volume)s stays on %(host)s: %(error)s',
                            {'volume': volume.id, 'host': self.host,
                             'error': error})
                return self._connect_late(volume, connector)
        path = self._handles.path(copy)
        if kind is Connection.LOCAL and self._will_be_decrypted(present):
            path = self._handles.link(copy)
        data: dict[str, Any] = {'device_path': path}
        if self._node.volumes.thin:
            # Of others Cinder says what report_discard_supported says.
            data['discard'] = True
        return {'driver_volume_type': LOCAL, 'data': data}

    @staticmethod
    def _will_be_decrypted(volume: objects.Volume) -> bool:
        """Whether Cinder itself connects an encrypted volume, to copy what it
        holds, or to write an image to it.

        os-brick replaces the device that it is given by a link to the one that
        it decrypts to, and takes what it finds in /dev/mapper for a device
        that it has made itself.
        """
        return bool(volume.encryption_key_id) and (
            volume.status == 'downloading' or not rows.attachments(
                context.get_admin_context(), volume.id))

    def _connect_late(self, volume: objects.Volume,
                      connector: dict[str, Any]) -> dict[str, Any]:
        """An ordinary connection to what Cinder has not had exported."""
        ctxt = context.get_admin_context()
        self._gate.check(ctxt, volume.id, gate.Operation.REMOTE)
        volume.update(self._export(ctxt, volume.id))
        return self._remote.connect(volume, connector)

    def _move(self, volume: objects.Volume, peer: str) -> str:
        """Bring a volume to a peer; the name of its copy there."""
        ctxt = context.get_admin_context()
        self._mover.begin(ctxt, volume, self._check_move(ctxt, volume, peer))
        return objects.Volume.get_by_id(ctxt, volume.id).name

    def _check_move(self, ctxt: context.RequestContext,
                    volume: objects.Volume, peer: str) -> objects.Service:
        """The service of a peer, if a volume may move there.

        No scheduler has chosen it: whoever may attach the volume names a
        connector, and the connector a node.

        :raises VolumeConnectedElsewhere: a remote connection would lose the
            copy that it reads
        :raises PeerDisabled: an operator wants nothing to come there
        :raises PeerInAnotherZone: nothing may cross zones
        """
        self._check_no_export(volume)
        service = objects.Service.get_by_args(ctxt, peer,
                                              constants.VOLUME_BINARY)
        if service.disabled:
            raise exception.PeerDisabled(
                volume_id=volume.id, host=self.host, peer=peer,
                reason=service.disabled_reason or 'no reason given')
        if (service.availability_zone != volume.availability_zone
                and not self.configuration.localstor_cross_az_attach):
            raise exception.PeerInAnotherZone(
                volume_id=volume.id, host=self.host, peer=peer,
                zone=volume.availability_zone,
                other=service.availability_zone)
        return service

    @staticmethod
    def _check_no_export(volume: objects.Volume) -> None:
        if volume.provider_location:
            raise exception.VolumeConnectedElsewhere(
                volume_id=volume.id, host='another host')

    def _connects_instead(self, error: Exception) -> bool:
        return (self.configuration.localstor_no_space == 'remote'
                and issubclass(exception.kind_of(error),
                               exception.NotEnoughSpace))

    def terminate_connection(self, volume: objects.Volume,
                             connector: dict[str, Any] | None,
                             **kwargs: Any) -> bool:
        """Whether others are still connected, so that the export stays."""
        ctxt = context.get_admin_context()
        self._gate.check(ctxt, volume.id, gate.Operation.DETACH)
        move = self._mover.of_volume(ctxt, volume.id)
        if move is not None:
            # Who has left is read from the attachments, not from this call:
            # it may come twice, late, or never.
            self._service.scheduler.look_soon(move)
        with self._export_lock(volume.id):
            return self._disconnect(ctxt, volume, connector)

    def _disconnect(self, ctxt: context.RequestContext,
                    volume: objects.Volume,
                    connector: dict[str, Any] | None) -> bool:
        others = self._others(ctxt, volume, connector)
        if not volume.provider_location:
            return any(row['connector'] for row in others)
        remote = self._remote_ones(ctxt, others)
        # Cinder notes a connector only after all is done.
        coming = [row for row in others
                  if volume.multiattach and not row['connector']]
        if (connector and not coming
                and self._directory.find(ctxt, connector) != self.host
                and connector.get('initiator') not in {
                    row['connector'].get('initiator') for row in remote}):
            self._remote.disconnect(volume, connector)
        if not remote and not coming:
            self._unexport(ctxt, volume)
        return bool(remote or coming)

    @staticmethod
    def _others(ctxt: context.RequestContext, volume: objects.Volume,
                connector: dict[str, Any] | None) -> list[dict[str, Any]]:
        """A volume's attachments but for one that leaves."""
        found = rows.attachments(ctxt, volume.id)
        leaving = [row for row in found if row['connector']
                   and connector in (row['connector'], None)][:1]
        return [row for row in found if row not in leaving]
