# SPDX-License-Identifier: Apache-2.0
"""What a backend brings back when it starts."""

from cinder import context
from oslo_log import log as logging

from cinder_localstor.datapath import handles
from cinder_localstor.moves import registry
from cinder_localstor.moves import scheduler
from cinder_localstor import rows

LOG = logging.getLogger(__name__)


class Recovery:
    """Brings back what a restart of the node took away."""

    def __init__(self, host: str, node_handles: handles.Handles,
                 periodic: scheduler.Scheduler) -> None:
        """:param host: ``host@backend`` of this node"""
        self.host = host
        self._handles = node_handles
        self._scheduler = periodic

    def recover(self) -> None:
        """Bring back what a restart of this node took away.

        Handles of all volumes that live here, and handles and exports of
        copies that are sources of moves.  What needs the peers is left to
        the periodic task, so that none of them can hold up the start: to build
        again what arrives here, and to undo moves that were broken off.
        """
        ctxt = context.get_admin_context()
        found = registry.read(ctxt, self.host)
        rows.link(ctxt, found.moves)
        for copy in found.superseded():
            LOG.info('Copy %(name)s is not activated: volume %(volume)s has '
                     'moved on as generation %(generation)d',
                     {'name': copy.name, 'volume': copy.volume_id,
                      'generation': copy.generation + 1})
        self._handles.restore(found.restored(), others=found.names())
        self._scheduler.tend_exports(list(found.moves))
