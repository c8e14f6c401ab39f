# SPDX-License-Identifier: Apache-2.0
"""Volumes that move where multipathd runs, as the README says."""

import functools

from lab import cloud as clouds
from lab import multipath
from tests.lab import base


@functools.cache
def cloud():
    """A lab of two nodes, up, in which multipathd runs."""
    found = clouds.Cloud('multipathd')
    found.up(nodes=2, kernel=base.KERNEL, options=base.OPTIONS,
             also=['multipathd'])
    return found


class StrictTest(base.GuestTestCase):
    """It takes disks with several paths only, and no source has those."""

    find_cloud = staticmethod(cloud)
    find_multipaths = 'strict'
    takes_sources = False

    def setUp(self):
        super().setUp()
        for node in self.nodes:
            node.run(['sh', '-c', 'cat >%s <<\\END\n%sEND\n'
                      'multipathd reconfigure' % (
                          multipath.CONFIGURATION,
                          multipath.configuration(self.find_multipaths))])

    def maps(self, node):
        """Names of the devices that multipathd has made."""
        # It says "ok" where there is none.
        return [name for name in self.lines(
            node, 'multipathd', 'show', 'maps', 'raw', 'format', '%n')
            if name != 'ok']

    def test_guest_whose_source_was_away_goes_on(self):
        node = self.other(self.source)
        self.wait_briefly(node)
        self.move_on()
        self.assertEqual(self.takes_sources, bool(self.maps(node)))

        self.cut_off_source()

        self.assert_goes_on()
        self.assertEqual([], self.maps(node))


class ThinStrictTest(StrictTest):

    volume_type = 'thin'


class GreedyTest(StrictTest):
    """It takes every disk that it sees."""

    find_multipaths = 'off'
    takes_sources = True


class ThinGreedyTest(GreedyTest):

    volume_type = 'thin'
