# SPDX-License-Identifier: Apache-2.0
"""Random walks: users, admins, guests and disasters in any order.

A short walk, always the same, is part of every run.  ``make soak`` makes long
ones, never the same.  What fails is printed as a list of calls that fails so,
made as short as can be, with a line that repeats it.
"""

import itertools
import os

import hypothesis
from hypothesis import stateful
from hypothesis import strategies

from tests.unit import base
from tests.unit import site

STEPS = 40
# Walks that are always the same, or so many new ones
SAME = 40
NEW = int(os.environ.get('LOCALSTOR_SOAK_WALKS', '0'))

hosts = strategies.sampled_from(site.HOSTS)
numbers = strategies.integers(0, 1)
regions = strategies.sampled_from(site.REGIONS)


def among(fits):
    """A rule's precondition, that some instance fits it."""
    return stateful.precondition(
        lambda self: any(map(fits, self.site.instances)))


def is_whole(instance):
    return instance.is_whole


def may_attach(instance):
    return is_whole(instance) and not instance.attachments


def may_migrate(instance):
    return is_whole(instance) and len(instance.attachments) == 1


def may_switch(instance):
    return instance.runs and len(instance.opened) == 2


def runs(instance):
    return instance.runs


def may_resume(instance):
    return not instance.runs and instance.home in instance.attachments


def may_delete(instance):
    return not instance.attachments and not instance.snapshots


def may_be_snapshotted(instance):
    return is_whole(instance) and len(instance.snapshots) < 2


def has_snapshots(instance):
    return bool(instance.snapshots)


def has_good_snapshots(instance):
    return any(snapshot.is_good for snapshot in instance.snapshots.values())


def may_be_reverted(instance):
    return may_attach(instance) and has_good_snapshots(instance)


def may_detach(instance):
    return bool(idle(instance))


def may_be_forced(instance):
    return bool(instance.attachments) and not instance.runs


def may_be_reset(instance):
    return is_whole(instance) and not instance.runs


def idle(instance):
    """Hosts whose attachment no running guest uses."""
    return sorted(host for host in instance.attachments
                  if not instance.runs or host != instance.home)


