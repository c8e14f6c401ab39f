# SPDX-License-Identifier: Apache-2.0

import time

from keystoneauth1 import exceptions

from tests.lab import base


class MoveTest(base.LabTestCase):
    """A volume follows its instance, on thick LVs and tgt."""

    volume_type = 'local'

    def test_there_and_back_again(self):
        volume = self.create(volume_type=self.volume_type)
        first = self.attach(volume, self.home(volume))
        self.write(first)
        content = self.checksum(first)
        self.detach(first)

        second = self.attach(volume, self.other(first.node))
        self.assertEqual(content, self.checksum(second))
        self.write(second, offset=500, size=10)
        added = self.checksum(second, offset=500, size=10)
        self.wait_until_arrived(second)
        self.assertEqual(content, self.checksum(second))
        self.assertEqual(added, self.checksum(second, offset=500, size=10))
        self.detach(second)

        third = self.attach(volume, first.node)
        self.assertEqual(content, self.checksum(third))
        self.wait_until_arrived(third)
        self.assertEqual(content, self.checksum(third))
        self.assertEqual(added, self.checksum(third, offset=500, size=10))

    def test_user_sees_one_volume_and_no_more(self):
        volume = self.create(volume_type=self.volume_type)
        second = self.attach(volume, self.other(self.home(volume)))
        listed = self.cloud.openstack('volume', 'list', user='demo')
        self.assertEqual([], listed)
        self.assertEqual('in-use', self.user.show(volume)['status'])
        self.assertIsNone(
            self.user.show(volume)['migration_status'])
        self.wait_until_arrived(second)


class ThinLioMoveTest(MoveTest):
    """The same on thin LVs and LIO."""

    volume_type = 'thin'


class InterruptedMoveTestCase(base.MovedTestCase):

    def setUp(self):
        super().setUp()
        self.hold_in_mid_move(self.moved)


class InterruptedMoveTest(InterruptedMoveTestCase):
    """A move survives whatever happens in the middle of it."""

    def test_restart_of_both_drivers(self):
        for node in (self.destination, self.source):
            node.service('cinder-volume').kill()
        for node in (self.destination, self.source):
            node.service('cinder-volume').start()
        self.assert_arrives()

    def test_power_cut_of_the_destination(self):
        self.cut_power(self.destination)
        self.destination.start()
        self.wait_for_handle(self.moved)
        self.assert_arrives()


class SourcePowerCutTest(InterruptedMoveTestCase):
    """The source's exports are in nobody's saved configuration."""

    def test_power_cut_of_the_source(self):
        self.cut_power(self.source)
        # What has arrived is there while the rest is away.
        self.assertEqual(self.added,
                         self.checksum(self.moved, offset=1000, size=10))
        self.source.start()
        self.assert_arrives()


class ThinLioSourcePowerCutTest(SourcePowerCutTest):

    volume_type = 'thin'


class HelperTest(InterruptedMoveTestCase):
    """The native helper dies in the middle of a move."""

    def setUp(self):
        if base.DATA_PATHS[0] != 'hydrator':
            self.skipTest('dm-clone has no process')
        super().setUp()

    def kill(self, name):
        """Kill processes of helpers on the destination; their number."""
        found = self.destination.run(['pgrep', '-f', name]).stdout.split()
        self.destination.run(['kill', '-9', *found])
        return len(found)

    def test_helper_dies_and_starts_again(self):
        self.assertEqual(1, self.kill('localstor-hydrator run'))
        self.assert_arrives()

    def test_helper_dies_with_what_watches_over_it(self):
        self.assertGreater(self.kill('localstor-hydrator'), 1)
        self.assert_arrives()


class RemoteConnectionTest(base.WrittenTestCase):

    def test_reader_without_an_instance_does_not_move_the_volume(self):
        reader = self.other(self.source)
        remote = self.user.attach_remotely(self.volume, reader)
        self.attachments.append(remote)
        self.assertEqual('iscsi', remote.connection['driver_volume_type'])
        with self.logged_in(remote) as disk:
            self.assertEqual(self.content, self.checksum(disk))
        self.assertEqual(self.source.name, self.home(self.volume).name)


class MissingHandleTest(base.WrittenTestCase):
    """The handle of a volume is gone, though its node has not started anew."""

    def test_it_is_made_when_the_volume_is_attached(self):
        local = self.attach(self.volume, self.source)
        for node in (self.source, self.other(self.source)):
            self.detach(local)
            self.source.run(['dmsetup', 'remove', local.device])
            local = self.attach(self.volume, node)
            self.assertEqual(self.content, self.checksum(local))
        self.wait_until_arrived(local)
        self.assertEqual(self.content, self.checksum(local))


class RefusedTest(base.LabTestCase):
    """An attachment that can't be says why and changes nothing."""

    def setUp(self):
        super().setUp()
        self.volume = self.create()
        self.source = self.home(self.volume)
        self.destination = self.other(self.source)

    def refuse(self):
        error = self.assertRaises(exceptions.HttpError, self.user.attach,
                                  self.volume, self.destination)
        self.user.wait_for_status(self.volume, 'available')
        self.assertEqual(self.source.name, self.home(self.volume).name)
        return str(error)

    def test_too_little_space(self):
        self.fill(self.destination, 'cinder-local', 1000)
        self.refuse()
        self.assertIn("'cinder-local' on node",
                      self.log_of(self.source))

    def test_too_little_space_for_the_map(self):
        self.fill(self.destination, 'cinder-local', 1024)
        self.refuse()
        self.assertIn('-regions', self.log_of(self.source))

    def test_peer_that_is_down(self):
        service = self.destination.service('cinder-volume')
        service.stop()
        self.addCleanup(service.start)
        time.sleep(25)  # service_down_time, and one look more
        self.refuse()
        self.assertIn('its service is down', self.log_of(self.source))

    def log_of(self, node):
        text = node.service('cinder-volume').log.read_text(errors='replace')
        return '\n'.join(line for line in text.splitlines()
                         if ' ERROR ' in line)


class SetupErrorTest(base.LabTestCase):
    """A backend that can't work says what is missing and does not start."""

    def fails_with(self, words, options=None):
        node = self.nodes[0]
        service = node.service('cinder-volume')
        before = len(service.log.read_text(errors='replace'))
        if options:
            node.configure({'local': options})
            self.addCleanup(node.configure,
                            {'local': dict.fromkeys(options)})
        service.stop()
        service.start(wait=False)
        end = time.monotonic() + base.PATIENCE
        while time.monotonic() < end:
            if words in service.log.read_text(errors='replace')[before:]:
                return
            time.sleep(0.5)
        self.fail('The log does not say %r' % words)

    def setUp(self):
        super().setUp()
        service = self.nodes[0].service('cinder-volume')
        self.addCleanup(service.start)
        self.addCleanup(service.stop)

    def test_no_such_volume_group(self):
        self.fails_with("no volume group 'elsewhere' on node1",
                        {'volume_group': 'elsewhere'})

    def test_buffered_export(self):
        self.fails_with('iscsi_target_flags = direct',
                        {'iscsi_target_flags': ''})

    def test_kernel_without_dm_clone(self):
        if base.KERNEL == 'own':
            self.skipTest('it is no module there')
        node = self.nodes[0]
        node.run(['sh', '-c', 'echo install dm-clone /bin/false > '
                  '/etc/modprobe.d/no-clone.conf; rmmod dm_clone'])
        self.addCleanup(node.run,
                        ['rm', '/etc/modprobe.d/no-clone.conf'])
        self.fails_with("no device-mapper target 'clone'",
                        {'localstor_data_path': 'clone'})
