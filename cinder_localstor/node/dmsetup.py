# SPDX-License-Identifier: Apache-2.0
"""Device-mapper nodes through dmsetup(8).

All our nodes have a UUID that begins with ``LOCALSTOR-``.  By it we know them
again, and by it the udev rules know them (:mod:`cinder_localstor.node.udev`).
"""

from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
import dataclasses
import os
import re

from os_brick.privileged import rootwrap
from oslo_log import log as logging
from oslo_utils import excutils
import tenacity

from cinder_localstor import exception
from cinder_localstor.node import commands
from cinder_localstor.node import interface
from cinder_localstor.node import privileged
from cinder_localstor.node import suspension
from cinder_localstor.node import udev

LOG = logging.getLogger(__name__)

UUID_PREFIX = 'LOCALSTOR-'
# Not in /dev/mapper: what is there belongs to device-mapper.
LINK = '/dev/localstor-%s'

SEGMENT_LINE = re.compile(r'(?P<name>\S+): (?P<start>\d+) (?P<length>\d+) '
                          r'(?P<target>\S+) ?(?P<arguments>.*)')
# What a segment of type linear or clone lies on
DEVICE = re.compile(r'\b\d+:\d+\b')
# Modules that a target needs and does not load by itself
MODULES_BESIDES = {'multipath': ('dm-round-robin',)}
NO_DEVICES = 'No devices found'
# dmsetup asks for the names of all nodes first, and then for each of them: one
# that has gone in between makes it fail (ENXIO); in the first words where it
# asks for tables, else in the others.
GONE = '(No such device or address|Device does not exist)'
# As often another may go while the rest is asked for.
LOOKS = 10
# Nodes that one command makes.  The kernel takes 128 KiB as an argument, which
# is some 700; but udev looks at each of them while the command waits, and a
# command has no more than its time.
AT_ONCE = 50
COLUMNS = 'name,uuid,major,minor,open,suspended,readonly'


def parse_segments(text: str, command: str
                   ) -> dict[str, list[interface.Segment]]:
    """Segments by node's name from ``dmsetup status`` or ``dmsetup table``.

    :raises OutputNotUnderstood: a line has another form
    """
    segments: dict[str, list[interface.Segment]] = {}
    for line in text.splitlines():
        if not line.strip() or line.startswith(NO_DEVICES):
            continue
        if line.endswith(':') or line.endswith(': '):
            # A node without a table
            segments.setdefault(line.rstrip(': '), [])
            continue
        match = SEGMENT_LINE.fullmatch(line)
        if match is None:
            raise exception.OutputNotUnderstood(line=line, command=command)
        segments.setdefault(match['name'], []).append(interface.Segment(
            start=int(match['start']), length=int(match['length']),
            target=match['target'], arguments=match['arguments'].strip()))
    return segments


def parse_info(text: str
               ) -> tuple[dict[str, interface.Device], dict[str, str]]:
    """Our nodes by name, and the names of all nodes by 'major:minor'.

    :param text: what ``dmsetup info -c`` prints of COLUMNS
    :raises OutputNotUnderstood: a line has another form
    """
    devices = {}
    names = {}
    for line in text.splitlines():
        if not line.strip() or line.startswith(NO_DEVICES):
            continue
        try:
            (name, uuid, major, minor,
             open_count, suspended, read_only) = line.split('|')
            names['%d:%d' % (int(major), int(minor))] = name
            if not uuid.startswith(UUID_PREFIX):
                continue
            devices[name] = interface.Device(
                name=name, open_count=int(open_count),
                suspended={'Active': False, 'Suspended': True}[suspended],
                read_only={'Writeable': False, 'Read-only': True}[read_only])
        except (ValueError, KeyError) as error:
            raise exception.OutputNotUnderstood(
                line=line, command='dmsetup info') from error
    return devices, names


