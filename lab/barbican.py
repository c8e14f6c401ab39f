# SPDX-License-Identifier: Apache-2.0
"""Barbican's API as an application of :mod:`lab.wsgi`.

Its own reads what it is made of from a file in /etc. Here the first argument
says where that is.
"""

import sys

from paste import deploy

application = deploy.loadapp('config:' + sys.argv[1])
