# SPDX-License-Identifier: Apache-2.0
"""The agent: runs commands and keeps services inside a node.

It is the one Python process of a node that is always there, needs nothing
but the standard library, and is the same program that ``lab.remote`` talks
to from outside. One TCP connection carries one request.

Every message is a frame: one byte that says what it is, four bytes of
length (big endian), then the payload.

========  =========  ===================================================
frame     direction  payload
========  =========  ===================================================
``Q``     to agent   the request, a JSON object
``I``     to agent   bytes for standard input; none means end of file
``O``     from it    bytes of standard output
``E``     from it    bytes of standard error
``X``     from it    the answer, a JSON object; the last frame
========  =========  ===================================================

A request's ``do`` is ``run`` (argv, environment, directory, timeout,
terminal), ``service-start`` (name, argv, environment, log), ``service-stop``
(name, signal, grace), ``service-status`` (names) or ``ping``.

When a client goes away the process group of its command is killed, so
nothing that a test started outlives the test by accident. Services are
sessions of their own and stay.
"""

import fcntl
import json
import os
import pty
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time

PORT = 7700
HEADER = struct.Struct('>cI')
CHUNK = 65536
# A peer that announces more than this is not one of ours.
MAX_FRAME = 16 * 1024 * 1024


def frame(kind, payload=b''):
    """The bytes of one frame."""
    return HEADER.pack(kind, len(payload)) + payload


def send_frame(connection, kind, payload=b''):
    """Send one frame."""
    connection.sendall(frame(kind, payload))


class FrameReader:
    """Cuts what arrives on a connection into frames."""

    def __init__(self):
        self._buffer = bytearray()

    def feed(self, data):
        """Take received bytes, return the complete frames among them."""
        self._buffer += data
        frames = []
        while len(self._buffer) >= HEADER.size:
            kind, length = HEADER.unpack_from(self._buffer)
            if length > MAX_FRAME:
                raise ValueError(f'frame of {length} bytes')
            end = HEADER.size + length
            if len(self._buffer) < end:
                break
            frames.append((kind, bytes(self._buffer[HEADER.size:end])))
            del self._buffer[:end]
        return frames


def send_answer(connection, **answer):
    """Send the frame that ends a conversation."""
    send_frame(connection, b'X', json.dumps(answer).encode())


def session_members(leader):
    """Every process of a session, zombies left out."""
    members = []
    for entry in os.listdir('/proc'):
        if not entry.isdigit():
            continue
        try:
            with open(f'/proc/{entry}/stat', 'rb') as stat:
                # The command's name may contain blanks and parentheses.
                fields = stat.read().rpartition(b')')[2].split()
        except OSError:
            continue
        if int(fields[3]) == leader and fields[0] not in (b'Z', b'X'):
            members.append(int(entry))
    return members


def signal_session(leader, number):
    """Send a signal to every process of a session."""
    for pid in session_members(leader):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass


class Services:
    """The long-lived processes of the node."""

    def __init__(self):
        self._lock = threading.Lock()
        self._processes = {}
        self._started = {}

    def start(self, request):
        """Start a service in a session of its own, output to its log."""
        name = request['name']
        with self._lock:
            process = self._processes.get(name)
            if process and process.poll() is None:
                return self._status(name)
            with open(request['log'], 'ab', buffering=0) as log:
                since = log.seek(0, os.SEEK_END)
                process = subprocess.Popen(
                    request['argv'], stdin=subprocess.DEVNULL, stdout=log,
                    stderr=log, env=request['environment'], cwd='/',
                    start_new_session=True)
            self._processes[name] = process
            self._started[name] = (time.monotonic(), since)
            return self._status(name)

    def stop(self, request):
        """Signal a service; after the timeout kill what is left of it."""
        process = self._processes.get(request['name'])
        if process is None:
            return {'was': 'unknown'}
        was = 'running' if process.poll() is None else 'dead'
        if was == 'running' and request['signal'] != signal.SIGKILL:
            os.kill(process.pid, request['signal'])
            try:
                process.wait(request['grace'])
            except subprocess.TimeoutExpired:
                was = 'killed'
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            signal_session(process.pid, signal.SIGKILL)
            if process.poll() is not None and not session_members(
                    process.pid):
                break
            time.sleep(0.02)
        with self._lock:
            if self._processes.get(request['name']) is process:
                del self._processes[request['name']]
        return {'was': was}

    def status(self, request):
        """State of the named services, or of all."""
        with self._lock:
            names = request.get('names') or list(self._processes)
            return {'services': {name: self._status(name)
                                 for name in names}}

    def _status(self, name):
        process = self._processes.get(name)
        if process is None:
            return {'state': 'stopped'}
        code = process.poll()
        if code is not None:
            return {'state': 'failed', 'returncode': code}
        # What stands in its log before this offset is of a former life.
        started, since = self._started[name]
        return {'state': 'running', 'pid': process.pid,
                'uptime': time.monotonic() - started,
                'log_offset': since}


