# SPDX-License-Identifier: Apache-2.0
"""Volumes from what there is already, as Cinder's users ask for them.

Thin volumes of one node share their blocks, so there is nothing to copy.  Any
other begins a *copy*: the new volume is usable at once and arrives from a
snapshot, on this node or on another, as a volume that moves does.  To clone a
volume such a snapshot is taken for the copy alone.

A volume that is reverted to a snapshot gets a copy of it in the same way,
which takes the place of the one that it has.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import dataclasses
from typing import Any

from cinder import context
from cinder import objects
from oslo_log import log as logging
from oslo_utils import excutils
from oslo_utils import units

from cinder_localstor.datapath import copies
from cinder_localstor.datapath import destination
from cinder_localstor.datapath import handles
from cinder_localstor.datapath import source
from cinder_localstor.datapath import transfer
from cinder_localstor import exception
from cinder_localstor.moves import executor
from cinder_localstor.moves import gate
from cinder_localstor.moves import properties
from cinder_localstor.moves import scheduler
from cinder_localstor.moves import table
from cinder_localstor.node import interface
from cinder_localstor.peers import rpc
from cinder_localstor import rows

# Before the id of a copy: the snapshot that is there for it alone.  LVM keeps
# names that begin with 'snapshot' for itself.
TAKEN = 'localstor-clone-'
# States of a copy that another of the same volume takes the place of
UNDONE_BY_ANOTHER = (table.State.CREATING, table.State.MIGRATING)

LOG = logging.getLogger(__name__)


class Copier:
    """Makes new volumes of one backend from snapshots and volumes."""

    def __init__(self, host: str, node: interface.Node,
                 on_source: source.Source,
                 on_destination: destination.Destination,
                 node_handles: handles.Handles, steps: executor.StepRunner,
                 interactive: executor.Executor,
                 periodic: scheduler.Scheduler, peers: rpc.PeerAPI,
                 volume_gate: gate.Gate, configuration: Any) -> None:
        """:param host: ``host@backend`` of this node
        :param interactive: drives copies that a user waits for
        """
        self.host = host
        self._node = node
        self._source = on_source
        self._destination = on_destination
        self._handles = node_handles
        self._steps = steps
        self._executor = interactive
        self._scheduler = periodic
        self._peers = peers
        self._gate = volume_gate
        self._configuration = configuration

    def from_snapshot(self, ctxt: context.RequestContext,
                      volume: objects.Volume, snapshot: objects.Snapshot
                      ) -> dict[str, str]:
        """Make a volume of what a snapshot holds, wherever that lies.

        :returns: the fields of its row that say which copy it is
        :raises SnapshotLost: there is no such snapshot
        :raises PeerDown: its node is down
        :raises NotEnoughSpace: the volume group or the pool is too full
        """
        found = self._find(ctxt, snapshot)
        if self._may_share(found):
            return self._share(volume, found.name)
        move_id = rows.new_move_id(volume.id)
        with self._beginning(ctxt, move_id):
            self._record(ctxt, volume, move_id, found)
            self._executor.drive(ctxt, move_id, [table.State.CREATING])
        return {'_name_id': move_id}

    @staticmethod
    def _find(ctxt: context.RequestContext, snapshot: objects.Snapshot
              ) -> copies.Copy:
        """:raises SnapshotLost: there is no such snapshot"""
        found = rows.find_snapshot(ctxt, snapshot.id)
        if found is None or found.role is not copies.Role.SNAPSHOT:
            raise exception.SnapshotLost(snapshot_id=snapshot.id)
        return found

    def _may_share(self, snapshot: copies.Copy) -> bool:
        """Whether a volume of this node can have the blocks of a snapshot.

        :raises SnapshotLost: there is no such snapshot
        """
        if (snapshot.host != self.host or not self._node.volumes.thin
                or self._source.does_snapshot_arrive(snapshot.name)):
            return False
        self._source.check_snapshot(snapshot.name)
        return True

    def revert(self, ctxt: context.RequestContext, volume: objects.Volume,
               snapshot: objects.Snapshot) -> None:
        """Let a volume be what it was when a snapshot was taken, wherever that
        lies.

        It gets another copy, made as for a new volume, and is as it was until
        that can be used.  What it has had until then is left behind, as in a
        move.

        :raises RevertGivenUp: nobody waits for it any more
        :raises VolumeInUse: somebody has it open
        :raises: what :meth:`from_snapshot` raises
        """
        move_id = rows.new_move_id(volume.id)
        # Before anything can fail, so that no former one is taken for it
        rows.note_revert(ctxt, volume.id, move_id)
        with self._beginning(ctxt, move_id):
            with self._gate.enter(ctxt, volume.id,
                                  gate.Operation.REVERT) as present:
                self._check_wanted(ctxt, present, snapshot)
                self._executor.unexport_aborted(ctxt, volume.id)
                self._handles.check_unused(present.name)
                found = self._find(ctxt, snapshot)
                move = self._record(ctxt, present, move_id, found,
                                    replaced=present.name)
            if self._may_share(found):
                self._destination.share(move.transfer)
                self._executor.change_state(
                    ctxt, move, table.State.COMPLETING,
                    table.Identity.BEGINS)
            else:
                self._executor.drive(ctxt, move_id, [table.State.CREATING])
        self._finish(ctxt, move)

    @staticmethod
    def _check_wanted(ctxt: context.RequestContext, volume: objects.Volume,
                      snapshot: objects.Snapshot) -> None:
        """:raises RevertGivenUp: the user has been told that it is not to be,
            and may have written to the volume since
        """
        if (volume.status != 'reverting'
                or rows.attachments(ctxt, volume.id)):
            raise exception.RevertGivenUp(volume_id=volume.id,
                                          snapshot_id=snapshot.id,
                                          status=volume.status)

    def _finish(self, ctxt: context.RequestContext, move: rows.Move) -> None:
        """Do at once what can be done of a volume that is reverted."""
        with self._or_later(move):
            self._destination.seal_replaced(move.transfer)
        with self._or_later(move):
            for kept in rows.for_volume(ctxt, move.volume_id):
                if (kept.state == table.State.KEEPING
                        and kept.transfer.source_name
                        == move.transfer.replaced):
                    self._executor.announce(kept)
                    self._look_after(kept.move_id)
        with self._or_later(move):
            self._executor.drive(ctxt, move.move_id,
                                 [table.State.COMPLETING])

    @staticmethod
    @contextlib.contextmanager
    def _or_later(move: rows.Move) -> Iterator[None]:
        """Leave to the scheduler what goes wrong when a volume is reverted."""
        try:
            yield
        except Exception as error:
            LOG.warning('Volume %(volume)s is reverted, and what that leaves '
                        'is removed later: %(error)s',
                        {'volume': move.volume_id, 'error': error})

    @staticmethod
    def arriving(ctxt: context.RequestContext, volume: objects.Volume
                 ) -> rows.Move | None:
        """The move that a volume arrives by, if some is still elsewhere."""
        return next((move for move in rows.for_volume(ctxt, volume.id)
                     if move.transfer.destination_name == volume.name
                     and move.state == table.State.MIGRATING), None)

    def snapshot(self, ctxt: context.RequestContext, volume: objects.Volume,
                 taken: copies.Copy, arriving: rows.Move) -> None:
        """Take a snapshot of a volume that arrives here: it arrives itself,
        from where its volume does.

        :param arriving: the volume's move
        :raises MoveChanged: that has gone on meanwhile
        :raises SourceBusy: the source does not answer
        :raises NotEnoughSpace: the volume group or the pool is too full
        """
        described = arriving.transfer
        local = self._destination.progress(
            described, self._node.device_mapper.devices()).local
        move_id = rows.new_move_id(volume.id)
        with (self._beginning(ctxt, move_id),
              self._executor.held(ctxt, arriving)):
            self._executor.begin(ctxt, volume, dataclasses.replace(
                described, move_id=move_id, source_host=self.host,
                source_name=described.destination_name,
                destination_name=taken.name, is_copy=True, taken_of='',
                cloned='', origin='', replaced='',
                snapshot_id=taken.snapshot_id,
                snapshot_of=arriving.move_id,
                content=max(described.size - local, 0),
                larger=taken.size if taken.size > described.size else 0),
                table.State.CREATING, self._service(ctxt))
            self._executor.drive(ctxt, move_id, [table.State.CREATING])

    def from_volume(self, ctxt: context.RequestContext,
                    volume: objects.Volume, cloned: objects.Volume
                    ) -> dict[str, str]:
        """Make a volume of what another one holds at this moment, though it
        may be written, and wherever it lives.

        :returns: as :meth:`from_snapshot`
        :raises VolumeIsMoving: some of it is on yet another node
        :raises VolumeHasGrown: it is larger than the new one by now
        :raises NotEnoughSpace: the volume group or the pool is too full
        """
        home = rows.home(ctxt, cloned.id)
        if home != self.host:
            return self._from_peer(ctxt, volume, cloned, home)
        if self._node.volumes.thin:
            with self._gate.enter(ctxt, cloned.id,
                                  gate.Operation.CLONE) as present:
                self._check_size(present, volume)
                if self.arriving(ctxt, present) is None:
                    return self._share(volume, present.name)
        move_id = rows.new_move_id(volume.id)
        with self._beginning(ctxt, move_id):
            with self._gate.enter(ctxt, cloned.id,
                                  gate.Operation.CLONE) as present:
                self._check_size(present, volume)
                move = self._record(ctxt, volume, move_id, copies.Copy(
                    host=self.host, name=TAKEN + move_id,
                    volume_id=present.id, generation=0,
                    size=present.size * units.Gi, depends_on=copies.Origin(
                        self.host, present.name)), present.name)
                self.take(ctxt, present, move.transfer)
                self._steps.run(ctxt, move.transfer,
                                [table.TAKE_SNAPSHOT.name])
            self._executor.drive(ctxt, move_id, [table.State.CREATING])
        return {'_name_id': move_id}

    def take(self, ctxt: context.RequestContext, cloned: objects.Volume,
             move: transfer.Transfer) -> None:
        """Take the snapshot that a clone is made of, if what is cloned still
        arrives here; else the step of that name does.

        :raises: what :meth:`snapshot` raises
        """
        arriving = self.arriving(ctxt, cloned)
        if arriving is not None and not self._node.volumes.is_active(
                move.source_name):
            self.snapshot(ctxt, cloned, copies.Copy(
                host=self.host, name=move.source_name, volume_id=cloned.id,
                generation=0, size=move.size), arriving)

    def _from_peer(self, ctxt: context.RequestContext, volume: objects.Volume,
                   cloned: objects.Volume, home: str) -> dict[str, str]:
        """As :meth:`from_volume`, of a volume that lives elsewhere.

        The peer looks whether it may be cloned, when it takes the snapshot.

        :param home: ``host@backend`` that it lives on
        """
        move_id = rows.new_move_id(volume.id)
        with self._beginning(ctxt, move_id):
            present = objects.Volume.get_by_id(ctxt, cloned.id)
            self._check_size(present, volume)
            self._record(ctxt, volume, move_id, copies.Copy(
                host=home, name=TAKEN + move_id, volume_id=present.id,
                generation=0, size=present.size * units.Gi,
                depends_on=copies.Origin(home, present.name)), present.name)
            self._executor.drive(ctxt, move_id, [table.State.CREATING])
        return {'_name_id': move_id}

    @staticmethod
    def _check_size(cloned: objects.Volume, volume: objects.Volume) -> None:
        """:raises VolumeHasGrown: a clone would be larger than its row says
        """
        if cloned.size > volume.size:
            raise exception.VolumeHasGrown(
                volume_id=cloned.id, size=cloned.size, asked=volume.size)

    def _share(self, volume: objects.Volume, name: str) -> dict[str, str]:
        """Let a thin volume begin with the blocks of another one.

        :raises NotEnoughSpace: the pool takes nothing more
        """
        self._destination.space.check(volume.name, 0)
        self._handles.create(copies.Copy(
            host=self.host, name=volume.name, volume_id=volume.id,
            generation=rows.FIRST_GENERATION, size=volume.size * units.Gi),
            content_of=name)
        return {}

    @contextlib.contextmanager
    def _beginning(self, ctxt: context.RequestContext, move_id: str
                   ) -> Iterator[None]:
        """Leave a copy to its beginner, and to the scheduler from then on.

        What fails is to be undone, which is recorded before it is told.
        """
        try:
            with self._scheduler.beginning(move_id):
                yield
        except Exception as error:
            with excutils.save_and_reraise_exception():
                move = rows.get(ctxt, move_id)
                if move and table.State(move.state) in table.UNDONE_BY_FAILURE:
                    self._executor.undo(ctxt, move, str(error))
                # Nobody waits for what has to be taken away again.
                self._look_after(move_id)
        self._look_after(move_id)

    def _look_after(self, move_id: str) -> None:
        # At the next period that is done again, so it spoils nothing.
        try:
            self._scheduler.look_after(move_id)
        except Exception as error:
            LOG.warning('Copy %(move)s goes on later: %(error)s',
                        {'move': move_id, 'error': error})

    def _record(self, ctxt: context.RequestContext, volume: objects.Volume,
                move_id: str, snapshot: copies.Copy, taken_of: str = '',
                replaced: str = '') -> rows.Move:
        """Make the row of a copy.

        :param snapshot: that it is made from
        :param taken_of: the volume's copy that it is yet to be taken of
        :param replaced: the volume's copy that it takes the place of
        """
        generation = rows.FIRST_GENERATION
        if replaced:
            generation = rows.generation_of(ctxt, volume.id) + 1
        else:
            self._undo_former(ctxt, volume.id)
        described = (move_id, taken_of or snapshot.name,
                     self._node.initiator.name(),
                     self._node.initiator.transports())
        is_here = snapshot.host == self.host
        offer = (self._source.offer(*described) if is_here
                 else self._peers.offer(snapshot.host, volume.id, *described,
                                        is_clone=bool(taken_of),
                                        is_revert=bool(replaced)))
        export = interface.Export(**offer['export'])
        answer = self._destination.examine(
            offer['block_size'], export.portal, self.host,
            properties.of_volume(ctxt, volume.id).data_path)
        size, larger = snapshot.size, volume.size * units.Gi
        return self._executor.begin(ctxt, volume, transfer.Transfer(
            move_id=move_id, volume_id=volume.id,
            generation=generation, source_host=snapshot.host,
            destination_host=self.host, source_name=snapshot.name,
            destination_name=rows.future_copy_name(move_id), size=size,
            block_size=offer['block_size'], engine=answer['engine'],
            export=dataclasses.replace(export, address=answer['address']),
            content=offer['content'], is_copy=True, taken_of=taken_of,
            cloned=snapshot.volume_id if taken_of and not is_here else '',
            origin=(snapshot.depends_on.name if snapshot.depends_on
                    and offer.get('depends', True) else ''),
            larger=larger if larger > size else 0, replaced=replaced,
            waits=bool(volume.encryption_key_id),
            **destination.choose_regions(size, self._configuration)),
            table.State.CREATING, self._service(ctxt))

    def _service(self, ctxt: context.RequestContext) -> objects.Service:
        return objects.Service.get_by_args(ctxt, self.host, 'cinder-volume')

    def _undo_former(self, ctxt: context.RequestContext, volume_id: str
                     ) -> None:
        """Undo what Cinder has given up, and has made a second time.

        It may fail after the volume could be used.
        """
        for move in rows.for_volume(ctxt, volume_id):
            if move.transfer.is_copy and move.state in UNDONE_BY_ANOTHER:
                self._executor.change_state(
                    ctxt, move, table.State.UNDOING,
                    problem='Cinder makes the volume a second time.')
