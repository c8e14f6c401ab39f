# SPDX-License-Identifier: Apache-2.0

import inspect
from unittest import mock

from cinder.db import api as db
from cinder.interface import volume_driver
from cinder import objects
import ddt
from oslo_db import exception as db_exception
from oslo_utils import units
from oslo_utils import uuidutils
import sqlalchemy

from cinder_localstor import driver as package
from cinder_localstor.driver import localstor
from cinder_localstor import exception
from cinder_localstor.moves import table
from cinder_localstor import opts
from cinder_localstor import rows
from tests.unit import base

INSTANCE = {'host': 'b', 'ip': '192.0.2.2', 'initiator': 'iqn.b'}
HERE = {'host': 'a', 'ip': '192.0.2.1', 'initiator': 'iqn.a'}
STRANGER = {'host': 'glance', 'ip': '192.0.2.9', 'initiator': 'iqn.g'}


class DriverTestCase(base.TestCase):

    def setUp(self):
        super().setUp()
        self.cloud = base.Cloud(self)
        self.remote = self.cloud.nodes[base.A].remote = mock.Mock(exports={})
        self.remote.describe.return_value = {
            'provider_location': 'to be somewhere', 'provider_auth': None}
        self.remote.export.return_value = {'provider_location': 'somewhere',
                                           'provider_auth': 'CHAP u p'}
        self.remote.connect.return_value = {'driver_volume_type': 'iscsi'}
        self.patch('cinder_localstor.peers.rpc.PeerAPI',
                   side_effect=lambda host, _time: base.Peers(self.cloud,
                                                              host))
        self.patch('cinder_localstor.peers.directory.own_identity',
                   return_value=[])
        self.driver = self.make(base.A)
        self.volume = self.cloud.create_volume()

    def make(self, host):
        made = localstor.LocalStorDriver(
            configuration=self.configuration, host=host,
            make_node=lambda _configuration: self.cloud.nodes[host],
            workers=base.Inline())
        made.do_setup(self.ctxt)
        self.cloud.running[host] = made._service
        return made

    def connect(self, connector, driver=None):
        return (driver or self.driver).initialize_connection(
            self.cloud.refresh(self.volume), connector)

    def state(self):
        moves = rows.for_volume(self.ctxt, self.volume.id)
        return moves[0].state if moves else None


class ComplianceTest(base.TestCase):

    def test_driver_is_a_volume_driver_for_cinder(self):
        self.assertTrue(issubclass(package.LocalStorDriver,
                                   volume_driver.VolumeDriverCore))

    def test_methods_take_what_cinder_gives(self):
        # Cinder's own check does not look at ordinary methods.
        for name, method in inspect.getmembers(
                volume_driver.VolumeDriverCore, inspect.isfunction):
            implemented = getattr(package.LocalStorDriver, name)
            if name.startswith('_') or not callable(implemented):
                continue
            expected = inspect.signature(method)
            found = inspect.signature(implemented)
            arguments = [object() for parameter
                         in expected.parameters.values()
                         if parameter.default is parameter.empty
                         and parameter.kind
                         is parameter.POSITIONAL_OR_KEYWORD]
            found.bind(*arguments, **{
                parameter.name: parameter.default for parameter
                in expected.parameters.values()
                if parameter.default is not parameter.empty})

    def test_it_says_who_it_is(self):
        self.assertRegex(package.LocalStorDriver.VERSION, r'^\d+\.\d+\.\d+$')
        self.assertIn(package.LocalStorDriver.VERSION,
                      package.LocalStorDriver.__doc__)
        self.assertEqual('cinder-localstor',
                         package.LocalStorDriver.CI_WIKI_NAME)

    def test_options_are_listed_for_the_sample_file(self):
        listed = {opt.name for section, found in opts.list_opts()
                  for opt in found if section != 'DEFAULT'}
        ours = {opt.name for opt
                in package.LocalStorDriver.get_driver_options()
                if opt.name.startswith('localstor_')}
        self.assertEqual(ours, listed)
        self.assertIn('localstor_host_map', listed)

    def test_every_option_is_explained(self):
        for opt in opts.LOCALSTOR_OPTS:
            self.assertTrue(opt.help.rstrip().endswith('.'), opt.name)

    def test_every_option_is_read_with_cinders_defaults(self):
        for name in opts.CINDER_OPTS + opts.LVM_OPTS:
            self.assertIn(name, {opt.name for opt in opts.driver_options()})


