# SPDX-License-Identifier: Apache-2.0
"""Snapshots of groups, of one moment, with real LVM and real guests."""

import json

from testtools import content

from tests.lab import base

# A guest that writes numbers to two disks in turn, each when the one before is
# on its disk.  It tells how far it is, and how long it had to wait at most.
WRITER = '''
import json, mmap, os, sys, time
*paths, told = sys.argv[1:]
disks = [os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_SYNC)
         for path in paths]
block = mmap.mmap(-1, 4096)
number, longest = 0, 0
while not os.path.exists(told + '.stop'):
    number += 1
    block[:8] = number.to_bytes(8, 'little')
    for disk in disks:
        began = time.monotonic()
        os.pwrite(disk, block, 0)
        longest = max(longest, time.monotonic() - began)
    with open(told + '.new', 'w') as file:
        json.dump([number, longest], file)
    os.rename(told + '.new', told)
'''
READER = '''
import mmap, os, sys
for path in sys.argv[1:]:
    disk = os.open(path, os.O_RDONLY | os.O_DIRECT)
    block = mmap.mmap(-1, 4096)
    os.preadv(disk, [block], 0)
    print(int.from_bytes(block[:8], 'little'))
'''
TOLD = '/run/written'
HANGS = '/run/hangs'
PROGRAM = '/usr/local/sbin/lvcreate'
# Stands for a command that waits for a disk
HANGING = '#!/bin/sh\necho $$ >%s\nexec sleep 600\n' % HANGS
# And for one that is slow
SLOW = ('#!/bin/sh\necho $$ >%s\nsleep 10\nexec /usr/sbin/lvcreate "$@"\n'
        % HANGS)
# Seconds that guests may have to wait, as the documentation says
LIMIT = 20
# A node of the lab is slow, and so is who looks.
SLACK = 10


