# SPDX-License-Identifier: Apache-2.0

import argparse
import json
import pathlib
import socket
import threading
from unittest import mock

import ddt
import fixtures
from oslotest import base

from lab import cli
from lab import errors
from lab import layout
from lab import volatile


class BlockSizesTest(base.BaseTestCase):

    def refuse(self, *arguments):
        return str(self.assertRaises(
            errors.LabError, volatile.check_block_sizes, *arguments))

    def test_nodes_of_the_lab_have_volatile_disks_with_them(self):
        volatile.check_block_sizes({'node1': 4096}, 'volatile', ['node1'])
        volatile.check_block_sizes({}, 'plain', [])

    def test_plain_disks_have_no_others(self):
        self.assertIn('512', self.refuse({'node1': 4096}, 'plain', ['node1']))

    def test_node_that_is_not_there_is_named(self):
        said = self.refuse({'node9': 4096}, 'volatile', ['node1', 'node2'])
        self.assertIn('node9', said)
        self.assertIn('node1, node2', said)


class ControlTest(base.BaseTestCase):
    """What is said to a disk, and what is made of its answers."""

    def setUp(self):
        super().setUp()
        self.place = layout.Layout('test')
        self.place.runtime = pathlib.Path(
            self.useFixture(fixtures.TempDir()).path)
        self.disk = volatile.VolatileDisk(
            'node1', 'local', pathlib.Path('/x/local.disk'), self.place,
            mock.Mock(), mock.Mock(), 512)
        self.heard = []

    def answer(self, text):
        listener = socket.socket(socket.AF_UNIX)
        self.addCleanup(listener.close)
        listener.bind(str(self.place.runtime / 'node1.local.control'))
        listener.listen()

        def serve():
            connection, _ = listener.accept()
            with connection, connection.makefile('rw') as lines:
                self.heard.append(json.loads(lines.readline()))
                lines.write(text)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        self.addCleanup(thread.join)

    def test_power_cut_names_seed_and_way(self):
        self.answer('{"seed": 7, "lose": "drop", "kept": 1, "dropped": 2,'
                    ' "torn": 3}\n')
        self.assertEqual({'kept': 1, 'dropped': 2, 'torn': 3},
                         self.disk.cut_power(7, 'drop'))
        self.assertEqual([{'command': 'power-cut', 'seed': 7,
                           'lose': 'drop'}], self.heard)

    def test_disk_that_refuses_is_named_with_its_reason(self):
        self.answer('{"error": "the file fails"}\n')
        error = self.assertRaises(errors.LabError, self.disk.status)
        self.assertIn('Disk "local" refused: the file fails', str(error))

    def test_disk_that_says_nothing_is_named(self):
        self.answer('')
        error = self.assertRaises(errors.LabError, self.disk.status)
        self.assertIn('Disk "local" does not answer', str(error))

    def test_disk_that_is_not_there_is_named(self):
        error = self.assertRaises(errors.LabError, self.disk.status)
        self.assertIn('node1.local.control', str(error))

    def test_kernel_is_told_where_it_is(self):
        self.assertEqual(
            'virtio_uml.device=%s/node1.local.disk:2' % self.place.runtime,
            self.disk.kernel_argument)


class PowerCutTest(base.BaseTestCase):

    def test_what_is_printed_is_enough_to_repeat_it(self):
        cut = volatile.PowerCut(7, 'tear', {
            'local': {'kept': 1, 'dropped': 2, 'torn': 3},
            'state': {'kept': 0, 'dropped': 0, 'torn': 0}})
        self.assertEqual('seed 7, lose tear; local: 1 kept, 2 dropped,'
                         ' 3 torn; state: 0 kept, 0 dropped, 0 torn',
                         str(cut))


@ddt.ddt
class SetupTest(base.BaseTestCase):

    def test_program_that_is_not_built_names_what_builds_it(self):
        self.useFixture(fixtures.MockPatch(
            'lab.volatile.PROGRAM', pathlib.Path('/nowhere')))
        error = self.assertRaises(errors.LabError, volatile.check)
        self.assertIn('make lab-programs', str(error))

    def test_seeds_by_chance_can_be_given_again(self):
        seed = volatile.choose_seed()
        self.assertEqual(seed, cli._seed(str(seed)))

    @ddt.data('-1', str(1 << 64), 'x', '')
    def test_no_seed(self, text):
        self.assertRaises((ValueError, argparse.ArgumentTypeError),
                          cli._seed, text)
