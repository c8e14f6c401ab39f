# SPDX-License-Identifier: Apache-2.0
"""For cinder-scheduler: a volume is made on the node that a request names.

``localstor-nova-compute`` names its own node when Nova makes a volume for an
instance; users can name any: ``openstack volume create --hint
localstor:node=<node>``.  It is a wish: where the node has no room, or no
backend of the volume's type, the volume is made elsewhere.
"""

from __future__ import annotations

from typing import Any

from cinder.scheduler import host_manager
from cinder.scheduler import weights
from cinder.volume import volume_utils
from oslo_config import cfg

from cinder_localstor import opts

CONF = cfg.CONF
CONF.register_opts(opts.SCHEDULER_OPTS)

# The scheduler hint that names a node, as Nova's part has it, too
NODE_HINT = 'localstor:node'


class LocalStorWeigher(weights.BaseHostWeigher):
    """Prefers the backends of the node that a request names."""

    minval = 0
    maxval = 1

    def weight_multiplier(self) -> float:
        """``localstor_node_weight_multiplier``"""
        return CONF.localstor_node_weight_multiplier

    def _weigh_object(self, backend: host_manager.BackendState,
                      properties: dict[str, Any]) -> int:
        hints = properties.get('scheduler_hints') or {}
        return hints.get(NODE_HINT) == volume_utils.extract_host(
            backend.backend_id, 'host')
