# SPDX-License-Identifier: Apache-2.0

import io
import logging
import os
import tempfile
from unittest import mock

from cinder.volume.targets import lio
import ddt
from oslo_concurrency import lockutils
from oslo_privsep import comm
import rtslib_fb

from cinder_localstor import exception
from cinder_localstor.node import secrets
from cinder_localstor.node import targets
from tests.unit import base
from tests.unit.node import fakes

MOVE = '6f9619ff-8b86-4d01-b42d-00cf4fc964ff'
OTHER = '7f9619ff-8b86-4d01-b42d-00cf4fc964ff'
INITIATOR = 'iqn.1993-08.org.debian:b'
ADDRESSES = '192.0.2.2'
SHOWN = '''\
Target 1: iqn.2010-10.org.openstack:volume-%s
    System information:
Target 2: iqn.2010-10.org.openstack:localstor-%s
    System information:
        Driver: iscsi
    Account information:
        somebody
    ACL information:
        192.0.2.2
        iqn.1993-08.org.debian:b
'''


@ddt.ddt
class ParseTest(base.TestCase):

    @ddt.data(('', set()), ('garbage \0', set()),
              (SHOWN % (OTHER, MOVE), {MOVE}),
              ('iqn.2010-10.org.openstack:localstor-%s\n'
               'iqn.2010-10.org.openstack:localstor-%s\n' % (MOVE, OTHER),
               {MOVE, OTHER}),
              ('iqn.2010-10.org.openstack:localstor-6f9619ff', set()))
    @ddt.unpack
    def test_moves_are_found_among_other_targets(self, text, expected):
        self.assertEqual(expected, targets.parse_targets(text))


class TargetTestCase(base.TestCase):

    def setUp(self):
        super().setUp()
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = directory.name
        self.override('volumes_dir', self.directory)
        self.override('target_prefix', 'iqn.2010-10.org.openstack:')
        self.command = fakes.FakeCommands()

    def assert_secret_is_hidden_till_the_export_ends(self):
        self.target.export(MOVE, '/dev/mapper/v-handle', self.described)
        self.assertNotIn(self.described.password,
                         secrets.mask(self.described.password))
        self.target.unexport(MOVE)
        self.assertEqual(self.described.password,
                         secrets.mask(self.described.password))

    def assert_secret_is_in_no_log(self):
        out = io.StringIO()
        handler = logging.StreamHandler(out)
        logging.getLogger().addHandler(handler)
        self.addCleanup(logging.getLogger().removeHandler, handler)
        self.target.export(MOVE, '/dev/mapper/v-handle', self.described)
        logging.getLogger('cinder.volume.targets').error(
            'Writes %s', {'chap_auth': self.described.password})
        self.assertIn('Writes', out.getvalue())
        self.assertNotIn(self.described.password, out.getvalue())


@ddt.ddt
class ChoiceTest(TargetTestCase):

    @ddt.data(('tgtadm', targets.TgtSourceTarget),
              ('lioadm', targets.LioSourceTarget))
    @ddt.unpack
    def test_target_helper_decides(self, helper, expected):
        self.override('target_helper', helper)
        self.assertIsInstance(targets.source_target(self.configuration,
                                                    self.command),
                              expected)

    def test_helper_that_can_not_do_it_is_refused_by_name(self):
        self.override('target_helper', 'scstadmin')
        error = self.assertRaises(exception.LocalStorException,
                                  targets.source_target, self.configuration,
                                  self.command)
        for part in ('scstadmin', 'tgtadm', 'lioadm'):
            self.assertIn(part, str(error))


