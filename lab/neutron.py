# SPDX-License-Identifier: Apache-2.0
"""A Neutron that has nothing: as much of it as instances without networks ask.

Whatever is listed is empty.
"""

import json
from typing import Any
from typing import Callable
from typing import Iterable


def application(environ: dict[str, Any],
                start_response: Callable[..., Any]) -> Iterable[bytes]:
    """The API, version 2.0: ``GET /v2.0/ports`` and the like."""
    kind = environ['PATH_INFO'].rpartition('/')[2].removesuffix('.json')
    body = json.dumps({kind.replace('-', '_'): []}).encode()
    start_response('200 OK', [('Content-Type', 'application/json'),
                              ('Content-Length', str(len(body)))])
    return [body]
