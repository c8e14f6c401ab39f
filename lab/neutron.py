# SPDX-License-Identifier: Apache-2.0
"""A Neutron that has nothing: as much of it as instances without networks ask.

Whatever is listed is empty, and nobody's quota has an end.
"""

import json
from typing import Any
from typing import Callable
from typing import Iterable


def application(environ: dict[str, Any],
                start_response: Callable[..., Any]) -> Iterable[bytes]:
    """The API, version 2.0: ``GET /v2.0/ports`` and the like.

    Of single objects ``GET /v2.0/quotas/<project>`` is the only one that is
    asked for.
    """
    kind, _slash, one = environ['PATH_INFO'].removeprefix(
        '/v2.0/').removesuffix('.json').partition('/')
    found: dict[str, Any] = ({'quota': {'port': -1}}
                             if kind == 'quotas' and one
                             else {kind.replace('-', '_'): []})
    body = json.dumps(found).encode()
    start_response('200 OK', [('Content-Type', 'application/json'),
                              ('Content-Length', str(len(body)))])
    return [body]
