# SPDX-License-Identifier: Apache-2.0

import dataclasses
import unittest
from unittest import mock

import ddt
from oslo_utils import units

from cinder_localstor.datapath import engine
from cinder_localstor.datapath import hydrator
from cinder_localstor import exception
from cinder_localstor.node import interface
from cinder_localstor.node import simulated
from tests.unit.datapath import test_destination
from tests.unit.datapath import test_transfer

SOURCE = '/dev/group/volume-s'


@ddt.ddt
class MetadataSizeTest(unittest.TestCase):

    # As "check" and "run" of localstor-hydrator want them
    @ddt.data((1, 267), (100, 2 + 1600 + 813), (1024, 16 * 1024 + 2 + 8323),
              (16384, 16384 + 2 + 133153))
    @ddt.unpack
    def test_of_so_many_gib(self, gib, blocks):
        size = hydrator.metadata_size(gib * units.Gi)
        self.assertGreaterEqual(size, blocks * 4096)
        self.assertLess(size, blocks * 4096 + 4 * units.Mi)
        self.assertEqual(0, size % (4 * units.Mi))


@ddt.ddt
class HydratorEngineTest(unittest.TestCase):

    def setUp(self):
        self.node = simulated.SimulatedNode('b', {})
        self.engine = hydrator.HydratorEngine(
            self.node, test_destination.configuration(
                localstor_hydration_min_rate=7, localstor_source_timeout=30,
                localstor_verify='sample', localstor_poll_time=20))
        self.move = dataclasses.replace(test_transfer.TRANSFER,
                                        engine='hydrator')
        self.node.volumes.create('volume-m', units.Gi, frozenset())
        self.node.volumes.create('volume-s', units.Gi, frozenset())

    def build(self):
        self.engine.create_map(self.move)
        self.engine.build(self.move, SOURCE)

    def progress(self):
        return self.engine.progress(self.move,
                                    self.node.device_mapper.devices())

    def test_helper_is_started_as_the_options_say(self):
        self.engine.create_map(self.move)
        with mock.patch.object(
                self.node.hydrators, 'start',
                return_value='/dev/group/volume-m') as start:
            self.engine.build(self.move, SOURCE)
        start.assert_called_once_with('volume-m', interface.Hydrator(
            move_id='m', data='/dev/group/volume-m',
            metadata='/dev/group/volume-m-regions', source=SOURCE,
            size=units.Gi, zeroed=False, minimum=7 * units.Mi,
            source_timeout=30, verify='sample', poll_time=20))

    def test_reads_of_what_must_wait_never_fail(self):
        self.move = dataclasses.replace(self.move, waits=True)
        self.engine.create_map(self.move)
        with mock.patch.object(
                self.node.hydrators, 'start',
                return_value='/dev/group/volume-m') as start:
            self.engine.build(self.move, SOURCE)
        self.assertEqual(0, start.call_args.args[1].source_timeout)

    def test_without_metadata_nothing_is_built(self):
        with self.assertRaises(exception.MetadataMissing) as caught:
            self.engine.build(self.move, SOURCE)
        self.assertIn('group/volume-m-regions', str(caught.exception))
        self.assertEqual({}, self.node.device_mapper.nodes)

    def test_metadata_that_are_there_are_never_zeroed(self):
        self.engine.create_map(self.move)
        disk = self.node.volumes.disks['volume-m-regions']
        disk.regions[3] = 'local'
        self.engine.create_map(self.move)
        self.assertEqual({3: 'local'}, disk.regions)

    def test_node_follows_a_helper_that_has_another_device(self):
        self.build()
        with mock.patch.object(
                self.node.hydrators, 'start',
                return_value='/dev/group/volume-s'):
            self.engine.build(self.move, SOURCE)
        self.assertEqual(
            '/dev/group/volume-s 0',
            self.node.device_mapper.nodes['volume-m-hydrator'].table[0]
            .arguments)

    def test_progress_of_a_move(self):
        self.assertEqual(engine.Hydration.MISSING, self.progress().hydration)
        self.build()
        rates = engine.Rates(minimum=7 * units.Mi)
        self.assertEqual(engine.Progress(engine.Hydration.OFF, 0, units.Gi, 0,
                                         rates=rates), self.progress())
        self.engine.start_hydration(self.move)
        self.assertEqual(engine.Hydration.RUNNING, self.progress().hydration)
        self.node.hydrate()
        self.assertEqual(engine.Progress(
            engine.Hydration.DONE, units.Gi, units.Gi, 0, rates=rates),
            self.progress())

    def test_progress_tells_what_it_is_held_to(self):
        self.build()
        rates = engine.Rates(30 * units.Mi, 20 * units.Mi)
        self.engine.throttle(self.move, rates)
        self.assertEqual(rates, self.progress().rates)

    @ddt.data(('opening', engine.Hydration.RUNNING),
              ('stalled', engine.Hydration.RUNNING),
              ('broken', engine.Hydration.FAILED),
              ('differing', engine.Hydration.DIFFERS),
              ('closing', engine.Hydration.MISSING))
    @ddt.unpack
    def test_states_of_the_helper(self, state, hydration):
        self.build()
        with mock.patch.object(
                self.node.hydrators, 'status',
                return_value=interface.HydratorStatus(state, 5, 6)):
            self.assertEqual(engine.Progress(hydration, 5, units.Gi, 6),
                             self.progress())

    @ddt.data(('off', None), ('sample', 4096), ('full', 4096))
    @ddt.unpack
    def test_progress_tells_what_was_compared(self, verify, verified):
        self.build()
        status = interface.HydratorStatus(
            'differing', 5, 6, verify=verify, verified=4096, differing=7,
            first_differing=8192)
        with mock.patch.object(self.node.hydrators, 'status',
                               return_value=status):
            self.assertEqual(
                engine.Progress(engine.Hydration.DIFFERS, 5, units.Gi, 6,
                                verified=verified, differing=7,
                                first_differing=8192), self.progress())

    def test_helper_without_its_node_is_missing(self):
        self.build()
        self.node.device_mapper.remove('volume-m-hydrator')
        self.assertEqual(engine.Hydration.MISSING, self.progress().hydration)

    def test_remove_keeps_the_metadata(self):
        self.build()
        for _time in range(2):
            self.engine.remove(self.move)
        self.assertEqual(({}, {}), (self.node.device_mapper.nodes,
                                    self.node.hydrators.processes))
        self.assertIn('volume-m-regions', self.node.volumes.disks)
        for _time in range(2):
            self.engine.remove_map(self.move)
        self.assertNotIn('volume-m-regions', self.node.volumes.disks)
