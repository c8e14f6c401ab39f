# SPDX-License-Identifier: Apache-2.0

import contextlib
import fcntl
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from unittest import mock

import ddt
from eventlet import patcher

from cinder_localstor.node import privileged
from cinder_localstor.node import suspension

ZERO = b'\0'


class PrivilegedTestCase(unittest.TestCase):
    """Without the daemon, and with programs that are scripts of ours."""

    def setUp(self):
        self.addCleanup(privileged.CONTEXT.set_client_mode,
                        privileged.CONTEXT.client_mode)
        privileged.CONTEXT.set_client_mode(False)
        # The daemon is a process of its own, without eventlet's patches,
        # which Cinder's fixtures bring into this one.
        for module in ('subprocess', 'threading'):
            original = mock.patch.object(privileged, module,
                                         patcher.original(module))
            original.start()
            self.addCleanup(original.stop)
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = directory.name
        path = mock.patch.dict('os.environ', {
            'PATH': self.directory + os.pathsep + os.environ['PATH'],
            'TELLTALE': 'x'})
        path.start()
        self.addCleanup(path.stop)

    def path(self, name):
        return os.path.join(self.directory, name)

    def boot_systemd(self, first):
        """systemd runs on this node; who is our first process."""
        os.mkdir(self.path('systemd'))
        with open(self.path('comm'), 'w') as file:
            file.write(first + '\n')
        for name, path in (('SYSTEMD', 'systemd'), ('FIRST_PROCESS', 'comm')):
            patched = mock.patch.object(privileged, name, self.path(path))
            patched.start()
            self.addCleanup(patched.stop)

    @contextlib.contextmanager
    def any_umask(self):
        """As a privsep daemon has it."""
        before = os.umask(0)
        try:
            yield
        finally:
            os.umask(before)

    def program(self, name, text):
        with open(self.path(name), 'w') as file:
            file.write('#!/bin/sh\n' + text)
        os.chmod(self.path(name), stat.S_IRWXU)

    def hang(self, name, text, pid='$$'):
        """Run a program that hangs; what is returned, and a process id that
        it tells, as text of a shell.
        """
        self.program(name, text % {'started': 'echo %s > %s' % (
            pid, self.path('pid'))})
        start = privileged._start

        def start_and_wait(*arguments):
            process = start(*arguments)
            # However busy the machine is, its time begins when it runs.
            self.wait_until(lambda: self.written('pid'))
            return process
        with mock.patch.object(privileged, '_start', start_and_wait):
            found = privileged.run([name], 0.3)
        return found, int(self.written('pid'))

    def written(self, name):
        """A line that a program has written, empty before."""
        try:
            with open(self.path(name)) as file:
                return file.read().rpartition('\n')[0]
        except FileNotFoundError:
            return ''

    def wait_until(self, condition, why=lambda: 'waited in vain'):
        for _try in range(600):
            if condition():
                return
            time.sleep(0.05)
        self.fail(why())


@ddt.ddt
class DaemonTest(unittest.TestCase):

    @ddt.data('privileged', 'lio')
    def test_it_does_more_at_a_time_than_the_node_has_processors(self, name):
        # In a process of its own: tests take back what is set by default.
        found = subprocess.run(
            [sys.executable, '-W', 'ignore', '-c',
             'from cinder_localstor.node import %s as daemon; '
             'print(daemon.CONTEXT.conf.thread_pool_size)' % name],
            check=True, capture_output=True, text=True)
        self.assertEqual(privileged.THREADS, int(found.stdout))


