# SPDX-License-Identifier: Apache-2.0
"""Volume groups through lvm2's command line.

Cinder's own LVM class calls a tool for every question, takes sizes in
rounded gigabytes, knows no tags and has no timeouts; a node with a thousand
volumes needs one call for all of them.
"""

from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import json
import os
import re
from typing import Any

from cinder.volume import volume_utils
from oslo_concurrency import lockutils
from oslo_log import log as logging
from oslo_utils import units

from cinder_localstor import exception
from cinder_localstor.node import commands
from cinder_localstor.node import interface
from cinder_localstor.node import privileged
from cinder_localstor.node import suspension
from cinder_localstor.node import udev

LOG = logging.getLogger(__name__)

# Block devices by their names (Linux, Documentation/ABI/stable/sysfs-block)
BLOCK_DEVICES = '/sys/class/block'
# Which LVM locks for a command that changes the group (lvm.conf(5),
# global/locking_dir)
LOCK_FILE = '/run/lock/lvm/V_%s'
# A logical volume's name as device-mapper has it, without the group's, and
# what LVM calls a part or a layer of it
MAPPED = re.compile(r'(?P<volume>(?:[^-]|--)+?)(?:_t(?:data|meta))?'
                    r'(?:_r(?:image|meta)_\d+)?(?:-[a-z]\w*)?')
# What activating a thin volume ends with when its pool does not know it:
# dm-thin answers ENODATA.  A power cut can come between LVM's metadata, which
# have the volume then, and the pool's own.
LOST = 'No data available'
# ionice(1): what is wiped stands in nobody's way.
IDLE = '-c3'
# What LVM says when it activates nothing above a part that is active, as a
# command leaves it that was killed (lib/activate/activate.c)
PART_IS_ACTIVE = re.compile(r'is prohibited while logical volume '
                            r'(?P<part>\S+) is active')
# A part of a mirrored volume, which LVM shows until it is wiped, with the
# volume's tags; the volume itself is noted and skipped till then
SHOWN_PART = re.compile(r'_rmeta_\d+$')
# Cinder's share of a volume group that its thin pool gets
POOL_SHARE = '95%VG'
# Bytes of a chunk of a thick snapshot.  The kernel keeps a record in memory
# for each one that has changed: of 1 TiB 16 million, where LVM's 4 KiB make
# 268 million.
CHUNK = 64 * units.Ki
# Bytes of the record of a chunk that has changed
RECORD = 16
# Kinds that Cinder may have volumes on (lvs(8), lv_attr): linear or striped,
# an origin, mirrored and RAID ones, thin ones, and snapshots. To remove a
# cached one would remove an operator's cache.
FIT = '-omMrRVs'
# What may be wrong with a volume's disks (lvs(8), the ninth of lv_attr)
AILMENTS = {'p': 'a disk of it is missing',
            'r': 'a disk of it does not have all that was written',
            'm': 'its mirrors differ'}
# What LVM says when it changes nothing in the group, since a disk is missing
DISK_IS_MISSING = 'while PVs are missing'
# What LVM says when what it has to note of a group does not fit into its
# metadata area any more, since 2.03 and before (lib/format_text/format-text.c)
NO_ROOM_FOR_METADATA = ('exceeds maximum metadata size',
                        'too large for circular buffer')
# The share of the room for metadata below which an operator should know
SCARCE = 0.2
# dmeventd extends snapshots that fill up. Ours can't, and to start it takes
# longer than all the rest.
UNMONITORED = ('--config', 'activation { monitoring = 0 }')
# Where guests' data can be seen: handles, helpers' devices, moves' sources
GUESTS_PATHS = ('/dev/mapper/volume-1-handle', '/dev/dm-99', '/dev/nbd99',
                '/dev/ublkb99', '/dev/sdz', '/dev/sdzz')
GUESTS_PATH_OVER_NVME = '/dev/nvme99n1'


