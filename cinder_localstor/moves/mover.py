# SPDX-License-Identifier: Apache-2.0
"""The life of a move, as Cinder's users and operators ask for it."""

from __future__ import annotations

from typing import Any

from cinder import context
from cinder import exception as cinder_exception
from cinder import objects
from oslo_log import log as logging
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
from cinder_localstor.moves import gate
from cinder_localstor.moves import properties
from cinder_localstor.moves import registry
from cinder_localstor.moves import scheduler
from cinder_localstor.moves import table
from cinder_localstor.node import interface
from cinder_localstor.peers import rpc
from cinder_localstor import rows

LOG = logging.getLogger(__name__)

# What a volume is before a user has it
MADE = ('creating', 'downloading')
# What it is while it may not leave, and what that is called: at the end of a
# retype Cinder writes once more where it is.
CHANGING = {'extending': 'being extended', 'retyping': 'being retyped'}
# The migration_status of the row that Cinder deletes after a migration
LEFT_BEHIND = 'deleting'
# Seconds that a handle may be open after its user has gone: udev looks at what
# somebody has written.
PATIENCE = 5


def _until_left() -> tenacity.Retrying:
    """Tries again while a handle is still open whose user has gone."""
    return tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(exception.VolumeInUse),
        stop=tenacity.stop_after_delay(PATIENCE),
        wait=tenacity.wait_fixed(gate.SOON), reraise=True)


