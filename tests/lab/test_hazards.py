# SPDX-License-Identifier: Apache-2.0
"""What breaks systems like this one, tried on real kernels.

The names are those of the hazards; doc/source/testing.rst tells where each is
tried.
"""

import concurrent.futures
import os
import re
import time
import uuid

from keystoneauth1 import exceptions

from lab import cloud as clouds
from lab import configuration
from lab import sparse
from lab import user as users
from tests.lab import base

BLOCK = 4096  # bytes
# How many volumes move at once (H25), and how often one moves (H5).  A soak
# sets it higher.
MANY = int(os.environ.get('LOCALSTOR_MANY', '4'))
# Seconds for which everybody wants the same volume
STORM = 60
# How many of a test's calls Cinder has to answer at a time; more take longer
# here than its API waits.
AT_ONCE = 3
# How often a volume goes where records of iSCSI's come and go
JOURNEYS = 5
COME_AND_GO = """
import os
import time
target = '/etc/iscsi/nodes/iqn.come-and-go'
portal = target + '/192.0.2.1,3260,1'
while not os.path.exists('/run/gone'):
    os.makedirs(portal)
    time.sleep(0.002)
    os.rmdir(portal)
    os.rmdir(target)
    time.sleep(0.002)
"""
MARKER = 'remanence of %s' % uuid.uuid4()


class HazardTestCase(base.LabTestCase):

    def write_stamp(self, attachment, stamp, block=0):
        attachment.node.run(
            ['sh', '-c', 'printf "%%-%ds" "%s" | dd of=%s bs=%d seek=%d '
             'oflag=direct conv=notrunc iflag=fullblock status=none' % (
                 BLOCK, stamp, attachment.device, BLOCK, block)])

    def read_stamp(self, attachment, block=0, flags='iflag=direct'):
        return attachment.node.run(
            ['sh', '-c', 'dd if=%s bs=%d skip=%d count=1 %s status=none' % (
                attachment.device, BLOCK, block, flags)]).stdout.strip()

    def background(self, node, script):
        """Start a shell script on a node; its output is below /run."""
        name = '/run/background-%s' % uuid.uuid4()
        node.run(['sh', '-c', '(%s) >%s 2>&1 </dev/null &' % (script, name)])
        return name

    def output(self, node, name):
        return node.run(['cat', name]).stdout


class MigratingHazardTest(HazardTestCase):
    """While the guest may write on either node."""

    def setUp(self):
        super().setUp()
        self.volume = self.create()
        source = self.home(self.volume)
        self.first = self.attach(self.volume, source)
        self.write_stamp(self.first, 'before')
        self.second = self.user.attach_second(self.first, self.other(source))
        self.attachments.append(self.second)

    def test_h1_reader_over_iscsi_never_sees_an_old_block(self):
        for number in range(20):
            self.write_stamp(self.first, 'stamp %d' % number)
            self.assertEqual('stamp %d' % number,
                             self.read_stamp(self.second))

    def test_h2_pages_read_before_the_switch_over_are_forgotten(self):
        self.assertEqual('before', self.read_stamp(self.second, flags=''))
        self.write_stamp(self.first, 'after')
        self.detach(self.first)
        self.wait_until_arrived(self.second)
        self.assertEqual('after', self.read_stamp(self.second, flags=''))


class AwayTest(HazardTestCase):
    """The source is away for longer than iSCSI waits by itself."""

    def setUp(self):
        super().setUp()
        self.volume = self.create(size=2)
        source = self.home(self.volume)
        first = self.attach(self.volume, source)
        self.write(first, size=20)
        self.content = self.checksum(first, size=20)
        self.write_stamp(first, 'the end', block=500000)
        self.detach(first)
        self.source, destination = source, self.other(source)
        self.standing = self.create(node=destination)
        self.local = self.attach(self.standing, destination)
        self.wait_briefly(destination)
        self.moved = self.attach(self.volume, destination)
        self.hold_in_mid_move(self.moved)
        self.write_stamp(self.moved, 'arrived', block=30000)

    def test_h9_everything_else_goes_on_and_then_the_move(self):
        node = self.moved.node
        self.cloud.cut(self.source.name, node.name)
        self.addCleanup(self.cloud.heal)
        reading = self.background(
            node, 'dd if=%s bs=%d skip=500000 count=1 iflag=direct '
            'status=none; echo done $?' % (self.moved.device, BLOCK))
        time.sleep(base.REPLACEMENT_TIMEOUT + 15)
        self.assertEqual('', self.output(node, reading))
        # What has arrived, other volumes and the backend go on.
        self.assertEqual('arrived', self.read_stamp(self.moved, block=30000))
        self.write_stamp(self.local, 'in the meantime')
        self.assertEqual('in the meantime', self.read_stamp(self.local))
        other = self.create(node=node)
        self.delete(other)
        self.assertIn('stalled', self.localstor(node, 'status').stdout)
        self.cloud.heal()
        self.wait_for('the read has its answer',
                      lambda: 'done' in self.output(node, reading))
        self.assertRegex(self.output(node, reading), r'the end\s+done 0')
        self.wait_until_arrived(self.moved)
        self.assertEqual(self.content, self.checksum(self.moved, size=20))


