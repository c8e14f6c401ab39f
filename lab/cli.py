# SPDX-License-Identifier: Apache-2.0
"""The command line: ``python -m lab``."""

import argparse
import collections
from collections.abc import Iterator
import contextlib
import dataclasses
import logging
import os
import secrets
import shlex
import shutil
import sys
import termios
import time
import tty
from typing import Any
from typing import TextIO

from cliff import app
from cliff import command
from cliff import commandmanager
from cliff import lister
from rich import console as consoles
from rich import progress as bars

from lab import attach
from lab import chaos
from lab import cloud
from lab import compare
from lab import configuration
from lab import control_plane
from lab import distance
from lab import errors
from lab import fleet
from lab import guest_io
from lab import parts
from lab import progress
from lab import releases
from lab import scale
from lab import sizes
from lab import volatile

_DESCRIPTION = '''\
A virtual cloud on this machine: real kernels, real OpenStack.

Each node is a User Mode Linux kernel with its own disks, LVM, iSCSI and
cinder-volume. Keystone, Cinder's API and scheduler, RabbitMQ and MariaDB run
natively. Everything lives in a network namespace of its own and is gone
after "down".
'''

# Beyond it a volume would take an hour to arrive.
_DELAY_MOST = 1000


def _size(text: str) -> int:
    """A size, in bytes."""
    try:
        return sizes.parse(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f'"{text}" is no size: use a number and K, M, G or T'
        ) from None


def _delay(text: str) -> int:
    """What a packet takes longer, in milliseconds."""
    if not text.isdecimal() or int(text) > _DELAY_MOST:
        raise argparse.ArgumentTypeError(
            f'"{text}" is no delay: use milliseconds, up to {_DELAY_MOST}')
    return int(text)


def _memory(text: str) -> str:
    """A size, as the kernel takes it."""
    _size(text)
    return text


def _option(text: str) -> tuple[str, str, str]:
    """SECTION.KEY=VALUE, taken apart."""
    name, equals, value = text.partition('=')
    section, dot, key = name.rpartition('.')
    if not (equals and dot and section and key):
        raise argparse.ArgumentTypeError(
            f'"{text}" is not of the form SECTION.KEY=VALUE')
    return section, key, value


def _seed(text: str) -> int:
    """A seed as a disk takes it: 64 bits without a sign."""
    seed = int(text)
    if not 0 <= seed < 1 << 64:
        raise ValueError(text)
    return seed


def _node_and_block_size(text: str) -> tuple[str, int]:
    """The name of a node, and bytes of a logical block of its disks."""
    node, _, size = text.partition('=')
    if not node or size not in map(str, volatile.BLOCK_SIZES):
        raise argparse.ArgumentTypeError(
            f'"{text}" is not of the form NODE=BYTES, with 512 or 4096 bytes')
    return node, int(size)


