# SPDX-License-Identifier: Apache-2.0

import pathlib
import threading
from unittest import mock

import fixtures
from oslotest import base

from lab import faults
from lab import journal


class OverlapTest(base.BaseTestCase):

    def test_what_waits_for_the_end_of_the_second_fault_gets_it(self):
        notes = journal.Journal(pathlib.Path(
            self.useFixture(fixtures.TempDir()).path, 'log'))
        cloud = mock.Mock(nodes=[mock.Mock(
            declarations=[mock.Mock()], place=mock.Mock(backends=()))])
        over = threading.Event()
        ended = []

        def start():
            # A service whose database is away
            ended.append(over.wait(10))

        breaking = faults.Faults(cloud, notes, 1)
        strikes = [faults.Fault('killed', 'node1', (0, 0), mock.Mock(), start),
                   faults.Fault('cut', 'network', (0, 0), mock.Mock(),
                                over.set)]
        with (mock.patch.object(breaking, '_choose', side_effect=strikes),
              mock.patch.object(faults, 'OVERLAP', 1)):
            breaking._strike()
        self.assertEqual([True], ended)