class ConstantLoadTest(HazardTestCase):

    def test_h4_volume_arrives_under_constant_load(self):
        if 'hydrator' not in base.DATA_PATHS:
            self.skipTest('dm-clone waits for a pause')
        volume = self.create(volume_type=configuration.BACKENDS[
            base.DATA_PATHS.index('hydrator')])
        attachment = self.attach(volume, self.home(volume))
        self.write_stamp(attachment, 'far away', block=200000)
        self.detach(attachment)
        moved = self.attach(volume, self.other(attachment.node))
        load = self.background(
            moved.node, 'exec fio --name=guest --filename=%s --direct=1 '
            '--ioengine=io_uring --rw=randrw --bs=4k --iodepth=4 --size=256m '
            '--time_based --runtime=600 & echo $!; wait' % moved.device)
        self.wait_until_arrived(moved)
        pid = self.output(moved.node, load).split()[0]
        moved.node.run(['kill', pid])
        self.wait_for('the load has ended', lambda: moved.node.run(
            ['kill', '-0', pid], check=False).returncode)
        self.assertNotIn('error=', self.output(moved.node, load))
        self.assertEqual('far away', self.read_stamp(moved, block=200000))


class SplitBrainTest(HazardTestCase):

    def test_h8_source_that_comes_back_late_is_not_activated(self):
        volume = self.create()
        source = self.home(volume)
        moved = self.attach(volume, self.other(source))
        self.hold_in_mid_move(moved)
        source.service('cinder-volume').kill()
        self.let_go()
        self.wait_for('the volume stands alone',
                      lambda: not self.arrival(moved))
        self.write_stamp(moved, 'newer')
        self.cut_power(source)
        source.start()
        self.wait_until_arrived(moved)
        self.assertRegex(self.log_of(source), 'is not activated: volume %s '
                         'has moved on as generation 2' % volume)
        self.assertEqual('newer', self.read_stamp(moved))


class ForgottenGuestTest(HazardTestCase):

    def test_h8_nobody_gets_what_a_forgotten_guest_has_open(self):
        volume = self.create()
        here = self.home(volume)
        attachment = self.attach(volume, here)
        self.write_stamp(attachment, 'of the first')
        self.background(here, "exec sh -c 'exec 3<>%s; echo $$ >/run/guest; "
                              "exec sleep 1000'" % attachment.device)
        self.addCleanup(here.run, ['rm', '-f', '/run/guest'])
        self.wait_for('the guest has it', lambda: here.run(
            ['test', '-s', '/run/guest'], check=False).returncode == 0)
        # Cinder believes whoever says so.
        self.detach(attachment)
        for node in (here, self.other(here)):
            refused = self.log_of(here).count('VolumeInUse')
            self.assertRaises(exceptions.HttpError, self.user.attach, volume,
                              node)
            self.assertLess(refused, self.log_of(here).count('VolumeInUse'))
            self.assertEqual('available', self.user.show(volume)['status'])
        self.assertIn('Cinder knows of nobody who has it', self.localstor(
            here, 'status', '-f', 'json').stdout)
        here.run(['sh', '-c', 'kill $(cat /run/guest)'])
        again = self.attach(volume, here)
        self.assertEqual('of the first', self.read_stamp(again))