@ddt.ddt
class RunTest(PrivilegedTestCase):

    def test_status_and_both_outputs(self):
        self.program('lvs', 'echo "out $1"; echo err >&2; exit 5')
        self.assertEqual((5, 'out x y\n', 'err\n'),
                         privileged.run(['lvs', 'x y'], 10))

    @ddt.data('sh', 'rm', '/usr/sbin/lvs', '../lvs', '')
    def test_other_programs_are_refused(self, name):
        self.program('rm', 'exit 0')
        self.assertRaises(ValueError, privileged.run, [name, '-c', 'true'],
                          10)

    def test_no_shell_reads_the_arguments(self):
        self.program('lvs', 'echo "$1"')
        self.assertEqual((0, '$(id); x\n', ''),
                         privileged.run(['lvs', '$(id); x'], 10))

    def test_what_lvm_says_in_a_report_is_no_part_of_it(self):
        self.program('vgs', 'echo "  Retrying metadata scan." >&$LVM_OUT_FD;'
                     ' echo "{}"')
        self.assertEqual((0, '{}\n', '  Retrying metadata scan.\n'),
                         privileged.run(['vgs'], 10))

    def test_output_is_that_of_the_c_locale(self):
        self.program('lvs', 'echo $LC_ALL $TELLTALE')
        self.assertEqual('C\n', privileged.run(['lvs'], 10)[1])

    def test_output_that_is_no_text(self):
        self.program('lvs', r"printf '\377'")
        self.assertEqual(1, len(privileged.run(['lvs'], 10)[1]))

    def test_input_is_empty(self):
        self.program('lvs', 'cat')
        self.assertEqual((0, '', ''), privileged.run(['lvs'], 10))

    def test_after_one_that_fails_no_other_is_run(self):
        self.program('lvs', 'echo "$1" | tee -a "%s"; test "$1" != 2'
                     % self.path('ran'))
        self.assertEqual((1, '2\n', ''), privileged.run_in_turn(
            [['lvs', '1'], ['lvs', '2'], ['lvs', '3']], 10))
        with open(self.path('ran')) as file:
            self.assertEqual('1\n2\n', file.read())

    def test_other_programs_are_refused_in_turn(self):
        self.program('lvs', 'true')
        self.assertRaises(ValueError, privileged.run_in_turn,
                          [['lvs'], ['sh', '-c', 'true']], 10)

    def run_hanging(self, text, pid='$$'):
        before = time.monotonic()
        result, pid = self.hang('lvs', text, pid)
        self.assertLess(time.monotonic() - before, 30)
        self.assertEqual((privileged.TIMED_OUT, '', ''), result)
        return pid

    def state(self, pid):
        """State of a process as proc(5) has it, None when it is gone."""
        try:
            with open('/proc/%d/stat' % pid) as file:
                return file.read().split(') ')[1][0]
        except (FileNotFoundError, ProcessLookupError):
            return None

    def assert_dead(self, pid, *states):
        self.wait_until(lambda: self.state(pid) in (None, *states),
                        lambda: '%d is %s' % (pid, self.state(pid)))

    def test_hanging_command_is_killed(self):
        self.assert_dead(self.run_hanging('%(started)s; exec sleep 60'))

    def test_its_children_are_killed_too(self):
        # Whoever inherits it may not ask for it.
        self.assert_dead(self.run_hanging('sleep 60 & %(started)s; wait',
                                          pid='$!'), 'Z')

    def test_command_that_ignores_signals_is_killed(self):
        self.assert_dead(self.run_hanging(
            'trap "" TERM INT HUP; %(started)s; sleep 60 & sleep 60'))

    def test_child_that_keeps_the_output_open_does_not_block(self):
        child = self.run_hanging(
            'setsid sleep 60 & %(started)s; exec sleep 60', pid='$!')
        os.kill(child, signal.SIGKILL)


