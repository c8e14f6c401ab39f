# SPDX-License-Identifier: Apache-2.0
"""`cinder-localstor abandon`: end a move whose other node is lost."""

import argparse

from cinder import context
from cliff import command

from cinder_localstor.cmd import backends
from cinder_localstor.moves import abandon


class Abandon(command.Command):
    """Let a move go on without its other node, which will never come back.

    Run it on the node that is left. What the lost node had to do counts as
    done. It is refused while cinder-volume is up on both nodes, and where the
    lost node holds what no other node has.

    A copy that is left on the lost node is of an old generation and is not
    activated there, should it come back after all.
    """

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument('move', metavar='MOVE',
                            help='id of the move, from cinder-localstor '
                                 'status')
        parser.add_argument(
            '--written-is-lost', action='store_true',
            help='go back to the source, as it was when the volume left it, '
                 'even though the guest may have written on the lost '
                 'destination; give up a copy that was arriving there')
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> None:
        backends.load(self.app.options.config_file)
        move = abandon.abandon(context.get_admin_context(), parsed_args.move,
                               parsed_args.written_is_lost)
        self.app.stdout.write(
            'Move %s of volume %s (%s) goes on without its other node.\n'
            % (move.move_id, move.volume_id, move.state))
