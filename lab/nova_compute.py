# SPDX-License-Identifier: Apache-2.0
"""``localstor-nova-compute``, with its privileged daemons there before
anybody waits.

Nova starts each when it is first needed: in a node that takes longer than all
else of a first attach.  Here they are forked off while little is loaded.
"""

import pathlib
import sys

# First: it changes what others import.
from cinder_localstor.nova import compute  # noqa: I100

from nova import privsep
from os_brick import privileged
from oslo_privsep import priv_context

from lab import guest_files

INSTANCES = pathlib.Path('/var/lib/nova/instances')


def main() -> None:
    """Run it."""
    guest_files.forget_lost(INSTANCES)
    for context in (privsep.sys_admin_pctxt, privileged.default):
        context.start(priv_context.Method.FORK)
    compute.main()


if __name__ == '__main__':
    sys.exit(main())
