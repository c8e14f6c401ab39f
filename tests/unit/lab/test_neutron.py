# SPDX-License-Identifier: Apache-2.0

import json

import ddt
from oslotest import base

from lab import neutron


@ddt.ddt
class NeutronTest(base.BaseTestCase):

    def test_a_project_may_have_any_number_of_ports(self):
        [body] = neutron.application(
            {'PATH_INFO': '/v2.0/quotas/a-project'}, lambda *_start: None)

        self.assertEqual({'quota': {'port': -1}}, json.loads(body))

    @ddt.data(('/v2.0/ports', 'ports'), ('/v2.0/ports.json', 'ports'),
              ('/v2.0/security-groups', 'security_groups'))
    @ddt.unpack
    def test_what_is_listed_is_empty(self, path, kind):
        started = []

        body = neutron.application(
            {'PATH_INFO': path}, lambda *start: started.append(start))

        self.assertEqual({kind: []}, json.loads(b''.join(body)))
        [(status, headers)] = started
        self.assertEqual('200 OK', status)
        self.assertEqual(str(len(b''.join(body))),
                         dict(headers)['Content-Length'])
