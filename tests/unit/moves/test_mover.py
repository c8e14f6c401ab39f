# SPDX-License-Identifier: Apache-2.0

import json
import os
import threading
import time
from unittest import mock

from cinder.db import api as db
from cinder import exception as cinder_exception
import ddt
from oslo_db import exception as db_exception
from oslo_utils import units
from oslo_utils import uuidutils
import tenacity

from cinder_localstor.datapath import engine
from cinder_localstor.datapath import handles
from cinder_localstor.datapath import hydrator
from cinder_localstor import exception
from cinder_localstor.moves import properties
from cinder_localstor.moves import table
from cinder_localstor.node import interface
from cinder_localstor.node import simulated
from cinder_localstor import rows
from tests.unit import base


class MoverTestCase(base.TestCase):

    def setUp(self):
        super().setUp()
        self.cloud = base.Cloud(self, (base.A, base.B, base.C))
        self.volume = self.cloud.create_volume()

    def state(self):
        moves = rows.for_volume(self.ctxt, self.volume.id)
        return moves[0].state if moves else None

    def assert_reads(self, *volumes):
        """Every volume reads as written."""
        for volume in volumes:
            self.assertEqual(self.cloud.content[volume.id],
                             self.cloud.read(volume))

    def assert_whole(self, *volumes):
        """Every volume reads as written, and there is nothing else."""
        volumes = volumes or (self.volume,)
        self.assert_reads(*volumes)
        self.assertEqual([], self.cloud.leftovers(volumes))
        self.assertEqual([], rows._moves(self.ctxt))

    def restart(self, host):
        """Cut the power of a node and start its driver again."""
        self.cloud.nodes[host].cut_power()
        self.cloud.boot(host)

    def lose_destination_of_an_aborted_move(self):
        """The volume is back at its source; nobody has it attached."""
        first = self.cloud.reserve(self.volume, {'host': 'a'})
        second = self.cloud.reserve(self.volume)
        self.cloud.move(self.volume)
        second.destroy()
        self.cloud.down.add(base.B)
        move = rows.for_volume(self.ctxt, self.volume.id)[0]
        rows.change_state(self.ctxt, move, table.State.ABORTING.value,
                          swap=True)
        first.destroy()


class FirstAttachTest(MoverTestCase):

    def test_volume_is_usable_at_once_and_arrives(self):
        self.cloud.move(self.volume)
        self.assertEqual(base.B, self.cloud.host_of(self.volume))
        self.assertEqual(table.State.MIGRATING, self.state())
        self.assert_reads(self.volume)
        self.cloud.write(self.volume, 3, 'new')
        self.cloud.watch()
        self.cloud.write(self.volume, 4, 'newer')
        self.cloud.settle()
        self.assert_whole()

    def test_source_is_read_over_what_the_destination_knows(self):
        for host, known in ((base.B, (interface.NVME, interface.ISCSI)),
                            (base.C, (interface.ISCSI,))):
            self.cloud.nodes[host].initiator.known = known
            self.cloud.move(self.volume, host)
            move, = rows.for_volume(self.ctxt, self.volume.id)
            self.assertEqual(known[0], move.transfer.export.transport)
            self.cloud.settle()
            self.assert_whole()

    def test_peer_of_an_earlier_version_gets_iscsi(self):
        examine = self.cloud.running[base.B].answers.examine
        self.cloud.running[base.B].answers.examine = lambda *asked: {
            key: value for key, value in examine(*asked).items()
            if key != 'transports'}
        self.cloud.nodes[base.B].initiator.known = (interface.NVME,)
        self.cloud.move(self.volume)
        move, = rows.for_volume(self.ctxt, self.volume.id)
        self.assertEqual(interface.ISCSI, move.transfer.export.transport)

    def encrypt(self):
        volume = self.cloud.refresh(self.volume)
        volume.encryption_key_id = '00000000-0000-0000-0000-000000000001'
        volume.save()

    def waits(self):
        """Whether reads wait as long as the source is away, whatever the
        options say.
        """
        self.cloud.move(self.volume)
        move, = rows.for_volume(self.ctxt, self.volume.id)
        return move.transfer.waits

    def test_encrypted_volume_waits_for_its_source(self):
        self.encrypt()
        self.assertTrue(self.waits())

    def test_others_do_as_the_options_say(self):
        self.assertFalse(self.waits())

    def test_peer_of_an_earlier_version_is_told_nothing_that_it_lacks(self):
        examine = self.cloud.running[base.B].answers.examine
        self.cloud.running[base.B].answers.examine = lambda *asked: {
            key: value for key, value in examine(*asked).items()
            if key != 'waits'}
        self.encrypt()
        self.assertFalse(self.waits())

    def test_source_is_read_only_before_hydration_starts(self):
        self.cloud.move(self.volume)
        copy = rows.for_volume(self.ctxt, self.volume.id)[0].transfer
        source = self.cloud.nodes[base.A].device_mapper.nodes[
            copy.source_name + '-handle']
        self.assertFalse(source.read_only)
        self.cloud.watch()
        self.assertTrue(source.read_only)

    def test_user_row_keeps_its_status_and_quota(self):
        before = self.cloud.refresh(self.volume)
        self.cloud.move(self.volume)
        after = self.cloud.refresh(self.volume)
        for field in ('id', 'status', 'migration_status', 'display_name',
                      'use_quota', 'size', 'project_id'):
            self.assertEqual(getattr(before, field), getattr(after, field))

    def test_shadow_row_is_hidden_and_costs_no_quota(self):
        self.cloud.move(self.volume)
        move = rows.for_volume(self.ctxt, self.volume.id)[0]
        shadow = self.cloud.refresh(
            type('Shadow', (), {'id': move.move_id}))
        self.assertEqual('target:' + self.volume.id, shadow.migration_status)
        self.assertFalse(shadow.use_quota)
        self.assertEqual(base.A + '#local', shadow.host)

    def test_generation_grows_with_each_move(self):
        self.cloud.move(self.volume)
        self.cloud.settle()
        self.cloud.move(self.volume, to=base.A)
        self.cloud.settle()
        self.assertEqual(3, rows.generation_of(self.ctxt, self.volume.id))
        self.assert_whole()

    def test_two_volumes_move_in_both_directions(self):
        other = self.cloud.create_volume(base.B)
        self.cloud.move(self.volume)
        self.cloud.move(other, to=base.A)
        self.cloud.settle()
        self.assertEqual(base.B, self.cloud.host_of(self.volume))
        self.assertEqual(base.A, self.cloud.host_of(other))
        self.assert_whole(self.volume, other)

    def test_tuning_options_of_today_do_not_change_a_move_of_yesterday(self):
        self.cloud.move(self.volume)
        self.override('localstor_region_size', 4)
        self.restart(base.B)
        self.cloud.settle()
        self.assert_whole()


