# SPDX-License-Identifier: Apache-2.0
"""The backends of this node, as cinder-volume reads its configuration."""

from collections.abc import Iterator
import contextlib
import dataclasses
import os
from typing import Any

# The first, because it registers Cinder's objects.
from cinder_localstor import opts

# Registers the options that belong to no backend.
from cinder.common import config  # noqa: F401
import cinder.privsep
from cinder import rpc
from cinder.volume import configuration as cinder_configuration
from cinder.volume import driver
from oslo_config import cfg
from oslo_db import exception as db_exception
from oslo_db import options as db_options

from cinder_localstor import exception
from cinder_localstor.node import privileged

CONF = cfg.CONF

DRIVER = 'cinder_localstor.'
# A person waits, so the database is not waited for without end.
DATABASE_TRIES = 2

# Cinder registers them in modules that only a service should load.
SERVICE_OPTS = [
    cfg.StrOpt('volume_driver',
               default='cinder.volume.drivers.lvm.LVMVolumeDriver',
               help='Driver to use for volume creation'),
    cfg.StrOpt('backend_host', help='Backend override of host value.'),
]


@dataclasses.dataclass(frozen=True)
class Configured:
    """A backend of ours; `host` is its ``host@backend``."""

    host: str
    configuration: Any

    @property
    def name(self) -> str:
        """What types of volumes know it by, and its like on other nodes."""
        return self.configuration.volume_backend_name or opts.BACKEND_NAME


def load(config_files: list[str]) -> None:
    """Read cinder's configuration.

    :raises cfg.Error: it can't be read
    """
    arguments = []
    for path in config_files:
        arguments += ['--config-file', path]
    CONF(arguments, project='cinder')
    db_options.set_defaults(CONF)
    CONF.set_override('max_retries', DATABASE_TRIES, group='database')
    if os.geteuid() == 0:
        # Whoever is root needs no daemon to become it.
        privileged.CONTEXT.set_client_mode(False)
        cinder.privsep.sys_admin_pctxt.set_client_mode(False)


def join_bus() -> None:
    """Let Cinder's services be asked for something.

    To be called when the configuration is read.
    """
    if not rpc.initialized():
        rpc.init(CONF)


@contextlib.contextmanager
def database_errors_told() -> Iterator[None]:
    """:raises DatabaseUnreadable: nobody knows what should be here"""
    try:
        yield
    except db_exception.DBError as error:
        raise exception.DatabaseUnreadable(
            reason=str(error).partition('\n')[0]) from error


def configured() -> list[Configured]:
    """The enabled backends that are ours."""
    found = []
    for name in filter(None, CONF.enabled_backends or ()):
        configuration = cinder_configuration.Configuration(
            SERVICE_OPTS + driver.volume_opts + opts.driver_options(),
            config_group=name)
        if configuration.volume_driver.startswith(DRIVER):
            # As cinder-volume does; see _launch_service in its cmd/volume.py.
            host = CONF[name].backend_host or CONF.host
            found.append(Configured('%s@%s' % (host, name), configuration))
    return found


def chosen(names: list[str]) -> list[Configured]:
    """The backends of ours with these names; all for none.

    :raises NoSuchBackend: the node has none of a name
    """
    known = {backend.host.rpartition('@')[2]: backend
             for backend in configured()}
    for name in names:
        if name not in known:
            raise exception.NoSuchBackend(
                name=name, known=', '.join(sorted(known)) or 'none')
    return [known[name] for name in names or known]
