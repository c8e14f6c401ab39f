# SPDX-License-Identifier: Apache-2.0

from oslotest import base

from lab import ledger
from lab import stamps

LIFE = ledger.LIFE


class LedgerTest(base.BaseTestCase):
    """One block is looked at: the first of cluster 2."""

    def setUp(self):
        super().setUp()
        self.ledger = ledger.Ledger('v', 64 << 20)
        self.number = self.ledger.begin()

    def write(self):
        self.number += 1
        self.ledger.take('a %d 2 0 1' % self.number)
        return self.number

    def flush(self):
        self.ledger.take('f %d' % self.number)

    def live_again(self):
        self.number = self.ledger.begin()

    def die(self):
        self.ledger.died()
        self.live_again()

    @staticmethod
    def line(*numbers):
        """What a guest says that has read the cluster."""
        rest = ['0'] * (stamps.CLUSTER_BLOCKS - 1)
        return ' '.join(['r', '2', '+'.join(map(str, numbers)), *rest])

    def read(self, *numbers):
        self.ledger.take(self.line(*numbers))

    def refuses(self, *numbers):
        self.assertRaises(ledger.StampError, self.read, *numbers)

    def test_what_was_acknowledged_must_be_read(self):
        first = self.write()
        second = self.write()
        self.read(second)
        for wrong in (0, first, second + 1):
            self.refuses(wrong)

    def test_what_was_never_written_reads_zeros(self):
        self.read(0)
        self.refuses(LIFE + 1)

    def test_an_error_says_where_and_what(self):
        self.write()
        error = self.assertRaises(ledger.StampError, self.read, 0)
        self.assertEqual(
            'Volume v at byte %d: found zeros, expected write 1 of life 1'
            % stamps.cluster_offset(2), str(error))

    def test_an_orderly_end_leaves_nothing_under_way(self):
        last = self.write()
        self.live_again()
        self.refuses(last + 1)
        self.read(last)

    def test_what_was_under_way_at_a_death_may_be_there(self):
        last = self.write()
        self.die()
        self.read(last + 1)

    def test_or_not(self):
        last = self.write()
        self.die()
        self.read(last)

    def test_or_be_torn(self):
        last = self.write()
        self.die()
        self.read(last, last + 1)

    def test_but_nothing_older(self):
        first = self.write()
        self.write()
        self.die()
        self.refuses(first)

    def test_what_was_not_there_once_does_not_come_later(self):
        last = self.write()
        self.die()
        self.read(last)
        self.refuses(last + 1)

    def test_what_was_there_once_stays(self):
        last = self.write()
        self.die()
        self.read(last + 1)
        self.refuses(last)

    def test_two_deaths_before_a_reading(self):
        first = self.write()
        self.die()
        self.die()
        self.read(first + 1)
        self.refuses(first)

    def test_no_write_of_the_future_is_there(self):
        self.write()
        self.die()
        self.refuses(self.number + 1)

    def test_a_power_cut_may_take_what_was_not_flushed(self):
        flushed = self.write()
        self.flush()
        self.write()
        self.ledger.lose()
        self.die()
        self.read(flushed)

    def test_a_power_cut_may_leave_any_of_it(self):
        self.write()
        self.flush()
        second = self.write()
        self.write()
        self.ledger.lose()
        self.die()
        self.read(second)
        self.refuses(self.number)

    def test_a_power_cut_takes_nothing_that_was_flushed(self):
        first = self.write()
        self.write()
        self.flush()
        self.ledger.lose()
        self.die()
        self.refuses(first)

    def test_a_flush_covers_what_was_written_before_it(self):
        first = self.write()
        second = self.write()
        self.ledger.take('f %d' % first)
        self.ledger.lose()
        self.die()
        self.refuses(0)
        self.read(second)

    def test_an_error_of_the_volume_is_a_failure(self):
        error = self.assertRaises(ledger.StampError, self.ledger.take,
                                  'e /dev/x: Input/output error')
        self.assertIn('Input/output error', str(error))

    def test_a_reader_elsewhere_may_see_newer_writes_but_no_older(self):
        first = self.write()
        floor = self.ledger.newest()
        second = self.write()

        def seen(number):
            return self.ledger.check_not_older(
                ['r 2 %d %s' % (number, ' '.join(['0'] * 15))], floor)
        self.assertEqual(16, seen(first))
        self.assertEqual(16, seen(second))
        self.assertRaises(ledger.StampError, seen, 0)

    def test_a_copy_has_what_was_acknowledged_before_or_was_under_way(self):
        first = self.write()
        fork = self.ledger.fork()
        second = self.write()
        for found in (first, second):
            fork.fork().take(self.line(found))
        self.assertRaises(ledger.StampError, fork.take, self.line(0))

    def test_a_copy_has_nothing_of_later_lives_of_the_volume(self):
        self.write()
        fork = self.ledger.fork()
        self.live_again()
        self.assertRaises(ledger.StampError, fork.take,
                          self.line(self.write()))

    def test_a_volume_has_nothing_of_its_copy(self):
        self.write()
        copies = [self.ledger.fork(), self.ledger.fork()]
        for one in copies:
            number = one.begin() + 1
            one.take('a %d 2 0 1' % number)
            self.refuses(number)
        self.assertRaises(ledger.StampError, copies[0].take,
                          self.line(number))

    def test_a_copy_may_be_what_its_volume_may_be(self):
        old = self.write()
        self.flush()
        new = self.write()
        self.ledger.died()
        self.ledger.lose()
        for found in (old, new, new + 1):
            self.ledger.fork().take(self.line(found))