class SpaceTest(MoverTestCase):
    """The destination has a thin pool that is small."""

    hold_up = 3

    def setUp(self):
        super().setUp()
        self.node = self.cloud.nodes[base.B]
        self.pool(5 * units.Gi)

    def pool(self, size, host=base.B):
        self.cloud.nodes[host].volumes.pool_size = size

    def fill(self, share):
        """Let others take a share of the pool."""
        volumes = self.node.volumes
        needed = int(volumes.pool_size * share) // (64 * units.Mi)
        volumes.disks['others'] = simulated.Disk(
            units.Gi, frozenset(), {number: 'x' for number in range(needed)})

    def arrived(self):
        copy = self.cloud.row(self.volume).name
        return self.node.volumes.disks[copy].used

    def problem(self):
        return rows.for_volume(self.ctxt, self.volume.id)[0].problem

    def assert_refused(self, volume=None):
        error = self.assertRaises(exception.PeerFailed, self.cloud.move,
                                  volume or self.volume)
        self.assertEqual('NotEnoughSpace', error.kind)
        self.assertIn('group/pool', str(error))

    def test_move_into_a_full_pool_is_refused(self):
        self.fill(0.9)
        self.assert_refused()
        self.cloud.settle()
        self.assertEqual(base.A, self.cloud.host_of(self.volume))
        self.assertEqual(['others'], list(self.node.volumes.disks))

    def test_pool_with_full_metadata_is_refused_before_anything_is_made(self):
        self.node.volumes.pool_metadata = 0.96
        with mock.patch.object(rows, 'begin') as begun:
            self.assert_refused()
        begun.assert_not_called()

    def test_second_of_two_moves_is_refused_if_both_are_too_much(self):
        self.pool(int(1.9 * units.Gi))
        second = self.cloud.create_volume()
        self.cloud.move(self.volume)
        self.assertEqual(0, self.arrived())
        self.assert_refused(second)
        self.cloud.settle()
        self.assertEqual(base.A, self.cloud.host_of(second))

    def test_what_has_arrived_is_not_counted_twice(self):
        self.pool(int(2.5 * units.Gi))
        second = self.cloud.create_volume()
        self.cloud.move(self.volume)
        for _time in range(2):
            self.cloud.watch()
        self.node.hydrate(8)
        self.cloud.move(second)
        self.cloud.settle()
        self.assertEqual(base.B, self.cloud.host_of(second))

    def test_thick_group_is_not_asked(self):
        self.pool(0)
        self.cloud.move(self.volume)
        self.cloud.settle()
        self.assertNotIn('SimulatedVolumeGroup._look_at_pool', [
            name for name, _nth in self.node.faults.seen])

    def test_hydration_stops_before_the_pool_is_full_and_goes_on(self):
        self.cloud.move(self.volume)
        for _time in range(2):
            self.cloud.watch()
        self.node.hydrate(self.hold_up)
        before = self.arrived()
        self.assertGreater(before, 0)
        self.fill(0.95)
        for _time in range(3):
            self.cloud.watch()
            self.cloud.hydrate()
        self.assertEqual(before, self.arrived())
        for part in ('group/pool', 'lvextend'):
            self.assertIn(part, self.problem())
        self.assertIn(self.problem(), [
            text for _host, _copy, text in self.cloud.report(
                base.B).found()])
        # The guest goes on, and a restart of the driver changes nothing.
        self.cloud.write(self.volume, 12, 'written')
        self.cloud.boot(base.B)
        self.cloud.watch()
        self.cloud.hydrate()
        self.assertEqual(before + 64 * units.Mi, self.arrived())
        del self.node.volumes.disks['others']
        self.cloud.watch()
        self.cloud.watch()
        self.assertEqual('', self.problem())
        self.cloud.settle()
        self.assert_whole()

    def test_pool_is_looked_at_once_for_all_moves(self):
        self.pool(9 * units.Gi)
        for volume in (self.volume, *(self.cloud.create_volume()
                                      for _time in range(4))):
            self.cloud.move(volume)
        for _time in range(3):
            self.node.faults.forget()
            self.cloud.watch()
        self.assertEqual(1, [name for name, _nth in self.node.faults.seen
                             ].count('SimulatedVolumeGroup._look_at_pool'))


