# SPDX-License-Identifier: Apache-2.0

from unittest import mock

from oslotest import base

from lab import compare
from lab import instances


class CompareTest(base.BaseTestCase):

    def compared(self, *figures):
        """What the table says of attaching, after these seconds."""
        return next(line for line in compare.compare([
            compare.Figure(driver, compare.ATTACH_HERE, seconds)
            for driver, seconds in figures])
            if line.step == compare.ATTACH_HERE)

    def test_medians_stand_side_by_side(self):
        found = self.compared(
            (compare.OURS, 1), (compare.THEIRS, 8), (compare.OURS, 9),
            (compare.THEIRS, 10), (compare.OURS, 2), (compare.THEIRS, 7))

        self.assertEqual((2, 8), (found.ours, found.theirs))
        self.assertEqual(0.25, found.ratio)

    def test_what_was_not_measured_has_no_ratio(self):
        self.assertIsNone(self.compared((compare.OURS, 1)).ratio)
        self.assertIsNone(self.compared((compare.THEIRS, 1)).ratio)

    def test_round_that_fails_is_told_and_keeps_what_it_has_measured(self):
        rounds, said = [], []

        def begin(_cloud, driver, _volumes):
            figure = compare.Figure(driver, compare.BOOT, len(rounds))
            rounds.append(mock.Mock(figures=[figure]))
            if len(rounds) == 2:
                rounds[-1].measure.side_effect = instances.InstanceError(
                    'it is silent')
            return rounds[-1]

        with mock.patch.object(compare, '_Round', begin):
            found = list(compare.run(None, 2, 1, said.append))

        self.assertEqual([0, 1, 2, 3], [figure.seconds for figure in found])
        self.assertIn('cut short: it is silent', said)
        for measured in rounds:
            measured.clear_up.assert_called_once_with()
