# SPDX-License-Identifier: Apache-2.0
"""Volumes that several instances have at the same time."""

from tests.lab import base


class SharedTest(base.LabTestCase):

    volume_type = 'local'

    def setUp(self):
        super().setUp()
        self.user.make_type('shared', volume_backend_name=self.volume_type,
                            multiattach='<is> True')
        self.volume = self.create(volume_type='shared')
        self.here = self.home(self.volume)
        self.there = self.other(self.here)

    def clean_up(self):
        super().clean_up()
        self.user.delete_type('shared')

    def test_instances_on_two_nodes_read_what_the_others_write(self):
        local = self.attach(self.volume, self.here)
        remote, third = (self.attach(self.volume, self.there)
                         for _number in range(2))
        self.assertEqual('local', local.connection['driver_volume_type'])
        self.assertEqual('iscsi', remote.connection['driver_volume_type'])
        with self.logged_in(remote) as disk:
            self.write(local)
            self.assertEqual(self.checksum(local), self.checksum(disk))
            self.write(disk, offset=32)
            self.assertEqual(self.checksum(disk, offset=32),
                             self.checksum(local, offset=32))
            # It has the same session.
            self.detach(third)
            self.detach(local)
            self.write(disk)
        self.assertEqual(self.here.name, self.home(self.volume).name)

    def test_connection_goes_on_when_the_node_is_back(self):
        # Its node has another export, too, as soon as it is back.
        other = self.create(volume_type=self.volume_type, node=self.here)
        moved = self.attach(other, self.there)
        self.hold_in_mid_move(moved)
        local = self.attach(self.volume, self.here)
        remote = self.attach(self.volume, self.there)
        with self.logged_in(remote) as disk:
            self.write(disk)
            content = self.checksum(disk)
            self.cut_power(self.here)
            self.here.start()
            self.cloud.wait_for_backends([self.here])
            self.assertEqual(content, self.checksum(disk))
            self.wait_for_handle(local)
            self.assertEqual(content, self.checksum(local))
        self.wait_until_arrived(moved)

    def test_one_instance_alone_is_followed_again(self):
        local = self.attach(self.volume, self.here)
        self.write(local)
        content = self.checksum(local)
        remote = self.attach(self.volume, self.there)
        self.detach(local)
        self.detach(remote)
        moved = self.attach(self.volume, self.there)
        self.assertEqual('local', moved.connection['driver_volume_type'])
        self.assertEqual(self.there.name, self.home(self.volume).name)
        self.assertEqual(content, self.checksum(moved))
        self.wait_until_arrived(moved)
        self.assertEqual(content, self.checksum(moved))


class ThinLioSharedTest(SharedTest):
    """The same on thin LVs and LIO."""

    volume_type = 'thin'
