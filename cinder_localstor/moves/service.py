# SPDX-License-Identifier: Apache-2.0
"""All that one backend does about moves, put together."""

import dataclasses
from typing import Any

from cinder_localstor.datapath import destination
from cinder_localstor.datapath import engines
from cinder_localstor.datapath import handles
from cinder_localstor.datapath import source
from cinder_localstor.moves import answers
from cinder_localstor.moves import executor
from cinder_localstor.moves import exports
from cinder_localstor.moves import mover
from cinder_localstor.moves import recovery
from cinder_localstor.moves import scheduler
from cinder_localstor.node import interface
from cinder_localstor.peers import rpc


@dataclasses.dataclass(frozen=True)
class Service:
    """The parts of a backend that have to do with moves.

    :ivar arriving: the destination side of moves here
    :ivar executor: drives the moves that nobody waits for
    """

    mover: mover.Mover
    scheduler: scheduler.Scheduler
    recovery: recovery.Recovery
    answers: answers.Answers
    arriving: destination.Destination
    executor: executor.Executor


def make(host: str, node: interface.Node, paths: engines.Engines,
         peers: rpc.PeerAPI, configuration: Any, workers: Any = None
         ) -> Service:
    """Put the parts of one backend together.

    :param host: ``host@backend`` of this node
    :param workers: where moves are looked after, a pool of its own if it is
        None
    """
    built = handles.Handles(node)
    on_source = source.Source(node)
    arriving = destination.Destination(node, paths)
    steps = executor.StepRunner(on_source, arriving)

    def make_executor(run_on_peer: executor.RunOnPeer) -> executor.Executor:
        return executor.Executor(
            host, steps, arriving, node.device_mapper.devices, run_on_peer,
            peers.is_source_used)

    patient = make_executor(peers.run)
    # A user waits, so a peer that does not answer is given up soon.
    hasty = make_executor(
        lambda peer, moving, names: peers.run(peer, moving, names,
                                              patient=False))
    periodic = scheduler.Scheduler(
        host, node, arriving, patient,
        exports.Exports(host, node.target, steps), configuration, workers)
    return Service(
        mover=mover.Mover(host, node, on_source, built, steps, patient,
                          hasty, periodic, peers, configuration),
        scheduler=periodic,
        recovery=recovery.Recovery(host, built, periodic),
        answers=answers.Answers(host, node, on_source, arriving, steps,
                                periodic, configuration),
        arriving=arriving, executor=patient)
