# SPDX-License-Identifier: Apache-2.0

import contextlib
import io
import json
import pathlib
import subprocess
import sys
import tempfile
import types
from unittest import mock

import ddt
from oslotest import base
from rich import console as consoles
from rich import table as tables

from lab.bench import beside
from lab.bench import disks
from lab.bench import fio
from lab.bench import native
from lab.bench import report
from lab.bench import results
from lab.bench import runner
from lab.bench import scenarios
from lab.bench import stacks
from lab.bench import steps
from lab.bench import vhost
from lab import errors

# What fio 3.33 prints, less what is not read
WAY = {'total_ios': 5000, 'iops': 2500.0, 'bw_bytes': 10240000,
       'io_bytes': 20480000,
       'lat_ns': {'min': 300000, 'max': 900000, 'mean': 390000.0},
       'clat_ns': {'max': 890000,
                   'percentile': {'50.000000': 380000,
                                  '99.000000': 500000}}}
IDLE = {**WAY, 'total_ios': 0, 'iops': 0.0}


def fio_output(**changes):
    job = {'error': 0, 'read': IDLE, 'write': WAY, **changes}
    return 'note: both iodepth >= 1\n' + json.dumps({'jobs': [job]})


@ddt.ddt
class FioTest(base.BaseTestCase):

    def test_the_way_that_the_job_went_is_read(self):
        for changes in ({}, {'read': WAY, 'write': IDLE}):
            figures = fio.parse(fio_output(**changes))
            self.assertEqual(2500, figures.iops)
            self.assertEqual(10240000, figures.bandwidth)
            self.assertEqual(20480000, figures.bytes)
            self.assertAlmostEqual(390e-6, figures.latency)
            self.assertAlmostEqual(380e-6, figures.p50)
            self.assertAlmostEqual(500e-6, figures.p99)
            self.assertAlmostEqual(900e-6, figures.worst)

    @ddt.data((fio_output(error=5), 'error 5'),
              (fio_output(write=IDLE), 'did nothing'),
              ('', 'something else'), ('{}', 'something else'),
              ('{"jobs": []}', 'something else'))
    @ddt.unpack
    def test_what_is_no_result_is_told(self, text, reason):
        error = self.assertRaises(errors.LabError, fio.parse, text)
        self.assertIn(reason, str(error))

    def test_a_job_is_what_the_seeds_command_says(self):
        command = fio.Job('randwrite', fsync=True).command('/dev/x', 2, 7)

        for option in ('-ioengine=libaio', '-direct=1', '-invalidate=1',
                       '-bs=4k', '-iodepth=1', '-fsync=1', '-rw=randwrite',
                       '-runtime=2', '-filename=/dev/x'):
            self.assertIn(option, command)
        self.assertNotIn('-sync=1', command)
        self.assertNotIn('-time_based', command)

    def test_a_latency_log(self):
        text = '1716\'000, 412000, 1, 4096, 0, 0\n'.replace("'", '')
        self.assertEqual([fio.Request(1716.0, 0.000412)],
                         list(fio.parse_log(text)))

    def test_the_longest_request_is_looked_for_in_its_time_only(self):
        log = [fio.Request(1.0, 0.5), fio.Request(2.0, 0.1),
               fio.Request(2.4, 0.2), fio.Request(4.0, 0.7)]
        self.assertEqual(0.2, steps.longest(log, 1.5, 3.0))
        # One that began in it and ended after it
        self.assertEqual(0.7, steps.longest(log, 1.5, 3.5))
        self.assertEqual(0.0, steps.longest(log, 5.0, 6.0))


