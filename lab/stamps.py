# SPDX-License-Identifier: Apache-2.0
"""A guest that writes stamps on a volume: runs inside a node.

Like the agent it needs nothing but the standard library.  It knows what to
write and tells what it has written and read; what it *should* have read is
known outside (:mod:`lab.ledger`), where no power cut reaches.

A stamp fills one block of 4 KiB.  Each of its sectors of 512 bytes begins
with a head that names the volume, the block and the number of the write, so
a stamp that is old, torn, misplaced or somebody else's is told apart.  Blocks
with stamps lie in clusters of 16, one cluster in each 4 MiB of the volume,
some of them across the borders of dm-clone's regions.

What it prints, a line each:

====================== ==================================================
``r CLUSTER VALUE...``  read: what each block of a cluster holds, see
                        :func:`value`
``v HOW``               all clusters were read, ``direct`` or ``buffered``
``s CLUSTERS``          the volume has grown
``a N CLUSTER FIRST COUNT``  write `N` on these blocks was acknowledged
``f N``                 all writes up to `N` were flushed
``e TEXT``              the volume answered with an error
====================== ==================================================

On its standard input ``s CLUSTERS`` says that the volume has grown; the end
of the input asks it to stop.  What it does then is done before it ends: once
the process is gone, nothing of it is in flight any more.
"""

import argparse
import mmap
import os
import random
import select
import struct
import sys
import time
import uuid
import zlib

SECTOR = 512
BLOCK = 4096
CLUSTER_BLOCKS = 16
CLUSTER = CLUSTER_BLOCKS * BLOCK
# One cluster lies somewhere in each of these.
STRIDE = 4 << 20

_MAGIC = b'stampLS1'
# Magic, volume, number of the block on the volume, number of the write, number
# of the sector in the block; then the CRC-32 of it all.
_HEAD = struct.Struct('<8s16sQQI')
_SUM = struct.Struct('<I')
_ZEROS = bytes(BLOCK)


def clusters_of(size):
    """How many clusters a volume of `size` bytes has."""
    return size // STRIDE


