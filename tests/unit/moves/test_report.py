# SPDX-License-Identifier: Apache-2.0

import dataclasses
import datetime
from unittest import mock

from cinder import objects
from oslo_utils import units

from cinder_localstor.datapath import clone
from cinder_localstor.datapath import copies
from cinder_localstor.datapath import engine
from cinder_localstor.datapath import handles
from cinder_localstor.datapath import transfer
from cinder_localstor import exception
from cinder_localstor.moves import report
from cinder_localstor.moves import table
from cinder_localstor.node import interface
from cinder_localstor.node import simulated
from cinder_localstor import rows
from tests.unit import base


class ReportTestCase(base.TestCase):

    def setUp(self):
        super().setUp()
        self.cloud = base.Cloud(self)
        self.volume = self.cloud.create_volume()

    def report(self, host=base.A):
        return self.cloud.report(host)

    def copies(self, host=base.A):
        return self.report(host).backends[0].copies

    def only(self, host=base.A):
        entries = self.copies(host)
        self.assertEqual(1, len(entries), entries)
        return entries[0]

    def assert_problem(self, text, host=base.A):
        problems = [problem for _host, _name, problem
                    in self.report(host).found()]
        self.assertEqual(1, len(problems), problems)
        self.assertIn(text, problems[0])

    def mapped(self, host=base.A, volume=None):
        name = handles.handle_name(self.cloud.refresh(
            volume or self.volume).name)
        return self.cloud.nodes[host].device_mapper.nodes[name]

    def disk(self, host=base.A):
        return self.cloud.nodes[host].volumes.disks[
            self.cloud.refresh(self.volume).name]

    def move_of_volume(self):
        return rows.for_volume(self.ctxt, self.volume.id)[0]


class SnapshotTest(ReportTestCase):

    def setUp(self):
        super().setUp()
        self.snapshot = self.cloud.snapshot_row(self.volume)
        self.cloud.running[base.A].keeper.create(self.ctxt, self.snapshot)
        self.set_status('available')

    def set_status(self, status):
        self.snapshot.status = status
        self.snapshot.save()

    def disks(self):
        return self.cloud.nodes[base.A].volumes.disks

    @property
    def name(self):
        return '_snapshot-' + self.snapshot.id

    def test_snapshot_is_well(self):
        found, = (copy for copy in self.copies()
                  if copy.role is copies.Role.SNAPSHOT)
        # The size is what it takes of the group.
        self.assertEqual((self.name, self.volume.id,
                          units.Gi + simulated.TABLES),
                         (found.name, found.volume_id, found.size))
        self.assertTrue(self.report().is_well)

    def test_missing_snapshot(self):
        del self.disks()[self.name]
        self.assert_problem('group/%s is missing' % self.name)
        for status in ('creating', 'deleting', 'error', 'error_deleting'):
            self.set_status(status)
            self.assertTrue(self.report().is_well, status)

    def test_invalid_snapshot(self):
        self.disks()[self.name].is_valid = False
        self.assert_problem('snapshot group/%s is invalid' % self.name)

    def test_snapshot_with_too_little_room(self):
        self.disks()[self.name].room = 1 << 40
        self.assert_problem("lvextend --size %db group/%s"
                            % (1 << 40, self.name))

    def test_snapshot_that_is_not_active(self):
        self.cloud.nodes[base.A].volumes.lost.add(self.name)
        self.assert_problem('lvchange --activate y group/' + self.name)

    def test_snapshot_whose_deletion_was_broken_off(self):
        self.disks()[self.name].origin = ''
        self.assert_problem('no snapshot of ' + self.volume.name)

    def test_snapshot_that_no_row_knows_of(self):
        self.snapshot.destroy()
        self.assert_problem('no volume and no move knows of it')

    def test_kept_copy_is_well(self):
        self.cloud.move(self.volume)
        self.cloud.settle()
        found, = (copy for copy in self.copies()
                  if copy.role is copies.Role.KEPT)
        self.assertEqual((self.volume.name, (), None),
                         (found.name, found.under, found.move))
        self.cloud.down.add(base.B)
        for host in (base.A, base.B):
            self.assertTrue(self.report(host).is_well)
        here, = self.copies(base.B)
        self.assertEqual(copies.Role.STANDING, here.role)

    def test_kept_copy_that_is_missing(self):
        self.cloud.move(self.volume)
        self.cloud.settle()
        del self.disks()[self.volume.name]
        self.assert_problem('group/%s is missing' % self.volume.name)