class Command:
    """One command of one client, from start to exit status."""

    def __init__(self, connection, request, reader):
        self._connection = connection
        self._request = request
        self._reader = reader
        self._outputs = {}
        self._input = None
        self._pending = bytearray()
        self._input_ended = False

    def run(self, frames):
        """Run to the end; frames are those already received."""
        request = self._request
        try:
            process = self._start()
        except OSError as error:
            send_answer(self._connection, error=str(error),
                        errno=error.errno)
            return
        timeout = request.get('timeout')
        deadline = time.monotonic() + timeout if timeout else None
        try:
            for kind, payload in frames:
                self._take(kind, payload)
            answer = self._pump(process, deadline)
        finally:
            if process.poll() is None:
                self._kill(process)
                process.wait()
            for descriptor in self._outputs:
                os.close(descriptor)
            if self._input is not None and self._input not in self._outputs:
                os.close(self._input)
        if answer is not None:
            send_answer(self._connection, **answer)
            self._linger()

    def _linger(self):
        """Let the client read the answer before the connection ends.

        Closing a socket that holds unread input resets the connection, and
        a reset may overtake the answer.
        """
        self._connection.shutdown(socket.SHUT_WR)
        self._connection.settimeout(5)
        while self._connection.recv(CHUNK):
            pass

    def _start(self):
        request = self._request
        options = {'env': request['environment'],
                   'cwd': request.get('directory') or '/'}
        if request.get('terminal'):
            ours, theirs = pty.openpty()
            try:
                self._resize(ours, request['terminal'])
                # setsid makes this very process the leader of a session
                # whose controlling terminal this is.
                process = subprocess.Popen(
                    ['setsid', '--ctty', *request['argv']],
                    stdin=theirs, stdout=theirs, stderr=theirs, **options)
            except OSError:
                os.close(ours)
                raise
            finally:
                os.close(theirs)
            self._outputs = {ours: b'O'}
            self._input = ours
        else:
            process = subprocess.Popen(
                request['argv'], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                start_new_session=True, **options)
            self._outputs = {os.dup(process.stdout.fileno()): b'O',
                             os.dup(process.stderr.fileno()): b'E'}
            self._input = os.dup(process.stdin.fileno())
            for pipe in (process.stdin, process.stdout, process.stderr):
                pipe.close()
            os.set_blocking(self._input, False)
        for descriptor in self._outputs:
            os.set_blocking(descriptor, False)
        return process

    @staticmethod
    def _resize(descriptor, size):
        rows, columns = size
        fcntl.ioctl(descriptor, termios.TIOCSWINSZ,
                    struct.pack('HHHH', rows, columns, 0, 0))

    @staticmethod
    def _kill(process):
        signal_session(process.pid, signal.SIGKILL)

    def _pump(self, process, deadline):
        """Carry bytes both ways until the command ends."""
        ended = os.pidfd_open(process.pid)
        try:
            while True:
                if deadline is not None and time.monotonic() > deadline:
                    return {'timeout': True}
                poll = select.poll()
                poll.register(ended, select.POLLIN)
                poll.register(self._connection, select.POLLIN)
                for descriptor in self._outputs:
                    poll.register(descriptor, select.POLLIN)
                if self._pending and self._input is not None:
                    poll.register(self._input, select.POLLOUT | (
                        select.POLLIN if self._input in self._outputs
                        else 0))
                wait = None
                if deadline is not None:
                    wait = max(0, deadline - time.monotonic()) * 1000 + 1
                events = dict(poll.poll(wait))
                for descriptor in list(self._outputs):
                    if descriptor in events:
                        self._carry_output(descriptor)
                if self._input in events:
                    self._carry_input()
                if self._connection.fileno() in events:
                    data = self._connection.recv(CHUNK)
                    if not data:
                        return None
                    for kind, payload in self._reader.feed(data):
                        self._take(kind, payload)
                if ended in events:
                    # A daemon that the command left behind may hold the
                    # pipes for ever: what is in them now is the output.
                    for descriptor in list(self._outputs):
                        while self._carry_output(descriptor):
                            pass
                    return {'returncode': process.wait()}
        finally:
            os.close(ended)

    def _carry_output(self, descriptor):
        """Forward what one pipe holds; tell whether there may be more."""
        if descriptor not in self._outputs:
            return False
        try:
            data = os.read(descriptor, CHUNK)
        except BlockingIOError:
            return False
        except OSError:
            # The other side of a terminal is gone.
            data = b''
        if data:
            send_frame(self._connection, self._outputs[descriptor], data)
            return True
        if descriptor != self._input:
            os.close(descriptor)
            del self._outputs[descriptor]
        else:
            # Reading a terminal nobody holds open fails at once, for ever:
            # the end of the process ends the loop.
            time.sleep(0.01)
        return False

    def _carry_input(self):
        if self._pending:
            try:
                written = os.write(self._input, self._pending)
            except BlockingIOError:
                return
            except OSError:
                # The command does not read; that is its business.
                written = len(self._pending)
                self._input_ended = True
            del self._pending[:written]
        self._close_input()

    def _close_input(self):
        if (self._input_ended and not self._pending
                and self._input is not None
                and self._input not in self._outputs):
            os.close(self._input)
            self._input = None

    def _take(self, kind, payload):
        if kind == b'I':
            if payload:
                self._pending += payload
            else:
                self._input_ended = True
                self._close_input()


