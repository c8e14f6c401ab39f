# SPDX-License-Identifier: Apache-2.0

from oslotest import base

from lab import compare


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
