# SPDX-License-Identifier: Apache-2.0

import pathlib

import fixtures
from oslotest import base

from lab import control_plane
from lab import layout


class TemplateTest(base.BaseTestCase):

    def test_two_labs_that_come_up_at_once_keep_one(self):
        root = pathlib.Path(self.useFixture(fixtures.TempDir()).path)
        template = root / 'database-keystone-0123456789abcdef'
        for name in ('first', 'second'):
            place = layout.Layout(name, root)
            for part in ('database', 'keys'):
                directory = place.directory / part
                directory.mkdir(parents=True)
                (directory / 'whose').write_text(name)
            control_plane.save_template(place, template)

        for part in ('database', 'keys'):
            self.assertEqual('first', (template / part / 'whose').read_text())
        self.assertEqual([template], list(root.glob('database-*')))
