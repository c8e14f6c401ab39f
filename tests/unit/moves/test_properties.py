# SPDX-License-Identifier: Apache-2.0

import ddt
from oslo_utils import units
from oslotest import base

from cinder_localstor import exception
from cinder_localstor.moves import properties


@ddt.ddt
class CheckTest(base.BaseTestCase):

    @ddt.data({}, {'volume_backend_name': 'local'},
              {'localstor:data_path': 'clone'},
              {'localstor:hydration_rate': '0'},
              {'localstor:hydration_rate': '10',
               'localstor:hydration_min_rate': '10'})
    def test_type_that_can_be_heeded(self, specs):
        properties.check('gold', specs)

    @ddt.data(
        ({'localstor:data_path': 'fast'}, ('data_path=fast', 'hydrator')),
        ({'localstor:hydration_rate': 'fast'}, ('hydration_rate=fast',)),
        ({'localstor:hydration_rate': '-1'}, ('hydration_rate=-1',)),
        ({'localstor:hydration_min_rate': '0'}, ('hydration_min_rate=0',)),
        ({'localstor:rate': '1'}, ('localstor:rate', 'hydration_rate')),
        ({'localstor:hydration_rate': '9',
          'localstor:hydration_min_rate': '10'}, ('hydration_rate=9', '=10')))
    @ddt.unpack
    def test_type_that_can_not_be_heeded(self, specs, parts):
        error = self.assertRaises(exception.WrongProperty, properties.check,
                                  'gold', specs)
        for part in (*parts, 'gold', 'openstack volume type'):
            self.assertIn(part, str(error))


class DescribedTest(base.BaseTestCase):

    def test_api_is_told_what_is_a_value(self):
        described = {key: known.described() for key, known
                     in properties.PROPERTIES.items()}
        self.assertEqual(['auto', 'hydrator', 'clone'],
                         described[properties.DATA_PATH]['enum'])
        self.assertEqual(
            ('integer', 1), (described[properties.HYDRATION_MIN_RATE]['type'],
                             described[properties.HYDRATION_MIN_RATE][
                                 'minimum']))


class ReadTest(base.BaseTestCase):

    def test_rates_are_bytes(self):
        self.assertEqual(
            properties.Wishes('clone', 20 * units.Mi, 5 * units.Mi),
            properties._read({'localstor:data_path': 'clone',
                              'localstor:hydration_rate': '20',
                              'localstor:hydration_min_rate': '5'}))