class WriterTest(PrivilegedTestCase):
    """Commands that write LVM's metadata, and hang."""

    def run_hanging(self, text):
        """Run an lvcreate that hangs; what is returned, and its pid."""
        return self.hang('lvcreate', text)

    def wait_until_gone(self, pid):
        self.wait_until(lambda: not os.path.exists('/proc/%d' % pid),
                        lambda: '%d is still there' % pid)

    def run_until_told(self, text, then='true'):
        """Run one that does not end while anybody has patience, but for
        that; its pid.
        """
        with mock.patch.object(privileged, 'PATIENCE', 1):
            found, pid = self.run_hanging(
                # What is ignored here could not be noticed there.
                'trap : TERM; %%(started)s; sh -c \'%s '
                'while [ ! -e %s ]; do sleep 0.1; done\'; %s'
                % (text, self.path('go'), then))
        self.assertEqual((privileged.STILL_RUNS, str(pid), ''), found)
        with open(self.path('go'), 'w'):
            pass
        # No zombie is left of it either.
        self.wait_until_gone(pid)

    def test_what_changes_metadata_is_one_of_them(self):
        readers = {'lvmconfig', 'lvs', 'vgs'}
        self.assertEqual(
            {name for name in privileged.PROGRAMS
             if name.startswith(('lv', 'vg'))} - readers, privileged.WRITERS)
        self.assertIn('lvrename', privileged.WRITERS)

    def test_it_is_asked_to_end(self):
        found, pid = self.run_hanging('%(started)s; exec sleep 60')
        self.assertEqual((privileged.TIMED_OUT, '', ''), found)
        self.wait_until_gone(pid)

    def test_it_may_finish_what_it_has_begun(self):
        found, _pid = self.run_hanging(
            'trap "" TERM; %(started)s; sleep 0.6; echo made')
        self.assertEqual((0, 'made\n', ''), found)

    def test_one_that_gives_up_is_a_time_out(self):
        found, _pid = self.run_hanging(
            'trap "exit 5" TERM; %(started)s; while :; do sleep 0.1; done')
        self.assertEqual((privileged.TIMED_OUT, '', ''), found)

    def test_one_in_a_critical_section_is_never_killed(self):
        self.run_until_told('', 'echo out; echo err >&2; touch %s'
                            % self.path('done'))
        self.assertTrue(os.path.exists(self.path('done')))

    def test_what_it_has_started_is_left_to_it(self):
        self.run_until_told('trap "touch %s" TERM;' % self.path('asked'))
        self.assertFalse(os.path.exists(self.path('asked')))


class LockTest(PrivilegedTestCase):

    def lock(self, kind):
        file = open(self.path('V_disks'), 'w')
        self.addCleanup(file.close)
        fcntl.flock(file, kind)
        return file

    def test_nobody(self):
        self.assertIsNone(privileged.lock_holder(self.path('V_disks')))
        self.lock(fcntl.LOCK_EX).close()
        self.assertIsNone(privileged.lock_holder(self.path('V_disks')))

    def test_group_is_known_that_lvm_has_noted(self):
        open(self.path('disks'), 'w').close()
        with mock.patch.object(privileged, 'BACKUPS', self.directory):
            self.assertTrue(privileged.has_backup('disks'))
            self.assertFalse(privileged.has_backup('others'))

    def test_one_that_only_reads(self):
        self.lock(fcntl.LOCK_SH)
        self.assertIsNone(privileged.lock_holder(self.path('V_disks')))

    def test_holder_is_named(self):
        self.lock(fcntl.LOCK_EX)
        os.utime(self.path('V_disks'), (time.time() - 100,) * 2)
        holder = privileged.Holder(*privileged.lock_holder(
            self.path('V_disks')))
        self.assertEqual(os.getpid(), holder.pid)
        self.assertIn('python', holder.command)
        self.assertAlmostEqual(100, holder.seconds, delta=10)

    def test_holder_that_can_not_be_seen_counts(self):
        with open(self.path('V_disks'), 'w') as file:
            # The lock outlives the process that took it.
            subprocess.run(['flock', str(file.fileno())], check=True,
                           pass_fds=[file.fileno()])
            self.assertEqual(privileged.UNSEEN, privileged.lock_holder(
                self.path('V_disks'))[1])

    def test_holder_has_it_no_longer_than_somebody_has_seen_it_free(self):
        self.lock(fcntl.LOCK_EX).close()
        os.utime(self.path('V_disks'), (time.time() - 100,) * 2)
        self.assertIsNone(privileged.lock_holder(self.path('V_disks')))
        # As LVM opens it: that alone makes it no newer.
        with open(self.path('V_disks'), 'a') as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self.assertLess(privileged.lock_holder(
                self.path('V_disks'))[2], 10)

    def outside(self):
        """From now on as in a container: nobody else's locks are told."""
        with open(self.path('locks'), 'w'):
            pass
        hidden = mock.patch.object(privileged, 'LOCKS', self.path('locks'))
        hidden.start()
        self.addCleanup(hidden.stop)

    def test_holder_outside_of_our_container_counts(self):
        self.outside()
        self.lock(fcntl.LOCK_EX)
        holder = privileged.Holder(*privileged.lock_holder(
            self.path('V_disks')))
        self.assertEqual((0, privileged.UNSEEN), holder[:2])
        self.assertIn('lslocks', str(holder))

    def test_nobody_outside_of_our_container_either(self):
        self.outside()
        self.assertIsNone(privileged.lock_holder(self.path('V_disks')))
        reader = self.lock(fcntl.LOCK_SH)
        self.assertIsNone(privileged.lock_holder(self.path('V_disks')))
        reader.close()
        # Nor is it locked by having been asked.
        self.lock(fcntl.LOCK_EX | fcntl.LOCK_NB)

    def test_one_that_waits_for_it_is_not_the_holder(self):
        self.lock(fcntl.LOCK_EX)
        waiting = subprocess.Popen(['flock', self.path('V_disks'), 'true'])
        self.addCleanup(waiting.wait)
        self.addCleanup(waiting.kill)
        time.sleep(0.2)
        self.assertEqual(os.getpid(), privileged.lock_holder(
            self.path('V_disks'))[0])


