# SPDX-License-Identifier: Apache-2.0
"""Cinder's own suites judge drivers in the lab, side by side.

The suites are Tempest's tests of volumes and those of Cinder's own plugin,
unchanged. This driver has those of its own plugin, too. Each driver has a
fresh lab, where its volume type is the default, and the same configuration.
What one driver passes and another does not is what its users would miss.
"""

import collections
from collections.abc import Collection
from collections.abc import Iterable
import dataclasses
import importlib.util
import pathlib
import re
import shutil
import subprocess
import time
from typing import Any
from typing import TextIO

from rich import console as consoles
from rich import table as tables
import subunit
from testtools import testresult

from lab import cloud as clouds
from lab import configuration
from lab import errors
from lab import instances
from lab import leftovers
from lab import parts
from lab import services
from lab import sizes
from lab import user as users

# Whom the others are compared with: Cinder's own driver
REFERENCE = 'lvm'
DISK_SIZE = 24 * sizes.GIB
_RESERVED = 80  # percent
_BUILD_TIMEOUT = 600  # seconds
# To export a volume with LIO takes a slow node half a minute.
_RPC_TIMEOUT = 180  # seconds
_CLEAR_SIZE = 64  # MiB
# Until what was deleted is gone from the nodes, in seconds
_PATIENCE = 180
_IMAGE_SIZE = 1 << 20
# MiB of the two flavors; an instance that boots from an image needs a disk
_FLAVORS = {'tempest': 128, 'tempest-larger': 160}
_FLAVOR_DISK = 1  # GiB
# The type of volumes that several instances have
_SHARED = 'tempest-shared'
# What the lab has instead of ssh
_SHELL = pathlib.Path(__file__).with_name('shell.py')
PASSED, FAILED, SKIPPED = 'passed', 'failed', 'skipped'
_ENDED = re.compile(r'\{\d+\} .* \.\.\. ')
_STATES = {'success': PASSED, 'xfail': PASSED, 'skip': SKIPPED}


@dataclasses.dataclass(frozen=True)
class Suites:
    """What judges.

    :ivar tests: regular expression of the tests' names
    :ivar also: the lab's parts that they need
    :ivar nodes: how many it needs
    :ivar workers: how many tests run at the same time
    :ivar without: the same of tests that are left out, '' for none
    """

    tests: str
    also: tuple[str, ...]
    nodes: int
    workers: int
    without: str = ''

    @property
    def instances(self) -> bool:
        """Whether they have some."""
        return 'nova' in self.also


# The nodes are slow, and wipe what was deleted. The third is for a volume that
# goes on.
OF_VOLUMES = Suites(
    r'^(tempest\.api\.volume|cinder_tempest_plugin\.(api|scenario)|'
    r'cinder_localstor_tempest_plugin)\.', ('backup', 'lvm'), nodes=3,
    workers=4)
