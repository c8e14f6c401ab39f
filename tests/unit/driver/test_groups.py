# SPDX-License-Identifier: Apache-2.0
"""Snapshots of groups whose volumes are all of one moment, as Cinder's own
volume manager asks for them.
"""

import itertools
import os
from unittest import mock

from cinder.db import api as db
from cinder.db import models
from cinder import exception as cinder_exception
from cinder import objects
import ddt
from oslo_utils import units

from cinder_localstor.driver import unfinished
from cinder_localstor import exception
from cinder_localstor.moves import gate
from cinder_localstor.moves import keeper
from cinder_localstor.node import simulated
from cinder_localstor import rows
from tests.unit import base
from tests.unit.driver import test_manager
from tests.unit.moves import test_mover

A, B = base.A, base.B
# Of a way in which calls go wrong, each such one is tried.
STEP = 3


class Writer:
    """A guest that writes numbers to two volumes in turn, each when the one
    before was answered.  Who is suspended answers nothing.
    """

    def __init__(self, cloud, volumes, region):
        self._node = cloud.nodes[A]
        self.volumes = volumes
        self.region = region
        self._paths = [cloud.handle(volume) for volume in volumes]
        self._contents = [cloud.content[volume.id] for volume in volumes]
        self._written = 0
        self.write()

    def write(self):
        """Write twice to each."""
        for _time in range(4):
            number, turn = divmod(self._written, 2)
            path = self._paths[turn]
            node = self._node.device_mapper.nodes.get(path.rsplit('/', 1)[1])
            if node is None or node.suspended:
                return
            self._node.write(path, self.region, str(number))
            self._node.flush(path)
            self._contents[turn][self.region] = str(number)
            self._written += 1


class GroupTestCase(test_manager.GroupTestCase):
    """A group of three volumes, which are written all the time."""

    specs = {'consistent_group_snapshot_enabled': '<is> True'}
    thin = False

    def setUp(self):
        super().setUp()
        if self.thin:
            self.make_thin(A)
        self.node = self.cloud.nodes[A]
        self.volumes = [self.volume, self.cloud.create(), self.cloud.create()]
        for volume in self.volumes:
            self.add(volume)
        self.group.refresh()
        self.let_write(self.volumes)

    def let_write(self, volumes):
        """Let a guest write each two of some volumes, in both orders."""
        self.writers = [
            Writer(self.cloud, pair, region) for region, pair
            in enumerate(itertools.permutations(volumes, 2))]
        self.node.faults.observe = lambda _host, _name: self.write()

    def write(self):
        for writer in self.writers:
            writer.write()

    def take(self):
        """A snapshot of the group, as Cinder's user finds it."""
        before = {taken.id for taken in self.all_taken()}
        try:
            self.cloud.snapshot_group(self.group)
        except simulated.Crash as crash:
            self.cloud.lose(crash.host)
        taken, = (taken for taken in self.all_taken()
                  if taken.id not in before)
        self.assertEqual(set(), self.suspended())
        return taken

    def all_taken(self):
        return objects.GroupSnapshotList.get_all(self.ctxt)

    def suspended(self):
        return {name for name, node in self.node.device_mapper.nodes.items()
                if node.suspended}

    def contents(self, snapshots):
        """What snapshots hold, by their volumes."""
        return {snapshot.volume_id: {
            writer.region: self.node.read(
                base.snapshot_path(self.node, snapshot.id), writer.region)
            for writer in self.writers} for snapshot in snapshots}

    def assert_one_moment(self, snapshots):
        contents = self.contents(snapshots)
        for writer in self.writers:
            first, second = (int(contents[volume.id][writer.region])
                             for volume in writer.volumes)
            self.assertIn(first - second, (0, 1))

    def assert_all(self, status, taken):
        taken.refresh()
        self.assertEqual({status}, {taken.status, *(
            snapshot.status for snapshot in
            objects.SnapshotList.get_all_for_group_snapshot(
                self.ctxt, taken.id))})

    def assert_refused(self, kind, *parts):
        """There is no snapshot, and everybody hears of it."""
        taken = self.take()
        self.assert_all('error', taken)
        error = self.cloud.failures[-1]
        self.assertIsInstance(error, kind)
        for part in parts:
            self.assertIn(part, str(error))
        self.cloud.watch()
        self.assertEqual(len(self.volumes), len(self.node.volumes.disks))
        for snapshot in taken.snapshots:
            self.assertIsNone(rows.place_of(self.ctxt, snapshot.id))
        self.delete(taken)
        self.assert_nothing_left(*self.volumes)
        return taken

    def delete(self, taken):
        self.cloud.delete_group_snapshot(taken)
        self.assertRaises(cinder_exception.GroupSnapshotNotFound,
                          objects.GroupSnapshot.get_by_id, self.ctxt,
                          taken.id)
        self.cloud.watch()


