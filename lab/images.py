# SPDX-License-Identifier: Apache-2.0
"""What the lab has so that volumes can be made of images: Glance, natively."""

import pathlib

from lab import configuration
from lab import control_plane
from lab import layout
from lab import services

PORT = 9292
GLANCE = 'glance'
# Of a Glance, whatever its store is
DIRECTORIES = ('staging', 'tasks', 'locks')


def url(place: layout.Layout) -> str:
    """Where Glance answers."""
    return f'http://{place.address("control")}:{PORT}'


APIS = (services.Api(GLANCE, 'image', url),)
SETUP = (services.Setup('glance-db-sync', lambda place: control_plane.manage(
    place, GLANCE, 'db_sync')),)


def config(lab: layout.Layout, state: pathlib.PurePath
           ) -> configuration.Sections:
    """glance-api.conf of any Glance of the lab, but for its store.

    :param state: where its :data:`DIRECTORIES` are
    """
    return {
        'DEFAULT': {'debug': False, 'use_stderr': True,
                    'enabled_import_methods': '[glance-direct]'},
        'database': configuration.database(lab, GLANCE),
        'os_glance_staging_store': {
            'filesystem_store_datadir': state / 'staging'},
        'os_glance_tasks_store': {
            'filesystem_store_datadir': state / 'tasks'},
        'keystone_authtoken': configuration.service_user(lab, GLANCE) | {
            'www_authenticate_uri': configuration.keystone_url(lab)},
        'paste_deploy': {
            'flavor': 'keystone', 'config_file':
                lab.environment / 'etc' / 'glance' / 'glance-api-paste.ini'},
        'oslo_concurrency': {'lock_path': state / 'locks'},
    }


def _config(place: services.Place) -> configuration.Sections:
    """glance-api.conf, which its tool reads, too."""
    state = place.directory / GLANCE
    return services.merged(config(place.layout, state), {
        'DEFAULT': {'worker_self_reference_url': url(place.layout),
                    'enabled_backends': 'files:file'},
        'glance_store': {'default_backend': 'files'},
        'files': {'filesystem_store_datadir': state / 'images'},
    })


def _prepare(place: services.Place) -> None:
    for name in ('images', *DIRECTORIES):
        (place.directory / GLANCE / name).mkdir(parents=True, exist_ok=True)


SERVICES = (
    services.Service(
        name=GLANCE,
        command=lambda place: control_plane.wsgi(
            place, 'glance.wsgi.api', PORT),
        environment=lambda place: control_plane.lab_on_path(place) | {
            'OS_GLANCE_CONFIG_DIR': str(control_plane.etc(place))},
        files=lambda place: {
            name: services.render_ini(_config(place))
            for name in ('glance-api.conf', 'glance.conf')},
        prepare=_prepare,
        after=('database',),
        ready=control_plane.listens(control_plane.NAME, PORT)),
)
