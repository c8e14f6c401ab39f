# SPDX-License-Identifier: Apache-2.0
"""udev rules that hide from the node what guests wrote (hazards H5 to H7).

blkid would make links by UUID and label to a guest's file system, or to one of
its two copies; LVM would activate a guest's volume group; udisks would offer
to mount it; and each of their probes holds a device open that is to go.

The flags are those of libdevmapper's and systemd's rules.  The files sort
before the first rules that look into a disk: 13-dm-disk.rules as lvm2 has it,
60-persistent-storage-dm.rules with Debian.  So they can't build on what 10- or
55-dm.rules find out, and ask sysfs.
"""

import tenacity

from cinder_localstor import exception
from cinder_localstor.node import commands
from cinder_localstor.node import privileged

DIRECTORY = '/run/udev/rules.d'
# What udevd tells those whom it can't listen to now: it takes one at a time,
# and all backends of a node start together.  And how often they ask.
BUSY = 'Resource temporarily unavailable'
ATTEMPTS = 20

HIDE = '''\
ENV{DM_UDEV_DISABLE_DISK_RULES_FLAG}="1"
ENV{DM_UDEV_DISABLE_OTHER_RULES_FLAG}="1"
ENV{UDEV_DISABLE_PERSISTENT_STORAGE_BLKID_FLAG}="1"
ENV{UDISKS_IGNORE}="1"
ENV{SYSTEMD_READY}="0"
OPTIONS:="nowatch"
'''

# The disks of moves' sources are known by the IQN in their path, those over
# NVMe/TCP by the NQN of their subsystem; they keep their links by serial
# number, which os-brick waits for.  The devices of native helpers are known by
# marks.
DEVICES_PATH = DIRECTORY + '/12-localstor.rules'
DEVICES_RULES = '''\
# Written by cinder-volume's cinder_localstor driver.
ACTION=="remove", GOTO="localstor_end"
SUBSYSTEM!="block", GOTO="localstor_end"
ATTR{dm/uuid}=="LOCALSTOR-*", GOTO="localstor_hide"
KERNEL=="ublkb*|nbd*", TEST=="/run/localstor/devices/%k", GOTO="localstor_hide"
KERNEL=="nvme*", ATTRS{subsysnqn}=="*:localstor-*", GOTO="localstor_hide"
KERNEL=="sd*", IMPORT{builtin}="path_id"
KERNEL=="sd*", ENV{ID_PATH}=="*-iscsi-*:localstor-*", GOTO="localstor_hide"
GOTO="localstor_end"
LABEL="localstor_hide"
ENV{DM_UDEV_DISABLE_SUBSYSTEM_RULES_FLAG}="1"
''' + HIDE + '''\
LABEL="localstor_end"
'''

GROUP_PATH = DIRECTORY + '/12-localstor-%s.rules'
# LVM's own rules stay: /dev/GROUP/VOLUME is theirs.
GROUP_RULES = '''\
# Written by cinder-volume's cinder_localstor driver.
ACTION=="remove", GOTO="localstor_group_end"
SUBSYSTEM!="block", GOTO="localstor_group_end"
ATTR{dm/uuid}!="LVM-*", GOTO="localstor_group_end"
ATTR{dm/name}!="%s-[!-]*", GOTO="localstor_group_end"
''' + HIDE + '''\
LABEL="localstor_group_end"
'''


def hide_devices(command: commands.Commands) -> None:
    """Hide handles, their parts, helpers' devices and the sources' disks."""
    _install(command, DEVICES_PATH, DEVICES_RULES)


def hide_group(command: commands.Commands, name: str) -> None:
    """Hide the logical volumes of a volume group, also those seen before."""
    # Device-mapper's name of a logical volume has each dash of the group's
    # and of its own doubled, and a single one between them.
    mapped = name.replace('-', '--')
    _install(command, GROUP_PATH % name, GROUP_RULES % mapped)
    # What was looked into before, with no such rules, is told by what was
    # found; who was killed before this gets here again at the next start.
    command.run('udevadm', 'trigger', '--action', 'change',
                '--subsystem-match', 'block',
                '--attr-match', 'dm/name=%s-[!-]*' % mapped,
                '--property-match', 'ID_FS_USAGE=?*',
                '--property-match', 'ID_PART_TABLE_TYPE=?*')


def _install(command: commands.Commands, path: str, rules: str) -> None:
    privileged.install_udev_rules(path, rules)
    _reload(command)


@tenacity.retry(
    retry=tenacity.retry_if_exception(
        lambda error: isinstance(error, exception.CommandFailed)
        and BUSY in str(error)),
    stop=tenacity.stop_after_attempt(ATTEMPTS),
    wait=tenacity.wait_random(0.1, 0.5), reraise=True)
def _reload(command: commands.Commands) -> None:
    command.run('udevadm', 'control', '--reload')
