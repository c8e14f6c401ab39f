# SPDX-License-Identifier: Apache-2.0
"""What Cinder's own volume manager does with our volumes."""

from cinder import exception as cinder_exception
from cinder import objects

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
