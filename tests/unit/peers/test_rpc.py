# SPDX-License-Identifier: Apache-2.0

import dataclasses
from unittest import mock

import ddt
import oslo_messaging as messaging
from oslo_messaging.rpc import dispatcher

from cinder_localstor.datapath import transfer
from cinder_localstor import exception
from cinder_localstor.moves import answers
from cinder_localstor.peers import rpc
from tests.unit import base
from tests.unit.datapath import test_transfer


class Answers:
    """A peer that keeps what it was asked."""

    def __init__(self):
        self.asked = []
        self.error = None

    def _note(self, *arguments):
        self.asked.append(arguments)
        if self.error:
            raise self.error

    def identify(self, _ctxt):
        self._note('identify')
        return ['b', '192.0.2.2']

    def examine(self, _ctxt, block_size, portal, data_path=''):
        self._note('examine', block_size, portal,
                   *([data_path] if data_path else []))
        return {'initiator': 'iqn.b'}

    def run(self, _ctxt, move, steps):
        self._note('run', move, steps)

    def remaining(self, _ctxt, names):
        self._note('remaining', names)
        return names[:1]

    def offer(self, _ctxt, move_id, name, initiator, transports=('iscsi',)):
        self._note('offer', move_id, name, initiator, *transports)
        return {'content': 7}

    def delete_snapshot(self, _ctxt, volume_id, snapshot_id):
        self._note('delete_snapshot', volume_id, snapshot_id)

    def unmanage_snapshot(self, _ctxt, volume_id, snapshot_id):
        self._note('unmanage_snapshot', volume_id, snapshot_id)

    def drive(self, _ctxt, move_id):
        self._note('drive', move_id)

    def recover(self):
        raise AssertionError('nobody may call this from outside')


class RpcTestCase(base.TestCase):

    def setUp(self):
        super().setUp()
        self.make_service(base.B)
        self.answers = Answers()
        self.server = rpc.serve(base.B, self.answers)
        self.addCleanup(self.server.stop)
        self.api = rpc.PeerAPI(base.A, timeout=2)


