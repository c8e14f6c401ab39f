# SPDX-License-Identifier: Apache-2.0

from unittest import mock

import ddt

from cinder_localstor.node import real
from tests.unit import base


@ddt.ddt
class RealNodeTest(base.TestCase):

    def setUp(self):
        super().setUp()
        self.override('volume_group', 'disks')

    @ddt.data('tgtadm', 'lioadm')
    def test_node_is_made_without_running_anything(self, helper):
        self.override('target_helper', helper)
        with mock.patch('subprocess.Popen') as started:
            real.node(self.configuration)
        started.assert_not_called()

    def test_maps_go_to_the_group_of_the_volumes(self):
        for name in (None, 'disks'):
            self.override('localstor_metadata_group', name)
            node = real.node(self.configuration)
            self.assertIs(node.volumes, node.metadata)

    def test_maps_go_to_a_faster_group(self):
        self.override('localstor_metadata_group', 'nvme')
        self.override('lvm_type', 'thin')
        node = real.node(self.configuration)
        self.assertEqual(('disks', 'nvme'),
                         (node.volumes.name, node.metadata.name))
        self.assertTrue(node.volumes.thin)
        self.assertFalse(node.metadata.thin)
