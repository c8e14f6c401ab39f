# SPDX-License-Identifier: Apache-2.0
"""Disks with logical blocks of 4 KiB (hazard H20)."""

import functools

from keystoneauth1 import exceptions

from lab import cloud as clouds
from tests.lab import base

LARGE = 4096  # bytes
SMALL = 512


@functools.cache
def cloud():
    """A lab of three nodes, up: two have disks with large blocks."""
    found = clouds.Cloud('blocks')
    found.up(nodes=3, disks='volatile', kernel=base.KERNEL,
             block_sizes={'node1': LARGE, 'node2': LARGE},
             options=base.OPTIONS)
    return found


class BlockSizesTest(base.LabTestCase):

    find_cloud = staticmethod(cloud)

    volume_type = 'local'

    def setUp(self):
        super().setUp()
        self.large, self.other_large, self.small = self.nodes

    def create_written(self, node):
        """A volume with content on a node; its content, too."""
        volume = self.create(volume_type=self.volume_type, node=node)
        attachment = self.attach(volume, node)
        self.write(attachment)
        content = self.checksum(attachment)
        self.detach(attachment)
        return volume, content

    def block_size(self, disk):
        return int(disk.node.run(['blockdev', '--getss', disk.device]).stdout)

    def test_volume_moves_where_the_blocks_are_as_large(self):
        volume, content = self.create_written(self.large)
        moved = self.attach(volume, self.other_large)
        self.assertEqual(LARGE, self.block_size(moved))
        self.assertEqual(content, self.checksum(moved))
        self.wait_until_arrived(moved)
        self.assertEqual(LARGE, self.block_size(moved))
        self.assertEqual(content, self.checksum(moved))

    def test_instance_that_migrates_sees_the_same_blocks_throughout(self):
        volume, content = self.create_written(self.large)
        first = self.attach(volume, self.large)
        second = self.user.attach_second(first, self.other_large)
        self.attachments.append(second)
        self.assertEqual(LARGE, self.block_size(second))
        self.assertEqual(content, self.checksum(second))
        self.detach(first)
        self.user.complete(second.id)
        self.assertEqual(LARGE, self.block_size(second))
        self.wait_until_arrived(second)
        self.assertEqual(content, self.checksum(second))

    def test_disk_of_a_remote_reader_has_the_blocks_of_the_volume(self):
        volume, content = self.create_written(self.large)
        remote = self.user.attach_remotely(volume, self.other_large)
        self.attachments.append(remote)
        with self.logged_in(remote) as disk:
            # tgt answers requests for less with an error of the medium.
            self.assertEqual(LARGE, self.block_size(disk))
            self.assertEqual(content, self.checksum(disk))

    def test_volume_stays_where_the_other_node_has_others(self):
        for source, destination in ((self.large, self.small),
                                    (self.small, self.large)):
            volume, content = self.create_written(source)
            self.assertRaises(exceptions.HttpError, self.user.attach, volume,
                              destination)
            self.user.wait_for_status(volume, 'available')
            self.assertEqual(source.name, self.home(volume).name)
            self.assertRegex(self.log_of(source),
                             '%s.*(512.*4096|4096.*512)' % destination.name)
            attachment = self.attach(volume, source)
            self.assertEqual(content, self.checksum(attachment))
            self.detach(attachment)


class ThinLioBlockSizesTest(BlockSizesTest):
    """The same on thin volumes, exported by LIO."""

    volume_type = 'thin'
