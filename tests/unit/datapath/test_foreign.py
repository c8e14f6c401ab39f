# SPDX-License-Identifier: Apache-2.0

import unittest

from oslo_utils import units

from cinder_localstor.datapath import copies
from cinder_localstor.datapath import foreign
from cinder_localstor import exception
from cinder_localstor.node import simulated


class ForeignTest(unittest.TestCase):

    def setUp(self):
        self.node = simulated.SimulatedNode('a', {})
        self.group = self.node.volumes
        self.disk = self.group.disks['mine'] = simulated.Disk(
            units.Gi, frozenset(['mine']), {3: 'x'})
        self.foreign = foreign.Foreign(self.node)
        self.copy = copies.Copy(
            host='a@local', name='volume-1', volume_id='1', generation=1,
            size=units.Gi)

    def take(self):
        self.foreign.take(self.group.find('mine'), self.copy)

    def test_what_is_taken_tells_whose_it_is_and_was_before_anything_else(
            self):
        seen = []
        self.node.faults.observe = lambda _host, name: seen.append(
            (name.split('.')[1], frozenset(self.disk.tags),
             'mine' in self.group.disks))
        self.take()
        tags = frozenset(['mine', 'localstor.volume=1',
                          'localstor.generation=1', 'localstor.former=mine'])
        changes = [found for found in seen
                   if found[0] in ('retag', 'rename', 'create')]
        self.assertEqual([('retag', tags, True), ('rename', tags, False),
                          ('create', tags, False)], changes)

    def test_what_was_taken_is_found_by_whatever_name(self):
        self.assertIsNone(self.foreign.find_taken('1'))
        self.take()
        self.assertEqual('volume-1', self.foreign.find_taken('1').name)
        self.assertIsNone(self.foreign.find_taken('1', 'a snapshot'))
        self.assertIsNone(self.foreign.find_taken('2'))

    def test_what_is_given_back_is_what_it_was(self):
        self.take()
        self.foreign.give_back(self.foreign.find_taken('1'))
        self.assertEqual({'mine': self.disk}, self.group.disks)
        self.assertEqual({'mine'}, self.disk.tags)
        self.assertEqual({}, self.node.device_mapper.nodes)

    def test_what_is_let_go_is_let_go_twice(self):
        self.take()
        for _time in range(2):
            self.foreign.let_go('volume-1', 'volume-plain', '1')
            self.assertEqual({'volume-plain': self.disk}, self.group.disks)
            self.assertEqual({'mine'}, self.disk.tags)

    def test_what_is_open_is_not_let_go(self):
        self.take()
        self.node.device_mapper.nodes['volume-1-handle'].open_count = 1
        self.assertRaises(exception.VolumeInUse, self.foreign.let_go,
                          'volume-1', 'volume-plain', '1')
        self.assertIn('volume-1', self.group.disks)
        self.assertIn('localstor.volume=1', self.disk.tags)
