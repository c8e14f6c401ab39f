# SPDX-License-Identifier: Apache-2.0
"""Volume services of many nodes in one process, natively.

``python -m lab.fleet_member CONFIGURATION FIRST LAST`` is what so many
processes of ``cinder-volume`` would be, but for the nodes, which are simulated
(:mod:`lab.simulated_driver`): the managers, the driver, the database and the
message bus are real.
"""

import sys
import threading

# Before all that it patches
from cinder.cmd import volume as _patched  # noqa: F401

from cinder.common import constants
from cinder import objects
from cinder import service
from cinder import version
from oslo_config import cfg
from oslo_log import log as logging
from oslo_service import loopingcall

from lab import configuration
from lab import simulated_driver

# Seconds between two looks at what arrives
PERIOD = 1


class _Service(service.Service):
    """One of many: Cinder's own remembers in its class which one it is."""

    def report_state(self) -> None:
        service.Service.service_id = self.origin_service_id
        super().report_state()


def main() -> None:
    """Run the services until the process is ended."""
    path, first, last = sys.argv[1:]
    objects.register_all()
    conf = cfg.CONF
    conf(['--config-file', path], project='cinder',
         version=version.version_string())
    logging.setup(conf, 'cinder')
    backend = configuration.BACKENDS[0]
    for number in range(int(first), int(last) + 1):
        # A launcher of oslo.service has ten services at the most.
        _Service.create(
            host='%s@%s' % (configuration.fleet_node(number), backend),
            binary=constants.VOLUME_BINARY, service_name=backend,
            coordination=True).start()
    loopingcall.FixedIntervalLoopingCall(
        simulated_driver.hydrate).start(PERIOD)
    threading.Event().wait()


if __name__ == '__main__':
    main()
