# SPDX-License-Identifier: Apache-2.0
"""Whoever acts in a chaos run: decides by a seed, and goes on after failures.

What he can't undo at once, because the cloud does not answer, he undoes later,
as an administrator would.
"""

import abc
from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Iterator
import contextlib
import random
import time
import traceback

from keystoneauth1 import exceptions

from lab import cloud as clouds
from lab import errors
from lab import instances
from lab import journal as journals
from lab import ledger as ledgers
from lab import leftovers
from lab import node as nodes
from lab import rest
from lab import user as users

# Seconds
PATIENCE = 240
PAUSE = (1, 8)
POLL = 1

# Of a volume that Cinder migrates
MIGRATING = ('starting', 'migrating', 'completing')
# Of a move that ends when the volume's snapshots are gone
KEPT = 'keeping'


class Stuck(Exception):
    """Something does not become what it should, and nothing excuses it."""


class Actor(abc.ABC):
    """One who acts until the run is over, and then leaves nothing."""

    # What may fail, because of a fault or of a refusal
    EXPECTED: tuple[type[Exception], ...] = (
        exceptions.ClientException, errors.LabError, users.VolumeError,
        instances.InstanceError)

    def __init__(self, name: str, cloud: clouds.Cloud, seed: int,
                 volume_type: str, journal: journals.Journal) -> None:
        self.name = name
        self._cloud = cloud
        self._user = users.User(cloud)
        self._nodes = cloud.nodes
        self._random = random.Random('%d %s' % (seed, name))
        self._type = volume_type
        self._journal = journal
        self._count = 0
        self._rest = rest.Rest(name, self._user, journal)
        # Whether the cloud may have something of ours that we don't know
        self._unsure = False
        # Whether there may be volumes or snapshots that nobody wants
        self._untidy = False

    def play(self) -> None:
        """Act until the run is over."""
        with self._caught():
            while not self._journal.over.wait(
                    self._random.uniform(*PAUSE)):
                self._turn()

    def finish(self) -> None:
        """Wait until all is well, verify, and remove what is there."""
        with self._caught():
            self._settle()
            self._end()

    @property
    @abc.abstractmethod
    def subject(self) -> str:
        """What all that he does is about, in words."""

    def _turn(self) -> None:
        """One decision.

        It takes the same numbers of the generator whatever the cloud has
        answered, so that the same seed decides the same again.
        """
        dice, second = self._random.random(), self._random.random()
        node = self._random.choice(self._nodes)
        if self._unsure or self._untidy:
            self._clear_up()
        if not self._unsure:
            self._decide(dice, second, node)

    @abc.abstractmethod
    def _decide(self, dice: float, second: float, node: nodes.Node) -> None:
        """Act, now that it is known what there is.

        :param dice: says what to do
        :param second: says how
        :param node: one of the nodes
        """

    @abc.abstractmethod
    def _settle(self) -> None:
        """Wait until what he has is well.

        :raises Stuck: it does not become so
        """

    @abc.abstractmethod
    def _end(self) -> None:
        """Verify and remove what he has.

        :raises Stuck: something fails
        """

    def _is_refused(self, what: str, text: str) -> bool:
        """Whether the cloud is right not to do it.

        :param text: what it has said
        """
        return False

    @abc.abstractmethod
    def _wanted(self) -> Collection[str]:
        """Ids of the volumes and snapshots that he has and wants."""

    @abc.abstractmethod
    def _is_clear(self) -> bool:
        """Find out what has become of what he has, and mend it.

        :returns: whether it is as he wants it
        :raises Stuck: it is as it must not be
        """

    def _remove_rest(self) -> bool:
        """Whether there is nothing with his name that he does not want."""
        return self._rest.remove(self._wanted())

    def _clear_up(self) -> None:
        """Find out what there is, and undo what nobody wants.

        :raises Stuck: that fails, and nothing excuses it
        """
        self._journal.under_way[self.name] = 'clear up'
        start = time.monotonic()
        try:
            self._untidy = not self._remove_rest()
            if self._unsure:
                self._unsure = not self._is_clear()
        except self.EXPECTED as error:
            self._journal.note(self.name, 'clear up: not yet: %s' % ' '.join(
                str(error).split()))
            if not self._journal.disturbed(start):
                raise Stuck('%s can not be cleared up: %s' % (
                    self.subject, error)) from error
        finally:
            self._journal.under_way.pop(self.name, None)

    @contextlib.contextmanager
    def _caught(self) -> Iterator[None]:
        try:
            yield
        except (Stuck, rest.RestError, ledgers.StampError) as error:
            self._journal.fail('%s: %s' % (self.name, error))
        except Exception:
            self._journal.fail('%s, %s: %s' % (
                self.name, self.subject, traceback.format_exc()))
        finally:
            self._journal.under_way.pop(self.name, None)

    def _act(self, what: str, action: Callable[[], None]) -> bool:
        """Do something; whether it was done.

        :raises Stuck: it failed and nothing excuses it
        """
        self._journal.under_way[self.name] = what
        start = time.monotonic()
        self._journal.note(self.name, what + ' ...')
        try:
            action()
        except self.EXPECTED as error:
            self._failed(what, error, start)
            return False
        finally:
            self._journal.under_way.pop(self.name, None)
        self._journal.count(what.partition(' ')[0])
        self._journal.note(self.name, '%s: done (%.1f s)' % (
            what, time.monotonic() - start))
        return True

    def _must(self, what: str, action: Callable[[], None]) -> None:
        if not self._act(what, action):
            raise Stuck('%s of %s failed at the end' % (what, self.subject))

    def _failed(self, what: str, error: Exception, start: float) -> None:
        self._unsure = self._untidy = True
        text = ' '.join(str(error).split())
        if isinstance(error, exceptions.HttpError) and (
                error.response is not None):
            # keystoneauth does not know the form of Cinder's errors.
            text = 'HTTP %s %s' % (error.http_status, error.response.text)
        if self._is_refused(what, text):
            kind = 'refused'
        elif self._journal.disturbed(start):
            kind = 'failed under a fault'
        else:
            raise Stuck('%s of %s failed without a fault: %s' % (
                what, self.subject, text))
        self._journal.count(kind)
        self._journal.note(self.name, '%s: %s: %s' % (what, kind, text))

    def _new_name(self) -> str:
        self._count += 1
        return '%s-%d' % (self.name, self._count)

    def _moves(self, volumes: Collection[str]) -> bool:
        """Whether one of the volumes moves, and will end to."""
        found = leftovers.moves(self._cloud)
        return any(state != KEPT for volume in volumes
                   for state in found.get(volume, ()))

    def _wait_for_moves(self, volumes: Collection[str]) -> None:
        """:raises Stuck: a move does not end"""
        self._journal.under_way[self.name] = 'waits for moves to end'
        end = time.monotonic() + 3 * PATIENCE
        while self._moves(volumes):
            if time.monotonic() > end:
                raise Stuck('%s: a move does not end' % self.subject)
            time.sleep(2 * POLL)

    @staticmethod
    def _wait_for(what: str, status: str | None,
                  look: Callable[[], str | None]) -> None:
        """Wait until something has a status, None: until it is gone.

        :raises VolumeError: it has another one that will stay
        """
        start = time.monotonic()
        while (found := look()) != status:
            if found is None or 'error' in found:
                raise users.VolumeError('%s is %s, not %s' % (
                    what, found, status))
            if time.monotonic() > start + (
                    PATIENCE if found.endswith('ing') else POLL):
                raise users.VolumeError('%s stays %s' % (what, found))
            time.sleep(POLL)