class SetupTest(DriverTestCase):

    def test_buffered_export_is_refused(self):
        self.override('target_helper', 'tgtadm')
        self.override('iscsi_target_flags', '')
        error = self.assertRaises(exception.BufferedExport, self.make,
                                  base.A)
        self.assertIn('iscsi_target_flags = direct', str(error))

    def test_lio_needs_no_flag(self):
        self.override('target_helper', 'lioadm')
        self.override('iscsi_target_flags', '')
        self.make(base.A)

    def test_kernel_that_lacks_a_target_is_refused(self):
        self.cloud.nodes[base.A].device_mapper.check_target = mock.Mock(
            side_effect=exception.NoDataPath(host='a', target='clone'))
        self.assertRaises(exception.NoDataPath,
                          self.driver.check_for_setup_error)

    def test_both_groups_are_checked(self):
        node = self.cloud.nodes[base.A]
        node.metadata = mock.Mock()
        with mock.patch.object(node.volumes, 'check') as check:
            self.driver.check_for_setup_error()
        check.assert_called_once_with()
        node.metadata.check.assert_called_once_with()

    def test_handles_are_there_after_the_start(self):
        node = self.cloud.nodes[base.A]
        node.cut_power()
        self.driver.check_for_setup_error()
        self.assertEqual([self.volume.name + '-handle'],
                         list(node.device_mapper.nodes))

    def test_failing_look_at_the_moves_does_not_end_the_loop(self):
        with mock.patch.object(self.driver._service.scheduler, 'watch',
                               side_effect=ValueError):
            self.driver._watch_moves()

    def test_failing_look_at_the_moves_keeps_no_export_waiting(self):
        with (mock.patch.object(self.driver._service.scheduler, 'watch',
                                side_effect=ValueError),
              mock.patch.object(self.driver, '_export_again') as exported):
            self.driver._watch_moves()
        exported.assert_called_once_with()

    def log_of(self, error):
        with (mock.patch.object(self.driver._service.scheduler, 'watch',
                                side_effect=error),
              self.assertLogs('cinder_localstor', 'ERROR') as log):
            self.driver._watch_moves()
        [told] = log.output
        return told

    def test_database_that_is_away_takes_a_line_of_the_log_each_time(self):
        for error in (
                db_exception.DBConnectionError(
                    sqlalchemy.exc.OperationalError(
                        'SELECT 1', {}, Exception('gone away'))),
                sqlalchemy.exc.OperationalError(
                    'SELECT 1', {}, Exception('Too many connections'))):
            told = self.log_of(error)
            self.assertIn('Could not look after the moves', told)
            self.assertRegex(told, 'gone away|Too many connections')
            self.assertNotIn('\n', told)

    def test_any_other_error_is_told_with_its_place(self):
        self.assertIn('Traceback', self.log_of(ValueError()))

    def test_what_can_not_be_settled_keeps_no_export(self):
        with (mock.patch.object(self.driver._unfinished, 'settle',
                                side_effect=ValueError),
              mock.patch.object(self.driver, '_end_exports') as ended):
            self.driver._settle_unfinished()
        ended.assert_called_once_with()


