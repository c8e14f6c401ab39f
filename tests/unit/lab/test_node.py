# SPDX-License-Identifier: Apache-2.0

import pathlib
import tempfile
from unittest import mock

from oslotest import base

from lab import errors
from lab import node
from lab import services


class RestartTest(base.BaseTestCase):
    """A service that says that it can't work is started again so often."""

    def setUp(self):
        super().setUp()
        self.log = pathlib.Path(self.enterContext(
            tempfile.TemporaryDirectory())) / 'log'
        self.host = mock.Mock()
        self.host.place.log.return_value = self.log
        self.host.place.environment = self.host.environment = {}
        self.host.service_states.return_value = {
            'n': {'state': 'running', 'log_offset': 0}}

    def start(self, restarts, says):
        """Start one that says this and that, one after the other."""
        said = iter(says)

        def request(do, **arguments):
            if do == 'service-start':
                self.log.write_text(next(said))
        self.host.agent.request.side_effect = request
        node.NodeService(self.host, services.Service(
            'n', lambda place: ['n'], restarts=restarts,
            ready=lambda place: services.Probe(
                says='joined', fails='Unhandled'))).start()

    def requests(self):
        return [call.kwargs['do']
                for call in self.host.agent.request.mock_calls]

    def test_once(self):
        self.start(1, ['Unhandled', 'joined'])
        self.assertEqual(['service-start', 'service-stop', 'service-start'],
                         self.requests())

    def test_no_more_than_that(self):
        error = self.assertRaises(errors.StartFailed, self.start, 1,
                                  ['Unhandled', 'Unhandled', 'joined'])
        self.assertIn('Unhandled', str(error))

    def test_not_at_all(self):
        self.assertRaises(errors.StartFailed, self.start, 0,
                          ['Unhandled', 'joined'])
        self.assertEqual(['service-start'], self.requests())
