# SPDX-License-Identifier: Apache-2.0

import pathlib

import fixtures
from oslotest import base

from lab import guest_files


class LostTest(base.BaseTestCase):

    def test_only_what_a_power_cut_has_left_empty_is_removed(self):
        instances = pathlib.Path(self.useFixture(fixtures.TempDir()).path)
        kept = {'_base/1': 'kernel', 'a/kernel': 'kernel',
                'a/console.log': '', 'b/disk.info': ''}
        lost = dict.fromkeys(('_base/2', 'a/ramdisk', 'b/kernel'), '')
        for name, content in (kept | lost).items():
            path = instances / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(content)
        guest_files.forget_lost(instances)
        self.assertEqual(set(kept), {
            str(path.relative_to(instances))
            for path in instances.rglob('*') if path.is_file()})
