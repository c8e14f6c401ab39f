# SPDX-License-Identifier: Apache-2.0
"""What Cinder's own driver of LVM has made in a backend's group becomes ours.

That driver gives volumes and snapshots the names that we give them.  So where
a backend gets this driver in place of that one, Cinder's rows name what is
there; but no tag says whose it is, and no row where a snapshot lies.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses

from cinder import context
from oslo_log import log as logging

from cinder_localstor.datapath import copies
from cinder_localstor.datapath import transfer
from cinder_localstor import exception
from cinder_localstor.moves import registry
from cinder_localstor.node import interface
from cinder_localstor import rows

LOG = logging.getLogger(__name__)


class Adoption:
    """Takes over what is in the group of one backend."""

    def __init__(self, host: str, group: interface.VolumeGroup) -> None:
        """:param host: ``host@backend`` of this node"""
        self.host = host
        self._group = group

    def adopt(self, ctxt: context.RequestContext, found: registry.Registry,
              volumes: Mapping[str, interface.LogicalVolume]) -> bool:
        """Take what Cinder has here by name and nobody by tags; whether there
        was anything.

        What can't be taken is told in the log, and tried again at the next
        start.

        :param volumes: all of the group
        """
        adopted = 0
        for copy in (*found.standing(), *rows.unplaced(ctxt, self.host)):
            if self._is_new(copy, volumes):
                try:
                    self._adopt(ctxt, copy, volumes[copy.name])
                except exception.LocalStorException as error:
                    LOG.error('Logical volume %(name)s is not taken over: '
                              '%(error)s', {'name': copy.name, 'error': error})
                else:
                    adopted += 1
        return bool(adopted)

    @staticmethod
    def _is_new(copy: copies.Copy,
                volumes: Mapping[str, interface.LogicalVolume]) -> bool:
        """Whether a copy is there, and not ours yet."""
        found = volumes.get(copy.name)
        if found is None or copy.generation != rows.FIRST_GENERATION:
            return False
        label = copies.Label(found.tags)
        if copy.depends_on is None:
            return not label
        # Its row comes last: it may have got its tags before.  So comes that
        # of one which an operator lets Cinder manage, and which is given back.
        return (found.taken_of == copy.depends_on.name
                and (not label or label.snapshot_id == copy.snapshot_id)
                and not label.former)

    def _adopt(self, ctxt: context.RequestContext, copy: copies.Copy,
               found: interface.LogicalVolume) -> None:
        own = transfer.tags(volume=copy.volume_id, generation=copy.generation,
                            snapshot=copy.snapshot_id or None)
        self._group.retag(found.name, add=own - found.tags,
                          remove=frozenset())
        if copy.snapshot_id:
            self._make_ready(found)
            rows.record_place(ctxt, dataclasses.replace(
                copy, depends_on=copies.Origin(self.host, found.origin)
                if found.origin else None))
        LOG.info('Logical volume %(name)s is taken over as what %(id)s is',
                 {'name': found.name,
                  'id': copy.snapshot_id or copy.volume_id})

    def _make_ready(self, snapshot: interface.LogicalVolume) -> None:
        """Let a snapshot be as those that we take: there when the node has
        started, and never full.
        """
        if not self._group.is_active(snapshot.name):
            self._group.keep_active(snapshot.name)
        if snapshot.size < snapshot.room:
            try:
                self._group.extend(snapshot.name, snapshot.room)
            except exception.NotEnoughSpace as error:
                LOG.warning('Snapshot %(name)s is lost when its volume has '
                            'changed much, as it was before: %(error)s',
                            {'name': snapshot.name, 'error': error})