class Mover:
    """Begins moves, and does with volumes that move what a user asks for."""

    def __init__(self, host: str, node: interface.Node,
                 on_source: source.Source, node_handles: handles.Handles,
                 interactive: executor.Executor,
                 periodic: scheduler.Scheduler, peers: rpc.PeerAPI,
                 volume_gate: gate.Gate, configuration: Any) -> None:
        """:param host: ``host@backend`` of this node
        :param interactive: drives moves that a user waits for
        """
        self.host = host
        self._node = node
        self._source = on_source
        self._handles = node_handles
        self._executor = interactive
        self._scheduler = periodic
        self._peers = peers
        self._configuration = configuration
        self._gate = volume_gate

    def begin(self, ctxt: context.RequestContext, volume: objects.Volume,
              peer: objects.Service, migrated_to: str = '') -> None:
        """Bring a volume to a peer; returns when it is usable there.

        :param migrated_to: ``host@backend#pool`` that an administrator
            migrates it to, '' where it follows an instance
        :raises LocalStorException: it can't be; it is as it was then
        :raises VolumeAttached: it would be migrated, but somebody uses it, or
            is about to
        :raises VolumeInUse: somebody has it open whom Cinder does not know
        """
        move_id = rows.new_move_id(volume.id)
        try:
            # Before the row is there for the periodic task to find
            with self._scheduler.beginning(move_id):
                for attempt in _until_left():
                    with attempt, self._gate.enter(ctxt, volume.id, (
                            gate.Operation.SEND if migrated_to
                            else gate.Operation.MOVE)) as present:
                        move, noted = self._record(ctxt, present, peer,
                                                   move_id, migrated_to)
                # What is recorded keeps others out from here on.
                self._prepare(ctxt, move, noted)
        except Exception:
            with excutils.save_and_reraise_exception():
                # Nobody waits for what has to be taken away again.
                self._scheduler.look_after(move_id)
        self._peers.nudge(peer.host, move_id)

    def _record(self, ctxt: context.RequestContext, volume: objects.Volume,
                peer: objects.Service, move_id: str, migrated_to: str
                ) -> tuple[rows.Move, list[dict[str, Any]]]:
        """Make the row of a move to a peer, if that can take the volume.

        :returns: and the attachments that were noted as connecting before
        """
        if (volume.group_id if migrated_to else gate.is_bound(volume)):
            raise exception.VolumeIsBound(volume_id=volume.id, host=self.host)
        if volume.status in CHANGING and not (
                volume.status == 'retyping' and migrated_to):
            raise exception.LocalStorException(
                reason='Volume %s is %s. Attach it when that is done.' % (
                    volume.id, CHANGING[volume.status]))
        arriving = [move.transfer for move
                    in rows.for_volume(ctxt, volume.id)]
        answer = self._peers.examine(
            peer.host, volume.id, self._node.volumes.block_size(),
            self._source.portal(),
            is_copy=any(move.is_copy for move in arriving),
            data_path=properties.of_volume(ctxt, volume.id).data_path,
            is_revert=any(move.replaced for move in arriving))
        attachments = rows.attachments(ctxt, volume.id)
        # Somebody may have come since the driver has looked.
        if volume.provider_location:
            raise exception.VolumeConnectedElsewhere(
                volume_id=volume.id, host='another host')
        if volume.multiattach and 1 < len({row['instance_uuid']
                                           for row in attachments}):
            raise exception.VolumeIsShared(volume_id=volume.id)
        if migrated_to and attachments:
            raise cinder_exception.VolumeAttached(volume_id=volume.id)
        unconnected = self._unconnected(attachments)
        noted = rows.connecting(ctxt, volume.id, unconnected)
        leaving = tuple(row['id'] for row in attachments if row['connector'])
        if leaving and len(leaving) == len(attachments):
            raise exception.VolumeConnectedElsewhere(
                volume_id=volume.id, host='the host of attachment '
                + leaving[0])
        self._executor.unexport_aborted(ctxt, volume.id)
        if len(unconnected) == 1:
            self._check_left(ctxt, volume, attachments, stays=False)
        if len(unconnected) > 1 and (
                noted or not leaving
                and self._handles.open_count(volume.name)):
            # A guest is about to open the copy that would be the source, or
            # has it open: Nova makes attachments anew for a guest that is
            # rebuilt, and leaves them so where that is broken off.
            raise exception.AttachmentUnderWay(
                volume_id=volume.id, count=len(unconnected), host=self.host)
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
                move_id, answer['initiator'], answer['address'],
                # A peer of an earlier version has no other.
                answer.get('transports', (interface.ISCSI,))),
            content=(self._source.content(volume.name)
                     if answer.get('thin') else -1),
            # A peer of an earlier version does as its options say.
            waits='waits' in answer and bool(volume.encryption_key_id),
            **destination.choose_regions(volume.size * units.Gi,
                                         self._configuration))
        # What connects is noted before the peer can be asked to let the volume
        # move on.
        return self._executor.begin(ctxt, volume, described,
                                    table.State.PREPARING, peer, leaving,
                                    migrated_to, unconnected), noted

    def _prepare(self, ctxt: context.RequestContext, move: rows.Move,
                 noted: list[dict[str, Any]]) -> None:
        """Take a new move to where its volume can be used, or undo it."""
        try:
            if (self._executor.drive(ctxt, move.move_id)
                    == table.State.PREPARING):
                raise exception.NotWanted(
                    volume_id=move.volume_id, host=self.host,
                    peer=move.transfer.destination_host)
        except Exception as error:
            with (excutils.save_and_reraise_exception(),
                  self._gate.lock(move.volume_id)):
                # From then on others may note what they connect.
                self._executor.undo(ctxt, move, str(error))
                rows.note_connecting(ctxt, move.volume_id, noted)

    @staticmethod
    def _unconnected(attachments: list[dict[str, Any]]
                     ) -> list[dict[str, Any]]:
        return [row for row in attachments if not row['connector']]

    def stay(self, ctxt: context.RequestContext, volume_id: str) -> str:
        """Let a user have a volume on this node; the name of its copy.

        No move begins from here on before Cinder has recorded which of the
        attachments got it.

        :raises VolumeIsMoving: it may be about to leave
        :raises VolumeIsDiscarded: it is as good as deleted
        :raises VolumeElsewhere: it has left meanwhile
        :raises VolumeInUse: somebody has it open whom Cinder does not know
        """
        for attempt in _until_left():
            with attempt, self._gate.enter(
                    ctxt, volume_id, gate.Operation.LOCAL) as present:
                attachments = rows.attachments(ctxt, volume_id)
                self._check_left(ctxt, present, attachments, stays=True)
                rows.note_connecting(ctxt, volume_id,
                                     self._unconnected(attachments))
        return present.name

    def _check_left(self, ctxt: context.RequestContext,
                    volume: objects.Volume, attachments: list[dict[str, Any]],
                    stays: bool) -> None:
        """Let no second guest write beside one that Cinder knows nothing of
        (hazard H8): Nova may have forgotten one that goes on.

        Where the volume stays, the guest that it was given to last may have
        it open: after a rebuild that was broken off it is connected anew.

        :raises VolumeInUse: there may be another one
        """
        known = volume.provider_location or any(
            row['connector'] or row['mountpoint'] for row in attachments)
        if (attachments and not known
                and self._handles.open_count(volume.name)
                and self._source.is_used(volume.name, rows.reading(
                    ctxt, volume.id, volume.name))):
            had_it = rows.given_to(ctxt, volume.id) if stays else ()
            if not all(row['instance_uuid'] in had_it for row in attachments):
                raise exception.VolumeInUse(
                    volume_name=volume.name, host=self.host,
                    device=self._handles.path(volume.name))

    def extend(self, ctxt: context.RequestContext, volume: objects.Volume,
               size: int) -> None:
        """Grow a volume to `size` bytes, whether it moves or not.

        One that may yet go back to where it was is waited for, since its
        other copy does not grow.  So is one that copies read; as long as it
        takes, if it is still made: Cinder has its image cloned for others
        before it lets it have its size.

        :raises VolumeIsMoving: it still may go back
        :raises OriginIsRead: LVM can't grow it as long as copies read it
        :raises NotEnoughSpace: the volume group is too full
        """
        for attempt in tenacity.Retrying(
                retry=tenacity.retry_if_exception_type(
                    exception.OriginIsRead),
                stop=(tenacity.stop_never if volume.status in MADE
                      else tenacity.stop_after_delay(
                          self._configuration.localstor_peer_timeout)),
                wait=tenacity.wait_fixed(gate.SOON), reraise=True):
            with attempt, self._gate.enter(
                    ctxt, volume.id, gate.Operation.EXTEND) as present:
                self._handles.extend(present.name, size)

    def of_volume(self, ctxt: context.RequestContext, volume_id: str
                  ) -> rows.Move | None:
        """The move that a volume has come by, or is about to leave by; None
        if there is none any more.
        """
        name = objects.Volume.get_by_id(ctxt, volume_id).name
        # Those before it in a chain may end later.
        moves = [move for move in rows.for_volume(ctxt, volume_id)
                 if move.state not in table.ASIDE
                 and (move.state in table.UNDONE_BY_FAILURE
                      or move.transfer.destination_name == name)]
        return moves[-1] if moves else None

    def is_arriving(self, ctxt: context.RequestContext,
                    volume: objects.Volume) -> bool:
        """Whether a volume's handle is built by its move, and not yet."""
        return any(move.transfer.destination_name == volume.name
                   and table.TABLE[table.State(move.state)].serves
                   for move in rows.for_volume(ctxt, volume.id))

    def adopt(self, ctxt: context.RequestContext, volume: objects.Volume
              ) -> None:
        """Let moves belong to the row that has their copy.

        Cinder migrates a volume in use to another kind of backend without a
        word to us, and deletes what the volume's row had until then.
        """
        if volume.migration_status != LEFT_BEHIND:
            return
        adopted: list[rows.Move] = []
        of_moves = registry.Registry(self.host, (),
                                     rows.for_host(ctxt, self.host))
        for volume_id in {copy.volume_id for copy in of_moves
                          if copy.name == volume.name} - {volume.id}:
            adopted += rows.for_volume(ctxt, volume_id)
        if adopted:
            LOG.warning('Moves %(moves)s go with copy %(copy)s, which is '
                        'volume %(volume)s now',
                        {'moves': [move.move_id for move in adopted],
                         'copy': volume.name, 'volume': volume.id})
            rows.hand_over(ctxt, adopted, volume.id)

    def discard(self, ctxt: context.RequestContext, volume_id: str) -> bool:
        """End all moves of a volume that is being deleted.

        A snapshot that still arrives with it is waited for, if that is not
        long.

        :returns: whether no move has its copy here any more; one that still
            has it removes it later
        :raises VolumeInUse: it is in use; the moves go on
        :raises DeletedTooEarly: it is not yet sure where it is, or a snapshot
            arrives for longer; they go on
        """
        for attempt in tenacity.Retrying(
                retry=tenacity.retry_if_exception_type(
                    exception.SnapshotOnItsWay),
                stop=tenacity.stop_after_delay(
                    self._configuration.localstor_peer_timeout),
                wait=tenacity.wait_fixed(gate.SOON), reraise=True):
            with attempt:
                last = self._try_to_discard(ctxt, volume_id)
        return last is None or self._executor.discard(ctxt, last)

    @tenacity.retry(
        retry=tenacity.retry_if_exception_type(exception.MoveChanged),
        stop=tenacity.stop_after_attempt(3), reraise=True)
    def _try_to_discard(self, ctxt: context.RequestContext, volume_id: str
                        ) -> rows.Move | None:
        with self._gate.enter(ctxt, volume_id, gate.Operation.DELETE):
            return self._decide_discard(ctxt, volume_id)

    def _decide_discard(self, ctxt: context.RequestContext, volume_id: str
                        ) -> rows.Move | None:
        """Record that a volume's moves are discarded, if nobody uses it.

        :returns: the move that has its copy here, None if none has
        """
        last = self.of_volume(ctxt, volume_id)
        self._check_no_snapshot_arrives(ctxt, volume_id)
        if last is not None and last.state != table.State.DISCARDING:
            # Before anything is recorded: what is recorded is carried out.
            self._handles.check_unused(last.transfer.destination_name)
        self._executor.unexport_aborted(ctxt, volume_id)
        if last is not None and last.state != table.State.DISCARDING:
            last = self._executor.change_state(ctxt, last,
                                               table.State.DISCARDING)
        return last

    def _check_no_snapshot_arrives(self, ctxt: context.RequestContext,
                                   volume_id: str) -> None:
        """Keep what snapshots read: a deleted one may still be there for who
        copies it.

        :raises SnapshotOnItsWay: some of one is still on another node
        """
        if rows.snapshots_arriving(ctxt, volume_id):
            raise exception.SnapshotOnItsWay(volume_id=volume_id)
