# SPDX-License-Identifier: Apache-2.0
"""What users read in Cinder's API of what their volumes have met."""

from unittest import mock

from cinder.api import microversions
from cinder.api.v3 import messages as messages_api
from cinder import context
from cinder.db import api as db
from cinder import exception as cinder_exception
from cinder.tests.unit.api import fakes
from oslo_utils import fixture
from oslo_utils import units

from cinder_localstor import exception
from cinder_localstor.moves import messages
from cinder_localstor.moves import table
from cinder_localstor import rows
from tests.unit import base
from tests.unit.driver import test_manager

A, B = base.A, base.B

# As Cinder's API shows them: what was to be done, and why it failed
ATTACH_FAILED = 'attach volume:Failed to attach volume.'
ATTACH_AWAY = 'attach volume:Driver is not initialized at present.'
ATTACH_STATE = 'attach volume:Volume status is invalid.'
ATTACH_UNKNOWN = 'attach volume:An unknown error occurred.'
CREATE = 'create volume from backend storage:'
CREATE_FAILED = CREATE + 'Driver failed to create the volume.'
CREATE_AWAY = CREATE + 'Driver is not initialized at present.'
CREATE_STATE = CREATE + 'Volume status is invalid.'
SNAPSHOT_FAILED = 'create snapshot:Snapshot failed to create.'
SNAPSHOT_BUSY = 'delete snapshot:Snapshot is busy.'


class MessagesTestCase(test_manager.SnapshotTestCase):

    def setUp(self):
        super().setUp()
        # Cinder's own messages are for the project that asks.
        self.ctxt.project_id = 'project'

    def wait_briefly(self):
        """Let what waits for a move on the other node be refused soon."""
        self.patch('tenacity.nap.time')
        self.override('localstor_peer_timeout', 1)
        self.cloud.boot(B)

    def shown(self):
        """What Cinder's API shows a user, oldest first."""
        request = fakes.HTTPRequest.blank(
            '/v3/messages', version=microversions.MESSAGES)
        request.environ['cinder.context'] = context.RequestContext(
            'user', 'project', roles=['member', 'reader'], is_admin=False,
            overwrite=False)
        controller = messages_api.MessagesController(None)
        return controller.index(request)['messages'][::-1]

    def told(self, about=None):
        """What was told of a volume or a snapshot."""
        return [found['user_message'] for found in self.shown()
                if found['resource_uuid'] == (about or self.volume).id]

    def attach_fails(self, host=B):
        self.assertRaises(cinder_exception.VolumeBackendAPIException,
                          self.cloud.attach, self.volume, host)


class AttachTest(MessagesTestCase):

    def test_node_has_no_space(self):
        self.cloud.nodes[B].volumes.total = units.Mi
        self.attach_fails()
        self.assertEqual([ATTACH_FAILED], self.told())

    def test_node_is_away(self):
        self.cloud.down.add(B)
        self.attach_fails()
        self.assertEqual([ATTACH_AWAY], self.told())

    def test_volume_still_decides_where_it_lives(self):
        self.cloud.attach(self.volume, A)
        self.cloud.attach(self.volume, B)
        self.assertEqual(table.State.STARTING, self.state())
        self.attach_fails(A)
        self.assertEqual([ATTACH_STATE], self.told())

    def test_all_that_the_api_shows_of_it(self):
        self.cloud.down.add(B)
        self.attach_fails()
        found, = self.shown()
        self.assertEqual(
            ('VOLUME', self.volume.id, 'ERROR',
             'VOLUME_VOLUME_002_002'),
            (found['resource_type'], found['resource_uuid'],
             found['message_level'], found['event_id']))
        self.assertTrue(found['request_id'].startswith('req-'))
        row, = db.message_get_all(self.ctxt)
        self.assertEqual('project', row['project_id'])

    def test_it_has_the_id_of_the_request(self):
        self.cloud.down.add(B)
        self.attach_fails()
        found, = self.shown()
        self.assertEqual(self.ctxt.request_id, found['request_id'])

    def test_what_works_is_not_told(self):
        self.cloud.arrive(self.volume)
        self.assertEqual([], self.shown())

    def test_remote_connection_instead_is_not_told(self):
        self.override('localstor_no_space', 'remote')
        self.cloud.nodes[B].volumes.total = units.Mi
        self.cloud.attach(self.volume, B, 'iscsi')
        self.assertEqual([], self.shown())

    def test_what_connects_for_no_instance_is_not_told(self):
        for method in ('export', 'connect'):
            with mock.patch.object(self.cloud.nodes[A].remote, method,
                                   side_effect=exception.LocalStorException(
                                       reason='no')):
                self.assertRaises(
                    cinder_exception.VolumeBackendAPIException,
                    self.cloud.ask, A, 'initialize_connection',
                    volume=self.refresh(),
                    connector=test_manager.RestartTest.READER)
        self.assertEqual([], self.shown())

    def test_error_is_not_hidden_by_one_in_telling_it(self):
        self.cloud.nodes[B].volumes.total = units.Mi
        with mock.patch.object(messages, 'tell', side_effect=ValueError):
            error = self.assertRaises(
                cinder_exception.VolumeBackendAPIException,
                self.cloud.attach, self.volume, B)
        self.assertIn('extend the group', str(error))


