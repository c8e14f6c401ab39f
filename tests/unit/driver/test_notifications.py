# SPDX-License-Identifier: Apache-2.0
"""What consumers of the message bus hear while Cinder's own volume manager
does what users ask for.
"""

import json
import queue
import threading
from unittest import mock

from cinder import exception as cinder_exception
from cinder import objects
from cinder import rpc
import oslo_messaging
from oslo_messaging.notify import _impl_test
from oslo_messaging.notify import notifier
from oslo_utils import units

from cinder_localstor.datapath import engine
from cinder_localstor import exception
from cinder_localstor.moves import notifications
from cinder_localstor.moves import queues
from cinder_localstor.moves import table
from cinder_localstor import rows
from tests.unit import base
from tests.unit.driver import test_manager

A, B = base.A, base.B
REGION = units.Gi // 16
# Seconds in which something happens that must
PATIENCE = 30


def listen(case):
    """Let a test have the notifier that Cinder makes where it is told to
    send notifications, with oslo.messaging's driver for tests.
    """
    case.override_config('driver', ['test'],
                         group='oslo_messaging_notifications')
    made = notifier.Notifier(
        rpc.NOTIFICATION_TRANSPORT, driver='test',
        serializer=rpc.RequestContextSerializer(
            oslo_messaging.JsonPayloadSerializer()))
    case.patch('cinder.rpc.get_notifier', side_effect=(
        lambda service, host: made.prepare(
            publisher_id='%s.%s' % (service, host))))
    _impl_test.reset()
    case.addCleanup(_impl_test.reset)


def heard():
    """All of ours that was sent."""
    return [message for _ctxt, message, _priority, _retry
            in _impl_test.NOTIFICATIONS
            if message['event_type'].startswith('localstor.')]


class NotificationsTestCase(test_manager.SnapshotTestCase):

    def setUp(self):
        super().setUp()
        listen(self)

    def names(self, about=None):
        """What was told of a volume, without the part that all have."""
        return [message['event_type'].removeprefix('localstor.')
                for message in heard() if message['payload']['volume_id']
                == (about or self.volume).id]

    def last(self, event):
        return [message for message in heard()
                if message['event_type'].endswith('.' + event)][-1]

    def hydrate(self, regions, host=B):
        self.cloud.nodes[host].hydrate(regions)
        self.cloud.watch()


