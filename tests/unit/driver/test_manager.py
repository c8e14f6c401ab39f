# SPDX-License-Identifier: Apache-2.0
"""What Cinder's own volume manager does with our volumes."""

from unittest import mock

from cinder import exception as cinder_exception
from cinder import objects

from cinder_localstor.datapath import handles
from cinder_localstor.datapath import transfer
from cinder_localstor import rows
from tests.unit import base
from tests.unit import services

A, B, C = base.A, base.B, base.C


class ManagerTestCase(base.TestCase):

    def setUp(self):
        super().setUp()
        self.patch('cinder_localstor.moves.scheduler.SOON', 0)
        self.cloud = services.Services(self)
        self.volume = self.cloud.create()

    def refresh(self):
        return self.cloud.refresh(self.volume)

    def assert_whole(self):
        """The volume reads as it was written."""
        self.assertEqual(self.cloud.content[self.volume.id],
                         self.cloud.read(self.volume))

    def assert_nothing_left(self, *volumes):
        self.assertEqual([], self.cloud.leftovers(volumes))

    def state(self):
        moves = rows.for_volume(self.ctxt, self.volume.id)
        return moves[-1].state if moves else None


class LifeTest(ManagerTestCase):
    """From creation to deletion."""

    def test_volume_is_created_and_deleted(self):
        self.assertEqual('available', self.refresh().status)
        self.assert_whole()
        self.assertTrue(self.cloud.delete(self.volume))
        self.assert_nothing_left()

    def test_volume_follows_its_instance(self):
        attachment = self.cloud.arrive(self.volume)
        self.assertEqual(B, self.cloud.host_of(self.volume))
        self.assertEqual('in-use', self.refresh().status)
        self.assert_whole()
        self.cloud.detach(self.volume, attachment)
        self.assertEqual('available', self.refresh().status)
        self.assertTrue(self.cloud.delete(self.volume))
        self.assert_nothing_left()


class BackupTest(ManagerTestCase):
    """What reads a volume once connects without an attachment."""

    BACKUP = {'host': 'backup', 'ip': '192.0.2.9', 'initiator': 'iqn.z'}

    def connect(self):
        return self.cloud.ask(A, 'initialize_connection',
                              volume=self.refresh(), connector=self.BACKUP)

    def disconnect(self):
        self.cloud.ask(A, 'terminate_connection', volume_id=self.volume.id,
                       connector=self.BACKUP)
        self.cloud.ask(A, 'remove_export', volume_id=self.volume.id)

    def test_volume_can_move_after_a_backup(self):
        self.assertEqual('iscsi', self.connect()['driver_volume_type'])
        self.assertNotEqual({}, self.cloud.remotes[A].exports)
        self.disconnect()
        self.assertEqual({}, self.cloud.remotes[A].exports)
        self.assertIsNone(self.refresh().provider_location)
        self.cloud.arrive(self.volume)
        self.assert_whole()

    def test_volume_does_not_move_during_a_backup(self):
        self.connect()
        self.assertRaises(cinder_exception.VolumeBackendAPIException,
                          self.cloud.attach, self.volume, B)
        self.assertNotEqual({}, self.cloud.remotes[A].exports)
        self.assert_whole()

    def test_device_of_a_backup_is_the_volume_itself(self):
        backup = objects.Backup(self.ctxt, volume_id=self.volume.id,
                                user_id='user', project_id='project',
                                host='backup', status='creating')
        backup.create()
        answer = self.cloud.ask(A, 'get_backup_device', backup=backup)
        self.assertEqual(self.volume.id, answer['backup_device'].id)
        self.assertFalse(answer['is_snapshot'])


class MigrationTest(ManagerTestCase):
    """Cinder's own migration copies a volume to a new one."""

    def test_volume_that_never_moved(self):
        self.assertEqual('success', self.cloud.migrate(
            self.volume).migration_status)
        self.assertEqual(B, self.cloud.host_of(self.volume))
        self.assert_whole()
        self.assert_nothing_left(self.volume)
        self.cloud.reboot(B)
        self.assert_whole()

    def test_volume_that_has_moved_survives_a_reboot(self):
        attachment = self.cloud.arrive(self.volume)
        self.cloud.detach(self.volume, attachment)
        self.cloud.migrate(self.volume, A)
        self.assert_nothing_left(self.volume)
        self.cloud.reboot(A)
        self.assert_whole()

    def test_copy_of_an_earlier_version_gets_its_handle(self):
        attachment = self.cloud.arrive(self.volume)
        self.cloud.detach(self.volume, attachment)
        self.patch('cinder_localstor.driver.localstor.LocalStorDriver.'
                   'update_migrated_volume', side_effect=NotImplementedError)
        self.cloud.migrate(self.volume, A)
        self.cloud.reboot(A)
        self.assert_whole()
        self.assertTrue(self.cloud.report(A).is_well)
        self.cloud.arrive(self.volume)
        self.assert_whole()

    def test_migration_that_breaks_off_leaves_the_volume_as_it_was(self):
        attachment = self.cloud.arrive(self.volume)
        self.cloud.detach(self.volume, attachment)
        belong = handles.Handles.belong

        def and_die(*arguments):
            belong(*arguments)
            raise ValueError

        with mock.patch.object(handles.Handles, 'belong', and_die):
            self.cloud.migrate(self.volume, A)
        for host in (A, B):
            self.cloud.reboot(host)
        self.assertEqual(B, self.cloud.host_of(self.volume))
        self.assert_whole()
        # Cinder shows the new copy as a volume of its own.
        self.assertTrue(self.cloud.report(A).is_well)

    def test_copy_is_of_the_volume_and_its_generation(self):
        attachment = self.cloud.arrive(self.volume)
        self.cloud.detach(self.volume, attachment)
        self.cloud.migrate(self.volume, A)
        disk, = self.cloud.nodes[A].volumes.disks.values()
        self.assertEqual(transfer.tags(volume=self.volume.id, generation=2),
                         disk.tags)
