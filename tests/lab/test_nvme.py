# SPDX-License-Identifier: Apache-2.0
"""Sources that are read over NVMe/TCP, with real kernels.

That volumes move so is shown by all other tests, which run over what
LOCALSTOR_TRANSPORT says.
"""

import uuid

from cinder_localstor.node import nvme
from tests.lab import base

SUBSYSTEMS = '/sys/kernel/config/nvmet/subsystems'
# Another disk under a name like a move's, for any host
STALE = '''set -e
cd /sys/kernel/config/nvmet
truncate -s 2G /run/stale
mkdir subsystems/{name}
echo 1 > subsystems/{name}/attr_allow_any_host
mkdir subsystems/{name}/namespaces/1
printf %s /run/stale > subsystems/{name}/namespaces/1/device_path
echo 1 > subsystems/{name}/namespaces/1/enable
mkdir ports/99
echo tcp > ports/99/addr_trtype
echo ipv4 > ports/99/addr_adrfam
echo {address} > ports/99/addr_traddr
echo 4499 > ports/99/addr_trsvcid
ln -s $PWD/subsystems/{name} ports/99/subsystems/
'''
STALE_GONE = '''cd /sys/kernel/config/nvmet
rm ports/99/subsystems/{name}
rmdir ports/99 subsystems/{name}/namespaces/1 subsystems/{name}
rm /run/stale
'''
FOREIGN = 'nqn.2014-08.org.nvmexpress:somebody'
# What /dev/nvme-fabrics is told
OPTIONS = ('transport=tcp,traddr={address},trsvcid={port},nqn={name},'
           'hostnqn={host},hostid={id}')
STRANGER = 'nqn.2014-08.org.nvmexpress:uuid:{id}'