# What they do needs no network; guests are slower than anything.
OF_INSTANCES = Suites(
    r'^tempest\.(api\.compute\.(volumes|servers\.test_server_rescue|'
    r'servers\.test_delete_server|admin\.test_live_migration|'
    r'admin\.test_migrations|admin\.test_volume)|'
    r'scenario\.test_volume)', ('nova', 'lvm'), nodes=2, workers=2,
    # Two guests of the lab's write to one volume there, and take what the
    # other has written for a loss.
    without=r'\.test_resize_server_with_multiattached_volume')


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a test ended, and why it did not pass."""

    state: str
    reason: str = ''


@dataclasses.dataclass
class Verdict:
    """What the suites say of one backend."""

    backend: str
    driver: str
    outcomes: dict[str, Outcome]
    seconds: float
    # Of the nodes and the database, by place and kind
    left: dict[str, Any]

    def tests(self, state: str) -> list[str]:
        """The tests that ended so."""
        return sorted(test for test, outcome in self.outcomes.items()
                      if outcome.state == state)

    def worse_than(self, other: 'Verdict') -> list[str]:
        """The tests that the other one passes and this one does not."""
        return [test for test in other.tests(PASSED)
                if self.outcomes.get(test, _NOT_RUN).state != PASSED]


_NOT_RUN = Outcome(FAILED, 'it was not run')


def options(backend: str) -> services.Options:
    """What cinder.conf has where this backend is judged."""
    return {'DEFAULT': {'default_volume_type': backend,
                        'rpc_response_timeout': _RPC_TIMEOUT}} | {
        # Volumes of types that name no backend go where most is free.
        name: {'volume_clear_size': _CLEAR_SIZE,
               'reserved_percentage': 0 if name == backend else _RESERVED}
        for name in (*configuration.BACKENDS, REFERENCE)}


def settings(cloud: clouds.Cloud, backend: str, directory: pathlib.Path,
             image: str, suites: Suites) -> services.Options:
    """tempest.conf, which differs in nothing but the backend's name, and in
    that the driver's own plugin has nothing to do with another driver.
    """
    partner = (configuration.BACKENDS[0] if backend == REFERENCE
               else REFERENCE)
    return {
        'DEFAULT': {'debug': True, 'use_stderr': False,
                    'log_file': directory / 'tempest.log'},
        'oslo_concurrency': {'lock_path': directory / 'locks'},
        'auth': {'use_dynamic_credentials': True,
                 'create_isolated_networks': False,
                 'admin_username': 'admin', 'admin_project_name': 'admin',
                 'admin_password': configuration.PASSWORD,
                 'admin_domain_name': 'Default'},
        'identity': {'uri_v3': configuration.keystone_url(cloud.layout),
                     'auth_version': 'v3', 'region': configuration.REGION},
        # Classes of which one test has a server want Neutron for all.
        'service_available': {'cinder': True, 'glance': True,
                              'nova': suites.instances,
                              'neutron': True, 'swift': False},
        'compute': {'image_ref': image, 'image_ref_alt': image,
                    'min_microversion': '2.1', 'max_microversion': 'latest',
                    'min_compute_nodes': suites.nodes,
                    'build_timeout': _BUILD_TIMEOUT,
                    **dict(zip(('flavor_ref', 'flavor_ref_alt'), _FLAVORS))},
        # Nobody reaches an instance by ssh.
        'validation': {'run_validation': False},
        'volume': {'catalog_type': 'volumev3',
                   'min_microversion': '3.0', 'max_microversion': 'latest',
                   'volume_type': backend,
                   **({'volume_type_multiattach': _SHARED}
                      if suites.instances else {}),
                   'backend_names': f'{backend},{partner}',
                   'backup_driver': 'posix',
                   'build_timeout': _BUILD_TIMEOUT},
        # Whatever Cinder's own driver has
        'compute-feature-enabled': {
            'volume_multiattach': True, 'live_migration': True,
            'block_migration_for_live_migration': False,
            'volume_backed_live_migration': True, 'cold_migration': True,
            'resize': True, 'attach_encrypted_volume': False,
            'interface_attach': False, 'metadata_service': False,
            'vnc_console': False, 'personality': False,
            'swap_volume': True, 'can_migrate_between_any_hosts': True},
        'volume-feature-enabled': {
            'multi_backend': True, 'backup': 'backup' in suites.also,
            'snapshot': True,
            'clone': True, 'manage_volume': True, 'manage_snapshot': True,
            'extend_attached_volume': True,
            'extend_volume_with_snapshot': True, 'volume_revert': True,
            'concurrency_tests': True},
        'localstor': {} if backend == REFERENCE else {
            'hosts': ','.join(f'{node.name}:{node.address}'
                              for node in cloud.nodes),
            'node_command': f'{cloud.place.binaries / "python"} '
                            f'{_SHELL} {{address}}'},
    }


def judge(cloud: clouds.Cloud, backend: str, results: pathlib.Path,
          stream: TextIO, suites: Suites) -> Verdict:
    """Run suites against one backend of a lab that is up.

    What was seen is left in a directory of the backend's below ``results``.

    :raises LabError: no test has this name
    """
    directory = results / backend
    shutil.rmtree(directory, ignore_errors=True)
    (directory / 'locks').mkdir(parents=True)
    before = leftovers.everything(cloud)
    image = (_prepare_instances(cloud, backend) if suites.instances
             else _upload_image(cloud))
    config = directory / 'tempest.conf'
    config.write_text(services.render_ini(
        settings(cloud, backend, directory, image, suites)))
    _write_discovery(directory)
    run = _Run(cloud, directory, config)
    names = run.tests(suites)
    if not names:
        raise errors.LabError(
            f'No test of the suites is called "{suites.tests}".')
    start = time.monotonic()
    run.run(suites, stream)
    seconds = time.monotonic() - start
    left = _left(cloud, before)
    shutil.copytree(cloud.layout.logs, directory / 'logs')
    return Verdict(backend, _driver(cloud, backend, suites),
                   outcomes(names, run.results()), seconds, left)


def _upload_image(cloud: clouds.Cloud) -> str:
    image = cloud.image_api.post('/v2/images', json={
        'name': 'tempest', 'disk_format': 'raw', 'visibility': 'public',
        'container_format': 'bare'}).json()['id']
    cloud.image_api.put(f'/v2/images/{image}/file', data=bytes(_IMAGE_SIZE),
                        headers={'Content-Type': 'application/octet-stream'})
    return image


def _prepare_instances(cloud: clouds.Cloud, backend: str) -> str:
    """Make flavors and a type, and find the image of the lab's own guest."""
    users.User(cloud).make_type(_SHARED, volume_backend_name=backend,
                                multiattach='<is> True')
    for name, memory in _FLAVORS.items():
        cloud.compute_api.post('/flavors', json={'flavor': {
            'id': name, 'name': name, 'ram': memory, 'vcpus': 1,
            'disk': _FLAVOR_DISK}})
    return instances.image(cloud)


