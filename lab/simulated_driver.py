# SPDX-License-Identifier: Apache-2.0
"""The driver on simulated nodes, of which a process has many."""

from typing import Any

from cinder_localstor.driver import localstor
from cinder_localstor.node import interface
from cinder_localstor.node import simulated

# Regions of each volume that arrive at a time: of a GiB the half
REGIONS = 8

# All of this process, by their hosts
NODES: dict[str, simulated.SimulatedNode] = {}


class _Elsewhere(simulated.SimulatedNode):
    """A node of another process, whose disks read as nothing."""

    def read(self, path: str, number: int) -> str:
        return ''


_ELSEWHERE = _Elsewhere('elsewhere', {})


class _Initiator(simulated.SimulatedInitiator):
    """Reads sources of any process."""

    def connect(self, export: interface.Export) -> str:
        self.sessions[export.iqn] = export
        return '/dev/iscsi/' + export.serial

    def find(self, move_id: str) -> tuple[simulated.SimulatedNode, str]:
        return _ELSEWHERE, move_id


class SimulatedDriver(localstor.LocalStorDriver):
    """The driver on a simulated node of its host's name."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, make_node=self._node_in_memory, **kwargs)

    def _node_in_memory(self, _configuration: Any) -> simulated.SimulatedNode:
        if self.host not in NODES:
            node = simulated.SimulatedNode(self.host, NODES)
            node.initiator = _Initiator(NODES, node.faults)
        return NODES[self.host]


def hydrate() -> None:
    """Let something arrive at all nodes."""
    for node in list(NODES.values()):
        node.hydrate(REGIONS)
