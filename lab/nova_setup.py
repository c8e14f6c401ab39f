# SPDX-License-Identifier: Apache-2.0
"""What a new Nova has to have before instances can run: a flavor, an image."""

from collections.abc import Iterable
import importlib.util
import os
import pathlib
import time

from lab import boot_image
from lab import errors
from lab import http
from lab import layout

# Of the flavor and the image of the lab's own guest
GUEST = 'guest'
# A flavor that the guest may be resized to
LARGER = 'larger'
_MEMORY = {GUEST: 128, LARGER: 160}  # MiB
# Where a machine is busy the kernel may take its timer for broken.
_COMMAND_LINE = 'console=ttyS0 quiet no_timer_check'
_TARGET = pathlib.Path(os.environ.get('CARGO_TARGET_DIR')
                       or layout.REPOSITORY / 'lab' / 'guest' / 'target')
_PROGRAM = (_TARGET / 'x86_64-unknown-linux-gnu' / 'release'
            / 'localstor-lab-guest')
# Bytes of the image, which is empty
DISK_SIZE = 1 << 20
# Seconds
_PATIENCE = 60


def check() -> None:
    """:raises LabError: something is missing that "make nova" makes"""
    if importlib.util.find_spec('libvirt') is None:
        raise errors.LabError(
            'nova-compute needs Python\'s module libvirt: run "make nova".')
    if not _PROGRAM.exists():
        raise errors.LabError(
            f'An instance of the lab runs a program that is not built: run '
            f'"make nova". It is looked for at {_PROGRAM}.')


def create_flavors(compute: http.Api) -> None:
    """The flavors ``guest`` and ``larger``: one CPU, 128 and 160 MiB, and no
    disk but their volumes.
    """
    for name, memory in _MEMORY.items():
        compute.post('/flavors', json={'flavor': {
            'id': name, 'name': name, 'ram': memory, 'vcpus': 1, 'disk': 0}})


def upload_image(images: http.Api) -> None:
    """The image ``guest``: from a volume made of it an instance boots.

    The kernel and its first root file system are images of their own, which
    Nova takes beside the volume.
    """
    image = boot_image.fetched()
    initramfs = image.initramfs({'init': _PROGRAM.read_bytes()})

    def upload(name: str, kind: str, content: bytes, **properties: str
               ) -> str:
        created = images.post('/v2/images', json={
            'name': name, 'disk_format': kind, 'visibility': 'public',
            'container_format': 'bare' if kind == 'raw' else kind,
            **properties}).json()['id']
        images.put(f'/v2/images/{created}/file', data=content, headers={
            'Content-Type': 'application/octet-stream'})
        return created

    upload(GUEST, 'raw', bytes(DISK_SIZE),
           kernel_id=upload(f'{GUEST}-kernel', 'aki',
                            image.kernel.read_bytes()),
           ramdisk_id=upload(f'{GUEST}-initramfs', 'ari', initramfs),
           os_command_line=_COMMAND_LINE,
           # An instance that boots from a volume can be rescued only so.
           hw_rescue_device='disk', hw_rescue_bus='virtio')


def wait_for_hypervisors(compute: http.Api, names: Iterable[str],
                         log: pathlib.Path) -> None:
    """Wait until Nova's scheduler, of this log, would choose these nodes.

    :raises StartFailed: it does not within 60 s
    """
    end = time.monotonic() + _PATIENCE
    while missing := set(names) - {
            found['hypervisor_hostname']
            for found in compute.get('/os-hypervisors').json()['hypervisors']
            if found['state'] == 'up'}:
        if time.monotonic() > end:
            raise errors.StartFailed(', '.join(sorted(missing)),
                                     'Nova has not heard of it', log)
        time.sleep(0.2)
