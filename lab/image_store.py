# SPDX-License-Identifier: Apache-2.0
"""What the lab has so that images are kept in volumes: a Glance in each node.

Its store is Cinder.  It needs a kernel that volumes can be attached to, and so
it runs in a node; the Glance of the control plane keeps its images in files.
"""

import pathlib

from lab import configuration
from lab import control_plane
from lab import images
from lab import node_services
from lab import services

PORT = 9293
NAME = 'glance-api'
_STATE = pathlib.PurePosixPath('/var/lib/glance')


def url(address: str) -> str:
    """Where a node's Glance answers.

    :param address: the node's
    """
    return f'http://{address}:{PORT}'


def _etc(place: services.Place) -> pathlib.Path:
    return place.directory / 'glance'


def _config_file(place: services.Place) -> str:
    return str(_etc(place) / 'glance-api.conf')


def _config(place: services.Place) -> configuration.Sections:
    """glance-api.conf of a node."""
    lab = place.layout
    return services.merged(images.config(lab, _STATE), {
        'DEFAULT': {'enabled_backends': 'volumes:cinder',
                    'worker_self_reference_url': url(place.address)},
        'glance_store': {'default_backend': 'volumes'},
        'volumes': {
            'cinder_volume_type': configuration.BACKENDS[0],
            'cinder_store_auth_address': configuration.keystone_url(lab),
            'cinder_store_user_name': images.GLANCE,
            'cinder_store_password': configuration.PASSWORD,
            'cinder_store_project_name': 'service',
            'cinder_catalog_info': 'volumev3::publicURL'},
        'privsep_osbrick': {'helper_command':
                            configuration.privsep_helper(
                                place, _config_file(place))},
    })


def _files(place: services.Place) -> dict[str, str | services.Link]:
    kept = {f'{_STATE}/{name}/.keep': '' for name in images.DIRECTORIES}
    return kept | {_config_file(place): services.render_ini(_config(place))}


SERVICES = (
    services.Service(
        name=NAME,
        command=lambda place: control_plane.wsgi(
            place, 'glance.wsgi.api', PORT),
        environment=lambda place: node_services.repository_on_path(place) | {
            'OS_GLANCE_CONFIG_DIR': str(_etc(place))},
        files=_files,
        after=('iscsid',),
        ready=lambda place: services.Probe(listens=(place.address, PORT)),
        start_timeout=900),
)
