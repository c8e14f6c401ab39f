# SPDX-License-Identifier: Apache-2.0
"""Sphinx configuration of the documentation."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent / '_ext'))

extensions = [
    'oslo_config.sphinxext',
    'localstor_tables',
]

project = 'cinder-localstor'
project_copyright = 'the cinder-localstor developers, Apache License 2.0'

# Not openstackdocstheme: it puts the pages under another license, calls them
# OpenStack's own and has every reader counted by a third party.
html_theme = 'furo'
html_title = project
html_static_path = ['_static']

nitpicky = True
