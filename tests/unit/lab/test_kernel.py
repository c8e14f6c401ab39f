# SPDX-License-Identifier: Apache-2.0

import pathlib
import shutil
import subprocess
from unittest import mock

import fixtures
from oslotest import base

from lab import cache
from lab import errors
from lab import kernel


class KernelTest(base.BaseTestCase):

    def setUp(self):
        super().setUp()
        self.cache = self.useFixture(fixtures.TempDir()).path
        self.useFixture(
            fixtures.EnvironmentVariable('XDG_CACHE_HOME', self.cache))
        self.recipe = pathlib.Path(self.cache, 'recipe')
        shutil.copytree(kernel._RECIPE, self.recipe)
        self.useFixture(
            fixtures.MockPatchObject(kernel, '_RECIPE', self.recipe))
        self.source('6.12.1')
        self.ptrace = pathlib.Path(self.cache, 'ptrace.so')
        self.ptrace.touch()
        self.useFixture(
            fixtures.MockPatchObject(kernel, 'PTRACE', self.ptrace))

    def source(self, version):
        answer = subprocess.CompletedProcess([], 0, version, '')
        self.useFixture(fixtures.MockPatchObject(
            kernel.subprocess, 'run', mock.Mock(return_value=answer)))

    def build(self):
        folder = cache.folder(kernel._name())
        folder.mkdir(parents=True)
        (folder / 'linux').touch()

    def test_own_kernel_is_asked_for_before_it_is_built(self):
        error = self.assertRaises(errors.LabError, kernel.named, 'own')

        self.assertIn('make lab-kernel', str(error))

    def test_own_kernel_is_found_where_it_was_built(self):
        self.build()

        self.assertTrue(kernel.named('own').image.exists())

    def test_another_recipe_is_another_kernel(self):
        self.build()
        with open(self.recipe / 'config', 'a') as config:
            config.write('CONFIG_EXT2_FS=y\n')

        self.assertRaises(errors.LabError, kernel.named, 'own')

    def test_another_source_is_another_kernel(self):
        self.build()
        self.source('6.12.2')

        self.assertRaises(errors.LabError, kernel.named, 'own')

    def test_what_does_not_go_into_the_kernel_does_not_rebuild_it(self):
        self.build()
        with open(self.recipe / '__init__.py', 'a') as module:
            module.write('# changed\n')

        self.assertTrue(kernel.named('own').image.exists())

    def test_what_sets_registers_is_asked_for_before_it_is_built(self):
        self.ptrace.unlink()

        error = self.assertRaises(errors.LabError, kernel.named, 'stock')

        self.assertIn('make lab-programs', str(error))

    def test_an_unknown_kernel_is_refused_by_name(self):
        error = self.assertRaises(errors.LabError, kernel.named, 'vanilla')

        self.assertIn('vanilla', str(error))
