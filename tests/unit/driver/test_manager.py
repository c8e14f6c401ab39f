# SPDX-License-Identifier: Apache-2.0
"""What Cinder's own volume manager does with our volumes."""

import contextlib
import threading
from unittest import mock

from cinder.api import microversions as mv
from cinder.api.v3 import attachments
from cinder import context
from cinder.db import api as db
from cinder.db import models
from cinder import exception as cinder_exception
from cinder import objects
from cinder.tests.unit.api import fakes
from cinder.tests.unit import fake_constants as fake
from cinder.volume import qos_specs
from cinder.volume import rpcapi
import ddt
from oslo_concurrency import processutils
from oslo_utils import timeutils
from oslo_utils import units
from oslo_utils import uuidutils
import tenacity
import testtools

from cinder_localstor.datapath import handles
from cinder_localstor.datapath import transfer
from cinder_localstor.driver import localstor
from cinder_localstor.driver import unfinished
from cinder_localstor import exception
from cinder_localstor.moves import gate
from cinder_localstor.moves import mover
from cinder_localstor.moves import properties
from cinder_localstor.moves import table
from cinder_localstor.node import simulated
from cinder_localstor.peers import directory
from cinder_localstor import rows
from tests.unit import base
from tests.unit import services

A, B, C = base.A, base.B, base.C


class ManagerTestCase(base.TestCase):

    hosts = (A, B)

    def setUp(self):
        super().setUp()
        self.cloud = services.Services(self, self.hosts)
        self.volume = self.cloud.create()

    def let_volumes_arrive(self):
        """Whatever waits for it sees volumes arrive meanwhile."""
        def pass_by(_seconds):
            for node in self.cloud.nodes.values():
                node.hydrate()
            self.cloud.watch()

        self.patch('tenacity.nap.time').sleep.side_effect = pass_by

    def make_thin(self, *hosts):
        """Let nodes have thin pools, and the volume be anew."""
        self.cloud.delete(self.volume)
        for host in hosts:
            self.cloud.nodes[host].volumes.pool_size = 64 * units.Gi
        self.volume = self.cloud.create()

    def settle_unfinished(self, host=A, patience=-2):
        """Let the periodic task settle what has not changed for so many
        seconds.
        """
        with mock.patch.object(unfinished, 'PATIENCE', patience):
            self.cloud.managers[host].driver._settle_unfinished()

    @contextlib.contextmanager
    def slow(self, adapter, call):
        """Let a call of a node's take longer than what is not broken off."""
        of = getattr(self.cloud.nodes[A], adapter)
        does = getattr(of, call)

        def look(*args, **kwargs):
            self.settle_unfinished()
            return does(*args, **kwargs)

        with mock.patch.object(of, call, side_effect=look) as called:
            yield
        called.assert_called()

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

    def test_delete_looks_for_no_moves_of_others(self):
        with mock.patch.object(rows, 'for_host') as search:
            self.assertTrue(self.cloud.delete(self.volume))
        search.assert_not_called()

    def test_volume_follows_its_instance(self):
        attachment = self.cloud.arrive(self.volume)
        self.assertEqual(B, self.cloud.host_of(self.volume))
        self.assertEqual('in-use', self.refresh().status)
        self.assert_whole()
        self.cloud.detach(self.volume, attachment)
        self.assertEqual('available', self.refresh().status)
        self.assertTrue(self.cloud.delete(self.volume))
        self.assert_nothing_left()

    def test_volume_follows_an_instance_that_was_shelved_when_it_got_it(self):
        attachment = self.cloud.reserve(self.volume)
        # Nova completes what it attaches though there is no node for it.
        attachments.AttachmentsController(mock.Mock()).complete(
            fakes.HTTPRequest.blank('/v3/attachments', use_admin_context=True,
                                    version=mv.NEW_ATTACH_COMPLETION),
            attachment.id, body={'os-complete': {}})
        self.assertEqual('in-use', self.refresh().status)
        connection = services.rpcapi.VolumeAPI().attachment_update(
            self.ctxt, self.refresh(), self.cloud.connector(B), attachment.id)
        self.assertEqual('local', connection['driver_volume_type'])
        self.cloud.watch()
        self.assertEqual(B, self.cloud.host_of(self.volume))
        self.assert_whole()

    def test_limits_of_its_type_reach_whoever_attaches_it(self):
        limits = qos_specs.create(self.ctxt, 'limits', {
            'consumer': 'front-end', 'total_iops_sec_per_gb': '30'})
        qos_specs.associate_qos_with_type(self.ctxt, limits.id,
                                          self.refresh().volume_type_id)
        for host in (A, B):
            attachment = self.cloud.reserve(self.volume)
            connection = services.rpcapi.VolumeAPI().attachment_update(
                self.ctxt, self.refresh(), self.cloud.connector(host),
                attachment.id)
            self.assertEqual(
                ('local', {'total_iops_sec': 30}),
                (connection['driver_volume_type'], connection['qos_specs']))
            attachment.destroy()


class CreateTest(ManagerTestCase):

    def test_volume_without_a_handle_leaves_nothing(self):
        # Cinder would try it on another node then.
        mapper = self.cloud.nodes[A].device_mapper
        with mock.patch.object(mapper, 'create', side_effect=(
                exception.CommandFailed(command='dmsetup create', host='a',
                                        reason='no memory'))):
            volume = self.cloud.create()
        self.assertEqual('error', volume.status)
        self.assert_nothing_left(self.volume)

    def test_volume_that_is_there_is_never_taken_back(self):
        mapper = self.cloud.nodes[A].device_mapper
        with mock.patch.object(mapper, 'reload', side_effect=(
                exception.CommandFailed(command='dmsetup reload', host='a',
                                        reason='no memory'))):
            self.assertRaises(
                exception.CommandFailed,
                self.cloud.driver(self.volume).create_volume, self.volume)
        self.assert_whole()


class TypeTest(ManagerTestCase):
    """What volumes are made whose type has extra specs of ours."""

    def create(self, **specs):
        made = db.volume_type_create(self.ctxt, {
            'name': 'gold', 'extra_specs': specs})
        return self.cloud.create(volume_type_id=made['id'])

    def test_what_can_be_heeded(self):
        self.assertEqual('available', self.create(
            **{'localstor:hydration_rate': '20'}).status)

    def test_what_can_not_be_heeded_is_not_made(self):
        self.assertEqual('error', self.create(
            **{'localstor:hydration_rate': 'fast'}).status)
        self.assert_nothing_left(self.volume)

    def test_api_tells_of_our_extra_specs(self):
        driver = self.cloud.driver(self.volume)
        driver.init_capabilities()
        self.assertEqual('localstor', driver.capabilities['vendor_prefix'])
        for key in properties.PROPERTIES:
            self.assertIn(key, driver.capabilities['properties'])


class CapacityTest(ManagerTestCase):
    """What the schedulers hear of how much is allocated."""

    def allocated(self):
        found = []
        for host in (A, B):
            manager = self.cloud.managers[host]
            with self.cloud.process(host):
                manager.publish_service_capabilities(self.ctxt)
            pool, = manager.last_capabilities['pools']
            found.append(pool['allocated_capacity_gb'])
        return found

    def test_it_follows_the_volume(self):
        self.assertEqual([1, 0], self.allocated())
        attachment = self.cloud.attach(self.volume, B)
        # The source copy takes its space till the end.
        self.assertEqual([1, 1], self.allocated())
        self.cloud.settle()
        self.assertEqual([0, 1], self.allocated())
        self.cloud.detach(self.volume, attachment)
        self.cloud.delete(self.volume)
        self.assertEqual([0, 0], self.allocated())

    def test_start_in_mid_move_counts_nothing_for_good(self):
        self.cloud.attach(self.volume, B)
        self.cloud.reboot(A)
        self.assertEqual([1, 1], self.allocated())
        self.cloud.settle()
        self.assertEqual([0, 1], self.allocated())


class NotWantedTest(ManagerTestCase):

    def test_attachment_that_is_deleted_before_it_has_a_connection(self):
        driver = self.cloud.driver(self.volume)
        create_export = driver.create_export

        def and_give_up(*arguments):
            update = create_export(*arguments)
            for row in rows.attachments(self.ctxt, self.volume.id):
                db.attachment_destroy(self.ctxt, row['id'])
            return update

        with mock.patch.object(driver, 'create_export', and_give_up):
            error = self.assertRaises(
                cinder_exception.VolumeBackendAPIException,
                self.cloud.attach, self.volume, B)
        self.assertIn('Nobody waits', str(error))
        self.assertEqual(A, self.cloud.host_of(self.volume))
        self.assert_whole()


class PeerTest(ManagerTestCase):
    """A connector names a node that no scheduler has chosen."""

    def change(self, host, **values):
        """An operator says something of a volume service."""
        service = objects.Service.get_by_id(self.ctxt,
                                            self.cloud.services[host].id)
        service.update(values)
        service.save()

    def disable(self, host):
        self.change(host, disabled=True, disabled_reason='new disks')

    def assert_refused(self, host, *parts):
        error = self.assertRaises(
            cinder_exception.VolumeBackendAPIException, self.cloud.attach,
            self.volume, host)
        for part in (self.volume.id, host, *parts):
            self.assertIn(part, str(error))
        self.assertIsNone(self.state())
        self.assertEqual(A, self.cloud.host_of(self.volume))

    def test_nothing_moves_to_a_node_that_is_disabled(self):
        self.disable(B)
        self.assert_refused(B, 'new disks', 'volume service set --enable')
        self.change(B, disabled=False)
        self.cloud.arrive(self.volume)
        self.assert_whole()

    def test_guest_does_not_migrate_to_a_node_that_is_disabled(self):
        self.cloud.attach(self.volume, A)
        self.disable(B)
        self.assert_refused(B)
        self.assert_whole()

    def test_node_that_is_disabled_keeps_what_it_has(self):
        self.disable(A)
        attachment = self.cloud.attach(self.volume, A)
        self.cloud.detach(self.volume, attachment)
        self.assert_whole()

    def test_node_that_is_disabled_can_be_drained(self):
        self.disable(A)
        self.cloud.arrive(self.volume)
        self.assertEqual(B, self.cloud.host_of(self.volume))
        self.assert_whole()
        self.assert_nothing_left(self.volume)

    def test_what_is_on_its_way_arrives_at_a_node_that_is_disabled(self):
        self.cloud.attach(self.volume, B)
        self.disable(B)
        self.cloud.reboot(B)
        self.cloud.settle()
        self.assert_whole()
        self.assert_nothing_left(self.volume)

    def test_volume_crosses_zones_unless_it_must_not(self):
        self.change(B, availability_zone='west')
        self.cloud.arrive(self.volume)
        self.assertEqual('west', self.refresh().availability_zone)

    def test_volume_stays_in_its_zone_where_it_must(self):
        self.override('localstor_cross_az_attach', False)
        self.change(B, availability_zone='west')
        self.assert_refused(B, "'nova'", "'west'",
                            'localstor_cross_az_attach')
        self.change(B, availability_zone='nova')
        self.cloud.arrive(self.volume)
        self.assert_whole()


