# SPDX-License-Identifier: Apache-2.0

import io
import logging
import unittest

from cinder_localstor.node import secrets

IQN = 'iqn.2010-10.org.openstack:localstor-x'
SECRET = 'Hush-1234'


class MaskTest(unittest.TestCase):

    def setUp(self):
        self.addCleanup(secrets.forget, IQN)
        self.out = io.StringIO()
        handler = logging.StreamHandler(self.out)
        handler.setFormatter(logging.Formatter('%(message)s'))
        root = logging.getLogger()
        # Alone: a traceback among what tests print looks like a failure.
        self.addCleanup(setattr, root, 'handlers', root.handlers)
        root.handlers = [handler]
        self.log = logging.getLogger('cinder.volume.targets.some')
        level = self.log.level
        self.log.setLevel(logging.DEBUG)
        self.addCleanup(self.log.setLevel, level)
        secrets.hide(IQN, SECRET)

    def assert_masked(self):
        self.assertNotIn(SECRET, self.out.getvalue())
        self.assertIn(secrets.MASK, self.out.getvalue())

    def test_in_a_message(self):
        self.log.debug('password ' + SECRET)
        self.assert_masked()

    def test_in_arguments(self):
        self.log.debug('%s and %r', SECRET, ['x', {'password': SECRET}])
        self.assert_masked()

    def test_in_named_arguments(self):
        self.log.debug('%(a)s', {'a': SECRET})
        self.assert_masked()

    def test_in_an_object_that_shows_it(self):
        class Command:
            def __str__(self):
                return 'rtstool create ' + SECRET
        self.log.debug(Command())
        self.assert_masked()

    def test_in_a_traceback(self):
        try:
            raise ValueError('rtstool create ' + SECRET)
        except ValueError:
            self.log.exception('It failed')
        self.assert_masked()
        self.assertIn('It failed', self.out.getvalue())
        self.assertIn('Traceback', self.out.getvalue())

    def test_traceback_without_a_secret_is_left_alone(self):
        try:
            raise ValueError('no more space')
        except ValueError:
            self.log.exception('It failed')
        self.assertIn('no more space', self.out.getvalue())

    def test_record_without_a_secret_keeps_its_arguments(self):
        self.log.debug('%d and %s', 1, 'x')
        self.assertEqual('1 and x\n', self.out.getvalue())

    def test_text(self):
        self.assertEqual('x *** y', secrets.mask('x %s y' % SECRET))

    def test_nothing_is_masked_by_an_empty_secret(self):
        secrets.hide('another', '')
        self.assertEqual('abc', secrets.mask('abc'))

    def test_handler_that_comes_later_is_covered_by_the_next_secret(self):
        out = io.StringIO()
        handler = logging.StreamHandler(out)
        logging.getLogger().addHandler(handler)
        self.addCleanup(logging.getLogger().removeHandler, handler)
        secrets.hide(IQN, SECRET)
        self.log.debug(SECRET)
        self.assertNotIn(SECRET, out.getvalue())

    def test_each_handler_is_filtered_once(self):
        for _time in range(3):
            secrets.hide(IQN, SECRET)
        for handler in logging.getLogger().handlers:
            self.assertEqual(1, sum(isinstance(found, secrets.MaskingFilter)
                                    for found in handler.filters))

    def test_forgotten_secret_is_no_longer_looked_for(self):
        secrets.forget(IQN)
        self.assertEqual(SECRET, secrets.mask(SECRET))
