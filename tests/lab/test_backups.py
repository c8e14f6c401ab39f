# SPDX-License-Identifier: Apache-2.0
"""Backups by Cinder's own service, on a node that the volume is not on.

Whoever only reads a volume, or writes a backup to it, has no instance, and the
volume stays where it is.
"""

from lab import configuration
from lab import control_plane
from lab import leftovers
from tests.lab import base

PROGRAM = '/usr/local/sbin/tgt-admin'
# Stands for one that has done its work when cinder-volume dies.
LAST = '''\
#!/bin/sh
/usr/sbin/tgt-admin "$@"
echo $$ >/run/exported
sleep 600
'''
# MiB
SIZE = 20
LATER = 500


class BackupTestCase(base.LabTestCase):
    """A volume with content, and backups of it made on the other node."""

    find_cloud = staticmethod(base.furnished_cloud)
    volume_type = 'local'

    def setUp(self):
        super().setUp()
        self.home_node, self.backup_node = self.nodes
        self.backups = []
        self.make_on(self.home_node)

    def make_on(self, node):
        self.volume = self.create(volume_type=self.volume_type, node=node)
        attachment = self.attach(self.volume, node)
        self.write(attachment, size=SIZE)
        self.content = self.checksum(attachment, size=SIZE)
        self.detach(attachment)

    def clean_up(self):
        # An incremental one before what it needs
        while self.backups:
            self.user.delete_backup(self.backups.pop())
        super().clean_up()

    def back_up(self, incremental=False):
        backup = self.user.request_backup(self.volume, incremental)
        self.backups.append(backup)
        self.user.wait_for_backup(backup)
        return backup

    def restore(self, backup, volume=None):
        restored = self.user.restore(backup, volume)
        if restored not in self.volumes:
            self.volumes.append(restored)
        return restored

    def assert_holds(self, volume, later=None):
        """A volume has the content, and at an offset what came later."""
        attachment = self.attach(volume, self.home(volume))
        self.assertEqual(self.content, self.checksum(attachment, size=SIZE))
        if later:
            self.assertEqual(later, self.checksum(attachment, LATER, SIZE))
        self.detach(attachment)

    def write_later(self, attachment):
        self.write(attachment, LATER, SIZE)
        return self.checksum(attachment, LATER, SIZE)

    def assert_at(self, node, volume=None):
        self.assertEqual(node.name, self.home(volume or self.volume).name)


class BackupTest(BackupTestCase):

    def test_full_and_incremental(self):
        full = self.back_up()
        attachment = self.attach(self.volume, self.home_node)
        later = self.write_later(attachment)
        self.detach(attachment)
        incremental = self.back_up(incremental=True)
        self.assertTrue(self.user.backup(incremental)['is_incremental'])

        self.assert_holds(self.restore(incremental), later)
        self.assert_holds(self.restore(full))
        self.assert_at(self.home_node)

    def test_restored_to_the_volume_itself(self):
        backup = self.back_up()
        attachment = self.attach(self.volume, self.home_node)
        self.write(attachment, size=SIZE)
        self.assertNotEqual(self.content,
                            self.checksum(attachment, size=SIZE))
        self.detach(attachment)

        self.restore(backup, self.volume)

        self.assert_at(self.home_node)
        self.assert_holds(self.volume)

    def test_volume_in_use_is_backed_up_and_goes_on(self):
        attachment = self.attach(self.volume, self.home_node)
        backup = self.back_up()
        later = self.write_later(attachment)
        self.assert_at(self.home_node)
        self.assertEqual('in-use', self.user.status(self.volume))
        self.detach(attachment)

        self.assert_holds(self.restore(backup))
        self.assert_holds(self.volume, later)

    def test_arriving_volume_is_backed_up_where_it_is(self):
        self.make_on(self.backup_node)
        moved = self.attach(self.volume, self.home_node)
        self.hold_in_mid_move(moved)
        self.detach(moved)

        backup = self.back_up()

        self.assertIsNotNone(self.arrival(moved))
        self.assert_at(self.home_node)
        self.let_go()
        self.assert_holds(self.restore(backup))
        self.assert_holds(self.volume)


class ThinBackupTest(BackupTest):

    volume_type = 'thin'


class BackupHostTest(BackupTestCase):
    """The host of cinder-backup has no backend, and never had one."""

    def setUp(self):
        super().setUp()
        self.service = self.backup_node.service('cinder-volume')
        self.service.stop()
        self.addCleanup(self.cloud.wait_for_backends, self.nodes)
        self.addCleanup(self.service.start)
        for backend in configuration.BACKENDS:
            self.cloud.run(control_plane.manage(
                self.cloud.place, 'cinder', 'service', 'remove',
                'cinder-volume',
                '%s@%s' % (self.backup_node.name, backend)))

    def test_volume_is_backed_up_and_restored_where_it_is(self):
        backup = self.back_up()
        self.assert_at(self.home_node)
        restored = self.restore(backup)
        self.assert_at(self.home_node, restored)
        self.assert_holds(restored)

    def test_volume_in_use_is_backed_up_and_goes_on(self):
        attachment = self.attach(self.volume, self.home_node)
        backup = self.back_up()
        self.assertEqual('in-use', self.user.status(self.volume))
        self.detach(attachment)
        self.assert_holds(self.restore(backup))


class BrokenOffTest(BackupTestCase):

    def is_exported(self):
        return self.volume in self.home_node.run(
            ['tgtadm', '--lld', 'iscsi', '--op', 'show', '--mode', 'target']
        ).stdout

    def test_export_that_nobody_has_noted_is_removed(self):
        node = self.home_node
        node.run(['sh', '-c', "cat >%s <<'END'\n%sEND\nchmod +x %s"
                  % (PROGRAM, LAST, PROGRAM)])
        self.addCleanup(node.run, ['rm', '-f', PROGRAM])
        self.backups.append(self.user.request_backup(self.volume))
        self.wait_for('the volume is exported', lambda: node.run(
            ['test', '-e', '/run/exported'], check=False).returncode == 0)
        node.service('cinder-volume').kill()
        node.run(['sh', '-c', 'rm %s; kill $(cat /run/exported); '
                  'rm /run/exported' % PROGRAM])
        self.assertTrue(self.is_exported())
        self.restart_cinder_volume(node)
        self.wait_for('the backup has failed', lambda: self.user.status(
            self.volume) == 'available')
        self.wait_for('nobody has noted it', lambda: leftovers.select(
            self.cloud, 'SELECT 1 FROM volumes WHERE provider_location IS '
            "NULL AND id = '%s'" % self.volume))
        self.wait_for('nothing is exported', lambda: not self.is_exported())
        moved = self.attach(self.volume, self.backup_node)
        self.assertEqual(self.content, self.checksum(moved, size=SIZE))
        self.wait_until_arrived(moved)
