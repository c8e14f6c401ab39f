# SPDX-License-Identifier: Apache-2.0
"""The operator's command, on top of all layers."""
