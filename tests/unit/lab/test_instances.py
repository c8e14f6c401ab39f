# SPDX-License-Identifier: Apache-2.0

from unittest import mock

from oslotest import base

from lab import cloud as clouds
from lab import instances

VOLUME = '025b19fd-528a-4477-befe-13ef20204515'
FOUND = ('{"event":"found","disk":"vda","serial":"025b19fd-528a-4477-b",'
         '"size":1073741824,"before":[null]}')
WRONG = ('{"event":"wrong","disk":"vda","serial":"025b19fd-528a-4477-b",'
         '"why":"stamp 3"}')
PANIC = '[   12.3] Kernel panic - not syncing: Attempted to kill init!'


class ReportsTest(base.BaseTestCase):

    def instance(self, *lines):
        """An instance with these lines on its console."""
        cloud = mock.create_autospec(clouds.Cloud, instance=True)
        cloud.compute_api = mock.MagicMock()
        found = instances.Instance(cloud, 'an-id')
        cloud.node.return_value.run.return_value.stdout = '\n'.join(lines)
        return found

    def test_what_the_kernel_says_is_no_report(self):
        guest = self.instance('[ 0.1] booting', '17', FOUND, FOUND[:20])

        [report] = guest.reports()
        self.assertEqual('found', report['event'])

    def test_a_report_is_known_by_the_volume(self):
        report = self.instance(FOUND).wait_for_report('found', VOLUME)

        self.assertEqual([None], report['before'])

    def test_a_wrong_disk_is_an_error(self):
        guest = self.instance(FOUND, WRONG, PANIC)

        error = self.assertRaises(instances.InstanceError,
                                  guest.wait_for_report, 'alive', VOLUME)

        self.assertIn('stamp 3', str(error))

    def test_a_panic_of_a_disk_is_told_apart_from_any_other(self):
        self.assertFalse(self.instance(FOUND, WRONG, PANIC).panicked)
        self.assertTrue(self.instance(FOUND, PANIC).panicked)
        self.assertFalse(self.instance(FOUND).panicked)

    def test_the_pause_of_a_live_migration_is_in_seconds(self):
        lines = ('Job type:         Completed', 'Time elapsed:     2101 ms',
                 'Total downtime:   460          ms')
        self.assertEqual(0.46, self.instance(*lines).downtime())
        self.assertIsNone(self.instance('Job type:         None').downtime())
