# SPDX-License-Identifier: Apache-2.0

import unittest

from tests.unit import model


class ContentsTest(unittest.TestCase):

    def setUp(self):
        super().setUp()
        self.contents = model.Contents()
        self.contents.write(0, 'old')
        self.contents.flush()
        self.contents.write(0, 'new')

    def reads(self, stamp):
        try:
            self.contents.read(0, stamp)
        except AssertionError:
            return False
        return True

    def test_last_write_is_read(self):
        self.assertFalse(self.reads('old'))
        self.assertTrue(self.reads('new'))

    def test_power_cut_may_take_what_was_not_flushed(self):
        self.contents.lose_cache()
        self.assertTrue(self.reads('old'))

    def test_power_cut_may_leave_what_was_not_flushed(self):
        self.contents.lose_cache()
        self.assertTrue(self.reads('new'))

    def test_what_was_read_is_read_again(self):
        self.contents.lose_cache()
        self.reads('old')
        self.assertFalse(self.reads('new'))

    def test_what_was_read_may_be_lost_at_the_next_power_cut(self):
        self.contents.lose_cache()
        self.reads('new')
        self.contents.lose_cache()
        self.assertTrue(self.reads('old'))

    def test_what_was_flushed_outlives_a_power_cut(self):
        self.contents.flush()
        self.contents.lose_cache()
        self.assertFalse(self.reads('old'))
        self.assertTrue(self.reads('new'))

    def test_flush_after_a_power_cut_is_of_what_is_there_then(self):
        self.contents.lose_cache()
        self.contents.flush()
        self.assertTrue(self.reads('old'))

    def test_write_after_a_power_cut_is_certain(self):
        self.contents.lose_cache()
        self.contents.write(0, 'newer')
        self.assertFalse(self.reads('new'))
        self.assertTrue(self.reads('newer'))

    def test_what_was_never_written_is_an_error(self):
        self.assertFalse(self.reads("somebody else's"))
