# SPDX-License-Identifier: Apache-2.0
"""Tests of our part in Nova, with Nova's own services.

They run in processes of their own, because Nova and Cinder have options of the
same names.
"""

import os

# Native threads, as nova-compute has them. Nova's tests choose by this, and
# it has to be done before anything is imported.
os.environ['OS_NOVA_DISABLE_EVENTLET_PATCHING'] = 'true'

from nova import monkey_patch  # noqa: E402

monkey_patch.patch()
