# SPDX-License-Identifier: Apache-2.0
"""Volumes go to Cinder's own LVM driver, and come from it.

Cinder copies them, through its connections of both drivers.
"""

from tests.lab import base

FOREIGN = 'lvm'


class ForeignTest(base.WrittenTestCase):

    find_cloud = staticmethod(base.furnished_cloud)

    def retype(self, volume_type):
        self.user.retype(self.volume, volume_type)
        self.wait_until_it_is(volume_type)

    def wait_until_it_is(self, volume_type):
        def is_it():
            found = self.user.show(self.volume)
            return ((found['volume_type'], found['status'])
                    == (volume_type, 'available'))
        self.wait_for('the volume is ' + volume_type, is_it)

    def assert_whole_there(self):
        attachment = self.attach(self.volume, self.source)
        with self.logged_in(attachment) as disk:
            self.assertEqual(self.content, self.checksum(disk))
        self.detach(attachment)

    def assert_whole_here(self):
        attachment = self.attach(self.volume, self.home(self.volume))
        self.assertEqual('local', attachment.connection['driver_volume_type'])
        self.assertEqual(self.content, self.checksum(attachment))
        self.detach(attachment)

    def test_volume_goes_and_comes_back(self):
        self.retype(FOREIGN)
        self.assert_whole_there()
        self.retype(self.volume_type)
        self.assert_whole_here()

    def test_volume_that_arrives_goes_when_it_has(self):
        moved = self.attach(self.volume, self.other(self.source))
        self.hold_in_mid_move(moved)
        self.detach(moved)
        self.user.retype(self.volume, FOREIGN)
        self.let_go()
        self.wait_until_it_is(FOREIGN)
        self.assert_whole_there()


class ThinLioForeignTest(ForeignTest):
    """The same on thin LVs and LIO."""

    volume_type = 'thin'
