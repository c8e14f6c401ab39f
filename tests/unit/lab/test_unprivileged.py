# SPDX-License-Identifier: Apache-2.0

import pathlib

from oslotest import base

from lab import layout
from lab import services
from lab import unprivileged

README = layout.REPOSITORY / 'README.rst'


class UnprivilegedTest(base.BaseTestCase):

    def setUp(self):
        super().setUp()
        self.lab = layout.Layout('test')
        self.lab.environment = pathlib.Path('/')

    def place(self, account):
        return services.Place('node1', '192.0.2.1', pathlib.Path('/lab/node1'),
                              self.lab, account=account)

    def test_driver_gets_what_the_readme_admits_and_no_more(self):
        told = [line.strip() for line in README.read_text().splitlines()
                if line.strip().startswith('cinder ALL = (root)')]
        files = unprivileged.sudoers(self.place('cinder'))
        self.assertEqual(
            [line.replace('/usr/bin/', '/bin/').replace(
                '/etc/cinder/', '/lab/node1/') for line in told],
            [line for line in files.splitlines()
             if 'cinder_localstor' in line])

    def test_command_runs_as_the_user(self):
        around, = unprivileged.PART.around
        command = around(self.place('cinder'), ['a', 'b'])
        self.assertEqual('cinder', command[3])
        self.assertEqual(['--', 'a', 'b'], command[-3:])
