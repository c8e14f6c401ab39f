# SPDX-License-Identifier: Apache-2.0

import contextlib
import datetime
import threading
from unittest import mock

from cinder import context
from cinder.db import api as db
from cinder.db import models
from cinder.message import message_field
from cinder import objects
from cinder import quota
from cinder.tests.unit import fake_constants as fake
from cinder.tests.unit import utils as cinder_test_utils
from cinder.volume import api as volume_api
from oslo_utils import timeutils
from oslo_utils import units

from cinder_localstor.driver import unfinished
from cinder_localstor import exception
from cinder_localstor import rows
from tests.unit import base

DAY = 86400


class UnfinishedTestCase(base.TestCase):
    """Volumes of a project, with Cinder's own API and its own quotas."""

    def setUp(self):
        super().setUp()
        self.project = self.ctxt.project_id = fake.PROJECT_ID
        self.cloud = base.Cloud(self)
        self.type = cinder_test_utils.create_volume_type(self.ctxt,
                                                         name='local')
        self.volume = self.create()
        # Its client asks for the versions of the services.
        self.patch('cinder.volume.rpcapi.VolumeAPI')
        # What the API sends, to a service that dies
        self.sent = self.patch(
            'cinder.scheduler.rpcapi.SchedulerAPI.extend_volume')
        self.nova = self.patch('cinder.compute.API').return_value
        self.unfinished = unfinished.Unfinished(
            base.A, self.node.volumes, self.extend,
            self.cloud.running[base.A].custodian)

    @property
    def node(self):
        return self.cloud.nodes[base.A]

    def extend(self, ctxt, volume, size):
        self.cloud.movers[base.A].extend(ctxt, volume, size)

    def create(self, host=base.A):
        volume = self.cloud.create_volume(host)
        self.set_row(volume, volume_type_id=self.type.id)
        return volume

    def usage(self, resource='gigabytes'):
        """GiB of the project that are in use, and that are reserved."""
        found = quota.QUOTAS.get_project_quotas(
            self.ctxt, self.project)[resource]
        return found['in_use'], found['reserved']

    def ask(self, size, volume=None):
        """What a user does: the volume is `extending` then."""
        volume_api.API().extend(self.ctxt, self.cloud.refresh(
            volume or self.volume), size)

    def grow(self, size, volume=None):
        """What the driver has done when it dies."""
        volume = self.cloud.refresh(volume or self.volume)
        self.extend(self.ctxt, volume, size * units.Gi)

    def set_row(self, volume, **values):
        with db.main_context_manager.writer.using(self.ctxt) as session:
            session.query(models.Volume).filter_by(
                id=volume.id).update(values)

    def later(self, seconds):
        return mock.patch.object(
            timeutils, 'utcnow', return_value=timeutils.utcnow()
            + datetime.timedelta(seconds=seconds))

    def settle(self, later=2 * unfinished.PATIENCE):
        with self.later(later):
            self.unfinished.settle(self.ctxt)

    def expire_reservations(self):
        """What Cinder does with them after a day."""
        with self.later(2 * DAY):
            quota.QUOTAS.expire(self.ctxt)

    def state(self, volume=None):
        row = self.cloud.refresh(volume or self.volume)
        return row.status, row.size

    def messages(self):
        return [(row['project_id'], row['resource_uuid'], row['detail_id'])
                for row in db.message_get_all(self.ctxt)]


