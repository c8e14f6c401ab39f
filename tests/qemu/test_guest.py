# SPDX-License-Identifier: Apache-2.0
"""A Linux guest of QEMU's on a disk that the native helper serves.

The move is between files of this machine. QEMU translates each instruction, so
that no KVM is needed.
"""

import hashlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import tempfile
import time
import unittest
import uuid

import testtools

from lab import boot_image
from lab import layout
from lab import shell_image
from tests.qemu import machine as machines

_TARGET = pathlib.Path(os.environ.get('CARGO_TARGET_DIR')
                       or layout.REPOSITORY / 'hydrator' / 'target')
HYDRATOR = _TARGET / 'release' / 'localstor-hydrator'
MIB = 1 << 20
SIZE = 64
WRITERS = 4
# Each overwrites one of the first MiB all the time; a reader reads the rest.
WRITTEN = WRITERS
# Seconds
PATIENCE = 60

# Sizes and places are in MiB. What bypasses the guest's cache has to come from
# the disk.
_FUNCTIONS = """
sum() {  # place, size
    dd if=/dev/vda bs=1M skip=$1 count=$2 iflag=direct 2> /dev/null |
        md5sum | cut -d ' ' -f 1
}
pattern() {  # text, size
    yes "$1" | head -c $(($2 << 20))
}
"""

_READ = 'say $(sum 0 64)\n'

_WRITE = """
say $(ls /sys/block/vda/mq | wc -l)
say $(sum 0 64)
pattern cached 4 | dd of=/dev/vda bs=64k seek=160 conv=notrunc,fsync
pattern direct 1 > /pattern
dd if=/pattern of=/dev/vda bs=1M seek=40 oflag=direct conv=notrunc,fsync
pattern small 1 | head -c 512 > /pattern
dd if=/pattern of=/dev/vda bs=512 seek=100001 oflag=direct conv=notrunc,fsync
say $(sum 0 64)
"""

# Writers and a reader go on until somebody types at the console. Each says
# what it has done in a round; whatever goes wrong it says, too.
_LOAD = """
write() {  # a writer's number
    round=0
    while [ ! -e /end ]; do
        round=$((round + 1))
        pattern "$1 $round" 1 > /pattern-$1
        dd if=/pattern-$1 of=/dev/vda bs=256k seek=$(($1 * 4)) \
            oflag=direct conv=notrunc,fsync 2> /error-$1 ||
            say error: $(cat /error-$1)
        dd if=/dev/vda bs=256k skip=$(($1 * 4)) count=4 iflag=direct \
            2> /dev/null | cmp - /pattern-$1 || say error: lost $1 $round
        say wrote $1 $round
    done
}
read_all() {
    while [ ! -e /end ]; do
        place=WRITTEN
        for expected in SUMS; do
            [ "$(sum $place 4)" = $expected ] || say error: read at $place
            place=$((place + 4))
            sleep 0.5
        done
    done
}
for writer in 0 1 2 3; do write $writer & done
read_all &
( read line < /dev/console; touch /end ) &
wait
dmesg | grep -i 'error' | while read line; do say error: $line; done
say $(sum 0 64)
"""


