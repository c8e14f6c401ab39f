# SPDX-License-Identifier: Apache-2.0
"""What cinder-volume starts where systemd runs (hazards H23 and H34)."""

import os
import pathlib
import shlex
import sys

from tests.lab import base

SYSTEMD = '/lib/systemd/systemd'
SCRIPT = str(pathlib.Path(__file__).with_name('systemd.sh'))
# Stands for the privileged daemon of cinder-volume, and for a helper
SERVICE = '''
import subprocess, sys, time
sys.path.insert(0, %(repository)r)
from cinder_localstor.node import privileged
subprocess.run([*privileged._scope(), 'sh', '-c', 'sleep 10001 &'], check=True)
subprocess.Popen(['sleep', '10002'])
time.sleep(10003)
'''
UNIT = '/run/systemd/system/localstor-test.service'


class SystemdTest(base.LabTestCase):

    def setUp(self):
        if not os.path.exists(SYSTEMD):
            self.skipTest('this machine has no systemd')
        super().setUp()
        self.node = self.nodes[0]
        self.node.run([SCRIPT, 'start'])
        self.addCleanup(self.end)
        self.wait_for('systemd has booted', self.has_booted)

    def end(self):
        self.node.run(['sh', '-c', 'kill -9 $(pgrep -x systemd)'])
        self.wait_for('systemd is gone', lambda: not self.systemd())

    def systemd(self):
        """Its process id on the node, '' if there is none."""
        return self.node.run(['pgrep', '-x', 'systemd'],
                             check=False).stdout.strip()

    def has_booted(self):
        return self.systemd() and self.inside(
            ['systemctl', 'is-system-running'],
            check=False).stdout.strip() in ('running', 'degraded')

    def inside(self, argv, check=True):
        """Run a command where this systemd is the first process."""
        return self.node.run([SCRIPT, 'inside', *argv], check=check)

    def serve(self, around=()):
        """Start a service that starts a helper, in other surroundings."""
        command = shlex.join([*around, sys.executable, '-c', SERVICE % {
            'repository': str(self.cloud.layout.repository)}])
        self.inside(['sh', '-c', 'mkdir -p %s; cat >%s <<END\n[Service]\n'
                     'ExecStart=/bin/sh /run/localstor-test\nEND\n'
                     'cat >/run/localstor-test <<\\END\nexec %s\nEND\n'
                     'systemctl daemon-reload'
                     % (os.path.dirname(UNIT), UNIT, command)])
        self.inside(['systemctl', 'start', 'localstor-test'])
        self.wait_for('all is started', lambda: self.sleeping('10002'))

    def sleeping(self, time):
        return self.node.run(['pgrep', '-fx', 'sleep ' + time],
                             check=False).stdout

    def test_helper_outlives_the_service_that_has_started_it(self):
        self.serve()
        self.inside(['systemctl', 'stop', 'localstor-test'])
        self.wait_for('what is no helper is gone',
                      lambda: not self.sleeping('10002'))
        self.assertNotEqual('', self.sleeping('10001'))

    def test_helper_starts_in_a_container_that_this_systemd_does_not_see(self):
        self.serve(['unshare', '--pid', '--fork', '--mount-proc'])
        self.assertNotEqual('', self.sleeping('10001'))
        # The first process of a container need not heed SIGTERM.
        self.inside(['systemctl', 'kill', '--signal=KILL', 'localstor-test'])
        self.wait_for('it has ended with the container',
                      lambda: not self.sleeping('10001'))
