# SPDX-License-Identifier: Apache-2.0
"""Nova's own scheduler chooses nodes for servers with local volumes."""

import types
from unittest import mock

import fixtures
from keystoneauth1 import exceptions
from nova import test
from nova.tests import fixtures as nova_fixtures
from oslo_utils.fixture import uuidsentinel as uuids

from cinder_localstor.nova import scheduler
from tests.nova import cloud

ROOT = nova_fixtures.CinderFixture.IMAGE_BACKED_VOL
NODES = ('node1', 'node2', 'node3')
MODULE = 'cinder_localstor.nova.scheduler'


class Cinder:
    """What Cinder's client answers to an administrator.

    :ivar hosts: where volumes are, by their ids; 10 GiB each
    :ivar rooms: GiB that are free on nodes
    :ivar closed: what is wrong with the volume services of nodes
    """

    def __init__(self):
        self.hosts = {ROOT: 'node1@local#local'}
        self.rooms = dict.fromkeys(NODES, 100)
        self.thin = False
        self.closed = {}
        self.asked = 0
        self.volumes = types.SimpleNamespace(get=self._volume)
        self.pools = types.SimpleNamespace(list=self._pools)
        self.services = types.SimpleNamespace(list=self._services)

    def _volume(self, volume_id):
        return types.SimpleNamespace(
            size=10, **{scheduler.HOST: self.hosts.get(volume_id)})

    def _pools(self, detailed):
        assert detailed
        self.asked += 1
        yield types.SimpleNamespace(name='storage@lvm#lvm',
                                    location_info='LVMVolumeDriver:storage')
        for node, room in self.rooms.items():
            if node not in self.closed:
                yield types.SimpleNamespace(
                    name=node + '@local#local', free_capacity_gb=room,
                    location_info='LocalStorDriver:%s@local:vg' % node,
                    thin_provisioning_support=self.thin)

    def _services(self, binary):
        assert binary == 'cinder-volume'
        for node in NODES:
            status, state = self.closed.get(node, ('enabled', 'up'))
            yield types.SimpleNamespace(host=node + '@local', status=status,
                                        state=state)


class SchedulerTest(cloud.LocalVolumeTestCase):

    filters = ['LocalVolumeFilter']
    weighers = [MODULE + '.LocalVolumeWeigher']

    def setUp(self):
        super().setUp()
        self.storage = Cinder()
        self.client = self.useFixture(fixtures.MockPatch(
            'nova.volume.cinder.cinderclient',
            return_value=self.storage)).mock
        for node in NODES:
            self.start_compute(node)

    def _setup_services(self):
        self.flags(
            available_filters=['nova.scheduler.filters.all_filters',
                               MODULE + '.LocalVolumeFilter'],
            enabled_filters=['ComputeFilter', *self.filters],
            weight_classes=['nova.scheduler.weights.all_weighers',
                            *self.weighers], group='filter_scheduler')
        super()._setup_services()

    def boot(self, state='ACTIVE'):
        """A server on its volume; the node that it is on."""
        server = self._build_server(networks='none', image_uuid='')
        server['block_device_mapping_v2'] = [{
            'boot_index': 0, 'uuid': ROOT, 'source_type': 'volume',
            'destination_type': 'volume'}]
        server = self.api.post_server({'server': server})
        self.server = self._wait_for_state_change(server, state)
        return self.server['OS-EXT-SRV-ATTR:host']

    def test_server_boots_where_its_volume_is(self):
        for node in NODES:
            self.storage.hosts[ROOT] = node + '@local#local'
            self.assertEqual(node, self.boot())
            self._delete_server(self.server)
        # One look for all nodes, and for both classes
        self.assertEqual(len(NODES), self.storage.asked)

    def test_node_without_room_is_passed_by(self):
        self.storage.hosts[ROOT] = 'gone@local#local'
        self.storage.rooms.update(node1=9, node3=9.99)
        self.assertEqual('node2', self.boot())

    def test_node_that_the_volume_is_on_needs_no_room(self):
        self.storage.rooms['node1'] = 0
        self.assertEqual('node1', self.boot())

    def test_no_node_has_room(self):
        self.storage.hosts[ROOT] = 'gone@local#local'
        self.storage.rooms = dict.fromkeys(NODES, 5)
        self.boot(state='ERROR')
        self.assertIn('node2@local has 5 GiB free, and 10 would come',
                      self.stdlog.logger.output)

    def test_thin_pools_may_have_room_enough(self):
        self.storage.hosts[ROOT] = 'gone@local#local'
        self.storage.thin = True
        self.storage.rooms = dict.fromkeys(NODES, 5)
        self.assertIn(self.boot(), NODES)

    def test_node_whose_volume_service_is_of_no_use_is_passed_by(self):
        self.storage.hosts[ROOT] = 'gone@local#local'
        self.storage.closed = {'node1': ('disabled', 'up'),
                               'node2': ('enabled', 'down')}
        self.assertEqual('node3', self.boot())

    def test_volumes_of_others_go_nowhere(self):
        self.storage.hosts[ROOT] = 'node2@lvm#lvm'
        self.storage.rooms = dict.fromkeys(NODES, 0)
        self.assertIn(self.boot(), NODES)

    def test_server_without_volumes_asks_nobody(self):
        self._create_server(networks='none')
        self.client.assert_not_called()

    def test_server_is_scheduled_though_cinder_does_not_answer(self):
        self.client.side_effect = exceptions.ConnectFailure('no route')
        self.assertIn(self.boot(), NODES)
        self.assertIn('without regard to its local volumes: no route',
                      self.stdlog.logger.output)

    def test_server_that_migrates_takes_its_volumes_where_room_is(self):
        self.assertEqual('node1', self.boot())
        self.storage.hosts[uuids.volume] = 'node1@local#local'
        self._attach_volume(self.server, uuids.volume)
        self.storage.rooms['node3'] = 19
        with mock.patch('nova.virt.libvirt.driver.LibvirtDriver.'
                        'migrate_disk_and_power_off', return_value='{}'):
            self._migrate_server(self.server)
        server = self._wait_for_state_change(self.server, 'VERIFY_RESIZE')
        self.assertEqual('node2', server['OS-EXT-SRV-ATTR:host'])


class WeigherTest(test.NoDBTestCase):
    """Of some volumes on one node, and some on another."""

    LOOK = scheduler.Look((scheduler.Volume(10, 'node1', 'local'),
                           scheduler.Volume(30, 'node2', 'local'),
                           scheduler.Volume(5, 'node1', 'thin')))

    def test_more_gigabytes_weigh_more(self):
        self.assertEqual([15, 30, 0], [self.LOOK.on(node) for node in NODES])

    def test_what_comes_to_one_backend_is_added_up(self):
        look = scheduler.Look(self.LOOK.volumes, {'node3@local': 39,
                                                  'node3@thin': 5})
        self.assertIn('node3@local has 39 GiB free, and 40 would come',
                      look.why_not('node3'))
