# SPDX-License-Identifier: Apache-2.0
"""What the lab has instead of networks: a Neutron without any, natively.

Instances ask it, and so does Tempest, before tests that need no network.
"""

from lab import control_plane
from lab import layout
from lab import services

PORT = 9696
NEUTRON = 'neutron'


def url(place: layout.Layout) -> str:
    """Where it answers."""
    return f'http://{place.address("control")}:{PORT}'


APIS = (services.Api(NEUTRON, 'network', url),)
SERVICES = (
    services.Service(
        name=NEUTRON,
        command=lambda place: control_plane.wsgi(place, 'lab.neutron', PORT),
        environment=control_plane.lab_on_path,
        ready=control_plane.listens(control_plane.NAME, PORT)),
)
