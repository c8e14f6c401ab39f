# SPDX-License-Identifier: Apache-2.0
"""``localstor-nova-compute``: nova-compute with our class for local volumes.

It registers the class, lets volumes that Nova makes for a new instance be made
on its node, and is nova-compute from then on, with its arguments and its files
of configuration.  Nova itself has no way to add a class, nor a hint.
"""

from collections.abc import Callable
import functools
import os
import sys
from typing import Any

# Before all else: it chooses what threads are.
from nova.cmd import compute
import nova.conf
from nova import config
from nova import version
from oslo_log import log as logging

from cinder_localstor.nova import opts

CONF = nova.conf.CONF
LOG = logging.getLogger(__name__)

# The first number of the versions of Nova that this was tried with
RELEASES = {34: '2026.2'}

KIND = 'local'
DRIVER = 'cinder_localstor.nova.volume.LocalVolumeDriver'


def main() -> None:
    """Run until nova-compute ends."""
    # By this name it finds its files of configuration.
    sys.argv[0] = os.path.join(os.path.dirname(sys.argv[0]), 'nova-compute')
    # What register() says belongs into the log.
    config.parse_args(sys.argv, configure_db=False, init_rpc=False)
    logging.setup(CONF, 'nova')
    register(version.version_info.version_string())
    # It parses them itself, and nobody may do so twice.
    CONF.clear()
    compute.main()


def register(found: str) -> None:
    """Let Nova use our class, if it is a Nova that we know.

    :param found: version of Nova
    """
    if int(found.partition('.')[0]) not in RELEASES:
        LOG.warning(
            'Local volumes are used as by a stock nova-compute: this is Nova '
            '%(found)s, and cinder_localstor knows %(known)s. Online extend '
            'does not work: do not set localstor_online_extend in '
            'cinder.conf. Volumes that Nova makes are made on any node.',
            {'found': found, 'known': ', '.join(
                '%d (%s)' % release for release in RELEASES.items())})
        return
    # Not before: in another release it may be another thing.
    from nova.virt.libvirt import driver
    from nova.volume import cinder
    driver.VOLUME_DRIVERS[KIND] = DRIVER
    cinder.cinderclient = made_here(cinder.cinderclient)
    LOG.info('Local volumes are used by %s', DRIVER)


def made_here(client_of: Callable[..., Any]) -> Callable[..., Any]:
    """Let volumes be made on this node, if they can.

    nova-compute makes those of instances that it starts, and no others.

    :param client_of: Nova's function that makes a client of Cinder
    """
    @functools.wraps(client_of)
    def cinderclient(*arguments: Any, **options: Any) -> Any:
        client = client_of(*arguments, **options)
        # There is none where only the version of the API was asked for.
        if client is not None:
            client.volumes.create = functools.partial(
                client.volumes.create,
                scheduler_hints={opts.NODE_HINT: CONF.host})
        return client
    return cinderclient