def _driver(cloud: clouds.Cloud, backend: str, suites: Suites) -> str:
    declared = {one.name: one
                for one in parts.of(suites.also).backends}[backend]
    driver = declared.options(cloud.nodes[0].place)['volume_driver']
    return (f'{driver.rpartition(".")[2]}, '
            f'{"thin" if declared.thin else "thick"}')


def _left(cloud: clouds.Cloud, before: Any) -> dict[str, Any]:
    """What the tests have left in the lab, once it is at rest."""
    end = time.monotonic() + _PATIENCE
    while True:
        left = leftovers.difference(before, leftovers.everything(cloud))
        if not left or time.monotonic() > end:
            return left
        time.sleep(1)


def _write_discovery(directory: pathlib.Path) -> None:
    """What ``tempest init`` would write: where its tests are."""
    spec = importlib.util.find_spec('tempest')
    if spec is None or not spec.origin:
        raise errors.LabError('There is no Tempest: run "make tempest".')
    package = pathlib.Path(spec.origin).parent
    (directory / '.stestr.conf').write_text(
        f'[DEFAULT]\ntest_path={package / "test_discover"}\n'
        f'top_dir={package.parent}\ngroup_regex=([^\\.]*\\.)*\n')


class _Run:
    """Tempest, in the lab's network namespace."""

    def __init__(self, cloud: clouds.Cloud, directory: pathlib.Path,
                 config: pathlib.Path) -> None:
        self._cloud = cloud
        self._directory = directory
        self._config = config

    def _start(self, *argv: str, stdout: Any) -> subprocess.Popen:
        place = self._cloud.place
        return subprocess.Popen(
            self._cloud.network.wrap([
                str(place.binaries / argv[0]), *argv[1:]]),
            cwd=self._directory, env=place.environment, stdout=stdout,
            stderr=subprocess.STDOUT, text=True)

    def tests(self, suites: Suites) -> list[str]:
        """The names of their tests."""
        # Without a repository of results it lists nothing.
        self._start('stestr', 'init', stdout=subprocess.DEVNULL).wait()
        listed, _ = self._start(
            *self._command(suites), '--list-tests',
            stdout=subprocess.PIPE).communicate()
        return [line for line in listed.splitlines() if '.test_' in line]

    def _command(self, suites: Suites) -> list[str]:
        return ['tempest', 'run', '--config-file', str(self._config),
                '--regex', suites.tests,
                *(['--exclude-regex', suites.without]
                  if suites.without else [])]

    def run(self, suites: Suites, stream: TextIO) -> None:
        """Run them; how each one ends goes to a stream as it comes."""
        with self._start(
                *self._command(suites), '--concurrency', str(suites.workers),
                stdout=subprocess.PIPE) as running, open(
                    self._directory / 'tempest.out', 'w') as output:
            for line in running.stdout or ():
                output.write(line)
                # The others are pages of what a test that failed has said.
                if _ENDED.match(line):
                    stream.write(line)
                    stream.flush()

    def results(self) -> dict[str, Outcome]:
        """Of the last run, by what the runner calls a test."""
        found: dict[str, Outcome] = {}

        def note(test: dict[str, Any]) -> None:
            found[test['id']] = Outcome(
                _STATES.get(test['status'], FAILED), _reason(test['details']))

        with open(self._directory / 'subunit', 'wb') as stream:
            self._start('stestr', 'last', '--subunit', stdout=stream).wait()
        with open(self._directory / 'subunit', 'rb') as stream:
            told = testresult.StreamToDict(note)
            told.startTestRun()
            subunit.ByteStreamToStreamResult(stream).run(told)
            told.stopTestRun()
        return found


