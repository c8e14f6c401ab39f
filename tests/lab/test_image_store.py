# SPDX-License-Identifier: Apache-2.0
"""Glance keeps its images in volumes: its store is a client of Cinder's.

Whoever reads or writes an image has no instance, and the volume stays where it
is.
"""

import hashlib
import os

from lab import http
from lab import image_store
from tests.lab import base

# MiB
SIZE = 20


class ImageStoreTest(base.LabTestCase):

    find_cloud = staticmethod(base.furnished_cloud)

    def setUp(self):
        super().setUp()
        self.content = os.urandom(SIZE << 20)
        self.stores = [
            http.Api(self.cloud.session(), image_store.url(node.address), {})
            for node in self.nodes]

    def upload(self):
        """An image by the first node's Glance; its id, and its volume's."""
        before = {volume['id'] for volume in self.user.volumes()}
        image = self.stores[0].post('/v2/images', json={
            'name': 'of-a-test', 'disk_format': 'raw',
            'container_format': 'bare'}).json()['id']
        self.addCleanup(self.delete_image, image)
        self.stores[0].put(
            '/v2/images/%s/file' % image, data=self.content,
            headers={'Content-Type': 'application/octet-stream'})
        volume, = {volume['id'] for volume in self.user.volumes()} - before
        return image, volume

    def delete_image(self, image):
        self.stores[0].delete('/v2/images/' + image)

    def assert_downloads(self, store, image):
        found = store.get('/v2/images/%s/file' % image).content
        self.assertEqual(hashlib.sha256(self.content).hexdigest(),
                         hashlib.sha256(found).hexdigest())

    def test_image_is_the_same_by_every_node(self):
        image, volume = self.upload()
        home = self.home(volume)
        for store in self.stores:
            self.assert_downloads(store, image)
        self.assertEqual(home.name, self.home(volume).name)

    def test_image_outlives_the_power_of_its_node(self):
        image, volume = self.upload()
        home = self.home(volume)
        home.kill()
        home.start()
        self.cloud.wait_for_backends([home])
        for store in self.stores:
            self.assert_downloads(store, image)
