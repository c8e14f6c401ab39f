# SPDX-License-Identifier: Apache-2.0
"""What a backend answers its peers about moves."""

from collections.abc import Collection
from collections.abc import Iterator
import contextlib
from typing import Any

from cinder import context
from cinder import objects
from cinder.volume import volume_utils
from oslo_utils import units

from cinder_localstor.datapath import destination
from cinder_localstor.datapath import source
from cinder_localstor.datapath import transfer
from cinder_localstor.datapath import wipes
from cinder_localstor import exception
from cinder_localstor.moves import copier
from cinder_localstor.moves import custodian
from cinder_localstor.moves import executor
from cinder_localstor.moves import gate
from cinder_localstor.moves import keeper
from cinder_localstor.moves import scheduler
from cinder_localstor.moves import table
from cinder_localstor.node import interface
from cinder_localstor.peers import directory
from cinder_localstor import rows


class Answers:
    """See :class:`cinder_localstor.peers.rpc.Answers`."""

    def __init__(self, host: str, node: interface.Node,
                 on_source: source.Source,
                 on_destination: destination.Destination,
                 steps: executor.StepRunner, periodic: scheduler.Scheduler,
                 copies_here: copier.Copier, keeps: keeper.Keeper,
                 lets_go: custodian.Custodian, volume_gate: gate.Gate,
                 configuration: Any) -> None:
        """:param host: ``host@backend`` of this node"""
        self.host = host
        self._node = node
        self._source = on_source
        self._destination = on_destination
        self._steps = steps
        self._scheduler = periodic
        self._copier = copies_here
        self._keeper = keeps
        self._custodian = lets_go
        self._gate = volume_gate
        self._configuration = configuration
        self._wipes = wipes.Wipes(node.volumes)

    def identify(self, ctxt: context.RequestContext) -> list[str]:
        """Names and addresses of this node."""
        return directory.own_identity(
            (volume_utils.extract_host(self.host, 'host'),
             self._configuration.target_ip_address,
             *self._node.initiator.addresses()))

    def examine(self, ctxt: context.RequestContext, block_size: int,
                portal: str, data_path: str = '') -> dict[str, Any]:
        """Whether a volume could move here, see Destination.examine."""
        return self._destination.examine(block_size, portal, self.host,
                                         data_path)

    def run(self, ctxt: context.RequestContext, move: dict[str, Any],
            steps: list[str]) -> None:
        """Run steps of a move here.

        None of them waits for a wipe: a copy that a step gives up is wiped by
        and by, see :meth:`remaining`.
        """
        described = transfer.Transfer.from_dict(move)
        self._scheduler.learn(described.move_id)
        with contextlib.ExitStack() as held:
            if described.cloned and table.TAKE_SNAPSHOT.name in steps:
                self._copier.take(ctxt, held.enter_context(
                    self._hold_cloned(ctxt, described)), described)
            self._steps.run(ctxt, described, steps)
        self._scheduler.tend_wipes()

    @contextlib.contextmanager
    def _hold_cloned(self, ctxt: context.RequestContext,
                     move: transfer.Transfer) -> Iterator[objects.Volume]:
        """Let a volume that is cloned elsewhere be what it was when that
        began.

        :raises VolumeHasChanged: it is not
        """
        with self._gate.enter(ctxt, move.cloned,
                              gate.Operation.CLONE) as volume:
            if (volume.name, volume.size * units.Gi) != (move.taken_of,
                                                         move.size):
                raise exception.VolumeHasChanged(volume_id=move.cloned)
            yield volume

    def remaining(self, ctxt: context.RequestContext, names: list[str]
                  ) -> list[str]:
        """Which of some copies are here still, perhaps being wiped."""
        return sorted(self._wipes.remaining(names))

    def is_source_used(self, ctxt: context.RequestContext,
                       move: dict[str, Any]) -> bool:
        """Whether anybody but the target has a source's handle open here."""
        asked = transfer.Transfer.from_dict(move)
        return self._source.is_used(asked.source_name, rows.reading(
            ctxt, asked.volume_id, asked.source_name))

    def offer(self, ctxt: context.RequestContext, move_id: str, name: str,
              initiator: str,
              transports: Collection[str] = (interface.ISCSI,)
              ) -> dict[str, Any]:
        """What a peer needs to copy a snapshot from here, see Source.offer.
        """
        return self._source.offer(move_id, name, initiator, transports)

    def delete_snapshot(self, ctxt: context.RequestContext, volume_id: str,
                        snapshot_id: str) -> None:
        """Delete a snapshot that lies here, of a volume that has moved on."""
        self._keeper.delete_here(volume_id, snapshot_id)

    def unmanage_snapshot(self, ctxt: context.RequestContext, volume_id: str,
                          snapshot_id: str) -> None:
        """Let a snapshot go that lies here, of a volume that has moved on."""
        self._custodian.unmanage_snapshot_here(ctxt, volume_id, snapshot_id)

    def drive(self, ctxt: context.RequestContext, move_id: str) -> None:
        """Look after a move now."""
        self._scheduler.look_after(move_id)
