# SPDX-License-Identifier: Apache-2.0
"""What a guest discards goes back to its node's thin pool."""

from tests.lab import base

# MiB
OFFSET, SIZE = 1200, 64


class DiscardTest(base.MovedTestCase):

    volume_type = 'thin'

    def used(self):
        """MiB that the volume's pool has given to its copy."""
        size, percent = self.destination.run([
            'lvs', '--noheadings', '--units', 'm', '--nosuffix', '-o',
            'lv_size,data_percent',
            'cinder-thin/' + self.copy_name(self.moved)]).stdout.split()
        return float(size) * float(percent) / 100

    def assert_given_back(self):
        before = self.used()
        self.write(self.moved, OFFSET, SIZE)
        self.assertLess(before + SIZE / 2, self.used())
        self.moved.node.run([
            'blkdiscard', '--offset', str(OFFSET << 20), '--length',
            str(SIZE << 20), self.moved.device])
        self.wait_for('the pool has it back', lambda: (
            self.used() < before + SIZE / 2))

    def test_discards_free_space_at_rest(self):
        self.assertTrue(self.moved.connection['discard'])
        self.wait_until_arrived(self.moved)
        self.assert_given_back()
        self.assert_whole()

    def test_discards_free_space_while_it_arrives(self):
        self.hold_in_mid_move(self.moved)
        before = self.used()
        self.write(self.moved, OFFSET, SIZE)
        self.moved.node.run([
            'blkdiscard', '--offset', str(OFFSET << 20), '--length',
            str(SIZE << 20), self.moved.device])
        # What was discarded is not brought from the source any more.
        self.assert_arrives()
        self.assertLess(self.used(), before + 2 * SIZE)
        zeros = self.moved.node.run([
            'sh', '-c', 'dd if=%s bs=1M count=%d skip=%d iflag=direct '
            'status=none | tr -d "\\0" | wc -c' % (
                self.moved.device, SIZE, OFFSET)]).stdout
        self.assertEqual(0, int(zeros))
