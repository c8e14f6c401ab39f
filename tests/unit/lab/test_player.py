# SPDX-License-Identifier: Apache-2.0

from unittest import mock

import ddt
from oslotest import base

from lab import player


@ddt.ddt
class RoomTest(base.BaseTestCase):
    """A volume of 3 GiB on node1, and what the scheduler sees of two nodes"""

    # As the snapshot or the volume has it, whatever the reason was
    ERROR = 'it is error, not available'

    def is_refused(self, what, here, there):
        nodes = [mock.Mock(), mock.Mock()]
        nodes[0].name, nodes[1].name = 'node1', 'node2'
        one = player.Player('user1', mock.Mock(nodes=nodes), 1, 'local',
                            mock.Mock(), 1)
        one.volume, one._size = 'v', 3
        one._user = mock.Mock(
            host=lambda _volume: 'node1',
            rooms=lambda: {'node1@local#local': here,
                           'node2@local#local': there})
        return one._is_refused(what, self.ERROR)

    @ddt.data(('snapshot', 2.98, 9, True), ('snapshot', 3, 9, True),
              ('snapshot', 9, 0, False), ('clone', 0, 9, False),
              ('clone', 0, 2.98, True), ('restore', 2, 2, True),
              ('detach', 0, 0, False))
    @ddt.unpack
    def test_what_has_no_room_is_refused(self, what, here, there, expected):
        self.assertEqual(expected, self.is_refused(what, here, there))
