# SPDX-License-Identifier: Apache-2.0
"""The engine `clone`: the kernel's dm-clone.

Table and status: Linux, Documentation/admin-guide/device-mapper/dm-clone.rst.
"""

from collections.abc import Iterator
import contextlib

import tenacity

from cinder_localstor.datapath import engine
from cinder_localstor.datapath import regions
from cinder_localstor.datapath import transfer
from cinder_localstor import exception
from cinder_localstor.node import interface

TARGET = 'clone'
HYDRATION_OFF = 'no_hydration'
# Seconds in which regions that are being copied arrive, and between two looks
ARRIVE_WITHIN, PAUSE = 5, 0.05
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

    def throttle(self, move: transfer.Transfer, rates: engine.Rates) -> None:
        # dm-clone knows no rate.  Hydration that was stopped is begun again
        # as any that is found to be off.
        if rates.limit == 0:
            self._node.device_mapper.message(
                self.node_name(move.destination_name), 'disable_hydration')

    @contextlib.contextmanager
    def frozen(self, copy: str) -> Iterator[None]:
        name, device_mapper = self.node_name(copy), self._node.device_mapper
        running = (self._status(name).hydration is engine.Hydration.RUNNING)
        try:
            if running:
                # A suspend waits for regions that are being copied, as long as
                # the source is away, and guests wait for its end.
                device_mapper.message(name, 'disable_hydration')
            self._check_idle(name)
            try:
                # It commits the map (clone_postsuspend in dm-clone-target.c).
                device_mapper.suspend(name)
                yield
            finally:
                self._resume(name)
        finally:
            if running:
                device_mapper.message(name, 'enable_hydration')

    @tenacity.retry(
        retry=tenacity.retry_if_exception_type(exception.LocalStorException),
        wait=tenacity.wait_fixed(PAUSE), stop=tenacity.stop_after_attempt(5),
        reraise=True)
    def _resume(self, name: str) -> None:
        # Nobody else does before the next start.
        self._node.device_mapper.resume(name)

    def _status(self, name: str) -> engine.Progress:
        device = self._node.device_mapper.devices().get(name)
        if device is None or not device.status:
            raise exception.HandleMissing(name=name)
        return parse_status(device.status[0].arguments)

    @tenacity.retry(
        retry=tenacity.retry_if_exception_type(exception.SourceBusy),
        wait=tenacity.wait_fixed(PAUSE),
        stop=tenacity.stop_after_delay(ARRIVE_WITHIN), reraise=True)
    def _check_idle(self, name: str) -> None:
        """:raises SourceBusy: regions are being copied"""
        status = self._node.device_mapper.devices()[name].status
        count = int(status[0].arguments.split()[4])
        if count:
            raise exception.SourceBusy(count=count, name=name)

    def copy_map(self, move: transfer.Transfer) -> None:
        self._node.metadata.copy(self._map_name_of_volume(move),
                                 self._map_name(move))

    def thaw(self, copy: str, devices: dict[str, interface.Device]) -> None:
        device = devices.get(self.node_name(copy))
        if device is not None and device.suspended:
            self._node.device_mapper.resume(device.name)

    def remove(self, move: transfer.Transfer) -> None:
        self._node.device_mapper.remove(
            self.node_name(move.destination_name))
