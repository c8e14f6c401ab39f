# SPDX-License-Identifier: Apache-2.0
"""Looks into sparse files."""

from collections.abc import Iterator
import os
import pathlib

CHUNK = 1 << 20  # bytes


def contains(path: pathlib.Path, wanted: bytes) -> bool:
    """Whether the parts of a file that are no holes contain some bytes."""
    return any(wanted in chunk for chunk in _chunks(path, len(wanted)))


def _chunks(path: pathlib.Path, overlap: int) -> Iterator[bytes]:
    with open(path, 'rb') as disk:
        end = os.fstat(disk.fileno()).st_size
        at = 0
        while at < end:
            try:
                at = os.lseek(disk.fileno(), at, os.SEEK_DATA)
            except OSError:
                return  # holes only
            hole = os.lseek(disk.fileno(), at, os.SEEK_HOLE)
            while at < hole:
                yield os.pread(disk.fileno(), CHUNK + overlap, at)
                at += CHUNK
