# SPDX-License-Identifier: Apache-2.0
"""All that one backend does about moves, put together."""

from collections.abc import Collection
import dataclasses
from typing import Any

from cinder_localstor.datapath import destination
from cinder_localstor.datapath import engines
from cinder_localstor.datapath import handles
from cinder_localstor.datapath import snapshots
from cinder_localstor.datapath import source
from cinder_localstor.datapath import wipes
from cinder_localstor.moves import answers
from cinder_localstor.moves import copier
from cinder_localstor.moves import custodian
from cinder_localstor.moves import executor
from cinder_localstor.moves import exports
from cinder_localstor.moves import facts
from cinder_localstor.moves import gate
from cinder_localstor.moves import keeper
from cinder_localstor.moves import messages
from cinder_localstor.moves import mover
from cinder_localstor.moves import notifications
from cinder_localstor.moves import queues
from cinder_localstor.moves import recovery
from cinder_localstor.moves import scheduler
from cinder_localstor.node import interface
from cinder_localstor.peers import rpc

# Of the time that a peer waits for an answer, what may be waited for a volume
GATE_SHARE = 0.8


@dataclasses.dataclass(frozen=True)
class Service:
    """The parts of a backend that have to do with moves.

    :ivar on_destination: the destination side of moves here
    :ivar executor: drives the moves that nobody waits for
    """

    mover: mover.Mover
    copier: copier.Copier
    keeper: keeper.Keeper
    custodian: custodian.Custodian
    scheduler: scheduler.Scheduler
    recovery: recovery.Recovery
    answers: answers.Answers
    on_destination: destination.Destination
    executor: executor.Executor


def make(host: str, node: interface.Node, all_engines: engines.Engines,
         peers: rpc.PeerAPI, configuration: Any, workers: Any = None
         ) -> Service:
    """Put the parts of one backend together.

    :param host: ``host@backend`` of this node
    :param workers: where moves are looked after, a pool of its own if it is
        None
    """
    node_handles = handles.Handles(node)
    on_source = source.Source(node, configuration)
    on_destination = destination.Destination(node, all_engines)
    turns = facts.Turns(configuration.localstor_max_moves)
    steps = executor.StepRunner(on_source, on_destination, turns)

    wiped = wipes.Wipes(node.volumes)

    def remaining(asked: str, names: Collection[str]) -> set[str]:
        if asked == host:
            return wiped.remaining(names)
        return peers.remaining(asked, names)

    tools = facts.Tools(
        host, on_destination, node.device_mapper.devices,
        node.initiator.connected, peers.is_source_used, remaining, turns)
    notified = notifications.Notifications(host, queues.Queue(1, workers))
    waiting = messages.Waiting()
    background = executor.Executor(steps, on_destination, tools, peers.run,
                                   notified, waiting)
    # A user waits, so a peer that does not answer is given up soon.
    interactive = executor.Executor(
        steps, on_destination, tools,
        lambda peer, moving, names: peers.run(peer, moving, names,
                                              patient=False),
        notified, waiting)
    periodic = scheduler.Scheduler(
        host, node, on_destination, background,
        exports.Exports(host, node.target, steps), peers, configuration,
        workers)
    volume_gate = gate.Gate(host, configuration.localstor_peer_timeout)
    copies_here = copier.Copier(
        host, node, on_source, on_destination, node_handles, steps,
        interactive, periodic, peers, volume_gate, configuration)
    keeps = keeper.Keeper(host, snapshots.Snapshots(node, configuration),
                          volume_gate, copies_here, interactive, periodic,
                          peers)
    lets_go = custodian.Custodian(host, node, volume_gate, peers)
    return Service(
        mover=mover.Mover(host, node, on_source, node_handles, interactive,
                          periodic, peers, volume_gate, configuration),
        copier=copies_here,
        keeper=keeps,
        custodian=lets_go,
        scheduler=periodic,
        recovery=recovery.Recovery(host, node, node_handles, on_destination,
                                   periodic),
        answers=answers.Answers(host, node, on_source, on_destination, steps,
                                periodic, copies_here, keeps, lets_go,
                                gate.Gate(
                                    host, GATE_SHARE
                                    * configuration.localstor_peer_timeout),
                                configuration),
        on_destination=on_destination, executor=background)
