# SPDX-License-Identifier: Apache-2.0

from oslotest import base

from lab import fleet


def count(when, queries, messages, **processors):
    return fleet.Count(when, queries, messages, processors)


class LoadTest(base.BaseTestCase):

    def test_it_is_what_was_asked_in_a_second(self):
        found = fleet.load(count(10, 100, 7, database=3),
                           count(14, 300, 9, database=5))

        self.assertEqual(fleet.Load(50, 0.5, {'database': 0.5}), found)

    def test_who_came_meanwhile_began_with_nothing(self):
        found = fleet.load(count(0, 0, 0), count(2, 0, 0, fleet=1))

        self.assertEqual({'fleet': 0.5}, found.processors)


class NodeOfTest(base.BaseTestCase):

    def test_few_volumes_are_all_over_many_nodes(self):
        self.assertEqual([0, 2, 4, 6], [
            fleet.node_of(volume, nodes=9, number=4) for volume in range(4)])

    def test_nodes_have_alike_of_many_volumes_and_in_turn(self):
        self.assertEqual([0, 1, 2, 0, 1, 2], [
            fleet.node_of(volume, nodes=3, number=6) for volume in range(6)])


class RowTest(base.BaseTestCase):

    def row(self, **values):
        load = fleet.Load(10, 2, {'database': 0.25, 'cinder-api': 0.5,
                                  'keystone': 0.125, 'epmd': 4})
        return dict(zip(fleet.HEADINGS, fleet.row(fleet.Measured(**{
            'nodes': 50, 'start': 3.2, 'idle': load, 'storm': load,
            'attached': [1.0, 2.0, 9.0], 'failures': [], **values}))))

    def test_every_heading_has_its_figure(self):
        self.assertEqual(len(fleet.HEADINGS), len(self.row()))

    def test_those_who_answer_the_user_count_together(self):
        self.assertEqual('0.62', self.row()['Processors: API'])

    def test_attachments_are_told_by_the_median_and_the_slowest(self):
        row = self.row()

        self.assertEqual('2.00', row['Attached, s'])
        self.assertEqual('9.00', row['95 of 100, s'])

    def test_failures_are_counted(self):
        self.assertEqual('2', self.row(failures=['no', 'no'])['Failed'])


class ReceivedTest(base.BaseTestCase):

    def test_all_protocols_count(self):
        self.assertEqual(12, fleet.received(
            '#{[{protocol,amqp091}] =>\n'
            '      #{messages_received_total => 7,\n'
            '        messages_received_confirm_total => 3},\n'
            '  [{protocol,amqp10}] => #{messages_received_total => 5}}'))
