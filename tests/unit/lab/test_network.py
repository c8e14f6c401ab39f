# SPDX-License-Identifier: Apache-2.0

from oslotest import base

from lab import layout
from lab import network


class RenderCutsTest(base.BaseTestCase):

    def rules(self, *cuts):
        text = network.render_cuts(list(cuts), layout.Layout())
        return [line.strip() for line in text.splitlines()
                if line.endswith('drop')]

    def test_no_cuts_leave_no_rule_of_earlier_ones(self):
        text = network.render_cuts([], layout.Layout())

        self.assertIn('delete table bridge lab', text)
        self.assertIn('delete table inet lab', text)
        self.assertEqual([], self.rules())

    def test_two_nodes_are_cut_in_both_directions(self):
        self.assertEqual(
            ['ip saddr 10.77.0.11 ip daddr 10.77.0.12 drop',
             'ip saddr 10.77.0.12 ip daddr 10.77.0.11 drop',
             'ip6 saddr fd77::b ip6 daddr fd77::c drop',
             'ip6 saddr fd77::c ip6 daddr fd77::b drop'],
            self.rules(('node1', 'node2')))

    def test_a_node_is_cut_from_one_service_only(self):
        rules = self.rules(('node1', 'rabbitmq'))

        self.assertIn('ip saddr 10.77.0.11 ip daddr 10.77.0.2 drop', rules)
        self.assertIn('ip saddr 10.77.0.2 ip daddr 10.77.0.11 drop', rules)
        self.assertFalse([rule for rule in rules if '10.77.0.3 ' in rule])

    def test_services_of_one_machine_are_cut_on_loopback(self):
        # Both ends of such a connection bear the service's address.
        self.assertEqual(['iif lo ip daddr 10.77.0.3 drop',
                          'iif lo ip saddr 10.77.0.3 drop'],
                         self.rules(('control', 'database')))

    def test_the_lab_itself_is_never_cut_off(self):
        everything = [('node1', 'node2'), ('control', 'node1'),
                      ('node1', 'rabbitmq'), ('database', 'node1'),
                      ('control', 'rabbitmq'), ('control', 'database')]

        console = layout.Layout().address('console')
        self.assertFalse([rule for rule in self.rules(*everything)
                          if console in rule])
