# SPDX-License-Identifier: Apache-2.0
"""A program that opens a volume on a node, as nova-compute does.

It takes what Cinder has answered (``connection_info``, JSON) from its input,
lets os-brick connect, says for how many seconds it did so, and disconnects.
What takes long when a program begins, and a service has behind it, is not
counted: imports, and privsep's daemon, without which it does its work.
"""

import json
import sys
import time

import os_brick
from os_brick.initiator import connector
from os_brick import privileged
from oslo_concurrency import lockutils
from oslo_config import cfg


def main() -> None:
    """Open one volume, and close it again."""
    cfg.CONF([], project='opener')
    lockutils.set_defaults('/run/lock')
    os_brick.setup(cfg.CONF)
    privileged.default.set_client_mode(False)
    connection = json.load(sys.stdin)
    opener = connector.InitiatorConnector.factory(
        connection['driver_volume_type'].upper(), '')
    start = time.monotonic()
    device = opener.connect_volume(connection['data'])
    print(time.monotonic() - start)
    opener.disconnect_volume(connection['data'], device)


if __name__ == '__main__':
    main()
