# SPDX-License-Identifier: Apache-2.0
"""Where Cinder's own scheduler has volumes made."""

import ddt

from cinder_localstor.nova import opts
from cinder_localstor import scheduler
from tests.unit import base
from tests.unit import services


@ddt.ddt
class LocalStorWeigherTest(base.TestCase):

    def setUp(self):
        super().setUp()
        self.cloud = services.Services(self, (base.A, base.B, base.C))
        self.override_config('scheduler_default_weighers',
                             ['CapacityWeigher', 'LocalStorWeigher'])
        # Whoever has most comes first.
        self.fill(base.A, 1 << 39)

    def fill(self, host, size):
        """Let a node have so many bytes less."""
        volumes = self.cloud.nodes[host].volumes
        volumes.create('other %d' % len(volumes.disks), size, frozenset())

    def made_on(self, **hints):
        volume = self.cloud.order(**hints)
        return volume.status, self.cloud.host_of(volume)

    @ddt.data(base.A, base.B, base.C)
    def test_volume_is_made_on_the_node_that_is_named(self, host):
        self.assertEqual(('available', host), self.made_on(
            **{scheduler.NODE_HINT: host.split('@')[0]}))

    def test_without_a_name_it_is_made_where_most_is_free(self):
        self.assertNotEqual(base.A, self.made_on()[1])

    @ddt.data('another', '', None, ['a'], {'a': 'a'}, 7)
    def test_name_of_no_node_is_no_reason(self, name):
        status, host = self.made_on(**{scheduler.NODE_HINT: name})
        self.assertEqual('available', status)
        self.assertNotEqual(base.A, host)

    def test_node_without_room_is_passed_over(self):
        volumes = self.cloud.nodes[base.A].volumes
        self.fill(base.A, volumes.capacity().free)
        status, host = self.made_on(**{scheduler.NODE_HINT: 'a'})
        self.assertEqual('available', status)
        self.assertNotEqual(base.A, host)

    def test_operator_may_have_it_ignored(self):
        self.override_config('localstor_node_weight_multiplier', 0.0)
        self.assertNotEqual(base.A, self.made_on(
            **{scheduler.NODE_HINT: 'a'})[1])

    def test_nova_names_it_as_the_weigher_expects(self):
        self.assertEqual(scheduler.NODE_HINT, opts.NODE_HINT)
