# SPDX-License-Identifier: Apache-2.0
"""Draws what a guest loses to hydration, and what arrives meanwhile.

``python -m lab.bench.beside FILE.svg`` runs the model of the native helper's
core (``hydrator/core/benches/beside.rs``), which finds the same on every
machine.
"""

import collections
import csv
import pathlib
import statistics
import subprocess
import sys

import matplotlib

HYDRATOR = pathlib.Path(__file__).parents[2] / 'hydrator'
COMMAND = ('cargo', 'bench', '--locked', '--package',
           'localstor-hydrator-core', '--bench', 'beside', '--',
           '--over-time')
REQUESTS, SLOWEST, ARRIVED = 'requests a second', '99 of 100 in us', 'MB/s'
# A row of the picture each, by the heading of their column
PANELS = {REQUESTS: 'requests, of those alone',
          SLOWEST: '99 of 100 within, µs',
          ARRIVED: 'arrives, MB/s'}
COLUMNS = ('disk', 'depth')
# Tenths of a second that the guest is alone
ALONE = 20
INCHES = 3.2, 2.1


def read(lines: list[str]) -> dict[tuple[str, str], list[dict[str, str]]]:
    """Rows of the model by disk and depth."""
    found = collections.defaultdict(list)
    for row in csv.DictReader(lines):
        found[row['disk'], row['depth']].append(row)
    return dict(found)


def draw(found: dict[tuple[str, str], list[dict[str, str]]],
         path: pathlib.Path) -> None:
    """One column for each disk, and in it a line for each depth."""
    matplotlib.use('svg')
    matplotlib.rcParams['svg.hashsalt'] = 'the same each time'
    from matplotlib import pyplot
    disks = list(dict.fromkeys(disk for disk, _depth in found))
    figure, axes = pyplot.subplots(
        len(PANELS), len(disks), sharex=True, squeeze=False,
        figsize=(INCHES[0] * len(disks), INCHES[1] * len(PANELS)))
    for (disk, depth), rows in found.items():
        seconds = [float(row['seconds']) for row in rows]
        for panel, heading in enumerate(PANELS):
            values = [float(row[heading]) for row in rows]
            if heading == REQUESTS:
                alone = statistics.mean(values[:ALONE])
                values = [value / alone for value in values]
            axes[panel][disks.index(disk)].plot(
                seconds, values, label=f'{depth} at once')
    for panel, (heading, title) in enumerate(PANELS.items()):
        axes[panel][0].set_ylabel(title)
        for axis in axes[panel]:
            axis.grid(alpha=0.3)
            if heading == SLOWEST:
                axis.set_yscale('log')
            else:
                axis.set_ylim(bottom=0)
    for number, disk in enumerate(disks):
        axes[0][number].set_title(disk)
        axes[-1][number].set_xlabel('seconds')
    axes[0][0].legend(fontsize='small')
    figure.tight_layout()
    figure.savefig(path, metadata={'Date': None})


def main() -> None:
    """Run the model, and draw what it prints."""
    [path] = sys.argv[1:]
    printed = subprocess.run(COMMAND, cwd=HYDRATOR, check=True, text=True,
                             stdout=subprocess.PIPE).stdout.splitlines()
    # Cargo may say something first.
    first = next(number for number, line in enumerate(printed)
                 if line.startswith(','.join(COLUMNS)))
    draw(read(printed[first:]), pathlib.Path(path))


if __name__ == '__main__':
    main()
