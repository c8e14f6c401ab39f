# SPDX-License-Identifier: Apache-2.0
"""LVM when its commands hang, die half-way, or lose what they have made."""

import uuid

from keystoneauth1 import exceptions

from tests.lab import base

GROUP = 'cinder-thin'
LOCAL_GROUP = 'cinder-local'
POOL = 'cinder--thin-cinder--thin--pool-tpool'
LOCK = '/run/lock/lvm/V_' + GROUP
BLOCK = 4096  # bytes
# Stands for a command that waits for a disk in its critical section.  It takes
# LVM's lock, as LVM does, and a signal finds it blocked.
HANGING = '''\
#!/bin/sh
trap "" TERM INT
exec 9>>%s
flock 9
dmsetup suspend %s
echo $$ >/run/hangs
while :; do sleep 1; done
''' % (LOCK, POOL)
PROGRAM = '/usr/local/sbin/lvcreate'


class LVMTestCase(base.LabTestCase):

    def setUp(self):
        super().setUp()
        self.node = self.nodes[0]

    def write_in_background(self, attachment):
        """Write a block; the file that tells when it is written."""
        name = '/run/written-%s' % uuid.uuid4()
        attachment.node.run(
            ['sh', '-c', '(dd if=/dev/urandom of=%s bs=%d count=1 '
             'oflag=direct conv=fsync,notrunc; echo done $?) >%s 2>&1 '
             '</dev/null &' % (attachment.device, BLOCK, name)])
        return name

    def is_written(self, name):
        return 'done 0' in self.node.run(['cat', name]).stdout

    def status(self):
        # It makes sure: two looks, and some seconds for each here.
        return self.localstor(self.node, 'status').stdout


class LostTest(LVMTestCase):

    def test_h29_volume_that_the_pool_does_not_know(self):
        lost = self.create(volume_type='thin', node=self.node)
        volume = self.create(volume_type='thin', node=self.node)
        attachment = self.attach(volume, self.node)
        self.write(attachment)
        content = self.checksum(attachment)
        # As a power cut between LVM's metadata and the pool's leaves it
        name = '%s/volume-%s' % (GROUP, lost)
        thin_id = self.node.run(['lvs', '--noheadings', '-o', 'thin_id', name]
                                ).stdout.strip()
        self.node.run(['dmsetup', 'remove', 'volume-%s-handle' % lost])
        self.node.run(['lvchange', '--activate', 'n', name])
        self.node.run(['dmsetup', 'message', POOL, '0', 'delete ' + thin_id])
        self.restart_cinder_volume(self.node)
        self.assertEqual(content, self.checksum(attachment))
        self.assertIn('Not active in volume group %s: volume-%s'
                      % (GROUP, lost), self.log_of(self.node))
        self.assertIn("'No data available'", ' '.join(self.status().split()))
        self.assertRaises(exceptions.HttpError, self.user.attach, lost,
                          self.node)
        self.user.wait_for_status(lost, 'available')
        self.delete(lost)
        self.assertNotIn(lost, self.node.run(['lvs', GROUP]).stdout)
        self.create(volume_type='thin', node=self.node)


class KilledTest(LVMTestCase):

    def test_what_lvm_had_written_is_durable_after_the_next_start(self):
        pool = '%s/%s-pool' % (GROUP, GROUP)
        # Another than before, which a power cut might bring back
        tag = 'written-%s' % uuid.uuid4()
        # As a process leaves it that is killed before it flushes the disk
        self.node.run(['lvchange', '--addtag', tag, pool])
        self.addCleanup(self.node.run, ['lvchange', '--deltag', tag, pool])
        self.restart_cinder_volume(self.node)
        self.cut_power(self.node, lose='drop')
        self.node.start()
        self.cloud.wait_for_backends([self.node])
        self.assertIn(tag, self.node.run(
            ['lvs', '--noheadings', '-o', 'lv_tags', pool]).stdout)


class DamagedTest(LVMTestCase):

    # LVM's metadata are where the header of their area says (pvck(8)); the
    # area begins at the ninth sector.
    DAMAGE = '''\
set -e
at=$(pvck --dump headers $0 | sed -n 's/.*raw_locn\\[0\\].offset //p')
dd if=/dev/zero of=$0 bs=512 count=1 seek=$((8 + at / 512)) oflag=direct \
    conv=notrunc,fsync
'''

    def test_group_whose_metadata_are_lost_is_given_back_its_own(self):
        disk = self.node.run(['pvs', '--noheadings', '-o', 'pv_name', '-S',
                              'vg_name=' + GROUP]).stdout.strip()
        attachment = self.attach(
            self.create(volume_type='thin', node=self.node), self.node)
        self.write(attachment)
        content = self.checksum(attachment)
        self.node.service('cinder-volume').stop()
        self.addCleanup(self.restart_cinder_volume, self.node)
        self.node.run(['sh', '-c', self.DAMAGE, disk])
        self.node.service('cinder-volume').start(wait=False)
        advice = 'pvck --repair --file /etc/lvm/backup/' + GROUP
        self.wait_for('the backend says what to do',
                      lambda: advice in self.log_of(self.node))
        # The other group has nothing to do with it.
        self.create(volume_type='local', node=self.node)
        self.node.run([*advice.split(), '--yes', disk])
        self.restart_cinder_volume(self.node)
        self.assertEqual(content, self.checksum(attachment))


