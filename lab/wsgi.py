# SPDX-License-Identifier: Apache-2.0
"""Serves one OpenStack API: ``python -m lab.wsgi MODULE ADDRESS PORT ...``.

One process with threads. What follows the port is what the application
finds as its own command line.
"""

import importlib
import socket
import sys

from werkzeug import serving

_BACKLOG = 128


class _Handler(serving.WSGIRequestHandler):
    """Logs one line a request, without colours."""

    def log_request(self, code: int | str = '-', size: int | str = '-'
                    ) -> None:
        self.log('info', '"%s" %s %s', self.requestline, code, size)


def main() -> None:
    """Load the application, then serve for ever."""
    module, address, port, *rest = sys.argv[1:]
    sys.argv[1:] = rest
    application = importlib.import_module(module).application
    # A server that binds by itself asks DNS for its own name.
    with socket.create_server((address, int(port)), backlog=_BACKLOG
                              ) as listener:
        server = serving.make_server(address, int(port), application,
                                     threaded=True,
                                     request_handler=_Handler,
                                     fd=listener.fileno())
        server.serve_forever(poll_interval=60)


if __name__ == '__main__':
    main()
