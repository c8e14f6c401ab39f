# SPDX-License-Identifier: Apache-2.0
"""Backends that had Cinder's own driver of LVM get this one."""

import ddt

from lab import configuration
from tests.lab import base

IN_TREE = 'cinder.volume.drivers.lvm.LVMVolumeDriver'


class ReplacedTestCase(base.LabTestCase):
    """A node that has Cinder's own driver, until it gets ours."""

    def setUp(self):
        super().setUp()
        self.here, self.there = self.nodes[:2]
        self.addCleanup(self.use, None)
        self.use(IN_TREE)

    def use(self, driver):
        """Give the backends of the node a driver, ours if it is None."""
        self.here.configure(dict.fromkeys(configuration.BACKENDS,
                                          {'volume_driver': driver}))
        self.restart_cinder_volume(self.here)


@ddt.ddt
class AdoptionTest(ReplacedTestCase):

    def assert_has(self, attachment, content):
        """The volume has these checksums, one of each 16 MiB."""
        self.assertEqual(content, [
            self.checksum(attachment, 16 * number)
            for number in range(len(content))])

    def write_more(self, attachment, content):
        """Write the next 16 MiB."""
        offset = 16 * len(content)
        self.write(attachment, offset)
        content.append(self.checksum(attachment, offset))

    @ddt.data(*configuration.BACKENDS)
    def test_volume_goes_on_and_its_snapshot_stays(self, volume_type):
        content = []
        volume = self.create(1, volume_type, self.here)
        attachment = self.attach(volume, self.here)
        with self.logged_in(attachment) as disk:
            self.write_more(disk, content)
            snapshot = self.user.request_snapshot(volume)
            self.wait_for_snapshot(snapshot, 'available')
            of_snapshot = list(content)
            self.write_more(disk, content)
            self.use(None)
            self.assert_has(disk, content)
            self.write_more(disk, content)
        self.detach(attachment)

        moved = self.attach(volume, self.there)
        self.assertEqual('local', moved.connection['driver_volume_type'])
        self.assert_has(moved, content)
        copy = self.user.request_volume('of-the-snapshot', 1, volume_type,
                                        snapshot_id=snapshot)
        self.volumes.append(copy)
        self.user.wait_for_status(copy, 'available')
        restored = self.attach(copy, self.home(copy))
        self.assert_has(restored, of_snapshot)
        self.detach(restored)
        self.delete(copy)
        self.user.request_snapshot_deletion(snapshot)
        self.wait_for_snapshot(snapshot, None)
        self.wait_until_arrived(moved)
        self.assert_has(moved, content)
