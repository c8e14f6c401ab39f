# SPDX-License-Identifier: Apache-2.0
"""Targets of tgtd for source copies, made with tgtadm(8).

Cinder's driver writes a file and lets tgt-admin, a program in Perl, read it.
That runs tgtadm once and again for each target that there is, takes most of
the time of an attachment, and never forgets a secret.
"""

from collections.abc import Iterable
from collections.abc import Iterator
import contextlib
import dataclasses
import re

from oslo_concurrency import lockutils
import tenacity

from cinder_localstor import exception
from cinder_localstor.node import commands
from cinder_localstor.node import interface

LUN = 1

_TGTADM = ('tgtadm', '--lld', 'iscsi', '--mode')
TARGET = (*_TGTADM, 'target')
_DISK = (*_TGTADM, 'logicalunit')
_ACCOUNT = (*_TGTADM, 'account')

# Not where tgtd does not answer
_REFUSED = (tenacity.retry_if_exception_type(exception.CommandFailed)
            & tenacity.retry_if_not_exception_type(exception.CommandTimedOut))

_BEGIN = re.compile(r'^Target (?P<number>\d+): (?P<iqn>\S+)$')
_PART = re.compile(r'^ {4}(?P<name>\S[^:]*):$')
_ENTRY = re.compile(r'^ {8}(?P<entry>\S+)$')


@dataclasses.dataclass
class Target:
    """A target as tgtd shows it.

    :ivar accounts: names of users that may log in
    :ivar admitted: addresses and names of initiators
    """

    number: int
    iqn: str
    accounts: list[str] = dataclasses.field(default_factory=list)
    admitted: list[str] = dataclasses.field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        """Whether :func:`make` has come to its end, for a source copy."""
        # An address, and the name of an initiator
        return len(self.admitted) == 2


def targets(command: commands.Commands) -> list[Target]:
    """All targets that tgtd has.

    :raises CommandFailed: it does not answer
    """
    return list(parse(command.run(*TARGET, '--op', 'show')))


def parse(text: str) -> Iterator[Target]:
    """The targets in what ``tgtadm --mode target --op show`` prints.

    All else that is said of a target is passed over.
    """
    target, entries = None, None
    for line in text.splitlines():
        if begin := _BEGIN.match(line):
            if target:
                yield target
            target = Target(int(begin['number']), begin['iqn'])
            entries = None
        elif target and (part := _PART.match(line)):
            entries = {'Account information': target.accounts,
                       'ACL information': target.admitted}.get(part['name'])
        elif entries is not None and (entry := _ENTRY.match(line)):
            entries.append(entry['entry'])
    if target:
        yield target


# What an earlier process has left is gone with the first try.
@tenacity.retry(retry=_REFUSED, stop=tenacity.stop_after_attempt(2),
                reraise=True)
def make(command: commands.Commands, export: interface.Export, device: str
         ) -> None:
    """Export a device, read-only, to one initiator.

    tgtd admits nobody to a target before the last two of these commands.

    :raises CommandFailed: tgtd refuses, and nothing is left
    :raises CommandTimedOut: it does not answer
    """
    number = _take_number(command, export.iqn)
    target = ('--tid', str(number))
    disk = (*target, '--lun', str(LUN))
    try:
        command.run_in_turn('tgtadm, for ' + export.iqn, [
            # Direct: past the page cache, and so by whole logical blocks
            [*_DISK, '--op', 'new', *disk, '--backing-store', device,
             '--bsoflags', 'direct', '--blocksize', str(export.block_size)],
            [*_DISK, '--op', 'update', *disk, '--params',
             'readonly=1,scsi_sn=%(serial)s,scsi_id=%(serial)s' % {
                 'serial': export.serial}],
            [*_ACCOUNT, '--op', 'new', '--user', export.username,
             '--password', export.password],
            [*_ACCOUNT, '--op', 'bind', *target, '--user', export.username],
            [*TARGET, '--op', 'bind', *target, '--initiator-address',
             export.address],
            [*TARGET, '--op', 'bind', *target, '--initiator-name',
             export.initiator]])
    except exception.CommandTimedOut:
        raise
    except exception.CommandFailed:
        _remove(command, number, [export.username])
        raise


def remove(command: commands.Commands, target: Target) -> None:
    """Take a target away, with its sessions and its secrets.

    :raises CommandFailed: tgtd refuses
    """
    _remove(command, target.number, target.accounts)


def _remove(command: commands.Commands, number: int, accounts: Iterable[str]
            ) -> None:
    command.run(*TARGET, '--op', 'delete', '--force', '--tid', str(number))
    for account in accounts:
        # tgtd may not have had it yet.
        with contextlib.suppress(exception.CommandFailed):
            command.run(*_ACCOUNT, '--op', 'delete', '--user', account)


def _take_number(command: commands.Commands, iqn: str) -> int:
    """A new, empty target; its number."""
    with lockutils.lock('localstor-tgt'):
        # Cinder's tgt-admin and other backends take numbers, too.
        for attempt in tenacity.Retrying(
                retry=_REFUSED, stop=tenacity.stop_after_attempt(5),
                reraise=True):
            with attempt:
                number = 1 + max((target.number
                                  for target in targets(command)), default=0)
                command.run(*TARGET, '--op', 'new', '--tid', str(number),
                            '--targetname', iqn)
    return number