@ddt.ddt
class SnapshotTest(GroupTestCase):

    def test_snapshots_are_of_one_moment_and_stay_so(self):
        taken = self.take()
        self.assert_all('available', taken)
        self.assert_one_moment(taken.snapshots)
        contents = self.contents(taken.snapshots)
        self.write()
        self.assertEqual(contents, self.contents(taken.snapshots))
        self.delete(taken)
        self.assert_nothing_left(*self.volumes)

    def test_group_is_made_of_one(self):
        taken = self.take()
        contents = self.contents(taken.snapshots)
        made = self.cloud.make_group(group_snapshot_id=taken.id)
        self.assertEqual('available', made.status)
        of = {snapshot.id: snapshot.volume_id for snapshot in taken.snapshots}
        for _time in range(2):
            for volume in made.volumes:
                expected = contents[of[volume.snapshot_id]]
                read = self.cloud.read(volume)
                self.assertEqual(expected, {
                    region: read[region] for region in expected})
            self.cloud.settle()
        self.delete(taken)
        for group in (made, self.group):
            self.cloud.ask(A, 'delete_group', group=group)
        self.cloud.watch()
        self.assert_nothing_left()

    def test_they_are_taken_while_guests_wait_and_nothing_else(self):
        before = self.node.faults.seen[:]
        self.take()
        seen = [name for name, _nth in self.node.faults.seen[len(before):]]
        first = seen.index('SimulatedDeviceMapper._hold')
        self.assertEqual(
            ['SimulatedDeviceMapper._hold',
             *['SimulatedVolumeGroup.create_snapshot'] * len(self.volumes),
             'SimulatedDeviceMapper._check_held'], seen[first:first + 5])

    def after(self, count, do):
        """Let something happen right after so many snapshots are made."""
        left = [count]

        def observe(_host, name):
            if name == 'SimulatedVolumeGroup.create_snapshot':
                left[0] -= 1
                if not left[0]:
                    do()
            self.write()
        self.node.faults.observe = observe

    @ddt.data(1, 2)
    def test_snapshots_that_take_too_long_are_none(self, count):
        self.after(count, self.node.device_mapper.let_all_go)
        self.assert_refused(exception.NotHeld, A, 'of one moment')

    def test_group_without_space_for_the_last_of_them(self):
        self.fill()
        taken = self.assert_refused(exception.NotEnoughSpace, '_snapshot-')
        self.assertEqual(
            {snapshot.id for snapshot in taken.snapshots},
            {row['resource_uuid'] for row in db.message_get_all(self.ctxt)})

    def fill(self):
        self.node.volumes.total = int(5.5 * units.Gi)

    def test_one_that_is_made_after_its_time_goes_with_the_others(self):
        self.node.faults.forget()
        self.node.faults.plan = simulated.Call(
            'SimulatedVolumeGroup.create_snapshot', 1, simulated.Fault.HANG)
        taken = self.take()
        self.assert_all('error', taken)
        self.assertIsInstance(self.cloud.failures[-1],
                              exception.CommandTimedOut)
        for snapshot in taken.snapshots:
            self.node.volumes.create_snapshot(
                rows.snapshot_copy_name(snapshot.id), snapshot.volume.name,
                frozenset())
        self.delete(taken)
        self.assert_nothing_left(*self.volumes)

    def test_volume_that_still_arrives_is_named_and_what_to_do(self):
        second = self.volumes[1]
        self.let_write([])
        with db.main_context_manager.writer.using(self.ctxt) as session:
            session.query(models.Volume).filter_by(id=second.id).update(
                {'group_id': None})
        self.cloud.detach(second, self.cloud.arrive(second, B))
        attachment = self.cloud.attach(second, A)
        self.cloud.watch()
        self.add(second)
        self.let_write(self.volumes)
        taken = self.take()
        self.assert_all('error', taken)
        error = self.cloud.failures[-1]
        self.assertIsInstance(error, exception.VolumeIsMoving)
        for part in (second.id, 'snapshot of its group when the move has '
                     'ended'):
            self.assertIn(part, str(error))
        self.assertIn(('create snapshot', 'Volume status is invalid.'),
                      self.cloud.messages(taken.snapshots[0]))
        self.delete(taken)
        self.cloud.settle()
        taken = self.take()
        self.assert_all('available', taken)
        self.assert_one_moment(taken.snapshots)
        self.delete(taken)
        self.cloud.detach(second, attachment)

    def test_copy_that_still_arrives_says_so_whatever_the_rows_say(self):
        disk = self.node.volumes.disks[self.volumes[2].name]
        before = disk.tags
        disk.tags |= {'localstor.move=x'}
        taken = self.take()
        disk.tags = before
        self.assert_all('error', taken)
        error = self.cloud.failures[-1]
        self.assertIsInstance(error, exception.StillArrives)
        self.assertIn(self.volumes[2].id, str(error))
        self.delete(taken)

    def test_volume_of_another_node_is_named(self):
        second = self.volumes[1]
        with db.main_context_manager.writer.using(self.ctxt) as session:
            session.query(models.Volume).filter_by(id=second.id).update(
                {'host': B + '#local'})
        taken = self.take()
        self.assert_all('error', taken)
        error = self.cloud.failures[-1]
        self.assertIsInstance(error, exception.VolumeElsewhere)
        for part in (second.id, B):
            self.assertIn(part, str(error))
        self.assertEqual(len(self.volumes), len(self.node.volumes.disks))

    def test_volume_without_its_handle_is_named(self):
        handle = self.cloud.handle(self.volumes[1]).rsplit('/', 1)[1]
        missing = self.node.device_mapper.nodes.pop(handle)
        self.let_write(self.volumes[2:])
        taken = self.take()
        self.assert_all('error', taken)
        self.assertIsInstance(self.cloud.failures[-1],
                              exception.HandleMissing)
        self.node.device_mapper.nodes[handle] = missing
        self.delete(taken)

    def test_none_is_of_a_moment_that_a_call_has_made_before(self):
        taken = self.take()
        self.assertRaises(exception.AlreadyThere, self.cloud.ask, A,
                          'create_group_snapshot', group_snapshot=taken)
        self.assert_one_moment(taken.snapshots)
        self.delete(taken)
        self.assert_nothing_left(*self.volumes)

    @ddt.data(NotImplementedError, RuntimeError)
    def test_whatever_goes_wrong_they_are_not_taken_in_turn(self, error):
        with mock.patch.object(keeper.Keeper, 'create_together',
                               side_effect=error):
            self.assert_refused(exception.LocalStorException)

    def test_locks_are_taken_in_one_order(self):
        locked = []
        lock = gate.Gate.lock

        def note(volume_id):
            locked.append(volume_id)
            return lock(volume_id)
        with mock.patch.object(gate.Gate, 'lock', side_effect=note):
            for order in (1, -1):
                self.cloud.managers[A].driver.create_group_snapshot(
                    self.ctxt, self.row_of_group_snapshot(),
                    self.row_of_snapshots()[::order])
        ids = sorted(volume.id for volume in self.volumes)
        self.assertEqual(2 * ids, locked)

    def row_of_group_snapshot(self):
        return mock.MagicMock(
            id='x', __getitem__=lambda _self, _key: self.group.group_type_id)

    def row_of_snapshots(self):
        return [self.cloud.snapshot_row(volume) for volume in self.volumes]

    def test_volumes_are_locked_until_all_is_done(self):
        held = []

        def observe(_host, name):
            if name == 'SimulatedVolumeGroup.create_snapshot':
                held.append(max(lock.calls - lock.ends, 0))
        lock = mock.MagicMock(calls=0, ends=0)
        lock.__enter__.side_effect = lambda *_args: setattr(
            lock, 'calls', lock.calls + 1)
        lock.__exit__.side_effect = lambda *_args: setattr(
            lock, 'ends', lock.ends + 1)
        self.node.faults.observe = observe
        with mock.patch.object(gate.Gate, 'lock', return_value=lock):
            self.take()
        self.assertEqual([len(self.volumes)] * len(self.volumes), held)
        self.assertEqual(lock.calls, lock.ends)

    # What nobody has resumed

    def leave_suspended(self):
        for volume in self.volumes:
            handle = self.cloud.handle(volume).rsplit('/', 1)[1]
            self.node.device_mapper.nodes[handle].suspended = True

    def test_start_resumes_what_a_killed_guard_has_left(self):
        self.leave_suspended()
        with self.assertLogs('cinder_localstor', 'WARNING') as logged:
            self.cloud.boot(A)
        self.assertEqual(set(), self.suspended())
        self.assertIn('was left suspended', logged.output[0])

    def test_so_does_the_periodic_task_also_if_one_can_not_be(self):
        self.leave_suspended()
        self.node.faults.plan = simulated.Call(
            'SimulatedDeviceMapper.resume', 0, simulated.Fault.ERROR)
        self.cloud.watch()
        self.assertEqual(1, len(self.suspended()))
        self.cloud.watch()
        self.assertEqual(set(), self.suspended())

    def test_what_a_guard_holds_is_left_to_it(self):
        held = []
        self.after(1, lambda: (self.cloud.watch(),
                               held.append(self.suspended())))
        self.assert_all('available', self.take())
        self.assertEqual(len(self.volumes), len(held[0]))


