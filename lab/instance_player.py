# SPDX-License-Identifier: Apache-2.0
"""A user of instances in a chaos run, which real Nova runs.

He has one instance, which boots from a volume and may have some more.  Its
guest (``lab/guest``) judges its disks, and what it says is remembered here
(:mod:`lab.witness`).  Nova is not what is judged: where it gives up, its
administrator takes the instance out of ERROR and gives it power again; then
its guest must find what it had written.
"""

from collections.abc import Callable
from collections.abc import Collection
import time
from typing import Any

from keystoneauth1 import exceptions

from lab import actor
from lab import cloud as clouds
from lab import errors
from lab import instances
from lab import journal as journals
from lab import node as nodes
from lab import user as users
from lab import witness

# Seconds after a fault in which Nova may not have come to terms with it
AFTERMATH = 300
# Seconds in which an administrator waits for what is under way
PATIENCE = 300
# GiB
LARGEST = 2
# Volumes beside the one that the instance boots from
MOST = 2
# What Nova's API says of a volume that an instance has, or is about to get
_IS_RESERVED = 'is already attached to instances'
# What a volume is that Cinder lets the instance reserve anew that has it: none
# that was being attached when Nova or Cinder died
_CAN_BE_RESERVED = ('in-use', 'reserved')
# What brings an instance back from a status that it has come to
REMEDIES: dict[str, tuple[str, Any]] = {
    'SHUTOFF': ('os-start', None),
    'PAUSED': ('unpause', None),
    'SUSPENDED': ('resume', None),
    'SHELVED': ('unshelve', None),
    'SHELVED_OFFLOADED': ('unshelve', None),
    'VERIFY_RESIZE': ('confirmResize', None),
    'ERROR': ('os-resetState', {'state': 'active'}),
}


class _Idle(Exception):
    """There is nothing to do."""


