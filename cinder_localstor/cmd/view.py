# SPDX-License-Identifier: Apache-2.0
"""How a report looks on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import datetime
from typing import Any

from cliff import columns
from oslo_utils import units
from rich import box
from rich import console
from rich import padding
from rich import progress_bar
from rich import table as rich_table
from rich import text

from cinder_localstor.datapath import engine
from cinder_localstor.moves import report

STALLED = 'stalled'
BAR_WIDTH = 36
# How much the newest sample weighs in the rate that is shown
WEIGHT = 0.3

WELL, WRONG, FAINT = 'green', 'bold red', 'dim'


def size(count: float | None) -> str:
    """Bytes for a reader."""
    if count is None:
        return '-'
    for unit, name in ((units.Ti, 'TiB'), (units.Gi, 'GiB'),
                       (units.Mi, 'MiB'), (units.Ki, 'KiB')):
        if count >= unit:
            return '%.4g %s' % (count / unit, name)
    return '%d B' % count


def rate(count: float | None) -> str:
    """Bytes per second for a reader."""
    return '-' if count is None else size(count) + '/s'


def duration(seconds: float | None) -> str:
    """A time span for a reader."""
    if seconds is None:
        return '-'
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return '%d:%02d:%02d' % (hours, minutes, rest)
    return '%d:%02d' % (minutes, rest)


class Rates:
    """How fast moves advance, from successive reports."""

    def __init__(self) -> None:
        self._samples: dict[str, tuple[datetime.datetime, int]] = {}
        self._rates: dict[str, float] = {}

    def measured(self, found: report.Report) -> report.Report:
        """The report with the rates of late instead of the average ones."""
        return dataclasses.replace(found, backends=tuple(
            dataclasses.replace(backend, copies=tuple(
                dataclasses.replace(copy, move=self._measure(copy.move,
                                                             found.at))
                for copy in backend.copies))
            for backend in found.backends))

    def _measure(self, move: report.Running | None, at: datetime.datetime
                 ) -> report.Running | None:
        if (move is None or move.progress is None
                or move.progress.hydration is not engine.Hydration.RUNNING):
            return move
        before = self._samples.get(move.move_id)
        self._samples[move.move_id] = (at, move.progress.local)
        if before is None:
            return move
        seconds = (at - before[0]).total_seconds()
        if seconds > 0:
            newest = max(0.0, (move.progress.local - before[1]) / seconds)
            known = self._rates.get(move.move_id, newest)
            self._rates[move.move_id] = known + WEIGHT * (newest - known)
        return dataclasses.replace(
            move, rate=self._rates.get(move.move_id, move.rate))


def rendered(found: report.Report) -> console.Group:
    """The whole report."""
    return console.Group(*_parts(found))


def _parts(found: report.Report) -> Iterator[console.RenderableType]:
    if not found.backends:
        yield text.Text('No backend of this node has the driver '
                        'cinder_localstor.', WRONG)
    for backend in found.backends:
        yield text.Text(backend.host, 'bold')
        if backend.copies:
            yield _table_of(backend)
        else:
            yield text.Text('no volumes', FAINT)
        yield from _problems_of(backend)
        yield text.Text('')
    for problem in found.problems:
        yield _problem('this node', problem)
    if found.backends and found.is_well:
        yield text.Text('all well', WELL)


def _table_of(backend: report.Backend) -> rich_table.Table:
    # Narrow enough for a terminal of 80 columns.
    grid = rich_table.Table(box=box.SIMPLE_HEAD, pad_edge=False,
                            padding=(0, 1, 0, 0))
    grid.add_column('')
    grid.add_column('volume', no_wrap=True)
    grid.add_column('size', justify='right')
    grid.add_column('open', justify='right')
    grid.add_column('handle on', overflow='fold')
    grid.add_column('state')
    for copy in backend.copies:
        grid.add_row(
            text.Text('!', WRONG) if copy.problems else text.Text('+', WELL),
            console.Group(copy.volume_id or copy.name,
                          *_lines_of_move(copy.move)),
            size(copy.size),
            '-' if copy.open_count is None else str(copy.open_count),
            ' + '.join(_kind(copy, name) for name in copy.under) or '-',
            _state(copy))
    return grid


def _kind(copy: report.Entry, name: str) -> str:
    """What a handle lies on, without the name of the copy itself."""
    if name.endswith('-' + copy.name.replace('-', '--')):
        return 'LV'
    return name.removeprefix(copy.name + '-')


def _state(copy: report.Entry) -> str:
    if copy.move is None:
        return copy.role.value
    steps = (' %d/%d' % (copy.move.done, copy.move.steps)
             if copy.move.steps else '')
    return '%s\n%s%s' % (copy.role.value, copy.move.state, steps)


def _lines_of_move(move: report.Running | None
                   ) -> Iterator[console.RenderableType]:
    if move is None:
        return
    yield text.Text('peer ' + move.peer, FAINT)
    progress = move.progress
    if progress is not None and progress.total:
        # The padding ends the line.
        yield padding.Padding(progress_bar.ProgressBar(
            total=progress.total, completed=progress.local,
            width=BAR_WIDTH), 0)
        yield '%d%% %s/%s' % (100 * progress.local // progress.total,
                              size(progress.local), size(progress.total))
        if progress.verified is not None:
            yield text.Text('compared with the source: '
                            + size(progress.verified), FAINT)
        yield (text.Text(STALLED + ': the source is away', WRONG)
               if move.stalled else '%s, ends in %s' % (
                   rate(move.rate), duration(move.remaining)))


def _problems_of(backend: report.Backend) -> Iterator[text.Text]:
    for problem in backend.problems:
        yield _problem(backend.host, problem)
    for copy in backend.copies:
        for problem in copy.problems:
            yield _problem(copy.volume_id or copy.name, problem)


def _problem(where: str, problem: str) -> text.Text:
    return text.Text.assemble(('! %s: ' % where, WRONG), problem)


# Columns of the formatters for programs; numbers are bytes and seconds.
COLUMNS = ('Backend', 'Volume', 'Copy', 'Role', 'Size', 'Open', 'Handle on',
           'Move', 'State', 'Peer', 'Hydration', 'Arrived', 'Total',
           'Compared', 'Rate', 'End in', 'Problems')


class Texts(columns.FormattableColumn[list[str]]):
    """Some texts; a program gets a list."""

    def human_readable(self) -> str:
        return '\n'.join(self._value)


class Amount(columns.FormattableColumn[int | None]):
    """A number that may be unknown; a program gets a number."""

    def human_readable(self) -> str:
        return '' if self._value is None else str(self._value)


class Bytes(Amount):
    """A number of bytes."""

    def human_readable(self) -> str:
        return '' if self._value is None else size(self._value)


class Seconds(Amount):
    """A time span."""

    def human_readable(self) -> str:
        return '' if self._value is None else duration(self._value)


class Word(columns.FormattableColumn[str | None]):
    """A word that may be missing."""

    def human_readable(self) -> str:
        return self._value or ''


KINDS = {'Size': Bytes, 'Open': Amount, 'Handle on': Texts, 'Arrived': Bytes,
         'Total': Bytes, 'Compared': Bytes, 'Rate': Bytes,
         'End in': Seconds, 'Problems': Texts}


def flat(found: report.Report) -> Iterator[tuple[Any, ...]]:
    """A line for each copy, and for each backend or node with a problem."""
    for line in _lines(found):
        yield tuple(KINDS.get(name, Word)(line.get(name))
                    for name in COLUMNS)


def _lines(found: report.Report) -> Iterator[dict[str, Any]]:
    if found.problems:
        yield _line('node', found.problems)
    for backend in found.backends:
        if backend.problems:
            yield _line('backend', backend.problems, Backend=backend.host)
        for copy in backend.copies:
            yield {**_line(copy.role.value, copy.problems,
                           Backend=backend.host),
                   'Volume': copy.volume_id or None, 'Copy': copy.name,
                   'Size': copy.size, 'Open': copy.open_count,
                   'Handle on': list(copy.under), **_move_line(copy.move)}


def _line(role: str, problems: tuple[str, ...], **more: str
          ) -> dict[str, Any]:
    return {'Role': role, 'Problems': list(problems), 'Handle on': [],
            **more}


def _move_line(move: report.Running | None) -> dict[str, Any]:
    if move is None:
        return {}
    line = {'Move': move.move_id, 'State': move.state, 'Peer': move.peer,
            'Rate': None if move.rate is None else round(move.rate),
            'End in': (None if move.remaining is None
                       else round(move.remaining))}
    if move.progress is not None:
        line.update({'Hydration': (STALLED if move.stalled
                                   else move.progress.hydration.value),
                     'Arrived': move.progress.local,
                     'Total': move.progress.total,
                     'Compared': move.progress.verified})
    return line
