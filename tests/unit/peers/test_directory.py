# SPDX-License-Identifier: Apache-2.0

import threading
import time
from unittest import mock

import ddt
from oslo_utils import timeutils

from cinder_localstor import exception
from cinder_localstor.peers import directory
from tests.unit import base


class DirectoryTestCase(base.TestCase):

    def setUp(self):
        super().setUp()
        for host in (base.A, base.B, 'c@other', 'd'):
            self.make_service(host)
        self.answers = {base.A: ['a', '192.0.2.1'],
                        base.B: ['b.example.org', '192.0.2.2',
                                 '2001:db8::2']}
        self.asked = []
        self.directory = self.make()

    def make(self, **host_map):
        return directory.Directory(base.A, host_map, self.ask)

    def ask(self, peer):
        self.asked.append(peer)
        answer = self.answers[peer]
        if callable(answer):
            return answer()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def find(self, **connector):
        return self.directory.find(self.ctxt, connector)


@ddt.ddt
class FindTest(DirectoryTestCase):

    @ddt.data(({'host': 'a'}, base.A), ({'host': 'b'}, base.B),
              ({'host': 'b.example.org'}, base.B),
              ({'ip': '192.0.2.2'}, base.B), ({'ip': '2001:db8::2'}, base.B),
              ({'ip': '2001:DB8:0::2'}, base.B),
              ({'host': 'nonsense', 'ip': '192.0.2.2'}, base.B),
              ({'host': 'nobody', 'ip': '192.0.2.99'}, None),
              ({'host': 'c'}, None), ({'host': 'd'}, None),
              ({'host': 'b', 'ip': '192.0.2.1'}, base.B))
    @ddt.unpack
    def test_connector(self, connector, expected):
        self.assertEqual(expected, self.find(**connector))

    @ddt.data({}, {'host': None}, {'host': '', 'ip': ''},
              {'initiator': 'iqn.x'})
    def test_connector_that_names_nothing_is_refused(self, connector):
        self.assertRaises(exception.InvalidConnector, self.directory.find,
                          self.ctxt, connector)

    @ddt.data({'host': 'strange'}, {'ip': '198.51.100.1'},
              {'host': 'strange', 'ip': '192.0.2.1'})
    def test_what_the_operator_says_goes_before_everything(self, connector):
        self.directory = self.make(**{'strange': 'b', '198.51.100.1': 'b'})
        self.assertEqual(base.B, self.find(**connector))
        self.assertEqual([], self.asked)

    def test_who_is_known_by_name_is_found_without_a_look_at_all(self):
        with mock.patch('cinder.objects.ServiceList.get_all') as listed:
            self.assertEqual(base.B, self.find(host='b', ip='192.0.2.1'))

        listed.assert_not_called()

    @ddt.data('%', 'x%', '_b')
    def test_connector_with_a_pattern_for_a_name_finds_nothing(self, host):
        self.make_service('x' + base.B + '#pool')
        self.assertIsNone(self.find(host=host))

    def test_name_with_a_backend_in_it_finds_no_other_backend(self):
        self.answers['d'] = []
        self.directory = directory.Directory('d', {}, self.ask)
        self.assertIsNone(self.find(host='c@other'))

    def test_map_to_a_host_without_this_backend_finds_nothing(self):
        self.directory = self.make(strange='c')
        self.assertIsNone(self.find(host='strange'))

    def test_backend_without_a_name_finds_its_peers(self):
        self.directory = directory.Directory('d', {}, self.ask)
        self.assertEqual('d', self.find(host='d'))
        self.assertEqual({'d'}, set(self.directory.services(self.ctxt)))

    def test_services_of_other_backends_are_no_peers(self):
        self.assertEqual({base.A, base.B},
                         set(self.directory.services(self.ctxt)))


class FormerNameTest(DirectoryTestCase):
    """A service has the name that a connector has, and is down."""

    DOWN = 'b.example.org@local'

    def setUp(self):
        super().setUp()
        self.make_service(self.DOWN)
        self.patch('cinder.objects.Service.is_up',
                   property(lambda found: found.host != self.DOWN))

    def test_it_is_found_where_nobody_else_has_that_name(self):
        self.answers[base.B] = ['b']
        self.assertEqual(self.DOWN, self.find(host='b.example.org'))

    def test_who_has_got_another_name_since_is_found(self):
        self.assertEqual(base.B, self.find(host='b.example.org'))

    def test_its_address_tells_who_it_is_now(self):
        self.answers[base.B] = ['b', '192.0.2.2']
        self.assertEqual(base.B, self.find(host='b.example.org',
                                           ip='192.0.2.2'))

    def test_nobody_is_asked_who_this_node_is(self):
        self.directory = directory.Directory(self.DOWN, {}, self.ask)
        self.assertEqual(self.DOWN, self.find(host='b.example.org'))
        self.assertEqual([], self.asked)


