# SPDX-License-Identifier: Apache-2.0
"""A backend is emptied by Cinder's own API, scheduler and volume managers."""

from unittest import mock

from cinder import context
from cinder.objects import fields
import oslo_messaging

from cinder_localstor import exception
from cinder_localstor.moves import drain
from tests.unit import base
from tests.unit import services

A, B, C = base.A, base.B, base.C
OTHER_BACKEND = 'a@thin'
NAME = 'local'


class DrainTestCase(base.TestCase):

    hosts = (A, B)

    def setUp(self):
        super().setUp()
        self.cloud = services.Services(self, self.hosts)
        self.volume = self.cloud.create()
        self.disable(A)
        self.drain = drain.Drain(A, NAME)

    def disable(self, host, disabled=True):
        service = self.cloud.services[host]
        service.disabled = disabled
        service.save()

    def advance(self):
        self.cloud._publish()
        # As whoever runs the command has it
        return self.drain.advance(context.get_admin_context())

    def empty(self):
        """Drain it to the end; the last look."""
        for _round in range(20):
            found = self.advance()
            if found.is_over:
                return found
            self.cloud.settle()
        self.fail('it does not end: %s' % (found,))

    def reasons(self, found):
        return {what.identity: what.reason for what in found.staying}

    def assert_at(self, host, *volumes):
        for volume in volumes:
            self.assertEqual(host, self.cloud.host_of(volume))
            self.assertEqual(self.cloud.content[volume.id],
                             self.cloud.read(volume))


class DrainTest(DrainTestCase):

    def test_volumes_that_nobody_uses_go_and_nothing_is_left(self):
        second = self.cloud.create()
        found = self.empty()
        self.assertEqual((0, ()), (found.size, found.staying))
        self.assert_at(B, self.volume, second)
        self.assertEqual({}, self.cloud.nodes[A].volumes.logical_volumes())

    def test_as_many_leave_at_a_time_as_may(self):
        for _number in range(4):
            self.cloud.create()
        self.drain = drain.Drain(A, NAME, at_once=2)
        self.advance()
        found = self.drain.look(self.ctxt)
        self.assertEqual((2, 3), (len(found.going), len(found.ready)))
        # They have not arrived yet.
        self.advance()
        found = self.drain.look(self.ctxt)
        self.assertEqual((2, 3), (len(found.going), len(found.ready)))
        self.assertEqual((), self.empty().staying)

    def test_volume_of_a_server_stays_until_that_is_migrated(self):
        attachment = self.cloud.attach(self.volume, A)
        found = self.empty()
        self.assertIn(base.INSTANCE, self.reasons(found)[self.volume.id])
        self.assert_at(A, self.volume)
        self.cloud.detach(self.volume, attachment)
        self.assertEqual((), self.empty().staying)
        self.assert_at(B, self.volume)

    def test_volume_that_arrives_goes_on_when_it_has(self):
        self.disable(A, False)
        coming = self.cloud.create(host=B)
        self.cloud.send(coming, A)
        self.disable(A)
        found = self.advance()
        self.assertEqual({coming.id}, {one.volume_id for one in found.going})
        self.assertEqual((), self.empty().staying)
        self.assert_at(B, coming, self.volume)

    def test_volume_that_cinder_is_about_to_migrate_is_waited_for(self):
        for status in ({'migration_status': 'target:' + base.INSTANCE},
                       {'migration_status': 'starting'},
                       {'migration_status': 'migrating'},
                       {'status': 'maintenance'}, {'status': 'retyping'}):
            with self.subTest(status):
                volume = self.cloud.refresh(self.volume)
                volume.update({'status': 'available',
                               'migration_status': None, **status})
                volume.save()
                found = self.advance()
                self.assertEqual(
                    ([self.volume.id], (), ()),
                    ([one.volume_id for one in found.going], found.ready,
                     found.staying))

    def test_what_keeps_a_move_from_going_on_is_told(self):
        self.advance()
        with mock.patch.object(
                self.cloud.nodes[A].target, 'unexport',
                side_effect=exception.CommandFailed(
                    command='tgtadm', host='a', reason='no memory')):
            for _period in range(3):
                self.cloud.watch()
                self.cloud.hydrate()
        self.assertIn('no memory',
                      self.drain.look(self.ctxt).going[0].problem)

    def test_volume_with_a_snapshot_stays_and_so_does_that(self):
        snapshot = self.cloud.take_snapshot(self.volume)
        found = self.empty()
        self.assertEqual({self.volume.id, snapshot.id},
                         set(self.reasons(found)))
        self.assertIn('snapshots', self.reasons(found)[self.volume.id])
        self.assertIn(self.volume.id, self.reasons(found)[snapshot.id])

    def test_what_is_kept_for_a_snapshot_is_not_waited_for(self):
        snapshot = self.cloud.take_snapshot(self.volume)
        self.cloud.detach(self.volume, self.cloud.arrive(self.volume))
        found = self.empty()
        self.assertEqual([snapshot.id], [*self.reasons(found)])
        self.assertGreater(found.size, 0)
        self.cloud.delete_snapshot(snapshot)
        self.cloud.settle()
        self.assertEqual((0, ()), (self.empty().size, self.empty().staying))

    def test_volume_of_a_group_stays(self):
        volume = self.cloud.refresh(self.volume)
        volume.group_id = base.INSTANCE
        volume.save()
        self.assertIn('group ' + base.INSTANCE,
                      self.reasons(self.empty())[volume.id])

    def test_volume_that_is_in_error_stays(self):
        self.cloud.set_status(self.volume, 'error')
        self.assertIn('error', self.reasons(self.empty())[self.volume.id])

    def test_what_a_failed_migration_left_stays(self):
        volume = self.cloud.refresh(self.volume)
        volume.update({'status': 'error_deleting',
                       'migration_status': 'target:' + base.INSTANCE})
        volume.save()
        self.assertIn('error_deleting',
                      self.reasons(self.empty())[self.volume.id])

    def test_no_other_node_is_enabled(self):
        self.disable(B)
        self.assertIn('no backend local of this driver on another '
                      'node',
                      self.reasons(self.empty())[self.volume.id])
        self.disable(B, False)
        self.assertEqual((), self.empty().staying)

    def test_nobody_says_where_volumes_can_go(self):
        with mock.patch('cinder.scheduler.rpcapi.SchedulerAPI.get_pools',
                        side_effect=oslo_messaging.MessagingTimeout):
            self.assertRaises(exception.NoScheduler, self.advance)

    def test_backend_that_takes_new_volumes_is_not_drained(self):
        self.drain.check(self.ctxt)
        self.disable(A, False)
        error = self.assertRaises(exception.NotDisabled, self.drain.check,
                                  self.ctxt)
        self.assertIn('--disable', str(error))

    def test_backend_that_is_down_is_not_drained(self):
        service = self.cloud.services[A]
        service.updated_at = service.created_at.replace(year=2000)
        with mock.patch('cinder.objects.Service.get_by_args',
                        return_value=service):
            self.assertRaises(exception.NotUp, self.drain.check, self.ctxt)


