# SPDX-License-Identifier: Apache-2.0
"""What a guest boots: Debian's kernel, and BusyBox for all else.

Both are taken out of Debian's packages without installing these: the machine's
own kernel is nobody's business here. What is needed of them lies in a cache
folder, one for each pair of versions.
"""

from collections.abc import Mapping
import dataclasses
import pathlib
import re
import shutil
import subprocess

from lab import cache
from lab import errors

# A metapackage: the kernel is what it depends on.
KERNEL = 'linux-image-cloud-amd64'
BUSYBOX = 'busybox-static'
# Drivers that the guest needs; Debian has them as modules.
_DRIVERS = ('virtio_pci', 'virtio_blk')
_PATIENCE = 300
_KERNEL_FILE = 'vmlinuz'

_INIT = b"""\
#!/bin/busybox sh
/bin/busybox --install -s /bin
mount -t devtmpfs devtmpfs /dev
mount -t proc proc /proc
mount -t sysfs sysfs /sys
for module in /modules/*; do insmod "$module"; done
. /work
poweroff -f
"""


@dataclasses.dataclass(frozen=True)
class Image:
    """A kernel, and the folder with the programs and modules for it."""

    folder: pathlib.Path

    @property
    def kernel(self) -> pathlib.Path:
        """What QEMU boots."""
        return self.folder / _KERNEL_FILE

    def initramfs(self, work: str) -> bytes:
        """A root file system whose init does this work, and powers off."""
        files = {'init': _INIT, 'work': work.encode(),
                 'bin/busybox': (self.folder / 'busybox').read_bytes()}
        for path in sorted((self.folder / 'modules').iterdir()):
            files[f'modules/{path.name}'] = path.read_bytes()
        return _archive(files)


def fetched() -> Image:
    """The image of the newest packages; downloads them if need be."""
    try:
        packages = _packages()
    except errors.LabError:
        # There are no lists of packages yet.
        _run(['apt-get', '-q', 'update'])
        packages = _packages()
    name = '-'.join(['qemu-guest', *packages.values()])
    return Image(cache.made(
        name, _KERNEL_FILE, lambda scratch: _fill(scratch, list(packages))))


def _packages() -> dict[str, str]:
    """Names of the packages, with their versions."""
    depends = _run(['apt-cache', 'depends', '--important', KERNEL])
    kernels = re.findall(r'Depends: (linux-image-\S+)', depends)
    if len(kernels) != 1:
        raise errors.LabError(
            f'One kernel was expected as what {KERNEL} depends on: {depends}')
    found = {}
    for package in (kernels[0], BUSYBOX):
        text = _run(['apt-cache', 'show', '--no-all-versions', package])
        version = re.search(r'^Version: (\S+)$', text, re.MULTILINE)
        if version is None:
            raise errors.LabError(f'{package} has no version: {text}')
        found[package] = version[1].replace(':', '_')
    return found


def _fill(scratch: pathlib.Path, packages: list[str]) -> None:
    """Make the folder ``result`` of what is in the packages."""
    root, result = scratch / 'root', scratch / 'result'
    try:
        _run(['apt-get', '-q', 'download', *packages], scratch)
    except errors.LabError:
        # What old lists name has been superseded.
        _run(['apt-get', '-q', 'update'])
        _run(['apt-get', '-q', 'download', *packages], scratch)
    for package in scratch.glob('*.deb'):
        _run(['dpkg-deb', '--extract', str(package), str(root)])
    (result / 'modules').mkdir(parents=True)
    for pattern, name in (('boot/vmlinuz-*', _KERNEL_FILE),
                          ('**/bin/busybox', 'busybox')):
        shutil.copy(next(root.glob(pattern)), result / name)
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
            depends = _run(['modinfo', '--field', 'depends', str(path)])
            needed = _in_order(root, tuple(depends.strip().split(',')))
            found += [one for one in [*needed, path] if one not in found]
    return found


def _run(command: list[str], folder: pathlib.Path | None = None) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True,
                          stdin=subprocess.DEVNULL, timeout=_PATIENCE)
    if done.returncode:
        raise errors.CommandFailed('this machine', command, done.returncode,
                                   done.stdout, done.stderr)
    return done.stdout


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
