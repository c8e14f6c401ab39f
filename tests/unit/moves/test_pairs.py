# SPDX-License-Identifier: Apache-2.0
"""Whole histories of a volume with faults, single and in pairs.

Every run has a fault at every other call that a history makes, each time
another one, and a sample of pairs that is always the same.  ``make soak`` has
every fault at each call, and new samples.  What fails tells its faults and the
calls that they struck.
"""

from collections.abc import Callable
import os
import random

import ddt

from tests.unit import base
from tests.unit import site

# Pairs of each history: always the same, or so many new ones
SAME = 6
NEW = int(os.environ.get('LOCALSTOR_SOAK_PAIRS', '0'))


STRIKES = tuple(
    site.Strike(fault, power) for fault in site.FAULTS
    for power in ((False, True) if fault in site.DEADLY else (False,)))


def migrated(cloud: site.Site) -> None:
    """A live migration succeeds."""
    instance = migrating(cloud)
    if len(instance.opened) == 2:
        cloud.switch(instance, base.B)
        write(cloud, instance)
        detach(cloud, instance, base.A)
    let_pass(cloud, instance)


def migration_rolled_back(cloud: site.Site) -> None:
    """A live migration fails in Nova, and the guest stays."""
    instance = migrating(cloud)
    write(cloud, instance)
    if instance.home == base.A and base.B in instance.attachments:
        detach(cloud, instance, base.B)
    let_pass(cloud, instance)


def deleted(cloud: site.Site) -> None:
    """A volume is detached and deleted before it has arrived."""
    instance = arriving(cloud)
    leave(cloud, instance)
    if not instance.attachments:
        cloud.delete(instance)


def moved_on(cloud: site.Site) -> None:
    """A volume goes on to a third node before it has arrived."""
    instance = arriving(cloud)
    leave(cloud, instance)
    use(cloud, instance, base.C)


def returned(cloud: site.Site) -> None:
    """A volume that still arrives grows and goes back."""
    instance = arriving(cloud)
    cloud.extend(instance)
    leave(cloud, instance)
    use(cloud, instance, base.A)


def sent(cloud: site.Site) -> None:
    """An admin migrates a volume, and it is used where it is then."""
    instance = cloud.create(base.A)
    cloud.script.begin_early()
    cloud.script.begin()
    cloud.send(instance, base.B)
    restart(cloud)
    use(cloud, instance, cloud.host_of(instance.volume))


HISTORIES = (migrated, migration_rolled_back, deleted, moved_on, returned,
             sent)


def migrating(cloud: site.Site) -> site.Instance:
    """An instance in a live migration from A to B."""
    instance = cloud.create(base.A)
    cloud.attach(instance, base.A)
    write(cloud, instance)
    cloud.script.begin_early()
    cloud.attach(instance, base.B)
    cloud.script.begin()
    return instance


def arriving(cloud: site.Site) -> site.Instance:
    """A volume that was attached elsewhere and has arrived by half."""
    instance = cloud.create(base.A)
    cloud.script.begin_early()
    use(cloud, instance, base.B)
    cloud.script.begin()
    return instance


def use(cloud: site.Site, instance: site.Instance, host: str) -> None:
    if not instance.attachments:
        cloud.attach(instance, host)
    let_pass(cloud, instance)


def leave(cloud: site.Site, instance: site.Instance) -> None:
    if instance.runs:
        cloud.stop(instance)
    for host in list(instance.attachments):
        detach(cloud, instance, host)


def detach(cloud: site.Site, instance: site.Instance, host: str) -> None:
    """Nova tries twice."""
    if not cloud.detach(instance, host):
        restart(cloud)
        cloud.detach(instance, host)


def write(cloud: site.Site, instance: site.Instance) -> None:
    if instance.runs:
        cloud.write(instance, 0)
        cloud.flush(instance)
        cloud.write(instance, 1)


def restart(cloud: site.Site) -> None:
    for host in sorted(cloud.down):
        cloud.boot(host)
    cloud.run_queue()


def let_pass(cloud: site.Site, instance: site.Instance) -> None:
    """A while in which half of what is left arrives."""
    write(cloud, instance)
    for node in cloud.nodes.values():
        node.hydrate(8)
    cloud.look()
    cloud.watch()
    restart(cloud)


@ddt.ddt
class HistoryTest(site.TestCase):

    def run_once(self, history: Callable[[site.Site], None],
                 script: site.Script) -> int:
        """How many calls a history makes that may go wrong.

        :raises AssertionError: something is not as it must be
        """
        cloud = site.Site(self, script=script)
        try:
            history(cloud)
            cloud.settle()
            calls = script.calls
            cloud.end()
        except AssertionError as error:
            raise AssertionError('%s, %s: %s' % (
                history.__name__, '; '.join(script.struck) or 'no fault',
                error)) from error
        return calls

    @ddt.data(*HISTORIES)
    def test_each_call_goes_wrong(self, history):
        for number in range(0, self.run_once(history, site.Script()),
                            1 if NEW else 2):
            strikes = (STRIKES if NEW
                       else (STRIKES[number // 2 % len(STRIKES)],))
            for strike in strikes:
                self.run_once(history, site.Script({number: strike}))

    @ddt.data(*HISTORIES)
    def test_two_calls_go_wrong(self, history):
        calls = self.run_once(history, site.Script(early=True))
        chance = random.Random(history.__name__)
        if NEW:
            chance.seed()
        for _pair in range(NEW or SAME):
            first = chance.randrange(calls)
            self.run_once(history, site.Script({
                first: chance.choice(STRIKES),
                # What a fault sets off makes calls of its own.
                first + chance.randint(1, calls): chance.choice(STRIKES)},
                early=True))