class Walk(stateful.RuleBasedStateMachine):
    """What anybody may do to a site at any time."""

    def __init__(self, case: site.TestCase) -> None:
        super().__init__()
        self.site = site.Site(case)
        for _number in range(2):
            self.site.attach(self.site.create(base.A), base.A)

    def one(self, number, fits):
        """One of the instances that fit."""
        fitting = list(filter(fits, self.site.instances))
        return fitting[number % len(fitting)]

    # Users

    @stateful.precondition(lambda self: len(self.site.instances) < 2)
    @stateful.rule(host=hosts)
    def create(self, host):
        self.site.create(host)

    @among(may_attach)
    @stateful.rule(number=numbers, host=hosts)
    def attach(self, number, host):
        self.site.attach(self.one(number, may_attach), host)

    @among(may_migrate)
    @stateful.rule(number=numbers, forward=strategies.booleans())
    def migrate(self, number, forward):
        instance = self.one(number, may_migrate)
        here = site.HOSTS.index(next(iter(instance.attachments)))
        self.site.attach(instance,
                         site.HOSTS[(here + (1 if forward else 2)) % 3])

    @among(may_switch)
    @stateful.rule(number=numbers)
    def switch(self, number):
        instance = self.one(number, may_switch)
        self.site.switch(instance, next(
            host for host in instance.opened if host != instance.home))

    @among(may_detach)
    @stateful.rule(number=numbers, which=numbers,
                   lost=strategies.sampled_from(['', '', '', 'request',
                                                 'answer']))
    def detach(self, number, which, lost):
        instance = self.one(number, may_detach)
        choice = idle(instance)
        self.site.detach(instance, choice[which % len(choice)], lost)

    @among(is_whole)
    @stateful.rule(number=numbers)
    def extend(self, number):
        instance = self.one(number, is_whole)
        if self.site.row(instance.volume).size < 3:
            self.site.extend(instance)

    @among(may_be_snapshotted)
    @stateful.rule(number=numbers)
    def take_snapshot(self, number):
        self.site.take_snapshot(self.one(number, may_be_snapshotted))

    @among(has_snapshots)
    @stateful.rule(number=numbers)
    def delete_snapshot(self, number):
        self.site.delete_snapshot(self.one(number, has_snapshots))

    @among(has_good_snapshots)
    @stateful.precondition(lambda self: len(self.site.instances) < 4)
    @stateful.rule(number=numbers, host=hosts)
    def create_from_snapshot(self, number, host):
        self.site.create_from_snapshot(self.one(number, has_good_snapshots),
                                       host)

    @among(may_be_reverted)
    @stateful.rule(number=numbers)
    def revert(self, number):
        self.site.revert(self.one(number, may_be_reverted))

    @among(is_whole)
    @stateful.precondition(lambda self: len(self.site.instances) < 4)
    @stateful.rule(number=numbers)
    def clone(self, number):
        self.site.clone(self.one(number, is_whole))

    @among(may_delete)
    @stateful.rule(number=numbers)
    def delete(self, number):
        self.site.delete(self.one(number, may_delete))

    # Guests

    @among(runs)
    @stateful.rule(number=numbers, region=regions,
                   flush=strategies.booleans())
    def write(self, number, region, flush):
        instance = self.one(number, runs)
        self.site.write(instance, region)
        if flush:
            self.site.flush(instance)

    @among(runs)
    @stateful.rule(number=numbers, flush=strategies.booleans())
    def stop(self, number, flush):
        self.site.stop(self.one(number, runs), flush)

    @among(may_resume)
    @stateful.rule(number=numbers)
    def resume(self, number):
        self.site.resume(self.one(number, may_resume))

    # Admins

    @among(may_be_forced)
    @stateful.rule(number=numbers)
    def force_detach(self, number):
        self.site.force_detach(self.one(number, may_be_forced))

    @among(may_attach)
    @stateful.rule(number=numbers, host=hosts)
    def send(self, number, host):
        self.site.send(self.one(number, may_attach), host)

    @among(may_be_reset)
    @stateful.rule(number=numbers, status=strategies.sampled_from(
        ['available', 'in-use', 'error', 'extending']))
    def reset_state(self, number, status):
        self.site.reset_state(self.one(number, may_be_reset), status)

    # Disasters

    @stateful.rule(calls=strategies.integers(0, 30),
                   fault=strategies.sampled_from(site.FAULTS),
                   power=strategies.booleans())
    def strike(self, calls, fault, power):
        self.site.script.after(calls, site.Strike(
            fault, power and fault in site.DEADLY))

    @stateful.precondition(lambda self: len(self.site.down) < 2)
    @stateful.rule(host=hosts, power=strategies.booleans(),
                   kept=strategies.lists(strategies.booleans(),
                                         min_size=1, max_size=4))
    def lose(self, host, power, kept):
        if power:
            self.site.survives = itertools.cycle(kept).__next__
            self.site.cut_power(host)
        else:
            self.site.lose(host)

    @stateful.precondition(lambda self: not self.site.is_cut)
    @stateful.rule(host=hosts, lasts=strategies.booleans())
    def cut_network(self, host, lasts):
        for other in site.HOSTS:
            if other != host:
                self.site.cut_network(host, other)
        if lasts:
            self.site.give_up_sessions()

    # Time

    @stateful.precondition(lambda self: self.site.down
                           or self.site.is_cut)
    @stateful.rule()
    def heal(self):
        self.site.mend_network()
        for host in sorted(self.site.down):
            self.site.boot(host)
        self.site.run_queue()

    @stateful.rule(host=hosts, most=strategies.integers(0, 16))
    def period(self, host, most):
        for node in self.site.nodes.values():
            node.hydrate(most)
        self.site.look()
        self.site.period(host)

    def teardown(self):
        self.site.end()


class WalkTest(site.TestCase):

    def test_nothing_is_lost_and_everything_ends(self):
        stateful.run_state_machine_as_test(
            lambda: Walk(self),
            settings=hypothesis.settings(
                max_examples=NEW or SAME, derandomize=not NEW,
                stateful_step_count=STEPS, database=None, deadline=None,
                print_blob=True, phases=(hypothesis.Phase.generate,
                                         hypothesis.Phase.shrink),
                suppress_health_check=list(hypothesis.HealthCheck)))
