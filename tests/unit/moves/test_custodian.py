# SPDX-License-Identifier: Apache-2.0

import contextlib
import datetime
from unittest import mock

from cinder import exception as cinder_exception
from cinder import objects
from cinder.tests.unit import utils as cinder_test_utils
import ddt
from oslo_utils import timeutils
from oslo_utils import units

from cinder_localstor.driver import unfinished
from cinder_localstor.moves import custodian
from cinder_localstor.node import simulated
from cinder_localstor import rows
from tests.unit import base
from tests.unit.moves import test_keeper


@ddt.ddt
class FaultTest(test_keeper.FaultTestCase):
    """Each call goes wrong once, in each way, with which Cinder manages a
    logical volume and a snapshot of it, unmanages both, or deletes what it did
    not get.  What a user had before is there, under one name.
    """

    parts = ('manage', 'manage snapshot', 'unmanage snapshot', 'unmanage')
    least = 15

    def setUp(self):
        super().setUp()
        self.group = self.cloud.nodes[base.A].volumes

    @property
    def custodian(self):
        return self.cloud.running[base.A].custodian

    def live(self):
        self.disk = self.cloud.make_foreign('mine', units.Gi - units.Mi)
        self.then = dict(self.disk.regions)
        self.group.create_snapshot('shot', 'mine', frozenset(['mine']))
        self.shot = self.group.disks['shot']
        volume = self.manage()
        self.cloud.content[volume.id] = self.then
        if volume.status == 'available':
            self.take_and_let_go_snapshot(volume)
            self.unmanage(volume)
        self.assert_mine(self.disk, 'mine', 'volume')
        self.assertEqual(self.then, self.disk.regions)
        self.assert_mine(self.shot, 'shot', '_snapshot')
        for disk in (self.shot, self.disk):
            self.group.disks = {name: found for name, found
                                in self.group.disks.items()
                                if found is not disk}
        self.assertEqual([], self.cloud.leftovers([self.volume]))

    def assert_mine(self, disk, *names):
        """There is what a user had, under a name that is told, and nothing of
        ours.
        """
        found, = [found for found, there in self.group.disks.items()
                  if there is disk]
        self.assertIn(found.partition('-')[0], names)
        self.assertEqual({'mine'}, disk.tags)

    @contextlib.contextmanager
    def asked(self, what, failure):
        """What the manager makes of it, but where its process dies."""
        try:
            yield
        except simulated.Crash as crash:
            self.cloud.down.add(crash.host)
        except test_keeper.REFUSALS:
            self.change(what, failure)

    def manage(self):
        volume = cinder_test_utils.create_volume(
            self.ctxt, host=base.A + '#local', size=0, status='managing')
        reference = {'source-name': 'mine'}
        with self.part('manage'), self.asked(volume, 'error_managing'):
            size = self.custodian.size(self.ctxt, volume, reference)
            self.custodian.manage(self.ctxt, volume, reference)
            volume.update({'size': size, 'status': 'available',
                           'launched_at': timeutils.utcnow()})
            volume.save()
        self.settle_all()
        volume.refresh()
        if volume.status == 'error_managing':
            self.delete_failed(volume)
        return volume

    def delete_failed(self, volume):
        self.change(volume, 'error_managing_deleting')
        self.assertTrue(self.custodian.give_back(self.ctxt, volume))
        volume.destroy()

    def take_and_let_go_snapshot(self, volume):
        snapshot = self.cloud.snapshot_row(volume)
        with self.part('manage snapshot'), self.asked(snapshot, 'error'):
            place = self.custodian.manage_snapshot(self.ctxt, snapshot,
                                                   {'source-name': 'shot'})
            snapshot.update({**place, 'status': 'available'})
            snapshot.save()
        self.settle_all()
        snapshot.refresh()
        if snapshot.status == 'creating':
            # None of it was taken.
            self.change(snapshot, 'error')
        if snapshot.status == 'error':
            self.custodian.give_back_snapshot(self.ctxt, snapshot)
        else:
            self.change(snapshot, 'unmanaging')
            with self.part('unmanage snapshot'), self.asked(snapshot,
                                                            'error'):
                self.custodian.unmanage_snapshot(self.ctxt, snapshot)
            self.settle_all()
            self.change(snapshot, 'unmanaging')
            self.custodian.unmanage_snapshot(self.ctxt, snapshot)
        snapshot.destroy()

    def unmanage(self, volume):
        self.change(volume, 'unmanaging')
        with self.part('unmanage'), self.asked(volume, 'error_unmanaging'):
            self.custodian.unmanage(self.ctxt, volume)
        self.settle_all()
        volume.refresh()
        if volume.status == 'available':
            path = self.cloud.handle(volume)
            self.assertEqual(self.then, {
                number: self.cloud.nodes[base.A].read(path, number)
                for number in self.then})
        self.custodian.unmanage(self.ctxt, volume)
        volume.destroy()

    def settle_all(self):
        """Let come back what has died, and be settled what was broken off.
        """
        self.cloud.settle(power=self.power)
        later = timeutils.utcnow() + datetime.timedelta(
            seconds=2 * unfinished.PATIENCE)
        with mock.patch.object(timeutils, 'utcnow', return_value=later):
            unfinished.Unfinished(base.A, self.group, None,
                                  self.custodian).settle(self.ctxt)

    @ddt.data(*simulated.Fault)
    def test_what_a_user_had_is_there(self, fault):
        self.try_every_call(fault)

    @ddt.data(simulated.Fault.CRASH, simulated.Fault.CRASH_AFTER)
    def test_power_cut_at_every_call(self, fault):
        self.try_every_call(fault, power=True)


