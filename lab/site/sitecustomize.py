# SPDX-License-Identifier: Apache-2.0
"""Changes what the services of a node find in Python.

They start commands by vfork. oslo.concurrency gives subprocess a function to
call between fork and exec, which rules vfork out. All that function does is
to reset SIGPIPE, and subprocess does that by itself. On a real machine nobody
would notice; in a node each fork of a service as large as Cinder costs half a
second, because it turns every page the service touches afterwards into a page
fault.
"""

import _posixsubprocess
import functools
import os

_fork_exec = _posixsubprocess.fork_exec


def _resets_sigpipe_only(function):
    return (isinstance(function, functools.partial)
            and function.func.__name__ == '_subprocess_setup'
            and function.args == (None,))


def fork_exec(*arguments):
    """As the original; its last arguments are preexec_fn, allow_vfork."""
    *others, function, allow_vfork = arguments
    if _resets_sigpipe_only(function):
        function = None
    return _fork_exec(*others, function, allow_vfork)


# Here and not in subprocess, of which eventlet makes copies.
_posixsubprocess.fork_exec = fork_exec


# For the test that a driver which makes nothing durable is caught.
if os.environ.get('LAB_WITHOUT_FLUSH'):
    os.fsync = lambda descriptor: None