class ForgottenGuestTest(ManagerTestCase):
    """A guest goes on of which Nova has told Cinder that it has gone."""

    def setUp(self):
        super().setUp()
        self.patch('cinder_localstor.moves.mover.PATIENCE', 0)
        self.cloud.open_count(self.volume, +1)

    def assert_refused(self, host):
        error = self.assertRaises(cinder_exception.VolumeBackendAPIException,
                                  self.cloud.attach, self.volume, host)
        self.assertIn('still open', str(error))
        self.assertIn(handles.handle_name(self.volume.name), str(error))

    def test_no_other_guest_writes_beside_it(self):
        self.assert_refused(A)
        self.cloud.open_count(self.volume, -1)
        self.cloud.attach(self.volume, A)

    def test_no_other_guest_has_what_it_still_writes(self):
        self.assert_refused(B)
        self.cloud.open_count(self.volume, -1)
        self.cloud.arrive(self.volume)
        self.assert_whole()


class DeleteTest(ManagerTestCase):
    """A delete in the middle of a move."""

    def setUp(self):
        super().setUp()
        attachment = self.cloud.attach(self.volume, B)
        self.cloud.detach(self.volume, attachment)
        self.assertEqual(table.State.MIGRATING, self.state())

    def test_volume_that_is_open_is_not_deleted(self):
        self.cloud.open_count(self.volume, +1)
        self.assertFalse(self.cloud.delete(self.volume))
        self.assertEqual('available', self.refresh().status)
        self.assertEqual(table.State.MIGRATING, self.state())
        self.cloud.open_count(self.volume, -1)
        self.cloud.settle()
        self.assert_whole()

    def open_as_it_is_recorded(self):
        """Something opens the handle when the delete is recorded already."""
        change_state = rows.change_state

        def and_open(ctxt, move, state, **swap):
            changed = change_state(ctxt, move, state, **swap)
            if state == table.State.DISCARDING:
                self.cloud.open_count(self.volume, +1)
            return changed

        return mock.patch.object(rows, 'change_state', and_open)

    def test_recorded_delete_is_not_taken_back(self):
        with self.open_as_it_is_recorded():
            self.assertTrue(self.cloud.delete(self.volume))
        self.cloud.nodes[B].device_mapper.nodes[handles.handle_name(
            self.cloud.row(self.volume).name)].open_count -= 1
        self.cloud.settle()
        self.assert_nothing_left()

    def test_what_is_being_removed_is_not_attached(self):
        move, = rows.for_volume(self.ctxt, self.volume.id)
        rows.change_state(self.ctxt, move, table.State.DISCARDING.value)
        # So that it is not removed meanwhile
        self.cloud.open_count(self.volume, +1)
        for host in (A, B):
            error = self.assertRaises(
                cinder_exception.VolumeBackendAPIException,
                self.cloud.attach, self.volume, host)
            self.assertIn('was deleted', str(error))


class RestartTest(ManagerTestCase):
    """What is exported when a node comes back."""

    READER = {'host': 'reader', 'ip': '192.0.2.9', 'initiator': 'iqn.z'}

    def test_arriving_volume_is_exported_when_its_handle_is_there(self):
        self.cloud.attach(self.volume, B)
        self.cloud.ask(B, 'initialize_connection', volume=self.refresh(),
                       connector=self.READER)
        self.cloud.reboot(B)
        self.assertEqual('in-use', self.refresh().status)
        driver = self.cloud.managers[B].driver
        with self.cloud.process(B):
            driver._watch_moves()
            driver._watch_moves()
        self.assertEqual([self.cloud.row(self.volume).name],
                         list(self.cloud.nodes[B].remote.exports))
        self.cloud.settle()
        self.assert_whole()

    def test_move_that_the_first_version_has_begun_goes_on(self):
        with mock.patch.object(rows, 'new_move_id', return_value=fake.UUID1):
            self.cloud.attach(self.volume, B)
        self.assertIsNone(self.state())
        self.cloud.reboot(B)
        self.assertEqual(table.State.MIGRATING, self.state())
        self.cloud.settle()
        self.assert_whole()
        self.assert_nothing_left(self.volume)

    def test_standing_volume_is_exported_at_once(self):
        self.cloud.ask(A, 'initialize_connection', volume=self.refresh(),
                       connector=self.READER)
        self.cloud.set_status(self.volume, 'in-use')
        self.cloud.reboot(A)
        self.assertEqual('in-use', self.refresh().status)
        self.assertEqual([self.volume.name],
                         list(self.cloud.nodes[A].remote.exports))


class RateTest(ManagerTestCase):
    """Helpers outlive the service, and what an operator changes meanwhile."""

    data_path = 'hydrator'

    def arrive_at(self, rate):
        """Restart the service of the node that the volume arrives at.

        :param rate: what the option allows from then on, MiB per second
        :returns: what the helper is held to a period later
        """
        self.override('localstor_hydration_rate', rate)
        self.cloud.boot(B)
        self.cloud.watch()
        process, = self.cloud.nodes[B].hydrators.processes.values()
        return process.limit

    def test_running_helper_hears_of_a_changed_rate(self):
        self.cloud.attach(self.volume, B)
        self.cloud.watch()
        self.assertEqual(90 * units.Mi, self.arrive_at(90))
        self.assertEqual(30 * units.Mi, self.arrive_at(30))
        self.assertIsNone(self.arrive_at(0))


class GroupTestCase(ManagerTestCase):
    """A generic group is on one node."""

    # Of the group's type
    specs: dict[str, str] = {}

    def setUp(self):
        super().setUp()
        made = db.group_type_create(
            self.ctxt, {'name': 'a type', 'group_specs': self.specs})
        self.group = objects.Group(
            self.ctxt, host=A + '#local', status='creating', name='a group',
            group_type_id=made['id'], volume_type_ids=[self.vt['id']],
            user_id='user', project_id='project', availability_zone='nova')
        self.group.create()
        self.cloud.ask(A, 'create_group', group=self.group)

    def add(self, volume, host=A):
        self.cloud.ask(host, 'update_group', group=self.group,
                       add_volumes=volume.id)


class GroupTest(GroupTestCase):

    def test_volume_of_a_group_stays_and_goes_with_the_group(self):
        self.add(self.volume)
        attachment = self.cloud.attach(self.volume, B, 'iscsi')
        self.assertEqual(A, self.cloud.host_of(self.volume))
        self.cloud.detach(self.volume, attachment)
        self.cloud.ask(A, 'delete_group', group=self.group)
        self.assert_nothing_left()

    def test_volume_that_is_not_sure_of_its_node_is_not_taken_in(self):
        here = self.cloud.attach(self.volume, A)
        self.cloud.attach(self.volume, B)
        self.assertEqual(table.State.STARTING, self.state())
        self.group.host = B + '#local'
        self.group.save()
        error = self.assertRaises(exception.VolumeIsMoving, self.add,
                                  self.volume, B)
        self.assertIn('one node only', str(error))
        self.assertIsNone(self.refresh().group_id)
        here.destroy()


class GroupSnapshotTest(GroupTestCase):
    """What Cinder makes of a group by its own means, a volume at a time."""

    def setUp(self):
        super().setUp()
        self.add(self.volume)
        self.second = self.cloud.create()
        self.add(self.second)
        for volume in (self.volume, self.second):
            self.cloud.write(volume, 1, volume.id)
        self.then = sorted((self.volume.id, self.second.id))

    def take(self):
        """A snapshot of the group, and then something else is written."""
        self.group.refresh()
        taken = self.cloud.snapshot_group(self.group)
        for volume in (self.volume, self.second):
            self.cloud.write(volume, 1, 'later')
        return taken

    def delete_all(self, *groups):
        for group in groups:
            self.cloud.ask(A, 'delete_group', group=group)

    def assert_made(self, **source):
        """A group is made that holds what this one has held."""
        made = self.cloud.make_group(**source)
        self.assertEqual(('available', A + '#local'), (made.status, made.host))
        for _time in range(2):
            self.assertEqual(self.then, sorted(
                self.cloud.read(volume)[1] for volume in made.volumes))
            self.cloud.settle()
        return made

    def test_snapshot_is_taken_and_deleted(self):
        taken = self.take()
        self.assertEqual(('available', ['available'] * 2), (
            taken.status, [row.status for row in taken.snapshots]))
        self.cloud.delete_group_snapshot(taken)
        self.assertRaises(cinder_exception.GroupSnapshotNotFound,
                          objects.GroupSnapshot.get_by_id, self.ctxt,
                          taken.id)
        self.delete_all(self.group)
        self.assert_nothing_left()

    def test_group_is_made_of_a_snapshot(self):
        taken = self.take()
        made = self.assert_made(group_snapshot_id=taken.id)
        self.cloud.delete_group_snapshot(taken)
        self.delete_all(made, self.group)
        self.assert_nothing_left()

    def test_group_is_made_of_a_group(self):
        made = self.assert_made(source_group_id=self.group.id)
        self.delete_all(made, self.group)
        self.assert_nothing_left()


