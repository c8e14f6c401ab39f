# SPDX-License-Identifier: Apache-2.0
"""The exports of one backend's source copies."""

from collections.abc import Iterable

from cinder import context
from oslo_log import log as logging

from cinder_localstor.moves import executor
from cinder_localstor.moves import table
from cinder_localstor.node import interface
from cinder_localstor import rows

LOG = logging.getLogger(__name__)


class Exports:
    """Lets the target export what the moves need, and nothing else."""

    def __init__(self, host: str, target: interface.SourceTarget,
                 steps: executor.StepRunner) -> None:
        """:param host: ``host@backend`` of this node"""
        self.host = host
        self._target = target
        self._steps = steps

    def serves_from_here(self, move: rows.Move) -> bool:
        """Whether a move reads its source copy from this node."""
        return (move.transfer.source_host == self.host
                and not move.transfer.is_local
                and table.TABLE[table.State(move.state)].serves)

    def put_right(self, moves: Iterable[rows.Move]) -> None:
        """Export what a target daemon that was restarted has forgotten, and
        take away what no move knows of.

        :param moves: that this node has a part in
        """
        try:
            exported = self._target.exported()
            for move in moves:
                if (self.serves_from_here(move)
                        and move.move_id not in exported):
                    self._export_again(move)
            for move_id in self._target.remains() - {
                    move.move_id for move in moves}:
                self._take_away(move_id)
        except Exception as error:
            LOG.error('The target does not tell what it exports: %s', error)

    def _export_again(self, move: rows.Move) -> None:
        try:
            self._steps.run(context.get_admin_context(), move.transfer,
                            [table.EXPORT_SOURCE.name])
        except Exception as error:
            LOG.error('The source of move %(move)s is not exported: '
                      '%(error)s', {'move': move.move_id, 'error': error})

    def _take_away(self, move_id: str) -> None:
        try:
            # Other backends of the node may share the target daemon.
            if rows.get(context.get_admin_context(), move_id) is None:
                LOG.warning('The export of move %s is left over and taken '
                            'away', move_id)
                self._target.unexport(move_id)
        except Exception as error:
            LOG.error('What is left over of the export of move %(move)s '
                      'stays: %(error)s', {'move': move_id, 'error': error})
