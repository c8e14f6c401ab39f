# SPDX-License-Identifier: Apache-2.0
"""The life of a move.

:mod:`table` says what the states are, who drives a move in each, which steps
are taken and what has to be true before the next one; :mod:`facts` finds out
what is true; :mod:`executor` walks through the table.

:mod:`registry` knows which copies should be on a backend.
:mod:`mover` does what users ask for, :mod:`scheduler` looks after the moves by
itself, :mod:`exports` and :mod:`recovery` bring back what was lost,
:mod:`answers` is what peers ask, and :mod:`service` puts the parts together.
"""