class VolumeTest(DriverTestCase):

    def make_row(self):
        volume = objects.Volume(self.ctxt, size=2, host=base.A + '#local',
                                status='creating')
        volume.create()
        return volume

    def test_created_volume_has_its_size_and_a_handle(self):
        volume = self.make_row()
        self.assertIsNone(self.driver.create_volume(volume))
        node = self.cloud.nodes[base.A]
        self.assertEqual(2 * units.Gi, node.volumes.disks[volume.name].size)
        self.assertEqual('/dev/mapper/%s-handle' % volume.name,
                         self.driver.local_path(volume))

    def test_full_group_names_itself(self):
        self.cloud.nodes[base.A].volumes.total = 0
        error = self.assertRaises(exception.NotEnoughSpace,
                                  self.driver.create_volume, self.make_row())
        self.assertIn('group', str(error))

    def test_deleted_volume_leaves_nothing(self):
        self.driver.delete_volume(self.volume)
        self.assertEqual({}, self.cloud.nodes[base.A].volumes.disks)
        self.driver.delete_volume(self.volume)

    def test_snapshot_that_an_earlier_version_has_refused_can_be_deleted(self):
        self.driver.delete_snapshot(self.cloud.snapshot_row(self.volume))

    def test_volume_in_use_is_not_deleted(self):
        self.cloud.nodes[base.A].device_mapper.nodes[
            self.volume.name + '-handle'].open_count = 1
        error = self.assertRaises(exception.VolumeInUse,
                                  self.driver.delete_volume, self.volume)
        self.assertIn('lsof', str(error))

    def test_extend(self):
        self.driver.extend_volume(self.volume, 3)
        self.assertEqual(3 * units.Gi, self.cloud.nodes[
            base.A].volumes.disks[self.volume.name].size)

    def test_extension_that_was_given_up_changes_nothing(self):
        self.volume.previous_status = 'extending'
        self.volume.save()
        error = self.assertRaises(exception.GivenUp,
                                  self.driver.extend_volume, self.volume, 3)
        self.assertIn(self.volume.id, str(error))
        self.assertEqual(units.Gi, self.cloud.nodes[
            base.A].volumes.disks[self.volume.name].size)

    def test_moving_volume_is_extended(self):
        self.cloud.move(self.volume)
        self.make(base.B).extend_volume(self.cloud.refresh(self.volume), 3)
        name = self.cloud.refresh(self.volume).name
        self.assertEqual(3 * units.Gi, self.cloud.nodes[
            base.B].volumes.disks[name].size)

    def test_volume_that_may_yet_go_back_is_not_extended(self):
        self.cloud.reserve(self.volume, {'host': 'a'})
        self.cloud.reserve(self.volume)
        self.cloud.move(self.volume)
        self.override('localstor_peer_timeout', 1)
        error = self.assertRaises(
            exception.VolumeIsMoving, self.make(base.B).extend_volume,
            self.cloud.refresh(self.volume), 3)
        for part in (self.volume.id, base.B, 'extend it', 'starting'):
            self.assertIn(part, str(error))

    def test_volume_deleted_in_mid_move_leaves_nothing_on_either_node(self):
        for rounds in range(2):
            volume = self.cloud.create_volume()
            self.cloud.move(volume)
            for _round in range(rounds):
                self.cloud.watch()
            self.make(base.B).delete_volume(self.cloud.refresh(volume))
            self.cloud.refresh(volume).destroy()
            self.assertEqual([], self.cloud.leftovers([self.volume]))
            self.assertEqual([], rows.for_host(self.ctxt, base.A))


