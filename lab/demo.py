# SPDX-License-Identifier: Apache-2.0
"""The main job, told as it happens: a volume follows its instance.

Exit status 0 means that every check held.
"""

import argparse
from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import dataclasses
import sys
import time

import rich.console
import rich.panel
import rich.progress
import rich.table

from lab import arrival
from lab import cloud as clouds
from lab import errors
from lab import node as nodes
from lab import progress
from lab import user as users

FILES = 6
FILE_MIB = 32
NEW_FILES = 2
MOUNT = '/mnt/volume'
# Seconds
PATIENCE = 300
# Bytes per second that a move may copy while it is shown that it runs
HELD = 8 << 20


@dataclasses.dataclass
class Check:
    """Something that has to hold, and what was seen."""

    claim: str
    held: bool
    seen: str = ''


class Story:
    """One run of the demo."""

    def __init__(self, cloud: clouds.Cloud, console: rich.console.Console
                 ) -> None:
        self.cloud = cloud
        self.console = console
        self.user = users.User(cloud)
        self.checks: list[Check] = []
        self.measured: list[tuple[str, str]] = []

    # Telling

    def chapter(self, text: str) -> None:
        """A headline."""
        self.console.rule('[bold]' + text, align='left')

    def say(self, text: str) -> None:
        """A line of the story."""
        self.console.print('  ' + text, highlight=False, soft_wrap=True)

    def check(self, claim: str, held: bool, seen: str = '') -> None:
        """Note a check and show how it came out."""
        self.checks.append(Check(claim, held, seen))
        mark = '[green]✓[/]' if held else '[red]✗[/]'
        self.say('%s %s%s' % (mark, claim,
                              '  [dim]%s[/]' % seen if seen else ''))

    def measure(self, what: str, value: str) -> None:
        """Note a figure for the table at the end."""
        self.measured.append((what, value))
        self.say('%s: [bold]%s[/]' % (what, value))

    @contextlib.contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Measure how long something takes."""
        start = time.monotonic()
        yield
        self.measure(what, '%.1f s' % (time.monotonic() - start))

    # The story

    def tell(self) -> bool:
        """All of it; whether every check held."""
        volume = self.create()
        try:
            home = self.cloud.node(self.user.host(volume))
            away = next(node for node in self.cloud.nodes
                        if node.name != home.name)
            source = self.fill(volume, home)
            attachment = self.follow(volume, away)
            try:
                self.use_while_it_arrives(attachment)
                self.arrive(attachment)
                self.look_around(source, attachment, home, away)
            finally:
                away.run(['umount', MOUNT], check=False)
                self.user.detach(attachment)
        finally:
            self.user.delete_volume(volume)
        self.summary()
        return all(check.held for check in self.checks)

    def create(self) -> str:
        """A volume, by the openstack command."""
        self.chapter('A user creates a volume')
        self.say('$ openstack volume create --size 1 --type local story')
        with self.timed('openstack volume create'):
            volume = self.cloud.openstack(
                'volume', 'create', '--size', '1', '--type', 'local',
                'story')['id']
            self.user.wait_for_status(volume, 'available')
        self.say('volume %s lives on [bold]%s[/]' % (
            volume, self.user.host(volume)))
        return volume

    def fill(self, volume: str, home: nodes.Node) -> str:
        """Attach where it lives and write files; the name of that copy."""
        self.chapter('Attached on %s, where it lives' % home.name)
        with self.timed('attach on its own node'):
            attachment = self.user.attach(volume, home)
        self.say('device %s' % attachment.device)
        self.say('under it: ' + self.table_of(home, attachment))
        home.run(['mkfs.ext4', '-q', attachment.device])
        home.run(['mkdir', '-p', MOUNT])
        home.run(['mount', attachment.device, MOUNT])
        self.write_files(home, 'old', FILES)
        home.run(['umount', MOUNT])
        self.say('a file system with %d files of %d MiB and their checksums'
                 % (FILES, FILE_MIB))
        self.user.detach(attachment)
        return attachment.device.removesuffix('-handle').rpartition('/')[2]

    def write_files(self, node: nodes.Node, name: str, count: int) -> None:
        script = ('cd %s && for i in $(seq %d); do dd if=/dev/urandom '
                  'of=%s-$i bs=1M count=%d status=none; done && '
                  'sha256sum %s-* > SHA256SUMS.%s && sync' % (
                      MOUNT, count, name, FILE_MIB, name, name))
        node.run(['sh', '-c', script], timeout=PATIENCE)

    def verify_files(self, node: nodes.Node, name: str) -> bool:
        """Whether all files read as written, past the page cache."""
        script = ('sync && echo 3 > /proc/sys/vm/drop_caches && cd %s && '
                  'sha256sum --check --quiet SHA256SUMS.%s' % (MOUNT, name))
        return node.run(['sh', '-c', script], check=False,
                        timeout=PATIENCE).returncode == 0

    def follow(self, volume: str, away: nodes.Node) -> users.Attachment:
        """Attach on the other node."""
        self.chapter('Detached, and attached on %s' % away.name)
        start = time.monotonic()
        attachment = self.user.attach(volume, away)
        away.run(['dd', 'if=' + attachment.device, 'of=/dev/null',
                  'bs=4096', 'count=1', 'iflag=direct', 'status=none'])
        self.started = time.monotonic()
        self.measure('from the API call to a usable device on the other node',
                     '%.1f s' % (self.started - start))
        self.say('device %s' % attachment.device)
        self.say('under it: ' + self.table_of(away, attachment))
        self.check('the volume lives on %s now' % away.name,
                   self.user.host(volume) == away.name)
        return attachment

    def use_while_it_arrives(self, attachment: users.Attachment) -> None:
        """Read old files and write new ones before all has arrived."""
        self.chapter('In use while the data is still arriving')
        node = attachment.node
        assert node is not None
        # On a slow machine it would else be over before this is.
        arrival.throttle(node, attachment.device, HELD)
        self.say('held back to %d MiB/s meanwhile' % (HELD >> 20))
        node.run(['mkdir', '-p', MOUNT])
        node.run(['mount', attachment.device, MOUNT])
        self.write_files(node, 'new', NEW_FILES)
        old = self.verify_files(node, 'old')
        new = self.verify_files(node, 'new')
        here = self.arrived(attachment)
        arrival.throttle(node, attachment.device)
        self.check('files read as written, new ones were added',
                   old and new)
        self.check('the move was still running then', here is not None,
                   'nothing is left to arrive' if here is None
                   else '%d of %d MiB were here' % here)

    def arrived(self, attachment: users.Attachment
                ) -> tuple[int, int] | None:
        """MiB that are here and that there are; None if all has arrived."""
        assert attachment.node is not None
        found = arrival.look(attachment.node, attachment.device)
        return found and (found.local >> 20, found.total >> 20)

    def arrive(self, attachment: users.Attachment) -> None:
        """Watch the periodic task finish the move."""
        self.chapter('The periodic task finishes the move')
        bar = rich.progress.Progress(
            rich.progress.TextColumn('  arriving'), rich.progress.BarColumn(),
            rich.progress.TaskProgressColumn(),
            rich.progress.TextColumn('{task.completed:.0f} of '
                                     '{task.total:.0f} MiB'),
            rich.progress.TimeRemainingColumn(), console=self.console)
        end = time.monotonic() + PATIENCE
        total = 0
        with bar:
            task = bar.add_task('arriving', total=1024)
            while time.monotonic() < end:
                found = self.arrived(attachment)
                if found is None:
                    bar.update(task, completed=1024)
                    break
                total = found[1]
                bar.update(task, completed=found[0], total=found[1])
                time.sleep(0.5)
        took = time.monotonic() - self.started
        self.measure('from usable to all local, in use meanwhile',
                     '%.1f s (%.0f MiB/s)' % (took, (total or 1024) / took))

    def look_around(self, source: str, attachment: users.Attachment,
                    home: nodes.Node, away: nodes.Node) -> None:
        """Nothing of the move is left, and all data is."""
        self.chapter('Nothing is left of the move')
        move_id = attachment.device.removesuffix('-handle').partition(
            'volume-')[2]
        self.eventually('the shadow row is gone', lambda: not any(
            row['id'] == move_id for row in self.user.volumes()))
        self.eventually('the handle is linear over the logical volume',
                        lambda: 'linear' in self.table_of(away, attachment))
        self.say('[dim]%s[/]' % self.table_of(away, attachment))
        self.gone('source logical volume', home, ['lvs', '-o', 'lv_name'],
                  source)
        self.gone('source export', home, [
            'tgtadm', '--lld', 'iscsi', '--op', 'show', '--mode', 'target'],
            move_id)
        self.gone('source handle', home, ['dmsetup', 'ls'], source)
        self.gone('iSCSI session', away, ['iscsiadm', '-m', 'session'],
                  move_id)
        self.gone('map of what had arrived', away, ['lvs', '-o', 'lv_name'],
                  '-regions')
        self.gone('native helper', away, [
            'sh', '-c', 'cat /proc/[0-9]*/comm'], 'localstor-hydra')
        self.check('all files read as written',
                   self.verify_files(away, 'old')
                   and self.verify_files(away, 'new'))

    def eventually(self, claim: str, holds: Callable[[], bool]) -> None:
        """Check something that may still take a moment."""
        end = time.monotonic() + PATIENCE
        while not holds() and time.monotonic() < end:
            time.sleep(0.5)
        self.check(claim, holds())

    def gone(self, what: str, node: nodes.Node, argv: list[str], name: str
             ) -> None:
        """Check that a command does not show a name any more."""
        out = node.run(argv, check=False).stdout
        self.check('%s is gone from %s' % (what, node.name),
                   name not in out, '$ ' + ' '.join(argv))

    def table_of(self, node: nodes.Node, attachment: users.Attachment) -> str:
        """The device-mapper table of a handle, in names."""
        name = attachment.device.rpartition('/')[2]
        table = node.run(['dmsetup', 'table', name]).stdout.strip()
        below = node.run(['dmsetup', 'deps', '-o', 'devname', name]
                         ).stdout.strip().rpartition(':')[2].strip(' ()')
        return '%s -> %s' % (table, below)

    def summary(self) -> None:
        """The tables at the end."""
        self.console.print()
        table = rich.table.Table('measured', 'value', title='What was seen')
        for row in self.measured:
            table.add_row(*row)
        held = sum(check.held for check in self.checks)
        table.add_section()
        table.add_row('checks that held', '%d of %d' % (held,
                                                        len(self.checks)))
        self.console.print(table)
        for check in self.checks:
            if not check.held:
                self.console.print('[red]did not hold:[/] %s %s' % (
                    check.claim, check.seen))


def main(argv: list[str] | None = None) -> int:
    """Run the demo; the exit status."""
    parser = argparse.ArgumentParser(prog='lab.demo', description=__doc__)
    parser.add_argument('--name', default='demo', help='name of the lab')
    options = parser.parse_args(argv)
    console = rich.console.Console(highlight=False)
    console.print(rich.panel.Panel(
        'Two compute nodes with real kernels, a control plane, one volume.\n'
        'The volume is attached on one node, then on the other: it is usable '
        'there\nat once, and its data follows.', title='cinder-localstor'))
    cloud = clouds.Cloud(options.name)
    start = time.monotonic()
    try:
        with progress.shown(sys.stdout) as shown:
            # dm-clone is there, too; this is the data path to recommend.
            cloud.up(nodes=2, progress=shown, options={
                'local': {'localstor_data_path': 'hydrator'}})
        story = Story(cloud, console)
        story.measure('the cloud came up in',
                      '%.0f s' % (time.monotonic() - start))
        held = story.tell()
    except (errors.LabError, users.VolumeError) as error:
        console.print('[red]%s[/]' % error)
        return 1
    console.print('The lab is still up: .venv/bin/python -m lab --name %s '
                  'status; "make lab-down" ends it.' % options.name)
    return 0 if held else 1


if __name__ == '__main__':
    sys.exit(main())
