# SPDX-License-Identifier: Apache-2.0
"""Debian's packages, taken apart without being installed."""

from collections.abc import Callable
from collections.abc import Iterable
import pathlib
import re
import subprocess
from typing import TypeVar

from lab import cache
from lab import errors

_Answer = TypeVar('_Answer')
# Seconds
_PATIENCE = 300
# Whether a folder is whole is seen by a file.
_LIST = 'packages'


def versions(names: Iterable[str]) -> dict[str, str]:
    """The newest version of each package, as part of a file's name.

    :raises LabError: there is no such package
    """
    found = {}
    for name in names:
        text = run(['apt-cache', 'show', '--no-all-versions', name])
        version = re.search(r'^Version: (\S+)$', text, re.MULTILINE)
        if version is None:
            raise errors.LabError(f'{name} has no version: {text}')
        found[name] = version[1].replace(':', '_')
    return found


def extract(names: Iterable[str], scratch: pathlib.Path) -> pathlib.Path:
    """Download packages; the folder below `scratch` with what is in them."""
    root, wanted = scratch / 'root', list(names)
    with_lists(lambda: run(['apt-get', '-q', 'download', *wanted], scratch))
    for package in scratch.glob('*.deb'):
        run(['dpkg-deb', '--extract', str(package), str(root)])
    return root


def kept(name: str) -> pathlib.Path:
    """The folder with what is in a package; downloads it if need be."""
    found = with_lists(lambda: versions([name]))

    def fill(scratch: pathlib.Path) -> None:
        result = extract([name], scratch).rename(scratch / 'result')
        (result / _LIST).write_text(f'{name} {found[name]}\n')
    return cache.made(f'{name}-{found[name]}', _LIST, fill)


def with_lists(ask: Callable[[], _Answer]) -> _Answer:
    """What comes of something that needs the lists of packages.

    It is done again with new ones if it fails: there may be none yet, or what
    they name has been superseded.
    """
    try:
        return ask()
    except errors.LabError:
        run(['apt-get', '-q', 'update'])
        return ask()


def run(command: list[str], folder: pathlib.Path | None = None) -> str:
    """What a command on this machine prints.

    :raises CommandFailed: it fails
    """
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True,
                          stdin=subprocess.DEVNULL, timeout=_PATIENCE)
    if done.returncode:
        raise errors.CommandFailed('this machine', command, done.returncode,
                                   done.stdout, done.stderr)
    return done.stdout
