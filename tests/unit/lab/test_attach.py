# SPDX-License-Identifier: Apache-2.0

import io
import math

from oslotest import base
from rich import console as consoles

from lab import attach
from lab import compare

MOVE = '6f9619ff-8b86-4d01-b42d-00cf4fc964ff'
OTHER = '7f9619ff-8b86-4d01-b42d-00cf4fc964ff'


def line(seconds, step, move=MOVE):
    """What cinder-volume logs of a move, at a second of a minute."""
    return ('2026-11-25 09:42:%06.3f 1505 INFO '
            'cinder_localstor.moves.executor [None req-1 - - - - - -] '
            'Move %s of volume %s: %s' % (seconds, move, OTHER, step))


class StepsTest(base.BaseTestCase):

    def test_steps_and_all_of_them_whatever_node_has_logged_it(self):
        self.assertEqual(
            {'export_source': 4.5, 'create_destination': 1.25,
             'preparing': 6.25},
            attach.steps([
                line(8, 'export_source'), 'anything else',
                line(12.5, 'export_source took 4.50 s'),
                line(14.25, 'preparing -> migrating'),
                line(8.5, 'create_destination'),
                line(9.75, 'create_destination took 1.25 s')]))

    def test_what_comes_after_it_is_prepared_does_not_count(self):
        self.assertEqual({'build_handle': 1, 'preparing': 2}, attach.steps([
            line(1, 'build_handle'), line(2, 'build_handle took 1.00 s'),
            line(3, 'preparing -> migrating'),
            line(9, 'seal_source'), line(10, 'seal_source took 1.00 s'),
            line(30, 'migrating -> completing')]))

    def test_clock_of_the_other_node_may_be_behind(self):
        self.assertEqual({'build_handle': 1, 'preparing': 2}, attach.steps([
            line(1, 'export_source'), line(3, 'preparing -> migrating'),
            line(3.2, 'build_handle'), line(4.2, 'build_handle took 1.00 s')]))

    def test_median_of_several_moves(self):
        self.assertEqual({'build_handle': 2}, attach.steps([
            line(1, 'build_handle took 1.00 s'),
            line(1, 'build_handle took 3.00 s', OTHER)]))


class FiguresTest(base.BaseTestCase):

    def test_almost_all_is_the_highest_but_one_of_twenty(self):
        self.assertEqual(18, attach.almost_all(range(20)))
        self.assertEqual(2, attach.almost_all([2, 1]))
        self.assertTrue(math.isnan(attach.almost_all([])))

    def test_ours_stands_beside_theirs(self):
        out = io.StringIO()
        attach.show(
            [attach.Attached('local', attach.OTHER, 2, 0.5, 60),
             attach.Attached(compare.THEIRS, attach.OTHER, 4, 6, 80)],
            [attach.Storm('local', [3, 4], ['no time'])],
            [line(1, 'build_handle took 1.00 s')],
            consoles.Console(file=out, width=120))

        rows = [[word.strip() for word in row.split('│')]
                for row in out.getvalue().splitlines()]
        self.assertIn(['local', 'on another node', '2.50', '2.50', '2.00',
                       '0.50', '60', '0.25'], [row[1:9] for row in rows])
        self.assertIn(['build_handle', '1.00'], [row[1:3] for row in rows])
        self.assertIn(['local', '3', '1', '3.50', '4.00'],
                      [row[1:6] for row in rows])
