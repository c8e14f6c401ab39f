# SPDX-License-Identifier: Apache-2.0
"""The partition table of a new disk: one partition, behind the first MiB.

A Master Boot Record (UEFI Specification 2.10, section 5.2.1), whose numbers
count logical blocks.
"""

import struct

START = 1 << 20  # bytes
LINUX_LVM = 0x8e
_ENTRY = struct.Struct('<B3sB3sII')
_ENTRIES_AT = 446
# Cylinders, heads and sectors say nothing of a disk of today.
_NO_GEOMETRY = b'\xff\xff\xff'


def table(size: int, block_size: int) -> bytes:
    """The first sector of a disk.

    :param size: bytes of the disk
    :param block_size: bytes of a logical block of it
    """
    entry = _ENTRY.pack(0, _NO_GEOMETRY, LINUX_LVM, _NO_GEOMETRY,
                        START // block_size, (size - START) // block_size)
    return (bytes(_ENTRIES_AT) + entry).ljust(510, b'\0') + b'\x55\xaa'
