# SPDX-License-Identifier: Apache-2.0
"""All that volumes and moves can leave behind in a lab."""

import time
from typing import Any

from lab import cloud as clouds
from lab import node as nodes
from lab import user as users

# Each prints one name a line; what they have no answer for prints nothing.
_QUESTIONS = {
    'logical volumes': "lvs --noheadings -o lv_full_name,lv_tags",
    # LVM activates a pool's own nodes when it is first used.
    'device-mapper nodes':
        "dmsetup ls | grep -v -e --pool -e '^No devices'",
    'suspended nodes': "dmsetup info -c --noheadings -o name,suspended"
                       " | grep ':Suspended'",
    'iSCSI sessions': 'cat /sys/class/iscsi_session/*/targetname',
    'iSCSI records': 'ls /etc/iscsi/nodes',
    'SCSI disks': 'ls -d /sys/block/sd*',
    'targets of tgt': 'tgtadm --lld iscsi --op show --mode target'
                      ' | grep ^Target',
    'files of tgt': 'ls /var/lib/cinder/volumes',
    'targets of LIO': 'ls /sys/kernel/config/target/iscsi | grep ^iqn',
    'disks of LIO': 'ls -d /sys/kernel/config/target/core/*/*/wwn',
    'NVMe controllers': 'cat /sys/class/nvme/*/subsysnqn',
    'subsystems of nvmet': 'ls /sys/kernel/config/nvmet/subsystems',
    'hosts of nvmet': 'ls /sys/kernel/config/nvmet/hosts',
    'instances': 'cd /etc/libvirt/qemu && ls *.xml;'
                 ' ls /var/lib/nova/instances | grep -e -',
}


def of_node(node: nodes.Node) -> dict[str, list[str]]:
    """Names of what is on a node, by kind."""
    script = '\n'.join(f'echo "# {kind}"; {{ {command}; }} 2>/dev/null'
                       for kind, command in _QUESTIONS.items())
    found: dict[str, list[str]] = {}
    for line in node.run(['sh', '-c', script + '\n:']).stdout.splitlines():
        if line.startswith('# '):
            names = found.setdefault(line[2:], [])
        elif line.strip():
            # dmsetup's second word is a number that changes.
            words = line.split('\t')[0].split()
            names.append(' '.join(words))
    return {kind: sorted(names) for kind, names in found.items()}


def of_database(cloud: clouds.Cloud) -> dict[str, list[str]]:
    """Rows of Cinder's that are not deleted, those of moves among them."""
    questions = {
        'volumes': 'SELECT id, status, migration_status FROM volumes'
                   ' WHERE NOT deleted',
        'attachments': 'SELECT id, volume_id, attached_host'
                       ' FROM volume_attachment WHERE NOT deleted',
        'snapshots': 'SELECT id, volume_id, status FROM snapshots'
                     ' WHERE NOT deleted',
        'backups': 'SELECT id, volume_id, status FROM backups'
                   ' WHERE NOT deleted',
        'metadata': 'SELECT volume_id, `key` FROM volume_admin_metadata'
                    ' WHERE NOT deleted',
    }
    return {kind: sorted(select(cloud, question))
            for kind, question in questions.items()}


def moves(cloud: clouds.Cloud) -> dict[str, list[str]]:
    """States of the running moves, by the volume's id."""
    found: dict[str, list[str]] = {}
    for line in select(
            cloud, "SELECT substr(migration_status, 8), value FROM volumes"
            " JOIN volume_admin_metadata ON volumes.id = volume_id"
            " WHERE NOT volumes.deleted AND `key` = 'localstor:state'"
            " AND migration_status LIKE 'target:%'"):
        volume, state = line.split()
        found.setdefault(volume, []).append(state)
    return found


def wait_until_local(cloud: clouds.Cloud, timeout: float) -> None:
    """Wait until no volume moves any more.

    :param timeout: seconds
    :raises VolumeError: one does, still
    """
    end = time.monotonic() + timeout
    while moves(cloud):
        if time.monotonic() > end:
            raise users.VolumeError('a move does not end')
        time.sleep(0.2)


def select(cloud: clouds.Cloud, question: str) -> list[str]:
    """What Cinder's database answers, a line for each row."""
    done = cloud.run([
        '/usr/bin/mariadb', '--no-defaults', '--batch', '--skip-column-names',
        f'--socket={cloud.layout.runtime}/database.sock', '--user=root',
        'cinder', '--execute', question])
    return done.stdout.splitlines()


def everything(cloud: clouds.Cloud) -> dict[str, list[str]]:
    """Names of all there is, by place and kind."""
    found = {f'{kind} in the database': names
             for kind, names in of_database(cloud).items()}
    for node in cloud.nodes:
        found |= {f'{kind} on {node.name}': names
                  for kind, names in of_node(node).items()}
    return found


def difference(before: dict[str, list[str]], after: dict[str, list[str]]
               ) -> dict[str, Any]:
    """What has come and what has gone."""
    changed = {}
    for kind in sorted(before.keys() | after.keys()):
        then, now = before.get(kind, []), after.get(kind, [])
        if then != now:
            changed[kind] = {
                'left': [name for name in now if name not in then],
                'gone': [name for name in then if name not in now]}
    return changed
