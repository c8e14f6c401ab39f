# SPDX-License-Identifier: Apache-2.0
"""What the lab has so that volumes can be encrypted: Barbican, natively.

Cinder asks it for a key for each volume of an encrypted type. Barbican itself
keeps the keys in its database, encrypted by a key in its configuration.
"""

import base64

from lab import configuration
from lab import control_plane
from lab import layout
from lab import services

PORT = 9311
BARBICAN = 'barbican'
# Nothing in a lab is secret.
_MASTER_KEY = base64.b64encode(b'the lab has no secrets at all...').decode()


def url(place: layout.Layout) -> str:
    """Where Barbican answers."""
    return f'http://{place.address("control")}:{PORT}'


APIS = (services.Api(BARBICAN, 'key-manager', url),)
SETUP = (services.Setup('barbican-db-sync', lambda place: [
    control_plane.python(place), str(place.binaries / 'barbican-manage'),
    'db', 'upgrade', '--db-url',
    configuration.database_url(place.layout, BARBICAN)]),)


def _config(place: services.Place) -> configuration.Sections:
    """barbican.conf."""
    lab = place.layout
    return {
        'DEFAULT': {'debug': False, 'use_stderr': True,
                    'host_href': url(lab)},
        'database': configuration.database(lab, BARBICAN),
        'keystone_authtoken': configuration.service_user(lab, BARBICAN) | {
            'www_authenticate_uri': configuration.keystone_url(lab)},
        'secretstore': {'enabled_secretstore_plugins': 'store_crypto'},
        'crypto': {'enabled_crypto_plugins': 'simple_crypto'},
        'simple_crypto_plugin': {'kek': _MASTER_KEY},
    }


SERVICES = (
    services.Service(
        name=BARBICAN,
        command=lambda place: control_plane.wsgi(
            place, 'lab.barbican', PORT,
            str(place.layout.environment / 'etc' / 'barbican'
                / 'barbican-api-paste.ini')),
        # It looks for its configuration nowhere else but in /etc.
        environment=lambda place: control_plane.lab_on_path(place) | {
            'HOME': str(control_plane.etc(place))},
        files=lambda place: {
            'barbican.conf': services.render_ini(_config(place))},
        after=('database',),
        ready=control_plane.listens(control_plane.NAME, PORT)),
)
