# SPDX-License-Identifier: Apache-2.0
"""The native helper on real kernels: ublk on the lab's own, NBD on Debian's.

A node alone, without a cloud. The move is between two logical volumes of the
node: what is tried here is the helper, not the way to the source.
"""

import json
import os
import pathlib
import random
import sys
import time
import unittest
import uuid

import testtools
from testtools import content

from lab import cloud as clouds
from lab import errors
from lab import kernel as kernels
from lab import layout
from lab import pieces

HYDRATOR = str(layout.REPOSITORY / 'hydrator' / 'target' / 'release'
               / 'localstor-hydrator')
RUNTIME = '/run/hydrator/volume'
GROUP = 'cinder-local'
THIN_GROUP = 'cinder-thin'
SIZE = 256 << 20
# Seconds
PATIENCE = 120
# Of the helper, under writers who remember; the soak has more.
KILLS = int(os.environ.get('LOCALSTOR_KILLS', '8'))


class HydratorTestCase(testtools.TestCase):
    """A move on a node of its own; subclasses say which kernel."""

    kernel = ''
    frontend = ''
    # What 16 MiB of zeros take up of a thin destination, in MiB
    space_of_zeros = 0

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        if not cls.kernel:
            raise unittest.SkipTest('only its subclasses are tests')
        try:
            kernels.named(cls.kernel)
        except errors.LabError as error:
            raise unittest.SkipTest(str(error))
        cls.cloud = clouds.Cloud(f'hydrator-{cls.frontend}')
        cls.addClassCleanup(cls.cloud.down)
        cls.cloud.up(nodes=1, kernel=cls.kernel, bare=True)
        cls.node = cls.cloud.node('node1')
        cls.node.run(['modprobe', '-q', 'nbd'], check=False)

    def setUp(self):
        super().setUp()
        self.move = str(uuid.uuid4())
        self.addCleanup(self.remove_volumes)
        for name, size in (('data', '256M'), ('metadata', '16M'),
                           ('source', '256M')):
            self.node.run(['lvcreate', '-qq', '-y', '-L', size, '-n', name,
                           GROUP])
        for name in ('metadata', 'data'):
            self.fill(name, '/dev/zero')
        self.fill('source', '/dev/urandom')
        self.starts = 0

        self.data = self.path('data')
        self.metadata = self.path('metadata')

    def remove_volumes(self):
        self.node.run(['lvremove', '-qq', '-y', GROUP, f'{THIN_GROUP}/data'],
                      check=False)

    @staticmethod
    def path(name):
        return f'/dev/{GROUP}/{name}'

    def shell(self, text, **arguments):
        return self.node.run(['bash', '-c', text], **arguments)

    def fill(self, name, source):
        # dd stops at the end of the volume, and calls that an error.
        self.node.run(['dd', f'if={source}', f'of={self.path(name)}', 'bs=1M',
                       'oflag=direct'], check=False)

    def checksum(self, name, skip=0):
        return self.checksum_of(self.path(name), skip)

    def checksum_of(self, path, skip=0):
        return self.shell(f'dd if={path} bs=1M skip={skip}'
                          ' iflag=direct status=none | sha256sum').stdout

    def make_thin_destination(self):
        """One that has no space yet, of a pool that zeroes."""
        self.node.run(['lvcreate', '-qq', '-y', '-V', '256M', '-n', 'data',
                       '--thinpool', f'{THIN_GROUP}/{THIN_GROUP}-pool'])
        self.data = f'/dev/{THIN_GROUP}/data'

    def space(self):
        """What a thin destination takes up, in MiB."""
        percent = self.node.run(
            ['lvs', '--noheadings', '-o', 'data_percent', self.data]).stdout
        return 256 * float(percent) / 100

    # The helper

    def start(self, *arguments):
        """Start a helper, and wait for its device."""
        self.begin(*arguments)
        return self.wait(lambda status: status['device'])['device']

    def begin(self, *arguments):
        """Start a helper; it lives on when the command has ended."""
        self.starts += 1
        command = [HYDRATOR, 'run', '--runtime', RUNTIME,
                   '--move', self.move, '--data', self.data,
                   '--metadata', self.metadata,
                   '--source', self.path('source'), '--new',
                   '--frontend', self.frontend, *arguments]
        if '--limit' not in arguments:
            command += ['--limit', '20M']
        self.shell(f'setsid {" ".join(command)} >> /tmp/hydrator.log 2>&1'
                   ' < /dev/null & echo $! > /tmp/hydrator.pid')
        if self.starts == 1:
            self.addCleanup(self.end)

    def kill(self):
        self.shell('kill -9 $(cat /tmp/hydrator.pid)')

    def devices(self):
        """The files of sysfs that stand for a device each."""
        return self.shell('ls -d /sys/class/ublk-char/ublkc*'
                          ' /sys/block/nbd*/pid 2> /dev/null',
                          check=False).stdout.split()

    def end(self):
        self.ask('abort', check=False)
        self.shell('kill -9 $(cat /tmp/hydrator.pid)', check=False)

    def ask(self, verb, *arguments, check=True):
        return self.node.run([HYDRATOR, verb, RUNTIME, *arguments],
                             check=check)

    def wait(self, wanted):
        """Its status when that is as wanted."""
        deadline = time.monotonic() + PATIENCE
        while True:
            answer = self.ask('status', check=False)
            if answer.returncode == 0:
                status = json.loads(answer.stdout)
                if wanted(status):
                    return status
            if time.monotonic() > deadline:
                log = self.shell('tail -20 /tmp/hydrator.log').stdout
                self.fail(f'{answer.stdout} {answer.stderr}\n{log}')
            time.sleep(0.2)

    # The guest

    def begin_load(self, device):
        """Write, flush and verify for some seconds."""
        self.begin_fio(device, '--rw=randwrite --bsrange=512-256k --iodepth=8'
                       ' --size=64M --verify=crc32c --verify_backlog=64'
                       ' --fsync=16 --runtime=8')

    def begin_reads(self, device):
        """Read, much at once, until the load is told to end."""
        self.begin_fio(device, '--rw=randread --bs=256k --iodepth=16'
                       ' --runtime=3600')

    def begin_fio(self, device, job):
        self.shell(
            f'setsid fio --name=guest --filename={device} --direct=1'
            f' --ioengine=io_uring {job} --time_based --output-format=json'
            ' --output=/tmp/fio.json'
            ' > /tmp/fio.log 2>&1 < /dev/null & echo $! > /tmp/fio.pid')
        self.addOnException(self.show_load)

    def show_load(self, _exc_info):
        found = self.shell('tail -n 50 /tmp/fio.log /tmp/fio.json'
                           ' /tmp/hydrator.log; dmesg | tail -n 20',
                           check=False)
        self.addDetail('guest and helper', content.text_content(found.stdout))

    def kill_under_load(self):
        self.shell('kill -0 $(cat /tmp/fio.pid)')
        self.kill_it()

    def kill_it(self):
        """Kill the process that serves, which may have a supervisor."""
        pid = self.wait(lambda status: status['device'])['pid']
        self.shell(f'kill -9 {pid}')

    def begin_pieces(self, device):
        """Let two dozen writers write and read back until they are told."""
        command = [os.path.realpath(sys.executable), '-ISE',
                   os.path.realpath(pieces.__file__), device,
                   self.path('source'), str(SIZE)]
        self.shell(f'setsid {" ".join(command)} > /tmp/pieces.json'
                   ' 2> /tmp/pieces.log < /dev/null &'
                   ' echo $! > /tmp/pieces.pid')
        self.addCleanup(self.shell, 'kill -9 $(cat /tmp/pieces.pid)',
                        check=False)

    def pieces_go_on(self):
        return not self.shell('kill -0 $(cat /tmp/pieces.pid)',
                              check=False).returncode

    def pieces_result(self):
        """What the writers say, when they have looked at everything."""
        self.shell('kill $(cat /tmp/pieces.pid); while kill -0'
                   ' $(cat /tmp/pieces.pid) 2> /dev/null;'
                   ' do sleep 0.2; done', timeout=PATIENCE, check=False)
        text = self.shell('cat /tmp/pieces.log /tmp/pieces.json').stdout
        self.addDetail('writers', content.text_content(text))
        return json.loads(text.splitlines()[-1])

    def swap_metadata(self, table):
        """Have the volume for metadata be something else from now on."""
        for step in (['load', '--table', table.strip()], ['resume']):
            self.node.run(['dmsetup', step[0], '--noudevsync', self.metadata,
                           *step[1:]])

    def make_slow_disk(self, size, latency):
        """A disk in memory on which each request takes its time.

        :param size: MiB
        :param latency: milliseconds
        :returns: its path
        """
        raise NotImplementedError

    def load_result(self):
        """What fio says of its job, when it has ended."""
        self.shell('while kill -0 $(cat /tmp/fio.pid) 2> /dev/null;'
                   ' do sleep 0.2; done', timeout=PATIENCE)
        text = self.shell('cat /tmp/fio.json').stdout
        return json.loads(text[text.index('{'):])['jobs'][0]

    def flushes_reach_it(self, device):
        name = pathlib.Path(device).name
        return self.shell(
            f'cat /sys/block/{name}/queue/write_cache').stdout.strip()


