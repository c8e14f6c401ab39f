# SPDX-License-Identifier: Apache-2.0
"""HTTP into the lab's network namespace from any process."""

from typing import Any
from typing import Mapping

from keystoneauth1 import adapter
from keystoneauth1.identity import v3
from keystoneauth1 import service_token as service_tokens
from keystoneauth1 import session as sessions
import requests
import requests.adapters
import urllib3
import urllib3.connection
import urllib3.connectionpool

from lab import configuration
from lab import layout
from lab import network


class _NamespaceAdapter(requests.adapters.HTTPAdapter):
    """Opens every connection inside the namespace."""

    def __init__(self, net: network.Network) -> None:
        class Connection(urllib3.connection.HTTPConnection):
            def _new_conn(self) -> Any:
                with net.entered():
                    return super()._new_conn()

        class Pool(urllib3.connectionpool.HTTPConnectionPool):
            ConnectionCls = Connection

        self._pool = Pool
        super().__init__()

    def init_poolmanager(self, *arguments: Any, **options: Any) -> None:
        """Make the pool manager use our connections."""
        super().init_poolmanager(*arguments, **options)
        self.poolmanager.pool_classes_by_scheme = {'http': self._pool}


class Api:
    """One API: a session, its base address and headers."""

    def __init__(self, session: sessions.Session, endpoint: str,
                 headers: Mapping[str, str]) -> None:
        self._adapter = adapter.Adapter(
            session, endpoint_override=endpoint,
            additional_headers=dict(headers))

    def request(self, method: str, path: str,
                **options: Any) -> requests.Response:
        """Any request; statuses from 400 on are raised by keystoneauth."""
        return self._adapter.request(path, method, **options)

    def get(self, path: str, **options: Any) -> requests.Response:
        """GET."""
        return self.request('GET', path, **options)

    def post(self, path: str, **options: Any) -> requests.Response:
        """POST."""
        return self.request('POST', path, **options)

    def put(self, path: str, **options: Any) -> requests.Response:
        """PUT."""
        return self.request('PUT', path, **options)

    def delete(self, path: str, **options: Any) -> requests.Response:
        """DELETE."""
        return self.request('DELETE', path, **options)


def session(place: layout.Layout, net: network.Network, user: str,
            project: str, service_token: bool) -> sessions.Session:
    """A session of a user; see ``Cloud.session``."""
    def password(name: str, of_project: str) -> v3.Password:
        return v3.Password(
            auth_url=configuration.keystone_url(place), username=name,
            password=configuration.PASSWORD, project_name=of_project,
            user_domain_id='default', project_domain_id='default')

    auth: Any = password(user, project)
    if service_token:
        auth = service_tokens.ServiceTokenAuthWrapper(
            user_auth=auth, service_auth=password('cinder', 'service'))
    transport = requests.Session()
    transport.trust_env = False
    transport.mount('http://', _NamespaceAdapter(net))
    return sessions.Session(auth=auth, session=transport)