def _add_disks(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument('--disks', choices=('plain', 'volatile'),
                        default=default,
                        help='what a power cut does to disks: nothing, or '
                             'they lose what was not flushed (default: '
                             f'{default})')


class _LabCommand(command.Command):
    """A command that knows its lab."""

    app: 'Lab'

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Leave the lines of the help as they are."""
        parser = super().get_parser(prog_name)
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        return parser

    @property
    def cloud(self) -> cloud.Cloud:
        """The lab chosen with --name."""
        return self.app.cloud


class Up(_LabCommand):
    """Start the lab and wait until volumes can be created on every node.

    The first start initialises the databases, which takes some 15 seconds
    longer; the result is kept below .lab/cache. On a running lab this does
    nothing.
    """

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Describe the arguments."""
        parser = super().get_parser(prog_name)
        parser.add_argument('--nodes', type=int, default=2, metavar='N',
                            help='how many nodes (default: 2)')
        parser.add_argument('--nova', action='store_true',
                            help='let instances run: Placement and Nova, '
                                 'and libvirtd and nova-compute in the '
                                 'nodes; "make nova" installs what it needs')
        parser.add_argument('--backup', action='store_true',
                            help='cinder-backup in the nodes, which keeps '
                                 'what it makes in one directory for all')
        parser.add_argument('--keys', action='store_true',
                            help='Barbican, so that volumes can be encrypted')
        parser.add_argument('--image-store', action='store_true',
                            help='Glance in the nodes, which keeps images in '
                                 'volumes')
        parser.add_argument('--lvm', action='store_true',
                            help='a third backend in each node, "lvm": '
                                 'Cinder\'s own driver, with thick volumes')
        parser.add_argument('--mirrored', action='store_true',
                            help='a further backend in each node, '
                                 '"mirrored": thick volumes that have a '
                                 'mirror on a second disk')
        parser.add_argument('--ipv6', action='store_true',
                            help='two further backends in each node, "ipv6" '
                                 'and "thin-ipv6", as "local" and "thin", '
                                 'whose volumes are read over IPv6')
        parser.add_argument('--unprivileged', action='store_true',
                            help='let cinder-volume run as the user cinder, '
                                 'with sudo and rootwrap')
        parser.add_argument('--contained', action='store_true',
                            help='let cinder-volume run in a container')
        parser.add_argument('--multipathd', action='store_true',
                            help='multipathd in the nodes, which takes disks '
                                 'that have several paths')
        parser.add_argument('--memory', metavar='SIZE', type=_memory,
                            help='memory of a node (default: 1G, with '
                                 '--nova, --backup, --image-store, --lvm, '
                                 '--mirrored or --ipv6 2G)')
        parser.add_argument('--disk-size', type=_size, metavar='SIZE',
                            default=8 * sizes.GIB,
                            help='size of the disk of each backend of a '
                                 'node, a sparse file (default: 8G)')
        _add_disks(parser, 'plain')
        parser.add_argument('--block-size', type=_node_and_block_size,
                            action='append', default=[],
                            metavar='NODE=BYTES',
                            help='bytes of a logical block of a node\'s '
                                 'volatile disks, 512 or 4096 (default: '
                                 '512); may be repeated')
        parser.add_argument('--driver', metavar='CLASS',
                            help='volume driver of "local" and "thin" '
                                 '(default: '
                                 'the driver of this repository)')
        parser.add_argument('--option', type=_option, action='append',
                            default=[], metavar='SECTION.KEY=VALUE',
                            help='set an option in every cinder.conf; may '
                                 'be repeated')
        parser.add_argument('--kernel', choices=('stock', 'own'),
                            default='stock',
                            help='what the nodes run: Debian\'s kernel, or '
                                 'the one that "make lab-kernel" builds, '
                                 'which has ublk (default: stock)')
        parser.add_argument('--bare', action='store_true',
                            help='only the nodes: no OpenStack, no service')
        parser.add_argument('--keep', action='store_true',
                            help='leave a lab that did not come up as it '
                                 'is, to look at; "down" removes it')
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> int:
        """Bring the lab up."""
        options: dict[str, dict[str, str]] = collections.defaultdict(dict)
        for section, key, value in parsed_args.option:
            options[section][key] = value
        started = time.monotonic()
        with progress.shown(self.app.stdout) as report:
            fresh = self.cloud.up(
                parsed_args.nodes, report, driver=parsed_args.driver,
                options=options, disk_size=parsed_args.disk_size,
                disks=parsed_args.disks,
                block_sizes=dict(parsed_args.block_size),
                memory=parsed_args.memory,
                kernel=parsed_args.kernel,
                also=[name for name in parts.OPTIONAL
                      if getattr(parsed_args, name)],
                bare=parsed_args.bare, keep=parsed_args.keep)
        if fresh:
            text = f'ready after {time.monotonic() - started:.0f} s'
        else:
            text = 'already running'
            absent = [f'{row["place"]} {row["service"]}'
                      for row in self.cloud.status()
                      if row['state'] not in ('running', 'on')]
            if absent:
                text += f', without {", ".join(absent)}'
        self.app.stdout.write(f'Lab "{self.cloud.name}" is {text}.\n')
        return 0


class Down(_LabCommand):
    """End everything the lab started, remove its disks and network.

    Cleans up after a crashed lab as well. Logs stay until the next start.
    """

    def take_action(self, parsed_args: argparse.Namespace) -> int:
        """Take the lab down."""
        found = self.cloud.down()
        text = 'is gone' if found else 'was not running'
        self.app.stdout.write(f'Lab "{self.cloud.name}" {text}.\n')
        return 0


class Status(_LabCommand, lister.Lister):
    """List services and nodes: state, process, address, uptime.

    The process of a service inside a node is numbered by the node's kernel.
    """

    def take_action(self, parsed_args: argparse.Namespace) -> tuple:
        """Collect the rows."""
        human = parsed_args.formatter == 'table'
        rows = []
        for row in self.cloud.status():
            uptime = row.get('uptime')
            if uptime is not None:
                uptime = _duration(uptime) if human else round(uptime, 1)
            pid = row.get('pid')
            rows.append((row['place'], row['service'], row['state'],
                         '' if human and pid is None else pid,
                         row['address'],
                         '' if human and uptime is None else uptime))
        cuts = self.cloud.network.cuts
        if human and cuts:
            text = ', '.join('-'.join(pair) for pair in cuts)
            self.app.stdout.write(f'Cut: {text}\n')
        return ('Place', 'Service', 'State', 'PID', 'Address',
                'Uptime'), rows


class Exec(_LabCommand):
    """Run a command on a node, or natively in the namespace.

    Standard input, output and error are passed through, the exit status is
    that of the command. With the place "control" the command runs natively
    in the lab's network namespace with the administrator's credentials in
    its environment, for instance

        python -m lab exec control -- openstack volume list

    When this command is interrupted, the one on the node is killed.
    """

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Describe the arguments."""
        parser = super().get_parser(prog_name)
        parser.add_argument('place', metavar='NODE',
                            help='a node, or "control"')
        parser.add_argument('-t', '--terminal', action='store_true',
                            help='give the command a terminal on the node')
        parser.add_argument('-u', '--user', default='admin',
                            help='whose credentials "control" gets: admin, '
                                 'demo or cinder (default: admin)')
        parser.add_argument('command', nargs=argparse.REMAINDER,
                            metavar='-- COMMAND', help='what to run')
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> int:
        """Run it."""
        argv = parsed_args.command + self.app.tail
        if not argv:
            raise errors.LabError(
                'Which command? Write it behind "--", for instance '
                f'"python -m lab exec {parsed_args.place} -- lvs".')
        if parsed_args.place == control_plane.NAME:
            return _run_native(self.cloud, argv, parsed_args.user)
        return _run_on_node(self.cloud, parsed_args.place, argv,
                            parsed_args.terminal)


class Console(_LabCommand):
    """Open a shell on a node, or in the namespace with "control".

    What the node's kernel says is shown by "python -m lab logs NODE".
    """

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Describe the arguments."""
        parser = super().get_parser(prog_name)
        parser.add_argument('place', metavar='NODE',
                            help='a node, or "control"')
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> int:
        """Run a shell."""
        shell = ['bash', '-i']
        if parsed_args.place == control_plane.NAME:
            return _run_native(self.cloud, shell, 'admin')
        return _run_on_node(self.cloud, parsed_args.place, shell, True)


class _NodeCommand(_LabCommand):
    """A command about one node."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Describe the arguments."""
        parser = super().get_parser(prog_name)
        parser.add_argument('node', metavar='NODE')
        return parser


class Kill(_NodeCommand):
    """Cut a node's power: everything on it stops at once, disks stay.

    Plain disks keep what was written. Of volatile disks (up --disks
    volatile) each write that was not flushed is kept, dropped, or torn
    between two sectors. The seed that decides is printed: the same seed
    decides the same of the same writes.
    """

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Describe the arguments."""
        parser = super().get_parser(prog_name)
        parser.add_argument('--seed', type=_seed, metavar='N',
                            help='what decides over volatile disks (default: '
                                 'one by chance)')
        parser.add_argument('--lose', choices=volatile.LOSE,
                            default='random',
                            help='what becomes of writes that were not '
                                 'flushed (default: random)')
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> int:
        """Kill it."""
        cut = self.cloud.node(parsed_args.node).kill(
            parsed_args.seed, parsed_args.lose)
        if cut is not None:
            self.app.stdout.write(f'Unflushed writes: {cut}.\n')
        return 0


class Start(_NodeCommand):
    """Power a node on again, with its disks as they were.

    Waits until its services are ready.
    """

    def take_action(self, parsed_args: argparse.Namespace) -> int:
        """Start it."""
        self.cloud.node(parsed_args.node).start()
        return 0


class Cut(_LabCommand):
    """Cut the network between two places.

    A place is a node, "control" (Keystone and Cinder's API and scheduler),
    "rabbitmq" or "database". Packets are dropped silently in both
    directions. Commands of the lab still reach the node.
    """

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Describe the arguments."""
        parser = super().get_parser(prog_name)
        parser.add_argument('first', metavar='PLACE')
        parser.add_argument('second', metavar='PLACE')
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> int:
        """Cut."""
        self.cloud.cut(parsed_args.first, parsed_args.second)
        return 0


class Heal(_LabCommand):
    """Remove all cuts from the network."""

    def take_action(self, parsed_args: argparse.Namespace) -> int:
        """Heal."""
        self.cloud.heal()
        return 0


class Logs(_LabCommand):
    """Show a log, or list the logs there are.

    A log is called "node1" (the console), "node1/cinder-volume", or like
    a service of the control plane.
    """

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Describe the arguments."""
        parser = super().get_parser(prog_name)
        parser.add_argument('log', nargs='?', metavar='NAME')
        parser.add_argument('-f', '--follow', action='store_true',
                            help='go on with what is added')
        parser.add_argument('-n', '--lines', type=int, metavar='N',
                            help='only the last lines')
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> int:
        """Show."""
        logs = self.cloud.layout.logs
        if not parsed_args.log:
            for path in sorted(logs.glob('*/*.log')):
                name = path.relative_to(logs).with_suffix('')
                self.app.stdout.write(
                    f'{str(name):32} {path.stat().st_size:>12}  {path}\n')
            return 0
        place, slash, service = parsed_args.log.partition('/')
        path = logs / place / f'{service or "console"}.log'
        if not slash and not path.exists():
            path = logs / control_plane.NAME / f'{place}.log'
        if not path.exists():
            raise errors.NotFound(
                f'Lab "{self.cloud.name}" has no log '
                f'"{parsed_args.log}"; "python -m lab logs" lists them.')
        lines = parsed_args.lines
        argv = ['tail', '-n', '+1' if lines is None else str(lines)]
        if parsed_args.follow:
            argv.append('-F')
        os.execvp(argv[0], [*argv, str(path)])


class Env(_LabCommand):
    """Print the variables of a user's credentials, to be used by a shell.

    The addresses are reachable inside the namespace only, that is with
    "python -m lab console control" and the like.
    """

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Describe the arguments."""
        parser = super().get_parser(prog_name)
        parser.add_argument('user', nargs='?', default='admin',
                            metavar='USER',
                            help='admin, demo or cinder (default: admin)')
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> int:
        """Print."""
        variables = self.cloud.environment(parsed_args.user)
        for name, value in variables.items():
            if name.startswith('OS_'):
                self.app.stdout.write(
                    f'export {name}={shlex.quote(value)}\n')
        return 0


class Service(_LabCommand):
    """Start, stop or restart a service, kill it, or show its state."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Describe the arguments."""
        parser = super().get_parser(prog_name)
        part = parts.of(parts.OPTIONAL)
        on_nodes = ', '.join(service.name for service in part.nodes)
        on_control = ', '.join(service.name for service in part.control)
        parser.add_argument('place', metavar='NODE',
                            help='a node, or "control"')
        parser.add_argument('service', metavar='SERVICE',
                            help=f'on a node {on_nodes}; on control '
                                 f'{on_control}')
        parser.add_argument('action', choices=('start', 'stop', 'restart',
                                               'kill', 'status'))
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> int:
        """Do it."""
        service = _service(self.cloud, parsed_args.place,
                           parsed_args.service)
        if parsed_args.action == 'status':
            state = service.status()['state']
            self.app.stdout.write(state + '\n')
            return 0 if state == 'running' else 3
        getattr(service, parsed_args.action)()
        return 0


class Restart(_LabCommand):
    """Restart a service and wait until it is ready."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Describe the arguments."""
        parser = super().get_parser(prog_name)
        parser.add_argument('place', metavar='NODE',
                            help='a node, or "control"')
        parser.add_argument('service', metavar='SERVICE')
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> int:
        """Restart."""
        _service(self.cloud, parsed_args.place,
                 parsed_args.service).restart()
        return 0


class Chaos(_LabCommand):
    """Play users on three nodes while services, nodes and networks fail.

    Users create, attach, move, live-migrate, extend, copy, revert, detach and
    delete volumes, with guests that write stamps on them. With --nova they
    boot, migrate, rebuild, shelve, evacuate and delete instances, and attach
    volumes to them. Meanwhile cinder-volume, tgtd, iscsid and native helpers,
    nova-compute, libvirtd and QEMU are killed, nodes lose their power and
    networks are cut. With --former the driver of nodes is upgraded, too.
    At the end everything is mended: every stamp must be there, every move
    must end, and nothing may be left on any node.

    The same seed makes the same decisions, as far as the cloud's answers
    allow. What happened when is in .lab/<name>/chaos.log. A lab that is not
    running is started before and taken down after.
    """

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Describe the arguments."""
        parser = super().get_parser(prog_name)
        parser.add_argument('--minutes', type=float, default=5, metavar='N',
                            help='how long to go on breaking things '
                                 '(default: 5)')
        parser.add_argument('--seed', type=int, metavar='S',
                            help='what the decisions come from (default: '
                                 'one by chance, which is printed)')
        parser.add_argument('--users', type=int, default=4, metavar='N',
                            help='how many users play (default: 4)')
        parser.add_argument('--nodes', type=int, default=3, metavar='N',
                            help='how many nodes to start (default: 3)')
        parser.add_argument('--nova', action='store_true',
                            help='let users have instances of Nova\'s')
        parser.add_argument('--mirrored', action='store_true',
                            help='let users have mirrored volumes, too, and '
                                 'disks of these die')
        parser.add_argument('--former', default='', metavar='REVISION',
                            help='the revision of this repository whose '
                                 'driver all nodes but the first begin with; '
                                 'they are upgraded meanwhile')
        _add_disks(parser, 'volatile')
        parser.add_argument('--keep', action='store_true',
                            help='leave the lab up, to look at')
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> int:
        """Play."""
        if parsed_args.mirrored and parsed_args.disks != 'volatile':
            raise errors.LabError('Only volatile disks can die: leave '
                                  '"--disks plain" away.')
        if parsed_args.former:
            # Whoever has mistyped it need not wait for the lab.
            releases.tree(self.cloud.layout, parsed_args.former)
        seed = parsed_args.seed
        if seed is None:
            seed = secrets.randbelow(1 << 31)
        out = self.app.stdout
        out.write(f'Seed {seed}.\n')
        with progress.shown(out) as report:
            fresh = self.cloud.up(parsed_args.nodes, report,
                                  # Cinder 29.0.0 hangs where it downloads
                                  # images in native threads.
                                  environment={} if parsed_args.nova
                                  else chaos.ENVIRONMENT,
                                  also=[name for name in ('nova', 'mirrored')
                                        if getattr(parsed_args, name)],
                                  disks=parsed_args.disks)
        try:
            journal = chaos.run(self.cloud, chaos.Plan(
                minutes=parsed_args.minutes, seed=seed,
                players=parsed_args.users, instances=parsed_args.nova,
                backends=('mirrored', *configuration.BACKENDS)
                if parsed_args.mirrored else configuration.BACKENDS,
                former=parsed_args.former), out)
        finally:
            if fresh and not parsed_args.keep:
                self.cloud.down()
        out.write(f'{chaos.summary(journal)}.\nLog: {journal.path}\n')
        if not journal.failures:
            out.write('Every stamp is there, and nothing is left.\n')
            return 0
        for failure in journal.failures:
            out.write(f'Failed (seed {seed}): {failure}\n')
        return 1


class Scale(lister.Lister):
    """Measure what many volumes cost a node: its start, and a period.

    The figures are those of the external commands that cinder-volume ran and
    of the time they took, for both backends of the node together. The lab is
    started before and taken down after.
    """

    app: 'Lab'

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Describe the arguments."""
        parser = super().get_parser(prog_name)
        parser.add_argument('--volumes', type=int, default=1000, metavar='N',
                            help='how many (default: 1000; a disk of 8G has '
                                 'room for some 1500)')
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Measure."""
        with self.app.passing(2) as cloud:
            found = list(scale.run(cloud, parsed_args.volumes, self.app.say))
        return (('What', 'Commands', 'Seconds in them', 'Seconds in all'),
                [(line.what, line.commands, '%.2f' % line.inside,
                  '' if line.seconds is None else '%.1f' % line.seconds)
                 for line in found])


class Fleet(lister.Lister):
    """Measure what hundreds of nodes ask of the services that they share.

    Message bus, database, API and scheduler are real, and so are the volume
    services; their nodes are simulated. The figures are what is asked in a
    second, while nothing moves and while volumes are attached at a given rate,
    and how many processors take part in it. The lab is started before and
    taken down after.
    """

    app: 'Lab'

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Describe the arguments."""
        parser = super().get_parser(prog_name)
        parser.add_argument('--nodes', type=int, action='append',
                            metavar='N',
                            help='how many; may be repeated (default: 10, '
                                 '50 and 100, as two processors have room '
                                 'for)')
        parser.add_argument('--rate', type=float, default=fleet.RATE,
                            metavar='N',
                            help='how many volumes are attached in a second '
                                 '(default: %(default)s)')
        parser.add_argument('--seconds', type=float, default=fleet.SECONDS,
                            metavar='N',
                            help='for so many seconds (default: '
                                 '%(default)s)')
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Measure."""
        with self.app.passing(0) as cloud:
            return fleet.HEADINGS, [fleet.row(found) for found in fleet.run(
                cloud, sorted(parsed_args.nodes or fleet.SIZES),
                parsed_args.rate, parsed_args.seconds, self.app.say)]


class Compare(lister.Lister):
    """Measure what instances wait for: this driver, and Cinder's own of LVM.

    Both are backends of the same two nodes, and do the same in turn: an
    instance boots, gets a volume of its own node and one of the other, loses
    them, migrates live and cold. The figures are medians, in seconds. The lab
    is started before and taken down after.
    """

    app: 'Lab'

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Describe the arguments."""
        parser = super().get_parser(prog_name)
        parser.add_argument('--rounds', type=int, default=3, metavar='N',
                            help='how often each does all of it (default: '
                                 '3)')
        parser.add_argument('--volumes', type=int, default=1, metavar='N',
                            help='how many volumes an instance has that '
                                 'migrates live (default: 1)')
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Measure."""
        with self.app.passing(
                2, also=['nova', 'lvm'],
                disk_size=compare.disk_size(parsed_args.volumes)) as cloud:
            figures = list(compare.run(cloud, parsed_args.rounds,
                                       parsed_args.volumes, self.app.say))

        def shown(figure: float | None) -> str:
            return '' if figure is None else '%.2f' % figure
        return (('What', 'This driver', 'LVM over iSCSI', 'Ratio'),
                [(line.step, shown(line.ours), shown(line.theirs),
                  shown(line.ratio)) for line in compare.compare(figures)])


class Attach(_LabCommand):
    """Measure what an attachment takes, beside Cinder's own driver of LVM.

    Thick and thin volumes of this driver, and those of Cinder's own, are
    attached in turn on their own node and on another, with os-brick and
    without Nova; then many at once. The figures are medians, in seconds; the
    lab is started before and taken down after.
    """

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Describe the arguments."""
        parser = super().get_parser(prog_name)
        parser.add_argument('--rounds', type=int, default=5, metavar='N',
                            help='how often each is attached (default: 5)')
        parser.add_argument('--storm', type=int, default=10, metavar='N',
                            help='how many are attached at once, 0 for none '
                                 '(default: 10)')
        parser.add_argument('--transport', choices=('iscsi', 'nvme-tcp'),
                            default='iscsi',
                            help='how sources of this driver are read; '
                                 'nvme-tcp takes what "make lab-kernel" '
                                 'builds, for all drivers (default: iscsi)')
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> int:
        """Measure."""
        transport = parsed_args.transport
        with self.app.passing(
                2, also=['lvm'], disk_size=attach.DISK_SIZE,
                kernel='stock' if transport == 'iscsi' else 'own',
                options={backend: {'localstor_transport': transport}
                         for backend in configuration.BACKENDS}) as cloud:
            found = list(attach.run(cloud, parsed_args.rounds, self.app.say))
            # Of these the steps are shown.
            lines = [line for node in cloud.nodes for line in
                     node.service('cinder-volume').log.read_text(
                         errors='replace').splitlines()]
            storms = (list(attach.storms(cloud, parsed_args.storm,
                                         self.app.say))
                      if parsed_args.storm else [])
        console = consoles.Console(file=self.app.stdout, highlight=False,
                                   soft_wrap=True)
        attach.show(found, storms, lines, console)
        return 0


class Distance(_LabCommand):
    """Measure what arrives of a source that is far.

    Volumes arrive by the native helper and by dm-clone while each packet
    between their nodes takes longer, and readers read on in what is not there
    yet; beside that, what the source gives as a disk of open-iscsi's. The
    figures are medians; the lab is started before and taken down after.
    """

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Describe the arguments."""
        parser = super().get_parser(prog_name)
        parser.add_argument('--rounds', type=int, default=3, metavar='N',
                            help='how often each is measured (default: 3)')
        parser.add_argument('--delays', type=_delay, nargs='+', metavar='MS',
                            default=[0, 5],
                            help='milliseconds that a packet takes longer '
                                 'either way (default: 0 5)')
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> int:
        """Measure."""
        with self.app.passing(2, options=distance.OPTIONS) as cloud:
            found = list(distance.run(cloud, parsed_args.delays,
                                      parsed_args.rounds, self.app.say))
        distance.show(found, consoles.Console(
            file=self.app.stdout, highlight=False, soft_wrap=True))
        return 0


class GuestIo(command.Command):
    """Measure what a guest of QEMU's gets by each of its ways to do I/O.

    On this machine, without a lab and without KVM. What is printed are
    medians.
    """

    app: 'Lab'

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Describe the arguments."""
        parser = super().get_parser(prog_name)
        parser.add_argument('--rounds', type=int, default=5, metavar='N',
                            help='how often each is measured (default: 5)')
        parser.add_argument('--seconds', type=float, default=5,
                            metavar='S',
                            help='how long each time (default: 5)')
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> int:
        """Measure."""
        found = list(guest_io.run(parsed_args.rounds, parsed_args.seconds,
                                  self.app.say))
        guest_io.show(found, consoles.Console(
            file=self.app.stdout, highlight=False, soft_wrap=True))
        return 0


class Bench(_LabCommand):
    """Measure what a move costs a guest: the native helper and dm-clone.

    One bare node with the lab's own kernel and disks of an exact latency is
    started before and taken down after. Every figure stands beside that of
    the raw logical volume, and is the median of several rounds. The frontend
    for virtual machines is measured beside QEMU's, without a node. Nothing is
    judged. The tables, a plot and all figures as JSON are left below
    .lab/bench.
    """

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Describe the arguments."""
        parser = super().get_parser(prog_name)
        parser.add_argument('--quick', action='store_true',
                            help='one short round: 6 to 8 minutes, not 30')
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> int:
        """Measure."""
        # Not for every command of the lab: this imports Cinder.
        from lab.bench import report
        from lab.bench import runner
        effort = runner.QUICK if parsed_args.quick else runner.STANDARD
        console = consoles.Console(file=self.app.stdout, highlight=False)
        if not console.is_terminal:
            console.width = report.WIDTH
        with progress.shown(self.app.stdout) as told:
            self.cloud.up(1, told, kernel='own', bare=True,
                          memory=runner.MEMORY)
        try:
            with bars.Progress(*bars.Progress.get_default_columns(),
                               bars.TimeElapsedColumn(),
                               console=console) as shown:
                found = runner.run(self.cloud, effort, shown)
        finally:
            self.cloud.down()
        report.show(found, self.cloud.layout.repository / '.lab' / 'bench',
                    console)
        return 1 if found.failures else 0


class Tempest(_LabCommand):
    """Let Cinder's own suites judge the driver beside Cinder's own one.

    For each backend a lab is started before and taken down after. What is
    passed with "lvm", Cinder's own driver, and not with another backend is
    listed; then the exit status is 1, and as well when something is left in
    the lab. All that was seen, with the services' logs, is left below
    .lab/tempest-results.
    """

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Describe the arguments."""
        parser = super().get_parser(prog_name)
        parser.add_argument('--backend', action='append',
                            choices=('local', 'thin', 'lvm'),
                            help='judge this one; may be repeated (default: '
                                 'all)')
        parser.add_argument('--nova', action='store_true',
                            help='Tempest\'s suites of instances, in a lab '
                                 'with Nova, in place of Cinder\'s own ones')
        parser.add_argument('--tests', metavar='REGEX',
                            help='only tests whose name it is found in '
                                 '(default: all that are of use there)')
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> int:
        """Judge."""
        # Not for every command of the lab: it needs "make tempest".
        from lab import tempest
        suites = (tempest.OF_INSTANCES if parsed_args.nova
                  else tempest.OF_VOLUMES)
        if parsed_args.tests:
            suites = dataclasses.replace(suites, tests=parsed_args.tests)
        results = self.cloud.layout.repository / '.lab' / 'tempest-results'
        verdicts = []
        for backend in parsed_args.backend or ('lvm', 'local', 'thin'):
            with progress.shown(self.app.stdout) as told:
                self.cloud.up(suites.nodes, told, also=suites.also,
                              disk_size=tempest.DISK_SIZE,
                              options=tempest.options(backend))
            try:
                verdicts.append(tempest.judge(
                    self.cloud, backend, results, self.app.stdout, suites))
            finally:
                self.cloud.down()
        console = consoles.Console(file=self.app.stdout, highlight=False,
                                   soft_wrap=True)
        return 0 if tempest.show(verdicts, console) else 1


_COMMANDS: dict[str, Any] = {
    'up': Up, 'down': Down, 'status': Status, 'exec': Exec,
    'console': Console, 'kill': Kill, 'start': Start, 'cut': Cut,
    'heal': Heal, 'logs': Logs, 'env': Env, 'service': Service,
    'restart': Restart, 'chaos': Chaos, 'attach': Attach, 'compare': Compare,
    'distance': Distance, 'scale': Scale, 'fleet': Fleet, 'bench': Bench,
    'guest-io': GuestIo, 'tempest': Tempest,
}


class Lab(app.App):
    """The program."""

    def __init__(self, tail: list[str]) -> None:
        manager = commandmanager.CommandManager('lab')
        for name, implementation in _COMMANDS.items():
            manager.add_command(name, implementation)
        super().__init__(_DESCRIPTION, '1', manager,
                         deferred_help=True)
        # What stands behind "--": it must not be searched for our options.
        self.tail = tail
        self.cloud: cloud.Cloud

    def build_option_parser(self, description: str | None,
                            version: str | None,
                            argparse_kwargs: dict[str, Any] | None = None
                            ) -> argparse.ArgumentParser:
        """Describe the options before the command."""
        parser = super().build_option_parser(
            description, version,
            {'prog': 'python -m lab',
             'formatter_class': argparse.RawDescriptionHelpFormatter})
        parser.add_argument('--name', default='default',
                            help='name of the lab: several can run at the '
                                 'same time (default: default)')
        return parser

    def initialize_app(self, argv: list[str]) -> None:
        """Find the lab."""
        self.cloud = cloud.Cloud(self.options.name)

    @contextlib.contextmanager
    def passing(self, nodes: int, **what: Any) -> Iterator[cloud.Cloud]:
        """The lab, up for what is measured in it and down after that.

        :param what: as :meth:`cloud.Cloud.up` takes it
        """
        with progress.shown(self.stderr) as report:
            self.cloud.up(nodes, report, **what)
        try:
            yield self.cloud
        finally:
            self.cloud.down()

    def say(self, text: str) -> None:
        """Tell what is being done, beside what is printed."""
        print(text, file=self.stderr, flush=True)

    def configure_logging(self) -> None:
        """Be quiet about what libraries have to say."""
        super().configure_logging()
        level = logging.DEBUG if self.options.verbose_level > 1 \
            else logging.ERROR
        for name in ('urllib3', 'keystoneauth', 'stevedore', 'asyncio'):
            logging.getLogger(name).setLevel(level)


def _service(lab: cloud.Cloud, place: str, name: str) -> Any:
    if place == control_plane.NAME:
        return lab.service(name)
    return lab.node(place).service(name)


def _run_native(lab: cloud.Cloud, argv: list[str], user: str) -> int:
    if not lab.running:
        raise errors.LabNotRunning(lab.name)
    environment = {**os.environ, **lab.environment(user)}
    # Nothing in there leads out.
    for name in list(environment):
        if name.lower().endswith('_proxy'):
            del environment[name]
    sys.stdout.flush()
    argv = lab.network.wrap(argv)
    os.execvpe(argv[0], argv, environment)


def _run_on_node(lab: cloud.Cloud, name: str, argv: list[str],
                 terminal: bool) -> int:
    node = lab.node(name)
    environment = dict(node.place.environment)
    size = None
    restore = None
    if terminal:
        columns, rows = shutil.get_terminal_size()
        size = (rows, columns)
        environment['TERM'] = os.environ.get('TERM', 'dumb')
        if os.isatty(0):
            restore = termios.tcgetattr(0)
            tty.setraw(0)
    try:
        code = node.agent.stream(
            argv, environment, _writer(sys.stdout), _writer(sys.stderr),
            source=0, terminal=size)
    finally:
        if restore is not None:
            termios.tcsetattr(0, termios.TCSADRAIN, restore)
    # As a shell reports a signal.
    return 128 - code if code < 0 else code


def _writer(stream: TextIO) -> Any:
    def write(data: bytes) -> None:
        stream.buffer.write(data)
        stream.buffer.flush()
    return write


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f'{hours} h {minutes:02} min'
    return f'{minutes} min {seconds:02} s' if minutes else f'{seconds} s'


def main(argv: list[str] | None = None) -> int:
    """Run the program, return its exit status."""
    argv = sys.argv[1:] if argv is None else argv
    tail: list[str] = []
    if '--' in argv:
        position = argv.index('--')
        argv, tail = argv[:position], argv[position + 1:]
    try:
        return Lab(tail).run(argv)
    except KeyboardInterrupt:
        return 130
