# SPDX-License-Identifier: Apache-2.0
"""What a node has instead of ssh: runs a command on another node.

``shell.py [OPTION]... HOST COMMAND [ARGUMENT]...`` as Nova calls ssh.  It
needs neither keys nor a daemon, because every node has an agent; nothing but
the standard library and the agent's protocol.
"""

import json
import os
import pathlib
import socket
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

from lab import agent  # noqa: E402

# Options that are followed by a value
_WITH_VALUE = ('-o', '-p', '-i', '-l')


def parse(arguments):
    """Host and command of a command line of ssh's."""
    arguments = list(arguments)
    while arguments[0].startswith('-'):
        option = arguments.pop(0)
        if option in _WITH_VALUE:
            arguments.pop(0)
    host, *command = arguments
    return host, command


def run(host, command):
    """Run a command there on our input, pass its output on; its status."""
    # ssh gives the words to a shell, joined.
    request = {'do': 'run', 'argv': ['sh', '-c', ' '.join(command)],
               'environment': dict(os.environ), 'timeout': None,
               'directory': None, 'terminal': None}
    reader = agent.FrameReader()
    with socket.create_connection((host, agent.PORT)) as connection:
        agent.send_frame(connection, b'Q', json.dumps(request).encode())
        while data := os.read(0, agent.CHUNK):
            agent.send_frame(connection, b'I', data)
        agent.send_frame(connection, b'I')
        while True:
            for kind, payload in reader.feed(connection.recv(agent.CHUNK)):
                if kind == b'O':
                    os.write(1, payload)
                elif kind == b'E':
                    os.write(2, payload)
                else:
                    return json.loads(payload).get('returncode', 255)


if __name__ == '__main__':
    sys.exit(run(*parse(sys.argv[1:])))
