# SPDX-License-Identifier: Apache-2.0

import pathlib

from oslotest import base

from lab import contained
from lab import layout
from lab import parts
from lab import services

OPERATIONS = layout.REPOSITORY / 'doc' / 'source' / 'operations.rst'


class ContainedTest(base.BaseTestCase):

    def command(self, *chosen):
        """That of cinder-volume in a lab with these optional parts."""
        part = parts.of(chosen)
        return services.named(part.nodes, 'cinder-volume').command(
            services.Place('node1', '192.0.2.1', pathlib.Path('/lab/node1'),
                           layout.Layout('test'), account=part.account,
                           around=part.around))

    def test_command_stays_as_it_is_where_nothing_is_around_it(self):
        self.assertIn('cinder-volume', self.command()[1])

    def test_what_runs_in_the_container_runs_as_its_user(self):
        command = self.command('contained', 'unprivileged')
        script, mode, *rest = command
        self.assertEqual(('container.sh', 'run'),
                         (pathlib.Path(script).name, mode))
        self.assertEqual('/bin/sh', rest[rest.index('--') + 1])
        self.assertIn('cinder', rest[rest.index('--'):])

    def test_container_has_of_its_node_what_the_documentation_tells(self):
        told = OPERATIONS.read_text()
        section = told[told.index('In containers\n'):
                       told.index('Where new volumes are made')]
        for path in contained.SHARED:
            self.assertIn('``%s``' % path, section)