class RemanenceTest(HazardTestCase):

    def test_h22_nothing_of_the_volume_is_left_on_the_source(self):
        volume = self.create()
        source = self.home(volume)
        first = self.attach(volume, source)
        self.write_stamp(first, MARKER, block=1000)
        source.run(['sync', first.device])
        self.assertTrue(self.is_on_disk(source))
        self.detach(first)
        moved = self.attach(volume, self.other(source))
        self.wait_until_arrived(moved)
        self.assertEqual(MARKER, self.read_stamp(moved, block=1000))
        self.assertFalse(self.is_on_disk(source))

    def is_on_disk(self, node):
        return sparse.contains(node.disk('local'), MARKER.encode())

    def test_h11_discarded_volume_does_not_read_what_others_left(self):
        volume = self.create()
        source = self.home(volume)
        destination = self.other(source)
        destination.run(['lvcreate', '-y', '-n', 'tenant', '-L', '1g',
                         'cinder-local'])
        destination.run(
            ['sh', '-c', 'yes "%s" | dd of=/dev/cinder-local/tenant bs=1M '
             'count=1024 iflag=fullblock oflag=direct status=none' % MARKER],
            timeout=base.PATIENCE)
        destination.run(['lvremove', '-y', 'cinder-local/tenant'])
        moved = self.attach(volume, destination)
        destination.run(['blkdiscard', moved.device], check=False)
        self.assertEqual('0', self.count(moved))
        self.wait_until_arrived(moved)
        self.assertEqual('0', self.count(moved))

    def count(self, attachment):
        """How often the marker is read in a sample of the volume."""
        return attachment.node.run(
            ['sh', '-c', 'for at in 0 100 500 900; do dd if=%s bs=1M skip=$at '
             'count=20 iflag=direct status=none; done | grep -ac "%s"'
             % (attachment.device, MARKER)], check=False).stdout.strip()