class CountersTest(base.BaseTestCase):

    def test_what_a_disk_did_is_the_difference(self):
        before = disks.Counters.parse(
            '1 0 8 1 10 0 80 10 0 11 11 0 0 0 0 5 6')
        after = disks.Counters.parse(
            '3 0 24 1 30 0 240 10 0 11 11 0 0 0 0 9 6')
        self.assertEqual(
            disks.Counters(reads=2, writes=20, written=160 * 512),
            after - before)

    def test_what_are_no_counters_is_told(self):
        for text in ('', '1 2 3', 'a ' * 17):
            self.assertRaises(errors.LabError, disks.Counters.parse, text)


class FitTest(base.BaseTestCase):

    def test_operations_in_sequence_are_found(self):
        line = results.fit((disk, 80e-6 + 6 * disk)
                           for disk in (1e-4, 3e-4, 1e-3, 3e-3))
        self.assertAlmostEqual(80e-6, line.a)
        self.assertAlmostEqual(6, line.b)

    def test_noise_is_spread(self):
        points = [(0.0, 1.1), (1.0, 1.9), (2.0, 3.1), (3.0, 3.9)]
        line = results.fit(points)
        self.assertAlmostEqual(0.96, line.b)
        self.assertAlmostEqual(1.06, line.a)


def some_results(rounds=3):
    """What a run could yield: dm-clone has six operations in sequence."""
    found = results.Results()
    found.environment = {'node': '6.12', 'load': (1.0, 2.0, 3.0)}
    in_sequence = {'raw': 1, 'clone-proposal': 6, 'clone': 6, 'ublk': 1,
                   'nbd': 1}
    for scenario in scenarios.SCENARIOS:
        for latency in scenario.latencies:
            for kind in scenario.kinds:
                for number in range(rounds):
                    for step in scenario.steps:
                        seconds = (in_sequence[kind.name] * latency / 1e3
                                   + (50e-6 if kind.name == 'raw' else 1e-4))
                        # One round in three is disturbed.
                        seconds *= 1 + 9 * (number == 1)
                        found.samples.append(results.Sample(
                            step.key, latency, kind.name, number, 1.5, {
                                'iops': 1 / seconds, 'p50': seconds - 2e-5,
                                'bandwidth': 1e6 / seconds,
                                'hydration': 2e8, 'amplification': 1.04,
                                'operations': 2.0, 'pause': 0.02,
                                'elsewhere': 0.001, 'linear': 0.1,
                                'settle': 0.01, 'load_and_resume': 0.09}))
    for number in range(rounds):
        for load in vhost.LOADS:
            for server in vhost.SERVERS:
                figures = {'iops': 50000.0, 'iops_per_core': 90000.0,
                           'p50': 18.4e-6}
                if server.beside:
                    figures = {name: value * 1.1
                               for name, value in figures.items()}
                found.samples.append(results.Sample(
                    load.key, None, server.name, number, 1.5, figures))
    found.native = {
        'request': {'settled: read of 4 KiB': {
            'median': 61.5, 'low': 60.0, 'high': 63.0}},
        'memory': {str(1 << 30): {'VmRSS': 20 << 20, 'VmLck': 19 << 20},
                   str(1 << 40): {'VmRSS': 52 << 20, 'VmLck': 51 << 20}}}
    return found


