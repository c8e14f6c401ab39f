# SPDX-License-Identifier: Apache-2.0
"""What Cinder's API, scheduler and volume manager do with logical volumes that
were there before, and with those that Cinder lets go.
"""

from unittest import mock

from cinder import exception as cinder_exception
from cinder import quota
import ddt
from oslo_utils import units

from cinder_localstor.datapath import handles
from cinder_localstor.datapath import transfer
from cinder_localstor import exception
from cinder_localstor.moves import table
from cinder_localstor.node import interface
from cinder_localstor.node import simulated
from cinder_localstor import rows
from tests.unit import base
from tests.unit.driver import test_manager

A, B = base.A, base.B


class ManageTestCase(test_manager.ManagerTestCase):

    thin = False

    def setUp(self):
        super().setUp()
        self.ctxt.project_id = 'project'
        self.group = self.cloud.nodes[A].volumes
        self.nodes = self.cloud.nodes[A].device_mapper.nodes
        if self.thin:
            self.group.pool_size = 64 * units.Gi
        self.disk = self.cloud.make_foreign('database')

    def was(self, disk, name='database'):
        """What a logical volume held when it was made."""
        regions = disk.size // simulated.REGION // interface.SECTOR
        return {number: '%s %d' % (name, number)
                for number in range(regions)}

    def assert_as_before(self, name='database', disk=None):
        """A logical volume is as if Cinder had never asked for it."""
        disk = disk or self.disk
        self.assertIs(disk, self.group.disks.get(name))
        self.assertEqual({'mine'}, disk.tags)
        self.assertEqual(self.was(disk), disk.regions)
        self.assertEqual({handles.handle_name(self.volume.name)},
                         set(self.nodes))

    def last_failure(self):
        return str(self.cloud.failures[-1])


class LifeTest(ManageTestCase):

    def test_what_is_managed_is_a_volume_like_any_other(self):
        volume = self.cloud.manage('database')
        self.assertEqual(('available', 1), (volume.status, volume.size))
        self.cloud.content[volume.id] = self.was(self.disk)
        self.assertEqual(self.cloud.content[volume.id],
                         self.cloud.read(volume))
        self.cloud.arrive(volume)
        self.assertEqual(B, self.cloud.host_of(volume))
        self.cloud.write(volume, 3, 'on another node')
        self.assertEqual(self.cloud.content[volume.id],
                         self.cloud.read(volume))
        self.assert_nothing_left(self.volume, volume)

    def test_it_grows_to_whole_gib_and_none_is_beyond_its_end(self):
        disk = self.cloud.make_foreign('odd', units.Gi + units.Mi)
        volume = self.cloud.manage('odd')
        self.assertEqual(2, volume.size)
        self.assertEqual(2 * units.Gi, disk.size)
        handle = self.nodes[handles.handle_name(volume.name)]
        self.assertEqual(2 * units.Gi, interface.SECTOR * sum(
            segment.length for segment in handle.table))

    def test_quota_and_allocated_capacity_follow(self):
        def used():
            found = quota.QUOTAS.get_project_quotas(self.ctxt, 'project')
            return [found[name]['in_use'] for name in ('volumes',
                                                       'gigabytes')]
        volume = self.cloud.manage('database')
        self.assertEqual([1, 1], used())
        self.assertEqual(2, rows.allocated(self.ctxt, A))
        self.cloud.unmanage(volume)
        self.assertEqual([0, 0], used())
        self.assertEqual(1, rows.allocated(self.ctxt, A))

    def test_deleted_it_is_wiped_as_any_other(self):
        volume = self.cloud.manage('database')
        self.assertTrue(self.cloud.delete(volume))
        self.cloud.settle()
        self.assert_nothing_left(self.volume)

    def test_it_comes_back_after_a_power_cut(self):
        volume = self.cloud.manage('database')
        self.cloud.reboot(A)
        self.assertEqual(self.was(self.disk), self.cloud.read(volume))

    def test_unmanaged_it_has_a_plain_name_and_nothing_of_ours(self):
        volume = self.cloud.manage('database')
        self.assertIsNone(self.cloud.unmanage(volume))
        self.assert_as_before('volume-' + volume.id)
        self.cloud.reboot(A)
        self.cloud.settle()
        self.assert_as_before('volume-' + volume.id)

    def test_volume_that_has_moved_is_unmanaged_and_managed_again(self):
        attachment = self.cloud.arrive(self.volume)
        self.cloud.detach(self.volume, attachment)
        self.assertIsNone(self.cloud.unmanage(self.volume))
        self.assertEqual((), self.cloud.report(B).backends[0].copies)
        again = self.cloud.manage('volume-' + self.volume.id, B)
        self.assertEqual('available', again.status)
        self.assertEqual(self.cloud.content[self.volume.id],
                         self.cloud.read(again))
        self.assertEqual(1, rows.generation_of(self.ctxt, again.id))

    def test_nobody_is_told_of_a_problem_before_during_or_after(self):
        def assert_well(*names):
            report = self.cloud.report(A)
            self.assertTrue(report.is_well, report.found())
            self.assertEqual({self.volume.name, *names}, {
                copy.name for copy in report.backends[0].copies})
        assert_well()
        volume = self.cloud.manage('database')
        assert_well(volume.name)
        self.cloud.unmanage(volume)
        assert_well()


