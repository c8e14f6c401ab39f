# SPDX-License-Identifier: Apache-2.0
"""Cinder's attachments, asked for as Nova does."""

from oslo_serialization import jsonutils as json
from tempest.lib.common import rest_client
from tempest.lib.services.volume.v3 import attachments_client


class AttachmentsClient(attachments_client.AttachmentsClient):
    """Bears the token of a service beside that of a user."""

    def __init__(self, auth_provider, service, *args, **kwargs):
        """:param service: the auth provider of a user with a service's role
        """
        super().__init__(auth_provider, *args, **kwargs)
        self._service = service

    def get_headers(self, *args, **kwargs):
        return {**super().get_headers(*args, **kwargs),
                'X-Service-Token': self._service.get_token()}

    def create_attachment(self, volume_id, server_id, connector=None):
        """Reserve a volume for a server, and connect it if there is a
        connector.
        """
        return self._ask(self.post, 'attachments', {'attachment': {
            'volume_uuid': volume_id, 'instance_uuid': server_id,
            **({'connector': connector} if connector else {})}})

    def update_attachment(self, attachment_id, connector):
        """Connect what is reserved."""
        return self._ask(self.put, 'attachments/' + attachment_id,
                         {'attachment': {'connector': connector}})

    def complete_attachment(self, attachment_id):
        """Say that the server has the volume."""
        self.post('attachments/%s/action' % attachment_id,
                  json.dumps({'os-complete': {}}))

    @staticmethod
    def _ask(ask, path, body):
        response, text = ask(path, json.dumps(body))
        return rest_client.ResponseBody(response, json.loads(text))
