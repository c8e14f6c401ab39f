# SPDX-License-Identifier: Apache-2.0
"""What a guest of QEMU's boots: Debian's kernel, and what its init needs.

They are taken out of Debian's packages without installing these: the machine's
own kernel is nobody's business here. What is needed of them lies in a cache
folder, one for each set of versions.
"""

from collections.abc import Iterable
from collections.abc import Mapping
import dataclasses
import pathlib
import re
import shutil

from lab import cache
from lab import errors
from lab import packages

# A metapackage: the kernel is what it depends on.
KERNEL = 'linux-image-cloud-amd64'
# Drivers that the guest needs; Debian has them as modules.
_DRIVERS = ('virtio_pci', 'virtio_blk')
_KERNEL_FILE = 'vmlinuz'


@dataclasses.dataclass(frozen=True)
class Image:
    """A kernel, and the folder with the modules and programs for it."""

    folder: pathlib.Path

    @property
    def kernel(self) -> pathlib.Path:
        """What QEMU boots."""
        return self.folder / _KERNEL_FILE

    def program(self, name: str) -> bytes:
        """A program of the packages."""
        return (self.folder / name).read_bytes()

    def initramfs(self, files: Mapping[str, bytes]) -> bytes:
        """A root file system of these files.

        It has modules, too, to be loaded in the order of their names, and
        nothing that loads them: ``init`` is among the files.
        """
        return _archive({**files, **{
            f'modules/{path.name}': path.read_bytes()
            for path in sorted((self.folder / 'modules').iterdir())}})


def fetched(programs: Mapping[str, str] | None = None) -> Image:
    """The image of the newest packages; downloads them if need be.

    :param programs: the name of each that is wanted, and of its package
    """
    programs = programs or {}
    found = packages.with_lists(lambda: _packages(programs.values()))
    name = '-'.join(['qemu-guest', *found.values()])
    return Image(cache.made(
        name, _KERNEL_FILE,
        lambda scratch: _fill(scratch, list(found), programs)))


def _packages(others: Iterable[str]) -> dict[str, str]:
    """Names of the packages, with their versions."""
    depends = packages.run(['apt-cache', 'depends', '--important', KERNEL])
    kernels = re.findall(r'Depends: (linux-image-\S+)', depends)
    if len(kernels) != 1:
        raise errors.LabError(
            f'One kernel was expected as what {KERNEL} depends on: {depends}')
    return packages.versions([kernels[0], *others])


def _fill(scratch: pathlib.Path, names: list[str],
          programs: Iterable[str]) -> None:
    """Make the folder ``result`` of what is in the packages."""
    root, result = packages.extract(names, scratch), scratch / 'result'
    (result / 'modules').mkdir(parents=True)
    shutil.copy(next(root.glob('boot/vmlinuz-*')), result / _KERNEL_FILE)
    for program in programs:
        shutil.copy(next(root.glob(f'**/bin/{program}')), result / program)
    # Number and name: who depends on others comes after them.
    for number, path in enumerate(_in_order(root, _DRIVERS)):
        shutil.copy(path, result / 'modules' / f'{number:02}-{path.name}')


def _in_order(root: pathlib.Path, names: tuple[str, ...]
              ) -> list[pathlib.Path]:
    """Files of modules and of what they depend on, in order of loading."""
    found: list[pathlib.Path] = []
    for name in names:
        # Without a file it is built in.
        for path in root.glob(f'**/kernel/**/{name}.ko*'):
            depends = packages.run(
                ['modinfo', '--field', 'depends', str(path)])
            needed = _in_order(root, tuple(depends.strip().split(',')))
            found += [one for one in [*needed, path] if one not in found]
    return found


def _archive(files: Mapping[str, bytes]) -> bytes:
    """Executable files and the folders they are in, as the kernel reads them.

    The format "newc" of the kernel's buffer-format.rst.
    """
    folders = {'dev', 'proc', 'sys', *(str(pathlib.PurePath(name).parent)
                                       for name in files)} - {'.'}
    entries = [(name, 0o40755, b'') for name in sorted(folders)]
    entries += [(name, 0o100755, content) for name, content in files.items()]
    entries.append(('TRAILER!!!', 0, b''))
    archive = bytearray()
    for number, (name, mode, content) in enumerate(entries):
        path = name.encode() + b'\0'
        fields = (number, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0,
                  len(path), 0)
        archive += b'070701' + b''.join(b'%08X' % field for field in fields)
        for piece in (path, content):
            archive += piece
            archive += bytes(-len(archive) % 4)
    return bytes(archive)
