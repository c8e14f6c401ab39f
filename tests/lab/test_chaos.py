# SPDX-License-Identifier: Apache-2.0

import sys

import testtools

from lab import chaos
from tests.lab import base


class ChaosTest(testtools.TestCase):
    """A short run; ``python -m lab chaos`` makes long ones."""

    # In which helpers die and a node loses its power
    SEED = 2

    def test_nothing_is_lost_and_nothing_is_left(self):
        journal = chaos.run(base.cloud(),
                            chaos.Plan(minutes=1, seed=self.SEED), sys.stdout)
        self.assertEqual([], journal.failures,
                         'seed %d, log %s' % (self.SEED, journal.path))
        self.assertGreater(journal.counts['faults'], 0)
        self.assertGreater(journal.counts['verify'], 0)
