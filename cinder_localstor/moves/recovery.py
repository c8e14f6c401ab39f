# SPDX-License-Identifier: Apache-2.0
"""What a backend brings back when it starts."""

from cinder import context
from oslo_log import log as logging

from cinder_localstor.datapath import handles
from cinder_localstor.moves import scheduler
from cinder_localstor.moves import table
from cinder_localstor import rows

LOG = logging.getLogger(__name__)


class Recovery:
    """Brings back what a restart of the node took away."""

    def __init__(self, host: str, built: handles.Handles,
                 periodic: scheduler.Scheduler) -> None:
        """:param host: ``host@backend`` of this node"""
        self.host = host
        self._handles = built
        self._scheduler = periodic

    def recover(self) -> None:
        """Bring back what a restart of this node took away.

        Handles of all volumes that stand here, and handles and exports of
        copies that are sources of moves.  What needs the peers is left to
        the periodic task, so that none of them can hold up the start: to build
        again what arrives here, and to undo moves that were broken off.
        """
        ctxt = context.get_admin_context()
        moves = rows.for_host(ctxt, self.host)
        arriving = {move.transfer.destination_name for move in moves
                    if move.transfer.destination_host == self.host
                    and not table.has_let_go(move)}
        standing = [handles.Standing(name, volume_id, generation)
                    for name, volume_id, generation
                    in rows.standing_copies(ctxt, self.host)]
        standing += [handles.Standing(move.transfer.source_name,
                                      move.volume_id,
                                      move.transfer.generation - 1,
                                      newest=move.transfer.generation)
                     for move in moves if self._needs_source(move)]
        for move in moves:
            if (move.transfer.source_host == self.host
                    and not self._needs_source(move)):
                LOG.info('Copy %(name)s is not activated: volume %(volume)s '
                         'has moved on as generation %(generation)d',
                         {'name': move.transfer.source_name,
                          'volume': move.volume_id,
                          'generation': move.transfer.generation})
        leaving = {move.transfer.source_name for move in moves
                   if move.transfer.source_host == self.host}
        self._handles.stand(
            list({copy.name: copy for copy in standing
                  if copy.name not in arriving}.values()),
            others=(arriving | leaving
                    | rows.passing_copies(ctxt, self.host)))
        self._scheduler.tend_exports(moves)

    def _needs_source(self, move: rows.Move) -> bool:
        return (move.transfer.source_host == self.host
                and not table.DELETE_SOURCE.is_done(move)
                and move.state not in (table.State.COMPLETING,
                                       table.State.DISCARDING))
