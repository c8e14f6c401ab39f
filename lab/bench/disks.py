# SPDX-License-Identifier: Apache-2.0
"""Disks of an exact latency on a node: null_blk.

Each request takes the same time, whatever its size and however many there are
at once. They have a volatile cache, so that a flush is a request of its own
(without a cache the kernel would drop it), and they take FUA. They keep what
is written in the node's memory. See Documentation/block/null_blk.rst.
"""

import dataclasses

from lab import errors
from lab import node as nodes

SECTOR = 512
MIB = 1 << 20
_CONFIGURATION = '/sys/kernel/config/nullb'
_LVM = ('devices { types = [ "nullb", 16 ] use_devicesfile = 0 '
        'global_filter = [ "a|^/dev/slow|", "r|.*|" ] }')


@dataclasses.dataclass(frozen=True)
class Counters:
    """What a disk has done, from its ``stat`` in sysfs.

    :ivar reads: requests
    :ivar writes: requests, flushes among them
    :ivar written: bytes
    """

    reads: int
    writes: int
    written: int

    @classmethod
    def parse(cls, text: str) -> 'Counters':
        """From Documentation/block/stat.rst.

        :raises LabError: it has another form
        """
        try:
            words = [int(word) for word in text.split()]
            return cls(reads=words[0], writes=words[4],
                       written=words[6] * SECTOR)
        except (ValueError, IndexError) as error:
            raise errors.LabError(f'"{text}" are no counters of a disk') \
                from error

    def __sub__(self, before: 'Counters') -> 'Counters':
        return Counters(*(mine - other for mine, other in zip(
            dataclasses.astuple(self), dataclasses.astuple(before))))


@dataclasses.dataclass(frozen=True)
class Disk:
    """A disk for data and metadata, and one of the same kind for the source.

    The first has a volume group with the volumes ``data`` and ``map``; the
    second is the source as it is.

    :ivar node: where it is
    :ivar latency: milliseconds of a request
    :ivar size: of the data and of the source, in MiB
    """

    node: nodes.Node
    latency: float
    size: int

    @property
    def _name(self) -> str:
        return f'slow{round(self.latency * 1000)}'

    @property
    def _group(self) -> str:
        return f'bench{round(self.latency * 1000)}'

    @property
    def data(self) -> str:
        """The destination's logical volume."""
        return f'/dev/{self._group}/data'

    @property
    def map(self) -> str:
        """The logical volume for what an engine has to note."""
        return f'/dev/{self._group}/map'

    @property
    def source(self) -> str:
        """What the data come from."""
        return f'/dev/{self._name}s'

    def make(self) -> None:
        """Make both disks and the volumes."""
        script = []
        for name, size in ((self._name, self.size + 64 + 8),
                           (self._name + 's', self.size)):
            folder = f'{_CONFIGURATION}/{name}'
            script.append(f'mkdir {folder}')
            for key, value in (
                    ('size', size), ('blocksize', 512), ('memory_backed', 1),
                    ('irqmode', 2),
                    ('completion_nsec', round(self.latency * 1e6)),
                    # As many as the node has processors: one
                    ('submit_queues', 1), ('hw_queue_depth', 256),
                    # As NVMe disks have none
                    ('no_sched', 1), ('discard', 1), ('cache_size', 64),
                    ('power', 1)):
                script.append(f'echo {value} > {folder}/{key}')
        lvm = f"--config '{_LVM}'"
        script += [
            'udevadm settle',
            f'vgcreate {lvm} -qq {self._group} /dev/{self._name}',
            f'lvcreate {lvm} -qq -y -W n -L {self.size}M -n data '
            f'{self._group}',
            f'lvcreate {lvm} -qq -y -W n -L 64M -n map {self._group}']
        self.node.run(['bash', '-ec', '\n'.join(script)])

    def clear(self) -> None:
        """Have it read zeros again, which gives back the memory."""
        self.node.run(['bash', '-ec', f'blkdiscard -f {self.map}\n'
                                      f'blkdiscard -f {self.data}'])

    def fill_source(self) -> None:
        """Give the source content that is not zeros."""
        self.node.run(['bash', '-c', (
            'openssl enc -aes-128-ctr -K 0 -iv 0 < /dev/zero 2> /dev/null'
            f' | dd of={self.source} bs=1M count={self.size} oflag=direct'
            ' iflag=fullblock status=none')], timeout=300)

    def counters(self) -> Counters:
        """Of the disk with data and metadata, since it was made."""
        return Counters.parse(self.node.run(
            ['cat', f'/sys/block/{self._name}/stat']).stdout)
