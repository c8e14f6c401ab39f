# SPDX-License-Identifier: Apache-2.0

import unittest

import ddt

from cinder_localstor.datapath import copies
from cinder_localstor.datapath import transfer

COPY = copies.Copy('a@local', 'volume-v', 'v', 3, 1 << 30)


@ddt.ddt
class LabelTest(unittest.TestCase):

    def label(self, **values):
        return copies.Label(transfer.tags(**values))

    def test_copy_that_arrives(self):
        label = self.label(volume='v', generation=2, move='m', needs=5)
        self.assertEqual(('v', '2', 'm', '', 5, 0, False), (
            label.volume_id, label.generation, label.move_id, label.map_of,
            label.needs(9), label.superseded, label.is_sealed))

    def test_copy_that_was_sealed(self):
        label = self.label(volume='v', generation=2, superseded=3)
        self.assertEqual((3, True, ''), (label.superseded, label.is_sealed,
                                         label.move_id))

    def test_region_map(self):
        label = self.label(map='m')
        self.assertTrue(label)
        self.assertEqual(('m', '', 9), (label.map_of, label.volume_id,
                                        label.needs(9)))

    def test_logical_volume_of_others(self):
        label = copies.Label(frozenset(['other', 'localstor']))
        self.assertFalse(label)
        self.assertEqual('?', label.generation)

    @ddt.data(({'volume': 'v', 'generation': 2}, 2),
              ({'generation': 2}, 2), ({}, 3),
              # What Cinder copies to is first a volume of its own.
              ({'volume': 'another', 'generation': 1}, 3),
              # What can't be read counts as too old.
              ({'volume': 'v', 'generation': 'x'}, 0))
    @ddt.unpack
    def test_generation_of_a_copy(self, values, expected):
        self.assertEqual(expected, self.label(**values).generation_of(COPY))

    def test_garbage_is_no_generation_that_it_has_moved_on_as(self):
        label = self.label(superseded='x')
        self.assertEqual((0, True), (label.superseded, label.is_sealed))
