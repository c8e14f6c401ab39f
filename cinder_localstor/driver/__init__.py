# SPDX-License-Identifier: Apache-2.0
"""Cinder's volume driver interface, and nothing else."""

from cinder_localstor.driver.localstor import LocalStorDriver

__all__ = ('LocalStorDriver',)
