# SPDX-License-Identifier: Apache-2.0
"""``localstor-nova-compute``: nova-compute with our class for local volumes.

It registers the class and is nova-compute from then on, with its arguments and
its files of configuration.  Nova itself has no way to add a class.
"""

import os
import sys

# Before all else: it chooses what threads are.
from nova.cmd import compute
import nova.conf
from nova import config
from nova import version
from oslo_log import log as logging

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
            'cinder.conf.', {'found': found, 'known': ', '.join(
                '%d (%s)' % release for release in RELEASES.items())})
        return
    # Not before: in another release it may be another thing.
    from nova.virt.libvirt import driver
    driver.VOLUME_DRIVERS[KIND] = DRIVER
    LOG.info('Local volumes are used by %s', DRIVER)