class StandingTest(ReportTestCase):

    def test_standing_volume_is_well(self):
        copy = self.only()
        self.assertEqual(copies.Role.STANDING, copy.role)
        self.assertEqual(self.volume.id, copy.volume_id)
        self.assertEqual(units.Gi, copy.size)
        self.assertEqual(('group-' + self.volume.name,), copy.under)
        self.assertTrue(self.report().is_well)

    def test_it_is_open_though_nobody_has_it(self):
        self.mapped().open_count = 1
        self.assert_problem("'lsof /dev/mapper/"
                            + handles.handle_name(self.volume.name))
        attachment = self.cloud.reserve(self.volume)
        self.assertTrue(self.report().is_well)
        attachment.destroy()
        self.assert_problem('Cinder knows of nobody')

    def test_it_is_open_for_what_cinder_does_with_it(self):
        self.mapped().open_count = 1
        for does in ({'status': 'backing-up'},
                     {'migration_status': 'migrating'}):
            self.volume.update({'status': 'available',
                                'migration_status': None, **does})
            self.volume.save()
            self.assertTrue(self.report().is_well, does)

    def test_other_node_knows_nothing_of_it(self):
        self.assertEqual((), self.copies(base.B))

    def test_missing_handle(self):
        self.cloud.nodes[base.A].cut_power()
        self.assert_problem('no handle')

    def test_missing_logical_volume(self):
        self.cloud.nodes[base.A].volumes.disks.clear()
        self.assert_problem('group/%s is missing' % self.volume.name)

    def test_logical_volume_that_is_not_active(self):
        self.cloud.nodes[base.A].volumes.is_active = lambda name: False
        self.assert_problem('lvchange --activate y group/')

    def test_logical_volume_that_the_pool_has_lost(self):
        self.cloud.nodes[base.A].volumes.lost.add(
            self.cloud.row(self.volume).name)
        self.assert_problem("'No data available'")

    def test_handle_on_the_wrong_device(self):
        other = self.cloud.create_volume()
        self.mapped().table = self.mapped(volume=other).table
        self.assert_problem('lies on group-%s instead of group-%s' % (
            other.name, self.volume.name))

    def test_read_only_handle(self):
        self.mapped().read_only = True
        self.assert_problem('read-only')

    def test_suspended_handle(self):
        self.mapped().suspended = True
        self.assert_problem("run 'dmsetup resume %s-handle'"
                            % self.volume.name)

    def test_suspended_logical_volume(self):
        self.cloud.nodes[base.A].volumes.abandoned.add('pool')
        found = self.report()
        self.assertFalse(found.is_well)
        self.assertIn("group/pool is suspended",
                      found.backends[0].problems[0])

    def test_old_generation(self):
        present, = rows.copies_on(self.ctxt, base.A)
        with mock.patch.object(rows, 'copies_on', return_value=[
                dataclasses.replace(present, generation=3)]):
            self.assert_problem('generation 1, the present one is 3')

    def test_copy_that_never_arrived(self):
        self.disk().tags |= transfer.tags(move='some-move')
        self.assert_problem('never arrived')

    def test_volume_that_has_moved_on_behind_the_back_of_the_database(self):
        self.disk().tags |= transfer.tags(superseded=2)
        self.assert_problem('moved on as generation 2')

    def test_tags_that_are_garbage(self):
        self.disk().tags = frozenset(['localstor.generation=x'])
        self.assert_problem('generation 0, the present one is 1')

    def test_volume_that_is_being_made_or_deleted_is_left_alone(self):
        for status in ('creating', 'deleting'):
            self.cloud.set_status(self.volume, status)
            self.assertTrue(self.report().is_well)
            self.assertEqual((), self.copies())

    def test_logical_volume_that_belongs_to_nothing(self):
        self.cloud.nodes[base.A].volumes.create(
            'forgotten', units.Gi, transfer.tags(volume='gone'))
        leftover, _standing = self.copies()
        self.assertEqual(copies.Role.LEFTOVER, leftover.role)
        self.assertEqual('gone', leftover.volume_id)
        self.assert_problem('no volume and no move')

    def test_logical_volume_of_somebody_else_is_left_alone(self):
        self.cloud.nodes[base.A].volumes.create('root', 1, frozenset())
        self.assertEqual(1, len(self.copies()))

    def test_device_that_belongs_to_nothing(self):
        node = self.cloud.nodes[base.A]
        node.device_mapper.nodes['x-handle'] = self.mapped()
        self.assert_problem('device x-handle')

    def test_session_that_belongs_to_nothing(self):
        iqn = 'iqn.2010-10.org.openstack:localstor-' + self.volume.id
        sessions = {iqn: '/dev/sda', 'iqn.2010-10.org.openstack:other': ''}
        self.cloud.nodes[base.A].initiator.connected = lambda: sessions
        self.assert_problem('session with ' + iqn)

    def test_disk_that_is_missing(self):
        self.cloud.nodes[base.A].volumes.missing = 1
        found = self.report().backends[0]
        self.assertIn('1 of the disks of volume group', found.problems[0])
        self.assertEqual((), found.copies[0].problems)

    def test_tool_that_fails_is_told_and_hides_nothing_else(self):
        for call, host in (('SimulatedVolumeGroup.logical_volumes', base.A),
                           ('SimulatedDeviceMapper.devices', base.A)):
            faults = self.cloud.nodes[host].faults
            faults.forget()
            faults.plan = simulated.Call(call, 0, simulated.Fault.HANG)
            found = self.report()
            self.assertIn('did not end', found.backends[0].problems[0])
            self.assertEqual((), found.backends[0].copies[0].problems)
            self.assertFalse(found.is_well)


