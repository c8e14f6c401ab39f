# SPDX-License-Identifier: Apache-2.0
"""The main job, told as it happens: a volume follows its instance."""

import sys
import time

from lab import arrival
from lab import node as nodes
from lab import story
from lab import user as users

FILES = 6
FILE_MIB = 32
NEW_FILES = 2
MOUNT = '/mnt/volume'
# Bytes per second that a move may copy while it is shown that it runs
HELD = 8 << 20


class MovingVolume(story.Story):
    """A volume is attached on one node, then on the other."""

    name = 'demo'
    title = (
        'Two compute nodes with real kernels, a control plane, one volume.\n'
        'The volume is attached on one node, then on the other: it is usable '
        'there\nat once, and its data follows.')

    def tell(self) -> None:
        """All of it."""
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
        node.run(['sh', '-c', script], timeout=story.PATIENCE)

    def verify_files(self, node: nodes.Node, name: str) -> bool:
        """Whether all files read as written, past the page cache."""
        script = ('sync && echo 3 > /proc/sys/vm/drop_caches && cd %s && '
                  'sha256sum --check --quiet SHA256SUMS.%s' % (MOUNT, name))
        return node.run(['sh', '-c', script], check=False,
                        timeout=story.PATIENCE).returncode == 0

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
        here = self.arrived(node, attachment.device)
        arrival.throttle(node, attachment.device)
        self.check('files read as written, new ones were added',
                   old and new)
        self.check('the move was still running then', here is not None,
                   'nothing is left to arrive' if here is None
                   else '%d of %d MiB were here' % here)

    def arrive(self, attachment: users.Attachment) -> None:
        """Watch the periodic task finish the move."""
        self.chapter('The periodic task finishes the move')
        assert attachment.node is not None
        total = self.watch_arrive(attachment.node, attachment.device)
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

    def table_of(self, node: nodes.Node, attachment: users.Attachment) -> str:
        """The device-mapper table of a handle, in names."""
        name = attachment.device.rpartition('/')[2]
        table = node.run(['dmsetup', 'table', name]).stdout.strip()
        below = node.run(['dmsetup', 'deps', '-o', 'devname', name]
                         ).stdout.strip().rpartition(':')[2].strip(' ()')
        return '%s -> %s' % (table, below)


if __name__ == '__main__':
    sys.exit(story.main(MovingVolume))
