# SPDX-License-Identifier: Apache-2.0
"""Volumes whose sources are read over IPv6."""

import functools

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


class OverIPv6:
    """Thick volumes, and tgt."""

    find_cloud = staticmethod(cloud)
    volume_type = 'ipv6'


class ThinOverIPv6(OverIPv6):
    """Thin volumes, and LIO."""

    volume_type = 'thin-ipv6'


class IPv6MoveTest(OverIPv6, test_moves.MoveTest):
    pass


class ThinIPv6MoveTest(ThinOverIPv6, test_moves.MoveTest):
    pass


class IPv6RemoteConnectionTest(OverIPv6, test_moves.RemoteConnectionTest):
    pass


class ThinIPv6RemoteConnectionTest(ThinOverIPv6,
                                   test_moves.RemoteConnectionTest):
    pass


class IPv6SecurityTest(OverIPv6, test_security.SecurityTest):
    pass


class ThinIPv6SecurityTest(ThinOverIPv6, test_security.SecurityTest):
    pass


class IPv6AwayTest(OverIPv6, base.GuestTestCase):
    """The source does not answer for a while, and its guest goes on."""

    def setUp(self):
        super().setUp()
        self.wait_briefly(self.other(self.source))
        self.move_on()

    def test_network_fails(self):
        self.cut_off_source()
        self.assert_goes_on()

    def test_power_of_the_source_fails(self):
        self.cut_power(self.source)
        self.source.start()
        self.assert_goes_on()


class ThinIPv6AwayTest(ThinOverIPv6, IPv6AwayTest):
    pass
