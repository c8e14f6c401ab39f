# SPDX-License-Identifier: Apache-2.0
"""The engine `hydrator`: a process of ours, localstor-hydrator.

Its device is under a linear node, so that the handle lies on a name which
stays the same when the process gets another device after a restart of the
node.  The format of its metadata: hydrator/core/FORMAT.md.
"""

from collections.abc import Iterator
import contextlib
from typing import Any

from oslo_utils import excutils
from oslo_utils import units

from cinder_localstor.datapath import engine
from cinder_localstor.datapath import regions
from cinder_localstor.datapath import transfer
from cinder_localstor import exception
from cinder_localstor.node import interface

NAME = 'hydrator'

LEAST_JOURNAL, MOST_JOURNAL = 256, 16384  # blocks
VOLUME_PER_JOURNAL_BLOCK = 64 * units.Mi  # bytes
# 63 of a block's 64 bytes are bits, one for each 4 KiB.
VOLUME_PER_BITMAP_BLOCK = 126 * units.Mi  # bytes
SUPERBLOCKS = 2

# Seconds that guests wait at most for what a driver does that may have died
LEASE = 20

HYDRATIONS = {
    # It recovers what it knew before it was restarted.
    'opening': engine.Hydration.RUNNING,
    'starting': engine.Hydration.OFF,
    'migrating': engine.Hydration.RUNNING,
    'stalled': engine.Hydration.RUNNING,
    'differing': engine.Hydration.DIFFERS,
    'done': engine.Hydration.DONE,
    'broken': engine.Hydration.FAILED,
    'closing': engine.Hydration.MISSING,
}


def metadata_size(size: int) -> int:
    """Bytes of map and journal for a volume of `size` bytes, in extents."""
    journal = min(max(-(-size // VOLUME_PER_JOURNAL_BLOCK), LEAST_JOURNAL),
                  MOST_JOURNAL)
    bitmap = -(-size // VOLUME_PER_BITMAP_BLOCK)
    return regions.in_extents((SUPERBLOCKS + journal + bitmap)
                              * regions.BLOCK)


class HydratorEngine(engine.Engine):
    """A localstor-hydrator with its metadata in a logical volume."""

    name = NAME
    blank = SUPERBLOCKS * regions.BLOCK
    verifies = True
    keeps_holes = True

    def __init__(self, node: interface.Node, configuration: Any) -> None:
        super().__init__(node)
        self._configuration = configuration

    def check(self) -> None:
        self._node.hydrators.check()

    def node_name(self, copy: str) -> str:
        return copy + '-hydrator'

    def map_size(self, move: transfer.Transfer) -> int:
        return metadata_size(move.size)

    def build(self, move: transfer.Transfer, source: str) -> None:
        self._check_map(move)
        configuration = self._configuration
        device = self._node.hydrators.start(
            move.destination_name, interface.Hydrator(
                move_id=move.move_id,
                data=self._node.volumes.path(move.destination_name),
                metadata=self._node.metadata.path(self._map_name(move)),
                source=source, size=move.size,
                zeroed=self._node.volumes.thin,
                minimum=(configuration.localstor_hydration_min_rate
                         * units.Mi),
                source_timeout=(0 if move.waits else
                                configuration.localstor_source_timeout),
                poll_time=configuration.localstor_poll_time,
                verify=configuration.localstor_verify))
        name = self.node_name(move.destination_name)
        table = [interface.Segment(0, move.size // interface.SECTOR,
                                   'linear', device + ' 0')]
        device_mapper = self._node.device_mapper
        if device_mapper.exists(name):
            device_mapper.reload(name, table)
        else:
            device_mapper.create(name, table)

    def start_hydration(self, move: transfer.Transfer) -> None:
        self._node.hydrators.hydrate(move.destination_name)

    def progress(self, move: transfer.Transfer,
                 devices: dict[str, interface.Device]) -> engine.Progress:
        status = self._node.hydrators.status(move.destination_name)
        if (status is None
                or self.node_name(move.destination_name) not in devices):
            return engine.Progress(engine.Hydration.MISSING)
        return engine.Progress(
            HYDRATIONS[status.state], status.local, move.size, status.rate,
            None if status.verify == interface.NOT_VERIFIED
            else status.verified, status.differing, status.first_differing,
            engine.Rates(status.limit, status.minimum))

    def throttle(self, move: transfer.Transfer, rates: engine.Rates) -> None:
        self._node.hydrators.throttle(move.destination_name, rates.limit,
                                      rates.minimum)

    @contextlib.contextmanager
    def frozen(self, copy: str) -> Iterator[None]:
        hydrators = self._node.hydrators
        hydrators.pause(copy, LEASE)
        try:
            yield
        except Exception:
            with (excutils.save_and_reraise_exception(),
                  contextlib.suppress(exception.CommandFailed)):
                hydrators.resume(copy)
        hydrators.resume(copy)

    def copy_map(self, move: transfer.Transfer) -> None:
        metadata = self._node.metadata
        self._node.hydrators.copy_metadata(
            metadata.path(self._map_name_of_volume(move)), move.snapshot_of,
            metadata.path(self._map_name(move)), move.move_id)

    def remove(self, move: transfer.Transfer) -> None:
        self._node.device_mapper.remove(
            self.node_name(move.destination_name))
        self._node.hydrators.end(move.destination_name)