class ThinSnapshotTest(SnapshotTest):

    thin = True

    def fill(self):
        self.node.faults.choose = self.full

    def full(self, _host, name):
        """LVM has no room for the last of them."""
        if name != 'SimulatedVolumeGroup.create_snapshot':
            return None
        if len(self.node.volumes.disks) < len(self.volumes) + 2:
            return None
        raise exception.NotEnoughSpace(group='group', host=A, free=0,
                                       needed=1, name='_snapshot-x')


class FaultTest(GroupTestCase):
    """Each call in which a snapshot of a group has a part goes wrong once, in
    each way.
    """

    fault, power = None, False

    def live(self, call=None):
        self.node.faults.forget()
        self.node.faults.plan = call
        taken = self.take()
        self.seen = self.node.faults.seen[:]
        self.node.faults.forget()
        self.write()
        self.come_back()
        self.judge(taken)
        self.delete(taken)
        self.assert_nothing_left(*self.volumes)
        for volume in self.volumes:
            self.assertEqual(self.cloud.content[volume.id],
                             self.cloud.read(volume))

    def come_back(self):
        for host in tuple(self.cloud.down):
            if self.power:
                self.cloud.reboot(host)
            else:
                self.cloud.boot(host)
        self.assertEqual(set(), self.suspended())
        self.settle_unfinished()

    def judge(self, taken):
        """It is of one moment, or it says that it is not."""
        taken.refresh()
        self.assert_all(taken.status, taken)
        if taken.status == 'available':
            self.assert_one_moment(taken.snapshots)
        else:
            self.assertEqual('error', taken.status)
            self.assertIsNotNone(self.fault)
        if self.fault in (simulated.Fault.ERROR, simulated.Fault.ERROR_AFTER):
            self.cloud.watch()
            self.assertEqual(len(self.volumes), len(self.node.volumes.disks))

    @staticmethod
    def some(calls, number):
        """Those that go wrong in one way, or all of them if there is time."""
        if 'LOCALSTOR_SOAK_FAULTS' in os.environ:
            return calls
        return calls[number % STEP::STEP]

    def test_snapshots_are_of_one_moment_or_none(self):
        self.live()
        calls = self.seen
        self.assertGreater(len(calls), len(self.volumes) + 2)
        for number, (self.fault, self.power) in enumerate(test_mover.WAYS):
            for name, nth in self.some(calls, number):
                try:
                    self.live(simulated.Call(name, nth, self.fault))
                except Exception as error:
                    raise AssertionError('%s of %s #%d: %s' % (
                        self.fault.name, name, nth, error)) from error


