# SPDX-License-Identifier: Apache-2.0
"""What may be read of a volume, whatever has happened to its nodes."""


class Contents:
    """The stamps that regions of a volume may hold.

    A guest reads what it wrote last.  After a power cut it may read anything
    from what it flushed last to what it wrote last; what it has read once it
    reads again, until the next power cut.
    """

    def __init__(self) -> None:
        # By region the stamps since the last flush, and before them the last
        # one that was flushed
        self._stamps: dict[int, list[str]] = {}
        # Regions that may hold older stamps than the last
        self._uncertain: set[int] = set()

    def write(self, number: int, stamp: str) -> None:
        """A guest has written a region."""
        self._stamps.setdefault(number, []).append(stamp)
        self._uncertain.discard(number)

    def flush(self) -> None:
        """A flush of the guest has returned."""
        for number in self._stamps.keys() - self._uncertain:
            del self._stamps[number][:-1]

    def lose_cache(self) -> None:
        """The node has lost power that the guest wrote on."""
        self._uncertain |= self._stamps.keys()

    def regions(self) -> list[int]:
        """All regions that were ever written."""
        return list(self._stamps)

    def read(self, number: int, found: str) -> None:
        """A guest has read a region.

        :raises AssertionError: it may not hold what was found
        """
        stamps = self._stamps[number]
        allowed = stamps if number in self._uncertain else stamps[-1:]
        assert found in allowed, 'region %d reads %r instead of %s' % (
            number, found, ' or '.join(map(repr, allowed)))
        del stamps[stamps.index(found) + 1:]
        self._uncertain.discard(number)