class ThinLifeTest(LifeTest):

    thin = True


@ddt.ddt
class RefusedTest(ManageTestCase):
    """What can't be managed is as it was, and why is told."""

    def assert_refused(self, name, *parts):
        volume = self.cloud.manage(name)
        self.assertEqual(('error_managing', 0), (volume.status, volume.size))
        for part in parts:
            self.assertIn(part, self.last_failure())
        entry = self.cloud.manageable().get(name)
        if entry:
            self.assertFalse(entry['safe_to_manage'])
            self.assertIn(entry['reason_not_safe'], self.last_failure())
        self.assertIsNone(self.cloud.delete_failed(volume))

    def test_what_is_not_there(self):
        self.assert_refused('nothing', "'group/nothing'", 'lvs group')

    def test_what_somebody_has_open(self):
        self.disk.is_open = True
        self.assert_refused('database', "'group/database'", 'lsof')
        self.assert_as_before()

    def test_what_is_unfit(self):
        self.disk.unfit = 'it is a pool. Copy it'
        self.assert_refused('database', 'it is a pool. Copy it.')
        self.assert_as_before()

    def test_thick_snapshot(self):
        self.cloud.make_foreign('shot', origin='database',
                                taken_of='database')
        volume = self.cloud.manage('shot')
        self.assertEqual('error_managing', volume.status)
        self.assertIn('Manage it as a snapshot', self.last_failure())

    def assert_ours(self, name, *parts):
        """What is Cinder's already, whether the API or the driver sees it."""
        disk = self.group.disks[name]
        before = disk.tags
        with mock.patch('cinder.volume.volume_utils.check_already_managed_'
                        'volume', return_value=False):
            self.assert_refused(name, *parts)
        self.assertIs(disk, self.group.disks[name])
        self.assertEqual(before, disk.tags)

    def test_another_volume(self):
        self.assertRaises(cinder_exception.InvalidVolume, self.cloud.manage,
                          self.volume.name)
        self.assert_ours(self.volume.name, '(standing)', self.volume.id)
        self.assert_whole()

    def test_snapshot_and_what_it_lies_on(self):
        snapshot = self.cloud.take_snapshot(self.volume)
        name = rows.snapshot_copy_name(snapshot.id)
        self.assert_ours(name, '(snapshot)', self.volume.id)
        self.cloud.arrive(self.volume)
        self.assert_ours(self.volume.name, '(kept)', self.volume.id)

    def test_both_copies_and_the_map_of_a_move(self):
        self.cloud.attach(self.volume, B)
        self.assert_ours(self.volume.name, '(source)', self.volume.id)
        self.group = self.cloud.nodes[B].volumes
        manage = self.cloud.manage
        for name in list(self.group.disks):
            with mock.patch.object(self.cloud, 'manage',
                                   lambda name: manage(name, B)):
                self.assert_ours(name)
        self.assertIn('part of volume', self.last_failure())
        self.cloud.settle()
        self.assert_whole()

    def test_what_is_being_wiped(self):
        self.cloud.delete(self.cloud.create())
        self.group.disks['localstor-wipe-x.12345678'] = simulated.Disk(
            units.Gi, frozenset())
        self.assert_refused('localstor-wipe-x.12345678', 'being wiped')

    def test_what_another_node_may_have_the_only_other_copy_of(self):
        self.disk.tags |= transfer.tags(volume=self.volume.id, generation=3)
        before = self.disk.tags
        self.assert_refused('database', self.volume.id, 'on all nodes')
        self.assertEqual(before, self.disk.tags)

    def test_volume_of_another_backend_in_the_same_group(self):
        other = base.Cloud.create_volume(self.cloud, B)
        self.cloud.make_foreign(other.name)
        self.assertRaises(cinder_exception.InvalidVolume, self.cloud.manage,
                          other.name)
        entry = self.cloud.manageable()[other.name]
        self.assertIn('of another backend', entry['reason_not_safe'])

    @ddt.data({}, {'source-id': 'database'}, {'source-name': None},
              {'source-name': '--force'})
    def test_reference_that_names_nothing(self, reference):
        driver = self.cloud.managers[A].driver
        self.assertRaises(cinder_exception.ManageExistingInvalidReference,
                          driver.manage_existing_get_size, self.volume,
                          reference)

    def test_group_without_space_for_whole_gib(self):
        self.disk.size -= units.Mi
        with mock.patch.object(self.group, 'extend', side_effect=(
                exception.NotEnoughSpace(group='group', host='a', name='x',
                                         free='0', needed='1'))):
            volume = self.cloud.manage('database')
        self.assertEqual('error_managing', volume.status)
        self.assertIn('vgextend', self.last_failure())
        self.assertIs(self.disk, self.group.disks['database'])
        self.assertEqual({'mine'}, self.disk.tags)

    def test_size_that_has_changed_since_the_quota_was_asked(self):
        size = self.cloud.managers[A].driver._service.custodian.size

        def and_grow(*arguments):
            answer = size(*arguments)
            self.disk.size *= 2
            return answer
        with mock.patch('cinder_localstor.moves.custodian.Custodian.size',
                        side_effect=and_grow):
            volume = self.cloud.manage('database')
        self.assertEqual('error_managing', volume.status)
        self.assertIn('its size has changed', self.last_failure())
        self.assertIn('database', self.group.disks)


