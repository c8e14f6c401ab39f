# SPDX-License-Identifier: Apache-2.0
"""Volumes from snapshots, and clones, with real LVM, kernels and iSCSI."""

from lab import leftovers
from tests.lab import test_snapshots


class CopyTest(test_snapshots.SnapshotTestCase):
    """Of thick volumes."""

    def setUp(self):
        super().setUp()
        self.write(self.attachment)
        self.content = self.checksum(self.attachment)

    def make(self, size=1, **source):
        """A new volume of a snapshot or of a volume, as soon as it is there.
        """
        volume = self.user.request_volume('made', size, self.volume_type,
                                          **source)
        self.volumes.append(volume)
        self.wait_for('volume %s is made' % volume, lambda: (
            self.user.status(volume) == 'available'))
        return volume

    def arrived(self):
        """All that is left is what snapshots need."""
        return {volume: states for volume, states
                in leftovers.moves(self.cloud).items()
                if states not in ([], self.left)} == {}

    def assert_holds(self, volume, node):
        """A volume holds on a node what was written at first."""
        attachment = self.attach(volume, node)
        self.assertEqual(self.content, self.checksum(attachment))
        return attachment

    def test_volume_of_a_snapshot_where_its_volume_has_gone(self):
        snapshot = self.take()
        self.move_on()
        self.write(self.attachment)
        # Cinder makes it where the volume is.
        there = self.home(self.volume)
        volume = self.make(2, snapshot_id=snapshot)
        self.assertEqual(there.name, self.home(volume).name)
        attachment = self.assert_holds(volume, there)
        self.write(attachment, offset=1500)
        late = self.checksum(attachment, offset=1500)
        self.cut_power(there)
        there.start()
        self.cloud.wait_for_backends([there])
        self.wait_for('it has arrived', self.arrived)
        self.assertEqual(self.content, self.checksum(attachment))
        self.assertEqual(late, self.checksum(attachment, offset=1500))
        self.detach(attachment)
        # A second one goes back at once to where the snapshot lies.
        second = self.make(snapshot_id=snapshot)
        attachment = self.assert_holds(second, self.source)
        self.delete_snapshot(snapshot)
        self.wait_for('it has arrived', lambda: (
            not leftovers.moves(self.cloud)))
        self.assertEqual(self.content, self.checksum(attachment))

    def test_clone_of_a_volume_that_is_written(self):
        self.write_numbers()
        before = self.written()
        volume = self.make(source_volid=self.volume)
        after = self.written()
        self.wait_for('the guest goes on', lambda: (
            self.written() > after + test_snapshots.COUNT))
        attachment = self.attach(volume, self.source)
        numbers = self.read_numbers(attachment.device)
        self.assertEqual(list(range(numbers[-1] - test_snapshots.COUNT + 1,
                                    numbers[-1] + 1)), numbers)
        self.assertLessEqual(before, numbers[-1])
        self.assertLessEqual(numbers[-1], after)
        self.wait_for('it has arrived', self.arrived)
        self.assertEqual(numbers, self.read_numbers(attachment.device))

    def revert(self, snapshot):
        self.detach(self.attachment)
        self.user.revert(self.volume, snapshot)
        self.wait_for('the volume is reverted', lambda: (
            self.user.status(self.volume) == 'available'))

    def test_volume_is_reverted_wherever_it_is(self):
        snapshot = self.take()
        self.write(self.attachment)
        self.revert(snapshot)
        self.attachment = self.assert_holds(self.volume, self.source)
        # A second time, on another node, and before it has arrived
        self.detach(self.attachment)
        there = self.other(self.source)
        self.attachment = self.attach(self.volume, there)
        self.write(self.attachment)
        self.revert(snapshot)
        self.attachment = self.assert_holds(self.volume, there)
        self.write(self.attachment, offset=600)
        late = self.checksum(self.attachment, offset=600)
        self.cut_power(there)
        there.start()
        self.cloud.wait_for_backends([there])
        self.wait_for('it has arrived', self.arrived)
        self.assertEqual(self.content, self.checksum(self.attachment))
        self.assertEqual(late, self.checksum(self.attachment, offset=600))
        for node in self.nodes:
            self.assertEqual(0, self.localstor(node, 'status').returncode)
        self.delete_snapshot(snapshot)
        self.wait_for('nothing is kept', lambda: (
            not leftovers.moves(self.cloud)))
        self.assertEqual(self.content, self.checksum(self.attachment))

    def test_all_it_comes_from_is_deleted_while_it_arrives(self):
        snapshot = self.take()
        volumes = [self.make(snapshot_id=snapshot),
                   self.make(snapshot_id=snapshot),
                   self.make(source_volid=self.volume)]
        self.delete_snapshot(snapshot)
        self.detach(self.attachment)
        self.delete(self.volume)
        for volume in volumes:
            self.assert_holds(volume, self.source)
        self.wait_for('they have arrived', self.arrived)
        for node in self.nodes:
            self.assertEqual(0, self.localstor(node, 'status').returncode)
        # What is left is looked for when the test has ended.


class ThinCopyTest(CopyTest):
    """Of thin volumes, which share their blocks on one node."""

    volume_type = 'thin'
    group = 'cinder-thin'
    left = []
