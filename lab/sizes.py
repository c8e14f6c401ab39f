# SPDX-License-Identifier: Apache-2.0
"""Sizes of disks and memory as people write them."""

GIB = 1024 ** 3

_UNITS = {'K': 1, 'M': 2, 'G': 3, 'T': 4}


def parse(text: str) -> int:
    """Bytes of a number with an optional binary unit; ValueError if none."""
    power = _UNITS.get(text[-1:].upper(), 0)
    number = int(text[:-1] if power else text)
    if number <= 0:
        raise ValueError(text)
    return number * 1024 ** power