class IdentityTest(DirectoryTestCase):

    def test_name_that_is_known_asks_nobody(self):
        self.find(host='b')
        self.assertEqual([], self.asked)

    def test_peers_are_asked_once_in_a_while(self):
        for _time in range(3):
            self.find(host='nobody')
        self.assertEqual([base.A, base.B], sorted(self.asked))

    def later(self, seconds):
        """Time goes by."""
        now = directory.time.monotonic() + seconds
        self.patch('cinder_localstor.peers.directory.time.monotonic',
                   return_value=now)

    def test_answers_grow_old(self):
        self.find(host='nobody')
        self.later(directory.IDENTITY_LIFETIME + 1)
        self.find(host='nobody')
        self.assertEqual(4, len(self.asked))

    def test_who_is_known_is_asked_alone(self):
        self.find(ip='192.0.2.2')
        self.later(directory.IDENTITY_LIFETIME + 1)
        self.asked.clear()
        self.assertEqual(base.B, self.find(ip='192.0.2.2'))
        self.assertEqual([base.B], self.asked)

    def test_address_that_another_has_by_now(self):
        self.find(ip='192.0.2.2')
        self.later(directory.IDENTITY_LIFETIME + 1)
        self.answers = {base.A: ['a', '192.0.2.2'], base.B: ['b']}
        self.assertEqual(base.A, self.find(ip='192.0.2.2'))

    def silence(self, peer):
        self.answers[peer] = exception.PeerDown(
            peer=peer, about='its names', host='-', reason='gone')

    def test_peer_that_does_not_answer_hides_nobody_else(self):
        self.silence(base.A)
        self.assertEqual(base.B, self.find(ip='192.0.2.2'))

    def test_peer_that_does_not_answer_is_let_alone_for_a_while(self):
        self.silence(base.A)
        for _time in range(3):
            self.find(host='nobody')
        self.assertEqual(1, self.asked.count(base.A))
        self.later(directory.SILENCE + 1)
        self.find(host='nobody')
        self.assertEqual(2, self.asked.count(base.A))

    def test_peer_that_does_not_answer_is_who_it_was(self):
        self.find(ip='192.0.2.2')
        self.later(directory.IDENTITY_LIFETIME + 1)
        self.silence(base.B)
        self.assertEqual(base.B, self.find(ip='192.0.2.2'))

    def test_peers_are_asked_at_once(self):
        meeting = threading.Barrier(2, timeout=5)
        for peer, names in tuple(self.answers.items()):
            self.answers[peer] = lambda names=names: (meeting.wait(),
                                                      names)[1]
        self.assertEqual(base.B, self.find(ip='192.0.2.2'))

    def test_nobody_waits_for_a_peer_that_is_not_needed(self):
        go_on = threading.Event()
        self.addCleanup(go_on.set)
        self.answers[base.A] = lambda: go_on.wait(10) and []
        began = time.monotonic()
        self.assertEqual(base.B, self.find(ip='192.0.2.2'))
        self.assertLess(time.monotonic() - began, 5)

    def test_peer_that_is_down_is_not_asked(self):
        with mock.patch('cinder.objects.Service.is_up', False):
            self.assertIsNone(self.find(ip='192.0.2.2'))
        self.assertEqual([base.A], self.asked)


class OwnIdentityTest(base.TestCase):

    def identity(self, *known):
        with mock.patch('socket.gethostname', return_value='a'), \
                mock.patch('socket.getfqdn', return_value='a.example.org'):
            return directory.own_identity(known)

    def test_names_and_addresses(self):
        self.assertEqual(['192.0.2.1', 'a', 'a.example.org', 'x'],
                         self.identity('192.0.2.1', 'x', 'a', ''))

    def test_what_every_node_has_is_no_identity(self):
        self.assertEqual(['a', 'a.example.org'],
                         self.identity('localhost', 'localhost.localdomain'))


class DownTest(base.TestCase):

    def test_services_that_are_down(self):
        self.make_service(base.A)
        service = self.make_service(base.B)
        self.assertEqual(set(), directory.down(self.ctxt))
        service.updated_at = timeutils.utcnow()
        with mock.patch('cinder.objects.Service.is_up',
                        new_callable=mock.PropertyMock,
                        side_effect=[True, False]):
            self.assertEqual({base.B}, directory.down(self.ctxt))
