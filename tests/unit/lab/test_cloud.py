# SPDX-License-Identifier: Apache-2.0

import subprocess
from unittest import mock

from oslotest import base

from lab import cloud as clouds
from lab import errors


class RunTest(base.BaseTestCase):

    def test_command_that_takes_too_long_is_an_error_of_the_lab(self):
        cloud = clouds.Cloud('none')
        # Whoever plays in it knows these, and tries again.
        with (mock.patch.object(cloud, '_require'),
              mock.patch.object(cloud, 'environment'),
              mock.patch('subprocess.run',
                         side_effect=subprocess.TimeoutExpired('', 7))):
            error = self.assertRaises(errors.CommandTimeout, cloud.run,
                                      ['sleep', '60'])
        self.assertIn('"sleep 60" on control', str(error))
        self.assertIn('7 seconds', str(error))