class GroupTest(base.LabTestCase):
    """A group of two thick volumes that a guest writes in turn."""

    volume_type = 'local'
    lvm_group = 'cinder-local'

    def setUp(self):
        super().setUp()
        self.taken = []
        self.group = self.user.make_group(
            self.volume_type, consistent_group_snapshot_enabled='<is> True')
        self.addCleanup(self.delete_group)
        self.members = [self.user.request_volume(
            'of-a-user', 1, self.volume_type, group_id=self.group)
            for _number in range(2)]
        for volume in self.members:
            self.user.wait_for_status(volume, 'available')
        self.node = self.home(self.members[0])
        self.devices = [self.attach(volume, self.node).device
                        for volume in self.members]
        self.write_numbers()

    def delete_group(self):
        for attachment in tuple(self.attachments):
            self.detach(attachment)
        for taken in tuple(self.taken):
            self.delete_snapshot(taken)
        self.user.request_group_deletion(self.group)
        self.wait_for('the group is gone', lambda: (
            self.user.group(self.group) is None))
        self.user.delete_group_type()

    def write_numbers(self):
        self.node.run(['rm', '-f', TOLD, TOLD + '.stop'])
        self.node.run(['sh', '-c', 'python3 -c "$0" %s %s </dev/null '
                       '>/dev/null 2>&1 &' % (' '.join(self.devices), TOLD),
                       WRITER])
        self.addCleanup(self.stop_writing)
        self.wait_for('the guest writes', lambda: self.written()[0] > 10)

    def stop_writing(self):
        self.node.run(['touch', TOLD + '.stop'])
        self.wait_for('the guest stops', lambda: self.node.run(
            ['pgrep', '-f', TOLD], check=False).returncode)

    def written(self):
        """The last number that is on both disks, and the longest time, in
        seconds, that the guest has waited for one.
        """
        found = self.node.run(['cat', TOLD], check=False).stdout
        return tuple(json.loads(found)) if found else (0, 0)

    def wait_until_it_goes_on(self):
        before = self.written()[0]
        self.wait_for('the guest goes on', lambda: (
            self.written()[0] > before + 10))

    def request(self):
        taken = self.user.request_group_snapshot(self.group)
        self.taken.append(taken)
        return taken

    def wait_for_snapshot(self, taken, status):
        self.wait_for('snapshot %s is %s' % (taken, status), lambda: (
            self.user.group_snapshot_status(taken) == status))

    def delete_snapshot(self, taken):
        self.taken.remove(taken)
        self.user.request_group_snapshot_deletion(taken)
        self.wait_for_snapshot(taken, None)

    def read_snapshots(self):
        of = {row['volume_id']: row['id']
              for row in self.user.snapshots_in_detail()}
        return [int(line) for line in self.node.run(
            ['python3', '-c', READER, *(
                '/dev/%s/_snapshot-%s' % (self.lvm_group, of[volume])
                for volume in self.members)]).stdout.split()]

    def suspended(self):
        return [line for line in self.node.run(
            ['dmsetup', 'info', '-c', '--noheadings', '-o', 'name,suspended']
        ).stdout.split() if line.endswith('-handle:Suspended')]

    def test_snapshots_are_of_one_moment(self):
        for _time in range(3):
            before = self.written()[0]
            taken = self.request()
            self.wait_for_snapshot(taken, 'available')
            self.wait_until_it_goes_on()
            first, second = self.read_snapshots()
            self.assertIn(first - second, (0, 1))
            self.assertLessEqual(before, second)
            self.assertLess(first, self.written()[0])
            self.assertEqual([first, second], self.read_snapshots())
            self.delete_snapshot(taken)
        self.assertEqual([], self.suspended())
        self.assertLess(self.written()[1], LIMIT)
        self.addDetail('longest wait', content.text_content(
            '%.1f s' % self.written()[1]))

    # What must not leave guests waiting

    def let_lvcreate_hang(self, text=HANGING):
        self.node.run(['sh', '-c', "cat >%s <<'END'\n%sEND\nchmod +x %s"
                       % (PROGRAM, text, PROGRAM)])
        self.addCleanup(self.node.run, ['rm', '-f', PROGRAM, HANGS])

    def wait_until_it_hangs(self):
        self.wait_for('the command hangs', lambda: self.node.run(
            ['test', '-e', HANGS], check=False).returncode == 0)
        self.assertEqual(2, len(self.suspended()))

    def end_hanging(self):
        self.node.run(['sh', '-c', 'kill $(cat %s); rm %s %s' % (
            HANGS, HANGS, PROGRAM)], check=False)

    def test_guests_go_on_when_cinder_volume_is_killed(self):
        self.let_lvcreate_hang()
        taken = self.request()
        self.wait_until_it_hangs()
        self.node.service('cinder-volume').kill()
        self.wait_until_it_goes_on()
        self.assertEqual([], self.suspended())
        self.assertLess(self.written()[1], LIMIT + SLACK)
        self.end_hanging()
        self.node.service('cinder-volume').start()
        self.cloud.wait_for_backends([self.node])
        # Nobody may believe that it is of one moment.
        self.wait_for_snapshot(taken, 'error')
        self.delete_snapshot(taken)

    def test_guests_go_on_when_a_command_hangs(self):
        self.let_lvcreate_hang()
        taken = self.request()
        self.wait_until_it_hangs()
        self.wait_until_it_goes_on()
        self.assertEqual([], self.suspended())
        self.assertLess(self.written()[1], LIMIT + SLACK)
        self.end_hanging()
        self.wait_for_snapshot(taken, 'error')
        self.delete_snapshot(taken)
        taken = self.request()
        self.wait_for_snapshot(taken, 'available')

    def test_guests_go_on_when_the_guard_is_killed(self):
        self.let_lvcreate_hang(SLOW)
        taken = self.request()
        self.wait_until_it_hangs()
        self.node.run(['pkill', '-KILL', '-f', 'node/suspension.py'])
        self.wait_until_it_goes_on()
        self.assertEqual([], self.suspended())
        self.wait_for_snapshot(taken, 'error')
        self.assertIn('could not be kept waiting', self.log_of(self.node))
        self.delete_snapshot(taken)


class ThinGroupTest(GroupTest):
    """The same with thin volumes."""

    volume_type = 'thin'
    lvm_group = 'cinder-thin'
