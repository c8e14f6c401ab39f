# SPDX-License-Identifier: Apache-2.0
"""What many volumes cost a node: its start, and a period of its watch.

The volumes are real logical volumes of one extent each, with rows of their own
in Cinder's database.  They are not made by Cinder, which would take an hour:
the logical volumes come from edited metadata of the group
(vgcfgbackup(8), vgcfgrestore(8)), the rows are copies of a real one.
"""

from collections.abc import Callable
from collections.abc import Iterator
import dataclasses
import datetime
import re
import secrets
import string
import textwrap
import time
from typing import Any
import uuid

import sqlalchemy as sa

from lab import cloud as clouds
from lab import configuration
from lab import node as nodes
from lab import user as users

GROUP = 'cinder-local'
METADATA = '/run/scale.vg'
# Seconds
PERIODS = 30
PATIENCE = 1800
# A command of ours, or of Cinder's and os-brick's tools
COMMAND = re.compile(
    r'(?:localstor\.node\.commands .*?\] (?P<ours>[\w-]+) .*: status -?\d+ '
    r'after (?P<seconds>[\d.]+) s\b'
    r'|CMD "(?P<others>\S+).*" returned: \d+ in (?P<elapsed>[\d.]+)s)')
WHEN = re.compile(r'(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3})')
BEGINS = 'Starting volume driver'
ENDS = 'Driver initialization completed'


@dataclasses.dataclass(frozen=True)
class Measured:
    """What something cost.

    :ivar commands: how many external commands ran
    :ivar inside: seconds that they took together
    :ivar seconds: how long it took in all, None where that says nothing
    """

    what: str
    commands: float
    inside: float
    seconds: float | None = None


def run(cloud: clouds.Cloud, count: int, say: Callable[[str], None]
        ) -> Iterator[Measured]:
    """Measure a node with `count` volumes more than it has."""
    node, other = cloud.nodes[:2]
    user = users.User(cloud)
    say('making %d volumes on %s' % (count, node.name))
    template = user.create_volume(1, 'local', node.name)
    ids = [str(uuid.uuid4()) for _number in range(count)]
    _make_rows(cloud, template, ids)
    _make_logical_volumes(node, ids)
    log = _Log(node)
    say('cutting the power of %s' % node.name)
    node.kill()
    log.skip()
    node.start(timeout=PATIENCE)
    yield log.start_up('start after a power cut')
    log.skip()
    node.service('cinder-volume').restart()
    yield log.start_up('restart of cinder-volume')
    say('waiting for some periods')
    yield log.period('a period, nothing moves')
    comes = user.create_volume(2, 'local', other.name)
    attachment = user.attach(comes, node)
    yield log.period('a period, one volume arrives')
    user.detach(attachment)
    yield _status(node)


def _make_rows(cloud: clouds.Cloud, template: str, ids: list[str]) -> None:
    engine = sa.create_engine(configuration.database_url(cloud.layout,
                                                         'cinder'))
    with cloud.network.entered(), engine.begin() as connection:
        volumes = sa.Table('volumes', sa.MetaData(), autoload_with=connection)
        row = connection.execute(sa.select(volumes).where(
            volumes.c.id == template)).mappings().one()
        connection.execute(sa.insert(volumes), [
            {**row, 'id': volume_id} for volume_id in ids])
    engine.dispose()


def _make_logical_volumes(node: nodes.Node, ids: list[str]) -> None:
    node.run(['vgcfgbackup', '-f', METADATA, GROUP])
    text = node.run(['cat', METADATA]).stdout
    begin = 'logical_volumes {\n'
    first = _used_extents(text)
    sections = ''.join(_section(volume_id, first + number)
                       for number, volume_id in enumerate(ids))
    node.run(['sh', '-c', 'cat >' + METADATA],
             input=text.replace(begin, begin + sections, 1))
    node.run(['vgcfgrestore', '--yes', '-f', METADATA, GROUP],
             timeout=PATIENCE)
    node.run(['vgchange', '--activate', 'y', GROUP], timeout=PATIENCE)


def _used_extents(text: str) -> int:
    """The first extent behind all logical volumes, which have no holes."""
    return max(int(start) + int(count) for count, start in re.findall(
        r'extent_count = (\d+).*?stripes = \[\s*"pv0", (\d+)', text,
        re.DOTALL))


def _section(volume_id: str, extent: int) -> str:
    letters = string.ascii_letters + string.digits
    name = '-'.join(''.join(secrets.choice(letters) for _letter in range(size))
                    for size in (6, 4, 4, 4, 4, 4, 6))
    return textwrap.dedent('''\
        volume-%s {
          id = "%s"
          status = ["READ", "WRITE", "VISIBLE"]
          flags = []
          tags = ["localstor.generation=1", "localstor.volume=%s"]
          creation_time = 1
          creation_host = "lab"
          segment_count = 1
          segment1 {
            start_extent = 0
            extent_count = 1
            type = "striped"
            stripe_count = 1
            stripes = [ "pv0", %d ]
          }
        }
        ''') % (volume_id, name, volume_id, extent)


class _Log:
    """What cinder-volume's log says of the commands that it ran."""

    def __init__(self, node: nodes.Node) -> None:
        self._path = node.service('cinder-volume').log
        self._at = 0

    def skip(self) -> None:
        """Look at what comes from now on."""
        self._at = self._path.stat().st_size

    def _lines(self) -> list[str]:
        with open(self._path, errors='replace') as log:
            log.seek(self._at)
            return log.read().splitlines()

    def start_up(self, what: str) -> Measured:
        """From the first driver's beginning until all are ready."""
        end = time.monotonic() + PATIENCE
        while True:
            lines = self._lines()
            begins = [number for number, line in enumerate(lines)
                      if BEGINS in line]
            ends = [number for number, line in enumerate(lines)
                    if ENDS in line]
            if len(ends) >= len(configuration.BACKENDS):
                break
            if time.monotonic() > end:
                raise TimeoutError('cinder-volume does not come up, see %s'
                                   % self._path)
            time.sleep(0.5)
        taken = _when(lines[ends[-1]]) - _when(lines[begins[0]])
        return Measured(what, *_cost(lines[begins[0]:ends[-1]]),
                        taken.total_seconds())

    def period(self, what: str) -> Measured:
        """The average of some periods, of the default length."""
        self.skip()
        time.sleep(PERIODS)
        commands, inside = _cost(self._lines())
        periods = PERIODS / 5
        return Measured(what, round(commands / periods, 1), inside / periods)


def _when(line: str) -> datetime.datetime:
    match = WHEN.search(line)
    assert match, line
    return datetime.datetime.fromisoformat(match[1])


def _cost(lines: list[str]) -> tuple[int, float]:
    """How many commands ran, and how many seconds they took."""
    found: list[Any] = list(filter(None, map(COMMAND.search, lines)))
    return len(found), sum(float(match['seconds'] or match['elapsed'])
                           for match in found)


def _status(node: nodes.Node) -> Measured:
    started = time.monotonic()
    node.run([str(node.place.binaries / 'cinder-localstor'), '--config-file',
              '/etc/cinder/cinder.conf', 'status', '-f', 'json'],
             check=False, timeout=PATIENCE)
    taken = time.monotonic() - started
    return Measured('cinder-localstor status', 0, 0.0, taken)
