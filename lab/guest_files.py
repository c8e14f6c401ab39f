# SPDX-License-Identifier: Apache-2.0
"""What Nova has fetched on a node for its guests: their kernels."""

import pathlib


def forget_lost(instances: pathlib.Path) -> None:
    """Remove what a power cut has left empty.

    Nova flushes nothing that it has fetched, starts a guest with it all the
    same, and nova-compute ends when that fails. What is not there is fetched
    again.

    :param instances: ``instances_path`` of nova.conf
    """
    for pattern in ('_base/*', '*/kernel', '*/ramdisk'):
        for path in instances.glob(pattern):
            if path.is_file() and not path.stat().st_size:
                path.unlink()