def parse_report(text: str, section: str, command: str
                 ) -> list[dict[str, str]]:
    """Rows of an lvm2 report in JSON (lvmreport(7)).

    :raises OutputNotUnderstood: it is no such report
    """
    try:
        report = json.loads(text)
        rows = report['report'][0][section]
        if not all(isinstance(value, str)
                   for row in rows for value in row.values()):
            raise ValueError('a field is no string')
        return rows
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise exception.OutputNotUnderstood(line=text[:200],
                                            command=command) from error


def parse_logical_volumes(text: str) -> dict[str, dict[str, Any]]:
    """Logical volumes of ``lvs`` by name, sizes in bytes.

    Those that were never active as a whole, because the command was killed,
    are ``half_made``.

    :raises OutputNotUnderstood: a row lacks a field or has a bad number
    """
    volumes = {}
    for row in parse_report(text, 'lv', 'lvs'):
        try:
            volumes[row['lv_name']] = {
                'size': int(row['lv_size']),
                'tags': frozenset(filter(None, row['lv_tags'].split(','))),
                # lvs(8), lv_attr: the sixth character says 'open'
                'open': row['lv_attr'][5] == 'o',
                # and the fifth 'active'
                'active': row['lv_attr'][4] == 'a',
                # and the eighth that a pool zeroes what it hands out
                'zeroes': row['lv_attr'][7] == 'z',
                # or an invalid snapshot, which may be suspended
                'valid': row['lv_attr'][4] not in 'IS',
                # and the first of what kind it is
                'kind': row['lv_attr'][0],
                'writable': row['lv_attr'][1] == 'w',
                'ailment': AILMENTS.get(row['lv_attr'][8], ''),
                # The last: not activated with its group
                'skipped': row['lv_attr'][9] == 'k',
                'chunk': int(row['chunk_size'] or 0),
                # As it was when a snapshot was made of it
                'origin_size': int(row['origin_size'] or 0),
                'pool': row['pool_lv'],
                'origin': row['origin'],
                'data_percent': float(row['data_percent'] or 0),
                'metadata_percent': float(row['metadata_percent'] or 0),
            }
        except (ValueError, LookupError) as error:
            raise exception.OutputNotUnderstood(line=str(row),
                                                command='lvs') from error
    for name, volume in volumes.items():
        volume['half_made'] = (volume['skipped']
                               and name + '_rmeta_0' in volumes)
    return {name: volume for name, volume in volumes.items()
            if not SHOWN_PART.search(name)}


def parse_devices_section(text: str) -> dict[str, Any]:
    """What ``lvmconfig`` says of how LVM finds its disks.

    :returns: ``global_filter``, and ``use_devicesfile`` if this LVM knows it
        (since 2.03.12)
    :raises OutputNotUnderstood: one of them has another form, or there is no
        filter
    """
    settings = {}
    for line in text.splitlines():
        name, _equals, value = line.strip().partition('=')
        if name not in ('use_devicesfile', 'global_filter'):
            continue
        try:
            settings[name] = json.loads(value)
        except ValueError as error:
            raise exception.OutputNotUnderstood(
                line=line, command='lvmconfig') from error
    if 'global_filter' not in settings:
        raise exception.OutputNotUnderstood(line=text[:200],
                                            command='lvmconfig')
    return settings


