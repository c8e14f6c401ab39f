# SPDX-License-Identifier: Apache-2.0

import unittest
from unittest import mock

import ddt

from cinder_localstor.datapath import engines
from cinder_localstor import exception
from cinder_localstor.node import simulated
from tests.unit.datapath import test_destination

NO_HELPER = exception.HydratorMissing(host='b', reason='no such file')
NO_CLONE = exception.NoDataPath(host='b', target='clone')


@ddt.ddt
class EnginesTest(unittest.TestCase):

    def setUp(self):
        self.node = simulated.SimulatedNode('b', {})

    def engines(self, data_path, verify='off'):
        return engines.Engines(
            self.node, test_destination.configuration(
                data_path, localstor_verify=verify))

    def lacks(self, part, method, error):
        patched = mock.patch.object(part, method, side_effect=error)
        patched.start()
        self.addCleanup(patched.stop)

    def lacks_helper(self):
        self.lacks(self.node.hydrators, 'check', NO_HELPER)

    def lacks_clone(self):
        self.lacks(self.node.device_mapper, 'check_target', NO_CLONE)

    @ddt.data(('auto', 'hydrator'), ('hydrator', 'hydrator'),
              ('clone', 'clone'))
    @ddt.unpack
    def test_node_that_has_both(self, data_path, name):
        self.assertEqual(name, self.engines(data_path).chosen().name)

    def test_auto_does_without_the_helper(self):
        self.lacks_helper()
        self.assertEqual('clone', self.engines('auto').chosen().name)

    def test_choice_is_made_once(self):
        found = self.engines('auto')
        self.assertEqual('hydrator', found.chosen().name)
        self.lacks_helper()
        self.assertEqual('hydrator', found.chosen().name)

    @ddt.data(('hydrator', 'clone'), ('clone', 'hydrator'),
              ('clone', 'auto'))
    @ddt.unpack
    def test_type_has_its_own_data_path(self, data_path, wanted):
        found = self.engines(data_path)
        self.assertEqual(data_path, found.chosen().name)
        self.assertEqual('clone' if wanted == 'clone' else 'hydrator',
                         found.chosen(wanted).name)
        self.assertEqual(data_path, found.chosen().name)

    def test_type_does_not_give_verification_up(self):
        self.assertRaises(exception.NotVerifiable, self.engines(
            'hydrator', 'full').chosen, 'clone')

    @ddt.data('auto', 'clone')
    def test_node_that_has_neither(self, data_path):
        self.lacks_helper()
        self.lacks_clone()
        with self.assertRaises(exception.NoDataPath) as caught:
            self.engines(data_path).chosen()
        self.assertIn('dm-clone', str(caught.exception))

    def test_helper_that_is_wanted_and_missing(self):
        self.lacks_helper()
        with self.assertRaises(exception.HydratorMissing) as caught:
            self.engines('hydrator').chosen()
        self.assertIn('pip install', str(caught.exception))

    @ddt.data('sample', 'full')
    def test_helper_verifies(self, verify):
        for data_path in ('auto', 'hydrator'):
            self.assertEqual('hydrator',
                             self.engines(data_path, verify).chosen().name)

    @ddt.data('sample', 'full')
    def test_clone_is_refused_where_moves_are_to_be_verified(self, verify):
        found = self.engines('clone', verify)
        for _time in range(2):
            with self.assertRaises(exception.NotVerifiable) as caught:
                found.chosen()
        for part in ('localstor_verify = ' + verify, 'clone',
                     'localstor_data_path = hydrator'):
            self.assertIn(part, str(caught.exception))

    def test_auto_does_not_give_verification_up(self):
        self.lacks_helper()
        self.assertRaises(exception.NotVerifiable,
                          self.engines('auto', 'full').chosen)

    def test_clone_that_has_begun_goes_on_unverified(self):
        self.assertEqual('clone',
                         self.engines('auto', 'full').named('clone').name)

    def test_move_keeps_the_engine_that_it_began_with(self):
        self.assertEqual('hydrator',
                         self.engines('clone').named('hydrator').name)
