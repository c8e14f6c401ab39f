# SPDX-License-Identifier: Apache-2.0
"""A user's whole day, with the command that users have."""

import hashlib
import os
import pathlib
import tempfile

from lab import configuration
from tests.lab import base

# MiB: of the image, and where the user writes later
IMAGE = 32
LATER = 300
USER, RECEIVER = 'demo', 'admin'


class DayTest(base.LabTestCase):

    find_cloud = staticmethod(base.furnished_cloud)

    def setUp(self):
        super().setUp()
        self.here, self.there = self.nodes
        self.backups = []
        self.images = []

    def clean_up(self):
        for snapshot in self.user.snapshots():
            self.user.request_snapshot_deletion(snapshot)
        self.wait_for('no snapshot is left',
                      lambda: not self.user.snapshots())
        for backup in self.backups:
            self.user.delete_backup(backup)
        super().clean_up()
        for image in self.images:
            self.ask('image', 'delete', image)

    def ask(self, *arguments, user=USER):
        return self.cloud.openstack(*arguments, user=user,
                                    timeout=base.PATIENCE)

    def make(self, *arguments):
        """A volume, when it can be used."""
        made = self.ask('volume', 'create', *arguments)['id']
        self.volumes.append(made)
        return self.used(made)

    def used(self, volume):
        self.user.wait_for_status(volume, 'available', base.PATIENCE)
        return volume

    def end(self, volume, *options):
        self.ask('volume', 'delete', *options, volume)
        self.volumes.remove(volume)
        self.wait_for('the volume is gone',
                      lambda: self.user.find(volume) is None)

    @staticmethod
    def on(node):
        return ('--hint', 'query=["=", "$host", "%s"]'
                % configuration.pool(node.name, 'local'))

    def upload(self):
        """An image, and the checksum of what it holds."""
        content = os.urandom(IMAGE << 20)
        with tempfile.TemporaryDirectory() as directory:
            path = pathlib.Path(directory, 'image')
            path.write_bytes(content)
            image = self.ask('image', 'create', '--disk-format', 'raw',
                             '--file', str(path), 'system')['id']
        self.images.append(image)
        return image, hashlib.sha256(content).hexdigest()

    def assert_holds(self, volume, node, image, later=None):
        """A volume can be used on a node, and has what it should."""
        attachment = self.attach(volume, node)
        self.assertEqual('local', attachment.connection['driver_volume_type'])
        self.assertIn(image, self.checksum(attachment, size=IMAGE))
        if later:
            self.assertEqual(later, self.checksum(attachment, LATER))
        self.detach(attachment)

    def test_from_an_image_to_another_project_and_back_to_nothing(self):
        image, content = self.upload()
        system = self.make('--image', image, '--size', '1', '--type', 'local',
                           *self.on(self.here), 'system')
        self.assert_holds(system, self.here, content)
        snapshot = self.ask('volume', 'snapshot', 'create', '--volume',
                            system, 'morning')['id']
        self.wait_for('the snapshot is there', lambda: self.user.snapshots()[
            snapshot] == 'available')

        # It is made where the snapshot is, and goes where it is wanted.
        clone = self.make('--snapshot', snapshot, '--size', '1', '--type',
                          'local', 'clone')
        self.assert_holds(clone, self.there, content)
        attachment = self.attach(clone, self.there)
        self.write(attachment, LATER)
        later = self.checksum(attachment, LATER)
        self.detach(attachment)

        self.ask('volume', 'set', '--size', '2', clone)
        self.used(clone)
        self.assertEqual(2, self.ask('volume', 'show', clone)['size'])
        backup = self.ask('volume', 'backup', 'create', '--name', 'noon',
                          clone)['id']
        self.backups.append(backup)
        self.user.wait_for_backup(backup)
        self.end(clone)

        restored = self.ask('volume', 'backup', 'restore', backup,
                            'restored')['volume_id']
        self.volumes.append(restored)
        self.user.wait_for_backup(backup)
        self.used(restored)
        self.assert_holds(restored, self.there, content, later)
        self.ask('volume', 'set', '--type', 'thin', '--retype-policy',
                 'on-demand', restored)
        self.wait_for('the volume is thin', lambda: self.user.show(restored)[
            'volume_type'] == 'thin')
        self.used(restored)
        self.assert_holds(restored, self.here, content, later)

        offer = self.ask('volume', 'transfer', 'request', 'create', restored)
        self.ask('volume', 'transfer', 'request', 'accept', '--auth-key',
                 offer['auth_key'], offer['id'], user=RECEIVER)
        self.assertNotIn(restored, [volume['ID'] for volume
                                    in self.ask('volume', 'list')])
        self.assert_holds(restored, self.there, content, later)
        self.end(system, '--purge')
