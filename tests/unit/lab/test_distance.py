# SPDX-License-Identifier: Apache-2.0

import argparse
import io

import ddt
from oslotest import base
from rich import console as consoles

from lab import cli
from lab import distance

MIB = 1 << 20


class FiguresTest(base.BaseTestCase):

    def test_medians_of_each_delay(self):
        out = io.StringIO()
        found = [distance.Rate(delay, 'a reader', source * MIB, ours * MIB)
                 for delay, source, ours in (
                     (0, 100, 90), (5, 20, 30), (0, 300, 60), (0, 200, 50))]
        distance.show(found, consoles.Console(file=out, width=80))
        self.assertEqual(
            [['0 ms', 'a reader', '200.0', '60.0', '0.25'],
             ['5 ms', 'a reader', '20.0', '30.0', '1.50']],
            [[cell.strip() for cell in line.strip('│').split('│')]
             for line in out.getvalue().splitlines() if ' ms' in line])


@ddt.ddt
class DelayTest(base.BaseTestCase):

    def test_delay(self):
        self.assertEqual(5, cli._delay('5'))

    @ddt.data('-5', '5ms', '', '1001')
    def test_no_delay(self, text):
        self.assertRaisesRegex(argparse.ArgumentTypeError, 'no delay',
                               cli._delay, text)