class HydratorSpaceTest(SpaceTest):

    data_path = 'hydrator'

    def test_volume_that_is_mostly_empty_needs_little(self):
        self.pool(units.Gi, base.A)
        volume = self.cloud.create_volume()
        for number in range(4, 16):
            self.cloud.content[volume.id][number] = ''
            self.cloud.nodes[base.A].volumes.disks[
                self.cloud.row(volume).name].regions[number] = ''
        self.pool(units.Gi // 2)
        self.cloud.move(volume)
        self.cloud.settle()
        self.assertEqual(base.B, self.cloud.host_of(volume))
        self.assertEqual(self.cloud.content[volume.id],
                         self.cloud.read(volume))


class LostTest(MoverTestCase):
    """The thin pool of a destination has lost a copy in a power cut."""

    def lose(self):
        self.node.cut_power()
        self.node.volumes.lost.add(self.copy)
        self.cloud.boot(base.B)

    def begin(self):
        self.node = self.cloud.nodes[base.B]
        self.cloud.move(self.volume)
        self.copy = self.cloud.row(self.volume).name

    def test_copy_that_was_in_use_is_never_made_anew(self):
        self.begin()
        self.lose()
        for _time in range(3):
            self.cloud.watch()
        self.assertIn(self.copy, self.node.volumes.lost)
        self.assertFalse(self.node.device_mapper.exists(
            self.copy + '-handle'))
        problem = rows.for_volume(self.ctxt, self.volume.id)[0].problem
        for part in (self.copy, 'not active', base.A):
            self.assertIn(part, problem)
        self.assertLess(len(problem), rows.MOST_CHARACTERS)
        # The only copy that is left is kept.
        self.assertEqual(1, len(self.cloud.nodes[base.A].volumes.disks))

    def test_volume_whose_copy_is_lost_can_be_deleted(self):
        self.begin()
        self.lose()
        self.cloud.watch()
        self.assertTrue(self.cloud.movers[base.B].discard(
            self.ctxt, self.volume.id))
        self.cloud.watch()
        self.assertEqual([], self.cloud.leftovers([]))

    def test_copy_that_was_lost_before_it_was_used_is_made_anew(self):
        node = self.cloud.nodes[base.B]
        create = node.volumes.create

        def lose_once(name, size, tags):
            made = create(name, size, tags)
            if not lost:
                lost.append(name)
                node.volumes.lost.add(name)
                raise exception.CommandFailed(command='lvcreate',
                                              host=base.B, reason='no power')
            return made
        lost = []
        with mock.patch.object(node.volumes, 'create', lose_once):
            self.assertRaises(exception.PeerFailed, self.cloud.move,
                              self.volume)
            self.cloud.settle()
            self.assertEqual({}, node.volumes.disks)
            self.cloud.move(self.volume)
        self.cloud.settle()
        self.assert_whole()


class MissingDiskTest(MoverTestCase):
    """The volume leaves a node that misses a disk of its group."""

    def setUp(self):
        super().setUp()
        self.there = self.cloud.nodes[base.A].volumes
        self.there.missing = 1

    def test_old_copy_is_removed_when_the_group_is_whole(self):
        self.cloud.move(self.volume)
        for _period in range(20):
            self.cloud.hydrate()
            self.cloud.watch()
        self.assertIn('PVs are missing',
                      rows.for_volume(self.ctxt, self.volume.id)[0].problem)
        self.assert_reads(self.volume)
        self.assertEqual(base.B, self.cloud.host_of(self.volume))
        self.there.missing = 0
        self.cloud.settle()
        self.assert_whole()


class RefusedTest(MoverTestCase):

    def test_too_little_space_leaves_the_volume_alone(self):
        self.cloud.nodes[base.B].volumes.total = units.Gi - 1
        error = self.assertRaises(exception.PeerFailed, self.cloud.move,
                                  self.volume)
        self.assertEqual('NotEnoughSpace', error.kind)
        self.assertIn('group', str(error))
        self.assertEqual(base.A, self.cloud.host_of(self.volume))
        self.assert_whole()

    def test_missing_disk_leaves_the_volume_alone(self):
        self.cloud.nodes[base.B].volumes.missing = 1
        error = self.assertRaises(exception.PeerFailed, self.cloud.move,
                                  self.volume)
        self.assertTrue(issubclass(exception.kind_of(error),
                                   exception.NotEnoughSpace))
        self.assertIn('A disk of volume group', str(error))
        self.assertEqual(base.A, self.cloud.host_of(self.volume))
        self.assert_whole()

    def test_full_metadata_group_leaves_the_volume_alone(self):
        # Room for the volume, none for its map
        self.cloud.nodes[base.B].volumes.total = units.Gi
        self.assertRaises(exception.PeerFailed, self.cloud.move, self.volume)
        self.cloud.settle()
        self.assertEqual(base.A, self.cloud.host_of(self.volume))
        self.assert_whole()

    def test_peer_that_is_down_leaves_the_volume_alone(self):
        self.cloud.down.add(base.B)
        error = self.assertRaises(exception.PeerDown, self.cloud.move,
                                  self.volume)
        self.assertIn(base.B, str(error))
        self.assertEqual(base.A, self.cloud.host_of(self.volume))

    def test_copy_that_was_never_used_is_not_wiped(self):
        node = self.cloud.nodes[base.B]
        node.faults.plan = simulated.Call('SimulatedInitiator.connect', 0,
                                          simulated.Fault.ERROR)
        clear = self.mock_object(node.volumes, 'clear')
        self.assertRaises(exception.PeerFailed, self.cloud.move, self.volume)
        self.cloud.settle()
        [wiped] = clear.mock_calls
        self.assertTrue(wiped.args[0].endswith('-regions'), wiped)
        self.assert_whole()

    def test_peer_that_hangs_later_does_not_hold_up_the_failed_attach(self):
        self.cloud.nodes[base.B].faults.plan = simulated.Call(
            'SimulatedInitiator.connect', 0, simulated.Fault.ERROR)
        work = []
        self.mock_object(base.Inline, 'submit',
                         lambda _self, function, *args: work.append(function))
        self.assertRaises(exception.PeerFailed, self.cloud.move, self.volume)
        self.assertEqual(table.State.ABORTING, self.state())
        for function in work:
            function()
        self.assert_whole()

    def test_other_block_size_leaves_the_volume_alone(self):
        self.cloud.nodes[base.B].volumes.logical_block = 4096
        error = self.assertRaises(exception.PeerFailed, self.cloud.move,
                                  self.volume)
        self.assertIn('4096', str(error))
        self.assert_whole()


class LargeBlocksTest(MoverTestCase):
    """All disks have logical blocks of 4 KiB."""

    data_path = 'hydrator'

    def setUp(self):
        super().setUp()
        for node in self.cloud.nodes.values():
            node.volumes.logical_block = 4096

    def test_volume_moves(self):
        self.cloud.move(self.volume)
        self.cloud.settle()
        self.assertEqual(base.B, self.cloud.host_of(self.volume))
        self.assert_whole()

    def test_disk_of_a_move_keeps_the_blocks_that_it_was_begun_with(self):
        # tgtd showed 512 bytes before it was told of others; what is connected
        # counts by them, and would read something else.
        for node in self.cloud.nodes.values():
            node.volumes.logical_block = 512
        self.cloud.move(self.volume)
        source = self.cloud.nodes[base.A]
        source.volumes.logical_block = 4096
        self.restart(base.A)
        self.cloud.watch()
        [(export, _device)] = source.target.exports.values()
        self.assertEqual(512, export.block_size)


class LiveMigrationTest(MoverTestCase):

    def setUp(self):
        super().setUp()
        self.first = self.cloud.reserve(self.volume, {'host': 'a'})
        self.second = self.cloud.reserve(self.volume)
        self.source_copy = self.volume.name
        self.cloud.move(self.volume)

    def write_on_source(self, number, content):
        path = '/dev/mapper/%s-handle' % self.source_copy
        self.cloud.nodes[base.A].write(path, number, content)
        self.cloud.content[self.volume.id][number] = content

    def test_nothing_is_copied_while_the_source_still_writes(self):
        self.assertEqual(table.State.STARTING, self.state())
        self.cloud.watch()
        self.cloud.hydrate()
        self.write_on_source(5, 'late')
        self.first.destroy()
        self.cloud.settle()
        self.assertEqual(base.B, self.cloud.host_of(self.volume))
        self.assert_whole()

    def test_destination_that_leaves_first_takes_the_move_back(self):
        self.write_on_source(5, 'late')
        self.second.destroy()
        self.cloud.watch()
        self.assertEqual(base.A, self.cloud.host_of(self.volume))
        self.cloud.settle()
        self.assert_whole()

    def open_source(self, count=1):
        self.cloud.nodes[base.A].device_mapper.nodes[
            self.source_copy + '-handle'].open_count = count

    def test_volume_that_may_yet_go_back_does_not_move_on(self):
        error = self.assertRaises(exception.VolumeIsMoving, self.cloud.move,
                                  self.volume, to=base.C)
        self.assertIn(self.volume.id, str(error))

    def test_lost_detach_of_the_source_is_seen_by_its_handle(self):
        self.open_source()
        self.cloud.write(self.volume, 2, 'written after the switch-over')
        self.cloud.watch()
        self.assertEqual(table.State.STARTING, self.state())
        self.open_source(0)
        self.cloud.settle()
        self.assertEqual(base.B, self.cloud.host_of(self.volume))
        self.assert_whole()

    def test_source_that_is_away_is_not_taken_for_unused(self):
        self.cloud.write(self.volume, 2, 'written after the switch-over')
        self.cloud.down.add(base.A)
        self.cloud.watch()
        self.assertEqual(table.State.STARTING, self.state())
        self.cloud.settle()
        self.assert_whole()

    def test_written_destination_is_kept_though_it_left_first(self):
        self.open_source()
        self.cloud.write(self.volume, 2, 'written after the switch-over')
        self.second.destroy()
        for _time in range(3):
            self.cloud.watch()
        self.assertEqual(table.State.STARTING, self.state())
        self.first.destroy()
        self.open_source(0)
        self.cloud.settle()
        self.assertEqual(base.B, self.cloud.host_of(self.volume))
        self.assert_whole()

    def test_both_gone_and_nothing_written_takes_the_move_back(self):
        self.first.destroy()
        self.second.destroy()
        self.cloud.settle()
        self.assertEqual(base.A, self.cloud.host_of(self.volume))
        self.assert_whole()

    def test_both_gone_after_a_write_on_the_destination_goes_on(self):
        self.cloud.write(self.volume, 2, 'written after the switch-over')
        self.first.destroy()
        self.second.destroy()
        self.cloud.settle()
        self.assertEqual(base.B, self.cloud.host_of(self.volume))
        self.assert_whole()

    def test_destination_that_a_guest_was_shown_is_wiped(self):
        clear = self.patch('cinder_localstor.node.simulated.'
                           'SimulatedVolumeGroup.clear')
        copy = self.cloud.row(self.volume).name
        self.second.destroy()
        self.cloud.settle()
        self.assertIn(copy, clear.call_args.args[0])
        self.assert_whole()


class ConnectingTest(MoverTestCase):
    """Cinder records who got a connection after it was given."""

    def setUp(self):
        super().setUp()
        self.attachments = [self.cloud.reserve(self.volume)
                            for _number in range(2)]

    def begin(self, host, to):
        self.cloud.movers[host].begin(
            self.ctxt, self.cloud.refresh(self.volume),
            self.cloud.services[to])

    def connect(self, host):
        db.volume_attachment_update(self.ctxt, self.attachments[0].id, {
            'connector': json.dumps({'host': host})})

    def test_volume_does_not_leave_the_guest_that_is_about_to_open_it(self):
        self.assertEqual(self.volume.name, self.cloud.movers[base.A].stay(
            self.ctxt, self.volume.id))
        error = self.assertRaises(exception.AttachmentUnderWay, self.begin,
                                  base.A, base.B)
        self.assertIn(self.volume.id, str(error))
        self.assertEqual([], rows._moves(self.ctxt))
        self.connect('a')
        self.begin(base.A, base.B)
        self.assertEqual(table.State.STARTING, self.state())

    def test_volume_does_not_leave_the_guest_that_has_it_open(self):
        # Nova leaves an attachment so when a rebuild is broken off.
        self.open_where_it_is()
        self.assertRaises(exception.AttachmentUnderWay, self.begin,
                          base.A, base.B)
        self.assertEqual([], rows._moves(self.ctxt))
        self.connect('a')
        self.begin(base.A, base.B)
        self.assertEqual(table.State.STARTING, self.state())

    def test_it_does_where_only_another_attachment_is_without_a_host(self):
        # So is one of a live migration that failed before.
        self.connect('a')
        self.cloud.reserve(self.volume)
        self.open_where_it_is()
        self.begin(base.A, base.B)
        self.assertEqual(table.State.STARTING, self.state())

    def open_where_it_is(self):
        self.cloud.nodes[base.A].device_mapper.nodes[
            handles.handle_name(self.volume.name)].open_count = 1

    def test_volume_that_has_just_come_does_not_go_on(self):
        self.begin(base.A, base.B)
        self.assertRaises(exception.AttachmentUnderWay, self.begin,
                          base.B, base.C)
        self.connect('b')
        self.begin(base.B, base.C)
        self.assertEqual(2, len(rows._moves(self.ctxt)))

    def test_move_that_failed_has_given_nobody_a_connection(self):
        self.cloud.down.add(base.B)
        self.patch('tests.unit.base.Peers.examine', return_value={
            'initiator': 'iqn', 'address': '192.0.2.1'})
        self.assertRaises(exception.PeerDown, self.begin, base.A, base.B)
        self.cloud.down.clear()
        self.cloud.watch()
        self.begin(base.A, base.C)

    def test_attachment_that_is_alone_may_try_again(self):
        self.cloud.movers[base.A].stay(self.ctxt, self.volume.id)
        self.attachments[1].destroy()
        self.begin(base.A, base.B)
        self.assertEqual(table.State.MIGRATING, self.state())

    def test_volume_that_has_left_does_not_stay(self):
        self.begin(base.A, base.B)
        self.assertRaises(exception.VolumeElsewhere,
                          self.cloud.movers[base.A].stay, self.ctxt,
                          self.volume.id)


@ddt.ddt
class ForgottenGuestTest(MoverTestCase):
    """A guest has a volume open, and Cinder does not know it any more."""

    def setUp(self):
        super().setUp()
        self.patch('cinder_localstor.moves.mover.PATIENCE', 0)
        self.attachment = self.cloud.reserve(self.volume)

    def open(self, host=base.A, count=1):
        name = handles.handle_name(self.cloud.refresh(self.volume).name)
        self.cloud.nodes[host].device_mapper.nodes[name].open_count = count

    def stay(self, host=base.A):
        return self.cloud.movers[host].stay(self.ctxt, self.volume.id)

    def begin(self):
        self.cloud.movers[base.A].begin(
            self.ctxt, self.cloud.refresh(self.volume),
            self.cloud.services[base.B])

    def reserve_for(self, instance):
        self.attachment.destroy()
        self.attachment = self.cloud.reserve(self.volume, instance=instance)

    def test_volume_is_for_nobody_else(self):
        self.open()
        for act in (self.stay, self.begin):
            error = self.assertRaises(exception.VolumeInUse, act)
            self.assertIn(self.volume.name, str(error))
        self.assertEqual([], rows._moves(self.ctxt))
        self.open(count=0)
        self.begin()

    def test_volume_is_for_that_guest_itself(self):
        # Nova makes its attachment anew for a rebuild, which may fail.
        self.stay()
        self.open()
        self.reserve_for(base.INSTANCE)
        self.assertEqual(self.volume.name, self.stay())
        self.assertRaises(exception.VolumeInUse, self.begin)

    def test_it_is_where_the_volume_has_come_with_it(self):
        self.begin()
        self.cloud.hydrate()
        self.cloud.watch()
        self.open(base.B)
        self.reserve_for(base.INSTANCE)
        self.stay(base.B)

    @ddt.data(None, uuidutils.generate_uuid())
    def test_it_is_not_where_another_one_had_it_since(self, instance):
        self.stay()
        self.reserve_for(instance)
        self.stay()
        self.open()
        self.reserve_for(base.INSTANCE)
        self.assertRaises(exception.VolumeInUse, self.stay)

    def test_it_is_not_while_another_one_asks_for_it_too(self):
        self.stay()
        self.open()
        self.cloud.reserve(self.volume, instance=uuidutils.generate_uuid())
        self.assertRaises(exception.VolumeInUse, self.stay)

    def test_volume_is_for_others_when_that_guest_has_gone(self):
        self.open()
        self.patch('cinder_localstor.moves.mover.PATIENCE', 5)
        with mock.patch('tenacity.nap.time.sleep',
                        lambda seconds: self.open(count=0)):
            self.stay()

    def test_it_is_where_cinder_knows_of_a_guest(self):
        db.volume_attachment_update(self.ctxt, self.attachment.id, {
            'connector': json.dumps({'host': 'a'})})
        self.open()
        self.stay()

    def test_it_is_where_only_the_target_reads_it(self):
        with mock.patch.object(self.cloud.nodes[base.A].device_mapper,
                               '_open_count', return_value=1), \
                mock.patch.object(rows, 'reading', return_value=['a move']), \
                mock.patch.object(self.cloud.nodes[base.A].target, 'exported',
                                  return_value={'a move', 'another'}):
            self.stay()


class HydratorLiveMigrationTest(LiveMigrationTest):

    data_path = 'hydrator'


class NotWantedTest(MoverTestCase):

    def test_volume_stays_when_the_attachment_is_gone_by_then(self):
        attachment = self.cloud.reserve(self.volume)
        begin = rows.begin

        def give_up(*args):
            attachment.destroy()
            return begin(*args)
        with mock.patch.object(rows, 'begin', give_up):
            self.assertRaises(exception.NotWanted, self.cloud.move,
                              self.volume)
        self.assertEqual(base.A, self.cloud.host_of(self.volume))
        self.cloud.settle()
        self.assert_whole()

    def test_late_request_on_the_node_that_it_has_left_is_refused(self):
        stale = self.cloud.refresh(self.volume)
        self.cloud.move(self.volume)
        self.assertRaises(
            exception.VolumeElsewhere, self.cloud.movers[base.A].begin,
            self.ctxt, stale, self.cloud.services[base.C])
        self.cloud.settle()
        self.assert_whole()


class LeftOverExportTest(MoverTestCase):

    def test_export_that_no_move_knows_of_is_taken_away_at_the_start(self):
        self.cloud.move(self.volume)
        target = self.cloud.nodes[base.A].target
        exports = dict(target.exports)
        self.cloud.settle()
        target.exports.update(exports)
        self.cloud.boot(base.A)
        self.assert_whole()

    def test_half_an_export_that_no_move_knows_of_is_taken_away(self):
        target = self.cloud.nodes[base.A].target
        self.mock_object(target, 'remains', return_value={'a-move'})
        unexport = self.mock_object(target, 'unexport')
        self.cloud.boot(base.A)
        unexport.assert_called_once_with('a-move')

    def test_what_does_not_tell_of_remains_exports_what_moves_need(self):
        self.cloud.move(self.volume)
        target = self.cloud.nodes[base.A].target
        before = dict(target.exports)
        target.exports.clear()
        self.mock_object(target, 'remains', side_effect=(
            exception.LocalStorException(reason='busy')))
        self.cloud.boot(base.A)
        self.assertEqual(before.keys(), target.exports.keys())

    def test_one_that_can_not_be_taken_away_keeps_no_other(self):
        target = self.cloud.nodes[base.A].target
        self.mock_object(target, 'remains', return_value={'one', 'other'})
        unexport = self.mock_object(target, 'unexport', side_effect=[
            exception.LocalStorException(reason='busy'), None])
        self.cloud.boot(base.A)
        unexport.assert_has_calls([mock.call('one'), mock.call('other')],
                                  any_order=True)


class WarmUpTest(MoverTestCase):

    def test_what_fails_is_told_and_keeps_nothing_else_from_starting(self):
        node = self.cloud.nodes[base.A]
        self.mock_object(node.target, 'warm_up',
                         side_effect=OSError('no LIO here'))
        name = self.mock_object(node.initiator, 'name')
        log = self.patch('cinder_localstor.moves.scheduler.LOG.warning')
        self.cloud.running[base.A].scheduler.warm_up()
        self.assertIn('no LIO here', str(log.call_args.args[-1]))
        name.assert_called_once_with()


class ExtendTest(MoverTestCase):

    def extend(self, gigabytes=2):
        volume = self.cloud.refresh(self.volume)
        self.cloud.movers[self.cloud.host_of(volume)].extend(
            self.ctxt, volume, gigabytes * units.Gi)
        volume.size = gigabytes
        volume.save()
        for number in range(16 * gigabytes - 16, 16 * gigabytes):
            self.cloud.write(self.volume, number, 'extended %d' % number)

    def test_volume_grows_in_mid_move(self):
        self.cloud.move(self.volume)
        self.extend(2)
        self.cloud.watch()
        self.extend(3)
        self.assert_reads(self.volume)
        self.cloud.settle()
        self.assert_whole()

    def test_grown_volume_comes_back_after_a_power_cut(self):
        self.cloud.move(self.volume)
        self.extend()
        self.restart(base.B)
        self.cloud.watch()
        self.assert_reads(self.volume)
        self.cloud.settle()
        self.assert_whole()

    def test_grown_volume_moves_on(self):
        self.cloud.move(self.volume)
        self.extend()
        self.cloud.move(self.volume, to=base.C)
        self.extend(3)
        self.assert_reads(self.volume)
        self.cloud.settle()
        self.assert_whole()


class HydratorExtendTest(ExtendTest):

    data_path = 'hydrator'


@ddt.ddt
class ChainTest(MoverTestCase):
    """A volume moves on, or back, while it still arrives."""

    def away(self, *hosts):
        """Nobody copies on these nodes."""
        for host in hosts:
            self.cloud.nodes[host].hydrate = lambda: None

    def back(self, *hosts):
        for host in hosts:
            del self.cloud.nodes[host].hydrate

    @ddt.data(base.A, base.C)
    def test_volume_moves_on_while_it_arrives(self, end):
        self.cloud.move(self.volume)
        self.cloud.write(self.volume, 3, 'on the second node')
        self.cloud.move(self.volume, to=end)
        self.assertEqual(end, self.cloud.host_of(self.volume))
        self.cloud.write(self.volume, 4, 'on the third node')
        self.assert_reads(self.volume)
        self.cloud.settle()
        self.assert_whole()

    def test_copy_that_was_passed_on_is_in_nobodys_way(self):
        self.cloud.move(self.volume)
        self.away(base.B)
        self.cloud.watch()
        self.cloud.move(self.volume, to=base.C)
        # It takes hours.
        self.patch('cinder_localstor.datapath.wipes.Wipes.wipe')
        for _period in range(4):
            self.cloud.hydrate()
            self.cloud.watch()
        self.assertIn(table.State.DISCARDING, [
            move.state for move in rows.for_volume(self.ctxt,
                                                   self.volume.id)])
        self.cloud.movers[base.C].stay(self.ctxt, self.volume.id)
        self.cloud.movers[base.C].extend(self.ctxt, self.volume, 2 * units.Gi)
        self.assert_reads(self.volume)

    @ddt.data(base.A, base.C)
    def test_last_move_ends_first(self, end):
        self.cloud.move(self.volume)
        self.away(base.B)
        self.cloud.write(self.volume, 3, 'on the second node')
        self.cloud.watch()
        self.cloud.move(self.volume, to=end)
        self.cloud.settle()
        self.assertEqual(end, self.cloud.host_of(self.volume))
        self.assert_whole()

    @ddt.data(base.A, base.C)
    def test_first_move_ends_first(self, end):
        self.cloud.move(self.volume)
        self.away(end)
        self.cloud.move(self.volume, to=end)
        for _time in range(5):
            self.cloud.watch()
            self.cloud.hydrate()
        self.assertEqual(1, len(rows.for_volume(self.ctxt, self.volume.id)))
        handle = self.cloud.nodes[base.B].device_mapper.nodes[
            'volume-%s-handle' % self.volume_on(base.B)]
        self.assertTrue(handle.read_only)
        self.back(end)
        self.cloud.settle()
        self.assert_whole()

    def volume_on(self, host):
        """The id in the name of the copy that the last move reads."""
        last = rows.for_volume(self.ctxt, self.volume.id)[-1].transfer
        self.assertEqual(host, last.source_host)
        return last.source_name.removeprefix('volume-')

    def test_five_moves_at_once(self):
        for host in (base.B, base.C, base.A, base.B, base.C):
            self.cloud.move(self.volume, to=host)
            self.cloud.write(self.volume, 3, 'on ' + host)
        self.assertEqual(5, len(rows.for_volume(self.ctxt, self.volume.id)))
        self.assert_reads(self.volume)
        self.cloud.settle()
        self.assertEqual(base.C, self.cloud.host_of(self.volume))
        self.assert_whole()

    def test_live_migration_of_an_arriving_volume_is_taken_back(self):
        first = self.cloud.reserve(self.volume)
        self.cloud.move(self.volume)
        first.connector = {'host': 'b'}
        first.save()
        second = self.cloud.reserve(self.volume)
        self.cloud.move(self.volume, to=base.C)
        second.destroy()
        self.cloud.watch()
        self.assertEqual(base.B, self.cloud.host_of(self.volume))
        self.cloud.write(self.volume, 5, 'home again')
        self.cloud.settle()
        self.assert_whole()

    def test_lost_destination_of_an_aborted_move_is_in_nobodys_way(self):
        self.lose_destination_of_an_aborted_move()
        self.cloud.move(self.volume, to=base.C)
        self.cloud.write(self.volume, 5, 'on the third node')
        self.cloud.settle()
        self.assertEqual(base.C, self.cloud.host_of(self.volume))
        self.assert_whole()

    @ddt.data(base.A, base.C)
    def test_delete_leaves_nothing_on_any_node(self, end):
        self.cloud.move(self.volume)
        self.cloud.watch()
        self.cloud.move(self.volume, to=end)
        volume = self.cloud.refresh(self.volume)
        self.cloud.movers[end].discard(self.ctxt, volume.id)
        volume.destroy()
        self.cloud.settle()
        self.assertEqual([], self.cloud.leftovers([]))

    @ddt.data(base.A, base.B, base.C)
    def test_any_node_loses_power(self, host):
        self.cloud.move(self.volume)
        self.cloud.write(self.volume, 3, 'on the second node')
        self.cloud.watch()
        self.cloud.move(self.volume, to=base.C)
        self.cloud.write(self.volume, 4, 'on the third node')
        self.cloud.watch()
        self.cloud.nodes[host].cut_power()
        self.cloud.boot(host)
        self.cloud.settle()
        self.assert_whole()

    def test_nothing_is_copied_while_the_first_source_can_be_written(self):
        self.cloud.move(self.volume)
        self.cloud.down.add(base.A)
        self.cloud.move(self.volume, to=base.C)
        self.cloud.watch()
        last = rows.for_volume(self.ctxt, self.volume.id)[-1]
        progress = self.cloud.running[base.C].on_destination.progress(
            last.transfer, self.cloud.nodes[base.C].device_mapper.devices())
        self.assertEqual(engine.Hydration.OFF, progress.hydration)
        self.cloud.settle()
        self.assert_whole()

    def test_handle_in_the_middle_is_exported_when_it_is_there_again(self):
        self.cloud.move(self.volume)
        self.cloud.watch()
        self.cloud.move(self.volume, to=base.C)
        self.restart(base.B)
        last = rows.for_volume(self.ctxt, self.volume.id)[-1]
        self.assertNotIn(last.move_id,
                         self.cloud.nodes[base.B].target.exported())
        self.cloud.settle()
        self.assert_whole()

    def test_lost_first_node_does_not_matter_once_all_has_arrived(self):
        self.cloud.move(self.volume)
        self.cloud.watch()
        self.cloud.move(self.volume, to=base.C)
        self.cloud.watch()
        self.cloud.nodes[base.C].hydrate()
        self.cloud.down.add(base.A)
        for _time in range(3):
            self.cloud.watch()
        self.assertNotIn('-source', ' '.join(
            self.cloud.nodes[base.B].device_mapper.nodes))
        self.assertEqual({}, self.cloud.nodes[base.B].volumes.disks)
        self.cloud.settle()
        self.assert_whole()


class HydratorChainTest(ChainTest):

    data_path = 'hydrator'


@ddt.ddt
class DiscardTest(MoverTestCase):

    def setUp(self):
        super().setUp()
        self.cloud.move(self.volume)

    def delete(self):
        volume = self.cloud.refresh(self.volume)
        if self.cloud.movers[base.B].discard(self.ctxt, volume.id):
            self.cloud.movers[base.B]._handles.delete(volume.name)
        volume.destroy()

    def test_delete_in_mid_move_leaves_nothing(self):
        self.cloud.watch()
        self.delete()
        self.cloud.watch()
        self.assertEqual([], self.cloud.leftovers([]))

    def test_delete_while_the_source_is_away_is_finished_later(self):
        self.cloud.watch()
        self.cloud.down.add(base.A)
        self.delete()
        self.cloud.watch()
        self.assertEqual({}, self.cloud.nodes[base.B].volumes.disks)
        self.cloud.settle()
        self.assertEqual([], self.cloud.leftovers([]))

    def delete_with_a_session_that_does_not_end(self):
        self.cloud.watch()
        faults = self.cloud.nodes[base.B].faults
        faults.forget()
        faults.plan = simulated.Call('SimulatedInitiator.disconnect', 0,
                                     simulated.Fault.HANG)
        self.delete()
        self.assertNotEqual({}, self.cloud.nodes[base.B].volumes.disks)

    def test_delete_whose_session_does_not_end_is_finished_later(self):
        self.delete_with_a_session_that_does_not_end()
        self.cloud.settle()
        self.assertEqual([], self.cloud.leftovers([]))

    @ddt.data(False, True)
    def test_delete_is_finished_after_a_restart(self, power):
        self.delete_with_a_session_that_does_not_end()
        if power:
            self.restart(base.B)
        self.cloud.settle()
        self.assertEqual([], self.cloud.leftovers([]))


class HydratorDiscardTest(DiscardTest):

    data_path = 'hydrator'


class OneBadMoveTest(MoverTestCase):

    def test_silent_target_daemon_does_not_hold_up_what_arrives(self):
        leaves = self.cloud.create_volume(base.B)
        self.cloud.move(leaves, to=base.A)
        self.cloud.move(self.volume)
        self.cloud.nodes[base.B].target.exported = mock.Mock(
            side_effect=OSError('tgtd is not there'))
        self.cloud.watch()
        self.cloud.hydrate()
        self.cloud.watch()
        self.assertIsNone(self.state())

    def test_move_that_has_not_begun_here_is_not_taken_for_broken_off(self):
        begin = rows.begin

        def look_at_once(*args):
            move = begin(*args)
            self.cloud.watch()
            return move
        with mock.patch.object(rows, 'begin', look_at_once):
            self.cloud.move(self.volume)
        self.assertEqual(base.B, self.cloud.host_of(self.volume))


class RestartTest(MoverTestCase):

    def test_destination_loses_power_in_mid_move(self):
        self.cloud.move(self.volume)
        self.cloud.write(self.volume, 1, 'before the power cut')
        self.cloud.watch()
        self.restart(base.B)
        self.cloud.watch()
        self.assert_reads(self.volume)
        self.cloud.settle()
        self.assert_whole()

    def test_source_loses_power_in_mid_move(self):
        self.cloud.move(self.volume)
        self.cloud.watch()
        self.restart(base.A)
        self.cloud.settle()
        self.assert_whole()

    def test_map_that_is_gone_is_never_made_anew(self):
        self.cloud.move(self.volume)
        self.cloud.watch()
        node = self.cloud.nodes[base.B]
        node.cut_power()
        lost = next(name for name in node.volumes.disks if 'regions' in name)
        disk = node.volumes.disks.pop(lost)
        self.cloud.boot(base.B)
        self.cloud.watch()
        self.assertNotIn(lost, node.volumes.disks)
        move = rows.for_volume(self.ctxt, self.volume.id)[0]
        self.assertIn(lost, move.problem)
        node.volumes.disks[lost] = disk
        self.cloud.settle()
        self.assert_whole()


class HydratorRestartTest(RestartTest):

    data_path = 'hydrator'


class FailingWrites:
    """One write of a move to the database fails, or none.

    An error after the write is a connection that breaks with the answer of
    the commit on its way.
    """

    def __init__(self, plan=None, when='before'):
        self.seen = []
        self._plan = plan
        self._when = when
        self._patches = [
            mock.patch.object(rows, name, self._wrap(name, getattr(rows,
                                                                   name)))
            for name in ('begin', 'change_state', 'record_done', 'forget')]

    def _wrap(self, name, write):
        def wrapper(*args, **kwargs):
            nth = sum(found == name for found, _nth in self.seen)
            self.seen.append((name, nth))
            if (name, nth) != self._plan:
                return write(*args, **kwargs)
            if self._when == 'after':
                write(*args, **kwargs)
            raise db_exception.DBConnectionError(Exception('gone away'))
        return wrapper

    def __enter__(self):
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_error):
        for patch in self._patches:
            patch.stop()