class CreateTest(MessagesTestCase):

    def make(self, source, host=A):
        volume = self.cloud.create_from(source, host)
        self.assertEqual('error', volume.status)
        return volume

    def test_node_has_no_space(self):
        snapshot = self.take()
        self.cloud.nodes[B].volumes.total = units.Mi
        self.assertEqual([CREATE_FAILED], self.told(self.make(snapshot, B)))

    def test_node_of_the_snapshot_is_away(self):
        snapshot = self.take()
        self.cloud.down.add(A)
        self.assertEqual([CREATE_AWAY], self.told(self.make(snapshot, B)))

    def test_snapshot_is_lost(self):
        snapshot = self.take()
        rows.forget_place(self.ctxt, snapshot.id)
        self.assertEqual([CREATE_FAILED], self.told(self.make(snapshot)))

    def test_snapshot_is_invalid(self):
        snapshot = self.take()
        self.patch('cinder_localstor.datapath.source.Source.offer',
                   side_effect=exception.SnapshotInvalid(group='g', name='s'))
        self.assertEqual([CREATE_FAILED], self.told(self.make(snapshot)))
        self.assertEqual([CREATE_FAILED], self.told(self.make(snapshot, B)))

    def test_volume_to_clone_is_in_mid_move(self):
        self.wait_briefly()
        self.cloud.attach(self.volume, B)
        self.assertEqual([CREATE_STATE], self.told(self.make(self.volume, B)))

    def test_volume_could_not_be_reverted(self):
        snapshot = self.take()
        self.cloud.nodes[A].volumes.total = units.Mi
        self.cloud.revert(self.volume, snapshot)
        self.assertEqual([CREATE_FAILED], self.told())

    def test_what_cinder_makes_to_revert_has_no_user(self):
        snapshot = self.take()
        with mock.patch('cinder_localstor.moves.copier.Copier.from_snapshot',
                        side_effect=exception.SnapshotLost(snapshot_id='-')):
            self.assertRaises(exception.SnapshotLost, self.cloud.driver(
                self.volume)._create_temp_volume_from_snapshot, self.ctxt,
                self.volume, snapshot)
        self.assertEqual([], self.shown())


class OnceTest(MessagesTestCase):
    """Of one failure there is one message, Cinder's or ours."""

    def test_volume_without_a_source(self):
        self.cloud.nodes[A].volumes.total = units.Mi
        self.assertEqual([CREATE_FAILED], self.told(self.cloud.create()))

    def test_snapshot_in_mid_move(self):
        self.wait_briefly()
        self.cloud.attach(self.volume, B)
        snapshot = self.cloud.take_snapshot(self.volume)
        self.assertEqual([SNAPSHOT_FAILED], self.told(snapshot))
        self.assertEqual(1, len(self.shown()))

    def test_extension_in_mid_move(self):
        self.patch('tenacity.nap.time')
        self.override('localstor_peer_timeout', 1)
        self.override('localstor_online_extend', True)
        self.cloud.attach(self.volume, A)
        self.cloud.attach(self.volume, B)
        driver = self.cloud.driver(self.volume)
        with mock.patch.object(driver, 'extend_volume', side_effect=(
                exception.LocalStorException(reason='no'))):
            self.cloud.extend(self.volume, 2)
        self.assertEqual(
            ['extend volume:Volume Driver failed to extend volume.'],
            self.told())

    def test_snapshot_whose_node_is_away_is_busy(self):
        snapshot = self.take()
        self.cloud.arrive(self.volume)
        self.cloud.down.add(A)
        self.assertEqual('available', self.cloud.delete_snapshot(snapshot))
        self.assertEqual([SNAPSHOT_BUSY], self.told(snapshot))
        self.assertEqual(1, len(self.shown()))


