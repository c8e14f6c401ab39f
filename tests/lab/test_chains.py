# SPDX-License-Identifier: Apache-2.0

from tests.lab import base


class ChainTestCase(base.LabTestCase):

    volume_type = 'local'

    def setUp(self):
        super().setUp()
        self.volume = self.create(volume_type=self.volume_type)
        home = self.home(self.volume)
        self.first, self.second, self.third = sorted(
            self.nodes, key=lambda node: node.name != home.name)
        attachment = self.attach(self.volume, self.first)
        self.write(attachment, size=20)
        self.pieces = [(0, 20, self.checksum(attachment, size=20))]
        self.detach(attachment)
        self.attachment = None
        self.go_to(self.second)

    def go_to(self, node):
        if self.attachment:
            self.detach(self.attachment)
        self.attachment = self.attach(self.volume, node)
        self.hold_in_mid_move(self.attachment)

    def add(self, offset, size=10):
        self.write(self.attachment, offset=offset, size=size)
        self.pieces.append((offset, size, self.checksum(
            self.attachment, offset=offset, size=size)))

    def assert_whole(self):
        for offset, size, content in self.pieces:
            self.assertEqual(content, self.checksum(
                self.attachment, offset=offset, size=size))

    def assert_arrives(self):
        self.assert_whole()
        self.wait_until_arrived(self.attachment)
        self.assert_whole()

    def moves(self):
        return [row for row in self.user.volumes()
                if row['migration_status'] == 'target:' + self.volume]

    def go_on(self, node):
        self.add(offset=900)
        self.go_to(node)
        self.assertEqual(2, len(self.moves()))
        self.add(offset=1000)
        self.assert_arrives()


class ChainTest(ChainTestCase):
    """A volume moves on, or back, or grows, while it still arrives (H15)."""

    def test_on_to_a_third_node(self):
        self.go_on(self.third)

    def test_back_to_the_first_node(self):
        self.go_on(self.first)

    def test_delete_while_two_moves_run(self):
        self.go_to(self.third)
        self.detach(self.attachment)
        self.delete(self.volume)

    def test_delete_while_the_first_node_is_away(self):
        passed = self.attachment
        self.go_to(self.third)
        for node in (self.second, self.third):
            self.cloud.cut(self.first.name, node.name)
        self.addCleanup(self.cloud.heal)
        self.let_go()
        self.wait_for('requests wait in the second node',
                      lambda: self.requests_wait(passed))
        self.detach(self.attachment)
        self.delete(self.volume)
        # The second node's target serves others still.
        other = self.create(node=self.second)
        self.wait_until_arrived(self.attach(other, self.third))
        self.cloud.heal()

    def requests_wait(self, attachment):
        found = attachment.node.run(
            ['sh', '-c', 'cat /sys/block/$(basename $(readlink -f %s))/'
             'inflight' % attachment.device]).stdout
        return any(map(int, found.split()))

    def test_power_cut_in_the_middle(self):
        self.add(offset=900)
        self.go_to(self.third)
        self.add(offset=1000)
        self.second.kill()
        self.second.start()
        self.assert_arrives()

    def test_extend_in_mid_move_and_on(self):
        self.add(offset=1000)
        self.user.extend_volume(self.volume, 2)
        # Beyond what the move knows of, and over its end
        self.add(offset=1016, size=20)
        self.assert_whole()
        self.go_to(self.third)
        self.assert_arrives()


class ThinLioChainTest(ChainTestCase):
    """The same on thin LVs and LIO."""

    volume_type = 'thin'

    def test_on_to_a_third_node(self):
        self.go_on(self.third)
