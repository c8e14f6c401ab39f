# SPDX-License-Identifier: Apache-2.0
"""Snapshots with real LVM, of a volume that is written.

A node alone, without a cloud.  What makes the snapshots is the driver's code,
in a process of its own.
"""

import json
import sys
import time

import testtools

from lab import cloud as clouds
from lab import layout

# A guest that writes numbers in turn, each when the one before is on the disk,
# round and round.  So at any moment the blocks hold COUNT numbers in a row.
COUNT = 64
WRITER = '''
import mmap, os, sys
disk = os.open(sys.argv[1], os.O_WRONLY | os.O_DIRECT | os.O_SYNC)
block = mmap.mmap(-1, 4096)
number = 0
while not os.path.exists(sys.argv[2] + '.stop'):
    number += 1
    block[:8] = number.to_bytes(8, 'little')
    os.pwrite(disk, block, (number %% %(count)d) << 20)
    with open(sys.argv[2], 'w') as told:
        told.write('%%d ' %% number)
''' % {'count': COUNT}
READER = '''
import mmap, os, sys
disk = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECT)
block = mmap.mmap(-1, 4096)
for place in range(%(count)d):
    os.preadv(disk, [block], place << 20)
    print(int.from_bytes(block[:8], 'little'))
''' % {'count': COUNT}
TOLD = '/run/written'
# Calls of the driver's, in turn, on the volumes of a group
DRIVER = '''
import json, sys, types
from cinder_localstor.datapath import copies, snapshots, wipes
from cinder_localstor.node import commands, lvm, privileged
privileged.CONTEXT.set_client_mode(False)
name, kind, calls = sys.argv[1:]
configuration = types.SimpleNamespace(
    localstor_pool_limit=95, volume_clear='zero', volume_clear_size=0,
    volume_clear_ionice=None)
group = lvm.LVMVolumeGroup(name, kind, 'volume_group', configuration,
                           commands.Commands(300))
group._disks = group._read_disks()
node = types.SimpleNamespace(volumes=group)
for call, *arguments in json.loads(calls):
    if call == 'create':
        group.create(arguments[0], 256 << 20, frozenset(['owner=me']))
    elif call == 'snapshot':
        snapshots.Snapshots(node, configuration).create(copies.Copy(
            host='h', name=arguments[1], volume_id='1', snapshot_id='1',
            generation=1, size=256 << 20), arguments[0])
    elif call == 'delete':
        snapshots.Snapshots(node, configuration).delete(arguments[0])
        for wiped in wipes.Wipes(group).recorded():
            wipes.Wipes(group).wipe(wiped)
    elif call == 'extend':
        group.extend(arguments[0], 512 << 20)
'''
VOLUME, SNAPSHOT = 'volume-1', '_snapshot-1'
# Seconds
PATIENCE = 600


class MomentTest(testtools.TestCase):
    """Thick snapshots."""

    group, kind = 'cinder-local', 'default'

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.cloud = clouds.Cloud('snapshots')
        cls.addClassCleanup(cls.cloud.down)
        cls.cloud.up(nodes=1, disks='volatile', bare=True)
        cls.node = cls.cloud.node('node1')

    def setUp(self):
        super().setUp()
        self.addCleanup(self.node.run, ['sh', '-c', 'touch %s.stop; sleep 1; '
                                        'dmsetup remove handle; '
                                        'lvremove -qq -y %s/%s %s/%s' % (
                                            TOLD, self.group, SNAPSHOT,
                                            self.group, VOLUME)],
                        check=False, timeout=PATIENCE)

    def drive(self, *calls):
        self.node.run([sys.executable, '-W', 'ignore', '-c', DRIVER,
                       self.group, self.kind, json.dumps(calls)],
                      environment={'PYTHONPATH': str(layout.REPOSITORY)},
                      timeout=PATIENCE)

    def path(self, name):
        return '/dev/%s/%s' % (self.group, name)

    def write_numbers(self):
        self.node.run(['sh', '-c', 'rm -f {0} {0}.stop; dmsetup create '
                       'handle --table "0 524288 linear {1} 0"; '
                       'python3 -c "$0" /dev/mapper/handle {0} </dev/null '
                       '>/dev/null 2>&1 &'.format(TOLD, self.path(VOLUME)),
                       WRITER], timeout=PATIENCE)
        end = time.monotonic() + PATIENCE
        while self.written() <= COUNT and time.monotonic() < end:
            time.sleep(1)

    def written(self):
        # What is being written is empty for a moment.
        text = self.node.run(['sh', '-c', 'until grep " " %s; do :; done'
                              % TOLD], timeout=PATIENCE).stdout
        return int(text)

    def read(self, name):
        out = self.node.run(['python3', '-c', READER, self.path(name)],
                            timeout=PATIENCE).stdout
        return sorted(map(int, out.split()))

    def volumes(self):
        return self.node.run(['lvs', '--noheadings', '-o', 'lv_name',
                              self.group], timeout=PATIENCE).stdout.split()

    def test_h13_snapshot_is_one_moment_and_durable(self):
        self.drive(('create', VOLUME))
        self.write_numbers()
        before = self.written()
        self.drive(('snapshot', VOLUME, SNAPSHOT))
        numbers = self.read(SNAPSHOT)
        self.assertEqual(list(range(numbers[-1] - COUNT + 1,
                                    numbers[-1] + 1)), numbers)
        self.assertLessEqual(before, numbers[-1])
        self.assertLess(numbers[-1], self.written())
        self.assertEqual(numbers, self.read(SNAPSHOT))
        self.node.kill(lose='drop')
        self.node.start()
        self.node.run(['vgchange', '-qq', '--activate', 'y', self.group],
                      timeout=PATIENCE)
        self.assertEqual(numbers, self.read(SNAPSHOT))
        self.drive(('extend', VOLUME))
        self.assertEqual(numbers, self.read(SNAPSHOT))
        self.drive(('delete', SNAPSHOT))
        self.assertIn(VOLUME, self.volumes())
        self.assertNotIn('snapshot', ' '.join(self.volumes()))
        self.assertNotIn('snapshot', self.node.run(['dmsetup', 'ls']).stdout)


class ThinMomentTest(MomentTest):
    """Thin snapshots."""

    group, kind = 'cinder-thin', 'thin'