@ddt.ddt
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
        self.assertNotEqual({}, self.cloud.nodes[A].remote.exports)
        self.disconnect()
        self.assertEqual({}, self.cloud.nodes[A].remote.exports)
        self.assertIsNone(self.refresh().provider_location)
        self.cloud.arrive(self.volume)
        self.assert_whole()

    def test_volume_does_not_move_during_a_backup(self):
        self.connect()
        self.assertRaises(cinder_exception.VolumeBackendAPIException,
                          self.cloud.attach, self.volume, B)
        self.assertNotEqual({}, self.cloud.nodes[A].remote.exports)
        self.assert_whole()

    def look_for_idle_exports(self):
        for _time in range(2):
            self.cloud.driver(self.volume)._end_exports()

    def test_export_that_can_not_be_ended_keeps_no_other(self):
        remote = self.cloud.nodes[A].remote
        for volume in (self.volume, self.cloud.create(A)):
            self.volume = volume
            self.cloud.set_status(volume, 'backing-up')
            self.connect()
            self.cloud.set_status(volume, 'available')
        self.assertEqual(2, len(remote.exports))
        with mock.patch.object(remote, 'unexport', side_effect=[
                exception.LocalStorException(reason='busy'), mock.DEFAULT],
                wraps=remote.unexport):
            self.look_for_idle_exports()
        self.assertEqual(1, len(remote.exports))
        self.look_for_idle_exports()
        self.assertEqual({}, remote.exports)

    @ddt.data('export', 'connect')
    def test_what_dies_while_it_connects_leaves_no_export(self, call):
        remote = self.cloud.nodes[A].remote
        work = getattr(remote, call)

        def and_die(*arguments):
            work(*arguments)
            raise simulated.Crash(A, call)
        self.cloud.set_status(self.volume, 'backing-up')
        with mock.patch.object(remote, call, and_die):
            self.assertRaises(simulated.Crash, self.connect)
        self.assertNotEqual({}, remote.exports)
        # Cinder does so where the service that makes a backup starts again.
        self.cloud.set_status(self.volume, 'available')
        self.look_for_idle_exports()
        self.assertEqual({}, remote.exports)
        self.cloud.arrive(self.volume)
        self.assert_whole()

    def test_what_dies_before_it_exports_leaves_no_row_that_says_so(self):
        remote = self.cloud.nodes[A].remote
        with mock.patch.object(remote, 'export',
                               side_effect=simulated.Crash(A, 'export')):
            self.assertRaises(simulated.Crash, self.connect)
        self.assertIsNotNone(self.refresh().provider_location)
        self.cloud.reboot(A)
        self.cloud.driver(self.volume)._export_again()
        self.look_for_idle_exports()
        self.assertIsNone(self.refresh().provider_location)
        self.assertEqual({}, remote.exports)
        self.cloud.arrive(self.volume)
        self.assert_whole()

    def test_what_goes_while_it_is_exported_again_does_not_stay(self):
        self.connect()
        remote = self.cloud.nodes[A].remote
        ensure, driver = remote.ensure, self.cloud.driver(self.volume)
        ctxt = context.RequestContext.from_dict(self.cloud.ctxt.to_dict())
        remover = threading.Thread(target=driver.remove_export,
                                   args=(ctxt, self.refresh()))

        def and_go(*arguments):
            remover.start()
            remover.join(1)
            ensure(*arguments)
        with mock.patch.object(remote, 'ensure', and_go):
            driver.ensure_export(self.ctxt, self.refresh())
        remover.join()
        self.assertIsNone(self.refresh().provider_location)
        self.assertEqual({}, remote.exports)

    def test_export_that_failed_is_not_recorded(self):
        with mock.patch.object(self.cloud.nodes[A].remote, 'export',
                               side_effect=processutils.ProcessExecutionError):
            self.assertRaises(processutils.ProcessExecutionError,
                              self.connect)
        self.assertIsNone(self.refresh().provider_location)

    @ddt.data('backing-up', 'uploading', 'restoring-backup')
    def test_export_that_is_read_stays(self, status):
        self.cloud.set_status(self.volume, status)
        self.connect()
        self.look_for_idle_exports()
        self.assertNotEqual({}, self.cloud.nodes[A].remote.exports)

    def test_export_that_an_attachment_may_be_for_stays(self):
        self.connect()
        self.cloud.reserve(self.volume)
        self.cloud.set_status(self.volume, 'in-use')
        self.look_for_idle_exports()
        self.assertNotEqual({}, self.cloud.nodes[A].remote.exports)

    def test_clone_that_a_backup_reads_stays_exported(self):
        self.connect()
        backup = objects.Backup(
            self.ctxt, volume_id=uuidutils.generate_uuid(), status='creating',
            temp_volume_id=self.volume.id, user_id=fake.USER_ID,
            project_id=fake.PROJECT_ID)
        backup.create()
        self.look_for_idle_exports()
        self.assertNotEqual({}, self.cloud.nodes[A].remote.exports)
        backup.temp_volume_id = None
        backup.save()
        self.look_for_idle_exports()
        self.assertEqual({}, self.cloud.nodes[A].remote.exports)

    def test_volume_that_cinder_copies_stays_exported(self):
        self.connect()
        self.volume.refresh()
        self.volume.migration_status = 'migrating'
        self.volume.save()
        self.look_for_idle_exports()
        self.assertNotEqual({}, self.cloud.nodes[A].remote.exports)

    def restore(self):
        """Write a backup to the volume; it is no device of the reader's."""
        host = self.cloud.host_of(self.volume)
        self.cloud.set_status(self.volume, 'restoring-backup')
        connection = self.cloud.ask(
            host, 'initialize_connection', volume=self.refresh(),
            connector=self.BACKUP)
        for number in range(16):
            self.cloud.nodes[host].write(connection['data']['device_path'],
                                         number, 'restored %d' % number)
            self.cloud.content[self.volume.id][number] = (
                'restored %d' % number)
        self.cloud.ask(host, 'terminate_connection',
                       volume_id=self.volume.id, connector=self.BACKUP)
        self.cloud.ask(host, 'remove_export', volume_id=self.volume.id)
        self.cloud.set_status(self.volume, 'available')
        self.assertEqual({}, self.cloud.nodes[host].remote.exports)

    def test_backup_is_restored(self):
        self.restore()
        self.assert_whole()
        self.cloud.arrive(self.volume)
        self.assert_whole()

    def test_backup_is_restored_in_mid_move(self):
        attachment = self.cloud.attach(self.volume, B)
        self.cloud.detach(self.volume, attachment)
        self.assertEqual(table.State.MIGRATING, self.state())
        self.restore()
        self.assert_whole()
        self.cloud.settle()
        self.assert_whole()
        self.assert_nothing_left(self.volume)

    def test_node_that_restores_gets_no_volume(self):
        self.BACKUP = self.cloud.connector(B)
        self.restore()
        self.assertEqual(A, self.cloud.host_of(self.volume))
        self.assert_whole()

    def test_device_of_a_backup_is_the_volume_itself(self):
        backup = objects.Backup(self.ctxt, volume_id=self.volume.id,
                                user_id='user', project_id='project',
                                host='backup', status='creating')
        backup.create()
        answer = self.cloud.ask(A, 'get_backup_device', backup=backup)
        self.assertEqual(self.volume.id, answer['backup_device'].id)
        self.assertFalse(answer['is_snapshot'])

    def test_volume_in_use_is_not_backed_up_in_mid_move(self):
        # Cinder clones it.
        self.cloud.attach(self.volume, B)
        volume = self.refresh()
        volume.previous_status = 'in-use'
        volume.save()
        backup = objects.Backup(self.ctxt, volume_id=volume.id,
                                user_id='user', project_id='project',
                                host='backup', status='creating')
        backup.create()
        error = self.assertRaises(
            exception.VolumeIsMoving,
            self.cloud.driver(self.volume).get_backup_device, self.ctxt,
            backup)
        self.assertIn('clone it', str(error))


class ExtendTest(ManagerTestCase):

    def setUp(self):
        super().setUp()
        # What has to wait is asked once more.
        self.patch('tenacity.stop_after_delay',
                   return_value=tenacity.stop_after_attempt(2))
        self.nap = self.patch('tenacity.nap.time')
        self.override('localstor_online_extend', True)

    def assert_extended(self, status):
        volume = self.cloud.extend(self.volume, 2)
        self.assertEqual((2, status), (volume.size, volume.status))
        self.assert_whole()

    def test_standing_volume(self):
        self.assert_extended('available')

    def test_volume_in_use(self):
        attachment = self.cloud.attach(self.volume, A)
        self.assert_extended('in-use')
        self.cloud.nova_extends.assert_called_once_with(
            mock.ANY, [attachment.instance_uuid], self.volume.id)

    def test_volume_in_use_by_a_stock_nova(self):
        self.override('localstor_online_extend', False)
        attachment = self.cloud.attach(self.volume, A)
        volume = self.cloud.extend(self.volume, 2)
        self.assertEqual((1, 'in-use'), (volume.size, volume.status))
        self.assertEqual(
            [('extend volume',
              'Could not find any available weighted backend.')],
            self.cloud.messages(volume))
        self.cloud.nova_extends.assert_not_called()
        self.cloud.detach(self.volume, attachment)
        self.assert_extended('available')

    def test_volume_that_arrives(self):
        attachment = self.cloud.attach(self.volume, B)
        self.assertEqual(table.State.MIGRATING, self.state())
        self.assert_extended('in-use')
        self.cloud.settle()
        self.assert_whole()
        self.cloud.detach(self.volume, attachment)
        self.assert_nothing_left(self.volume)

    def test_volume_that_may_yet_go_back(self):
        self.cloud.attach(self.volume, A)
        destination = self.cloud.attach(self.volume, B)
        self.assertEqual(table.State.STARTING, self.state())
        volume = self.cloud.extend(self.volume, 2)
        self.assertEqual((1, 'error_extending'), (volume.size, volume.status))
        self.cloud.set_status(self.volume, 'in-use')
        self.cloud.open_count(self.volume, -1)
        destination.destroy()
        self.cloud.settle()
        self.assertEqual(A, self.cloud.host_of(self.volume))
        self.assert_whole()
        self.assert_extended('in-use')

    def test_volume_is_waited_for_that_may_yet_go_back(self):
        source = self.cloud.attach(self.volume, A)
        self.cloud.attach(self.volume, B)

        def leave(_seconds):
            self.cloud.nodes[A].device_mapper.nodes[handles.handle_name(
                self.volume.name)].open_count -= 1
            source.destroy()
            self.cloud.watch()

        self.nap.sleep.side_effect = leave
        self.assert_extended('in-use')
        self.cloud.settle()
        self.assertEqual(B, self.cloud.host_of(self.volume))
        self.assert_whole()

    def test_one_that_takes_long_goes_on(self):
        with self.slow('volumes', 'extend'):
            self.assert_extended('available')
        self.assertEqual([], self.cloud.messages(self.volume))

    def test_volume_that_is_being_removed(self):
        attachment = self.cloud.attach(self.volume, B)
        self.cloud.detach(self.volume, attachment)
        move, = rows.for_volume(self.ctxt, self.volume.id)
        rows.change_state(self.ctxt, move, table.State.DISCARDING.value)
        volume = self.cloud.extend(self.volume, 2)
        self.assertEqual((1, 'error_extending'), (volume.size, volume.status))


