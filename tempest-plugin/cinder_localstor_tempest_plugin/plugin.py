# SPDX-License-Identifier: Apache-2.0

import pathlib

from tempest import config
from tempest.test_discover import plugins

from cinder_localstor_tempest_plugin import config as our_config


class LocalStorTempestPlugin(plugins.TempestPlugin):
    """What Tempest asks of a plugin."""

    def load_tests(self):
        package = pathlib.Path(__file__).parent
        return str(package / 'tests'), str(package.parent)

    def register_opts(self, conf):
        config.register_opt_group(conf, our_config.group, our_config.options)

    def get_opt_lists(self):
        return [(our_config.group.name, our_config.options)]
