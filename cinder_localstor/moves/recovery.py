# SPDX-License-Identifier: Apache-2.0
"""What a backend brings back when it starts."""

from cinder import context
from oslo_log import log as logging

from cinder_localstor.datapath import destination
from cinder_localstor.datapath import handles
from cinder_localstor import exception
from cinder_localstor.moves import adoption
from cinder_localstor.moves import registry
from cinder_localstor.moves import scheduler
from cinder_localstor.node import interface
from cinder_localstor import rows

LOG = logging.getLogger(__name__)


class Recovery:
    """Brings back what a restart of the node took away."""

    def __init__(self, host: str, node: interface.Node,
                 node_handles: handles.Handles,
                 on_destination: destination.Destination,
                 periodic: scheduler.Scheduler) -> None:
        """:param host: ``host@backend`` of this node"""
        self.host = host
        self._node = node
        self._adoption = adoption.Adoption(host, node.volumes)
        self._handles = node_handles
        self._destination = on_destination
        self._scheduler = periodic

    def recover(self) -> None:
        """Bring back what a restart of this node took away.

        Handles of all volumes that live here, and handles and exports of
        copies that are sources of moves.  What needs the peers is left to
        the periodic task, so that none of them can hold up the start: to build
        again what arrives here, and to undo moves that were broken off.
        """
        ctxt = context.get_admin_context()
        self._handles.resume_abandoned()
        found = registry.read(ctxt, self.host)
        self._thaw(found)
        volumes = self._node.volumes.logical_volumes()
        if self._adoption.adopt(ctxt, found, volumes):
            found = registry.read(ctxt, self.host)
            volumes = self._node.volumes.logical_volumes()
        rows.link(ctxt, found.moves)
        for copy in found.superseded():
            LOG.info('Copy %(name)s is not activated: volume %(volume)s has '
                     'moved on as generation %(generation)d',
                     {'name': copy.name, 'volume': copy.volume_id,
                      'generation': copy.generation + 1})
        self._handles.restore(found.restored(), volumes, found.names())
        self._scheduler.tend_exports(list(found.moves))

    def restore(self, ctxt: context.RequestContext, volume_id: str) -> None:
        """Bring back the handle of a volume that lives here, if it can be made
        by now.
        """
        found = registry.read(ctxt, self.host)
        self._handles.restore([copy for copy in found.restored()
                               if copy.volume_id == volume_id],
                              self._node.volumes.logical_volumes(),
                              found.names())

    def _thaw(self, found: registry.Registry) -> None:
        """Let guests go on for whom a snapshot was just being taken."""
        devices = self._node.device_mapper.devices() if found.arriving else {}
        for copy in found.arriving:
            try:
                self._destination.thaw(found.move_of(copy).transfer, devices)
            except exception.LocalStorException as error:
                LOG.error('Volume copy %(name)s may still be frozen: '
                          '%(error)s', {'name': copy.name, 'error': error})