class DmsetupDeviceMapper(interface.DeviceMapper):
    """The device-mapper of this node."""

    def __init__(self, command: commands.Commands) -> None:
        self._command = command

    def check_target(self, target: str) -> None:
        for module in ('dm-' + target, *MODULES_BESIDES.get(target, ())):
            try:
                self._command.run('modprobe', '--quiet', module)
            except exception.CommandFailed:
                # It may be built in.
                LOG.debug('No module %s to load', module)
        versions = self._command.run('dmsetup', 'targets')
        if target not in (line.split()[0] for line in versions.splitlines()
                          if line.strip()):
            raise exception.NoDataPath(host=self._command.host, target=target)
        udev.hide_devices(self._command)

    def devices(self) -> dict[str, interface.Device]:
        devices, names = parse_info(self._of_all(
            'info', '--columns', '--noheadings', '--separator', '|',
            '--options', COLUMNS))
        # --noflush: without it a clone commits its map for each question.
        status = parse_segments(
            self._of_all('status', '--noflush'), 'dmsetup status')
        tables = parse_segments(self._of_all('table'), 'dmsetup table')
        for name, device in devices.items():
            devices[name] = dataclasses.replace(
                device, status=tuple(status.get(name, ())),
                under=tuple(names.get(found, found)
                            for segment in tables.get(name, ())
                            for found in DEVICE.findall(segment.arguments)))
        return devices

    @tenacity.retry(
        retry=tenacity.retry_if_exception_message(match='(?s).*' + GONE),
        stop=tenacity.stop_after_attempt(LOOKS), reraise=True)
    def _of_all(self, *arguments: str) -> str:
        """What a command of dmsetup says of all nodes of the host.

        :raises CommandFailed: it fails, or nodes come and go all the time
        """
        return self._command.run('dmsetup', *arguments)

    def path(self, name: str) -> str:
        return '/dev/mapper/' + name

    def link(self, name: str) -> str:
        rootwrap.link_root(self.path(name), LINK % name)
        return LINK % name

    def exists(self, name: str) -> bool:
        return os.path.exists(self.path(name))

    def in_flight(self, name: str) -> int:
        device = os.path.basename(os.path.realpath(self.path(name)))
        try:
            with open('/sys/block/%s/inflight' % device) as file:
                # Reads and writes, the kernel's sysfs-block
                return sum(map(int, file.read().split()))
        except FileNotFoundError:
            return 0

    def create(self, name: str, table: list[interface.Segment],
               read_only: bool = False) -> None:
        try:
            self._command.run('dmsetup', 'create', name,
                              '--uuid', UUID_PREFIX + name,
                              *_table_arguments('\n'.join(map(str, table)),
                                                read_only))
        except exception.CommandTimedOut:
            raise
        except exception.CommandFailed as error:
            if 'Device or resource busy' not in str(error):
                raise
            found = self.devices().get(name)
            if found is None:
                raise
            if not found.status:
                # Whoever made it was ended before it had a table, and udev
                # has no name for it yet.
                self.reload(name, table, read_only)

    def create_all(self, nodes: Sequence[interface.NewNode]) -> None:
        failed = None
        for first in range(0, len(nodes), AT_ONCE):
            try:
                self._command.run(
                    'dmsetup', 'create', '--concise',
                    ';'.join(map(_concise, nodes[first:first + AT_ONCE])))
            except exception.CommandFailed as error:
                failed = failed or error
        if failed:
            raise failed

    def reload(self, name: str, table: list[interface.Segment],
               read_only: bool = False, keep_queued: bool = False) -> None:
        self._swap(name, '\n'.join(map(str, table)), read_only, keep_queued)

    def make_read_only(self, name: str) -> None:
        self.reload(name, self.table(name), read_only=True)

    def table(self, name: str) -> list[interface.Segment]:
        """What a node, ours or not, is made of."""
        # Of a single node dmsetup does not say which it is.
        lines = self._command.run('dmsetup', 'table', name).splitlines()
        return parse_segments(
            '\n'.join('%s: %s' % (name, line) for line in lines),
            'dmsetup table')[name]

    def _swap(self, name: str, table: str, read_only: bool,
              keep_queued: bool = False) -> None:
        self._command.run('dmsetup', 'load', name,
                          *_table_arguments(table, read_only))
        try:
            # One ioctl: the kernel suspends, swaps and resumes.  So no death
            # of ours can leave the node suspended, and when the suspend is
            # interrupted the old table stays (do_resume in dm-ioctl.c).
            self._command.run('dmsetup', 'resume', '--nolockfs',
                              *(['--noflush'] if keep_queued else []), name)
        except exception.CommandFailed:
            with excutils.save_and_reraise_exception():
                self._command.run('dmsetup', 'clear', name)

    def suspend(self, name: str) -> None:
        self._command.run('dmsetup', 'suspend', '--nolockfs', name)

    def resume(self, name: str) -> None:
        self._command.run('dmsetup', 'resume', name)

    @contextlib.contextmanager
    def held(self, names: Sequence[str]) -> Iterator[None]:
        guard = self._command.hold(names, interface.HOLD)
        gone_on = set(names)
        failure = None
        try:
            yield
            # The fact that tells: somebody may have resumed one by hand.
            gone_on -= suspension.suspended().keys()
        except exception.CommandFailed as error:
            failure = error
        finally:
            early = self._let_go(guard)
        if failure and not early:
            raise failure
        if gone_on or early:
            # A command that the guard has ended tells no reason.
            raise exception.NotHeld(
                names=', '.join(sorted(gone_on or names)),
                host=self._command.host, seconds=interface.HOLD) from failure

    def _let_go(self, guard: int) -> bool:
        """Whether nodes went on before that."""
        try:
            self._command.let_go(guard)
            return False
        except exception.CommandFailed as error:
            LOG.error('Guests did not wait until all was done: %s', error)
            return True

    def abandoned(self) -> set[str]:
        found = {name for name, uuid in suspension.suspended().items()
                 if uuid.startswith(UUID_PREFIX)}
        if not found or privileged.lock_holder(privileged.suspension_lock()):
            return set()
        # A guard may have let them go on since.
        return found & suspension.suspended().keys()

    def message(self, name: str, text: str) -> None:
        self._command.run('dmsetup', 'message', name, '0', text)

    def remove(self, name: str) -> None:
        if os.path.lexists(LINK % name):
            rootwrap.unlink_root(LINK % name)

        @tenacity.retry(
            retry=tenacity.retry_if_exception_type(exception.VolumeInUse),
            wait=tenacity.wait_fixed(0.2), stop=tenacity.stop_after_attempt(5),
            reraise=True)
        def attempt() -> None:
            # A probe of udev's may have it open for a moment.
            try:
                self._command.run('dmsetup', 'remove', name)
            except exception.CommandTimedOut:
                raise
            except exception.CommandFailed as error:
                if 'not found' in str(error) or 'No such device' in str(error):
                    return
                if 'busy' in str(error):
                    raise exception.VolumeInUse(
                        volume_name=name, host=self._command.host,
                        device=self.path(name)) from error
                raise
        attempt()

    def flush(self, device: str) -> None:
        privileged.flush(device)

    def forget_cached(self, device: str) -> None:
        privileged.forget_cached(device)

    def refuse_discards(self, device: str) -> None:
        privileged.refuse_discards(device)


def _concise(node: interface.NewNode) -> str:
    """A node as dmsetup(8), CONCISE FORMAT, has it."""
    fields = (node.name, UUID_PREFIX + node.name, '',
              'ro' if node.read_only else 'rw', *map(str, node.table))
    return ','.join(re.sub(r'([,;\\])', r'\\\1', field) for field in fields)


def _table_arguments(table: str, read_only: bool) -> list[str]:
    return ['--table', table, *(['--readonly'] if read_only else [])]
