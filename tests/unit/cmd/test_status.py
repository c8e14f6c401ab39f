# SPDX-License-Identifier: Apache-2.0

import io
import json
from unittest import mock

from oslo_db import exception as db_exception

from cinder_localstor.cmd import backends
from cinder_localstor.cmd import main
from cinder_localstor.cmd import status
from cinder_localstor import rows
from tests.unit import base


class Interrupted(Exception):
    """The operator has seen enough."""


class StatusTest(base.TestCase):

    def setUp(self):
        super().setUp()
        self.cloud = base.Cloud(self)
        self.volume = self.cloud.create_volume()
        self.loaded = self.patch('cinder_localstor.cmd.backends.load')
        self.patch('cinder_localstor.cmd.backends.configured',
                   return_value=[backends.Configured(base.A, None)])
        self.node = self.patch('cinder_localstor.node.real.node',
                               return_value=self.cloud.nodes[base.A])
        self.slept = self.patch('cinder_localstor.cmd.status.time').sleep

    def run_command(self, *arguments):
        """Exit status, output and what goes to the error output."""
        out, err = io.StringIO(), io.StringIO()
        app = main.LocalStorApp(stdout=out, stderr=err)
        with mock.patch.dict('os.environ', {'COLUMNS': '200'}):
            code = app.run(['status', *arguments])
        return code, out.getvalue(), err.getvalue()

    def test_all_is_well(self):
        code, out, err = self.run_command()
        self.assertEqual(0, code)
        self.assertIn(self.volume.id, out)
        self.assertIn('all well', out)
        self.assertEqual('', err)
        self.slept.assert_not_called()

    def test_problem_that_lasts_changes_the_exit_status(self):
        self.cloud.nodes[base.A].cut_power()
        code, out, _err = self.run_command()
        self.assertEqual(1, code)
        self.assertIn('it has no handle', out)
        self.slept.assert_called_once_with(status.SECOND_LOOK)

    def test_problem_that_is_gone_a_second_later_does_not(self):
        node = self.cloud.nodes[base.A]
        node.cut_power()
        self.slept.side_effect = lambda _time: self.cloud.boot(base.A)
        self.assertEqual(0, self.run_command()[0])

    def test_json(self):
        code, out, _err = self.run_command('-f', 'json')
        self.assertEqual(0, code)
        self.assertEqual([(base.A, self.volume.id, 1 << 30, [])],
                         [(line['Backend'], line['Volume'], line['Size'],
                           line['Problems']) for line in json.loads(out)])

    def test_table_and_columns(self):
        _code, out, _err = self.run_command('-f', 'table', '-c', 'Volume')
        self.assertIn(self.volume.id, out)
        self.assertNotIn('standing', out)

    def test_wrong_exit_status_in_any_format(self):
        self.cloud.nodes[base.A].cut_power()
        for form in ('json', 'value', 'csv', 'yaml'):
            self.assertEqual(1, self.run_command('-f', form)[0])

    def test_node_without_our_backends(self):
        backends.configured.return_value = []
        code, out, _err = self.run_command()
        self.assertEqual(1, code)
        self.assertIn('No backend', out)

    def test_database_that_does_not_answer(self):
        with mock.patch.object(rows, 'for_host',
                               side_effect=db_exception.DBConnectionError(
                                   Exception('nobody there\nmore'))):
            code, out, err = self.run_command()
        self.assertEqual(1, code)
        self.assertEqual('', out)
        self.assertIn('nobody there. Check', err)

    def test_configuration_files_are_handed_on(self):
        out = io.StringIO()
        main.LocalStorApp(stdout=out, stderr=out).run(
            ['--config-file', 'x', 'status'])
        self.loaded.assert_called_once_with(['x'])

    def test_watch_shows_it_again_and_again(self):
        self.cloud.move(self.volume)
        self.cloud.watch()
        self.node.return_value = self.cloud.nodes[base.B]
        backends.configured.return_value = [backends.Configured(base.B,
                                                                None)]
        self.slept.side_effect = [None, None, Interrupted]
        looks = mock.patch.object(status.Watcher, 'look', autospec=True,
                                  side_effect=status.Watcher.look)
        with looks as look:
            _code, out, _err = self.run_command('--watch', '--interval', '7')
        self.assertEqual(3, look.call_count)
        self.slept.assert_called_with(7.0)
        self.assertIn('migrating', out)

    def test_watch_survives_the_database(self):
        self.slept.side_effect = [None, Interrupted]
        found = rows.for_host(self.ctxt, base.A)
        with mock.patch.object(rows, 'for_host', side_effect=[
                db_exception.DBConnectionError(Exception('gone')), found]):
            _code, out, _err = self.run_command('--watch')
        self.assertIn(self.volume.id, out)

    def test_interval_has_to_be_above_zero(self):
        with mock.patch('sys.stderr', io.StringIO()) as err:
            self.assertRaises(SystemExit, self.run_command, '--watch',
                              '--interval', '0')
        self.assertIn('not above 0', err.getvalue())
