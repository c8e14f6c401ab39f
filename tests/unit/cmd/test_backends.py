# SPDX-License-Identifier: Apache-2.0

from unittest import mock

import cinder.privsep
from oslo_config import cfg

from cinder_localstor.cmd import backends
from cinder_localstor.node import privileged
from tests.unit import base

OURS = 'cinder_localstor.driver.LocalStorDriver'


class ConfiguredTest(base.TestCase):

    def setUp(self):
        super().setUp()
        for opt in backends.SERVICE_OPTS:
            self.configuration.append_config_values([opt])
        self.override('volume_driver', OURS)

    def hosts(self, *names):
        self.override_config('enabled_backends', list(names))
        return [backend.host for backend in backends.configured()]

    def test_host_is_named_as_cinder_volume_does(self):
        self.override_config('host', 'node1')
        self.assertEqual(['node1@local'], self.hosts('local'))

    def test_backend_host_goes_before_host(self):
        self.override_config('host', 'node1')
        self.override('backend_host', 'another')
        self.assertEqual(['another@local'], self.hosts('local'))

    def test_backends_of_other_drivers_are_passed_over(self):
        self.override_config('host', 'node1')
        self.assertEqual(['node1@local'], self.hosts('lvm', 'local', ''))

    def test_no_backends_at_all(self):
        self.assertEqual([], self.hosts())

    def test_options_of_the_section_are_read(self):
        self.hosts('local')
        self.assertEqual('192.0.2.1', backends.configured()[0]
                         .configuration.target_ip_address)


class LoadTest(base.TestCase):

    def setUp(self):
        super().setUp()
        self.parsed = self.patch('oslo_config.cfg.ConfigOpts.__call__')
        for context in (privileged.CONTEXT, cinder.privsep.sys_admin_pctxt):
            self.addCleanup(context.set_client_mode, context.client_mode)
            context.set_client_mode(True)

    def load(self, user, *files):
        with mock.patch('os.geteuid', return_value=user):
            backends.load(list(files))

    def test_files_are_read_in_turn(self):
        self.load(0, 'x', 'y')
        self.parsed.assert_called_once_with(
            ['--config-file', 'x', '--config-file', 'y'], project='cinder')

    def test_root_needs_no_daemon(self):
        self.load(0)
        self.assertFalse(privileged.CONTEXT.client_mode)
        self.assertFalse(cinder.privsep.sys_admin_pctxt.client_mode)

    def test_others_need_it(self):
        self.load(1000)
        self.assertTrue(privileged.CONTEXT.client_mode)

    def test_database_is_not_waited_for_without_end(self):
        self.load(0)
        self.assertEqual(backends.DATABASE_TRIES,
                         cfg.CONF.database.max_retries)
