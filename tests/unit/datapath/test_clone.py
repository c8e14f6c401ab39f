# SPDX-License-Identifier: Apache-2.0

import dataclasses
import unittest
from unittest import mock

import ddt
import tenacity

from cinder_localstor.datapath import clone
from cinder_localstor.datapath import engine
from cinder_localstor.datapath import regions
from cinder_localstor import exception
from cinder_localstor.node import interface
from cinder_localstor.node import simulated
from tests.unit.datapath import test_transfer

OFF, RUNNING, DONE, FAILED = (
    engine.Hydration.OFF, engine.Hydration.RUNNING, engine.Hydration.DONE,
    engine.Hydration.FAILED)
TUNING = '4 hydration_threshold 16 hydration_batch_size 8'


@ddt.ddt
class StatusTest(unittest.TestCase):

    @ddt.data(
        ('8 9/1024 128 0/16 0 1 no_hydration %s rw' % TUNING, OFF, 0, 16),
        ('8 9/1024 128 3/16 1 0 %s rw' % TUNING, RUNNING, 3, 16),
        ('8 9/1024 128 3/16 1 2 no_hydration no_discard_passdown %s rw'
         % TUNING, OFF, 3, 16),
        ('8 9/1024 128 3/16 1 1 no_discard_passdown %s rw' % TUNING, RUNNING,
         3, 16),
        ('8 9/1024 128 16/16 0 1 no_hydration %s rw' % TUNING, DONE, 16, 16),
        ('8 9/1024 128 16/16 0 0 %s ro' % TUNING, FAILED, 16, 16),
        ('8 9/1024 128 3/16 0 0 %s Fail' % TUNING, FAILED, 3, 16))
    @ddt.unpack
    def test_line(self, text, hydration, local, total):
        self.assertEqual(
            engine.Progress(hydration, local * 65536, total * 65536),
            clone.parse_status(text))

    @ddt.data('Fail', 'Error', ' Fail ')
    def test_broken_clone(self, text):
        self.assertEqual(engine.Progress(FAILED), clone.parse_status(text))

    @ddt.data('', 'x', '8 9/1024', '8 9/1024 128', '8 9/1024 128 3',
              '8 9/1024 128 3/16', '8 9/1024 128 3/16 1',
              '8 9/1024 x 3/16 1 0 0 rw', '8 9/1024 128 x/16 1 0 0 rw',
              '8 9/1024 128 3/16/2 1 0 0 rw', '8 9/1024 128 17/16 1 0 0 rw',
              '8 9/1024 128 -1/16 1 0 0 rw', '8 9/1024 128 3/16 1 x 0 rw')
    def test_corrupt_line_is_refused(self, text):
        with self.assertRaises(exception.OutputNotUnderstood) as caught:
            clone.parse_status(text)
        self.assertIn('dmsetup status', str(caught.exception))