class ResultsTest(base.BaseTestCase):

    def test_a_disturbed_round_does_not_count(self):
        found = some_results()
        self.assertAlmostEqual(
            1 / (0.3e-3 + 1e-4), found.median('sync-new', 'ublk', 'iops', 0.3))

    def test_the_line_of_a_stack(self):
        line = some_results().line('sync-new', 'clone')
        self.assertAlmostEqual(6, line.b)
        self.assertAlmostEqual(100e-6, line.a)

    def test_the_line_of_the_median_request(self):
        line = some_results().line('sync-new', 'clone', typical=True)
        self.assertAlmostEqual(6, line.b)
        self.assertAlmostEqual(80e-6, line.a)

    def test_a_line_wants_two_disks(self):
        self.assertIsNone(some_results().line('read-remote', 'ublk'))

    def test_a_ratio_is_taken_within_a_round(self):
        found = results.Results()
        for number, (raw, mine) in enumerate(((100, 90), (10, 8), (50, 40))):
            for stack, iops in (('raw', raw), ('ublk', mine)):
                found.samples.append(results.Sample(
                    'sync-new', 0.3, stack, number, 0, {'iops': iops}))
        self.assertAlmostEqual(0.8, found.ratio('sync-new', 'ublk', 'iops'))

    def test_a_ratio_to_another_stack(self):
        found = some_results()
        self.assertAlmostEqual(1, found.ratio('hydration', 'ublk', 'iops',
                                              to='nbd'))
        self.assertAlmostEqual(1.1, found.ratio(
            vhost.LOADS[0].key, 'vhost-null', 'iops', to='qemu-null'))

    def test_what_was_measured_on_none_of_the_labs_disks(self):
        self.assertEqual([], some_results().latencies(vhost.LOADS[0].key))

    def test_what_was_not_measured_is_none(self):
        found = results.Results()
        self.assertIsNone(found.median('sync-new', 'ublk', 'iops'))
        self.assertIsNone(found.ratio('sync-new', 'ublk', 'iops'))
        self.assertIsNone(found.line('sync-new', 'ublk'))


class ScenariosTest(base.BaseTestCase):

    def test_every_figure_has_a_name(self):
        keys = [step.key for scenario in scenarios.SCENARIOS
                for step in scenario.steps if step.key]
        self.assertEqual(sorted(set(keys)), sorted(keys))
        self.assertEqual(set(keys), set(scenarios.LABELS))
        self.assertLessEqual(set(scenarios.BESIDE.items()),
                             {(a, b) for a in keys for b in keys})

    def test_every_figure_but_those_while_hydrating_is_taken_on_raw(self):
        for scenario in scenarios.SCENARIOS:
            if scenario not in scenarios.WHILE_HYDRATING:
                self.assertIn(stacks.Raw, scenario.kinds)

    def test_each_stack_comes_first_once(self):
        first = {}
        for turn in runner._turns(runner.Effort(
                5, 1, scenarios.SCENARIOS)):
            first.setdefault((turn.round, turn.scenario, turn.latency),
                             turn.kind)
        sync = {kind for (_round, scenario, latency), kind in first.items()
                if scenario is scenarios.SYNC[0] and latency == 1.0}
        self.assertEqual(set(stacks.ALL), sync)


class TurnTest(base.BaseTestCase):

    def setUp(self):
        super().setUp()
        self.disk = mock.create_autospec(disks.Disk, instance=True)
        self.disk.node = mock.Mock()
        self.found = results.Results()

    def take(self, stack):
        stack.disk = self.disk
        stack.label = 'a stack'
        runner._take(stack, runner._Turn(
            scenarios.QUICK[0], 0.3, type(stack), 1), runner.QUICK,
            self.found)

    def swept(self):
        """What is removed afterwards."""
        return '\n'.join(call.args[0][2] for call
                         in self.disk.node.run.call_args_list)

    def test_what_a_failed_step_has_left_is_removed(self):
        stack = mock.create_autospec(stacks.Raw, instance=True)
        stack.remove.side_effect = errors.LabError('bench-clone is busy')
        self.take(stack)

        self.assertIn('bench-clone is busy', self.found.failures[0])
        self.assertIn('dmsetup remove --retry --force bench-clone',
                      self.swept())
        self.disk.clear.assert_called_once_with()

    def test_what_can_not_be_removed_is_told(self):
        stack = mock.create_autospec(stacks.Raw, instance=True)
        stack.build.side_effect = errors.LabError('no space')
        self.disk.clear.side_effect = errors.LabError('data is in use')
        self.take(stack)

        self.assertEqual(2, len(self.found.failures))
        self.assertIn('data is in use', self.found.failures[1])