# How calls go wrong, and whether the power is cut then
WAYS = (*((fault, False) for fault in simulated.Fault),
        (simulated.Fault.CRASH, True), (simulated.Fault.CRASH_AFTER, True))


def sample(calls, *way):
    """Those of some calls that go wrong in one of WAYS, so that each does in
    one of them; or all calls if there is time.
    """
    if 'LOCALSTOR_SOAK_FAULTS' in os.environ:
        return calls
    return calls[WAYS.index(way)::len(WAYS)]


@ddt.ddt
class FaultTest(MoverTestCase):
    """Each call of a move goes wrong once, in each way.

    :cvar is_sampled: whether in one way, unless there is time for all
    """

    is_sampled = False

    def run_once(self, plan=None, power=False):
        """Attach elsewhere, let the move end, whatever goes wrong."""
        volume = self.cloud.create_volume()
        for node in self.cloud.nodes.values():
            node.faults.forget()
        if plan:
            host, call = plan
            self.cloud.nodes[host].faults.plan = call
        try:
            self.cloud.move(volume)
        except simulated.Crash as crash:
            self.cloud.down.add(crash.host)
        except (exception.LocalStorException, db_exception.DBError):
            pass
        if self.cloud.host_of(volume) == base.B and not self.cloud.down:
            self.cloud.write(volume, 7, 'written in mid-move')
        self.cloud.watch()
        self.cloud.settle(power=power)
        return volume

    def calls(self, *way):
        """The calls of all nodes in a move without faults that go wrong in
        one of WAYS.
        """
        volume = self.run_once()
        calls = [(host, name, nth)
                 for host, node in self.cloud.nodes.items()
                 for name, nth in node.faults.seen]
        self.forget_volume(volume)
        self.assertGreater(len(calls), 30)
        return sample(calls, *way) if self.is_sampled else calls

    def forget_volume(self, volume):
        host = self.cloud.host_of(volume)
        node = self.cloud.nodes[host]
        node.faults.forget()
        self.cloud.movers[host]._handles.delete(
            self.cloud.refresh(volume).name)
        self.cloud.refresh(volume).destroy()

    @ddt.data(*simulated.Fault)
    def test_move_ends_as_before_or_complete(self, fault):
        self.forget_volume(self.volume)
        for host, name, nth in self.calls(fault, False):
            volume = self.run_once(
                (host, simulated.Call(name, nth, fault)))
            try:
                self.assert_whole(volume)
            except Exception as error:
                raise AssertionError('%s of %s #%d on %s: %s' % (
                    fault.name, name, nth, host, error)) from error
            self.forget_volume(volume)

    @ddt.data('before', 'after')
    def test_database_fails_at_every_write(self, when):
        self.forget_volume(self.volume)
        with FailingWrites() as writes:
            self.forget_volume(self.run_once())
        self.assertGreater(len(writes.seen), 9)
        for name, nth in writes.seen:
            with FailingWrites((name, nth), when):
                volume = self.run_once()
            try:
                self.assert_whole(volume)
            except Exception as error:
                raise AssertionError('%s #%d fails %s the write: %s' % (
                    name, nth, when, error)) from error
            self.forget_volume(volume)

    @ddt.data(simulated.Fault.CRASH, simulated.Fault.CRASH_AFTER)
    def test_power_cut_at_every_call(self, fault):
        self.forget_volume(self.volume)
        for host, name, nth in self.calls(fault, True):
            volume = self.run_once(
                (host, simulated.Call(name, nth, fault)), power=True)
            try:
                self.assert_whole(volume)
            except Exception as error:
                raise AssertionError('%s of %s #%d on %s: %s' % (
                    fault.name, name, nth, host, error)) from error
            self.forget_volume(volume)


