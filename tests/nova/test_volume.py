# SPDX-License-Identifier: Apache-2.0

import os

import ddt
import fixtures
from lxml import etree
from nova import exception
from nova import objects
from nova import test
from nova.tests import fixtures as nova_fixtures
from nova.tests.functional.api import client
from nova.virt import fake
from nova.virt.libvirt import driver
from oslo_utils.fixture import uuidsentinel as uuids
from oslo_utils import units

from cinder_localstor.nova import volume
from tests.nova import cloud


class ExtendTest(cloud.LocalVolumeTestCase):

    def setUp(self):
        super().setUp()
        self.start_compute('node1')

    def test_guest_sees_the_new_size(self):
        server = self.serve()
        self.grow(2)
        self.extend(server, 2)
        self.assertEqual([(str(self.device), 2 * units.Gi)],
                         [call[:2] for call in self.resizes])
        self.assertIsNone(self.last_action(server)['message'])

    def test_guest_is_never_shown_more_than_there_is(self):
        server = self.serve()
        self.extend(server, 2)
        self.assertEqual([units.Gi], [size for _path, size, *_flags in
                                      self.resizes])

    def test_node_that_has_not_the_device_has_nothing_to_do(self):
        server = self._stop_server(self.serve())
        os.unlink(self.device)
        self.extend(server, 2)
        self.assertEqual([], self.resizes)
        self.assertIsNone(self.last_action(server)['message'])


class ReleaseTest(cloud.LocalVolumeTestCase):
    """A Nova of a release that we don't know is left as it is."""

    version = '33.0.0'

    def test_guest_never_sees_the_new_size(self):
        self.start_compute('node1')
        server = self.serve()
        self.grow(2)
        error = self.assertRaises(client.OpenStackApiException, self.extend,
                                  server, 2)
        self.assertIn('ExtendVolumeNotSupported', str(error))
        self.assertEqual([], self.resizes)
        self.assertEqual('Error', self.last_action(server)['message'])


@ddt.ddt
class DriverTest(test.NoDBTestCase):
    """What Nova's libvirt driver alone does with a volume."""

    CONNECTION = {'driver_volume_type': 'local', 'serial': uuids.volume,
                  'data': {'device_path': '/dev/mapper/volume-1-handle'}}

    def setUp(self):
        super().setUp()
        self.useFixture(nova_fixtures.LibvirtFixture())
        self.useFixture(cloud.Registered())

    def driver(self):
        return driver.LibvirtDriver(fake.FakeVirtAPI(), False)

    def disk(self):
        """How QEMU is told to use it."""
        config = self.driver()._get_volume_config(
            self.CONNECTION, {'type': 'disk', 'dev': 'vdb', 'bus': 'virtio'})
        return etree.fromstring(config.to_xml())

    def test_it_is_a_block_device_with_native_io(self):
        disk = self.disk()
        self.assertEqual('block', disk.get('type'))
        self.assertEqual('/dev/mapper/volume-1-handle',
                         disk.find('source').get('dev'))
        self.assertEqual(uuids.volume, disk.findtext('serial'))
        self.assertEqual({'name': 'qemu', 'type': 'raw', 'cache': 'none',
                          'io': 'native'}, disk.find('driver').attrib)

    @ddt.data('io_uring', 'threads')
    def test_io_can_be_chosen(self, io):
        self.flags(volume_io=io, group='localstor')
        self.assertEqual(io, self.disk().find('driver').get('io'))

    def test_native_io_is_not_asked_for_with_a_page_cache(self):
        self.flags(disk_cachemodes=['block=writeback'], group='libvirt')
        self.assertEqual('threads', self.disk().find('driver').get('io'))

    def test_error_names_what_is_missing(self):
        self.flags(volume_timeout=0, group='localstor')
        error = self.assertRaises(
            exception.VolumeAttachFailed, self.driver()._connect_volume,
            None, self.CONNECTION, objects.Instance(uuid=uuids.server))
        for part in (uuids.volume, '/dev/mapper/volume-1-handle',
                     'Start cinder-volume', 'rebooted hard', 'refresh'):
            self.assertIn(part, str(error))


class Clock:
    """Stands for the module ``time``: somebody waits, and others work."""

    def __init__(self):
        self.now = 0
        self.then = []

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        for event in [event for event in self.then if event[0] <= self.now]:
            self.then.remove(event)
            event[1]()


class WaitTest(cloud.LocalVolumeTestCase):
    """A device that is not there, or not yet."""

    def setUp(self):
        super().setUp()
        self.flags(resume_guests_state_on_host_boot=True)
        self.clock = Clock()
        self.useFixture(fixtures.MockPatchObject(volume, 'time', self.clock))
        self.start_compute('node1')

    def start_node(self, seconds):
        """Let a node start, whose cinder-volume is ready after `seconds`."""
        os.unlink(self.device)
        self.clock.then.append((seconds, lambda: self.grow(1)))
        self.restart_compute_service('node1', keep_hypervisor_state=False)

    def guests(self):
        """What runs on the node."""
        return {guest.uuid for guest in
                self.computes['node1'].driver._host.list_guests()}

    def test_guests_of_a_node_that_starts_wait_for_cinder_volume(self):
        servers = [self.serve(), self.serve(uuids.another)]
        self.start_node(seconds=200)
        self.assertEqual({server['id'] for server in servers}, self.guests())
        self.assertEqual(200, self.clock.now)

    def test_all_guests_of_a_node_have_the_same_patience(self):
        servers = [self.serve(), self.serve(uuids.another)]
        self.start_node(seconds=1000)
        self.assertEqual(set(), self.guests())
        self.assertAlmostEqual(300, self.clock.now, delta=2)
        for server in servers:
            self.assertEqual('ERROR', self.api.get_server(
                server['id'])['status'])

        self.clock.sleep(1000)
        for server in servers:
            self._reboot_server(server, hard=True)
        self.assertEqual({server['id'] for server in servers}, self.guests())