class GuestOnDiskTest(HazardTestCase):

    def test_h5_h7_volume_with_a_file_system_moves_again_and_again(self):
        volume = self.create()
        label = str(uuid.uuid4())
        attachment = self.attach(volume, self.home(volume))
        attachment.node.run(['mkfs.ext4', '-q', '-U', label,
                             attachment.device])
        for _time in range(MANY // 2):
            self.detach(attachment)
            attachment = self.attach(volume, self.other(attachment.node))
            self.wait_until_arrived(attachment)
            for node in self.nodes:
                self.assertNotIn(label, node.run(
                    ['ls', '/dev/disk/by-uuid'], check=False).stdout)
            attachment.node.run(['e2fsck', '-fn', attachment.device])

    def test_h6_volume_group_of_a_guest_is_not_seen_by_the_nodes(self):
        volume = self.create()
        first = self.attach(volume, self.home(volume))
        # As inside the guest, where this device is all there is
        lvm = ['--config', 'devices { global_filter = ["a|^%s$|", "r|.*|"] '
               'filter = ["a|.*|"] scan_lvs = 1 }' % first.device]
        first.node.run(['pvcreate', *lvm, first.device])
        first.node.run(['vgcreate', *lvm, 'guests-group', first.device])
        self.assert_hidden()
        self.detach(first)
        moved = self.attach(volume, self.other(first.node))
        self.assert_hidden()
        self.wait_until_arrived(moved)
        self.assert_hidden()

    def assert_hidden(self):
        for node in self.nodes:
            self.assertNotIn('guests-group', node.run(['vgs']).stdout)


class AnyTimeTest(HazardTestCase):
    """What users and administrators do in mid-move (H14, H18)."""

    def setUp(self):
        super().setUp()
        self.volume = self.create()
        source = self.home(self.volume)
        first = self.attach(self.volume, source)
        self.write_stamp(first, 'written first')
        self.detach(first)
        self.moved = self.attach(self.volume, self.other(source))
        self.hold_in_mid_move(self.moved)

    def assert_arrives(self):
        self.assertEqual('written first', self.read_stamp(self.moved))
        self.wait_until_arrived(self.moved)
        self.assertEqual('written first', self.read_stamp(self.moved))

    def test_h18_force_detach_and_attach_again(self):
        self.attachments.remove(self.moved)
        self.user.force_detach(self.moved)
        self.moved = self.attach(self.volume, self.moved.node)
        self.assert_arrives()

    def test_h18_reset_state_by_an_administrator(self):
        self.user.reset(self.volume, 'error')
        self.user.reset(self.volume, 'in-use')
        self.assert_arrives()

    def test_h18_shelved_instance_has_an_attachment_and_no_node(self):
        shelved = self.user.reserve(self.volume, self.moved.instance_id)
        self.attachments.append(shelved)
        self.detach(self.moved)
        self.moved = self.user.connect(shelved, self.other(self.moved.node))
        self.attachments.remove(shelved)
        self.attachments.append(self.moved)
        self.assert_arrives()

    def test_h17_session_that_was_left_behind_is_not_taken_for_another(self):
        source, node = self.home(self.volume), self.moved.node
        self.wait_until_arrived(self.moved)
        self.detach(self.moved)
        source = self.other(node)
        iqn = 'iqn.2010-10.org.openstack:localstor-%s' % uuid.uuid4()
        target = ['tgtadm', '--lld', 'iscsi', '--mode']
        source.run(['truncate', '-s', '2G', '/run/stale'])
        source.run([*target, 'target', '--op', 'new', '--tid', '77',
                    '--targetname', iqn])
        source.run([*target, 'logicalunit', '--op', 'new', '--tid', '77',
                    '--lun', '1', '--backing-store', '/run/stale'])
        source.run([*target, 'target', '--op', 'bind', '--tid', '77',
                    '--initiator-address', 'ALL'])
        record = ['iscsiadm', '-m', 'node', '-T', iqn, '-p',
                  source.address + ':3260']
        node.run([*record, '-o', 'new'])
        node.run([*record, '--login'])
        try:
            self.assertIn(iqn, self.localstor(node, 'status').stdout)
            back = self.attach(self.volume, source)
            self.wait_until_arrived(back)
            self.detach(back)
            self.moved = self.attach(self.volume, node)
            self.assertEqual('written first', self.read_stamp(self.moved))
        finally:
            node.run([*record, '--logout'])
            node.run([*record, '-o', 'delete'])
            source.run([*target, 'target', '--op', 'delete', '--force',
                        '--tid', '77'])
        self.assert_arrives()


class ManyTest(HazardTestCase):
    """H25"""

    volume_type = 'thin'

    def in_parallel(self, function, items):
        with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(function, items))

    def detach_all(self, volume):
        for attachment in self.user.attachments(volume):
            self.user.remove_attachment(attachment)

    def as_another(self):
        """A user with sessions of his own."""
        return users.User(clouds.Cloud(self.cloud.name))

    def test_h25_many_volumes_move_at_once(self):
        volumes = [self.create(volume_type=self.volume_type)
                   for _number in range(MANY)]

        def move(volume):
            attachment = self.as_another().attach(
                volume, self.other(self.home(volume)))
            self.attachments.append(attachment)
            self.hold_in_mid_move(attachment)
            return attachment
        attachments = self.in_parallel(move, volumes)
        if base.DATA_PATHS[1] == 'hydrator':
            self.assertNotIn(None, map(self.arrival, attachments))
        for attachment in attachments:
            self.wait_until_arrived(attachment, timeout=MANY * 60)

    def test_h25_records_of_other_targets_come_and_go(self):
        """iscsiadm reads all of them, and stumbles over one that is gone."""
        volume = self.create()
        for node in self.nodes:
            node.run(['rm', '-f', '/run/gone'])
            node.run(['sh', '-c', 'python3 -c "$0" </dev/null >/dev/null '
                      '2>&1 &', COME_AND_GO])
            self.addCleanup(node.run, ['touch', '/run/gone'])
        for _time in range(JOURNEYS):
            attachment = self.attach(volume, self.other(self.home(volume)))
            self.wait_until_arrived(attachment)
            self.detach(attachment)

    def test_h25_of_two_nodes_that_ask_at_once_exactly_one_wins(self):
        volume = self.create()
        home = self.home(volume)
        wanted = [node for node in self.nodes if node.name != home.name]
        instance = str(uuid.uuid4())
        reserved = self.user.reserve(volume, instance)
        # Cinder keeps the row of an attachment that failed.
        self.addCleanup(self.detach_all, volume)

        def ask(node):
            try:
                return self.as_another().attach_second(reserved, node)
            except exceptions.HttpError as error:
                return str(error)
        answers = self.in_parallel(ask, wanted)
        won = [found for found in answers
               if isinstance(found, users.Attachment)]
        self.assertEqual(1, len(won), answers)
        self.assertTrue(re.search('on its way|lives on', self.log_of(home)))
        self.wait_until_arrived(won[0])
        self.assertEqual(won[0].node.name, self.home(volume).name)

    def test_h25_storm_of_attachments_leaves_the_volume_whole(self):
        volume = self.create()
        first = self.attach(volume, self.home(volume))
        self.write(first)
        content = self.checksum(first)
        self.detach(first)

        def come_and_go(number):
            user, came = self.as_another(), 0
            end = time.monotonic() + STORM
            while time.monotonic() < end:
                node = self.nodes[(number + came) % len(self.nodes)]
                try:
                    attachment = user.attach(volume, node)
                except exceptions.HttpError as error:
                    # Cinder's text for a call that took too long
                    self.assertNotIn('Unable to update the attachment.',
                                     str(error))
                    time.sleep(0.5)
                    continue
                user.detach(attachment)
                came += 1
            return came
        came = self.in_parallel(come_and_go, range(AT_ONCE))
        self.assertGreater(sum(came), 2, came)
        last = self.attach(volume, self.other(self.home(volume)))
        self.assertEqual(content, self.checksum(last))
        self.wait_until_arrived(last)
        self.assertEqual(content, self.checksum(last))
