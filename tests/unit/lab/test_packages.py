# SPDX-License-Identifier: Apache-2.0

from unittest import mock

from oslotest import base

from lab import errors
from lab import packages

FAILED = errors.LabError('no lists')


class ListsTest(base.BaseTestCase):

    def ask(self, *answers):
        """What is answered, and how often lists were fetched for it."""
        asked = mock.Mock(side_effect=answers)
        with mock.patch.object(packages, 'run') as run:
            try:
                return packages.with_lists(asked), run.call_count
            except errors.LabError as error:
                return error, run.call_count

    def test_they_are_fetched_where_something_fails_without(self):
        self.assertEqual(('found', 0), self.ask('found'))
        self.assertEqual(('found', 1), self.ask(FAILED, 'found'))

    def test_what_fails_with_new_ones_fails(self):
        self.assertEqual((FAILED, 1), self.ask(FAILED, FAILED))
