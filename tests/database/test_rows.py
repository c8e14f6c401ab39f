# SPDX-License-Identifier: Apache-2.0
"""The unit tests of rows, but for those of SQLite's own ways."""

from tests.database import base
from tests.unit import test_rows

SQLITES = ('test_moves_of_a_volume_are_found_by_an_index',
           'test_moves_of_a_host_are_found_among_the_volumes_there_are',
           'test_nothing_but_problems_is_ever_cut')

for kind in list(vars(test_rows).values()):
    if isinstance(kind, type) and issubclass(kind, test_rows.RowsTestCase):
        globals()[kind.__name__] = type(
            kind.__name__, (base.OnMariaDB, kind),
            {'__module__': __name__,
             **{name: None for name in SQLITES if hasattr(kind, name)}})
del kind
