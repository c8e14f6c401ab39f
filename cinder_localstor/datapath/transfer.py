# SPDX-License-Identifier: Apache-2.0
"""What the data path has to know of a move, and how logical volumes tell it.

A node must know what each logical volume is even before it can reach the
database, so the gist is kept in the volumes' LVM tags too.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from cinder_localstor.node import interface

TAG = re.compile(r'localstor\.(?P<key>[a-z]+)=(?P<value>.+)')


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A move as far as it hardly ever changes, or a copy: its source stays.

    The source of a copy is a snapshot, or where a snapshot itself arrives what
    its volume arrives from.

    :ivar move_id: also the id of the shadow volume's row
    :ivar volume_id: id of the user's volume
    :ivar generation: of the destination copy; the source's is one less
    :ivar source_host: ``host@backend`` that has the source copy
    :ivar destination_host: ``host@backend`` that gets the volume
    :ivar source_name: name of the source copy
    :ivar destination_name: name of the destination copy
    :ivar size: bytes of the source
    :ivar block_size: bytes of a logical block of the source
    :ivar engine: name of the engine
    :ivar region_sectors: sectors of a region, a power of two
    :ivar threshold: batches that are copied at the same time
    :ivar batch: regions that are copied in one go
    :ivar export: where the source copy is found
    :ivar content: bytes that the source copy holds, -1 where that is not
        known, or was not when the move began
    :ivar is_copy: whether it is a copy
    :ivar taken_of: of a copy, the volume's copy that its source is taken of,
        '' where a user has taken it
    :ivar cloned: the volume that `taken_of` is the copy of, where that is on
        another node than the new volume, '' elsewhere
    :ivar origin: of a copy, what its source can't do without, '' for nothing
    :ivar larger: bytes of the destination if it is larger than the source, 0
        if it is not
    :ivar snapshot_of: of a snapshot that was taken while its volume arrived,
        the move that it arrived by; '' elsewhere. `source_name` is the
        volume's copy then
    :ivar snapshot_id: the snapshot's, '' if no user has it
    :ivar replaced: of a copy that its volume is reverted to, the one that the
        volume has until the copy can be used; '' elsewhere
    :ivar waits: whether reads wait for a source that is away as long as it
        takes, whatever the options say
    :ivar comes_back: bytes that the source is to have when the volume is back
        there because the destination is lost for good; 0 elsewhere
    """

    move_id: str
    volume_id: str
    generation: int
    source_host: str
    destination_host: str
    source_name: str
    destination_name: str
    size: int
    block_size: int
    engine: str
    region_sectors: int
    threshold: int
    batch: int
    export: interface.Export
    content: int = -1
    is_copy: bool = False
    taken_of: str = ''
    cloned: str = ''
    origin: str = ''
    larger: int = 0
    snapshot_of: str = ''
    snapshot_id: str = ''
    replaced: str = ''
    waits: bool = False
    comes_back: int = 0

    @property
    def is_snapshot(self) -> bool:
        """Whether what arrives is a snapshot."""
        return bool(self.snapshot_of)

    @property
    def source_node(self) -> str:
        """See :func:`source_node`."""
        return source_node(self.destination_name)

    @property
    def is_local(self) -> bool:
        """Whether it never leaves its node."""
        return self.source_host == self.destination_host

    @property
    def destination_size(self) -> int:
        """Bytes of the destination copy."""
        return max(self.size, self.larger)

    def as_dict(self) -> dict[str, Any]:
        """A form that RPC can carry."""
        return {**interface.without_defaults(self),
                'export': self.export.as_dict()}

    def kept(self, move_id: str, size: int) -> Transfer:
        """What stands for the copy that this one has :attr:`replaced`: as if
        the volume had left it behind in a move.

        :param size: bytes of that copy
        """
        return Transfer(
            move_id=move_id, volume_id=self.volume_id,
            generation=self.generation,
            source_host=self.destination_host,
            destination_host=self.destination_host,
            source_name=self.replaced,
            destination_name=self.destination_name, size=size,
            block_size=self.block_size, engine=self.engine,
            region_sectors=self.region_sectors, threshold=self.threshold,
            batch=self.batch, export=interface.NO_EXPORT)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Transfer:
        """The inverse of :meth:`as_dict`."""
        return cls(**{**values,
                      'export': interface.Export(**values['export'])})


def source_node(copy: str) -> str:
    """The device-mapper name of the node that a copy reads its source by."""
    return copy + '-source'


def tags(**values: Any) -> frozenset[str]:
    """LVM tags that hold the given values, without those that are None."""
    return frozenset('localstor.%s=%s' % (key, value)
                     for key, value in values.items() if value is not None)


def read_tags(found: frozenset[str]) -> dict[str, str]:
    """The values that :func:`tags` wrote; tags of others are passed over."""
    matches = filter(None, map(TAG.fullmatch, found))
    return {match['key']: match['value'] for match in matches}
