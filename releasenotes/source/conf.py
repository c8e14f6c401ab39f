# SPDX-License-Identifier: Apache-2.0
"""Sphinx configuration of the release notes."""

extensions = [
    'reno.sphinxext',
]

project = 'cinder-localstor release notes'
project_copyright = 'the cinder-localstor developers, Apache License 2.0'

html_theme = 'furo'
html_title = project
