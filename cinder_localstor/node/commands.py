# SPDX-License-Identifier: Apache-2.0
"""Runs the node's tools, each with a timeout and a clear error."""

from collections.abc import Callable
from collections.abc import Sequence
import shlex
import socket

from oslo_log import log as logging
from oslo_utils import timeutils

from cinder_localstor import exception
from cinder_localstor.node import privileged

LOG = logging.getLogger(__name__)

Run = Callable[[list[str], float], tuple[int, str, str]]


class Commands:
    """Runs external commands on this node."""

    def __init__(self, timeout: float) -> None:
        """:param timeout: seconds that a command may take"""
        self.timeout = timeout
        self.host = socket.gethostname()

    def run(self, *arguments: str, timeout: float | None = None) -> str:
        """Run a command and return what it printed.

        :raises CommandTimedOut: it was ended after its time
        :raises CommandStillRuns: it could not be; of LVM's only
        :raises CommandFailed: its exit status was not 0
        """
        return self._judge(privileged.run, list(arguments),
                           timeout or self.timeout)

    def run_in_turn(self, what: str, lines: Sequence[Sequence[str]]) -> None:
        """Run commands, one after the other, until one fails.

        :param what: is told and logged in place of them: they have secrets
        :raises CommandTimedOut: one was ended after its time
        :raises CommandFailed: the exit status of one was not 0
        """
        self._judge(lambda _arguments, limit: privileged.run_in_turn(
            [list(arguments) for arguments in lines], limit),
            [what], self.timeout)

    def start_hydrator(self, copy: str, arguments: list[str]) -> str:
        """Start the native helper of a copy; what it printed.

        :raises CommandTimedOut: it is not usable yet
        :raises CommandFailed: it can't work
        """
        return self._judge(
            lambda _arguments, limit: privileged.start_hydrator(
                copy, arguments, limit),
            [privileged.HYDRATOR, 'run', *arguments], self.timeout)

    def hold(self, names: Sequence[str], seconds: float) -> int:
        """Suspend device-mapper nodes; the process id of their guard.

        :param seconds: after which they go on, whatever happens
        :raises CommandFailed: none of them is suspended, or not for long
        """
        return int(self._judge(
            lambda _arguments, limit: privileged.hold(
                list(names), seconds, limit),
            ['dmsetup', 'suspend', *names], self.timeout))

    def let_go(self, guard: int) -> None:
        """Let the nodes of a guard go on.

        :raises CommandFailed: they did so before
        """
        self._judge(lambda _arguments, limit: privileged.let_go(guard, limit),
                    ['dmsetup', 'resume'], self.timeout)

    def _judge(self, run: Run, arguments: list[str], limit: float) -> str:
        command = shlex.join(arguments)
        watch = timeutils.StopWatch()
        with watch:
            status, out, err = run(arguments, limit)
        LOG.debug('%(command)s: status %(status)s after %(elapsed).2f s',
                  {'command': command, 'status': status,
                   'elapsed': watch.elapsed()})
        if status == privileged.STILL_RUNS:
            raise exception.CommandStillRuns(command=command, host=self.host,
                                             seconds=limit, pid=out)
        if status == privileged.TIMED_OUT:
            raise exception.CommandTimedOut(command=command, host=self.host,
                                            seconds=limit)
        if status != 0:
            raise exception.CommandFailed(command=command, host=self.host,
                                          reason=err.strip() or status)
        return out
