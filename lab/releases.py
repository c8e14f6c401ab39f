# SPDX-License-Identifier: Apache-2.0
"""Former releases of the driver on some of the nodes, as in an upgrade."""

import os
import pathlib
import subprocess
import tempfile

from lab import errors
from lab import layout
from lab import node as nodes
from lab import node_services

PACKAGE = 'cinder_localstor'
# Where Python looks for the driver first
_PATH = 'PYTHONPATH'


def tree(place: layout.Layout, revision: str) -> pathlib.Path:
    """Where the driver of a revision of this repository is.

    :raises LabError: there is no such revision, or no driver in it
    """
    found = place.directory / 'former' / revision
    if not (found / PACKAGE).exists():
        archive = subprocess.run(
            ['git', '-C', place.repository, 'archive', revision, '--',
             PACKAGE], capture_output=True)
        if archive.returncode:
            raise errors.LabError(
                f'There is no driver of revision "{revision}" in '
                f'{place.repository}: {archive.stderr.decode().strip()}')
        found.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=found) as unpacked:
            subprocess.run(['tar', '-x', '-C', unpacked], check=True,
                           input=archive.stdout)
            # Whatever ends us, it is there as a whole or not at all.
            os.rename(os.path.join(unpacked, PACKAGE), found / PACKAGE)
    return found


def choose(node: nodes.Node, revision: str = '') -> None:
    """Let a node have a driver when its services are started the next time.

    :param revision: '' for the present one
    """
    present = node_services.repository_on_path(node.place)[_PATH]
    trees = [str(tree(node.place.layout, revision))] if revision else []
    node.configure(environment={_PATH: os.pathsep.join([*trees, present])})


def is_former(node: nodes.Node) -> bool:
    """Whether a node has a driver that is not the present one."""
    first = node.environment.get(_PATH, '').split(os.pathsep)[0]
    return pathlib.Path(first).is_relative_to(
        node.place.layout.directory / 'former')
