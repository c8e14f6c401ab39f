# SPDX-License-Identifier: Apache-2.0
"""Volumes that have a mirror on another disk of their node, which dies."""

import functools

from keystoneauth1 import exceptions

from lab import cloud as clouds
from lab import mirrors
from tests.lab import base


@functools.cache
def cloud():
    """A lab of two nodes, up, each with a group of two disks."""
    found = clouds.Cloud('mirrored')
    found.up(nodes=2, kernel=base.KERNEL, disks='volatile', also=['mirrored'],
             options={'mirrored': base.QUICK | {
                 'localstor_data_path': base.DATA_PATHS[0]}})
    return found


class MirrorsTest(base.GuestTestCase):

    find_cloud = staticmethod(cloud)
    volume_type = 'mirrored'

    def let_die(self, node):
        """One of the two disks of the group answers with errors alone."""
        mirrors.disk(node).fail()
        self.addCleanup(mirrors.replace, node)
        self.wait_for('the node misses it',
                      lambda: mirrors.missing(node) == 1)

    def status(self, node):
        # However long its lines are
        return ' '.join(self.localstor(node, 'status').stdout.split())

    def assert_writes_on(self):
        before = self.ledger.acknowledged
        self.wait_for('the guest writes on',
                      lambda: self.ledger.acknowledged > before + 50)

    def assert_every_stamp_is_there(self, attachment):
        self.live(attachment).stop(base.PATIENCE)
        self.assertEqual([], self.journal.failures)

    def test_guest_does_not_see_that_a_disk_dies(self):
        guest = self.live(self.first)
        self.let_die(self.source)
        self.assert_writes_on()
        told = self.status(self.source)
        for part in ('1 of the disks of volume group ' + mirrors.GROUP,
                     'a disk of it is missing'):
            self.assertIn(part, told)
        self.restart_cinder_volume(self.source)
        self.assert_writes_on()
        self.assertTrue(guest.stop(base.PATIENCE))

        self.cut_power(self.source)
        self.source.start()
        self.wait_for_handle(self.first)
        self.assert_every_stamp_is_there(self.first)

        mirrors.replace(self.source)
        self.wait_for('the mirror is there again', lambda: (
            'a disk of it' not in self.status(self.source)))
        self.assert_every_stamp_is_there(self.first)

    def test_guest_whose_volume_arrives_does_not_see_it_either(self):
        self.move_on()
        self.let_die(self.moved.node)
        self.assert_goes_on()

    def test_volume_leaves_the_node_and_no_other_goes_there(self):
        self.live(self.first).stop(base.PATIENCE)
        self.detach(self.first)
        self.let_die(self.source)

        moved = self.attach(self.volume, self.other(self.source))
        self.assert_every_stamp_is_there(moved)
        self.wait_for('only the group keeps the old copy', lambda: (
            'LVM makes, extends and renames nothing' in self.status(
                self.source)))
        volume = self.create(volume_type=self.volume_type)
        self.assertEqual(self.other(self.source).name, self.user.host(volume))
        self.assertRaises(exceptions.HttpError, self.user.attach, volume,
                          self.source)
        self.assertIn('for volume %s: A disk of volume group' % volume,
                      self.log_of(self.other(self.source)))

        mirrors.give_up(self.source)
        self.wait_until_arrived(moved)
        self.assertNotIn(mirrors.GROUP, self.status(self.source))
        self.assert_every_stamp_is_there(moved)
