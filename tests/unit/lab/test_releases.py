# SPDX-License-Identifier: Apache-2.0

import pathlib
import subprocess
import tempfile
from unittest import mock

from oslotest import base

from lab import errors
from lab import faults
from lab import layout
from lab import releases


class Node:
    """As much of a node as a release is chosen for."""

    name = 'node2'

    def __init__(self, place):
        self.place = mock.Mock(layout=place)
        self.environment = {}
        self.cinder_volume = mock.Mock()

    def configure(self, environment):
        self.environment |= environment

    def service(self, name):
        assert name == 'cinder-volume'
        return self.cinder_volume


class ReleaseTest(base.BaseTestCase):
    """A repository with a former driver that says so."""

    def setUp(self):
        super().setUp()
        self.repository = pathlib.Path(self.enterContext(
            tempfile.TemporaryDirectory()))
        self.git('init', '-q')
        driver = self.repository / releases.PACKAGE
        driver.mkdir()
        for text in ('former', 'present'):
            (driver / 'version').write_text(text)
            self.git('add', '.')
            self.git('-c', 'user.name=n', '-c', 'user.email=e', 'commit',
                     '-q', '-m', text)
        self.node = Node(layout.Layout('l', self.repository))

    def git(self, *arguments):
        subprocess.run(['git', '-C', self.repository, *arguments], check=True)

    def version(self):
        """What Python finds first on the node."""
        return next(
            found.read_text() for found in (
                pathlib.Path(path, releases.PACKAGE, 'version')
                for path in self.node.environment['PYTHONPATH'].split(':'))
            if found.exists())

    def test_node_has_the_former_one_until_it_is_upgraded(self):
        self.assertFalse(releases.is_former(self.node))
        releases.choose(self.node, 'HEAD~')
        self.assertEqual('former', self.version())
        self.assertTrue(releases.is_former(self.node))
        releases.choose(self.node)
        self.assertEqual('present', self.version())
        self.assertFalse(releases.is_former(self.node))

    def test_chaos_upgrades_those_that_have_it(self):
        present = Node(self.node.place.layout)
        releases.choose(present)
        releases.choose(self.node, 'HEAD~')
        for node in (present, self.node):
            node.declarations = [mock.Mock()]
            node.place.backends = ()
        breaking = faults.Faults(
            mock.Mock(nodes=[present, self.node]), mock.Mock(), 1)
        fault = breaking._upgrade()
        fault.begin()
        self.node.cinder_volume.stop.assert_called_once_with()
        fault.end()
        self.node.cinder_volume.start.assert_called_once_with()
        self.assertEqual('present', self.version())

    def test_revision_that_there_is_not(self):
        error = self.assertRaises(errors.LabError, releases.choose, self.node,
                                  'no-such-one')
        self.assertIn('no-such-one', str(error))
        self.assertFalse(releases.is_former(self.node))