class StatsTest(DriverTestCase):

    def pool(self):
        return self.driver.get_volume_stats(refresh=True)['pools'][0]

    def test_space_is_that_of_the_group(self):
        self.cloud.nodes[base.A].volumes.total = 10 * units.Gi
        pool = self.pool()
        self.assertEqual((10, 9, 1, 1), (
            pool['total_capacity_gb'], pool['free_capacity_gb'],
            pool['provisioned_capacity_gb'], pool['total_volumes']))

    def test_free_space_is_never_rounded_up(self):
        self.cloud.nodes[base.A].volumes.total = 2 * units.Gi - 1
        self.assertLess(self.pool()['free_capacity_gb'], 1)

    def test_what_does_not_work_is_not_promised(self):
        pool = self.pool()
        self.assertTrue(pool['multiattach'])
        self.assertFalse(pool['QoS_support'])
        self.assertFalse(pool['thin_provisioning_support'])
        self.assertTrue(pool['thick_provisioning_support'])
        self.assertTrue(pool['consistent_group_snapshot_enabled'])
        self.assertFalse(pool.get('replication_enabled', False))
        # Cinder takes what is not said for a yes.
        self.assertIs(False, pool['online_extend_support'])

    def test_backend_and_version(self):
        stats = self.driver.get_volume_stats(refresh=True)
        self.assertEqual(('local', localstor.LocalStorDriver.VERSION),
                         (stats['volume_backend_name'],
                          stats['driver_version']))


@ddt.ddt
class ConnectionTest(DriverTestCase):
    """Which connection a connector gets, by who waits for it."""

    LOCAL, MOVE, REMOTE = localstor.Connection

    @ddt.data((HERE, True, LOCAL), (HERE, False, LOCAL),
              (INSTANCE, True, MOVE), (INSTANCE, False, REMOTE),
              (STRANGER, True, REMOTE), (STRANGER, False, REMOTE),
              ({'ip': '192.0.2.9'}, True, REMOTE))
    @ddt.unpack
    def test_choice(self, connector, instance_waits, expected):
        if instance_waits:
            self.cloud.reserve(self.volume)
        self.assertEqual(expected,
                         self.driver._choose(self.volume, connector)[0])

    def test_instance_that_is_attached_already_does_not_wait(self):
        self.cloud.reserve(self.volume, HERE)
        self.assertEqual(self.REMOTE,
                         self.driver._choose(self.volume, INSTANCE)[0])

    def test_what_a_client_of_the_former_api_has_attached_stays(self):
        attachment = self.cloud.reserve(self.volume)
        db.volume_attached(self.ctxt, attachment.id, attachment.instance_uuid,
                           None, '/dev/vdb')
        self.assertEqual(self.REMOTE,
                         self.driver._choose(self.volume, INSTANCE)[0])

    def test_attachment_without_an_instance_does_not_move_a_volume(self):
        attachment = objects.VolumeAttachment(
            self.ctxt, volume_id=self.volume.id, attach_status='reserved')
        attachment.create()
        self.assertEqual(self.REMOTE,
                         self.driver._choose(self.volume, INSTANCE)[0])

    def test_local_connection_is_the_handle(self):
        self.assertEqual(
            {'driver_volume_type': 'local', 'data': {
                'device_path': '/dev/mapper/%s-handle' % self.volume.name}},
            self.connect(HERE))
        self.assertIsNone(self.driver.create_export(self.ctxt, self.volume,
                                                    HERE))

    def test_cinder_gets_a_link_to_what_it_decrypts(self):
        named, other = ({'driver_volume_type': 'local', 'data': {
            'device_path': '/dev/%s/%s-handle' % (where, self.volume.name)}}
            for where in ('mapper', 'link'))
        self.assertEqual(named, self.connect(HERE))
        self.volume.encryption_key_id = uuidutils.generate_uuid()
        self.volume.save()
        self.assertEqual(other, self.connect(HERE))
        self.cloud.reserve(self.volume)
        self.assertEqual(named, self.connect(HERE))
        # Its image is written again, while its instance waits.
        self.volume.status = 'downloading'
        self.volume.save()
        self.assertEqual(other, self.connect(HERE))

    def test_connection_to_a_thin_volume_tells_that_it_can_be_trimmed(self):
        self.cloud.nodes[base.A].volumes.pool_size = 64 * units.Gi
        self.assertIs(True, self.connect(HERE)['data']['discard'])

    def test_copy_that_can_have_no_handle_is_not_attached(self):
        node = self.cloud.nodes[base.A]
        node.device_mapper.nodes.clear()
        with mock.patch.object(node.volumes, 'active_names',
                               return_value=set()):
            error = self.assertRaises(exception.HandleMissing, self.connect,
                                      HERE)
        self.assertIn(self.volume.name, str(error))

    @ddt.data(HERE, INSTANCE, STRANGER)
    def test_handle_is_made_where_it_could_not_be_before(self, connector):
        self.cloud.write(self.volume, 3, 'before')
        self.cloud.nodes[base.A].device_mapper.nodes.clear()
        self.cloud.reserve(self.volume)
        self.driver.create_export(self.ctxt, self.volume, connector)
        self.connect(connector)
        self.assertEqual(self.cloud.content[self.volume.id],
                         self.cloud.read(self.volume))

    def test_instance_elsewhere_gets_the_volume_there(self):
        self.cloud.reserve(self.volume)
        self.assertIsNone(self.driver.create_export(self.ctxt, self.volume,
                                                    INSTANCE))
        info = self.connect(INSTANCE)
        self.assertEqual('local', info['driver_volume_type'])
        self.assertEqual(self.cloud.handle(self.volume),
                         info['data']['device_path'])
        self.assertEqual(base.B, self.cloud.host_of(self.volume))
        self.assertEqual(table.State.MIGRATING, self.state())

    def test_backup_does_not_drag_the_volume_along(self):
        self.volume.update(self.driver.create_export(self.ctxt, self.volume,
                                                     INSTANCE))
        self.volume.save()
        self.assertEqual('iscsi',
                         self.connect(INSTANCE)['driver_volume_type'])
        self.assertEqual(base.A, self.cloud.host_of(self.volume))
        self.assertIsNone(self.state())

    def test_remote_export_is_that_of_the_handle(self):
        fields = self.driver.create_export(self.ctxt, self.volume, STRANGER)
        self.assertEqual('somewhere', fields['provider_location'])
        exported, = self.remote.export.mock_calls
        self.assertEqual('/dev/mapper/%s-handle' % self.volume.name,
                         exported.args[2])

    def test_volume_with_a_remote_connection_does_not_move(self):
        self.cloud.reserve(self.volume)
        self.volume.provider_location = 'somewhere'
        self.volume.save()
        error = self.assertRaises(exception.VolumeConnectedElsewhere,
                                  self.connect, INSTANCE)
        self.assertIn(self.volume.id, str(error))

    def test_connector_without_a_host_is_refused(self):
        self.assertRaises(exception.InvalidConnector, self.connect,
                          {'initiator': 'iqn.x'})


