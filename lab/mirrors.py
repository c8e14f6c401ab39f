# SPDX-License-Identifier: Apache-2.0
"""A disk of a node's mirrored group: it dies, and an operator mends that."""

from lab import node as nodes
from lab import volatile

GROUP = 'cinder-mirrored'
# What the lab calls the second of its disks, and the node its device
_DISK, _DEVICE = 'mirrored-2', '/dev/vdd'


def disk(node: nodes.Node) -> volatile.VolatileDisk:
    """The one that may die."""
    return next(found for found in node.volatile_disks
                if found.name == _DISK)


def missing(node: nodes.Node) -> int:
    """How many disks LVM misses on a node that is on."""
    return _ask(node, 'vg_missing_pv_count')


def give_up(node: nodes.Node) -> None:
    """Let the group be without the disk, so that it can be changed."""
    node.run(['vgreduce', '--removemissing', '--mirrorsonly', '--force',
              GROUP])


def replace(node: nodes.Node) -> None:
    """Let the group have another disk in its place, and all mirrors there.

    It goes on where it was broken off, as :func:`bring_back` does.
    """
    if disk(node).status()['fails']:
        give_up(node)
        disk(node).fail(False)
    if _ask(node, 'pv_count') == 1:
        node.run(['wipefs', '--all', _DEVICE])
        node.run(['vgextend', '--yes', GROUP, _DEVICE])
    _for_each(node, 'lvconvert', '--yes', '--repair')


def bring_back(node: nodes.Node) -> None:
    """Let the disk work again, with what it had when it died."""
    disk(node).fail(False)
    if missing(node):
        node.run(['vgextend', '--restoremissing', GROUP, _DEVICE])
    _for_each(node, 'lvchange', '--refresh')


def mend(node: nodes.Node) -> None:
    """Go on with what was begun to mend the group, or replace the disk."""
    if disk(node).status()['fails'] or _ask(node, 'pv_count') == 1:
        replace(node)
    else:
        bring_back(node)


def _ask(node: nodes.Node, number: str) -> int:
    return int(node.run(['vgs', '--noheadings', '--options', number,
                         GROUP]).stdout)


def _for_each(node: nodes.Node, *command: str) -> None:
    """Run a command for each volume whose mirror is not whole."""
    found = node.run(['lvs', '--noheadings', '--options', 'lv_full_name',
                      '--select', 'lv_health_status!=""', GROUP]).stdout
    for name in found.split():
        node.run([*command, name], timeout=180)
    # LVM leaves behind what it had in place of a disk that was missing.
    for line in node.run(['dmsetup', 'ls']).stdout.splitlines():
        if '-missing_' in line:
            node.run(['dmsetup', 'remove', line.split()[0]])
