# SPDX-License-Identifier: Apache-2.0
"""`cinder-localstor drain`: empty the backends of a node."""

import argparse
import time

from cinder import context
from cliff import command
from rich import box
from rich import console
from rich import progress
from rich import table as rich_table

from cinder_localstor.cmd import backends
from cinder_localstor.cmd import view
from cinder_localstor.moves import drain

# Seconds between two looks
INTERVAL = 5.0
EMPTY, NOT_EMPTY = 0, 1


class Drain(command.Command):
    """Let the volumes of this node go to others, so that it can be replaced.

    Volumes that nobody uses are migrated by Cinder, each to the node that has
    most room of those with a backend of the same name. Users may use them
    meanwhile. Those of servers go with these, when they are migrated. What
    stays is shown, and why. It ends when all that can go is gone; broken off,
    it can be begun again.

    Run it as root on the node itself, whose services of Cinder's volumes have
    to be up, and disabled so that no new ones come. The exit status is 0 when
    nothing is left, and 1 when something stays.
    """

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument(
            'backends', nargs='*', metavar='BACKEND',
            help='names of backends, as enabled_backends has them (default: '
                 'all of this driver)')
        parser.add_argument(
            '--at-once', type=_positive, default=drain.AT_ONCE, metavar='N',
            help='how many volumes of a backend leave at the same time '
                 '(default: %d)' % drain.AT_ONCE)
        parser.add_argument(
            '--dry-run', action='store_true',
            help='only show what would go and what would stay')
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> int:
        backends.load(self.app.options.config_file)
        backends.join_bus()
        self._console = console.Console(file=self.app.stdout, highlight=False)
        with backends.database_errors_told():
            drains = [drain.Drain(chosen.host, chosen.name,
                                  parsed_args.at_once)
                      for chosen in backends.chosen(parsed_args.backends)]
            if parsed_args.dry_run:
                looks = [self._show_plan(one) for one in drains]
            else:
                for one in drains:
                    one.check(context.get_admin_context())
                looks = [self._drain(one) for one in drains]
        for one, found in zip(drains, looks):
            self._show_rest(one.host, found)
        return NOT_EMPTY if any(found.staying for found in looks) else EMPTY

    def _show_plan(self, one: drain.Drain) -> drain.Look:
        found = one.look(context.get_admin_context())
        self._console.print('%s: %d volumes would go, %d are on their way' % (
            one.host, len(found.ready), len(found.going)))
        return found

    def _drain(self, one: drain.Drain) -> drain.Look:
        with progress.Progress(
                progress.TextColumn('{task.description}'),
                progress.BarColumn(), progress.TaskProgressColumn(),
                progress.TextColumn('{task.fields[what]}'),
                console=self._console) as shown:
            bar = None
            while True:
                found = one.advance(context.get_admin_context())
                if bar is None:
                    size = found.size
                    bar = shown.add_task(one.host, total=size or 1, what='')
                shown.update(bar, what=_summary(found),
                             completed=size - found.size if size else 1)
                if found.is_over:
                    return found
                time.sleep(INTERVAL)

    def _show_rest(self, host: str, found: drain.Look) -> None:
        if not found.staying:
            if found.is_over:
                self._console.print('%s has nothing left.' % host)
            return
        grid = rich_table.Table(box=box.SIMPLE_HEAD, pad_edge=False,
                                title='What stays on %s' % host,
                                title_justify='left')
        for name in ('', 'id', 'why'):
            grid.add_column(name, overflow='fold')
        for what in found.staying:
            grid.add_row(what.kind, what.identity, what.reason)
        self._console.print(grid)


def _summary(found: drain.Look) -> str:
    """What is under way, for a line of the terminal."""
    text = '%s left: %d on their way, %d to follow, %d stay' % (
        view.size(found.size), len(found.going), len(found.ready),
        len(found.staying))
    problems = sorted({one.problem for one in found.going if one.problem})
    return text + ''.join('\n! ' + problem for problem in problems)


def _positive(value: str) -> int:
    number = int(value)
    if number < 1:
        raise argparse.ArgumentTypeError('%s is not above 0' % value)
    return number
