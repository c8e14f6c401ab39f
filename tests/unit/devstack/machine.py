# SPDX-License-Identifier: Apache-2.0
"""A directory that stands for a machine which DevStack installs."""

import os
import pathlib
import shutil
import subprocess
import sys

HERE = pathlib.Path(__file__).parent
REPOSITORY = HERE.parents[2]
# Where DevStack is; the project has no copy of it.
DEVSTACK = os.environ.get('LOCALSTOR_DEVSTACK', '')
# What Cinder's tree has in etc/cinder
CINDER = pathlib.Path(sys.prefix) / 'etc' / 'cinder'

PARTS = ('files', 'functions', 'functions-common', 'inc', 'lib', 'stackrc')

REPLACED = ('apt-get', 'bindep', 'cargo', 'chown', 'cinder-rtstool', 'dmsetup',
            'edit-constraints', 'iscsiadm', 'localstor-hydrator', 'losetup',
            'lvremove', 'lvs', 'openssl', 'openstack', 'pip', 'pvs', 'rmdir',
            'sudo', 'systemctl', 'tgt-admin', 'tgtadm', 'udevadm', 'vgcreate',
            'vgremove', 'vgs')

LOCALRC = '''\
STACK_USER=$(id -un)
DEST={directory}/opt
DATA_DIR={directory}/opt/data
enable_plugin cinder-localstor {repository}
HOST_IP=192.0.2.11
SERVICE_HOST=192.0.2.10
DATABASE_TYPE=mysql
DATABASE_HOST=192.0.2.10
DATABASE_PASSWORD=secret
RABBIT_HOST=192.0.2.10
RABBIT_PASSWORD=secret
SERVICE_PASSWORD=secret
ADMIN_PASSWORD=secret
LOCALSTOR_BACKING_FILE_SIZE=64K
'''


def lay_out(directory: pathlib.Path, localrc: str) -> None:
    """Make DevStack's directory and the trees that it would clone.

    :param localrc: what local.conf has besides the addresses
    """
    devstack = directory / 'devstack'
    devstack.mkdir()
    for part in PARTS:
        (devstack / part).symlink_to(os.path.join(DEVSTACK, part))
    (devstack / 'localrc').write_text(
        LOCALRC.format(repository=REPOSITORY, directory=directory) + localrc)
    trees = directory / 'opt'
    trees.mkdir()
    (trees / 'cinder-localstor').symlink_to(REPOSITORY)
    shutil.copytree(CINDER, trees / 'cinder' / 'etc' / 'cinder')
    (trees / 'data').mkdir()


class Machine:
    """What DevStack would install, below a directory.

    :ivar directory: of it all
    """

    def __init__(self, directory: pathlib.Path, localrc: str = '') -> None:
        """:param localrc: what local.conf has besides the addresses"""
        self.directory = directory
        lay_out(directory, localrc)
        for programs, names in (
                ('bin', REPLACED),
                ('opt/bindep-venv/bin', ['bindep']),
                ('opt/requirements/.venv/bin', ['edit-constraints']),
                ('opt/data/venv/bin', ['pip', 'localstor-hydrator'])):
            (directory / programs).mkdir(parents=True)
            for name in names:
                (directory / programs / name).symlink_to(HERE / 'machine.sh')
        for path in ('etc/lvm', 'etc/sudoers.d', 'etc/systemd/system',
                     'run/udev/rules.d'):
            (directory / path).mkdir(parents=True)
        self.path('etc/lvm/lvm.conf').write_text(
            'devices {\n        # global_filter = [ "a|.*|" ]\n}\n')

    def path(self, name: str) -> pathlib.Path:
        """Where a file of the machine is."""
        return self.directory / name

    def call(self, script: str, **environment: str
             ) -> subprocess.CompletedProcess:
        """Run the phases of one of DevStack's scripts."""
        return subprocess.run(
            ['bash', str(HERE / 'phases.sh'), script, str(self.directory)],
            env={'PATH': '%s:%s' % (self.directory / 'bin',
                                    os.environ['PATH']),
                 'HOME': str(self.directory), 'TERM': 'dumb',
                 'MACHINE': str(self.directory), **environment},
            capture_output=True, text=True, timeout=120, check=False)

    def calls(self) -> list[str]:
        """What was called since this was last asked."""
        file = self.directory / 'calls'
        if not file.exists():
            return []
        calls = file.read_text().splitlines()
        file.unlink()
        return calls