class Agent:
    """Listens, and gives every connection a thread."""

    def __init__(self):
        self._services = Services()

    def serve(self, address, port):
        """Accept connections for ever."""
        with socket.create_server((address, port), backlog=64) as listener:
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=self._converse, args=(connection,),
                                 daemon=True).start()

    def _converse(self, connection):
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                self._answer(connection)
            except (OSError, ValueError) as error:
                print(f'conversation failed: {error!r}', file=sys.stderr)

    def _answer(self, connection):
        reader = FrameReader()
        frames = []
        while not frames:
            data = connection.recv(CHUNK)
            if not data:
                return
            frames = reader.feed(data)
        kind, payload = frames.pop(0)
        if kind != b'Q':
            raise ValueError(f'a conversation began with {kind!r}')
        request = json.loads(payload)
        if request['do'] == 'run':
            # The client may have sent input right behind the request.
            Command(connection, request, reader).run(frames)
            return
        try:
            answer = self._do(request)
        except OSError as error:
            answer = {'error': str(error), 'errno': error.errno}
        send_answer(connection, **answer)

    def _do(self, request):
        if request['do'] == 'ping':
            with open('/proc/uptime') as uptime:
                return {'uptime': float(uptime.read().split()[0])}
        return {'service-start': self._services.start,
                'service-stop': self._services.stop,
                'service-status': self._services.status,
                }[request['do']](request)


if __name__ == '__main__':
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    Agent().serve(sys.argv[1], int(sys.argv[2]))
