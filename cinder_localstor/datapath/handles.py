# SPDX-License-Identifier: Apache-2.0
"""Handles, and the volumes that do not move."""

from collections.abc import Container
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import dataclasses

from oslo_concurrency import lockutils
from oslo_log import log as logging
from oslo_utils import excutils
import tenacity

from cinder_localstor.datapath import copies
from cinder_localstor.datapath import transfer
from cinder_localstor.datapath import wipes
from cinder_localstor import exception
from cinder_localstor.node import interface

LOG = logging.getLogger(__name__)

SUFFIX = '-handle'
# Seconds in which an engine whose source answers has a moment without requests
ANSWERED_WITHIN = 2
# How often a handle is made again, and the seconds in between
ATTEMPTS = 3
PAUSE = 0.2


def handle_name(copy: str) -> str:
    """The device-mapper name of the handle of a volume copy."""
    return copy + SUFFIX


@dataclasses.dataclass(frozen=True)
class Backing:
    """The engine's device that the first `sectors` of a handle lie on."""

    device: str
    sectors: int


class Handles:
    """The handles of one node and the logical volumes under them.

    A handle lies on its logical volume.  While the volume moves its beginning
    lies on an engine's device instead, and what the volume was extended by
    since, which no engine knows of, on the logical volume still (hazard H12).

    A copy that the volume has moved on from is read-only.  Its LVM tag says
    so, because the tag outlives a power cut.
    """

    def __init__(self, node: interface.Node) -> None:
        self._node = node
        self._wipes = wipes.Wipes(node.volumes)

    def path(self, copy: str) -> str:
        """The device that everybody uses."""
        return self._node.device_mapper.path(handle_name(copy))

    def link(self, copy: str) -> str:
        """The same device by a link that its user may replace."""
        return self._node.device_mapper.link(handle_name(copy))

    def create(self, copy: copies.Copy, content_of: str = '') -> None:
        """Make the logical volume of a copy and its handle, or neither.

        :param content_of: a thin volume that it is to have the content of
        :raises NotEnoughSpace: the volume group is too full
        """
        tags = transfer.tags(volume=copy.volume_id,
                             generation=copy.generation)
        was_there = self._node.volumes.is_active(copy.name)
        try:
            if content_of:
                self._node.volumes.create_snapshot(copy.name, content_of,
                                                   tags)
                self._node.volumes.extend(copy.name, copy.size)
            else:
                self._node.volumes.create(copy.name, copy.size, tags)
            self._load(interface.LogicalVolume(copy.name, copy.size, tags))
        except Exception:
            with excutils.save_and_reraise_exception():
                # Cinder may make the volume on another node instead, and
                # never ask this one to delete it.
                if not was_there:
                    self._take_back(copy.name)

    def _take_back(self, name: str) -> None:
        """Remove a volume that nobody was ever shown, if that can be."""
        try:
            self.remove(name)
            self._node.volumes.remove(name)
        except Exception as error:
            LOG.error('What was made of %(name)s is left over: %(error)s',
                      {'name': name, 'error': error})

    def delete(self, name: str) -> None:
        """Remove a handle, and have its logical volume wiped and removed.

        :raises VolumeInUse: somebody has the handle open
        :raises SnapshotsLeft: thick snapshots lie on the logical volume
        """
        with self._lock(name):
            self._remove(name)
            self._wipes.give_up(name)

    def remove(self, name: str) -> None:
        """Remove a handle; the logical volume stays as it is.

        :raises VolumeInUse: somebody has the handle open
        """
        with self._lock(name):
            self._remove(name)

    def _remove(self, name: str) -> None:
        self._node.device_mapper.remove(handle_name(name))

    def check_unused(self, name: str) -> None:
        """:raises VolumeInUse: somebody has the handle open"""
        if self.open_count(name):
            raise exception.VolumeInUse(
                volume_name=name, host='this node', device=self.path(name))

    def is_there(self, name: str) -> bool:
        """Whether there is a handle; no command."""
        return self._node.device_mapper.exists(handle_name(name))

    def check_there(self, name: str) -> None:
        """:raises HandleMissing: there is no handle"""
        if not self.is_there(name):
            raise exception.HandleMissing(name=name)

    def held(self, names: Sequence[str]
             ) -> contextlib.AbstractContextManager[None]:
        """Let nobody read or write some copies while something is done, see
        :meth:`interface.DeviceMapper.held`.
        """
        return self._node.device_mapper.held(list(map(handle_name, names)))

    def resume_abandoned(self) -> None:
        """Let the handles go on that are suspended and that nobody holds.

        Only if a guard was killed, too, are there any.
        """
        abandoned = self._node.device_mapper.abandoned()
        if not abandoned:
            return
        for name in sorted(self._node.volumes.active_names()):
            if handle_name(name) in abandoned:
                self._resume(name)

    def _resume(self, name: str) -> None:
        LOG.warning('%s was left suspended by a process that is no more, and '
                    'is resumed', handle_name(name))
        try:
            with self._lock(name):
                self._node.device_mapper.resume(handle_name(name))
        except exception.LocalStorException as error:
            LOG.error('%(name)s stays suspended: %(error)s',
                      {'name': handle_name(name), 'error': error})

    def check_answered(self, name: str) -> None:
        """:raises RequestsWait: requests wait for a source that is away"""
        for attempt in tenacity.Retrying(
                retry=tenacity.retry_if_exception_type(
                    exception.RequestsWait),
                stop=tenacity.stop_after_delay(ANSWERED_WITHIN),
                wait=tenacity.wait_fixed(ANSWERED_WITHIN / 20),
                reraise=True):
            with attempt:
                self._check_answered(name)

    def _check_answered(self, name: str) -> None:
        count = self._node.device_mapper.in_flight(handle_name(name))
        if not count:
            return
        handle = self._node.device_mapper.devices().get(handle_name(name))
        # A logical volume answers sooner or later, an engine may not.
        if handle is not None and self._backing(name, handle) is not None:
            raise exception.RequestsWait(count=count, name=name)

    def open_count(self, name: str) -> int:
        """How often a handle is open; 0 when there is none."""
        device = self._node.device_mapper.devices().get(handle_name(name))
        return device.open_count if device else 0

    def extend(self, name: str, size: int) -> None:
        """Grow a volume to `size` bytes, whether it moves or not.

        :raises NotEnoughSpace: the volume group is too full
        :raises OriginInUse: it has thick snapshots and is in use
        :raises OriginIsRead: copies read its thick snapshots
        :raises OriginArrives: it has thick snapshots and still arrives
        """
        volumes = self._node.volumes.logical_volumes()
        snapshots = interface.snapshots_on(name, volumes)
        if snapshots and volumes[name].size < size:
            self._check_arrived(volumes[name])
            self._check_unread(name, [volumes[snapshot]
                                      for snapshot in snapshots])
            self._extend_origin(name, size, snapshots)
            return
        self._node.volumes.extend(name, size)
        with self._lock(name):
            handle = self._node.device_mapper.devices().get(
                handle_name(name))
            if handle is not None:
                self._load(self._node.volumes.find(name),
                           self._backing(name, handle))

    def _check_unread(self, name: str,
                      snapshots: list[interface.LogicalVolume]) -> None:
        """:raises OriginIsRead: thick snapshots of a copy are read, or are
            there for copies alone, and so go by themselves
        """
        read = [snapshot.name for snapshot in snapshots
                if copies.Label(snapshot.tags).is_for_copies
                or self._node.device_mapper.above(
                    self._node.volumes.mapped_name(snapshot.name))]
        if read:
            raise exception.OriginIsRead(name=name, snapshots=', '.join(read))

    @staticmethod
    def _check_arrived(volume: interface.LogicalVolume) -> None:
        """:raises OriginArrives: it does still"""
        if copies.Label(volume.tags).move_id:
            raise exception.OriginArrives(name=volume.name)

    def _extend_origin(self, name: str, size: int, snapshots: list[str]
                       ) -> None:
        """Grow a volume whose handle keeps it active, as LVM grows none."""
        if self.open_count(name):
            raise exception.OriginInUse(name=name,
                                        snapshots=', '.join(snapshots))
        with self._lock(name):
            self._remove(name)
            try:
                self._node.volumes.extend(name, size)
            finally:
                self._bring_back(name)

    @tenacity.retry(
        retry=tenacity.retry_if_exception_type(exception.LocalStorException),
        wait=tenacity.wait_fixed(PAUSE),
        stop=tenacity.stop_after_attempt(ATTEMPTS), reraise=True)
    def _bring_back(self, name: str) -> None:
        # Nobody else looks for a handle that is missing before the next start.
        self._load(self._node.volumes.find(name))

    def _backing(self, name: str, handle: interface.Device
                 ) -> Backing | None:
        """The engine that a handle lies on at present, if any."""
        if handle.under[0] == self._node.volumes.mapped_name(name):
            return None
        return Backing(self._node.device_mapper.path(handle.under[0]),
                       handle.status[0].length)

    def create_on_engine(self, copy: str, size: int, backing: Backing) -> None:
        """Make the first handle of a copy of `size` bytes."""
        with self._lock(copy):
            self._load(interface.LogicalVolume(copy, size), backing)

    def load(self, copy: str, backing: Backing | None = None,
             snapshot_size: int | None = None) -> None:
        """Load the table of a handle: its logical volume, behind an engine if
        one is given, whatever it lay on.

        :param snapshot_size: bytes of a snapshot, which nobody writes; LVM
            tells those that a thick one has for changes
        """
        with self._lock(copy):
            found = self._node.volumes.find(copy)
            if snapshot_size is None:
                self._load(found, backing)
            else:
                self._load(dataclasses.replace(found, size=snapshot_size),
                           backing, read_only=True)

    def seal(self, copy: str, generation: int) -> None:
        """Let nobody write a copy any more.

        :param generation: what the volume has moved on as
        """
        with self._lock(copy):
            self._seal(copy, generation)

    def _seal(self, copy: str, generation: int) -> None:
        # First: a power cut in between must not let the copy be written.
        self._tag_sealed(copy, generation)
        self._node.device_mapper.flush(self.path(copy))
        self._node.device_mapper.make_read_only(handle_name(copy))

    def seal_left(self, copy: str, generation: int) -> None:
        """As :meth:`seal`, of a copy that may be gone, or have no handle."""
        with self._lock(copy):
            if copy not in self._node.volumes.logical_volumes():
                return
            if self._node.device_mapper.exists(handle_name(copy)):
                self._seal(copy, generation)
            else:
                self._tag_sealed(copy, generation)

    def unseal(self, copy: str) -> None:
        """Let a copy be written again, and have its handle.

        That of one that arrives itself is built by its move.

        :raises LogicalVolumeMissing: there is no such copy
        """
        with self._lock(copy):
            found = self._node.volumes.find(copy)
            label = copies.Label(found.tags)
            sealed = (transfer.tags(superseded=label.superseded)
                      if label.is_sealed else frozenset())
            self._node.volumes.retag(copy, add=frozenset(), remove=sealed)
            handle = self._node.device_mapper.devices().get(
                handle_name(copy))
            if handle is not None or not label.move_id:
                self._load(
                    dataclasses.replace(found, tags=found.tags - sealed),
                    self._backing(copy, handle) if handle else None)

    def _tag_sealed(self, copy: str, generation: int) -> None:
        self._node.volumes.retag(
            copy, add=transfer.tags(superseded=generation),
            remove=frozenset())

    def belong(self, copy: copies.Copy) -> None:
        """Let a copy's tags say whose it is and of which generation.

        :raises LogicalVolumeMissing: there is no such copy
        """
        with self._lock(copy.name):
            found = self._node.volumes.find(copy.name).tags
            own = transfer.tags(volume=copy.volume_id,
                                generation=copy.generation)
            keys = transfer.read_tags(own).keys()
            old = frozenset(tag for tag in found
                            if keys & transfer.read_tags(
                                frozenset([tag])).keys())
            self._node.volumes.retag(copy.name, add=own - found,
                                     remove=old - own)

    @staticmethod
    def _lock(copy: str) -> contextlib.AbstractContextManager:
        return lockutils.lock('localstor-handle-' + copy)

    def _load(self, volume: interface.LogicalVolume,
              backing: Backing | None = None, read_only: bool = False
              ) -> None:
        name = handle_name(volume.name)
        device_mapper = self._node.device_mapper
        table = self._table(volume, backing)
        read_only = read_only or self._is_sealed(volume)
        if device_mapper.exists(name):
            device_mapper.reload(name, table, read_only)
        else:
            device_mapper.create(name, table, read_only)

    def _table(self, volume: interface.LogicalVolume,
               backing: Backing | None) -> list[interface.Segment]:
        table, start = [], 0
        if backing is not None:
            table = [interface.Segment(0, backing.sectors, 'linear',
                                       '%s 0' % backing.device)]
            start = backing.sectors
        length = volume.size // interface.SECTOR - start
        if length > 0:
            table.append(interface.Segment(
                start, length, 'linear', '%s %d' % (
                    self._node.volumes.path(volume.name), start)))
        return table

    def restore(self, wanted: list[copies.Copy],
                volumes: Mapping[str, interface.LogicalVolume],
                others: Container[str] = ()) -> dict[str, Exception]:
        """Build the missing handles of copies that lie on their logical
        volumes alone.

        One bad volume does not keep the others from being built.

        :param volumes: all of the group
        :param others: names of copies that somebody else takes care of
        :returns: what went wrong, by name of the copy
        """
        known = {copy.name for copy in wanted}
        for name, volume in volumes.items():
            if (name not in known and name not in others
                    and wipes.former_name(name) is None):
                self._tell_of_stranger(volume)
        devices = self._node.device_mapper.devices()
        failures: dict[str, Exception] = {}
        missing = []
        for copy in wanted:
            with self._tell_failure(copy.name, failures):
                volume = self._present(copy, volumes)
                if handle_name(copy.name) not in devices:
                    missing.append(volume)
                elif not self._is_right(volume, devices):
                    with self._lock(volume.name):
                        self._load(volume)
        if missing:
            self._make_missing(missing, failures)
        return failures

    def _make_missing(self, volumes: list[interface.LogicalVolume],
                      failures: dict[str, Exception]) -> None:
        """All at once, and one by one what is missing then, because any of
        them was in the way.
        """
        try:
            self._node.device_mapper.create_all([interface.NewNode(
                handle_name(volume.name), tuple(self._table(volume, None)),
                self._is_sealed(volume)) for volume in volumes])
        except exception.LocalStorException as error:
            LOG.warning('Handles are made one by one: %s', error)
            devices = self._node.device_mapper.devices()
            for volume in volumes:
                with self._tell_failure(volume.name, failures):
                    if not self._is_right(volume, devices):
                        self._load(volume)

    @staticmethod
    @contextlib.contextmanager
    def _tell_failure(name: str, failures: dict[str, Exception]
                      ) -> Iterator[None]:
        try:
            yield
        except exception.LocalStorException as error:
            LOG.error('No handle for %(name)s: %(error)s',
                      {'name': name, 'error': error})
            failures[name] = error

    @staticmethod
    def _tell_of_stranger(volume: interface.LogicalVolume) -> None:
        label = copies.Label(volume.tags)
        if label.volume_id:
            LOG.warning(
                'Logical volume %(name)s holds generation %(generation)s of '
                'volume %(volume)s, which lives elsewhere or is deleted. It '
                'is not activated, and kept: whether another copy is as new '
                'is not known here.',
                {'name': volume.name, 'volume': label.volume_id,
                 'generation': label.generation})

    def _present(self, copy: copies.Copy,
                 volumes: Mapping[str, interface.LogicalVolume]
                 ) -> interface.LogicalVolume:
        """The logical volume of a copy, if that is what should be there."""
        try:
            volume = volumes[copy.name]
        except KeyError as error:
            raise exception.LogicalVolumeMissing(
                group=self._node.volumes.name, name=copy.name,
                host='this node') from error
        self._check_generation(copy, copies.Label(volume.tags))
        if not self._node.volumes.is_active(copy.name):
            raise exception.LogicalVolumeInactive(
                group=self._node.volumes.name, name=copy.name,
                volume_id=copy.volume_id)
        return volume

    def _is_right(self, volume: interface.LogicalVolume,
                  devices: dict[str, interface.Device]) -> bool:
        device = devices.get(handle_name(volume.name))
        return (device is not None
                and device.under == (
                    self._node.volumes.mapped_name(volume.name),)
                and device.read_only == self._is_sealed(volume))

    @staticmethod
    def _is_sealed(volume: interface.LogicalVolume) -> bool:
        return copies.Label(volume.tags).is_sealed

    @staticmethod
    def _check_generation(copy: copies.Copy, label: copies.Label) -> None:
        """:raises GenerationTooOld: the volume is elsewhere by now"""
        generation = label.generation_of(copy)
        what = ''
        if label.move_id:
            what = 'an arriving copy of generation %d' % generation
        elif generation < copy.generation:
            what = str(generation)
        elif label.superseded > (copy.newest or copy.generation):
            what = '%d, which moved on as generation %d' % (generation,
                                                            label.superseded)
        if what:
            raise exception.GenerationTooOld(
                name=copy.name, host='this node', volume_id=copy.volume_id,
                expected=copy.generation, found=what)
