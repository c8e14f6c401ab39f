# SPDX-License-Identifier: Apache-2.0

import ddt
from oslotest import base

from lab import partitions


@ddt.ddt
class TableTest(base.BaseTestCase):

    @ddt.data(512, 4096)
    def test_one_partition_from_the_first_mib_to_the_end(self, block_size):
        found = partitions.table(8 << 30, block_size)
        self.assertEqual(512, len(found))
        self.assertEqual(b'\x55\xaa', found[510:])
        self.assertEqual(partitions.LINUX_LVM, found[450])
        start, length = (int.from_bytes(found[at:at + 4], 'little')
                         * block_size for at in (454, 458))
        self.assertEqual(1 << 20, start)
        self.assertEqual(8 << 30, start + length)
        self.assertEqual(bytes(48), found[462:510])
