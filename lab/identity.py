# SPDX-License-Identifier: Apache-2.0
"""Keystone's API, with its policy loaded.

oslo.policy loads it at the first request, and is not made for two first ones
in two threads: one of them fails.
"""

from keystone.common.rbac_enforcer import enforcer
from keystone.wsgi import api

application = api.application
enforcer.RBACEnforcer()._enforcer.load_rules()
