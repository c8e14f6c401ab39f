# SPDX-License-Identifier: Apache-2.0
"""Goes through all that is to be measured, in rounds."""

from collections.abc import Iterator
import dataclasses
import os
import platform
import subprocess
import time

from rich import progress as bars

from lab.bench import disks
from lab.bench import native
from lab.bench import results as results_
from lab.bench import scenarios
from lab.bench import stacks
from lab.bench import steps
from lab.bench import vhost
from lab import cloud as clouds
from lab import errors
from lab import node as nodes

MEMORY = '6G'


@dataclasses.dataclass(frozen=True)
class Effort:
    """How much to do.

    :ivar rounds: how often each figure is taken
    :ivar seconds: how long a guest works
    """

    rounds: int
    seconds: float
    scenarios: tuple[scenarios.Scenario, ...]


STANDARD = Effort(rounds=3, seconds=2, scenarios=scenarios.SCENARIOS)
QUICK = Effort(rounds=1, seconds=1, scenarios=scenarios.QUICK)


@dataclasses.dataclass(frozen=True)
class _Turn:
    """One stack's turn in a round of a scenario."""

    scenario: scenarios.Scenario
    latency: float
    kind: type[stacks.Stack]
    round: int


def run(cloud: clouds.Cloud, effort: Effort, progress: bars.Progress
        ) -> results_.Results:
    """Measure everything, on a lab of one bare node that is up."""
    found = results_.Results()
    node = cloud.node('node1')
    found.environment = environment(node, effort)
    turns = list(_turns(effort))
    task = progress.add_task('disks', total=len(turns) + 3)
    made = {}
    for latency in sorted({turn.latency for turn in turns}):
        made[latency] = disks.Disk(node, latency, scenarios.VOLUME)
        made[latency].make()
    for latency in {turn.latency for turn in turns
                    if turn.scenario in scenarios.HYDRATION}:
        made[latency].fill_source()
    begun = 0
    for turn in turns:
        if turn.round > begun:
            begun = turn.round
            # For who has no terminal with a bar
            progress.console.print(f'round {begun} of {effort.rounds}')
        stack = turn.kind(made[turn.latency])
        progress.update(task, description=(
            f'round {turn.round}: {turn.latency:g} ms, {stack.label}'))
        _take(stack, turn, effort, found)
        progress.advance(task)
    for name, measure in (('the core', native.requests),
                          ('memory', native.memory)):
        progress.update(task, description=f'natively: {name}')
        try:
            found.native |= measure()
        except errors.LabError as error:
            found.failures.append(f'{name}: {error}')
        progress.advance(task)
    progress.update(task, description='natively: vhost-user-blk')
    try:
        vhost.measure(effort.rounds, effort.seconds, found)
    except (errors.LabError, OSError) as error:
        found.failures.append(f'vhost-user-blk: {error}')
    progress.advance(task)
    found.environment['load at the end'] = os.getloadavg()
    found.environment['seconds'] = \
        time.time() - found.environment['begun']
    return found


def _turns(effort: Effort) -> Iterator[_Turn]:
    """Each stack has its turn at another place in each round."""
    for number in range(1, effort.rounds + 1):
        for scenario in effort.scenarios:
            for latency in scenario.latencies:
                shift = (number - 1) % len(scenario.kinds)
                for kind in (scenario.kinds[shift:]
                             + scenario.kinds[:shift]):
                    yield _Turn(scenario, latency, kind, number)


def _take(stack: stacks.Stack, turn: _Turn, effort: Effort,
          found: results_.Results) -> None:
    """Build, measure and remove a stack; what fails is noted."""
    now = steps.Round(effort.seconds, turn.round)
    try:
        try:
            stack.build(turn.scenario.size)
            for step in turn.scenario.steps:
                load = os.getloadavg()[0]
                figures = step.perform(stack, now)
                if step.key:
                    found.samples.append(results_.Sample(
                        step.key, turn.latency, stack.name, turn.round,
                        load, figures))
        finally:
            stack.remove()
    except errors.LabError as error:
        where = (f'round {turn.round}, {turn.latency:g} ms, {stack.label}, '
                 f'{[step.key for step in turn.scenario.steps if step.key]}')
        found.failures.append(f'{where}: {error}')
        try:
            stacks.sweep(stack.disk)
        except errors.LabError as left:
            found.failures.append(f'{where}, swept: {left}')


def environment(node: nodes.Node, effort: Effort) -> dict[str, object]:
    """Where this is measured."""
    return {
        'begun': time.time(),
        'date': time.strftime('%Y-%m-%d %H:%M:%S %z'),
        'rounds': effort.rounds,
        'seconds of a guest': effort.seconds,
        'load at the beginning': os.getloadavg(),
        'processors': os.cpu_count(),
        'processor': _processor(),
        'machine': platform.release(),
        'node': node.run(['uname', '-r']).stdout.strip(),
        'fio': node.run(['fio', '--version']).stdout.strip(),
        'commit': subprocess.run(
            ['git', 'describe', '--always', '--dirty'], cwd=stacks.HYDRATOR
            .parents[3], capture_output=True, text=True).stdout.strip(),
    }


def _processor() -> str:
    with open('/proc/cpuinfo') as information:
        for line in information:
            if line.startswith('model name'):
                return line.split(':', 1)[1].strip()
    return platform.machine()
