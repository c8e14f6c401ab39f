# SPDX-License-Identifier: Apache-2.0
"""What users do with Nova: their servers' volumes go where these go."""

import shlex
import sys
import tempfile
import time

from lab import instances
from lab import leftovers
from lab import node as nodes
from lab import nova_setup
from lab import story


class MigratingServer(story.Story):
    """A server migrates live, and its volume follows."""

    name = 'demo-nova'
    title = (
        'Nova, Glance and Cinder, and two compute nodes with libvirt and '
        'QEMU.\nA server boots from a volume, migrates live to the other '
        'node, and its volume\nfollows. Another volume goes from one server '
        'to the next.')
    also = ('nova',)

    def tell(self) -> None:
        """All of it."""
        before = leftovers.everything(self.cloud)
        image = self.create_image()
        root = self.create_volume('root', '--image', image)
        home = self.cloud.node(self.user.host(root))
        away = next(node for node in self.cloud.nodes
                    if node.name != home.name)
        web = self.boot('web', root, home)
        self.migrate(web, root, home, away)
        data = self.create_volume('data')
        self.plug_in(web, data, away)
        self.take_out(web, data)
        other_root = self.create_volume('other-root', '--image', image)
        other = self.boot('other', other_root, home)
        self.plug_in_elsewhere(other, data, home)
        self.remove(['web', 'other'], [root, data, other_root], image)
        self.eventually('nothing is left on any node', lambda:
                        not leftovers.difference(
                            before, leftovers.everything(self.cloud)))

    def run(self, *arguments: str) -> str:
        """Run and show an openstack command; the id of what it makes."""
        self.say('$ openstack ' + shlex.join(arguments))
        answer = self.cloud.openstack(*arguments, timeout=story.PATIENCE)
        # Some tell nothing, and some of another thing.
        return (answer or {}).get('id', '')

    def create_image(self) -> str:
        """The image that servers boot; its id."""
        self.chapter('A user uploads an image')
        of_lab = self.cloud.image_api.get(
            '/v2/images/' + instances.image(self.cloud)).json()
        properties = [
            word for name in ('kernel_id', 'ramdisk_id', 'os_command_line')
            for word in ('--property', '%s=%s' % (name, of_lab[name]))]
        with tempfile.NamedTemporaryFile() as file:
            file.truncate(nova_setup.DISK_SIZE)
            with self.timed('openstack image create'):
                return self.run(
                    'image', 'create', '--disk-format', 'raw',
                    '--container-format', 'bare', '--file', file.name,
                    *properties, 'small')

    def create_volume(self, name: str, *arguments: str) -> str:
        """A volume of 1 GiB; its id."""
        self.chapter('A user creates the volume "%s"' % name)
        with self.timed('openstack volume create %s' % name):
            volume = self.run('volume', 'create', '--size', '1', '--type',
                              'local', *arguments, name)
            self.user.wait_for_status(volume, 'available')
        self.say('volume %s lives on [bold]%s[/]' % (
            volume, self.user.host(volume)))
        return volume

    def boot(self, name: str, root: str, node: nodes.Node
             ) -> instances.Instance:
        """A server on a node, when its guest has begun to write."""
        self.chapter('The server "%s" boots on %s' % (name, node.name))
        with self.timed('from openstack server create to a guest that runs'):
            server = instances.Instance(self.cloud, self.run(
                'server', 'create', '--flavor', nova_setup.GUEST,
                '--volume', root, '--nic', 'none', '--host', node.name,
                name))
            server.wait_for('ACTIVE')
            server.wait_for_report('found', root)
        self.say('its guest writes numbered stamps, flushes them, and reads '
                 'them back')
        return server

    def migrate(self, server: instances.Instance, root: str,
                home: nodes.Node, away: nodes.Node) -> None:
        """Live migration; the volume follows."""
        self.chapter('"web" migrates live to %s' % away.name)
        server.assert_alive()
        before = self.stamps(server, root)
        with self.timed('openstack server migrate --live-migration'):
            self.run('server', 'migrate', '--live-migration', '--host',
                     away.name, 'web')
            server.wait_for('ACTIVE')
        started = time.monotonic()
        self.check('the server is on %s' % away.name,
                   server.node.name == away.name)
        paused = server.downtime()
        if paused is not None:
            self.measure("the guest's pause, as libvirt tells it",
                         '%.2f s' % paused)
        self.check('the volume is on %s, too' % away.name,
                   self.user.host(root) == away.name)
        self.chapter('Its volume arrives while the guest uses it')
        device = self.device(root)
        total = self.watch_arrive(away, device)
        took = time.monotonic() - started
        self.measure('from the end of the migration to all local',
                     '%.1f s (%.0f MiB/s)' % (took, (total or 1024) / took))
        self.goes_on(server, root, before)

    def goes_on(self, server: instances.Instance, volume: str, before: int
                ) -> None:
        """Check that a guest writes, and has found all that it wrote."""
        if server.go_on():
            self.say("the guest's kernel had given up, because of its memory "
                     'and not of a disk: where instructions are translated '
                     'that may happen in a live migration. It has booted '
                     'again.')
        after = self.stamps(server, volume)
        self.check('its guest goes on, and each of its stamps is there',
                   after > before, '%d stamps, then %d' % (before, after))

    def plug_in(self, server: instances.Instance, data: str,
                node: nodes.Node) -> None:
        """Attach a volume while its server runs."""
        self.chapter('"data" is attached to "web"')
        with self.timed('from openstack server add volume to its use'):
            self.run('server', 'add', 'volume', 'web', 'data')
            server.wait_for_report('found', data)
        server.assert_alive()
        self.check('it is on %s' % node.name,
                   self.user.host(data) == node.name)

    def take_out(self, server: instances.Instance, data: str) -> None:
        """Detach it while its server runs."""
        self.chapter('"data" is detached from "web"')
        self.written = self.stamps(server, data)
        with self.timed('openstack server remove volume'):
            self.run('server', 'remove', 'volume', 'web', 'data')
            server.wait_for_report('gone', data)
            self.user.wait_for_status(data, 'available')
        server.assert_alive()

    def plug_in_elsewhere(self, server: instances.Instance, data: str,
                          node: nodes.Node) -> None:
        """Attach it to a server on the other node."""
        self.chapter('"data" is attached to "other", on %s' % node.name)
        with self.timed('from openstack server add volume to its use, on the '
                        'other node'):
            self.run('server', 'add', 'volume', 'other', 'data')
            found = server.wait_for_report('found', data)
        self.check('each stamp that "web" wrote is there',
                   sum(found['before']) >= self.written,
                   '%d stamps' % sum(found['before']))
        self.watch_arrive(node, self.device(data))
        server.assert_alive()

    def remove(self, servers: list[str], volumes: list[str], image: str
               ) -> None:
        """Delete all that was made."""
        self.chapter('All is deleted')
        with self.timed('openstack server delete --wait'):
            self.run('server', 'delete', '--wait', *servers)
        for volume in volumes:
            self.user.delete_volume(volume)
        self.run('image', 'delete', image)

    def stamps(self, server: instances.Instance, volume: str) -> int:
        """How many the guest has on a volume."""
        return max((report['stamps'] for report in server.reports()
                    if report['event'] == 'alive'
                    and report['serial'] == volume[:20]), default=0)

    def device(self, volume: str) -> str:
        """The path of an attached volume on its node."""
        [attachment] = self.user.attachments(volume)
        found = self.cloud.volume_api.get('/attachments/' + attachment).json()
        return found['attachment']['connection_info']['device_path']


if __name__ == '__main__':
    sys.exit(story.main(MigratingServer))
