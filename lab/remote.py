# SPDX-License-Identifier: Apache-2.0
"""The outside end of a node's agent."""

import dataclasses
import json
import os
import select
import socket
import time
from typing import Any
from typing import Callable

from lab import agent
from lab import errors
from lab import network

Sink = Callable[[bytes], None]


@dataclasses.dataclass(frozen=True)
class Result:
    """What a command left behind."""

    command: list[str]
    returncode: int
    stdout: str
    stderr: str


class Agent:
    """Speaks with the agent of one node."""

    def __init__(self, name: str, address: str, net: network.Network) -> None:
        self._name = name
        self._address = address
        self._network = net

    def request(self, timeout: float = 30, **request: Any) -> dict[str, Any]:
        """One question, one answer."""
        connection = self._open(timeout)
        with connection:
            try:
                agent.send_frame(connection, b'Q',
                                 json.dumps(request).encode())
                reader = agent.FrameReader()
                while True:
                    data = connection.recv(agent.CHUNK)
                    if not data:
                        raise errors.NodeUnreachable(
                            self._name, 'it hung up')
                    for _, payload in reader.feed(data):
                        answer = json.loads(payload)
                        if 'error' in answer:
                            raise errors.LabError(
                                f'Node "{self._name}" could not '
                                f'{request["do"]}: {answer["error"]}')
                        return answer
            except OSError as error:
                raise errors.NodeUnreachable(self._name, error) from error

    def run(self, argv: list[str], environment: dict[str, str], *,
            check: bool = True, timeout: float | None = 60,
            data: str | bytes | None = None,
            directory: str | None = None) -> Result:
        """Run a command to its end and return what it printed."""
        stdout: list[bytes] = []
        stderr: list[bytes] = []
        if isinstance(data, str):
            data = data.encode()
        code = self.stream(argv, environment, stdout.append, stderr.append,
                           timeout=timeout, data=data or b'',
                           directory=directory)
        result = Result(argv, code,
                        b''.join(stdout).decode(errors='replace'),
                        b''.join(stderr).decode(errors='replace'))
        if check and code:
            raise errors.CommandFailed(self._name, argv, code,
                                       result.stdout, result.stderr)
        return result

    def stream(self, argv: list[str], environment: dict[str, str],
               stdout: Sink, stderr: Sink, *, timeout: float | None = None,
               data: bytes | None = None, source: int | None = None,
               directory: str | None = None,
               terminal: tuple[int, int] | None = None) -> int:
        """Run a command, pass its output on as it comes.

        Standard input is either the given data or what a file descriptor
        yields.
        """
        request = {'do': 'run', 'argv': argv, 'environment': environment,
                   'timeout': timeout, 'directory': directory,
                   'terminal': terminal}
        connection = self._open(10)
        with connection:
            # A node that loses its power says nothing more.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in ((socket.TCP_KEEPIDLE, 5),
                                  (socket.TCP_KEEPINTVL, 2),
                                  (socket.TCP_KEEPCNT, 5)):
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
            connection.setblocking(False)
            outgoing = bytearray(agent.frame(b'Q',
                                             json.dumps(request).encode()))
            if source is None:
                data = data or b''
                for start in range(0, len(data), agent.CHUNK):
                    outgoing += agent.frame(
                        b'I', data[start:start + agent.CHUNK])
                outgoing += agent.frame(b'I')
            try:
                return self._converse(connection, argv, stdout, stderr,
                                      timeout, outgoing, source)
            except OSError as error:
                raise errors.NodeUnreachable(self._name, error) from error

    def _converse(self, connection: socket.socket, argv: list[str],
                  stdout: Sink, stderr: Sink, timeout: float | None,
                  outgoing: bytearray, source: int | None) -> int:
        reader = agent.FrameReader()
        # The agent keeps the time; this is for a node that hangs.
        deadline = time.monotonic() + timeout + 10 if timeout else None
        while True:
            # Never wait for the agent to take input only: it may be waiting
            # for us to take output.
            inputs: list[Any] = [connection]
            if source is not None and not outgoing:
                inputs.append(source)
            wait = None
            if deadline is not None:
                wait = max(0.0, deadline - time.monotonic())
            # Not poll: a test process in which eventlet has patched the
            # standard library has none.
            readable, writable, _ = select.select(
                inputs, [connection] if outgoing else [], [], wait)
            if source is not None and source in readable:
                piece = os.read(source, agent.CHUNK)
                outgoing += agent.frame(b'I', piece)
                if not piece:
                    source = None
            if writable:
                del outgoing[:connection.send(outgoing)]
            if connection in readable:
                received = connection.recv(agent.CHUNK)
                if not received:
                    raise errors.NodeUnreachable(self._name, 'it hung up')
                for kind, payload in reader.feed(received):
                    if kind == b'O':
                        stdout(payload)
                    elif kind == b'E':
                        stderr(payload)
                    else:
                        return self._end(argv, timeout, json.loads(payload))
            if deadline is not None and time.monotonic() > deadline:
                raise errors.CommandTimeout(self._name, argv, timeout or 0)

    def _end(self, argv: list[str], timeout: float | None,
             answer: dict[str, Any]) -> int:
        if 'error' in answer:
            raise errors.CommandFailed(self._name, argv, 127, '',
                                       answer['error'])
        if answer.get('timeout'):
            raise errors.CommandTimeout(self._name, argv, timeout or 0)
        return answer['returncode']

    def _open(self, timeout: float) -> socket.socket:
        try:
            return self._network.connect(self._address, agent.PORT, timeout)
        except OSError as error:
            raise errors.NodeUnreachable(self._name, error) from error
