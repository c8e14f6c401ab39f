# SPDX-License-Identifier: Apache-2.0
"""What a guest boots: Debian's kernel, and BusyBox for all else."""

from collections.abc import Mapping

from lab import boot_image

_BUSYBOX = 'busybox'
_PROGRAMS = {_BUSYBOX: 'busybox-static'}

_INIT = b"""\
#!/bin/busybox sh
/bin/busybox --install -s /bin
mount -t devtmpfs devtmpfs /dev
mount -t proc proc /proc
mount -t sysfs sysfs /sys
for module in /modules/*; do insmod "$module"; done
. /work
poweroff -f
"""


def fetched() -> boot_image.Image:
    """The image of the newest packages; downloads them if need be."""
    return boot_image.fetched(_PROGRAMS)


def initramfs(image: boot_image.Image, work: str,
              files: Mapping[str, bytes] | None = None) -> bytes:
    """A root file system whose init does this work, and powers off.

    :param files: what the work needs besides, by paths from the root
    """
    return image.initramfs({**(files or {}), 'init': _INIT,
                            'work': work.encode(),
                            'bin/busybox': image.program(_BUSYBOX)})
