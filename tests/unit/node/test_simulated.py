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

    @ddt.data(*simulated.Fault)
    def test_fault_is_chosen_when_the_call_comes(self, fault):
        self.node.faults.choose = lambda host, name: (
            fault if (host, name) == ('a', CREATE) else None)
        self.assertRaises(
            (exception.LocalStorException, simulated.Crash),
            self.node.volumes.create, 'x', 1, frozenset())
        self.assertEqual(fault in simulated.LATE,
                         'x' in self.node.volumes.disks)

    def test_what_a_call_has_done_is_observed(self):
        found = []
        self.node.faults.observe = lambda host, name: found.append(
            (host, name, list(self.node.volumes.disks)))
        self.node.volumes.create('x', 8 * interface.SECTOR, frozenset())
        self.assertEqual([('a', CREATE, ['x'])], found)

    def test_nodes_do_not_share_faults(self):
        self.node.faults.plan = simulated.Call(CREATE, 0,
                                               simulated.Fault.ERROR)
        self.other.volumes.create('x', 8 * interface.SECTOR, frozenset())


class WorldTest(SimulatedTestCase):

    def test_new_disk_holds_what_somebody_else_wrote(self):
        self.node.volumes.create('x', 8 * interface.SECTOR, frozenset())
        self.assertEqual('an old tenant', self.node.read('/dev/group/x', 0))

    def test_full_group_takes_no_more(self):
        self.node.volumes.total = 10
        self.node.volumes.create('x', 8, frozenset())
        self.assertRaises(exception.NotEnoughSpace, self.node.volumes.create,
                          'y', 3, frozenset())

    def test_power_cut_takes_devices_exports_and_sessions(self):
        self.node.volumes.create('x', 8 * interface.SECTOR, frozenset())
        mapper = self.node.device_mapper
        mapper.create('h', self.linear('/dev/group/x'))
        export = self.node.target.describe('m', 'iqn', '')
        self.node.target.export('m', '/dev/mapper/h', export)
        self.node.cut_power()
        self.assertEqual((['x'], {}, set()),
                         (list(self.node.volumes.disks), mapper.nodes,
                          self.node.target.exported()))

    def test_power_cut_takes_what_was_not_flushed(self):
        self.node.volumes.create('x', 8 * interface.SECTOR, frozenset())
        path = '/dev/group/x'
        self.node.write(path, 0, 'flushed')
        self.node.flush(path)
        self.node.write(path, 0, 'not flushed')
        self.node.cut_power()
        self.assertEqual('flushed', self.node.read(path, 0))

    def test_some_of_what_was_not_flushed_may_survive(self):
        self.node.volumes.create('x', 8 * interface.SECTOR, frozenset())
        path = '/dev/group/x'
        for number in (0, 1):
            self.node.write(path, number, 'not flushed')
        self.node.cut_power(iter([True, False]).__next__)
        self.assertEqual(('not flushed', 'an old tenant'), (
            self.node.read(path, 0), self.node.read(path, 1)))

    def test_map_of_a_clone_is_on_the_disk_when_it_is_committed_only(self):
        self.node.volumes.create('x', 8 * interface.SECTOR,
                                 frozenset({'localstor.map=m'}))
        self.node.volumes.zero('x', 4096)
        self.node.write('/dev/group/x', 0, 'local')
        self.node.cut_power(lambda: True)
        self.assertEqual('', self.node.read('/dev/group/x', 0))

    def test_source_is_not_reached_over_a_cut_network(self):
        self.node.volumes.create('x', 8 * interface.SECTOR, frozenset())
        export = self.node.target.describe('m', 'iqn', '')
        self.node.target.export('m', '/dev/group/x', export)
        disk = self.other.initiator.connect(export)
        self.other.initiator.unreachable.add('a')
        for reach in (lambda: self.other.read(disk, 0),
                      lambda: self.other.initiator.connect(export)):
            self.assertRaises(exception.SourceUnreachable, reach)
        self.other.initiator.unreachable.clear()
        self.assertEqual('an old tenant', self.other.read(disk, 0))

    def test_device_in_use_stays(self):
        self.node.volumes.create('x', 8 * interface.SECTOR, frozenset())
        mapper = self.node.device_mapper
        mapper.create('below', self.linear('/dev/group/x'))
        mapper.create('above', self.linear('/dev/mapper/below'))
        self.assertRaises(exception.VolumeInUse, mapper.remove, 'below')
        mapper.remove('above')
        mapper.remove('below')
        self.assertEqual({}, mapper.nodes)

    def test_logical_volume_that_something_lies_on_stays(self):
        self.node.volumes.create('x', 8 * interface.SECTOR, frozenset())
        self.node.device_mapper.create('above', self.linear('/dev/group/x'))
        self.assertRaises(exception.CommandFailed,
                          self.node.volumes.remove, 'x')
        self.node.device_mapper.remove('above')
        self.node.volumes.remove('x')
        self.assertEqual({}, self.node.volumes.disks)

    def test_device_on_nothing_can_not_be_made(self):
        self.assertRaises(exception.CommandFailed,
                          self.node.device_mapper.create, 'h',
                          self.linear('/dev/group/absent'))

    def test_source_is_found_with_its_own_export_only(self):
        export = self.node.target.describe('m', 'iqn', '')
        self.assertRaises(exception.SourceUnreachable,
                          self.other.initiator.connect, export)

    def test_sealed_device_takes_no_writes(self):
        self.node.volumes.create('x', 8 * interface.SECTOR, frozenset())
        self.node.device_mapper.create('h', self.linear('/dev/group/x'),
                                       read_only=True)
        self.assertRaises(AssertionError, self.node.write, '/dev/mapper/h', 0,
                          'x')
