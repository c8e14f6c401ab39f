# SPDX-License-Identifier: Apache-2.0
"""For nova-scheduler: where an instance's local volumes are, and can go.

A volume follows its instance to wherever Nova puts that, and Nova knows
nothing of volumes when it chooses.  So a new instance lands on any node, and
its volume has to move; or on one that has no room for it, where Nova finds out
when it attaches.  Cinder's API tells both before.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Iterator
import dataclasses
import weakref

from cinderclient import exceptions as cinder_exceptions
from keystoneauth1 import exceptions as keystone_exceptions
import nova.conf
from nova import context
from nova import exception
from nova import objects
from nova.scheduler import filters
from nova.scheduler import host_manager
from nova.scheduler import utils
from nova.scheduler import weights
from nova.volume import cinder
from oslo_log import log as logging

from cinder_localstor.nova import opts

CONF = nova.conf.CONF
CONF.register_opts(opts.SCHEDULER_OPTS, group=opts.GROUP)
LOG = logging.getLogger(__name__)

# What the capabilities of this driver's pools say
LOCATION = 'LocalStorDriver:'
HOST = 'os-vol-host-attr:host'

_SILENT = (exception.NovaException, cinder_exceptions.ClientException,
           keystone_exceptions.ClientException)


@dataclasses.dataclass(frozen=True)
class Volume:
    """A local volume of an instance.

    :ivar size: GiB
    :ivar node: that it is on
    :ivar backend: name of its backend, the same one on all nodes
    """

    size: int
    node: str
    backend: str


@dataclasses.dataclass(frozen=True)
class Look:
    """What Cinder tells of the volumes of one instance.

    :ivar rooms: GiB that are free for thick volumes, by ``node@backend``; of
        a thin pool it is not known how much would come
    :ivar closed: the ``node@backend`` whose services are disabled or down
    """

    volumes: tuple[Volume, ...] = ()
    rooms: dict[str, float] = dataclasses.field(default_factory=dict)
    closed: frozenset[str] = frozenset()

    def on(self, node: str) -> int:
        """GiB of the volumes that are on a node."""
        return sum(volume.size for volume in self.volumes
                   if volume.node == node)

    def why_not(self, node: str) -> str:
        """Why the volumes can't come to a node, '' if they can.

        One without a backend of this driver connects to them.
        """
        needed: dict[str, int] = {}
        for volume in self.volumes:
            if volume.node != node:
                backend = '%s@%s' % (node, volume.backend)
                needed[backend] = needed.get(backend, 0) + volume.size
        for backend, size in needed.items():
            if backend in self.closed:
                return 'the volume service %s is disabled or down' % backend
            if size > self.rooms.get(backend, size):
                return '%s has %g GiB free, and %d would come' % (
                    backend, self.rooms[backend], size)
        return ''


# What was found out for a request, as long as there is that
_looks: weakref.WeakKeyDictionary[objects.RequestSpec, Look] = (
    weakref.WeakKeyDictionary())


def look(spec: objects.RequestSpec) -> Look:
    """What Cinder tells of an instance's volumes; nothing if it does not
    answer, so that instances are scheduled all the same.
    """
    found = _looks.get(spec)
    if found is None:
        try:
            found = _ask(spec.instance_uuid)
        except _SILENT as error:
            LOG.warning('Instance %(instance)s is scheduled without regard to '
                        'its local volumes: %(error)s',
                        {'instance': spec.instance_uuid, 'error': error})
            found = Look()
        _looks[spec] = found
    return found


def _ask(instance: str) -> Look:
    volume_ids = [mapping.volume_id for mapping in _mappings(instance)
                  if mapping.is_volume and mapping.volume_id]
    if not volume_ids:
        return Look()
    client = cinder.cinderclient(context.get_admin_context())
    pools = {pool.name.partition('#')[0]: pool
             for pool in client.pools.list(detailed=True)
             if str(getattr(pool, 'location_info', '')).startswith(LOCATION)}
    backends = {name.partition('@')[2] for name in pools}
    volumes = []
    for volume_id in volume_ids:
        volume = client.volumes.get(volume_id)
        host = getattr(volume, HOST, None) or ''
        node, _at, backend = host.partition('#')[0].partition('@')
        if backend in backends:
            volumes.append(Volume(volume.size, node, backend))
    if not volumes:
        return Look()
    return Look(tuple(volumes), {
        name: float(pool.free_capacity_gb) for name, pool in pools.items()
        if not pool.thin_provisioning_support}, frozenset(
            service.host for service in client.services.list(
                binary='cinder-volume')
            if (service.status, service.state) != ('enabled', 'up')))


def _mappings(instance: str) -> Iterable[objects.BlockDeviceMapping]:
    """The block devices of an instance, be it still to be built or not."""
    ctxt = context.get_admin_context()
    try:
        return objects.BuildRequest.get_by_instance_uuid(
            ctxt, instance).block_device_mappings
    except exception.BuildRequestNotFound:
        cell = objects.InstanceMapping.get_by_instance_uuid(
            ctxt, instance).cell_mapping
    with context.target_cell(ctxt, cell) as of_cell:
        return objects.BlockDeviceMappingList.get_by_instance_uuid(
            of_cell, instance)


class LocalVolumeFilter(filters.BaseHostFilter):
    """Passes the nodes that an instance's local volumes are on, or can come
    to.
    """

    def filter_all(self, hosts: list[host_manager.HostState],
                   spec: objects.RequestSpec
                   ) -> Iterator[host_manager.HostState]:
        """The hosts that pass; asks once for all of them."""
        if utils.request_is_rebuild(spec):
            yield from hosts
            return
        found = look(spec)
        for host in hosts:
            if reason := found.why_not(host.host):
                LOG.info('Instance %(instance)s does not go to %(host)s: '
                         '%(reason)s', {'instance': spec.instance_uuid,
                                        'host': host.host, 'reason': reason})
            else:
                yield host


class LocalVolumeWeigher(weights.BaseHostWeigher):
    """Prefers the node that most of an instance's local volumes are on."""

    minval = 0

    def weight_multiplier(self, host: host_manager.HostState) -> float:
        """Of an aggregate, or of ``[localstor] volume_weight_multiplier``."""
        return utils.get_weight_multiplier(
            host, 'volume_weight_multiplier',
            CONF.localstor.volume_weight_multiplier)

    def _weigh_object(self, host: host_manager.HostState,
                      spec: objects.RequestSpec) -> int:
        return look(spec).on(host.host)
