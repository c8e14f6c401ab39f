# SPDX-License-Identifier: Apache-2.0

import unittest

import ddt

from cinder_localstor import exception
from cinder_localstor.node import interface
from cinder_localstor.node import simulated

CREATE = 'SimulatedVolumeGroup.create'
CRASHES = (simulated.Fault.CRASH, simulated.Fault.CRASH_AFTER)
LATE = (simulated.Fault.ERROR_AFTER, simulated.Fault.HANG_AFTER,
        simulated.Fault.CRASH_AFTER)
HANGS = (simulated.Fault.HANG, simulated.Fault.HANG_AFTER)


class SimulatedTestCase(unittest.TestCase):

    def setUp(self):
        self.network = {}
        self.node = simulated.SimulatedNode('a', self.network)
        self.other = simulated.SimulatedNode('b', self.network)

    def linear(self, device):
        return [interface.Segment(0, 8, 'linear', device + ' 0')]


@ddt.ddt
class FaultsTest(SimulatedTestCase):

    @ddt.data(*simulated.Fault)
    def test_fault_strikes_once_and_as_it_says(self, fault):
        self.node.faults.plan = simulated.Call(CREATE, 1, fault)
        create = self.node.volumes.create
        create('first', 1, frozenset())
        expected = (simulated.Crash if fault in CRASHES
                    else exception.CommandTimedOut if fault in HANGS
                    else exception.CommandFailed)
        self.assertRaises(expected, create, 'second', 1, frozenset())
        self.assertEqual(fault in LATE, 'second' in self.node.volumes.disks)
        create('third', 1, frozenset())
        self.assertIn('third', self.node.volumes.disks)

    def test_crash_is_caught_by_no_ordinary_handler(self):
        self.assertNotIsInstance(simulated.Crash('a', 'x'), Exception)

    def test_calls_are_counted(self):
        for name in ('x', 'y'):
            self.node.volumes.create(name, 1, frozenset())
        self.assertEqual([(CREATE, 0), (CREATE, 1)], self.node.faults.seen)
        self.node.faults.forget()
        self.assertEqual([], self.node.faults.seen)

    def test_nodes_do_not_share_faults(self):
        self.node.faults.plan = simulated.Call(CREATE, 0,
                                               simulated.Fault.ERROR)
        self.other.volumes.create('x', 1, frozenset())


class WorldTest(SimulatedTestCase):

    def test_new_disk_holds_what_somebody_else_wrote(self):
        self.node.volumes.create('x', 1, frozenset())
        self.assertEqual('an old tenant', self.node.read('/dev/group/x', 0))

    def test_full_group_takes_no_more(self):
        self.node.volumes.total = 10
        self.node.volumes.create('x', 8, frozenset())
        self.assertRaises(exception.NotEnoughSpace, self.node.volumes.create,
                          'y', 3, frozenset())

    def test_power_cut_takes_devices_exports_and_sessions(self):
        self.node.volumes.create('x', 1, frozenset())
        mapper = self.node.device_mapper
        mapper.create('h', self.linear('/dev/group/x'))
        export = self.node.target.describe('m', 'iqn', '')
        self.node.target.export('m', '/dev/mapper/h', export)
        self.node.cut_power()
        self.assertEqual((['x'], {}, set()),
                         (list(self.node.volumes.disks), mapper.nodes,
                          self.node.target.exported()))

    def test_device_in_use_stays(self):
        self.node.volumes.create('x', 1, frozenset())
        mapper = self.node.device_mapper
        mapper.create('below', self.linear('/dev/group/x'))
        mapper.create('above', self.linear('/dev/mapper/below'))
        self.assertRaises(exception.VolumeInUse, mapper.remove, 'below')
        mapper.remove('above')
        mapper.remove('below')
        self.assertEqual({}, mapper.nodes)

    def test_device_on_nothing_can_not_be_made(self):
        self.assertRaises(exception.CommandFailed,
                          self.node.device_mapper.create, 'h',
                          self.linear('/dev/group/absent'))

    def test_source_is_found_with_its_own_export_only(self):
        export = self.node.target.describe('m', 'iqn', '')
        self.assertRaises(exception.SourceUnreachable,
                          self.other.initiator.connect, export)

    def test_sealed_device_takes_no_writes(self):
        self.node.volumes.create('x', 1, frozenset())
        self.node.device_mapper.create('h', self.linear('/dev/group/x'),
                                       read_only=True)
        self.assertRaises(AssertionError, self.node.write, '/dev/mapper/h', 0,
                          'x')