class SnapshotTestCase(ManagerTestCase):

    def take(self):
        snapshot = self.cloud.take_snapshot(self.volume)
        self.assertEqual('available', snapshot.status)
        return snapshot

    def assert_as_then(self, *snapshots):
        """Snapshots hold what the volume held when they were taken."""
        for snapshot in snapshots:
            self.assertEqual(self.cloud.content[snapshot.id],
                             self.cloud.read_snapshot(snapshot))


class SnapshotTest(SnapshotTestCase):
    """Thick snapshots."""

    # Whether what a volume has left is kept for its snapshots
    keeps = True

    def assert_refused(self, *parts):
        snapshot = self.cloud.take_snapshot(self.volume)
        self.assertEqual('error', snapshot.status)
        for part in parts:
            self.assertIn(part, str(self.cloud.failures[-1]))
        return snapshot

    def kept(self):
        return [move.state for move
                in rows.for_volume(self.ctxt, self.volume.id)]

    def test_snapshot_holds_what_the_volume_held_then(self):
        snapshot = self.take()
        self.cloud.write(self.volume, 3, 'later')
        second = self.take()
        self.cloud.write(self.volume, 3, 'latest')
        self.assert_as_then(snapshot, second)
        self.assert_whole()
        self.assertIsNone(self.cloud.delete_snapshot(snapshot))
        self.assert_as_then(second)
        self.assertIsNone(self.cloud.delete_snapshot(second))
        self.assert_whole()
        self.assert_nothing_left(self.volume)
        self.assertTrue(self.cloud.delete(self.volume))

    def test_row_says_where_it_lies_and_tags_what_it_is(self):
        snapshot = self.take()
        self.assertEqual(A, snapshot.provider_location)
        disk = self.cloud.nodes[A].volumes.disks['_' + snapshot.name]
        self.assertEqual(
            transfer.tags(volume=self.volume.id, snapshot=snapshot.id,
                          generation=1), disk.tags)

    def test_volume_in_use(self):
        self.cloud.attach(self.volume, A)
        snapshot = self.take()
        self.cloud.write(self.volume, 3, 'later')
        self.assert_as_then(snapshot)
        self.assertEqual('in-use', self.refresh().status)

    def test_volume_moves_on_and_its_snapshot_stays(self):
        snapshot = self.take()
        attachment = self.cloud.arrive(self.volume)
        self.cloud.write(self.volume, 3, 'later')
        second = self.take()
        self.cloud.write(self.volume, 4, 'latest')
        self.assert_as_then(snapshot, second)
        self.assertEqual((A, B), (snapshot.provider_location,
                                  second.provider_location))
        self.assertEqual([table.State.KEEPING] * self.keeps, self.kept())
        self.assert_whole()
        self.assert_nothing_left(self.volume)
        # Cinder asks the node that has the volume.
        self.assertIsNone(self.cloud.delete_snapshot(snapshot))
        self.cloud.settle()
        self.assertEqual([], self.kept())
        self.assertEqual({}, self.cloud.nodes[A].volumes.disks)
        self.assert_as_then(second)
        self.cloud.detach(self.volume, attachment)
        self.assertIsNone(self.cloud.delete_snapshot(second))
        self.assertTrue(self.cloud.delete(self.volume))
        self.assert_nothing_left()

    def test_volume_moves_back_and_forth_with_snapshots_everywhere(self):
        snapshots = []
        for number, host in enumerate((B, A, B)):
            snapshots.append(self.take())
            attachment = self.cloud.arrive(self.volume, host)
            self.cloud.write(self.volume, number, 'on ' + host)
            self.cloud.detach(self.volume, attachment)
        self.assert_as_then(*snapshots)
        self.assert_whole()
        for host in (A, B):
            self.cloud.reboot(host)
        self.assert_as_then(*snapshots)
        self.assert_whole()
        self.assertTrue(self.cloud.report(A).is_well)
        self.assertTrue(self.cloud.report(B).is_well)
        for snapshot in snapshots:
            self.assertIsNone(self.cloud.delete_snapshot(snapshot))
        self.cloud.settle()
        self.assert_whole()
        self.assert_nothing_left(self.volume)

    def test_snapshot_in_mid_move_is_taken_when_all_has_arrived(self):
        self.cloud.attach(self.volume, B)
        self.assertEqual(table.State.MIGRATING, self.state())
        self.let_volumes_arrive()
        snapshot = self.take()
        self.cloud.settle()
        self.assert_as_then(snapshot)

    def test_snapshot_in_mid_move_is_of_that_moment_and_arrives(self):
        self.cloud.attach(self.volume, B)
        self.cloud.watch()
        self.assertEqual(table.State.MIGRATING, self.state())
        snapshot = self.take()
        self.cloud.write(self.volume, 3, 'later')
        self.assert_as_then(snapshot)
        self.cloud.settle()
        self.assert_as_then(snapshot)
        self.assertIsNone(self.cloud.delete_snapshot(snapshot))
        self.cloud.settle()
        self.assert_nothing_left(self.volume)

    def test_snapshot_of_what_has_arrived_needs_no_end_of_the_move(self):
        attachment = self.cloud.attach(self.volume, B)
        node = self.cloud.nodes[A]
        with mock.patch.object(node.volumes, 'clear', side_effect=(
                exception.CommandFailed(command='dd', host='a',
                                        reason='slow'))):
            for _time in range(6):
                self.cloud.hydrate()
                self.cloud.watch()
            self.assertEqual(table.State.COMPLETING, self.state())
            snapshot = self.take()
        self.cloud.write(self.volume, 3, 'later')
        self.cloud.settle()
        self.assert_as_then(snapshot)
        self.cloud.detach(self.volume, attachment)

    def test_deletion_waits_for_a_node_that_is_away(self):
        snapshot = self.take()
        self.cloud.arrive(self.volume)
        self.cloud.down.add(A)
        self.assertEqual('available', self.cloud.delete_snapshot(snapshot))
        self.assert_as_then(snapshot)
        self.cloud.boot(A)
        self.assertIsNone(self.cloud.delete_snapshot(snapshot))
        self.cloud.settle()
        self.assert_nothing_left(self.volume)

    def test_deletion_that_takes_long_goes_on(self):
        snapshot = self.take()
        with self.slow('volumes', 'remove'):
            self.assertIsNone(self.cloud.delete_snapshot(snapshot))
        self.assertEqual([], self.cloud.messages(snapshot))

    def test_deletion_without_an_answer_can_be_asked_for_again(self):
        snapshot = self.take()
        self.cloud.arrive(self.volume)
        for fault in (simulated.Fault.HANG, simulated.Fault.HANG_AFTER):
            self.cloud.nodes[B].faults.forget()
            self.cloud.nodes[B].faults.plan = simulated.Call(
                'Peers.delete_snapshot', 0, fault)
            self.assertEqual('error_deleting',
                             self.cloud.delete_snapshot(snapshot))
            for part in (snapshot.id, A, 'snapshot set --state error'):
                self.assertIn(part, str(self.cloud.failures[-1]))
        self.assertIsNone(self.cloud.delete_snapshot(snapshot))
        self.cloud.settle()
        self.assert_nothing_left(self.volume)

    def test_full_group_is_told_and_nothing_is_left(self):
        self.fill()
        snapshot = self.assert_refused('group', '_snapshot-')
        self.assertIsNone(snapshot.provider_location)
        self.assert_nothing_left(self.volume)
        self.assertIsNone(self.cloud.delete_snapshot(snapshot))

    def fill(self):
        self.cloud.nodes[A].volumes.total = int(1.5 * units.Gi)

    def test_snapshots_take_space_for_the_scheduler(self):
        self.take()
        with self.cloud.process(A):
            self.cloud.managers[A].publish_service_capabilities(self.ctxt)
        pool, = self.cloud.managers[A].last_capabilities['pools']
        self.assertEqual((2, 2), (pool['allocated_capacity_gb'],
                                  pool['provisioned_capacity_gb']))

    def test_volume_with_snapshots_grows(self):
        snapshot = self.take()
        volume = self.cloud.extend(self.volume, 2)
        self.assertEqual((2, 'available'), (volume.size, volume.status))
        self.assert_whole()
        self.assert_as_then(snapshot)

    def test_volume_in_use_with_snapshots_grows(self):
        self.override('localstor_online_extend', True)
        self.cloud.attach(self.volume, A)
        snapshot = self.take()
        volume = self.cloud.extend(self.volume, 2)
        self.assertEqual(self.in_use, (volume.size, volume.status))
        if self.keeps:
            error = self.assertRaises(
                exception.OriginInUse,
                self.cloud.driver(self.volume).extend_volume, volume, 2)
            for part in (volume.name, snapshot.id, 'Detach the volume'):
                self.assertIn(part, str(error))
        self.assert_as_then(snapshot)

    # LVM grows no origin that is active.
    in_use = (1, 'error_extending')

    def test_volume_goes_with_its_snapshots(self):
        self.take()
        attachment = self.cloud.arrive(self.volume)
        self.cloud.detach(self.volume, attachment)
        self.take()
        with db.main_context_manager.writer.using(self.ctxt) as session:
            session.query(models.Snapshot).update({'status': 'deleting'})
        self.cloud.set_status(self.volume, 'deleting')
        self.cloud.ask(B, 'delete_volume', volume=self.refresh(),
                       cascade=True)
        self.cloud.settle()
        self.assert_nothing_left()

    def test_volume_stays_when_a_snapshot_of_it_can_not_be_deleted(self):
        snapshot = self.take()
        attachment = self.cloud.arrive(self.volume)
        self.cloud.detach(self.volume, attachment)
        self.cloud.down.add(A)
        snapshot = self.cloud.refresh_snapshot(snapshot)
        snapshot.status = 'deleting'
        snapshot.save()
        self.cloud.set_status(self.volume, 'deleting')
        self.cloud.ask(B, 'delete_volume', volume=self.refresh(),
                       cascade=True)
        self.assertEqual('available', self.refresh().status)
        self.assert_whole()
        self.assert_as_then(snapshot)
        self.cloud.boot(A)
        self.assertIsNone(self.cloud.delete_snapshot(snapshot))
        self.assertTrue(self.cloud.delete(self.volume))
        self.cloud.settle()
        self.assert_nothing_left()

    def test_service_that_dies_in_it_leaves_what_can_be_deleted(self):
        for fault in (simulated.Fault.CRASH, simulated.Fault.CRASH_AFTER):
            self.cloud.nodes[A].faults.forget()
            self.cloud.nodes[A].faults.plan = simulated.Call(
                'SimulatedVolumeGroup.create_snapshot', 0, fault)
            snapshot = self.cloud.snapshot_row(self.volume)
            self.assertRaises(
                simulated.Crash, self.cloud.ask, A, 'create_snapshot',
                snapshot=snapshot)
            # As Cinder's cleanup has it when the service starts
            snapshot.status = 'error'
            snapshot.save()
            self.cloud.reboot(A)
            self.assertTrue(self.cloud.report(A).is_well)
            attachment = self.cloud.arrive(self.volume)
            self.assertIsNone(self.cloud.delete_snapshot(snapshot))
            self.cloud.settle()
            self.assert_nothing_left(self.volume)
            self.cloud.detach(self.volume, attachment)
            self.cloud.detach(self.volume, self.cloud.arrive(self.volume, A))


