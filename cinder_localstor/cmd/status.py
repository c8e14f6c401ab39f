# SPDX-License-Identifier: Apache-2.0
"""`cinder-localstor status`: what is here, and what is wrong with it."""

import argparse
from collections.abc import Iterable
from collections.abc import Sequence
from importlib import metadata
import time
from typing import Any, NamedTuple, TextIO

from cinder import context
from cliff.formatters import base
from cliff import lister
from rich import console
from rich import live
from rich import text
from stevedore import extension

from cinder_localstor.cmd import backends
from cinder_localstor.cmd import view
from cinder_localstor.datapath import destination
from cinder_localstor.datapath import engines
from cinder_localstor import exception
from cinder_localstor.moves import report
from cinder_localstor.node import interface
from cinder_localstor.node import real

# Name of the format for people
VIEW = 'view'
# Seconds between the two looks that make sure of a problem
SECOND_LOOK = 1.0
WELL, WRONG = 0, 1


class ViewFormatter(base.ListFormatter):
    """Shows the report itself and not the lines that are made of it."""

    found = report.Report(at=report.NEVER)

    def add_argument_group(self, parser: argparse.ArgumentParser) -> None:
        pass

    def emit_list(self, column_names: Sequence[str],
                  data: Iterable[Sequence[Any]], stdout: TextIO,
                  parsed_args: argparse.Namespace) -> None:
        console.Console(file=stdout).print(view.rendered(self.found))


class Status(lister.Lister):
    """Show the volumes of this node, its running moves and what is wrong.

    Run it as root on the node itself. It reads only: volumes and moves take
    no notice of it. The exit status is 0 when all is well, and 1 when
    something is wrong, for a second at least, or could not be found out.
    With --watch it is 0.
    """

    formatter_default = VIEW
    need_sort_by_cliff = False

    def _load_formatter_plugins(self) -> Any:
        plugins = super()._load_formatter_plugins()
        self._view = ViewFormatter()
        plugins.extensions.append(extension.Extension(
            VIEW, metadata.EntryPoint(VIEW, __name__ + ':ViewFormatter',
                                      self.formatter_namespace),
            ViewFormatter, self._view))
        return plugins

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument(
            '--watch', action='store_true',
            help='show it until interrupted, with the rates of the moment')
        parser.add_argument(
            '--interval', type=_seconds, default=2.0, metavar='SECONDS',
            help='time between two looks of --watch (default: 2)')
        return parser

    def run(self, parsed_args: argparse.Namespace) -> int:
        backends.load(self.app.options.config_file)
        watcher = Watcher([_backend(configured) for configured
                           in backends.configured()])
        if parsed_args.watch:
            self._watch(watcher, parsed_args.interval)
            return WELL
        self._view.found = found = watcher.make_sure()
        super().run(parsed_args)
        return WELL if found.is_well and found.backends else WRONG

    def take_action(self, parsed_args: argparse.Namespace
                    ) -> tuple[Sequence[str], Iterable[Sequence[Any]]]:
        return view.COLUMNS, view.flat(self._view.found)

    def _watch(self, watcher: 'Watcher', interval: float) -> None:
        rates = view.Rates()
        screen = console.Console(file=self.app.stdout)
        with live.Live(console=screen, auto_refresh=False) as shown:
            while True:
                try:
                    found = rates.measured(watcher.look())
                    shown.update(view.rendered(found), refresh=True)
                except exception.DatabaseUnreadable as error:
                    # It may come back, and whoever watches wants to see it.
                    shown.update(text.Text(str(error), view.WRONG),
                                 refresh=True)
                time.sleep(interval)


class Backend(NamedTuple):
    """``host@backend``, its tools and what arrives there."""

    host: str
    node: interface.Node
    on_destination: destination.Destination


def _backend(configured: backends.Configured) -> Backend:
    node = real.node(configured.configuration)
    return Backend(configured.host, node, destination.Destination(
        node, engines.Engines(node, configured.configuration)))


class Watcher:
    """Looks at the backends of this node."""

    def __init__(self, found: list[Backend]) -> None:
        self._backends = found

    def look(self) -> report.Report:
        """What is here now.

        :raises DatabaseUnreadable: nobody knows what should be here
        """
        ctxt = context.get_admin_context()
        with backends.database_errors_told():
            return report.report([
                (report.look(ctxt, backend.host, backend.node), backend.node,
                 backend.on_destination) for backend in self._backends])

    def make_sure(self) -> report.Report:
        """What is here now, and what is wrong and stays wrong."""
        found = self.look()
        if found.is_well:
            return found
        time.sleep(SECOND_LOOK)
        return report.lasting(found, self.look())


def _seconds(value: str) -> float:
    seconds = float(value)
    if seconds <= 0:
        raise argparse.ArgumentTypeError('%s is not above 0' % value)
    return seconds
