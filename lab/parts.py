# SPDX-License-Identifier: Apache-2.0
"""The parts that a cloud of the lab can have."""

from lab import configuration
from lab import control_plane
from lab import images
from lab import node_services
from lab import nova
from lab import services
from lab import sizes

VOLUMES = services.Part(
    programs=control_plane.PROGRAMS | node_services.PROGRAMS,
    control=control_plane.SERVICES,
    databases=('keystone', 'cinder'),
    setup=control_plane.SETUP,
    packages=('keystone', 'cinder'),
    sources=(control_plane.__file__,),
    apis=(services.Api('cinder', 'volumev3', configuration.cinder_url),),
    nodes=node_services.SERVICES,
    kept=node_services.KEPT,
    state_size=sizes.GIB // 2,
    memory=sizes.GIB)

IMAGES = services.Part(
    programs={},
    control=images.SERVICES,
    databases=(images.GLANCE,),
    setup=images.SETUP,
    packages=(images.GLANCE,),
    sources=(images.__file__,),
    apis=images.APIS,
    nodes=(),
    kept=(),
    state_size=0,
    memory=0)

INSTANCES = services.Part(
    programs=nova.PROGRAMS,
    control=nova.SERVICES,
    databases=nova.DATABASES,
    setup=nova.SETUP,
    packages=('nova', 'openstack-placement'),
    sources=(nova.__file__,),
    apis=nova.APIS,
    nodes=nova.NODE_SERVICES,
    kept=nova.KEPT,
    state_size=2 * sizes.GIB,
    # A guest is a QEMU of some 190 MiB.
    memory=2 * sizes.GIB,
    accounts=nova.ACCOUNTS,
    files=nova.node_files)


def of(nova_too: bool) -> services.Part:
    """All that is in a cloud, with or without instances."""
    volumes = VOLUMES + IMAGES
    return volumes + INSTANCES if nova_too else volumes