class ReportTest(base.BaseTestCase):

    def text(self, found):
        out = io.StringIO()
        console = consoles.Console(file=out, width=200)
        for table in report.tables(found):
            console.print(table)
        return out.getvalue()

    def line(self, text, *words):
        for line in text.splitlines():
            if all(word in line for word in words):
                return line
        self.fail('no line with %s in\n%s' % (words, text))

    def test_operations_in_sequence_are_shown(self):
        text = self.text(some_results())
        self.assertIn('6.000', self.line(text, 'dm-clone, ours', '6.000'))
        self.assertIn('1.000', self.line(text, '<= 1.05'))

    def test_nothing_reaches_a_goal_by_being_rounded(self):
        found = results.Results()
        for stack, iops, written in (('raw', 100000, 1),
                                     ('ublk', 94999, 1.1001)):
            for key in ('sync-new', 'deep-new'):
                found.samples.append(results.Sample(
                    key, 3.0, stack, 1, 0,
                    {'iops': iops, 'amplification': written}))
        text = self.text(found)
        self.assertIn('0.949', self.line(text, '>= 0.95'))
        self.assertIn('1.101', self.line(text, '< 1.1'))
        self.assertIn('0.94', self.line(text, 'hydrator, ublk', '94999'))

    def test_memory_is_what_it_grows_by(self):
        self.assertIn('32.0 MiB', self.line(self.text(some_results()),
                                            '< 48 MiB'))

    def test_virtual_machines_have_figures_beside_those_of_qemu(self):
        text = self.text(some_results())
        for words, ours, theirs in (
                (('4k random read', ': IOPS '), '55000 1.10', '50000'),
                (('4k random read', 'median'), '20.2', '18.4'),
                (('4k random read', 'per core'), '99000 1.10', '90000')):
            cells = [cell.strip() for cell in self.line(
                text, 'depth 1 ', *words).split('│')]
            self.assertEqual([ours, theirs], cells[2:4])

    def test_virtual_machines_have_figures_without_qemu(self):
        found = some_results()
        found.samples = [sample for sample in found.samples
                         if not sample.stack.startswith('qemu')]
        line = self.line(self.text(found), 'depth 32 4k random write: IOPS ')
        self.assertEqual(['55000 -', '-'], [
            cell.strip() for cell in line.split('│')[2:4]])

    def test_a_run_in_which_all_failed_is_shown_as_well(self):
        self.assertIn('-', self.text(results.Results()))

    def test_a_table_can_be_put_into_the_documentation(self):
        table = tables.Table('', 'raw LV', title='The swap')
        table.add_row('pause, ms', '4.3 "or so"')

        self.assertEqual(
            '.. csv-table:: The swap\n'
            '   :header-rows: 1\n'
            '\n'
            '   "","raw LV"\n'
            '   "pause, ms","4.3 ""or so"""\n', report.as_rst(table))

    def test_everything_is_left_in_a_folder(self):
        found = some_results()
        found.failures.append('round 1: [broken] pipe')
        with tempfile.TemporaryDirectory() as folder:
            place = pathlib.Path(folder, 'bench')
            report.show(found, place, consoles.Console(file=io.StringIO()))
            left = json.loads((place / 'bench.json').read_text())
            self.assertEqual(len(found.samples), len(left['samples']))
            self.assertIn('[broken] pipe',
                          (place / 'tables.txt').read_text())
            self.assertIn('<svg', (place / 'latency.svg').read_text())