class WaitingTest(MessagesTestCase):
    """A volume arrives, and the node is away that it comes from."""

    def setUp(self):
        super().setUp()
        self.clock = self.patch('cinder_localstor.moves.messages.time')
        self.clock.monotonic.return_value = 0.0

    def lose_source(self):
        initiator = self.cloud.nodes[B].initiator
        initiator.broken |= set(initiator.sessions)
        initiator.unreachable.add(A)

    def peer_says(self, error):
        self.cloud.running[A].answers._steps.run = mock.Mock(
            side_effect=error)

    def pass_time(self, seconds):
        self.clock.monotonic.return_value += seconds
        self.cloud.watch()

    def wait(self):
        """Let more than enough time pass, in some periods."""
        for _period in range(5):
            self.pass_time(messages.PATIENCE)

    def test_it_is_told_once(self):
        self.cloud.attach(self.volume, B)
        self.lose_source()
        self.wait()
        self.assertEqual([ATTACH_AWAY], self.told())
        self.assertEqual('WARNING', self.shown()[0]['message_level'])
        self.wait()
        # As another process would find it
        self.cloud.boot(B)
        self.wait()
        self.assertEqual(1, len(self.shown()))

    def test_it_is_told_once_though_it_comes_and_goes(self):
        self.cloud.attach(self.volume, B)
        for _time in range(3):
            self.lose_source()
            self.wait()
            self.cloud.nodes[B].initiator.unreachable.clear()
            self.cloud.watch()
        self.assertEqual([ATTACH_AWAY], self.told())

    def test_it_is_told_of_each_move(self):
        # The fixture's time has no zone: no service's is compared with it.
        self.patch('cinder.objects.Service.is_up', True)
        date = self.useFixture(fixture.TimeFixture())
        for _time in range(2):
            attachment = self.cloud.attach(self.volume, B)
            self.lose_source()
            self.wait()
            self.cloud.nodes[B].initiator.unreachable.clear()
            self.cloud.settle()
            self.cloud.detach(self.volume, attachment)
            self.cloud.detach(self.volume, self.cloud.arrive(self.volume, A))
            date.advance_time_seconds(messages.PATIENCE)
        self.assertEqual([ATTACH_AWAY] * 2, self.told())

    def test_it_is_told_later_when_the_database_is_away(self):
        self.cloud.attach(self.volume, B)
        self.lose_source()
        with mock.patch.object(messages, 'tell', side_effect=ValueError):
            self.wait()
        self.assertIn("can't reach", rows.for_volume(
            self.ctxt, self.volume.id)[0].problem)
        self.wait()
        self.assertEqual([ATTACH_AWAY], self.told())

    def test_it_is_asked_for_once_whether_it_was_told(self):
        self.cloud.attach(self.volume, B)
        self.lose_source()
        self.wait()
        with mock.patch.object(messages, 'db') as asked:
            self.wait()
        asked.message_get_all.assert_not_called()

    def test_node_that_starts_anew_is_not_told(self):
        self.cloud.attach(self.volume, B)
        for _time in range(3):
            self.lose_source()
            for _period in range(3):
                self.pass_time(messages.PATIENCE / 4)
            self.cloud.nodes[B].initiator.unreachable.clear()
            self.cloud.watch()
        self.assertEqual([], self.shown())

    def test_volume_that_needs_the_source_no_more_is_not_told(self):
        self.cloud.attach(self.volume, B)
        self.cloud.watch()
        self.cloud.down.add(A)
        self.cloud.hydrate()
        self.wait()
        self.assertEqual(table.State.COMPLETING, self.state())
        self.assertEqual([], self.shown())

    def test_copy(self):
        volume = self.cloud.create_from(self.take(), B)
        self.lose_source()
        self.wait()
        self.assertEqual([CREATE_AWAY], self.told(volume))

    def test_copy_whose_snapshot_is_lost_has_failed(self):
        volume = self.cloud.create_from(self.take(), B)
        self.lose_source()
        self.peer_says(exception.SnapshotInvalid(group='g', name='s'))
        self.wait()
        self.assertEqual([CREATE_FAILED], self.told(volume))
        self.assertEqual('ERROR', self.shown()[0]['message_level'])

    def test_move_that_something_else_holds_up(self):
        self.cloud.attach(self.volume, B)
        self.peer_says(exception.CommandTimedOut(command='lvs', host='a',
                                                 seconds=60))
        self.wait()
        self.assertEqual([ATTACH_UNKNOWN], self.told())
