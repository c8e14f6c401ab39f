# SPDX-License-Identifier: Apache-2.0
"""What a user and Nova do with volumes, through Cinder's API.

There is no Nova: an instance is an id, and attaching takes the calls that
Nova makes, with the connector that os-brick would give on the node.
"""

import dataclasses
import json
import time
from typing import Any
import uuid

from keystoneauth1 import exceptions
import tenacity

from lab import cloud as clouds
from lab import configuration
from lab import node as nodes

# Seconds
PATIENCE = 180


class VolumeError(Exception):
    """A volume came into a state that nobody asked for."""


@dataclasses.dataclass
class Attachment:
    """An attachment, and the device it gives on a node."""

    id: str
    volume_id: str
    instance_id: str | None
    node: nodes.Node | None
    connection: dict[str, Any]

    @property
    def device(self) -> str:
        """The path of the volume on the node."""
        return self.connection['device_path']


class User:
    """Somebody with a project, volumes and instances."""

    def __init__(self, cloud: clouds.Cloud) -> None:
        self.cloud = cloud
        self._api = cloud.volume_api

    def create_volume(self, size: int = 1, volume_type: str = 'local',
                      node: str | None = None, image: str | None = None
                      ) -> str:
        """Create a volume and wait for it; its id.

        :param size: GiB
        :param node: where; the scheduler chooses if it is None
        :param image: what is on it; nothing if it is None
        """
        created = self.request_volume('of-a-user', size, volume_type, node,
                                      image)
        self.wait_for_status(created, 'available')
        return created

    def request_volume(self, name: str, size: int, volume_type: str,
                       node: str | None = None, image: str | None = None,
                       **source: str) -> str:
        """Ask for a volume of `size` GiB and don't wait; its id.

        :param source: ``snapshot_id`` or ``source_volid``
        """
        request: dict[str, Any] = {'volume': {
            'size': size, 'volume_type': volume_type, 'name': name,
            'imageRef': image, **source}}
        if node:
            request['OS-SCH-HNT:scheduler_hints'] = {'query': json.dumps(
                ['=', '$host', configuration.pool(node, volume_type)])}
        return self._api.post('/volumes', json=request).json()['volume']['id']

    def request_deletion(self, volume_id: str) -> None:
        """Ask for the end of a volume and don't wait."""
        self._api.delete('/volumes/' + volume_id)

    def find(self, volume_id: str) -> dict[str, Any] | None:
        """The volume as :meth:`show` has it; None if there is none."""
        try:
            return self.show(volume_id)
        except exceptions.NotFound:
            return None

    def status(self, volume_id: str) -> str | None:
        """Status of a volume; None if there is none."""
        volume = self.find(volume_id)
        return volume and volume['status']

    def show(self, volume_id: str) -> dict[str, Any]:
        """The volume as the API shows it to an administrator."""
        return self._api.get('/volumes/' + volume_id).json()['volume']

    def host(self, volume_id: str) -> str:
        """Name of the node that a volume lives on."""
        host = self.show(volume_id)['os-vol-host-attr:host']
        return host.partition('@')[0]

    def rooms(self) -> dict[str, float]:
        """GiB that the scheduler takes for free, by ``host@backend#pool``."""
        return {pool['name']: float(pool['capabilities']['free_capacity_gb'])
                for pool in self._api.get(
                    '/scheduler-stats/get_pools?detail=True').json()['pools']}

    def copy_of(self, volume_id: str) -> str:
        """Id that the name of a volume's logical volume has."""
        return (self.show(volume_id)['os-vol-mig-status-attr:name_id']
                or volume_id)

    def messages(self, volume_id: str) -> list[str]:
        """What Cinder has told the volume's user of failures, in words."""
        return [message['user_message'] for message in
                self._api.get('/messages').json()['messages']
                if message['resource_uuid'] == volume_id]

    def volumes(self) -> list[dict[str, Any]]:
        """All volumes of all projects that the API lists, in detail."""
        return self._api.get('/volumes/detail?all_tenants=1').json()[
            'volumes']

    def wait_for_status(self, volume_id: str, status: str,
                        timeout: float = PATIENCE) -> None:
        """:raises VolumeError: it failed, or took more than `timeout` s"""
        end = time.monotonic() + timeout
        while True:
            found = self.show(volume_id)['status']
            if found == status:
                return
            if 'error' in found or time.monotonic() > end:
                raise VolumeError('volume %s is %s, not %s' % (
                    volume_id, found, status))
            time.sleep(0.1)

    def extend_volume(self, volume_id: str, size: int) -> None:
        """Grow a volume to `size` GiB, attached or not, and wait for it."""
        before = self.show(volume_id)['status']
        self.extend(volume_id, size)
        self.wait_for_status(volume_id, before)
        found = self.show(volume_id)['size']
        if found != size:
            raise VolumeError('volume %s has %s GiB, not %d' % (
                volume_id, found, size))

    def delete_volume(self, volume_id: str, timeout: float = PATIENCE
                      ) -> None:
        """Delete a volume and wait until it is gone."""
        self.request_deletion(volume_id)

        @tenacity.retry(wait=tenacity.wait_fixed(0.2),
                        stop=tenacity.stop_after_delay(timeout),
                        retry=tenacity.retry_if_result(bool), reraise=True)
        def is_there() -> bool:
            found = self.status(volume_id)
            if found is not None and 'error' in found:
                raise VolumeError('volume %s is %s' % (volume_id, found))
            return found is not None
        is_there()

    def request_snapshot(self, volume_id: str, name: str = 'of-a-user'
                         ) -> str:
        """Ask for a snapshot of a volume, in use or not; its id."""
        return self._api.post('/snapshots', json={'snapshot': {
            'volume_id': volume_id, 'name': name, 'force': True}}).json()[
                'snapshot']['id']

    def snapshots(self) -> dict[str, str]:
        """Statuses of all snapshots, by their ids."""
        return {row['id']: row['status']
                for row in self.snapshots_in_detail()}

    def snapshots_in_detail(self) -> list[dict[str, Any]]:
        """All snapshots of all projects."""
        return self._api.get('/snapshots?all_tenants=1').json()['snapshots']

    def request_snapshot_deletion(self, snapshot_id: str) -> None:
        """Ask for the deletion of a snapshot."""
        self._api.delete('/snapshots/' + snapshot_id)

    def make_type(self, name: str, **extra_specs: str) -> None:
        """Make a volume type."""
        self._api.post('/types', json={'volume_type': {
            'name': name, 'extra_specs': extra_specs}})

    def delete_type(self, name: str) -> None:
        """Delete a volume type."""
        self._api.delete('/types/' + self._type_id(name))

    def _type_id(self, name: str) -> str:
        found, = [kind['id'] for kind in
                  self._api.get('/types').json()['volume_types']
                  if kind['name'] == name]
        return found

    def encrypt_type(self, volume_type: str, encrypted: bool = True) -> None:
        """Let volumes of a type be encrypted from now on, or no more."""
        path = '/types/%s/encryption' % self._type_id(volume_type)
        if encrypted:
            self._api.post(path, json={'encryption': {
                'provider': 'luks', 'cipher': 'aes-xts-plain64',
                'key_size': 256, 'control_location': 'front-end'}})
        else:
            self._api.delete(path + '/provider')

    def limit_type(self, volume_type: str, **limits: str) -> str:
        """Let volumes of a type be limited by who uses them from now on; id
        of the limits.

        :param limits: such as ``total_iops_sec``
        """
        limited = self._api.post('/qos-specs', json={'qos_specs': {
            'name': 'of-a-user', 'consumer': 'front-end', **limits}}).json()[
                'qos_specs']['id']
        self._api.get('/qos-specs/%s/associate?vol_type_id=%s' % (
            limited, self._type_id(volume_type)))
        return limited

    def delete_limits(self, limits_id: str) -> None:
        """Let no volumes be limited so any more."""
        self._api.delete('/qos-specs/%s?force=True' % limits_id)

    def disable_service(self, host: str) -> None:
        """Let a cinder-volume get nothing new, as an administrator does.

        :param host: ``host@backend``
        """
        self._api.put('/os-services/disable-log-reason', json={
            'binary': 'cinder-volume', 'host': host,
            'disabled_reason': 'out of service'})

    def make_group(self, volume_type: str, **specs: str) -> str:
        """Make a group for volumes of a type, which go nowhere then; its id.

        Its node is the scheduler's choice.

        :param specs: extra specs of the group's type
        :raises VolumeError: it has failed, or took more than 180 s
        """
        kind = self._api.post('/group_types', json={'group_type': {
            'name': 'of-a-user', 'group_specs': specs}}).json()[
                'group_type']['id']
        group = self._api.post('/groups', json={'group': {
            'name': 'of-a-user', 'group_type': kind, 'volume_types': [
                self._type_id(volume_type)]}}).json()['group']['id']
        end = time.monotonic() + PATIENCE
        while (found := self.group(group)) and found['status'] != 'available':
            if found['status'] == 'error' or time.monotonic() > end:
                raise VolumeError('group %s is %s' % (group, found['status']))
            time.sleep(0.5)
        return group

    def group(self, group_id: str) -> dict[str, Any] | None:
        """A group as the API shows it; None if there is none."""
        try:
            return self._api.get('/groups/' + group_id).json()['group']
        except exceptions.NotFound:
            return None

    def request_group_snapshot(self, group_id: str) -> str:
        """Ask for a snapshot of a group; its id."""
        return self._api.post('/group_snapshots', json={'group_snapshot': {
            'group_id': group_id, 'name': 'of-a-user'}}).json()[
                'group_snapshot']['id']

    def group_snapshot_status(self, group_snapshot_id: str) -> str | None:
        """Status of a snapshot of a group; None if there is none."""
        try:
            return self._api.get('/group_snapshots/' + group_snapshot_id
                                 ).json()['group_snapshot']['status']
        except exceptions.NotFound:
            return None

    def request_group_snapshot_deletion(self, group_snapshot_id: str) -> None:
        """Ask for the deletion of a snapshot of a group."""
        self._api.delete('/group_snapshots/' + group_snapshot_id)

    def request_group_deletion(self, group_id: str) -> None:
        """Ask for the end of a group and of all its volumes."""
        self._api.post('/groups/%s/action' % group_id,
                       json={'delete': {'delete-volumes': True}})

    def delete_group_type(self) -> None:
        """Delete what :meth:`make_group` has made besides the group."""
        kind, = [found['id'] for found in
                 self._api.get('/group_types').json()['group_types']
                 if found['name'] == 'of-a-user']
        self._api.delete('/group_types/' + kind)

    def manage(self, node: nodes.Node, volume_type: str, name: str) -> str:
        """Ask for a logical volume of a node as a volume; its id."""
        return self._api.post('/os-volume-manage', json={'volume': {
            'host': configuration.pool(node.name, volume_type),
            'volume_type': volume_type, 'name': name,
            'ref': {'source-name': name}}}).json()['volume']['id']

    def manage_snapshot(self, volume_id: str, name: str) -> str:
        """Ask for a logical volume as a snapshot of a volume; its id."""
        return self._api.post('/os-snapshot-manage', json={'snapshot': {
            'volume_id': volume_id, 'name': name,
            'ref': {'source-name': name}}}).json()['snapshot']['id']

    def unmanage(self, volume_id: str) -> None:
        """Ask for a volume to be Cinder's no more."""
        self._api.post('/volumes/%s/action' % volume_id,
                       json={'os-unmanage': {}})

    def unmanage_snapshot(self, snapshot_id: str) -> None:
        """Ask for a snapshot to be Cinder's no more."""
        self._api.post('/snapshots/%s/action' % snapshot_id,
                       json={'os-unmanage': {}})

    def request_backup(self, volume_id: str, incremental: bool = False
                       ) -> str:
        """Ask for a backup of a volume, in use or not; its id."""
        return self._api.post('/backups', json={'backup': {
            'volume_id': volume_id, 'incremental': incremental,
            'force': True}}).json()['backup']['id']

    def backup(self, backup_id: str) -> dict[str, Any]:
        """A backup as the API shows it."""
        return self._api.get('/backups/' + backup_id).json()['backup']

    def wait_for_backup(self, backup_id: str, timeout: float = PATIENCE
                        ) -> None:
        """Wait until a backup is not worked on any more.

        :raises VolumeError: it failed, or took more than `timeout` s
        """
        end = time.monotonic() + timeout
        while (found := self.backup(backup_id))['status'] != 'available':
            if found['status'] == 'error' or time.monotonic() > end:
                raise VolumeError('backup %s is %s: %s' % (
                    backup_id, found['status'], found['fail_reason']))
            time.sleep(0.2)

    def restore(self, backup_id: str, volume_id: str | None = None) -> str:
        """Restore a backup and wait for it; the volume's id.

        :param volume_id: to which volume; to a new one if it is None
        """
        restored = self._api.post('/backups/%s/restore' % backup_id, json={
            'restore': {'volume_id': volume_id}}).json()['restore'][
                'volume_id']
        self.wait_for_backup(backup_id)
        self.wait_for_status(restored, 'available')
        return restored

    def delete_backup(self, backup_id: str, timeout: float = PATIENCE
                      ) -> None:
        """Delete a backup and wait until it is gone."""
        self._api.delete('/backups/' + backup_id)

        @tenacity.retry(wait=tenacity.wait_fixed(0.2),
                        stop=tenacity.stop_after_delay(timeout),
                        retry=tenacity.retry_if_result(bool), reraise=True)
        def is_there() -> bool:
            try:
                return bool(self.backup(backup_id))
            except exceptions.NotFound:
                return False
        is_there()

    def connector(self, node: nodes.Node) -> dict[str, Any]:
        """What os-brick says of a node."""
        name = node.run(['cat', '/etc/iscsi/initiatorname.iscsi']).stdout
        return {'host': node.name, 'ip': node.address,
                'initiator': name.split('InitiatorName=')[1].split()[0],
                'multipath': False, 'os_type': 'linux', 'platform': 'x86_64'}

    def attach(self, volume_id: str, node: nodes.Node,
               instance_id: str | None = None) -> Attachment:
        """Attach as Nova does: reserve, connect, complete."""
        return self.connect(self.reserve(
            volume_id, instance_id or str(uuid.uuid4())), node)

    def reserve(self, volume_id: str, instance_id: str) -> Attachment:
        """An attachment without a node: the first half of :meth:`attach`."""
        reserved = self._api.post('/attachments', json={'attachment': {
            'volume_uuid': volume_id, 'instance_uuid': instance_id,
        }}).json()['attachment']['id']
        return Attachment(reserved, volume_id, instance_id, None, {})

    def connect(self, attachment: Attachment, node: nodes.Node
                ) -> Attachment:
        """The second half of :meth:`attach`."""
        try:
            answer = self._put_connector(attachment.id, node)
        except exceptions.HttpError:
            self.detach(attachment)
            raise
        self.complete(attachment.id)
        return dataclasses.replace(
            attachment, node=node,
            connection=answer['attachment']['connection_info'])

    def locate(self, attachment_id: str, node: nodes.Node) -> None:
        """Say where an attachment is, as an administrator does by hand."""
        self._put_connector(attachment_id, node)
        self.complete(attachment_id)

    def _put_connector(self, attachment_id: str, node: nodes.Node) -> Any:
        return self._api.put('/attachments/' + attachment_id, json={
            'attachment': {'connector': {**self.connector(node),
                                         'mountpoint': '/dev/vdb'}}}).json()

    def complete(self, attachment_id: str) -> None:
        """Say that the instance has got the volume."""
        self._api.post('/attachments/%s/action' % attachment_id,
                       json={'os-complete': {}})

    def attach_second(self, attachment: Attachment, node: nodes.Node
                      ) -> Attachment:
        """What Nova does on the destination of a live migration."""
        answer = self._api.post('/attachments', json={'attachment': {
            'volume_uuid': attachment.volume_id,
            'instance_uuid': attachment.instance_id,
            'connector': self.connector(node)}}).json()['attachment']
        return Attachment(answer['id'], attachment.volume_id,
                          attachment.instance_id, node,
                          answer['connection_info'])

    def attach_remotely(self, volume_id: str, node: nodes.Node
                        ) -> Attachment:
        """A connection for somebody who only wants to read: no instance."""
        answer = self._api.post('/attachments', json={'attachment': {
            'volume_uuid': volume_id,
            'connector': self.connector(node)}}).json()['attachment']
        return Attachment(answer['id'], volume_id, None, node,
                          answer['connection_info'])

    def detach(self, attachment: Attachment) -> None:
        """Remove an attachment."""
        self.remove_attachment(attachment.id)

    def attached(self, attachment_id: str, node: nodes.Node) -> Attachment:
        """An attachment that somebody else has made for a node."""
        found = self._api.get('/attachments/' + attachment_id).json()[
            'attachment']
        return Attachment(found['id'], found['volume_id'], found['instance'],
                          node, found['connection_info'])

    def remove_attachment(self, attachment_id: str) -> None:
        """Remove an attachment of which only the id is known."""
        self._api.delete('/attachments/' + attachment_id)

    def force_detach(self, attachment: Attachment) -> None:
        """Remove an attachment whose host is lost: without a connector."""
        self._api.post('/volumes/%s/action' % attachment.volume_id, json={
            'os-force_detach': {'attachment_id': attachment.id,
                                'connector': None}})

    def attachments(self, volume_id: str) -> list[str]:
        """Ids of all attachments of a volume."""
        return list(self.attachment_statuses(volume_id))

    def attachment_hosts(self, volume_id: str) -> dict[str, str | None]:
        """Where Cinder has each attachment of a volume, by its id; those that
        are only reserved are nowhere, or missing.
        """
        return {row['attachment_id']: row['host_name']
                for row in self.show(volume_id)['attachments']}

    def attachment_statuses(self, volume_id: str) -> dict[str, str]:
        """The status of each attachment of a volume, by its id."""
        return {row['id']: row['status'] for row in self._api.get(
            '/attachments/detail?all_tenants=1&volume_id=' + volume_id
        ).json()['attachments'] if row['volume_id'] == volume_id}

    def extend(self, volume_id: str, size: int) -> None:
        """Ask for a volume to grow to `size` GiB; does not wait."""
        self._api.post('/volumes/%s/action' % volume_id,
                       json={'os-extend': {'new_size': size}})

    def migrate(self, volume_id: str, host: str) -> None:
        """Ask for a volume that nobody uses to live elsewhere; does not wait.

        :param host: ``host@backend#pool``
        """
        self._api.post('/volumes/%s/action' % volume_id, json={
            'os-migrate_volume': {'host': host, 'force_host_copy': False,
                                  'lock_volume': True}})

    def retype(self, volume_id: str, volume_type: str) -> None:
        """Ask for a volume to be of another type, wherever that is; does not
        wait.
        """
        self._api.post('/volumes/%s/action' % volume_id, json={
            'os-retype': {'new_type': volume_type,
                          'migration_policy': 'on-demand'}})

    def upload_to_image(self, volume_id: str, disk_format: str) -> str:
        """Ask for an image of what a volume holds; its id."""
        return self._api.post('/volumes/%s/action' % volume_id, json={
            'os-volume_upload_image': {
                'image_name': 'of-a-volume', 'container_format': 'bare',
                'disk_format': disk_format, 'visibility': 'private',
                'protected': False, 'force': True}}).json()[
                    'os-volume_upload_image']['image_id']

    def revert(self, volume_id: str, snapshot_id: str) -> None:
        """Ask for a volume to be again what its newest snapshot is; does not
        wait.
        """
        self._api.post('/volumes/%s/action' % volume_id, json={
            'revert': {'snapshot_id': snapshot_id}})

    def reset(self, volume_id: str, status: str, **others: str | None
              ) -> None:
        """Set a volume's status, as an administrator does by hand.

        :param others: ``migration_status`` and ``attach_status``
        """
        self._api.post('/volumes/%s/action' % volume_id, json={
            'os-reset_status': {'status': status, **others}})

    def reset_snapshot(self, snapshot_id: str, status: str) -> None:
        """Set a snapshot's status, as an administrator does by hand."""
        self._api.post('/snapshots/%s/action' % snapshot_id, json={
            'os-reset_status': {'status': status}})