class NvmeTest(base.LabTestCase):
    """On thick LVs."""

    volume_type = 'local'

    def setUp(self):
        super().setUp()
        if base.TRANSPORT != 'nvme-tcp':
            self.skipTest('LOCALSTOR_TRANSPORT is not nvme-tcp')
        self.volume = self.create(volume_type=self.volume_type)
        self.source = self.home(self.volume)
        self.destination = self.other(self.source)

    def begin(self):
        first = self.attach(self.volume, self.source)
        self.write(first, size=20)
        self.content = self.checksum(first, size=20)
        self.detach(first)
        self.moved = self.attach(self.volume, self.destination)
        self.hold_in_mid_move(self.moved)
        self.name, = self.sessions(self.destination)

    def sysfs(self, attribute):
        return self.destination.run(
            ['sh', '-c', 'cat /sys/class/nvme/*/' + attribute]).stdout.strip()

    def disk(self):
        return '/dev/' + self.destination.run(
            ['sh', '-c', 'ls /sys/block | grep -x "nvme[0-9]*n[0-9]*"']
        ).stdout.strip()

    def connects(self, node, host, secret=None):
        """Whether a node can connect as some host."""
        options = OPTIONS.format(
            address=self.source.address, port=4420, name=self.name, host=host,
            # The kernel wants one host's name for each.
            id=(host.removeprefix(nvme.HOST_NAME)
                if host.startswith(nvme.HOST_NAME) else uuid.uuid4()))
        if secret:
            options += ',dhchap_secret=' + secret
        connected = node.run(
            ['sh', '-c', f"printf %s '{options}' > /dev/nvme-fabrics"],
            check=False, timeout=90).returncode == 0
        for path in node.run(['sh', '-c', 'ls -d /sys/class/nvme/nvme*'],
                             check=False).stdout.split():
            node.run(['sh', '-c', f'echo 1 > {path}/delete_controller'])
        return connected

    def test_nobody_else_gets_at_the_source(self):
        self.begin()
        self.assertTrue(self.name.startswith(nvme.NAME), self.name)
        host, secret = self.sysfs('hostnqn'), self.sysfs('dhchap_secret')
        third, = (node for node in self.nodes if node.name not in
                  (self.source.name, self.destination.name))
        stranger = STRANGER.format(id=uuid.uuid4())
        self.assertFalse(self.connects(third, stranger))
        self.assertFalse(self.connects(third, stranger, secret))
        self.assertFalse(self.connects(third, host))
        self.assertFalse(self.connects(third, host, nvme.make_secret()))
        # It is the name and the secret that decide, and nothing else failed.
        self.assertTrue(self.connects(third, host, secret))
        self.wait_until_arrived(self.moved)

    def test_source_can_not_be_written(self):
        self.begin()
        self.assert_not_written()
        self.wait_until_arrived(self.moved)
        self.assertEqual(self.content, self.checksum(self.moved, size=20))

    def assert_not_written(self):
        # It is the writing that fails, and not that there is a disk.
        self.destination.run(['dd', 'if=' + self.disk(), 'of=/dev/null',
                              'bs=4096', 'count=1', 'iflag=direct'])
        for command in (['dd', 'if=/dev/urandom', 'of=' + self.disk(),
                         'bs=4096', 'count=1', 'oflag=direct'],
                        ['blkdiscard', '--length', '1M', self.disk()],
                        ['blkdiscard', '--zeroout', '--length', '1M',
                         self.disk()]):
            self.assertNotEqual(0, self.destination.run(
                command, check=False).returncode, command)

    def test_secret_is_in_no_log(self):
        self.begin()
        secret = self.sysfs('dhchap_secret')
        self.assertTrue(secret.startswith('DHHC-1:'), secret)
        self.wait_until_arrived(self.moved)
        for node in self.nodes:
            log = node.service('cinder-volume').log.parent
            for path in log.iterdir():
                self.assertNotIn(secret, path.read_text(errors='replace'),
                                 path)

    def test_source_comes_back_from_a_power_cut(self):
        """It is read-only by then, and nvmet opens no such device."""
        self.begin()
        self.source.kill()
        self.source.start()
        self.assertEqual(self.content, self.checksum(self.moved, size=20))
        self.assert_not_written()
        self.wait_until_arrived(self.moved)
        self.assertEqual(self.content, self.checksum(self.moved, size=20))

    def test_session_that_was_left_behind_is_not_taken_for_another(self):
        third, = (node for node in self.nodes if node.name not in
                  (self.source.name, self.destination.name))
        stale = nvme.NAME + str(uuid.uuid4())
        words = {'name': stale, 'address': third.address}
        third.run(['sh', '-c', STALE.format(**words)])
        self.addCleanup(third.run, ['sh', '-c', STALE_GONE.format(**words)])
        number = uuid.uuid4()
        options = OPTIONS.format(
            **words, port=4499, host=STRANGER.format(id=number), id=number)
        self.destination.run(
            ['sh', '-c', f"printf %s '{options}' > /dev/nvme-fabrics"])
        self.addCleanup(self.destination.run, [
            'sh', '-c', 'for path in /sys/class/nvme/nvme*; do'
            ' echo 1 > $path/delete_controller; done'])
        self.assertIn(stale, self.localstor(self.destination,
                                            'status').stdout)
        first = self.attach(self.volume, self.source)
        self.write(first, size=20)
        content = self.checksum(first, size=20)
        self.detach(first)
        moved = self.attach(self.volume, self.destination)
        self.assertEqual(content, self.checksum(moved, size=20))
        self.wait_until_arrived(moved)
        self.assertEqual(content, self.checksum(moved, size=20))
        self.assertEqual([stale], self.sessions(self.destination))

    def test_subsystem_of_somebody_else_is_left_alone(self):
        foreign = f'{SUBSYSTEMS}/{FOREIGN}'
        self.source.run(['mkdir', foreign])
        self.addCleanup(self.source.run, ['rmdir', foreign])
        self.begin()
        self.source.service('cinder-volume').restart()
        self.wait_until_arrived(self.moved)
        self.source.run(['test', '-d', foreign])


class ThinNvmeTest(NvmeTest):
    """On thin LVs, and the other data path."""

    volume_type = 'thin'
