# SPDX-License-Identifier: Apache-2.0
"""Snapshots, as Cinder's users ask for them.

A snapshot stays on the node that its volume was on, and Cinder asks the node
that the volume is on now.  So the snapshot's row says where it lies.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
import contextlib
import operator

from cinder import context
from cinder import objects
from oslo_log import log as logging
from oslo_utils import excutils
from oslo_utils import units
import tenacity

from cinder_localstor.datapath import copies
from cinder_localstor.datapath import snapshots
from cinder_localstor import exception
from cinder_localstor.moves import copier
from cinder_localstor.moves import executor
from cinder_localstor.moves import gate
from cinder_localstor.moves import scheduler
from cinder_localstor.moves import table
from cinder_localstor.peers import rpc
from cinder_localstor import rows

LOG = logging.getLogger(__name__)


def ask_there(ctxt: context.RequestContext, peers: rpc.PeerAPI, host: str,
              snapshot: objects.Snapshot, action: str,
              ask: Callable[[str, str, str], None]) -> None:
    """Have something done with a snapshot on the node that it lies on.

    :param host: ``host@backend`` of that
    :param action: what users call it
    :param ask: does it, given the host, the volume's id and the snapshot's
    :raises SnapshotAway: the node is down; the snapshot is as it was
    :raises SnapshotUncertain: it has not answered
    :raises PeerFailed: it says that it can't
    """
    if not peers.is_up(ctxt, host):
        raise exception.SnapshotAway(snapshot_id=snapshot.id, host=host,
                                     action=action)
    try:
        ask(host, snapshot.volume_id, snapshot.id)
    except exception.PeerDown as error:
        raise exception.SnapshotUncertain(
            snapshot_id=snapshot.id, host=host, action=action,
            reason=error) from error


class Keeper:
    """Takes and deletes the snapshots of one backend's volumes."""

    def __init__(self, host: str, node_snapshots: snapshots.Snapshots,
                 volume_gate: gate.Gate, copies_here: copier.Copier,
                 interactive: executor.Executor,
                 periodic: scheduler.Scheduler, peers: rpc.PeerAPI) -> None:
        """:param host: ``host@backend`` of this node
        :param interactive: drives what a user waits for
        """
        self.host = host
        self._snapshots = node_snapshots
        self._gate = volume_gate
        self._copier = copies_here
        self._executor = interactive
        self._scheduler = periodic
        self._peers = peers

    @tenacity.retry(
        retry=tenacity.retry_if_exception_type(exception.MoveChanged),
        stop=tenacity.stop_after_attempt(3), reraise=True)
    def create(self, ctxt: context.RequestContext,
               snapshot: objects.Snapshot) -> dict[str, str | None]:
        """Take a snapshot of a volume; while that arrives, it does so too.

        :returns: the fields of its row that say where it lies
        :raises VolumeIsMoving: what it is to hold is not decided yet
        :raises SourceBusy: the node that it arrives from does not answer
        :raises NotEnoughSpace: the volume group or the pool is too full
        """
        with self._gate.enter(ctxt, snapshot.volume_id,
                              gate.Operation.SNAPSHOT) as volume:
            copy = self._describe(ctxt, snapshot, volume)
            place = rows.record_place(ctxt, copy)
            arriving = self._copier.arriving(ctxt, volume)
            try:
                if arriving is not None:
                    self._copier.snapshot(ctxt, volume, copy, arriving)
                else:
                    self._snapshots.create(copy, volume.name)
            except exception.CommandTimedOut:
                raise  # it may yet be made
            except Exception:
                with excutils.save_and_reraise_exception():
                    self._take_back(ctxt, copy)
        return place

    def _describe(self, ctxt: context.RequestContext,
                  snapshot: objects.Snapshot, volume: objects.Volume
                  ) -> copies.Copy:
        """What a snapshot will be.

        :param volume: it is of, as it is now
        """
        return copies.Copy(
            host=self.host, name=rows.snapshot_copy_name(snapshot.id),
            volume_id=volume.id, snapshot_id=snapshot.id,
            generation=rows.generation_of(ctxt, volume.id),
            size=volume.size * units.Gi, role=copies.Role.SNAPSHOT,
            depends_on=self._snapshots.origin(self.host, volume.name))

    def create_together(self, ctxt: context.RequestContext,
                        snapshots: Sequence[objects.Snapshot]
                        ) -> dict[str, dict[str, str | None]]:
        """Take snapshots of several volumes, all of one moment, or none.

        :returns: the fields of their rows that say where they lie, by their
            ids
        :raises VolumeIsMoving: some of a volume is on another node
        :raises VolumeElsewhere: all of it is
        :raises NotHeld: the volumes went on before all snapshots were made
        :raises NotEnoughSpace: the volume group or the pool is too full
        """
        with contextlib.ExitStack() as held:
            of: dict[str, copies.Copy] = {}
            # In one order, so that no two groups wait for each other
            for snapshot in sorted(snapshots,
                                   key=operator.attrgetter('volume_id')):
                volume = held.enter_context(self._gate.enter(
                    ctxt, snapshot.volume_id, gate.Operation.GROUP_SNAPSHOT))
                of[volume.name] = self._describe(ctxt, snapshot, volume)
            places = {copy.snapshot_id: rows.record_place(ctxt, copy)
                      for copy in of.values()}
            try:
                self._snapshots.create_together(of)
            except exception.AlreadyThere:
                raise  # whoever made it has more to say of it
            except Exception as error:
                with excutils.save_and_reraise_exception():
                    for copy in of.values():
                        # One that was not made in its time may yet be.
                        self._take_back(ctxt, copy, forget=not isinstance(
                            error, exception.CommandTimedOut))
        return places

    @staticmethod
    def _arriving(ctxt: context.RequestContext, volume_id: str,
                  snapshot_id: str) -> rows.Move | None:
        """What brings the rest of a snapshot, if that arrives."""
        return next((move for move
                     in rows.snapshots_arriving(ctxt, volume_id)
                     if move.transfer.snapshot_id == snapshot_id), None)

    def _take_back(self, ctxt: context.RequestContext, snapshot: copies.Copy,
                   forget: bool = True) -> None:
        """Let there be nothing of a snapshot that failed, if that can be.

        :param forget: where it lies, too
        """
        try:
            if self._arriving(ctxt, snapshot.volume_id,
                              snapshot.snapshot_id) is None:
                self._snapshots.delete(snapshot.name)
            if forget:
                rows.forget_place(ctxt, snapshot.snapshot_id)
        except Exception as error:
            LOG.error('What was made of %(name)s goes when the snapshot is '
                      'deleted: %(error)s',
                      {'name': snapshot.name, 'error': error})

    def delete(self, ctxt: context.RequestContext,
               snapshot: objects.Snapshot) -> None:
        """Delete a snapshot, wherever it lies.

        :raises: what :func:`ask_there` raises
        """
        host = rows.place_of(ctxt, snapshot.id)
        if host == self.host:
            self.delete_here(snapshot.volume_id, snapshot.id)
        elif host is not None:
            ask_there(ctxt, self._peers, host, snapshot, 'delete',
                      self._peers.delete_snapshot)

    def delete_here(self, volume_id: str, snapshot_id: str) -> None:
        """Delete a snapshot that lies on this node.

        What a copy still reads goes when that has all of it.
        """
        ctxt = context.get_admin_context()
        name = rows.snapshot_copy_name(snapshot_id)
        with self._gate.lock(volume_id):
            if table.readers(rows.for_host(ctxt, self.host), self.host, name):
                self._snapshots.disown(name)
            elif arriving := self._arriving(ctxt, volume_id, snapshot_id):
                self._discard(ctxt, arriving)
            else:
                self._snapshots.delete(name)
        self._scheduler.tend_wipes()

    def _discard(self, ctxt: context.RequestContext, arriving: rows.Move
                 ) -> None:
        """Take away what there is of a snapshot that arrives."""
        if arriving.state == table.State.CREATING:
            arriving = self._executor.undo(ctxt, arriving, 'It is deleted.')
        elif arriving.state not in (table.State.UNDOING,
                                    table.State.DISCARDING):
            arriving = self._executor.change_state(ctxt, arriving,
                                                   table.State.DISCARDING)
        self._executor.discard(ctxt, arriving)
