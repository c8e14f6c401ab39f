# SPDX-License-Identifier: Apache-2.0

from lab import configuration
from tests.lab import base


class DrainTest(base.LabTestCase):
    """`cinder-localstor drain`, before a node is replaced."""

    def setUp(self):
        super().setUp()
        self.node = self.nodes[0]

    def named_on(self, node):
        """Names of the volumes' copies in both groups of a node."""
        return [name for group in ('cinder-local', 'cinder-thin')
                for name in self.lines(node, 'lvs', '--noheadings',
                                       '--options', 'lv_name', group)
                if name.startswith('volume-')]

    def create_written(self, volume_type):
        """A volume of the node; its id, and the checksum of what it holds."""
        volume = self.create(volume_type=volume_type, node=self.node)
        attachment = self.attach(volume, self.node)
        self.write(attachment)
        content = self.checksum(attachment)
        self.detach(attachment)
        return volume, content

    def test_node_is_emptied_but_for_what_an_instance_has(self):
        written = [self.create_written(backend)
                   for backend in configuration.BACKENDS]
        used = self.create(node=self.node)
        attachment = self.attach(used, self.node)
        refused = self.localstor(self.node, 'drain')
        self.assertEqual(1, refused.returncode)
        self.assertIn('--disable', refused.stderr)
        for backend in configuration.BACKENDS:
            self.disable('%s@%s' % (self.node.name, backend))

        drained = self.localstor(self.node, 'drain')
        self.assertEqual((1, ''), (drained.returncode, drained.stderr))
        self.assertIn(used, drained.stdout)
        self.assertIn('attached to', drained.stdout)
        self.assertIn(self.node.name + '@thin has nothing left',
                      drained.stdout)
        self.assertEqual(['volume-' + used], self.named_on(self.node))

        self.detach(attachment)
        drained = self.localstor(self.node, 'drain', 'local')
        self.assertEqual((0, ''), (drained.returncode, drained.stderr))
        self.assertEqual([], self.named_on(self.node))
        for volume, content in written:
            home = self.home(volume)
            self.assertNotEqual(self.node.name, home.name)
            self.assertEqual(content, self.checksum(
                self.attach(volume, home)))

    def test_it_is_broken_off_and_begun_again(self):
        volume, content = self.create_written('local')
        self.disable(self.node.name + '@local')
        plan = self.localstor(self.node, 'drain', 'local', '--dry-run')
        self.assertEqual(0, plan.returncode)
        self.assertIn('1 volumes would go', plan.stdout)
        self.localstor(self.node, 'drain', 'local',
                       under=('timeout', '--signal', 'INT', '8'))
        drained = self.localstor(self.node, 'drain', 'local')
        self.assertEqual((0, ''), (drained.returncode, drained.stderr))
        self.assertEqual([], self.named_on(self.node))
        self.assertEqual(content, self.checksum(
            self.attach(volume, self.home(volume))))
