# SPDX-License-Identifier: Apache-2.0
"""Two or three operations on one volume at the same time, in every order.

Every run of the tests has a sample, always the same, of the schedules with one
preemption.  ``make soak`` has all of these, and new ones with one for each
operation.  What fails tells its schedule, and the steps that were taken; with
that in the environment, as ``LOCALSTOR_SCHEDULE='0x3 1x12'``, the test repeats
this one alone.
"""

from collections.abc import Callable
import contextlib
import os
import random
import re
from typing import Any
import uuid

from cinder.db import api as db
from cinder.db import models
from cinder import exception as cinder_exception
import ddt
from oslo_utils import units
import sqlalchemy as sa

from cinder_localstor import exception
from cinder_localstor.moves import loss
from cinder_localstor.moves import table
from cinder_localstor.node import simulated
from cinder_localstor import rows
from tests.unit import base
from tests.unit import interleavings
from tests.unit import site

# Schedules of each pair: always the same, or so many new ones with several
# preemptions
SAME = 3
NEW = int(os.environ.get('LOCALSTOR_SOAK_ORDERS', '0'))
SCHEDULE = os.environ.get('LOCALSTOR_SCHEDULE')

# An id, or what is made of the beginning of one
ID = re.compile(r'[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{8}')
# What of the database is told
ROWS = (
    (models.Volume.id, models.Volume._name_id, models.Volume.host,
     models.Volume.size, models.Volume.status, models.Volume.deleted,
     models.Volume.provider_location),
    (models.VolumeAdminMetadata.volume_id, models.VolumeAdminMetadata.key,
     sa.case((models.VolumeAdminMetadata.key == rows.SINCE, ''),
             else_=models.VolumeAdminMetadata.value),
     models.VolumeAdminMetadata.deleted),
    (models.VolumeAttachment.id, models.VolumeAttachment.attach_status,
     models.VolumeAttachment.connector, models.VolumeAttachment.deleted))


class Site(site.Site):
    """A site in which several requests can be under way."""

    run: interleavings.Run | None = None
    # Nodes that an operator takes for lost
    lost: tuple[str, ...] = ()

    def on(self, host: str) -> contextlib.AbstractContextManager[None]:
        return self.run.on(host) if self.run else contextlib.nullcontext()

    def _ask(self, volume, work):
        def work_there(driver):
            with self.on(driver.host):
                return work(driver)
        return super()._ask(volume, work_there)

    def period(self, host):
        with self.on(host):
            super().period(host)

    def look(self):
        with self.run.looking() if self.run else contextlib.nullcontext():
            super().look()

    def describe(self) -> str:
        """All that a node or the database holds, in the words of each run.
        """
        found: list[Any] = []
        for node in self.nodes.values():
            found += [sorted((name, sorted(disk.tags), disk)
                             for name, disk in node.volumes.disks.items()),
                      sorted(node.device_mapper.nodes.items()),
                      sorted(node.target.exports.items()),
                      sorted(node.initiator.sessions.items()),
                      sorted((name, helper.started) for name, helper
                             in node.hydrators.processes.items())]
        with db.main_context_manager.reader.using(self.ctxt) as session:
            for columns in ROWS:
                found += sorted(map(repr, session.query(*columns)))
        found += [(one.attachments, one.opened, one.home, one.runs,
                   one.doomed) for one in self.instances]
        ids: dict[str, int] = {}
        return ID.sub(lambda match: str(ids.setdefault(match[0], len(ids))),
                      repr(found))

    def connect(self, instance: site.Instance, host: str, attachment: Any,
                refused: tuple[type[Exception], ...] = site.REFUSALS) -> None:
        """What is left of attaching a volume that is reserved already.

        :param refused: errors that the user may be told
        """
        try:
            volume = self.refresh(instance.volume)
            path = self._ask(volume, lambda driver: self._connect(
                driver, volume, attachment, host))
        except refused:
            return
        if not path:
            # While Cinder migrates it, it stays where it is. Guests of this
            # model use no iSCSI.
            return
        if self.run:
            self.run.point(interleavings.on_node(host, 'a guest opens it'))
        if instance.attachments.get(host) != attachment.id:
            return  # given up meanwhile
        self._open(instance, host, path)
        if not instance.runs:
            instance.home, instance.runs = host, True

    def reserved(self, instance: site.Instance, host: str, **options: Any
                 ) -> Callable[[], None]:
        """Reserve a volume for an instance; the rest of attaching it."""
        attachment = self.reserve(instance.volume)
        instance.attachments[host] = attachment.id
        return lambda: self.connect(instance, host, attachment, **options)

    def give_up(self, instance: site.Instance, host: str) -> None:
        """Nova ends a guest on a node and deletes its attachment."""
        if instance.home == host:
            self._stop(instance)
        self.detach(instance, host)

    def destroy(self, instance: site.Instance) -> None:
        """Delete a volume as Cinder's API lets it, if at all."""
        for host in list(instance.attachments):
            self.give_up(instance, host)
        if rows.attachments(self.ctxt, instance.volume.id):
            return
        # Cinder's lock for it, and its look at what is left then
        with self.run.lock('delete'):
            self._destroy(instance)

    def _destroy(self, instance: site.Instance) -> None:
        if instance not in self.instances:
            return
        self.set_status(instance.volume, 'deleting')
        with contextlib.suppress(*site.REFUSALS):
            self._ask(instance.volume,
                      lambda driver: self._delete(driver, instance))

    def grow(self, instance: site.Instance) -> None:
        """Extend a volume, or be refused."""
        row = self.row(instance.volume)
        before, size = row.status, row.size + 1
        self.set_status(instance.volume, 'extending')
        try:
            volume = self.refresh(instance.volume)
            self._ask(volume, lambda driver: driver.extend_volume(volume,
                                                                  size))
        except site.REFUSALS:
            self.set_status(instance.volume, before)
            return
        volume.update({'size': size, 'status': before})
        volume.save()

    def declare_lost(self, host: str) -> None:
        """Tell that a node never comes back, or be refused."""
        with contextlib.suppress(exception.NotLost):
            loss.declare(self.ctxt, host, written_is_lost=True)

    def clear(self, host: str) -> None:
        """Remove what the log of a node names that was taken for lost.

        :raises AssertionError: it is active, or the node has more to do
        """
        for left in self.leftovers([instance.volume
                                    for instance in self.instances]):
            assert left[0] == host and left[1] in ('volume', 'tag'), left
            self.nodes[host].volumes.disks.pop(left[2], None)


