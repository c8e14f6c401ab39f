# SPDX-License-Identifier: Apache-2.0
"""What both ends of a source over NVMe/TCP agree on.

Each move has a subsystem of its own, which admits one host, by a name and a
secret that no other move has: the kernel keeps a secret with the name of a
host, and not with a subsystem.
"""

import base64
import secrets
import zlib

NAME = 'nqn.2010-10.org.openstack:localstor-'
HOST_NAME = 'nqn.2010-10.org.openstack:localstor-host-'
NAMESPACE = 1
# Bytes, as for an HMAC of SHA-256
_KEY = 32


def make_secret() -> str:
    """A secret as NVM Express Base Specification 2.0, 8.13.5.8, writes it.

    The key is used as it is (``00``); what follows it is its CRC-32, the
    lowest byte first.
    """
    key = secrets.token_bytes(_KEY)
    checked = key + zlib.crc32(key).to_bytes(4, 'little')
    return 'DHHC-1:00:%s:' % base64.b64encode(checked).decode()