class RateTest(MoverTestCase):
    """Volumes that arrive share what the option allows."""

    data_path = 'hydrator'

    def limits(self, count, busy=0):
        for _number in range(count):
            self.cloud.move(self.cloud.create_volume())
        self.cloud.watch()
        self.cloud.running[base.B].scheduler._busy.update(
            move.move_id for move in rows.for_host(
                self.ctxt, base.B)[:busy])
        return {limit for limit, _minimum in self.rates()}

    def rates(self):
        """What the helpers of the volumes that arrive are told next."""
        hydrators = self.cloud.nodes[base.B].hydrators
        with mock.patch.object(hydrators, 'throttle',
                               wraps=hydrators.throttle) as throttle:
            self.cloud.watch()
        return [call.args[1:] for call in throttle.call_args_list]

    def arrive_by(self, **specs):
        """Let a volume arrive whose type has some extra specs of ours."""
        volume = self.cloud.create_volume()
        self.give_type(volume, **specs)
        self.cloud.move(volume)
        self.cloud.watch()
        return volume

    def give_type(self, volume, **specs):
        made = db.volume_type_create(self.ctxt, {
            'name': uuidutils.generate_uuid(), 'extra_specs': {
                properties.PREFIX + key: value
                for key, value in specs.items()}})
        db.volume_update(self.ctxt, volume.id, {'volume_type_id': made['id']})

    def test_there_is_no_limit_unless_it_is_set(self):
        self.assertEqual(set(), self.limits(2))

    def hold(self, limit):
        """Let helpers be held to something else than what they were told."""
        for process in self.cloud.nodes[base.B].hydrators.processes.values():
            process.limit = limit

    def test_what_a_full_pool_has_stopped_goes_on_after_a_restart(self):
        self.assertEqual(set(), self.limits(1))
        self.hold(0)
        self.cloud.boot(base.B)
        self.assertEqual([(None, 10 * units.Mi)], self.rates())
        self.assertEqual([], self.rates())

    def test_type_has_a_rate_of_its_own(self):
        self.arrive_by(hydration_rate='20')
        self.assertEqual([(20 * units.Mi, 10 * units.Mi)], self.rates())
        self.assertEqual([], self.rates())

    def test_helper_that_was_started_again_is_told_again(self):
        self.arrive_by(hydration_rate='20')
        self.rates()
        self.hold(None)
        self.assertEqual([(20 * units.Mi, 10 * units.Mi)], self.rates())

    def test_what_an_operator_has_told_a_helper_holds(self):
        volume = self.arrive_by(hydration_rate='20')
        self.rates()
        self.hold(5)
        self.assertEqual([], self.rates())
        self.give_type(volume)
        self.assertEqual([(None, 10 * units.Mi)], self.rates())

    def test_helper_that_was_told_before_the_first_look_is_left_so(self):
        self.arrive_by()
        self.rates()
        self.arrive_by()
        self.hold(5)
        self.assertEqual([], self.rates())

    def test_first_helper_that_was_told_before_the_first_look_too(self):
        self.cloud.watch()
        self.arrive_between_looks()
        self.hold(5)
        self.assertEqual([], self.rates())

    def arrive_between_looks(self):
        """Let a volume arrive, which the next period finds under way."""
        self.cloud.move(self.volume)
        scheduler = self.cloud.running[base.B].scheduler
        for move in rows.for_volume(self.ctxt, self.volume.id):
            scheduler.look_after(move.move_id)

    def test_helper_of_a_former_process_is_told_what_it_may_have_now(self):
        self.cloud.move(self.volume)
        self.override('localstor_hydration_min_rate', 20)
        self.cloud.boot(base.B)
        self.cloud.watch()
        self.assertEqual([(None, 20 * units.Mi)], self.rates())

    def test_type_takes_no_more_than_its_share(self):
        self.override('localstor_hydration_rate', 30)
        self.arrive_by(hydration_rate='20')
        self.cloud.move(self.volume)
        self.cloud.watch()
        self.assertEqual([15 * units.Mi] * 2,
                         [limit for limit, _minimum in self.rates()])

    def test_type_has_a_least_rate_of_its_own(self):
        self.arrive_by(hydration_min_rate='70')
        self.assertEqual([(None, 70 * units.Mi)], self.rates())

    def test_what_a_type_wants_no_more_is_not_heeded_any_more(self):
        volume = self.arrive_by(hydration_rate='20')
        self.rates()
        self.give_type(volume)
        self.assertEqual([(None, 10 * units.Mi)], self.rates())
        self.assertEqual([], self.rates())

    def test_what_could_not_be_told_is_told_again(self):
        volume = self.arrive_by(hydration_rate='20')
        self.rates()
        self.give_type(volume)
        with mock.patch.object(
                self.cloud.nodes[base.B].hydrators, 'throttle', side_effect=(
                    exception.CommandTimedOut(
                        command='throttle', host='b', seconds=60))) as tell:
            self.cloud.watch()
        tell.assert_called_once()
        self.assertEqual([(None, 10 * units.Mi)], self.rates())

    def test_type_that_is_wrong_holds_up_nothing(self):
        self.override('localstor_hydration_rate', 30)
        self.arrive_by(hydration_rate='fast')
        self.assertEqual([(30 * units.Mi, 10 * units.Mi)], self.rates())

    def test_type_has_a_data_path_of_its_own(self):
        volume = self.arrive_by(data_path='clone')
        self.assertEqual('clone', rows.for_volume(
            self.ctxt, volume.id)[0].transfer.engine)

    def test_each_gets_its_share(self):
        self.override('localstor_hydration_rate', 90)
        self.assertEqual({30 * units.Mi}, self.limits(3))

    def test_what_is_busy_has_its_share_too(self):
        self.override('localstor_hydration_rate', 90)
        self.assertEqual({30 * units.Mi}, self.limits(3, busy=1))

    def test_helper_that_takes_no_limit_holds_up_no_move(self):
        self.override('localstor_hydration_rate', 90)
        self.cloud.move(self.volume)
        self.cloud.watch()
        self.patch('cinder_localstor.node.simulated.SimulatedHydrators.'
                   'throttle', side_effect=exception.CommandTimedOut(
                       command='throttle', host='b', seconds=60))
        self.cloud.settle()
        self.assert_whole()


