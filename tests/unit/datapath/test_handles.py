# SPDX-License-Identifier: Apache-2.0

import threading
import time
import unittest
from unittest import mock

import ddt
from oslo_utils import units

from cinder_localstor.datapath import copies
from cinder_localstor.datapath import handles
from cinder_localstor.datapath import transfer
from cinder_localstor.datapath import wipes
from cinder_localstor import exception
from cinder_localstor.node import interface
from cinder_localstor.node import simulated
from tests.unit import base

GIB_SECTORS = units.Gi // interface.SECTOR


class HandlesTestCase(unittest.TestCase):

    def setUp(self):
        self.node = simulated.SimulatedNode('a', {})
        self.handles = handles.Handles(self.node)
        self.mapper = self.node.device_mapper

    def copy(self, name='x', generation=1, newest=0):
        return copies.Copy('a', name, 'id-' + name, generation, units.Gi,
                           newest=newest)

    def create(self, name='x', generation=1):
        self.handles.create(self.copy(name, generation))

    def lose(self, name='x'):
        self.node.cut_power()
        self.node.volumes.lost.add(name)

    def tag(self, name='x', **values):
        self.node.volumes.retag(name, transfer.tags(**values), frozenset())


class OneVolumeTest(HandlesTestCase):

    def test_create_makes_volume_tags_and_handle(self):
        self.create()
        disk = self.node.volumes.disks['x']
        self.assertEqual(units.Gi, disk.size)
        self.assertEqual({'volume': 'id-x', 'generation': '1'},
                         transfer.read_tags(disk.tags))
        self.assertEqual(('group-x',),
                         self.mapper.devices()['x-handle'].under)

    def test_create_twice_is_create_once(self):
        self.create()
        self.create()
        self.assertEqual(['x-handle'], list(self.mapper.nodes))

    def test_delete_leaves_only_what_is_to_be_wiped(self):
        self.create()
        for _time in range(2):
            self.handles.delete('x')
        self.assertEqual({}, self.mapper.nodes)
        [name] = self.node.volumes.disks
        self.assertEqual('x', wipes.former_name(name))

    def test_what_a_power_cut_took_as_it_was_made_is_made_again(self):
        self.create()
        self.lose()
        self.create()
        self.assertEqual('an old tenant',
                         self.node.read('/dev/mapper/x-handle', 0))

    def test_lost_volume_is_deleted(self):
        self.node.volumes.pool_size = 1 << 40
        self.create()
        self.lose()
        self.handles.delete('x')
        self.assertEqual(({}, {}), (self.mapper.nodes,
                                    self.node.volumes.disks))

    def test_volume_in_use_is_not_deleted(self):
        self.create()
        self.mapper.nodes['x-handle'].open_count = 1
        self.assertRaises(exception.VolumeInUse, self.handles.delete, 'x')
        self.assertIn('x', self.node.volumes.disks)

    def test_extend_grows_volume_and_handle(self):
        self.create()
        self.handles.extend('x', 2 * units.Gi)
        self.assertEqual(2 * units.Gi, self.node.volumes.disks['x'].size)
        self.assertEqual(2 * units.Gi // 512,
                         self.mapper.nodes['x-handle'].table[0].length)

    def under(self):
        return self.mapper.devices()['x-handle'].under

    def over_an_engine(self):
        self.node.volumes.create('x', units.Gi, frozenset())
        self.mapper.create('x-clone', [interface.Segment(
            0, GIB_SECTORS, 'linear', '/dev/group/x 0')])
        self.handles.create_on_engine('x', units.Gi, handles.Backing(
            '/dev/mapper/x-clone', GIB_SECTORS))

    def test_extend_of_a_moving_volume_adds_what_no_engine_knows_of(self):
        self.over_an_engine()
        self.assertEqual(('x-clone',), self.under())
        for gigabytes in (2, 3):
            self.handles.extend('x', gigabytes * units.Gi)
            self.assertEqual(('x-clone', 'group-x'), self.under())
            tail = self.mapper.nodes['x-handle'].table[1]
            self.assertEqual((GIB_SECTORS, (gigabytes - 1) * GIB_SECTORS,
                              '/dev/group/x %d' % GIB_SECTORS),
                             (tail.start, tail.length, tail.arguments))

    def test_extended_volume_stands_alone_in_one_piece(self):
        self.over_an_engine()
        self.handles.extend('x', 2 * units.Gi)
        self.handles.load('x')
        self.assertEqual([interface.Segment(0, 2 * GIB_SECTORS, 'linear',
                                            '/dev/group/x 0')],
                         self.mapper.nodes['x-handle'].table)

    def test_extend_without_a_handle_makes_none(self):
        # What it would have to lie on is not known.
        self.create()
        self.node.cut_power()
        self.handles.extend('x', 2 * units.Gi)
        self.assertEqual({}, self.mapper.nodes)

    def test_sealed_copy_stays_read_only_whatever_it_lies_on(self):
        self.over_an_engine()
        self.handles.seal('x', 2)
        self.assertEqual(('x-clone',), self.under())
        self.assertTrue(self.mapper.nodes['x-handle'].read_only)
        self.handles.load('x')
        self.assertEqual(('group-x',), self.under())
        self.assertTrue(self.mapper.nodes['x-handle'].read_only)

    def test_path_is_that_of_the_handle(self):
        self.assertEqual('/dev/mapper/x-handle', self.handles.path('x'))