class MoveTest(NotificationsTestCase):

    def leave(self, host, attachment):
        """A guest that has the volume on two nodes has gone from one."""
        mapper = self.cloud.nodes[host].device_mapper
        opened, = [name for name in mapper.nodes if name.endswith('-handle')]
        mapper.nodes[opened].open_count -= 1
        attachment.destroy()

    def test_volume_follows_its_instance(self):
        self.cloud.attach(self.volume, B)
        self.assertEqual(['move.start', 'move.usable'], self.names())
        self.cloud.settle()
        self.assertEqual(['move.start', 'move.usable', 'move.arrived',
                          'move.end'], self.names())

    def test_payload_has_the_fields_that_are_documented(self):
        self.cloud.attach(self.volume, B)
        move, = rows.for_volume(self.ctxt, self.volume.id)
        volume = self.refresh()
        self.assertEqual({
            'tenant_id': 'project', 'user_id': 'user',
            'volume_id': volume.id, 'display_name': volume.display_name,
            'volume_type': self.vt['id'], 'size': 1, 'status': 'in-use',
            'availability_zone': 'nova', 'host': B + '#local',
            'move_id': move.move_id, 'state': 'migrating', 'generation': 2,
            'source_host': A, 'destination_host': B, 'engine': 'clone',
            'transfer_bytes': units.Gi, 'arrived_bytes': None,
            'problem': ''},
            self.last('usable')['payload'] | {'status': 'in-use'})
        self.assertEqual([field.name for field in notifications.FIELDS],
                         list(self.last('usable')['payload']))

    def test_they_come_from_the_node_that_drives_the_move(self):
        self.cloud.arrive(self.volume)
        self.assertEqual(
            [('localstor.move.start', 'volume.' + A),
             ('localstor.move.usable', 'volume.' + A),
             ('localstor.move.arrived', 'volume.' + B),
             ('localstor.move.end', 'volume.' + B)],
            [(message['event_type'], message['publisher_id'])
             for message in heard()])

    def test_it_has_moved_when_that_is_told(self):
        found = []

        def look(_driver, _ctxt, message, *_more):
            if message['event_type'].startswith('localstor.'):
                move = rows.get(self.ctxt, message['payload']['move_id'])
                found.append((message['event_type'].rpartition('.')[2],
                              move and move.state,
                              self.cloud.host_of(self.volume)))

        with mock.patch.object(_impl_test.TestDriver, 'notify', look):
            self.cloud.arrive(self.volume)
        self.assertEqual(
            [('start', 'preparing', A), ('usable', 'migrating', B),
             ('arrived', 'completing', B), ('end', None, B)], found)

    def test_what_is_not_recorded_is_not_told(self):
        self.cloud.attach(self.volume, B)
        self.cloud.hydrate()
        with mock.patch.object(rows, 'change_state', side_effect=(
                exception.MoveChanged(move_id='-', state='-'))):
            self.cloud.watch()
        self.assertEqual(['move.start', 'move.usable'], self.names())

    def test_volume_goes_back_to_where_the_guest_stays(self):
        self.cloud.attach(self.volume, A)
        self.leave(B, self.cloud.attach(self.volume, B))
        self.cloud.settle()
        self.assertEqual(['move.start', 'move.usable', 'move.aborting',
                          'move.aborted'], self.names())
        self.assertEqual(A + '#local', self.last('aborted')['payload']['host'])

    def test_live_migration_is_usable_once(self):
        self.cloud.attach(self.volume, A)
        self.cloud.attach(self.volume, B)
        source, _ = self.cloud.refresh(self.volume).volume_attachment
        self.leave(A, source)
        self.cloud.settle()
        self.assertEqual(['move.start', 'move.usable', 'move.arrived',
                          'move.end'], self.names())

    def test_failure_is_told_with_its_reason(self):
        self.cloud.nodes[B].volumes.total = units.Mi
        self.assertRaises(cinder_exception.VolumeBackendAPIException,
                          self.cloud.attach, self.volume, B)
        self.cloud.settle()
        self.assertEqual(['move.start', 'move.aborting', 'move.aborted'],
                         self.names())
        self.assertIn('extend the group',
                      self.last('aborting')['payload']['problem'])

    def test_volume_is_deleted_in_mid_move(self):
        attachment = self.cloud.attach(self.volume, B)
        self.cloud.detach(self.volume, attachment)
        self.assertTrue(self.cloud.delete(self.volume))
        self.cloud.settle()
        self.assertEqual(['move.start', 'move.usable', 'move.discarding',
                          'move.discarded'], self.names())
        self.assertEqual('project',
                         self.last('discarded')['payload']['tenant_id'])

    def test_source_copy_is_kept_for_its_snapshots(self):
        snapshot = self.take()
        self.cloud.arrive(self.volume)
        self.assertEqual(['move.start', 'move.usable', 'move.arrived',
                          'move.kept'], self.names())
        self.cloud.delete_snapshot(snapshot)
        self.cloud.settle()
        self.assertEqual('move.end', self.names()[-1])

    def test_secret_of_a_move_is_told_to_nobody(self):
        iscsi = self.cloud.nodes[B].initiator
        self.cloud.attach(self.volume, B)
        move, = rows.for_volume(self.ctxt, self.volume.id)
        secret = move.transfer.export.password
        self.assertNotEqual('', secret)
        iscsi.broken |= set(iscsi.sessions)
        with mock.patch.object(iscsi, 'connect', side_effect=(
                exception.CommandFailed(command='iscsiadm -v ' + secret,
                                        host='b', reason='no'))):
            self.cloud.watch()
        self.cloud.settle()
        self.assertIn('iscsiadm -v ***',
                      self.last('error')['payload']['problem'])
        self.assertNotIn(secret, json.dumps(
            [message for _ctxt, message, *_more in _impl_test.NOTIFICATIONS
             if message in heard()]))


