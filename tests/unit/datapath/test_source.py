# SPDX-License-Identifier: Apache-2.0

import dataclasses
import unittest
from unittest import mock

from cinder_localstor.datapath import copies
from cinder_localstor.datapath import handles
from cinder_localstor.datapath import source
from cinder_localstor.datapath import transfer
from cinder_localstor.datapath import wipes
from cinder_localstor import exception
from cinder_localstor.node import interface
from cinder_localstor.node import simulated
from tests.unit.datapath import test_transfer

MOVE = test_transfer.TRANSFER


class SourceTest(unittest.TestCase):

    def setUp(self):
        self.node = simulated.SimulatedNode('a', {})
        handles.Handles(self.node).create(
            copies.Copy(MOVE.source_host, MOVE.source_name, 'v', 1,
                        MOVE.size))
        self.source = source.Source(self.node, mock.Mock())
        self.move = dataclasses.replace(
            MOVE, export=self.source.describe_export(
                'm', 'iqn.b', '192.0.2.2', ()))
        self.node.faults.forget()

    def handle(self):
        return self.node.device_mapper.nodes[MOVE.source_name + '-handle']

    def create_on_engine(self):
        self.node.device_mapper.create('engine', [interface.Segment(
            0, MOVE.size // interface.SECTOR, 'linear',
            self.node.volumes.path(MOVE.source_name) + ' 0')])
        handles.Handles(self.node).load(MOVE.source_name, handles.Backing(
            '/dev/mapper/engine', MOVE.size // interface.SECTOR))

    def called(self):
        return [name.partition('.')[2] for name, _nth
                in self.node.faults.seen]

    def test_the_handle_is_exported_and_not_what_is_under_it(self):
        for _time in range(2):
            self.source.export_source(self.move)
        self.assertEqual({'m': (self.move.export,
                                '/dev/mapper/volume-v-handle')},
                         self.node.target.exports)

    def test_what_was_written_is_durable_before_it_is_read_elsewhere(self):
        path = '/dev/mapper/%s-handle' % MOVE.source_name
        self.node.write(path, 0, 'not flushed')
        self.source.export_source(self.move)
        self.node.cut_power()
        self.assertEqual('not flushed', self.node.read(
            '/dev/group/' + MOVE.source_name, 0))

    def test_copy_without_a_handle_is_not_exported(self):
        self.node.device_mapper.nodes.clear()
        self.assertRaisesRegex(exception.HandleMissing, MOVE.source_name,
                               self.source.export_source, self.move)
        self.assertEqual({}, self.node.target.exports)

    def test_sealed_source_is_read_only_and_says_so_after_a_power_cut(self):
        for _time in range(2):
            self.source.seal_source(self.move)
        self.assertTrue(self.handle().read_only)
        tags = self.node.volumes.disks[MOVE.source_name].tags
        self.assertEqual('2', transfer.read_tags(tags)['superseded'])

    def test_tag_is_written_before_the_handle_is_sealed(self):
        # A power cut in between must not let the old copy be written.
        self.source.seal_source(self.move)
        self.assertLess(self.called().index('retag'),
                        self.called().index('make_read_only'))

    def test_what_was_written_is_durable_before_it_is_sealed(self):
        self.source.seal_source(self.move)
        self.assertLess(self.called().index('flush'),
                        self.called().index('make_read_only'))

    def test_unexport(self):
        self.source.export_source(self.move)
        for _time in range(2):
            self.source.unexport_source(self.move)
        self.assertEqual(set(), self.node.target.exported())

    def test_export_stays_while_its_requests_wait_for_another_node(self):
        with mock.patch.object(handles, 'ANSWERED_WITHIN', 0.02):
            self.source.export_source(self.move)
            self.create_on_engine()
            self.handle().in_flight = 2
            self.assertRaisesRegex(exception.RequestsWait, MOVE.source_name,
                                   self.source.unexport_source, self.move)
            self.assertEqual({'m'}, self.node.target.exported())
            self.handle().in_flight = 0
            self.source.unexport_source(self.move)
        self.assertEqual(set(), self.node.target.exported())

    def test_busy_guest_of_a_standing_copy_is_not_waited_for(self):
        self.source.export_source(self.move)
        self.handle().in_flight = 32
        self.source.unexport_source(self.move)
        self.assertEqual(set(), self.node.target.exported())

    def test_source_is_given_up_and_nobody_waits_for_the_wipe(self):
        for _time in range(2):
            self.source.delete_source(self.move)
        self.assertEqual({}, self.node.device_mapper.nodes)
        [name] = self.node.volumes.disks
        self.assertEqual(MOVE.source_name, wipes.former_name(name))
        self.assertNotIn('clear', self.called())
