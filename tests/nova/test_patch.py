# SPDX-License-Identifier: Apache-2.0

import os
import pathlib
import re
import shutil
import subprocess
import sys

import fixtures
import nova
from oslotest import base

PATCH = pathlib.Path(__file__).parents[2].joinpath(
    'contrib', 'nova', 'local-volumes.patch')
TESTS = 'nova.tests.unit.virt.libvirt.volume.test_local'
PATCHED = re.compile(r'^--- a/(\S+)$', re.MULTILINE)


class PatchTest(base.BaseTestCase):
    """The patch for Nova's source, on the Nova that is installed."""

    def setUp(self):
        super().setUp()
        self.tree = pathlib.Path(self.useFixture(fixtures.TempDir()).path)
        installed = pathlib.Path(nova.__file__).parent
        shutil.copytree(installed, self.tree / 'nova',
                        copy_function=os.symlink)
        for name in PATCHED.findall(PATCH.read_text()):
            (self.tree / name).unlink()
            shutil.copy(installed.parent / name, self.tree / name)

    def run_there(self, *argv):
        return subprocess.run(
            argv, cwd=self.tree, capture_output=True, text=True, check=False,
            timeout=300, env={**os.environ, 'PYTHONPATH': os.pathsep.join(
                [str(self.tree), *sys.path])})

    def test_it_applies_and_its_own_tests_pass(self):
        done = self.run_there('git', 'apply', str(PATCH))
        self.assertEqual(0, done.returncode, done.stderr)

        done = self.run_there(sys.executable, '-W', 'ignore', '-m',
                              'testtools.run', TESTS)

        self.assertEqual(0, done.returncode, done.stdout + done.stderr)
        self.assertRegex(done.stdout, r'Ran [1-9]\d* tests')