class _Moves:
    """What holds for every kernel and frontend."""

    def test_a_guest_that_verifies_survives_kills_in_mid_move(self):
        device = self.start()
        self.assertEqual('write back', self.flushes_reach_it(device))
        self.begin_load(device)
        self.ask('start')
        for _ in range(3):
            time.sleep(1)
            self.kill_under_load()
            self.assertEqual(device, self.start())

        result = self.load_result()

        self.assertEqual(0, result['error'])
        self.wait(lambda status: status['state'] == 'done')
        self.ask('finish')
        # What the guest has not written is as it was on the source.
        self.assertEqual(self.checksum('source', skip=64),
                         self.checksum('data', skip=64))
        checked = self.node.run([HYDRATOR, 'check', self.path('metadata')])
        self.assertIn('complete', checked.stdout)

    def test_a_kill_is_a_pause_of_less_than_two_seconds(self):
        # Its supervisor starts a successor.
        device = self.start('--detach')
        self.begin_load(device)
        self.ask('start')
        for _ in range(3):
            time.sleep(1)
            self.kill_under_load()

        result = self.load_result()

        self.assertEqual(0, result['error'])
        longest = max(result[kind]['lat_ns']['max']
                      for kind in ('read', 'write', 'sync'))
        self.assertLess(longest, 2e9)

    def test_no_read_fails_by_a_kill_while_it_is_answered(self):
        device = self.start('--detach')
        self.begin_reads(device)
        for _ in range(KILLS):
            time.sleep(0.5)
            self.kill_under_load()
        self.shell('kill -INT $(cat /tmp/fio.pid)')

        result = self.load_result()

        self.assertEqual(0, result['error'])

    def test_nothing_that_was_answered_is_lost_by_kills(self):
        # What the helper notes takes long, so that each kill comes upon many
        # writes whose data is on the disk and whose notes are not.
        self.metadata = self.make_slow_disk(16, 3)
        # Most blocks are written before they arrive.
        device = self.start('--detach', '--limit', '256K')
        self.ask('start')
        self.begin_pieces(device)
        moments = random.Random(self.move)
        for _ in range(KILLS):
            time.sleep(moments.uniform(0.5, 2.5))
            if not self.pieces_go_on():
                break
            self.kill_it()

        result = self.pieces_result()

        self.assertIsNone(result['wrong'], result)

    def test_what_was_answered_survives_a_metadata_disk_that_fails(self):
        device = self.start('--detach')
        table = self.node.run(['dmsetup', 'table', self.metadata]).stdout
        self.node.run(['dmsetup', 'suspend', '--nolockfs', self.metadata])
        self.shell('dd if=/dev/urandom of=/tmp/written bs=64k count=3'
                   f' status=none; dd if=/tmp/written of={device} bs=64k'
                   ' oflag=direct status=none', timeout=PATIENCE)

        # Only now the disk is asked for what the guest was answered by.
        self.swap_metadata(table.replace('linear', 'error'))
        self.wait(lambda status: status['state'] == 'broken')
        self.kill_it()
        self.shell('for _ in {1..100}; do'
                   f' grep -q "^localstor-hydrator: " {RUNTIME}/log && exit;'
                   ' sleep 0.1; done; exit 1')
        self.swap_metadata(table)
        self.wait(lambda status: status['device'])

        self.shell(f'dd if={device} bs=64k count=3 iflag=direct status=none'
                   ' | cmp - /tmp/written', timeout=PATIENCE)

    def test_a_move_that_is_verified_tells_that_everything_was_compared(self):
        device = self.start('--verify', 'full')
        self.begin_load(device)
        self.ask('start')

        self.assertEqual(0, self.load_result()['error'])
        status = self.wait(lambda status: status['state'] == 'done')

        self.assertEqual('full', status['verify'])
        # All that was copied; the guest wrote into the first 64 MiB only.
        self.assertEqual(status['copied'], status['verified'])
        self.assertGreaterEqual(status['verified'], 192 << 20)
        self.assertEqual((0, 0), (status['differences'],
                                  status['differing_blocks']))
        self.ask('finish')
        self.assertEqual(self.checksum('source', skip=64),
                         self.checksum('data', skip=64))

    def test_remote_blocks_read_as_the_source_and_nothing_is_copied_yet(self):
        device = self.start()

        seen = self.shell(f'dd if={device} bs=1M iflag=direct status=none'
                          ' | sha256sum').stdout

        self.assertEqual(self.checksum('source'), seen)
        status = self.wait(lambda status: True)
        self.assertEqual('starting', status['state'])
        self.assertEqual(0, status['local'])

    def test_a_thin_destination_takes_up_what_has_content(self):
        self.shell(f'dd if=/dev/zero of={self.path("source")} bs=1M seek=64'
                   ' count=192 oflag=direct')
        self.make_thin_destination()
        device = self.start('--detach', '--zeroed')
        self.ask('start')
        # Its successor does not know where the destination was written to.
        self.wait(lambda status: status['local'] > 32 << 20)
        self.kill_it()

        self.wait(lambda status: status['state'] == 'done')

        self.assertEqual(64, self.space())
        self.assertEqual(self.checksum('source'), self.checksum_of(device))
        self.node.run(['blkdiscard', '-o', '0', '-l', '16M', device])
        self.assertEqual(48, self.space())
        self.node.run(['blkdiscard', '-z', '-o', '16M', '-l', '16M', device])
        self.assertEqual(32 + self.space_of_zeros, self.space())
        self.node.run(['cmp', '-n', '32M', device, '/dev/zero'])
        self.ask('finish')
        self.assertEqual(self.checksum('source', skip=32),
                         self.checksum_of(self.data, skip=32))

    def test_discarded_and_zeroed_blocks_read_zeros(self):
        device = self.start()

        self.node.run(['blkdiscard', '-o', '0', '-l', '4M', device])
        self.node.run(['blkdiscard', '-z', '-o', '8M', '-l', '4M', device])

        for offset in ('0', '8M'):
            self.node.run(['cmp', '-n', '4M', '-i', f'{offset}:0', device,
                           '/dev/zero'])
        # And not what lies beside them.
        self.node.run(['cmp', '-n', '4M', '-i', '4M', device,
                       self.path('source')])

    def test_a_successor_takes_the_device_over_after_an_orderly_end(self):
        device = self.start()
        self.begin_load(device)
        time.sleep(1)

        self.shell('kill $(cat /tmp/hydrator.pid); while kill -0'
                   ' $(cat /tmp/hydrator.pid) 2> /dev/null;'
                   ' do sleep 0.1; done')

        self.assertEqual(device, self.start())
        self.assertEqual(0, self.load_result()['error'])

    def test_an_abort_leaves_no_device(self):
        device = self.start()

        self.ask('abort')

        size = self.shell(f'blockdev --getsize64 {device}', check=False)
        self.assertIn(size.stdout.strip(), ('', '0'))
        self.assertNotEqual(0, self.ask('status', check=False).returncode)

    def test_the_kernel_kills_others_when_memory_is_short(self):
        self.start()

        score = self.shell('cat /proc/$(cat /tmp/hydrator.pid)/oom_score_adj')

        self.assertEqual('-1000', score.stdout.strip())

    def test_kills_at_any_moment_of_the_start_leak_no_device(self):
        for delay in range(0, 400, 20):
            self.begin()
            time.sleep(delay / 1000)
            self.kill()

        self.start()

        self.assertEqual(1, len(self.devices()), self.devices())
        self.ask('abort')
        self.assertEqual([], self.devices())

    def test_a_device_that_nobody_has_recorded_is_taken_over(self):
        device = self.start()
        self.begin_load(device)
        self.kill()
        # As if it had been killed before it showed its device.
        self.node.run(['rm', f'{RUNTIME}/device'])

        self.assertEqual(device, self.start())

        self.assertEqual(0, self.load_result()['error'])

    def test_an_abort_without_a_helper_removes_a_device_without_a_record(self):
        self.start()
        self.kill()
        self.node.run(['rm', f'{RUNTIME}/device'])

        self.ask('abort')

        self.assertEqual([], self.devices())

    def test_a_move_is_not_finished_before_it_is_complete(self):
        self.start()

        refused = self.ask('finish', check=False)

        self.assertNotEqual(0, refused.returncode)
        self.assertIn('not complete', refused.stderr)
        self.wait(lambda status: status['device'])

    def test_a_second_helper_keeps_away(self):
        self.start()

        second = self.node.run(
            [HYDRATOR, 'check', self.path('metadata')], check=False)

        self.assertNotEqual(0, second.returncode)
        self.assertIn('in use', second.stderr)


