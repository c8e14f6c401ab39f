# SPDX-License-Identifier: Apache-2.0

import argparse

import ddt
from oslotest import base

from lab import cli
from lab import sizes


@ddt.ddt
class ArgumentsTest(base.BaseTestCase):

    @ddt.data(('1', 1), ('3K', 3 << 10), ('2m', 2 << 20), ('8G', 8 << 30),
              ('1T', 1 << 40))
    @ddt.unpack
    def test_size(self, text, expected):
        self.assertEqual(expected, sizes.parse(text))

    @ddt.data('', 'G', '8X', '-1G', '0', '1.5G')
    def test_no_size(self, text):
        self.assertRaises(argparse.ArgumentTypeError, cli._size, text)

    def test_option(self):
        self.assertEqual(('local', 'key', 'a=b.c'),
                         cli._option('local.key=a=b.c'))

    @ddt.data('key=value', '.key=value', 'local.=value', 'local.key')
    def test_no_option(self, text):
        self.assertRaises(argparse.ArgumentTypeError, cli._option, text)

    def test_block_size_of_a_node(self):
        self.assertEqual(('node2', 4096),
                         cli._node_and_block_size('node2=4096'))

    @ddt.data('4096', '=4096', 'node2=', 'node2=4K', 'node2=1000')
    def test_no_block_size(self, text):
        self.assertRaises(argparse.ArgumentTypeError,
                          cli._node_and_block_size, text)

    @ddt.data((5, '5 s'), (65, '1 min 05 s'), (3720, '1 h 02 min'))
    @ddt.unpack
    def test_duration(self, seconds, expected):
        self.assertEqual(expected, cli._duration(seconds))
