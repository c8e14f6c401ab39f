# SPDX-License-Identifier: Apache-2.0
"""DevStack's own scripts with the plugin, on a node with a systemd in it.

Keystone and Cinder run as DevStack configured them, beside its database,
message bus and web server. What takes a network is there before.
"""

import importlib.metadata
import json
import pathlib
import subprocess
import sys
import tarfile

import tenacity
import testtools
from testtools import content

from lab import cache
from lab import cloud as clouds
from lab import layout
from lab import node_services
from lab import sizes
from tests.lab import test_systemd
from tests.unit.devstack import machine

SCRIPT = pathlib.Path(__file__).with_name('stack.sh')
PROJECTS = ('keystone', 'cinder')
# On a real file system: a loop device takes no file of the node's memory.
DATA = node_services.STATE_MOUNT + '/devstack'
GROUP = 'stack-volumes-local'
# MariaDB's counter of queries is built by pip, and there is no image.
LOCALRC = '''\
ADMIN_PASSWORD=secret
DATABASE_PASSWORD=secret
RABBIT_PASSWORD=secret
SERVICE_PASSWORD=secret
HOST_IP={address}
OFFLINE=True
API_WORKERS=1
IMAGE_URLS=
MYSQL_GATHER_PERFORMANCE=False
ENABLED_SERVICES=key,mysql,rabbit,c-api,c-sch,c-vol
enable_plugin cinder-localstor /opt/stack/cinder-localstor
LOCALSTOR_BACKING_FILE_SIZE=2G
'''
# Seconds that one of DevStack's scripts may take, and a command
LONG = 3600
SHORT = 300


def download(directory, project, *options):
    """Let pip download the version of a project that is installed here."""
    subprocess.run(
        [sys.executable, '-m', 'pip', 'download', '--quiet', *options,
         '--dest', str(directory),
         f'{project}=={importlib.metadata.version(project)}'],
        check=True, timeout=SHORT)


def source_of(project):
    """The folder with a project's tree as its source package has it."""
    def fill(scratch):
        download(scratch, project, '--no-deps', '--no-binary', ':all:')
        [package] = scratch.glob('*.tar.gz')
        with tarfile.open(package) as archive:
            archive.extractall(scratch, filter='data')
        result = scratch / 'result'
        result.mkdir()
        [tree] = (path for path in scratch.iterdir()
                  if path.is_dir() and path != result)
        tree.rename(result / project)
    return cache.made(
        f'source-{project}-{importlib.metadata.version(project)}', project,
        fill)


def wheels_of(project):
    """The folder with a project's wheel and all that it requires."""
    def fill(scratch):
        download(scratch / 'result', project)
        (scratch / 'result' / project).touch()
    return cache.made(
        f'wheels-{project}-{importlib.metadata.version(project)}', project,
        fill)


class StackTest(testtools.TestCase):
    """stack.sh, unstack.sh and clean.sh."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        if not machine.DEVSTACK:
            return
        wheels = wheels_of('bindep')
        trees = [source_of(project) for project in PROJECTS]
        cls.cloud = clouds.Cloud('stack')
        cls.addClassCleanup(cls.cloud.down)
        cls.cloud.up(nodes=1, bare=True, memory='5G',
                     disk_size=20 * sizes.GIB)
        cls.node = cls.cloud.node('node1')
        cls.script('machine', sys.prefix, machine.DEVSTACK,
                   str(layout.REPOSITORY), str(wheels), *map(str, trees))

    def setUp(self):
        super().setUp()
        if not machine.DEVSTACK:
            self.skipTest('LOCALSTOR_DEVSTACK does not say where DevStack is')
        self.logs = self.cloud.layout.directory / 'logs'
        self.logs.mkdir(exist_ok=True)

    @classmethod
    def script(cls, *argv, timeout=SHORT, **arguments):
        return cls.node.run([str(SCRIPT), *argv], timeout=timeout,
                            **arguments)

    def inside(self, command):
        return self.node.run(
            [test_systemd.SCRIPT, 'inside', 'bash', '-c', command],
            timeout=SHORT).stdout

    def openstack(self, command):
        return json.loads(self.script(
            'stacked', 'source openrc admin admin >/dev/null 2>&1 &&'
            f' openstack {command} --format json').stdout)

    def run_devstack(self, name):
        """Run one of DevStack's scripts; the end of its log if it fails."""
        log = self.logs / f'{name}.out'
        # Its own user can't write there.
        result = self.node.run(
            ['bash', '-c', f'{SCRIPT} stacked ./{name} > {log} 2>&1'],
            timeout=LONG, check=False)
        if result.returncode:
            tail = log.read_text(errors='replace').splitlines()[-60:]
            self.addDetail(name, content.text_content('\n'.join(tail)))
        self.assertEqual(0, result.returncode, name)

    def there(self):
        """What is on the node that a plugin could leave."""
        return self.inside(f'''
            vgs --noheadings -o vg_name,pv_name,lv_count
            lvs --noheadings -o lv_full_name
            dmsetup ls | sort
            losetup --list --noheadings -O NAME,BACK-FILE
            find /run/udev/rules.d /run/localstor /etc/systemd/system \\
                /etc/cinder {DATA} -path '*localstor*' | sort
            exit 0''')

    def wait_for(self, wanted, ask):
        """Ask until the answer is the wanted one."""
        for attempt in tenacity.Retrying(
                stop=tenacity.stop_after_delay(SHORT),
                wait=tenacity.wait_fixed(2), reraise=True):
            with attempt:
                self.assertEqual(wanted, ask())

    def test_volumes_are_served_until_unstack(self):
        self.script('prepare', DATA,
                    input=LOCALRC.format(address=self.node.address))
        before = self.there()

        self.run_devstack('stack.sh')
        self.wait_for({'cinder-scheduler': 'up', 'cinder-volume': 'up'},
                      lambda: {row['Binary']: row['State'] for row in
                               self.openstack('volume service list')})
        volume = self.openstack('volume create --size 1 --type local one')
        self.wait_for('available', lambda: self.openstack(
            f'volume show {volume["id"]}')['status'])
        self.assertIn(f'{GROUP}/volume-{volume["id"]}', self.there())

        self.run_devstack('unstack.sh')
        self.run_devstack('clean.sh')
        self.assertEqual(before, self.there())
