# SPDX-License-Identifier: Apache-2.0
"""Folders outside the repository for what takes long to make or to fetch."""

from collections.abc import Callable
import fcntl
import os
import pathlib
import shutil


def folder(name: str) -> pathlib.Path:
    """Where a thing of this name lies, once it is made."""
    cache = os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache'
    return pathlib.Path(cache, 'cinder-localstor', name)


def made(name: str, file: str, make: Callable[[pathlib.Path], None]
         ) -> pathlib.Path:
    """The folder of this name, made by one process if it is not there.

    :param file: it has one of this name if it is whole
    :param make: called with a scratch folder, in which it makes all of it as
        the folder ``result``
    """
    place = folder(name)
    place.parent.mkdir(parents=True, exist_ok=True)
    with open(place.with_name(name + '.lock'), 'w') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (place / file).exists():
            return place
        scratch = place.with_name(name + '.build')
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        try:
            make(scratch)
            shutil.rmtree(place, ignore_errors=True)
            (scratch / 'result').rename(place)
        finally:
            shutil.rmtree(scratch)
        return place