class FindTest(UnfinishedTestCase):

    def test_one_question_tells_that_nothing_is_broken_off(self):
        with base.Statements() as statements:
            self.settle()
        self.assertEqual(1, len(statements.texts))

    def test_host_whose_name_is_like_ours_is_another_one(self):
        self.set_row(self.volume, status='retyping',
                     host=base.A.replace('a', 'b', 1) + '#local')
        like = unfinished.Unfinished(
            base.A.replace('a', '_', 1), self.node.volumes, self.extend,
            self.cloud.running[base.A].custodian)
        with self.later(2 * unfinished.PATIENCE):
            like.settle(self.ctxt)
        self.assertEqual(('retyping', 1), self.state())

    def test_what_has_ended_since_the_look_is_left_alone(self):
        self.set_row(self.volume, status='retyping')
        look = rows.in_states

        def end(*args):
            found = look(*args)
            self.set_row(self.volume, status='in-use')
            return found
        with mock.patch.object(rows, 'in_states', end):
            self.settle()
        self.assertEqual(('in-use', 1), self.state())

    def test_what_was_begun_since_the_look_is_left_to_who_works_at_it(self):
        self.set_row(self.volume, status='retyping')
        with contextlib.ExitStack() as at_work:
            with mock.patch.object(
                    self.unfinished, '_settle_extensions', lambda *_args: (
                        at_work.enter_context(
                            self.unfinished.under_way(self.volume.id)))):
                self.settle()
            self.assertEqual(('retyping', 1), self.state())
        self.settle()
        self.assertEqual(('available', 1), self.state())


class BeginningTest(UnfinishedTestCase):
    """A request that has waited on the bus comes while it is settled."""

    def test_who_comes_first_is_left_to_work(self):
        self.ask(3)
        find = self.unfinished._reservations
        with contextlib.ExitStack() as at_work:
            def begin(*args):
                at_work.enter_context(
                    self.unfinished.under_way(self.volume.id))
                return find(*args)
            with mock.patch.object(self.unfinished, '_reservations', begin):
                self.settle()
            self.assertEqual(('extending', 1), self.state())
            self.assertEqual((1, 2), self.usage())
            self.assertEqual([], self.messages())

    def test_who_comes_later_finds_what_has_become_of_it(self):
        self.ask(3)
        found = []

        def begin():
            with self.unfinished.under_way(self.volume.id):
                found.append(unfinished.is_given_up(
                    context.get_admin_context(), self.volume.id))
        late = threading.Thread(target=begin)
        change = objects.Volume.conditional_update

        def change_slowly(*args):
            late.start()
            late.join(0.1)
            self.assertEqual([], found)
            return change(*args)
        with mock.patch.object(objects.Volume, 'conditional_update',
                               change_slowly):
            self.settle()
        late.join()
        self.assertEqual([True], found)


