# SPDX-License-Identifier: Apache-2.0

import dataclasses
import datetime
import io
import json
import unittest

import ddt
from oslo_utils import units
from rich import console

from cinder_localstor.cmd import view
from cinder_localstor.datapath import copies
from cinder_localstor.datapath import engine
from cinder_localstor.moves import report

START = datetime.datetime(2030, 1, 1)


def running(local=units.Gi, hydration=engine.Hydration.RUNNING, **more):
    values = {'move_id': 'm', 'peer': 'b@local', 'state': 'migrating',
              'since': START, 'done': 2, 'steps': 2,
              'progress': engine.Progress(hydration, local, 4 * units.Gi),
              'rate': 1.0 * units.Gi, **more}
    return report.Running(**values)


def with_copies(*entries, at=0, **more):
    return report.Report(
        at=START + datetime.timedelta(seconds=at),
        backends=(report.Backend('a@local', copies=entries),), **more)


STANDING = report.Entry('volume-1', 'id-1', copies.Role.STANDING, units.Gi,
                        ('group-volume--1',), 1)
MOVING = report.Entry('volume-2', 'id-2', copies.Role.ARRIVING, 4 * units.Gi,
                      ('volume-2-clone',), 0, move=running())


@ddt.ddt
class NumbersTest(unittest.TestCase):

    @ddt.data((None, '-'), (0, '0 B'), (1023, '1023 B'), (1024, '1 KiB'),
              (1536 * units.Mi, '1.5 GiB'), (16 * units.Ti, '16 TiB'))
    @ddt.unpack
    def test_bytes(self, count, expected):
        self.assertEqual(expected, view.size(count))

    @ddt.data((None, '-'), (0, '0:00'), (59.6, '1:00'), (3599, '59:59'),
              (3600, '1:00:00'), (100000, '27:46:40'))
    @ddt.unpack
    def test_time(self, seconds, expected):
        self.assertEqual(expected, view.duration(seconds))


class ViewTest(unittest.TestCase):

    def shown(self, found):
        screen = console.Console(record=True, width=200, file=io.StringIO())
        screen.print(view.rendered(found))
        return screen.export_text()

    def line_of(self, word, found):
        lines = [line for line in self.shown(found).splitlines()
                 if word in line]
        self.assertEqual(1, len(lines), self.shown(found))
        return lines[0]

    def test_volume_shows_what_its_handle_lies_on(self):
        line = self.line_of('id-1', with_copies(STANDING))
        for part in ('+', '1 GiB', 'LV', 'standing'):
            self.assertIn(part, line)

    def test_handle_on_something_else_shows_its_name(self):
        copy = dataclasses.replace(STANDING, under=('group-volume--9',))
        self.assertIn('group-volume--9',
                      self.line_of('id-1', with_copies(copy)))

    def test_it_fits_into_80_columns(self):
        name = 'volume-12345678-1234-1234-1234-123456789abc'
        copy = dataclasses.replace(
            MOVING, name=name, volume_id=name.removeprefix('volume-'),
            under=(name + '-clone',))
        screen = console.Console(record=True, width=80, file=io.StringIO())
        screen.print(view.rendered(with_copies(copy)))
        shown = screen.export_text()
        for part in (copy.volume_id, 'clone', '4 GiB', 'ends in 0:03',
                     'peer b@local'):
            self.assertIn(part, shown)

    def test_move_shows_bar_bytes_rate_and_end(self):
        shown = self.shown(with_copies(MOVING))
        for part in ('id-2', 'arriving', 'migrating 2/2', 'b@local', '━━━━━',
                     '25% 1 GiB/4 GiB', '1 GiB/s', '0:03'):
            self.assertIn(part, shown)

    def test_move_shows_what_was_compared(self):
        compared = 'compared with the source: '
        self.assertNotIn(compared, self.shown(with_copies(MOVING)))
        for verified, words in ((0, '0 B'), (units.Gi, '1 GiB')):
            progress = engine.Progress(engine.Hydration.RUNNING, units.Gi,
                                       4 * units.Gi, verified=verified)
            copy = dataclasses.replace(MOVING, move=running(
                progress=progress))
            self.assertIn(compared + words, self.shown(with_copies(copy)))

    def test_bar_grows(self):
        def filled(local):
            screen = console.Console(width=200, force_terminal=True,
                                     color_system='truecolor',
                                     file=io.StringIO())
            copy = dataclasses.replace(MOVING, move=running(local))
            screen.print(view.rendered(with_copies(copy)))
            bar = screen.file.getvalue().split('━')
            return len(bar[0]), screen.file.getvalue()
        self.assertNotEqual(filled(units.Gi)[1].replace('25%', ''),
                            filled(2 * units.Gi)[1].replace('50%', ''))

    def test_move_without_progress_shows_no_bar(self):
        copy = dataclasses.replace(
            MOVING, move=running(progress=None, rate=None))
        shown = self.shown(with_copies(copy))
        self.assertIn('id-2', shown)
        self.assertNotIn('%', shown)

    def test_problem_names_its_volume(self):
        copy = dataclasses.replace(STANDING, problems=('it has no handle',))
        shown = self.shown(with_copies(copy))
        self.assertIn('! id-1: it has no handle', shown)
        self.assertNotIn('all well', shown)

    def test_problems_of_backend_and_node(self):
        found = report.Report(
            at=START, problems=('device x',),
            backends=(report.Backend('a@local', problems=('no group',)),))
        shown = self.shown(found)
        self.assertIn('! a@local: no group', shown)
        self.assertIn('! this node: device x', shown)
        self.assertIn('no volumes', shown)

    def test_all_well(self):
        self.assertIn('all well', self.shown(with_copies(STANDING)))

    def test_problem_that_looks_like_markup_is_shown_as_it_is(self):
        found = report.Report(at=START, problems=('[bold]x[/bold]',))
        self.assertIn('[bold]x[/bold]', self.shown(found))

    def test_node_without_our_backends_says_so(self):
        self.assertIn('No backend', self.shown(report.Report(at=START)))


