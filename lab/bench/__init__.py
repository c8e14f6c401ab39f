# SPDX-License-Identifier: Apache-2.0
"""A benchmark of the data paths of a moving volume, on one node of the lab.

:mod:`~lab.bench.scenarios` says what is measured, :mod:`~lab.bench.stacks`
builds what it is measured on, :mod:`~lab.bench.fio` is the guest,
:mod:`~lab.bench.native` needs no node, nor does :mod:`~lab.bench.vhost`, which
is about virtual machines; :mod:`~lab.bench.runner` goes through all of it in
rounds. :mod:`~lab.bench.results` makes medians and fits of what came out,
:mod:`~lab.bench.report` shows them.

Nothing here judges a figure: it is a benchmark, not a test.
"""
