# SPDX-License-Identifier: Apache-2.0
"""What nova-compute does with a connection of the kind ``local``."""

import os
import time
from typing import Any

import nova.conf
from nova import exception
from nova.virt import block_device
from nova.virt.libvirt.storage import lvm
from nova.virt.libvirt.volume import volume
from oslo_log import log as logging

from cinder_localstor.nova import opts

CONF = nova.conf.CONF
CONF.register_opts(opts.LOCAL_VOLUME_OPTS, group=opts.GROUP)

LOG = logging.getLogger(__name__)

# Seconds between two looks for a device
INTERVAL = 0.5


class LocalVolumeDriver(volume.LibvirtVolumeDriver):
    """Volumes that are block devices of the node already.

    As Nova's own class, with asynchronous I/O, a wait for the devices when
    the node starts, and volumes that grow while a guest uses them.
    """

    def __init__(self, host: Any) -> None:
        super().__init__(host)
        # One patience for all: hundreds of guests start with their node.
        self._until = time.monotonic() + CONF.localstor.volume_timeout

    def get_config(self, connection_info: dict[str, Any],
                   disk_info: dict[str, Any]) -> Any:
        """The disk as libvirt's XML describes it."""
        disk = super().get_config(connection_info, disk_info)
        disk.driver_io = CONF.localstor.volume_io
        return disk

    def connect_volume(self, connection_info: dict[str, Any],
                       instance: Any) -> None:
        """Wait for the device of a volume.

        :raises VolumeAttachFailed: it is not there in time
        """
        super().connect_volume(connection_info, instance)
        path = connection_info['data']['device_path']
        if not os.path.exists(path):
            LOG.info('Waiting for %s', path, instance=instance)
        while not os.path.exists(path):
            if time.monotonic() > self._until:
                raise exception.VolumeAttachFailed(
                    volume_id=block_device.get_volume_id(connection_info),
                    reason='%s is not on this node. Start cinder-volume '
                           "here, look at 'cinder-localstor status', and "
                           'try again; a server in the state ERROR is '
                           'rebooted hard. One whose volume is attached on '
                           "another node is stopped, and 'nova-manage "
                           "volume_attachment refresh' brings that here." %
                           path)
            time.sleep(INTERVAL)

    def extend_volume(self, connection_info: dict[str, Any], instance: Any,
                      requested_size: int) -> int:
        """How many bytes the device of a volume has that was extended."""
        path = connection_info['data']['device_path']
        try:
            return lvm.get_volume_size(path)
        except exception.VolumeBDMPathNotFound:
            # An instance that migrates has two nodes. Both are told, and
            # only one of them has the device and a guest that runs.
            LOG.info('%s was extended elsewhere', path, instance=instance)
            return requested_size
