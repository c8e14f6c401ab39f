# SPDX-License-Identifier: Apache-2.0

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
            node.run(['lvremove', '--yes', 'cinder-local/' + name])

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