class ThinFaultTest(FaultTest):

    thin = True


class UnfinishedTest(GroupTestCase):
    """Snapshots of groups that have died with the service."""

    def die(self):
        self.node.faults.plan = simulated.Call(
            'SimulatedVolumeGroup.create_snapshot', 1, simulated.Fault.CRASH)
        self.node.faults._counts.clear()
        taken = self.take()
        self.cloud.boot(A)
        self.assert_all('creating', taken)
        return taken

    def test_they_are_an_error_and_can_be_deleted(self):
        taken = self.die()
        self.settle_unfinished()
        self.assert_all('error', taken)
        self.delete(taken)
        self.assert_nothing_left(*self.volumes)

    def test_deletion_that_has_died_can_be_asked_for_again(self):
        taken = self.take()
        self.node.faults.forget()
        self.node.faults.plan = simulated.Call(
            'SimulatedVolumeGroup.remove', 1, simulated.Fault.CRASH)
        self.assertRaises(simulated.Crash, self.cloud.delete_group_snapshot,
                          taken)
        self.cloud.boot(A)
        self.assert_all('deleting', taken)
        self.settle_unfinished(B)
        self.assert_all('deleting', taken)
        self.settle_unfinished()
        self.assert_all('error', taken)
        self.delete(taken)
        self.assert_nothing_left(*self.volumes)

    def test_group_whose_volumes_were_being_changed_is_as_its_volumes_say(
            self):
        crash = simulated.Crash(A, 'VolumeManager.update_group')
        with mock.patch.object(self.cloud.managers[A].driver, 'update_group',
                               side_effect=crash):
            self.assertRaises(
                simulated.Crash, self.cloud.change_group, self.group,
                remove=self.volumes[0].id)
        self.cloud.boot(A)
        self.settle_unfinished(B)
        self.group.refresh()
        self.assertEqual('updating', self.group.status)
        self.settle_unfinished()
        self.group.refresh()
        self.assertEqual('available', self.group.status)
        self.assertEqual({volume.id for volume in self.volumes},
                         {volume.id for volume in self.group.volumes})

    def test_one_that_may_be_under_way_goes_on(self):
        taken = self.die()
        self.settle_unfinished(patience=unfinished.PATIENCE)
        self.assert_all('creating', taken)

    def test_one_of_another_backend_is_left_to_it(self):
        taken = self.die()
        self.settle_unfinished(B)
        self.assert_all('creating', taken)


