# SPDX-License-Identifier: Apache-2.0

from oslotest import base

from lab import ledger as ledgers
from lab import witness

VOLUME = '025b19fd-528a-4477-befe-13ef20204515'
SERIAL = VOLUME[:20]


def found(*before, at=0):
    return {'event': 'found', 'serial': SERIAL, 'before': list(before),
            'at': at}


def alive(stamps):
    return {'event': 'alive', 'serial': SERIAL, 'stamps': stamps}


class WitnessTest(base.BaseTestCase):

    def setUp(self):
        super().setUp()
        self.witness = witness.Witness()

    def test_stamps_may_become_more(self):
        self.witness.hear('here', [found(None), alive(7)])
        self.witness.hear('there', [found(8), alive(9)])

        self.assertEqual(9, self.witness.stamps(VOLUME))

    def test_disk_that_went_back_is_an_error(self):
        self.witness.hear('here', [found(None), alive(7)])

        self.assertRaises(ledgers.StampError, self.witness.hear, 'there',
                          [found(6)])

    def test_disk_that_is_empty_again_is_an_error(self):
        self.witness.hear('here', [found(None), alive(7)])

        self.assertRaises(ledgers.StampError, self.witness.hear, 'there',
                          [found(None)])

    def test_disk_that_has_grown_is_none(self):
        self.witness.hear('here', [found(None), alive(7)])

        self.witness.hear('there', [found(7, None)])

    def test_disk_that_the_guest_calls_wrong_is_an_error(self):
        self.assertRaises(ledgers.StampError, self.witness.hear, 'here', [
            {'event': 'wrong', 'serial': SERIAL, 'why': 'stamp 3'}])

    def test_what_was_heard_before_is_not_judged_again(self):
        reports = [found(None), alive(7)]
        self.witness.hear('here', reports)

        self.assertEqual(1, self.witness.hear('here', [*reports, alive(8)]))

    def test_new_console_is_judged_from_its_beginning(self):
        self.witness.hear('here', [found(None), alive(7)])

        self.assertRaises(ledgers.StampError, self.witness.hear, 'here',
                          [found(3), alive(4), alive(5)])

    def test_console_whose_end_was_lost_is_the_same(self):
        self.witness.hear('here', [found(3), alive(5), alive(7)])

        self.assertEqual(0, self.witness.hear('here', [found(3), alive(5)]))
        self.assertEqual(0, self.witness.hear('here', []))
        self.assertEqual(0, self.witness.hear('here', [found(3), alive(5)]))
        self.assertEqual(7, self.witness.stamps(VOLUME))

    def test_disk_that_went_back_to_the_last_boot_is_an_error(self):
        self.witness.hear('here', [found(3, at=1), alive(5), alive(7)])

        self.assertRaises(ledgers.StampError, self.witness.hear, 'here',
                          [found(3, at=2), alive(5)])

    def test_volume_with_other_content_begins_anew(self):
        self.witness.hear('here', [found(None), alive(7)])
        self.witness.forget(VOLUME)

        self.witness.hear('here', [found(None), alive(1)])
        self.assertEqual(1, self.witness.stamps(VOLUME))