class CallTest(RpcTestCase):

    def test_identify(self):
        self.assertEqual(['b', '192.0.2.2'], self.api.identify(base.B))

    def test_examine(self):
        self.assertEqual({'initiator': 'iqn.b'},
                         self.api.examine(base.B, 'v', 512, 'p:1'))
        self.assertEqual([('examine', 512, 'p:1')], self.answers.asked)

    def test_examine_by_what_a_type_wants(self):
        self.api.examine(base.B, 'v', 512, 'p:1', data_path='clone')
        self.assertEqual([('examine', 512, 'p:1', 'clone')],
                         self.answers.asked)

    def test_run_carries_the_whole_move(self):
        for patient in (True, False):
            self.answers.asked.clear()
            self.api.run(base.B, test_transfer.TRANSFER, ['create_map'],
                         patient)
            self.assertEqual([('run', test_transfer.TRANSFER.as_dict(),
                               ['create_map'])], self.answers.asked)

    def test_remaining(self):
        self.assertEqual({'x'}, self.api.remaining(base.B, {'y', 'x'}))
        self.assertEqual([('remaining', ['x', 'y'])], self.answers.asked)

    def test_offer(self):
        self.assertEqual({'content': 7}, self.api.offer(
            base.B, 'v', 'm', 'snapshot', 'iqn.a', ('iscsi',),
            is_clone=True))
        self.assertEqual([('offer', 'm', 'snapshot', 'iqn.a', 'iscsi')],
                         self.answers.asked)

    def test_run_carries_a_copy(self):
        copied = dataclasses.replace(test_transfer.TRANSFER, is_copy=True,
                                     origin='volume-v')
        self.api.run(base.B, copied, ['export_source'])
        (_run, sent, _steps), = self.answers.asked
        self.assertEqual(copied, transfer.Transfer.from_dict(sent))

    def test_delete_snapshot(self):
        self.api.delete_snapshot(base.B, 'v', 's')
        self.assertEqual([('delete_snapshot', 'v', 's')], self.answers.asked)

    def test_unmanage_snapshot(self):
        self.api.unmanage_snapshot(base.B, 'v', 's')
        self.assertEqual([('unmanage_snapshot', 'v', 's')],
                         self.answers.asked)

    def test_nudge_waits_for_no_answer(self):
        self.answers.error = ValueError('not now')
        self.api.nudge(base.B, 'm')

    def test_error_keeps_its_kind_and_its_text(self):
        self.answers.error = exception.NotEnoughSpace(
            group='disks', host='b', name='x', free='1', needed='2')
        error = self.assertRaises(exception.PeerFailed, self.api.examine,
                                  base.B, 'volume-id', 512, 'p:1')
        self.assertEqual('NotEnoughSpace', error.kind)
        for part in (base.B, 'volume-id', 'examine', "'disks'"):
            self.assertIn(part, str(error))

    def test_error_names_the_steps_that_were_asked_for(self):
        self.answers.error = exception.NotEnoughSpace(
            group='disks', host='b', name='x', free='1', needed='2')
        error = self.assertRaises(
            exception.PeerFailed, self.api.run, base.B,
            test_transfer.TRANSFER, ['create_destination', 'create_map'])
        self.assertIn("'create_destination, create_map'", str(error))

    def refused_with(self, error, expected):
        with mock.patch.object(messaging.RPCClient, 'prepare') as prepare:
            prepare.return_value.call.side_effect = error
            return self.assertRaises(expected, self.api.examine, base.B,
                                     'volume-id', 512, 'p:1')

    def test_error_of_a_class_that_does_not_travel(self):
        error = self.refused_with(
            messaging.RemoteError('NotEnoughSpace', 'no room'),
            exception.PeerFailed)
        self.assertEqual('NotEnoughSpace', error.kind)
        self.assertIn('no room', str(error))

    def test_error_of_a_class_that_travels(self):
        travelled = type('ISCSITargetCreateFailed_Remote', (Exception,), {})
        error = self.refused_with(travelled('no target'),
                                  exception.PeerFailed)
        self.assertEqual('ISCSITargetCreateFailed', error.kind)
        self.assertIn('no target', str(error))

    def test_bus_that_does_not_work(self):
        error = self.refused_with(
            messaging.MessageDeliveryFailure('no broker'),
            exception.PeerDown)
        self.assertIn('no broker', str(error))

    def test_error_that_nobody_thought_of(self):
        self.answers.error = ZeroDivisionError('oh')
        error = self.assertRaises(exception.PeerFailed, self.api.identify,
                                  base.B)
        self.assertEqual('ZeroDivisionError', error.kind)

    def test_peer_that_does_not_answer(self):
        error = self.refused_with(messaging.MessagingTimeout,
                                  exception.PeerDown)
        for part in (base.B, base.A, 'volume-id', '2 seconds'):
            self.assertIn(part, str(error))

    def test_what_is_asked_of_no_volume_is_told_without_one(self):
        with mock.patch('cinder.objects.Service.is_up', False):
            for ask, about in (
                    (lambda: self.api.identify(base.B), 'its names'),
                    (lambda: self.api.remaining(base.B, ['copy']),
                     'what is left of copies')):
                error = self.assertRaises(exception.PeerDown, ask)
                self.assertIn(f'asks about {about}. ', str(error))

    def test_peer_whose_service_is_down_is_not_asked(self):
        with mock.patch('cinder.objects.Service.is_up', False):
            self.assertRaises(exception.PeerDown, self.api.identify, base.B)
        self.assertRaises(exception.PeerDown, self.api.identify, base.C)
        self.assertEqual([], self.answers.asked)


class TransportsTest(RpcTestCase):

    def test_offer_over_what_both_have(self):
        self.api.offer(base.B, 'v', 'm', 'snapshot', 'iqn.a',
                       ('nvme-tcp', 'iscsi'), is_clone=False)
        self.assertEqual(
            [('offer', 'm', 'snapshot', 'iqn.a', 'nvme-tcp', 'iscsi')],
            self.answers.asked)


class FirstEndpoint:
    """What a peer of the first version lets others call."""

    target = messaging.Target(version='1.0')

    def __init__(self, answers):
        self.identify = answers.identify
        self.examine = answers.examine
        self.run = answers.run
        self.drive = answers.drive


