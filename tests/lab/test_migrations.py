# SPDX-License-Identifier: Apache-2.0
"""An administrator migrates volumes, with real LVM, kernels and iSCSI."""

from lab import configuration
from lab import leftovers
from tests.lab import base


class MigrationTestCase(base.WrittenTestCase):

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


class MigrationTest(MigrationTestCase):

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

    def test_thick_volume_becomes_thin_where_the_scheduler_says(self):
        self.user.retype(self.volume, 'thin')
        self.wait_until_it_has_ended()
        found = self.user.show(self.volume)
        self.assertEqual(('success', 'thin'),
                         (self.ended(), found['volume_type']))
        home = self.home(self.volume)
        self.assertEqual(configuration.pool(home.name, 'thin'),
                         found['os-vol-host-attr:host'])
        self.assert_whole(home)

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


class OwnNodeTest(MigrationTestCase):
    """A volume that may be on any backend goes to the other of its node."""

    volume_type = '__DEFAULT__'

    def test_volume_becomes_one_of_the_other_kind(self):
        host = self.user.show(self.volume)['os-vol-host-attr:host']
        node, kind = host.partition('#')[0].split('@')
        other = next(backend for backend in configuration.BACKENDS
                     if backend != kind)
        self.user.migrate(self.volume, configuration.pool(node, other))
        self.wait_until_it_has_ended()
        self.assertEqual('success', self.ended())
        self.assertEqual(configuration.pool(node, other), self.user.show(
            self.volume)['os-vol-host-attr:host'])
        self.assert_whole(self.source)
