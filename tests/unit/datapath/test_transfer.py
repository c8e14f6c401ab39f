# SPDX-License-Identifier: Apache-2.0

import dataclasses
import json
import unittest

import ddt

from cinder_localstor.datapath import transfer
from cinder_localstor.node import interface

EXPORT = interface.Export(
    portal='192.0.2.1:3260', iqn='iqn.x', lun=1, serial='s',
    initiator='iqn.b', address='192.0.2.2', username='user',
    password='Hush')
TRANSFER = transfer.Transfer(
    move_id='m', volume_id='v', generation=2, source_host='a@local',
    destination_host='b@local', source_name='volume-v',
    destination_name='volume-m', size=1 << 30, block_size=512, engine='clone',
    region_sectors=128, threshold=16, batch=8, export=EXPORT)


class TransferTest(unittest.TestCase):

    def test_it_is_the_same_after_a_journey_by_rpc(self):
        sent = json.loads(json.dumps(TRANSFER.as_dict()))
        self.assertEqual(TRANSFER, transfer.Transfer.from_dict(sent))

    def test_so_are_the_blocks_of_its_disk(self):
        large = dataclasses.replace(TRANSFER, export=dataclasses.replace(
            EXPORT, block_size=4096))
        sent = json.loads(json.dumps(large.as_dict()))
        self.assertEqual(large, transfer.Transfer.from_dict(sent))

    def test_earlier_peer_is_not_told_what_it_takes_for_granted(self):
        self.assertNotIn('block_size', TRANSFER.as_dict()['export'])

    def test_what_a_newer_peer_adds_is_not_taken_silently(self):
        self.assertRaises(TypeError, transfer.Transfer.from_dict,
                          {**TRANSFER.as_dict(), 'news': 1})

    def test_password_is_not_shown(self):
        self.assertNotIn('Hush', repr(TRANSFER))

    def test_it_can_not_be_changed(self):
        self.assertRaises(dataclasses.FrozenInstanceError, setattr, TRANSFER,
                          'size', 1)


@ddt.ddt
class TagsTest(unittest.TestCase):

    def test_values_come_back(self):
        tags = transfer.tags(volume='v', generation=3, move='m')
        self.assertEqual({'volume': 'v', 'generation': '3', 'move': 'm'},
                         transfer.read_tags(tags))

    def test_none_is_left_out(self):
        self.assertEqual(frozenset(['localstor.volume=v']),
                         transfer.tags(volume='v', move=None))

    @ddt.data('other', 'localstor', 'localstor.', 'localstor.move',
              'localstor.move=', 'localstor.MOVE=x', 'xlocalstor.move=y',
              'cinder.localstor.move=y')
    def test_tags_of_others_are_passed_over(self, tag):
        self.assertEqual({}, transfer.read_tags(frozenset([tag])))

    def test_lvm_takes_them(self):
        # lvm(8): these characters, no hyphen in front, 1024 at most
        for tag in transfer.tags(volume='0-9', generation=3):
            self.assertRegex(tag, r'^[A-Za-z0-9_+.][A-Za-z0-9_+.\-/=!:&#]*$')