class NoSpaceTest(DriverTestCase):

    def setUp(self):
        super().setUp()
        self.cloud.nodes[base.B].volumes.total = 0
        self.cloud.reserve(self.volume)

    def test_error_names_the_space(self):
        error = self.assertRaises(exception.PeerFailed, self.connect,
                                  INSTANCE)
        for part in (base.B, 'group', 'vgextend'):
            self.assertIn(part, str(error))
        self.assertEqual([], self.cloud.leftovers([self.volume]))

    def test_remote_connection_instead_if_so_configured(self):
        self.override('localstor_no_space', 'remote')
        self.assertEqual('iscsi',
                         self.connect(INSTANCE)['driver_volume_type'])
        self.assertEqual(base.A, self.cloud.host_of(self.volume))
        self.assertEqual('somewhere', self.cloud.refresh(
            self.volume).provider_location)
        self.assertIsNone(self.state())

    def test_other_failures_are_failures(self):
        self.override('localstor_no_space', 'remote')
        self.cloud.nodes[base.B].volumes.total = 1 << 40
        self.cloud.nodes[base.B].volumes.block_size = lambda: 4096
        error = self.assertRaises(exception.PeerFailed, self.connect,
                                  INSTANCE)
        self.assertEqual('BlockSizesDiffer', error.kind)

    def test_peer_that_is_down_is_a_failure(self):
        self.override('localstor_no_space', 'remote')
        self.cloud.down.add(base.B)
        self.assertRaises(exception.PeerDown, self.connect, INSTANCE)