class Peers(site.Peers):
    """As the base, and what a peer does takes the locks of its process."""

    def _call(self, peer, method, *arguments):
        with self._cloud.on(peer):
            return super()._call(peer, method, *arguments)


Pair = list[tuple[str, str, Callable[[], None]]]


def arriving(cloud: Site, host: str = base.B) -> site.Instance:
    """A volume of A that has come to a node, with its guest, and arrives."""
    instance = cloud.create(base.A)
    cloud.attach(instance, host)
    cloud.write(instance, 0)
    cloud.watch()
    return instance


def left(cloud: Site) -> site.Instance:
    """One that arrives, and that no guest uses any more."""
    instance = arriving(cloud)
    cloud.give_up(instance, base.B)
    return instance


def migrating(cloud: Site) -> site.Instance:
    """A guest of A in a live migration to B."""
    instance = cloud.create(base.A)
    cloud.attach(instance, base.A)
    cloud.attach(instance, base.B)
    return instance


def late(cloud: Site, host: str, *steps: str) -> Callable[[], None]:
    """A request of a peer that comes a second time."""
    move, = cloud.moves()

    def run() -> None:
        with contextlib.suppress(exception.LocalStorException):
            cloud.running[host].answers.run(
                cloud.ctxt, move.transfer.as_dict(), list(steps))
    return run


def arrived(cloud: Site) -> None:
    """All that was still to come has come."""
    cloud.hydrate()


def attach_and_delete(cloud: Site) -> Pair:
    """A reservation is given up while it is being used."""
    instance = cloud.create(base.A)
    attach = cloud.reserved(instance, base.B)
    return [('attach', base.A, attach),
            ('delete', base.A, lambda: cloud.destroy(instance))]


def attach_and_delete_in_mid_move(cloud: Site) -> Pair:
    instance = left(cloud)
    attach = cloud.reserved(instance, base.C)
    return [('attach', base.B, attach),
            ('delete', base.B, lambda: cloud.destroy(instance))]


def attach_and_extend(cloud: Site) -> Pair:
    instance = cloud.create(base.A)
    attach = cloud.reserved(instance, base.B)
    return [('attach', base.A, attach),
            ('extend', base.A, lambda: cloud.grow(instance))]


