# SPDX-License-Identifier: Apache-2.0

from tests.database import base
from tests.unit.moves import test_mover


class AtOnceTest(base.OnMariaDB, test_mover.AtOnceTest):
    """Threads that are in transactions at the same time."""