class ExtensionTest(UnfinishedTestCase):

    def test_not_begun_is_taken_back_and_the_user_is_told(self):
        self.ask(3)
        self.assertEqual(('extending', 1), self.state())
        self.assertEqual((1, 2), self.usage())

        self.settle()

        self.assertEqual(('available', 1), self.state())
        self.assertEqual((1, 0), self.usage())
        self.assertEqual(
            [(self.project, self.volume.id,
              message_field.Detail.DRIVER_FAILED_EXTEND[0])],
            self.messages())

    def test_done_on_the_node_is_done(self):
        self.ask(3)
        self.grow(3)

        self.settle()

        self.assertEqual(('available', 3), self.state())
        self.assertEqual((3, 0), self.usage())
        self.assertEqual([], self.messages())

    def test_handle_that_has_not_grown_yet_grows(self):
        self.ask(3)
        self.node.volumes.extend(self.volume.name, 3 * units.Gi)

        self.settle()

        handle = self.node.device_mapper.nodes[self.volume.name + '-handle']
        self.assertEqual(3 * units.Gi // 512, sum(
            segment.length for segment in handle.table))

    def test_volume_in_use_stays_so_and_nova_is_told_of_its_size(self):
        attachment = self.cloud.reserve(self.volume, {'host': 'a'})
        self.cloud.set_status(self.volume, 'in-use')
        volume_api.API().extend_attached_volume(
            self.ctxt, self.cloud.refresh(self.volume), 2)
        self.grow(2)

        self.settle()

        self.assertEqual(('in-use', 2), self.state())
        self.nova.extend_volume.assert_called_once_with(
            mock.ANY, [attachment.instance_uuid], self.volume.id)

    def test_committed_before_the_crash_counts_once(self):
        self.ask(3)
        self.grow(3)
        reservations = self.sent.call_args.args[3]
        quota.QUOTAS.commit(self.ctxt, reservations,
                            project_id=self.project)

        self.settle()

        self.assertEqual(('available', 3), self.state())
        self.assertEqual((3, 0), self.usage())

    def test_crash_after_the_commit_counts_once(self):
        self.ask(3)
        self.grow(3)
        with mock.patch.object(objects.Volume, 'conditional_update',
                               side_effect=KeyboardInterrupt):
            self.assertRaises(KeyboardInterrupt, self.settle)

        self.settle()

        self.assertEqual(('available', 3), self.state())
        self.assertEqual((3, 0), self.usage())

    def test_reservation_that_has_expired_is_made_again(self):
        self.ask(3)
        self.grow(3)
        self.expire_reservations()
        self.assertEqual((1, 0), self.usage())

        self.settle(later=2 * DAY)

        self.assertEqual(('available', 3), self.state())
        self.assertEqual((3, 0), self.usage())

    def test_without_quota_for_it_the_volume_keeps_its_size(self):
        self.ask(3)
        self.grow(3)
        self.expire_reservations()
        db.quota_create(self.ctxt, self.project, 'gigabytes', 2)

        self.settle(later=2 * DAY)

        self.assertEqual(('available', 1), self.state())
        self.assertEqual((1, 0), self.usage())
        self.assertEqual(1, len(self.messages()))

    def test_two_at_once_have_a_reservation_each(self):
        other = self.create()
        self.ask(3)
        self.ask(5, other)
        self.grow(5, other)

        self.settle()

        self.assertEqual(('available', 1), self.state())
        self.assertEqual(('available', 5), self.state(other))
        self.assertEqual((6, 0), self.usage())

    def test_quota_of_the_volumes_type_is_right_too(self):
        self.ask(3)
        self.assertEqual((1, 2), self.usage('gigabytes_local'))
        self.settle()
        self.assertEqual((1, 0), self.usage('gigabytes_local'))

        self.ask(3)
        self.grow(3)
        self.settle()

        self.assertEqual((3, 0), self.usage('gigabytes_local'))
        self.assertEqual((3, 0), self.usage())

    def test_what_has_just_begun_is_left_alone(self):
        self.ask(3)

        self.settle(later=unfinished.PATIENCE // 2)

        self.assertEqual(('extending', 1), self.state())

    def test_what_is_asked_for_twice_is_left_alone_until_both_have_ended(self):
        self.ask(3)
        with self.unfinished.under_way(self.volume.id):
            with self.unfinished.under_way(self.volume.id):
                pass
            self.settle()
            self.assertEqual(('extending', 1), self.state())
        self.settle()
        self.assertEqual(('available', 1), self.state())

    def test_volumes_of_others_are_left_alone(self):
        other = self.create(base.B)
        self.ask(3, other)

        self.settle()

        self.assertEqual(('extending', 1), self.state(other))

    def test_volume_that_can_not_be_settled_does_not_stop_the_others(self):
        lost = self.volume
        other = self.create()
        self.ask(3)
        self.ask(3, other)
        del self.node.volumes.disks[lost.name]

        self.settle()

        self.assertEqual(('extending', 1), self.state(lost))
        self.assertEqual(('available', 1), self.state(other))

    def test_volume_that_may_yet_go_back_waits(self):
        self.ask(3)
        self.node.volumes.extend(self.volume.name, 3 * units.Gi)
        with mock.patch.object(
                self.unfinished, '_extend',
                side_effect=exception.VolumeIsMoving(
                    volume_id='v', move_id='m', state='starting',
                    action='extending it', destination='b')):
            self.settle()
            self.assertEqual(('extending', 1), self.state())

        self.settle()

        self.assertEqual(('available', 3), self.state())

    def test_extension_that_comes_late_is_not_wanted(self):
        self.ask(3)
        self.assertFalse(unfinished.is_given_up(self.ctxt, self.volume.id))
        self.settle()
        self.assertTrue(unfinished.is_given_up(self.ctxt, self.volume.id))

        # The user tries again.
        self.ask(2)

        self.assertFalse(unfinished.is_given_up(self.ctxt, self.volume.id))


class RetypeTest(UnfinishedTestCase):

    def test_volume_is_as_it_was(self):
        self.set_row(self.volume, status='retyping')
        self.settle()
        self.assertEqual(('available', 1), self.state())

    def test_volume_that_was_migrated_before_is_as_it_was(self):
        self.set_row(self.volume, status='retyping',
                     migration_status='success')
        self.settle()
        self.assertEqual(('available', 1), self.state())

    def test_volume_that_cinder_copies_is_left_to_it(self):
        self.set_row(self.volume, status='retyping',
                     migration_status='migrating')
        self.settle()
        self.assertEqual(('retyping', 1), self.state())


class RevertTest(UnfinishedTestCase):

    def setUp(self):
        super().setUp()
        self.snapshot = self.cloud.snapshot_row(self.volume)
        self.snapshot.update(self.cloud.running[base.A].keeper.create(
            self.ctxt, self.snapshot))
        self.snapshot.save()

    def ask(self):
        """What a user does."""
        self.set_row(self.volume, status='reverting')
        self.snapshot.status = 'restoring'
        self.snapshot.save()

    def assert_settled(self, told):
        self.settle()
        self.assertEqual(('available', 1), self.state())
        self.snapshot.refresh()
        self.assertEqual('available', self.snapshot.status)
        self.assertEqual(told, [row[1:] for row in self.messages()])

    def test_not_begun_it_is_as_it_was_and_the_user_is_told(self):
        self.ask()
        self.assert_settled([(self.volume.id, (
            message_field.Detail.DRIVER_FAILED_CREATE[0]))])

    def test_done_it_is_done(self):
        self.ask()
        self.cloud.running[base.A].copier.revert(
            self.ctxt, self.cloud.refresh(self.volume), self.snapshot)
        self.assert_settled([])

    def test_snapshot_is_free_though_its_volume_was_settled_before(self):
        self.ask()
        self.set_row(self.volume, status='available')
        self.assert_settled([])

    def test_one_that_is_under_way_goes_on(self):
        self.ask()
        with self.unfinished.under_way(self.volume.id):
            self.settle()
            self.assertEqual(('reverting', 1), self.state())
            self.snapshot.refresh()
            self.assertEqual('restoring', self.snapshot.status)
        self.settle()
        self.assertEqual(('available', 1), self.state())


class SnapshotTest(UnfinishedTestCase):
    """Snapshots whose deletion has died with the service."""

    def snapshot(self, status='deleting'):
        return cinder_test_utils.create_snapshot(
            self.ctxt, self.volume.id, status=status,
            volume_type_id=self.type.id)

    def status(self, snapshot):
        return objects.Snapshot.get_by_id(self.ctxt, snapshot.id).status

    def test_it_can_be_deleted_again_and_the_user_is_told(self):
        snapshot = self.snapshot()

        self.settle()

        self.assertEqual('error', self.status(snapshot))
        [row] = db.message_get_all(self.ctxt)
        self.assertEqual((snapshot.id, 'VOLUME_SNAPSHOT'), (
            row['resource_uuid'], row['resource_type']))

    def test_one_that_may_be_under_way_goes_on(self):
        snapshot = self.snapshot()
        self.settle(later=unfinished.PATIENCE - 1)
        self.assertEqual('deleting', self.status(snapshot))

    def test_one_of_a_volume_that_is_deleted_with_it_goes_on(self):
        snapshot = self.snapshot()
        self.set_row(self.volume, status='deleting')
        self.settle()
        self.assertEqual('deleting', self.status(snapshot))

    def test_others_are_left_alone(self):
        snapshots = [self.snapshot(status)
                     for status in ('available', 'creating', 'error')]
        self.settle()
        self.assertEqual(['available', 'creating', 'error'],
                         [self.status(snapshot) for snapshot in snapshots])