@ddt.ddt
class SealTest(HandlesTestCase):
    """What a volume was before it was reverted is sealed, and goes."""

    def test_copy_without_a_handle_is_sealed(self):
        self.create()
        self.handles.remove('x')
        self.handles.seal_left('x', 2)
        self.assertTrue(copies.Label(
            self.node.volumes.disks['x'].tags).is_sealed)

    def test_copy_that_is_gone_has_nothing_to_seal(self):
        self.handles.seal_left('x', 2)
        self.assertEqual({}, self.node.volumes.disks)

    @ddt.data('remove', 'delete')
    def test_copy_stays_while_it_is_sealed(self, goes):
        self.create()
        others = threading.Thread(
            target=lambda: getattr(self.handles, goes)('x'))
        volumes = self.node.volumes
        retag = volumes.retag

        def retag_and_wait(*arguments, **tags):
            retag(*arguments, **tags)
            others.start()
            others.join(0.1)

        with mock.patch.object(volumes, 'retag', retag_and_wait):
            self.handles.seal_left('x', 2)
        others.join(10)
        self.assertEqual({}, self.mapper.nodes)


@ddt.ddt
class StandTest(HandlesTestCase):

    def restore(self, *wanted):
        return self.handles.restore(list(wanted),
                                    self.node.volumes.logical_volumes())

    def after_a_power_cut(self, *names):
        for name in names:
            self.create(name)
        self.node.cut_power()

    def test_missing_handles_come_back(self):
        self.after_a_power_cut('x', 'y')
        self.assertEqual({}, self.restore(self.copy('x'),
                                          self.copy('y')))
        self.assertEqual({'x-handle', 'y-handle'}, set(self.mapper.nodes))

    def test_a_thousand_volumes_are_looked_at_with_two_calls(self):
        names = ['v%d' % number for number in range(1000)]
        for name in names:
            self.create(name)
        self.node.faults.forget()
        self.assertEqual({}, self.restore(*map(self.copy, names)))
        self.assertEqual(2, len(self.node.faults.seen))

    def test_a_thousand_handles_are_made_with_one_call(self):
        names = ['v%d' % number for number in range(1000)]
        self.after_a_power_cut(*names)
        self.node.faults.forget()
        self.assertEqual({}, self.restore(*map(self.copy, names)))
        self.assertEqual(3, len(self.node.faults.seen))
        self.assertEqual(1000, len(self.mapper.nodes))

    def test_command_that_is_ended_has_its_handles_left_as_they_are(self):
        self.after_a_power_cut('x', 'y')
        make = self.mapper.create_all

        def make_one_and_hang(nodes):
            make(nodes[:1])
            raise exception.CommandTimedOut(command='dmsetup', host='a',
                                            seconds=60)
        self.mapper.create_all = make_one_and_hang
        self.node.faults.forget()

        self.assertEqual({}, self.restore(self.copy('x'), self.copy('y')))

        self.assertEqual({'x-handle', 'y-handle'}, set(self.mapper.nodes))
        self.assertNotIn(('SimulatedDeviceMapper.reload', 0),
                         self.node.faults.seen)

    def test_old_generation_is_not_activated(self):
        self.after_a_power_cut('x')
        failures = self.restore(self.copy(generation=2))
        self.assertIsInstance(failures['x'], exception.GenerationTooOld)
        self.assertIn('generation 1', str(failures['x']))
        self.assertEqual({}, self.mapper.nodes)

    def test_copy_that_was_arriving_is_not_activated(self):
        self.after_a_power_cut('x')
        self.tag(move='m')
        failures = self.restore(self.copy())
        self.assertIn('an arriving copy', str(failures['x']))
        self.assertEqual({}, self.mapper.nodes)

    def test_newer_generation_is_activated(self):
        # The database was slower than the tag.
        self.create('x', generation=2)
        self.node.cut_power()
        self.assertEqual({}, self.restore(self.copy(generation=1)))

    def test_volume_without_tags_is_activated(self):
        self.after_a_power_cut('x')
        self.node.volumes.disks['x'].tags = frozenset()
        self.assertEqual({}, self.restore(self.copy(generation=1)))

    def test_lost_volume_is_named_and_the_others_stand(self):
        self.after_a_power_cut('x', 'y')
        self.node.volumes.lost.add('x')
        failures = self.restore(self.copy('x'), self.copy('y'))
        self.assertEqual(['x'], list(failures))
        for part in ('group/x', 'id-x', 'No data available'):
            self.assertIn(part, str(failures['x']))
        self.assertEqual({'y-handle'}, set(self.mapper.nodes))

    def test_missing_volume_is_named(self):
        failures = self.restore(self.copy())
        self.assertIsInstance(failures['x'], exception.LogicalVolumeMissing)
        self.assertIn('group/x', str(failures['x']))

    @ddt.data('missing', 'old', 'garbage', 'broken')
    def test_one_bad_volume_does_not_stop_the_others(self, what):
        self.after_a_power_cut('x', 'y', 'z')
        generation = 1
        if what == 'missing':
            del self.node.volumes.disks['y']
        elif what == 'old':
            generation = 2
        elif what == 'garbage':
            self.node.volumes.disks['y'].tags = frozenset(
                ['localstor.generation=garbage'])
        else:
            self.node.faults.forget()
            self.node.volumes.path = lambda name: (
                '/dev/group/%s' % ('gone' if name == 'y' else name))
        failures = self.restore(self.copy('x'),
                                self.copy('y', generation),
                                self.copy('z'))
        self.assertEqual(['y'], list(failures))
        self.assertEqual({'x-handle', 'z-handle'}, set(self.mapper.nodes))

    def test_source_of_a_move_comes_back_read_only(self):
        self.after_a_power_cut('x')
        self.tag(superseded=2)
        self.assertEqual({}, self.restore(self.copy(newest=2)))
        self.assertTrue(self.mapper.nodes['x-handle'].read_only)

    def test_writable_handle_of_a_sealed_source_is_sealed(self):
        self.create()
        self.tag(superseded=2)
        self.restore(self.copy(newest=2))
        self.assertTrue(self.mapper.nodes['x-handle'].read_only)

    def test_copy_that_the_volume_has_moved_on_from_is_not_activated(self):
        self.after_a_power_cut('x')
        self.tag(superseded=2)
        failures = self.restore(self.copy())
        self.assertIn('moved on as generation 2', str(failures['x']))
        self.assertEqual({}, self.mapper.nodes)

    def test_handle_on_the_wrong_device_is_put_right(self):
        self.create('x')
        self.create('y')
        self.mapper.nodes['x-handle'].table = (
            self.mapper.nodes['y-handle'].table)
        self.restore(self.copy('x'))
        self.assertEqual(('group-x',),
                         self.mapper.devices()['x-handle'].under)

    def test_handle_that_is_right_is_left_alone(self):
        self.create()
        self.node.faults.forget()
        self.restore(self.copy())
        self.assertNotIn(('SimulatedDeviceMapper.reload', 0),
                         self.node.faults.seen)


