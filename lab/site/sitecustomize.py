# SPDX-License-Identifier: Apache-2.0
"""Lets the services of a node start commands by vfork.

oslo.concurrency gives subprocess a function to call between fork and exec,
which rules vfork out. All that function does is to reset SIGPIPE, and
subprocess does that by itself. On a real machine nobody would notice; in a
node each fork of a service as large as Cinder costs half a second, because
it turns every page the service touches afterwards into a page fault.
"""

import _posixsubprocess
import functools

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
