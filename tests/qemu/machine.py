# SPDX-License-Identifier: Apache-2.0
"""A virtual machine of QEMU's whose disk a helper serves."""

from collections.abc import Callable
import pathlib
import subprocess
import time

from lab import boot_image
from lab import errors
from lab import shell_image

QEMU = 'qemu-system-x86_64'
# What the guest says to us begins with this; the rest is its kernel's.
_MARK = 'guest: '
# Puts it at the beginning of a line, whatever the kernel has written before.
_SAY = f'say() {{ printf "\\n{_MARK}%s\\n" "$*" > /dev/console; }}\n'
# Each has a queue of the disk of its own.
PROCESSORS = 2
# A whole life; without KVM each instruction is translated.
_PATIENCE = 120


class Machine:
    """Boots, does its work as ``/dev/vda`` is there, and powers off.

    The work is a shell script, in which ``say`` tells something, and what is
    told to it is read from ``/dev/console``.
    """

    def __init__(self, folder: pathlib.Path, image: boot_image.Image,
                 socket: pathlib.Path, work: str) -> None:
        self._folder = folder
        initramfs = folder / 'initramfs'
        initramfs.write_bytes(shell_image.initramfs(image, _SAY + work))
        # A file each: nobody has to read them while it runs.
        with open(folder / 'console', 'w') as console, \
                open(folder / 'qemu', 'w') as messages:
            self._process = subprocess.Popen(
                [QEMU, '-nodefaults', '-no-reboot', '-display', 'none',
                 '-machine', 'q35,accel=tcg,memory-backend=memory',
                 '-smp', str(PROCESSORS), '-m', '256M', '-object',
                 'memory-backend-memfd,id=memory,size=256M,share=on',
                 '-chardev', f'socket,id=volume,path={socket},reconnect=1',
                 '-device', 'vhost-user-blk-pci,chardev=volume',
                 '-serial', 'stdio',
                 '-kernel', image.kernel, '-initrd', initramfs,
                 '-append', 'console=ttyS0 quiet panic=-1'],
                stdin=subprocess.PIPE, stdout=console, stderr=messages,
                text=True)

    def tell(self, line: str) -> None:
        """Type a line at its console."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + '\n')
        self._process.stdin.flush()

    def said(self) -> list[str]:
        """What it has said until now."""
        lines = self._console().split('\n')
        # The last one may not be complete.
        return [line.strip().removeprefix(_MARK) for line in lines[:-1]
                if line.startswith(_MARK)]

    def wait(self, wanted: Callable[[list[str]], bool]) -> None:
        """Until what it has said is as wanted."""
        deadline = time.monotonic() + _PATIENCE
        while not wanted(self.said()):
            if self._process.poll() is not None:
                raise errors.LabError(f'QEMU ended early: {self._records()}')
            if time.monotonic() > deadline:
                raise errors.LabError(f'The guest waits: {self._records()}')
            time.sleep(0.05)

    def ended(self) -> list[str]:
        """What it has said when it has powered off."""
        try:
            status = self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            raise errors.LabError(f'The guest hangs: {self._records()}')
        if status:
            raise errors.LabError(f'QEMU failed: {self._records()}')
        return self.said()

    def kill(self) -> None:
        """Pull the plug, if it runs still."""
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()

    def _console(self) -> str:
        return (self._folder / 'console').read_text(errors='replace')

    def _records(self) -> str:
        """The ends of what guest and QEMU have written, for who looks why."""
        messages = (self._folder / 'qemu').read_text(errors='replace')
        return f'{self._console()[-2000:]}\n{messages[-2000:]}'