class TgtTest(TargetTestCase):

    def setUp(self):
        super().setUp()
        self.target = targets.TgtSourceTarget(self.configuration,
                                              self.command)
        self.described = self.target.describe(MOVE, INITIATOR, '192.0.2.2')
        self.shows(SHOWN % (MOVE, OTHER))

    def shows(self, text):
        self.command.answer('tgtadm --lld iscsi --mode target --op show', text)

    def changes(self):
        """What was done to which targets, in order."""
        return [line.removeprefix('tgtadm --lld iscsi --mode ')
                for line in self.command.ran if '--op show' not in line]

    def export(self):
        self.target.export(MOVE, '/dev/mapper/v-handle', self.described)

    def test_description(self):
        self.override('target_port', 3333)
        export = self.target.describe(MOVE, INITIATOR,
                                      '192.0.2.2')
        self.assertEqual(
            ('192.0.2.1:3333', 'iqn.2010-10.org.openstack:localstor-' + MOVE,
             1, MOVE, INITIATOR),
            (export.portal, export.iqn, export.lun, export.serial,
             export.initiator))

    def test_secrets_differ_from_move_to_move(self):
        other = self.target.describe(MOVE, INITIATOR,
                                     '192.0.2.2')
        self.assertNotEqual(other.password, self.described.password)
        self.assertNotIn(other.password, repr(other))

    def test_exported_is_what_is_whole_and_a_move_s(self):
        self.assertEqual({OTHER}, self.target.exported())
        self.shows((SHOWN % (OTHER, MOVE)).replace('192.0.2.2', ''))
        self.assertEqual(set(), self.target.exported())
        self.assertEqual({MOVE}, self.target.remains())

    def test_export_is_made(self):
        self.export()
        self.assertIn('target --op new --tid 3 --targetname '
                      + self.described.iqn, self.changes())

    def test_export_that_is_there_is_not_made_again(self):
        self.shows(SHOWN % (OTHER, MOVE))
        self.export()
        self.assertEqual([], self.changes())

    def test_export_that_is_not_whole_is_made_anew(self):
        self.shows((SHOWN % (OTHER, MOVE)).replace('192.0.2.2', ''))
        self.export()
        self.assertEqual(['target --op delete --force --tid 2',
                          'account --op delete --user somebody',
                          'target --op new --tid 3 --targetname '
                          + self.described.iqn], self.changes()[:3])

    def test_tgtd_does_not_know_the_export_after_a_restart(self):
        self.export()
        self.assertEqual([], os.listdir(self.directory))

    def test_unexport_ends_its_sessions_and_forgets_its_user(self):
        self.shows(SHOWN % (OTHER, MOVE))
        self.target.unexport(MOVE)
        self.assertEqual(['target --op delete --force --tid 2',
                          'account --op delete --user somebody'],
                         self.changes())

    def test_unexport_of_what_is_gone_does_nothing(self):
        self.target.unexport(MOVE)
        self.assertEqual([], self.changes())

    def test_what_an_earlier_version_left_is_gone(self):
        path = os.path.join(self.directory, 'localstor-' + MOVE)
        open(path, 'w').close()
        self.target.unexport(MOVE)
        self.assertFalse(os.path.exists(path))

    def test_silent_daemon_is_an_error(self):
        self.command.hang('tgtadm')
        self.assertRaises(exception.CommandTimedOut, self.target.exported)
        self.assertRaises(exception.CommandTimedOut, self.target.unexport,
                          MOVE)

    def test_secret_is_in_no_log(self):
        self.assert_secret_is_in_no_log()

    def test_secret_is_hidden_till_the_export_ends(self):
        self.assert_secret_is_hidden_till_the_export_ends()


