# SPDX-License-Identifier: Apache-2.0

import time

from keystoneauth1 import exceptions

from lab import guest as guests
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
        self.assertFalse(self.arrival(self.second).hydrating)
        self.write(self.first, offset=8, size=8)
        content = self.checksum(self.first)
        self.detach(self.first)
        self.assertEqual(content, self.checksum(self.second))
        self.wait_until_arrived(self.second)
        self.assertEqual(content, self.checksum(self.second))
        self.assertEqual(self.destination.name, self.home(self.volume).name)

    def test_lost_detach_is_seen_by_the_source_that_nobody_uses(self):
        guest = ('exec 3<%s; echo $$ >/run/guest; exec sleep 1000'
                 % self.first.device)
        self.source.run(['sh', '-c', 'sh -c "$1" >/dev/null 2>&1 </dev/null &',
                         'sh', guest])
        self.write(self.second, offset=8, size=8)
        content = self.checksum(self.second)
        time.sleep(12)
        self.assertFalse(self.arrival(self.second).hydrating)
        self.source.run(['sh', '-c', 'kill $(cat /run/guest)'])
        self.wait_until_arrived(self.second)
        self.assertEqual(content, self.checksum(self.second))

    def test_migration_that_fails_leaves_the_volume_where_it_was(self):
        self.write(self.first, offset=8, size=8)
        content = self.checksum(self.first)
        self.detach(self.second)
        end = time.monotonic() + base.PATIENCE
        while (self.home(self.volume).name != self.source.name
               and time.monotonic() < end):
            time.sleep(0.5)
        self.assertEqual(self.source.name, self.home(self.volume).name)
        self.write(self.first, offset=100, size=1)
        self.assertEqual(content, self.checksum(self.first))


class RunningGuestTest(base.GuestTestCase):
    """The guest runs all the while, on thick LVs and tgt."""

    def test_every_stamp_follows(self):
        on_source = self.live(self.first)
        second = self.user.attach_second(self.first,
                                         self.other(self.source))
        self.attachments.append(second)
        for how in ('buffered', 'direct'):
            guests.peek(second.node, second.device, self.ledger, how,
                        base.PATIENCE)
        time.sleep(2)  # for some more stamps on the source
        self.assertTrue(on_source.stop(base.PATIENCE))
        on_destination = self.live(second)
        self.detach(self.first)
        time.sleep(2)  # and on the destination
        self.assertTrue(on_destination.stop(base.PATIENCE))
        self.wait_until_arrived(second)
        self.live(second).stop(base.PATIENCE)
        self.assertEqual([], self.journal.failures)
        self.assertGreater(self.ledger.acknowledged, 20)

    def test_volume_stays_where_its_guest_is_though_no_attachment_says_so(
            self):
        guest = self.live(self.first)
        # As Nova leaves it when a rebuild is broken off
        remade = self.user.reserve(self.volume, self.first.instance_id)
        self.attachments.append(remade)
        self.detach(self.first)
        self.assertRaises(exceptions.HttpError, self.user.attach_second,
                          remade, self.other(self.source))
        for failed in set(self.user.attachments(self.volume)) - {remade.id}:
            self.user.remove_attachment(failed)
        before = self.ledger.acknowledged
        self.wait_for('the guest writes on',
                      lambda: self.ledger.acknowledged > before + 20)

        self.user.connect(remade, self.source)
        second = self.user.attach_second(remade, self.other(self.source))
        self.attachments.append(second)
        self.assertTrue(guest.stop(base.PATIENCE))
        guest = self.live(second)
        self.detach(remade)
        self.assertTrue(guest.stop(base.PATIENCE))
        self.wait_until_arrived(second)
        self.live(second).stop(base.PATIENCE)
        self.assertEqual([], self.journal.failures)


class ThinLioRunningGuestTest(RunningGuestTest):
    """The same on thin LVs and LIO."""

    volume_type = 'thin'