GUARD = """
import sys
from cinder_localstor.node import suspension
suspension.BLOCK = sys.argv[1]
sys.exit(suspension.main(*sys.argv[2:]))
"""
# A service that suspends nodes and does nothing else
SERVICE = """
import sys, time
from cinder_localstor.node import privileged
from cinder_localstor.node import suspension
privileged.CONTEXT.set_client_mode(False)
privileged.RUNTIME, *privileged.GUARD = sys.argv[1:6]
print(privileged.hold(['a', 'b'], 60, 60)[0], flush=True)
time.sleep(60)
"""
# Nodes are directories as in sysfs; a file 'hangs' or 'fails' is for the
# commands to come.
DMSETUP = """
command=$1
shift
for name; do
    case $name in -*) continue;; esac
    node=dm-$name/dm
    [ -e $node/$command-hangs ] && exec sleep 60
    [ -e $node ] || { echo "Device $name not found" >&2; exit 1; }
    rm $node/$command-fails 2>/dev/null && exit 1
    case $command in suspend) new=1;; resume) new=0;; esac
    echo $new >$node/suspended
    echo $command $name >>log
done
"""


class GuardTest(PrivilegedTestCase):
    """Nodes that are suspended, by the guard as a process."""

    def setUp(self):
        super().setUp()
        self.nodes = self.path('nodes')
        self.program('dmsetup', 'cd %s\n%s' % (self.nodes, DMSETUP))
        for name in ('a', 'b'):
            os.makedirs(self.path('nodes/dm-%s/dm' % name))
            for field, value in (('name', name), ('suspended', '0'),
                                 ('uuid', 'LOCALSTOR-' + name)):
                self.write(name, field, value)
        self.guard = [sys.executable, '-c', GUARD, self.nodes]
        for name, value in (
                ('GUARD', self.guard), ('select', patcher.original('select')),
                ('RUNTIME', self.path('run')),
                ('SYSTEMD', self.path('systemd'))):
            patched = mock.patch.object(privileged, name, value)
            patched.start()
            self.addCleanup(patched.stop)
        nodes = mock.patch.object(suspension, 'BLOCK', self.nodes)
        nodes.start()
        self.addCleanup(nodes.stop)

    def write(self, name, field, value=''):
        path = os.path.join(self.nodes, 'dm-' + name, 'dm', field)
        with open(path, 'w') as file:
            file.write(value)

    def suspended(self):
        return set(suspension.suspended())

    def log(self):
        with open(os.path.join(self.nodes, 'log')) as file:
            return file.read().splitlines()

    def hold(self, seconds=60, timeout=60, names=('a', 'b')):
        """The process id of a guard."""
        status, out, err = privileged.hold(list(names), seconds, timeout)
        self.assertEqual((0, ''), (status, err))
        self.addCleanup(self.end, int(out))
        return int(out)

    def end(self, guard):
        if guard in privileged._guards:
            privileged.let_go(guard, 60)
        # One that was given up still works on the nodes.
        self.wait_until(lambda: not os.path.exists('/proc/%d' % guard))

    def holder(self):
        return privileged.lock_holder(privileged.suspension_lock())

    def test_nodes_are_held_until_they_are_let_go(self):
        guard = self.hold()
        self.assertEqual({'a', 'b'}, self.suspended())
        self.assertEqual(guard, self.holder()[0])
        self.assertEqual((0, '', ''), privileged.let_go(guard, 60))
        self.assertEqual(set(), self.suspended())
        self.assertIsNone(self.holder())
        self.assertEqual({}, privileged._guards)

    def test_it_has_a_session_of_its_own_and_is_not_told_to_end(self):
        guard = self.hold()
        self.assertEqual(guard, os.getsid(guard))
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(guard, number)
        self.assertEqual({'a', 'b'}, self.suspended())
        self.assertEqual((0, '', ''), privileged.let_go(guard, 60))

    def test_it_has_a_scope_of_its_own_where_systemd_runs(self):
        self.boot_systemd('systemd')
        self.program('systemd-run', 'echo "$*" >%s; shift 3; exec "$@"'
                     % self.path('scope'))
        self.hold()
        with open(self.path('scope')) as file:
            self.assertIn('--quiet --scope --collect ' + sys.executable,
                          file.read())

    def test_they_go_on_when_the_time_is_over_and_that_is_told(self):
        guard = self.hold(seconds=3)
        self.wait_until(lambda: not self.suspended())
        self.assertEqual(suspension.EARLY, privileged.let_go(guard, 60)[0])

    def test_they_go_on_when_who_has_suspended_them_is_killed(self):
        service = subprocess.Popen(
            [sys.executable, '-c', SERVICE, self.path('run'), *self.guard],
            stdout=subprocess.PIPE, text=True)
        self.addCleanup(service.stdout.close)
        self.addCleanup(service.wait)
        self.assertEqual('0\n', service.stdout.readline())
        self.assertEqual({'a', 'b'}, self.suspended())
        service.kill()
        self.wait_until(lambda: not self.suspended())
        self.wait_until(lambda: not self.holder())

    def test_one_that_is_no_node_lets_the_others_go_on(self):
        status, _out, err = privileged.hold(['a', 'absent'], 60, 60)
        self.assertEqual(suspension.FAILED, status)
        self.assertIn('absent not found', err)
        self.assertEqual((set(), ['suspend a', 'resume a']),
                         (self.suspended(), self.log()))

    def test_one_that_can_not_be_suspended_lets_the_others_go_on(self):
        self.write('b', 'suspend-hangs')
        status, _out, _err = privileged.hold(['a', 'b'], 3, 60)
        self.assertEqual(suspension.EARLY, status)
        self.assertEqual((set(), ['suspend a', 'resume a']),
                         (self.suspended(), self.log()))

    def test_who_waits_no_longer_lets_them_go_on(self):
        self.write('b', 'suspend-hangs')
        self.assertNotEqual(0, privileged.hold(['a', 'b'], 60, 3)[0])
        self.assertEqual(set(), self.suspended())

    def test_resuming_is_tried_until_it_works(self):
        guard = self.hold()
        self.write('a', 'resume-fails')
        self.assertEqual(0, privileged.let_go(guard, 60)[0])
        self.assertEqual(set(), self.suspended())

    def test_so_it_is_where_no_program_can_be_started_at_the_moment(self):
        # Nor is the machine's own found.
        with mock.patch.dict('os.environ', {'PATH': self.directory}):
            guard = self.hold()
        os.rename(self.path('dmsetup'), self.path('away'))
        self.assertEqual(privileged.TIMED_OUT,
                         privileged.let_go(guard, 0.5)[0])
        self.assertEqual({'a', 'b'}, self.suspended())
        os.rename(self.path('away'), self.path('dmsetup'))
        self.wait_until(lambda: not self.suspended())

    def test_so_it_is_where_nobody_can_look_at_the_moment(self):
        guard = self.hold()
        with mock.patch.object(suspension, 'BLOCK', self.nodes):
            os.rename(self.nodes, self.path('away'))
            # As a machine does that is out of files
            with open(self.nodes, 'w'):
                pass
            self.assertEqual(privileged.TIMED_OUT,
                             privileged.let_go(guard, 0.5)[0])
            os.remove(self.nodes)
            os.rename(self.path('away'), self.nodes)
        self.wait_until(lambda: not self.suspended())

    def test_nobody_else_can_lock_what_it_locks(self):
        with self.any_umask():
            os.mkdir(self.path('run'), 0o777)
            self.hold()
        self.assertEqual(0o755, os.stat(self.path('run')).st_mode & 0o777)
        self.assertEqual(0o600, os.stat(
            privileged.suspension_lock()).st_mode & 0o777)

    def test_it_follows_no_link_of_anybody(self):
        os.mkdir(self.path('run'))
        with open(self.path('precious'), 'w') as file:
            file.write('content')
        os.symlink(self.path('precious'), privileged.suspension_lock())
        self.assertNotEqual(0, privileged.hold(['a'], 60, 60)[0])
        with open(self.path('precious')) as file:
            self.assertEqual('content', file.read())

    def test_one_that_is_ready_too_late_is_a_time_out(self):
        def give_up(*_arguments):
            # A moment before it says that they are held
            self.wait_until(self.suspended)
            time.sleep(0.5)
            return [], [], []
        with mock.patch.object(privileged.select, 'select', give_up):
            status, out, _err = privileged.hold(['a'], 60, 60)
        self.assertNotEqual(0, status)
        self.assertEqual('', out)

    def test_one_that_hangs_keeps_the_others_from_nothing(self):
        guard = self.hold()
        self.write('a', 'resume-hangs')
        self.assertEqual(privileged.TIMED_OUT,
                         privileged.let_go(guard, 3)[0])
        self.assertEqual({'a'}, self.suspended())
        os.killpg(guard, signal.SIGKILL)

    def test_second_guard_waits_for_the_first(self):
        first = self.hold(names=['a'])
        second = privileged.threading.Thread(
            target=lambda: self.hold(names=['b']))
        second.start()
        time.sleep(0.5)
        self.assertEqual({'a'}, self.suspended())
        privileged.let_go(first, 60)
        second.join()
        self.assertEqual(['suspend a', 'resume a', 'suspend b'], self.log())

    def test_one_that_nobody_waits_for_any_more_suspends_nothing(self):
        first = self.hold(names=['a'])
        self.assertEqual(privileged.TIMED_OUT,
                         privileged.hold(['b'], 60, 0.5)[0])
        privileged.let_go(first, 60)
        self.wait_until(lambda: not self.holder())
        self.assertEqual(['suspend a', 'resume a'], self.log())


