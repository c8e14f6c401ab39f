# SPDX-License-Identifier: Apache-2.0

from lab import leftovers
from tests.lab import base


class AbandonTest(base.LabTestCase):
    """`cinder-localstor abandon`, when a node is lost for good."""

    def setUp(self):
        super().setUp()
        self.volume = self.create()
        self.source = self.home(self.volume)
        self.destination = self.other(self.source)

    def abandon(self, node, *arguments):
        move, = (row['id'] for row in self.user.volumes()
                 if row['id'] != self.volume)
        return self.localstor(node, 'abandon', move, *arguments)

    def abandon_when_the_other_node_counts_as_down(self, node, *arguments):
        self.wait_for('%s may go on alone' % node.name,
                      lambda: self.abandon(node, *arguments).returncode == 0)

    def assert_left_alone(self, node):
        """The lost node does not use its copy when it comes back."""
        node.start()
        self.wait_for('%s tells of its copy' % node.name,
                      lambda: 'volume %s, which lives elsewhere or is '
                      'deleted' % self.volume in self.log_of(node))
        self.assertEqual([], [name for name in self.lines(
            node, 'dmsetup', 'ls') if name.endswith('-handle')])
        status = self.localstor(node, 'status', '-f', 'json').stdout
        left = self.lines(node, 'lvs', '--noheadings', '--options',
                          'lv_name', 'cinder-local')
        self.assertNotEqual([], left)
        for name in left:
            self.assertIn(name, status)
        # Thick snapshots go with what they lie on.
        node.run(['lvremove', '--yes', *('cinder-local/' + name
                                         for name in left)])
        # That of a source may have come to the disk, or not.
        node.run(['iscsiadm', '-m', 'node', '-o', 'delete'], check=False)

    def test_source_is_lost_when_all_has_arrived(self):
        moved = self.attach(self.volume, self.destination)
        self.hold_in_mid_move(moved)
        self.assertIn('both are up',
                      self.abandon(self.destination).stderr)
        self.source.service('cinder-volume').kill()
        self.let_go()
        self.wait_for('the volume stands alone',
                      lambda: not self.arrival(moved))
        self.write(moved)
        content = self.checksum(moved)
        self.cut_power(self.source)
        self.abandon_when_the_other_node_counts_as_down(self.destination)
        self.wait_until_arrived(moved)
        self.assertEqual(content, self.checksum(moved))
        self.assert_left_alone(self.source)

    def test_destination_is_lost_before_the_guest_came(self):
        first = self.attach(self.volume, self.source)
        self.write(first)
        content = self.checksum(first)
        second = self.user.attach_second(first, self.destination)
        self.attachments.append(second)
        self.cut_power(self.destination)
        self.wait_for('the destination counts as down',
                      lambda: '--written-is-lost' in self.abandon(
                          self.source).stderr)
        self.abandon_when_the_other_node_counts_as_down(
            self.source, '--written-is-lost')
        self.detach(second)
        self.wait_for('the move has ended',
                      lambda: len(self.user.volumes()) == 1)
        self.assertEqual(self.source.name, self.home(self.volume).name)
        self.assertEqual(content, self.checksum(first))
        self.write(first)
        self.assert_left_alone(self.destination)

    def test_destination_is_lost_in_mid_move(self):
        first = self.attach(self.volume, self.source)
        self.write(first)
        content = self.checksum(first)
        self.detach(first)
        # LVM extends no copy that has one, unless nobody has that open.
        snapshot = self.user.request_snapshot(self.volume)
        self.wait_for_snapshot(snapshot, 'available')
        moved = self.attach(self.volume, self.destination)
        self.hold_in_mid_move(moved)
        self.write(moved)
        self.user.extend_volume(self.volume, 2)
        self.cut_power(self.destination)
        self.held.clear()
        self.wait_for('the destination counts as down',
                      lambda: '--written-is-lost' in self.abandon(
                          self.source).stderr)
        host = self.destination.name + '@local'
        self.disable(host)
        self.wait_for('it goes back', lambda: self.localstor(
            self.source, 'lost', host, '--written-is-lost').returncode == 0)
        self.wait_for('the move has ended',
                      lambda: len(self.user.volumes()) == 1)
        # Its server is evacuated to where it is by now.
        self.detach(moved)
        back = self.attach(self.volume, self.source)
        self.assertEqual(content, self.checksum(back))
        self.write(back, offset=1500)
        self.assertEqual(str(2 << 30), self.source.run(
            ['blockdev', '--getsize64', back.device]).stdout.strip())
        self.user.request_snapshot_deletion(snapshot)
        self.wait_for_snapshot(snapshot, None)
        self.assert_left_alone(self.destination)

    def test_snapshots_and_volumes_go_with_a_lost_node(self):
        moved = self.attach(self.volume, self.source)
        snapshot = self.user.request_snapshot(self.volume)
        self.wait_for_snapshot(snapshot, 'available')
        self.detach(moved)
        moved = self.attach(self.volume, self.destination)
        self.wait_for('all has arrived but what the snapshot lies on',
                      lambda: leftovers.moves(self.cloud) == {
                          self.volume: ['keeping']})
        self.detach(moved)
        lost = self.create(node=self.source)
        self.cut_power(self.source)
        host = self.source.name + '@local'
        self.disable(host)
        self.wait_for('the source counts as down', lambda: self.localstor(
            self.destination, 'lost', host).returncode == 0)
        given_up = self.localstor(self.destination, 'lost', host,
                                  '--give-up-volumes')
        self.assertEqual((0, ''), (given_up.returncode, given_up.stderr))
        self.assertIn(lost, given_up.stdout)
        self.wait_for_snapshot(snapshot, 'error')
        self.user.request_snapshot_deletion(snapshot)
        self.wait_for_snapshot(snapshot, None)
        for volume in (lost, self.volume):
            self.delete(volume)
        self.assert_left_alone(self.source)
