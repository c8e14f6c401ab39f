# SPDX-License-Identifier: Apache-2.0
"""Instances that real Nova runs, with volumes on this driver.

The guest is the lab's own (``lab/guest``): it writes and verifies numbered
stamps on every disk that it sees.
"""

import functools
import os
import threading
import time

from lab import arrival
from lab import cloud as clouds
from lab import configuration
from lab import instances
from lab import leftovers
from lab import nova_setup
from lab import sizes
from tests.lab import base
from tests.lab import test_adoption

# Statuses of a migration
ENDED = {'completed', 'failed', 'error', 'cancelled'}
NAME = os.environ.get('LOCALSTOR_NOVA_LAB', 'nova')


@functools.cache
def cloud():
    """The lab of these tests, up: two nodes in which instances run."""
    found = clouds.Cloud(NAME)
    # A guest knows its stamps wherever they lie, also those that an instance
    # before it has left.
    found.up(nodes=2, also=['keys', 'nova'], options={
        backend: options | {'volume_clear_size': 0}
        for backend, options in base.OPTIONS.items()})
    return found


class InstanceTestCase(base.LabTestCase):
    """A test with instances, of which nothing may be left in the end."""

    find_cloud = staticmethod(cloud)

    def setUp(self):
        super().setUp()
        self.instances = []
        # First of all: what an instance has can't be deleted.
        self.addCleanup(self.delete_instances)

    def delete_instances(self):
        while self.instances:
            self.instances.pop().delete()

    def boot(self, node, volume_type='local', size=1):
        """An instance on a node, and the volume that it boots from."""
        volume = self.user.create_volume(
            size, volume_type, node.name, instances.image(self.cloud))
        self.volumes.append(volume)
        instance = instances.boot(self.cloud, volume, node)
        self.instances.append(instance)
        return instance, volume

    def made_for(self, instance):
        """The volume that Nova makes for an instance, when there is one."""
        self.wait_for('it has a volume', instance.volumes,
                      timeout=2 * base.PATIENCE)
        made, = instance.volumes()
        self.volumes.append(made)
        return made

    def stop(self, instance):
        instance.act('os-stop')
        instance.wait_for('SHUTOFF')

    def delete_instance(self, instance):
        self.instances.remove(instance)
        instance.delete()

    def remove_forgotten_attachments(self, instance):
        """Those in Cinder that Nova knows nothing of any more."""
        known = {*instance.attachments().values()}
        for volume in instance.volumes():
            for attachment in {*self.user.attachments(volume)} - known:
                self.user.remove_attachment(attachment)

    def assert_arrives(self, volume, node):
        """A volume comes to be on a node, and nowhere else."""
        self.assertEqual(node.name, self.user.host(volume))
        self.wait_for('%s has arrived' % volume, lambda: not any(
            found['migration_status'] for found in self.user.volumes()))


class InstanceTest(InstanceTestCase):

    def test_volumes_are_whole_wherever_their_instance_is(self):
        here, there = self.nodes
        instance, root = self.boot(here)
        self.assertEqual(here.name, self.user.host(root))

        instance.live_migrate(there)
        instance.go_on()
        self.assert_arrives(root, there)
        instance.go_on()
        # Memory that was copied while it was translated is not always right,
        # and a new disk touches much of it.
        instance.boot_again()

        data = self.create(node=here)
        instance.attach(data)
        self.assertEqual(there.name, self.user.host(data))
        instance.assert_alive()
        instance.detach(data)
        instance.wait_for_report('gone', data)
        instance.assert_alive()
        self.delete_instance(instance)


