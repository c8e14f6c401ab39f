# SPDX-License-Identifier: Apache-2.0

import dataclasses

import ddt

from cinder_localstor import exception
from cinder_localstor.node import interface
from cinder_localstor.node import tgt
from tests.unit import base
from tests.unit.node import fakes

MOVE = '6f9619ff-8b86-4d01-b42d-00cf4fc964ff'
IQN = 'iqn.2010-10.org.openstack:localstor-' + MOVE
INITIATOR = 'iqn.1993-08.org.debian:b'
EXPORT = interface.Export(
    portal='192.0.2.1:3260', iqn=IQN, lun=tgt.LUN, serial=MOVE,
    initiator=INITIATOR, address='192.0.2.2', username='user',
    password='a secret')
# What tgtd of Debian 12 prints, shortened
SHOWN = """\
Target 3: %s
    System information:
        Driver: iscsi
        State: ready
    I_T nexus information:
        I_T nexus: 10
            Initiator: iqn.1993-08.org.debian:b alias: node2
            Connection: 0
                IP Address: 192.0.2.2
    LUN information:
        LUN: 0
            Type: controller
            SCSI ID: IET     004d0000
        LUN: 1
            Backing store path: /dev/mapper/v-handle
            Backing store flags: direct
    Account information:
        user
    ACL information:
        192.0.2.2
        iqn.1993-08.org.debian:b
Target 12: iqn.2010-10.org.openstack:volume-1
    Account information:
    ACL information:
        ALL
""" % IQN
SHOW = 'tgtadm --lld iscsi --mode target --op show'
NEW = 'tgtadm --lld iscsi --mode target --op new'


@ddt.ddt
class ParseTest(base.TestCase):

    def test_users_and_admitted_initiators_of_a_target(self):
        self.assertEqual(
            [tgt.Target(3, IQN, ['user'], ['192.0.2.2', INITIATOR]),
             tgt.Target(12, 'iqn.2010-10.org.openstack:volume-1', [],
                        ['ALL'])],
            list(tgt.parse(SHOWN)))

    @ddt.data('', 'garbage \0', 'Target x: ' + IQN, '    Target 3: ' + IQN,
              'ACL information:\n        ALL')
    def test_anything_else_is_no_target(self, text):
        self.assertEqual([], list(tgt.parse(text)))

    def test_target_is_whole_when_an_initiator_is_admitted_from_an_address(
            self):
        first, second = tgt.parse(SHOWN)
        self.assertTrue(first.is_whole)
        self.assertFalse(second.is_whole)


class TargetsTest(base.TestCase):

    def setUp(self):
        super().setUp()
        self.command = fakes.FakeCommands()
        self.command.answer(SHOW, SHOWN)

    def make(self):
        tgt.make(self.command, EXPORT, '/dev/mapper/v-handle')

    def changes(self):
        return [line.removeprefix('tgtadm --lld iscsi --mode ')
                for line in self.command.ran if line != SHOW]

    def refuse(self, words, reason='refused'):
        """Refuse a command once."""
        self.command.answer(words, exception.CommandFailed(
            command=words, host='node1', reason=reason), '')

    def test_it_is_direct_read_only_and_admits_one_initiator_at_last(self):
        self.make()
        self.assertEqual([
            'target --op new --tid 13 --targetname ' + IQN,
            'logicalunit --op new --tid 13 --lun 1 --backing-store '
            '/dev/mapper/v-handle --bsoflags direct --blocksize 512',
            'logicalunit --op update --tid 13 --lun 1 --params '
            'readonly=1,scsi_sn=%s,scsi_id=%s' % (MOVE, MOVE),
            'account --op new --user user --password a secret',
            'account --op bind --tid 13 --user user',
            'target --op bind --tid 13 --initiator-address 192.0.2.2',
            'target --op bind --tid 13 --initiator-name ' + INITIATOR],
            self.changes())

    def test_disk_has_the_blocks_that_its_export_is_described_with(self):
        tgt.make(self.command, dataclasses.replace(EXPORT, block_size=4096),
                 '/dev/x')
        self.assertIn('logicalunit --op new --tid 13 --lun 1 --backing-store '
                      '/dev/x --bsoflags direct --blocksize 4096',
                      self.changes())

    def test_number_that_somebody_else_took_meanwhile_is_not_taken(self):
        self.command.answer(SHOW, SHOWN, SHOWN.replace('12', '13'))
        self.refuse(NEW, 'this target already exists')
        self.make()
        self.assertIn('target --op new --tid 14 --targetname ' + IQN,
                      self.changes())

    def test_user_that_an_earlier_process_left_is_replaced(self):
        self.refuse('tgtadm --lld iscsi --mode account --op new',
                    'this account already exists')
        self.make()
        self.assertEqual(2, sum('account --op new' in line
                                for line in self.changes()))
        self.assertIn('account --op delete --user user', self.changes())
        self.assertEqual('target --op bind --tid 13 --initiator-name '
                         + INITIATOR, self.changes()[-1])

    def test_nothing_is_left_of_a_target_that_is_refused(self):
        self.command.fail('tgtadm --lld iscsi --mode logicalunit',
                          'no such device')
        error = self.assertRaises(exception.CommandFailed, self.make)
        self.assertIn('no such device', str(error))
        self.assertEqual(['target --op delete --force --tid 13',
                          'account --op delete --user user'],
                         self.changes()[-2:])

    def test_a_daemon_that_hangs_is_asked_once(self):
        self.command.hang('tgtadm --lld iscsi --mode logicalunit')
        self.assertRaises(exception.CommandTimedOut, self.make)
        self.assertEqual(2, len(self.changes()))

    def test_sessions_and_users_go_with_a_target(self):
        tgt.remove(self.command, tgt.Target(3, IQN, ['a', 'b']))
        self.assertEqual(['target --op delete --force --tid 3',
                          'account --op delete --user a',
                          'account --op delete --user b'], self.changes())

    def test_user_that_is_gone_is_no_failure(self):
        self.command.fail('tgtadm --lld iscsi --mode account --op delete',
                          "can't find the account")
        tgt.remove(self.command, tgt.Target(3, IQN, ['a', 'b']))
        self.assertEqual(3, len(self.changes()))
