# SPDX-License-Identifier: Apache-2.0
"""The moves of one backend: begin, watch, recover, end."""

from __future__ import annotations

from collections.abc import Callable
import time
from typing import Any

from cinder import context
from cinder import objects
from cinder.volume import volume_utils
import futurist
from oslo_concurrency import lockutils
from oslo_log import log as logging
from oslo_utils import excutils
from oslo_utils import units
import tenacity

from cinder_localstor.datapath import clone
from cinder_localstor.datapath import destination
from cinder_localstor.datapath import engines
from cinder_localstor.datapath import handles
from cinder_localstor.datapath import source
from cinder_localstor.datapath import transfer
from cinder_localstor import exception
from cinder_localstor.moves import executor
from cinder_localstor.moves import table
from cinder_localstor.node import interface
from cinder_localstor.peers import directory
from cinder_localstor.peers import rpc
from cinder_localstor import rows

LOG = logging.getLogger(__name__)

# Moves that are looked after at the same time.  Most of it is waiting for
# peers, so one that is away must not keep the others waiting.
WORKERS = 8
# Seconds
SOON = 1
# Stands among the busy moves for the look at all exports.
EXPORTS = 'exports'


def size_lock(volume_id: str) -> str:
    """Name of the lock that keeps a volume from growing as a move begins."""
    return 'localstor-size-' + volume_id


def _is_hydrating(move: rows.Move) -> bool:
    return table.START_HYDRATION.name in move.done


