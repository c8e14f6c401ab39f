# SPDX-License-Identifier: Apache-2.0

import io

from cinder_localstor.cmd import main
from cinder_localstor.moves import table
from cinder_localstor import rows
from tests.unit import base


class AbandonTest(base.TestCase):

    def setUp(self):
        super().setUp()
        self.cloud = base.Cloud(self)
        self.volume = self.cloud.create_volume()
        self.patch('cinder_localstor.cmd.backends.load')
        self.down = self.patch('cinder_localstor.peers.directory.down',
                               return_value={base.A})

    def run_command(self, *arguments):
        out, err = io.StringIO(), io.StringIO()
        app = main.LocalStorApp(stdout=out, stderr=err)
        return app.run(['abandon', *arguments]), out.getvalue(), err.getvalue()

    def test_move_goes_on(self):
        self.cloud.move(self.volume)
        self.cloud.watch()
        self.cloud.hydrate()
        self.cloud.down.add(base.A)
        self.cloud.watch()
        move = rows.for_volume(self.ctxt, self.volume.id)[0]
        self.assertEqual(table.State.COMPLETING, move.state)
        code, out, _err = self.run_command(move.move_id)
        self.assertEqual(0, code)
        self.assertIn(move.move_id, out)
        self.cloud.watch()
        self.assertEqual([], rows.for_volume(self.ctxt, self.volume.id))

    def test_move_that_nobody_knows(self):
        code, _out, err = self.run_command('nonsense')
        self.assertEqual(1, code)
        self.assertIn('no move nonsense', err)