class ThinSnapshotTest(SnapshotTest):
    """Thin snapshots, which need no origin."""

    keeps = False
    in_use = (2, 'in-use')

    def setUp(self):
        super().setUp()
        self.make_thin(*self.cloud.nodes)

    def fill(self):
        self.cloud.nodes[A].volumes.pool_size = units.Gi


class ImageCacheTest(SnapshotTestCase):
    """Each node clones what any of them has in its cache of images."""

    def setUp(self):
        super().setUp()
        self.let_volumes_arrive()
        self.image = {
            'id': fake.IMAGE_ID, 'owner': 'project', 'size': units.Gi,
            'container_format': 'bare', 'disk_format': 'raw',
            'visibility': 'public', 'updated_at': timeutils.utcnow()}
        self.content = {number: 'image %d' % number for number in range(16)}
        for name in ('user_id', 'project_id'):
            self.override_config('cinder_internal_tenant_' + name, fake.UUID1)
        self.override('image_volume_cache_enabled', True)
        for host in (A, B):
            self.cloud.boot(host)
        self.made = []

    def make(self, host=A, size=1):
        """A volume of the image; whether that was downloaded for it."""
        volume, downloaded = self.cloud.create_of_image(
            self.image, self.content, host, size)
        self.assertEqual('available', volume.status)
        self.made.append(volume)
        return downloaded

    def assert_made(self):
        for _time in range(2):
            for volume in self.made:
                read = self.cloud.read(volume)
                self.assertEqual(self.content, {
                    number: read[number] for number in self.content})
            self.cloud.settle()
        cached = [objects.Volume.get_by_id(self.ctxt, row.volume_id)
                  for host in (A, B)
                  for row in db.image_volume_cache_get_all(
                      self.ctxt, host=host + '#local')]
        self.assertEqual(1, len(cached))
        self.assert_nothing_left(self.volume, *cached, *self.made)

    def test_second_volume_needs_no_download(self):
        self.assertEqual([True, False], [self.make(), self.make()])
        self.assert_made()

    def test_volume_that_is_larger_than_the_image(self):
        # Cinder has it cloned for its cache, and grown then.
        self.assertEqual([True, False], [self.make(size=3),
                                         self.make(size=2)])
        self.assertEqual(3 * units.Gi, self.cloud.nodes[A].volumes.disks[
            self.made[0].name].size)
        self.assert_made()

    def test_other_node_needs_no_download(self):
        self.assertEqual([True, False], [self.make(), self.make(B, 2)])
        self.assert_made()

    def test_node_that_is_down_costs_a_download(self):
        self.make()
        self.cloud.down.add(A)
        self.assertTrue(self.make(B))
        self.cloud.boot(A)
        self.assert_made()


class ThinImageCacheTest(ImageCacheTest):
    """With nodes that share their blocks."""

    def setUp(self):
        super().setUp()
        self.make_thin(*self.cloud.nodes)


class TransferTest(ManagerTestCase):
    """A volume is given to another project."""

    def test_standing_volume(self):
        self.assertEqual('another', self.cloud.give_away(
            self.volume, 'another').project_id)
        self.cloud.arrive(self.volume)
        self.assert_whole()

    def test_volume_in_mid_move(self):
        attachment = self.cloud.attach(self.volume, B)
        self.cloud.detach(self.volume, attachment)
        self.assertEqual(table.State.MIGRATING, self.state())
        self.assertEqual('another', self.cloud.give_away(
            self.volume, 'another').project_id)
        self.cloud.settle()
        self.assertEqual('another', self.refresh().project_id)
        self.assert_whole()
        self.assert_nothing_left(self.volume)
        self.assertTrue(self.cloud.delete(self.volume))
        self.assert_nothing_left()


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

    def test_volume_that_arrives_is_migrated_when_it_has(self):
        self.let_volumes_arrive()
        for force in (True, False):
            attachment = self.cloud.attach(self.volume, B)
            self.cloud.detach(self.volume, attachment)
            self.assertEqual('success', self.cloud.migrate(
                self.volume, A, force).migration_status)
            self.assertIsNone(self.state())
            self.assertEqual(A, self.cloud.host_of(self.volume))
        self.assertEqual('available', self.refresh().status)
        self.assert_whole()
        self.assert_nothing_left(self.volume)

    def test_volume_in_use_is_not_migrated_in_mid_move(self):
        self.cloud.attach(self.volume, B)
        self.assertIsNone(self.cloud.swap_begins(self.volume, A))
        self.assertEqual('error', self.refresh().migration_status)
        self.cloud.settle()
        self.assert_whole()
        self.assert_nothing_left(self.volume)

    def test_volume_in_use_is_swapped_and_not_moved(self):
        old = self.cloud.attach(self.volume, A)
        new = self.cloud.swap_begins(self.volume, B)
        attachment = self.cloud.attach(new, A, 'iscsi')
        self.assertEqual(B, self.cloud.host_of(new))
        self.cloud.copy(self.volume, new)
        self.cloud.detach(self.volume, old)
        self.cloud.swap_ends(self.volume, new)
        self.assertEqual(B, self.cloud.host_of(self.volume))
        self.assert_whole()
        self.assert_nothing_left(self.volume)
        self.cloud.detach(self.volume, attachment)
        self.cloud.arrive(self.volume, A)
        self.assert_whole()

    def test_volume_is_not_swapped_in_mid_move(self):
        self.cloud.attach(self.volume, B)
        self.assertIsNone(self.cloud.swap_begins(self.volume, A))
        self.cloud.settle()
        self.assert_whole()
        self.assert_nothing_left(self.volume)

    def test_copy_that_cinder_has_swapped_away_ends_its_move(self):
        # To a backend of another kind, which asks nobody.
        self.cloud.attach(self.volume, B)
        away = self.cloud.create(A)
        with mock.patch('cinder_localstor.driver.localstor.LocalStorDriver.'
                        'update_migrated_volume',
                        side_effect=NotImplementedError):
            self.cloud.ask(A, 'update_migrated_volume', volume=self.refresh(),
                           new_volume=away, volume_status='in-use')
        away.refresh()
        self.refresh().finish_volume_migration(away)
        self.cloud.open_count(away, -1)
        self.assertTrue(self.cloud.delete(away))
        self.cloud.settle()
        self.assert_nothing_left(self.refresh())


