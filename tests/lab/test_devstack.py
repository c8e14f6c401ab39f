# SPDX-License-Identifier: Apache-2.0
"""The DevStack plugin on a node: real LVM, device-mapper and privsep.

A node alone, without a cloud. What takes a network and what is systemd's is
replaced.
"""

import os
import sys

import testtools

from lab import cloud as clouds
from lab import layout
from lab import node_services
from tests.unit.devstack import machine

DIRECTORY = '/stack'
# On a real file system: a loop device takes no file of the node's memory.
DATA = node_services.STATE_MOUNT + '/devstack'
GROUP = 'stack-volumes-local'
LOCALRC = f'''\
OFFLINE=True
DATA_DIR={DATA}
DEVSTACK_VENV={sys.prefix}
ENABLED_SERVICES=key,n-cpu,c-api,tempest
LOCALSTOR_BACKING_FILE_SIZE=256M
'''
# Seconds; a node is slow at starting processes.
PATIENCE = 300

LAY_OUT = '''\
import pathlib, sys
from tests.unit.devstack import machine
machine.lay_out(pathlib.Path(sys.argv[1]), sys.argv[2])
'''

# What the lab has for sudo leaves rootwrap out.
SUDO = '''\
#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
exec env "$@"
'''
# Does what the unit of a backing file says.
SYSTEMCTL = r'''#!/bin/bash
case "$1 $2" in
    'enable --now') line=ExecStart ;;
    'disable --now') line=ExecStop ;;
    *) exit ;;
esac
command=$(sed -n "s/^$line=//p" "/etc/systemd/system/$3")
eval "${command//\$\$/\$}"
'''

# As cinder-volume does when it starts, with the configuration it would have
CHECK = '''\
import shlex, sys
from cinder_localstor.cmd import backends
from cinder_localstor.node import real
from cinder import utils
from oslo_config import cfg
from oslo_privsep import priv_context
cfg.CONF(['--config-file', '/etc/cinder/cinder.conf'], project='cinder')
priv_context.init(root_helper=shlex.split(utils.get_root_helper()))
[configured] = backends.configured()
assert configured.configuration.volume_group == sys.argv[1]
node = real.node(configured.configuration)
node.volumes.check()
node.hydrators.check()
'''


class DevStackTest(testtools.TestCase):
    """stack, unstack and clean on a node that has a volume group already."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        if not machine.DEVSTACK:
            return
        cls.cloud = clouds.Cloud('devstack')
        cls.addClassCleanup(cls.cloud.down)
        cls.cloud.up(nodes=1, bare=True)
        cls.node = cls.cloud.node('node1')

    def setUp(self):
        super().setUp()
        if not machine.DEVSTACK:
            self.skipTest('LOCALSTOR_DEVSTACK does not say where DevStack is')
        self.addCleanup(self.shell, f'rm -rf {DIRECTORY} {DATA}')

    def run_there(self, *argv, **arguments):
        return self.node.run(list(argv), timeout=PATIENCE, environment={
            'PYTHONPATH': str(layout.REPOSITORY),
            'LOCALSTOR_DEVSTACK': machine.DEVSTACK,
            'PATH': f'{DIRECTORY}/bin:' + self.node.place.environment['PATH']
        }, **arguments)

    def shell(self, text, **arguments):
        return self.run_there('bash', '-c', text, **arguments)

    def python(self, text, *arguments):
        self.run_there(sys.executable, '-W', 'ignore', '-c', text, *arguments)

    def write(self, path, text):
        self.shell(f'mkdir -p {os.path.dirname(path)} && cat > {path}'
                   f' && chmod +x {path}', input=text)

    def lay_out(self, localrc=''):
        """Make the node one that DevStack can install."""
        self.shell(f'modprobe loop; mkdir {DIRECTORY} {DATA}')
        self.python(LAY_OUT, DIRECTORY, LOCALRC + localrc)
        self.shell(f'ln -s /etc {DIRECTORY}/etc; mkdir -p /etc/sudoers.d'
                   ' /etc/systemd/system')
        # The file as it comes with LVM has this line.
        self.shell("sed -i 's/^ *global_filter = .*/    # global_filter ="
                   " [ \"a|.*|\" ]/' /etc/lvm/lvm.conf")
        self.write(f'{DIRECTORY}/bin/sudo', SUDO)
        self.write(f'{DIRECTORY}/bin/systemctl', SYSTEMCTL)
        self.write(f'{DIRECTORY}/bin/cargo', '#!/bin/sh\necho cargo 1.85.0\n')
        for name in ('bin/openstack', 'opt/bindep-venv/bin/bindep',
                     'opt/requirements/.venv/bin/edit-constraints'):
            self.write(f'{DIRECTORY}/{name}', '#!/bin/sh\n')

    def run_script(self, name):
        self.shell(f'bash {machine.HERE}/phases.sh {name} {DIRECTORY}')

    def there(self):
        """What is on the node that a plugin could leave."""
        return self.shell(fr'''
            vgs --noheadings -o vg_name,pv_name,lv_count
            lvs --noheadings -o lv_full_name
            dmsetup ls | sort
            losetup --list --noheadings -O NAME,BACK-FILE
            find /run/udev/rules.d /run/localstor /etc/systemd/system \
                /etc/cinder {DATA} -type f | sort
            grep -v '^ *$' /etc/lvm/lvm.conf
            iscsiadm -m session
            ls /sys/kernel/config/target/iscsi
            exit 0''').stdout

    def use(self, group):
        """Leave what a node has in mid-move: a volume, and what it lies on."""
        self.shell(f'''
            set -e
            lvcreate -qq -y -L 32M -n volume-1 --addtag localstor.volume=1 \
                {group}
            size=$(blockdev --getsz /dev/{group}/volume-1)
            dmsetup create volume-1-data --uuid LOCALSTOR-volume-1-data \
                --table "0 $size linear /dev/{group}/volume-1 0"
            dmsetup create volume-1-handle --uuid LOCALSTOR-volume-1-handle \
                --table "0 $size linear /dev/mapper/volume-1-data 0"
            mkdir -p /run/localstor/devices''')

    def test_stack_unstack_and_clean(self):
        self.lay_out()
        before = self.there()

        self.run_script('stack')
        self.assertIn(GROUP, self.there())
        # LVM's filter and rootwrap are right, and the helper is found.
        self.python(CHECK, GROUP)
        stacked = self.there()
        self.run_script('stack')
        self.assertEqual(stacked, self.there())

        self.use(GROUP)
        self.run_script('unstack')
        self.run_script('clean')
        self.assertEqual(before, self.there())

    def test_of_a_group_that_was_there_only_the_drivers_volumes_go(self):
        self.lay_out('LOCALSTOR_VOLUME_GROUP=cinder-local\n')
        self.shell('lvcreate -qq -y -L 32M -n theirs cinder-local')
        self.addCleanup(self.shell, 'lvremove -qq -y cinder-local/theirs')
        before = self.there()

        self.run_script('stack')
        self.python(CHECK, 'cinder-local')
        self.use('cinder-local')
        self.run_script('unstack')
        self.run_script('clean')

        self.assertEqual(before, self.there())
