# SPDX-License-Identifier: Apache-2.0
"""Copies that nobody needs any more, until their content is gone.

A wipe can take hours, so nobody waits for one.  A copy that is given up gets
another name, in one operation of LVM: that is the record of the wipe.  Under
that name no volume and no move finds it, it takes its space for as long as it
is there, and whoever looks at the logical volumes of the node, after a restart
too, knows what is left to be done.
"""

from collections.abc import Collection
import re
import uuid

from cinder_localstor.datapath import copies
from cinder_localstor.node import interface

PREFIX = 'localstor-wipe-'
# A second copy of the same name may come before the first is wiped.
_GIVEN_UP = re.compile(re.escape(PREFIX) + r'(?P<name>.+)\.[0-9a-f]{8}')


def former_name(name: str) -> str | None:
    """The name that a copy had before it was given up, None if it was not.
    """
    match = _GIVEN_UP.fullmatch(name)
    return match['name'] if match else None


class Wipes:
    """The wipes of one node; every method is idempotent."""

    def __init__(self, group: interface.VolumeGroup) -> None:
        self._group = group

    def give_up(self, name: str) -> None:
        """Record that a copy is to be wiped and removed.

        It waits as long as copies read a thick snapshot of it that no user
        has any more.

        :param name: of a copy that no device lies on any more
        :raises SnapshotsLeft: thick snapshots do that a user has
        """
        volumes = self._group.logical_volumes()
        if name not in volumes:
            return
        interface.check_no_snapshots(self._group.name, name, {
            found: volume for found, volume in volumes.items()
            if copies.Label(volume.tags).snapshot_id
            or not copies.Label(volume.tags)})
        if (not self._group.is_active(name)
                and not self._group.activate(name)):
            # There is nothing of it to wipe.
            self._group.remove(name)
        else:
            self._group.rename(name, '%s%s.%s' % (PREFIX, name,
                                                  uuid.uuid4().hex[:8]))

    def recorded(self) -> list[str]:
        """Names of the logical volumes that are to be wiped; no command."""
        return sorted(filter(former_name, self._group.active_names()))

    def remaining(self, names: Collection[str]) -> set[str]:
        """Which of some copies are here still, given up or not; no command.
        """
        found = self._group.active_names()
        found |= {former for former in map(former_name, found) if former}
        return found.intersection(names)

    def wipe(self, name: str) -> None:
        """Wipe a logical volume as volume_clear says, and remove it.

        What breaks it off does no harm: it begins anew the next time.

        :param name: one that :meth:`recorded` has told
        :raises ValueError: it is none that was given up
        """
        if former_name(name) is None:
            raise ValueError('%s was not given up' % name)
        self._group.clear(name)
        self._group.remove(name)
