# SPDX-License-Identifier: Apache-2.0
"""Ends moves whose other node is lost for good.

A move waits for a node that is away for as long as it takes.  Only an operator
knows that it will never come back.
"""

from cinder import context

from cinder_localstor import exception
from cinder_localstor.moves import table
from cinder_localstor.peers import directory
from cinder_localstor import rows


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
    """
    move = rows.get(ctxt, move_id)
    if move is None:
        raise exception.NoSuchMove(move_id=move_id)
    state = table.State(move.state)
    lost = _lost_side(ctxt, move)
    if table.LOST[lost].value in move.done:
        return move
    if table.ABANDONABLE.get(state) is not lost:
        raise exception.NotAbandoned(
            move_id=move_id, state=move.state, host=_host(move, lost),
            reason='it holds what no other node has of volume %s. Bring it '
                   'back, or restore the volume from a backup'
                   % move.volume_id)
    if state is table.State.STARTING:
        if not written_is_lost:
            raise exception.NotAbandoned(
                move_id=move_id, state=move.state, host=_host(move, lost),
                reason='the guest may have written there. If it never ran '
                       'there, or you give up what it wrote, say '
                       '--written-is-lost')
        state = table.State.ABORTING
        move = rows.change_state(ctxt, move, state.value, swap=True)
    elif state is table.State.KEEPING:
        # The snapshots are lost with it.
        if move.transfer.is_local:
            rows.forget(ctxt, move)
            return move
        # The other node drives this one.
        state = table.State.COMPLETING
        move = rows.change_state(ctxt, move, state.value)
        move = rows.record_done(ctxt, move, tuple(
            step.name for step in table.TABLE[state].steps))
    steps = [step.name for step in table.TABLE[state].steps
             if step.side is lost and not step.is_done(move)]
    return rows.record_done(ctxt, move, (*move.done, *steps,
                                         table.LOST[lost].value))


def _host(move: rows.Move, side: table.Side) -> str:
    return (move.transfer.source_host if side is table.Side.SOURCE
            else move.transfer.destination_host)


def _lost_side(ctxt: context.RequestContext, move: rows.Move) -> table.Side:
    down = directory.down(ctxt)
    lost = [side for side in table.Side if _host(move, side) in down]
    if lost and move.transfer.is_local and move.state == table.State.KEEPING:
        return table.Side.SOURCE  # no other node has a part in it
    if len(lost) != 1:
        raise exception.NotAbandoned(
            move_id=move.move_id, state=move.state,
            host=' and '.join(_host(move, side) for side in table.Side),
            reason='both are down' if lost else 'both are up, so it ends by '
            'itself')
    return lost[0]
