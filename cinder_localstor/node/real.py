# SPDX-License-Identifier: Apache-2.0
"""The node as it is: its tools put together as the options say."""

from typing import Any

from cinder_localstor.node import commands
from cinder_localstor.node import dmsetup
from cinder_localstor.node import hydrators
from cinder_localstor.node import initiators
from cinder_localstor.node import interface
from cinder_localstor.node import lvm
from cinder_localstor.node import targets
from cinder_localstor.node import transports


def node(configuration: Any) -> interface.Node:
    """The tools of this node for one backend."""
    command = commands.Commands(configuration.localstor_command_timeout)
    volumes = lvm.LVMVolumeGroup(configuration.volume_group,
                                 configuration.lvm_type, 'volume_group',
                                 configuration, command)
    metadata = volumes
    group = configuration.localstor_metadata_group
    if group and group != configuration.volume_group:
        metadata = lvm.LVMVolumeGroup(group, 'default',
                                      'localstor_metadata_group',
                                      configuration, command)
    device_mapper = dmsetup.DmsetupDeviceMapper(command)
    transport = configuration.localstor_transport
    return interface.Node(
        volumes=volumes, metadata=metadata, device_mapper=device_mapper,
        target=transports.SourceTargets(
            transport, targets.source_target(configuration, command),
            targets.NvmeSourceTarget(configuration, command, device_mapper)),
        remote=targets.CinderRemoteTarget(configuration, volumes),
        initiator=transports.Initiators(
            transport, initiators.OpenISCSIInitiator(command),
            initiators.NvmeInitiator(command)),
        hydrators=hydrators.ProcessHydrators(command))
