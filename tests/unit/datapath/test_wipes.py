# SPDX-License-Identifier: Apache-2.0

import ddt

from cinder_localstor.datapath import handles
from cinder_localstor.datapath import transfer
from cinder_localstor.datapath import wipes
from cinder_localstor import exception
from cinder_localstor.node import simulated
from tests.unit import base

TAGS = transfer.tags(volume='v', generation=1)


@ddt.ddt
class WipesTest(base.TestCase):

    def setUp(self):
        super().setUp()
        self.node = simulated.SimulatedNode(base.A, {})
        self.group = self.node.volumes
        self.group.create('copy', 1 << 30, TAGS)
        self.wipes = wipes.Wipes(self.group)

    def test_copy_that_is_given_up_is_there_until_it_is_wiped(self):
        free = self.group.capacity().free
        self.wipes.give_up('copy')
        [name] = self.wipes.recorded()
        self.assertEqual('copy', wipes.former_name(name))
        self.assertEqual({'copy'}, self.wipes.remaining(['copy', 'another']))
        self.assertEqual(free, self.group.capacity().free)
        self.assertEqual(TAGS, self.group.logical_volumes()[name].tags)
        self.wipes.wipe(name)
        self.assertEqual(set(), self.wipes.remaining(['copy']))
        self.assertEqual({}, self.group.disks)

    def test_copy_that_has_snapshots_is_not_given_up(self):
        self.group.create_snapshot('snapshot', 'copy', frozenset())
        error = self.assertRaises(exception.SnapshotsLeft,
                                  self.wipes.give_up, 'copy')
        self.assertIn('snapshot would be lost', str(error))
        self.assertEqual([], self.wipes.recorded())

    def test_copy_that_is_not_given_up_remains_and_is_not_wiped(self):
        self.assertEqual([], self.wipes.recorded())
        self.assertEqual({'copy'}, self.wipes.remaining(['copy']))
        self.assertRaises(ValueError, self.wipes.wipe, 'copy')
        self.assertIn('copy', self.group.disks)

    def test_what_is_gone_is_given_up_without_a_word(self):
        self.wipes.give_up('another')
        self.assertEqual([], self.wipes.recorded())

    def test_next_copy_of_the_same_name_is_another(self):
        self.wipes.give_up('copy')
        self.assertTrue(self.group.create('copy', 1 << 30, TAGS))
        self.wipes.give_up('copy')
        self.assertEqual(2, len(self.wipes.recorded()))

    @ddt.data('copy', 'localstor-wipe-copy', 'localstor-wipe-.0123abcd',
              'localstor-wipe-copy.0123', 'a-localstor-wipe-copy.0123abcd')
    def test_other_names(self, name):
        self.assertIsNone(wipes.former_name(name))

    @ddt.data(*simulated.Fault)
    def test_wipe_goes_on_whatever_goes_wrong(self, fault):
        for call in ('logical_volumes', 'rename', 'clear', 'remove'):
            self.group.create('copy', 1 << 30, TAGS)
            self.node.faults.forget()
            self.node.faults.plan = simulated.Call(
                'SimulatedVolumeGroup.' + call, 0, fault)
            for _time in range(2):
                try:
                    self.wipes.give_up('copy')
                    for name in self.wipes.recorded():
                        self.wipes.wipe(name)
                except (exception.LocalStorException, simulated.Crash):
                    self.node.cut_power()
            self.assertEqual({}, self.group.disks, call)

    def test_what_can_not_be_activated_is_removed_at_once(self):
        # Nobody would find it among those that are active.
        self.group.lost.add('copy')
        self.wipes.give_up('copy')
        self.assertEqual({}, self.group.disks)

    def test_start_builds_no_handle_for_it(self):
        self.wipes.give_up('copy')
        log = self.patch('cinder_localstor.datapath.handles.LOG.warning')
        handles.Handles(self.node).restore(
            [], self.node.volumes.logical_volumes())
        log.assert_not_called()
        self.assertEqual({}, self.node.device_mapper.nodes)
