# SPDX-License-Identifier: Apache-2.0

import subprocess
import sys
import uuid

import ddt
import fixtures
from oslotest import base

from lab import ledger
from lab import stamps

VOLUME = uuid.UUID('5a1d3c0e-6f0b-4a52-9a3e-0d1f2b3c4d5e')
SIZE = 64 << 20


@ddt.ddt
class StampTest(base.BaseTestCase):

    def test_a_stamp_is_read_as_its_number(self):
        self.assertEqual('7', stamps.value(
            VOLUME, 3, stamps.stamp(VOLUME, 3, 7)))

    def test_zeros(self):
        self.assertEqual('0', stamps.value(VOLUME, 3, bytes(stamps.BLOCK)))

    def test_a_torn_stamp_shows_both_writes(self):
        old = stamps.stamp(VOLUME, 3, 7)
        new = stamps.stamp(VOLUME, 3, 8)
        self.assertEqual('7+8', stamps.value(VOLUME, 3,
                                             new[:1024] + old[1024:]))

    def test_a_stamp_of_another_volume(self):
        other = uuid.uuid4()
        self.assertEqual('?of-volume-%s' % other, stamps.value(
            VOLUME, 3, stamps.stamp(other, 3, 7)))

    def test_a_stamp_in_the_wrong_place(self):
        self.assertEqual('?of-block-4-sector-0', stamps.value(
            VOLUME, 3, stamps.stamp(VOLUME, 4, 7)))

    @ddt.data((0, '?no-stamp'), (40, '?damaged'))
    @ddt.unpack
    def test_a_flipped_bit(self, place, expected):
        data = bytearray(stamps.stamp(VOLUME, 3, 7))
        data[place] ^= 1
        self.assertEqual(expected, stamps.value(VOLUME, 3, bytes(data)))

    def test_clusters_lie_apart_and_within_the_volume(self):
        last = 0
        for cluster in range(stamps.clusters_of(1 << 30)):
            start = stamps.cluster_offset(cluster)
            self.assertGreaterEqual(start, last)
            self.assertEqual(0, start % stamps.BLOCK)
            last = start + stamps.CLUSTER
        self.assertLessEqual(last, 1 << 30)

    def test_some_clusters_cross_the_borders_of_regions(self):
        crossing = [cluster for cluster in range(256)
                    if stamps.cluster_offset(cluster) % stamps.CLUSTER]
        self.assertEqual(128, len(crossing))


class GuestTest(base.BaseTestCase):
    """The program itself, on a file."""

    def setUp(self):
        super().setUp()
        self.path = self.useFixture(fixtures.TempDir()).path + '/volume'
        with open(self.path, 'wb') as file:
            file.truncate(SIZE)
        self.ledger = ledger.Ledger(str(VOLUME), SIZE)

    def live(self, words=b'', lines=400):
        """A life of some lines more than the first readings."""
        process = subprocess.Popen(
            [sys.executable, '-ISE', stamps.__file__, 'live', self.path,
             str(VOLUME), str(self.ledger.clusters),
             '--first', str(self.ledger.begin()), '--rate', '100000'],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        process.stdin.write(words)
        process.stdin.flush()
        for number, line in enumerate(process.stdout):
            if number == 2 * self.ledger.clusters + lines:
                process.stdin.close()
            self.ledger.take(line.decode())
        process.stdout.close()
        return process.wait()

    def test_what_it_writes_is_what_the_ledger_expects(self):
        self.assertEqual(0, self.live())
        self.assertGreater(self.ledger.acknowledged, 100)
        self.assertEqual(0, self.live())

    def test_it_goes_on_on_a_volume_that_has_grown(self):
        with open(self.path, 'r+b') as file:
            file.truncate(2 * SIZE)
        clusters = stamps.clusters_of(2 * SIZE)
        self.assertEqual(0, self.live(b's %d\n' % clusters))
        self.assertEqual(clusters, self.ledger.clusters)
        self.assertGreater(max(self.ledger.newest()),
                           clusters // 2 * stamps.CLUSTER_BLOCKS)

    def test_what_somebody_else_wrote_is_found(self):
        self.live()
        block = stamps.cluster_offset(5) // stamps.BLOCK
        with open(self.path, 'r+b') as file:
            file.seek(block * stamps.BLOCK)
            file.write(b'x' * stamps.BLOCK)
        error = self.assertRaises(ledger.StampError, self.live)
        self.assertIn('at byte %d: found no-stamp' % (block * stamps.BLOCK),
                      str(error))

    def test_a_missing_device_is_an_error(self):
        self.path += '-that-is-not-there'
        error = self.assertRaises(ledger.StampError, self.live)
        self.assertIn('No such file', str(error))
