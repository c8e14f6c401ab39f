# SPDX-License-Identifier: Apache-2.0
"""What is left to do in the database when a node is lost for good.

Only an operator knows that it will never come back.  Should it all the same,
nothing of it is activated, and its log says what is there.
"""

from __future__ import annotations

import dataclasses

from cinder.common import constants
from cinder import context
from cinder import exception as cinder_exception
from cinder import objects

from cinder_localstor import exception
from cinder_localstor.moves import abandon
from cinder_localstor.peers import directory
from cinder_localstor import rows


@dataclasses.dataclass(frozen=True)
class Loss:
    """What a lost backend had.

    :ivar moves: that go on without it
    :ivar waiting: moves that can't, with the reason
    :ivar snapshots: ids of those that are given up
    :ivar volumes: ids of those whose only copy it had, but for what waits
    """

    moves: tuple[rows.Move, ...]
    waiting: tuple[tuple[rows.Move, str], ...]
    snapshots: tuple[str, ...]
    volumes: tuple[str, ...]


def declare(ctxt: context.RequestContext, host: str,
            written_is_lost: bool = False) -> Loss:
    """Let go on what can without a backend, and give its snapshots up.

    It may be repeated, when its users have deleted what they could not use.

    :param host: ``host@backend``
    :param written_is_lost: see :func:`abandon.abandon`
    :raises NotLost: it is up or enabled, or there never was one of this name
    """
    _check(ctxt, host)
    moves, waiting = [], []
    # Of a volume that arrives there the snapshots come first.
    for move in sorted(rows.for_host(ctxt, host), key=lambda move: (
            not move.transfer.is_snapshot)):
        try:
            moves.append(abandon.abandon(ctxt, move.move_id, written_is_lost))
        except exception.NotAbandoned as error:
            waiting.append((move, str(error)))
        except exception.NoSuchMove:
            pass  # it has ended meanwhile
    snapshots = [copy.snapshot_id for copy in rows.snapshots_on(ctxt, host)]
    for snapshot_id in snapshots:
        rows.give_up_snapshot(ctxt, snapshot_id)
    undecided = {move.volume_id for move, _reason in waiting}
    return Loss(tuple(moves), tuple(waiting), tuple(snapshots), tuple(
        copy.volume_id for copy in rows.copies_on(ctxt, host)
        if copy.volume_id not in undecided))


def give_up_volumes(ctxt: context.RequestContext, host: str, heir: str
                    ) -> list[str]:
    """Let the volumes of a lost backend be in error on another one, where
    their users can delete them; those that no move belongs to.

    :param host: ``host@backend`` that is lost
    :param heir: the other one
    :returns: their ids
    :raises NotLost: it is up or enabled, or there never was one of this name
    """
    _check(ctxt, host)
    service = objects.Service.get_by_args(ctxt, heir,
                                          constants.VOLUME_BINARY)
    return [copy.volume_id for copy in rows.copies_on(ctxt, host)
            if not rows.for_volume(ctxt, copy.volume_id)
            and rows.give_up_volume(ctxt, copy.volume_id, host, service)]


def _check(ctxt: context.RequestContext, host: str) -> None:
    try:
        service = objects.Service.get_by_args(ctxt, host,
                                              constants.VOLUME_BINARY)
    except cinder_exception.ServiceNotFound as error:
        raise exception.NotLost(
            host=host, reason='Cinder knows no volume service of this name, '
            "see 'openstack volume service list'") from error
    if host not in directory.down(ctxt):
        raise exception.NotLost(
            host=host, reason='its cinder-volume is up, or was a minute ago')
    if not service.disabled:
        raise exception.NotLost(
            host=host, reason='its service is enabled, as if it were to come '
            "back. If it never will, say 'openstack volume service set "
            "--disable --disable-reason <why> %s cinder-volume' first" % host)