class FailedTest(ManageTestCase):
    """Cinder did not get it entirely, and a user's data is never wiped."""

    def manage_and_fail_late(self):
        with mock.patch('cinder.volume.flows.manager.manage_existing.'
                        'ManageExistingTask.execute', autospec=True,
                        side_effect=self.manage_and_fail):
            return self.cloud.manage('database')

    @staticmethod
    def manage_and_fail(task, context, volume, manage_existing_ref, size):
        task.driver.manage_existing(volume, manage_existing_ref)
        raise cinder_exception.CinderException('the database is away')

    def test_deleted_it_is_given_back(self):
        volume = self.manage_and_fail_late()
        self.assertEqual('error_managing', volume.status)
        self.assertNotIn('database', self.group.disks)
        self.assertIsNone(self.cloud.delete_failed(volume))
        self.cloud.settle()
        self.assert_as_before()
        self.assertEqual('available', self.cloud.manage('database').status)

    def test_deleted_by_force_it_is_given_back(self):
        volume = self.manage_and_fail_late()
        self.cloud.set_status(volume, 'managing')
        self.assertIsNone(self.cloud._delete(volume, force=True))
        self.cloud.settle()
        self.assert_as_before()

    def test_name_that_another_has_by_now_is_left_to_that(self):
        volume = self.manage_and_fail_late()
        other = self.cloud.make_foreign('database')
        self.cloud.delete_failed(volume)
        self.assert_as_before('volume-' + volume.id)
        self.assert_as_before('database', other)

    def test_handle_that_can_not_be_made_leaves_it_as_it_was(self):
        with mock.patch.object(
                self.cloud.nodes[A].device_mapper, 'create', side_effect=(
                    exception.CommandFailed(command='dmsetup', host='a',
                                            reason='busy'))):
            volume = self.cloud.manage('database')
        self.assertEqual('error_managing', volume.status)
        self.assert_as_before()
        self.assertIsNone(self.cloud.delete_failed(volume))
        self.assert_as_before()

    def test_failed_creation_leaves_nothing(self):
        # It was never taken, so it is not given back either.
        mapper = self.cloud.nodes[A].device_mapper
        with mock.patch.object(mapper, 'create', side_effect=(
                exception.CommandTimedOut(command='dmsetup', host='a',
                                          seconds=60))):
            with mock.patch.object(handles.Handles, '_take_back'):
                volume = self.cloud.create()
        self.assertEqual('error', volume.status)
        self.assertTrue(self.cloud.delete(volume))
        self.cloud.settle()
        self.assertEqual({self.volume.name, 'database'},
                         set(self.group.disks))


