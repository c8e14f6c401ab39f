# SPDX-License-Identifier: Apache-2.0

import os
import sys

import testtools

from lab import chaos
from lab import cloud as clouds


class ChaosTest(testtools.TestCase):
    """A short run; ``python -m lab chaos`` makes long ones.

    In a lab of its own: in the one of other tests volumes are wiped in part
    only, and here what was never written must read zeros.
    """

    # In which helpers die and a node loses its power
    SEED = 2

    def test_nothing_is_lost_and_nothing_is_left(self):
        name = os.environ.get('LOCALSTOR_LAB', 'test') + '-chaos'
        cloud = clouds.Cloud(name)
        self.addCleanup(cloud.down)
        cloud.up(nodes=3, environment=chaos.ENVIRONMENT,
                 disks='volatile')
        journal = chaos.run(cloud, chaos.Plan(minutes=1, seed=self.SEED),
                            sys.stdout)
        self.assertEqual([], journal.failures,
                         'seed %d, log %s' % (self.SEED, journal.path))
        self.assertGreater(journal.counts['faults'], 0)
        self.assertGreater(journal.counts['verify'], 0)