def attach_and_attach(cloud: Site) -> Pair:
    """Two peers want a volume."""
    instance = cloud.create(base.A)
    return [('attach to b', base.A, cloud.reserved(instance, base.B)),
            ('attach to c', base.A, cloud.reserved(instance, base.C))]


def attach_here_and_there(cloud: Site) -> Pair:
    instance = cloud.create(base.A)
    return [('attach to a', base.A, cloud.reserved(instance, base.A)),
            ('attach to b', base.A, cloud.reserved(instance, base.B))]


def attach_and_give_up(cloud: Site) -> Pair:
    """Nobody wants a volume any more that is on its way."""
    instance = cloud.create(base.A)
    attach = cloud.reserved(instance, base.B)
    return [('attach', base.A, attach),
            ('detach', base.A, lambda: cloud.give_up(instance, base.B))]


def attach_and_periods(cloud: Site) -> Pair:
    """No look takes a move that is beginning for one that was broken off."""
    instance = cloud.create(base.A)
    attach = cloud.reserved(instance, base.B, refused=())
    return [('attach', base.A, attach), ('periods', base.A, cloud.watch)]


def attach_on_and_end(cloud: Site) -> Pair:
    """A volume moves on in the moment in which it has arrived."""
    instance = left(cloud)
    attach = cloud.reserved(instance, base.C)
    arrived(cloud)
    return [('attach', base.B, attach), ('periods', base.B, cloud.watch)]


def attach_back_and_end(cloud: Site) -> Pair:
    instance = left(cloud)
    attach = cloud.reserved(instance, base.A)
    arrived(cloud)
    return [('attach', base.B, attach), ('periods', base.B, cloud.watch)]


def extend_and_end(cloud: Site) -> Pair:
    instance = arriving(cloud)
    arrived(cloud)
    return [('extend', base.B, lambda: cloud.grow(instance)),
            ('periods', base.B, cloud.watch)]


def detach_and_periods(cloud: Site) -> Pair:
    """A live migration succeeds."""
    instance = migrating(cloud)
    cloud.switch(instance, base.B)
    return [('detach', base.B, lambda: cloud.give_up(instance, base.A)),
            ('periods', base.A, cloud.watch)]


def detach_and_detach(cloud: Site) -> Pair:
    """A live migration ends on both nodes: it is taken back, or not."""
    instance = migrating(cloud)
    cloud._stop(instance)
    return [('detach a', base.B, lambda: cloud.give_up(instance, base.A)),
            ('detach b', base.B, lambda: cloud.give_up(instance, base.B))]


def detach_and_period_of_two(cloud: Site) -> Pair:
    """A live migration is taken back, and both nodes look."""
    instance = migrating(cloud)
    cloud._stop(instance)
    cloud.give_up(instance, base.B)
    return [('period of a', base.A, lambda: cloud.period(base.A)),
            ('period of b', base.B, lambda: cloud.period(base.B))]


def delete_and_delete(cloud: Site) -> Pair:
    """Two deletes; Cinder lets one after the other in."""
    instance = left(cloud)
    return [('delete', base.B, lambda: cloud.destroy(instance)),
            ('delete again', base.B, lambda: cloud.destroy(instance))]


def delete_and_periods(cloud: Site) -> Pair:
    instance = left(cloud)
    return [('delete', base.B, lambda: cloud.destroy(instance)),
            ('periods', base.B, cloud.watch)]


def delete_and_end(cloud: Site) -> Pair:
    instance = left(cloud)
    arrived(cloud)
    return [('delete', base.B, lambda: cloud.destroy(instance)),
            ('periods', base.B, cloud.watch)]


def period_and_nudge(cloud: Site) -> Pair:
    """A peer asks for what the node is doing anyway."""
    instance = cloud.create(base.A)
    cloud.attach(instance, base.B)
    cloud.hydrate()
    move, = cloud.moves()
    return [('period', base.B, lambda: cloud.period(base.B)),
            ('nudge', base.B,
             lambda: cloud.running[base.B].answers.drive(cloud.ctxt,
                                                         move.move_id))]


def export_again_and_end(cloud: Site) -> Pair:
    """The target daemon of the source was restarted; the move ends."""
    arriving(cloud)
    arrived(cloud)
    cloud.nodes[base.A].target.exports.clear()
    return [('period of a', base.A, lambda: cloud.period(base.A)),
            ('period of b', base.B, lambda: cloud.period(base.B))]


