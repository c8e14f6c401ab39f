# SPDX-License-Identifier: Apache-2.0
"""A guest that uses a volume, seen from outside: see :mod:`lab.stamps`."""

import contextlib
import os
import sys
import threading
import time

from lab import cloud as clouds
from lab import errors
from lab import journal as journals
from lab import ledger as ledgers
from lab import leftovers
from lab import node as nodes
from lab import stamps

_PYTHON = [os.path.realpath(sys.executable), '-ISE',
           os.path.realpath(stamps.__file__)]


class Guest:
    """A process on a node that reads and writes stamps on a device."""

    def __init__(self, cloud: clouds.Cloud, node: nodes.Node, device: str,
                 volume: str, ledger: ledgers.Ledger,
                 journal: journals.Journal, rate: float) -> None:
        """:param volume: whose device it is
        :param rate: requests a second
        """
        self._cloud = cloud
        self.node = node
        self._device = device
        self._volume = volume
        self._ledger = ledger
        self._journal = journal
        self._rate = rate
        self._line = b''
        self._errors = b''
        self._ended = threading.Event()
        self.verified = threading.Event()
        self._input, self._hand = os.pipe()
        self._asked_to_stop = False
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether something of it may still be in flight."""
        return not self._ended.is_set()

    def grow(self, clusters: int) -> None:
        """Tell it that its volume has grown."""
        if self.alive and not self._asked_to_stop:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._hand, b's %d\n' % clusters)

    def stop(self, timeout: float) -> bool:
        """Ask it to end; whether it has within `timeout` seconds."""
        if not self._asked_to_stop:
            self._asked_to_stop = True
            os.close(self._hand)
        return self._ended.wait(timeout)

    def _live(self) -> None:
        first = self._ledger.begin()
        before = self._ledger.acknowledged, self._ledger.verified
        argv = [*_PYTHON, 'live', self._device, self._ledger.volume,
                str(self._ledger.clusters), '--first', str(first),
                '--rate', str(self._rate)]
        try:
            status = self.node.agent.stream(
                argv, self.node.place.environment, self._hear,
                self._hear_error, source=self._input)
            if status:
                self._ledger.died()
                self._journal.fail('The guest of volume %s on %s ended with '
                                   'status %d: %s' % (
                                       self._volume, self.node.name,
                                       status, self._errors.decode()))
        except ledgers.StampError as error:
            self._journal.fail('%s, on %s by the guest' % (
                error, self.node.name))
        except errors.LabError as error:
            self._ledger.died()
            if (self.node.volatile_disks
                    or leftovers.moves(self._cloud).get(self._volume)):
                # On any disk dm-clone keeps a write for later that goes to a
                # region which has not arrived: its map is not durable before
                # a flush.
                self._ledger.lose()
            self._journal.note('guest', 'of volume %s on %s is lost: %s' % (
                self._volume, self.node.name, error))
            if not self._journal.disturbed(time.monotonic()):
                self._journal.fail('The guest of volume %s on %s was lost '
                                   'without a power cut: %s' % (
                                       self._volume, self.node.name,
                                       error))
        finally:
            os.close(self._input)
            self._journal.count('stamps written',
                                self._ledger.acknowledged - before[0])
            self._journal.count('clusters of stamps read',
                                self._ledger.verified - before[1])
            self._ended.set()

    def _hear(self, data: bytes) -> None:
        *lines, self._line = (self._line + data).split(b'\n')
        for line in lines:
            if line == b'v direct':
                self.verified.set()
            self._ledger.take(line.decode())

    def _hear_error(self, data: bytes) -> None:
        self._errors += data


def peek(node: nodes.Node, device: str, ledger: ledgers.Ledger,
         how: str, timeout: float) -> int:
    """Read all while somebody else writes; how many blocks were read.

    :raises StampError: what was read is older than what was acknowledged
        before
    """
    floor = ledger.newest()
    found = node.run([*_PYTHON, 'read', device, ledger.volume,
                      str(ledger.clusters), '--how', how],
                     timeout=timeout, check=False)
    return ledger.check_not_older(found.stdout.splitlines(), floor)