class SendTest(ManagerTestCase):
    """An administrator migrates a volume to another of our backends."""

    def setUp(self):
        super().setUp()
        self.copied = self.patch('cinder.volume.volume_utils.copy_volume')

    def ended(self):
        volume = self.refresh()
        return volume.migration_status, volume.status, volume.host

    def assert_sent(self, to=B):
        """Cinder takes it for done, and so it is."""
        self.assertEqual(('success', 'available', to + '#local'),
                         self.ended())
        self.assert_whole()
        self.copied.assert_not_called()
        self.cloud.settle()
        self.assertEqual(to, self.cloud.host_of(self.volume))
        self.assert_whole()
        self.assert_nothing_left(self.volume)
        self.cloud.reboot(to)
        self.assert_whole()

    def assert_stays(self):
        self.assertEqual(('error', 'available', A + '#local'), self.ended())
        self.cloud.settle()
        self.copied.assert_not_called()
        self.assert_whole()
        self.assert_nothing_left(self.volume)

    def die(self, module, name, before=False):
        """Let the process of the source die as it does something."""
        act = getattr(module, name)

        def and_die(*arguments, **named):
            if not before:
                act(*arguments, **named)
            raise simulated.Crash(A, name)
        with (mock.patch.object(module, name, and_die),
              testtools.ExpectedException(simulated.Crash)):
            self.cloud.send(self.volume)

    def test_volume_is_usable_at_once_and_arrives(self):
        volume = self.cloud.send(self.volume)
        self.assertEqual('migrating', self.state())
        self.assertEqual(self.cloud.services[B].uuid, volume.service_uuid)
        self.assert_sent()

    def test_what_is_written_meanwhile_is_kept(self):
        self.cloud.send(self.volume)
        self.cloud.write(self.volume, 3, 'in mid-move')
        self.assert_sent()

    def test_thick_volume_becomes_thin(self):
        self.cloud.nodes[B].volumes.pool_size = 64 * units.Gi
        self.cloud.send(self.volume)
        self.assert_sent()

    def test_thin_volume_becomes_thick(self):
        self.make_thin(A)
        self.cloud.send(self.volume)
        self.assert_sent()

    def test_volume_that_still_arrives_goes_on(self):
        attachment = self.cloud.attach(self.volume, B)
        self.cloud.detach(self.volume, attachment)
        self.cloud.watch()
        self.cloud.send(self.volume, A)
        self.assertEqual(2, len(rows.for_volume(self.ctxt, self.volume.id)))
        self.assert_sent(A)

    def test_volume_is_attached_elsewhere_while_it_arrives(self):
        self.cloud.send(self.volume)
        self.cloud.arrive(self.volume, A)
        self.assertEqual(A, self.cloud.host_of(self.volume))
        self.assert_whole()
        self.assert_nothing_left(self.volume)

    def test_volume_goes_nowhere_before_cinder_takes_it_for_done(self):
        # Cinder writes the host once more, whatever it is by then.
        def attach_elsewhere(*_arguments):
            self.cloud.reserve(self.volume)
            kinds.append(self.cloud.driver(self.volume)._choose(
                self.refresh(), self.cloud.connector(A))[0])
        kinds = []
        with mock.patch.object(base.Peers, 'nudge', attach_elsewhere):
            self.cloud.send(self.volume)
        self.assertEqual([localstor.Connection.REMOTE], kinds)
        self.assertEqual('success', self.refresh().migration_status)

    def test_volume_that_is_attached_stays(self):
        # Between Cinder's look and ours
        reserve = self.cloud.reserve
        note = rows.note_migration

        def and_attach(*arguments):
            note(*arguments)
            reserve(self.volume)
        with mock.patch.object(rows, 'note_migration', and_attach):
            self.cloud.send(self.volume)
        self.assertIsInstance(self.cloud.failures[-1],
                              cinder_exception.VolumeAttached)
        self.assertEqual('error', self.refresh().migration_status)
        self.assertEqual([], rows.for_volume(self.ctxt, self.volume.id))
        self.assert_whole()

    def test_volume_with_a_remote_connection_stays(self):
        self.volume.refresh()
        self.volume.update({'provider_location': 'somewhere'})
        self.volume.save()
        self.cloud.send(self.volume)
        self.assertIsInstance(self.cloud.failures[-1],
                              exception.VolumeConnectedElsewhere)
        self.assertEqual('error', self.refresh().migration_status)

    def test_without_space_it_fails_with_a_sentence(self):
        self.cloud.nodes[B].volumes.total = units.Gi // 2
        with mock.patch('cinder.scheduler.filters.capacity_filter.'
                        'CapacityFilter.backend_passes', return_value=True):
            self.cloud.send(self.volume)
        self.assertIn('extend the group', str(self.cloud.failures[-1]))
        self.assert_stays()

    def test_node_that_dies_meanwhile(self):
        with mock.patch.object(base.Peers, 'run',
                               side_effect=exception.LocalStorException(
                                   reason='no')):
            self.cloud.send(self.volume)
        self.assert_stays()

    def test_service_dies_before_there_is_a_move(self):
        self.die(rows, 'begin', before=True)
        self.cloud.boot(A)
        self.assert_stays()

    def test_service_dies_before_the_volume_is_there(self):
        self.die(base.Peers, 'run')
        self.cloud.boot(A)
        self.assert_stays()

    def test_service_dies_when_the_volume_is_there(self):
        self.die(mover.Mover, '_prepare')
        # Whose process has not died says nothing.
        self.cloud.boot(B)
        self.assertEqual('migrating', self.refresh().migration_status)
        self.cloud.boot(A)
        self.assert_sent()

    def test_volume_of_this_backend_is_not_moved_to_it(self):
        # A retype may need a new volume on the same backend.
        volume = self.refresh()
        with self.cloud.process(A):
            self.assertEqual(
                (False, None), self.cloud.driver(volume).migrate_volume(
                    self.ctxt, volume, {'host': A + '#local', 'capabilities': {
                        'location_info': directory.LOCATION % (A, 'vg')}}))
        self.assertIsNone(self.state())

    def test_what_cinder_copies_is_left_to_it(self):
        self.cloud.send(self.volume)
        self.cloud.settle()
        self.cloud.detach(self.volume, self.cloud.arrive(self.volume, A))
        self.cloud.set_status(self.volume, 'available')
        with mock.patch('cinder.volume.volume_utils.copy_volume',
                        side_effect=simulated.Crash(A, 'dd')):
            self.assertRaises(simulated.Crash, self.cloud.migrate,
                              self.volume)
        self.cloud.boot(A)
        self.assertEqual(('migrating', 'maintenance', A + '#local'),
                         self.ended())

    def test_volume_gets_a_type_of_another_backend(self):
        here, there = (db.volume_type_create(self.ctxt, {
            'name': name, 'extra_specs': {'volume_backend_name': name}})
            for name in ('local', 'other'))
        self.cloud.managers[B].driver._backend_name = 'other'
        volume = self.refresh()
        volume.update({'volume_type_id': here['id']})
        volume.save()
        volume = self.cloud.retype(volume, there)
        self.assertEqual(there['id'], volume.volume_type_id)
        self.assertEqual('available', volume.status)
        self.assertEqual(B + '#other', volume.host)
        self.copied.assert_not_called()
        self.cloud.settle()
        self.assert_whole()
        self.assert_nothing_left(self.volume)


class RetypeTest(ManagerTestCase):
    """A volume is of another type, on the same backend."""

    def setUp(self):
        super().setUp()
        self.copied = self.patch(
            'cinder.volume.manager.VolumeManager._copy_volume_data')

    def retype(self, **specs):
        other = db.volume_type_create(self.ctxt, {
            'name': 'other', 'extra_specs': specs or {'key': 'value'}})
        volume = self.refresh()
        volume.update({'previous_status': volume.status,
                       'status': 'retyping'})
        volume.save()
        services.rpcapi.VolumeAPI().retype(
            self.ctxt, volume, other['id'],
            services.Backend(self.cloud.host_of(volume) + '#local', None,
                             {}), 'never')
        return self.refresh()

    def assert_retyped(self):
        before = self.refresh()
        after = self.retype()
        self.assertEqual('available', after.status)
        self.assertNotEqual(before.volume_type_id, after.volume_type_id)
        self.assertEqual(before.host, after.host)
        self.copied.assert_not_called()
        self.cloud.settle()
        self.assert_whole()
        self.assert_nothing_left(self.volume)

    def test_volume_that_has_moved_survives_a_reboot(self):
        attachment = self.cloud.arrive(self.volume)
        self.cloud.detach(self.volume, attachment)
        self.assert_retyped()
        self.cloud.reboot(B)
        self.assert_whole()

    def test_standing_volume(self):
        self.assert_retyped()

    def test_volume_that_arrives(self):
        attachment = self.cloud.attach(self.volume, B)
        self.cloud.detach(self.volume, attachment)
        self.assert_retyped()
        self.assertEqual(B, self.cloud.host_of(self.volume))

    def test_volume_gets_no_type_that_can_not_be_heeded(self):
        before = self.refresh()
        after = self.retype(**{'localstor:data_path': 'fast'})
        self.assertEqual(('available', before.volume_type_id),
                         (after.status, after.volume_type_id))

    def test_volume_that_may_yet_go_back_stays_what_it_is(self):
        # Cinder writes where it is when the driver has answered.
        self.cloud.attach(self.volume, A)
        self.cloud.attach(self.volume, B)
        before = self.refresh()
        after = self.retype()
        self.assertEqual(('in-use', before.volume_type_id),
                         (after.status, after.volume_type_id))

    def test_it_moves_nowhere_meanwhile(self):
        retype = localstor.LocalStorDriver.retype

        def and_attach(*arguments):
            answer = retype(*arguments)
            error = self.assertRaises(exception.LocalStorException,
                                      self.begin_move)
            self.assertIn('is being retyped', str(error))
            return answer

        with mock.patch.object(localstor.LocalStorDriver, 'retype',
                               and_attach):
            self.assert_retyped()
        self.cloud.arrive(self.volume)
        self.assert_whole()

    def begin_move(self):
        self.cloud.driver(self.volume)._mover.begin(
            self.ctxt, self.refresh(), objects.Service.get_by_args(
                self.ctxt, B, 'cinder-volume'))