def late_export_and_end(cloud: Site) -> Pair:
    arriving(cloud)
    arrived(cloud)
    return [('late', base.A, late(cloud, base.A, 'export_source')),
            ('period', base.B, lambda: cloud.period(base.B))]


def late_creation_and_undoing(cloud: Site) -> Pair:
    """What the source has asked for comes when it has died and come back."""
    instance = cloud.create(base.A)
    cloud.nodes[base.A].faults.plan = simulated.Call(
        'Peers.run', 0, simulated.Fault.CRASH)
    cloud.reserved(instance, base.B)()
    cloud.boot(base.A)
    return [('late', base.B, late(cloud, base.B, 'create_destination',
                                  'create_map')),
            ('period', base.A, lambda: cloud.period(base.A))]


def restart_and_period(cloud: Site) -> Pair:
    """The source comes back, and is asked for what is left to do."""
    arriving(cloud)
    arrived(cloud)
    cloud.nodes[base.A].cut_power()
    return [('restart', base.A, lambda: cloud.boot(base.A)),
            ('period', base.B, lambda: cloud.period(base.B))]


def restart_and_attach(cloud: Site) -> Pair:
    """A node starts as a volume comes to it."""
    instance = cloud.create(base.A)
    attach = cloud.reserved(instance, base.B)
    return [('restart', base.B, lambda: cloud.boot(base.B)),
            ('attach', base.A, attach)]


def migrate_and_attach(cloud: Site) -> Pair:
    """A volume is wanted on a third node while it is migrated."""
    instance = cloud.create(base.A)
    return [('migrate', base.A,
             lambda: cloud.send(instance, base.B, may_fail=True)),
            ('attach', base.A,
             lambda: cloud.reserved(instance, base.C)())]


def migrate_and_extend(cloud: Site) -> Pair:
    instance = cloud.create(base.A)
    return [('migrate', base.A,
             lambda: cloud.send(instance, base.B, may_fail=True)),
            ('extend', base.A, lambda: cloud.grow(instance))]


def migrate_and_restart(cloud: Site) -> Pair:
    """The node starts that a volume comes to."""
    instance = cloud.create(base.A)
    return [('migrate', base.A,
             lambda: cloud.send(instance, base.B, may_fail=True)),
            ('restart', base.B, lambda: cloud.boot(base.B))]


def clone_elsewhere_and_attach(cloud: Site) -> Pair:
    """A volume leaves while another node has it cloned."""
    instance = cloud.create(base.A)
    attach = cloud.reserved(instance, base.B)
    return [('clone', base.C,
             lambda: cloud.clone(instance, base.C, may_fail=True)),
            ('attach', base.A, attach)]


def clone_elsewhere_and_delete(cloud: Site) -> Pair:
    instance = cloud.create(base.A)

    def clone() -> None:
        with contextlib.suppress(cinder_exception.VolumeNotFound):
            cloud.clone(instance, base.C, may_fail=True)
    return [('clone', base.C, clone),
            ('delete', base.A, lambda: cloud.destroy(instance))]


def clone_elsewhere_and_extend(cloud: Site) -> Pair:
    instance = cloud.create(base.A)
    return [('clone', base.C,
             lambda: cloud.clone(instance, base.C, may_fail=True)),
            ('extend', base.A, lambda: cloud.grow(instance))]


def with_snapshot(cloud: Site) -> site.Instance:
    """One that nobody uses, with a snapshot that it has left on its way."""
    instance = cloud.create(base.A)
    cloud.take_snapshot(instance)
    cloud.attach(instance, base.B)
    cloud.period(base.B)
    cloud.give_up(instance, base.B)
    return instance


def revert_and_periods(cloud: Site) -> Pair:
    """A volume still arrives that is reverted."""
    instance = with_snapshot(cloud)
    return [('revert', base.B, lambda: cloud.revert(instance)),
            ('periods', base.B, cloud.watch)]


def revert_and_end(cloud: Site) -> Pair:
    """A volume is reverted in the moment in which it has arrived."""
    instance = with_snapshot(cloud)
    arrived(cloud)
    return [('revert', base.B, lambda: cloud.revert(instance)),
            ('periods', base.B, cloud.watch)]


def revert_and_restart(cloud: Site) -> Pair:
    """The node starts that has the snapshot."""
    instance = with_snapshot(cloud)
    return [('revert', base.B, lambda: cloud.revert(instance)),
            ('restart', base.A, lambda: cloud.boot(base.A))]


