# SPDX-License-Identifier: Apache-2.0
"""What the lab tests stand on: one virtual cloud for all of them.

The lab is brought up by the first test and left running; its name is in
LOCALSTOR_LAB.  Its disks lose what was not flushed when their power is cut.
After each test nothing may be left of it on any node.
"""

import contextlib
import dataclasses
import functools
import os
import pathlib
import sys
import time

import fixtures
import testtools
from testtools import content

from lab import arrival
from lab import chaos
from lab import cloud as clouds
from lab import configuration
from lab import guest as guests
from lab import journal as journals
from lab import ledger as ledgers
from lab import leftovers
from lab import sizes
from lab import user as users

# Seconds; helpers that compare everything read all of it twice.
PATIENCE = 360 if os.environ.get('LOCALSTOR_VERIFY') == 'full' else 180
# Of what wait_briefly() is told
REPLACEMENT_TIMEOUT = 5
ISCSID_CONF = '/etc/iscsi/iscsid.conf'
# Bytes per second of a move that is not to end yet
SLOW = 512 << 10
# Of the backends `local` and `thin`.  The soak has them the other way round.
DATA_PATHS = os.environ.get('LOCALSTOR_DATA_PATHS',
                            'hydrator,clone').split(',')
# Debian's, where helpers have NBD devices; "own" has ublk
KERNEL = os.environ.get('LOCALSTOR_KERNEL', 'stock')
# By which sources are read; the other one, nvme-tcp, needs the own kernel.
TRANSPORT = os.environ.get('LOCALSTOR_TRANSPORT', 'iscsi')
# Bytes of a logical block of each disk, as disks have them (4Kn)
BLOCK_SIZE = int(os.environ.get('LOCALSTOR_BLOCK_SIZE', '512'))
# Of a node; each helper locks 35 MiB.
MEMORY = os.environ.get('LOCALSTOR_MEMORY')
# A move spends most of its time with waiting, and with wiping what was copied.
QUICK = {'localstor_monitor_interval': 2, 'volume_clear_size': 64,
         'localstor_transport': TRANSPORT}
OPTIONS = {backend: {'localstor_data_path': path} | QUICK
           for backend, path in zip(configuration.BACKENDS, DATA_PATHS)}
# dm-clone compares nothing.
VERIFY = {'clone': 'off',
          'hydrator': os.environ.get('LOCALSTOR_VERIFY', 'sample')}


@functools.cache
def cloud():
    """The lab of all tests, up."""
    found = clouds.Cloud(os.environ.get('LOCALSTOR_LAB', 'test'))
    found.up(nodes=3, disks='volatile', kernel=KERNEL, memory=MEMORY,
             block_sizes=dict.fromkeys(('node1', 'node2', 'node3'),
                                       BLOCK_SIZE),
             environment=chaos.ENVIRONMENT, options={
                 backend: options | {'localstor_verify': VERIFY[
                     options['localstor_data_path']]}
                 for backend, options in OPTIONS.items()})
    return found


@functools.cache
def furnished_cloud():
    """A lab of two nodes, up, that has Barbican, Cinder's own LVM driver, in
    both nodes Glance with images in volumes, and in the second cinder-backup.

    Cinder chooses any cinder-backup that it has heard of since its scheduler
    started.
    """
    found = clouds.Cloud(os.environ.get('LOCALSTOR_FURNISHED_LAB',
                                        'furnished'))
    found.up(nodes=2, also=['backup', 'image_store', 'keys', 'lvm'], options={
        # Seconds until the scheduler knows of what has changed
        'DEFAULT': {'backend_stats_polling_interval': 5}} | OPTIONS)
    found.nodes[0].service('cinder-backup').stop()
    found.service('cinder-scheduler').restart()
    found.wait_for_backends(found.nodes)
    return found