class CopyTest(SnapshotTestCase):
    """Volumes from snapshots, and clones."""

    def assert_made(self, *volumes, beside=()):
        for _time in range(2):
            for volume in volumes:
                self.assertEqual('available', self.cloud.row(volume).status)
                self.assertEqual(self.cloud.content[volume.id], {
                    number: content for number, content
                    in self.cloud.read(volume).items()
                    if number in self.cloud.content[volume.id]})
            self.cloud.settle()
        self.assert_nothing_left(*volumes, *beside)

    def test_volume_of_a_snapshot_is_made_on_any_node(self):
        snapshot = self.take()
        self.cloud.write(self.volume, 3, 'later')
        self.assert_made(*[self.cloud.create_from(snapshot, host)
                           for host in (A, B)], beside=[self.volume])
        self.assert_as_then(snapshot)
        self.assert_whole()

    def test_larger_volume_of_a_snapshot(self):
        snapshot = self.take()
        for host in (A, B):
            volume = self.cloud.create_from(snapshot, host, 2)
            self.cloud.write(volume, 30, 'at the end')
            self.assert_made(volume, beside=[self.volume])
            self.cloud.delete(volume)

    def test_volume_is_attached_elsewhere_while_it_arrives(self):
        snapshot = self.take()
        for there in (A, B):
            volume = self.cloud.create_from(snapshot)
            attachment = self.cloud.attach(volume, there)
            self.cloud.write(volume, 5, 'by a guest')
            self.cloud.settle()
            self.cloud.detach(volume, attachment)
            self.cloud.set_status(volume, 'available')
            self.assert_made(volume, beside=[self.volume])
            self.cloud.delete(volume)

    def test_clone_of_a_volume_in_use(self):
        self.cloud.attach(self.volume, A)
        volume = self.cloud.create_from(self.volume)
        self.cloud.write(self.volume, 3, 'later')
        self.cloud.write(volume, 4, 'in the clone')
        self.assert_made(volume, beside=[self.volume])
        self.assert_whole()

    def test_volume_is_reverted_to_a_snapshot_here_and_elsewhere(self):
        for there in (A, B):
            snapshot = self.take()
            attachment = self.cloud.attach(self.volume, there)
            self.cloud.settle()
            self.cloud.detach(self.volume, attachment)
            self.cloud.set_status(self.volume, 'available')
            self.cloud.write(self.volume, 3, 'not wanted')
            volume = self.cloud.revert(self.volume, snapshot)
            self.assertEqual('available', volume.status)
            self.assert_whole()
            self.cloud.settle()
            self.assert_as_then(snapshot)
            self.assertIsNone(self.cloud.delete_snapshot(snapshot))
            self.cloud.settle()
            self.assert_nothing_left(self.volume)

    def test_volume_that_still_arrives_is_reverted_at_once(self):
        snapshot = self.take()
        attachment = self.cloud.attach(self.volume, B)
        self.cloud.watch()
        self.cloud.write(self.volume, 3, 'not wanted')
        self.cloud.detach(self.volume, attachment)
        self.cloud.set_status(self.volume, 'available')
        copied = self.patch('cinder.volume.manager.VolumeManager.'
                            '_revert_to_snapshot_generic')
        volume = self.cloud.revert(self.volume, snapshot)
        copied.assert_not_called()
        self.assertEqual('available', volume.status)
        self.assert_whole()
        self.cloud.settle()
        self.assert_whole()
        self.assert_as_then(snapshot)

    def test_export_that_was_left_does_not_keep_a_volume_as_it_is(self):
        snapshot = self.take()
        self.cloud.driver(self.volume)._export(self.ctxt, self.volume.id)
        self.cloud.revert(self.volume, snapshot)
        self.assertIsNone(self.refresh().provider_location)
        self.assertEqual({}, self.cloud.nodes[A].remote.exports)
        self.assert_whole()

    def test_volume_that_can_not_be_reverted_is_as_it_was(self):
        snapshot = self.take()
        self.cloud.write(self.volume, 3, 'later')
        before = dict(self.cloud.content[self.volume.id])
        self.cloud.nodes[A].volumes.total = units.Mi
        with self.assertLogs('cinder_localstor.driver') as logs:
            volume = self.cloud.revert(self.volume, snapshot)
        self.assertIn('extend the group', logs.output[-1])
        self.assertEqual('available', volume.status)
        self.assertEqual('available',
                         self.cloud.refresh_snapshot(snapshot).status)
        self.cloud.content[self.volume.id] = before
        self.assert_whole()
        self.cloud.settle()
        self.assert_as_then(snapshot)
        self.assertIsNone(self.cloud.delete_snapshot(snapshot))
        self.assert_nothing_left(self.volume)

    def test_second_revert_that_is_refused_is_no_success(self):
        snapshot = self.take()
        self.cloud.revert(self.volume, snapshot)
        self.cloud.settle()
        self.cloud.write(self.volume, 3, 'after the first')
        before = dict(self.cloud.content[self.volume.id])
        with (mock.patch.object(gate.Gate, '_check', side_effect=(
                exception.VolumeElsewhere(volume_id='v', host='h',
                                          asked='a'))),
              self.assertLogs('cinder_localstor.driver', 'ERROR')):
            self.cloud.revert(self.volume, snapshot)
        self.assertNotEqual([], self.cloud.failures)
        self.cloud.content[self.volume.id] = before
        self.assert_whole()

    def test_what_was_given_up_is_not_reverted_any_more(self):
        # Its user was told so, and has written since.
        snapshot = self.take()
        self.cloud.write(self.volume, 3, 'after it was given up')
        for attached in (False, True):
            with self.assertLogs('cinder_localstor.driver') as logs:
                rpcapi.VolumeAPI().revert_to_snapshot(
                    self.ctxt, self.refresh(), snapshot)
            self.assertIn('been given up', logs.output[-1])
            self.cloud._read_no_deleted()
            self.assert_whole()
            self.assertEqual('in-use' if attached else 'available',
                             self.refresh().status)
            if not attached:
                self.cloud.attach(self.volume, A)

    def test_no_fault_of_ours_lets_cinder_copy(self):
        snapshot = self.take()
        copied = self.patch('cinder.volume.manager.VolumeManager.'
                            '_revert_to_snapshot_generic')
        for fault in (AttributeError, NotImplementedError):
            with mock.patch('cinder_localstor.moves.copier.Copier._record',
                            side_effect=fault('a fault')):
                volume = self.cloud.revert(self.volume, snapshot)
            self.assertEqual('available', volume.status)
        copied.assert_not_called()

    def test_error_after_it_was_reverted_is_none(self):
        snapshot = self.take()
        self.cloud.write(self.volume, 3, 'not wanted')
        with mock.patch('cinder_localstor.moves.copier.Copier._finish',
                        side_effect=ValueError('late')):
            volume = self.cloud.revert(self.volume, snapshot)
        self.assertEqual('available', volume.status)
        self.assertEqual([], self.cloud.failures)
        self.assert_whole()

    def test_all_is_deleted_while_it_arrives(self):
        snapshot = self.take()
        volumes = [self.cloud.create_from(snapshot, B),
                   self.cloud.create_from(snapshot, A),
                   self.cloud.create_from(self.volume)]
        self.assertIsNone(self.cloud.delete_snapshot(snapshot))
        self.assertTrue(self.cloud.delete(self.volume))
        self.assertTrue(self.cloud.delete(volumes.pop()))
        self.cloud.settle()
        self.cloud.watch()
        self.assert_made(*volumes)

    def arrivals(self):
        """What brings snapshots of the volume the rest of them."""
        return rows.snapshots_arriving(self.ctxt, self.volume.id)

    def assert_gone_before_the_volume_arrives(self):
        """Nobody waits for what a deleted volume alone has read."""
        for _period in range(4):
            self.cloud.watch()
        self.assertEqual([], self.arrivals())
        self.assertEqual(table.State.MIGRATING, self.state())
        for host in self.hosts:
            found = self.cloud.nodes[host].volumes.disks
            self.assertEqual([], [name for name in found if not any(
                part in name for part in (self.volume.id,
                                          self.refresh().name_id))])
        self.assert_whole()
        self.cloud.settle()
        self.assert_nothing_left(self.volume)

    def test_clone_of_what_arrives_is_deleted_with_what_it_reads(self):
        self.cloud.attach(self.volume, B)
        self.cloud.watch()
        volumes = [self.cloud.create_from(self.volume, host)
                   for host in (A, B)]
        self.assertEqual(2, len(self.arrivals()))
        for volume in volumes:
            self.assertTrue(self.cloud.delete(volume))
        self.assert_gone_before_the_volume_arrives()

    def test_snapshot_that_nobody_reads_any_more_goes_before_it_arrives(self):
        self.cloud.attach(self.volume, B)
        self.cloud.watch()
        snapshot = self.take()
        volumes = [self.cloud.create_from(snapshot, host)
                   for host in (A, B)]
        self.assertIsNone(self.cloud.delete_snapshot(snapshot))
        self.assertTrue(self.cloud.delete(volumes.pop()))
        for _period in range(4):
            self.cloud.watch()
        self.assertEqual(1, len(self.arrivals()))
        self.assertEqual(self.cloud.content[volumes[0].id],
                         self.cloud.read(volumes[0]))
        self.assertTrue(self.cloud.delete(volumes.pop()))
        self.assert_gone_before_the_volume_arrives()

    def test_without_space_it_fails_with_a_sentence(self):
        snapshot = self.take()
        self.cloud.nodes[B].volumes.total = units.Mi
        volume = self.cloud.create_from(snapshot, B)
        self.assertEqual('error', volume.status)
        self.assertIn('extend the group', str(self.cloud.failures[-1]))
        self.assertTrue(self.cloud.delete(volume))
        self.cloud.settle()
        self.assert_nothing_left(self.volume)

    def test_restart_in_mid_creation(self):
        snapshot = self.take()
        volume = self.cloud.create_from(snapshot, B)
        self.cloud.reboot(B)
        self.cloud.reboot(A)
        self.cloud.watch()
        self.assert_made(volume, beside=[self.volume])

    def space(self, host):
        """GiB that the scheduler is told of, allocated and provisioned."""
        with self.cloud.process(host):
            self.cloud.managers[host].publish_service_capabilities(self.ctxt)
        pool, = self.cloud.managers[host].last_capabilities['pools']
        return (pool['allocated_capacity_gb'],
                int(pool['provisioned_capacity_gb']))

    def test_they_take_space_for_the_scheduler(self):
        self.cloud.create_from(self.volume)
        # The snapshot that the clone reads among them
        self.assertEqual((3, 3), self.space(A))

    def test_clone_of_another_node_takes_space_where_it_is(self):
        self.cloud.create_from(self.volume, B)
        self.assertEqual((1, 1), self.space(B))


