# SPDX-License-Identifier: Apache-2.0

import io
import re
import types
from unittest import mock

import ddt
from oslotest import base
from rich import console as consoles
from testtools import content

from lab import configuration
from lab import layout
from lab import parts
from lab import services
from lab import tempest

PASSED = tempest.Outcome(tempest.PASSED)
FAILED = tempest.Outcome(tempest.FAILED, 'wrong')
SKIPPED = tempest.Outcome(tempest.SKIPPED, 'not here')


def verdict(backend, left=None, **outcomes):
    return tempest.Verdict(backend, 'a driver', outcomes, 1.0, left or {})


class OutcomesTest(base.BaseTestCase):

    def test_a_test_that_ran_says_it_itself(self):
        self.assertEqual({'a.B.test_c[id-1]': FAILED}, tempest.outcomes(
            ['a.B.test_c[id-1]'], {'a.B.test_c[id-1]': FAILED}))

    def test_a_class_speaks_for_its_tests(self):
        self.assertEqual(
            {'a.B.test_c[id-1]': SKIPPED, 'a.B.test_d': SKIPPED},
            tempest.outcomes(['a.B.test_c[id-1]', 'a.B.test_d'],
                             {'setUpClass (a.B)': SKIPPED}))

    def test_what_nobody_speaks_of_has_failed(self):
        found = tempest.outcomes(['a.B.test_c'], {})

        self.assertEqual(tempest.FAILED, found['a.B.test_c'].state)

    def test_a_class_that_cannot_tidy_up_has_failed(self):
        name = 'tearDownClass (a.B)'

        self.assertEqual({'a.B.test_c': PASSED, name: FAILED},
                         tempest.outcomes(['a.B.test_c'], {
                             'a.B.test_c': PASSED, name: FAILED}))


class ReasonTest(base.BaseTestCase):

    def reason(self, **details):
        return tempest._reason({
            name.replace('_', '-'): content.text_content(text)
            for name, text in details.items()})

    def test_of_a_skip(self):
        self.assertEqual('no Nova', self.reason(reason='no Nova'))

    def test_of_an_error_with_several_lines(self):
        self.assertEqual(
            'lab.Error: first second',
            self.reason(pythonlogging='x', traceback=(
                'Traceback (most recent call last):\n'
                '  File "a.py", line 1, in b\n    c()\n'
                'lab.Error: first\nsecond\n')))

    def test_of_nothing(self):
        self.assertEqual('', self.reason())


class ShowTest(base.BaseTestCase):

    def show(self, *verdicts):
        stream = io.StringIO()
        console = consoles.Console(file=stream, width=200)
        held = tempest.show(verdicts, console)
        self.shown = stream.getvalue()
        return held

    def test_what_only_the_reference_passes_is_listed(self):
        self.assertFalse(self.show(
            verdict('lvm', one=PASSED, two=PASSED, three=PASSED, four=FAILED),
            verdict('local', one=PASSED, two=SKIPPED, four=FAILED)))

        listed = self.shown.partition('not with local: 2')[2]
        self.assertIn('skipped: two', listed)
        self.assertIn('failed: three', listed)
        self.assertNotIn('four', listed)

    def test_nobody_is_behind(self):
        self.assertTrue(self.show(verdict('lvm', one=PASSED, two=FAILED),
                                  verdict('local', one=PASSED, two=PASSED)))
        self.assertIn('not with local: none', self.shown)

    def test_what_is_left_behind_counts(self):
        self.assertFalse(self.show(
            verdict('lvm', one=PASSED),
            verdict('local', {'sessions': {'left': ['iqn.x']}}, one=PASSED)))
        self.assertIn('iqn.x', self.shown)

    def test_reasons_of_skips_are_counted(self):
        self.show(verdict('local', one=SKIPPED, two=SKIPPED))

        self.assertTrue(re.search(r'2 not here', self.shown))


@ddt.ddt
class SettingsTest(base.BaseTestCase):

    def settings(self, backend):
        cloud = mock.MagicMock(layout=layout.Layout(), nodes=[
            types.SimpleNamespace(name='node1', address='192.0.2.1')])
        return tempest.settings(cloud, backend, cloud.layout.cache, 'image',
                                tempest.OF_VOLUMES)

    @ddt.data(*configuration.BACKENDS)
    def test_only_names_differ_from_those_of_the_reference(self, backend):
        ours = self.settings(backend)
        reference = self.settings(tempest.REFERENCE)
        self.assertEqual('node1:192.0.2.1', ours['localstor']['hosts'])
        self.assertEqual({}, reference['localstor'])

        for settings in (ours, reference):
            for name in ('volume_type', 'backend_names'):
                del settings['volume'][name]
            del settings['localstor']
        self.assertEqual(reference, ours)

    @ddt.data(*configuration.BACKENDS, tempest.REFERENCE)
    def test_the_judged_backend_is_the_default(self, backend):
        [default] = [options['default_volume_type'] for options
                     in tempest.options(backend).values()
                     if 'default_volume_type' in options]

        self.assertEqual(backend, default)
        self.assertIn(backend, [one.name for one
                                in parts.of(tempest.OF_VOLUMES.also).backends])

    def test_the_reference_is_cinders_own(self):
        [backend] = [one for one in parts.of(tempest.OF_VOLUMES.also).backends
                     if one.name == tempest.REFERENCE]
        lab = layout.Layout()
        place = services.Place('node1', lab.address('node1'),
                               lab.node_directory('node1'), lab)

        self.assertTrue(backend.options(place)['volume_driver'].startswith(
            'cinder.volume.drivers.'))