class CopyTest(NotificationsTestCase):

    def test_volume_arrives_from_a_snapshot(self):
        volume = self.cloud.create_from(self.take(), B)
        self.assertEqual(['copy.start', 'copy.usable'], self.names(volume))
        self.cloud.settle()
        self.assertEqual(['copy.start', 'copy.usable', 'copy.arrived',
                          'copy.end'], self.names(volume))

    def test_volume_that_could_not_be_made(self):
        snapshot = self.take()
        self.cloud.nodes[B].volumes.total = units.Mi
        volume = self.cloud.create_from(snapshot, B)
        self.cloud.settle()
        self.assertEqual(['copy.start', 'copy.undoing', 'copy.undone'],
                         self.names(volume))
        self.assertIn('extend the group',
                      self.last('undoing')['payload']['problem'])

    def test_service_that_dies_in_mid_creation(self):
        snapshot = self.take()
        with mock.patch('cinder_localstor.moves.executor.Executor.drive',
                        side_effect=SystemExit):
            self.assertRaises(SystemExit, self.cloud.create_from, snapshot, B)
        self.cloud.boot(B)
        self.cloud.settle()
        told = [message['event_type'] for message in heard()]
        self.assertEqual(['localstor.copy.start', 'localstor.copy.undoing',
                          'localstor.copy.undone'], told)


class ErrorTest(NotificationsTestCase):

    def errors(self):
        return self.names().count('move.error')

    def test_it_is_told_once_how_long_it_lasts(self):
        self.cloud.attach(self.volume, B)
        initiator = self.cloud.nodes[B].initiator
        for _time in range(2):
            initiator.broken |= set(initiator.sessions)
            initiator.unreachable.add(A)
            for _period in range(5):
                self.cloud.watch()
            # As another service would find it
            self.cloud.boot(B)
            self.cloud.watch()
            initiator.unreachable.clear()
            self.cloud.watch()
        self.assertEqual(2, self.errors())
        self.cloud.settle()
        self.assertEqual(2, self.errors())

    def test_it_has_the_priority_of_an_error(self):
        self.cloud.attach(self.volume, B)
        self.cloud.nodes[B].initiator.broken |= set(
            self.cloud.nodes[B].initiator.sessions)
        self.cloud.nodes[B].initiator.unreachable.add(A)
        self.cloud.watch()
        message = self.last('error')
        self.assertEqual('ERROR', message['priority'])
        self.assertIn("can't reach", message['payload']['problem'])
        self.assertEqual('INFO', self.last('usable')['priority'])

    def test_pool_that_is_full_is_told_once(self):
        self.cloud.attach(self.volume, B)
        driver = self.cloud.managers[B].driver
        space = driver._service.on_destination.space
        for begun in (True, False):
            with mock.patch.object(space, 'has_room', return_value=False), \
                    mock.patch.object(space, 'look'):
                space.full = 'the pool is full'
                if not begun:
                    move, = rows.for_volume(self.ctxt, self.volume.id)
                    rows.record_done(self.ctxt, move, tuple(
                        name for name in move.done if name
                        != table.START_HYDRATION.name))
                for _period in range(5):
                    self.cloud.watch()
            self.cloud.watch()
        self.assertEqual(2, self.errors())


class ProgressTest(NotificationsTestCase):

    def arrived(self):
        return [message['payload']['arrived_bytes'] // REGION
                for message in heard()
                if message['event_type'].endswith('.progress')]

    def setUp(self):
        super().setUp()
        self.cloud.attach(self.volume, B)
        self.cloud.watch()

    def test_each_tenth_is_told_once(self):
        for _time in range(15):
            self.hydrate(1)
            self.cloud.watch()
        self.assertEqual([2, 4, 5, 7, 8, 10, 12, 13, 15], self.arrived())
        self.hydrate(1)
        self.assertEqual(['progress'] * 9 + ['arrived'],
                         [name.rpartition('.')[2]
                          for name in self.names()][2:12])
        self.assertEqual(units.Gi,
                         self.last('arrived')['payload']['arrived_bytes'])

    def test_what_comes_at_once_is_told_at_once(self):
        self.hydrate(9)
        self.assertEqual([9], self.arrived())

    def test_restart_tells_nothing_again(self):
        self.hydrate(9)
        self.cloud.boot(B)
        self.cloud.watch()
        self.cloud.watch()
        self.assertEqual([9], self.arrived())
        self.hydrate(2)
        self.assertEqual([9, 11], self.arrived())

    def test_period_costs_no_query_for_it(self):
        listened = mock.Mock(wraps=objects.Volume.get_by_id)
        self.hydrate(2)
        with mock.patch.object(objects.Volume, 'get_by_id', listened):
            self.cloud.watch()
            self.cloud.watch()
        listened.assert_not_called()

    def test_nothing_is_remembered_of_moves_that_have_ended(self):
        self.cloud.settle()
        told = self.cloud.running[B].executor._notifications
        self.assertEqual({}, told._parts)