class VerificationTest(MoverTestCase):

    data_path = 'hydrator'

    def test_move_whose_copy_differs_waits_until_it_does_not(self):
        self.cloud.move(self.volume)
        differs = engine.Progress(engine.Hydration.DIFFERS, units.Gi,
                                  units.Gi, differing=1)
        with mock.patch.object(hydrator.HydratorEngine, 'progress',
                               return_value=differs):
            for _time in range(3):
                self.cloud.watch()
            self.assertEqual(table.State.MIGRATING, self.state())
        self.cloud.settle()
        self.assert_whole()


class HydratorFaultTest(FaultTest):

    data_path = 'hydrator'


class DestinationFirstFaultTest(FaultTest):

    source_first = False
    is_sampled = True


class BusyDeleteTest(MoverTestCase):

    def test_delete_while_the_move_is_being_prepared(self):
        self.cloud.nodes[base.B].faults.plan = simulated.Call(
            'SimulatedVolumeGroup.create', 0, simulated.Fault.CRASH)
        with mock.patch.object(rows, 'change_state',
                               side_effect=exception.MoveChanged(
                                   move_id='m', state='preparing')):
            self.assertRaises(exception.LocalStorException,
                              self.cloud.move, self.volume)
        self.assertEqual(table.State.PREPARING, self.state())
        self.patch('tenacity.stop_after_delay',
                   return_value=tenacity.stop_after_attempt(2))
        error = self.assertRaises(
            cinder_exception.VolumeIsBusy,
            self.cloud.movers[base.A].discard, self.ctxt, self.volume.id)
        self.assertIn('delete it again', str(error))
        self.cloud.settle()
        self.assertEqual(base.A, self.cloud.host_of(self.volume))
        self.assert_whole()

    def test_delete_of_a_volume_in_use_changes_nothing(self):
        self.cloud.move(self.volume)
        node = self.cloud.nodes[base.B]
        handle = node.device_mapper.nodes[
            self.cloud.refresh(self.volume).name + '-handle']
        handle.open_count = 1
        self.assertRaises(exception.VolumeInUse,
                          self.cloud.movers[base.B].discard, self.ctxt,
                          self.volume.id)
        handle.open_count = 0
        self.cloud.settle()
        self.assert_whole()

    def test_delete_while_the_move_is_taken_back(self):
        self.lose_destination_of_an_aborted_move()
        volume = self.cloud.refresh(self.volume)
        self.cloud.movers[base.A].discard(self.ctxt, volume.id)
        self.cloud.movers[base.A]._handles.delete(volume.name)
        volume.destroy()
        self.cloud.settle()
        self.assertEqual([], self.cloud.leftovers([]))


