# SPDX-License-Identifier: Apache-2.0
"""``localstor-nova-compute``, with its privileged daemons there before
anybody waits.

Nova starts each when it is first needed: in a node that takes longer than all
else of a first attach.  Here they are forked off while little is loaded.

Nova flushes nothing of the kernels that it fetches, which guests elsewhere
have on their volumes: a power cut leaves them empty, and Nova starts guests
with them all the same.  Nor does it flush the file that says which node it is
on, without which it does not start again.  Here they are flushed.
"""

from collections.abc import Callable
import functools
import os
import sys
from typing import Any

# First: it changes what others import.
from cinder_localstor.nova import compute  # noqa: I100

from nova import privsep
from os_brick import privileged
from oslo_privsep import priv_context
from oslo_utils import importutils

# Whatever fetches a kernel does it in one of these, or before the first.
FETCHING = ('_create_guest', 'pre_live_migration')


def _flushed(work: Callable[..., Any]) -> Callable[..., Any]:
    """Let a method leave nothing that is only in memory."""
    @functools.wraps(work)
    def and_flush(*arguments: Any, **options: Any) -> Any:
        try:
            return work(*arguments, **options)
        finally:
            os.sync()
    return and_flush


def main() -> None:
    """Run it."""
    for context in (privsep.sys_admin_pctxt, privileged.default):
        context.start(priv_context.Method.FORK)
    # It is large, and the daemons need none of it.
    driver = importutils.import_class(
        'nova.virt.libvirt.driver.LibvirtDriver')
    for name in FETCHING:
        setattr(driver, name, _flushed(getattr(driver, name)))
    identity = importutils.import_module('nova.virt.node')
    identity.write_local_node_uuid = _flushed(identity.write_local_node_uuid)
    compute.main()


if __name__ == '__main__':
    sys.exit(main())
