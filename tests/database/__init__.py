# SPDX-License-Identifier: Apache-2.0
"""Tests with MariaDB, where unit tests have a database of one connection."""

import os

# Native threads: greenlets would take turns. It has to be said before Cinder's
# tests are imported.
os.environ['OS_CINDER_DISABLE_EVENTLET_PATCHING'] = 'true'
