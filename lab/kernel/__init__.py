# SPDX-License-Identifier: Apache-2.0
"""The kernels that nodes can run.

The stock one is Debian's package user-mode-linux. The lab's own is built
from Debian's linux-source, for what the stock one lacks: ublk, null_blk,
fault injection, NVMe over TCP, and disks whose flush reaches the machine's
own disk. It lies in a cache folder, because building it takes some minutes:
one kernel for each recipe.

Neither knows of all the registers that a processor may have; with
``lab/ptrace`` they need not.
"""

import dataclasses
import hashlib
import pathlib
import subprocess

from lab import cache
from lab import errors

SOURCE = 'linux-source-6.12'
_IMAGE = 'linux'
_RECIPE = pathlib.Path(__file__).resolve().parent
PTRACE = (_RECIPE.parent
          / 'ptrace/target/release/liblocalstor_lab_ptrace.so')


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel image, and the folder that has a folder of its modules."""

    image: pathlib.Path
    modules: pathlib.Path

    @property
    def environment(self) -> dict[str, str]:
        """What its process has to have in its environment."""
        return {'LD_PRELOAD': str(PTRACE)}


STOCK = Kernel(pathlib.Path('/usr/bin/linux.uml'),
               pathlib.Path('/usr/lib/uml/modules'))


def named(name: str) -> Kernel:
    """The kernel ``stock`` or ``own``; LabError if it is not there."""
    if not PTRACE.exists():
        raise errors.LabError(
            f'What a node\'s kernel sets registers with is not built: run '
            f'"make lab-programs". It is looked for at {PTRACE}.')
    if name == 'stock':
        return STOCK
    if name != 'own':
        raise errors.LabError(
            f'There is no kernel "{name}"; choose "stock" or "own".')
    kernel = _built(cache.folder(_name()))
    if not kernel.image.exists():
        raise errors.LabError(
            f'The lab\'s own kernel is not built, or its recipe has changed '
            f'since: run "make lab-kernel". It is looked for at '
            f'{kernel.image}.')
    return kernel


def build() -> Kernel:
    """Build the lab's own kernel unless it is there; takes minutes."""
    return _built(cache.made(_name(), _IMAGE, _make))


def _make(scratch: pathlib.Path) -> None:
    subprocess.run(['tar', '-xf', f'/usr/src/{SOURCE}.tar.xz'], cwd=scratch,
                   check=True)
    subprocess.run(['nice', _RECIPE / 'build.sh', scratch / SOURCE,
                    scratch / 'result'], check=True)


def _built(folder: pathlib.Path) -> Kernel:
    return Kernel(folder / _IMAGE, folder / 'lib' / 'modules')


def _name() -> str:
    """Of what the kernel is made of: another recipe, another name."""
    package = subprocess.run(
        ['dpkg-query', '--show', '--showformat', '${Version}', SOURCE],
        capture_output=True, text=True)
    if package.returncode:
        raise errors.LabError(
            f'The lab\'s own kernel needs Debian\'s package {SOURCE}; '
            f'"make lab-kernel" installs it.')
    digest = hashlib.sha256(package.stdout.encode())
    for path in [_RECIPE / 'build.sh', _RECIPE / 'config',
                 *sorted(_RECIPE.glob('*.patch'))]:
        digest.update(b'\0' + path.name.encode() + b'\0')
        digest.update(path.read_bytes())
    return f'kernel-{digest.hexdigest()[:12]}'