class TwoBackendsTest(ReportTestCase):

    def test_nodes_of_one_backend_are_no_leftovers_of_another(self):
        # Both see all device-mapper nodes of the machine.
        found = self.cloud.report(base.A, base.B)
        node = self.cloud.nodes[base.A]
        self.cloud.nodes[base.B].device_mapper = node.device_mapper
        found = self.cloud.report(base.B, base.A)
        self.assertEqual(set(), found.found())
        self.assertEqual([base.B, base.A],
                         [backend.host for backend in found.backends])


class MovingTest(ReportTestCase):

    def setUp(self):
        super().setUp()
        self.cloud.move(self.volume)

    def test_both_nodes_show_the_move(self):
        self.cloud.watch()
        there, here = self.only(base.B), self.only(base.A)
        self.assertEqual(copies.Role.ARRIVING, there.role)
        self.assertEqual(copies.Role.SOURCE, here.role)
        for copy, peer in ((there, base.A), (here, base.B)):
            self.assertEqual((), copy.problems)
            self.assertEqual(self.volume.id, copy.volume_id)
            self.assertEqual(peer, copy.move.peer)
            self.assertEqual(table.State.MIGRATING, copy.move.state)
            self.assertEqual((2, 2), (copy.move.done, copy.move.steps))

    def test_progress_is_known_to_the_destination(self):
        self.cloud.watch()
        self.cloud.write(self.volume, 3, 'new')
        self.assertIsNone(self.only(base.A).move.progress)
        self.assertEqual(
            engine.Progress(engine.Hydration.RUNNING, units.Gi // 16,
                            units.Gi),
            self.only(base.B).move.progress)

    def test_rate_is_the_average_since_hydration_began(self):
        self.cloud.watch()
        self.cloud.write(self.volume, 3, 'new')
        since = self.move_of_volume().since
        self.patch('oslo_utils.timeutils.utcnow',
                   return_value=since + datetime.timedelta(seconds=4))
        # It would compare the time with one that has a zone.
        self.patch('cinder_localstor.peers.directory.down',
                   return_value=set())
        move = self.only(base.B).move
        self.assertEqual(units.Gi / 16 / 4, move.rate)
        self.assertEqual(60, move.remaining)

    def test_nothing_is_wrong_at_any_moment_of_a_move(self):
        for _period in range(3):
            for host in self.cloud.nodes:
                self.assertEqual(set(), self.report(host).found())
            self.cloud.watch()
            self.cloud.hydrate()
        self.assertEqual([], rows.for_host(self.ctxt, base.A))

    def detach(self):
        for attachment in objects.VolumeAttachmentList.get_all_by_volume_id(
                self.ctxt, self.volume.id):
            attachment.destroy()

    def test_it_is_open_though_nobody_has_it(self):
        self.cloud.watch()
        self.mapped(base.B).open_count = 1
        self.assertTrue(self.report(base.B).is_well)
        self.detach()
        self.assert_problem('Cinder knows of nobody', base.B)

    def test_it_is_open_for_what_arrives_from_it(self):
        middle = self.mapped(base.B)
        for host in (base.A, base.B):
            self.cloud.watch()
            self.cloud.move(self.volume, host)
        self.detach()
        middle.open_count = 1
        for host in (base.A, base.B):
            self.assertTrue(self.report(host).is_well,
                            self.report(host).found())
        self.mapped(base.B).open_count = 1
        self.assert_problem('Cinder knows of nobody', base.B)

    def test_snapshot_that_arrives_is_open_for_what_is_made_of_it(self):
        self.cloud.watch()
        snapshot = self.cloud.snapshot_row(self.volume)
        self.cloud.running[base.B].keeper.create(self.ctxt, snapshot)
        self.detach()
        name = rows.find_snapshot(self.ctxt, snapshot.id).name
        self.assertIn((name, copies.Role.ARRIVING), [
            (copy.name, copy.role) for copy in self.copies(base.B)])
        self.cloud.nodes[base.B].device_mapper.nodes[
            handles.handle_name(name)].open_count = 1
        self.assertEqual(set(), self.report(base.B).found())

    def test_problem_of_a_move_is_shown_on_both_nodes(self):
        rows.record_problem(self.ctxt, self.move_of_volume(), 'it rains')
        self.assert_problem('it rains', base.A)
        self.assert_problem('it rains', base.B)

    def test_peer_that_is_down(self):
        with mock.patch.object(report.directory, 'down',
                               return_value={base.A}):
            self.assert_problem('cinder-volume of a@local is down', base.B)

    def test_source_that_is_not_exported(self):
        self.cloud.nodes[base.A].target.exports.clear()
        self.assert_problem('not exported to ' + base.B, base.A)

    def test_device_that_an_export_has_of_its_own(self):
        node = self.cloud.nodes[base.A]
        node.target.nodes = lambda export: (export.serial + '-guard',)
        for name in (self.move_of_volume().move_id, 'unknown'):
            node.device_mapper.create(name + '-guard', [
                interface.Segment(0, 8, 'flakey', '')])
        self.assertEqual(
            ['unknown-guard'],
            [text.split()[1].rstrip(':') for text in self.report().problems
             if text.startswith('device ')])

    def test_target_is_asked_on_the_source_only(self):
        asked = []
        for host, node in self.cloud.nodes.items():
            node.target.exported = lambda host=host: asked.append(
                host) or {self.move_of_volume().move_id}
            self.report(host)
        self.assertEqual([base.A], asked)

    def test_missing_session(self):
        self.cloud.nodes[base.B].initiator.sessions.clear()
        self.assert_problem('no working session with the source', base.B)

    def test_engine_that_is_gone(self):
        nodes = self.cloud.nodes[base.B].device_mapper.nodes
        name = self.cloud.refresh(self.volume).name
        del nodes[name + '-clone']
        self.assert_problem('device %s-clone is missing' % name, base.B)

    def test_handle_that_does_not_lie_on_the_engine(self):
        name = self.cloud.refresh(self.volume).name
        path = self.cloud.nodes[base.B].volumes.path(name)
        mapped = self.mapped(base.B)
        mapped.table = [dataclasses.replace(mapped.table[0],
                                            arguments=path + ' 0')]
        self.assert_problem('instead of %s-clone' % name, base.B)

    def test_hydration_that_has_stopped(self):
        self.cloud.watch()
        for mapped in self.cloud.nodes[base.B].device_mapper.nodes.values():
            mapped.hydrating = False
        self.assert_problem('hydration has stopped', base.B)

    def test_hydration_that_has_failed(self):
        self.cloud.watch()
        failed = engine.Progress(engine.Hydration.FAILED)
        with mock.patch.object(clone.CloneEngine, 'progress',
                               return_value=failed):
            self.assert_problem('hydration has failed', base.B)

    def test_copy_that_differs_from_the_source(self):
        self.cloud.watch()
        differs = engine.Progress(engine.Hydration.DIFFERS, differing=7,
                                  first_differing=8192)
        name = self.cloud.refresh(self.volume).name
        with mock.patch.object(clone.CloneEngine, 'progress',
                               return_value=differs):
            for part in ('7 blocks', 'byte 8192', 'dmesg',
                         'localstor-hydrator status /run/localstor/' + name,
                         'on another node'):
                self.assert_problem(part, base.B)

    def test_suspended_engine(self):
        name = self.cloud.refresh(self.volume).name + '-clone'
        self.cloud.nodes[base.B].device_mapper.nodes[name].suspended = True
        self.assert_problem('%s is suspended' % name, base.B)

    def test_sealed_source_that_can_be_written(self):
        self.cloud.watch()
        name = self.move_of_volume().transfer.source_name
        self.cloud.nodes[base.A].device_mapper.nodes[
            handles.handle_name(name)].read_only = False
        self.assert_problem('this copy can be written', base.A)

    def test_missing_source_copy(self):
        self.cloud.nodes[base.A].volumes.disks.clear()
        self.assert_problem('is missing', base.A)

    def test_destination_copy_that_the_pool_has_lost(self):
        self.cloud.nodes[base.B].volumes.lost.add(
            self.cloud.row(self.volume).name)
        self.assert_problem("'No data available'", base.B)

    def test_missing_destination_copy(self):
        name = self.cloud.refresh(self.volume).name
        node = self.cloud.nodes[base.B]
        found = node.volumes.logical_volumes()
        del found[name]
        with mock.patch.object(node.volumes, 'logical_volumes',
                               return_value=found):
            self.assert_problem('%s is missing' % name, base.B)

    def test_nothing_is_called_that_changes_anything(self):
        for node in self.cloud.nodes.values():
            node.faults.forget()
        for host in self.cloud.nodes:
            self.report(host)
        called = {name for node in self.cloud.nodes.values()
                  for name, _nth in node.faults.seen}
        self.assertEqual({'SimulatedVolumeGroup.logical_volumes',
                          'SimulatedVolumeGroup.missing_disks',
                          'SimulatedDeviceMapper.devices'}, called)

    def test_what_is_wrong_with_the_disks_is_told_on_both_nodes(self):
        for host in (base.A, base.B):
            for name, disk in self.cloud.nodes[host].volumes.disks.items():
                disk.ailment = 'a disk of it is missing'
            self.assert_problem('lvconvert --repair', host)