class UnmanageTest(ManageTestCase):
    """What can't be let go is as it was."""

    def assert_refused(self, *parts, host=A):
        driver = self.cloud.managers[host].driver
        error = self.assertRaises(
            cinder_exception.VolumeIsBusy, driver.unmanage, self.refresh())
        for part in (self.volume.id, *parts):
            self.assertIn(part, str(error))
        self.assertEqual('available', self.cloud.unmanage(self.volume))
        self.assert_whole()

    def test_volume_that_moves(self):
        attachment = self.cloud.attach(self.volume, B)
        self.cloud.detach(self.volume, attachment)
        self.assertEqual(table.State.MIGRATING, self.state())
        self.assert_refused(B, 'cinder-localstor status', host=B)
        self.cloud.settle()
        self.assertIsNone(self.cloud.unmanage(self.volume))

    def test_volume_that_is_open(self):
        self.cloud.open_count(self.volume, +1)
        self.assertEqual('available', self.cloud.unmanage(self.volume))
        self.assert_whole()

    def test_volume_with_snapshots(self):
        snapshot = self.cloud.take_snapshot(self.volume)
        driver = self.cloud.managers[A].driver
        error = self.assertRaises(cinder_exception.VolumeIsBusy,
                                  driver.unmanage, self.refresh())
        self.assertIn(snapshot.id, str(error))
        self.assertRaises(cinder_exception.InvalidVolume,
                          self.cloud.unmanage, self.volume)
        self.assert_whole()

    def test_volume_that_copies_read(self):
        new = self.cloud.create_from(self.volume)
        self.assert_refused('localstor-clone-')
        self.cloud.settle()
        self.assertIsNone(self.cloud.unmanage(self.volume))
        self.cloud.settle()
        self.assertEqual(self.cloud.content[self.volume.id],
                         self.cloud.read(new))

    def test_thick_snapshots_of_others_stay_with_it(self):
        self.cloud.make_foreign('shot', origin=self.volume.name,
                                taken_of=self.volume.name)
        self.assertIsNone(self.cloud.unmanage(self.volume))
        self.assertEqual('volume-' + self.volume.id,
                         self.group.disks['shot'].origin)

    def test_volume_that_is_lost_is_not_said_to_be_let_go(self):
        self.nodes.clear()
        del self.group.disks[self.volume.name]
        self.assertEqual('error_unmanaging', self.cloud.unmanage(self.volume))
        self.assertIn('no logical volume', self.last_failure())


class ListTest(ManageTestCase):

    def test_what_is_there_is_told(self):
        self.cloud.make_foreign('odd', units.Gi + units.Mi)
        self.cloud.make_foreign('shot', origin='odd', taken_of='odd')
        found = self.cloud.manageable()
        self.assertEqual({'database', 'odd', self.volume.name}, set(found))
        self.assertEqual((True, None, 2, None), (
            found['odd']['safe_to_manage'], found['odd']['reason_not_safe'],
            found['odd']['size'], found['odd']['cinder_id']))
        ours = found[self.volume.name]
        self.assertEqual((False, self.volume.id), (ours['safe_to_manage'],
                                                   ours['cinder_id']))
        self.assertIn('already', ours['reason_not_safe'])

    def test_page_by_page(self):
        for name in 'abc':
            self.cloud.make_foreign(name)
        first = self.cloud.manageable(limit=2)
        self.assertEqual(['a', 'b'], sorted(first))
        self.assertEqual(['c', 'database'], sorted(self.cloud.manageable(
            limit=2, marker={'source-name': 'b'})))
        self.assertEqual(['b', 'c'], sorted(self.cloud.manageable(
            limit=2, offset=1)))


