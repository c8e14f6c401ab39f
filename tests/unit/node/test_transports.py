# SPDX-License-Identifier: Apache-2.0

import dataclasses
from unittest import mock

from cinder_localstor import exception
from cinder_localstor.node import interface
from cinder_localstor.node import transports
from tests.unit import base

BOTH = (interface.NVME, interface.ISCSI)
OVER_ISCSI = dataclasses.replace(interface.NO_EXPORT, iqn='iqn.2010-10.x:y')
OVER_NVME = dataclasses.replace(interface.NO_EXPORT, iqn='nqn.2010-10.x:y')
MISSING = exception.NoTransport(transport='nvme-tcp', host='node1',
                                reason='it has none')


class TransportsTestCase(base.TestCase):

    def setUp(self):
        super().setUp()
        self.iscsi, self.nvme = mock.Mock(), mock.Mock()

    def made(self, kind, choice, has_nvme=True):
        if not has_nvme:
            self.nvme.check.side_effect = MISSING
        made = kind(choice, self.iscsi, self.nvme)
        made.check()
        return made


class SourceTargetsTest(TransportsTestCase):

    def describe(self, choice, offered, has_nvme=True):
        target = self.made(transports.SourceTargets, choice, has_nvme)
        return target.describe('m', 'iqn.b', 'a', offered)

    def test_nvme_where_both_nodes_have_it(self):
        for choice in ('nvme-tcp', 'auto'):
            self.assertIs(self.nvme.describe.return_value,
                          self.describe(choice, BOTH))

    def test_iscsi_where_the_option_says_so(self):
        self.assertIs(self.iscsi.describe.return_value,
                      self.describe('iscsi', BOTH))
        # Nothing is loaded or looked for either.
        self.nvme.check.assert_not_called()

    def test_iscsi_with_a_peer_that_has_no_other(self):
        self.assertIs(self.iscsi.describe.return_value,
                      self.describe('nvme-tcp', (interface.ISCSI,)))

    def test_iscsi_where_the_kernel_has_no_other(self):
        self.assertIs(self.iscsi.describe.return_value,
                      self.describe('auto', BOTH, has_nvme=False))

    def test_no_start_where_the_kernel_has_not_what_is_wanted(self):
        self.assertRaises(exception.NoTransport, self.describe, 'nvme-tcp',
                          BOTH, has_nvme=False)

    def test_move_keeps_what_it_began_with(self):
        target = self.made(transports.SourceTargets, 'iscsi')
        target.export('m', 'd', OVER_NVME)
        target.export('n', 'd', OVER_ISCSI)
        self.nvme.export.assert_called_once_with('m', 'd', OVER_NVME)
        self.iscsi.export.assert_called_once_with('n', 'd', OVER_ISCSI)

    def test_unexport_finds_what_there_is(self):
        target = self.made(transports.SourceTargets, 'iscsi')
        self.nvme.remains.return_value = {'m'}
        target.unexport('m')
        self.iscsi.unexport.assert_not_called()
        target.unexport('n')
        self.iscsi.unexport.assert_called_once_with('n')
        self.assertEqual([mock.call('m'), mock.call('n')],
                         self.nvme.unexport.call_args_list)

    def test_exports_of_both_count(self):
        target = self.made(transports.SourceTargets, 'iscsi')
        for method in ('exported', 'remains'):
            getattr(self.iscsi, method).return_value = {'m'}
            getattr(self.nvme, method).return_value = {'n'}
            self.assertEqual({'m', 'n'}, getattr(target, method)())


class InitiatorsTest(TransportsTestCase):

    def test_what_a_source_can_be_read_by(self):
        for choice, has_nvme, expected in (
                ('iscsi', True, BOTH[1:]), ('auto', True, BOTH),
                ('auto', False, BOTH[1:]), ('nvme-tcp', True, BOTH)):
            self.nvme.check.side_effect = None
            with self.subTest(choice=choice, has_nvme=has_nvme):
                self.assertEqual(expected, self.made(
                    transports.Initiators, choice, has_nvme).transports())

    def test_no_start_where_the_kernel_has_not_what_is_wanted(self):
        self.assertRaises(exception.NoTransport, self.made,
                          transports.Initiators, 'nvme-tcp', False)

    def test_move_keeps_what_it_began_with(self):
        initiator = self.made(transports.Initiators, 'iscsi')
        for name in ('connect', 'disconnect'):
            getattr(initiator, name)(OVER_NVME)
            getattr(initiator, name)(OVER_ISCSI)
            getattr(self.nvme, name).assert_called_once_with(OVER_NVME)
            getattr(self.iscsi, name).assert_called_once_with(OVER_ISCSI)

    def test_sessions_of_both_count(self):
        initiator = self.made(transports.Initiators, 'iscsi')
        self.iscsi.connected.return_value = {'i': '/dev/sdz'}
        self.nvme.connected.return_value = {'n': '/dev/nvme9n1'}
        self.assertEqual({'i': '/dev/sdz', 'n': '/dev/nvme9n1'},
                         initiator.connected())