def _reason(details: dict[str, Any]) -> str:
    """What a test says of why it did not pass, in one line."""
    if 'reason' in details:
        return details['reason'].as_text().strip()
    for name, content in details.items():
        if name.startswith('traceback'):
            lines = content.as_text().strip().splitlines()
            # An error's text, which may have lines of its own, is behind the
            # last line of the program.
            return ' '.join(line.strip() for line in lines[
                1 + max((number for number, line in enumerate(lines)
                         if line.startswith('    ')), default=-1):])
    return ''


def outcomes(tests: Iterable[str], results: dict[str, Outcome]
             ) -> dict[str, Outcome]:
    """How each test ended.

    Where a class can't be set up, or has no use here, the runner says so of
    the class and nothing of its tests.
    """
    found = {}
    for test in tests:
        group = test.partition('[')[0].rpartition('.')[0]
        found[test] = results.get(test) or results.get(
            f'setUpClass ({group})', _NOT_RUN)
    for name, outcome in results.items():
        if name.startswith('tearDownClass') and outcome.state == FAILED:
            found[name] = outcome
    return found


def show(verdicts: Collection[Verdict], console: consoles.Console) -> bool:
    """Print what was found; whether no backend is behind the reference."""
    table = tables.Table(title='Cinder\'s own suites')
    for heading in ('backend', 'driver', PASSED, FAILED, SKIPPED, 'seconds',
                    'left behind'):
        table.add_column(heading)
    for verdict in verdicts:
        table.add_row(verdict.backend, verdict.driver, *(
            str(len(verdict.tests(state)))
            for state in (PASSED, FAILED, SKIPPED)),
            f'{verdict.seconds:.0f}', 'something' if verdict.left else '')
    console.print(table)
    for verdict in verdicts:
        _show_skipped(verdict, console)
        _show_tests(f'Failed with {verdict.backend}', verdict,
                    verdict.tests(FAILED), console)
        for place, left in verdict.left.items():
            console.print(f'Left behind with {verdict.backend}: '
                          f'{place}: {left}', markup=False)
    behind = False
    known = {verdict.backend: verdict for verdict in verdicts}
    for verdict in verdicts:
        if REFERENCE in known and verdict.backend != REFERENCE:
            worse = verdict.worse_than(known[REFERENCE])
            _show_tests(f'Passed with {REFERENCE} and not with '
                        f'{verdict.backend}', verdict, worse, console)
            behind = behind or bool(worse or verdict.left)
    return not behind


def _show_skipped(verdict: Verdict, console: consoles.Console) -> None:
    reasons = collections.Counter(
        verdict.outcomes[test].reason for test in verdict.tests(SKIPPED))
    console.print(f'\nSkipped with {verdict.backend}:')
    for reason, count in reasons.most_common():
        console.print(f'{count:4} {reason}', markup=False)


def _show_tests(title: str, verdict: Verdict, tests: list[str],
                console: consoles.Console) -> None:
    console.print(f'\n{title}: {len(tests) or "none"}')
    for test in tests:
        outcome = verdict.outcomes.get(test, _NOT_RUN)
        console.print(f'  {outcome.state}: {test.partition("[")[0]}\n'
                      f'      {outcome.reason}', markup=False)
