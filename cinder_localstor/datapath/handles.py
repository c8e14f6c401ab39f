# SPDX-License-Identifier: Apache-2.0
"""Handles, and the volumes that stand still."""

import dataclasses

from oslo_log import log as logging

from cinder_localstor.datapath import transfer
from cinder_localstor import exception
from cinder_localstor.node import interface

LOG = logging.getLogger(__name__)

SUFFIX = '-handle'


def handle_name(copy: str) -> str:
    """The device-mapper name of the handle of a volume copy."""
    return copy + SUFFIX


@dataclasses.dataclass(frozen=True)
class Standing:
    """A copy that stands on this node, as the database knows it."""

    name: str
    volume_id: str
    generation: int
    read_only: bool = False


class Handles:
    """The handles of one node and the logical volumes under them."""

    def __init__(self, node: interface.Node) -> None:
        self._node = node

    def path(self, copy: str) -> str:
        """The device that everybody uses."""
        return self._node.device_mapper.path(handle_name(copy))

    def create(self, standing: Standing, size: int) -> None:
        """Make a logical volume of `size` bytes and its handle.

        :raises NotEnoughSpace: the volume group is too full
        """
        self._node.volumes.create(
            standing.name, size,
            transfer.tags(volume=standing.volume_id,
                          generation=standing.generation))
        self.rest_on(standing.name, self._node.volumes.path(standing.name),
                     size)

    def delete(self, name: str) -> None:
        """Remove a handle and its logical volume, wiped.

        :raises VolumeInUse: somebody has the handle open
        """
        self._node.device_mapper.remove(handle_name(name))
        self._node.volumes.clear(name)
        self._node.volumes.remove(name)

    def check_unused(self, name: str) -> None:
        """:raises VolumeInUse: somebody has the handle open"""
        handle = handle_name(name)
        device = self._node.device_mapper.devices().get(handle)
        if device is not None and device.open_count:
            raise exception.VolumeInUse(
                volume_name=name, host='this node',
                device=self._node.device_mapper.path(handle))

    def extend(self, name: str, size: int) -> None:
        """Grow a standing volume to `size` bytes.

        :raises NotEnoughSpace: the volume group is too full
        """
        self._node.volumes.extend(name, size)
        self.rest_on(name, self._node.volumes.path(name), size)

    def rest_on(self, copy: str, device: str, size: int,
                read_only: bool = False) -> None:
        """Let a handle of `size` bytes lie on a device, whatever it lay on.
        """
        name = handle_name(copy)
        device_mapper = self._node.device_mapper
        table = [interface.Segment(0, size // interface.SECTOR, 'linear',
                                   '%s 0' % device)]
        if device_mapper.exists(name):
            device_mapper.reload(name, table, read_only)
        else:
            device_mapper.create(name, table, read_only)

    def stand(self, wanted: list[Standing]) -> dict[str, Exception]:
        """Build the missing handles of standing volumes.

        One bad volume does not keep the others from being built.

        :returns: what went wrong, by name of the copy
        """
        volumes = self._node.volumes.logical_volumes()
        devices = self._node.device_mapper.devices()
        failures: dict[str, Exception] = {}
        for standing in wanted:
            try:
                self._stand_one(standing, volumes, devices)
            except exception.LocalStorException as error:
                LOG.error('No handle for %(name)s: %(error)s',
                          {'name': standing.name, 'error': error})
                failures[standing.name] = error
        return failures

    def _stand_one(self, standing: Standing,
                   volumes: dict[str, interface.LogicalVolume],
                   devices: dict[str, interface.Device]) -> None:
        try:
            volume = volumes[standing.name]
        except KeyError as error:
            raise exception.LogicalVolumeMissing(
                group=self._node.volumes.name, name=standing.name,
                host='this node') from error
        found = transfer.read_tags(volume.tags)
        generation = transfer.read_number(found, 'generation',
                                          standing.generation)
        if 'move' in found or generation < standing.generation:
            raise exception.GenerationTooOld(
                name=standing.name, host='this node',
                volume_id=standing.volume_id, expected=standing.generation,
                found=('an arriving copy of generation %d' % generation
                       if 'move' in found else generation))
        device = devices.get(handle_name(standing.name))
        under = self._node.volumes.mapped_name(standing.name)
        if (device is not None and device.under == (under,)
                and device.read_only == standing.read_only):
            return
        self.rest_on(standing.name, self._node.volumes.path(standing.name),
                     volume.size, read_only=standing.read_only)
