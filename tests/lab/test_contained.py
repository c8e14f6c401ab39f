# SPDX-License-Identifier: Apache-2.0
"""cinder-volume in a container, as a user of its own: as Kolla has it.

All that it has started ends with the container (hazard H34).
"""

import functools

from lab import cloud as clouds
from tests.lab import base
from tests.lab import test_moves
from tests.lab import test_snapshots


@functools.cache
def cloud():
    """A lab of two nodes, up, where cinder-volume runs in containers."""
    found = clouds.Cloud('contained')
    found.up(nodes=2, kernel=base.KERNEL, options=base.OPTIONS,
             also=['contained', 'unprivileged'])
    return found


class EndTest(base.GuestTestCase):
    """The container ends while a volume arrives and its guest works."""

    find_cloud = staticmethod(cloud)

    def setUp(self):
        super().setUp()
        self.destination = self.other(self.source)
        self.move_on()

    def test_killed_with_all_that_it_had_started(self):
        service = self.destination.service('cinder-volume')
        service.kill()
        self.assertEqual('', self.destination.run(
            ['pgrep', '-f', 'localstor-hydrator|cinder-volume'],
            check=False).stdout)
        service.start()
        self.assert_goes_on()

    def test_both_stopped_and_started_as_for_an_upgrade(self):
        for node in (self.source, self.destination):
            node.service('cinder-volume').stop()
        for node in (self.source, self.destination):
            node.service('cinder-volume').start()
        self.assert_goes_on()


class ThinEndTest(EndTest):

    volume_type = 'thin'


class ContainedSnapshotTest(test_snapshots.SnapshotTest):

    find_cloud = staticmethod(cloud)


class ContainedMoveTest(test_moves.MoveTest):

    find_cloud = staticmethod(cloud)


class ThinLioContainedMoveTest(test_moves.ThinLioMoveTest):

    find_cloud = staticmethod(cloud)