class InstancePlayer(actor.Actor):
    """One user with his instance, its volumes and his decisions."""

    def __init__(self, name: str, cloud: clouds.Cloud, seed: int,
                 volume_type: str, journal: journals.Journal) -> None:
        super().__init__(name, cloud, seed, volume_type, journal)
        self._instance: instances.Instance | None = None
        self._root = ''
        # Whether its guest has ever lived
        self._born = False
        # Attached or not: Nova knows
        self._data: list[str] = []
        # Whether another instance is to boot from its root disk
        self._begins_anew = False
        self._witness = witness.Witness()
        # Whether the root disk may get the image's content at any time
        self._reimaging = False
        # Since when something is under way that must end: by the id of the
        # instance or volume
        self._busy_since: dict[str, float] = {}

    @property
    def subject(self) -> str:
        """His instance."""
        return 'instance %s with %s' % (
            self._instance.id if self._instance else 'none',
            ', '.join(self._volumes()) or 'no volume')

    def _volumes(self) -> list[str]:
        return [self._root, *self._data] if self._root else self._data

    def _wanted(self) -> Collection[str]:
        return self._volumes()

    @property
    def _running(self) -> instances.Instance:
        """His instance, where there is one."""
        assert self._instance is not None
        return self._instance

    # -- Turns --------------------------------------------------------------

    def _decide(self, dice: float, second: float, node: nodes.Node) -> None:
        if self._instance is None:
            self._act('boot on ' + node.name, lambda: self._boot(node))
            return
        what, action = self._choose(dice, second, node)
        try:
            done = self._act(what, action)
        except _Idle:
            return
        if done and self._instance is not None:
            self._act('live on', self._live_on)

    def _choose(self, dice: float, second: float, node: nodes.Node
                ) -> tuple[str, Callable[[], None]]:
        to = ' to ' + node.name
        choices: list[tuple[float, str, Callable[[], None]]] = [
            (0.28, 'live-migrate' + to, lambda: self._live_migrate(node)),
            (0.36, 'abort a live migration' + to,
             lambda: self._abort_live_migration(node, 20 * second)),
            (0.46, 'cold-migrate' + to,
             lambda: self._cold_migrate(node, second < 0.5)),
            (0.60, 'attach one of ' + node.name, lambda: self._attach(node)),
            (0.68, 'detach', lambda: self._detach(second < 0.5)),
            (0.73, 'reboot', lambda: self._running.reboot()),
            (0.78, 'stop and start', self._stop_and_start),
            (0.83, 'shelve and unshelve' + to, lambda: self._shelve(node)),
            (0.88, 'rebuild', self._rebuild),
            (0.92, 'extend', self._extend),
            (0.96, 'evacuate' + to, lambda: self._evacuate(node)),
            (1.00, 'delete', self._delete),
        ]
        return next((what, action) for bound, what, action in choices
                    if dice < bound)

    def _is_refused(self, what: str, text: str) -> bool:
        return _IS_RESERVED in text

    # -- What the guest says ------------------------------------------------

    def _listen(self) -> None:
        """:raises StampError: a volume is not what it must be"""
        if self._instance is None:
            return
        try:
            place = self._instance.node.name
            reports = self._instance.reports()
        except (errors.LabError, exceptions.ClientException):
            # Its node is away, or the API.
            return
        self._born = self._born or bool(reports)
        self._journal.count('reports', self._witness.hear(
            '%s on %s' % (self._instance.id, place), reports))
        if self._reimaging:
            self._witness.forget(self._root)

    def _live_on(self) -> None:
        """Its guest writes on all its disks."""
        try:
            if self._running.go_on():
                self._journal.count('panics of memory')
        finally:
            self._listen()

    # -- Actions ------------------------------------------------------------

    def _boot(self, node: nodes.Node) -> None:
        name = self._new_name()
        self._root = self._user.request_volume(
            name, 1, self._type, image=instances.image(self._cloud))
        self._wait_for('volume %s' % self._root, 'available',
                       lambda: self._user.status(self._root))
        self._instance = instances.request(self._cloud, name, self._root,
                                           node)
        self._born = False
        self._running.wait_for('ACTIVE')
        self._live_on()

    def _live_migrate(self, node: nodes.Node) -> None:
        self._only_to_another(node)
        self._running.live_migrate(node)

    def _only_to_another(self, node: nodes.Node) -> None:
        if self._running.node.name == node.name:
            raise _Idle

    def _abort_live_migration(self, node: nodes.Node, delay: float) -> None:
        self._only_to_another(node)
        instance = self._running
        instance.act('os-migrateLive', {'host': node.name,
                                        'block_migration': 'auto'})
        time.sleep(delay)
        try:
            instance.give_up_live_migration()
        except exceptions.ClientException:
            # It was over when it was to be given up.
            pass
        instance.wait_for('ACTIVE')

    def _cold_migrate(self, node: nodes.Node, there: bool) -> None:
        self._only_to_another(node)
        instance = self._running
        instance.act('migrate', {'host': node.name})
        instance.wait_for('VERIFY_RESIZE')
        self._listen()
        instance.act('confirmResize' if there else 'revertResize')
        instance.wait_for('ACTIVE')

    def _attach(self, node: nodes.Node) -> None:
        instance = self._running
        spare = set(self._data) - set(instance.volumes())
        if spare:
            volume = min(spare)
        elif len(self._data) < MOST:
            volume = self._user.request_volume(
                self._new_name(), 1, self._type, node.name)
            self._data.append(volume)
            self._wait_for('volume %s' % volume, 'available',
                           lambda: self._user.status(volume))
        else:
            raise _Idle
        self._plug_in(volume)

    def _plug_in(self, volume: str) -> None:
        try:
            self._running.attach(volume)
        except exceptions.BadRequest as error:
            if self._is_refused('attach', error.response.text):
                # Nova's API had given up when nova-compute, back again, noted
                # the disk. It is no attachment, so nobody can detach it.
                self._give_up_instance()
            raise

    def _detach(self, delete: bool) -> None:
        instance = self._running
        attached = sorted(set(self._data) & set(instance.volumes()))
        if not attached:
            raise _Idle
        instance.detach(attached[0])
        self._wait_for('volume %s' % attached[0], 'available',
                       lambda: self._user.status(attached[0]))
        if delete:
            self._data.remove(attached[0])
            self._untidy = True

    def _stop_and_start(self) -> None:
        self._stop()
        self._start()

    def _stop(self) -> None:
        self._running.act('os-stop')
        self._running.wait_for('SHUTOFF')

    def _start(self) -> None:
        self._running.act('os-start')
        self._running.wait_for('ACTIVE')

    def _shelve(self, node: nodes.Node) -> None:
        self._running.act('shelve')
        self._running.wait_for('SHELVED_OFFLOADED')
        self._running.act('unshelve', {'host': node.name}, version='2.91')
        self._running.wait_for('ACTIVE')

    def _rebuild(self) -> None:
        self._reimaging = True
        # What it had is judged for the last time.
        self._listen()
        self._running.act('rebuild', {
            'imageRef': instances.image(self._cloud)}, version='2.93')
        self._running.wait_for('ACTIVE')
        self._listen()
        self._reimaging = False

    def _extend(self) -> None:
        instance = self._running
        volume = self._root
        size = self._user.show(volume)['size']
        if size >= LARGEST:
            raise _Idle
        self._user.extend(volume, size + 1)
        self._wait_for('volume %s' % volume, 'in-use',
                       lambda: self._user.status(volume))
        if self._user.show(volume)['size'] != size + 1:
            # A service that came back has taken it back.
            raise users.VolumeError('volume %s has not grown' % volume)
        instance.wait_for('ACTIVE')

    def _evacuate(self, node: nodes.Node) -> None:
        """The power of its node fails, and Nova is told to go on elsewhere."""
        self._only_to_another(node)
        home = self._running.node
        if not self._journal.breaking.acquire(blocking=False):
            raise _Idle
        try:
            with self._journal.fault('evacuation from ' + home.name):
                home.kill()
                instances.declare_down(self._cloud, home)
                try:
                    self._running.evacuate(node)
                    self._running.wait_for('ACTIVE')
                finally:
                    self._bring_back(home)
        finally:
            self._journal.breaking.release()

    def _bring_back(self, node: nodes.Node) -> None:
        node.start()
        instances.declare_down(self._cloud, node, False)
        self._cloud.wait_for_backends([node])

    def _delete(self) -> None:
        self._running.delete()
        self._instance, self._root = None, ''
        self._untidy = True

    # -- After a failure ----------------------------------------------------

    def _is_clear(self) -> bool:
        self._listen()
        self._delete_unknown()
        if self._instance is not None and self._instance.status is None:
            self._instance = None
        if self._instance is None and self._begins_anew:
            self._begin_anew()
            return False
        if self._instance is None:
            self._root = ''
        elif not self._is_up(self._instance.show()):
            return False
        # Each is to be looked at.
        if not all([self._is_well(volume) for volume in self._volumes()]):
            return False
        self._reimaging = False
        return True

    def _delete_unknown(self) -> None:
        """Delete instances whose creation was not answered."""
        for identity in instances.named(self._cloud, self.name + '-'):
            if self._instance is None or identity != self._instance.id:
                self._journal.note(self.name, 'deletes instance ' + identity)
                instances.Instance(self._cloud, identity).delete()

    def _is_up(self, shown: dict[str, Any]) -> bool:
        """Whether the instance is active and its guest lives; does what an
        administrator does where it is not.
        """
        status, task = shown['status'], shown['OS-EXT-STS:task_state']
        if status == 'ERROR' and not self._born:
            self._running.delete()
            return False
        is_nowhere = shown['OS-EXT-SRV-ATTR:host'] is None
        if status == 'ERROR' and is_nowhere:
            # It could not be unshelved, and Nova lets nobody try it again.
            self._give_up_instance()
            return False
        if task or status not in ('ACTIVE', *REMEDIES):
            if self._is_overdue(self._running.id, '%s (%s)' % (status, task)):
                if not self._born:
                    # The message to build it is lost with its node: it has
                    # none, and would not get one.
                    self._running.delete()
                elif is_nowhere:
                    # The message to unshelve it is: it would be ACTIVE, and
                    # on no node.
                    self._give_up_instance()
                else:
                    self._running.act(*REMEDIES['ERROR'])
            return False
        self._busy_since.pop(self._running.id, None)
        if strays := self._strays(status):
            self._bring(strays)
            return False
        if status != 'ACTIVE':
            self._journal.note(self.name, 'instance is ' + status)
            self._journal.count('mended by hand')
            self._running.act(*REMEDIES[status])
            if status != 'ERROR':
                return False
        return self._lives(again=status == 'ERROR')

    def _give_up_instance(self) -> None:
        """Let another instance have the root disk."""
        self._journal.note(self.name, 'begins anew with ' + self._root)
        self._journal.count('mended by hand')
        self._begins_anew = True
        self._running.delete()

    def _begin_anew(self) -> None:
        """Boot another instance from the root disk of one that is deleted."""
        if not all([self._is_well(volume) for volume in self._volumes()]):
            return
        self._instance = instances.request(self._cloud, self._new_name(),
                                           self._root)
        self._begins_anew = False

    def _strays(self, status: str) -> list[str]:
        """Volumes that Nova has noted as attached on another node, or on
        none, while their instance does not run: it can't start then.
        """
        instance = self._running
        if status not in ('ACTIVE', 'ERROR', 'SHUTOFF') or instance.runs:
            return []
        home = instance.node.name
        return [volume for volume, attachment in instance.attachments().items()
                if self._user.attachment_hosts(volume).get(attachment) != home]

    def _bring(self, volumes: list[str]) -> None:
        """Bring volumes to where Nova has their instance, as its
        administrator does, who makes sure that it runs nowhere else.
        """
        instance = self._running
        self._journal.note(self.name, 'fetches ' + ', '.join(volumes))
        self._journal.count('mended by hand')
        instance.end_elsewhere()
        if instance.status != 'SHUTOFF':
            instance.act(*REMEDIES['ERROR'])
            self._stop()
        for volume, attachment in instance.attachments().items():
            self._has_only(volume, attachment)
        for volume in volumes:
            if self._user.status(volume) not in _CAN_BE_RESERVED:
                self._user.reset(volume, 'in-use')
        instance.attach_anew(volumes)

    def _is_overdue(self, identity: str, what: str) -> bool:
        """Whether it is time to do something about what does not end.

        :param identity: of the instance or volume
        :raises Stuck: it does not end though nothing disturbs it
        """
        since = self._busy_since.setdefault(identity, time.monotonic())
        if time.monotonic() < since + PATIENCE:
            return False
        if not self._journal.disturbed(since - AFTERMATH):
            raise actor.Stuck('%s: %s stays %s' % (
                self.subject, identity, what))
        self._journal.note(self.name, '%s stays %s' % (identity, what))
        self._journal.count('mended by hand')
        del self._busy_since[identity]
        return True

    def _lives(self, again: bool) -> bool:
        """Whether the guest lives, after a new start if that is needed."""
        try:
            if again or not self._running.runs:
                self._running.reboot()
            self._live_on()
        except instances.InstanceError as error:
            self._journal.note(self.name, 'does not live: %s' % (
                ' '.join(str(error).split())))
            self._listen()
            self._journal.count('mended by hand')
            self._running.act('reboot', {'type': 'HARD'})
            return False
        return True

    def _is_well(self, volume: str) -> bool:
        """Whether a volume is as Nova has it; mends it if not."""
        found = self._user.find(volume)
        if found is None:
            raise actor.Stuck('volume %s is gone' % volume)
        of_nova = (self._running.attachments() if self._instance else {}
                   ).get(volume)
        if not self._has_only(volume, of_nova):
            # A detachment of which Nova has not seen the end
            self._running.detach(volume)
            return False
        status = found['status']
        wanted = 'in-use' if of_nova else 'available'
        if status == wanted and (
                found['migration_status'] not in actor.MIGRATING):
            self._busy_since.pop(volume, None)
            return True
        self._journal.note(self.name, 'volume %s is %s' % (volume, status))
        if status.startswith('error') and not of_nova and (
                not self._witness.stamps(volume)):
            # It never came to be.
            self._data.remove(volume)
            return True
        if status.startswith('error'):
            self._journal.count('mended by hand')
            self._user.reset(volume, wanted)
        elif self._is_overdue(volume, status):
            if of_nova and status == 'reserved':
                # A rebuild that was broken off has made it anew.
                self._user.locate(of_nova, self._running.node)
            else:
                # Nobody makes it: who was to is dead.
                self._user.reset(
                    volume, 'error' if status == 'creating' else wanted)
        return False

    def _has_only(self, volume: str, wanted: str | None) -> bool:
        """Whether a volume has no attachment but this one; removes others,
        which nobody knows any more.
        """
        there = set(self._user.attachments(volume))
        for unwanted in there - {wanted}:
            self._journal.note(self.name, 'removes attachment ' + unwanted)
            self._user.remove_attachment(unwanted)
        return wanted is None or wanted in there

    # -- The end ------------------------------------------------------------

    def _settle(self) -> None:
        start = time.monotonic()
        # Attachments that Nova has left are seen by nobody else.
        self._unsure = True
        while self._unsure or self._untidy:
            if time.monotonic() > start + 6 * actor.PATIENCE:
                raise actor.Stuck('%s does not settle' % self.subject)
            self._clear_up()
            time.sleep(2 * actor.POLL)

    def _end(self) -> None:
        if self._instance is not None:
            self._plug_all_in()
            # dm-clone hardly goes on while a guest writes.
            self._must('stop', self._stop)
            self._wait_for_moves(self._volumes())
            self._must('start', self._start)
            self._must('verify', self._live_on)
            self._check_places()
            self._must('delete', self._delete)
        self._data = []
        self._settle()

    def _plug_all_in(self) -> None:
        """:raises Stuck: one can't be, though nothing is in its way"""
        while spare := set(self._data) - set(self._running.volumes()):
            volume = min(spare)
            if self._act('attach at the end', lambda: self._plug_in(volume)):
                continue
            if not self._begins_anew:
                raise actor.Stuck('%s does not get volume %s' % (
                    self.subject, volume))
            self._settle()

    def _check_places(self) -> None:
        """:raises Stuck: a volume is not where its instance is"""
        home = self._running.node.name
        for volume in self._volumes():
            if (found := self._user.host(volume)) != home:
                raise actor.Stuck('volume %s is on %s, instance %s on %s' % (
                    volume, found, self._running.id, home))
