# SPDX-License-Identifier: Apache-2.0
"""Node-local, migrating storage for OpenStack's block storage service.

The packages are layers, each calling only downwards:

``driver``
    Cinder's volume driver interface.  Decides *what* happens.
``moves``
    The life of a move: states, transitions, the steps that lead from one to
    the next, the periodic task and the recovery at start-up.
``peers``
    Who the peers are, and the RPC between them.
``datapath``
    What lies under a volume's handle.
``node``
    Adapters to the node's tools, each with a simulated twin.

``nova`` and ``scheduler`` are no layers of the driver: they run in Nova's
services, and in cinder-scheduler.

``rows`` stands beside ``peers``: Cinder's database rows that hold a move.
"""
