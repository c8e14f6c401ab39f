# SPDX-License-Identifier: Apache-2.0

import pathlib

import ddt
from oslotest import base

from lab import errors
from lab import layout


@ddt.ddt
class LayoutTest(base.BaseTestCase):

    def test_labs_of_other_names_or_repositories_never_collide(self):
        labs = [layout.Layout(name, pathlib.Path(repository))
                for name in ('default', 'other')
                for repository in ('/src/one', '/src/two')]

        for attribute in ('namespace', 'runtime', 'directory', 'lock'):
            values = {getattr(lab, attribute) for lab in labs}
            self.assertEqual(len(labs), len(values), attribute)

    def test_a_lab_keeps_its_identity(self):
        first = layout.Layout('x', pathlib.Path('/src'))
        again = layout.Layout('x', pathlib.Path('/src'))

        self.assertEqual(first.identity, again.identity)

    def test_a_socket_path_fits_however_deep_the_repository_lies(self):
        deep = pathlib.Path('/' + 'd' * 200)

        lab = layout.Layout('n' * 32, deep)

        self.assertLess(len(str(lab.runtime / 'node64' / 'mconsole')), 108)

    @ddt.data('', 'cache', 'Upper', 'a b', '../x', '-x', 'n' * 33)
    def test_refused_names(self, name):
        self.assertRaises(errors.LabError, layout.Layout, name)

    @ddt.data('/with blank', '/with,comma', '/with:colon', "/with'quote")
    def test_a_path_that_would_break_the_kernel_command_line(self, path):
        error = self.assertRaises(errors.LabError, layout.Layout, 'x',
                                  pathlib.Path(path))

        self.assertIn(path, str(error))

    @ddt.data(('control', '10.77.0.1'), ('rabbitmq', '10.77.0.2'),
              ('database', '10.77.0.3'), ('node1', '10.77.0.11'),
              ('node64', '10.77.0.74'))
    @ddt.unpack
    def test_address(self, place, address):
        self.assertEqual(address, layout.Layout().address(place))

    @ddt.data('node0', 'node65', 'node01', 'node', 'nowhere')
    def test_no_such_place(self, place):
        error = self.assertRaises(errors.NotFound, layout.Layout().address,
                                  place)

        self.assertIn('"%s"' % place, str(error))
