# SPDX-License-Identifier: Apache-2.0
"""The life of a move.

:mod:`table` says what the states are, who drives a move in each, which steps
are taken and what has to be true before the next one; :mod:`steps` ties the
names of steps to the data path; :mod:`executor` walks through the table.
"""