class HydratorTest(PrivilegedTestCase):

    def setUp(self):
        super().setUp()
        for name in ('RUNTIME', 'SYSTEMD'):
            patched = mock.patch.object(privileged, name, self.path(name))
            patched.start()
            self.addCleanup(patched.stop)

    def start(self):
        return privileged.start_hydrator('volume-1', ['--size', '5'], 10)

    def arguments(self):
        return ('run --detach --runtime %(runtime)s/volume-1 '
                '--marks %(runtime)s/devices --size 5'
                % {'runtime': self.path('RUNTIME')})

    def test_it_is_started_in_the_background(self):
        self.program('localstor-hydrator', 'echo "$*"')
        self.assertEqual((0, self.arguments() + '\n', ''), self.start())

    def test_it_gets_a_scope_of_its_own_where_systemd_runs(self):
        self.boot_systemd('systemd')
        self.program('systemd-run', 'echo "$*"')
        self.assertEqual(
            (0, '--quiet --scope --collect localstor-hydrator %s\n'
             % self.arguments(), ''), self.start())

    def test_a_container_is_in_no_scope_of_its_node(self):
        self.boot_systemd('dumb-init')
        self.program('systemd-run', 'echo somebody else is in it; exit 1')
        self.program('localstor-hydrator', 'echo "$*"')
        self.assertEqual((0, self.arguments() + '\n', ''), self.start())

    def test_container_with_the_processes_of_its_node_may_lack_systemd_run(
            self):
        self.boot_systemd('systemd')
        self.program('localstor-hydrator', 'echo "$*"')
        with mock.patch.object(privileged, '_path',
                               return_value=self.directory):
            self.assertEqual((0, self.arguments() + '\n', ''), self.start())

    def test_first_process_that_is_hidden_is_taken_for_systemd(self):
        self.boot_systemd('systemd')
        os.unlink(self.path('comm'))
        self.program('systemd-run', 'echo "$*"')
        self.assertIn('--scope', self.start()[1])

    def serve(self, answer):
        """Answer one line on the socket of a helper; what was asked."""
        directory = os.path.join(self.path('RUNTIME'), 'volume-1')
        os.makedirs(directory)
        listener = socket.socket(socket.AF_UNIX)
        self.addCleanup(listener.close)
        listener.bind(os.path.join(directory, 'control'))
        listener.listen()
        asked = []

        def run():
            connection = listener.accept()[0]
            asked.append(connection.recv(4096))
            connection.sendall(answer)
            connection.close()
        thread = threading.Thread(target=run)
        thread.start()
        self.addCleanup(thread.join)
        return asked

    def ask(self):
        return privileged.ask_hydrator('volume-1', '{"command": "x"}', 5)

    def test_question_and_answer_are_lines(self):
        asked = self.serve(b'{"ok": true}\nnot this')
        self.assertEqual('{"ok": true}\n', self.ask())
        self.assertEqual([b'{"command": "x"}\n'], asked)

    def test_nobody_answers(self):
        self.assertRaises(OSError, self.ask)


