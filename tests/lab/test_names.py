# SPDX-License-Identifier: Apache-2.0
"""Nova, Cinder and the kernel have names of their own for a node (H19)."""

import functools

from lab import cloud as clouds
from lab import user as users
from tests.lab import base

# No node has it.
ELSEWHERE = '203.0.113.9'


def cinder_host(node):
    """What Cinder calls a node; the kernel calls it by its name."""
    return 'cinder-of-' + node.name


@functools.cache
def cloud():
    """A lab of two nodes, up, whose volume services have other names."""
    found = clouds.Cloud('names')
    found.up(nodes=2, kernel=base.KERNEL, options=base.OPTIONS | {
        'local': base.OPTIONS['local'] | {
            'localstor_host_map': ','.join(
                'nova-of-%s:cinder-of-%s' % (name, name)
                for name in ('node1', 'node2'))}})
    for node in found.nodes:
        node.configure({'DEFAULT': {'host': cinder_host(node)}})
        node.service('cinder-volume').restart()
    # It would choose the former ones.
    found.service('cinder-scheduler').restart()
    return found


class User(users.User):
    """A user of instances on nodes that Nova calls as `names` says."""

    names = {}

    def connector(self, node):
        return super().connector(node) | {
            key: value.format(node.name) for key, value in self.names.items()}


class NamesTest(base.LabTestCase):

    find_cloud = staticmethod(cloud)

    def setUp(self):
        super().setUp()
        self.user = User(self.cloud)
        self.wait_for('the scheduler knows the volume services', lambda: {
            cinder_host(node) + '@local' for node in self.nodes} == {
                pool['name'].partition('#')[0]
                for pool in self.cloud.volume_api.get(
                    '/scheduler-stats/get_pools').json()['pools']
                if '@local' in pool['name']})
        self.volume = self.create()

    def home(self, volume):
        return next(node for node in self.nodes
                    if cinder_host(node) == self.user.host(volume))

    def follows(self, **names):
        """A volume goes to an instance on the other node."""
        self.user.names = names
        home = self.home(self.volume)
        attachment = self.attach(self.volume, home)
        self.write(attachment)
        content = self.checksum(attachment)
        self.detach(attachment)
        there = self.other(home)
        attachment = self.attach(self.volume, there)
        self.assertEqual('local', attachment.connection['driver_volume_type'])
        self.assertEqual(content, self.checksum(attachment))
        self.wait_until_arrived(attachment)
        self.assertEqual(there, self.home(self.volume))

    def test_node_is_known_by_its_address(self):
        self.follows(host='compute-of-{}.example.org')

    def test_node_is_known_by_the_name_that_its_kernel_has(self):
        self.follows(host='{}', ip=ELSEWHERE)

    def test_node_is_known_by_what_the_operator_says(self):
        self.follows(host='nova-of-{}', ip=ELSEWHERE)

    def test_node_that_nobody_knows_reads_from_afar(self):
        self.user.names = {'host': 'compute-of-{}', 'ip': ELSEWHERE}
        attachment = self.attach(self.volume, self.home(self.volume))
        self.assertEqual('iscsi', attachment.connection['driver_volume_type'])