class NativeTest(base.BaseTestCase):

    def test_estimates_of_criterion(self):
        with tempfile.TemporaryDirectory() as folder:
            new = pathlib.Path(folder, 'settled_ read', 'new')
            new.mkdir(parents=True)
            (new / 'benchmark.json').write_text(
                '{"full_id": "settled: read"}')
            (new / 'estimates.json').write_text(json.dumps({'median': {
                'confidence_interval': {'lower_bound': 60, 'upper_bound': 63},
                'point_estimate': 61.5}}))
            self.assertEqual(
                {'settled: read': {'median': 61.5, 'low': 60, 'high': 63}},
                native.read_estimates(pathlib.Path(folder)))

    def test_no_estimates_are_told(self):
        with tempfile.TemporaryDirectory() as folder:
            self.assertRaises(errors.LabError, native.read_estimates,
                              pathlib.Path(folder))

    def test_memory_of_a_process(self):
        text = 'Name:\tx\nVmLck:\t   1024 kB\nVmRSS:\t   2048 kB\n'
        self.assertEqual({'VmLck': 1 << 20, 'VmRSS': 2 << 20},
                         native.read_memory(text))

    def program(self, text):
        return [sys.executable, '-c', text]

    def test_a_process_is_served_until_it_is_not_needed(self):
        with tempfile.TemporaryDirectory() as folder:
            place = pathlib.Path(folder)
            with native.served(self.program(
                    'import time; print("up", flush=True); time.sleep(60)'),
                    place) as process:
                native.wait_until(process, place,
                                  (place / 'log').read_text)
            self.assertEqual('up\n', (place / 'log').read_text())
            self.assertIsNotNone(process.poll())

    def test_a_process_that_ends_early_says_why(self):
        with tempfile.TemporaryDirectory() as folder:
            place = pathlib.Path(folder)
            with native.served(self.program('raise SystemExit("no disk")'),
                               place) as process:
                error = self.assertRaises(
                    errors.LabError, native.wait_until, process, place,
                    lambda: False)
        self.assertIn('no disk', str(error))

    def test_a_program_that_is_missing_is_told(self):
        with tempfile.TemporaryDirectory() as folder:
            served = native.served(['/no/program'], pathlib.Path(folder))
            error = self.assertRaises(errors.LabError, served.__enter__)
        self.assertIn('/no/program', str(error))


# What the guest prints
TOLD = ('{"requests": 1000, "seconds": 2.0, "processor": 0.5, "p50": 8432, '
        '"p99": 69463}\n')