class FileTest(PrivilegedTestCase):

    def make(self, content=b''):
        path = self.path('device')
        with open(path, 'wb') as file:
            file.write(content)
        return path

    def read(self, path):
        with open(path, 'rb') as file:
            return file.read()

    def test_zeros_are_written_to_the_end_and_no_further(self):
        size = privileged.CHUNK + 100
        path = self.make(b'x' * (size + 50))
        privileged.zero(path, size)
        self.assertEqual(ZERO * size + b'x' * 50, self.read(path))

    def test_zeros_are_durable(self):
        path = self.make(b'x' * 4096)
        with mock.patch('os.fsync') as synced:
            privileged.zero(path, 4096)
        synced.assert_called_once()

    def test_missing_device_is_no_file_to_make(self):
        self.assertRaises(FileNotFoundError, privileged.zero,
                          self.path('absent'), 4096)
        self.assertFalse(os.path.exists(self.path('absent')))

    def test_flush(self):
        with mock.patch('os.fsync') as synced:
            privileged.flush(self.make())
        synced.assert_called_once()

    def test_descriptors_are_closed_after_a_failure(self):
        path = self.make(b'x')
        before = len(os.listdir('/proc/self/fd'))
        with mock.patch('os.fsync', side_effect=OSError):
            self.assertRaises(OSError, privileged.flush, path)
            self.assertRaises(OSError, privileged.zero, path, 1)
        # A file is no block device.
        self.assertRaises(OSError, privileged.forget_cached, path)
        self.assertEqual(before, len(os.listdir('/proc/self/fd')))

    def test_nobody_else_writes_rules(self):
        path = self.path('run/rules.d/56.rules')
        with self.any_umask():
            privileged.install_udev_rules(path, 'text')
        self.assertEqual(0o644, os.stat(path).st_mode & 0o777)
        self.assertEqual(0o755, os.stat(
            os.path.dirname(path)).st_mode & 0o777)

    def test_rules_are_replaced_as_a_whole(self):
        path = self.path('run/rules.d/56.rules')
        privileged.install_udev_rules(path, 'text')
        with mock.patch('os.replace', side_effect=OSError):
            self.assertRaises(OSError, privileged.install_udev_rules, path,
                              'other')
        self.assertEqual(b'text', self.read(path))
        self.assertEqual(['56.rules'], os.listdir(os.path.dirname(path)))
        privileged.install_udev_rules(path, 'other')
        self.assertEqual(b'other', self.read(path))

    def test_backends_that_start_together_install_the_same_rules(self):
        path = self.path('run/rules.d/56.rules')
        replace, others = os.replace, ['other']

        def another_comes_first(*names):
            if others:
                others.pop()
                other = threading.Thread(
                    target=privileged.install_udev_rules, args=(path, 'text'))
                other.start()
                other.join()
            replace(*names)

        with mock.patch('os.replace', side_effect=another_comes_first):
            privileged.install_udev_rules(path, 'text')
        self.assertEqual(b'text', self.read(path))
        self.assertEqual(['56.rules'], os.listdir(os.path.dirname(path)))
