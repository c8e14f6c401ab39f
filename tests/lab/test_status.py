# SPDX-License-Identifier: Apache-2.0

import json
import os
import sys

from tests.lab import base


class StatusTest(base.LabTestCase):
    """`cinder-localstor status` on a node with a move."""

    def ask(self, node, *arguments):
        """Exit status and output of the command."""
        done = node.run(
            [os.path.join(os.path.dirname(sys.executable),
                          'cinder-localstor'),
             '--config-file', '/etc/cinder/cinder.conf', 'status',
             *arguments], check=False, timeout=base.PATIENCE,
            environment={'COLUMNS': '100'})
        return done.returncode, done.stdout

    def line_of(self, volume, node):
        status, text = self.ask(node, '-f', 'json')
        lines = [line for line in json.loads(text)
                 if line['Volume'] == volume]
        self.assertEqual(1, len(lines), text)
        return status, lines[0]

    def test_move_is_shown_while_it_runs_and_all_is_well_after_it(self):
        volume = self.create(size=3)
        moved = self.attach(volume, self.other(self.home(volume)))
        self.hold_in_mid_move(moved)
        status, line = self.line_of(volume, moved.node)
        self.assertEqual((0, 'migrating', 'running'), (
            status, line['State'], line['Hydration']), line)
        self.assertEqual(3 << 30, line['Total'])
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
        self.assertEqual(0, self.ask(node)[0])