class LabTestCase(testtools.TestCase):
    """A test with a cloud of three nodes and a user."""

    find_cloud = staticmethod(cloud)

    def setUp(self):
        super().setUp()
        self.cloud = self.find_cloud()
        self.user = users.User(self.cloud)
        self.nodes = self.cloud.nodes
        self.volumes = []
        self.attachments = []
        self.held = []
        before = self.everything()
        self.addCleanup(self.assert_nothing_left, before)
        self.addCleanup(self.clean_up)

    # What is there

    def everything(self):
        """Names of all that a move or a volume can leave, node by node."""
        return leftovers.everything(self.cloud)

    def lines(self, node, *argv):
        out = node.run(list(argv), check=False).stdout
        return [line.split()[0] for line in out.splitlines()
                if line.strip() and 'No devices' not in line]

    def sessions(self, node):
        out = node.run(['sh', '-c', 'cat /sys/class/iscsi_session/*/targetname'
                        ' /sys/class/nvme/*/subsysnqn 2>/dev/null'],
                       check=False).stdout
        return out.split()

    def localstor(self, node, *arguments, under=()):
        """What ``cinder-localstor`` says on a node, with its exit status.

        :param under: command that runs it
        """
        return node.run(
            [*under, os.path.join(os.path.dirname(sys.executable),
                                  'cinder-localstor'),
             '--config-file', '/etc/cinder/cinder.conf', *arguments],
            check=False, timeout=PATIENCE, environment={
                'COLUMNS': '200',
                'PYTHONPATH': str(self.cloud.layout.repository)})

    def log_of(self, node):
        """What cinder-volume has logged on a node."""
        return node.service('cinder-volume').log.read_text(errors='replace')

    def restart_cinder_volume(self, node):
        """Restart it; the scheduler would choose the node afterwards."""
        node.service('cinder-volume').restart()
        self.cloud.wait_for_backends([node])

    def assert_nothing_left(self, before):
        end = time.monotonic() + PATIENCE
        left = leftovers.difference(before, self.everything())
        while left and time.monotonic() < end:
            time.sleep(1)
            left = leftovers.difference(before, self.everything())
        self.assertEqual({}, left)

    def clean_up(self):
        self.let_go()
        for attachment in self.attachments:
            self.user.detach(attachment)
        for volume in self.volumes:
            self.user.delete_volume(volume)

    # What a user does

    def create(self, size=1, volume_type='local', node=None):
        volume = self.user.create_volume(size, volume_type,
                                         node.name if node else None)
        self.volumes.append(volume)
        return volume

    def attach(self, volume, node, **kwargs):
        attachment = self.user.attach(volume, node, **kwargs)
        self.attachments.append(attachment)
        return attachment

    def detach(self, attachment):
        self.attachments.remove(attachment)
        self.user.detach(attachment)

    def delete(self, volume):
        self.volumes.remove(volume)
        self.user.delete_volume(volume)

    def write(self, attachment, offset=0, size=16):
        """Write `size` MiB of random data at `offset` MiB, durably."""
        attachment.node.run(
            ['dd', 'if=/dev/urandom', 'of=' + attachment.device, 'bs=1M',
             'count=%d' % size, 'seek=%d' % offset, 'oflag=direct',
             'conv=fsync,notrunc'], timeout=PATIENCE)

    def checksum(self, attachment, offset=0, size=16):
        """Checksum of `size` MiB at `offset` MiB, read past the cache."""
        return attachment.node.run(
            ['sh', '-c', 'dd if=%s bs=1M count=%d skip=%d iflag=direct '
             'status=none | sha256sum' % (attachment.device, size, offset)],
            timeout=PATIENCE).stdout

    @contextlib.contextmanager
    def logged_in(self, attachment):
        """An attachment with an iSCSI connection, and its disk as a device."""
        node, connection = attachment.node, attachment.connection
        target = ['iscsiadm', '-m', 'node', '-T', connection['target_iqn'],
                  '-p', connection['target_portal']]
        node.run([*target, '-o', 'new'])
        for name, value in (('authmethod', connection['auth_method']),
                            ('username', connection['auth_username']),
                            ('password', connection['auth_password'])):
            node.run([*target, '-o', 'update', '-n',
                      'node.session.auth.' + name, '-v', value])
        node.run([*target, '--login'])
        try:
            node.run(['udevadm', 'settle'])
            disk, = node.run(['sh', '-c', 'ls $(dirname $(grep -l %s '
                              '/sys/class/iscsi_session/*/targetname))/device/'
                              'target*/*/block | grep sd'
                              % connection['target_iqn']]).stdout.split()
            yield dataclasses.replace(attachment, connection={
                **connection, 'device_path': '/dev/' + disk})
        finally:
            node.run([*target, '--logout'])
            node.run([*target, '-o', 'delete'])

    # What an administrator does

    def disable(self, host):
        """Let a ``host@backend`` get nothing new until the test ends."""
        self.user.disable_service(host)
        # Cinder 29.0.0 says that it enables one, and does not.
        self.addCleanup(leftovers.select, self.cloud, 'UPDATE services '
                        "SET disabled = 0 WHERE host = '%s'" % host)

    # Disasters

    def cut_power(self, node, lose='random'):
        """Cut a node's power; its disks lose what was not flushed.

        What decided over it is in the test's details.
        """
        cut = node.kill(lose=lose)
        self.addDetail('power cut of %s' % node.name,
                       content.text_content(str(cut)))

    def wait_briefly(self, node):
        """Let iSCSI on a node soon give a source up that is away."""
        node.run(['sed', '-i.before', 's/^node.session.timeo.'
                  'replacement_timeout = .*/node.session.timeo.'
                  'replacement_timeout = %d/' % REPLACEMENT_TIMEOUT,
                  ISCSID_CONF])
        self.addCleanup(node.run, ['mv', ISCSID_CONF + '.before',
                                   ISCSID_CONF])

    def fill(self, node, group, leave):
        """Leave only so many MiB of a volume group on a node."""
        free = int(node.run(
            ['vgs', '--noheadings', '--units', 'm', '--nosuffix', '-o',
             'vg_free', group]).stdout.split('.')[0])
        node.run(['lvcreate', '-y', '-n', 'filling', '-L',
                  '%dm' % (free - leave), group])
        self.addCleanup(node.run, ['lvremove', '-y', group + '/filling'])

    # Moves

    def copy_name(self, attachment):
        return os.path.basename(attachment.device).removesuffix('-handle')

    def arrival(self, attachment):
        """How far the volume is; None when it does not arrive."""
        return arrival.look(attachment.node, attachment.device)

    def hold_in_mid_move(self, attachment):
        """Wait until hydration runs, and let it hardly go on."""
        arrival.wait_until_hydrating(attachment.node, attachment.device,
                                     PATIENCE)
        self.held.append(attachment)
        arrival.throttle(attachment.node, attachment.device, SLOW)

    def let_go(self):
        """Let go on what was held."""
        while self.held:
            attachment = self.held.pop()
            arrival.throttle(attachment.node, attachment.device)

    def wait_until_arrived(self, attachment, timeout=PATIENCE):
        """Wait until a volume's move has ended in every respect."""
        self.let_go()
        end = time.monotonic() + timeout
        name = self.copy_name(attachment).removeprefix('volume-')
        while time.monotonic() < end:
            if not self.arrival(attachment) and not any(
                    row['id'] == name for row in self.user.volumes()):
                return
            time.sleep(0.5)
        self.fail('%s has not arrived: %s' % (attachment.device,
                                              self.arrival(attachment)))

    def wait_for(self, description, condition, timeout=PATIENCE):
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            if condition():
                return
            time.sleep(0.5)
        self.fail('Waited in vain until ' + description)

    def wait_for_snapshot(self, snapshot, status):
        self.wait_for('snapshot %s is %s' % (snapshot, status), lambda: (
            self.user.snapshots().get(snapshot) == status))

    def wait_for_handle(self, attachment):
        """Wait until the device is there again after a power cut."""
        self.wait_for('%s comes back' % attachment.device,
                      lambda: attachment.node.run(
                          ['test', '-b', attachment.device],
                          check=False).returncode == 0)

    def other(self, node):
        return next(found for found in self.nodes if found is not node
                    and found.name != node.name)

    def home(self, volume):
        """The node that a volume lives on."""
        return self.cloud.node(self.user.host(volume))


