# SPDX-License-Identifier: Apache-2.0

import pathlib
from unittest import mock

import fixtures
from keystoneauth1 import exceptions
from oslotest import base

from lab import instance_player
from lab import journal

VOLUME = '518bad7d-4009-4bc5-a04a-dd6dd104e0fb'


class OverdueTest(base.BaseTestCase):
    """What does not end by itself is mended, however well the rest is."""

    def setUp(self):
        super().setUp()
        notes = journal.Journal(pathlib.Path(
            self.useFixture(fixtures.TempDir()).path, 'log'))
        player = instance_player.InstancePlayer(
            'user1', mock.Mock(nodes=[]), 1, 'local', notes)
        player._user = self.user = mock.Mock()
        player._instance = self.instance = mock.Mock(
            id='i', volumes=lambda: [VOLUME])
        player._root = VOLUME
        self.user.attachments.return_value = ['a']
        self.instance.attachments.return_value = {VOLUME: 'a'}
        self.instance.show.return_value = {
            'status': 'ACTIVE', 'OS-EXT-STS:task_state': None,
            'OS-EXT-SRV-ATTR:host': 'node1'}
        self.useFixture(fixtures.MockPatchObject(
            instance_player.instances, 'named', return_value=[]))
        for name in ('_listen', '_lives'):
            self.useFixture(fixtures.MockPatchObject(player, name))
        self.player = player
        self.clock = self.useFixture(fixtures.MockPatchObject(
            instance_player.time, 'monotonic')).mock

    def look(self, seconds, status):
        """Whether all is well at a time, with a volume of this status."""
        self.clock.return_value = 1000 + seconds
        self.user.find.return_value = {'status': status,
                                       'migration_status': None}
        return self.player._is_clear()

    def test_volume_of_an_instance_that_is_up(self):
        with self.player._journal.fault('power cut'):
            for seconds in (0, 200, 310):
                self.assertFalse(self.look(seconds, 'reserved'))
        self.user.locate.assert_called_once_with('a', self.instance.node)
        self.assertTrue(self.look(320, 'in-use'))

    def test_volume_that_was_well_meanwhile(self):
        with self.player._journal.fault('power cut'):
            self.assertFalse(self.look(0, 'reserved'))
            self.assertTrue(self.look(200, 'in-use'))
            self.assertFalse(self.look(310, 'reserved'))
        self.user.locate.assert_not_called()

    def test_volume_that_nobody_makes_is_given_up(self):
        new = '2d0a0c3e-6d34-4f1c-8a06-2d4d9b5b0a11'
        self.user.attachments.side_effect = lambda volume: (
            ['a'] if volume == VOLUME else [])
        self.player._data = [new]

        def find(status):
            self.user.find.side_effect = lambda volume: {
                'status': 'in-use' if volume == VOLUME else status,
                'migration_status': None}

        find('creating')
        with self.player._journal.fault('service killed'):
            for seconds in (0, 310):
                self.assertFalse(self.look(seconds, None))
        self.user.reset.assert_called_once_with(new, 'error')
        find('error')
        self.assertTrue(self.look(320, None))
        self.assertEqual([], self.player._data)

    def look_at_build(self, host=None):
        self.instance.show.return_value = {
            'status': 'BUILD', 'OS-EXT-STS:task_state': 'scheduling',
            'OS-EXT-SRV-ATTR:host': host}
        with self.player._journal.fault('power cut'):
            for seconds in (0, 310):
                self.assertFalse(self.look(seconds, 'reserved'))

    def test_instance_that_nobody_builds_is_deleted(self):
        self.look_at_build()
        self.instance.delete.assert_called_once_with()
        self.instance.act.assert_not_called()

    def test_instance_whose_guest_has_written_is_kept(self):
        self.player._born = True
        self.look_at_build('node1')
        self.instance.delete.assert_not_called()
        self.instance.act.assert_called_once_with(
            *instance_player.REMEDIES['ERROR'])

    def show_nowhere(self, status, task):
        self.instance.show.return_value = {
            'status': status, 'OS-EXT-STS:task_state': task,
            'OS-EXT-SRV-ATTR:host': None}

    def test_instance_whose_unshelving_is_lost_is_another_one(self):
        self.player._born = True
        self.show_nowhere('SHELVED_OFFLOADED', 'spawning')
        with self.player._journal.fault('power cut'):
            self.assertFalse(self.look(0, 'in-use'))
            self.instance.delete.assert_not_called()
            self.assertFalse(self.look(310, 'in-use'))
        self.instance.delete.assert_called_once_with()
        self.instance.act.assert_not_called()
        self.assertTrue(self.player._begins_anew)

    def test_instance_that_is_nowhere_is_another_one_of_its_volume(self):
        self.player._born = True
        self.show_nowhere('ERROR', None)
        request = self.useFixture(fixtures.MockPatchObject(
            instance_player.instances, 'request')).mock
        with self.player._journal.fault('power cut'):
            self.assertFalse(self.look(0, 'in-use'))
            self.instance.delete.assert_called_once_with()
            self.instance.status = None
            # Its attachment has stayed.
            self.assertFalse(self.look(10, 'in-use'))
            self.user.remove_attachment.assert_called_once_with('a')
            request.assert_not_called()
            self.user.attachments.return_value = []
            self.assertFalse(self.look(20, 'available'))
        request.assert_called_once_with(mock.ANY, mock.ANY, VOLUME)
        self.assertEqual([VOLUME], self.player._volumes())
        self.assertIs(request.return_value, self.player._instance)

    def refuse_reserved(self, volume):
        raise exceptions.BadRequest(response=mock.Mock(
            text='volume %s is already attached to instances: i' % volume))

    def test_instance_with_a_disk_that_is_only_reserved_is_another_one(self):
        self.instance.attach.side_effect = self.refuse_reserved
        self.player._data = ['another-volume']
        new = mock.Mock(id='j', volumes=lambda: [VOLUME, 'another-volume'])

        def settle():
            self.instance.delete.assert_called_once_with()
            self.player._instance, self.player._begins_anew = new, False

        with mock.patch.object(self.player, '_settle', settle):
            self.player._plug_all_in()
        self.assertIs(new, self.player._instance)

    def look_at_stray(self, status, host):
        """Nova has noted an attachment at a host; its instance is at node1,
        and does not run.
        """
        self.instance.node.name = 'node1'
        self.instance.runs = False
        self.instance.status = status
        self.instance.show.return_value['status'] = status
        self.user.attachment_hosts.return_value = {'a': host}
        return self.look(0, 'in-use')

    def test_volume_that_nova_has_elsewhere_is_brought(self):
        for host in ('node2', None):
            self.instance.reset_mock()
            self.assertFalse(self.look_at_stray('ACTIVE', host))
            self.assertEqual(
                [mock.call.end_elsewhere(),
                 mock.call.act(*instance_player.REMEDIES['ERROR']),
                 mock.call.act('os-stop'), mock.call.wait_for('SHUTOFF'),
                 mock.call.attach_anew([VOLUME])],
                [call for call in self.instance.mock_calls
                 if call[0] not in ('show', 'attachments')])

    def test_volume_that_stays_attaching_is_brought(self):
        self.user.status.return_value = 'attaching'
        self.assertFalse(self.look_at_stray('SHUTOFF', 'node2'))
        self.user.reset.assert_called_once_with(VOLUME, 'in-use')
        self.instance.attach_anew.assert_called_once_with([VOLUME])

    def test_volume_of_a_stopped_instance_is_brought_before_it_starts(self):
        self.user.status.return_value = 'in-use'
        self.assertFalse(self.look_at_stray('SHUTOFF', 'node2'))
        self.user.reset.assert_not_called()
        self.instance.attach_anew.assert_called_once_with([VOLUME])
        self.instance.act.assert_not_called()

    def test_volume_that_is_where_its_instance_is_stays(self):
        self.assertTrue(self.look_at_stray('ACTIVE', 'node1'))
        self.instance.attach_anew.assert_not_called()
