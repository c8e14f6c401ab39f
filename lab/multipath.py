# SPDX-License-Identifier: Apache-2.0
"""multipathd on the nodes, as most have it that use iSCSI.

It is Debian's, and not installed on this machine, where its rules for udev
would be those of every node.
"""

import pathlib

from lab import packages
from lab import services

CONFIGURATION = '/etc/multipath.conf'
_TEXT = '''\
defaults {
    find_multipaths %s
    user_friendly_names no
    verbosity 3
}
blacklist {
    devnode "^(ubd|vd|nbd|ublk)"
}
'''


def configuration(find_multipaths: str = 'strict') -> str:
    """What multipathd is told; see multipath.conf(5)."""
    return _TEXT % find_multipaths


def _files(place: services.Place) -> dict[str, str | services.Link]:
    root = packages.kept('multipath-tools')
    found = [path.relative_to(root) for folder in ('sbin', 'lib', 'usr/sbin',
                                                   'usr/lib')
             for path in (root / folder).rglob('*') if not path.is_dir()]
    return {CONFIGURATION: configuration(), **{
        str(pathlib.Path('/usr', path.relative_to(
            'usr') if path.parts[0] == 'usr' else path)):
        services.Link(str(root / path)) for path in found}}


PART = services.Part(
    nodes=(services.Service(
        name='multipathd',
        # The package has systemd load the module.
        command=lambda place: ['/bin/sh', '-c', 'modprobe dm-multipath &&'
                               ' exec /usr/sbin/multipathd -d'],
        ready=lambda place: services.Probe(says='startup listener')),),
    files=_files)
