# SPDX-License-Identifier: Apache-2.0
"""What a node has instead of ssh: runs a command on another node.

``shell.py [OPTION]... HOST COMMAND [ARGUMENT]...`` as Nova calls ssh.  It
needs neither keys nor a daemon, because every node has an agent; nothing but
the standard library and the lab.
"""

import os
import pathlib
import socket
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

from lab import errors  # noqa: E402
from lab import remote  # noqa: E402

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


class _Network:
    """As a node has it, which is in the lab's network with all it does."""

    @staticmethod
    def connect(address, port, timeout=None):
        """A TCP connection."""
        return socket.create_connection((address, port), timeout)


def run(host, command):
    """Run a command there on our input, pass its output on; its status."""
    agent = remote.Agent(host, host, _Network())
    try:
        # ssh gives the words to a shell, joined.
        return agent.stream(['sh', '-c', ' '.join(command)], dict(os.environ),
                            lambda data: os.write(1, data),
                            lambda data: os.write(2, data), source=0)
    except errors.LabError as error:
        # As ssh ends when it has no connection
        print(error, file=sys.stderr)
        return 255


if __name__ == '__main__':
    sys.exit(run(*parse(sys.argv[1:])))
