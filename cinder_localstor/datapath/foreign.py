# SPDX-License-Identifier: Apache-2.0
"""Logical volumes that were there before Cinder had them, and stay when it has
them no more.

What Cinder takes is not its own before it says so.  So the first thing that is
changed of a logical volume are its tags: they tell whose it is to be, and the
name that it had (``localstor.former``).  As long as Cinder has not got it
entirely, whoever finds it can give it back by them.  What is let go gets the
name that its user knows first, and loses its tags then.
"""

from cinder_localstor.datapath import copies
from cinder_localstor.datapath import handles
from cinder_localstor.datapath import transfer
from cinder_localstor import exception
from cinder_localstor.node import interface


class Foreign:
    """Takes the logical volumes of one node, and lets them go."""

    def __init__(self, node: interface.Node) -> None:
        self._volumes = node.volumes
        self._handles = handles.Handles(node)

    def find_taken(self, volume_id: str, snapshot_id: str = ''
                   ) -> interface.LogicalVolume | None:
        """What was taken to be a volume, or a snapshot of one, whatever it is
        called by now.
        """
        for volume in self._volumes.logical_volumes().values():
            label = copies.Label(volume.tags)
            if label.former and (label.volume_id, label.snapshot_id) == (
                    volume_id, snapshot_id):
                return volume
        return None

    def take(self, found: interface.LogicalVolume, copy: copies.Copy) -> None:
        """Make a logical volume the one of a copy; its content stays.

        It grows to the size of the copy: whoever uses that may read and write
        all that Cinder says it has.

        :raises NotEnoughSpace: the volume group is too full to let it grow
        """
        if not found.origin:
            self._volumes.extend(found.name, copy.size)
        own = transfer.tags(
            volume=copy.volume_id, snapshot=copy.snapshot_id or None,
            generation=copy.generation, former=found.name)
        self._volumes.retag(found.name, add=own - found.tags,
                            remove=_ours(found.tags) - own)
        self._volumes.rename(found.name, copy.name)
        if not copy.snapshot_id:
            self._handles.load(copy.name)

    def give_back(self, taken: interface.LogicalVolume) -> None:
        """Let what was taken be what it was before.

        :raises VolumeInUse: somebody has its handle open
        """
        label = copies.Label(taken.tags)
        name = label.former
        if name != taken.name and name in self._volumes.logical_volumes():
            # Somebody has made another one of that name meanwhile.
            name = taken.name
        self._let_go(taken.name, name)

    def is_whole(self, name: str, volume_id: str) -> bool:
        """Whether nothing of a volume's copy was let go."""
        found = self._volumes.logical_volumes().get(name)
        return (found is not None
                and copies.Label(found.tags).volume_id == volume_id)

    def let_go(self, name: str, plain: str, identity: str) -> None:
        """Let a copy be nobody's, by a plain name; it is not wiped.

        :param identity: id of the volume or the snapshot that it was
        :raises VolumeInUse: somebody has its handle open
        :raises VolumeIsRead: copies read thick snapshots of it
        :raises LogicalVolumeMissing: there is nothing to let go
        """
        volumes = self._volumes.logical_volumes()
        read = [snapshot for snapshot
                in interface.snapshots_on(name, volumes)
                if copies.Label(volumes[snapshot].tags)]
        if read:
            raise exception.VolumeIsRead(volume_id=identity,
                                         snapshots=', '.join(read))
        self._let_go(name, plain)

    def _let_go(self, name: str, plain: str) -> None:
        self._handles.remove(name)
        if name != plain and name in self._volumes.logical_volumes():
            self._volumes.rename(name, plain)
        tags = self._volumes.find(plain).tags
        self._volumes.retag(plain, add=frozenset(), remove=_ours(tags))


def _ours(tags: frozenset[str]) -> frozenset[str]:
    return frozenset(tag for tag in tags
                     if transfer.read_tags(frozenset([tag])))
