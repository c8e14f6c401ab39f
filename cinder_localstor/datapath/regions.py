# SPDX-License-Identifier: Apache-2.0
"""Sizes for dm-clone: of a region, and of the map of all regions.

Formats: Linux, Documentation/admin-guide/device-mapper/dm-clone.rst, and
drivers/md/dm-clone-metadata.c with the persistent-data library under it.
"""

from oslo_utils import units

from cinder_localstor.node import interface

MINIMUM_REGION = 8  # sectors: 4 KiB, the smallest that dm-clone takes
MAXIMUM_REGION = 1 << 21  # sectors: 1 GiB
# 64 KiB hydrates as fast as a plain copy where 4 KiB reached a hundredth of
# it, and a small write still waits for little.
DEFAULT_REGION = 128  # sectors
# A map of 16 Mi bits is 2 MiB in memory; bigger volumes get bigger regions.
MOST_REGIONS = 1 << 24

BLOCK = 4096  # bytes of a block of the map
# A block of the array holds (4096 - 24) / 8 words of 64 bits.
REGIONS_PER_BLOCK = 32576
# A B-tree node has room for 252 entries of 16 bytes and is at least a third
# full.
LEAST_FANOUT = 84
# A block of the space map's own bitmap keeps 2 bits for each block.
SPACE_PER_BLOCK = 16320
SLACK = 64  # blocks: superblock, roots, and some to be on the safe side
GRANULE = 4 * units.Mi  # bytes: LVM's default extent


def region_sectors(size: int, configured: int = 0) -> int:
    """Sectors of a region for a volume of `size` bytes.

    :param configured: KiB, a power of two; 0 chooses
    :raises ValueError: the configured size is none that dm-clone takes
    """
    if configured:
        sectors = configured * units.Ki // interface.SECTOR
        if (sectors & (sectors - 1)
                or not MINIMUM_REGION <= sectors <= MAXIMUM_REGION):
            raise ValueError('localstor_region_size = %d is no power of two '
                             'from 4 to 1048576' % configured)
        return sectors
    sectors = DEFAULT_REGION
    while region_count(size, sectors) > MOST_REGIONS:
        sectors *= 2
    return sectors


def region_count(size: int, sectors: int) -> int:
    """Regions of a volume of `size` bytes."""
    return -(-size // (sectors * interface.SECTOR))


def map_size(size: int, sectors: int) -> int:
    """Bytes of the map for a volume of `size` bytes, rounded to extents.

    The bits of the regions, the tree above them, and the same again because
    a commit writes new blocks before it frees old ones (copy on write).
    """
    leaves = -(-region_count(size, sectors) // REGIONS_PER_BLOCK)
    tree, level = 0, leaves
    while level > 1:
        level = -(-level // LEAST_FANOUT)
        tree += level
    blocks = 2 * (leaves + tree) + SLACK
    blocks += 2 * -(-blocks // SPACE_PER_BLOCK)
    return in_extents(blocks * BLOCK)


def in_extents(size: int) -> int:
    """`size` in bytes, rounded up to what a logical volume can have."""
    return -(-size // GRANULE) * GRANULE