class AtOnceTest(MoverTestCase):
    """Several threads, as a user's calls are."""

    def setUp(self):
        super().setUp()
        self.share_database()
        self.examining = threading.Event()
        self.running = threading.Event()
        peers = self.cloud.movers[base.A]._peers
        peers.examine = self.slow(peers.examine, self.examining)
        peers.run = self.slow(peers.run, self.running)

    @staticmethod
    def slow(method, begun):
        def act(*arguments, **options):
            begun.set()
            # Long enough for whoever may to come in
            time.sleep(0.05)
            return method(*arguments, **options)
        return act

    def test_volume_does_not_grow_while_its_move_begins(self):
        # The copy that the move makes would be too small.
        volume = self.cloud.refresh(self.volume)

        def extend():
            self.examining.wait(10)
            self.cloud.movers[base.A].extend(self.ctxt, volume, 2 * units.Gi)

        begun, grown = base.at_once(
            lambda: self.cloud.move(self.volume), extend)
        self.assertIsNone(begun)
        self.assertIsInstance(grown, exception.VolumeElsewhere)
        self.assertEqual(
            units.Gi,
            self.cloud.nodes[base.A].volumes.disks[volume.name].size)

    def test_of_two_moves_one_begins(self):
        self.cloud.reserve(self.volume)
        volume = self.cloud.refresh(self.volume)
        errors = base.at_once(*[
            lambda to=to: self.cloud.movers[base.A].begin(
                self.ctxt, volume, self.cloud.services[to])
            for to in (base.B, base.C)])
        # The other comes while it is being prepared, or when it has left.
        refused, = filter(None, errors)
        self.assertIsInstance(refused, (exception.VolumeIsMoving,
                                        exception.VolumeElsewhere))
        self.assertEqual(1, len(rows.for_volume(self.ctxt, volume.id)))

    def test_move_that_is_beginning_is_not_taken_for_broken_off(self):
        def look():
            self.running.wait(10)
            for _time in range(5):
                time.sleep(0.005)
                self.cloud.running[base.A].scheduler.watch()

        self.assertEqual([None] * 2, base.at_once(
            lambda: self.cloud.move(self.volume), look))
        self.assertEqual(base.B, self.cloud.host_of(self.volume))
