# SPDX-License-Identifier: Apache-2.0
"""What a guest discards goes back to its node's thin pool."""

from tests.lab import base

# MiB, within the GiB of the volume
OFFSET, SIZE = 500, 64


class DiscardTest(base.MovedTestCase):

    volume_type = 'thin'

    def used(self):
        """MiB that the volume's pool has given to its copy."""
        size, percent = self.destination.run([
            'lvs', '--noheadings', '--units', 'm', '--nosuffix', '-o',
            'lv_size,data_percent',
            'cinder-thin/' + self.copy_name(self.moved)]).stdout.split()
        return float(size) * float(percent) / 100

    def discard(self):
        self.destination.run([
            'blkdiscard', '--offset', str(OFFSET << 20), '--length',
            str(SIZE << 20), self.moved.device])

    def test_discards_free_space(self):
        self.assertTrue(self.moved.connection['discard'])
        self.wait_until_arrived(self.moved)
        self.write(self.moved, OFFSET, SIZE)
        before = self.used()
        self.discard()
        self.wait_for('the pool has it back', lambda: (
            self.used() < before - SIZE / 2))
        self.assert_whole()

    def test_discards_free_space_while_it_arrives(self):
        if base.DATA_PATHS[1] != 'hydrator':
            self.skipTest('dm-clone takes no discards')
        self.hold_in_mid_move(self.moved)
        self.write(self.moved, OFFSET, SIZE)
        before = self.used()
        self.discard()
        self.wait_for('the pool has it back', lambda: (
            self.used() < before - SIZE / 2))
        self.assert_arrives()
