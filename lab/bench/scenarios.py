# SPDX-License-Identifier: Apache-2.0
"""What is measured: a table.

T1Q1 is one thread with one request at a time. A volume's first MiB are
*filled* before they are used where local blocks are wanted; all other blocks
are remote, and a job goes to each of them once.
"""

import dataclasses

from lab.bench import fio
from lab.bench import stacks
from lab.bench import steps

# Of a disk's request, in milliseconds
LATENCIES = (0.1, 0.3, 1.0, 3.0)
ONE = (0.3,)
# MiB
VOLUME = 1024
FILLED = 16


@dataclasses.dataclass(frozen=True)
class Scenario:
    """Steps on one fresh stack, for some disks and some stacks.

    :ivar size: of the volume, in MiB
    :ivar latencies: of the disks, in milliseconds
    """

    steps: tuple[steps.Step, ...]
    size: int = VOLUME
    latencies: tuple[float, ...] = ONE
    kinds: tuple[type[stacks.Stack], ...] = stacks.ALL


# Where a job goes: blocks that are local after Fill, or two areas that
# nothing else touches
LOCAL = {'size': FILLED, 'again': True}
FIRST = {'offset': FILLED, 'size': 512 - FILLED}
SECOND = {'offset': 512, 'size': 512}
BIG = {'block': '1m', 'depth': 4}
FILL = steps.Fill(size=FILLED)

ENGINES = stacks.ALL[1:]
FRONTENDS = (stacks.Raw, stacks.UblkHydrator, stacks.NbdHydrator)
SWAPPED = (stacks.Raw, *stacks.ALL[2:])
BEST = (stacks.DriversClone, stacks.UblkHydrator)
SIX_KINDS = (stacks.Raw, stacks.DriversClone, stacks.UblkHydrator)


def _job(pattern: str, *areas: dict[str, object], **options: object
         ) -> fio.Job:
    for area in areas:
        options |= area
    return fio.Job(pattern, **options)  # type: ignore[arg-type]


SYNC = (
    Scenario((
        steps.Guest('sync-new', _job('randwrite', FIRST, sync=True)),
    ), latencies=LATENCIES),
    Scenario((
        steps.Guest('fsync-new', _job('randwrite', FIRST, fsync=True)),
        steps.Guest('deep-new', _job('randwrite', SECOND, depth=32)),
        FILL,
        steps.Guest('sync-settled', _job('randwrite', LOCAL, sync=True)),
    ), latencies=(0.3, 3.0)),
)

# What is short of raw at depth where a disk is slow: a time of each request's,
# whatever the disk does, is less of it the slower the disk is.
SLOW = (
    Scenario((
        steps.Guest('slow-new', _job('randwrite', SECOND, depth=32)),
        FILL,
        steps.Guest('slow-settled', _job('randwrite', LOCAL, depth=32)),
    ), latencies=(3.0, 12.0), kinds=FRONTENDS),
)

SIDE_BY_SIDE = (
    Scenario((
        steps.Guest('read-remote', _job('randread', FIRST)),
        steps.Fill(size=FILLED, flushed=False),
        steps.Guest('read-unsettled', _job('randread', LOCAL)),
        steps.Flush(),
        steps.Guest('read-settled', _job('randread', LOCAL)),
        steps.Guest('deep-settled', _job('randwrite', LOCAL, depth=32)),
    )),
    Scenario((
        steps.Guest('big-write-new', _job('write', FIRST, BIG)),
        steps.Guest('big-read-remote', _job('read', SECOND, BIG)),
        steps.Guest('big-read-settled', _job('read', FIRST, BIG)),
    )),
)

WHILE_HYDRATING = (
    Scenario((
        steps.GuestAndHydration('sync-new-on',
                                _job('randwrite', FIRST, sync=True)),
    ), kinds=BEST),
    Scenario((
        steps.GuestAndHydration('read-remote-on', _job('randread', FIRST)),
    ), kinds=BEST),
    Scenario((
        FILL,
        steps.GuestAndHydration('deep-settled-on',
                                _job('randwrite', LOCAL, depth=32)),
    ), kinds=ENGINES),
    Scenario((
        steps.GuestAndHydration(
            'big-read-on', _job('read', SECOND, BIG, again=True)),
    ), kinds=BEST),
    Scenario((
        steps.GuestAndHydration(
            'big-write-on', _job('write', SECOND, BIG, again=True)),
    ), kinds=BEST),
)

HYDRATION = (
    Scenario((steps.Hydration('hydration'),), size=512),
)

SWAP = (
    Scenario((
        steps.Swap('swap', _job('randwrite', sync=True, pause=1000)),
    ), size=64, kinds=SWAPPED),
)

# The six commands of "Understanding Storage Performance", to the letter but
# for the time that they run
SIX = {
    'six-1': _job('write', block='4M', depth=32),
    'six-2': _job('read', block='4M', depth=32),
    'six-3': _job('randwrite', fsync=True),
    'six-4': _job('randread'),
    'six-5': _job('randwrite', depth=128),
    'six-6': _job('randread', depth=128),
}
SIX_COMMANDS = tuple(
    Scenario((steps.Guest(key, job),), size=256, kinds=SIX_KINDS)
    for key, job in SIX.items())

SCENARIOS = (*SYNC, *SLOW, *SIDE_BY_SIDE, *WHILE_HYDRATING, *HYDRATION, *SWAP,
             *SIX_COMMANDS)
# What is enough for a first look
QUICK = (*SYNC, *SIDE_BY_SIDE, WHILE_HYDRATING[2], *HYDRATION, *SWAP)

# How each is called where figures are shown
LABELS = {
    'sync-new': 'T1Q1 4k random write, sync=1, remote blocks',
    'fsync-new': 'T1Q1 4k random write, fsync=1, remote blocks',
    'sync-settled': 'T1Q1 4k random write, sync=1, settled blocks',
    'read-remote': 'T1Q1 4k random read, remote blocks',
    'read-unsettled': 'T1Q1 4k random read, local, not settled',
    'read-settled': 'T1Q1 4k random read, settled blocks',
    'deep-new': 'depth 32 4k random write, remote blocks',
    'deep-settled': 'depth 32 4k random write, settled blocks',
    'slow-new': 'depth 32 4k random write, remote blocks, slow disks',
    'slow-settled': 'depth 32 4k random write, settled blocks, slow disks',
    'big-write-new': '1M write, depth 4, remote blocks',
    'big-read-remote': '1M read, depth 4, remote blocks',
    'big-read-settled': '1M read, depth 4, settled blocks',
    'sync-new-on': 'T1Q1 4k random write, sync=1, remote blocks',
    'read-remote-on': 'T1Q1 4k random read, remote blocks',
    'deep-settled-on': 'depth 32 4k random write, settled blocks',
    'big-read-on': '1M read, depth 4, remote blocks',
    'big-write-on': '1M write, depth 4, remote blocks',
    'hydration': 'hydration of 512 MiB, no guest',
    'swap': 'swap to linear',
    'six-1': 'linear write 4M, depth 32',
    'six-2': 'linear read 4M, depth 32',
    'six-3': 'random write 4k, depth 1, fsync=1',
    'six-4': 'random read 4k, depth 1',
    'six-5': 'random write 4k, depth 128',
    'six-6': 'random read 4k, depth 128',
}
# What the same guest does to the raw volume, where nothing is copied
BESIDE = {
    'sync-new-on': 'sync-new', 'read-remote-on': 'read-remote',
    'deep-settled-on': 'deep-settled', 'big-read-on': 'big-read-remote',
    'big-write-on': 'big-write-new',
}
