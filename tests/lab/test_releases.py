# SPDX-License-Identifier: Apache-2.0
"""Two releases of the driver at once, as in an upgrade node by node (H35).

LOCALSTOR_FORMER is the revision of this repository whose driver the second
node begins with.  Without it there is nothing to try.
"""

import functools
import os

import testtools

from lab import cloud as clouds
from lab import releases
from tests.lab import base

FORMER = os.environ.get('LOCALSTOR_FORMER', '')


@functools.cache
def cloud():
    """A lab of two nodes, up."""
    found = clouds.Cloud('releases')
    found.up(nodes=2, kernel=base.KERNEL, options=base.OPTIONS)
    return found


def use(node, revision=''):
    """Restart a node's cinder-volume with the driver of a revision."""
    releases.choose(node, revision)
    node.service('cinder-volume').restart()


@testtools.skipUnless(FORMER, 'LOCALSTOR_FORMER names no former release')
class FormerTest(base.LabTestCase):
    """Thick volumes move between the two, by the native helper."""

    find_cloud = staticmethod(cloud)
    volume_type = 'local'

    def setUp(self):
        super().setUp()
        self.new, self.old = self.nodes
        use(self.old, FORMER)
        self.cloud.wait_for_backends([self.old])

    def make(self, node):
        """A volume on a node, with content."""
        volume = self.create(volume_type=self.volume_type, node=node)
        attachment = self.attach(volume, node)
        self.write(attachment)
        content = self.checksum(attachment)
        self.detach(attachment)
        return volume, content

    def move(self, source, destination):
        """A volume in mid-move, and what it has."""
        volume, content = self.make(source)
        attachment = self.attach(volume, destination)
        self.hold_in_mid_move(attachment)
        return attachment, content

    def assert_arrives(self, attachment, content):
        self.assertEqual(content, self.checksum(attachment))
        self.wait_until_arrived(attachment)
        self.assertEqual(content, self.checksum(attachment))

    def test_to_the_new_one_and_back(self):
        attachment, content = self.move(self.old, self.new)
        self.assert_arrives(attachment, content)
        self.detach(attachment)
        again = self.attach(attachment.volume_id, self.old)
        self.assert_arrives(again, content)

    def test_to_the_old_one_and_back_in_mid_move(self):
        attachment, content = self.move(self.new, self.old)
        self.detach(attachment)
        again = self.attach(attachment.volume_id, self.new)
        self.assert_arrives(again, content)

    def test_source_is_upgraded_in_mid_move(self):
        attachment, content = self.move(self.old, self.new)
        use(self.old)
        self.assert_arrives(attachment, content)

    def test_destination_is_upgraded_in_mid_move(self):
        attachment, content = self.move(self.new, self.old)
        use(self.old)
        self.assert_arrives(attachment, content)


class ThinFormerTest(FormerTest):
    """The same with thin volumes, LIO and dm-clone."""

    volume_type = 'thin'