class GuestTestCase(LabTestCase):
    """A volume, attached on its node, for guests that write stamps."""

    volume_type = 'local'
    # GiB
    size = 1

    def setUp(self):
        super().setUp()
        self.journal = journals.Journal(pathlib.Path(
            self.useFixture(fixtures.TempDir()).path, 'log'))
        self.volume = self.create(self.size, self.volume_type)
        self.ledger = ledgers.Ledger(self.volume, self.size * sizes.GIB)
        self.source = self.home(self.volume)
        self.first = self.attach(self.volume, self.source)
        # The ledger begins with zeros, a thick volume with what the disk held.
        self.source.run(['blkdiscard', '--zeroout', self.first.device],
                        timeout=PATIENCE)

    def live(self, attachment):
        """A guest that has read all that should be there."""
        guest = guests.Guest(self.cloud, attachment.node, attachment.device,
                             self.volume, self.ledger, self.journal, rate=30)
        self.addCleanup(guest.stop, PATIENCE)
        self.assertTrue(guest.verified.wait(PATIENCE), self.journal.failures)
        return guest

    def move_on(self):
        """Let the volume arrive elsewhere, held in mid-move, while its guest
        works.
        """
        self.assertTrue(self.live(self.first).stop(PATIENCE))
        self.detach(self.first)
        self.moved = self.attach(self.volume, self.other(self.source))
        self.hold_in_mid_move(self.moved)
        self.guest = self.live(self.moved)

    def cut_off_source(self):
        """Let the source be away for longer than iSCSI waits on the node that
        the volume moves to, see :meth:`wait_briefly`.
        """
        self.cloud.cut(self.source.name, self.moved.node.name)
        self.addCleanup(self.cloud.heal)
        time.sleep(REPLACEMENT_TIMEOUT + 15)
        self.cloud.heal()

    def assert_goes_on(self):
        """Its guest writes again, all arrives, and every stamp is there."""
        before = self.ledger.acknowledged
        self.wait_for('the guest writes again',
                      lambda: self.ledger.acknowledged > before + 20)
        self.wait_until_arrived(self.moved)
        self.assertTrue(self.guest.stop(PATIENCE))
        self.live(self.moved).stop(PATIENCE)
        self.assertEqual([], self.journal.failures)