class UnderWayTest(GroupTestCase):
    """A snapshot that Cinder still works at, however long that takes."""

    def test_it_is_left_alone(self):
        driver = self.cloud.managers[A].driver
        asked, seen = driver.create_group_snapshot, []

        def ask(*arguments):
            try:
                return asked(*arguments)
            finally:
                self.settle_unfinished()
                seen.extend(taken.status for taken in self.all_taken())
        with mock.patch.object(driver, 'create_group_snapshot', ask):
            taken = self.take()
        self.assertEqual((['creating'], 'available'), (seen, taken.status))

    def test_so_is_its_deletion(self):
        driver = self.cloud.managers[A].driver
        asked, seen = driver.delete_snapshot, []
        taken = self.take()

        def ask(*arguments):
            self.settle_unfinished()
            self.assert_all('deleting', taken)
            seen.append(arguments)
            return asked(*arguments)
        with mock.patch.object(driver, 'delete_snapshot', ask):
            self.delete(taken)
        self.assertEqual(len(self.volumes), len(seen))
        self.assertEqual([], db.message_get_all(self.ctxt))

    def test_so_is_a_change_of_volumes(self):
        seen = []

        def look(*_arguments):
            self.settle_unfinished()
            self.group.refresh()
            seen.append(self.group.status)
        with mock.patch.object(gate.Gate, 'check', look):
            self.cloud.change_group(self.group, add=self.cloud.create().id)
        self.group.refresh()
        self.assertEqual((['updating'], 'available'),
                         (seen, self.group.status))

    def test_one_that_was_made_is_not_broken_off_by_an_older_look(self):
        driver = self.cloud.managers[A].driver
        taken = self.take()
        row = objects.GroupSnapshot.get_by_id(self.ctxt, taken.id)
        row.status = 'creating'
        driver._unfinished._break_off_group_snapshot(row)
        taken.refresh()
        self.assertEqual('available', taken.status)


class EachByItselfTest(UnderWayTest):
    """The same where Cinder takes one after the other."""

    specs = {}


class FormerReleasesTest(test_manager.ManagerTestCase):

    def test_group_that_could_not_be_made_can_be_deleted(self):
        update, volumes = self.cloud.managers[A].driver \
            .delete_consistencygroup(self.ctxt, mock.sentinel.group, [])
        self.assertEqual(({'status': 'deleted'}, []), (update, volumes))
