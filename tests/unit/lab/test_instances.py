# SPDX-License-Identifier: Apache-2.0

from unittest import mock

import fixtures
from oslotest import base

from lab import cloud as clouds
from lab import errors
from lab import instances

VOLUME = '025b19fd-528a-4477-befe-13ef20204515'
FOUND = ('{"event":"found","disk":"vda","serial":"025b19fd-528a-4477-b",'
         '"size":1073741824,"before":[null]}')
WRONG = ('{"event":"wrong","disk":"vda","serial":"025b19fd-528a-4477-b",'
         '"why":"stamp 3"}')
FAILS = WRONG.replace('stamp 3', 'Input/output error (os error 5)')
NO_MEMORY = WRONG.replace('stamp 3', 'Cannot allocate memory (os error 12)')
BAD_RING = '[  430.272242] virtio_blk virtio0: req.0:id 0 is not a head!'
PANIC = '[   12.3] Kernel panic - not syncing: Attempted to kill init!'


class ReportsTest(base.BaseTestCase):

    # What libvirt says
    state = 'running'

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
        self.useFixture(fixtures.MockPatch('time.sleep'))
        guest = self.instance(FOUND, WRONG, PANIC)

        error = self.assertRaises(instances.InstanceError,
                                  guest.wait_for_report, 'alive', VOLUME)

        self.assertIn('stamp 3', str(error))

    def test_a_volume_that_nova_gave_up_is_not_waited_for(self):
        guest = self.instance()
        self.useFixture(fixtures.MockPatchObject(guest, 'volumes',
                                                 return_value=[]))
        self.useFixture(fixtures.MockPatchObject(
            guest, 'failures', return_value=['no space']))

        error = self.assertRaises(instances.InstanceError, guest.attach,
                                  VOLUME)

        self.assertIn("['no space']", str(error))

    def test_a_panic_of_a_disk_is_told_apart_from_any_other(self):
        self.assertFalse(self.instance(FOUND, WRONG, PANIC).panicked)
        self.assertTrue(self.instance(FOUND, PANIC).panicked)
        self.assertFalse(self.instance(FOUND).panicked)

    def test_a_disk_that_fails_for_want_of_memory_is_not_wrong(self):
        self.assertFalse(self.instance(FOUND, FAILS, PANIC).panicked)
        guest = self.instance(FOUND, BAD_RING, FAILS, PANIC)
        self.assertTrue(guest.panicked)
        self.assertEqual(['found'],
                         [report['event'] for report in guest.reports()])
        self.assertFalse(self.instance(FOUND, BAD_RING, WRONG, PANIC).panicked)

    def test_what_a_disk_can_not_say_is_not_its_fault(self):
        guest = self.instance(FOUND, NO_MEMORY, PANIC)
        self.assertTrue(guest.panicked)
        self.assertEqual(['found'],
                         [report['event'] for report in guest.reports()])

    def test_the_pause_of_a_live_migration_is_in_seconds(self):
        lines = ('Job type:         Completed', 'Time elapsed:     2101 ms',
                 'Total downtime:   460          ms')
        self.assertEqual(0.46, self.instance(*lines).downtime())
        self.assertIsNone(self.instance('Job type:         None').downtime())

    def test_a_silent_guest_is_told_with_the_disks_that_do_not_answer(self):
        guest = self.instance(FOUND)
        self.shows(guest, 'dm-3/inflight dm-4/inflight', 'dm-3/inflight')

        error = self.assertRaises(
            instances.InstanceError, guest.wait_for_report, 'alive', VOLUME,
            timeout=0)

        self.assertIn("do not answer: ['dm-3/inflight']", str(error))

    def shows(self, guest, *inflight):
        """What a guest's node says in turn of its disks, then the last."""
        self.useFixture(fixtures.MockPatch('time.sleep'))
        self.useFixture(fixtures.MockPatchObject(instances, 'SILENCE', 0))
        answers = list(inflight)

        def run(command, **_options):
            text = FOUND
            if 'inflight' in command[-1]:
                text = answers.pop(0) if len(answers) > 1 else answers[0]
            elif 'domstate' in command:
                text = self.state
            return mock.Mock(stdout=text)
        guest.node.run.side_effect = run

    def go_on(self, guest):
        """Whether a guest that is silent is booted again."""
        with mock.patch.object(guest, 'volumes', return_value=[VOLUME]), \
                mock.patch.object(guest, 'reboot') as reboot, \
                mock.patch.object(guest, 'wait_for_stamps'), \
                mock.patch.object(guest, 'assert_alive', side_effect=[
                    instances.InstanceError('silent'), None]):
            try:
                guest.go_on()
            except instances.InstanceError:
                self.assertFalse(reboot.called)
                return False
            return reboot.called

    def test_a_silent_guest_whose_disks_answer_is_booted_again(self):
        guest = self.instance(FOUND)
        self.shows(guest, 'dm-3/inflight', 'dm-4/inflight')
        self.assertTrue(self.go_on(guest))

    def test_one_whose_disk_does_not_is_not(self):
        guest = self.instance(FOUND)
        self.shows(guest, 'dm-3/inflight dm-4/inflight', 'dm-3/inflight')
        self.assertFalse(self.go_on(guest))

    def test_nor_is_one_that_libvirt_has_stopped(self):
        for self.state in ('shut off', 'paused'):
            guest = self.instance(FOUND)
            self.shows(guest, '')
            self.assertFalse(self.go_on(guest))

    def test_nor_is_one_whose_disk_is_wrong(self):
        self.useFixture(fixtures.MockPatch('time.sleep'))
        self.assertFalse(self.go_on(self.instance(FOUND, WRONG, PANIC)))