class WrittenTestCase(LabTestCase):
    """A volume that was written on its node, and that nobody has."""

    volume_type = 'local'

    def setUp(self):
        super().setUp()
        self.volume = self.create(volume_type=self.volume_type)
        self.source = self.home(self.volume)
        attachment = self.attach(self.volume, self.source)
        self.write(attachment)
        self.content = self.checksum(attachment)
        self.detach(attachment)


class MovedTestCase(LabTestCase):
    """A volume with content that has just been attached elsewhere."""

    volume_type = 'local'

    def setUp(self):
        super().setUp()
        self.volume = self.create(volume_type=self.volume_type)
        first = self.attach(self.volume, self.home(self.volume))
        self.write(first, size=20)
        self.content = self.checksum(first, size=20)
        self.detach(first)
        self.source = first.node
        self.moved = self.attach(self.volume, self.other(first.node))
        self.destination = self.moved.node
        self.write(self.moved, offset=1000, size=10)
        self.added = self.checksum(self.moved, offset=1000, size=10)

    def assert_whole(self):
        self.assertEqual(self.content, self.checksum(self.moved, size=20))
        self.assertEqual(self.added,
                         self.checksum(self.moved, offset=1000, size=10))

    def assert_arrives(self):
        self.assert_whole()
        self.wait_until_arrived(self.moved)
        self.assert_whole()
