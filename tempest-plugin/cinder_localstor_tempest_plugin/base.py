# SPDX-License-Identifier: Apache-2.0
"""What the tests stand on: volumes, attachments and what is on the nodes."""

import dataclasses
import os
import shlex
import subprocess
import time

from oslo_utils import uuidutils
from tempest.common import waiters
from tempest import config
from tempest.lib.common import api_version_utils
from tempest.lib.common.utils import data_utils
from tempest.lib.common.utils import test_utils
from tempest.lib import exceptions
from tempest import test

from cinder_localstor_tempest_plugin import attachments

CONF = config.CONF

# Of Cinder's API: the first that completes attachments
MICROVERSION = '3.44'
# Seconds for a command on a node
PATIENCE = 120
# Of what is written and read, in MiB
SIZE = 4


@dataclasses.dataclass(frozen=True)
class Attachment:
    """A volume that a server has on a host, and the device that it is there.
    """

    id: str
    volume_id: str
    server_id: str
    host: str
    device: str


class LocalStorTest(test.BaseTestCase):

    credentials = ['admin', ['service', CONF.localstor.service_role]]

    @classmethod
    def skip_checks(cls):
        super().skip_checks()
        if len(CONF.localstor.hosts) < 2:
            raise cls.skipException('[localstor] hosts names no two nodes')

    @classmethod
    def setup_credentials(cls):
        cls.set_network_resources()
        super().setup_credentials()

    @classmethod
    def setup_clients(cls):
        super().setup_clients()
        cls.volumes_client = cls.os_admin.volumes_client_latest
        cls.snapshots_client = cls.os_admin.snapshots_client_latest
        cls.attachments_client = attachments.AttachmentsClient(
            cls.os_admin.auth_provider,
            cls.os_roles_service.auth_provider,
            CONF.volume.catalog_type,
            CONF.volume.region or CONF.identity.region,
            endpoint_type=CONF.volume.endpoint_type)

    @classmethod
    def resource_setup(cls):
        super().resource_setup()
        cls.setup_api_microversion_fixture(
            volume_microversion=api_version_utils.select_request_microversion(
                MICROVERSION, CONF.volume.min_microversion))

    # Volumes

    def create_volume(self, **source):
        """A volume of the type that is to be tested; its id."""
        made = self.volumes_client.create_volume(
            name=data_utils.rand_name('localstor'),
            volume_type=CONF.volume.volume_type,
            size=source.pop('size', CONF.volume.volume_size), **source)[
                'volume']['id']
        self.addCleanup(self.volumes_client.wait_for_resource_deletion, made)
        self.addCleanup(test_utils.call_and_ignore_notfound_exc,
                        self.volumes_client.delete_volume, made)
        self.wait_for(made, 'available')
        return made

    def create_snapshot(self, volume):
        """A snapshot of a volume, in use or not; its id."""
        made = self.snapshots_client.create_snapshot(
            volume_id=volume, force=True)['snapshot']['id']
        self.addCleanup(self.snapshots_client.wait_for_resource_deletion,
                        made)
        self.addCleanup(test_utils.call_and_ignore_notfound_exc,
                        self.snapshots_client.delete_snapshot, made)
        waiters.wait_for_volume_resource_status(
            self.snapshots_client, made, 'available')
        return made

    def wait_for(self, volume, status):
        waiters.wait_for_volume_resource_status(
            self.volumes_client, volume, status)

    def show(self, volume):
        return self.volumes_client.show_volume(volume)['volume']

    def home(self, volume):
        """The host that a volume is on."""
        host = self.show(volume)['os-vol-host-attr:host'].partition('@')[0]
        self.assertIn(host, CONF.localstor.hosts,
                      '[localstor] hosts does not name all nodes')
        return host

    def wait_for_home(self, volume, host):
        """Wait until a volume is on a host again that it was to leave.

        Nobody waits for that but who asks.
        """
        if not test_utils.call_until_true(
                lambda: self.home(volume) == host,
                CONF.localstor.arrival_timeout, 1):
            raise exceptions.TimeoutException(
                'Volume %s is still on %s' % (volume, self.home(volume)))

    def others(self, *hosts):
        """All hosts but some."""
        return [host for host in CONF.localstor.hosts if host not in hosts]

    # Attachments

    @staticmethod
    def connector(host):
        """What os-brick says of a host, as far as Cinder wants to know."""
        return {'host': host, 'ip': CONF.localstor.hosts[host],
                'initiator': 'iqn.2010-10.org.openstack:tempest-' + host,
                'multipath': False, 'os_type': 'linux',
                'platform': 'x86_64', 'mountpoint': '/dev/vdb'}

    def attach(self, volume, host):
        """As Nova attaches a volume to a server on a host."""
        server = uuidutils.generate_uuid()
        reserved = self.attachments_client.create_attachment(
            volume, server)['attachment']['id']
        self.addCleanup(self.remove, reserved)
        answer = self.attachments_client.update_attachment(
            reserved, self.connector(host))['attachment']
        self.attachments_client.complete_attachment(reserved)
        return self._given(answer, volume, server, host)

    def attach_second(self, attachment, host):
        """As Nova attaches it where the server live-migrates to."""
        answer = self.attachments_client.create_attachment(
            attachment.volume_id, attachment.server_id,
            self.connector(host))['attachment']
        self.addCleanup(self.remove, answer['id'])
        return self._given(answer, attachment.volume_id,
                           attachment.server_id, host)

    def _given(self, answer, volume, server, host):
        connection = answer['connection_info']
        self.assertEqual('local', connection['driver_volume_type'])
        return Attachment(answer['id'], volume, server, host,
                          connection['device_path'])

    def remove(self, attachment_id):
        test_utils.call_and_ignore_notfound_exc(
            self.attachments_client.delete_attachment, attachment_id)

    def detach(self, attachment):
        """As Nova detaches it."""
        self.remove(attachment.id)

    # What is on the nodes

    @staticmethod
    def run_on(host, command):
        """What a shell command says on a node; None if none can be run."""
        if not CONF.localstor.node_command:
            return None
        words = CONF.localstor.node_command.format(
            host=host, address=CONF.localstor.hosts[host])
        done = subprocess.run(
            [*shlex.split(words), command], timeout=PATIENCE, check=False,
            capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if done.returncode:
            raise AssertionError('"%s" on %s: %s' % (command, host,
                                                     done.stderr))
        return done.stdout

    def write(self, attachment, offset=0):
        """Write something where a guest would; a checksum of it.

        :param offset: in MiB
        """
        self.run_on(attachment.host,
                    'dd if=/dev/urandom of=%s bs=1M count=%d seek=%d '
                    'oflag=direct conv=fsync,notrunc status=none'
                    % (attachment.device, SIZE, offset))
        return self.read(attachment, offset)

    def read(self, attachment, offset=0):
        """A checksum of what a guest would read."""
        return self.run_on(attachment.host,
                           'dd if=%s bs=1M count=%d skip=%d iflag=direct '
                           'status=none | sha256sum'
                           % (attachment.device, SIZE, offset))

    def wait_until_arrived(self, attachment):
        """Wait until nothing is left on another node."""
        copy = os.path.basename(attachment.device).removesuffix('-handle')
        end = time.monotonic() + CONF.localstor.arrival_timeout
        while self.run_on(attachment.host,
                          'ls /dev/mapper | grep -c -e "^%s-clone$" '
                          '-e "^%s-hydrator$" || true'
                          % (copy, copy)) not in (None, '0\n'):
            if time.monotonic() > end:
                raise exceptions.TimeoutException(
                    'Volume %s still arrives on %s'
                    % (attachment.volume_id, attachment.host))
            time.sleep(1)
