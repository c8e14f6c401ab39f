# SPDX-License-Identifier: Apache-2.0

import base64
import unittest
import zlib

from cinder_localstor.node import nvme


class SecretTest(unittest.TestCase):

    def test_secret_is_as_the_kernel_reads_it(self):
        # nvme_auth_extract_key() in drivers/nvme/common/auth.c
        version, hmac, key, end = nvme.make_secret().split(':')
        decoded = base64.b64decode(key, validate=True)
        self.assertEqual(('DHHC-1', '00', ''), (version, hmac, end))
        self.assertEqual(36, len(decoded))
        self.assertEqual(zlib.crc32(decoded[:-4]),
                         int.from_bytes(decoded[-4:], 'little'))

    def test_no_two_are_the_same(self):
        self.assertEqual(9, len({nvme.make_secret() for _ in range(9)}))
