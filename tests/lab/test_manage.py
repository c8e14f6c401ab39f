# SPDX-License-Identifier: Apache-2.0
"""Logical volumes that were there before, and stay afterwards, with real LVM.
"""

from tests.lab import base

NAME = 'of-an-operator'
SHOT = 'taken-by-hand'
# An extent more than Cinder could have
MEBIBYTES = 1028


class ManageTest(base.LabTestCase):
    """In a group of thick volumes."""

    volume_type = 'local'
    group = 'cinder-local'

    def setUp(self):
        super().setUp()
        self.node = self.nodes[0]
        self.unmanaged = []
        self.make()
        self.addCleanup(self.remove)
        self.content = self.fill('/dev/%s/%s' % (self.group, NAME))

    def lvm(self, *argv, check=True):
        return self.node.run(list(argv), check=check,
                             timeout=base.PATIENCE).stdout

    def make(self):
        self.lvm('lvcreate', '--yes', '--size', '%dm' % MEBIBYTES, '--name',
                 NAME, self.group)

    def take(self, name):
        self.lvm('lvcreate', '--yes', '--snapshot', '--extents',
                 '100%ORIGIN', '--name', SHOT, '%s/%s' % (self.group, name))

    def remove(self):
        """All that is the operator's; what is Cinder's has gone before."""
        for name in self.names():
            if name in (NAME, SHOT, *self.unmanaged):
                self.lvm('lvremove', '--yes', '%s/%s' % (self.group, name),
                         check=False)

    def names(self):
        return set(self.lvm('lvs', '--noheadings', '--options', 'lv_name',
                            self.group).split())

    def tags(self, name):
        return self.lvm('lvs', '--noheadings', '--options', 'lv_tags',
                        '%s/%s' % (self.group, name)).strip()

    def fill(self, device):
        self.node.run(['dd', 'if=/dev/urandom', 'of=' + device, 'bs=1M',
                       'count=16', 'oflag=direct', 'conv=fsync,notrunc'],
                      timeout=base.PATIENCE)
        return self.read(device)

    def read(self, device):
        return self.node.run(
            ['sh', '-c', 'dd if=%s bs=1M count=16 iflag=direct status=none '
             '| sha256sum' % device], timeout=base.PATIENCE).stdout

    def manage(self, name=NAME):
        volume = self.user.manage(self.node, self.volume_type, name)
        self.volumes.append(volume)
        self.wait_for('it is managed or refused', lambda: (
            # So the API shows ``managing`` and ``error_managing``.
            self.user.status(volume) != 'creating'))
        return volume

    def unmanage(self, volume):
        self.user.unmanage(volume)
        self.wait_for('it is no volume any more', lambda: (
            self.user.find(volume) is None))
        self.volumes.remove(volume)
        self.unmanaged.append('volume-' + volume)
        return self.unmanaged[-1]

    def test_it_is_managed_moves_and_is_let_go(self):
        volume = self.manage()
        shown = self.user.show(volume)
        self.assertEqual(('available', 2), (shown['status'], shown['size']))
        self.cut_power(self.node)
        self.node.start()
        self.cloud.wait_for_backends([self.node])
        attachment = self.attach(volume, self.node)
        self.assertEqual(self.content, self.checksum(attachment))
        # Its last MiB is there.
        self.write(attachment, offset=2 * 1024 - 16)
        self.detach(attachment)
        there = self.other(self.node)
        attachment = self.attach(volume, there)
        self.assertEqual(self.content, self.checksum(attachment))
        self.wait_until_arrived(attachment)
        self.detach(attachment)
        self.node = there
        name = self.unmanage(volume)
        self.assertEqual('', self.tags(name))
        self.assertEqual(self.content,
                         self.read('/dev/%s/%s' % (self.group, name)))
        self.assertEqual(0, self.localstor(there, 'status').returncode)

    def test_it_is_refused_while_it_is_open_and_given_back(self):
        self.node.run(['sh', '-c', 'sleep 600 </dev/%s/%s >/dev/null 2>&1 &'
                       % (self.group, NAME)])
        self.addCleanup(self.node.run, ['pkill', '-f', 'sleep 600'],
                        check=False)
        volume = self.manage()
        self.assertEqual('error', self.user.status(volume))
        self.assertIn('lsof /dev/%s/%s' % (self.group, NAME),
                      self.log_of(self.node))
        self.node.run(['pkill', '-f', 'sleep 600'])
        self.delete(volume)
        self.assertIn(NAME, self.names())
        self.assertEqual('', self.tags(NAME))
        volume = self.manage()
        self.assertEqual('available', self.user.status(volume))
        self.unmanage(volume)

    def test_snapshot_that_was_taken_by_hand(self):
        volume = self.manage()
        self.take('volume-' + volume)
        attachment = self.attach(volume, self.node)
        self.write(attachment)
        snapshot = self.user.manage_snapshot(volume, SHOT)
        self.wait_for('it is managed', lambda: (
            self.user.snapshots().get(snapshot) == 'available'))
        self.assertEqual(self.content, self.read(
            '/dev/%s/_snapshot-%s' % (self.group, snapshot)))
        self.assertEqual(0, self.localstor(self.node, 'status').returncode)
        self.user.unmanage_snapshot(snapshot)
        self.wait_for('it is no snapshot any more', lambda: (
            snapshot not in self.user.snapshots()))
        name = '_snapshot-' + snapshot
        self.unmanaged.append(name)
        self.assertEqual('', self.tags(name))
        self.assertEqual(self.content,
                         self.read('/dev/%s/%s' % (self.group, name)))
        self.remove()


class ThinManageTest(ManageTest):
    """In a thin pool."""

    volume_type = 'thin'
    group = 'cinder-thin'

    def make(self):
        self.lvm('lvcreate', '--yes', '--virtualsize', '%dm' % MEBIBYTES,
                 '--thinpool', self.group + '-pool', '--name', NAME,
                 self.group)

    def take(self, name):
        self.lvm('lvcreate', '--yes', '--snapshot', '--setactivationskip',
                 'n', '--name', SHOT, '%s/%s' % (self.group, name))
