# SPDX-License-Identifier: Apache-2.0
"""Instances that real Nova runs, with volumes on this driver.

The guest is the lab's own (``lab/guest``): it writes and verifies numbered
stamps on every disk that it sees.
"""

import functools
import os

from lab import cloud as clouds
from lab import configuration
from lab import instances
from tests.lab import base

NAME = os.environ.get('LOCALSTOR_NOVA_LAB', 'nova')


@functools.cache
def cloud():
    """The lab of these tests, up: two nodes in which instances run."""
    found = clouds.Cloud(NAME)
    found.up(nodes=2, nova=True, options={
        backend: {'localstor_data_path': path} | base.QUICK
        for backend, path in zip(configuration.BACKENDS, base.DATA_PATHS)})
    return found


class InstanceTestCase(base.LabTestCase):
    """A test with instances, of which nothing may be left in the end."""

    find_cloud = staticmethod(cloud)

    def setUp(self):
        super().setUp()
        self.instances = []
        # First of all: what an instance has can't be deleted.
        self.addCleanup(self.delete_instances)

    def delete_instances(self):
        while self.instances:
            self.instances.pop().delete()

    def boot(self, node, volume_type='local'):
        """An instance on a node, and the volume that it boots from."""
        volume = self.user.create_volume(
            1, volume_type, node.name, instances.image(self.cloud))
        self.volumes.append(volume)
        instance = instances.boot(self.cloud, volume, node)
        self.instances.append(instance)
        return instance, volume

    def delete_instance(self, instance):
        self.instances.remove(instance)
        instance.delete()

    def assert_goes_on(self, instance):
        """Its guest lives, or can live again where its kernel panicked.

        A guest whose instructions are translated may do that after a live
        migration on a busy machine, from memory that is not right; what is
        on its disks has to be.
        """
        if instance.panicked:
            instance.reboot()
            for volume in instance.volumes():
                instance.wait_for_stamps(volume)
        instance.assert_alive()

    def assert_arrives(self, volume, node):
        """A volume comes to be on a node, and nowhere else."""
        self.assertEqual(node.name, self.user.host(volume))
        self.wait_for('%s has arrived' % volume, lambda: not any(
            found['migration_status'] for found in self.user.volumes()))


class InstanceTest(InstanceTestCase):

    def test_volumes_are_whole_wherever_their_instance_is(self):
        here, there = self.nodes
        instance, root = self.boot(here)
        self.assertEqual(here.name, self.user.host(root))

        instance.live_migrate(there)
        self.assert_goes_on(instance)
        self.assert_arrives(root, there)
        self.assert_goes_on(instance)

        data = self.create(node=here)
        instance.attach(data)
        self.assertEqual(there.name, self.user.host(data))
        instance.assert_alive()
        instance.detach(data)
        instance.wait_for_report('gone', data)
        instance.assert_alive()
        self.delete_instance(instance)


class ActionsTest(InstanceTestCase):
    """What else users and administrators do with an instance."""

    def setUp(self):
        super().setUp()
        self.here, self.there = self.nodes
        self.instance, self.root = self.boot(self.here)
        self.instance.assert_alive()

    def assert_finds_its_stamps(self):
        """Its guest has booted again and found what it had written."""
        self.instance.wait_for_stamps(self.root)
        self.instance.assert_alive()

    def test_volume_goes_with_a_cold_migration(self):
        self.instance.act('migrate', {'host': self.there.name})
        self.instance.wait_for('VERIFY_RESIZE')
        self.assertEqual(self.there.name, self.instance.node.name)
        self.assert_finds_its_stamps()
        self.instance.act('confirmResize')
        self.instance.wait_for('ACTIVE')
        self.assert_arrives(self.root, self.there)
        self.instance.assert_alive()

    def test_instance_is_deleted_while_its_volume_arrives(self):
        data = self.create(node=self.there)
        self.instance.attach(data)
        self.delete_instance(self.instance)
        self.delete(data)
