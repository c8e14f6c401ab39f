# SPDX-License-Identifier: Apache-2.0

import io
import pathlib
import subprocess
from unittest import mock

import fixtures
from oslotest import base
from rich import console as consoles

from lab import errors
from lab import guest_io


class FiguresTest(base.BaseTestCase):

    def test_medians_beside_the_first_way(self):
        rates = {'raw': (900, 100, 800), 'threads': (200, 220, 10),
                 'native': (100, 500, 50), 'io_uring': (300, 300, 1)}
        found = [guest_io.Rate(job, way, iops) for job in guest_io.JOBS
                 for way, all_rounds in rates.items() for iops in all_rounds]
        out = io.StringIO()
        guest_io.show(found, consoles.Console(file=out, width=80))
        self.assertIn(
            ['randread, depth 32', '800', '200 (1.00)', '100 (0.50)',
             '300 (1.50)'],
            [[cell.strip() for cell in line.strip('│').split('│')]
             for line in out.getvalue().splitlines()])


class GuestTest(base.BaseTestCase):

    def test_it_does_every_job_on_its_disk_and_tells_each(self):
        script = guest_io.work(2.5, 7)
        commands = [line for line in script.splitlines()
                    if line.startswith('/bin/fio')]
        self.assertEqual(len(guest_io.JOBS), len(commands))
        for command, job in zip(commands, guest_io.JOBS.values()):
            self.assertIn(f'-iodepth={job.depth} -rw={job.pattern} '
                          '-runtime=2.5 -filename=/dev/vda', command)
        subprocess.run(['sh', '-n'], input=script, text=True, check=True)

    def test_a_program_goes_with_its_libraries(self):
        files = guest_io._program('fio')
        self.assertIn('bin/fio', files)
        self.assertIn('lib/libc.so.6', files)
        self.assertIn('lib64/ld-linux-x86-64.so.2', files)

    def test_a_program_that_is_missing_is_named(self):
        with mock.patch.object(guest_io.shutil, 'which', return_value=None):
            self.assertRaisesRegex(errors.LabError, 'no fio',
                                   guest_io._program, 'fio')

    def test_a_guest_that_ended_early_shows_its_console(self):
        folder = pathlib.Path(self.useFixture(fixtures.TempDir()).path)
        (folder / 'results').touch()
        (folder / 'console').write_text('a panic')
        with mock.patch.object(guest_io, '_output'):
            self.assertRaisesRegex(
                errors.LabError, '0 of 4 jobs: a panic', guest_io._boot,
                folder, folder / 'kernel', 'native', 1)
