# SPDX-License-Identifier: Apache-2.0

import io

from cinder_localstor.cmd import backends
from cinder_localstor.cmd import main
from tests.unit import base
from tests.unit import services

A, B = base.A, base.B


class LostTest(base.TestCase):

    def setUp(self):
        super().setUp()
        self.cloud = services.Services(self)
        self.volume = self.cloud.create()
        service = self.cloud.services[A]
        service.disabled = True
        service.save()
        self.patch('cinder_localstor.cmd.backends.load')
        self.patch('cinder_localstor.cmd.backends.configured',
                   return_value=[backends.Configured(B, None)])
        self.down = self.patch('cinder_localstor.peers.directory.down',
                               return_value={A})

    def run_command(self, *arguments):
        """Exit status, output and what goes to the error output."""
        out, err = io.StringIO(), io.StringIO()
        app = main.LocalStorApp(stdout=out, stderr=err)
        code = app.run(['lost', *arguments])
        return code, out.getvalue(), err.getvalue()

    def test_what_is_lost_is_told(self):
        snapshot = self.cloud.take_snapshot(self.volume)
        code, out, err = self.run_command(A)
        self.assertEqual((0, ''), (code, err))
        self.assertEqual(
            ['Snapshot %s is lost, and can be deleted.' % snapshot.id,
             'Volume %s is lost. See --give-up-volumes.' % self.volume.id],
            out.splitlines())
        self.assertEqual('available', self.cloud.refresh(self.volume).status)

    def test_volumes_are_given_up_on_demand(self):
        code, out, _err = self.run_command(A, '--give-up-volumes')
        self.assertEqual(0, code)
        self.assertIn('Volume %s is lost. Its users can delete it.'
                      % self.volume.id, out)
        self.assertEqual(B, self.cloud.host_of(self.volume))

    def test_move_that_waits_changes_the_exit_status(self):
        self.cloud.attach(self.volume, B)
        self.cloud.watch()
        code, out, _err = self.run_command(A)
        self.assertEqual(1, code)
        self.assertIn('Volume %s: Move ' % self.volume.id, out)
        self.assertIn('holds what no other node has', out)

    def test_move_that_goes_on_is_told(self):
        self.cloud.attach(self.volume, B)
        self.cloud.watch()
        self.cloud.hydrate()
        self.cloud.down.add(A)
        self.cloud.watch()
        code, out, _err = self.run_command(A)
        self.assertEqual(0, code)
        self.assertIn('(completing) goes on without it.', out)

    def test_node_that_is_up(self):
        self.down.return_value = set()
        code, _out, err = self.run_command(A, '--give-up-volumes')
        self.assertEqual(1, code)
        self.assertIn('a@local is not given up: its cinder-volume is up', err)
        self.assertEqual(A, self.cloud.host_of(self.volume))

    def test_this_node_has_no_such_backend(self):
        self.down.return_value = {'a@thin'}
        code, _out, err = self.run_command('a@thin', '--give-up-volumes')
        self.assertEqual(1, code)
        self.assertIn('no backend thin of this driver on this node', err)
