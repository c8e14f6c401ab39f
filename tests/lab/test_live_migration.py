# SPDX-License-Identifier: Apache-2.0

import time

from tests.lab import base


class LiveMigrationTest(base.LabTestCase):
    """The calls that Nova makes when an instance migrates, without Nova."""

    def setUp(self):
        super().setUp()
        self.volume = self.create()
        self.source = self.home(self.volume)
        self.destination = self.other(self.source)
        self.first = self.attach(self.volume, self.source)
        self.write(self.first)
        self.second = self.user.attach_second(self.first, self.destination)
        self.attachments.append(self.second)

    def test_guest_writes_on_the_source_until_it_leaves(self):
        self.checksum(self.second)
        time.sleep(6)  # a look of the periodic task, which must do nothing
        self.assertIn('no_hydration', self.status(self.second))
        self.write(self.first, offset=16, size=32)
        content = self.checksum(self.first)
        self.detach(self.first)
        self.assertEqual(content, self.checksum(self.second))
        self.wait_until_arrived(self.second)
        self.assertEqual(content, self.checksum(self.second))
        self.assertEqual(self.destination.name, self.home(self.volume).name)

    def test_lost_detach_is_seen_by_the_source_that_nobody_uses(self):
        guest = ('exec 3<%s; echo $$ >/run/guest; exec sleep 1000'
                 % self.first.device)
        self.source.run(['sh', '-c', '(%s) >/dev/null 2>&1 &' % guest])
        self.write(self.second, offset=16, size=32)
        content = self.checksum(self.second)
        time.sleep(12)
        self.assertIn('no_hydration', self.status(self.second))
        self.source.run(['sh', '-c', 'kill $(cat /run/guest)'])
        self.wait_until_arrived(self.second)
        self.assertEqual(content, self.checksum(self.second))

    def test_migration_that_fails_leaves_the_volume_where_it_was(self):
        self.write(self.first, offset=16, size=32)
        content = self.checksum(self.first)
        self.detach(self.second)
        end = time.monotonic() + base.PATIENCE
        while (self.home(self.volume).name != self.source.name
               and time.monotonic() < end):
            time.sleep(0.5)
        self.assertEqual(self.source.name, self.home(self.volume).name)
        self.write(self.first, offset=100, size=1)
        self.assertEqual(content, self.checksum(self.first))