def thin_revert_and_periods(cloud: Site) -> Pair:
    """A volume gets another copy in an instant, and of two of the scheduler's
    workers one removes its last one.
    """
    for node in cloud.nodes.values():
        node.volumes.pool_size = 64 * units.Gi
    instance = cloud.create(base.A)
    cloud.take_snapshot(instance)

    def remove() -> None:
        for move in rows.for_volume(cloud.ctxt, instance.volume.id):
            if move.state == table.State.KEEPING:
                cloud.running[base.A].executor.drive(cloud.ctxt, move.move_id)
    return [('revert', base.A, lambda: cloud.revert(instance)),
            ('periods', base.A, cloud.watch), ('remove', base.A, remove)]


def snapshot_and_attach(cloud: Site) -> Pair:
    """A volume leaves while a snapshot of it is taken."""
    instance = cloud.create(base.A)
    attach = cloud.reserved(instance, base.B)
    return [('snapshot', base.A,
             lambda: cloud.take_snapshot(instance, may_fail=True)),
            ('attach', base.A, attach)]


def snapshot_and_periods(cloud: Site) -> Pair:
    """A snapshot is taken of what has arrived, and of what has not."""
    instance = left(cloud)
    return [('snapshot', base.B, lambda: cloud.take_snapshot(instance)),
            ('periods', base.B, cloud.watch)]


def snapshot_and_end(cloud: Site) -> Pair:
    """One is taken in the moment in which its volume has arrived."""
    instance = left(cloud)
    arrived(cloud)
    return [('snapshot', base.B, lambda: cloud.take_snapshot(instance)),
            ('periods', base.B, cloud.watch)]


def snapshot_and_snapshot(cloud: Site) -> Pair:
    instance = left(cloud)
    return [('snapshot', base.B, lambda: cloud.take_snapshot(instance)),
            ('another', base.B, lambda: cloud.take_snapshot(instance))]


def delete_snapshot_and_attach(cloud: Site) -> Pair:
    """Its volume leaves while a snapshot is deleted."""
    instance = cloud.create(base.A)
    cloud.take_snapshot(instance)
    attach = cloud.reserved(instance, base.B)
    return [('delete', base.A,
             lambda: cloud.delete_snapshot(instance, may_fail=True)),
            ('attach', base.A, attach)]


def delete_snapshot_and_end(cloud: Site) -> Pair:
    """A source that stays for its snapshots is needed no longer."""
    instance = with_snapshot(cloud)
    arrived(cloud)
    return [('delete', base.B, lambda: cloud.delete_snapshot(instance)),
            ('periods', base.B, cloud.watch)]


def delete_snapshot_and_restart(cloud: Site) -> Pair:
    instance = with_snapshot(cloud)
    return [('delete', base.B,
             lambda: cloud.delete_snapshot(instance, may_fail=True)),
            ('restart', base.A, lambda: cloud.boot(base.A))]


def delete_snapshot_and_copy(cloud: Site) -> Pair:
    """A volume is made of a snapshot that is being deleted; Cinder's API had
    let that be asked for before.
    """
    instance = with_snapshot(cloud)
    snapshot, = instance.snapshots.values()

    def copy() -> None:
        with contextlib.suppress(cinder_exception.SnapshotNotFound):
            cloud.create_from_snapshot(instance, base.C, may_fail=True,
                                       snapshot=snapshot)
    return [('copy', base.C, copy),
            ('delete', base.B,
             lambda: cloud.delete_snapshot(instance, may_fail=True))]


def snapshot_and_extend(cloud: Site) -> Pair:
    instance = left(cloud)
    return [('snapshot', base.B,
             lambda: cloud.take_snapshot(instance, may_fail=True)),
            ('extend', base.B, lambda: cloud.grow(instance))]


def snapshot_and_attach_on(cloud: Site) -> Pair:
    """A volume moves on while a snapshot is taken of what has arrived."""
    instance = left(cloud)
    attach = cloud.reserved(instance, base.C)
    return [('snapshot', base.B,
             lambda: cloud.take_snapshot(instance, may_fail=True)),
            ('attach', base.B, attach)]


def delete_snapshot_and_extend(cloud: Site) -> Pair:
    instance = cloud.create(base.A)
    cloud.take_snapshot(instance)
    return [('delete', base.A,
             lambda: cloud.delete_snapshot(instance, may_fail=True)),
            ('extend', base.A, lambda: cloud.grow(instance))]


