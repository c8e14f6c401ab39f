# SPDX-License-Identifier: Apache-2.0
"""Ends moves whose other node is lost for good.

A move waits for a node that is away for as long as it takes.  Only an operator
knows that it will never come back.
"""

from cinder import context
from cinder import objects
import tenacity

from cinder_localstor import exception
from cinder_localstor.moves import table
from cinder_localstor.peers import directory
from cinder_localstor import rows


# By state the sides that a move can go on without: others hold what no other
# node has.
_OF_ALL = {table.State.STARTING: {table.Side.DESTINATION},
           table.State.MIGRATING: {table.Side.DESTINATION},
           table.State.COMPLETING: {table.Side.SOURCE},
           table.State.KEEPING: {table.Side.SOURCE},
           table.State.RETURNING: {table.Side.DESTINATION},
           table.State.ABORTING: {table.Side.DESTINATION},
           table.State.UNDOING: {*table.Side},
           table.State.DISCARDING: {*table.Side}}
# What a copy is made of stays, so nothing but the copy is lost.
_OF_COPIES = {table.State.CREATING: {table.Side.DESTINATION},
              table.State.COMPLETING: {*table.Side}}

# In these a guest may have written to a destination.
_WRITTEN = (table.State.STARTING, table.State.MIGRATING,
            table.State.COMPLETING)


@tenacity.retry(
    retry=tenacity.retry_if_exception_type(exception.MoveChanged),
    stop=tenacity.stop_after_attempt(3), reraise=True)
def abandon(ctxt: context.RequestContext, move_id: str,
            written_is_lost: bool = False) -> rows.Move:
    """Let a move go on without its lost node.

    What that node had to do counts as done; the other one drives the move to
    its end.

    :param written_is_lost: whether the operator accepts that what a guest may
        have written on a lost destination is gone
    :returns: the move as it is now
    :raises NoSuchMove: it has ended, or never was
    :raises NotAbandoned: the node is up, or has what no other node has
    :raises MoveChanged: it went on each time that this was to be recorded
    """
    move = rows.get(ctxt, move_id)
    if move is None:
        raise exception.NoSuchMove(move_id=move_id)
    lost = _lost_side(ctxt, move)
    if table.is_lost(move, lost):
        return move
    _check(ctxt, move, lost, written_is_lost)
    return _go_on(ctxt, move, lost)


def _check(ctxt: context.RequestContext, move: rows.Move, lost: table.Side,
           written_is_lost: bool) -> None:
    """:raises NotAbandoned: it can't go on, or not without being told so"""
    state = table.State(move.state)
    sides = _OF_ALL.get(state, set()) | (
        _OF_COPIES.get(state, set()) if move.transfer.is_copy else set())
    if lost not in sides:
        raise _refusal(move, lost, 'it holds what no other node has of volume '
                       '%s. Bring it back, or restore the volume from a '
                       'backup' % move.volume_id)
    if lost is table.Side.SOURCE or state not in _WRITTEN:
        return
    if not move.transfer.is_copy:
        _check_last(ctxt, move, lost)
    if not written_is_lost:
        raise _refusal(move, lost, (
            'what has arrived there is gone with it, and the new volume too. '
            'If you give that up, say --written-is-lost'
            if move.transfer.is_copy else
            'the guest may have written there since %s UTC. If it never ran '
            'there, or you give up what it wrote, say --written-is-lost'
            % move.since.isoformat(' ', 'seconds')))


def _check_last(ctxt: context.RequestContext, move: rows.Move,
                lost: table.Side) -> None:
    """:raises NotAbandoned: others need what has arrived at the destination
    """
    copy = move.transfer.destination_name
    if objects.Volume.get_by_id(ctxt, move.volume_id).name != copy:
        raise _refusal(move, lost, 'volume %s has moved on from there, and '
                       'what had not is gone. Restore it from a backup'
                       % move.volume_id)
    for other in rows.for_host(ctxt, move.transfer.destination_host):
        if (other.transfer.snapshot_of == move.move_id
                and not table.is_lost(other, lost)):
            raise _refusal(move, lost, 'snapshot %s of it arrives there by '
                           'move %s, which has to be abandoned before'
                           % (other.transfer.snapshot_id, other.move_id))


def _go_on(ctxt: context.RequestContext, move: rows.Move, lost: table.Side
           ) -> rows.Move:
    """Record that a side is lost, in the state that this leads to."""
    state = table.State(move.state)
    done = (table.LOST[lost].value,)
    if move.transfer.is_copy and lost is table.Side.DESTINATION:
        if move.transfer.is_local:
            rows.forget(ctxt, move)
            return move
        return rows.change_state(ctxt, move, table.State.UNDOING.value,
                                 done=done)
    if state is table.State.MIGRATING:
        return rows.come_back(ctxt, move, table.State.RETURNING.value, done)
    if state is table.State.STARTING:
        return rows.change_state(ctxt, move, table.State.ABORTING.value,
                                 swap=True, done=done)
    if state is table.State.KEEPING:
        # The snapshots are lost with it.
        if move.transfer.is_local:
            rows.forget(ctxt, move)
            return move
        # The other node drives this one, and has done its part.
        completing = table.State.COMPLETING
        return rows.change_state(
            ctxt, move, completing.value, done=done + tuple(
                step.name for step in table.TABLE[completing].steps
                if step.side is table.Side.DESTINATION))
    return rows.record_done(ctxt, move, (*move.done, *done))


def _refusal(move: rows.Move, lost: table.Side, reason: str
             ) -> exception.NotAbandoned:
    return exception.NotAbandoned(move_id=move.move_id, state=move.state,
                                  host=_host(move, lost), reason=reason)


def _host(move: rows.Move, side: table.Side) -> str:
    return (move.transfer.source_host if side is table.Side.SOURCE
            else move.transfer.destination_host)


def _lost_side(ctxt: context.RequestContext, move: rows.Move) -> table.Side:
    down = directory.down(ctxt)
    lost = [side for side in table.Side if _host(move, side) in down]
    if lost and move.transfer.is_local:
        # No other node has a part in it.
        return (table.Side.SOURCE if move.state == table.State.KEEPING
                else table.Side.DESTINATION)
    if len(lost) != 1:
        raise exception.NotAbandoned(
            move_id=move.move_id, state=move.state,
            host=' and '.join(_host(move, side) for side in table.Side),
            reason='both are down' if lost else 'both are up, so it ends by '
            'itself')
    return lost[0]
