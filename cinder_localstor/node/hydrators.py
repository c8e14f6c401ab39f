# SPDX-License-Identifier: Apache-2.0
"""The native helpers of a node: localstor-hydrator, one for each copy.

A helper outlives the driver.  It is started in the background, restarts itself
when it dies, and is asked over a socket in its own directory below /run, one
JSON object on a line each way (hydrator/daemon/src/protocol.rs).
"""

import json
import os
from typing import Any

from oslo_log import log as logging

from cinder_localstor import exception
from cinder_localstor.node import commands
from cinder_localstor.node import interface
from cinder_localstor.node import privileged

LOG = logging.getLogger(__name__)

UBLK, NBD = '/dev/ublk-control', '/sys/module/nbd'
MODULES = {UBLK: 'ublk_drv', NBD: 'nbd'}


def parse_status(text: str) -> interface.HydratorStatus:
    """What a helper answers.

    :raises OutputNotUnderstood: it has another form
    """
    try:
        answer = json.loads(text)
        # A helper of an earlier version goes on until its move has ended.
        return interface.HydratorStatus(
            state=str(answer['state']), local=int(answer['local']),
            rate=int(answer['rate']),
            verify=str(answer.get('verify', interface.NOT_VERIFIED)),
            verified=int(answer.get('verified', 0)),
            differing=int(answer.get('differing_blocks', 0)),
            first_differing=_int_or_none(answer.get('first_differing')),
            limit=_int_or_none(answer['limit']),
            minimum=int(answer['minimum']))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise exception.OutputNotUnderstood(
            line=text, command=privileged.HYDRATOR + ' status') from error


def _int_or_none(value: Any) -> int | None:
    return None if value is None else int(value)


class ProcessHydrators(interface.Hydrators):
    """The helpers of this node."""

    def __init__(self, command: commands.Commands) -> None:
        self._command = command

    def check(self) -> None:
        try:
            self._command.run(privileged.HYDRATOR, '--version')
        except (OSError, exception.CommandFailed) as error:
            raise exception.HydratorMissing(
                host=self._command.host, reason=error) from error
        for sign, module in MODULES.items():
            if not os.path.exists(sign):
                try:
                    self._command.run('modprobe', '--quiet', module)
                except exception.CommandFailed:
                    LOG.debug('No module %s to load', module)
            if os.path.exists(sign):
                return
        raise exception.NoUserBlockDevices(host=self._command.host)

    def start(self, copy: str, hydrator: interface.Hydrator) -> str:
        arguments = [
            '--move', hydrator.move_id, '--data', hydrator.data,
            '--metadata', hydrator.metadata, '--source', hydrator.source,
            '--size', str(hydrator.size), '--new',
            '--minimum', str(hydrator.minimum)]
        if hydrator.zeroed:
            arguments.append('--zeroed')
        if hydrator.verify != interface.NOT_VERIFIED:
            arguments += ['--verify', hydrator.verify]
        if hydrator.source_timeout:
            arguments += ['--source-timeout', str(hydrator.source_timeout)]
        if hydrator.poll_time:
            arguments += ['--poll', str(hydrator.poll_time)]
        return self._command.start_hydrator(copy, arguments).strip()

    def status(self, copy: str) -> interface.HydratorStatus | None:
        try:
            return parse_status(self._ask(copy, command='status'))
        except OSError:
            return None

    def hydrate(self, copy: str) -> None:
        self._tell(copy, command='start')

    def throttle(self, copy: str, limit: int | None, minimum: int) -> None:
        self._tell(copy, command='throttle', limit=limit, minimum=minimum)

    def pause(self, copy: str, seconds: int) -> None:
        self._tell(copy, command='pause', seconds=seconds)

    def resume(self, copy: str) -> None:
        self._tell(copy, command='resume')

    def copy_metadata(self, metadata: str, move_id: str, to: str,
                      new_move_id: str) -> None:
        self._command.run(
            privileged.HYDRATOR, 'copy', metadata, '--move', move_id,
            '--to', to, '--new-move', new_move_id)

    def end(self, copy: str) -> None:
        directory = privileged.runtime_directory(copy)
        if not os.path.exists(directory):
            return
        try:
            self._command.run(privileged.HYDRATOR, 'abort', directory)
        except exception.CommandTimedOut:
            raise
        except exception.CommandFailed as error:
            if 'is in use' in str(error):
                raise exception.VolumeInUse(
                    volume_name=copy, host=self._command.host,
                    device=directory + '/device') from error
            raise

    def _ask(self, copy: str, **request: Any) -> str:
        """:raises OSError: nobody answers"""
        return privileged.ask_hydrator(copy, json.dumps(request),
                                       self._command.timeout)

    def _tell(self, copy: str, **request: Any) -> None:
        command = '%s %s %s' % (privileged.HYDRATOR, request['command'], copy)
        try:
            answer = self._ask(copy, **request)
        except OSError as error:
            raise exception.CommandFailed(
                command=command, host=self._command.host,
                reason=error) from error
        if '"ok"' not in answer:
            raise exception.CommandFailed(
                command=command, host=self._command.host,
                reason=answer.strip() or 'it ended without an answer')
