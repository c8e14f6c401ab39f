# SPDX-License-Identifier: Apache-2.0
"""The power is cut, and disks lose what was not flushed."""

import time

from keystoneauth1 import exceptions

from tests.lab import base

WITHOUT_FLUSH = 'LAB_WITHOUT_FLUSH'


class PowerCutTestCase(base.LabTestCase):

    def restart(self, *nodes, lose='drop'):
        """Cut the power of all nodes at once, then bring them back."""
        for node in nodes:
            self.cut_power(node, lose)
        for node in nodes:
            node.start()


class PromiseTest(PowerCutTestCase):
    """What was acknowledged is there, though nothing is left in a cache."""

    def test_volume_that_was_made_and_grew(self):
        volume = self.create()
        self.user.extend_volume(volume, 2)
        node = self.home(volume)
        self.restart(node)
        attachment = self.attach(volume, node)
        self.write(attachment, offset=2000)
        self.assertEqual(node.name, self.home(volume).name)


class MoveTest(base.MovedTestCase, PowerCutTestCase):

    def restart(self, *nodes, lose='drop'):
        super().restart(*nodes, lose=lose)
        self.wait_for_handle(self.moved)

    def test_both_nodes_while_the_data_arrives(self):
        self.hold_in_mid_move(self.moved)
        self.restart(self.moved.node, self.source, lose='tear')
        self.assert_arrives()

    def test_both_nodes_when_the_handle_has_just_been_swapped(self):
        while self.arrival(self.moved):
            time.sleep(0.05)
        self.restart(self.moved.node, self.source)
        self.assert_arrives()

    def test_destination_when_the_source_has_just_been_removed(self):
        self.wait_until_arrived(self.moved)
        self.restart(self.moved.node)
        self.assert_whole()


class SharpnessTest(PowerCutTestCase):
    """These tests notice a step that is recorded before it is durable."""

    def configure(self, node, value):
        node.configure(environment={WITHOUT_FLUSH: value})
        self.restart_cinder_volume(node)

    def test_driver_that_makes_nothing_durable_is_caught(self):
        node = self.nodes[0]
        self.addCleanup(self.configure, node, '')
        self.configure(node, 'yes')
        volume = self.create(node=node)
        self.restart(node)
        self.assertRaises(exceptions.HttpError, self.attach, volume, node)
