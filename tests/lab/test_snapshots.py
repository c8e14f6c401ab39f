# SPDX-License-Identifier: Apache-2.0
"""Snapshots with real LVM: of a volume in use, and of one that moves on."""

import dataclasses

from lab import leftovers
from tests.lab import base

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


class SnapshotTestCase(base.LabTestCase):
    """A volume with a guest, of which snapshots are taken: thick ones."""

    volume_type = 'local'
    group = 'cinder-local'
    size = 1
    # What becomes of the move of a volume that has snapshots
    left = ['keeping']

    def setUp(self):
        super().setUp()
        self.snapshots = []
        self.addCleanup(self.delete_snapshots)
        self.volume = self.create(self.size, self.volume_type)
        self.source = self.home(self.volume)
        self.attachment = self.attach(self.volume, self.source)

    def take(self):
        snapshot = self.user.request_snapshot(self.volume)
        self.snapshots.append(snapshot)
        self.wait_for_snapshot(snapshot, 'available')
        return snapshot

    def delete_snapshot(self, snapshot):
        self.snapshots.remove(snapshot)
        self.user.request_snapshot_deletion(snapshot)
        self.wait_for_snapshot(snapshot, None)

    def delete_snapshots(self):
        for snapshot in list(self.snapshots):
            self.delete_snapshot(snapshot)

    # The guest

    def write_numbers(self):
        self.source.run(['rm', '-f', TOLD, TOLD + '.stop'])
        self.source.run(['sh', '-c', 'python3 -c "$0" %s %s </dev/null '
                         '>/dev/null 2>&1 &' % (self.attachment.device, TOLD),
                         WRITER])
        self.addCleanup(self.stop_writing)
        self.wait_for('the guest has been round once',
                      lambda: self.written() > COUNT)

    def written(self):
        told = []

        def tells():
            # What is being written is empty for a moment.
            text = self.source.run(['cat', TOLD], check=False).stdout
            told.extend([int(text)] if text.endswith(' ') else [])
            return told
        self.wait_for('the guest tells how far it is', tells)
        return told[0]

    def stop_writing(self):
        self.source.run(['touch', TOLD + '.stop'])
        self.wait_for('the guest stops', lambda: self.source.run(
            ['pgrep', '-f', TOLD], check=False).returncode)

    def read_snapshot(self, snapshot):
        return self.read_numbers('/dev/%s/_snapshot-%s' % (self.group,
                                                           snapshot))

    def assert_in_a_row(self, numbers):
        self.assertEqual(list(range(numbers[-1] - COUNT + 1,
                                    numbers[-1] + 1)), numbers)

    def read_numbers(self, device):
        out = self.source.run(['python3', '-c', READER, device]).stdout
        return sorted(map(int, out.split()))

    def move_on(self):
        self.detach(self.attachment)
        self.attachment = self.attach(self.volume, self.other(self.source))
        self.wait_for('the volume has arrived', lambda: (
            leftovers.moves(self.cloud).get(self.volume, []) == self.left))


class SnapshotTest(SnapshotTestCase):
    """Thick snapshots."""

    def test_h13_snapshot_is_one_moment_of_a_volume_that_is_written(self):
        self.write_numbers()
        before = self.written()
        snapshot = self.take()
        self.wait_for('the guest goes on', lambda: (
            self.written() > before + 2 * COUNT))
        after = self.written()
        numbers = self.read_snapshot(snapshot)
        self.assert_in_a_row(numbers)
        self.assertLessEqual(before, numbers[-1])
        self.assertLess(numbers[-1], after)
        # It is durable, as all that Cinder was told of.
        self.cut_power(self.source)
        self.source.start()
        self.assertEqual(numbers, self.read_snapshot(snapshot))
        self.move_on()
        self.assertEqual(numbers, self.read_snapshot(snapshot))
        for node in self.nodes:
            self.assertEqual(0, self.localstor(node, 'status').returncode)
        # Cinder asks the node that the volume is on now.
        self.delete_snapshot(snapshot)
        self.wait_for('the move has ended', lambda: (
            not leftovers.moves(self.cloud)))

    def test_deletion_waits_for_the_node_that_has_the_snapshot(self):
        self.write(self.attachment)
        content = self.checksum(self.attachment)
        snapshot = self.take()
        self.move_on()
        self.source.service('cinder-volume').stop()
        self.wait_for('its service counts as down', lambda: not self.is_up())
        self.user.request_snapshot_deletion(snapshot)
        self.wait_for('it is refused', lambda: (
            'Snapshot %s lies on %s' % (snapshot, self.source.name)
            in self.log_of(self.attachment.node)))
        self.wait_for_snapshot(snapshot, 'available')
        self.source.service('cinder-volume').start()
        self.cloud.wait_for_backends([self.source])
        self.delete_snapshot(snapshot)
        self.assertEqual(content, self.checksum(self.attachment))

    def is_up(self):
        [service] = self.cloud.volume_api.get('/os-services?host=%s@%s' % (
            self.source.name, self.volume_type)).json()['services']
        return service['state'] == 'up'

    def test_volume_with_a_snapshot_grows(self):
        self.write(self.attachment)
        content = self.checksum(self.attachment)
        snapshot = self.take()
        self.detach(self.attachment)
        self.user.extend_volume(self.volume, 2)
        self.attachment = self.attach(self.volume, self.source)
        self.write(self.attachment, offset=1500)
        self.assertEqual(content, self.checksum(self.attachment))
        self.delete_snapshot(snapshot)
        self.assertEqual(content, self.checksum(self.attachment))


