# SPDX-License-Identifier: Apache-2.0

import dataclasses
import types
import unittest
from unittest import mock

import ddt

from cinder_localstor.datapath import copies
from cinder_localstor.datapath import destination
from cinder_localstor.datapath import engine
from cinder_localstor.datapath import engines
from cinder_localstor.datapath import handles
from cinder_localstor.datapath import source
from cinder_localstor.datapath import transfer
from cinder_localstor.datapath import wipes
from cinder_localstor import exception
from cinder_localstor.node import interface
from cinder_localstor.node import simulated
from tests.unit.datapath import test_transfer

MOVE = dataclasses.replace(test_transfer.TRANSFER, region_sectors=1 << 17)
BUILD = ('create_destination', 'create_map', 'connect_source',
         'build_engine', 'build_handle')


def configuration(data_path='clone', **more):
    """Options as a destination reads them."""
    return types.SimpleNamespace(**{
        'localstor_data_path': data_path, 'localstor_hydration_min_rate': 10,
        'localstor_source_timeout': 0, 'localstor_verify': 'off',
        'localstor_poll_time': 0, **more})


class DestinationTestCase(unittest.TestCase):

    data_path = 'clone'

    def setUp(self):
        network = {}
        self.there = simulated.SimulatedNode('a', network)
        self.node = simulated.SimulatedNode('b', network)
        handles.Handles(self.there).create(
            copies.Copy(MOVE.source_host, MOVE.source_name, 'v', 1,
                        MOVE.size))
        self.source = source.Source(self.there, mock.Mock())
        self.move = dataclasses.replace(
            MOVE, engine=self.data_path,
            export=self.source.describe_export(
                'm', 'iqn.b', '192.0.2.2', ()))
        self.source.export_source(self.move)
        for number in range(16):
            self.there.write('/dev/mapper/volume-v-handle', number,
                             'first %d' % number)
        self.destination = destination.Destination(
            self.node, engines.Engines(self.node,
                                       configuration(self.data_path)))

    def do(self, *steps):
        for step in steps:
            # Each may be asked for twice.
            getattr(self.destination, step)(self.move)
            getattr(self.destination, step)(self.move)

    def read(self, number):
        return self.node.read('/dev/mapper/volume-m-handle', number)

    def progress(self):
        return self.destination.progress(self.move,
                                         self.node.device_mapper.devices())


class ExamineTest(DestinationTestCase):

    def test_answer_names_the_initiator_and_the_engine(self):
        self.assertEqual({'initiator': 'iqn.1993-08.org.debian:b',
                          'address': '192.0.2.1', 'engine': 'clone',
                          'transports': ['iscsi'], 'waits': 'yes'},
                         self.destination.examine(512, 'p:1', 'b@local'))

    def test_other_blocks_are_refused(self):
        with self.assertRaises(exception.BlockSizesDiffer) as caught:
            self.destination.examine(4096, 'p:1', 'b@local')
        for part in ('b@local', '512', '4096'):
            self.assertIn(part, str(caught.exception))


@ddt.ddt
class SourceNodeTest(DestinationTestCase):

    @ddt.data((interface.ISCSI, '1 queue_if_no_path 0 1 1 '),
              # NVMe's disks take no requests.
              (interface.NVME, '3 queue_if_no_path queue_mode bio 0 1 1 '))
    @ddt.unpack
    def test_it_waits_for_its_one_path(self, transport, beginning):
        move = dataclasses.replace(
            self.move, export=self.there.target.describe(
                'm', 'iqn.b', '192.0.2.2', (transport,)))
        self.there.target.exports.clear()
        self.source.export_source(move)
        self.destination.connect_source(move)
        segment, = self.node.device_mapper.nodes[move.source_node].table
        self.assertEqual('multipath', segment.target)
        self.assertTrue(segment.arguments.startswith(beginning),
                        segment.arguments)