class OlderPeerTest(CallTest):
    """The peer has not been upgraded yet."""

    def setUp(self):
        with mock.patch.object(rpc, 'VERSION', '1.0'), \
                mock.patch.object(rpc, 'Endpoint', FirstEndpoint):
            super().setUp()

    def test_remaining(self):
        # It has wiped what it was told to before it answered.
        self.assertEqual(set(), self.api.remaining(base.B, {'x'}))
        self.assertEqual([], self.answers.asked)

    def test_offer(self):
        self.refuses(lambda: self.api.offer(base.B, 'v', 'm', 's', 'iqn.a',
                                            ('iscsi',), is_clone=False))

    def test_run_carries_a_copy(self):
        # It knows no field of one.
        copied = dataclasses.replace(test_transfer.TRANSFER, is_copy=True)
        self.refuses(lambda: self.api.run(base.B, copied, ['export_source']))

    def test_examine_by_what_a_type_wants(self):
        # It does not know of types, and does as its options say.
        self.assertEqual({'initiator': 'iqn.b'}, self.api.examine(
            base.B, 'v', 512, 'p:1', data_path='clone'))
        self.assertEqual([('examine', 512, 'p:1')], self.answers.asked)

    def test_volume_that_arrives_by_a_copy_does_not_move_there(self):
        self.refuses(lambda: self.api.examine(base.B, 'v', 512, 'p:1', True))

    def test_volume_that_was_reverted_and_arrives_does_not_move_there(self):
        for path in ('', 'clone'):
            self.refuses(lambda path=path: self.api.examine(
                base.B, 'v', 512, 'p:1', True, path, is_revert=True))

    def refuses(self, ask):
        error = self.assertRaises(exception.PeerFailed, ask)
        self.assertEqual(rpc.UNSUPPORTED, error.kind)
        self.assertEqual([], self.answers.asked)

    def test_delete_snapshot(self):
        # It has none.
        self.refuses(lambda: self.api.delete_snapshot(base.B, 'v', 's'))

    def test_unmanage_snapshot(self):
        self.refuses(lambda: self.api.unmanage_snapshot(base.B, 'v', 's'))


class EndpointBeforeClones(rpc.Endpoint):
    """What a peer of 1.3 lets others call."""

    target = messaging.Target(version='1.3')


class PeerBeforeClonesTest(CallTest):
    """The peer makes copies of its snapshots, but takes none for them."""

    def setUp(self):
        with mock.patch.object(rpc, 'VERSION', '1.3'), \
                mock.patch.object(rpc, 'Endpoint', EndpointBeforeClones):
            super().setUp()

    def refuses(self, ask):
        error = self.assertRaises(exception.PeerFailed, ask)
        self.assertEqual(rpc.UNSUPPORTED, error.kind)
        self.assertEqual([], self.answers.asked)

    def test_examine_by_what_a_type_wants(self):
        # It does not know of types, and does as its options say.
        self.assertEqual({'initiator': 'iqn.b'}, self.api.examine(
            base.B, 'v', 512, 'p:1', data_path='clone'))
        self.assertEqual([('examine', 512, 'p:1')], self.answers.asked)

    def test_unmanage_snapshot(self):
        self.refuses(lambda: self.api.unmanage_snapshot(base.B, 'v', 's'))

    def test_offer(self):
        self.refuses(lambda: self.api.offer(base.B, 'v', 'm', 's', 'iqn.a',
                                            ('iscsi',), is_clone=True))
        for transports in (('iscsi',), ('nvme-tcp', 'iscsi')):
            self.assertEqual({'content': 7}, self.api.offer(
                base.B, 'v', 'm', 's', 'iqn.a', transports, is_clone=False))
            self.assertEqual(('offer', 'm', 's', 'iqn.a', 'iscsi'),
                             self.answers.asked[-1])

    def test_run_carries_a_clone(self):
        # It knows no field of one.
        cloned = dataclasses.replace(test_transfer.TRANSFER, is_copy=True,
                                     cloned='v')
        self.refuses(lambda: self.api.run(base.B, cloned, ['take_snapshot']))


class OlderCallerTest(CallTest):
    """This node has been upgraded, the one that asks has not."""

    def setUp(self):
        super().setUp()
        self.patch('cinder_localstor.peers.rpc.VERSION', '1.0')


@ddt.ddt
class ExposedTest(RpcTestCase):

    METHODS = {'identify', 'examine', 'run', 'is_source_used', 'remaining',
               'delete_snapshot', 'unmanage_snapshot', 'offer', 'drive'}

    def test_these_methods_and_no_others(self):
        self.assertEqual(self.METHODS, {
            name for name in dir(rpc.Endpoint)
            if not name.startswith('_') and name != 'target'})

    def test_bus_refuses_any_other_method(self):
        error = self.assertRaises(exception.LocalStorException,
                                  self.api._call, base.B, '-', 'recover',
                                  patient=False)
        self.assertIn('does not support RPC method recover', str(error))

    def test_backend_answers_them_all(self):
        for name in self.METHODS:
            self.assertTrue(callable(getattr(answers.Answers, name)))

    @ddt.data('recover', '_note', '__init__', 'watch', 'begin', 'discard')
    def test_anything_else_is_refused(self, name):
        dispatch = dispatcher.RPCDispatcher(
            [rpc.Endpoint(self.answers)], mock.Mock(
                deserialize_context=lambda ctxt: ctxt),
            dispatcher.DefaultRPCAccessPolicy)
        incoming = mock.Mock(ctxt={}, client_timeout=None, message={
            'method': name, 'args': {}, 'version': rpc.VERSION})
        self.assertRaises(dispatcher.NoSuchMethod, dispatch.dispatch,
                          incoming)