def delete_snapshot_and_attach_back(cloud: Site) -> Pair:
    """Its volume comes back to the node that has the snapshot."""
    instance = with_snapshot(cloud)
    attach = cloud.reserved(instance, base.A)
    return [('delete', base.B,
             lambda: cloud.delete_snapshot(instance, may_fail=True)),
            ('attach', base.B, attach)]


def copy_and_attach(cloud: Site) -> Pair:
    """A volume leaves while another is made of its snapshot."""
    instance = cloud.create(base.A)
    cloud.take_snapshot(instance)
    attach = cloud.reserved(instance, base.B)
    return [('copy', base.C,
             lambda: cloud.create_from_snapshot(instance, base.C,
                                                may_fail=True)),
            ('attach', base.A, attach)]


def copy_and_end(cloud: Site) -> Pair:
    """One is made of a snapshot whose volume has arrived elsewhere."""
    instance = with_snapshot(cloud)
    arrived(cloud)
    return [('copy', base.C,
             lambda: cloud.create_from_snapshot(instance, base.C)),
            ('periods', base.B, cloud.watch)]


def copy_and_restart(cloud: Site) -> Pair:
    """The node starts that has the snapshot."""
    instance = with_snapshot(cloud)
    return [('copy', base.C,
             lambda: cloud.create_from_snapshot(instance, base.C,
                                                may_fail=True)),
            ('restart', base.A, lambda: cloud.boot(base.A))]


def lose(cloud: Site, host: str) -> None:
    """A node fails, and an operator says that it never comes back."""
    cloud.cut_power(host)
    cloud.services[host].disabled = True
    cloud.services[host].save()
    cloud.lost = (host,)


def lost(cloud: Site) -> site.Instance:
    """One of A that had hardly arrived when its guest's node was lost."""
    instance = arriving(cloud)
    lose(cloud, base.B)
    return instance


def lost_and_period(cloud: Site) -> Pair:
    """An operator gives up what was written; the source looks."""
    lost(cloud)
    return [('lost', 'operator', lambda: cloud.declare_lost(base.B)),
            ('period', base.A, lambda: cloud.period(base.A))]


def lost_and_restart(cloud: Site) -> Pair:
    """The source starts."""
    lost(cloud)
    cloud.nodes[base.A].cut_power()
    return [('lost', 'operator', lambda: cloud.declare_lost(base.B)),
            ('restart', base.A, lambda: cloud.boot(base.A))]


def lost_and_return(cloud: Site) -> Pair:
    """What was taken for lost comes back."""
    lost(cloud)
    return [('lost', 'operator', lambda: cloud.declare_lost(base.B)),
            ('restart', base.B, lambda: cloud.boot(base.B))]


def lost_and_lost(cloud: Site) -> Pair:
    """Two operators know it."""
    lost(cloud)
    return [('lost', 'operator', lambda: cloud.declare_lost(base.B)),
            ('lost again', 'other', lambda: cloud.declare_lost(base.B))]


def lost_and_attach(cloud: Site) -> Pair:
    """Its guest is to be started anew."""
    instance = lost(cloud)
    attach = cloud.reserved(instance, base.A)
    return [('lost', 'operator', lambda: cloud.declare_lost(base.B)),
            ('attach', base.A, attach)]


def lost_source_and_end(cloud: Site) -> Pair:
    """The source is lost that is needed no longer."""
    left(cloud)
    arrived(cloud)
    lose(cloud, base.A)
    return [('lost', 'operator', lambda: cloud.declare_lost(base.A)),
            ('period', base.B, lambda: cloud.period(base.B))]


def returning(cloud: Site) -> site.Instance:
    """One that comes back from a lost node."""
    instance = lost(cloud)
    cloud.declare_lost(base.B)
    cloud.give_up(instance, base.B)
    return instance


def return_and_return(cloud: Site) -> Pair:
    """The lost node starts while a volume comes back from it."""
    returning(cloud)
    return [('period', base.A, lambda: cloud.period(base.A)),
            ('restart', base.B, lambda: cloud.boot(base.B))]


def return_and_attach(cloud: Site) -> Pair:
    instance = returning(cloud)
    attach = cloud.reserved(instance, base.A)
    return [('period', base.A, lambda: cloud.period(base.A)),
            ('attach', base.A, attach)]