class FailuresTest(base.BaseTestCase):

    def test_what_went_wrong_is_what_its_events_say(self):
        events = [{'result': 'Success', 'details': None, 'traceback': None},
                  {'result': 'Error', 'details': 'ClientException',
                   'traceback': 'in line 3'}]
        cloud = mock.create_autospec(clouds.Cloud, instance=True)
        cloud.compute_api = mock.MagicMock()
        cloud.compute_api.get.return_value.json.side_effect = [
            {'instanceActions': [{'request_id': 'req-1'}]},
            {'instanceAction': {'events': events}}]

        self.assertEqual(['ClientException'],
                         instances.Instance(cloud, 'an-id').failures())
        cloud.compute_api.get.assert_called_with(
            '/servers/an-id/os-instance-actions/req-1', headers=mock.ANY)


class EndElsewhereTest(base.BaseTestCase):
    """Nobody is to have a guest run where Nova does not have it."""

    def setUp(self):
        super().setUp()
        self.other = mock.Mock()
        self.other.name = 'node2'
        self.cloud = mock.create_autospec(clouds.Cloud, instance=True)
        self.cloud.compute_api = mock.MagicMock()
        self.home = self.cloud.node.return_value
        self.home.name = 'node1'
        self.cloud.nodes = [self.home, self.other]
        self.guest = instances.Instance(self.cloud, 'an-id')
        self.useFixture(fixtures.MockPatchObject(
            instances.Instance, 'name', 'instance-1'))

    def commands(self):
        return [' '.join(call.args[0]) for call in self.other.run.mock_calls
                if call.args]

    def test_one_that_runs_there_is_ended(self):
        self.other.run.return_value.stdout = 'instance-0\ninstance-1\n'
        self.guest.end_elsewhere()
        self.assertIn('virsh destroy instance-1', self.commands())
        self.home.run.assert_not_called()

    def test_one_that_does_not_is_forgotten(self):
        self.other.run.return_value.stdout = 'instance-10\n'
        self.guest.end_elsewhere()
        self.assertNotIn('virsh destroy instance-1', self.commands())
        self.assertIn('virsh undefine instance-1', self.commands())

    def test_node_that_does_not_tell_keeps_it_from_going_on(self):
        self.other.run.side_effect = errors.LabError('no libvirtd')
        self.assertRaises(errors.LabError, self.guest.end_elsewhere)