def cluster_offset(cluster):
    """Where a cluster begins, in bytes; every other one off any border."""
    within = zlib.crc32(b'%d' % cluster) % (STRIDE // CLUSTER - 1) * CLUSTER
    return cluster * STRIDE + within + (cluster % 2) * 5 * BLOCK


def _head(volume, block, number, sector):
    head = _HEAD.pack(_MAGIC, volume.bytes, block, number, sector)
    return head + _SUM.pack(zlib.crc32(head))


def stamp(volume, block, number):
    """The bytes of one stamp."""
    return b''.join(_head(volume, block, number, sector).ljust(SECTOR, b'.')
                    for sector in range(BLOCK // SECTOR))


def value(volume, block, data):
    """What a block holds, as a word.

    The number of the write; ``0`` for zeros; numbers joined by ``+`` when its
    sectors are of several writes; ``?`` and what is wrong with it when no
    write of ours can have left it so.
    """
    if data == _ZEROS:
        return '0'
    numbers = set()
    for sector in range(BLOCK // SECTOR):
        found = data[sector * SECTOR:(sector + 1) * SECTOR]
        if found == _ZEROS[:SECTOR]:
            numbers.add(0)
            continue
        head, rest = found[:_HEAD.size], found[_HEAD.size:]
        magic, owner, place, number, index = _HEAD.unpack(head)
        if magic != _MAGIC:
            return '?no-stamp'
        if _SUM.unpack_from(rest)[0] != zlib.crc32(head):
            return '?damaged'
        if owner != volume.bytes:
            return '?of-volume-%s' % uuid.UUID(bytes=owner)
        if (place, index) != (block, sector):
            return '?of-block-%d-sector-%d' % (place, index)
        numbers.add(number)
    return '+'.join(map(str, sorted(numbers)))


class Device:
    """The volume, through the page cache or past it."""

    def __init__(self, path, volume, how):
        self._volume = volume
        self._file = os.open(path, os.O_RDWR | (
            os.O_DIRECT if how == 'direct' else 0))
        # Direct I/O wants aligned memory.
        self._memory = mmap.mmap(-1, CLUSTER)

    def read(self, cluster):
        """The values of a cluster's blocks."""
        start = cluster_offset(cluster)
        with memoryview(self._memory) as view:
            got = os.preadv(self._file, [view], start)
        if got != CLUSTER:
            raise OSError(0, 'only %d bytes at %d' % (got, start))
        data = self._memory[:]
        return [value(self._volume, start // BLOCK + number,
                      data[number * BLOCK:(number + 1) * BLOCK])
                for number in range(CLUSTER_BLOCKS)]

    def write(self, number, cluster, first, count):
        """Write stamps on some blocks of a cluster, in one go."""
        start = cluster_offset(cluster) + first * BLOCK
        size = count * BLOCK
        self._memory[:size] = b''.join(
            stamp(self._volume, start // BLOCK + block, number)
            for block in range(count))
        with memoryview(self._memory) as view, view[:size] as part:
            if os.pwritev(self._file, [part], start) != size:
                raise OSError(0, 'short write at %d' % start)

    def flush(self):
        """Make durable what was acknowledged."""
        os.fdatasync(self._file)

    def close(self):
        """Close it."""
        os.close(self._file)


def say(*words):
    """One line for the ledger."""
    sys.stdout.write(' '.join(map(str, words)) + '\n')
    sys.stdout.flush()


def read_all(device, clusters, how):
    """Tell all that is there."""
    for cluster in range(clusters):
        say('r', cluster, *device.read(cluster))
    say('v', how)


class Guest:
    """Reads everything, then writes and reads at random until told to stop.

    :param first: number before the first write
    :param rate: requests a second
    """

    def __init__(self, path, volume, clusters, first, rate):
        self._path = path
        self._volume = volume
        self._clusters = clusters
        self._number = first
        self._rate = rate
        self._random = random.Random(first)
        # A guest comes back to the same places.
        self._hot = [self._random.randrange(clusters) for _ in range(8)]
        self._input = b''

    def run(self):
        """Live until the end of the input."""
        # What is in the page cache now must not be believed later.
        buffered = Device(self._path, self._volume, 'buffered')
        read_all(buffered, self._clusters, 'buffered')
        buffered.close()
        device = Device(self._path, self._volume, 'direct')
        read_all(device, self._clusters, 'direct')
        while self._go_on():
            dice = self._random.random()
            if dice < 0.2:
                cluster = self._place()
                say('r', cluster, *device.read(cluster))
            elif dice < 0.3:
                device.flush()
                say('f', self._number)
            else:
                self._write(device)
        device.flush()
        say('f', self._number)

    def _place(self):
        if self._random.random() < 0.5:
            return self._random.choice(self._hot)
        return self._random.randrange(self._clusters)

    def _write(self, device):
        count = self._random.choice((1, 1, 1, 2, 5, CLUSTER_BLOCKS))
        place = (self._place(),
                 self._random.randrange(CLUSTER_BLOCKS - count + 1), count)
        self._number += 1
        device.write(self._number, *place)
        say('a', self._number, *place)

    def _go_on(self):
        """Wait for the next turn; False when there is none."""
        pause = self._random.expovariate(self._rate)
        end = time.monotonic() + min(pause, 1)
        while True:
            left = max(0, end - time.monotonic())
            readable, _, _ = select.select([0], [], [], left)
            if not readable:
                return True
            piece = os.read(0, 4096)
            if not piece:
                return False
            self._take(piece)

    def _take(self, piece):
        *lines, self._input = (self._input + piece).split(b'\n')
        for line in lines:
            self._clusters = int(line.split()[1])
            # It is curious about what it got.
            self._hot[0] = self._clusters - 1
            say('s', self._clusters)


def main():
    """Run the program."""
    parser = argparse.ArgumentParser()
    parser.add_argument('what', choices=('live', 'read'))
    parser.add_argument('device')
    parser.add_argument('volume', type=uuid.UUID)
    parser.add_argument('clusters', type=int)
    parser.add_argument('--first', type=int, default=0)
    parser.add_argument('--rate', type=float, default=30)
    parser.add_argument('--how', choices=('direct', 'buffered'),
                        default='direct')
    options = parser.parse_args()
    try:
        if options.what == 'read':
            read_all(Device(options.device, options.volume, options.how),
                     options.clusters, options.how)
        else:
            Guest(options.device, options.volume, options.clusters,
                  options.first, options.rate).run()
    except OSError as error:
        say('e', '%s: %s' % (options.device, error))
        sys.exit(1)


if __name__ == '__main__':
    main()
