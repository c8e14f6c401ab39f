# SPDX-License-Identifier: Apache-2.0

import contextlib
import errno
import itertools
import json
import os
import pathlib
from unittest import mock

import ddt
import fixtures
from oslo_utils import units

from cinder_localstor import exception
from cinder_localstor.node import interface
from cinder_localstor.node import lvm
from tests.unit import base
from tests.unit.node import fakes


def row(name='volume-1', **more):
    return {'lv_name': name, 'lv_size': str(units.Gi), 'lv_tags': '',
            'lv_attr': '-wi-a-----', 'pool_lv': '', 'origin': '',
            'data_percent': '', 'metadata_percent': '', 'chunk_size': '0',
            'origin_size': '', **more}


def lvs(*rows):
    return json.dumps({'report': [{'lv': list(rows)}]})


def disk(name='/dev/null', **more):
    return {'vg_mda_size': str(units.Mi), 'vg_mda_free': str(units.Mi // 2),
            'vg_missing_pv_count': '0', 'pv_name': name, 'pv_size': '0',
            'pv_free': '0', 'pv_allocatable': 'allocatable', **more}


def vgs(*disks):
    return json.dumps({'report': [{'vg': list(disks)}]})


@ddt.ddt
class ParseTest(base.TestCase):

    def test_volume(self):
        self.assertEqual(
            {'volume-1': {'size': units.Gi,
                          'tags': frozenset(['localstor.move=m', 'other']),
                          'open': True, 'active': True, 'zeroes': True,
                          'valid': True, 'pool': 'disks-pool', 'origin': '',
                          'data_percent': 12.5, 'metadata_percent': 0,
                          'kind': 'V', 'writable': True, 'ailment': '',
                          'skipped': False, 'half_made': False,
                          'chunk': 0, 'origin_size': 0}},
            lvm.parse_logical_volumes(lvs(row(
                lv_tags='localstor.move=m,other', lv_attr='Vwi-aotz--',
                pool_lv='disks-pool', data_percent='12.50'))))

    def test_volume_that_nobody_has_open(self):
        found = lvm.parse_logical_volumes(lvs(row()))
        self.assertFalse(found['volume-1']['open'])

    def test_group_without_volumes(self):
        self.assertEqual({}, lvm.parse_logical_volumes(lvs()))

    @ddt.data('', 'not json', '[]', 'null', '{}', '{"report": []}',
              '{"report": [{"vg": []}]}', '{"report": [{"lv": null}]}',
              '{"report": [{"lv": [["lv_name"]]}]}',
              '{"report": [{"lv": [{"lv_name": 7}]}]}',
              '{"report": [{"lv": [')
    def test_other_output_is_refused(self, text):
        error = self.assertRaises(exception.OutputNotUnderstood,
                                  lvm.parse_logical_volumes, text)
        self.assertIn('lvs', str(error))

    @ddt.data({'lv_size': '1g'}, {'lv_size': ''}, {'lv_attr': '-wi'},
              {'data_percent': 'x'})
    def test_bad_field_is_refused(self, fields):
        self.assertRaises(exception.OutputNotUnderstood,
                          lvm.parse_logical_volumes, lvs(row(**fields)))

    @ddt.data(*row())
    def test_missing_field_is_refused(self, name):
        bad = row()
        del bad[name]
        self.assertRaises(exception.OutputNotUnderstood,
                          lvm.parse_logical_volumes, lvs(bad))


@ddt.ddt
class FilterTest(base.TestCase):

    @ddt.data((['a|.*|'], True), ([], True), (['r|.*|'], False),
              (['a|^/dev/sd[ab]$|', 'r|.*|'], False),
              (['r|/dev/sd|', 'a|.*|'], False),
              (['a|/dev/sd|', 'r|.*|'], True),
              (['r#/dev/nbd#'], True), (['r{^/dev/}'], False))
    @ddt.unpack
    def test_first_match_decides(self, filters, admitted):
        self.assertIs(admitted, lvm.is_admitted('/dev/sdz', filters))

    @ddt.data('', 'a', 'x|.*|', 'r|(|')
    def test_other_filter_is_refused(self, text):
        self.assertRaises(ValueError, lvm.is_admitted, '/dev/sdz', [text])

    @ddt.data('', '\tuse_devicesfile=0\n')
    def test_devices_section(self, devices_file):
        text = ('devices {\n'
                '\tdir="/dev"\n'
                '%s'
                '\tfilter=["a|.*|"]\n'
                '\tglobal_filter=["a|^/dev/md=\\\\d$|","r|.*|"]\n'
                '}\n' % devices_file)
        settings = lvm.parse_devices_section(text)
        self.assertEqual(['a|^/dev/md=\\d$|', 'r|.*|'],
                         settings.pop('global_filter'))
        self.assertEqual({'use_devicesfile': 0} if devices_file else {},
                         settings)

    @ddt.data('', 'something else', 'global_filter', 'global_filter=',
              'global_filter=["a', 'filter=["r|.*|"]',
              'global_filter=["r|.*|"]\nuse_devicesfile=')
    def test_other_devices_section_is_refused(self, text):
        self.assertRaises(exception.OutputNotUnderstood,
                          lvm.parse_devices_section, text)


class GroupTestCase(base.TestCase):

    kind = 'default'

    def setUp(self):
        super().setUp()
        self.command = fakes.FakeCommands()
        self.command.answer('lvs', lvs())
        self.flush = self.patch('cinder_localstor.node.privileged.flush')
        self.hide = self.patch('cinder_localstor.node.udev.hide_group')
        self.has_backup = self.patch(
            'cinder_localstor.node.privileged.has_backup', return_value=False)
        self.holder = self.patch(
            'cinder_localstor.node.privileged.lock_holder', return_value=None)
        self.group = self.make(self.kind)

    def make(self, kind):
        return lvm.LVMVolumeGroup('disks', kind, 'volume_group',
                                  self.configuration, self.command)


@ddt.ddt
class ThickTest(GroupTestCase):

    def test_create_takes_bytes_and_tags(self):
        self.assertTrue(self.group.create(
            'volume-1', units.Gi, frozenset(['b=2', 'a=1'])))
        self.assertEqual(['lvcreate --yes --name volume-1 --addtag a=1 '
                          '--addtag b=2 --size 1073741824b disks'],
                         self.command.ran)

    def test_create_of_what_is_there_changes_nothing(self):
        self.command.fail('lvcreate', 'Logical Volume "volume-1" already '
                          'exists in volume group "disks"')
        self.assertFalse(self.group.create('volume-1', 1, frozenset()))

    @ddt.data('create', 'extend')
    def test_full_group_is_told_with_numbers(self, method):
        self.command.answer('lvs', lvs(row()))
        self.command.answer('vgs', vgs(disk(pv_size=str(4 * units.Gi),
                                            pv_free=str(units.Gi))))
        for program in ('lvcreate', 'lvextend'):
            self.command.fail(program, 'Volume group "disks" has '
                              'insufficient free space (256 extents)')
        arguments = ['volume-1', 3 * units.Gi]
        if method == 'create':
            arguments.append(frozenset())
        error = self.assertRaises(exception.NotEnoughSpace,
                                  getattr(self.group, method), *arguments)
        for part in ('disks', 'node1', '1.00 GiB', '3.00 GiB', 'volume-1'):
            self.assertIn(part, str(error))

    @ddt.data(*itertools.product(
        ('create', 'extend'),
        ('VG disks 32 metadata on /dev/sdb (521969 bytes) exceeds maximum '
         'metadata size (521472 bytes)\n  Failed to write VG disks.',
         'VG disks 17 metadata on /dev/sdb (524000 bytes) too large for '
         'circular buffer (1044480 bytes with 523900 used)')))
    @ddt.unpack
    def test_full_metadata_area_is_told_with_what_to_do(self, method, said):
        self.command.answer('lvs', lvs(row()))
        for program in ('lvcreate', 'lvextend'):
            self.command.fail(program, said)
        arguments = ['volume-1', 3 * units.Gi]
        if method == 'create':
            arguments.append(frozenset())
        error = self.assertRaises(exception.MetadataAreaFull,
                                  getattr(self.group, method), *arguments)
        for part in ('disks', 'node1', 'volume-1', '/dev/sdb',
                     '--metadatasize'):
            self.assertIn(part, str(error))

    @ddt.data(('create', 'lvcreate', ('volume-1', 2 * units.Gi,
                                      frozenset())),
              ('extend', 'lvextend', ('volume-1', 2 * units.Gi)),
              ('remove', 'lvremove', ('volume-1',)),
              ('rename', 'lvrename', ('volume-1', 'volume-2')),
              ('retag', 'lvchange', ('volume-1', frozenset('a'),
                                     frozenset())),
              ('check', 'vgs', ()),
              ('logical_volumes', 'lvs', ()),
              ('capacity', 'vgs', ()))
    @ddt.unpack
    def test_time_out_is_never_taken_for_anything_else(self, method, program,
                                                       arguments):
        self.command.answer('lvs', lvs(row()))
        self.command.hang(program)
        self.assertRaises(exception.CommandTimedOut,
                          getattr(self.group, method), *arguments)

    @ddt.data(('create', 'lvcreate', ('volume-1', 2 * units.Gi,
                                      frozenset())),
              ('extend', 'lvextend', ('volume-1', 2 * units.Gi)),
              ('rename', 'lvrename', ('volume-1', 'volume-2')),
              ('remove', 'lvremove', ('volume-1',)))
    @ddt.unpack
    def test_other_failure_is_passed_on(self, method, program, arguments):
        self.command.answer('lvs', lvs(row()))
        self.command.fail(program, 'disk on fire')
        error = self.assertRaises(exception.CommandFailed,
                                  getattr(self.group, method), *arguments)
        self.assertIn('disk on fire', str(error))

    def test_extend_of_what_is_big_enough_does_nothing(self):
        self.command.answer('lvs', lvs(row()))
        self.group.extend('volume-1', units.Gi)
        self.assertEqual([], self.command.ran_of('lvextend'))

    def test_extend_of_what_is_gone_names_it(self):
        self.command.answer('lvs', lvs())
        error = self.assertRaises(exception.LogicalVolumeMissing,
                                  self.group.extend, 'volume-1', units.Gi)
        self.assertIn('disks/volume-1', str(error))

    def test_remove_of_what_is_gone_changes_nothing(self):
        self.command.fail('lvremove', 'Failed to find logical volume '
                          '"disks/volume-1"')
        self.group.remove('volume-1')

    SNAPSHOT = {'origin': 'volume-1', 'lv_attr': 'swi-a-s---',
                'chunk_size': '65536', 'origin_size': str(units.Gi)}

    def test_snapshot_has_room_for_all_of_its_origin_or_is_none(self):
        # LVM takes a share of something for what there is at the most.
        self.command.answer('lvs', lvs(row()))
        self.group.create_snapshot('_snapshot-1', 'volume-1',
                                   frozenset(['b=2', 'a=1']))
        # A header, four full tables of 4096 records and the next
        room = (16384 + 1 + 4 + 1) * 65536
        self.assertEqual([
            'lvcreate --yes --config activation { monitoring = 0 } '
            '--snapshot --name _snapshot-1 --addtag a=1 --addtag b=2 '
            '--size %db --chunksize 65536b disks/volume-1' % room],
            self.command.ran_of('lvcreate'))

    def test_snapshot_of_what_is_gone_names_it(self):
        self.command.answer('lvs', lvs())
        error = self.assertRaises(
            exception.LogicalVolumeMissing, self.group.create_snapshot,
            '_snapshot-1', 'volume-1', frozenset())
        self.assertIn('disks/volume-1', str(error))
        self.assertEqual([], self.command.ran_of('lvcreate'))

    @ddt.data((0, 0), (16390 * 65536, 0), (16390 * 65536 - 1, 1))
    @ddt.unpack
    def test_room_that_a_snapshot_lacks_is_seen(self, size, lacks):
        rows = [row(), row('_snapshot-1', **{
            **self.SNAPSHOT, 'lv_size': str(size)})] if size else [row()]
        self.command.answer('lvs', lvs(*rows))
        self.assertEqual(bool(lacks), any(
            found.size < found.room
            for found in self.group.logical_volumes().values()))

    def moment(self):
        @contextlib.contextmanager
        def entered():
            self.command.reply('begin')
            yield
            self.command.reply('end')
        return entered()

    def wanted(self):
        return [interface.NewSnapshot('_snapshot-%d' % number,
                                      'volume-%d' % number, frozenset())
                for number in (1, 2)]

    def test_moment_is_that_of_the_commands_and_no_longer(self):
        self.command.answer('lvs', lvs(row(), row('volume-2')))
        with (mock.patch.object(self.group, '_flush', side_effect=lambda: (
                self.command.reply('flush'))),
              mock.patch('oslo_concurrency.lockutils.lock') as lock):
            lock.return_value.__enter__.side_effect = lambda: (
                self.command.reply('lock'))
            self.group.create_snapshots(self.wanted(), self.moment())
        self.assertEqual(
            ['lock', 'lvs', 'begin', 'lvcreate', 'lvcreate', 'end', 'flush'],
            [line.split()[0] for line in self.command.ran])

    def test_failure_ends_the_moment(self):
        self.command.fail('lvcreate', 'no')
        self.command.answer('lvs', lvs(row(), row('volume-2')))
        moment = mock.MagicMock()
        moment.__exit__.return_value = False
        self.assertRaises(exception.CommandFailed,
                          self.group.create_snapshots, self.wanted(), moment)
        moment.__exit__.assert_called_once()
        self.assertEqual(1, len(self.command.ran_of('lvcreate')))

    def exists(self, *rows):
        self.command.fail('lvcreate', 'Logical Volume "_snapshot-1" already '
                          'exists in volume group "disks"')
        self.command.answer('lvs', lvs(row(), *rows))

    def test_snapshot_that_is_there_is_not_made_again(self):
        self.exists(row('_snapshot-1', **self.SNAPSHOT))
        self.group.create_snapshot('_snapshot-1', 'volume-1', frozenset())

    def test_volume_that_has_the_name_of_a_snapshot_is_none(self):
        # The command died before it was one.
        self.exists(row('_snapshot-1'))
        self.assertRaises(exception.CommandFailed, self.group.create_snapshot,
                          '_snapshot-1', 'volume-1', frozenset())

    def test_snapshot_without_space_is_told_with_numbers(self):
        self.command.fail('lvcreate', 'Volume group "disks" has '
                          'insufficient free space (256 extents)')
        self.command.answer('lvs', lvs(row()))
        self.command.answer('vgs', vgs(disk(pv_size='4', pv_free='2')))
        error = self.assertRaises(
            exception.NotEnoughSpace, self.group.create_snapshot,
            '_snapshot-1', 'volume-1', frozenset())
        for part in ('disks', '_snapshot-1', '1.00 GiB'):
            self.assertIn(part, str(error))

    @ddt.data(('swi-a-s---', True), ('swi-I-s---', False),
              ('swi-S-s---', False))
    @ddt.unpack
    def test_snapshot_tells_its_origin_and_whether_it_is_good(self, attributes,
                                                              valid):
        self.command.answer('lvs', lvs(row(), row(
            '_snapshot-1', **{**self.SNAPSHOT, 'lv_attr': attributes})))
        found = self.group.logical_volumes()
        self.assertEqual(('volume-1', valid),
                         (found['_snapshot-1'].origin,
                          found['_snapshot-1'].is_valid))
        self.assertEqual(('', True), (found['volume-1'].origin,
                                      found['volume-1'].is_valid))

    def test_snapshot_is_split_from_its_origin_once(self):
        self.command.answer('lvs', lvs(
            row(), row('_snapshot-1', **self.SNAPSHOT)),
            lvs(row(), row('_snapshot-1')), lvs(row()))
        for _time in range(3):
            self.group.split_snapshot('_snapshot-1')
        self.assertEqual(['lvconvert --yes --config activation { monitoring '
                          '= 0 } --splitsnapshot disks/_snapshot-1'],
                         self.command.ran_of('lvconvert'))

    def test_origin_of_snapshots_is_not_removed(self):
        self.command.answer('lvs', lvs(
            row(), row('_snapshot-1', **self.SNAPSHOT)))
        error = self.assertRaises(exception.SnapshotsLeft, self.group.remove,
                                  'volume-1')
        self.assertIn('_snapshot-1', str(error))
        self.assertEqual([], self.command.ran_of('lvremove'))

    @ddt.data(False, True)
    def test_origin_is_inactive_while_it_grows(self, fails):
        self.command.answer('lvs', lvs(
            row(), row('_snapshot-1', **self.SNAPSHOT)))
        if fails:
            self.command.fail('lvextend', 'disk on fire')
            self.assertRaises(exception.CommandFailed, self.group.extend,
                              'volume-1', 2 * units.Gi)
        else:
            self.group.extend('volume-1', 2 * units.Gi)
        changing = 'lvchange --config activation { monitoring = 0 } '
        self.assertEqual([changing + '--activate n disks/volume-1',
                          'lvextend --size 2147483648b disks/volume-1',
                          changing + '--activate y disks/volume-1'],
                         [line for line in self.command.ran
                          if line[:3] == 'lvc' or line[:3] == 'lve'])

    def test_rename_is_one_command(self):
        self.group.rename('volume-1', 'volume-2')
        self.assertEqual(['lvrename disks volume-1 volume-2'],
                         self.command.ran)

    def test_rename_of_what_is_renamed_changes_nothing(self):
        self.command.answer('lvs', lvs(row('volume-2')))
        self.command.fail('lvrename', 'Existing logical volume "volume-1" '
                          'not found in volume group "disks"')
        self.group.rename('volume-1', 'volume-2')

    @ddt.data((['volume-1'], {'volume-1'}), (FileNotFoundError, set()))
    @ddt.unpack
    def test_active_names_come_from_no_command(self, listed, expected):
        self.patch('os.listdir', side_effect=[listed])
        self.assertEqual(expected, self.group.active_names())
        self.assertEqual([], self.command.ran)

    def test_retag_is_one_command(self):
        self.group.retag('volume-1', frozenset('ba'), frozenset('c'))
        self.assertEqual(['lvchange --addtag a --addtag b --deltag c '
                          'disks/volume-1'], self.command.ran)

    def test_retag_without_tags_runs_nothing(self):
        self.group.retag('volume-1', frozenset(), frozenset())
        self.assertEqual([], self.command.ran)

    def test_volumes_of_a_node_come_from_one_command(self):
        self.command.answer('lvs', lvs(*(row('volume-%d' % number)
                                         for number in range(1000))))
        self.assertEqual(1000, len(self.group.logical_volumes()))
        self.assertEqual(1, len(self.command.ran))

    def test_capacity_is_that_of_the_group(self):
        self.command.answer('lvs', lvs(row(), row('volume-2')))
        self.command.answer('vgs', vgs(disk(pv_size='60', pv_free='30'),
                                       disk(pv_size='40', pv_free='10')))
        capacity = self.group.capacity()
        self.assertEqual((100, 40, 2 * units.Gi, 2, False),
                         (capacity.total, capacity.free,
                          capacity.provisioned, capacity.volumes,
                          capacity.thin))

    def test_disk_that_is_being_emptied_has_nothing_free(self):
        self.command.answer('vgs', vgs(
            disk(pv_size='60', pv_free='30', pv_allocatable=''),
            disk(pv_size='40', pv_free='10')))
        self.assertEqual(10, self.group.capacity().free)

    def lose_a_disk(self):
        self.command.answer('vgs', vgs(
            *(disk(name, pv_size='60', pv_free='30', vg_missing_pv_count='1')
              for name in ('/dev/null', '[unknown]'))))

    def test_nothing_is_free_while_a_disk_is_missing(self):
        self.lose_a_disk()
        self.assertEqual((120, 0), (self.group.capacity().total,
                                    self.group.capacity().free))
        self.assertEqual(1, self.group.missing_disks())

    @ddt.data('create', 'extend', 'create_snapshot', 'rename')
    def test_what_waits_for_a_missing_disk_is_told_so(self, method):
        self.command.answer('lvs', lvs(row()))
        for program in ('lvcreate', 'lvextend', 'lvrename'):
            self.command.fail(program, 'Cannot change VG disks while PVs are '
                              'missing.')
        arguments = {'create': ('volume-2', units.Gi, frozenset()),
                     'extend': ('volume-1', 2 * units.Gi),
                     'rename': ('volume-1', 'volume-2'),
                     'create_snapshot': ('_snapshot-1', 'volume-1',
                                         frozenset())}[method]
        error = self.assertRaises(exception.DiskMissing,
                                  getattr(self.group, method), *arguments)
        for part in ('disks', 'node1', arguments[0], 'vgreduce'):
            self.assertIn(part, str(error))

    @ddt.data(('-wi-a-----', ''), ('rwi-a-r-p-', 'missing'),
              ('rwi-a-r-r-', 'written'), ('rwi-a-r-m-', 'differ'))
    @ddt.unpack
    def test_what_is_wrong_with_the_disks_of_a_volume_is_known(
            self, attributes, ailment):
        self.command.answer('lvs', lvs(row(lv_attr=attributes)))
        found = self.group.logical_volumes()['volume-1'].ailment
        self.assertEqual(bool(ailment), bool(found))
        self.assertIn(ailment, found)

    def test_there_is_no_pool(self):
        self.assertIsNone(self.group.pool())
        self.assertEqual([], self.command.ran)

    def test_names_as_device_mapper_knows_them(self):
        self.assertEqual('disks-volume--1--x',
                         self.group.mapped_name('volume-1-x'))
        self.assertEqual('/dev/disks/volume-1', self.group.path('volume-1'))

    def test_copy_reads_what_is_on_the_disk_and_not_in_the_cache(self):
        self.group.copy('volume-1-regions', '_snapshot-1-regions')
        self.assertEqual(
            ['dd if=/dev/disks/volume-1-regions '
             'of=/dev/disks/_snapshot-1-regions bs=1M iflag=direct '
             'oflag=direct conv=nocreat,notrunc,fsync'], self.command.ran)

    def test_clear_wipes_as_configured(self):
        self.override('volume_clear', 'zero')
        self.override('volume_clear_size', 5)
        self.override('volume_clear_ionice', '-c3')
        self.command.answer('lvs', lvs(row()))
        with mock.patch('cinder.volume.volume_utils.clear_volume') as clear:
            self.group.clear('volume-1')
        clear.assert_called_once_with(
            1024, '/dev/disks/volume-1', volume_clear='zero',
            volume_clear_size=5, volume_clear_ionice='-c3')

    def test_clear_ends_where_the_volume_ends(self):
        self.override('volume_clear_size', 64)
        self.command.answer('lvs', lvs(row(lv_size=str(4 * units.Mi))))
        with mock.patch('cinder.volume.volume_utils.copy_volume') as copy:
            self.group.clear('volume-1')
        [written] = copy.mock_calls
        self.assertEqual(('/dev/zero', '/dev/disks/volume-1', 4),
                         written.args[:3])

    def test_nothing_is_wiped_where_the_operator_does_not_want_it(self):
        # Cinder's function, which is not called, takes no such value.
        self.override('volume_clear', 'none')
        self.command.answer('lvs', lvs(row()))
        self.group.clear('volume-1')

    def test_clear_of_what_is_gone_does_nothing(self):
        self.command.answer('lvs', lvs())
        with mock.patch('cinder.volume.volume_utils.clear_volume') as clear:
            self.group.clear('volume-1')
        clear.assert_not_called()


class AtOnceTest(GroupTestCase):

    def test_what_changes_the_group_runs_one_at_a_time(self):
        inside, run = base.Inside(), self.command.run

        def slow(*arguments, **options):
            if arguments[0] != 'lvs':
                inside()
            return run(*arguments, **options)

        self.command.answer('lvs', lvs(row()))
        self.command.run = slow
        self.assertEqual([None] * 4, base.at_once(
            lambda: self.group.create('volume-2', units.Gi, frozenset()),
            lambda: self.group.extend('volume-1', 2 * units.Gi),
            lambda: self.group.retag('volume-1', frozenset('a'),
                                     frozenset()),
            lambda: self.group.remove('volume-1')))
        self.assertEqual(1, inside.most)


class ThinTest(GroupTestCase):

    kind = 'thin'

    def pool(self, **more):
        return row('disks-pool', lv_size='1000', data_percent='25.00',
                   lv_attr='twi-aotz--', **more)

    def test_create_is_virtual(self):
        self.group.create('volume-1', 4096, frozenset())
        self.assertEqual(['lvcreate --yes --name volume-1 --virtualsize '
                          '4096b --thinpool disks-pool disks'],
                         self.command.ran)

    def test_snapshot_is_active_and_needs_no_origin(self):
        self.group.create_snapshot('_snapshot-1', 'volume-1',
                                   frozenset(['a=1']))
        self.assertEqual([
            'lvcreate --yes --config activation { monitoring = 0 } '
            '--snapshot --name _snapshot-1 --addtag a=1 --setactivationskip '
            'n disks/volume-1'], self.command.ran)
        self.command.answer('lvs', lvs(self.pool(), row(), row(
            '_snapshot-1', origin='volume-1', pool_lv='disks-pool')))
        self.assertEqual('', self.group.logical_volumes()['_snapshot-1'
                                                          ].origin)
        self.group.split_snapshot('_snapshot-1')
        self.group.remove('volume-1')
        self.assertEqual([], self.command.ran_of('lvconvert'))
        self.assertEqual(1, len(self.command.ran_of('lvremove')))

    def lose(self):
        """As a power cut in an lvcreate leaves it."""
        self.command.answer('lvcreate', exception.CommandFailed(
            command='lvcreate', host='node1', reason='Logical Volume '
            '"volume-1" already exists in volume group "disks"'), '')
        self.command.fail('lvchange --activate y disks/volume-1',
                          'device-mapper: reload ioctl on  (253:6) failed: '
                          'No data available')

    def test_volume_that_was_lost_as_it_was_made_is_made_again(self):
        self.lose()
        self.assertTrue(self.group.create('volume-1', 4096, frozenset()))
        self.assertEqual(
            ['lvcreate', 'lvchange', 'lvremove', 'lvcreate'],
            [line.split()[0] for line in self.command.ran])

    def test_volume_that_is_there_is_not_made_again(self):
        self.lose()
        self.patch('os.path.exists', return_value=True)
        self.assertFalse(self.group.create('volume-1', 4096, frozenset()))
        self.assertEqual([], self.command.ran_of('lvremove'))

    def test_snapshot_that_is_skipped_is_kept_active(self):
        self.group.keep_active('_snapshot-1')
        self.assertEqual(
            ['lvchange --setactivationskip n disks/_snapshot-1',
             'lvchange --activate y disks/_snapshot-1'],
            self.command.ran_of('lvchange'))

    def test_volume_that_is_not_active_for_another_reason_is_kept(self):
        self.lose()
        self.command.fail('lvchange', 'Input/output error')
        self.assertRaises(exception.CommandFailed, self.group.create,
                          'volume-1', 4096, frozenset())
        self.assertEqual([], self.command.ran_of('lvremove'))

    def test_capacity_is_that_of_the_pool(self):
        self.command.answer('lvs', lvs(self.pool(), row()))
        self.command.answer('vgs', vgs(disk()))
        capacity = self.group.capacity()
        self.assertEqual((1000, 750, units.Gi, 1, True),
                         (capacity.total, capacity.free,
                          capacity.provisioned, capacity.volumes,
                          capacity.thin))

    def test_pool_has_nothing_free_while_a_disk_is_missing(self):
        self.command.answer('lvs', lvs(self.pool(), row()))
        self.command.answer('vgs', vgs(disk(vg_missing_pv_count='1')))
        self.assertEqual(0, self.group.capacity().free)

    def test_pool_and_what_is_in_it_come_from_one_command(self):
        self.command.answer('lvs', lvs(
            self.pool(metadata_percent='11.04'),
            row(data_percent='50.00', lv_tags='localstor.move=m')))
        pool = self.group.pool()
        self.assertEqual(('disks/disks-pool', 1000, 0.25, 0.1104),
                         (pool.name, pool.size, pool.data,
                          round(pool.metadata, 4)))
        self.assertEqual({'volume-1': units.Gi // 2}, {
            name: volume.used for name, volume in pool.volumes.items()})
        self.assertEqual(1, len(self.command.ran))

    def test_pool_that_is_gone_is_named(self):
        self.command.answer('lvs', lvs())
        error = self.assertRaises(exception.LogicalVolumeMissing,
                                  self.group.pool)
        self.assertIn('disks/disks-pool', str(error))

    def test_pool_is_no_volume(self):
        self.command.answer('lvs', lvs(self.pool(), row()))
        self.assertEqual(['volume-1'], list(self.group.logical_volumes()))

    def test_clear_has_nothing_to_do(self):
        self.command.answer('lvs', lvs(self.pool(), row()))
        with mock.patch('cinder.volume.volume_utils.clear_volume') as clear:
            self.group.clear('volume-1')
        clear.assert_not_called()


@ddt.ddt
class BusyTest(GroupTestCase):
    """Somebody holds LVM's lock of the group."""

    @ddt.data(('create', ('volume-1', units.Gi, frozenset())),
              ('extend', ('volume-1', 2 * units.Gi)),
              ('retag', ('volume-1', frozenset('a'), frozenset())),
              ('remove', ('volume-1',)), ('logical_volumes', ()),
              ('capacity', ()), ('check', ()))
    @ddt.unpack
    def test_nothing_is_done_while_a_command_hangs(self, method, arguments):
        self.holder.return_value = (4711, 'lvcreate --yes x', 61)
        error = self.assertRaises(exception.VolumeGroupBusy,
                                  getattr(self.group, method), *arguments)
        self.assertEqual([], self.command.ran)
        for part in ('disks', 'node1', 'lvcreate --yes x', '4711',
                     '61 seconds'):
            self.assertIn(part, str(error))
        self.holder.assert_called_with('/run/lock/lvm/V_disks')

    def test_one_that_is_at_work_is_waited_for(self):
        self.holder.return_value = (4711, 'lvcreate', 59)
        self.group.remove('volume-1')
        self.assertEqual(1, len(self.command.ran_of('lvremove')))


@ddt.ddt
class SuspendedTest(GroupTestCase):

    kind = 'thin'

    def setUp(self):
        super().setUp()
        self.directory = self.useFixture(fixtures.TempDir()).path
        self.patch('cinder_localstor.node.suspension.BLOCK', self.directory)

    def device(self, name, suspended=True, uuid='LVM-x'):
        directory = os.path.join(self.directory, 'dm-' + name, 'dm')
        os.makedirs(directory)
        for field, value in (('name', name), ('uuid', uuid),
                             ('suspended', int(suspended))):
            with open(os.path.join(directory, field), 'w') as file:
                file.write('%s\n' % value)

    @ddt.data(('disks-volume--1', 'volume-1'), ('disks-x', 'x'),
              ('disks-disks--pool', 'disks-pool'),
              ('disks-disks--pool-tpool', 'disks-pool'),
              ('disks-disks--pool_tdata', 'disks-pool'),
              ('disks-disks--pool_tmeta', 'disks-pool'),
              ('disks-volume--1-real', 'volume-1'),
              ('disks-volume--a--b', 'volume-a-b'))
    @ddt.unpack
    def test_name(self, mapped, name):
        self.device(mapped)
        self.assertEqual({name}, self.group.suspended())

    def test_others_are_none_of_ours(self):
        self.device('disks--2-volume')
        self.device('disks-x', suspended=False)
        self.device('disks-y', uuid='LOCALSTOR-disks-y')
        self.device('volume-1-handle')
        self.assertEqual(set(), self.group.suspended())

    def test_nothing_is_run_when_nothing_is_suspended(self):
        self.group.resume_abandoned()
        self.assertEqual([], self.command.ran)
        self.holder.assert_not_called()

    def test_pool_is_resumed_before_what_lies_on_it(self):
        for name in ('disks-a', 'disks-disks--pool-tpool', 'disks-z'):
            self.device(name)
        self.group.resume_abandoned()
        self.assertEqual(['lvchange --refresh disks/disks-pool',
                          'lvchange --refresh disks/a',
                          'lvchange --refresh disks/z'], self.command.ran)

    def test_command_that_is_at_work_is_left_alone(self):
        self.device('disks-a')
        self.holder.return_value = (4711, 'lvcreate', 1)
        self.group.resume_abandoned()
        self.assertEqual([], self.command.ran)

    def test_one_that_stays_suspended_does_not_keep_the_others_so(self):
        self.device('disks-a')
        self.device('disks-b')
        self.command.fail('lvchange --refresh disks/a', 'no')
        self.group.resume_abandoned()
        self.assertEqual('lvchange --refresh disks/b', self.command.ran[-1])

    def test_start_resumes_before_it_asks_for_anything(self):
        self.device('disks-a')
        self.command.fail('vgs', 'stop here')
        self.assertRaises(exception.VolumeGroupMissing, self.group.check)
        self.assertEqual('lvchange --refresh disks/a', self.command.ran[0])


@ddt.ddt
class CheckTest(GroupTestCase):

    def setUp(self):
        super().setUp()
        self.admit('["a|^/dev/sda4$|","r|.*|"]')
        self.use('/dev/null', '/dev/zero')
        self.command.answer('lvs', lvs())
        self.block_devices = pathlib.Path(
            self.useFixture(fixtures.TempDir()).path)
        self.patch('cinder_localstor.node.lvm.BLOCK_DEVICES',
                   str(self.block_devices))
        self.plug_in('null', 512)
        self.plug_in('zero', 4096)

    def plug_in(self, disk, block_size, partitions=()):
        """Let sysfs show a disk as Linux does."""
        device = self.block_devices / 'devices' / disk
        (device / 'queue').mkdir(parents=True)
        (device / 'queue' / 'logical_block_size').write_text(
            '%d\n' % block_size)
        (self.block_devices / disk).symlink_to(device)
        for number in partitions:
            partition = device / ('%sp%d' % (disk, number))
            partition.mkdir()
            (partition / 'partition').write_text('%d\n' % number)
            (self.block_devices / partition.name).symlink_to(partition)

    def use(self, *names):
        """Let the group have physical volumes."""
        self.command.answer('vgs', vgs(*map(disk, names)))

    def admit(self, filters, use_devicesfile=0):
        self.command.answer('lvmconfig', 'use_devicesfile=%d\n'
                            'global_filter=%s\n' % (use_devicesfile,
                                                    filters))

    @ddt.data('["a|.*|"]', '["r|/dev/dm-|"]', '"a|/dev/sd|"', '[]',
              '["a|^/dev/sd[a-z]$|","r|.*|"]')
    def test_lvm_that_looks_into_volumes_is_refused(self, filters):
        self.admit(filters)
        error = self.assertRaises(exception.LVMLooksIntoVolumes,
                                  self.group.check)
        for part in ('node1', 'global_filter', '/dev/'):
            self.assertIn(part, str(error))

    def test_devices_file_is_as_good_as_a_filter(self):
        self.admit('["a|.*|"]', use_devicesfile=1)
        self.group.check()

    def test_filter_that_is_not_understood_is_refused(self):
        self.admit('["a|(|"]')
        self.assertRaises(exception.OutputNotUnderstood, self.group.check)

    @ddt.data(('Volume group "disks" not found', True),
              ('bad metadata text on /dev/vdb1 in mda1', False))
    @ddt.unpack
    def test_group_that_was_there_is_not_to_be_made_anew(self, reason, known):
        self.command.fail('vgs', reason)
        self.has_backup.return_value = known
        error = self.assertRaises(exception.VolumeGroupLost, self.group.check)
        for part in ('node1', reason, '--file /etc/lvm/backup/disks'):
            self.assertIn(part, str(error))
        self.assertNotIn('vgcreate', str(error))

    def test_missing_group_names_the_option(self):
        self.command.fail('vgs', 'Volume group "disks" not found')
        error = self.assertRaises(exception.VolumeGroupMissing,
                                  self.group.check)
        for part in ('disks', 'node1', 'option volume_group'):
            self.assertIn(part, str(error))

    def test_metadata_area_that_is_nearly_full_is_told(self):
        self.command.answer('vgs', vgs(disk(vg_mda_free=str(100 * units.Ki))))
        with self.assertLogs('cinder_localstor.node.lvm') as logged:
            self.group.check()
        for part in ('disks', '100 of 512 KiB', '--metadatasize'):
            self.assertIn(part, logged.output[0])

    def test_metadata_area_with_room_is_no_matter(self):
        with self.assertNoLogs('cinder_localstor.node.lvm', 'WARNING'):
            self.group.check()

    def test_volumes_are_activated(self):
        self.group.check()
        self.assertIn('vgchange --activate y disks', self.command.ran)

    def test_volume_that_is_lost_does_not_keep_the_others_away(self):
        self.command.fail('vgchange', 'reload ioctl failed: No data available')
        self.command.answer('lvs', lvs(row(lv_attr='Vwi---tz--'),
                                       row('disks-pool'), row('volume-2')))
        with self.assertLogs('cinder_localstor.node.lvm') as logged:
            self.group.check()
        self.assertIn('volume-1', logged.output[0])
        self.assertNotIn('volume-2', logged.output[0])
        self.assertEqual(4096, self.group.block_size())

    @ddt.data('disks-pool', '')
    def test_group_without_its_pool_is_refused(self, inactive):
        self.command.fail('vgchange', 'check of pool failed')
        self.command.answer('lvs', lvs(
            row('disks-pool', lv_attr='twi---tz--' if inactive
                else 'twi-aotz--')))
        self.assertRaises(exception.CommandFailed, self.group.check)

    def test_volumes_are_hidden_before_they_are_activated(self):
        self.command.fail('vgchange', 'no')
        self.assertRaises(exception.CommandFailed, self.group.check)
        self.hide.assert_called_once_with(self.command, 'disks')

    def test_largest_blocks_count(self):
        self.group.check()
        self.assertEqual(4096, self.group.block_size())

    def test_partition_has_the_blocks_of_its_disk(self):
        self.plug_in('nvme0n1', 4096, partitions=(3,))
        self.use('/dev/nvme0n1p3')
        self.group.check()
        self.assertEqual(4096, self.group.block_size())

    def test_disk_that_is_lost_does_not_keep_the_others_away(self):
        # As LVM calls it
        self.use('/dev/null', '[unknown]')
        self.group.check()
        self.assertEqual(512, self.group.block_size())

    @ddt.data(('create', ('volume-1', units.Gi, frozenset()), 'lvcreate'),
              ('extend', ('volume-1', 2 * units.Gi), 'lvextend'),
              ('retag', ('volume-1', frozenset('a'), frozenset()),
               'lvchange'),
              ('create_snapshot', ('x', 'volume-1', frozenset()), 'lvcreate'),
              ('split_snapshot', ('_snapshot-2',), 'lvconvert'),
              ('rename', ('volume-1', 'volume-2'), 'lvrename'),
              ('remove', ('volume-1',), 'lvremove'))
    @ddt.unpack
    def test_change_is_durable_when_it_is_done(self, method, arguments,
                                               program):
        self.group.check()
        self.command.answer('lvs', lvs(row(), row('_snapshot-2',
                                                  origin='volume-2')))
        self.flush.side_effect = lambda disk: self.command.ran.append(disk)
        getattr(self.group, method)(*arguments)
        self.assertEqual(program, self.command.ran[-3].split()[0])
        self.assertEqual(['/dev/null', '/dev/zero'], self.command.ran[-2:])

    def test_what_a_killed_process_has_changed_is_durable_after_the_start(
            self):
        self.flush.side_effect = lambda disk: self.command.ran.append(disk)
        self.group.check()
        self.assertLess(self.command.ran.index('vgchange --activate y disks'),
                        self.command.ran.index('/dev/null'))
        self.assertIn('/dev/zero', self.command.ran)

    @ddt.data(('create', ('volume-1', units.Gi, frozenset()), 'lvcreate',
               'already exists'),
              ('remove', ('volume-1',), 'lvremove',
               'Failed to find logical volume'))
    @ddt.unpack
    def test_change_that_was_made_before_is_durable_too(
            self, method, arguments, program, reason):
        self.group.check()
        self.flush.reset_mock()
        self.command.fail(program, reason)
        getattr(self.group, method)(*arguments)
        self.flush.assert_called_with('/dev/zero')

    def test_wiping_is_durable_before_the_volume_goes(self):
        self.group.check()
        self.flush.reset_mock()
        self.command.answer('lvs', lvs(row()))
        with mock.patch('cinder.volume.volume_utils.clear_volume') as clear:
            clear.side_effect = lambda *args, **kwargs: (
                self.flush.assert_not_called())
            self.group.clear('volume-1')
        self.flush.assert_called_with('/dev/zero')

    @ddt.data(FileNotFoundError(errno.ENOENT, 'gone'),
              OSError(errno.EIO, 'dead'))
    def test_disk_that_lvm_misses_keeps_nothing_from_being_changed(
            self, error):
        self.group.check()
        self.flush.reset_mock()
        self.use('[unknown]', '/dev/zero')
        self.flush.side_effect = lambda name: self.without_null(name, error)
        self.group.remove('volume-1')
        self.flush.assert_called_with('/dev/zero')

    @ddt.data('default', 'thin')
    def test_disk_that_was_added_is_flushed_after_a_look_at_the_space(
            self, kind):
        self.command.answer('lvs', lvs(self.pool()))
        group = self.make(kind)
        group.check()
        self.plug_in('random', 512)
        self.use('/dev/null', '/dev/random')
        group.capacity()
        group.retag('volume-1', frozenset('a'), frozenset())
        self.flush.assert_called_with('/dev/random')

    def test_disk_of_the_group_that_can_not_be_flushed_is_an_error(self):
        self.group.check()
        self.flush.side_effect = lambda name: self.without_null(
            name, OSError(errno.EIO, 'dead'))
        self.assertRaises(OSError, self.group.remove, 'volume-1')

    def test_missing_disk_is_told_at_the_start(self):
        self.command.answer('vgs', vgs(
            disk('[unknown]', vg_missing_pv_count='1'),
            disk(vg_missing_pv_count='1')))
        with self.assertLogs('cinder_localstor.node.lvm', 'ERROR') as logged:
            self.group.check()
        self.assertIn('1 of the disks of volume group disks',
                      logged.output[0])

    @staticmethod
    def without_null(disk, error):
        if disk == '/dev/null':
            raise error

    @staticmethod
    def pool(attributes='twi-aotz--'):
        return row('disks-pool', lv_attr=attributes)

    @ddt.data('check', 'create')
    def test_parts_that_are_active_without_their_whole(self, method):
        def prohibited(part):
            return exception.CommandFailed(
                command='', host='node1', reason='Activation of logical '
                'volume disks/volume-1 is prohibited while logical volume '
                'disks/volume-1_%s is active.' % part)

        program = {'check': 'vgchange', 'create': 'lvchange'}[method]
        again = {'check': 'vgchange --activate y disks',
                 'create': 'lvchange --activate y disks/volume-1'}[method]
        deactivated = ['lvchange --activate n disks/volume-1_' + part
                       for part in ('rmeta_0', 'rimage_1')]
        said = [prohibited('rmeta_0'), prohibited('rimage_1'), '']
        if program == 'lvchange':
            said = [said[0], '', said[1], '', '']
        self.command.answer(program, *said)
        self.command.fail('lvcreate', 'Logical Volume "volume-1" already '
                          'exists in volume group "disks"')
        self.command.answer('lvs', lvs(row(lv_attr='rwi---r---')))
        arguments = {'check': (), 'create': ('volume-1', units.Gi,
                                             frozenset())}[method]
        getattr(self.make('default'), method)(*arguments)
        self.assertEqual([again, deactivated[0], again, deactivated[1],
                          again],
                         [line for line in self.command.ran
                          if '--activate' in line])

    def test_part_that_stays_active_is_told(self):
        self.command.fail(
            'vgchange', 'Activation of logical volume disks/volume-1 is '
            'prohibited while logical volume disks/volume-1_rmeta_0 is '
            'active.')
        self.command.answer('lvs', lvs(row(lv_attr='rwi---r---')))
        with self.assertLogs('cinder_localstor.node.lvm', 'ERROR') as logged:
            self.group.check()
        self.assertIn('volume-1_rmeta_0 is active', logged.output[0])

    @ddt.data('thin', 'auto')
    def test_pool_that_does_not_zero_is_refused(self, kind):
        self.command.answer('lvs', lvs(self.pool('twi-aot---')))
        error = self.assertRaises(exception.PoolDoesNotZero,
                                  self.make(kind).check)
        for part in ('disks/disks-pool', 'node1', 'lvchange --zero y'):
            self.assertIn(part, str(error))
        self.assertNotIn('vgchange --activate y disks', self.command.ran)

    def test_pool_of_others_may_do_as_it_likes(self):
        self.command.answer('lvs', lvs(self.pool('twi-aot---')))
        self.make('default').check()

    def test_pool_is_made_once(self):
        group = self.make('thin')
        group.check()
        self.assertEqual(['lvcreate --yes --thinpool disks-pool --zero y '
                          '--extents 95%VG disks'],
                         self.command.ran_of('lvcreate'))
        self.command.answer('lvs', lvs(self.pool()))
        group.check()
        self.assertEqual(1, len(self.command.ran_of('lvcreate')))

    def test_auto_takes_the_pool_that_is_there(self):
        group = self.make('auto')
        group.check()
        self.assertFalse(group.thin)
        self.command.answer('lvs', lvs(self.pool()))
        group = self.make('auto')
        group.check()
        self.assertTrue(group.thin)


@ddt.ddt
class MirroredTest(GroupTestCase):

    # As lvs shows one, where lvcreate was killed on a node
    half_made = (row(lv_attr='rwi---r--k'),
                 row('volume-1_rmeta_0', lv_attr='ewi-a-r-r-'),
                 row('volume-1_rmeta_1', lv_attr='ewi-a-r-r-'))

    def make(self, kind):
        self.override('lvm_mirrors', 1)
        return super().make(kind)

    def test_each_volume_is_mirrored(self):
        self.group.create('volume-1', units.Gi, frozenset())
        self.assertEqual(['lvcreate --yes --name volume-1 --type raid1 '
                          '--mirrors 1 --size 1073741824b disks'],
                         self.command.ran)

    def test_one_that_a_power_cut_has_left_half_made_is_made_again(self):
        self.command.answer(
            'lvcreate', exception.CommandFailed(
                command='lvcreate', host='node1', reason='Logical Volume '
                '"volume-1" already exists in volume group "disks"'), '')
        self.command.answer('lvs', lvs(*self.half_made))
        self.assertTrue(self.group.create('volume-1', units.Gi, frozenset()))
        self.assertEqual(['lvcreate', 'lvchange', 'lvs', 'lvremove',
                          'lvcreate'],
                         [line.split()[0] for line in self.command.ran])

    def test_one_that_an_operator_lets_be_skipped_is_not_made_again(self):
        self.command.answer(
            'lvcreate', exception.CommandFailed(
                command='lvcreate', host='node1', reason='Logical Volume '
                '"volume-1" already exists in volume group "disks"'))
        self.command.answer('lvs', lvs(row(lv_attr='rwi---r--k')))
        self.assertFalse(self.group.create('volume-1', units.Gi,
                                           frozenset()))

    def test_parts_that_lvm_shows_are_no_volumes(self):
        # They have the volume's tags.
        self.command.answer('lvs', lvs(*self.half_made))
        self.assertEqual({'volume-1'}, set(self.group.logical_volumes()))

    @ddt.data((half_made, False), ((row(lv_attr='rwi---r--k'),), True),
              ((row(),), True))
    @ddt.unpack
    def test_one_that_is_half_made_cannot_be_activated(self, rows, active):
        self.command.answer('lvs', lvs(*rows))
        self.assertIs(active, self.group.activate('volume-1'))

    @ddt.data(0, -1)
    def test_without_mirrors_volumes_are_linear(self, number):
        self.override('lvm_mirrors', number)
        super().make('default').create('volume-1', units.Gi, frozenset())
        self.assertNotIn('--mirrors', self.command.ran[-1])

    def test_each_byte_counts_once(self):
        self.command.answer('vgs', vgs(disk(pv_size='60', pv_free='30'),
                                       disk(pv_size='50', pv_free='10')))
        capacity = self.group.capacity()
        self.assertEqual((50, 10), (capacity.total, capacity.free))

    @ddt.data(([], 2, 0), ([10], 2, 0), ([10, 10], 2, 10), ([10, 4], 2, 4),
              ([10, 6, 6], 2, 11), ([20, 6, 6], 2, 12), ([10, 6, 6], 3, 6),
              ([10, 6], 1, 16))
    @ddt.unpack
    def test_what_has_its_mirror_on_another_disk(self, sizes, count, room):
        self.assertEqual(room, lvm.mirrored(sizes, count))

    @ddt.data('thin', 'auto')
    def test_pool_is_for_others_to_mirror(self, kind):
        self.command.answer('vgs', vgs(disk()))
        self.command.answer('lvmconfig', 'global_filter=["r|.*|"]\n')
        self.command.answer('lvs', lvs(row('disks-pool')))
        error = self.assertRaises(exception.PoolIsNotMirrored,
                                  self.make(kind).check)
        for part in ('disks/disks-pool', 'node1', 'lvconvert'):
            self.assertIn(part, str(error))

    @ddt.data('disks-a_rimage_0', 'disks-a_rmeta_1', 'disks-a')
    def test_part_that_is_suspended_is_its_volume(self, name):
        self.patch('cinder_localstor.node.suspension.suspended',
                   return_value={name: 'LVM-uuid'})
        self.assertEqual({'a'}, self.group.suspended())


@ddt.ddt
class UnfitTest(GroupTestCase):
    """What no volume of Cinder's can lie on, in a thick group."""

    PLAIN = row()

    def unfit(self, *rows, **fields):
        self.command.answer('lvs', lvs(row(**{**self.PLAIN, **fields}),
                                       *rows))
        return self.group.logical_volumes()['volume-1'].unfit

    @ddt.data('-wi-a-----', 'owi-a-----', 'rwi-a-r---', 'Rwi-aor---',
              'mwi-a-m---', 'Mwi-a-m---')
    def test_linear_striped_mirrored_and_raid_ones_are_fit(self, attributes):
        self.assertEqual('', self.unfit(lv_attr=attributes))

    @ddt.data(('Cwi-a-C---', 'lv_layout'), ('twi-aotz--', 'lv_layout'),
              ('vwi-a-v---', 'lv_layout'), ('Owi-a-----', 'lv_layout'),
              ('-ri-a-----', '--permission rw disks/volume-1'),
              ('-Ri-a-----', '--permission rw disks/volume-1'),
              ('-wi-------', '--activate y'), ('-wi-s-----', '--activate y'),
              ('-wi-a----k', '--setactivationskip n'),
              ('-wi-a---p-', "see 'pvs'"))
    @ddt.unpack
    def test_others_are_not_and_what_to_do_is_told(self, attributes, part):
        self.assertIn(part, self.unfit(lv_attr=attributes))

    def test_volume_of_the_other_kind_is_not(self):
        self.assertIn('copy it', self.unfit(
            lv_attr='Vwi-a-tz--', pool_lv='disks-pool').lower())

    @ddt.data((1, 65536, True), (0, 65536, False), (1, 4096, False),
              (2, 4096, True), (1, 0, False))
    @ddt.unpack
    def test_thick_snapshot_needs_room_for_all_that_can_change(
            self, extents, chunk, fits):
        unfit = self.unfit(
            row('origin', lv_attr='owi-a-s---', lv_size=str(2 * units.Gi)),
            lv_attr='swi-a-s---', origin='origin', chunk_size=str(chunk),
            origin_size=str(units.Gi),
            lv_size=str(units.Gi + extents * 4 * units.Mi))
        self.assertEqual(fits, not unfit)
        if not fits:
            self.assertRegex(unfit, r'lvextend --size \d+b disks/volume-1')


class ThinUnfitTest(GroupTestCase):

    kind = 'thin'

    def unfit(self, **fields):
        self.command.answer('lvs', lvs(row(**fields)))
        return self.group.logical_volumes()['volume-1'].unfit

    def test_volume_of_the_pool_is_fit(self):
        self.assertEqual('', self.unfit(lv_attr='Vwi-a-tz--',
                                        pool_lv='disks-pool'))

    def test_volume_of_another_pool_or_of_none_is_not(self):
        self.assertIn("pool 'fast'", self.unfit(lv_attr='Vwi-a-tz--',
                                                pool_lv='fast'))
        self.assertIn('it is thick', self.unfit())

    def test_thin_snapshot_tells_what_it_was_taken_of(self):
        self.command.answer('lvs', lvs(row(
            lv_attr='Vwi-a-tz--', pool_lv='disks-pool', origin='other')))
        found = self.group.logical_volumes()['volume-1']
        self.assertEqual(('other', ''), (found.taken_of, found.origin))
