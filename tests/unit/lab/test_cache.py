# SPDX-License-Identifier: Apache-2.0

import pathlib

import fixtures
from oslotest import base

from lab import cache


class MadeTest(base.BaseTestCase):

    def setUp(self):
        super().setUp()
        self.useFixture(fixtures.EnvironmentVariable(
            'XDG_CACHE_HOME', self.useFixture(fixtures.TempDir()).path))
        self.calls = 0

    def make(self, scratch):
        self.calls += 1
        (scratch / 'result').mkdir()
        (scratch / 'result' / 'whole').write_text(str(self.calls))

    def made(self):
        return cache.made('thing', 'whole', self.make)

    def left(self):
        return {path.name for path in cache.folder('').iterdir()}

    def test_what_is_there_is_not_made_again(self):
        self.assertEqual(self.made(), self.made())
        self.assertEqual(1, self.calls)

    def test_what_is_not_whole_is_made_again(self):
        (self.made() / 'whole').unlink()
        self.assertEqual('2', (self.made() / 'whole').read_text())

    def test_what_can_not_be_made_leaves_nothing(self):
        def fail(scratch: pathlib.Path) -> None:
            self.make(scratch)
            raise ValueError('no disk')

        self.assertRaises(ValueError, cache.made, 'thing', 'whole', fail)
        self.assertEqual({'thing.lock'}, self.left())
