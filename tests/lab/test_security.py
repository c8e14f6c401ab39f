# SPDX-License-Identifier: Apache-2.0

import re

from oslo_utils import netutils

from tests.lab import base


UUID = 'deadbeef-0000-4000-8000-000000000001'


class SecurityTestCase(base.LabTestCase):

    volume_type = 'local'

    def setUp(self):
        super().setUp()
        self.volume = self.create(volume_type=self.volume_type)
        self.source = self.home(self.volume)
        self.destination = self.other(self.source)

    def begin(self):
        self.moved = self.attach(self.volume, self.destination)
        self.hold_in_mid_move(self.moved)


class SecurityTest(SecurityTestCase):
    """What a move opens is open to the destination only, and not for long."""

    def begin_over_iscsi(self):
        if base.TRANSPORT != 'iscsi':
            self.skipTest('test_nvme has the same over NVMe/TCP')
        self.begin()
        self.iqn = self.sessions(self.destination)[0]

    def record(self):
        """What open-iscsi on the destination knows of the source."""
        text = self.destination.run(
            ['iscsiadm', '-m', 'node', '-T', self.iqn, '-S']).stdout
        return dict(re.findall(r'^(\S+) = (\S+)$', text, re.MULTILINE))

    def log_in(self, node, username, password):
        """Try to log in to the source as somebody else; whether it works."""
        record = self.record()
        address = netutils.escape_ipv6(record['node.conn[0].address'])
        target = ['iscsiadm', '-m', 'node', '-T', self.iqn, '-p', '%s:%s' % (
            address, record['node.conn[0].port'])]
        node.run([*target, '-o', 'new'])
        try:
            for name, value in (('authmethod', 'CHAP'),
                                ('username', username),
                                ('password', password)):
                node.run([*target, '-o', 'update', '-n',
                          'node.session.auth.' + name, '-v', value])
            node.run([*target, '-o', 'update', '-n',
                      'node.session.initial_login_retry_max', '-v', '1'])
            done = node.run([*target, '--login'], check=False, timeout=60)
            if not done.returncode:
                node.run([*target, '--logout'])
            return not done.returncode
        finally:
            node.run([*target, '-o', 'delete'])

    def test_nobody_else_gets_at_the_source(self):
        self.begin_over_iscsi()
        record = self.record()
        username = record['node.session.auth.username']
        password = record['node.session.auth.password']
        self.assertFalse(self.log_in(self.source, username, password))
        self.wait_until_arrived(self.moved)

    def test_source_can_not_be_written(self):
        self.begin_over_iscsi()
        disk = self.destination.run(
            ['sh', '-c', 'cat /sys/block/sd*/ro']).stdout.split()
        self.assertEqual(['1'], disk)
        handle = [name for name in self.lines(self.source, 'dmsetup', 'ls')
                  if name.endswith('-handle')][0]
        written = self.source.run(
            ['dd', 'if=/dev/zero', 'of=/dev/mapper/' + handle, 'bs=4096',
             'count=1', 'oflag=direct'], check=False)
        self.assertNotEqual(0, written.returncode)
        self.wait_until_arrived(self.moved)

    def test_secret_is_in_no_log(self):
        self.begin_over_iscsi()
        password = self.record()['node.session.auth.password']
        self.assertGreaterEqual(len(password), 12)
        self.wait_until_arrived(self.moved)
        for node in self.nodes:
            log = node.service('cinder-volume').log.parent
            for path in log.iterdir():
                self.assertNotIn(password,
                                 path.read_text(errors='replace'), path)


class ThinLioSecurityTest(SecurityTest):
    """The same on thin LVs and LIO."""

    volume_type = 'thin'


class FileSystemTest(SecurityTestCase):
    """No node sees what a guest has made of its volume."""

    def test_guest_file_system_is_not_seen_by_the_nodes(self):
        first = self.attach(self.volume, self.source)
        self.source.run(['mkfs.ext4', '-q', '-U', UUID, first.device])
        self.assert_hidden()
        self.detach(first)
        self.begin()
        self.assert_hidden()
        self.wait_until_arrived(self.moved)
        self.assert_hidden()
        self.destination.kill()
        self.destination.start()
        self.assert_hidden()

    def test_file_system_that_a_node_knew_before_is_hidden_at_start(self):
        seen = 'cinder-local/volume-seen'
        try:
            self.source.run(['sh', '-c',
                             'rm /run/udev/rules.d/12-localstor*'])
            self.source.run(['udevadm', 'control', '--reload'])
            self.source.run(['lvcreate', '--yes', '--size', '8M',
                             '--name', seen])
            self.addCleanup(self.source.run, ['lvremove', '--yes', seen])
            self.source.run(['mkfs.ext4', '-q', '-U', UUID, '/dev/' + seen])
            # Who watches the disk may have begun too late.
            self.source.run(['udevadm', 'trigger', '--action', 'change',
                             '/dev/' + seen])
            self.assertIn(UUID, self.links(self.source))
        finally:
            self.source.service('cinder-volume').restart()
        self.wait_for('the links are gone',
                      lambda: UUID not in self.links(self.source))

    def assert_hidden(self):
        for node in self.nodes:
            self.assertNotIn(UUID, self.links(node), node.name)

    def links(self, node):
        node.run(['udevadm', 'settle'])
        return node.run(['ls', '/dev/disk/by-uuid'], check=False).stdout


class ThinFileSystemTest(FileSystemTest):

    volume_type = 'thin'


class TargetDaemonTest(base.LabTestCase):

    def test_restart_of_tgtd_in_mid_move(self):
        volume = self.create(size=2)
        first = self.attach(volume, self.home(volume))
        self.write(first, size=20)
        content = self.checksum(first, size=20)
        self.detach(first)
        moved = self.attach(volume, self.other(first.node))
        self.hold_in_mid_move(moved)
        first.node.service('tgtd').kill()
        first.node.service('tgtd').start()
        self.assertEqual(content, self.checksum(moved, size=20))
        self.wait_until_arrived(moved)
        self.assertEqual(content, self.checksum(moved, size=20))
