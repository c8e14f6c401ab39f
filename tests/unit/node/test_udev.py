# SPDX-License-Identifier: Apache-2.0

import fnmatch
import re

from cinder_localstor import exception
from cinder_localstor.node import udev
from tests.unit import base
from tests.unit.node import fakes


class HideTest(base.TestCase):

    def setUp(self):
        super().setUp()
        self.command = fakes.FakeCommands()
        self.install = self.patch(
            'cinder_localstor.node.privileged.install_udev_rules')

    def names(self, group):
        """Which of device-mapper's names are hidden with a group."""
        udev.hide_group(self.command, group)
        rules = self.install.call_args.args[1]
        return re.search('ATTR{dm/name}!="([^"]*)"', rules)[1]

    def test_rules_are_read_at_once(self):
        udev.hide_devices(self.command)
        self.install.assert_called_once_with(udev.DEVICES_PATH,
                                             udev.DEVICES_RULES)
        self.assertEqual(['udevadm control --reload'], self.command.ran)

    def fail(self, reason, *later):
        self.command.answer('udevadm control', exception.CommandFailed(
            command='udevadm control --reload', host='node1',
            reason='Failed to send reload request: ' + reason), *later)

    def test_udevd_that_listens_to_another_backend_is_asked_again(self):
        self.patch('tenacity.nap.time.sleep')
        self.fail(udev.BUSY, '')
        udev.hide_devices(self.command)
        self.assertEqual(2 * ['udevadm control --reload'], self.command.ran)

    def test_udevd_that_never_listens_is_given_up(self):
        self.patch('tenacity.nap.time.sleep')
        self.fail(udev.BUSY)
        self.assertRaises(exception.CommandFailed, udev.hide_devices,
                          self.command)
        self.assertEqual(udev.ATTEMPTS, len(self.command.ran))

    def test_udevd_that_is_not_there_is_told_at_once(self):
        self.fail('No such file or directory')
        self.assertRaises(exception.CommandFailed, udev.hide_devices,
                          self.command)
        self.assertEqual(1, len(self.command.ran))

    def test_volumes_that_were_looked_into_before_are_hidden_too(self):
        udev.hide_group(self.command, 'my-disks')
        self.assertEqual(
            ['udevadm control --reload',
             'udevadm trigger --action change --subsystem-match block '
             '--attr-match dm/name=my--disks-[!-]* '
             '--property-match ID_FS_USAGE=?* '
             '--property-match ID_PART_TABLE_TYPE=?*'], self.command.ran)

    def test_each_group_has_rules_of_its_own(self):
        for group in ('disks', 'more-disks'):
            udev.hide_group(self.command, group)
        self.assertEqual(2, len({call.args[0] for call in
                                 self.install.call_args_list}))

    def test_volumes_of_the_group_are_hidden(self):
        self.assertTrue(fnmatch.fnmatchcase('my--disks-volume--1',
                                            self.names('my-disks')))

    def test_volumes_of_a_group_with_a_longer_name_are_not(self):
        self.assertFalse(fnmatch.fnmatchcase('my--disks--old-volume--1',
                                             self.names('my-disks')))
