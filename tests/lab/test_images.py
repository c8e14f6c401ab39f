# SPDX-License-Identifier: Apache-2.0
"""Volumes of Glance's images and images of volumes, by Cinder's own ways."""

import hashlib
import os
import pathlib
import subprocess
import tempfile

from keystoneauth1 import exceptions

from lab import configuration
from lab import leftovers
from tests.lab import base

# MiB
SIZE = 16
# MiB of an image whose download takes some seconds; nodes keep it meanwhile
LARGE = 350
# Of whoever Cinder has its cache of images for
INTERNAL = {'cinder_internal_tenant_project_id': 32 * '1',
            'cinder_internal_tenant_user_id': 32 * '2'}


class ImageTestCase(base.LabTestCase):

    def setUp(self):
        super().setUp()
        self.images = []
        self.content = os.urandom(SIZE << 20)
        self.addCleanup(self.delete_images)

    def delete_images(self):
        for image in self.images:
            self.cloud.image_api.delete('/v2/images/' + image)

    def upload(self, content, kind='raw'):
        """An image with some content; its id."""
        created = self.cloud.image_api.post('/v2/images', json={
            'name': 'of-a-test', 'disk_format': kind, 'visibility': 'public',
            'container_format': 'bare'}).json()['id']
        self.images.append(created)
        self.cloud.image_api.put(
            '/v2/images/%s/file' % created, data=content,
            headers={'Content-Type': 'application/octet-stream'})
        return created

    def downloads(self):
        """How often the first image was asked for."""
        log = self.cloud.service('glance').log.read_text(errors='replace')
        return log.count('GET /v2/images/%s/file' % self.images[0])

    def convert(self, kind, size):
        """The content as a disk of `size` MiB in a file of QEMU's."""
        with tempfile.TemporaryDirectory() as directory:
            raw = pathlib.Path(directory) / 'raw'
            raw.write_bytes(self.content)
            os.truncate(raw, size << 20)
            subprocess.run(['qemu-img', 'convert', '-f', 'raw', '-O', kind,
                            raw, raw.with_suffix('.' + kind)], check=True)
            return raw.with_suffix('.' + kind).read_bytes()

    def create_of(self, image, node=None, volume_type='local'):
        # Cinder 29.0.0 hangs where it downloads images in native threads, as
        # the second node has them.
        volume = self.user.create_volume(
            1, volume_type, (node or self.nodes[0]).name, image)
        self.volumes.append(volume)
        return volume

    def assert_holds(self, volume, node):
        """A volume holds on a node what the image does."""
        attachment = self.attach(volume, node)
        self.assertIn(hashlib.sha256(self.content).hexdigest(),
                      self.checksum(attachment, size=SIZE))
        return attachment


class ImageTest(ImageTestCase):

    def test_volume_holds_its_image_and_follows_its_instance(self):
        volume = self.create_of(self.upload(self.content))
        self.assertEqual('true', self.user.show(volume)['bootable'])
        self.wait_until_arrived(self.assert_holds(volume, self.nodes[1]))

    def test_volume_of_a_compressed_image(self):
        volume = self.create_of(self.upload(self.convert('qcow2', 900),
                                            'qcow2'))
        self.assert_holds(volume, self.home(volume))

    def test_image_that_is_too_large_leaves_nothing(self):
        image = self.upload(self.convert('qcow2', 2000), 'qcow2')
        error = self.assertRaises(
            exceptions.BadRequest, self.user.request_volume, 'too-small', 1,
            'local', image=image)
        self.assertIn("doesn't fit in a volume of size 1GB",
                      error.response.text)

    def test_arriving_volume_becomes_an_image_and_stays(self):
        volume = self.create_of(self.upload(self.content))
        moved = self.assert_holds(volume, self.nodes[2])
        self.hold_in_mid_move(moved)
        self.detach(moved)
        image = self.user.upload_to_image(volume, 'raw')
        self.images.append(image)
        self.wait_for('it is an image', lambda: self.cloud.image_api.get(
            '/v2/images/' + image).json()['status'] == 'active')
        self.wait_for('it is free', lambda: (
            self.user.status(volume) == 'available'))
        self.assertEqual(moved.node.name, self.home(volume).name)
        content = self.cloud.image_api.get('/v2/images/%s/file' % image)
        self.assertEqual(hashlib.sha256(self.content).digest(),
                         hashlib.sha256(content.content[:SIZE << 20]
                                        ).digest())


class InterruptedTest(ImageTestCase):
    """A download ends too early: the user is told, and nothing is left."""

    def begin(self):
        """A volume of an image that is being downloaded."""
        image = self.upload(bytes(LARGE << 20))
        volume = self.user.request_volume(
            'of-a-test', 1, 'local', self.nodes[0].name, image)
        self.volumes.append(volume)
        self.wait_for('it is downloaded', self.downloads)
        return volume

    def wait_until_failed(self, volume):
        self.wait_for('it has failed',
                      lambda: self.user.status(volume) == 'error')

    def test_glance_dies(self):
        volume = self.begin()
        glance = self.cloud.service('glance')
        glance.kill()
        try:
            self.wait_until_failed(volume)
        finally:
            glance.start()
        self.assertEqual(1, len(self.user.messages(volume)))
        self.delete(volume)

    def test_cinder_volume_dies(self):
        volume = self.begin()
        service = self.nodes[0].service('cinder-volume')
        service.kill()
        service.start()
        self.cloud.wait_for_backends([self.nodes[0]])
        self.wait_until_failed(volume)
        self.delete(volume)


class ImageCacheTest(ImageTestCase):
    """An image is downloaded once for all nodes."""

    volume_type = 'local'

    def setUp(self):
        super().setUp()
        self.configure(True)
        self.addCleanup(self.configure, None)
        # Of Cinder's, of each image one
        self.addCleanup(self.delete_cached)

    def configure(self, enabled):
        for node in self.nodes:
            node.configure(
                {backend: {'image_volume_cache_enabled': enabled}
                 for backend in configuration.BACKENDS}
                | {'DEFAULT': {name: enabled and value for name, value
                               in INTERNAL.items()}})
            node.service('cinder-volume').restart()
        self.cloud.wait_for_backends(self.nodes)

    def cached(self):
        return [volume['id'] for volume in self.user.volumes()
                if volume['name'] == 'image-' + self.images[0]]

    def delete_cached(self):
        for volume in self.cached():
            self.user.delete_volume(volume)

    def test_all_nodes_make_their_volumes_of_one(self):
        image = self.upload(self.content)
        nodes = [self.nodes[0], *self.nodes]
        volumes = [self.create_of(image, node, self.volume_type)
                   for node in nodes]
        self.assertEqual([node.name for node in nodes],
                         [self.home(volume).name for volume in volumes])
        attachments = [self.assert_holds(volume, node)
                       for volume, node in zip(volumes, nodes)]
        self.wait_for('all have arrived', lambda: (
            not leftovers.moves(self.cloud)))
        for attachment in attachments:
            self.assertIn(hashlib.sha256(self.content).hexdigest(),
                          self.checksum(attachment, size=SIZE))
        self.assertEqual(1, self.downloads())
        self.assertEqual(1, len(self.cached()))


class ThinImageCacheTest(ImageCacheTest):
    """Nodes whose own volumes share their blocks."""

    volume_type = 'thin'