class RoomTest(SnapshotTestCase):
    """A thick snapshot is never full, or is not made."""

    def setUp(self):
        super().setUp()
        self.write(self.attachment)
        self.content = self.checksum(self.attachment)

    def test_all_of_the_volume_changes(self):
        snapshot = self.take()
        self.write(self.attachment, size=self.size * 1024)
        device = '/dev/%s/_snapshot-%s' % (self.group, snapshot)
        self.assertEqual(self.content, self.checksum(dataclasses.replace(
            self.attachment, connection={'device_path': device})))

    def test_group_without_so_much_room(self):
        self.fill(self.source, self.group, 700)
        snapshot = self.user.request_snapshot(self.volume)
        self.snapshots.append(snapshot)
        self.wait_for_snapshot(snapshot, 'error')
        self.assertIn("that '_snapshot-%s' needs" % snapshot,
                      self.log_of(self.source))
        self.write(self.attachment, size=self.size * 1024)


class ThinSnapshotTest(SnapshotTest):
    """Thin snapshots, which need no origin."""

    volume_type = 'thin'
    group = 'cinder-thin'
    left = []


class ArrivingSnapshotTest(SnapshotTestCase):
    """Snapshots of a volume that a guest writes while it arrives."""

    def setUp(self):
        super().setUp()
        self.write_numbers()
        self.stop_writing()
        self.detach(self.attachment)
        self.attachment = self.attach(self.volume, self.other(self.source))
        self.source = self.attachment.node
        self.hold_in_mid_move(self.attachment)
        self.write_numbers()

    def handle(self, snapshot):
        return '/dev/mapper/_snapshot-%s-handle' % snapshot

    def is_there(self, device):
        return self.source.run(['test', '-b', device],
                               check=False).returncode == 0

    def read_snapshot(self, snapshot):
        if self.is_there(self.handle(snapshot)):
            return self.read_numbers(self.handle(snapshot))
        self.assertLess(len(self.moves()), 2, 'it arrives, and is not served')
        return super().read_snapshot(snapshot)

    def moves(self):
        return leftovers.moves(self.cloud).get(self.volume, [])

    def wait_until_served(self, snapshot):
        self.wait_for('the snapshot is there', lambda: (
            self.is_there(self.handle(snapshot)) or len(self.moves()) < 2))

    def test_h13_snapshot_is_one_moment_and_arrives_with_its_volume(self):
        before = self.written()
        snapshot = self.take()
        self.assertIsNotNone(self.arrival(self.attachment))
        numbers = self.read_snapshot(snapshot)
        self.wait_for('the guest goes on', lambda: (
            self.written() > before + 2 * COUNT))
        after = self.written()
        self.assert_in_a_row(numbers)
        self.assertLessEqual(before, numbers[-1])
        self.assertLess(numbers[-1], after)
        self.assertEqual(numbers, self.read_snapshot(snapshot))
        self.cut_power(self.source)
        self.source.start()
        self.wait_for_handle(self.attachment)
        self.wait_until_served(snapshot)
        self.assertEqual(numbers, self.read_snapshot(snapshot))
        self.wait_until_arrived(self.attachment)
        self.wait_for('the moves have ended', lambda: not self.moves())
        self.assertFalse(self.is_there(self.handle(snapshot)))
        self.assertEqual(numbers, self.read_snapshot(snapshot))
        for node in self.nodes:
            self.assertEqual(0, self.localstor(node, 'status').returncode)

    def test_volume_of_it_is_usable_at_once_on_another_node(self):
        snapshot = self.take()
        numbers = self.read_snapshot(snapshot)
        attachment = self.make(self.other(self.source), snapshot_id=snapshot)
        self.assertEqual(numbers, self.read_volume(attachment))
        self.delete_snapshot(snapshot)
        self.assert_all_arrives()
        self.assertEqual(numbers, self.read_volume(attachment))
        self.detach(attachment)

    def test_clone_is_one_moment_too(self):
        before = self.written()
        attachment = self.make(self.source, source_volid=self.volume)
        after = self.written()
        numbers = self.read_volume(attachment)
        self.assert_in_a_row(numbers)
        self.assertLessEqual(before, numbers[-1])
        self.assertLess(numbers[-1], after)
        self.assert_all_arrives()
        self.assertEqual(numbers, self.read_volume(attachment))
        self.detach(attachment)

    def make(self, node, **source):
        """A volume of a snapshot or a volume, attached."""
        made = self.user.request_volume('made', self.size, self.volume_type,
                                        **source)
        self.volumes.append(made)
        self.user.wait_for_status(made, 'available')
        return self.attach(made, node)

    def read_volume(self, attachment):
        out = attachment.node.run(['python3', '-c', READER,
                                   attachment.device]).stdout
        return sorted(map(int, out.split()))

    def assert_all_arrives(self):
        # dm-clone copies nothing as long as a guest writes.
        self.stop_writing()
        self.let_go()
        self.wait_for('all moves have ended', lambda: (
            not leftovers.moves(self.cloud)))


class ThinArrivingSnapshotTest(ArrivingSnapshotTest):
    """The same with thin volumes."""

    volume_type = 'thin'
    group = 'cinder-thin'