class AbortingTest(ReportTestCase):

    def test_source_is_a_whole_volume_again(self):
        self.cloud.reserve(self.volume, {'host': 'a'})
        second = self.cloud.reserve(self.volume)
        self.cloud.move(self.volume)
        second.destroy()
        self.cloud.down.add(base.A)
        self.cloud.watch()
        self.assertEqual(table.State.ABORTING, self.move_of_volume().state)
        self.assertEqual((), self.only(base.A).problems)
        self.assertEqual((), self.only(base.B).problems)
        self.cloud.nodes[base.A].cut_power()
        self.assertIn('it has no handle', self.only(base.A).problems)


class LastingTest(ReportTestCase):

    def test_problem_that_goes_away_is_none(self):
        well = self.report()
        self.cloud.nodes[base.A].cut_power()
        wrong = self.report()
        self.assertFalse(wrong.is_well)
        self.assertTrue(report.lasting(well, wrong).is_well)
        self.assertTrue(report.lasting(wrong, well).is_well)
        self.assertEqual(wrong, report.lasting(wrong, wrong))

    def test_problem_whose_figures_change_is_one(self):
        earlier, later = (report.Report(at=report.NEVER, backends=(
            report.Backend(host=base.A, problems=(
                "Volume group 'disks' has been locked for %d seconds"
                % seconds,)),)) for seconds in (9, 10))
        self.assertEqual(later, report.lasting(earlier, later))

    def test_leftover_that_goes_away_is_none(self):
        well = self.report()
        self.cloud.nodes[base.A].volumes.create(
            'forgotten', units.Gi, transfer.tags(volume='gone'))
        wrong = self.report()
        self.assertEqual(2, len(wrong.backends[0].copies))
        self.assertEqual(1, len(report.lasting(well, wrong)
                                .backends[0].copies))

    def test_refusal_of_the_database_is_not_hidden(self):
        with mock.patch.object(rows, 'for_host',
                               side_effect=exception.LocalStorException):
            self.assertRaises(exception.LocalStorException, self.report)