class SchedulerTest(InstanceTestCase):
    """Nova chooses the node, and knows of local volumes."""

    def create_root(self, node):
        volume = self.user.create_volume(1, 'local', node.name,
                                         instances.image(self.cloud))
        self.volumes.append(volume)
        return volume

    def room(self, node):
        """GiB that Cinder's scheduler knows to be free on a node."""
        return next(
            pool['capabilities']['free_capacity_gb'] for pool
            in self.cloud.volume_api.get('/scheduler-stats/get_pools'
                                         '?detail=True').json()['pools']
            if pool['name'] == configuration.pool(node.name, 'local'))

    def test_instance_boots_where_its_volume_is(self):
        for node in self.nodes:
            instance = instances.boot(self.cloud, self.create_root(node))
            self.instances.append(instance)
            self.assertEqual(node.name, instance.node.name)
            # Nothing had to come.
            self.assertEqual({}, leftovers.moves(self.cloud))
            instance.assert_alive()

    def test_volume_that_nova_makes_is_made_where_its_instance_starts(self):
        # One of them has less room than the other.
        for node in self.nodes:
            instance = instances.request_of_image(
                self.cloud, nova_setup.GUEST, 'local', node)
            self.instances.append(instance)
            root = self.made_for(instance)
            instance.wait_until_booted(root)
            self.assertEqual(node.name, self.user.host(root))
            # It has never been anywhere else.
            self.assertEqual(root, self.user.copy_of(root))
            instance.assert_alive()

    def test_instance_goes_to_no_node_without_room(self):
        here, there = self.nodes
        root = self.create_root(here)
        instances.enable(self.cloud, here, False)
        self.addCleanup(instances.enable, self.cloud, here)
        # Others would not come there either.
        self.addCleanup(self.wait_for, 'Cinder tells that there is room again',
                        lambda: self.room(there) > 1)
        self.fill(there, 'cinder-local', 1000)
        self.wait_for('Cinder tells of it', lambda: self.room(there) < 1)
        instance = instances.request(self.cloud, 'nowhere', root)
        self.instances.append(instance)
        self.wait_for('Nova has given up',
                      lambda: instance.status == 'ERROR')
        self.assertIn(there.name + '@local has 0.9', self.cloud.service(
            'nova-scheduler').log.read_text(errors='replace'))
        self.assertEqual(here.name, self.user.host(root))


class BootedTestCase(InstanceTestCase):
    """A test with an instance that runs, and a node for it to go to."""

    def setUp(self):
        super().setUp()
        self.here, self.there = self.nodes
        self.instance, self.root = self.boot(self.here)
        self.instance.assert_alive()

    def assert_finds_its_stamps(self):
        """Its guest has booted again and found what it had written."""
        self.instance.wait_for_stamps(self.root)
        self.instance.assert_alive()

    def attach_new(self, node, size=1, volume_type='local'):
        """A volume of a node, attached to the instance."""
        volume = self.create(size, volume_type, node)
        self.instance.attach(volume)
        return volume


