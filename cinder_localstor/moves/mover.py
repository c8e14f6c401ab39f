# SPDX-License-Identifier: Apache-2.0
"""The life of a move, as Cinder's users and operators ask for it."""

from __future__ import annotations

from typing import Any

from cinder import context
from cinder import objects
from cinder.volume import volume_utils
from oslo_concurrency import lockutils
from oslo_utils import excutils
from oslo_utils import units
import tenacity

from cinder_localstor.datapath import clone
from cinder_localstor.datapath import destination
from cinder_localstor.datapath import handles
from cinder_localstor.datapath import source
from cinder_localstor.datapath import transfer
from cinder_localstor import exception
from cinder_localstor.moves import executor
from cinder_localstor.moves import scheduler
from cinder_localstor.moves import table
from cinder_localstor.node import interface
from cinder_localstor.peers import rpc
from cinder_localstor import rows

# Seconds between two attempts
SOON = 1


def size_lock(volume_id: str) -> str:
    """Name of the lock that keeps a volume as it is while a move begins."""
    return 'localstor-size-' + volume_id


class Mover:
    """Begins moves, and does with volumes that move what a user asks for."""

    def __init__(self, host: str, node: interface.Node,
                 on_source: source.Source, built: handles.Handles,
                 steps: executor.StepRunner, hasty: executor.Executor,
                 periodic: scheduler.Scheduler, peers: rpc.PeerAPI,
                 configuration: Any) -> None:
        """:param host: ``host@backend`` of this node
        :param hasty: drives moves that a user waits for
        """
        self.host = host
        self._node = node
        self._source = on_source
        self._handles = built
        self._steps = steps
        self._executor = hasty
        self._scheduler = periodic
        self._peers = peers
        self._configuration = configuration

    def begin(self, ctxt: context.RequestContext, volume: objects.Volume,
              peer: objects.Service) -> None:
        """Bring a volume to a peer; returns when it is usable there.

        :raises LocalStorException: it can't be; it is as it was then
        """
        with lockutils.lock(size_lock(volume.id)):
            self._begin(ctxt, objects.Volume.get_by_id(ctxt, volume.id),
                        peer)

    def _begin(self, ctxt: context.RequestContext, volume: objects.Volume,
               peer: objects.Service) -> None:
        self._check_decided(ctxt, volume, 'moving it on')
        if volume.status == 'extending':
            raise exception.LocalStorException(
                reason='Volume %s is being extended. Attach it when that is '
                       'done.' % volume.id)
        answer = self._peers.examine(
            peer.host, volume.id, self._node.volumes.block_size(),
            self._source.portal())
        move_id = rows.new_move_id()
        attachments = rows.attachments(ctxt, volume.id)
        unconnected = self._unconnected(attachments)
        noted = rows.connecting(ctxt, volume.id, unconnected)
        if noted and len(unconnected) > 1:
            # A guest may be about to open the copy that would be the source.
            raise exception.AttachmentUnderWay(
                volume_id=volume.id, count=len(unconnected), host=self.host)
        leaving = tuple(row['id'] for row in attachments if row['connector'])
        if leaving and len(leaving) == len(attachments):
            raise exception.VolumeConnectedElsewhere(
                volume_id=volume.id, host='the host of attachment '
                + leaving[0])
        described = transfer.Transfer(
            move_id=move_id, volume_id=volume.id,
            generation=rows.generation_of(ctxt, volume.id) + 1,
            source_host=self.host, destination_host=peer.host,
            source_name=volume.name,
            destination_name=rows.future_copy_name(move_id),
            size=volume.size * units.Gi,
            block_size=self._node.volumes.block_size(),
            # A peer of an earlier version has no other.
            engine=answer.get('engine', clone.TARGET),
            export=self._source.describe_export(
                move_id, answer['initiator'], answer['address']),
            content=(self._source.content(volume.name)
                     if answer.get('thin') else -1),
            **destination.choose_regions(volume.size * units.Gi,
                                         self._configuration))
        try:
            # Before the row is there for the periodic task to find
            with self._scheduler.beginning(move_id):
                move = rows.begin(ctxt, volume, described,
                                  table.State.PREPARING.value, peer, leaving)
                # Before the peer can be asked to let the volume move on
                rows.note_connecting(ctxt, volume.id, unconnected)
                self._prepare(ctxt, move)
        except Exception:
            with excutils.save_and_reraise_exception():
                # Nobody waits for what has to be taken away again.
                self._scheduler.look_after(move_id)
                rows.note_connecting(ctxt, volume.id, noted)
        self._peers.nudge(peer.host, move_id)

    def _prepare(self, ctxt: context.RequestContext, move: rows.Move) -> None:
        try:
            if (self._executor.drive(ctxt, move.move_id)
                    == table.State.PREPARING):
                raise exception.NotWanted(
                    volume_id=move.volume_id, host=self.host,
                    peer=move.transfer.destination_host)
        except Exception:
            with excutils.save_and_reraise_exception():
                self._executor.undo(ctxt, move)

    def _check_decided(self, ctxt: context.RequestContext,
                       volume: objects.Volume, action: str) -> None:
        """:raises VolumeIsMoving: it may yet go back to where it was
        :raises VolumeElsewhere: it lives on another node
        """
        for move in rows.for_volume(ctxt, volume.id):
            if move.state in table.UNDECIDED:
                raise exception.VolumeIsMoving(
                    volume_id=volume.id, move_id=move.move_id,
                    state=move.state, action=action,
                    destination=move.transfer.destination_host)
        self._check_home(volume)

    def _check_home(self, volume: objects.Volume) -> None:
        """:raises VolumeElsewhere: it lives on another node"""
        home = volume_utils.extract_host(volume.host)
        if home != self.host:
            raise exception.VolumeElsewhere(volume_id=volume.id, host=home,
                                            asked=self.host)

    @staticmethod
    def _unconnected(attachments: list[dict[str, Any]]) -> list[str]:
        return [row['id'] for row in attachments if not row['connector']]

    def stay(self, ctxt: context.RequestContext, volume_id: str) -> str:
        """Let a user have a volume on this node; the name of its copy.

        No move begins from here on before Cinder has recorded which of the
        attachments got it.

        :raises VolumeElsewhere: it has left meanwhile
        """
        with lockutils.lock(size_lock(volume_id)):
            volume = objects.Volume.get_by_id(ctxt, volume_id)
            self._check_home(volume)
            rows.note_connecting(ctxt, volume_id, self._unconnected(
                rows.attachments(ctxt, volume_id)))
        return volume.name

    def extend(self, ctxt: context.RequestContext, volume: objects.Volume,
               size: int) -> None:
        """Grow a volume to `size` bytes, whether it moves or not.

        One that may yet go back to where it was is waited for, since its
        other copy does not grow.

        :raises VolumeIsMoving: it still may go back
        :raises NotEnoughSpace: the volume group is too full
        """
        for attempt in tenacity.Retrying(
                retry=tenacity.retry_if_exception_type(
                    exception.VolumeIsMoving),
                stop=tenacity.stop_after_delay(
                    self._configuration.localstor_peer_timeout),
                wait=tenacity.wait_fixed(SOON), reraise=True):
            with attempt, lockutils.lock(size_lock(volume.id)):
                volume = objects.Volume.get_by_id(ctxt, volume.id)
                self._check_decided(ctxt, volume, 'extending it')
                self._handles.extend(volume.name, size)

    def of_volume(self, ctxt: context.RequestContext, volume_id: str
                  ) -> rows.Move | None:
        """The move that decides where a volume is, if it moves."""
        moves = [move for move in rows.for_volume(ctxt, volume_id)
                 if move.state != table.State.ABORTING]
        return moves[-1] if moves else None

    def discard(self, ctxt: context.RequestContext, volume_id: str) -> bool:
        """End all moves of a volume that is being deleted.

        :returns: whether no move has its copy here any more; one that still
            has it removes it later
        :raises VolumeInUse: it is in use, or not yet sure of where it is; the
            moves go on
        """
        for attempt in tenacity.Retrying(
                retry=tenacity.retry_if_exception_type(exception.MoveChanged),
                stop=tenacity.stop_after_attempt(3), reraise=True):
            with attempt:
                done = self._discard(ctxt, volume_id)
        return done

    def _discard(self, ctxt: context.RequestContext, volume_id: str) -> bool:
        moves = rows.for_volume(ctxt, volume_id)
        if (rows.home(ctxt, volume_id) != self.host
                or any(move.state in table.UNDONE_BY_FAILURE
                       for move in moves)):
            # In a moment it stands somewhere for good.
            raise exception.VolumeInUse(
                volume_name=volume_id, host=self.host,
                device='/dev/mapper/*%s*' % handles.SUFFIX)
        last = self.of_volume(ctxt, volume_id)
        if last is not None:
            # Before anything is recorded: what is recorded is carried out.
            self._handles.check_unused(last.transfer.destination_name)
        for move in moves:
            if move.state == table.State.ABORTING:
                # What is left of it on the peer is removed anyway.  Only its
                # export is in the way.
                self._steps.run(ctxt, move.transfer, ['unexport_source'])
        return last is None or self._executor.discard(ctxt, last)
