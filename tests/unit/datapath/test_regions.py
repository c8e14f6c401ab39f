# SPDX-License-Identifier: Apache-2.0

import unittest

import ddt
import hypothesis
from hypothesis import strategies
from oslo_utils import units

from cinder_localstor.datapath import regions

SIZES = strategies.integers(1, 16 * 1024).map(lambda size: size * units.Gi)
SECTORS = strategies.integers(3, 21).map(lambda power: 1 << power)
# Time of one example says nothing on a machine that does other things too.
quick = hypothesis.settings(deadline=None)


@ddt.ddt
class RegionTest(unittest.TestCase):

    @quick
    @hypothesis.given(SIZES)
    def test_chosen_region_is_a_power_of_two_that_dm_clone_takes(self, size):
        sectors = regions.region_sectors(size)
        self.assertEqual(0, sectors & (sectors - 1))
        self.assertGreaterEqual(sectors, regions.DEFAULT_REGION)
        self.assertLessEqual(sectors, regions.MAXIMUM_REGION)

    @quick
    @hypothesis.given(SIZES)
    def test_map_in_memory_stays_small(self, size):
        sectors = regions.region_sectors(size)
        self.assertLessEqual(regions.region_count(size, sectors),
                             regions.MOST_REGIONS)

    @quick
    @hypothesis.given(SIZES, SIZES)
    def test_bigger_volumes_never_get_smaller_regions(self, one, other):
        small, big = sorted((one, other))
        self.assertLessEqual(regions.region_sectors(small),
                             regions.region_sectors(big))

    @quick
    @hypothesis.given(SIZES, SECTORS)
    def test_regions_cover_the_volume_and_no_more(self, size, sectors):
        count = regions.region_count(size, sectors)
        region = sectors * 512
        self.assertGreaterEqual(count * region, size)
        self.assertLess((count - 1) * region, size)

    @ddt.data((4, 8), (64, 128), (1048576, 1 << 21))
    @ddt.unpack
    def test_configured_size_is_taken(self, kib, sectors):
        self.assertEqual(sectors, regions.region_sectors(units.Gi, kib))

    @ddt.data(1, 2, 3, 5, 65, 1048577, 2097152)
    def test_configured_size_that_dm_clone_refuses_is_refused(self, kib):
        with self.assertRaises(ValueError) as caught:
            regions.region_sectors(units.Gi, kib)
        self.assertIn('localstor_region_size = %d' % kib,
                      str(caught.exception))

    @ddt.data((1, 128), (1024, 128), (1025, 256), (16 * 1024, 2048))
    @ddt.unpack
    def test_known_sizes(self, gib, sectors):
        self.assertEqual(sectors, regions.region_sectors(gib * units.Gi))


@ddt.ddt
class MapTest(unittest.TestCase):

    @quick
    @hypothesis.given(SIZES, SECTORS)
    def test_map_has_room_for_two_of_its_trees(self, size, sectors):
        leaves = -(-regions.region_count(size, sectors)
                   // regions.REGIONS_PER_BLOCK)
        self.assertGreater(regions.map_size(size, sectors),
                           2 * leaves * regions.BLOCK)

    @quick
    @hypothesis.given(SIZES, SIZES, SECTORS)
    def test_bigger_volumes_never_get_smaller_maps(self, one, other, sectors):
        small, big = sorted((one, other))
        self.assertLessEqual(regions.map_size(small, sectors),
                             regions.map_size(big, sectors))

    @quick
    @hypothesis.given(SIZES, SECTORS)
    def test_smaller_regions_never_get_smaller_maps(self, size, sectors):
        hypothesis.assume(sectors > regions.MINIMUM_REGION)
        self.assertGreaterEqual(regions.map_size(size, sectors // 2),
                                regions.map_size(size, sectors))

    @quick
    @hypothesis.given(SIZES, SECTORS)
    def test_map_fills_extents(self, size, sectors):
        found = regions.map_size(size, sectors)
        self.assertEqual(0, found % regions.GRANULE)
        self.assertGreater(found, 0)

    @quick
    @hypothesis.given(SIZES)
    def test_map_of_chosen_regions_is_a_trifle(self, size):
        found = regions.map_size(size, regions.region_sectors(size))
        self.assertLessEqual(found, max(regions.GRANULE, size // 1024))

    @ddt.data((1, 128, 4), (16 * 1024, 2048, 8), (16 * 1024, 8, 1044))
    @ddt.unpack
    def test_known_maps(self, gib, sectors, mib):
        self.assertEqual(mib * units.Mi,
                         regions.map_size(gib * units.Gi, sectors))