def checksum(content):
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def pattern(text, size):
    """What the guest's function of that name makes."""
    line = f'{text}\n'.encode()
    return (line * (size // len(line) + 1))[:size]


def rounds(said):
    """How many rounds each writer has done, of those that have done some."""
    return {int(line.split()[1]): int(line.split()[2]) for line in said
            if line.startswith('wrote')}


class GuestTest(testtools.TestCase):

    image: boot_image.Image

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        if shutil.which(machines.QEMU) is None:
            raise unittest.SkipTest(f'there is no {machines.QEMU}')
        cls.image = shell_image.fetched()

    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix='localstor-qemu-'))
        self.addCleanup(shutil.rmtree, self.folder)
        self.runtime = self.folder / 'runtime'
        self.move = str(uuid.uuid4())
        self.source = os.urandom(SIZE * MIB)
        (self.folder / 'source').write_bytes(self.source)
        # Another tenant's, which nobody must see.
        (self.folder / 'data').write_bytes(b'\xaa' * (SIZE * MIB))
        (self.folder / 'metadata').write_bytes(bytes(16 * MIB))
        self.addCleanup(self.end)
        self.call('run', '--detach', '--runtime', self.runtime,
                  '--move', self.move, '--new',
                  '--frontend', 'vhost-user-blk', '--limit', '2M',
                  '--minimum', '1M',
                  *(f'--{name}={self.folder / name}'
                    for name in ('data', 'metadata', 'source')))

    # The helper

    def call(self, *arguments, check=True):
        done = subprocess.run(
            [HYDRATOR, *arguments], capture_output=True, text=True,
            stdin=subprocess.DEVNULL, timeout=2 * PATIENCE)
        if check and done.returncode:
            self.fail(f'{arguments}: {done.stderr}')
        return done

    def end(self):
        """Leave no process, whatever has happened."""
        deadline = time.monotonic() + PATIENCE
        # A successor that is just starting can't be asked.
        while self.runtime.exists():
            answer = self.call('abort', self.runtime, check=False)
            if time.monotonic() > deadline:
                self.fail(f'A helper is left: {answer.stderr} {self.log()}')
            time.sleep(0.1)

    def wait(self, wanted):
        """Its status when that is as wanted."""
        deadline = time.monotonic() + PATIENCE
        while True:
            answer = self.call('status', self.runtime, check=False)
            if answer.returncode == 0:
                status = json.loads(answer.stdout)
                if wanted(status):
                    return status
            if time.monotonic() > deadline:
                self.fail(f'{answer.stdout} {answer.stderr} {self.log()}')
            time.sleep(0.1)

    def kill(self, delay=None):
        """Kill the serving process; its successor serves when it returns.

        :param delay: let requests gather before, and take it so many seconds
            after they can be seen
        """
        pid = self.wait(lambda status: status['device'])['pid']
        if delay is not None:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(1)
            os.kill(pid, signal.SIGCONT)
            time.sleep(delay)
        os.kill(pid, signal.SIGKILL)
        self.wait(lambda status: status['pid'] != pid and status['device'])

    def log(self):
        return (self.runtime / 'log').read_text()

    def carried_out_again(self):
        """Requests that successors have found unanswered."""
        return sum(int(count) for count in re.findall(
            r'carried out again, as not answered before: (\d+)', self.log()))

    # The guest

    def boot(self, work):
        folder = pathlib.Path(tempfile.mkdtemp(dir=self.folder))
        machine = machines.Machine(folder, self.image, self.runtime / 'vhost',
                                   _FUNCTIONS + work)
        self.addCleanup(machine.kill)
        return machine

    def boot_load(self):
        """A guest that writes and verifies until it is told to end."""
        sums = [checksum(self.source[place * MIB:][:4 * MIB])
                for place in range(WRITTEN, SIZE, 4)]
        return self.boot(_LOAD.replace('WRITTEN', str(WRITTEN))
                         .replace('SUMS', ' '.join(sums)))

    def wait_for_rounds(self, machine):
        """Each writer has ended a round since."""
        before = rounds(machine.said())
        machine.wait(lambda said: all(
            rounds(said).get(writer, 0) > before.get(writer, 0)
            for writer in range(WRITERS)))

    def end_load(self, machine):
        """What the disk must hold, when the guest has powered off."""
        machine.tell('end')
        said = machine.ended()
        self.assertEqual([], [line for line in said if 'error' in line])
        expected = b''.join(pattern(f'{writer} {done}', MIB)
                            for writer, done in sorted(rounds(said).items()))
        expected += self.source[WRITTEN * MIB:]
        self.assertEqual(checksum(expected), said[-1])
        return expected

    def test_guest_reads_the_source_and_what_was_written(self):
        expected = bytearray(self.source)
        for place, content in (
                (10 * MIB, pattern('cached', 4 * MIB)),
                (40 * MIB, pattern('direct', MIB)),
                (100001 * 512, pattern('small', 512))):
            expected[place:place + len(content)] = content
        said = self.boot(_WRITE).ended()
        self.assertEqual([str(machines.PROCESSORS), checksum(self.source),
                          checksum(expected)], said)
        said = self.boot(_READ).ended()
        self.assertEqual([checksum(expected)], said)

    def test_guest_sees_no_error_when_the_helper_is_killed(self):
        machine = self.boot_load()
        # Too early or too late there is nothing unanswered.
        for milliseconds in range(20):
            self.wait_for_rounds(machine)
            self.kill(milliseconds / 1000)
            if milliseconds >= 2 and self.carried_out_again():
                break
        self.wait_for_rounds(machine)
        self.assertGreater(self.carried_out_again(), 0)
        expected = self.end_load(machine)
        self.assertEqual([checksum(expected)], self.boot(_READ).ended())

    def test_guest_sees_no_error_while_the_disk_arrives(self):
        machine = self.boot_load()
        self.wait_for_rounds(machine)
        self.call('start', self.runtime)
        self.wait(lambda status: status['copied'])
        self.kill()
        self.assertNotEqual('done', self.wait(bool)['state'])
        self.wait_for_rounds(machine)
        self.call('throttle', self.runtime)
        self.wait(lambda status: status['state'] == 'done')
        self.wait_for_rounds(machine)
        expected = self.end_load(machine)
        self.call('finish', self.runtime)
        report = self.call('check', self.folder / 'metadata').stdout
        self.assertIn(': complete.', report)
        arrived = (self.folder / 'data').read_bytes()
        # Not themselves: they are too long to be shown.
        self.assertEqual(checksum(expected), checksum(arrived))