class ZeroTest(LVMTestCase):

    def test_h30_pool_that_does_not_zero_is_refused(self):
        self.node.run(['lvchange', '--zero', 'n', '%s/%s-pool' % (GROUP,
                                                                  GROUP)])
        self.addCleanup(self.zero_again)
        self.node.service('cinder-volume').stop()
        self.node.service('cinder-volume').start(wait=False)
        self.wait_for('the backend says no', lambda: (
            'lvchange --zero y' in self.log_of(self.node)))
        self.wait_for('the service counts as down', lambda: not self.is_up())
        # Nobody reads what another tenant has left: there is no volume.
        volume = self.user.request_volume('of-a-user', 1, 'thin',
                                          self.node.name)
        self.volumes.append(volume)
        self.user.wait_for_status(volume, 'error')

    def is_up(self):
        [service] = self.cloud.volume_api.get(
            '/os-services?host=%s@thin' % self.node.name).json()['services']
        return service['state'] == 'up'

    def zero_again(self):
        self.node.run(['lvchange', '--zero', 'y', '%s/%s-pool' % (GROUP,
                                                                  GROUP)])
        self.restart_cinder_volume(self.node)


class MetadataAreaTest(LVMTestCase):

    # Adds tags of so many characters, so many at a time, as long as they fit
    FILL = '''\
number=0
while read length count; do
    while :; do
        tags=
        for tag in $(seq $count); do
            number=$((number + 1))
            tags="$tags --addtag $(printf "%%0${length}d" $number)"
        done
        vgchange -qq $tags %s 2>/dev/null || break
    done
done <<END
1000 50
1000 5
200 1
END
''' % LOCAL_GROUP

    def test_full_metadata_area_is_told_with_what_to_do(self):
        volume = self.create(node=self.nodes[1])
        self.addCleanup(self.make_room)
        self.node.run(['sh', '-c', self.FILL], timeout=base.PATIENCE)
        self.assertRaises(exceptions.HttpError, self.user.attach, volume,
                          self.node)
        self.user.wait_for_status(volume, 'available')
        self.assertIn('pvcreate --metadatasize', self.log_of(self.node))
        self.restart_cinder_volume(self.node)
        self.assertRegex(self.log_of(self.node), "metadata area of volume "
                         'group %s has 0 of' % LOCAL_GROUP)
        self.make_room()
        self.attach(volume, self.node)

    def make_room(self):
        tags = self.node.run(['vgs', '--noheadings', '-o', 'vg_tags',
                              LOCAL_GROUP]).stdout.strip()
        if tags:
            self.node.run(['vgchange', '-qq', *(
                word for tag in tags.split(',')
                for word in ('--deltag', tag)), LOCAL_GROUP])


class SuspendedTest(LVMTestCase):

    def test_h32_pool_that_a_dead_command_left_suspended_is_resumed(self):
        volume = self.create(volume_type='thin', node=self.node)
        attachment = self.attach(volume, self.node)
        mapped = 'cinder--thin-volume--' + volume.replace('-', '--')
        for name in (mapped, POOL):
            self.node.run(['dmsetup', 'suspend', name])
        writing = self.write_in_background(attachment)
        self.wait_for('the write is done', lambda: self.is_written(writing))
        self.assertIn('was left suspended', self.log_of(self.node))
        self.assertEqual([], self.suspended())

    def suspended(self):
        return [line for line in self.node.run(
            ['dmsetup', 'info', '-c', '--noheadings', '-o', 'name,suspended']
        ).stdout.split() if line.endswith(':Suspended')]

    def test_h32_command_in_its_critical_section_is_not_killed(self):
        volume = self.create(volume_type='thin', node=self.node)
        attachment = self.attach(volume, self.node)
        self.configure(5)
        self.addCleanup(self.configure, None)
        self.node.run(['sh', '-c', "cat >%s <<'END'\n%sEND\nchmod +x %s"
                       % (PROGRAM, HANGING, PROGRAM)])
        self.addCleanup(self.node.run, ['rm', '-f', PROGRAM])
        self.volumes.append(self.user.request_volume(
            'of-a-user', 1, 'thin', self.node.name))
        self.wait_for('the command hangs', lambda: self.node.run(
            ['test', '-e', '/run/hangs'], check=False).returncode == 0)
        self.addCleanup(self.node.run, ['rm', '-f', '/run/hangs'])
        pid = self.node.run(['cat', '/run/hangs']).stdout.strip()
        writing = self.write_in_background(attachment)
        self.wait_for('it is left alone', lambda: (
            'It goes on as process %s' % pid in self.log_of(self.node)))
        self.node.run(['rm', '-f', PROGRAM])
        # Nobody resumes what it may be about to change, or waits for it.
        self.assertFalse(self.is_written(writing))
        self.assertIn(POOL + ':Suspended', self.suspended())
        self.assertRegex(self.status(), r'has been\s+locked')
        # It dies, as with the node's memory full.
        self.node.run(['kill', '-9', pid])
        self.wait_for('the write is done', lambda: self.is_written(writing))
        self.assertNotEqual(0, self.node.run(
            ['test', '-e', '/proc/' + pid], check=False).returncode)
        self.create(volume_type='thin', node=self.node)

    def configure(self, seconds):
        self.node.configure({'thin': {'localstor_command_timeout': seconds}})
        self.restart_cinder_volume(self.node)
