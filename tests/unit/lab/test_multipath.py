# SPDX-License-Identifier: Apache-2.0

import pathlib
from unittest import mock

import fixtures
from oslotest import base

from lab import multipath
from lab import packages
from lab import services


class FilesTest(base.BaseTestCase):

    def test_what_is_in_the_package_is_found_where_it_would_be_installed(self):
        root = pathlib.Path(self.useFixture(fixtures.TempDir()).path)
        for name in ('sbin/multipathd', 'usr/sbin/multipath',
                     'lib/udev/rules.d/60-multipath.rules', 'etc/other'):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).touch()
        with mock.patch.object(packages, 'kept', return_value=root):
            files = multipath.PART.files(mock.Mock())
        self.assertIn('find_multipaths strict',
                      files.pop(multipath.CONFIGURATION))
        self.assertEqual({
            '/usr/sbin/multipathd': services.Link(
                str(root / 'sbin/multipathd')),
            '/usr/sbin/multipath': services.Link(
                str(root / 'usr/sbin/multipath')),
            '/usr/lib/udev/rules.d/60-multipath.rules': services.Link(
                str(root / 'lib/udev/rules.d/60-multipath.rules'))}, files)