class AtOnceTest(HandlesTestCase):

    def test_a_table_is_changed_by_one_at_a_time(self):
        # A volume grows in the moment in which its data has all arrived:
        # what it lies on is looked at and then laid.
        self.create()
        inside = base.Inside()
        self.mapper.reload = inside
        operations = (lambda: self.handles.extend('x', 2 * units.Gi),
                      lambda: self.handles.load('x'),
                      lambda: self.handles.create_on_engine(
                          'x', units.Gi, handles.Backing(
                              '/dev/mapper/y', GIB_SECTORS)))
        self.assertEqual([None] * 3, base.at_once(*operations))
        self.assertEqual(1, inside.most)

    def test_extending_sees_what_was_laid_meanwhile(self):
        self.create()
        self.create('y')
        self.handles.load('x', handles.Backing('/dev/mapper/y-handle',
                                               GIB_SECTORS))
        devices, reload = self.mapper.devices, self.mapper.reload

        def look():
            found = devices()
            time.sleep(0.02)
            return found

        def slow(*arguments):
            time.sleep(0.01)
            reload(*arguments)

        self.mapper.devices, self.mapper.reload = look, slow
        self.assertEqual([None] * 2, base.at_once(
            lambda: self.handles.extend('x', 2 * units.Gi),
            lambda: self.handles.load('x')))
        self.assertEqual(('group-x',), devices()['x-handle'].under)

    def test_sealing_is_not_undone_by_a_table_of_before(self):
        self.create()
        volumes, looked = self.node.volumes.logical_volumes, threading.Event()

        def slow():
            found = volumes()
            looked.set()
            time.sleep(0.02)
            return found

        def seal():
            looked.wait(10)
            self.handles.seal('x', 2)

        self.node.volumes.logical_volumes = slow
        self.assertEqual([None] * 2, base.at_once(
            lambda: self.handles.load('x'), seal))
        self.assertTrue(self.mapper.nodes['x-handle'].read_only)
