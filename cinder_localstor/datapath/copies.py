# SPDX-License-Identifier: Apache-2.0
"""Copies of volumes: what should be on a node, and what is there.

:class:`Copy` is what the database wants, and the registry of a backend
(:mod:`cinder_localstor.moves.registry`) has them all.  :class:`Label` is what
a logical volume tells of itself.
"""

from __future__ import annotations

import dataclasses
import enum

from cinder_localstor.datapath import transfer


class Role(str, enum.Enum):
    """What a copy is to its node; the value is what operators are shown."""

    STANDING = 'standing'
    SOURCE = 'source'
    ARRIVING = 'arriving'
    SNAPSHOT = 'snapshot'
    # A snapshot that is there for a copy which reads it, and for no user
    READ = 'read'
    # The volume has moved on, and thick snapshots lie on it.
    KEPT = 'kept'
    # Cinder makes or deletes it.
    PASSING = 'passing'
    # It was given up, and is wiped.
    WIPING = 'wiping'
    # Nobody knows of it.
    LEFTOVER = 'leftover'


@dataclasses.dataclass(frozen=True)
class Origin:
    """The copy that another one reads what it has not got yet from.

    :ivar host: ``host@backend`` that has it
    """

    host: str
    name: str


@dataclasses.dataclass(frozen=True)
class Copy:
    """A copy of a volume on one backend, as the database knows it, or a
    snapshot.

    :ivar host: ``host@backend`` that has it
    :ivar name: of its logical volume
    :ivar generation: of the volume; 0 where it has no meaning
    :ivar size: bytes that the volume has
    :ivar state: of the move that it is a part of, else of the volume or the
        snapshot
    :ivar move_id: of that move, '' if there is none
    :ivar newest: the generation that the volume may have moved on to; 0 when
        this copy is the newest
    :ivar snapshot_id: of the snapshot that it is, '' if it is none
    :ivar depends_on: what it can't do without, None if it has all it needs
    """

    host: str
    name: str
    volume_id: str
    generation: int
    size: int
    role: Role = Role.STANDING
    state: str = ''
    move_id: str = ''
    newest: int = 0
    snapshot_id: str = ''
    depends_on: Origin | None = None


class Label:
    """What the tags of a logical volume tell of the copy that it holds."""

    def __init__(self, tags: frozenset[str]) -> None:
        self._values = transfer.read_tags(tags)

    def __bool__(self) -> bool:
        """Whether the logical volume is one of ours."""
        return bool(self._values)

    @property
    def volume_id(self) -> str:
        """The user's volume, '' where none is told."""
        return self._values.get('volume', '')

    @property
    def snapshot_id(self) -> str:
        """The snapshot that it is, '' if it is none."""
        return self._values.get('snapshot', '')

    @property
    def is_for_copies(self) -> bool:
        """Of a snapshot, whether no user has it, and copies alone read it."""
        return bool(self.volume_id) and not self.snapshot_id

    @property
    def move_id(self) -> str:
        """The move by which it still arrives, '' if it has."""
        return self._values.get('move', '')

    @property
    def map_of(self) -> str:
        """The move whose region map it holds, '' if it holds a copy."""
        return self._values.get('map', '')

    @property
    def former(self) -> str:
        """The name that it had before Cinder managed it, '' if Cinder made
        it.
        """
        return self._values.get('former', '')

    @property
    def generation(self) -> str:
        """The generation as it is told, '?' where none is."""
        return self._values.get('generation', '?')

    @property
    def superseded(self) -> int:
        """The generation that its volume has moved on as, 0 if it has not."""
        return self._number('superseded', 0)

    @property
    def is_sealed(self) -> bool:
        """Whether nobody may write it any more."""
        return 'superseded' in self._values

    def generation_of(self, copy: Copy) -> int:
        """The generation that it is of, of the volume that a copy is of.

        Where it tells none of this volume it is that of the copy.  It may
        name another: what Cinder copies a volume to is first a volume of its
        own, and a copy is that of the row that names it.
        """
        if self.volume_id not in ('', copy.volume_id):
            return copy.generation
        return self._number('generation', copy.generation)

    def needs(self, size: int) -> int:
        """Bytes of a thin pool that it needs when all has arrived.

        :param size: bytes of the logical volume, if it does not tell
        """
        return self._number('needs', size)

    def _number(self, key: str, default: int) -> int:
        """0 when it is none, so that it counts as too old."""
        try:
            return int(self._values.get(key, default))
        except ValueError:
            return 0
