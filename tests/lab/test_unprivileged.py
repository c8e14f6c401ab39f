# SPDX-License-Identifier: Apache-2.0
"""cinder-volume as a user of its own, with the rights the README gives it."""

import functools

from lab import cloud as clouds
from lab import unprivileged
from tests.lab import base
from tests.lab import test_moves
from tests.lab import test_snapshots


@functools.cache
def cloud():
    """A lab of two nodes, up, where cinder-volume is not root."""
    found = clouds.Cloud('unprivileged')
    found.up(nodes=2, kernel=base.KERNEL, also=['unprivileged'],
             options=base.OPTIONS)
    return found


class UserTest(base.LabTestCase):

    find_cloud = staticmethod(cloud)

    def test_it_is_not_root(self):
        node = self.nodes[0]
        process = node.service_states()['cinder-volume']['pid']
        self.assertEqual(unprivileged.ACCOUNT.name, node.run(
            ['stat', '-c', '%U', '/proc/%d' % process]).stdout.strip())


class UnprivilegedSnapshotTest(test_snapshots.SnapshotTest):

    find_cloud = staticmethod(cloud)


class UnprivilegedMoveTest(test_moves.MoveTest):

    find_cloud = staticmethod(cloud)


class ThinLioUnprivilegedMoveTest(test_moves.ThinLioMoveTest):

    find_cloud = staticmethod(cloud)
