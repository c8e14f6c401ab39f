# SPDX-License-Identifier: Apache-2.0
"""The parts that a cloud of the lab can have."""

from collections.abc import Collection
import functools
import operator

from lab import backups
from lab import configuration
from lab import contained
from lab import control_plane
from lab import image_store
from lab import images
from lab import keys
from lab import multipath
from lab import networks
from lab import node_services
from lab import nova
from lab import services
from lab import sizes
from lab import unprivileged

VOLUMES = services.Part(
    programs=control_plane.PROGRAMS | node_services.PROGRAMS,
    control=control_plane.SERVICES,
    databases=('keystone', 'cinder'),
    setup=control_plane.SETUP,
    packages=('keystone', 'cinder'),
    sources=(control_plane.__file__,),
    apis=(services.Api('cinder', 'volumev3', configuration.cinder_url),),
    nodes=node_services.SERVICES,
    backends=node_services.BACKENDS,
    kept=node_services.KEPT,
    state_size=sizes.GIB // 2,
    memory=sizes.GIB)

IMAGES = services.Part(
    control=images.SERVICES,
    databases=(images.GLANCE,),
    setup=images.SETUP,
    packages=(images.GLANCE,),
    sources=(images.__file__,),
    apis=images.APIS)

NETWORKS = services.Part(
    control=networks.SERVICES,
    sources=(networks.__file__,),
    apis=networks.APIS)

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
    # Images of shelved instances, and disks that are not of volumes
    state_size=8 * sizes.GIB,
    # A guest is a QEMU of some 190 MiB.
    memory=2 * sizes.GIB,
    accounts=nova.ACCOUNTS,
    files=nova.node_files)


BACKUPS = services.Part(nodes=backups.SERVICES, memory=2 * sizes.GIB)

IMAGE_STORE = services.Part(nodes=image_store.SERVICES, memory=2 * sizes.GIB)

KEYS = services.Part(
    control=keys.SERVICES,
    databases=(keys.BARBICAN,),
    setup=keys.SETUP,
    packages=(keys.BARBICAN,),
    sources=(keys.__file__,),
    apis=keys.APIS)

# What a driver is judged beside
IN_TREE = services.Part(
    backends=(services.Backend('lvm', configuration.in_tree),),
    memory=2 * sizes.GIB)

MIRRORED = services.Part(
    backends=(services.Backend('mirrored', configuration.mirrored, disks=2),),
    memory=2 * sizes.GIB)

IPV6 = services.Part(
    backends=(services.Backend('ipv6', configuration.ipv6),
              services.Backend('thin-ipv6', configuration.thin_ipv6,
                               thin=True)),
    memory=2 * sizes.GIB)

OPTIONAL = {'nova': INSTANCES, 'backup': BACKUPS, 'keys': KEYS,
            'image_store': IMAGE_STORE, 'lvm': IN_TREE, 'mirrored': MIRRORED,
            'ipv6': IPV6,
            'unprivileged': unprivileged.PART, 'contained': contained.PART,
            'multipathd': multipath.PART}


def of(chosen: Collection[str]) -> services.Part:
    """All that is in a cloud with these optional parts."""
    return functools.reduce(operator.add, (
        part for name, part in OPTIONAL.items() if name in chosen),
        VOLUMES + IMAGES + NETWORKS)
