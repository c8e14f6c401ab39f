# SPDX-License-Identifier: Apache-2.0
"""What a volume must hold: the ledger of the stamps on it.

It is kept outside the nodes.  A write that was acknowledged must be read from
then on.  One that was under way when its writer died may be there or not; once
it was read, or not read, that is settled too.

On a disk with a volatile cache a power cut may take back what was not flushed.
Who cuts the power of such a disk says so with :meth:`Ledger.lose`; every value
since the last flush is allowed then.
"""

from collections.abc import Iterable
import itertools
import threading

from lab import stamps

# Numbers of writes of one life of the writer.
LIFE = 1 << 32
# No writers of one volume live more often.
LIVES = 1000


class StampError(Exception):
    """A volume does not hold what it must hold."""


class Ledger:
    """The stamps of one volume.

    Blocks are numbered ``cluster * CLUSTER_BLOCKS + place in the cluster``.
    """

    _forks = itertools.count(1)

    def __init__(self, volume: str, size: int) -> None:
        """:param volume: whose id the stamps have
        :param size: bytes
        """
        self.volume = volume
        self.clusters = stamps.clusters_of(size)
        self.acknowledged = 0
        self.verified = 0
        self._lock = threading.Lock()
        self._life = 0
        self._last = 0
        self._durable: dict[int, int] = {}
        # Acknowledged and not flushed, in the order of the writes
        self._fresh: dict[int, list[int]] = {}
        # Writes that may be there or not: what dead writers were at, by block,
        # as ranges of numbers
        self._under_way: dict[int, list[range]] = {}
        # Blocks of which more than one content is allowed, or was found
        self._several: dict[int, frozenset[int]] = {}

    # The life of a writer

    def begin(self) -> int:
        """A new writer begins to live; the number before its first write."""
        with self._lock:
            self._life += 1
            self._last = self._life * LIFE
            return self._last

    def take(self, line: str) -> None:
        """What the writer says, see :mod:`lab.stamps`.

        :raises StampError: it has read what it must not read
        """
        kind, *words = line.split()
        with self._lock:
            if kind == 'a':
                self._acknowledge(*map(int, words))
            elif kind == 'f':
                self._flush(int(words[0]))
            elif kind == 'r':
                self._check(int(words[0]), words[1:])
            elif kind == 's':
                self.clusters = int(words[0])
            elif kind == 'e':
                raise StampError('Volume %s: I/O error on %s' % (
                    self.volume, ' '.join(words)))

    def died(self) -> None:
        """The writer was killed: what it was at may be there or not."""
        with self._lock:
            begun = range(self._last + 1, (self._life + 1) * LIFE)
            for block in range(self.clusters * stamps.CLUSTER_BLOCKS):
                self._under_way.setdefault(block, []).append(begun)

    def lose(self) -> None:
        """The power of a volatile disk under the volume was cut."""
        with self._lock:
            for block, numbers in self._fresh.items():
                self._several[block] = frozenset(
                    (self._durable.get(block, 0), *numbers))

    # Copies

    def fork(self) -> 'Ledger':
        """What a copy of the volume must hold that is asked for now.

        Its stamps have the volume's id, too, and numbers of their own.
        """
        with self._lock:
            fork = Ledger(self.volume, 0)
            fork.clusters = self.clusters
            fork.acknowledged = self.acknowledged
            fork._durable = self._newest()
            fork._under_way = {block: list(begun) for block, begun
                               in self._under_way.items()}
            fork._several = dict(self._several)
            fork._life, fork._last = self._life, self._last
        # The copy may have what is written until it is made.
        fork.died()
        fork._life = next(self._forks) * LIVES
        return fork

    # What is expected

    def newest(self) -> dict[int, int]:
        """The last acknowledged write of each block that has one."""
        with self._lock:
            return self._newest()

    def check_not_older(self, lines: Iterable[str], floor: dict[int, int]
                        ) -> int:
        """Compare what was read while the writer went on.

        :param floor: :meth:`newest` when the reading began
        :returns: how many blocks were read
        :raises StampError: something older was read
        """
        seen = 0
        for line in lines:
            kind, *words = line.split()
            if kind == 'e':
                raise StampError('Volume %s: I/O error on %s' % (
                    self.volume, ' '.join(words)))
            if kind != 'r':
                continue
            for block, word in self._blocks(int(words[0]), words[1:]):
                seen += 1
                least = floor.get(block, 0)
                if word.startswith('?') or min(
                        map(int, word.split('+'))) < least:
                    raise self._error(block, word, 'at least %s'
                                      % self._name(least))
        return seen

    # Inside

    def _newest(self) -> dict[int, int]:
        return dict(self._durable) | {
            block: numbers[-1] for block, numbers in self._fresh.items()}

    def _blocks(self, cluster: int, words: list[str]
                ) -> list[tuple[int, str]]:
        if len(words) != stamps.CLUSTER_BLOCKS:
            raise StampError('Volume %s: cluster %d was not understood: %s'
                             % (self.volume, cluster, ' '.join(words)))
        first = cluster * stamps.CLUSTER_BLOCKS
        return [(first + place, word) for place, word in enumerate(words)]

    def _acknowledge(self, number: int, cluster: int, first: int, count: int
                     ) -> None:
        start = cluster * stamps.CLUSTER_BLOCKS + first
        for block in range(start, start + count):
            self._fresh.setdefault(block, []).append(number)
            self._several.pop(block, None)
            self._under_way.pop(block, None)
        self._last = number
        self.acknowledged += 1

    def _flush(self, number: int) -> None:
        for block, numbers in list(self._fresh.items()):
            settled = [one for one in numbers if one <= number]
            if settled:
                self._durable[block] = settled[-1]
                del numbers[:len(settled)]
            if not numbers:
                del self._fresh[block]

    def _check(self, cluster: int, words: list[str]) -> None:
        for block, word in self._blocks(cluster, words):
            if word.startswith('?'):
                raise self._error(block, word, self._name(
                    max(self._allowed(block))))
            found = frozenset(map(int, word.split('+')))
            allowed = self._allowed(block)
            begun = self._under_way.get(block, [])
            if not all(any(number in numbers for numbers in begun)
                       for number in found - allowed):
                raise self._error(block, word, ' or '.join(
                    map(self._name, sorted(allowed))))
            self._settle(block, found, allowed)
        self.verified += 1

    def _allowed(self, block: int) -> frozenset[int]:
        if block in self._several:
            return self._several[block]
        fresh = self._fresh.get(block)
        return frozenset((fresh[-1] if fresh
                          else self._durable.get(block, 0),))

    def _settle(self, block: int, found: frozenset[int],
                allowed: frozenset[int]) -> None:
        self._under_way.pop(block, None)
        self._several.pop(block, None)
        if len(found) > 1:
            self._several[block] = found
        if found != allowed:
            self._fresh[block] = [max(found)]

    def _error(self, block: int, word: str, expected: str) -> StampError:
        cluster, place = divmod(block, stamps.CLUSTER_BLOCKS)
        offset = stamps.cluster_offset(cluster) + place * stamps.BLOCK
        found = (word[1:] if word.startswith('?') else ' and '.join(
            self._name(int(number)) for number in word.split('+')))
        return StampError(
            'Volume %s at byte %d: found %s, expected %s' % (
                self.volume, offset, found, expected))

    @staticmethod
    def _name(number: int) -> str:
        if not number:
            return 'zeros'
        return 'write %d of life %d' % (number % LIFE, number // LIFE)