class Mover:
    """Everything about moves that one backend does.

    It is also what peers call (:class:`cinder_localstor.peers.rpc.Endpoint`).
    """

    def __init__(self, host: str, node: interface.Node,
                 paths: engines.Engines, peers: rpc.PeerAPI,
                 configuration: Any,
                 workers: Any = None) -> None:
        """:param host: ``host@backend`` of this node
        :param workers: where moves are looked after, a pool of its own if
            it is None
        """
        self.host = host
        self._node = node
        self._peers = peers
        self._configuration = configuration
        self._source = source.Source(node)
        self._arriving = destination.Destination(node, paths)
        self._handles = handles.Handles(node)
        self._steps = executor.StepRunner(self._source, self._arriving)
        self._executor = self._make_executor(peers.run)
        self._workers = workers or futurist.ThreadPoolExecutor(WORKERS)
        self._busy: set[str] = set()
        # Moves that a user waits for; another that is still preparing has
        # been broken off.
        self._beginning: set[str] = set()

    def _make_executor(self, run_on_peer: executor.RunOnPeer
                       ) -> executor.Executor:
        return executor.Executor(
            self.host, self._steps, self._arriving,
            self._node.device_mapper.devices, run_on_peer,
            self._peers.is_source_used)

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
            **destination.choose_regions(volume.size * units.Gi,
                                         self._configuration))
        # A user waits, so a peer that does not answer is given up soon.
        hasty = self._make_executor(
            lambda host, moving, steps: self._peers.run(host, moving, steps,
                                                        patient=False))
        # Before the row is there for the periodic task to find
        self._beginning.add(move_id)
        try:
            move = rows.begin(ctxt, volume, described,
                              table.State.PREPARING.value, peer, leaving)
            try:
                if hasty.drive(ctxt, move_id) == table.State.PREPARING:
                    raise exception.NotWanted(
                        volume_id=volume.id, peer=peer.host, host=self.host)
            except Exception:
                with excutils.save_and_reraise_exception():
                    self._executor.undo(ctxt, move)
        finally:
            self._beginning.discard(move_id)
        self._peers.nudge(peer.host, move_id)

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
        home = volume_utils.extract_host(volume.host)
        if home != self.host:
            raise exception.VolumeElsewhere(volume_id=volume.id, host=home,
                                            asked=self.host)

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

    # What peers ask

    def identify(self, ctxt: context.RequestContext) -> list[str]:
        """Names and addresses of this node."""
        return directory.own_identity(
            (volume_utils.extract_host(self.host, 'host'),
             self._configuration.target_ip_address))

    def examine(self, ctxt: context.RequestContext, block_size: int,
                portal: str) -> dict[str, str]:
        """Whether a volume could move here, see Destination.examine."""
        return self._arriving.examine(block_size, portal, self.host)

    def run(self, ctxt: context.RequestContext, move: dict[str, Any],
            steps: list[str]) -> None:
        """Run steps of a move here."""
        self._steps.run(ctxt, transfer.Transfer.from_dict(move), steps)

    def is_source_used(self, ctxt: context.RequestContext,
                       move: dict[str, Any]) -> bool:
        """Whether anybody but the target has a source's handle open here."""
        asked = transfer.Transfer.from_dict(move)
        exported = self._node.target.exported()
        sources = [found for found in rows.for_volume(ctxt, asked.volume_id)
                   if found.transfer.source_name == asked.source_name
                   and found.move_id in exported]
        return self._source.is_used(asked, len(sources))

    def drive(self, ctxt: context.RequestContext, move_id: str) -> None:
        """Look after a move now."""
        self._look_after(move_id, None)

    # What this node does by itself

    def check(self) -> None:
        """:raises NoDataPath: volumes can't move to this node"""
        self._arriving.check()

    def warm_up(self) -> None:
        """Start in the background what the first move would wait for.

        That is the privileged daemons of the target and of os-brick.
        """
        for start in (self._node.target.warm_up, self._node.initiator.name):
            self._workers.submit(self._warm_up, start)

    def _warm_up(self, start: Callable[[], Any]) -> None:
        try:
            start()
        except Exception as error:
            LOG.warning('The first move will have to wait, or fail: %s',
                        error)

    def watch(self) -> None:
        """Take all moves that this node drives as far as they go.

        The facts of all are read at once; then each is looked after on its
        own, so that one which fails or hangs does not hold up the others.
        """
        ctxt = context.get_admin_context()
        moves = rows.for_host(ctxt, self.host)
        if any(map(self._serves_from_here, moves)):
            self._tend_exports()
        owned = [move for move in moves if self._executor.owns(move)]
        moves = [move for move in owned if move.move_id not in self._busy]
        if not moves:
            return
        limit = self._share_of_rate(owned)
        devices = self._node.device_mapper.devices()
        for move in moves:
            self._busy.add(move.move_id)
            self._workers.submit(self._look_after, move.move_id, devices,
                                 limit)

    def _share_of_rate(self, owned: list[rows.Move]) -> int | None:
        """Bytes per second that each volume may arrive with, None for no
        limit.
        """
        rate = self._configuration.localstor_hydration_rate * units.Mi
        arriving = sum(map(_is_hydrating, owned))
        return rate // arriving if rate and arriving else None

    def _throttle(self, move: rows.Move, limit: int) -> None:
        try:
            self._arriving.throttle(move.transfer, limit)
        except exception.LocalStorException as error:
            LOG.warning('Move %(move)s goes on at its former rate: %(error)s',
                        {'move': move.move_id, 'error': error})

    def _serves_from_here(self, move: rows.Move) -> bool:
        return (move.transfer.source_host == self.host
                and table.TABLE[table.State(move.state)].serves)

    def _tend_exports(self) -> None:
        """Let the target export what it should, in the background."""
        if EXPORTS not in self._busy:
            self._busy.add(EXPORTS)
            self._workers.submit(self._put_exports_right)

    def _put_exports_right(self) -> None:
        """Export what a target daemon that was restarted has forgotten, and
        take away what no move knows of.
        """
        ctxt = context.get_admin_context()
        try:
            exported = self._node.target.exported()
            for move in rows.for_host(ctxt, self.host):
                if (self._serves_from_here(move)
                        and move.move_id not in exported):
                    self._export_again(move)
            # Other backends of the node may share the target daemon.
            for move_id in self._node.target.remains():
                if rows.get(ctxt, move_id) is None:
                    LOG.warning('The export of move %s is left over and '
                                'taken away', move_id)
                    self._node.target.unexport(move_id)
        except Exception as error:
            LOG.error('The target does not tell what it exports: %s', error)
        finally:
            self._busy.discard(EXPORTS)

    def _look_after(self, move_id: str, devices: executor.Devices | None,
                    limit: int | None = None) -> None:
        ctxt = context.get_admin_context()
        try:
            move = rows.get(ctxt, move_id)
            if move is None or move_id in self._beginning:
                return
            if limit is not None and _is_hydrating(move):
                self._throttle(move, limit)
            if (move.state in table.UNDONE_BY_FAILURE
                    and self._executor.owns(move)):
                self._executor.undo(ctxt, move)
            else:
                self._executor.drive(ctxt, move_id, devices)
        except exception.MoveChanged as error:
            LOG.info('%s', error)
        except Exception as error:
            LOG.warning('Move %(move)s waits: %(error)s',
                        {'move': move_id, 'error': error})
            move = rows.get(ctxt, move_id)
            if move is not None:
                rows.record_problem(ctxt, move, str(error))
        finally:
            self._busy.discard(move_id)

    def recover(self) -> None:
        """Bring back what a restart of this node took away.

        Handles of all volumes that stand here, and handles and exports of
        copies that are sources of moves.  What needs the peers is left to
        :meth:`watch`, so that none of them can hold up the start: to build
        again what arrives here, and to undo moves that were broken off.
        """
        ctxt = context.get_admin_context()
        moves = rows.for_host(ctxt, self.host)
        arriving = {move.transfer.destination_name for move in moves
                    if move.transfer.destination_host == self.host
                    and not set(table.LETS_GO).intersection(move.done)}
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
        self._tend_exports()

    def _needs_source(self, move: rows.Move) -> bool:
        return (move.transfer.source_host == self.host
                and 'delete_source' not in move.done
                and move.state not in (table.State.COMPLETING,
                                       table.State.DISCARDING))

    def _export_again(self, move: rows.Move) -> None:
        try:
            self._steps.run(context.get_admin_context(), move.transfer,
                            ['export_source'])
        except Exception as error:
            LOG.error('The source of move %(move)s is not exported: '
                      '%(error)s', {'move': move.move_id, 'error': error})

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

    def look_soon(self, move: rows.Move) -> None:
        """Look after a move when the call that is under way has ended.

        Cinder removes an attachment's row only after it has told us.
        """
        def look() -> None:
            time.sleep(SOON)
            self._look_after(move.move_id, None)
        self._workers.submit(look)