class ThinFaultTest(FaultTest):

    thin = True
    is_sampled = True


@ddt.ddt
class FarFaultTest(test_keeper.FaultTestCase):
    """Each call goes wrong once, in each way, with which a snapshot is
    unmanaged whose volume has left its node.
    """

    parts = ('unmanage snapshot',)
    least = 4

    def setUp(self):
        super().setUp()
        self.forget_volume(self.volume)

    def live(self):
        volume = self.cloud.create_volume()
        snapshot = self.take(volume)
        disks = self.cloud.nodes[base.A].volumes.disks
        name = rows.snapshot_copy_name(snapshot.id)
        disk = disks[name]
        held = dict(disk.regions)
        self.cloud.move(volume)
        self.cloud.settle()
        self.change(snapshot, 'unmanaging')
        with self.part('unmanage snapshot'), self.asked(snapshot, 'error'):
            self.cloud.running[base.B].custodian.unmanage_snapshot(
                self.ctxt, snapshot)
        for _period in range(3):
            self.come_back()
        # Whatever has become of it, it can be asked for again.
        self.cloud.running[base.B].custodian.unmanage_snapshot(self.ctxt,
                                                               snapshot)
        snapshot.destroy()
        self.come_back()
        self.assertIs(disk, disks.pop(name))
        self.assertEqual((frozenset(), held), (disk.tags, disk.regions))
        self.cloud.settle()
        self.assert_whole(volume)
        self.forget_volume(volume)

    def come_back(self):
        """Let a period pass, where what has died is back."""
        for host in sorted(self.cloud.down):
            if self.power:
                self.cloud.nodes[host].cut_power()
            self.cloud.boot(host)
        self.cloud.watch()

    @ddt.data(*simulated.Fault)
    def test_what_a_user_had_is_there(self, fault):
        self.try_every_call(fault)

    @ddt.data(simulated.Fault.CRASH, simulated.Fault.CRASH_AFTER)
    def test_power_cut_at_every_call(self, fault):
        self.try_every_call(fault, power=True)


class ThinFarFaultTest(FarFaultTest):

    thin = True


class SettleTest(test_keeper.KeeperTestCase):
    """What was broken off with the service."""

    def setUp(self):
        super().setUp()
        self.cloud.make_foreign('mine')
        self.taken = cinder_test_utils.create_volume(
            self.ctxt, host=base.A + '#local', size=0, status='managing')

    def custodian(self):
        return self.cloud.running[base.A].custodian

    def manage(self):
        self.custodian().manage(self.ctxt, self.taken,
                                {'source-name': 'mine'})

    def settle(self, what=None):
        what = what or self.taken
        settled = self.custodian().settle_volume(self.ctxt, what)
        return settled, objects.Volume.get_by_id(self.ctxt, what.id).status

    def test_what_this_process_has_begun_is_left_to_cinder(self):
        self.manage()
        self.assertEqual((False, 'managing'), self.settle())

    def test_what_another_process_has_begun_is_given_back(self):
        self.manage()
        self.restart(base.A)
        self.assertEqual((True, 'error_managing'), self.settle())
        self.assertIn('mine', self.cloud.nodes[base.A].volumes.disks)
        # A request that comes so late is refused.
        self.assertRaises(cinder_exception.ManageExistingInvalidReference,
                          self.manage)

    def test_what_lies_about_of_a_volume_that_failed_is_managed_again(self):
        group = self.cloud.nodes[base.A].volumes
        group.disks['mine'].tags |= {
            'localstor.former=mine', 'localstor.generation=1',
            'localstor.volume=' + self.volume.id}
        failed = (custodian.FAILED, custodian.FAILED_DELETING)
        for status in ('available', *failed):
            self.cloud.set_status(self.volume, status)
            entry, = [found for found in self.custodian().manageable_volumes(
                self.ctxt) if found['reference']['source-name'] == 'mine']
            self.assertEqual(status in failed, entry['safe_to_manage'])
        self.manage()
        disk = group.disks[self.taken.name]
        self.assertIn('localstor.volume=' + self.taken.id, disk.tags)
        self.assertNotIn('localstor.volume=' + self.volume.id, disk.tags)

    def test_volume_that_was_not_let_go_yet_is_as_it_was(self):
        self.change(self.volume, 'unmanaging')
        self.restart(base.A)
        self.assertEqual((True, 'available'), self.settle(self.volume))
        self.assert_reads(self.volume)

    def test_creation_of_a_snapshot_is_nothing_of_ours(self):
        snapshot = self.cloud.snapshot_row(self.volume)
        self.assertFalse(self.custodian().settle_snapshot(self.ctxt,
                                                          snapshot))
        snapshot.refresh()
        self.assertEqual('creating', snapshot.status)
        self.assertIsNone(rows.place_of(self.ctxt, snapshot.id))
