# SPDX-License-Identifier: Apache-2.0
"""Volumes whose sources are read over IPv6."""

import functools
import time

from lab import cloud as clouds
from tests.lab import base
from tests.lab import test_moves
from tests.lab import test_security


@functools.cache
def cloud():
    """A lab of two nodes, up, with backends that are read over IPv6."""
    found = clouds.Cloud('ipv6')
    found.up(nodes=2, kernel=base.KERNEL, also=['ipv6'], options={
        'ipv6': base.OPTIONS['local'], 'thin-ipv6': base.OPTIONS['thin']})
    return found


class IPv6MoveTest(test_moves.MoveTest):

    find_cloud = staticmethod(cloud)
    volume_type = 'ipv6'


class ThinIPv6MoveTest(IPv6MoveTest):

    volume_type = 'thin-ipv6'


class IPv6RemoteConnectionTest(test_moves.RemoteConnectionTest):

    find_cloud = staticmethod(cloud)
    volume_type = 'ipv6'


class ThinIPv6RemoteConnectionTest(IPv6RemoteConnectionTest):

    volume_type = 'thin-ipv6'


class IPv6SecurityTest(test_security.SecurityTest):

    find_cloud = staticmethod(cloud)
    volume_type = 'ipv6'


class ThinIPv6SecurityTest(IPv6SecurityTest):

    volume_type = 'thin-ipv6'


class IPv6AwayTest(base.GuestTestCase):
    """The source does not answer for a while, and its guest goes on."""

    find_cloud = staticmethod(cloud)
    volume_type = 'ipv6'

    def setUp(self):
        super().setUp()
        self.move_on()

    def test_network_fails(self):
        self.cloud.cut(self.source.name, self.moved.node.name)
        self.addCleanup(self.cloud.heal)
        time.sleep(base.REPLACEMENT_TIMEOUT + 15)
        self.cloud.heal()
        self.assert_goes_on()

    def test_power_of_the_source_fails(self):
        self.cut_power(self.source)
        self.source.start()
        self.assert_goes_on()


class ThinIPv6AwayTest(IPv6AwayTest):

    volume_type = 'thin-ipv6'
