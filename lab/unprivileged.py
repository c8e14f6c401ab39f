# SPDX-License-Identifier: Apache-2.0
"""cinder-volume as a user of its own, as distributions let it run.

It becomes root by what the README tells an operator to admit, and by Cinder's
own rootwrap.
"""

import pathlib
import sys

from lab import services

ACCOUNT = services.Account('cinder', 64061)
_SUDO = '/usr/bin/sudo'
_SUDOERS = '/etc/sudoers.d/cinder-localstor'
ROOTWRAP = '/etc/cinder/rootwrap.conf'
_FILTERS = '/etc/cinder/rootwrap.d/volume.filters'
_REACHED_BY = '/usr/bin/cinder-rootwrap'
# The driver's, and those of Cinder and os-brick that rootwrap would admit
_CONTEXTS = ('cinder_localstor.node.privileged.CONTEXT',
             'cinder_localstor.node.lio.CONTEXT',
             'cinder.privsep.sys_admin_pctxt',
             'os_brick.privileged.default')
# $0 is the user; directories come first, then "--" and the command.
_BECOME = f'''\
while [ "$1" != -- ]; do chmod -f a+x "$1" || :; shift; done
shift
chmod 440 {_SUDOERS}
chown -R "$0:" /var/lib/cinder
exec setpriv --reuid="$0" --regid="$0" --init-groups "$@"
'''


def sudoers(place: services.Place) -> str:
    """What it may run as root on a node; see sudoers(5)."""
    helper = (f'{place.binaries}/privsep-helper --config-file '
              f'{place.directory}/cinder.conf --privsep_context')
    admitted = [f'{helper} {context} *' for context in _CONTEXTS]
    admitted.append(f'{_REACHED_BY} {ROOTWRAP} *')
    # The driver is that of the repository.
    return f'Defaults:{ACCOUNT.name} env_keep += "PYTHONPATH"\n' + ''.join(
        f'{ACCOUNT.name} ALL = (root) NOPASSWD: {command}\n'
        for command in admitted)


def _files(place: services.Place) -> dict[str, str | services.Link]:
    configuration = place.layout.environment
    return {
        _SUDOERS: sudoers(place),
        # The lab's own lets everything pass.
        '/usr/local/bin/sudo': services.Link(_SUDO),
        _REACHED_BY: services.Link(str(place.binaries / 'cinder-rootwrap')),
        **{path: (configuration / path.lstrip('/')).read_text()
           for path in (ROOTWRAP, _FILTERS)}}


def _as_its_user(place: services.Place, command: list[str]) -> list[str]:
    # Python and the repository may lie in somebody's home.
    reached = {parent for path in (sys.executable, place.layout.repository)
               for parent in pathlib.Path(path).resolve().parents}
    return ['/bin/sh', '-c', _BECOME, place.account,
            *sorted(map(str, reached)), '--', *command]


PART = services.Part(
    programs={_SUDO: 'sudo'}, accounts=(ACCOUNT,),
    account=ACCOUNT.name, around=(_as_its_user,), files=_files)