@ddt.ddt
class LioTest(TargetTestCase):

    def setUp(self):
        super().setUp()
        for name in ('prepare', 'export', 'unexport', 'targets', 'remains'):
            setattr(self, name, self.patch('cinder_localstor.node.lio.' + name,
                                           __name__=name))
        self.target = targets.LioSourceTarget(self.configuration,
                                              self.command)
        self.described = self.target.describe(MOVE, INITIATOR, '192.0.2.2')

    def test_disk_has_the_number_of_the_move(self):
        self.assertEqual((MOVE, 0),
                         (self.described.serial, self.described.lun))

    def test_export(self):
        self.target.export(MOVE, '/dev/mapper/v-handle', self.described)
        self.export.assert_called_once_with(self.described,
                                            '/dev/mapper/v-handle')

    def test_secret_is_in_no_log(self):
        self.assert_secret_is_in_no_log()

    def test_secret_is_hidden_till_the_export_ends(self):
        self.assert_secret_is_hidden_till_the_export_ends()

    def test_whatever_there_is_of_an_export_is_removed(self):
        self.remains.return_value = {
            self.described.iqn, self.described.iqn.replace(MOVE, OTHER)}
        self.target.unexport(MOVE)
        self.unexport.assert_called_once_with(self.described.iqn)

    def test_exports_and_remains_are_found_among_others(self):
        others = 'iqn.2010-10.org.openstack:volume-' + MOVE
        self.targets.return_value = {self.described.iqn, others}
        self.remains.return_value = {
            self.described.iqn.replace(MOVE, OTHER), others}
        self.assertEqual({MOVE}, self.target.exported())
        self.assertEqual({OTHER}, self.target.remains())

    def test_warm_up(self):
        self.target.warm_up()
        self.prepare.assert_called_once_with()

    @ddt.data((rtslib_fb.RTSLibError('device is in use'), 'device is in use'),
              (comm.PrivsepTimeout(), 'PrivsepTimeout'),
              (lockutils.AcquireLockFailedException('lioadm'), 'lioadm'),
              (OSError('no such device'), 'no such device'))
    @ddt.unpack
    def test_failure_says_why(self, error, reason):
        self.export.side_effect = error
        failed = self.assertRaises(
            exception.CommandFailed, self.target.export, MOVE,
            '/dev/mapper/v-handle', self.described)
        self.assertIn('rtslib: export', str(failed))
        self.assertIn(reason, str(failed))


class RemoteTest(base.TestCase):

    def setUp(self):
        super().setUp()
        self.driver = mock.Mock()
        self.make = self.patch('oslo_utils.importutils.import_object',
                               return_value=self.driver)
        self.volumes = mock.Mock()
        self.volumes.block_size.return_value = 512
        self.remote = targets.CinderRemoteTarget(self.configuration,
                                                 self.volumes)

    def test_driver_is_made_when_it_is_needed(self):
        # Whoever only looks at a node has no need of it.
        self.make.assert_not_called()
        self.remote.check()
        self.make.assert_called_once()

    def test_every_target_helper_has_both_kinds_of_exports(self):
        self.assertEqual(set(targets.SOURCE_TARGETS),
                         set(targets.REMOTE_TARGETS))

    def test_export_gives_the_fields_of_the_row(self):
        self.driver.create_export.return_value = {'location': 'l',
                                                  'auth': 'a'}
        self.assertEqual({'provider_location': 'l', 'provider_auth': 'a'},
                         self.remote.export(self.ctxt, 'v', '/dev/x'))

    def test_lio_has_the_export_again_whatever_else_it_has(self):
        said = []

        def execute(*command, **_options):
            said.append(command[1:])
            return SHOWN % (MOVE, OTHER), ''
        self.patch('cinder.utils.execute', execute)
        self.make.return_value = lio.LioAdm(configuration=self.configuration)
        volume = {'id': MOVE, 'name': 'volume-' + MOVE, 'provider_location':
                  '192.0.2.1:3260,1 iqn.2010-10.org.openstack:volume-%s 0'
                  % MOVE, 'provider_auth': 'CHAP user password'}
        self.remote.ensure(self.ctxt, volume, '/dev/x',
                           [{'initiator': INITIATOR}])
        self.assertIn('/dev/x', [command[1] for command in said
                                 if command[0] == 'create'])
        self.assertIn(INITIATOR, [command[-1] for command in said
                                  if command[0] == 'add-initiator'])
        self.assertNotIn(('restore',), said)

    def test_lio_is_told_nothing_of_blocks(self):
        self.volumes.block_size.return_value = 4096
        self.driver.create_export.return_value = {'location': 'l',
                                                  'auth': 'a'}
        self.override('target_helper', 'lioadm')
        self.driver.VOLUME_CONF = None
        self.remote.export(self.ctxt, 'v', '/dev/x')

    def test_connector_is_checked_before_it_is_admitted(self):
        self.driver.validate_connector.side_effect = ValueError
        self.assertRaises(ValueError, self.remote.connect, 'v', {})
        self.driver.initialize_connection.assert_not_called()


