# SPDX-License-Identifier: Apache-2.0
"""The engine `clone`: the kernel's dm-clone.

Table and status: Linux, Documentation/admin-guide/device-mapper/dm-clone.rst.
"""

from cinder_localstor.datapath import engine
from cinder_localstor.datapath import regions
from cinder_localstor.datapath import transfer
from cinder_localstor import exception
from cinder_localstor.node import interface

TARGET = 'clone'
HYDRATION_OFF = 'no_hydration'
# The mode of a map that can't be written any more
BROKEN_MODES = ('ro', 'Fail', 'Error')


def parse_status(arguments: str) -> engine.Progress:
    """What the status line of a clone tells, counted in regions.

    :param arguments: `<metadata block size> <used>/<total metadata blocks>
        <region size> <hydrated>/<total regions> <hydrating> <#feature args>
        <feature args>* <#core args> <core args>* <metadata mode>`
    :raises OutputNotUnderstood: it has another form
    """
    if arguments.strip() in BROKEN_MODES:
        return engine.Progress(engine.Hydration.FAILED)
    words = arguments.split()
    try:
        sectors = int(words[2])
        hydrated, total = (int(count) for count in words[3].split('/'))
        features = words[6:6 + int(words[5])]
        mode = words[-1]
        if not 0 <= hydrated <= total:
            raise ValueError('more regions hydrated than there are')
    except (ValueError, IndexError) as error:
        raise exception.OutputNotUnderstood(
            line=arguments, command='dmsetup status') from error
    if mode in BROKEN_MODES:
        hydration = engine.Hydration.FAILED
    elif hydrated == total:
        hydration = engine.Hydration.DONE
    elif HYDRATION_OFF in features:
        hydration = engine.Hydration.OFF
    else:
        hydration = engine.Hydration.RUNNING
    region = sectors * interface.SECTOR
    return engine.Progress(hydration, hydrated * region, total * region)


class CloneEngine(engine.Engine):
    """A dm-clone node with its region map in a logical volume."""

    name = TARGET
    blank = regions.BLOCK

    def check(self) -> None:
        self._node.device_mapper.check_target(TARGET)

    def node_name(self, copy: str) -> str:
        return copy + '-clone'

    def map_size(self, move: transfer.Transfer) -> int:
        return regions.map_size(move.size, move.region_sectors)

    def build(self, move: transfer.Transfer, source: str) -> None:
        self._check_map(move)
        name = self.node_name(move.destination_name)
        arguments = '%s %s %s %d 1 %s 4 hydration_threshold %d ' \
            'hydration_batch_size %d' % (
                self._node.metadata.path(self._map_name(move)),
                self._node.volumes.path(move.destination_name), source,
                move.region_sectors, HYDRATION_OFF, move.threshold,
                move.batch)
        device_mapper = self._node.device_mapper
        device_mapper.create(name, [interface.Segment(
            0, move.size // interface.SECTOR, TARGET, arguments)])
        # dm-clone takes a discarded region for one that has arrived: it
        # would read what the disk held for somebody else before (H11).
        device_mapper.refuse_discards(device_mapper.path(name))

    def start_hydration(self, move: transfer.Transfer) -> None:
        self._node.device_mapper.message(
            self.node_name(move.destination_name), 'enable_hydration')

    def progress(self, move: transfer.Transfer,
                 devices: dict[str, interface.Device]) -> engine.Progress:
        device = devices.get(self.node_name(move.destination_name))
        if device is None or not device.status:
            return engine.Progress(engine.Hydration.MISSING)
        return parse_status(device.status[0].arguments)

    def throttle(self, move: transfer.Transfer, limit: int | None,
                 minimum: int | None = None) -> None:
        # dm-clone knows no rate.  Hydration that was stopped is begun again
        # as any that is found to be off.
        if limit == 0:
            self._node.device_mapper.message(
                self.node_name(move.destination_name), 'disable_hydration')

    def remove(self, move: transfer.Transfer) -> None:
        self._node.device_mapper.remove(
            self.node_name(move.destination_name))