@ddt.ddt
class VhostTest(base.BaseTestCase):

    def setUp(self):
        super().setUp()
        folder = self.enterContext(tempfile.TemporaryDirectory())
        self.place = pathlib.Path(folder)
        self.commands = []
        self.broken = ()
        for target, name, replacement in (
                (vhost, '_SIZE', 1 << 20), (vhost, '_run', self.run_program),
                (vhost, '_listens', lambda path: True),
                (vhost.shutil, 'which', lambda name: '/usr/bin/' + name),
                (native, 'folder', lambda: contextlib.nullcontext(
                    self.place)),
                (native, 'served', self.served),
                (native, 'status', lambda place: {'state': 'done'})):
            self.enterContext(mock.patch.object(target, name, replacement))

    def run_program(self, command):
        self.commands.append([str(word) for word in command])
        return TOLD

    @contextlib.contextmanager
    def served(self, command, place):
        name = pathlib.Path(command[0]).name
        if name in self.broken:
            raise errors.LabError(name + ' is broken')
        self.commands.append([str(word) for word in command])
        yield types.SimpleNamespace(pid=77, args=command, poll=lambda: None)

    def measure(self, rounds=1):
        found = results.Results()
        vhost.measure(rounds, 1.5, found)
        return found

    def test_what_the_guest_says(self):
        figures = vhost.parse(TOLD)
        self.assertEqual(500, figures['iops'])
        self.assertEqual(2000, figures['iops_per_core'])
        self.assertAlmostEqual(8.432e-6, figures['p50'])
        self.assertAlmostEqual(69.463e-6, figures['p99'])

    @ddt.data('', 'null', '[]', '{}', TOLD.replace('0.5', '0'),
              TOLD.replace('8432', 'null'))
    def test_what_are_no_figures_is_told(self, text):
        error = self.assertRaises(errors.LabError, vhost.parse, text)
        self.assertIn('something else', str(error))

    def test_every_server_has_one_of_qemus_beside_it(self):
        names = [server.name for server in vhost.SERVERS]
        self.assertEqual(sorted(set(names)), sorted(names))
        for server in vhost.SERVERS:
            self.assertEqual(server.name.startswith('qemu-'),
                             server.beside is None)
            self.assertIn(server.beside, [None, *names])

    def test_each_load_goes_to_each_server(self):
        found = self.measure(rounds=2)
        self.assertEqual([], found.failures)
        self.assertEqual(
            sorted((load.key, server.name, number) for load in vhost.LOADS
                   for server in vhost.SERVERS for number in (1, 2)),
            sorted((sample.key, sample.stack, sample.round)
                   for sample in found.samples))
        first = {sample.round: sample.stack
                 for sample in reversed(found.samples)}
        self.assertEqual({1: vhost.SERVERS[0].name, 2: vhost.SERVERS[1].name},
                         first)

    def test_the_guest_is_the_same_for_all(self):
        self.measure()
        guests = {}
        for command in self.commands:
            if pathlib.Path(command[0]).name == 'guest':
                guests.setdefault(command[4], set()).add(
                    tuple(command[2:4] + command[5:]))
        expected = {('77', '1.5', load.way, str(load.block), str(load.depth))
                    for load in vhost.LOADS}
        self.assertEqual({'once': expected, 'again': expected}, guests)

    def test_remote_blocks_are_remote_for_each_load(self):
        self.measure()
        runs = [command for command in self.commands if 'run' in command]
        settled = sum(server.copied for server in vhost.SERVERS)
        self.assertEqual(settled + len(vhost.LOADS), len(runs))
        self.assertEqual(settled, sum('start' in command
                                      for command in self.commands))

    def test_without_qemu_the_others_are_measured(self):
        with mock.patch.object(vhost.shutil, 'which', lambda name: None):
            found = self.measure()
        self.assertEqual(1, len(found.failures))
        self.assertIn('qemu-system-common', found.failures[0])
        self.assertEqual({server.name for server in vhost.SERVERS
                          if server.beside},
                         {sample.stack for sample in found.samples})

    def test_one_that_fails_does_not_stop_the_others(self):
        self.broken = ('null',)
        found = self.measure()
        self.assertEqual(['round 1, vhost-user-blk, frontend, null: '
                          'null is broken'], found.failures)
        self.assertEqual(len(vhost.SERVERS) - 1,
                         len({sample.stack for sample in found.samples}))


class VhostProgramTest(base.BaseTestCase):

    def test_what_a_program_complains_of_is_told(self):
        error = self.assertRaises(errors.LabError, vhost._run, [
            sys.executable, '-c', 'raise SystemExit("no queue")'])
        self.assertIn('no queue', str(error))

    def test_one_that_is_missing_or_does_not_end_is_told(self):
        self.assertRaises(errors.LabError, vhost._run, ['/no/program'])
        with mock.patch.object(
                subprocess, 'run',
                side_effect=subprocess.TimeoutExpired('guest', 60)):
            self.assertRaises(errors.LabError, vhost._run, ['guest'])


class BesideTest(base.BaseTestCase):

    LINES = ('disk,depth,seconds,requests a second,99 of 100 in us,MB/s',
             *(f'{disk},1,{tenth / 10},100,50,{tenth}'
               for disk in ('NVMe', 'SATA') for tenth in range(30)))

    def test_each_disk_and_depth_is_a_line(self):
        found = beside.read(list(self.LINES))

        self.assertEqual([('NVMe', '1'), ('SATA', '1')], list(found))
        self.assertEqual('29', found['SATA', '1'][-1]['MB/s'])

    def test_the_picture_names_the_disks(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, 'beside.svg')
            beside.draw(beside.read(list(self.LINES)), path)

            self.assertIn('<!-- SATA -->', path.read_text())
