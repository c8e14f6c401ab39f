# SPDX-License-Identifier: Apache-2.0

import dataclasses
import os
import pathlib
import subprocess
import sys
import tempfile

import ddt
from oslotest import base

from lab import errors
from lab import layout
from lab import node_services
from lab import parts
from lab import services
from lab import sizes


class RenderTest(base.BaseTestCase):

    def test_render_ini(self):
        text = services.render_ini({
            'DEFAULT': {'debug': True, 'unset': None},
            'multi': {'option': ['one', 'two']}})

        self.assertEqual('[DEFAULT]\ndebug = True\n\n'
                         '[multi]\noption = one\noption = two\n', text)

    def test_later_layers_win_and_inputs_stay(self):
        first = {'a': {'x': 1, 'y': 1}}

        result = services.merged(first, {'a': {'x': 2}, 'b': {'z': 3}})

        self.assertEqual({'a': {'x': 2, 'y': 1}, 'b': {'z': 3}}, result)
        self.assertEqual({'a': {'x': 1, 'y': 1}}, first)


class NamedTest(base.BaseTestCase):

    def test_an_unknown_service_is_told_with_the_known_ones(self):
        error = self.assertRaises(errors.NotFound, services.named,
                                  node_services.SERVICES, 'nova')

        self.assertIn('"nova"', str(error))
        self.assertIn('cinder-volume', str(error))


class ProbeTest(base.BaseTestCase):

    def setUp(self):
        super().setUp()
        descriptor, name = tempfile.mkstemp()
        os.close(descriptor)
        self.addCleanup(os.unlink, name)
        self.log = pathlib.Path(name)
        self.log.write_text('ready\n')

    def judge(self, probe, since=0, connects=False):
        return probe.judge(self.log, since, lambda address, port: connects)

    def test_what_says_nothing_is_ready(self):
        self.assertTrue(self.judge(services.Probe()))

    def test_a_former_life_does_not_count(self):
        probe = services.Probe(says='ready')

        self.assertTrue(self.judge(probe))
        self.assertFalse(self.judge(probe, since=6))

    def test_says_it_often_enough(self):
        probe = services.Probe(says='ready', times=2)

        self.assertFalse(self.judge(probe))
        self.log.write_text('ready\nready\n')
        self.assertTrue(self.judge(probe))

    def test_listens(self):
        probe = services.Probe(listens=('10.77.0.1', 80))

        self.assertFalse(self.judge(probe))
        self.assertTrue(self.judge(probe, connects=True))

    def test_never_ready(self):
        self.log.write_text('ready\nno disk\n')

        self.assertRaises(services.NeverReady, self.judge,
                          services.Probe(says='ready', fails='no disk'))

    def test_no_log_yet(self):
        self.log = self.log.with_name('missing')

        self.assertFalse(self.judge(services.Probe(says='ready')))