class CloneEngineTest(unittest.TestCase):

    def setUp(self):
        self.node = simulated.SimulatedNode('b', {})
        self.engine = clone.CloneEngine(self.node)
        self.move = dataclasses.replace(test_transfer.TRANSFER,
                                        region_sectors=1 << 17)
        self.node.volumes.create('volume-m', 1 << 30, frozenset())
        self.node.volumes.create('volume-s', 1 << 30, frozenset())
        self.source = '/dev/group/volume-s'

    def disk(self):
        return self.node.volumes.disks['volume-m-regions']

    def test_new_map_says_that_nothing_has_arrived(self):
        self.engine.create_map(self.move)
        self.assertEqual({}, self.disk().regions)
        self.assertEqual(regions.map_size(1 << 30, 1 << 17),
                         self.disk().size)

    def test_map_that_is_there_is_never_zeroed(self):
        self.engine.create_map(self.move)
        self.disk().regions[3] = 'local'
        self.engine.create_map(self.move)
        self.assertEqual({3: 'local'}, self.disk().regions)

    def test_map_leaves_zeros_behind(self):
        self.engine.create_map(self.move)
        disk = self.node.metadata.disks['volume-m-regions']
        disk.regions[3] = 'arrived'
        self.engine.remove_map(self.move)
        self.assertNotIn('volume-m-regions', self.node.metadata.disks)
        self.assertEqual({}, disk.regions)
        self.engine.remove_map(self.move)

    def test_without_a_map_nothing_is_built(self):
        error = self.assertRaises_(exception.MetadataMissing)
        self.assertIn('group/volume-m-regions', str(error))
        self.assertEqual({}, self.node.device_mapper.nodes)

    def assertRaises_(self, kind):
        with self.assertRaises(kind) as caught:
            self.engine.build(self.move, self.source)
        return caught.exception

    def test_clone_is_built_as_the_move_says_and_does_not_hydrate(self):
        self.engine.create_map(self.move)
        self.engine.build(self.move, self.source)
        segment = self.node.device_mapper.nodes['volume-m-clone'].table[0]
        self.assertEqual(
            (0, 1 << 21, 'clone', '/dev/group/volume-m-regions '
             '/dev/group/volume-m /dev/group/volume-s 131072 1 no_hydration '
             '4 hydration_threshold 16 hydration_batch_size 8'),
            dataclasses.astuple(segment))
        self.assertEqual(OFF, self.progress().hydration)

    def test_clone_refuses_discards(self):
        self.engine.create_map(self.move)
        self.engine.build(self.move, self.source)
        self.assertIn(('SimulatedDeviceMapper.refuse_discards', 0),
                      self.node.faults.seen)

    def progress(self):
        return self.engine.progress(self.move,
                                    self.node.device_mapper.devices())

    def test_hydration(self):
        self.engine.create_map(self.move)
        self.engine.build(self.move, self.source)
        self.engine.start_hydration(self.move)
        self.assertEqual(RUNNING, self.progress().hydration)
        self.node.hydrate()
        self.assertEqual(engine.Progress(DONE, 1 << 30, 1 << 30),
                         self.progress())

    def test_what_is_not_there_is_missing(self):
        self.assertEqual(engine.Hydration.MISSING, self.progress().hydration)

    def hydrate(self):
        self.engine.create_map(self.move)
        self.engine.build(self.move, self.source)
        self.engine.start_hydration(self.move)
        return self.node.device_mapper.nodes['volume-m-clone']

    def test_nothing_is_written_while_it_is_frozen(self):
        mapped = self.hydrate()
        with self.engine.frozen('volume-m'):
            self.assertTrue(mapped.suspended)
            self.assertFalse(mapped.hydrating)
        self.assertFalse(mapped.suspended)
        self.assertTrue(mapped.hydrating)

    def test_what_did_not_hydrate_does_not_after_it_was_frozen(self):
        mapped = self.hydrate()
        mapped.hydrating = False
        with self.engine.frozen('volume-m'):
            pass
        self.assertFalse(mapped.hydrating)

    def test_guests_do_not_wait_for_regions_that_are_being_copied(self):
        mapped = self.hydrate()
        busy = interface.Segment(
            0, 1 << 21, 'clone',
            '8 9/1024 128 3/16 2 1 no_hydration %s rw' % TUNING)
        with (mock.patch.object(self.node.device_mapper, '_status',
                                return_value=busy),
              mock.patch.object(clone.CloneEngine._check_idle.retry, 'stop',
                                tenacity.stop_after_attempt(2)),
              self.assertRaises(exception.SourceBusy) as caught,
              self.engine.frozen('volume-m')):
            self.fail('it is not frozen')
        self.assertIn('2 regions', str(caught.exception))
        self.assertFalse(mapped.suspended)

    def test_map_of_a_snapshot_is_that_of_its_volume(self):
        self.hydrate()
        self.node.hydrate(most=3)
        snapshot = dataclasses.replace(
            self.move, source_name='volume-m', destination_name='_snapshot-m',
            snapshot_id='m', snapshot_of=self.move.move_id)
        self.engine.create_map(snapshot)
        with self.engine.frozen('volume-m'):
            self.engine.copy_map(snapshot)
        self.node.hydrate()
        self.assertEqual([0, 1, 2], sorted(self.node.volumes.disks[
            '_snapshot-m-regions'].regions))

    def test_what_a_process_has_left_frozen_is_thawed(self):
        mapped = self.hydrate()
        self.node.device_mapper.suspend('volume-m-clone')
        self.engine.thaw('volume-m', self.node.device_mapper.devices())
        self.assertFalse(mapped.suspended)
        self.engine.thaw('volume-s', self.node.device_mapper.devices())

    def test_remove_keeps_the_map(self):
        self.engine.create_map(self.move)
        self.engine.build(self.move, self.source)
        for _time in range(2):
            self.engine.remove(self.move)
        self.assertEqual({}, self.node.device_mapper.nodes)
        self.assertIn('volume-m-regions', self.node.volumes.disks)
        for _time in range(2):
            self.engine.remove_map(self.move)
        self.assertNotIn('volume-m-regions', self.node.volumes.disks)