class UblkTest(_Moves, HydratorTestCase):
    """ublk, on the lab's own kernel."""

    kernel = 'own'
    frontend = 'ublk'

    def make_slow_disk(self, size, latency):
        folder = '/sys/kernel/config/nullb/slow'
        options = {'size': size, 'memory_backed': 1, 'irqmode': 2,
                   'completion_nsec': latency * 1000000, 'cache_size': 1,
                   'hw_queue_depth': 256, 'power': 1}
        self.shell(f'mkdir {folder}; ' + '; '.join(
            f'echo {value} > {folder}/{key}'
            for key, value in options.items()) + '; udevadm settle')
        self.addCleanup(self.node.run, ['rmdir', folder])
        return '/dev/slow'


class NbdTest(_Moves, HydratorTestCase):
    """The kernel's NBD client, on Debian's kernel."""

    kernel = 'stock'
    frontend = 'nbd'
    # Linux 6.1 sends NBD zeros as data.
    space_of_zeros = 16

    def make_slow_disk(self, size, latency):
        # Not dm-delay, which counts in ticks of 10 ms there.
        self.node.run(['modprobe', 'scsi_debug', f'dev_size_mb={size}',
                       f'ndelay={latency * 1000000}'])
        # A helper that was killed keeps it until its last request has ended.
        self.addCleanup(self.shell, 'for _ in {1..100}; do rmmod scsi_debug'
                        ' && exit; sleep 0.1; done; exit 1')
        self.node.run(['udevadm', 'settle'])
        return '/dev/' + self.shell(
            'ls /sys/bus/pseudo/drivers/scsi_debug/adapter*/host*/target*/'
            '*/block').stdout.strip()