class UnknownHostTest(DriverTestCase):

    def test_anybody_may_connect(self):
        self.driver.validate_connector(STRANGER)

    def test_strangers_are_refused_if_so_configured(self):
        self.override('localstor_unknown_host', 'refuse')
        for connector in (HERE, INSTANCE):
            self.driver.validate_connector(connector)
        error = self.assertRaises(exception.UnknownHost,
                                  self.driver.validate_connector, STRANGER)
        for part in ('glance', '192.0.2.9', base.A, base.B,
                     'localstor_host_map'):
            self.assertIn(part, str(error))


class DisconnectTest(DriverTestCase):

    def remote_volume(self):
        self.volume.provider_location = 'somewhere'
        self.volume.save()
        return self.volume

    def test_remote_connection_is_closed(self):
        self.driver.terminate_connection(self.remote_volume(), STRANGER)
        self.remote.disconnect.assert_called_once_with(self.volume, STRANGER)

    def test_forced_detach_without_a_connector_does_no_harm(self):
        self.driver.terminate_connection(self.remote_volume(), None,
                                         force=True)
        self.driver.terminate_connection(self.volume, None, force=True)

    def test_local_disconnection_has_nothing_to_do(self):
        self.driver.terminate_connection(self.volume, HERE)
        self.remote.disconnect.assert_not_called()

    def test_export_stays_while_another_attachment_is_connected(self):
        self.cloud.reserve(self.volume, HERE)
        self.assertFalse(
            self.driver.terminate_connection(self.volume, HERE))
        self.cloud.reserve(self.remote_volume(), STRANGER)
        self.assertTrue(self.driver.terminate_connection(self.volume, HERE))

    def test_volume_that_has_left_is_refused_before_it_is_exported(self):
        # A request that waited, or was sent when the volume was still here
        self.cloud.reserve(self.volume)
        self.cloud.move(self.volume)
        left = self.cloud.refresh(self.volume)
        for connector in (HERE, INSTANCE, STRANGER):
            self.assertRaises(exception.VolumeElsewhere,
                              self.driver.create_export, self.ctxt, left,
                              connector)
        self.remote.export.assert_not_called()

    def test_refused_move_takes_no_export_away(self):
        # Cinder removes the export when initialize_connection fails, and
        # not when create_export does.
        self.cloud.reserve(self.remote_volume(), STRANGER)
        self.cloud.reserve(self.volume)
        self.assertRaises(exception.VolumeConnectedElsewhere,
                          self.driver.create_export, self.ctxt,
                          self.cloud.refresh(self.volume),
                          {'host': 'b', 'initiator': 'iqn.b'})

    def test_export_that_is_removed_leaves_no_fields(self):
        self.driver.remove_export(self.ctxt, self.remote_volume())
        self.remote.unexport.assert_called_once()
        self.assertIsNone(self.cloud.refresh(self.volume).provider_location)
        self.driver.remove_export(self.ctxt, self.cloud.refresh(self.volume))
        self.remote.unexport.assert_called_once()

    def test_only_exported_volumes_are_exported_again(self):
        self.driver.ensure_export(self.ctxt, self.volume)
        self.remote.ensure.assert_not_called()
        self.driver.ensure_export(self.ctxt, self.remote_volume())
        self.remote.ensure.assert_called_once()

    def test_move_is_looked_after_when_an_attachment_has_gone(self):
        first = self.cloud.reserve(self.volume, HERE)
        self.cloud.reserve(self.volume)
        self.connect(INSTANCE)
        there = self.make(base.B)
        self.assertEqual(table.State.STARTING, self.state())
        first.destroy()
        with base.no_pause():
            there.terminate_connection(self.cloud.refresh(self.volume), HERE)
        self.assertEqual(table.State.MIGRATING, self.state())
