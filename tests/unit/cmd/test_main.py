# SPDX-License-Identifier: Apache-2.0

import io
import logging
import unittest

from cliff import help

from cinder_localstor.cmd import main


class MainTest(unittest.TestCase):

    def setUp(self):
        root = logging.getLogger()
        before = list(root.handlers), root.level

        def restore():
            root.handlers[:], root.level = before
        self.addCleanup(restore)
        self.err = io.StringIO()
        self.out = io.StringIO()

    def run_app(self, *arguments):
        app = main.LocalStorApp(stdout=self.out, stderr=self.err)
        try:
            return app.run(list(arguments))
        except help.HelpExit:
            return 0

    def test_status_is_among_the_commands(self):
        self.run_app('--help')
        self.assertIn('status', self.out.getvalue())
        self.assertIn('--config-file', self.out.getvalue())

    def test_command_alone_gives_help(self):
        self.assertEqual(0, self.run_app())
        self.assertIn('status', self.out.getvalue())

    def test_exit_status_is_explained(self):
        self.run_app('help', 'status')
        self.assertIn('exit status', self.out.getvalue())

    def test_libraries_are_quiet_on_the_terminal(self):
        self.run_app('--help')
        logging.getLogger('os_brick').error('noise')
        main.LocalStorApp.LOG.error('what matters')
        self.assertEqual('what matters\n', self.err.getvalue())

    def test_all_of_it_is_there_when_asked_for(self):
        self.run_app('-v', '--help')
        logging.getLogger('os_brick').error('noise')
        self.assertIn('noise', self.err.getvalue())
