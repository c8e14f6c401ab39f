# SPDX-License-Identifier: Apache-2.0
"""cinder-volume in a container, as Kolla and others deploy it.

When the container ends, so does every process that cinder-volume has started.
"""

import pathlib
import sys

from lab import configuration
from lab import services

_SCRIPT = pathlib.Path(__file__).with_name('container.sh')
# What Kolla lets it share with its node, beside its configuration.  A node
# where systemd runs has a directory in /run by which one sees that.
SHARED = ('/dev', '/sys', '/run', '/lib/modules', configuration.CINDER_STATE,
          '/etc/iscsi', '/etc/target')
SYSTEMD = '/run/systemd/system'


def _in_a_container(place: services.Place, command: list[str]) -> list[str]:
    mounted = [place.layout.repository, place.layout.directory,
               place.layout.environment, pathlib.Path(sys.base_prefix)]
    return [str(_SCRIPT), 'run', *SHARED,
            *(str(path) for path in mounted
              if not path.is_relative_to('/usr')),
            '--', *command]


PART = services.Part(
    files=lambda place: {f'{SYSTEMD}/.keep': ''},
    around=(_in_a_container,))