class SnapshotTest(ManageTestCase):
    """Snapshots that were taken by hand, of a volume of Cinder's."""

    def setUp(self):
        super().setUp()
        self.group.create_snapshot('by-hand', self.volume.name,
                                   frozenset(['mine']))
        self.shot = self.group.disks['by-hand']
        self.then = {number: 'first %d' % number for number in range(16)}
        self.cloud.write(self.volume, 3, 'later')

    def test_it_is_a_snapshot_like_any_other(self):
        snapshot = self.cloud.manage_snapshot('by-hand', self.volume)
        self.assertEqual(('available', 1), (snapshot.status,
                                            snapshot.volume_size))
        self.cloud.content[snapshot.id] = self.then
        new = self.cloud.create_from(snapshot)
        self.cloud.arrive(self.volume)
        self.cloud.settle()
        self.assertEqual(self.then, self.cloud.read(new))
        self.assertEqual(self.then, self.cloud.read_snapshot(snapshot))
        self.assert_nothing_left_but(new)
        self.assertIsNone(self.cloud.delete_snapshot(snapshot))
        self.cloud.settle()
        self.assert_nothing_left_but(new)

    def assert_nothing_left_but(self, *new):
        del self.group.disks['database']
        self.assert_nothing_left(self.volume, *new)
        self.group.disks['database'] = self.disk

    def assert_let_go(self, snapshot):
        """There is what a user had, under a plain name."""
        self.assertIs(self.shot, self.group.disks['_' + snapshot.name])
        self.assertEqual({'mine'}, self.shot.tags)
        self.assertEqual('first 3', self.shot.regions[3])

    def test_unmanaged_it_holds_what_it_held(self):
        snapshot = self.cloud.manage_snapshot('by-hand', self.volume)
        self.assertIsNone(self.cloud.unmanage_snapshot(snapshot))
        self.assert_let_go(snapshot)
        self.assertTrue(self.cloud.report(A).is_well)
        self.assert_whole()

    def manage_and_leave(self):
        """A snapshot whose volume has left its node."""
        snapshot = self.cloud.manage_snapshot('by-hand', self.volume)
        self.cloud.content[snapshot.id] = self.then
        self.cloud.arrive(self.volume)
        return snapshot

    def assert_stays(self, snapshot, *parts):
        """It can't be unmanaged, and is as it was."""
        driver = self.cloud.driver(self.volume)
        error = self.assertRaises(
            cinder_exception.SnapshotIsBusy, driver.unmanage_snapshot,
            self.cloud.refresh_snapshot(snapshot))
        # By this name Cinder finds what it tells the user.
        self.assertIs(cinder_exception.SnapshotIsBusy, type(error))
        for part in (snapshot.id, 'as it was', *parts):
            self.assertIn(part, str(error))
        self.assertEqual('available', self.cloud.unmanage_snapshot(snapshot))
        self.assertEqual(self.then, self.cloud.read_snapshot(snapshot))

    def test_it_is_unmanaged_though_its_volume_has_left(self):
        snapshot = self.manage_and_leave()
        self.assertIsNone(self.cloud.unmanage_snapshot(snapshot))
        # A thick one still needs what its volume has left behind.
        for _period in range(3):
            self.cloud.watch()
            self.assert_let_go(snapshot)
        del self.group.disks['_' + snapshot.name]
        self.cloud.settle()
        self.assert_whole()
        self.assert_nothing_left_but()

    def test_it_stays_while_its_node_is_away(self):
        snapshot = self.manage_and_leave()
        self.cloud.down.add(A)
        self.assert_stays(snapshot, A, 'unmanage it when')
        self.cloud.boot(A)
        self.assertIsNone(self.cloud.unmanage_snapshot(snapshot))
        self.assert_let_go(snapshot)

    def test_without_an_answer_it_can_be_unmanaged_again(self):
        snapshot = self.manage_and_leave()
        for fault in (simulated.Fault.HANG, simulated.Fault.HANG_AFTER):
            self.cloud.nodes[B].faults.forget()
            self.cloud.nodes[B].faults.plan = simulated.Call(
                'Peers.unmanage_snapshot', 0, fault)
            self.assertEqual('error_deleting',
                             self.cloud.unmanage_snapshot(snapshot))
            for part in (snapshot.id, A, 'asked to unmanage it',
                         'snapshot set --state error'):
                self.assertIn(part, self.last_failure())
            self.cloud.set_snapshot_status(snapshot, 'error')
        self.assertIsNone(self.cloud.unmanage_snapshot(snapshot))
        self.assert_let_go(snapshot)

    def test_peer_of_an_earlier_release_is_upgraded_first(self):
        snapshot = self.manage_and_leave()
        with mock.patch.object(
                base.Peers, 'unmanage_snapshot', create=True, side_effect=(
                    exception.PeerFailed(
                        peer=A, about='the volume', step='unmanage_snapshot',
                        reason='', kind='UnsupportedVersion'))):
            self.assert_stays(snapshot, A, 'Upgrade')

    def test_what_reads_it_from_another_node_keeps_it(self):
        snapshot = self.manage_and_leave()
        new = self.cloud.create_from(snapshot, B)
        self.assert_stays(snapshot, 'made from it')
        self.cloud.settle()
        self.assertEqual(self.then, self.cloud.read(new))
        self.assertIsNone(self.cloud.unmanage_snapshot(snapshot))

    def test_it_stays_while_it_arrives(self):
        del self.group.disks['by-hand']
        self.cloud.attach(self.volume, B)
        self.cloud.watch()
        snapshot = self.cloud.take_snapshot(self.volume)
        self.then = self.cloud.content[snapshot.id]
        self.assert_stays(snapshot, 'content')
        self.cloud.settle()
        self.assertIsNone(self.cloud.unmanage_snapshot(snapshot))

    def test_what_reads_it_keeps_it(self):
        snapshot = self.cloud.manage_snapshot('by-hand', self.volume)
        self.cloud.content[snapshot.id] = self.then
        new = self.cloud.create_from(snapshot)
        status = self.cloud.unmanage_snapshot(snapshot)
        self.assertEqual(None if self.thin else 'available', status)
        self.cloud.settle()
        self.assertEqual(self.then, self.cloud.read(new))

    def test_snapshot_of_another_volume_is_refused(self):
        other = self.cloud.create()
        snapshot = self.cloud.manage_snapshot('by-hand', other)
        self.assertEqual('error', snapshot.status)
        self.assertIn('no snapshot of', self.last_failure())
        self.assertIsNone(self.cloud.delete_snapshot(snapshot))
        self.assertIs(self.shot, self.group.disks['by-hand'])

    def test_it_is_listed_with_its_origin(self):
        self.assertNotIn('by-hand', self.cloud.manageable())
        found = self.cloud.manageable_snapshots()['by-hand']
        self.assertEqual((True, 1, {'source-name': self.volume.name}), (
            found['safe_to_manage'], found['size'],
            found['source_reference']))
        snapshot = self.cloud.manage_snapshot('by-hand', self.volume)
        found, = self.cloud.manageable_snapshots().values()
        self.assertEqual((False, snapshot.id), (found['safe_to_manage'],
                                                found['cinder_id']))

    def test_failed_it_is_given_back_when_it_is_deleted(self):
        with mock.patch('cinder.objects.Snapshot.update', side_effect=(
                cinder_exception.CinderException('the database is away'))):
            snapshot = self.cloud.manage_snapshot('by-hand', self.volume)
        self.assertEqual('error', snapshot.status)
        self.assertNotIn('by-hand', self.group.disks)
        self.assertIsNone(self.cloud.delete_snapshot(snapshot))
        self.cloud.settle()
        self.assertIs(self.shot, self.group.disks['by-hand'])
        self.assertEqual({'mine'}, self.shot.tags)
        self.assertEqual('first 3', self.shot.regions[3])


class ThinSnapshotTest(SnapshotTest):

    thin = True