class ActionsTest(BootedTestCase):
    """What users and administrators do with an instance."""

    def test_volume_goes_with_a_cold_migration(self):
        self.instance.act('migrate', {'host': self.there.name})
        self.instance.wait_for('VERIFY_RESIZE')
        self.assertEqual(self.there.name, self.instance.node.name)
        self.assert_finds_its_stamps()
        self.instance.act('confirmResize')
        self.instance.wait_for('ACTIVE')
        self.assert_arrives(self.root, self.there)
        self.instance.assert_alive()

    def test_volume_goes_with_a_resize(self):
        self.instance.act('resize', {'flavorRef': nova_setup.LARGER})
        self.instance.wait_for('VERIFY_RESIZE')
        self.assertEqual(self.there.name, self.instance.node.name)
        self.instance.act('confirmResize')
        self.instance.wait_for('ACTIVE')
        self.assert_finds_its_stamps()
        self.assert_arrives(self.root, self.there)

    def test_rebuilt_instance_has_its_image_again_and_its_other_volume(self):
        data = self.attach_new(self.there)
        self.instance.reboot()
        self.assert_finds_its_stamps()
        self.instance.act('rebuild', {
            'imageRef': instances.image(self.cloud)}, version='2.93')
        self.instance.wait_for('ACTIVE')
        self.wait_for('the root disk is as new', lambda: [[None]] == [
            report['before'] for report in self.instance.reports()
            if report['event'] == 'found'
            and report['serial'] == self.root[:20]][-1:])
        self.instance.wait_for_stamps(data)
        self.instance.assert_alive()
        self.assert_arrives(self.root, self.here)

    def test_new_volumes_are_made_where_the_instance_is(self):
        for node in (self.here, self.there):
            volume = self.cloud.openstack(
                'volume', 'create', '--size', '1', '--type', 'local',
                '--hint', 'local_to_instance=' + self.instance.id,
                'beside')['id']
            self.volumes.append(volume)
            self.user.wait_for_status(volume, 'available')
            self.assertEqual(node.name, self.home(volume).name)
            if node is self.here:
                self.instance.live_migrate(self.there)

    def test_volume_comes_back_with_a_reverted_migration(self):
        self.instance.act('migrate', {'host': self.there.name})
        self.instance.wait_for('VERIFY_RESIZE')
        self.assert_finds_its_stamps()
        self.instance.act('revertResize')
        self.instance.wait_for('ACTIVE')
        self.assertEqual(self.here.name, self.instance.node.name)
        self.assert_finds_its_stamps()
        self.assert_arrives(self.root, self.here)

    def test_instance_stops_and_starts(self):
        self.instance.act('os-stop')
        self.instance.wait_for('SHUTOFF')
        self.instance.act('os-start')
        self.instance.wait_for('ACTIVE')
        self.assert_finds_its_stamps()

    def test_instance_is_rebooted(self):
        for kind in ('SOFT', 'HARD'):
            self.instance.act('reboot', {'type': kind})
            self.instance.wait_for('ACTIVE')
            self.assert_finds_its_stamps()

    def test_instance_is_suspended_and_resumed(self):
        self.instance.act('suspend')
        self.instance.wait_for('SUSPENDED')
        self.instance.act('resume')
        self.instance.wait_for('ACTIVE')
        self.instance.go_on()

    def test_rescued_instance_has_its_volumes(self):
        data = self.attach_new(self.there)
        self.instance.act('rescue', {
            'rescue_image_ref': instances.image(self.cloud)}, version='2.87')
        self.instance.wait_for('RESCUE')
        for volume in (self.root, data):
            self.instance.wait_for_stamps(volume)
        self.instance.assert_alive()
        self.instance.act('unrescue')
        self.instance.wait_for('ACTIVE')
        self.assert_finds_its_stamps()
        self.assert_arrives(self.root, self.here)
        self.assert_arrives(data, self.here)

    def test_shelved_instance_comes_back_on_the_other_node(self):
        self.instance.act('shelve')
        self.instance.wait_for('SHELVED_OFFLOADED')
        data = self.create(node=self.here)
        self.instance.request_volume(data)
        self.instance.act('unshelve', {'host': self.there.name},
                          version='2.91')
        self.instance.wait_for('ACTIVE')
        self.assert_finds_its_stamps()
        self.instance.wait_for_report('found', data)
        self.assert_arrives(self.root, self.there)
        self.assert_arrives(data, self.there)

    def test_guest_sees_that_its_volume_has_grown(self):
        self.user.extend_volume(self.root, 2)
        self.instance.wait_for_report(
            'resized', self.root,
            wanted=lambda report: report['size'] == 2 * sizes.GIB)
        self.instance.assert_alive()

    def test_volume_grows_while_it_arrives(self):
        data = self.attach_new(self.there, size=2)
        self.user.extend_volume(data, 3)
        self.instance.wait_for_report(
            'resized', data,
            wanted=lambda report: report['size'] == 3 * sizes.GIB)
        self.instance.assert_alive()

    def test_limit_of_a_type_goes_with_the_instance(self):
        limits = self.user.limit_type('thin', total_iops_sec='500')
        self.addCleanup(self.user.delete_limits, limits)
        data = self.attach_new(self.there, volume_type='thin')
        self.assertIn('<total_iops_sec>500<', self.instance.description())
        self.instance.live_migrate(self.there)
        self.instance.go_on()
        self.assertIn('<total_iops_sec>500<', self.instance.description())
        self.assert_arrives(data, self.there)

    def test_volume_in_use_goes_to_another_backend_of_its_node(self):
        data = self.attach_new(self.here)
        self.user.retype(data, 'thin')
        self.wait_for('it has gone', lambda: self.user.show(data)[
            'volume_type'] == 'thin' and self.user.status(data) == 'in-use',
            timeout=2 * base.PATIENCE)
        self.instance.assert_alive()
        self.instance.reboot()
        self.instance.wait_for_stamps(data)

    def test_instance_is_deleted_while_its_volume_arrives(self):
        data = self.attach_new(self.there)
        self.delete_instance(self.instance)
        self.delete(data)

    def test_guests_come_back_with_their_node(self):
        data = self.attach_new(self.there)
        self.here.kill()
        self.here.start()
        self.instance.wait_for('ACTIVE')
        self.assert_finds_its_stamps()
        self.instance.wait_for_stamps(data)
        instances.wait_for_compute(self.cloud, self.here)