class OffTest(test_manager.ManagerTestCase):
    """No notifications are configured, as it is by default."""

    def test_nothing_is_read_for_nobody(self):
        with mock.patch.object(notifications.Notifications, '_send') as send:
            self.cloud.arrive(self.volume)
        send.assert_not_called()


class BrokerTest(NotificationsTestCase):
    """The bus is away, or slow."""

    def test_move_does_not_fail_of_it(self):
        with mock.patch.object(
                _impl_test.TestDriver, 'notify',
                side_effect=oslo_messaging.MessageDeliveryFailure('away')):
            self.cloud.arrive(self.volume)
        self.assert_whole()
        self.assert_nothing_left(self.volume)

    def test_database_that_is_away_loses_a_notification_and_no_move(self):
        with mock.patch.object(notifications, 'objects') as read:
            read.Volume.get_by_id.side_effect = ValueError
            self.cloud.arrive(self.volume)
        self.assertEqual([], heard())
        self.assert_whole()

    def test_it_is_not_tried_for_ever(self):
        self.cloud.arrive(self.volume)
        self.assertEqual({notifications.RETRIES}, {
            retry for _ctxt, message, _priority, retry
            in _impl_test.NOTIFICATIONS if message in heard()})


class SlowTest(base.TestCase):

    def setUp(self):
        super().setUp()
        listen(self)
        self.patch('cinder_localstor.moves.notifications.BACKLOG', 3)
        self.comes_back = threading.Event()
        self.addCleanup(self.comes_back.set)
        self.tried = queue.Queue()
        # What a broker that is away does to a thread by default
        self.patch('cinder_localstor.moves.notifications.objects.Volume'
                   '.get_by_id', side_effect=self.wait)
        self.told = notifications.Notifications(B, queues.Queue(1))
        self.move = mock.Mock(move_id='m', state='preparing')

    def wait(self, *_arguments):
        self.tried.put(None)
        self.comes_back.wait(PATIENCE)

    def tell(self, times):
        for _time in range(times):
            self.told.entered(self.move)

    def test_nobody_waits_for_it(self):
        self.tell(1)
        self.tried.get(timeout=PATIENCE)
        self.assertFalse(self.comes_back.is_set())

    def test_what_waits_is_so_much_at_most(self):
        self.tell(5)
        self.comes_back.set()
        for _time in range(3):
            self.tried.get(timeout=PATIENCE)
        self.assertTrue(self.tried.empty())

    def test_all_is_told_again_when_it_is_back(self):
        self.tell(5)
        self.comes_back.set()
        for _time in range(3):
            self.tried.get(timeout=PATIENCE)
        self.assertTrue(self.told._room.acquire(timeout=PATIENCE))
        self.told._room.release()
        self.tell(1)
        self.tried.get(timeout=PATIENCE)


class PartsTest(base.TestCase):

    def test_progress_is_told_nine_times_at_most(self):
        told = notifications.Notifications(B, mock.Mock())
        told._tell = mock.Mock()
        move = mock.Mock(move_id='m')
        move.transfer.size = 1000
        for local in (0, *range(1001), 1064):
            told.progressed(move, engine.Progress(
                engine.Hydration.RUNNING, local, 1000))
        self.assertEqual([100, 200, 300, 400, 500, 600, 700, 800, 900], [
            call.args[0].arrived for call in told._tell.mock_calls])
