# SPDX-License-Identifier: Apache-2.0
"""All copies that should be on a backend.

What is done at the start, what is reported, what goes with a volume that is
deleted and what counts as left behind is read from here and nowhere else.
What is really there, the logical volumes tell
(:class:`cinder_localstor.datapath.copies.Label`).
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Iterator

from cinder import context

from cinder_localstor.datapath import copies
from cinder_localstor.moves import table
from cinder_localstor import rows

# States in which the user's volume is the source copy still, or again
BEFORE_IDENTITY = (table.State.PREPARING, table.State.RETURNING,
                   table.State.ABORTING)


class Registry:
    """The copies of one backend, as the database had them at one moment.

    A copy in the middle of a chain has two entries: it arrives by one move,
    and is the source of another.

    :ivar volumes: copies of users' volumes, whether these move or not
    :ivar moves: that the backend has a part in
    :ivar snapshots: that lie here, wherever their volumes are by now
    :ivar sources: what moves read here
    :ivar read: snapshots that copies read here, whether a user has them or not
    :ivar arriving: what moves bring here
    """

    def __init__(self, host: str, volumes: Iterable[copies.Copy],
                 moves: Iterable[rows.Move],
                 snapshots: Iterable[copies.Copy] = ()) -> None:
        """:param host: ``host@backend``"""
        self.host = host
        self.volumes = tuple(volumes)
        self.moves = tuple(moves)
        self.snapshots = tuple(snapshots)
        of_here = [move for move in self.moves
                   if move.transfer.source_host == host]
        self.sources = tuple(_source(move) for move in of_here
                             if not move.transfer.is_copy)
        # These are nobody's volume any more.
        self._kept = {copy.name for copy in self.sources
                      if copy.role is copies.Role.KEPT}
        self.read = tuple(_snapshot(move) for move in of_here
                          if move.transfer.is_copy
                          and not move.transfer.is_snapshot)
        # A source that is kept has nothing to do with the other node.
        self.arriving = tuple(self._arriving(move) for move in self.moves
                              if move.transfer.destination_host == host
                              and move.state != table.State.KEEPING)

    def __iter__(self) -> Iterator[copies.Copy]:
        yield from (*self.volumes, *self.sources, *self.arriving,
                    *self.snapshots, *self.read)

    def names(self) -> set[str]:
        """Names of all copies."""
        return {copy.name for copy in self}

    def of_no_user(self) -> list[copies.Copy]:
        """Snapshots that are there for what reads them alone, each once."""
        held = {copy.name for copy in self.snapshots}
        return list({copy.name: copy for copy in self.read
                     if copy.name not in held}.values())

    def standing(self) -> list[copies.Copy]:
        """Copies of volumes that have no part in a move."""
        moving = {copy.name for copy in (*self.sources, *self.arriving)}
        return [copy for copy in self.volumes
                if copy.role is copies.Role.STANDING
                and copy.name not in moving]

    def _arriving(self, move: rows.Move) -> copies.Copy:
        described = move.transfer
        state = table.State(move.state)
        serves = (state in table.UNDONE_BY_FAILURE
                  or table.TABLE[state].serves)
        return copies.Copy(
            host=self.host, name=described.destination_name,
            volume_id=move.volume_id, generation=described.generation,
            size=described.destination_size, role=copies.Role.ARRIVING,
            state=move.state, move_id=move.move_id,
            newest=max((other.transfer.generation for other in self.moves
                        if other.transfer.source_name
                        == described.destination_name), default=0),
            depends_on=copies.Origin(described.source_host,
                                     described.source_name)
            if serves else None)

    def restored(self) -> list[copies.Copy]:
        """Copies whose handle lies on their logical volume alone, if it is
        to be there: it is brought back at the start.

        What arrives is built again by its move.
        """
        found = {copy.name: copy for copy in self.volumes
                 if copy.role is copies.Role.STANDING}
        found.update((copy.name, copy) for copy in self.sources
                     if self._is_needed(copy))
        for copy in self.arriving:
            if not table.has_released(self.move_of(copy)):
                found.pop(copy.name, None)
        return list(found.values())

    def superseded(self) -> list[copies.Copy]:
        """Sources that no move reads any more: they are being deleted, or
        kept for their snapshots.
        """
        return [copy for copy in self.sources if not self._is_needed(copy)]

    def _is_needed(self, source: copies.Copy) -> bool:
        state = table.State(source.state)
        return ((state in BEFORE_IDENTITY or table.TABLE[state].serves)
                and source.name not in self._kept
                and not table.DELETE_SOURCE.is_done(self.move_of(source)))

    def move_of(self, copy: copies.Copy) -> rows.Move:
        """The move that a source or an arriving copy has a part in."""
        return next(move for move in self.moves
                    if move.move_id == copy.move_id)


def _source(move: rows.Move) -> copies.Copy:
    described = move.transfer
    # It may be sealed.
    left = (table.TABLE[table.State(move.state)].serves
            or move.state == table.State.RETURNING)
    kept = move.state == table.State.KEEPING
    return copies.Copy(
        host=described.source_host, name=described.source_name,
        volume_id=move.volume_id, generation=described.generation - 1,
        size=described.size, state=move.state,
        role=copies.Role.KEPT if kept else copies.Role.SOURCE,
        move_id=move.move_id, newest=described.generation if left else 0)


def _snapshot(move: rows.Move) -> copies.Copy:
    described = move.transfer
    return copies.Copy(
        host=described.source_host, name=described.source_name,
        volume_id=move.volume_id, generation=0, size=described.size,
        state=move.state, role=copies.Role.READ, move_id=move.move_id,
        depends_on=copies.Origin(described.source_host, described.origin)
        if described.origin else None)


def read(ctxt: context.RequestContext, host: str) -> Registry:
    """The registry of a backend as it is now.

    :param host: ``host@backend``
    """
    # The moves first: of one that ends in between, the volume's row tells.
    moves = rows.for_host(ctxt, host)
    return Registry(host, rows.copies_on(ctxt, host), moves,
                    rows.snapshots_on(ctxt, host))
