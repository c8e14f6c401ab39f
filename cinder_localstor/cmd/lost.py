# SPDX-License-Identifier: Apache-2.0
"""`cinder-localstor lost`: a node will never come back."""

import argparse

from cinder import context
from cliff import command

from cinder_localstor.cmd import backends
from cinder_localstor.moves import loss

DONE, NOT_DONE = 0, 1


class Lost(command.Command):
    """Let all go on that can without a node that is lost for good.

    Run it on any other node that has the driver, once for each backend of the
    lost one, whose service has to be disabled. Moves that need nothing more
    of it go on. Its snapshots become errors, and can be deleted. The volumes
    that were there and nowhere else are listed. It can be repeated. The exit
    status is 1 when moves wait for what only the lost node has.

    Should the node come back after all, nothing of it is activated.
    """

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument('host', metavar='HOST@BACKEND',
                            help='the volume service of the lost node, from '
                                 "'openstack volume service list'")
        parser.add_argument(
            '--written-is-lost', action='store_true',
            help='let volumes that were arriving at the lost node be back '
                 'where they came from, as they were when they left, even '
                 'though their guests may have written there; and give up '
                 'copies that were arriving')
        parser.add_argument(
            '--give-up-volumes', action='store_true',
            help="let its volumes be in error on this node's backend of the "
                 'same name, where their users can delete them')
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> int:
        backends.load(self.app.options.config_file)
        ctxt, host = context.get_admin_context(), parsed_args.host
        heir = (backends.chosen([host.rpartition('@')[2]])[0].host
                if parsed_args.give_up_volumes else '')
        found = loss.declare(ctxt, host, parsed_args.written_is_lost)
        for move in found.moves:
            self._say('Move %s of volume %s (%s) goes on without it.',
                      move.move_id, move.volume_id, move.state)
        for move, reason in found.waiting:
            self._say('Volume %s: %s', move.volume_id, reason)
        for snapshot_id in found.snapshots:
            self._say('Snapshot %s is lost, and can be deleted.', snapshot_id)
        given_up = (loss.give_up_volumes(ctxt, host, heir) if heir else [])
        for volume_id in found.volumes:
            if volume_id in given_up:
                self._say('Volume %s is lost. Its users can delete it.',
                          volume_id)
            else:
                self._say('Volume %s is lost. See --give-up-volumes.',
                          volume_id)
        return NOT_DONE if found.waiting else DONE

    def _say(self, text: str, *values: str) -> None:
        self.app.stdout.write(text % values + '\n')
