# SPDX-License-Identifier: Apache-2.0
"""How far a volume is that arrives on a node, as its engine tells."""

import dataclasses
import json
import os
import sys
import time

from cinder_localstor import opts
from lab import errors
from lab import node as nodes

SECTOR = 512  # bytes
# Of dm-clone, as the driver has it
THRESHOLD, = (str(option.default) for option in opts.LOCALSTOR_OPTS
              if option.name == 'localstor_hydration_threshold')
PROGRAM = os.path.join(os.path.dirname(sys.executable), 'localstor-hydrator')


@dataclasses.dataclass(frozen=True)
class Arrival:
    """What the engine under a handle tells; `local` and `total` in bytes."""

    engine: str
    hydrating: bool
    local: int
    total: int


def look(node: nodes.Node, device: str) -> Arrival | None:
    """The arrival behind a handle; None when it lies on its own volume.

    :param device: of the handle
    """
    text = node.run(
        ['sh', '-c', 'dmsetup status --noflush "$1-clone" 2>/dev/null || '
         '"$0" status "/run/localstor/$1" 2>/dev/null', PROGRAM,
         _copy(device)], check=False).stdout
    if text.startswith('{'):
        status = json.loads(text)
        return Arrival('hydrator', status['state'] != 'starting',
                       status['local'], status['size'])
    words = text.split()
    if 'clone' not in words:
        return None
    region = int(words[5]) * SECTOR
    local, total = (int(word) * region for word in words[6].split('/'))
    return Arrival('clone', 'no_hydration' not in words, local, total)


def wait_until_hydrating(node: nodes.Node, device: str, timeout: float
                         ) -> None:
    """Wait until something arrives behind a handle.

    :param device: of the handle
    :param timeout: seconds
    :raises LabError: nothing does in time
    """
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        found = look(node, device)
        if found and found.hydrating:
            return
        time.sleep(0.2)
    raise errors.LabError(f'Hydration of {device} on {node.name} does not '
                          f'begin')


def throttle(node: nodes.Node, device: str, rate: int | None = None) -> None:
    """Let a helper copy so many bytes per second, or as it was started with.

    dm-clone knows no rate: it copies nothing then, though it says that it
    hydrates.  Where nothing arrives, nothing happens.
    """
    copy = _copy(device)
    told = node.run(['dmsetup', 'message', copy + '-clone', '0',
                     'hydration_threshold', '0' if rate else THRESHOLD],
                    check=False)
    if told.returncode:
        limits = ['--limit', str(rate), '--minimum', str(rate)] if rate else []
        node.run([PROGRAM, 'throttle', '/run/localstor/' + copy, *limits],
                 check=False)


def _copy(device: str) -> str:
    return os.path.basename(device).removesuffix('-handle')