class AdoptionTest(InstanceTestCase, test_adoption.ReplacedTestCase):
    """An instance has volumes of Cinder's own driver, which ours replaces."""

    def assert_has(self, **kinds):
        """How the instance has its volumes, by their names in the test."""
        self.assertEqual(
            {getattr(self, name): kind for name, kind in kinds.items()},
            {volume: self.user.attached(attachment, self.here).connection[
                'driver_volume_type'] for volume, attachment
             in self.instance.attachments().items()})

    def assert_refuses_to_leave(self):
        self.assertRaises(instances.InstanceError,
                          self.instance.live_migrate, self.there)
        self.remove_forgotten_attachments(self.instance)
        self.instance.assert_alive()

    def assert_goes(self, *volumes):
        self.instance.live_migrate(self.there)
        self.instance.go_on()
        for volume in volumes:
            self.assert_arrives(volume, self.there)

    def test_volumes_are_local_when_they_are_attached_anew(self):
        self.instance, self.root = self.boot(self.here)
        self.data = self.create(node=self.here)
        self.instance.attach(self.data)
        self.assert_has(root='iscsi', data='iscsi')
        self.use(None)
        self.instance.assert_alive()
        self.assert_refuses_to_leave()

        self.instance.detach(self.data)
        self.instance.attach(self.data)
        self.assert_has(root='iscsi', data='local')
        self.instance.act('shelve')
        self.instance.wait_for('SHELVED_OFFLOADED')
        self.instance.act('unshelve', {'host': self.here.name},
                          version='2.91')
        self.instance.wait_for('ACTIVE')
        for volume in (self.root, self.data):
            self.instance.wait_for_stamps(volume)
        self.assert_has(root='local', data='local')
        self.assert_goes(self.root, self.data)

    def test_root_disk_is_local_when_nova_manage_has_refreshed_it(self):
        self.instance, self.root = self.boot(self.here)
        self.use(None)
        self.stop(self.instance)
        self.instance.attach_anew([self.root])
        self.instance.act('os-start')
        self.instance.wait_for('ACTIVE')
        self.instance.wait_for_stamps(self.root)
        self.assert_has(root='local')
        self.assert_goes(self.root)


class SnapshotTest(BootedTestCase):
    """Nova makes a volume of a snapshot, and boots from that."""

    def test_instance_has_what_the_snapshot_had(self):
        snapshot = self.user.request_snapshot(self.root)
        self.wait_for('there is a snapshot', lambda: self.user.snapshots().get(
            snapshot) == 'available')
        other = instances.request_of_snapshot(self.cloud, nova_setup.GUEST,
                                              snapshot, self.there)
        self.instances.append(other)
        copy = self.made_for(other)
        other.wait_until_booted(copy)
        other.wait_for_stamps(copy)
        other.assert_alive()
        self.assert_arrives(copy, self.there)
        self.instance.assert_alive()
        self.user.request_snapshot_deletion(snapshot)
        self.wait_for('it is gone',
                      lambda: snapshot not in self.user.snapshots())