def room_for(origin: int, chunk: int) -> int:
    """Bytes in which a thick snapshot can note all that its origin can change.

    Beside the chunks it has a header and, for each of them, a record; where
    the records fill a table the next one is there already (Linux'
    admin-guide/device-mapper/snapshot and drivers/md/dm-snap-persistent.c).

    :param origin: bytes of its origin
    :param chunk: bytes of a chunk, which has room for a record
    """
    chunks = -(-origin // chunk)
    tables = 1 + chunks // (chunk // RECORD)
    return (1 + tables + chunks) * chunk


def _room(row: dict[str, Any]) -> int:
    """Bytes that a thick snapshot should have; 0 of another volume."""
    if row['pool'] or not row['origin']:
        return 0
    return room_for(row['origin_size'], max(row['chunk'], RECORD))


def mirrored(sizes: Sequence[int], count: int) -> int:
    """Bytes that there is room for, if each lies on so many disks.

    The largest disks can be full of what has its mirror on the others, but
    for what these have no room for.

    :param sizes: bytes of each disk
    """
    largest_first = sorted(sizes, reverse=True)
    return min(sum(largest_first[largest:]) // (count - largest)
               for largest in range(count))


def _kind(pool: str) -> str:
    return "thin, in pool '%s'" % pool if pool else 'thick'


def is_admitted(path: str, filters: list[str]) -> bool:
    """Whether LVM looks at a device: the first pattern that matches decides.

    A filter is ``a`` or ``r``, a delimiter, a regular expression, and the
    delimiter again (lvm.conf(5), devices/global_filter).

    :raises ValueError: a filter has another form
    """
    for found in filters:
        if found[:1] not in 'ar' or len(found) < 3:
            raise ValueError(found)
        try:
            matches = re.search(found[2:-1], path)
        except re.error as error:
            raise ValueError(found) from error
        if matches:
            return found.startswith('a')
    return True


class LVMVolumeGroup(interface.VolumeGroup):
    """A volume group of this node."""

    def __init__(self, name: str, lvm_type: str, option: str,
                 configuration: Any, command: commands.Commands) -> None:
        """:param lvm_type: 'default' (thick), 'thin' or 'auto'
        :param option: the option that named the group, for errors
        """
        self.name = name
        self._type = lvm_type
        self._option = option
        self._configuration = configuration
        self._command = command
        self._pool = name + '-pool'
        # Cinder's driver takes a negative number for none.
        self._mirrors = max(configuration.lvm_mirrors, 0)
        self._lock = 'localstor-lvm-' + name
        self._block_size = 0
        self._disks: list[str] = []
        self._may_have_nvme = (configuration.localstor_transport
                               != interface.ISCSI)

    @property
    def thin(self) -> bool:
        return self._type == 'thin'

    def check(self) -> None:
        self.resume_abandoned()
        try:
            disks = self._group()
        except exception.CommandTimedOut:
            raise
        except exception.CommandFailed as error:
            raise self._missing(error) from error
        self._warn_of_scarce_metadata(disks[0])
        self._tell_of_missing_disks(disks)
        self._check_filter()
        pool = self._report().get(self._pool)
        if self._type == 'auto':
            self._type = 'thin' if pool else 'default'
        if self.thin and self._mirrors:
            raise exception.PoolIsNotMirrored(
                pool='%s/%s' % (self.name, self._pool),
                host=self._command.host, mirrors=self._mirrors)
        if self.thin and not pool:
            # Whatever lvm.conf(5), allocation/thin_pool_zero, says
            self._run('lvcreate', '--yes', '--thinpool', self._pool,
                      '--zero', 'y', '--extents', POOL_SHARE, self.name)
        elif pool and self.thin and not pool['zeroes']:
            raise exception.PoolDoesNotZero(
                pool='%s/%s' % (self.name, self._pool),
                host=self._command.host)
        udev.hide_group(self._command, self.name)
        self._activate_all()
        # What a process has changed that was killed before it could do this
        self._flush()
        self._block_size = max(map(_logical_block_size, self._disks),
                               default=interface.SECTOR)

    def _missing(self, error: exception.CommandFailed) -> Exception:
        """What an operator is told whose group LVM does not find."""
        # LVM warns of metadata that it can't read.
        if 'metadata' in str(error) or privileged.has_backup(self.name):
            return exception.VolumeGroupLost(
                group=self.name, host=self._command.host, reason=error)
        return exception.VolumeGroupMissing(
            group=self.name, host=self._command.host, option=self._option)

    def _activate_all(self) -> None:
        try:
            self._activate('vgchange', self.name)
        except exception.CommandTimedOut:
            raise
        except exception.CommandFailed as error:
            # One bad volume must not keep the others from their guests.
            inactive = {name for name, row in self._report().items()
                        if not row['active']}
            if not inactive or self._pool in inactive:
                raise
            LOG.error('Not active in volume group %(group)s: %(names)s. '
                      '%(error)s', {'group': self.name, 'error': error,
                                    'names': ', '.join(sorted(inactive))})

    def _activate(self, *arguments: str) -> None:
        """Activate what a command of LVM's is told to.

        Parts that are active without their whole are deactivated first. LVM
        names one at a time of each whole.
        """
        command, *rest = arguments
        deactivated: set[str] = set()
        while True:
            try:
                self._run(command, '--activate', 'y', *rest)
                return
            except exception.CommandTimedOut:
                raise
            except exception.CommandFailed as error:
                parts = set(PART_IS_ACTIVE.findall(str(error))) - deactivated
                if not parts:
                    raise
            LOG.warning('A command that is no more has left parts of logical '
                        'volumes active without the whole, which is '
                        'activated now: %s', ', '.join(sorted(parts)))
            self._run('lvchange', '--activate', 'n', *sorted(parts))
            deactivated |= parts

    def _run(self, *arguments: str) -> str:
        """Run a command of LVM's in the group, see Commands.run.

        :raises VolumeGroupBusy: another hangs there; this one would, too
        """
        holder = self._lock_holder()
        if holder is not None and holder.seconds > self._command.timeout:
            raise exception.VolumeGroupBusy(
                group=self.name, host=self._command.host,
                seconds=holder.seconds, holder=holder)
        return self._command.run(*arguments)

    def _lock_holder(self) -> privileged.Holder | None:
        """Who changes the group at the moment, whoever started it."""
        found = privileged.lock_holder(LOCK_FILE % self.name)
        return privileged.Holder(*found) if found else None

    def _check_filter(self) -> None:
        """:raises LVMLooksIntoVolumes: it could activate a guest's group"""
        # Not by their names: an LVM that does not know one fails.
        settings = parse_devices_section(self._command.run(
            'lvmconfig', '--typeconfig', 'full', 'devices'))
        if settings.get('use_devicesfile'):
            return
        filters = settings['global_filter']
        if isinstance(filters, str):
            filters = [filters]
        for path in (*GUESTS_PATHS, *(
                [GUESTS_PATH_OVER_NVME] if self._may_have_nvme else [])):
            try:
                admitted = is_admitted(path, filters)
            except ValueError as error:
                raise exception.OutputNotUnderstood(
                    line=str(error), command='lvmconfig') from error
            if admitted:
                raise exception.LVMLooksIntoVolumes(
                    host=self._command.host, path=path, filters=filters)

    def _group(self) -> list[dict[str, str]]:
        """A row for each of its disks, with what it has itself."""
        text = self._run(
            'vgs', '--reportformat', 'json', '--units', 'b', '--nosuffix',
            '--options', 'vg_mda_size,vg_mda_free,vg_missing_pv_count,'
            'pv_name,pv_size,pv_free,pv_allocatable', self.name)
        rows = parse_report(text, 'vg', 'vgs')
        if not rows:
            raise exception.OutputNotUnderstood(line=text, command='vgs')
        # A missing one has no path.
        self._disks = [row['pv_name'] for row in rows
                       if row['pv_name'].startswith('/')]
        return rows

    def missing_disks(self) -> int:
        return _count_missing(self._group())

    def _warn_of_scarce_metadata(self, group: dict[str, str]) -> None:
        # The area holds the metadata twice: as they are, and as they are
        # just being written.
        room, free = int(group['vg_mda_size']) // 2, int(group['vg_mda_free'])
        if free < room * SCARCE:
            LOG.warning("LVM's metadata area of volume group %(group)s has "
                        '%(free)d of %(room)d KiB left, and each volume '
                        'takes about half a KiB. See pvcreate(8), '
                        '--metadatasize',
                        {'group': self.name, 'free': free // units.Ki,
                         'room': room // units.Ki})

    def _tell_of_missing_disks(self, disks: Sequence[Mapping[str, str]]
                               ) -> None:
        missing = _count_missing(disks)
        if missing:
            LOG.error("%(count)d of the disks of volume group %(group)s are "
                      "missing: what is on the others can be used, and "
                      "nothing new be made. See 'pvs'",
                      {'count': missing, 'group': self.name})

    def _report(self) -> dict[str, dict[str, Any]]:
        return parse_logical_volumes(self._run(
            'lvs', '--reportformat', 'json', '--units', 'b', '--nosuffix',
            '--options',
            'lv_name,lv_size,lv_tags,lv_attr,pool_lv,origin,data_percent,'
            'metadata_percent,chunk_size,origin_size', self.name))

    def logical_volumes(self) -> dict[str, interface.LogicalVolume]:
        return self._volumes(self._report())

    def _volumes(self, report: dict[str, dict[str, Any]]
                 ) -> dict[str, interface.LogicalVolume]:
        return {name: interface.LogicalVolume(
            name=name, size=row['size'], tags=row['tags'],
            is_open=row['open'],
            used=int(row['size'] * row['data_percent'] / 100),
            origin='' if row['pool'] else row['origin'],
            is_valid=row['valid'], taken_of=row['origin'],
            room=_room(row), unfit=self._unfit(name, report),
            ailment=row['ailment'])
            for name, row in report.items() if name != self._pool}

    def _unfit(self, name: str, report: dict[str, dict[str, Any]]) -> str:
        """Why no volume of Cinder's can lie on a logical volume."""
        row, full_name = report[name], '%s/%s' % (self.name, name)
        pool = self._pool if self.thin else ''
        if row['kind'] not in FIT:
            return ("it is none of LVM's linear, striped, mirrored, RAID or "
                    "thin ones, or is just being changed (see 'lvs "
                    "--options +lv_layout %s'). Copy it to one that is"
                    % full_name)
        if row['pool'] != pool:
            return ('it is %s, and volumes of this backend are %s. Copy it '
                    'to one that is so' % (_kind(row['pool']), _kind(pool)))
        if row['ailment']:
            return ("%s, see 'pvs' and 'lvs --all --options +devices %s'. "
                    "Bring the disk back, or let LVM mend the mirror"
                    % (row['ailment'], full_name))
        if not row['valid']:
            return ("it is an invalid snapshot, and what it had is lost. "
                    "Remove it: 'lvremove %s'" % full_name)
        if not row['writable']:
            return ("it is read-only. Run 'lvchange --permission rw %s'"
                    % full_name)
        if row['skipped'] or not row['active']:
            return ("it is not active, or would not be after a restart. Run "
                    "'lvchange --setactivationskip n %s' and 'lvchange "
                    "--activate y %s'" % (full_name, full_name))
        if row['size'] < _room(row):
            return ("it would be full before all of '%s' has changed, and "
                    "lost. Run 'lvextend --size %db %s'"
                    % (row['origin'], _room(row), full_name))
        return ''

    def pool(self) -> interface.Pool | None:
        if not self.thin:
            return None
        report = self._report()
        try:
            pool = report[self._pool]
        except KeyError as error:
            raise exception.LogicalVolumeMissing(
                group=self.name, name=self._pool, host=self._command.host
            ) from error
        return interface.Pool(
            name='%s/%s' % (self.name, self._pool), size=pool['size'],
            data=pool['data_percent'] / 100,
            metadata=pool['metadata_percent'] / 100,
            volumes=self._volumes(report))

    def capacity(self) -> interface.Capacity:
        report = self._report()
        # An operator may have added a disk, which has to be flushed then.
        disks = self._group()
        pool = report.pop(self._pool, None)
        provisioned = sum(row['size'] for row in report.values())
        if self.thin and pool is not None:
            total = pool['size']
            free = int(total * (1 - pool['data_percent'] / 100))
        else:
            copies = self._mirrors + 1
            total = mirrored([int(disk['pv_size']) for disk in disks], copies)
            free = mirrored([int(disk['pv_free']) for disk in disks
                             if disk['pv_allocatable']], copies)
        if _count_missing(disks):
            # LVM would make nothing, and the scheduler should know.
            free = 0
        return interface.Capacity(total=total, free=free,
                                  provisioned=provisioned,
                                  volumes=len(report), thin=self.thin)

    def block_size(self) -> int:
        return self._block_size

    def _flush(self) -> None:
        """Make durable what was changed.

        lvm2 writes its metadata past the page cache but flushes no disk: a
        power cut takes a volume or a tag back that was long believed.
        """
        try:
            self._flush_disks()
        except OSError:
            # An operator has taken a disk out of the group, or it has died,
            # and the others have the metadata.
            self._group()
            self._flush_disks()

    def _flush_disks(self) -> None:
        for disk in self._disks:
            privileged.flush(disk)

    def path(self, name: str) -> str:
        return '/dev/%s/%s' % (self.name, name)

    def mapped_name(self, name: str) -> str:
        # lvm(8): hyphens are doubled, one joins group and volume
        return '%s-%s' % (self.name.replace('-', '--'),
                          name.replace('-', '--'))

    def is_active(self, name: str) -> bool:
        return os.path.exists(self.path(name))

    def activate(self, name: str) -> bool:
        try:
            self._activate('lvchange', '%s/%s' % (self.name, name))
        except exception.CommandTimedOut:
            raise
        except exception.CommandFailed as error:
            if LOST not in str(error):
                raise
            LOG.warning('Logical volume %(name)s was lost as it was made: '
                        '%(error)s', {'name': name, 'error': error})
            return False
        found = self._report().get(name)
        return found is None or not found['half_made']

    def keep_active(self, name: str) -> None:
        # lvchange does one of the two at a time.
        with lockutils.lock(self._lock):
            for change in (('--setactivationskip', 'n'), ('--activate', 'y')):
                self._run('lvchange', *change, '%s/%s' % (self.name, name))
            self._flush()

    def active_names(self) -> set[str]:
        try:
            return set(os.listdir('/dev/' + self.name))
        except FileNotFoundError:
            return set()  # a group without volumes has no directory

    def create(self, name: str, size: int, tags: frozenset[str]) -> bool:
        arguments = ['lvcreate', '--yes', '--name', name]
        for tag in sorted(tags):
            arguments += ['--addtag', tag]
        if self.thin:
            arguments += ['--virtualsize', '%db' % size,
                          '--thinpool', self._pool, self.name]
        else:
            if self._mirrors:
                arguments += ['--type', 'raid1',
                              '--mirrors', str(self._mirrors)]
            arguments += ['--size', '%db' % size, self.name]
        # lvm2 takes a lock of its own with a wait that has no end; ours
        # keeps the time that a caller waits out of the command's timeout.
        with lockutils.lock(self._lock):
            try:
                self._run(*arguments)
            except exception.CommandTimedOut:
                raise
            except exception.CommandFailed as error:
                if 'already exists' not in str(error):
                    self._complain(error, name, size)
                    raise
                made = not self.is_active(name) and not self.activate(name)
                if made:
                    self._remove(name)
                    self._run(*arguments)
            else:
                made = True
            self._flush()
        return made

    def create_snapshots(self, wanted: Sequence[interface.NewSnapshot],
                         moment: contextlib.AbstractContextManager[None]
                         = contextlib.nullcontext()) -> None:
        with lockutils.lock(self._lock):
            origins = {} if self.thin else self.logical_volumes()
            with moment:
                for snapshot in wanted:
                    self._create_snapshot(snapshot, origins)
            self._flush()

    def _create_snapshot(self, wanted: interface.NewSnapshot,
                         origins: Mapping[str, interface.LogicalVolume]
                         ) -> None:
        name, origin, tags = wanted
        arguments = ['lvcreate', '--yes', *UNMONITORED, '--snapshot',
                     '--name', name]
        for tag in sorted(tags):
            arguments += ['--addtag', tag]
        room = 0
        if self.thin:
            # LVM activates none by itself, unless told so.
            arguments += ['--setactivationskip', 'n']
        elif origin not in origins:
            raise exception.LogicalVolumeMissing(
                group=self.name, name=origin, host=self._command.host)
        else:
            # In bytes: of a share LVM takes what there is, and says nothing
            # (lvcreate(8), --extents).
            room = room_for(origins[origin].size, CHUNK)
            arguments += ['--size', '%db' % room,
                          '--chunksize', '%db' % CHUNK]
        try:
            self._run(*arguments, '%s/%s' % (self.name, origin))
        except exception.CommandTimedOut:
            raise
        except exception.CommandFailed as error:
            report = self._report()
            if name not in report or report[name]['origin'] != origin:
                if origin in report:
                    self._complain(error, name,
                                   room or report[origin]['size'])
                raise

    def split_snapshot(self, name: str) -> None:
        with lockutils.lock(self._lock):
            volume = self.logical_volumes().get(name)
            if volume is None or not volume.origin:
                return
            self._run('lvconvert', '--yes', *UNMONITORED, '--splitsnapshot',
                      '%s/%s' % (self.name, name))
            self._flush()

    def extend(self, name: str, size: int) -> None:
        volumes = self.logical_volumes()
        if name not in volumes:
            raise exception.LogicalVolumeMissing(
                group=self.name, name=name, host=self._command.host)
        if volumes[name].size >= size:
            return
        with lockutils.lock(self._lock), self._inactive(
                name if interface.snapshots_on(name, volumes) else None):
            try:
                self._run('lvextend', '--size', '%db' % size,
                          '%s/%s' % (self.name, name))
            except exception.CommandFailed as error:
                self._complain(error, name, size)
                raise
            self._flush()

    @contextlib.contextmanager
    def _inactive(self, origin: str | None) -> Iterator[None]:
        """Let an origin be inactive: LVM grows no other."""
        if origin is None:
            yield
            return
        full_name = '%s/%s' % (self.name, origin)
        self._run('lvchange', *UNMONITORED, '--activate', 'n', full_name)
        try:
            yield
        finally:
            self._run('lvchange', *UNMONITORED, '--activate', 'y', full_name)

    def _complain(self, error: exception.CommandFailed, name: str,
                  size: int) -> None:
        if any(found in str(error) for found in NO_ROOM_FOR_METADATA):
            raise exception.MetadataAreaFull(
                group=self.name, host=self._command.host, name=name,
                reason=error.kwargs['reason']) from error
        if DISK_IS_MISSING in str(error):
            raise exception.DiskMissing(
                group=self.name, host=self._command.host, name=name,
                reason=error.kwargs['reason']) from error
        if 'insufficient' in str(error).lower():
            free = self.capacity().free
            raise exception.NotEnoughSpace(
                group=self.name, host=self._command.host, name=name,
                free=gibibytes(free), needed=gibibytes(size))

    def zero(self, name: str, size: int) -> None:
        privileged.zero(self.path(name), size)

    def copy(self, name: str, to: str) -> None:
        # dm-clone writes its map past the page cache.
        self._command.run(
            'dd', 'if=' + self.path(name), 'of=' + self.path(to), 'bs=1M',
            'iflag=direct', 'oflag=direct', 'conv=nocreat,notrunc,fsync')

    def clear(self, name: str) -> None:
        # Cinder's function refuses the value that its option allows.
        if self._configuration.volume_clear == 'none':
            return
        volume = self.logical_volumes().get(name)
        # A thin pool hands out zeroed blocks only.
        if volume is None or self.thin:
            return
        size = volume.size // units.Mi
        volume_utils.clear_volume(
            size, self.path(name),
            volume_clear=self._configuration.volume_clear,
            # Cinder's function would write on behind the end; 0 is all.
            volume_clear_size=min(self._configuration.volume_clear_size,
                                  size),
            volume_clear_ionice=(self._configuration.volume_clear_ionice
                                 or IDLE))
        # Before the volume goes, or nobody would know what is not wiped.
        self._flush()

    def retag(self, name: str, add: frozenset[str],
              remove: frozenset[str]) -> None:
        arguments = []
        for tag in sorted(add):
            arguments += ['--addtag', tag]
        for tag in sorted(remove):
            arguments += ['--deltag', tag]
        if arguments:
            with lockutils.lock(self._lock):
                self._run('lvchange', *arguments,
                          '%s/%s' % (self.name, name))
                self._flush()

    def rename(self, name: str, new: str) -> None:
        with lockutils.lock(self._lock):
            try:
                self._run('lvrename', self.name, name, new)
            except exception.CommandTimedOut:
                raise
            except exception.CommandFailed as error:
                found = self.logical_volumes()
                if name in found or new not in found:
                    self._complain(error, name, 0)
                    raise
            self._flush()

    def remove(self, name: str) -> None:
        with lockutils.lock(self._lock):
            # LVM would remove them with it.
            interface.check_no_snapshots(self.name, name,
                                         self.logical_volumes())
            self._remove(name)
            self._flush()

    def _remove(self, name: str) -> None:
        try:
            self._run('lvremove', '--yes', '--config',
                      'activation { retry_deactivation = 1 }',
                      '%s/%s' % (self.name, name))
        except exception.CommandTimedOut:
            raise
        except exception.CommandFailed as error:
            if 'Failed to find logical volume' not in str(error):
                raise

    def suspended(self) -> set[str]:
        prefix = self.mapped_name('')
        found = set()
        for name, uuid in suspension.suspended().items():
            match = MAPPED.fullmatch(name.removeprefix(prefix))
            if uuid.startswith('LVM-') and name.startswith(prefix) and match:
                found.add(match['volume'].replace('--', '-'))
        return found

    def resume_abandoned(self) -> None:
        if not self.suspended():
            return
        with lockutils.lock(self._lock):
            # Whoever has suspended something holds the lock until it is
            # resumed, if it lives.
            if self._lock_holder() is not None:
                return
            # Nothing on the pool answers before the pool does.
            for name in sorted(self.suspended(),
                               key=lambda name: (name != self._pool, name)):
                self._resume(name)

    def _resume(self, name: str) -> None:
        full_name = '%s/%s' % (self.name, name)
        LOG.warning('Logical volume %s was left suspended by a command that '
                    'is no more, and is resumed', full_name)
        try:
            # LVM's own way: to the table that its metadata tell, whether the
            # command died before they were written or after.
            self._run('lvchange', '--refresh', full_name)
        except exception.LocalStorException as error:
            LOG.error('Logical volume %(name)s stays suspended: %(error)s',
                      {'name': full_name, 'error': error})


def _count_missing(disks: Sequence[Mapping[str, str]]) -> int:
    return int(disks[0]['vg_missing_pv_count'])


def gibibytes(size: int) -> str:
    """Bytes for a reader."""
    return '%.2f GiB' % (size / units.Gi)


def _logical_block_size(disk: str) -> int:
    """Bytes of a logical block of a disk or of a partition."""
    device = os.path.realpath(os.path.join(
        BLOCK_DEVICES, os.path.basename(os.path.realpath(disk))))
    if os.path.exists(os.path.join(device, 'partition')):
        # Only the disk that it is a part of has a queue.
        device = os.path.dirname(device)
    with open(os.path.join(device, 'queue', 'logical_block_size')) as file:
        return int(file.read())