class RatesTest(unittest.TestCase):

    def move(self, rates, local, at, **more):
        found = with_copies(dataclasses.replace(
            MOVING, move=running(local, **more)), at=at)
        return rates.measured(found).backends[0].copies[0].move

    def test_first_report_keeps_the_average(self):
        self.assertEqual(units.Gi, self.move(view.Rates(), 0, 0).rate)

    def test_second_report_gives_the_rate_between_them(self):
        rates = view.Rates()
        self.move(rates, 100, 0)
        self.assertEqual(150, self.move(rates, 400, 2).rate)

    def test_rate_follows_slowly(self):
        rates = view.Rates()
        self.move(rates, 0, 0)
        self.move(rates, 100, 1)
        rate = self.move(rates, 300, 2).rate
        self.assertTrue(100 < rate < 200, rate)

    def test_move_that_stalls_gets_slower(self):
        rates = view.Rates()
        self.move(rates, 0, 0)
        fast = self.move(rates, 100, 1).rate
        self.assertLess(self.move(rates, 100, 2).rate, fast)

    def test_two_reports_of_one_moment_do_no_harm(self):
        rates = view.Rates()
        self.move(rates, 0, 0)
        self.assertEqual(units.Gi, self.move(rates, 10, 0).rate)

    def test_move_that_is_not_hydrating_has_no_rate(self):
        move = self.move(view.Rates(), 0, 0, rate=None,
                         hydration=engine.Hydration.OFF)
        self.assertIsNone(move.rate)

    def test_copies_without_a_move_are_left_alone(self):
        found = with_copies(STANDING)
        self.assertEqual(found, view.Rates().measured(found))


class FlatTest(unittest.TestCase):

    def lines(self, found):
        return [{name: value.machine_readable()
                 for name, value in zip(view.COLUMNS, line, strict=True)}
                for line in view.flat(found)]

    def test_programs_get_numbers(self):
        line = self.lines(with_copies(MOVING))[0]
        self.assertEqual(
            {'Backend': 'a@local', 'Volume': 'id-2', 'Copy': 'volume-2',
             'Role': 'arriving', 'Size': 4 * units.Gi, 'Open': 0,
             'Handle on': ['volume-2-clone'], 'Move': 'm',
             'State': 'migrating', 'Peer': 'b@local',
             'Hydration': 'running', 'Arrived': units.Gi,
             'Total': 4 * units.Gi, 'Compared': None, 'Rate': units.Gi,
             'End in': 3,
             'Problems': []}, line)
        self.assertEqual(line, json.loads(json.dumps(line)))

    def test_what_was_compared_is_a_number(self):
        progress = engine.Progress(engine.Hydration.RUNNING, units.Gi,
                                   4 * units.Gi, verified=4096)
        copy = dataclasses.replace(MOVING, move=running(progress=progress))
        self.assertEqual(4096,
                         self.lines(with_copies(copy))[0]['Compared'])

    def test_people_get_words(self):
        values = dict(zip(view.COLUMNS, next(view.flat(with_copies(MOVING)))))
        self.assertEqual('4 GiB', str(values['Size']))
        self.assertEqual('0:03', str(values['End in']))
        values = dict(zip(view.COLUMNS,
                          next(view.flat(with_copies(STANDING)))))
        for name in ('Move', 'Arrived', 'End in', 'Problems'):
            self.assertEqual('', str(values[name]))

    def test_problems_of_node_and_backend_have_lines_of_their_own(self):
        found = report.Report(
            at=START, problems=('x',),
            backends=(report.Backend('a@local', problems=('y', 'z')),))
        self.assertEqual(
            [(None, 'node', ['x']), ('a@local', 'backend', ['y', 'z'])],
            [(line['Backend'], line['Role'], line['Problems'])
             for line in self.lines(found)])