class ChoiceTest(DrainTestCase):
    """Where volumes go."""

    hosts = (A, B, C, OTHER_BACKEND)

    def fill(self, host, gigabytes):
        for _number in range(gigabytes):
            self.cloud.create(host=host)

    def test_they_go_where_most_room_is_on_another_node(self):
        self.fill(B, 2)
        for _number in range(3):
            self.cloud.create()
        self.empty()
        self.assertEqual(
            {A: 0, OTHER_BACKEND: 0, B: 3, C: 3},
            {host: len(self.cloud.nodes[host].volumes.logical_volumes())
             for host in self.hosts})

    def test_another_one_is_tried_if_one_refuses(self):
        self.fill(C, 2)
        with mock.patch.object(
                self.cloud.managers[B].driver._service.on_destination,
                'examine', side_effect=exception.NoDataPath(
                    host='b', target='multipath')):
            self.assertEqual((), self.empty().staying)
        self.assert_at(C, self.volume)

    def test_none_takes_it(self):
        with mock.patch(
                'cinder.scheduler.filter_scheduler.FilterScheduler.'
                'backend_passes_filters', side_effect=(
                    exception.exception.NoValidBackend(reason='no zone'))):
            reason = self.reasons(self.empty())[self.volume.id]
        self.assertIn('b@local#local: refused', reason)
        self.assertIn('c@local#local: refused', reason)
        self.assertNotIn('thin', reason)
        self.assertEqual('available', self.cloud.refresh(self.volume).status)

    def test_volume_that_is_taken_meanwhile_is_left_alone(self):
        refused = exception.exception.InvalidVolume(reason='it is deleted')
        with mock.patch('cinder.volume.api.API.migrate_volume',
                        side_effect=refused) as asked:
            reason = self.reasons(self.empty())[self.volume.id]
        self.assertIn('it is deleted', reason)
        self.assertEqual(2, asked.call_count)


class NameTest(DrainTestCase):

    def test_users_without_an_instance_are_told_by_their_host(self):
        attachment = self.cloud.reserve(self.volume, instance=None)
        attachment.attached_host = 'metal'
        attachment.attach_status = fields.VolumeAttachStatus.ATTACHED
        attachment.save()
        self.assertIn('metal', self.reasons(self.empty())[self.volume.id])