class RefusalTest(BootedTestCase):
    """What can't be done has a sentence, and the instance stays as it was."""

    def assert_refused(self, volume, *words):
        """The instance does not get a volume, and Nova is told why."""
        self.instance.request_volume(volume)
        self.wait_for('it is refused', lambda: self.user.status(volume)
                      == 'available' and self.instance.failures())
        # Its users are told that it failed, whatever Cinder has said.
        log = self.here.service('nova-compute').log.read_text(errors='replace')
        self.assertTrue(any('Update attachment failed' in line
                            and all(word in line for word in words)
                            for line in log.splitlines()))
        self.assertEqual([self.root], self.instance.volumes())
        self.assertEqual('available', self.user.status(volume))
        self.instance.assert_alive()

    def test_node_has_too_little_space(self):
        volume = self.create(node=self.there)
        self.fill(self.here, 'cinder-local', 1000)
        self.assert_refused(volume, volume, "'cinder-local'")
        self.assertEqual(self.there.name, self.user.host(volume))

    def test_service_of_the_node_is_disabled(self):
        volume = self.create(node=self.there)
        self.disable(self.here.name + '@local')
        self.assert_refused(volume, volume, 'disabled (out of service)')
        self.assertEqual(self.there.name, self.user.host(volume))


class LiveMigrationTest(BootedTestCase):
    """Live migration, in its variants."""

    def test_paused(self):
        self.instance.act('pause')
        self.instance.wait_for('PAUSED')
        self.instance.live_migrate(self.there)
        self.instance.act('unpause')
        self.instance.wait_for('ACTIVE')
        self.instance.go_on()
        self.assert_arrives(self.root, self.there)

    def test_to_where_a_volume_still_comes_from(self):
        data = self.attach_new(self.there)
        self.hold_in_mid_move(self.user.attached(
            self.instance.attachments()[data], self.here))
        self.instance.live_migrate(self.there)
        self.instance.go_on()
        self.let_go()
        for volume in (self.root, data):
            self.assert_arrives(volume, self.there)
        self.instance.assert_alive()

    def test_six_volumes(self):
        volumes = [self.attach_new(node) for node in self.nodes
                   for _number in range(2)]
        volumes.append(self.attach_new(self.here, volume_type='thin'))
        self.instance.live_migrate(self.there)
        self.instance.go_on()
        for volume in volumes:
            self.assert_arrives(volume, self.there)
        self.instance.assert_alive()

    def test_back_at_once(self):
        self.instance.live_migrate(self.there)
        self.instance.live_migrate(self.here)
        self.instance.go_on()
        self.assert_arrives(self.root, self.here)
        self.instance.assert_alive()

    def test_two_servers_change_places(self):
        other, root = self.boot(self.there)
        threads = [threading.Thread(target=server.live_migrate, args=[node])
                   for server, node in ((self.instance, self.there),
                                        (other, self.here))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for server in (self.instance, other):
            server.go_on()
        self.assert_arrives(self.root, self.there)
        self.assert_arrives(root, self.here)


class FailedMigrationTest(BootedTestCase):
    """Back at the source, or on at the destination; never both or none."""

    def migrate(self):
        """Begin a live migration."""
        self.instance.act('os-migrateLive', {'host': self.there.name,
                                             'block_migration': 'auto'})

    def assert_is_somewhere(self):
        """The guest goes on, on one node, and its volume is there."""
        # A status of the instance is not yet the end of it.
        self.wait_for('the migration has ended', lambda: ENDED.issuperset(
            self.instance.migrations() or ['asked for']))
        self.instance.wait_for('ACTIVE')
        self.instance.go_on()
        node = self.instance.node
        self.assert_arrives(self.root, node)
        self.instance.assert_alive()
        self.assertEqual([node.name], self.running())
        return node

    def running(self):
        """Names of the nodes that have the guest running."""
        return [node.name for node in self.nodes if self.instance.name
                in node.run(['virsh', 'list', '--name']).stdout]

    def wait_until_prepared(self):
        """Wait until QEMU is there on the destination."""
        self.wait_for('it is prepared', lambda: self.instance.name in (
            self.there.run(['virsh', 'list', '--all', '--name']).stdout))

    def test_aborted(self):
        self.migrate()
        self.instance.abort_live_migration()
        self.assert_is_somewhere()

    def test_qemu_dies_on_the_destination(self):
        self.migrate()
        self.wait_until_prepared()
        self.there.run(['pkill', '-KILL', 'qemu'])
        self.assertEqual(self.here.name, self.assert_is_somewhere().name)

    def test_destination_loses_its_power(self):
        self.migrate()
        self.wait_until_prepared()
        self.there.kill()
        self.addCleanup(self.cloud.wait_for_backends, [self.there])
        # TCP sends again what QEMU has sent for a quarter of an hour, unless
        # the node is back and knows nothing of it.
        end = time.monotonic() + base.PATIENCE
        while self.is_migrating() and time.monotonic() < end:
            self.instance.assert_alive()
        self.there.start()
        self.wait_for('Nova has given up', lambda: not self.is_migrating(),
                      timeout=2 * base.PATIENCE)
        self.instance.assert_alive()
        # If there was nobody to clean up, Nova wants to be told that all is
        # well.
        self.instance.act('os-resetState', {'state': 'active'})
        self.assertEqual(self.here.name, self.assert_is_somewhere().name)

    def is_migrating(self):
        """Whether Nova is at it still."""
        return bool(self.instance.show()['OS-EXT-STS:task_state'])

    def test_source_loses_its_power(self):
        data = self.create(node=self.here)
        self.instance.attach(data)
        self.migrate()
        self.wait_until_prepared()
        self.here.kill()
        self.addCleanup(self.cloud.wait_for_backends, [self.here])
        self.here.start()
        instances.wait_for_compute(self.cloud, self.here)
        self.wait_for('Nova has come to terms with it',
                      lambda: not self.is_migrating(),
                      timeout=2 * base.PATIENCE)
        self.wait_for('the migration has ended', lambda: ENDED.issuperset(
            self.instance.migrations()))
        self.assertEqual([], self.running())
        # Nova says it is here, and has noted the connections of there.
        self.assertEqual(self.here.name, self.instance.node.name)
        self.instance.end_elsewhere()
        self.bring_back(self.root, data)

    def bring_back(self, *volumes):
        """What an operator does so that an instance has its volumes again, and
        lives where Nova has it.
        """
        self.instance.act('os-resetState', {'state': 'active'})
        self.stop(self.instance)
        self.remove_forgotten_attachments(self.instance)
        self.instance.attach_anew(volumes)
        self.instance.act('os-start')
        self.instance.wait_for('ACTIVE')
        for volume in volumes:
            self.instance.wait_for_stamps(volume)
            self.assert_arrives(volume, self.here)
        self.instance.assert_alive()
        self.assertEqual([self.here.name], self.running())

    def test_nova_compute_dies_on_the_destination(self):
        self.migrate()
        self.wait_until_prepared()
        service = self.there.service('nova-compute')
        service.kill()
        self.instance.assert_alive()
        service.start()
        # It does not know any more what it was asked for.
        self.wait_for('Nova has given up', lambda: not self.instance.show()[
            'OS-EXT-STS:task_state'], timeout=2 * base.PATIENCE)
        self.instance.act('os-resetState', {'state': 'active'})
        self.assert_is_somewhere()
        self.remove_forgotten_attachments(self.instance)

    def test_nova_compute_dies_on_the_source_after_the_switch(self):
        name, service = self.instance.name, self.here.service('nova-compute')
        self.migrate()
        self.wait_for('it runs there', lambda: 'running' in self.there.run(
            ['virsh', 'domstate', name], check=False).stdout)
        service.kill()
        # It finds an instance of its own that does not run, and lets it run.
        service.start()
        self.wait_for('it has tried to', lambda: not self.instance.show()[
            'OS-EXT-STS:task_state'], timeout=2 * base.PATIENCE)
        self.assertEqual([self.there.name], self.running())
        # Nova never learns where it is: an operator ends it there, and brings
        # its volume back.
        self.instance.end_elsewhere()
        self.bring_back(self.root)

    def test_cinder_volume_dies_on_the_destination(self):
        self.migrate()
        self.wait_until_prepared()
        service = self.there.service('cinder-volume')
        service.kill()
        self.instance.assert_alive()
        service.start()
        self.cloud.wait_for_backends([self.there])
        self.assertEqual(self.there.name, self.assert_is_somewhere().name)

    def test_destination_has_no_cinder_volume(self):
        attached = self.user.attachments(self.root)
        service = self.there.service('cinder-volume')
        service.kill()
        self.migrate()
        self.wait_for('it has failed',
                      lambda: self.instance.migrations() == ['failed'])
        self.assertEqual(self.here.name, self.assert_is_somewhere().name)
        service.start()
        self.cloud.wait_for_backends([self.there])
        # Cinder's API keeps what it had reserved, with any driver.
        reserved, = {*self.user.attachments(self.root)} - {*attached}
        self.user.remove_attachment(reserved)


class SharedTest(InstanceTestCase):
    """Two instances on two nodes have a volume, and use it in turn."""

    volume_type = 'local'

    def setUp(self):
        super().setUp()
        self.user.make_type('shared', volume_backend_name=self.volume_type,
                            multiattach='<is> True')
        self.shared = self.create(volume_type='shared')
        self.here = self.home(self.shared)
        self.there = self.other(self.here)
        self.instance, self.root = self.boot(self.here)
        self.other_one, _other_root = self.boot(self.there)
        self.instance.attach(self.shared)
        self.other_one.assert_alive()
        self.stop(self.other_one)
        self.other_one.request_volume(self.shared)
        self.wait_for('both have it', lambda: 2 == sum(
            status == 'attached' for status in
            self.user.attachment_statuses(self.shared).values()))

    def clean_up(self):
        super().clean_up()
        self.user.delete_type('shared')

    def start(self, instance):
        instance.act('os-start')
        instance.wait_for('ACTIVE')
        instance.wait_for_stamps(self.shared)
        instance.assert_alive()

    def test_each_finds_what_the_other_has_written(self):
        for before, after in ((self.instance, self.other_one),
                              (self.other_one, self.instance)):
            self.stop(before)
            self.start(after)
        self.assertEqual(self.here.name, self.home(self.shared).name)

    def test_one_of_them_migrates_live_and_comes_back(self):
        for node in (self.there, self.here):
            self.instance.live_migrate(node)
            self.instance.go_on()
            self.assert_arrives(self.root, node)
            self.assertEqual(self.here.name, self.home(self.shared).name)
        self.stop(self.instance)
        self.start(self.other_one)

    def test_the_last_one_is_followed(self):
        self.stop(self.instance)
        self.instance.detach(self.shared)
        self.start(self.other_one)
        self.other_one.detach(self.shared)
        self.other_one.attach(self.shared)
        self.other_one.wait_for_stamps(self.shared)
        self.assert_arrives(self.shared, self.there)
        self.other_one.assert_alive()


class ThinLioSharedTest(SharedTest):

    volume_type = 'thin'


class EvacuationTest(InstanceTestCase):
    """The node of an instance is lost, and Nova is asked for it elsewhere."""

    def lose(self, node):
        """Take a node's power for good, as far as Nova knows."""
        node.kill()
        self.addCleanup(self.give_back, node)
        instances.declare_down(self.cloud, node)

    def give_back(self, node):
        """The node is back; all its services are."""
        if not node.powered:
            node.start()
            instances.declare_down(self.cloud, node, False)
            self.cloud.wait_for_backends([node])

    def evacuate(self, instance, node):
        instance.evacuate(node)
        self.wait_for('it is there', lambda: instance.node.name == node.name)
        if instance.status == 'SHUTOFF':
            instance.act('os-start')
        instance.wait_for('ACTIVE')

    def test_instance_goes_back_whose_volume_was_arriving(self):
        here, there = self.nodes
        instance, root = self.boot(here, size=3)
        known = instance.wait_for_report('alive', root)['stamps']
        instance.live_migrate(there)
        device = '/dev/mapper/volume-%s-handle' % self.user.show(root)[
            'os-vol-mig-status-attr:name_id']
        arrival.wait_until_hydrating(there, device, base.PATIENCE)
        arrival.throttle(there, device, base.SLOW)
        self.lose(there)
        host = there.name + '@local'
        self.disable(host)
        self.wait_for('the volume goes back', lambda: self.localstor(
            here, 'lost', host, '--written-is-lost').returncode == 0)
        # tgt may keep the export until TCP gives the lost node up.
        self.wait_for('it is back', lambda: leftovers.moves(self.cloud) in (
            {}, {root: ['aborting']}))
        self.evacuate(instance, here)
        # Nobody has what was written on the lost node; all else is there.
        found = instance.wait_for_report('found', root)
        self.assertGreaterEqual(sum(found['before']), known)
        instance.assert_alive()
        there.start()
        instances.declare_down(self.cloud, there, False)
        # What an operator finds there, and removes
        instance.end_elsewhere()
        left = there.run(['lvs', '--noheadings', '--options', 'lv_name',
                          'cinder-local']).stdout.split()
        there.run(['lvremove', '--yes', *('cinder-local/' + name
                                          for name in left)])
        there.run(['iscsiadm', '-m', 'node', '-o', 'delete'], check=False)
        instance.assert_alive()
        self.delete_instance(instance)

    def test_instance_goes_to_where_its_volume_is(self):
        group = self.user.make_group('local')
        self.addCleanup(self.user.delete_group_type)
        root = self.user.request_volume(
            'of-a-group', 1, 'local', image=instances.image(self.cloud),
            group_id=group)
        self.user.wait_for_status(root, 'available')
        there = self.home(root)
        here = self.other(there)
        instance = instances.boot(self.cloud, root, here)
        self.instances.append(instance)
        instance.assert_alive()
        self.lose(here)
        self.evacuate(instance, there)
        instance.wait_for_stamps(root)
        instance.assert_alive()
        self.give_back(here)
        instance.assert_alive()
        # Nobody has told open-iscsi on the lost node.
        here.run(['iscsiadm', '-m', 'node', '-o', 'delete'])
        self.delete_instance(instance)
        self.user.request_group_deletion(group)
        self.wait_for('the group is deleted',
                      lambda: self.user.group(group) is None)


# GiB of an encrypted volume: its header takes some of the guest's first zone.
SIZE = 2


class EncryptedTest(InstanceTestCase):
    """An encrypted volume, whose key Nova gets from Barbican."""

    def setUp(self):
        super().setUp()
        self.here, self.there = self.nodes
        self.user.encrypt_type('thin')

    def clean_up(self):
        super().clean_up()
        self.user.encrypt_type('thin', False)

    def test_instance_boots_from_it(self):
        instance, root = self.boot(self.here, 'thin', SIZE)
        instance.live_migrate(self.there)
        instance.go_on()
        self.assert_arrives(root, self.there)
        instance.reboot()
        instance.wait_for_stamps(root)
        instance.assert_alive()

    def test_it_is_readable_wherever_its_instance_is(self):
        instance, _root = self.boot(self.here)
        data = self.create(SIZE, 'thin', self.there)
        instance.attach(data)
        self.assertTrue(self.user.show(data)['encrypted'])
        self.assert_arrives(data, self.here)
        instance.assert_alive()
        instance.live_migrate(self.there)
        instance.go_on()
        self.assert_arrives(data, self.there)
        instance.reboot()
        instance.wait_for_stamps(data)
        instance.assert_alive()
        instance.detach(data)
        self.delete(data)