class SharedTest(ManagerTestCase):
    """Several instances have a volume at the same time."""

    hosts = (A, B, C)

    def setUp(self):
        super().setUp()
        self.cloud.delete(self.volume)
        self.volume = self.cloud.create(multiattach=True)

    def attach(self, host, kind='local'):
        """Attach the volume to yet another instance."""
        return self.cloud.attach(self.volume, host, kind,
                                 uuidutils.generate_uuid())

    def admitted(self, host):
        """Initiators that a node's ordinary connections are for."""
        return self.cloud.nodes[host].remote.admitted.get(
            self.refresh().name, set())

    def test_two_on_the_node_of_the_volume(self):
        first, second = self.attach(A), self.attach(A)
        self.cloud.detach(self.volume, first)
        self.assertEqual(A, self.cloud.host_of(self.volume))
        self.cloud.detach(self.volume, second)
        self.assert_whole()
        self.assert_nothing_left(self.volume)

    def test_one_alone_is_followed(self):
        self.attach(B)
        self.assertEqual(B, self.cloud.host_of(self.volume))
        self.cloud.settle()
        self.assert_whole()

    def test_second_on_another_node_is_not_followed(self):
        self.attach(A)
        self.attach(B, 'iscsi')
        self.assertEqual(A, self.cloud.host_of(self.volume))
        self.assertEqual({self.cloud.connector(B)['initiator']},
                         self.admitted(A))

    def test_two_that_connect_at_once_get_in_both(self):
        self.attach(A)
        connections, made = {}, base.Inside()

        def connect(host):
            attachment = self.cloud.reserve(
                self.volume, instance=uuidutils.generate_uuid())
            # A transaction is of one thread.
            ctxt = context.RequestContext.from_dict(self.cloud.ctxt.to_dict())
            volume, connector = self.refresh(), self.cloud.connector(host)

            def do():
                connections[host] = rpcapi.VolumeAPI().attachment_update(
                    ctxt, volume, connector, attachment.id)
            return do

        remote = self.cloud.nodes[A].remote
        export = remote.export

        def and_wait(*arguments):
            answer = export(*arguments)
            made()
            return answer
        with mock.patch.object(remote, 'export', and_wait):
            self.assertEqual([None, None], base.at_once(
                *map(connect, (B, C))))
        for connection in connections.values():
            self.cloud.log_in(self.volume, connection)

    def test_volume_that_arrives_stays_where_it_comes_to(self):
        self.attach(B)
        self.attach(C, 'iscsi')
        self.cloud.settle()
        self.assertEqual(B, self.cloud.host_of(self.volume))
        self.assertEqual({self.cloud.connector(C)['initiator']},
                         self.admitted(B))
        self.assert_whole()

    def test_first_is_migrated_while_another_stays(self):
        first = self.attach(A)
        self.attach(B, 'iscsi')
        # To where the other one is: they share the connection.
        self.cloud.attach(self.volume, B, 'iscsi', first.instance_uuid)
        self.cloud.detach(self.volume, first)
        self.assertEqual(A, self.cloud.host_of(self.volume))
        self.assertEqual({self.cloud.connector(B)['initiator']},
                         self.admitted(A))

    def test_last_from_a_node_closes_the_connection(self):
        self.attach(A)
        first, second = self.attach(B, 'iscsi'), self.attach(B, 'iscsi')
        self.cloud.detach(self.volume, first)
        self.assertEqual({self.cloud.connector(B)['initiator']},
                         self.admitted(A))
        self.cloud.detach(self.volume, second)
        self.assertEqual(set(), self.admitted(A))

    def test_volume_moves_again_when_the_others_have_left(self):
        first = self.attach(A)
        self.cloud.detach(self.volume, self.attach(B, 'iscsi'))
        self.assertIsNone(self.refresh().provider_location)
        self.cloud.attach(self.volume, B, 'local', first.instance_uuid)
        self.cloud.detach(self.volume, first)
        self.cloud.settle()
        self.assertEqual(B, self.cloud.host_of(self.volume))
        self.assert_whole()
        self.assert_nothing_left(self.volume)

    def test_second_comes_while_the_first_is_connected(self):
        export = localstor.LocalStorDriver.create_export

        def and_reserve(*arguments):
            answer = export(*arguments)
            self.cloud.reserve(self.volume,
                               instance=uuidutils.generate_uuid())
            return answer
        with mock.patch.object(localstor.LocalStorDriver, 'create_export',
                               and_reserve):
            attachment = self.attach(B, 'iscsi')
        self.assertEqual({self.cloud.connector(B)['initiator']},
                         self.admitted(A))
        self.cloud.detach(self.volume, attachment)
        self.let_go_of_reservations()
        self.assert_export_ends()

    def test_none_comes_while_the_first_is_migrated(self):
        first = self.attach(A)
        second = self.cloud.attach(self.volume, B, 'local',
                                   first.instance_uuid)
        for host in (A, B, C):
            error = self.assertRaises(cinder_exception.CinderException,
                                      self.attach, host)
            self.assertIn('one node only', str(error))
            self.let_go_of_reservations()
        self.cloud.detach(self.volume, first)
        self.cloud.settle()
        self.assertEqual(B, self.cloud.host_of(self.volume))
        self.attach(B)
        self.cloud.detach(self.volume, second)
        self.assert_whole()

    def let_go_of_reservations(self):
        """As Nova does when an attachment has failed."""
        for row in rows.attachments(self.ctxt, self.volume.id):
            if not row['connector']:
                db.volume_detached(self.ctxt, self.volume.id, row['id'])

    def test_connection_that_fails_takes_none_away(self):
        self.attach(A)
        self.attach(B, 'iscsi')
        for part, host in (('node.simulated.SimulatedRemoteTarget.connect', C),
                           ('moves.mover.Mover.stay', A)):
            with mock.patch('cinder_localstor.' + part, side_effect=(
                    exception.LocalStorException(reason='not now'))):
                self.assertRaises(cinder_exception.CinderException,
                                  self.attach, host)
            self.let_go_of_reservations()
        self.assertEqual({self.cloud.connector(B)['initiator']},
                         self.admitted(A))
        self.assertIsNotNone(self.refresh().provider_location)

    def test_connection_that_fails_takes_none_away_that_is_being_made(self):
        self.attach(A)
        connect = localstor.LocalStorDriver.initialize_connection

        def and_fail(*arguments):
            answer = connect(*arguments)
            with mock.patch.object(
                    localstor.LocalStorDriver, 'initialize_connection',
                    side_effect=exception.LocalStorException(reason='no')):
                self.assertRaises(cinder_exception.CinderException,
                                  self.attach, B)
            return answer
        with mock.patch.object(localstor.LocalStorDriver,
                               'initialize_connection', and_fail):
            self.attach(C, 'iscsi')
        self.assertEqual({self.cloud.connector(C)['initiator']},
                         self.admitted(A))

    def test_connection_that_is_being_made_stays_when_the_last_leaves(self):
        self.attach(A)
        last = self.attach(B, 'iscsi')
        connect = localstor.LocalStorDriver.initialize_connection

        def and_leave(*arguments):
            answer = connect(*arguments)
            self.cloud.detach(self.volume, last)
            return answer
        with mock.patch.object(localstor.LocalStorDriver,
                               'initialize_connection', and_leave):
            self.attach(C, 'iscsi')
        self.assertIn(self.cloud.connector(C)['initiator'], self.admitted(A))
        self.assertIsNotNone(self.refresh().provider_location)

    def test_export_ends_when_the_last_two_have_left_at_once(self):
        self.attach(A)
        two = [self.attach(B, 'iscsi'), self.attach(C, 'iscsi')]
        for attachment in two:
            self.cloud.leave(self.volume, attachment)
        for attachment in two:
            db.volume_detached(self.ctxt, self.volume.id, attachment.id)
        for row in rows.attachments(self.ctxt, self.volume.id):
            db.volume_detached(self.ctxt, self.volume.id, row['id'])
        self.assert_export_ends()

    def assert_export_ends(self):
        for _time in range(2):
            self.assertIsNotNone(self.refresh().provider_location)
            self.cloud.driver(self.volume)._end_exports()
        self.assertIsNone(self.refresh().provider_location)
        self.assertEqual({}, self.cloud.nodes[A].remote.exports)

    def test_connection_is_there_after_a_reboot_whatever_the_status(self):
        self.attach(A)
        self.attach(B, 'iscsi')
        self.cloud.set_status(self.volume, 'attaching')
        self.cloud.nodes[A].remote.exports.clear()
        self.cloud.nodes[A].remote.admitted.clear()
        self.cloud.reboot(A)
        self.cloud.driver(self.volume)._export_again()
        self.assertEqual([self.refresh().name],
                         list(self.cloud.nodes[A].remote.exports))
        self.assertEqual({self.cloud.connector(B)['initiator']},
                         self.admitted(A))

    def test_move_does_not_begin_when_another_one_has_come(self):
        begin = mover.Mover.begin

        def and_attach(*arguments):
            with mock.patch.object(mover.Mover, 'begin', begin):
                self.attach(A)
            return begin(*arguments)
        first = self.attach(A)
        with mock.patch.object(mover.Mover, 'begin', and_attach):
            error = self.assertRaises(
                cinder_exception.CinderException, self.cloud.attach,
                self.volume, B, 'local', first.instance_uuid)
        self.assertIn('another instance', str(error))
        self.assertEqual(A, self.cloud.host_of(self.volume))
        self.assertIsNone(self.state())

    def test_one_that_is_left_with_a_connection_is_migrated(self):
        first, second = self.attach(A), self.attach(B, 'iscsi')
        self.cloud.detach(self.volume, first)
        self.cloud.attach(self.volume, C, 'iscsi', second.instance_uuid)
        self.cloud.detach(self.volume, second)
        self.assertEqual({self.cloud.connector(C)['initiator']},
                         self.admitted(A))

    def test_instance_on_the_node_of_the_volume_leaves_first(self):
        first, second = self.attach(A), self.attach(B, 'iscsi')
        self.cloud.detach(self.volume, first)
        self.assertIsNotNone(self.refresh().provider_location)
        self.cloud.detach(self.volume, second)
        self.assertIsNone(self.refresh().provider_location)
        self.assert_whole()
        self.assert_nothing_left(self.volume)
