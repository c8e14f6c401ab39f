# SPDX-License-Identifier: Apache-2.0
"""The command `cinder-localstor`."""

import argparse
import logging
import sys
from typing import Any
import warnings

from cliff import app
from cliff import commandmanager
from pbr import version

NAMESPACE = 'cinder_localstor.commands'
DESCRIPTION = 'Look after the node-local volumes of this node.'


class LocalStorApp(app.App):
    """Runs the commands of NAMESPACE."""

    NAME = 'cinder-localstor'
    LOG = logging.getLogger(NAME)

    def __init__(self, **streams: Any) -> None:
        super().__init__(
            description=DESCRIPTION,
            version=version.VersionInfo('cinder-localstor').version_string(),
            command_manager=commandmanager.CommandManager(NAMESPACE),
            deferred_help=True, **streams)

    def build_option_parser(
            self, description: str | None, version: str | None,
            argparse_kwargs: dict[str, Any] | None = None
    ) -> argparse.ArgumentParser:
        parser = super().build_option_parser(description, version,
                                             argparse_kwargs)
        parser.add_argument(
            '--config-file', action='append', metavar='PATH', default=[],
            help="cinder's configuration, more than one if repeated "
                 '(default: where cinder looks, /etc/cinder/cinder.conf)')
        return parser

    def configure_logging(self) -> None:
        """Send what matters here to the terminal, and no more.

        Libraries log what the commands tell better; all of it is there with
        --verbose or --log-file.
        """
        # Some library may have made a handler as soon as it was imported.
        logging.getLogger().handlers.clear()
        super().configure_logging()
        if self.options.verbose_level > self.DEFAULT_VERBOSE_LEVEL:
            return
        for handler in logging.getLogger().handlers:
            if (isinstance(handler, logging.StreamHandler)
                    and not isinstance(handler, logging.FileHandler)):
                handler.addFilter(logging.Filter(self.LOG.name))

    def initialize_app(self, argv: list[str]) -> None:
        # Not cliff's interactive mode, which nobody has asked for.
        self.options.deferred_help |= not argv


def main(arguments: list[str] | None = None) -> int:
    """Entry point."""
    # They tell developers what Cinder's libraries will change.
    warnings.simplefilter('ignore')
    return LocalStorApp().run(
        sys.argv[1:] if arguments is None else arguments)


if __name__ == '__main__':
    sys.exit(main())
