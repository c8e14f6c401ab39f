# SPDX-License-Identifier: Apache-2.0
"""Shows what was measured: tables, a plot, and everything as JSON."""

from collections.abc import Iterable
from collections.abc import Iterator
import csv
import io
import json
import math
import pathlib
import statistics
import textwrap

from rich import console as consoles
from rich import table as tables_

from lab.bench import results as results_
from lab.bench import scenarios
from lab.bench import stacks
from lab.bench import vhost
from lab import sizes

# Narrower, the tables break their lines.
WIDTH = 150
# Keys whose writes to the disk are counted
WRITES = ('sync-new', 'fsync-new', 'deep-new', 'big-write-new',
          'sync-settled', 'deep-settled')
NOTHING = '-'
MIB = 1 << 20


def show(found: results_.Results, folder: pathlib.Path,
         console: consoles.Console) -> None:
    """Print the tables, and leave them below a folder with JSON and plot."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / 'bench.json').write_text(
        json.dumps(found.as_dict(), indent=1) + '\n')
    with open(folder / 'tables.txt', 'w') as file:
        for target in (console, consoles.Console(file=file, width=WIDTH)):
            for table in filter(lambda table: table.rows, tables(found)):
                target.print(table)
                target.print()
            for failure in found.failures:
                target.print(f'FAILED {failure}', markup=False)
    (folder / 'tables.inc').write_text('\n'.join(
        as_rst(table) for table in tables(found) if table.rows))
    plot(found, folder / 'latency.svg')
    console.print(f'Everything: {folder}/bench.json, tables.txt, tables.inc, '
                  'latency.svg', markup=False)


def as_rst(table: tables_.Table) -> str:
    """The same table, for the documentation."""
    file = io.StringIO()
    writer = csv.writer(file, quoting=csv.QUOTE_ALL, lineterminator='\n')
    writer.writerow(column.header for column in table.columns)
    writer.writerows(zip(*(column.cells for column in table.columns)))
    rows = textwrap.indent(file.getvalue(), ' ' * 3)
    return (f'.. csv-table:: {table.title}\n   :header-rows: 1\n\n{rows}')


def tables(found: results_.Results) -> Iterator[tables_.Table]:
    """All tables; some have no rows after a quick run."""
    yield _environment(found)
    for key in ('sync-new', 'fsync-new', 'sync-settled'):
        yield _latencies(found, key)
    yield _side_by_side(
        found, 'Side by side, nothing is copied in the background',
        [*_keys(scenarios.SIDE_BY_SIDE), 'deep-new', *_keys(scenarios.SLOW)])
    yield _side_by_side(
        found, 'While hydration goes on: the guest (beside it the raw volume '
        'without)', _keys(scenarios.WHILE_HYDRATING))
    yield _written(found)
    yield _hydration(found)
    yield _swap(found)
    yield _side_by_side(found, 'The six commands', list(scenarios.SIX))
    yield _native(found)
    yield _vhost(found)
    yield _goals(found)


def _keys(some: Iterable[scenarios.Scenario]) -> list[str]:
    return [step.key for scenario in some for step in scenario.steps
            if step.key]


def _table(title: str, *columns: str) -> tables_.Table:
    table = tables_.Table(title=title, title_justify='left')
    for number, column in enumerate(columns):
        table.add_column(column, justify='right' if number else 'left')
    return table


def _environment(found: results_.Results) -> tables_.Table:
    table = _table('Where', 'what', 'is')
    for name, value in found.environment.items():
        if isinstance(value, (tuple, list)):
            value = ', '.join(f'{part:.1f}' for part in value)
        elif isinstance(value, float):
            value = f'{value:.0f}'
        table.add_row(name, str(value))
    loads = [sample.load for sample in found.samples]
    if loads:
        table.add_row('load: least, median, most',
                      f'{min(loads):.1f}, {statistics.median(loads):.1f}, '
                      f'{max(loads):.1f}')
    return table


def _latencies(found: results_.Results, key: str) -> tables_.Table:
    disks = found.latencies(key)
    raw = found.line(key, 'raw')
    table = _table(
        f'{scenarios.LABELS[key]}: latency = a + b * disk', '',
        *(f'disk {disk:g} ms: µs, IOPS, of raw' for disk in disks),
        'a, µs', 'b', 'b of raw', 'median request: a, µs', 'b')
    for kind in stacks.ALL:
        cells = []
        for disk in disks:
            iops = found.median(key, kind.name, 'iops', disk)
            ratio = found.ratio(key, kind.name, 'iops', disk)
            cells.append(NOTHING if not iops else
                         f'{1e6 / iops:.0f}  {iops:.0f}  {_ratio(ratio)}')
        line = found.line(key, kind.name)
        cells += [NOTHING] * 3 if line is None else [
            f'{line.a * 1e6:.0f}', f'{line.b:.3f}',
            f'{line.b / raw.b:.3f}' if raw else NOTHING]
        typical = found.line(key, kind.name, typical=True)
        cells += [NOTHING] * 2 if typical is None else [
            f'{typical.a * 1e6:.0f}', f'{typical.b:.3f}']
        table.add_row(kind.label, *cells)
    return table


def _side_by_side(found: results_.Results, title: str, keys: Iterable[str]
                  ) -> tables_.Table:
    table = _table(f'{title}: IOPS or MB/s, of raw', '', 'disk',
                   *(kind.label for kind in stacks.ALL))
    for key in keys:
        beside = scenarios.BESIDE.get(key, key)
        quantity = 'bandwidth' if _is_big(key) else 'iops'
        for disk in found.latencies(key):
            cells = []
            for kind in stacks.ALL:
                raw = kind is stacks.Raw
                value = found.median(beside if raw else key, kind.name,
                                     quantity, disk)
                ratio = found.ratio(key, kind.name, quantity, disk, beside)
                cells.append(NOTHING if value is None else ' '.join(filter(
                    None, [_amount(value, quantity),
                           '' if raw else _ratio(ratio)])))
            table.add_row(scenarios.LABELS[key], f'{disk:g} ms', *cells)
    return table


def _is_big(key: str) -> bool:
    return key.startswith('big-') or key in ('six-1', 'six-2')


def _written(found: results_.Results) -> tables_.Table:
    table = _table('Written to the disk for each byte of the guest, and '
                   'requests of the disk for each of the guest\'s', '',
                   'disk', *(kind.label for kind in stacks.ALL))
    for key in WRITES:
        for disk in found.latencies(key):
            cells = []
            for kind in stacks.ALL:
                figures = [found.median(key, kind.name, quantity, disk)
                           for quantity in ('amplification', 'operations')]
                cells.append('  '.join(
                    NOTHING if figure is None else f'{figure:.3f}'
                    for figure in figures))
            table.add_row(scenarios.LABELS[key], f'{disk:g} ms', *cells)
    return table


def _hydration(found: results_.Results) -> tables_.Table:
    table = _table('Hydration, MB/s (of dd)', '',
                   *('dd' if kind is stacks.Raw else kind.label
                     for kind in stacks.ALL))
    cells = []
    for kind in stacks.ALL:
        rate = found.median('hydration', kind.name, 'hydration')
        ratio = found.ratio('hydration', kind.name, 'hydration')
        cells.append(NOTHING if rate is None
                     else f'{_amount(rate, "bandwidth")} {_ratio(ratio)}')
    table.add_row(scenarios.LABELS['hydration'], *cells)
    for key in ('deep-settled-on', 'read-remote-on', 'big-read-on'):
        table.add_row(
            'guest: ' + scenarios.LABELS[key],
            *(_amount(found.median(key, kind.name, 'hydration'), 'bandwidth')
              for kind in stacks.ALL))
    return table


def _swap(found: results_.Results) -> tables_.Table:
    table = _table('The swap to linear, ms', '',
                   *(kind.label for kind in scenarios.SWAPPED))
    for quantity, label in (
            ('linear', 'from "all local" to linear'),
            ('settle', 'of this: a flush of the engine'),
            ('load_and_resume', 'of this: dmsetup load, dmsetup resume'),
            ('pause', 'longest request of the guest, in that time'),
            ('elsewhere', 'longest request of the guest, else')):
        table.add_row(label, *(
            NOTHING if (value := found.median('swap', kind.name, quantity))
            is None else f'{value * 1e3:.1f}' for kind in scenarios.SWAPPED))
    return table


def _native(found: results_.Results) -> tables_.Table:
    table = _table('Natively', '', 'median', 'from', 'to')
    for name, nanoseconds in found.native.get('request', {}).items():
        table.add_row(f'core, {name}', *(
            f'{nanoseconds[part]:.1f} ns'
            for part in ('median', 'low', 'high')))
    for size, used in found.native.get('memory', {}).items():
        for name in ('VmRSS', 'VmLck'):
            table.add_row(f'helper, volume of {int(size) // sizes.GIB} GiB, '
                          f'{name}', f'{used[name] / MIB:.1f} MiB', '', '')
    growth = memory_per_tib(found)
    if growth is not None:
        table.add_row('helper, memory for each TiB more',
                      f'{growth / MIB:.1f} MiB', '', '')
    return table


def _vhost(found: results_.Results) -> tables_.Table:
    table = _table('vhost-user-blk natively (of QEMU\'s)', '',
                   *(server.label for server in vhost.SERVERS))
    for load in vhost.LOADS:
        if not any(sample.key == load.key for sample in found.samples):
            continue
        for quantity, label in (('iops', 'IOPS'), ('p50', 'median, µs'),
                                ('iops_per_core', 'IOPS per core')):
            cells = []
            for server in vhost.SERVERS:
                value = found.median(load.key, server.name, quantity)
                if value is None:
                    cells.append(NOTHING)
                elif quantity == 'p50':
                    cells.append(f'{value * 1e6:.1f}')
                elif server.beside is None:
                    cells.append(f'{value:.0f}')
                else:
                    ratio = found.ratio(load.key, server.name, quantity,
                                        to=server.beside)
                    cells.append(f'{value:.0f} {_ratio(ratio)}')
            table.add_row(f'{load.label}: {label}', *cells)
    return table


def memory_per_tib(found: results_.Results) -> float | None:
    """Bytes by which the helper grows with each TiB of its volume."""
    sized = sorted((int(size), used['VmRSS'])
                   for size, used in found.native.get('memory', {}).items())
    if len(sized) < 2:
        return None
    (small, less), (large, more) = sized[0], sized[-1]
    return (more - less) / (large - small) * 1024 * sizes.GIB


def _goals(found: results_.Results) -> tables_.Table:
    table = _table('The helper\'s goals', '', 'goal', stacks.UblkHydrator
                   .label, stacks.NbdHydrator.label)

    def add(label: str, goal: str, figure: str, *arguments: object) -> None:
        cells = []
        for name in (stacks.UblkHydrator.name, stacks.NbdHydrator.name):
            key, *rest = arguments
            if figure in ('b', 'typical b'):
                line = found.line(str(key), name, figure != 'b')
                value = line.b if line else None
            else:
                value = getattr(found, figure)(key, name, *rest)
            cells.append(NOTHING if value is None
                         else _unrounded(value, 3, up=goal.startswith('<')))
        table.add_row(label, goal, *cells)

    add('sync=1, remote: b', '<= 1.05', 'b', 'sync-new')
    add('sync=1, remote: b of the median request', '<= 1.05', 'typical b',
        'sync-new')
    add('sync=1, settled: b', '1.0', 'b', 'sync-settled')
    add('sync=1, remote, 3 ms: IOPS of raw', '>= 0.95', 'ratio', 'sync-new',
        'iops', 3.0)
    add('sync=1, remote, 0.3 ms: IOPS of raw', '>= 0.75', 'ratio',
        'sync-new', 'iops', 0.3)
    add('depth 32, remote, 3 ms: IOPS of raw', '>= 0.9', 'ratio', 'deep-new',
        'iops', 3.0)
    add('depth 32, remote, 3 ms: written per byte', '< 1.1', 'median',
        'deep-new', 'amplification', 3.0)
    add('hydration, no guest: of dd', '>= 0.9', 'ratio', 'hydration',
        'hydration')
    table.add_row('hydration, guest at depth 32: MB/s', '>= 10.5', *(
        _amount(found.median('deep-settled-on', kind.name, 'hydration'),
                'bandwidth')
        for kind in (stacks.UblkHydrator, stacks.NbdHydrator)))
    slowest = max((figures['median'] for name, figures
                   in found.native.get('request', {}).items()
                   if '32' not in name and 'flush' not in name), default=None)
    table.add_row('core, slowest single request', '< 200 ns',
                  NOTHING if slowest is None else f'{slowest:.1f} ns', '')
    growth = memory_per_tib(found)
    table.add_row('memory for each TiB', '< 48 MiB',
                  NOTHING if growth is None else f'{growth / MIB:.1f} MiB',
                  '')
    return table


def _amount(value: float | None, quantity: str) -> str:
    if value is None:
        return NOTHING
    if quantity == 'bandwidth':
        return f'{value / 1e6:.1f} MB/s'
    return f'{value:.0f}'


def _ratio(value: float | None) -> str:
    return NOTHING if value is None else _unrounded(value, 2)


def _unrounded(value: float, digits: int, up: bool = False) -> str:
    """So that nothing reaches a goal by being rounded."""
    scaled = value * 10 ** digits
    # What binary fractions add is no reason for another digit.
    whole = math.ceil(scaled - 1e-6) if up else math.floor(scaled + 1e-6)
    return f'{whole / 10 ** digits:.{digits}f}'


def plot(found: results_.Results, path: pathlib.Path) -> None:
    """Latency over the disk's, with its lines; and IOPS of raw."""
    # Slow to import, and only wanted here
    import matplotlib
    matplotlib.use('svg')
    from matplotlib import pyplot

    key = 'sync-new'
    disks = found.latencies(key)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.5))
    for kind in stacks.ALL:
        line = found.line(key, kind.name)
        if line is None:
            continue
        seen = [(disk, iops) for disk in disks
                if (iops := found.median(key, kind.name, 'iops', disk))]
        points = left.plot([disk for disk, _iops in seen],
                           [1e3 / iops for _disk, iops in seen], 'o')
        colour = points[0].get_color()
        left.plot(disks, [line.a * 1e3 + line.b * disk for disk in disks],
                  color=colour, label=f'{kind.label}: b = {line.b:.2f}')
        right.plot(disks, [found.ratio(key, kind.name, 'iops', disk)
                           for disk in disks], 'o-', color=colour,
                   label=kind.label)
    left.set(xlabel='disk, ms for each request', ylabel='guest, ms',
             title=scenarios.LABELS[key])
    right.set(xlabel='disk, ms for each request', ylabel='IOPS of raw LV',
              xscale='log', ylim=(0, 1.1), title='The same, beside raw')
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
