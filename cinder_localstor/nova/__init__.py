# SPDX-License-Identifier: Apache-2.0
"""Our part in Nova: how nova-compute uses a node's own block devices, and
which node nova-scheduler chooses.

It runs in Nova's services, and knows nothing of the driver nor of Cinder,
which need not be installed there.
"""