def return_and_attach_elsewhere(cloud: Site) -> Pair:
    instance = returning(cloud)
    attach = cloud.reserved(instance, base.C)
    return [('period', base.A, lambda: cloud.period(base.A)),
            ('attach', base.A, attach)]


def return_and_delete(cloud: Site) -> Pair:
    instance = returning(cloud)
    return [('period', base.A, lambda: cloud.period(base.A)),
            ('delete', base.A, lambda: cloud.destroy(instance))]


def return_and_extend(cloud: Site) -> Pair:
    instance = returning(cloud)
    return [('period', base.A, lambda: cloud.period(base.A)),
            ('extend', base.A, lambda: cloud.grow(instance))]


PAIRS = (attach_and_delete, attach_and_delete_in_mid_move, attach_and_extend,
         attach_and_attach, attach_here_and_there, attach_and_give_up,
         attach_and_periods, attach_on_and_end, attach_back_and_end,
         extend_and_end, detach_and_periods, detach_and_detach,
         detach_and_period_of_two, delete_and_delete, delete_and_periods,
         delete_and_end, period_and_nudge, export_again_and_end,
         late_export_and_end, late_creation_and_undoing, restart_and_period,
         restart_and_attach, migrate_and_attach, migrate_and_extend,
         migrate_and_restart, clone_elsewhere_and_attach,
         clone_elsewhere_and_delete, clone_elsewhere_and_extend,
         revert_and_periods, revert_and_end, revert_and_restart,
         thin_revert_and_periods,
         snapshot_and_attach, snapshot_and_periods, snapshot_and_end,
         snapshot_and_snapshot, delete_snapshot_and_attach,
         delete_snapshot_and_end, delete_snapshot_and_restart,
         delete_snapshot_and_copy, snapshot_and_extend,
         snapshot_and_attach_on, delete_snapshot_and_extend,
         delete_snapshot_and_attach_back, copy_and_attach, copy_and_end,
         copy_and_restart, lost_and_period, lost_and_restart,
         lost_and_return, lost_and_lost, lost_and_attach,
         lost_source_and_end, return_and_return, return_and_attach,
         return_and_attach_elsewhere, return_and_delete, return_and_extend)


@ddt.ddt
class PairTest(site.TestCase):

    def setUp(self):
        super().setUp()
        # What is sorted by ids is in the same order in each run.
        chance = random.Random(0)
        self.patch('uuid.uuid4', side_effect=lambda: uuid.UUID(
            int=chance.getrandbits(128), version=4))
        self.patch('cinder_localstor.peers.rpc.PeerAPI',
                   side_effect=lambda host, _time: Peers(self.site, host))
        self.patch('cinder_localstor.peers.directory.down',
                   side_effect=lambda _ctxt: self.site.down)
        self.share_database()

    @ddt.data(*PAIRS)
    def test_every_order(self, prepare):
        cloud = Site(self)
        operations = prepare(cloud)

        def perform(schedule, is_known):
            run = cloud.run = interleavings.Run(
                [interleavings.Operation(name, act, [host])
                 for name, host, act in operations], schedule, is_known)
            cloud.script.choose = run.call
            for node in cloud.nodes.values():
                node.faults.choose = run.call
            return run, lambda: end(cloud, run), lambda: judge(cloud)

        one, more = (interleavings.Explorer(preemptions, perform)
                     for preemptions in (1, len(operations)))
        if SCHEDULE:
            one.replay(interleavings.read_schedule(SCHEDULE))
        elif NEW:
            one.explore()
            more.explore(NEW, random.Random())
        else:
            one.explore(SAME, random.Random(prepare.__name__))


def end(cloud: Site, run: interleavings.Run) -> str:
    """Let what was left to other threads be done, and describe it all.

    :raises Exception: an operation has ended with an error that Cinder does
        not expect
    """
    cloud.run = None
    for node in cloud.nodes.values():
        node.faults.choose = lambda _host, _name: None
    for operation in run.operations:
        if operation.error is not None:
            raise operation.error
    cloud.run_queue()
    cloud.look()
    return cloud.describe()


def judge(cloud: Site) -> None:
    """Whatever has happened, nothing is lost and everything ends.

    :raises AssertionError: it is not so
    """
    cloud.watch()
    for host in cloud.nodes:
        cloud.boot(host)
    cloud.settle()
    for host in cloud.lost:
        cloud.clear(host)
    cloud.end()
