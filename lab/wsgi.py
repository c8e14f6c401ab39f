# SPDX-License-Identifier: Apache-2.0
"""Serves one OpenStack API: ``python -m lab.wsgi MODULE ADDRESS PORT ...``.

One process with threads. What follows the port is what the application
finds as its own command line.
"""

import importlib
import socketserver
import sys
import wsgiref.simple_server


class _Handler(wsgiref.simple_server.WSGIRequestHandler):
    """Logs one line a request, without asking DNS who the client is."""

    def address_string(self) -> str:
        return self.client_address[0]


class _Server(socketserver.ThreadingMixIn,
              wsgiref.simple_server.WSGIServer):
    daemon_threads = True
    request_queue_size = 128
    allow_reuse_address = True

    def server_bind(self) -> None:
        # As the parent does, but without the reverse look-up of our address.
        socketserver.TCPServer.server_bind(self)
        self.server_name = str(self.server_address[0])
        self.server_port = int(self.server_address[1])
        self.setup_environ()


def main() -> None:
    """Load the application, then serve for ever."""
    module, address, port, *rest = sys.argv[1:]
    sys.argv[1:] = rest
    application = importlib.import_module(module).application
    with _Server((address, int(port)), _Handler) as server:
        server.set_app(application)
        server.serve_forever(poll_interval=60)


if __name__ == '__main__':
    main()
