# SPDX-License-Identifier: Apache-2.0

import io
from unittest import mock

from oslo_db import exception as db_exception

from cinder_localstor.cmd import backends
from cinder_localstor.cmd import main
from tests.unit import base
from tests.unit import services

A, B = base.A, base.B


class DrainTest(base.TestCase):

    def setUp(self):
        super().setUp()
        self.cloud = services.Services(self)
        self.volume = self.cloud.create()
        self.disable()
        self.patch('cinder_localstor.cmd.backends.load')
        self.patch('cinder_localstor.cmd.backends.join_bus')
        self.configured = [backends.Configured(A, mock.Mock(
            volume_backend_name='local'))]
        self.patch('cinder_localstor.cmd.backends.configured',
                   side_effect=lambda: self.configured)
        self.patch('cinder_localstor.cmd.drain.time').sleep.side_effect = (
            lambda _seconds: self.cloud.settle())

    def disable(self, disabled=True):
        service = self.cloud.services[A]
        service.disabled = disabled
        service.save()

    def run_command(self, *arguments):
        """Exit status, output and what goes to the error output."""
        self.cloud._publish()
        out, err = io.StringIO(), io.StringIO()
        app = main.LocalStorApp(stdout=out, stderr=err)
        with mock.patch.dict('os.environ', {'COLUMNS': '200'}):
            code = app.run(['drain', *arguments])
        return code, out.getvalue(), err.getvalue()

    def test_all_goes(self):
        code, out, err = self.run_command()
        self.assertEqual((0, ''), (code, err))
        self.assertIn('100%', out)
        self.assertIn('a@local has nothing left.', out)
        self.assertEqual(B, self.cloud.host_of(self.volume))

    def test_what_stays_is_shown_with_the_reason(self):
        other = self.cloud.create()
        self.cloud.attach(self.volume, A)
        code, out, _err = self.run_command()
        self.assertEqual(1, code)
        self.assertIn(self.volume.id, out)
        self.assertIn('attached to ' + base.INSTANCE, out)
        self.assertNotIn(other.id, out)
        self.assertEqual(B, self.cloud.host_of(other))

    def test_plan_is_shown_and_nothing_done(self):
        self.disable(False)
        code, out, _err = self.run_command('--dry-run')
        self.assertEqual(0, code)
        self.assertIn('a@local: 1 volumes would go, 0 are on their way', out)
        self.assertNotIn('nothing left', out)
        self.assertEqual(A, self.cloud.host_of(self.volume))

    def test_backend_that_takes_new_volumes(self):
        self.disable(False)
        code, _out, err = self.run_command()
        self.assertEqual(1, code)
        self.assertIn('openstack volume service set --disable', err)
        self.assertEqual(A, self.cloud.host_of(self.volume))

    def test_backend_by_its_name(self):
        self.configured.append(backends.Configured('a@thin', mock.Mock(
            volume_backend_name='thin')))
        self.assertEqual(0, self.run_command('local')[0])
        code, _out, err = self.run_command('thick')
        self.assertEqual(1, code)
        self.assertIn('no backend thick of this driver on this node, but '
                      'local, thin', err)

    def test_number_that_is_none(self):
        self.assertRaises(SystemExit, self.run_command, '--at-once', '0')

    def test_database_does_not_answer(self):
        with mock.patch('cinder_localstor.moves.registry.read',
                        side_effect=db_exception.DBConnectionError('gone')):
            code, _out, err = self.run_command()
        self.assertEqual(1, code)
        self.assertIn('gone', err)
