# SPDX-License-Identifier: Apache-2.0
"""A user of volumes in a chaos run, with instances that are ids.

He has one volume at a time, and one guest at most writes it: a guest has ended
before the volume is used on another node.  Now and then he takes a snapshot,
goes on with a copy and deletes what it was made of, or reverts.
"""

import dataclasses
import time
import uuid

from keystoneauth1 import exceptions

from lab import actor
from lab import cloud as clouds
from lab import configuration
from lab import guest as guests
from lab import journal as journals
from lab import ledger as ledgers
from lab import leftovers
from lab import node as nodes
from lab import sizes
from lab import user as users

# GiB
LARGEST = 3

# What the cloud may refuse with a sentence, and be right.
REFUSALS = ('may yet go back', 'is being extended', 'Attach it again',
            'Free some space')
# The API does not pass on why these are refused.
MUTE = ('extend', 'delete', 'migrate', 'revert')
# Nor does it of these why its scheduler finds no place for them.
SCHEDULED = ('snapshot', 'clone', 'restore')
# GiB that a snapshot of a thick volume takes beside its size, at most
TABLES = 0.1
# What a service that comes back does not leave so
SETTLED_BY_THE_DRIVER = ('extending', 'retyping', 'reverting')
UNDECIDED = ('preparing', 'starting', 'aborting', 'discarding')


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A snapshot of the volume, and what it must hold.

    :ivar size: GiB
    """

    id: str
    ledger: ledgers.Ledger
    size: int


class Player(actor.Actor):
    """One user with his volume, his instance and his decisions."""

    def __init__(self, name: str, cloud: clouds.Cloud, seed: int,
                 volume_type: str, journal: journals.Journal,
                 rate: float) -> None:
        super().__init__(name, cloud, seed, volume_type, journal)
        self._rate = rate
        self._instance = str(uuid.uuid4())
        self.volume = ''
        self._size = 0
        self._ledger: ledgers.Ledger
        self._snapshot: Snapshot | None = None
        self._attachment: users.Attachment | None = None
        # The other one of a live migration that is under way
        self._second: users.Attachment | None = None
        self._guest: guests.Guest | None = None
        # The copy that the volume had when it was to be reverted, until it is
        # known what has come of that
        self._reverted_from: str | None = None
        self._waits_since = 0.0
        # Since when the volume has a status that must end by itself
        self._passing_since = 0.0

    @property
    def subject(self) -> str:
        """His volume."""
        return 'volume %s' % self.volume

    # -- Turns --------------------------------------------------------------

    def _decide(self, dice: float, second: float, node: nodes.Node) -> None:
        if not self.volume:
            self._act('create', self._create)
        elif self._attachment is None:
            self._use(dice, second, node)
        elif self._guest is None or not self._guest.alive:
            self._revive(dice)
        elif dice < 0.20:
            self._act('detach', self._detach)
        elif dice < 0.40:
            self._act('move to ' + node.name, lambda: self._move(node))
        elif dice < 0.65:
            self._migrate(node, second)
        elif dice < 0.75:
            self._act('extend', self._extend)
        elif dice < 0.90:
            self._copy(second)

    def _use(self, dice: float, second: float, node: nodes.Node) -> None:
        if dice < 0.60:
            self._act('attach on ' + node.name, lambda: self._attach(node))
        elif dice < 0.70:
            self._act('extend', self._extend)
        elif dice < 0.80:
            self._copy(second)
        elif dice < 0.90:
            self._change(node)
        else:
            self._act('delete', self._delete)

    def _copy(self, dice: float) -> None:
        """Take a snapshot, go on with a copy, or revert."""
        if dice < 0.4:
            self._act('clone', self._go_on_with_a_clone)
        elif self._snapshot is None:
            self._act('snapshot', self._take_snapshot)
        elif dice < 0.7:
            self._act('restore', self._go_on_with_the_snapshot)
        elif dice < 0.9 and self._snapshot.size == self._size:
            self._act('revert', self._revert)
        else:
            self._act('forget', self._forget_snapshot)

    def _change(self, node: nodes.Node) -> None:
        """Let a volume that nobody uses be elsewhere, or as it was."""
        if self._snapshot is None:
            self._act('migrate to ' + node.name,
                      lambda: self._migrate_unused(node))
        elif self._snapshot.size == self._size:
            self._act('revert', self._revert)

    def _revive(self, dice: float) -> None:
        """After the death of the guest, most likely with its node."""
        self._guest = None
        if dice < 0.3:
            self._act('force detach', self._force_detach)
        else:
            self._act('start the guest again', self._start_guest)

    def _is_refused(self, what: str, text: str) -> bool:
        return any(words in text for words in REFUSALS) or (
            what.split()[0] in MUTE and self._is_undecided()) or (
            what in SCHEDULED and self._lacks_room(what))

    def _lacks_room(self, what: str) -> bool:
        """Whether no node has room for a copy of the volume."""
        places = ([self._user.host(self.volume)] if what == 'snapshot'
                  else [node.name for node in self._nodes])
        rooms = self._user.rooms()
        return all(rooms.get(configuration.pool(place, self._type), 0)
                   < self._size + TABLES for place in places)

    def _is_undecided(self) -> bool:
        """Whether it is open what becomes of a move of the volume."""
        return any(state in UNDECIDED for state in
                   leftovers.moves(self._cloud).get(self.volume, ()))

    # -- Actions ------------------------------------------------------------

    def _create(self) -> None:
        name = self._new_name()
        try:
            self.volume = self._user.request_volume(name, 1, self._type)
        except exceptions.ClientException:
            self.volume = self._find(name)
            raise
        self._size = 1
        self._ledger = ledgers.Ledger(self.volume, self._size * sizes.GIB)
        self._wait('available')

    def _find(self, name: str) -> str:
        """Id of a volume whose creation was not answered; '' if none is."""
        self._size = 1
        for row in self._user.volumes():
            if row['name'] == name:
                self._ledger = ledgers.Ledger(row['id'], sizes.GIB)
                return row['id']
        return ''

    def _attach(self, node: nodes.Node) -> None:
        attachment = self._user.attach(self.volume, node, self._instance)
        if attachment.connection.get('driver_volume_type') != 'local':
            raise actor.Stuck('volume %s is not local on %s: %s' % (
                self.volume, node.name,
                attachment.connection.get('driver_volume_type')))
        self._attachment = attachment
        self._start_guest()

    def _start_guest(self) -> None:
        attachment = self._attachment
        assert attachment is not None and attachment.node is not None
        node = attachment.node
        if not self._waits_since:
            self._waits_since = time.monotonic()
        if node.run(['test', '-b', attachment.device],
                    check=False).returncode:
            if (not self._journal.disturbed(self._waits_since)
                    and time.monotonic() > self._waits_since + actor.PATIENCE):
                raise actor.Stuck('%s does not come back on %s' % (
                    attachment.device, node.name))
            raise users.VolumeError('there is no %s yet' % attachment.device)
        self._waits_since = 0.0
        self._guest = guests.Guest(self._cloud, node, attachment.device,
                                   self.volume, self._ledger, self._journal,
                                   self._rate)

    def _stop_guest(self, timeout: float = 60) -> None:
        """:raises VolumeError: it hangs in the kernel; nothing may be done
            with the volume yet
        """
        if self._guest is None:
            return
        if not self._guest.stop(timeout):
            raise users.VolumeError('the guest on %s does not stop'
                                    % self._guest.node.name)
        self._guest = None

    def _detach(self) -> None:
        self._stop_guest()
        attachment, self._attachment = self._attachment, None
        self._user.detach(attachment)

    def _force_detach(self) -> None:
        attachment, self._attachment = self._attachment, None
        self._user.force_detach(attachment)

    def _move(self, node: nodes.Node) -> None:
        self._detach()
        self._attach(node)

    def _migrate(self, node: nodes.Node, dice: float) -> None:
        assert self._attachment is not None
        if node.name == self._attachment.node.name:
            return
        what = 'live-migrate to %s%s' % (
            node.name, '' if dice < 0.7 else ' and back')
        self._act(what, lambda: self._live_migrate(node, dice < 0.7))

    def _live_migrate(self, node: nodes.Node, there: bool) -> None:
        self._second = self._user.attach_second(self._attachment, node)
        # As a probe of udev would, before the switch-over
        for how in ('buffered', 'direct'):
            guests.peek(node, self._second.device, self._ledger, how, 60)
        if there:
            self._stop_guest()
            self._user.complete(self._second.id)
            first, self._attachment = self._attachment, self._second
            self._second = None
            self._start_guest()
            self._guest.verified.wait(30)
        else:
            first, self._second = self._second, None
        self._user.detach(first)

    def _extend(self) -> None:
        if self._size >= LARGEST:
            return
        self._user.extend(self.volume, self._size + 1)
        self._wait('in-use' if self._attachment else 'available')
        volume = self._user.find(self.volume)
        if volume is None or volume['size'] != self._size + 1:
            # A service that came back has taken it back.
            raise users.VolumeError('volume %s has not grown' % self.volume)
        self._grow(self._size + 1)

    def _grow(self, size: int) -> None:
        self._size = size
        if self._guest is not None and self._guest.alive:
            self._guest.grow(size * 256)
        else:
            self._ledger.clusters = size * 256

    def _take_snapshot(self) -> None:
        ledger = self._ledger.fork()
        taken = self._user.request_snapshot(self.volume, self._new_name())
        self._wait_for('snapshot %s' % taken, 'available',
                       lambda: self._user.snapshots().get(taken))
        self._snapshot = Snapshot(taken, ledger, self._size)

    def _forget_snapshot(self) -> None:
        assert self._snapshot is not None
        forgotten, self._snapshot = self._snapshot, None
        self._user.request_snapshot_deletion(forgotten.id)
        self._wait_for('snapshot %s' % forgotten.id, None,
                       lambda: self._user.snapshots().get(forgotten.id))

    def _go_on_with_a_clone(self) -> None:
        self._go_on(self._ledger.fork(), self._size,
                    source_volid=self.volume)

    def _go_on_with_the_snapshot(self) -> None:
        assert self._snapshot is not None
        self._go_on(self._snapshot.ledger.fork(), self._snapshot.size,
                    snapshot_id=self._snapshot.id)

    def _go_on(self, ledger: ledgers.Ledger, size: int, **source: str
               ) -> None:
        """Use a copy from now on, which may well arrive for a while; what
        it is made of is deleted meanwhile.
        """
        copy = self._user.request_volume(self._new_name(), size, self._type,
                                         **source)
        self._wait_for('volume %s' % copy, 'available',
                       lambda: self._user.status(copy))
        if self._attachment:
            self._detach()
        self.volume, self._size, self._ledger = copy, size, ledger
        self._snapshot = None
        self._untidy = not self._remove_rest()

    def _wanted(self) -> set[str]:
        return {self.volume, self._snapshot.id if self._snapshot else ''}

    def _migrate_unused(self, node: nodes.Node) -> None:
        if self._user.host(self.volume) == node.name:
            return
        self._user.migrate(self.volume, configuration.pool(node.name,
                                                           self._type))
        self._wait_for(
            'migration of volume %s' % self.volume, 'success',
            lambda: self._user.show(self.volume)['migration_status'])
        self._wait('available')

    def _revert(self) -> None:
        assert self._snapshot is not None
        if self._attachment:
            self._detach()
        self._reverted_from = self._user.copy_of(self.volume)
        self._user.revert(self.volume, self._snapshot.id)
        self._wait('available')
        if not self._is_reverted():
            raise users.VolumeError(
                'volume %s is as it was: %s' % (self.volume, self._reason()))

    def _reason(self) -> str:
        """Why the volume was not reverted, as its node has logged it: users
        are told no more than that it could not be.
        """
        host = self._user.host(self.volume)
        node = next(node for node in self._nodes if node.name == host)
        lines = node.service('cinder-volume').log.read_text(
            errors='replace').splitlines()
        return next((line for line in reversed(lines)
                     if self.volume + ' could not be reverted' in line), '')

    def _is_reverted(self) -> bool:
        """Find out what a volume is that was to be reverted: it gets another
        copy, or is as it was.
        """
        before = self._reverted_from
        reverted = before is not None and (
            before != self._user.copy_of(self.volume))
        self._reverted_from = None
        if reverted:
            assert self._snapshot is not None
            self._ledger = self._snapshot.ledger.fork()
        return reverted

    def _delete(self) -> None:
        if self._snapshot:
            self._forget_snapshot()
        self._user.request_deletion(self.volume)
        self._wait(None)

    def _wait(self, status: str | None) -> None:
        """Wait for a status, None: until the volume is gone."""
        self._wait_for('volume %s' % self.volume, status,
                       lambda: self._user.status(self.volume))
        if status is None:
            self.volume = ''

    # -- After a failure ----------------------------------------------------

    def _is_clear(self) -> bool:
        if not self.volume:
            return True
        volume = self._user.find(self.volume)
        if volume is None:
            self._gone()
            return True
        if self._second is not None:
            # A live migration that was broken off: the guest stays.
            self._second = None
        kept = {self._attachment.id} if self._attachment else set()
        there = set(self._user.attachments(self.volume))
        for unwanted in there - kept:
            self._journal.note(self.name, 'removes attachment ' + unwanted)
            self._user.remove_attachment(unwanted)
        if kept - there:
            raise actor.Stuck('attachment %s of volume %s is gone' % (
                kept, self.volume))
        return self._is_well(volume)

    def _gone(self) -> None:
        if self._attachment is not None or self._ledger.acknowledged:
            self._journal.note(self.name, 'volume is gone')
        self.volume = ''
        self._attachment = self._snapshot = self._reverted_from = None

    def _is_well(self, volume: dict) -> bool:
        """Whether the volume's status is one of rest; mends it if not."""
        status, size = volume['status'], volume['size']
        wanted = 'in-use' if self._attachment else 'available'
        migrates = volume['migration_status'] in actor.MIGRATING
        if status == wanted and not migrates:
            self._passing_since = 0.0
            self._is_reverted()
            if size != self._size:
                self._grow(size)
            return True
        self._journal.note(self.name, 'volume %s is %s' % (
            self.volume, status))
        if status in ('error', 'error_deleting'):
            # It never came to be, or its deletion was broken off.
            self._user.reset(self.volume, 'available')
            self._act('delete', self._delete)
            return not self.volume
        if status in ('error_extending', 'available', 'in-use') and (
                not migrates):
            self._journal.count('mended by hand')
            self._user.reset(self.volume, wanted)
            return False
        # On its way somewhere
        if not self._passing_since:
            self._passing_since = time.monotonic()
        if time.monotonic() > self._passing_since + actor.PATIENCE:
            if not self._journal.disturbed(self._passing_since):
                raise actor.Stuck('volume %s stays %s' % (self.volume, status))
            if status not in SETTLED_BY_THE_DRIVER:
                self._journal.count('mended by hand')
                self._user.reset(
                    self.volume, 'error' if status in ('creating', 'deleting')
                    else wanted, migration_status='none')
            self._passing_since = 0.0
        return False

    # -- The end ------------------------------------------------------------

    def _settle(self) -> None:
        """Until the volume is well and used by a guest, or not at all."""
        start = time.monotonic()
        while self._unsure or self._untidy or (
                self._attachment is not None and (
                    self._guest is None or not self._guest.alive)):
            if time.monotonic() > start + 2 * actor.PATIENCE:
                raise actor.Stuck('volume %s does not settle' % self.volume)
            if self._unsure or self._untidy:
                self._clear_up()
            else:
                self._guest = None
                self._act('start the guest again', self._start_guest)
            time.sleep(2 * actor.POLL)

    def _end(self) -> None:
        if not self.volume:
            return
        self._arrive()
        end = time.monotonic() + 3 * actor.PATIENCE
        while self._attachment is None:
            if time.monotonic() > end:
                raise actor.Stuck('volume %s can not be attached'
                                  % self.volume)
            node = self._random.choice(self._nodes)
            self._act('attach on ' + node.name, lambda: self._attach(node))
            self._settle()
        self._arrive()
        self._must('verify', self._verify)
        self._must('detach', self._detach)
        self._must('delete', self._delete)

    def _arrive(self) -> None:
        # dm-clone hardly goes on while a guest writes.
        self._must('stop the guest', lambda: self._stop_guest(actor.PATIENCE))
        self._wait_for_moves([self.volume])

    def _verify(self) -> None:
        """A last life, in which all is read once more."""
        self._start_guest()
        if not self._guest.verified.wait(actor.PATIENCE):
            raise actor.Stuck('volume %s can not be read' % self.volume)
        self._stop_guest(actor.PATIENCE)
