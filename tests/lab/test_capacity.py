# SPDX-License-Identifier: Apache-2.0
"""What the scheduler knows of the space on the nodes, beside what LVM says."""

from lab import configuration
from lab import leftovers
from lab import sizes
from tests.lab import base


class CapacityTest(base.LabTestCase):

    find_cloud = staticmethod(base.furnished_cloud)
    volume_type = 'local'
    group = 'cinder-local'

    def setUp(self):
        super().setUp()
        self.here, self.there = self.nodes
        self.before = {
            node.name: self.told(node)['allocated_capacity_gb']
            for node in self.nodes}

    def told(self, node):
        """What the scheduler was told of a node last."""
        found, = [
            pool['capabilities'] for pool in self.cloud.volume_api.get(
                '/scheduler-stats/get_pools?detail=True').json()['pools']
            if pool['name'] == configuration.pool(node.name,
                                                  self.volume_type)]
        return found

    def lvm(self, node, command, fields, *selection):
        """Rows of numbers; sizes in bytes."""
        out = node.run([command, '--noheadings', '--units', 'b', '--nosuffix',
                        '-o', fields, *selection, self.group]).stdout
        return [[float(word) for word in line.split()]
                for line in out.splitlines()]

    def space(self, node):
        """GiB that are free, and that volumes are promised, of a node."""
        [[size, free]] = self.lvm(node, 'vgs', 'vg_size,vg_free')
        return free / sizes.GIB, (size - free) / sizes.GIB

    def assert_known(self, here=0, there=0):
        """The scheduler comes to know what there is.

        :param here: GiB of the test's own on the first node, by Cinder's
            rows
        """
        self.wait_for('the moves have ended',
                      lambda: not leftovers.moves(self.cloud))

        def known():
            for node, more in ((self.here, here), (self.there, there)):
                told, (free, promised) = self.told(node), self.space(node)
                found = {
                    'allocated': (told['allocated_capacity_gb'],
                                  self.before[node.name] + more),
                    'free': (told['free_capacity_gb'], free),
                    'provisioned': (told['provisioned_capacity_gb'],
                                    promised)}
                if any(abs(one - other) > 0.02
                       for one, other in found.values()):
                    self.seen = node.name, found
                    return False
            return True
        try:
            self.wait_for('the scheduler knows', known)
        except self.failureException as error:
            raise self.failureException('%s: %s' % (error, self.seen))

    def test_scheduler_knows_what_each_operation_has_taken(self):
        volume = self.create(volume_type=self.volume_type, node=self.here)
        self.assert_known(here=1)
        snapshot = self.user.request_snapshot(volume)
        self.wait_for('it is taken', lambda: (
            self.user.snapshots()[snapshot] == 'available'))
        self.assert_known(here=2)
        clone = self.user.request_volume('clone', 1, self.volume_type,
                                         source_volid=volume)
        self.volumes.append(clone)
        self.user.wait_for_status(clone, 'available')
        self.assert_known(here=3)
        self.user.extend_volume(clone, 2)
        self.assert_known(here=4)
        attachment = self.attach(clone, self.there)
        self.assert_known(here=2, there=2)
        self.detach(attachment)
        self.user.request_snapshot_deletion(snapshot)
        self.wait_for('it is deleted', lambda: (
            snapshot not in self.user.snapshots()))
        self.assert_known(here=1, there=2)
        for gone in (volume, clone):
            self.delete(gone)
        self.assert_known()


class ThinCapacityTest(CapacityTest):

    volume_type = 'thin'
    group = 'cinder-thin'

    def space(self, node):
        [[size, used]] = self.lvm(node, 'lvs', 'lv_size,data_percent', '-S',
                                  'lv_layout=[thin,pool]')
        promised = sum(size for [size] in self.lvm(
            node, 'lvs', 'lv_size', '-S', 'lv_layout=[thin,sparse]'))
        return size * (1 - used / 100) / sizes.GIB, promised / sizes.GIB