class RemoteTgtTest(TargetTestCase):
    """With Cinder's own driver of tgt."""

    VOLUME = {'id': MOVE, 'name': 'volume-' + MOVE, 'provider_auth':
              'CHAP user password', 'provider_location':
              '192.0.2.1:3260,1 iqn.2010-10.org.openstack:volume-%s 1' % MOVE}

    def setUp(self):
        super().setUp()
        self.override('target_helper', 'tgtadm')
        shown = ('Target 1: %svolume-%s\n        LUN: 1\n' % (
            self.configuration.target_prefix, MOVE), '')
        for command in ('tgtadmin_show', 'tgtadm_show', 'tgtadmin_update'):
            self.patch('cinder.privsep.targets.tgt.' + command,
                       return_value=shown)
        self.volumes = mock.Mock()
        self.remote = targets.CinderRemoteTarget(self.configuration,
                                                 self.volumes)

    def test_what_is_described_is_what_is_made(self):
        self.volumes.block_size.return_value = 512
        volume = {'id': MOVE, 'name': 'volume-' + MOVE,
                  'provider_location': None, 'provider_auth': None}
        # Cinder's driver reads the row again.
        self.remote._driver().db = mock.Mock(
            volume_get=lambda _ctxt, _volume_id: volume)
        described = self.remote.describe(self.ctxt, volume)
        volume |= described
        made = self.remote.export(self.ctxt, volume, '/dev/x')
        self.assertEqual(described['provider_auth'], made['provider_auth'])
        # But for the number that tgt has given it
        numbered = described['provider_location'].replace(',0 ', ',1 ')
        self.assertEqual(numbered, made['provider_location'])

    def test_what_is_described_can_be_taken_away(self):
        volume = dict(self.VOLUME)
        volume |= self.remote.describe(self.ctxt, volume)
        path = os.path.join(self.directory, volume['name'])
        with open(path, 'w') as file:
            file.write('<target>')
        delete = self.patch('cinder.privsep.targets.tgt.tgtadmin_delete')
        self.remote.unexport(self.ctxt, volume)
        delete.assert_called()
        self.assertFalse(os.path.exists(path))

    def written(self):
        """What tgt-admin reads, line by line."""
        path = os.path.join(self.directory, 'volume-' + MOVE)
        with open(path) as file:
            return [line.strip() for line in file if line.strip()]

    def ensure(self):
        self.remote.ensure(self.ctxt, self.VOLUME, '/dev/x', [])

    def test_disk_has_the_blocks_of_the_device(self):
        self.volumes.block_size.return_value = 4096
        self.remote.export(self.ctxt, self.VOLUME, '/dev/x')
        self.assertEqual(['<backing-store /dev/x>', 'block-size 4096',
                          '</backing-store>'], self.written()[1:4])

    def test_it_has_them_again(self):
        self.test_disk_has_the_blocks_of_the_device()
        self.ensure()
        self.assertIn('block-size 4096', self.written())

    def test_it_has_them_where_the_node_has_lost_what_it_knew(self):
        self.volumes.block_size.return_value = 4096
        self.ensure()
        self.assertIn('block-size 4096', self.written())

    def test_what_an_earlier_version_has_made_keeps_its_blocks(self):
        self.volumes.block_size.return_value = 512
        self.remote.export(self.ctxt, self.VOLUME, '/dev/x')
        self.assertIn('backing-store /dev/x', self.written())
        self.volumes.block_size.return_value = 4096
        self.ensure()
        self.assertIn('backing-store /dev/x', self.written())
