# SPDX-License-Identifier: Apache-2.0

import json

from tests.lab import base


class StatusTest(base.LabTestCase):
    """`cinder-localstor status` on a node with a move."""

    def line_of(self, volume, node):
        answer = self.localstor(node, 'status', '-f', 'json')
        lines = [line for line in json.loads(answer.stdout)
                 if line['Volume'] == volume]
        self.assertEqual(1, len(lines), answer.stdout)
        return answer.returncode, lines[0]

    def test_move_is_shown_while_it_runs_and_all_is_well_after_it(self):
        volume = self.create()
        moved = self.attach(volume, self.other(self.home(volume)))
        self.hold_in_mid_move(moved)
        status, line = self.line_of(volume, moved.node)
        self.assertEqual((0, 'migrating', 'running'), (
            status, line['State'], line['Hydration']), line)
        self.assertEqual(1 << 30, line['Total'])
        self.assertRegex(line['Handle on'][0], '-(clone|hydrator)$')
        self.wait_until_arrived(moved)
        status, line = self.line_of(volume, moved.node)
        self.assertEqual((0, None, []), (
            status, line['State'], line['Problems']), line)

    def test_handle_that_is_gone_is_a_problem(self):
        volume = self.create()
        node = self.home(volume)
        name = 'volume-%s' % volume
        node.run(['dmsetup', 'remove', name + '-handle'])
        status, line = self.line_of(volume, node)
        self.assertEqual(1, status)
        self.assertIn('handle', line['Problems'][0])
        node.service('cinder-volume').restart()
        self.assertEqual(0, self.localstor(node, 'status').returncode)
