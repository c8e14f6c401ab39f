# SPDX-License-Identifier: Apache-2.0
"""A node of the lab boots, whatever a power cut has left on its disks.

A node alone, without a cloud: what the driver makes of such disks is tested
elsewhere.
"""

import testtools

from lab import cloud as clouds

GROUP = 'cinder-thin'
POOL = GROUP + '-pool'


class BootTest(testtools.TestCase):

    def setUp(self):
        super().setUp()
        self.cloud = clouds.Cloud('boot')
        self.addCleanup(self.cloud.down)
        self.cloud.up(nodes=1, bare=True)
        self.node = self.cloud.node('node1')

    def restart(self):
        self.node.kill()
        self.node.boot()

    def make(self, name):
        self.node.run(['lvcreate', '-qq', '-y', '--type', 'thin', '-V', '64M',
                       '-n', name, '--thinpool', POOL, GROUP])

    def lose(self, name):
        """Take a volume out of the pool's metadata, but not out of LVM's.

        A power cut does so: LVM writes its own and sends a message to the
        pool, which commits later.
        """
        number = self.node.run(['lvs', '--noheadings', '-o', 'thin_id',
                                f'{GROUP}/{name}']).stdout.strip()
        self.node.run(['lvchange', '-an', f'{GROUP}/{name}'])
        self.node.run(['dmsetup', 'message',
                       '-'.join(name.replace('-', '--')
                                for name in (GROUP, POOL)) + '-tpool',
                       '0', f'delete {number}'])

    def active(self):
        return self.node.run(['lvs', '--noheadings', '-o', 'lv_name',
                              '--select', 'lv_active=active',
                              GROUP]).stdout.split()

    def test_volume_that_the_thin_pool_does_not_know(self):
        for name in ('first', 'lost', 'other'):
            self.make(name)
        self.lose('lost')

        self.restart()

        self.assertEqual(sorted(['first', 'other', POOL]),
                         sorted(self.active()))
        self.assertIn('not every volume of ' + GROUP,
                      self.node.console_log.read_text(errors='replace'))
