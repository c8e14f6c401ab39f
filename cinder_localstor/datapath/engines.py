# SPDX-License-Identifier: Apache-2.0
"""The engines of a node, and the one that its option wants."""

from typing import Any

from oslo_log import log as logging

from cinder_localstor.datapath import clone
from cinder_localstor.datapath import engine
from cinder_localstor.datapath import hydrator
from cinder_localstor import exception
from cinder_localstor.node import interface

LOG = logging.getLogger(__name__)

AUTO = 'auto'


class Engines:
    """All engines: a move keeps the one that it began with."""

    def __init__(self, node: interface.Node, configuration: Any) -> None:
        self.configuration = configuration
        self._engines: dict[str, engine.Engine] = {
            # The one that is wanted by 'auto' first
            hydrator.NAME: hydrator.HydratorEngine(node, configuration),
            clone.TARGET: clone.CloneEngine(node)}
        self._chosen: dict[str, str] = {}

    def named(self, name: str) -> engine.Engine:
        """The engine of a move that has begun."""
        return self._engines[name]

    def chosen(self, wanted: str = '') -> engine.Engine:
        """What moves that begin now get.

        :param wanted: what the volume's type has in place of the option
            localstor_data_path, '' for nothing
        :raises NoDataPath: this node can't run what is wanted
        :raises NotVerifiable: it can't compare what it copies, as it should
        """
        wanted = wanted or self.configuration.localstor_data_path
        if wanted not in self._chosen:
            chosen = self._choose(wanted)
            self._check_verification(chosen)
            self._chosen[wanted] = chosen
        return self._engines[self._chosen[wanted]]

    def _check_verification(self, name: str) -> None:
        """:raises NotVerifiable: it can't compare what the option wants"""
        verify = self.configuration.localstor_verify
        if (verify != interface.NOT_VERIFIED
                and not self._engines[name].verifies):
            raise exception.NotVerifiable(verify=verify, engine=name)

    def _choose(self, wanted: str) -> str:
        if wanted != AUTO:
            self._engines[wanted].check()
            return wanted
        *better, last = self._engines
        for name in better:
            try:
                self._engines[name].check()
                return name
            except exception.NoDataPath as error:
                LOG.warning('Volumes will move here with %(last)s: %(error)s',
                            {'last': last, 'error': error})
        self._engines[last].check()
        return last
