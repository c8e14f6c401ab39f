# SPDX-License-Identifier: Apache-2.0
"""Many writers of pieces of blocks, who read back what was answered.

Runs inside a node and needs nothing but the standard library, as
:mod:`lab.stamps` does.  Each writer is a thread with blocks of 4 KiB of its
own.  It writes pieces of 512 bytes past the page cache, one at a time and
never two of a block at once, as a file system's log does; so it knows what
each piece must hold.  What was answered must be read from then on, whatever
happens to the program that serves the device, and what was never written must
read as the source.  Nothing is ever flushed: no power fails here.

On SIGTERM it reads all blocks once more.  The last line that it prints is a
JSON object::

    operations  how many reads and writes have ended
    blocks      on how many blocks something was written
    wrong       the first wrong piece in words, or an error, or null
"""

import argparse
import json
import mmap
import os
import random
import signal
import struct
import sys
import threading

PIECE = 512
BLOCK = 4096
PIECES = BLOCK // PIECE
# Writes of a block before a writer goes on to the next
TURNS = 16
# Place on the device and number of the write, all over the piece
_WORD = struct.Struct('<QQ')


def piece(offset, number):
    """What write `number` leaves at an offset, in bytes."""
    return _WORD.pack(offset, number) * (PIECE // _WORD.size)


def what_is(data, offset, source):
    """In words what a piece holds that does not hold what it should."""
    if data == source:
        return 'the source'
    place, number = _WORD.unpack_from(data)
    if data == piece(offset, number):
        return 'write %d' % number
    if data == piece(place, number):
        return 'write %d of offset %d' % (number, place)
    return 'nothing that was written: %s...' % data[:16].hex()


class Wrong(Exception):
    """Something else was read than what was answered."""


class Writer(threading.Thread):
    """Writes to blocks of its own, and remembers what is where."""

    def __init__(self, crew, blocks, seed):
        super().__init__()
        self._crew = crew
        self._blocks = blocks
        self._random = random.Random(seed)
        # Direct I/O wants aligned memory.
        self._memory = mmap.mmap(-1, BLOCK)
        # Numbers of the last writes, by block; 0 is the source.
        self.newest = {}
        self.operations = 0

    def run(self):
        try:
            while not self._crew.over.is_set():
                for block in self._blocks:
                    self._use(block)
                    if self._crew.over.is_set():
                        break
            for block in self.newest:
                self._check(block)
        except (Wrong, OSError) as error:
            self._crew.stop(str(error))

    def _use(self, block):
        """Write to a block some times, and look at it and at older ones."""
        newest = self.newest.setdefault(block, [0] * PIECES)
        for _ in range(TURNS):
            if self._crew.over.is_set():
                return
            self._write(block, newest, self._random.randrange(PIECES))
            self._check(block)
        self._check(self._random.choice(list(self.newest)))

    def _write(self, block, newest, index):
        number = newest[index] + 1
        offset = block * BLOCK + index * PIECE
        self._memory[:PIECE] = piece(offset, number)
        with memoryview(self._memory) as view, view[:PIECE] as part:
            if os.pwritev(self._crew.device, [part], offset) != PIECE:
                raise OSError(0, 'short write at %d' % offset)
        newest[index] = number
        self.operations += 1

    def _check(self, block):
        with memoryview(self._memory) as view:
            if os.preadv(self._crew.device, [view], block * BLOCK) != BLOCK:
                raise OSError(0, 'short read of block %d' % block)
        self.operations += 1
        found = self._memory[:]
        source = os.pread(self._crew.source, BLOCK, block * BLOCK)
        for index, number in enumerate(self.newest[block]):
            part = slice(index * PIECE, (index + 1) * PIECE)
            offset = block * BLOCK + part.start
            expected = piece(offset, number) if number else source[part]
            if found[part] != expected:
                raise Wrong('offset %d, after %d operations of this writer: '
                            'write %d was answered, read was %s' % (
                                offset, self.operations, number,
                                what_is(found[part], offset, source[part])))


class Crew:
    """All writers of a device."""

    def __init__(self, device, source, size, writers, seed):
        self.device = os.open(device, os.O_RDWR | os.O_DIRECT)
        self.source = os.open(source, os.O_RDONLY)
        self.over = threading.Event()
        self._wrong = None
        blocks = size // BLOCK
        self._writers = [
            Writer(self, range(number * blocks // writers,
                               (number + 1) * blocks // writers),
                   seed + number)
            for number in range(writers)]

    def stop(self, wrong=None):
        """End; the first reason counts."""
        self._wrong = self._wrong or wrong
        self.over.set()

    def work(self):
        """Write until told to stop, and tell how it went."""
        for writer in self._writers:
            writer.start()
        for writer in self._writers:
            writer.join()
        return {'operations': sum(one.operations for one in self._writers),
                'blocks': sum(len(one.newest) for one in self._writers),
                'wrong': self._wrong}


def main():
    """Run the program."""
    parser = argparse.ArgumentParser()
    parser.add_argument('device')
    parser.add_argument('source')
    parser.add_argument('size', type=int, help='bytes')
    parser.add_argument('--writers', type=int, default=24)
    parser.add_argument('--seed', type=int, default=1)
    options = parser.parse_args()
    crew = Crew(options.device, options.source, options.size,
                options.writers, options.seed)
    signal.signal(signal.SIGTERM, lambda number, frame: crew.stop())
    result = crew.work()
    print(json.dumps(result))
    sys.exit(1 if result['wrong'] else 0)


if __name__ == '__main__':
    main()
