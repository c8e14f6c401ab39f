# SPDX-License-Identifier: Apache-2.0
"""What volume types say of moves."""

import time

from lab import leftovers
from tests.lab import base

# Seconds, and bytes per second
WHILE = 15
GENTLE = 1 << 20


class RateTest(base.LabTestCase):

    def setUp(self):
        super().setUp()
        self.user.make_type('gentle', volume_backend_name='local', **{
            'localstor:data_path': 'hydrator',
            'localstor:hydration_rate': '1',
            'localstor:hydration_min_rate': '1'})

    def clean_up(self):
        super().clean_up()
        # A move has the type of its volume.
        self.wait_for('the moves have ended',
                      lambda: not leftovers.moves(self.cloud))
        self.user.delete_type('gentle')

    def arrived(self, attachment):
        """Bytes."""
        return self.arrival(attachment).local

    def test_volume_arrives_as_slowly_as_its_type_says_until_it_has_another(
            self):
        volume = self.create(size=3, volume_type='gentle')
        home = self.home(volume)
        moved = self.attach(volume, self.other(home))
        self.wait_for('it arrives', lambda: self.arrival(moved).hydrating)
        # The rate is set at the next period.
        time.sleep(WHILE)
        before = self.arrived(moved)
        time.sleep(WHILE)
        self.assertLess(self.arrived(moved) - before, 2 * WHILE * GENTLE)
        self.user.retype(volume, 'local')
        self.wait_until_arrived(moved)
        self.assertEqual('local', self.user.show(volume)['volume_type'])