@ddt.ddt
class PartsTest(base.BaseTestCase):

    def setUp(self):
        super().setUp()
        lab = layout.Layout()
        self.place = services.Place('node1', lab.address('node1'),
                                    lab.node_directory('node1'), lab)

    @ddt.data('control', 'nodes', 'setup')
    def test_everything_waits_only_for_what_is_before_it(self, kind):
        seen = set()
        for declared in getattr(parts.of(parts.OPTIONAL), kind):
            self.assertLessEqual(set(declared.after), seen, declared.name)
            seen.add(declared.name)

    @ddt.data('control', 'nodes')
    def test_everything_renders(self, kind):
        place = self.place
        for service in getattr(parts.of(parts.OPTIONAL), kind):
            self.assertTrue(all(isinstance(word, str)
                                for word in service.command(place)))
            service.files(place)
            if service.ready:
                self.assertIsInstance(service.ready(place), services.Probe)

    def test_databases_are_made_of_commands_and_of_what_is_in_the_cloud(self):
        part = parts.of(parts.OPTIONAL)

        for setup in part.setup:
            self.assertTrue(all(isinstance(word, str)
                                for word in setup.command(self.place)))
        for api in part.apis:
            self.assertTrue(api.url(self.place.layout).startswith('http://'))

    def test_a_cloud_without_instances_has_nothing_of_them(self):
        part = parts.of(())

        self.assertEqual(('keystone', 'cinder', 'glance'), part.databases)
        self.assertEqual((), part.accounts)
        self.assertEqual({}, part.files(self.place))
        self.assertNotIn('libvirtd', [one.name for one in part.nodes])

    def cinder_conf(self, *chosen):
        part = parts.of(chosen)
        place = dataclasses.replace(self.place, backends=part.backends)
        service = services.named(part.nodes, 'cinder-volume')
        self.assertEqual(len(part.backends), service.ready(place).times)
        return service.files(place)[node_services.cinder_config(place)]

    def test_each_backend_has_a_disk_and_a_section(self):
        for chosen in ((), ('lvm',)):
            part = parts.of(chosen)
            config = self.cinder_conf(*chosen)

            *groups, _state = node_services.disks(sizes.GIB, part)
            self.assertEqual([one.name for one in part.backends],
                             [disk.name for disk in groups])
            for backend, disk in zip(part.backends, groups):
                self.assertIn(f'[{backend.name}]\n', config)
                self.assertIn(f'volume_group = {backend.group}\n', config)
                self.assertIn(f'vgcreate -q {backend.group} /dev/x',
                              disk.use('/dev/x'))
                self.assertEqual(backend.thin, 'thin-pool' in
                                 disk.use('/dev/x'))

    def test_cinders_own_driver_is_there_when_it_is_chosen(self):
        self.assertIn('enabled_backends = local,thin\n', self.cinder_conf())
        self.assertIn('enabled_backends = local,thin,lvm\n',
                      self.cinder_conf('lvm'))

    def test_all_nodes_have_one_directory_of_backups(self):
        service = services.named(parts.of(['backup']).nodes, 'cinder-backup')

        self.assertNotIn('cinder-backup',
                         [one.name for one in parts.of(()).nodes])
        paths = set()
        for name in ('node1', 'node2'):
            place = dataclasses.replace(
                self.place, name=name,
                directory=self.place.layout.node_directory(name))
            [config] = service.files(place).values()
            paths |= {line for line in config.splitlines()
                      if line.startswith('backup_posix_path')}
        self.assertEqual(
            {f'backup_posix_path = {self.place.layout.directory}/backups'},
            paths)

    def test_nova_compute_has_no_database(self):
        service = services.named(parts.of(parts.OPTIONAL).nodes,
                                 'nova-compute')

        [config] = service.files(self.place).values()

        self.assertNotIn('[database]', config)
        self.assertNotIn('mysql', config)

    def test_an_option_of_the_user_wins(self):
        lab = layout.Layout()
        place = services.Place(
            'node1', lab.address('node1'), lab.node_directory('node1'), lab,
            {'local': {'volume_driver': 'a.Driver'},
             'extra': {'key': 'value'}})
        service = services.named(node_services.SERVICES, 'cinder-volume')

        config, = (text for name, text in service.files(place).items()
                   if name.endswith('node1/cinder.conf'))

        self.assertIn('volume_driver = a.Driver\n', config)
        self.assertIn('[extra]\nkey = value\n', config)


class AccountsTest(base.BaseTestCase):

    def files(self, *names):
        lab = layout.Layout()
        place = services.Place('node1', lab.address('node1'),
                               lab.node_directory('node1'), lab)
        return node_services.base_files(place, {}, [
            services.Account(name, 64055) for name in names])

    def test_what_the_machine_lacks_is_added(self):
        files = self.files('nobody-has-this', 'root')

        for path, password in (('/etc/passwd', '*'), ('/etc/group', 'x')):
            own = pathlib.Path(path).read_text()
            self.assertTrue(files[path].startswith(own))
            added = files[path].removeprefix(own)
            self.assertTrue(added.startswith(
                f'nobody-has-this:{password}:64055:'))
            self.assertEqual(1, added.count('\n'))

    def test_where_nothing_lacks_the_files_stay(self):
        self.assertNotIn('/etc/passwd', self.files('root'))


class SiteTest(base.BaseTestCase):
    """What nodes' services find on their Python path."""

    SCRIPT = '''
import functools, sitecustomize, subprocess, sys
sitecustomize._fork_exec = lambda *arguments: sys.exit(
    'fork' if arguments[-2] else 'vfork')
def _subprocess_setup(function): pass
def other(function): pass
subprocess.Popen(['true'], preexec_fn=functools.partial(%s))
'''

    def how_started(self, partial):
        done = subprocess.run(
            [sys.executable, '-c', self.SCRIPT % partial],
            capture_output=True, text=True, check=False,
            env={'PYTHONPATH': str(layout.REPOSITORY / 'lab' / 'site')})
        return done.stderr.strip()

    def test_resetting_sigpipe_needs_no_fork(self):
        self.assertEqual('vfork', self.how_started('_subprocess_setup, None'))

    def test_what_a_caller_wants_done_is_done(self):
        self.assertEqual('fork', self.how_started('_subprocess_setup, print'))
        self.assertEqual('fork', self.how_started('other, None'))
