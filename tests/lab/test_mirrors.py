# SPDX-License-Identifier: Apache-2.0
"""Volumes that have a mirror on another disk of their node, which dies."""

import functools

from keystoneauth1 import exceptions

from lab import cloud as clouds
from lab import configuration
from lab import mirrors
from tests.lab import base

PROGRAM = '/usr/local/sbin/lvcreate'
# Stands for one that is killed while it makes the parts of a volume: LVM shows
# them until they are wiped.
KILLED = '''\
#!/bin/sh
for word; do
    [ "$before" != --name ] || name=$word
    before=$word
done
/sbin/lvcreate "$@" &
part=/dev/mapper/%s-$(echo "$name" | sed s/-/--/g)_rmeta_0
until [ -e "$part" ]; do :; done
kill -9 $!
echo $$ >/run/killed
sleep 600
''' % mirrors.GROUP.replace('-', '--')


@functools.cache
def cloud():
    """A lab of two nodes, up, each with a group of two disks."""
    found = clouds.Cloud('mirrored')
    found.up(nodes=2, kernel=base.KERNEL, disks='volatile', also=['mirrored'],
             options={'mirrored': base.QUICK | {
                 'localstor_data_path': base.DATA_PATHS[0]}})
    return found


class MirrorsTest(base.GuestTestCase):

    find_cloud = staticmethod(cloud)
    volume_type = 'mirrored'

    def let_die(self, node):
        """One of the two disks of the group answers with errors alone."""
        mirrors.disk(node).fail()
        self.addCleanup(mirrors.replace, node)
        self.wait_for('the node misses it',
                      lambda: mirrors.missing(node) == 1)

    def status(self, node):
        # However long its lines are
        return ' '.join(self.localstor(node, 'status').stdout.split())

    def assert_writes_on(self):
        before = self.ledger.acknowledged
        self.wait_for('the guest writes on',
                      lambda: self.ledger.acknowledged > before + 50)

    def assert_every_stamp_is_there(self, attachment):
        self.live(attachment).stop(base.PATIENCE)
        self.assertEqual([], self.journal.failures)

    def test_guest_does_not_see_that_a_disk_dies(self):
        guest = self.live(self.first)
        self.let_die(self.source)
        self.assert_writes_on()
        told = self.status(self.source)
        for part in ('1 of the disks of volume group ' + mirrors.GROUP,
                     'a disk of it is missing'):
            self.assertIn(part, told)
        self.restart_cinder_volume(self.source)
        self.assert_writes_on()
        self.assertTrue(guest.stop(base.PATIENCE))

        self.cut_power(self.source)
        self.source.start()
        self.wait_for_handle(self.first)
        self.assert_every_stamp_is_there(self.first)

        mirrors.replace(self.source)
        self.wait_for('the mirror is there again', lambda: (
            'a disk of it' not in self.status(self.source)))
        self.assert_every_stamp_is_there(self.first)

    def test_guest_whose_volume_arrives_does_not_see_it_either(self):
        self.move_on()
        self.let_die(self.moved.node)
        self.assert_goes_on()

    def test_volume_leaves_the_node_and_no_other_goes_there(self):
        self.live(self.first).stop(base.PATIENCE)
        self.detach(self.first)
        self.let_die(self.source)

        moved = self.attach(self.volume, self.other(self.source))
        self.assert_every_stamp_is_there(moved)
        self.wait_for('only the group keeps the old copy', lambda: (
            'LVM makes, extends and renames nothing' in self.status(
                self.source)))
        pool = configuration.pool(self.source.name, self.volume_type)
        self.wait_for('the scheduler knows',
                      lambda: not self.user.rooms()[pool])
        volume = self.create(volume_type=self.volume_type)
        self.assertEqual(self.other(self.source).name, self.user.host(volume))
        self.assertRaises(exceptions.HttpError, self.user.attach, volume,
                          self.source)
        self.assertIn('for volume %s: A disk of volume group' % volume,
                      self.log_of(self.other(self.source)))

        mirrors.give_up(self.source)
        self.wait_until_arrived(moved)
        self.assertNotIn(mirrors.GROUP, self.status(self.source))
        self.assert_every_stamp_is_there(moved)


class KilledTest(base.LabTestCase):

    find_cloud = staticmethod(cloud)

    def setUp(self):
        super().setUp()
        self.node = self.nodes[0]

    def test_volume_that_was_left_half_made_is_deleted(self):
        self.node.run(['sh', '-c', "cat >%s <<'END'\n%sEND\nchmod +x %s"
                       % (PROGRAM, KILLED, PROGRAM)])
        self.addCleanup(self.node.run, ['rm', '-f', PROGRAM])
        volume = self.user.request_volume('of-a-user', 1, 'mirrored',
                                          self.node.name)
        self.volumes.append(volume)
        self.wait_for('the command is killed', lambda: self.node.run(
            ['test', '-e', '/run/killed'], check=False).returncode == 0)
        self.node.service('cinder-volume').kill()
        self.node.run(['sh', '-c', 'rm %s; kill $(cat /run/killed); '
                       'rm /run/killed' % PROGRAM])
        name = 'volume-' + volume
        self.assertRegex(self.logical_volumes(), name + ' +rwi---r--k')
        self.restart_cinder_volume(self.node)
        self.user.wait_for_status(volume, 'error')
        self.delete(volume)
        self.assertEqual('', self.logical_volumes())
        self.create(volume_type='mirrored', node=self.node)

    def test_volume_whose_part_is_active_alone_is_active_again(self):
        volume = self.create(volume_type='mirrored', node=self.node)
        attachment = self.attach(volume, self.node)
        self.write(attachment)
        content = self.checksum(attachment)
        self.detach(attachment)
        # As a vgchange leaves it that is killed half-way
        self.node.service('cinder-volume').stop()
        self.node.run(['dmsetup', 'remove', 'volume-%s-handle' % volume])
        name = '%s/volume-%s' % (mirrors.GROUP, volume)
        self.node.run(['lvchange', '--activate', 'n', name])
        self.node.run(['lvchange', '--yes', '--activate', 'y',
                       name + '_rimage_1'])
        self.restart_cinder_volume(self.node)
        attachment = self.attach(volume, self.node)
        self.assertEqual(content, self.checksum(attachment))

    def logical_volumes(self):
        return self.node.run(['lvs', '--noheadings', '--options',
                              'lv_name,lv_attr', mirrors.GROUP]).stdout.strip()
