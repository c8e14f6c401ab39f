# SPDX-License-Identifier: Apache-2.0
"""Nova's own API, conductor, scheduler and nova-computes, in one process.

They are those of Nova's functional tests.  What is replaced is what they stand
on: libvirt, Cinder's API, and the devices, which are files here.
"""

import os
import pathlib
import sys
from unittest import mock

import fixtures
from nova.privsep import fs
from nova.tests.fixtures import libvirt
from nova.tests.functional.libvirt import base
from nova.virt.libvirt import driver
from nova.volume import cinder
from oslo_concurrency import processutils
from oslo_utils.fixture import uuidsentinel as uuids
from oslo_utils import units
from sqlalchemy import exc

from cinder_localstor.nova import compute


class Registered(fixtures.Fixture):
    """Our class is registered, as :func:`compute.main` does it."""

    def __init__(self, version='34.0.0'):
        self._version = version

    def _setUp(self):
        self.useFixture(fixtures.MockPatchObject(
            driver, 'VOLUME_DRIVERS', dict(driver.VOLUME_DRIVERS)))
        self.useFixture(fixtures.MockPatchObject(
            cinder, 'cinderclient', cinder.cinderclient))
        compute.register(self._version)


class LocalVolumeTestCase(base.ServersTestBase):
    """A volume that Cinder calls local.

    :ivar device: of the volume, on whichever node it is
    """

    microversion = 'latest'
    ADMIN_API = True
    # Version of Nova
    version = '34.0.0'

    def setUp(self):
        super().setUp()
        # Nova's tests make errors of these, and SQLAlchemy has new ones.
        self.useFixture(fixtures.WarningsFilter([
            {'action': 'ignore', 'category': exc.SADeprecationWarning}]))
        self.useFixture(Registered(self.version))
        self.device = pathlib.Path(
            self.useFixture(fixtures.TempDir()).path) / 'volume-1-handle'
        self.grow(1)
        self.useFixture(fixtures.MockPatchObject(
            fs, 'blockdev_size', side_effect=self._blockdev))
        self.cinder.VOLUME_CONNECTION_INFO = {'fake': {
            'driver_volume_type': 'local',
            'data': {'device_path': str(self.device)}}}
        self.disks = self._record('attachDeviceFlags')
        self.resizes = self._record('blockResize')

    def _setup_services(self):
        # Where it is installed; Nova's tests look for it in Nova's tree.
        self.flags(api_paste_config=os.path.join(
            sys.prefix, 'etc', 'nova', 'api-paste.ini'), group='wsgi')
        super()._setup_services()

    def _record(self, method):
        """The arguments of all calls of a method of libvirt's domains."""
        calls = []
        original = getattr(libvirt.Domain, method)

        def call(domain, *arguments, **named):
            calls.append((*arguments, *named.values()))
            return original(domain, *arguments, **named)

        self.useFixture(fixtures.MockPatchObject(
            libvirt.Domain, method, call))
        return calls

    def grow(self, size):
        """Let the device have `size` GiB."""
        with open(self.device, 'ab') as device:
            device.truncate(size * units.Gi)

    def _blockdev(self, path):
        try:
            return '%d\n' % os.stat(path).st_size, ''
        except FileNotFoundError as error:
            raise processutils.ProcessExecutionError(
                stderr='blockdev: cannot open %s' % path) from error

    def serve(self, volume=uuids.volume):
        """A server that has a volume."""
        server = self._create_server(networks='none')
        self._attach_volume(server, volume)
        return server

    def extend(self, server, size):
        """What Cinder does when it has extended the volume to `size` GiB."""
        self.cinder.volumes[uuids.volume] = {
            'id': uuids.volume, 'size': size, 'multiattach': False,
            'availability_zone': 'nova'}
        with mock.patch('nova.volume.cinder.API'
                        '.get_volume_encryption_metadata', return_value={}):
            self.api.create_server_external_events([{
                'name': 'volume-extended', 'server_uuid': server['id'],
                'tag': uuids.volume}])

    def last_action(self, server):
        """What ``server event list`` has on its first line."""
        return self.api.get_instance_actions(server['id'])[0]
