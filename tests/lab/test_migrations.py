# SPDX-License-Identifier: Apache-2.0
"""An administrator migrates volumes, with real LVM, kernels and iSCSI."""

from lab import configuration
from lab import leftovers
from tests.lab import base


class MigrationTest(base.LabTestCase):

    def setUp(self):
        super().setUp()
        self.volume = self.create()
        self.source = self.home(self.volume)
        attachment = self.attach(self.volume, self.source)
        self.write(attachment)
        self.content = self.checksum(attachment)
        self.detach(attachment)

    def ended(self):
        """How the migration has ended, None while it has not."""
        found = self.user.show(self.volume)['migration_status']
        return found if found in ('success', 'error') else None

    def wait_until_it_has_ended(self):
        self.wait_for('the migration has ended', self.ended)
        self.assertEqual('available', self.user.status(self.volume))

    def assert_whole(self, node):
        """The volume is a local disk of a node, and holds what it held."""
        attachment = self.attach(self.volume, node)
        self.assertEqual(self.content, self.checksum(attachment))
        self.wait_for('all has arrived', lambda: (
            not leftovers.moves(self.cloud)))
        self.assertEqual(self.content, self.checksum(attachment))
        self.detach(attachment)
        self.assertEqual(node.name, self.home(self.volume).name)

    def test_volume_is_usable_on_the_other_node_at_once(self):
        destination = self.other(self.source)
        self.user.migrate(self.volume, configuration.pool(
            destination.name, 'local'))
        self.wait_until_it_has_ended()
        self.assertEqual('success', self.ended())
        self.assertEqual(destination.name, self.home(self.volume).name)
        # It has not been copied before.
        self.assertIn(self.volume, leftovers.moves(self.cloud))
        self.assert_whole(destination)

    def test_thick_volume_becomes_thin_on_its_own_node(self):
        for node in self.nodes:
            if node.name != self.source.name:
                self.set_service(node.name + '@thin', 'disable')
                self.addCleanup(self.set_service, node.name + '@thin',
                                'enable')
        self.user.retype(self.volume, 'thin')
        self.wait_until_it_has_ended()
        found = self.user.show(self.volume)
        self.assertEqual(
            ('success', 'thin', configuration.pool(self.source.name, 'thin')),
            (self.ended(), found['volume_type'],
             found['os-vol-host-attr:host']))
        self.assert_whole(self.source)

    def set_service(self, host, action):
        self.cloud.openstack('volume', 'service', 'set', '--' + action, host,
                             'cinder-volume')

    def test_service_dies_in_mid_migration(self):
        destination = self.other(self.source)
        self.user.migrate(self.volume, configuration.pool(
            destination.name, 'local'))
        self.wait_for('the move is there', lambda: (
            self.volume in leftovers.moves(self.cloud)))
        self.source.service('cinder-volume').kill()
        self.source.service('cinder-volume').start()
        self.cloud.wait_for_backends([self.source])
        self.wait_until_it_has_ended()
        self.assertEqual(
            {'success': destination.name, 'error': self.source.name}[
                self.ended()], self.home(self.volume).name)
        self.assert_whole(self.home(self.volume))
