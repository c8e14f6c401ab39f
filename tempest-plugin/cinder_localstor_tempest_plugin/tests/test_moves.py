# SPDX-License-Identifier: Apache-2.0

from tempest import config
from tempest.lib import decorators

from cinder_localstor_tempest_plugin import base

CONF = config.CONF

# MiB: where the first node writes, and the second
FIRST, SECOND = 0, 500


class WrittenTestCase(base.LocalStorTest):
    """A server has a volume on its node, and has written something."""

    def setUp(self):
        super().setUp()
        self.volume = self.create_volume()
        self.source = self.home(self.volume)
        self.destination = self.others(self.source)[0]
        self.first = self.attach(self.volume, self.source)
        self.content = self.write(self.first, FIRST)


class MoveTest(WrittenTestCase):
    """A volume that was written on one node is attached on another."""

    def setUp(self):
        super().setUp()
        self.detach(self.first)

    def move(self):
        moved = self.attach(self.volume, self.destination)
        self.assertEqual(self.destination, self.home(self.volume))
        self.assertEqual(self.content, self.read(moved, FIRST))
        return moved

    @decorators.idempotent_id('8c1b8f0e-59a0-4a43-9f0e-3a6c1f5f0b11')
    def test_volume_follows_and_is_usable_at_once(self):
        moved = self.move()
        later = self.write(moved, SECOND)
        self.wait_until_arrived(moved)
        self.assertEqual(self.content, self.read(moved, FIRST))
        self.assertEqual(later, self.read(moved, SECOND))

    @decorators.idempotent_id('0b5f7a3c-6f2f-4a78-8d5c-6d3e8f3fb4e2')
    def test_volume_comes_back_while_it_arrives(self):
        moved = self.move()
        later = self.write(moved, SECOND)
        self.detach(moved)
        back = self.attach(self.volume, self.source)
        for _time in range(2):
            self.assertEqual(self.source, self.home(self.volume))
            self.assertEqual(self.content, self.read(back, FIRST))
            self.assertEqual(later, self.read(back, SECOND))
            self.wait_until_arrived(back)

    @decorators.idempotent_id('f6f6a6c9-0f0b-4f0e-8a25-0d2b3f5a7c93')
    def test_volume_goes_on_to_a_third_node(self):
        others = self.others(self.source, self.destination)
        if not others:
            raise self.skipException('[localstor] hosts names no third node')
        moved = self.move()
        later = self.write(moved, SECOND)
        self.detach(moved)
        on = self.attach(self.volume, others[0])
        for _time in range(2):
            self.assertEqual(self.content, self.read(on, FIRST))
            self.assertEqual(later, self.read(on, SECOND))
            self.wait_until_arrived(on)

    @decorators.idempotent_id('5e0f3b61-38f5-4a8d-94f1-97a1c1f7d0a4')
    def test_volume_grows_while_it_arrives(self):
        self.detach(self.move())
        larger = CONF.volume.volume_size + 1
        self.wait_for(self.volume, 'available')
        self.volumes_client.extend_volume(self.volume, new_size=larger)
        self.wait_for(self.volume, 'available')
        self.assertEqual(larger, self.show(self.volume)['size'])
        grown = self.attach(self.volume, self.destination)
        last = self.write(grown, larger * 1024 - base.SIZE)
        self.wait_until_arrived(grown)
        self.assertEqual(self.content, self.read(grown, FIRST))
        self.assertEqual(last, self.read(grown, larger * 1024 - base.SIZE))


class CopyTest(WrittenTestCase):
    """New volumes are made of what is on another node."""

    def assert_usable_everywhere(self, volume):
        """A volume has the content, on each of two nodes."""
        for host in (self.destination, self.source):
            attachment = self.attach(volume, host)
            self.assertEqual(host, self.home(volume))
            self.assertEqual(self.content, self.read(attachment, FIRST))
            self.wait_until_arrived(attachment)
            self.assertEqual(self.content, self.read(attachment, FIRST))
            self.detach(attachment)
            self.wait_for(volume, 'available')

    @decorators.idempotent_id('a0c8f7d5-0c62-4c53-92c8-2f1e4f9f6b15')
    def test_snapshot_is_used_on_another_node(self):
        snapshot = self.create_snapshot(self.volume)
        self.write(self.first, FIRST)
        self.assert_usable_everywhere(self.create_volume(
            snapshot_id=snapshot))

    @decorators.idempotent_id('c3b4a1f2-7d9e-4d0b-8b61-5a0f9e8d7c26')
    def test_clone_of_a_volume_that_has_just_moved(self):
        self.detach(self.first)
        self.detach(self.attach(self.volume, self.destination))
        self.wait_for(self.volume, 'available')
        self.assert_usable_everywhere(self.create_volume(
            source_volid=self.volume))


class LiveMigrationTest(WrittenTestCase):
    """The calls to Cinder that Nova makes for a server."""

    def setUp(self):
        super().setUp()
        self.second = self.attach_second(self.first, self.destination)

    @decorators.idempotent_id('2d7e6f58-1b34-4c0a-a9d3-8e7f6a5b4c37')
    def test_volume_follows_when_the_server_has_left(self):
        self.assertEqual(self.content, self.read(self.second, FIRST))
        # The server still runs at the source.
        last = self.write(self.first, SECOND)
        self.attachments_client.complete_attachment(self.second.id)
        self.detach(self.first)
        self.assertEqual(last, self.read(self.second, SECOND))
        self.wait_until_arrived(self.second)
        self.assertEqual(self.destination, self.home(self.volume))
        self.assertEqual(self.content, self.read(self.second, FIRST))
        self.assertEqual(last, self.read(self.second, SECOND))

    @decorators.idempotent_id('94c5d6e7-8f90-4a1b-b2c3-d4e5f6a7b848')
    def test_volume_stays_when_the_server_does(self):
        self.detach(self.second)
        last = self.write(self.first, SECOND)
        self.assertEqual(self.content, self.read(self.first, FIRST))
        self.detach(self.first)
        self.wait_for(self.volume, 'available')
        self.wait_for_home(self.volume, self.source)
        again = self.attach(self.volume, self.source)
        self.assertEqual(self.content, self.read(again, FIRST))
        self.assertEqual(last, self.read(again, SECOND))