class BuildTest(DestinationTestCase):

    def test_volume_reads_as_on_the_source_at_once(self):
        self.do(*BUILD)
        self.assertEqual('first 7', self.read(7))
        self.assertEqual(engine.Hydration.OFF, self.progress().hydration)

    def test_writes_stay_here(self):
        self.do(*BUILD)
        self.node.write('/dev/mapper/volume-m-handle', 7, 'new')
        self.assertEqual('new', self.read(7))
        self.assertEqual('first 7', self.there.read(
            '/dev/mapper/volume-v-handle', 7))

    def test_tags_say_that_it_arrives(self):
        self.do('create_destination')
        self.assertEqual(
            {'volume': 'v', 'generation': '2', 'move': 'm'},
            transfer.read_tags(self.node.volumes.disks['volume-m'].tags))

    def test_source_node_is_read_only(self):
        self.do(*BUILD)
        self.assertTrue(self.node.device_mapper.nodes[
            'volume-m-source'].read_only)

    def test_names_of_what_is_under_the_handle(self):
        self.do(*BUILD)
        nodes = set(self.node.device_mapper.nodes) - {'volume-m-handle'}
        self.assertEqual(nodes, set(self.destination.node_names(self.move)))

    def test_handle_on_something_else_counts_as_missing(self):
        self.do(*BUILD)
        self.do('stand_alone')
        self.assertEqual(engine.Hydration.MISSING, self.progress().hydration)

    def test_source_is_connected_while_its_export_lives(self):
        self.do(*BUILD)
        self.assertTrue(self.connected())
        self.there.cut_power()
        self.assertFalse(self.connected())

    def connected(self, status=None):
        devices = self.node.device_mapper.devices()
        if status is not None:
            name = self.move.destination_name + '-source'
            devices[name] = dataclasses.replace(devices[name], status=(
                interface.Segment(0, 8, 'multipath', status),))
        return self.destination.is_connected(self.move, devices)

    def test_path_that_failed_once_is_no_connection(self):
        self.do(*BUILD)
        line = '2 0 0 0 1 1 %s 0 1 0 8:16 %s 1'
        self.assertTrue(self.connected(line % ('A', 'A')))
        self.assertFalse(self.connected(line % ('E', 'F')))


class HydratorBuildTest(BuildTest):

    data_path = 'hydrator'

    def test_helper_is_gone_and_comes_back_with_what_it_knew(self):
        self.do(*BUILD, 'start_hydration')
        self.node.write('/dev/mapper/volume-m-handle', 7, 'new')
        self.node.hydrators.processes.clear()
        self.assertEqual(engine.Hydration.MISSING, self.progress().hydration)
        self.do('build_engine', 'restore_handle')
        self.assertEqual(engine.Hydration.RUNNING, self.progress().hydration)
        self.assertEqual('new', self.read(7))


class EndTest(DestinationTestCase):

    start = 'message'

    def setUp(self):
        super().setUp()
        self.do(*BUILD)

    def test_caches_are_dropped_before_hydration(self):
        self.node.faults.forget()
        self.destination.start_hydration(self.move)
        self.assertEqual(['forget_cached', 'forget_cached', self.start],
                         [name.partition('.')[2]
                          for name, _nth in self.node.faults.seen])

    def test_arrived_volume_needs_nothing_of_the_move(self):
        self.do('start_hydration')
        self.node.hydrate()
        self.do('settle', 'stand_alone', 'remove_engine',
                'disconnect_source', 'remove_map', 'keep_destination')
        self.there.cut_power()
        self.assertEqual('first 7', self.read(7))
        self.assertEqual(['volume-m-handle'],
                         list(self.node.device_mapper.nodes))
        self.assertEqual(['volume-m'], list(self.node.volumes.disks))
        self.assertEqual({}, self.node.initiator.connected())
        self.assertNotIn('move', transfer.read_tags(
            self.node.volumes.disks['volume-m'].tags))

    def test_move_taken_back_leaves_nothing(self):
        self.do('remove_handle', 'disconnect_source', 'remove_engine',
                'remove_map', 'remove_unused')
        self.assertEqual(({}, {}, {}), (
            self.node.device_mapper.nodes, self.node.volumes.disks,
            self.node.initiator.sessions))

    def test_copy_that_was_used_is_left_to_be_wiped(self):
        self.do('remove_handle', 'disconnect_source', 'remove_engine',
                'remove_map', 'delete_destination')
        [name] = self.node.volumes.disks
        self.assertEqual('volume-m', wipes.former_name(name))

    def test_handle_in_use_is_not_taken_away(self):
        self.node.device_mapper.nodes['volume-m-handle'].open_count = 1
        self.assertRaises(exception.VolumeInUse,
                          self.destination.remove_handle, self.move)


class HydratorEndTest(EndTest):

    data_path = 'hydrator'
    start = 'hydrate'

    def test_helper_ends_with_its_engine(self):
        self.do('remove_handle', 'remove_engine')
        self.assertEqual({}, self.node.hydrators.processes)


class ChooseTest(unittest.TestCase):

    def test_options_of_now_are_kept(self):
        options = configuration(
            localstor_region_size=4, localstor_hydration_threshold=3,
            localstor_hydration_batch=5)
        self.assertEqual(
            {'region_sectors': 8, 'threshold': 3, 'batch': 5},
            destination.choose_regions(1 << 30, options))
