# SPDX-License-Identifier: Apache-2.0
"""The DevStack plugin, called by DevStack's own functions.

What changes a machine is replaced (``machine.sh``), so these tests show what
is written and called, not that it works.
"""

import configparser
from importlib import metadata
import pathlib
import re
import shlex

import fixtures
from oslo_rootwrap import wrapper
from oslotest import base

from cinder_localstor.node import lio
from cinder_localstor.node import lvm
from cinder_localstor.node import nvme
from cinder_localstor.node import privileged
from cinder_localstor import opts
from cinder_localstor import scheduler
from tests.unit.devstack import machine

SCHEDULER = machine.REPOSITORY / 'cinder_localstor' / 'nova' / 'scheduler.py'
LIBRARY = machine.REPOSITORY / 'devstack' / 'lib' / 'localstor'
GROUP = 'stack-volumes-local'
CONTROLLER = 'ENABLED_SERVICES=key,n-cpu,n-sch,c-api,c-sch,tempest\n'
COMPUTE = 'ENABLED_SERVICES=n-cpu\n'
NVMET = 'sys/kernel/config/nvmet'


class PluginTestCase(base.BaseTestCase):
    """A machine with what local.conf says."""

    localrc = CONTROLLER

    def setUp(self):
        super().setUp()
        if not machine.DEVSTACK:
            self.skipTest('LOCALSTOR_DEVSTACK does not say where DevStack is')
        self.machine = machine.Machine(
            pathlib.Path(self.useFixture(fixtures.TempDir()).path),
            self.localrc)

    def run_script(self, name):
        """Run the phases of a script; what was called is answered."""
        done = self.machine.call(name)
        self.assertEqual(0, done.returncode, done.stdout + done.stderr)
        return self.machine.calls()

    def read(self, name):
        parser = configparser.ConfigParser(interpolation=None,
                                           default_section='')
        parser.read(self.machine.path(name))
        return parser

    def assert_group_is_missed(self, group, done):
        self.assertNotEqual(0, done.returncode)
        self.assertIn('There is no volume group ' + group, done.stderr)

    def cinder_conf(self):
        return self.read('etc/cinder/cinder.conf')

    def files(self):
        """What is in each file, but for DevStack's and the test's own."""
        ours = [path for top in ('etc', 'run', 'opt/data', 'groups')
                for path in self.machine.path(top).rglob('*')
                if path.is_file() and not path.is_symlink()
                # lib/lvm looks into the machine's own for its unit.
                and 'systemd' not in path.parts]
        # clean_lvm_filter leaves an empty line for each that it removes.
        return {str(path.relative_to(self.machine.directory)):
                re.sub(r'\n\s*\n', '\n', path.read_text()) for path in ours}

    def admitted(self, path, when='etc/lvm/lvm.conf'):
        """Whether LVM looks at a device."""
        text = self.machine.path(when).read_text()
        found = re.search(r'^ *global_filter = \[(.*)\]', text, re.MULTILINE)
        return lvm.is_admitted(path, re.findall('"(.*?)"', found[1]))


class StackTest(PluginTestCase):
    """An all-in-one host. A run takes seconds, so the tests share two."""

    def test_stack(self):
        calls = self.run_script('stack')
        self.assert_configured()
        self.assert_kept_from_lvm()
        self.assert_installed(calls)
        self.assert_tempest_knows()
        before = self.files()

        again = self.run_script('stack')

        self.assertEqual(before, self.files())
        self.assertEqual(set(), {call.split()[0] for call in again} & {
            'vgcreate', 'vgremove', 'lvremove', 'dmsetup', 'iscsiadm',
            'systemctl'})

    def assert_configured(self):
        conf = self.cinder_conf()
        self.assertEqual('local', conf['DEFAULT']['enabled_backends'])
        self.assertEqual('local', conf['DEFAULT']['default_volume_type'])
        section = conf['local']
        known = {opt.name for opt in opts.driver_options()}
        self.assertEqual(
            {'volume_driver', 'volume_backend_name',
             'image_volume_cache_enabled'}, set(section) - known)
        # The server would not see it.
        self.assertEqual('False', section['localstor_online_extend'])
        self.assertEqual('cinder_localstor.driver.LocalStorDriver',
                         section['volume_driver'])
        self.assertEqual('local', section['volume_backend_name'])
        self.assertEqual(GROUP, section['volume_group'])
        self.assertEqual('192.0.2.11', section['target_ip_address'])
        self.assertEqual('True', section['image_volume_cache_enabled'])
        # A peer that is away is missed within a minute.
        self.assertEqual('60', conf['DEFAULT']['service_down_time'])
        section = conf['keystone_authtoken']
        self.assertEqual('service', section['service_token_roles'])
        self.assertEqual('True', section['service_token_roles_required'])

    def assert_kept_from_lvm(self):
        """LVM looks into no volume when cinder-volume starts, and later."""
        for when in ('opt/lvm.conf.at-start', 'etc/lvm/lvm.conf'):
            self.assertTrue(self.admitted('/dev/loop9', when))
            for path in lvm.GUESTS_PATHS:
                self.assertFalse(self.admitted(path, when), path)

    def assert_installed(self, calls):
        tree = self.machine.path('opt/cinder-localstor')
        constraints = self.machine.path('opt/requirements'
                                        '/upper-constraints.txt')
        for call in (
                # No second target
                f'bindep -b --file {tree}/bindep.txt devstack',
                f'pip install -c {constraints} -e {tree}',
                f'pip install -c {constraints} {tree}/hydrator/daemon',
                'openstack --os-region-name=RegionOne volume type create'
                ' --property volume_backend_name=local local'):
            self.assertIn(call, calls)

    def assert_tempest_knows(self):
        found = self.read('opt/tempest.conf')
        self.assertEqual(
            {'manage_volume': 'True', 'manage_snapshot': 'True',
             'volume_revert': 'True', 'extend_attached_volume': 'False'},
            dict(found['volume-feature-enabled']))
        # What DevStack and Tempest say by themselves is true.
        self.assertNotIn('compute-feature-enabled', found)

    def test_a_rust_that_is_too_old(self):
        done = self.machine.call('stack', CARGO_VERSION='1.63.0')

        self.assertNotEqual(0, done.returncode)
        self.assertIn('The native helper needs Rust 1.85 or later',
                      done.stderr)
        self.assertIn('bindep -b --file %s devstack rust'
                      % self.machine.path('opt/cinder-localstor/bindep.txt'),
                      self.machine.calls())

    def test_a_backing_file_that_becomes_no_disk(self):
        done = self.machine.call('stack', LOOP_DEVICE='')

        self.assert_group_is_missed(GROUP, done)


class ComputeTest(PluginTestCase):
    """A second compute node, whose services are the controller's."""

    localrc = COMPUTE

    def test_it_has_a_volume_service_of_its_own_and_no_more(self):
        calls = self.run_script('stack')

        conf = self.cinder_conf()
        self.assertEqual('local', conf['DEFAULT']['enabled_backends'])
        self.assertEqual(GROUP, conf['local']['volume_group'])
        self.assertIn('@192.0.2.10/cinder', conf['database']['connection'])
        self.assertEqual([], [call for call in calls
                              if call.startswith(('openstack', 'mysql'))])
        self.assertFalse(self.machine.path('opt/tempest.conf').exists())


class ChoicesTest(PluginTestCase):

    localrc = CONTROLLER + '''\
CINDER_ENABLED_BACKENDS=localstor:fast,localstor:large
CINDER_TARGET_HELPER=tgtadm
CINDER_SERVICE_REPORT_INTERVAL=30
LOCALSTOR_HYDRATOR=False
LOCALSTOR_TARGET_IP=198.51.100.11
'''

    def test_what_local_conf_says_goes_first(self):
        calls = self.run_script('stack')

        conf = self.cinder_conf()
        self.assertEqual('30', conf['DEFAULT']['report_interval'])
        for name in ('fast', 'large'):
            self.assertEqual('stack-volumes-' + name,
                             conf[name]['volume_group'])
            self.assertEqual('198.51.100.11', conf[name]['target_ip_address'])
            # With tgt, required
            self.assertEqual('tgtadm', conf[name]['target_helper'])
            self.assertEqual('direct', conf[name]['iscsi_target_flags'])
        self.assertEqual([], [call for call in calls
                              if 'hydrator' in call or ' rust' in call])


class NovaTest(PluginTestCase):

    localrc = CONTROLLER + 'LOCALSTOR_NOVA=True\n'
    UNIT = 'etc/systemd/system/devstack@n-cpu.service.d/localstor.conf'

    def unit(self):
        return self.machine.path(self.UNIT)

    def test_nova_compute_is_ours_until_unstack(self):
        self.run_script('stack')
        program, = re.findall('^ExecStart=(.+)$', self.unit().read_text(),
                              re.MULTILINE)
        self.assertRegex(program, r'/bin/localstor-nova-compute --config-file'
                                  r' /etc/nova/nova-cpu\.conf$')
        self.assertIn('localstor-nova-compute',
                      {entry.name for entry in metadata.entry_points(
                          group='console_scripts')})
        self.assertEqual('True', self.cinder_conf()['local'][
            'localstor_online_extend'])
        self.assertEqual('True', self.read('opt/tempest.conf')[
            'volume-feature-enabled']['extend_attached_volume'])

        self.run_script('unstack')
        self.assertFalse(self.unit().parent.exists())

    def test_nova_scheduler_knows_of_local_volumes(self):
        self.run_script('stack')
        conf = self.machine.path('etc/nova/nova.conf').read_text()
        for option in ('available_filters', 'enabled_filters',
                       'weight_classes'):
            *_before, last = re.findall('^%s *= *(.+)$' % option, conf,
                                        re.MULTILINE)
            module, _dot, name = last.rpartition(',')[2].rpartition('.')
            self.assertIn(module, ('', 'cinder_localstor.nova.scheduler'))
            self.assertIn('class %s(' % name, SCHEDULER.read_text())
        self.assertIn('available_filters = nova.scheduler.filters.all_filters',
                      conf)
        self.assertRegex(conf, 'enabled_filters *= *ComputeFilter,')

    def test_cinder_scheduler_heeds_the_node_that_a_request_names(self):
        self.run_script('stack')
        conf = self.machine.path('etc/cinder/cinder.conf').read_text()
        weighers, = re.findall('^scheduler_default_weighers *= *(.+)$', conf,
                               re.MULTILINE)
        self.assertEqual(['CapacityWeigher',
                          scheduler.LocalStorWeigher.__name__],
                         weighers.split(','))

    def test_what_is_chosen_no_more_is_taken_back(self):
        self.unit().parent.mkdir()
        self.unit().touch()
        localrc = self.machine.path('devstack/localrc')
        localrc.write_text(localrc.read_text() + 'LOCALSTOR_NOVA=False\n')
        self.run_script('stack')
        self.assertFalse(self.unit().parent.exists())


class CleanTestCase(PluginTestCase):

    def setUp(self):
        super().setUp()
        self.before = self.files()

    def use(self, group):
        """Leave what a node has in the middle of a move."""
        self.machine.path('nodes').write_text(
            'volume-1-handle LOCALSTOR-volume-1-handle\n'
            'volume-1-clone LOCALSTOR-volume-1-clone\n'
            f'{group}-volume--1 LVM-abc\n')
        self.machine.path('groups/' + group).write_text(
            '  volume-1 localstor.volume=1,other\n  mail theirs\n')
        self.machine.path('sessions').write_text(
            '192.0.2.12:3260,1 iqn.2010-10.org.openstack:localstor-7\n'
            '192.0.2.99:3260,1 iqn.1999-01.org.example:other\n')
        self.use_nvme('localstor-7')
        self.use_nvme('other')
        devices = self.machine.path('run/localstor/devices')
        devices.mkdir(parents=True)
        (devices / 'nbd0').touch()
        self.machine.path('run/localstor/volume-1').mkdir()
        for name in ('', '-' + group):
            self.machine.path('run/udev/rules.d/12-localstor%s.rules'
                              % name).touch()

    def use_nvme(self, name):
        """Leave a controller, and a subsystem with its host."""
        name = 'nqn.2010-10.org.openstack:' + name
        controller = self.controller(name)
        controller.mkdir(parents=True)
        (controller / 'subsysnqn').write_text(name + '\n')
        target = self.machine.path(NVMET)
        subsystem, host = (target / kind / name
                           for kind in ('subsystems', 'hosts'))
        for path in (host, subsystem / 'namespaces/1',
                     subsystem / 'allowed_hosts',
                     target / 'ports/1/subsystems'):
            path.mkdir(parents=True, exist_ok=True)
        (subsystem / 'allowed_hosts' / name).symlink_to(host)
        (target / 'ports/1/subsystems' / name).symlink_to(subsystem)

    def controller(self, name):
        return self.machine.path('sys/class/nvme/nvme-'
                                 + name.rpartition(':')[2])

    def assert_released_over_nvme(self):
        self.assertEqual([], list(self.machine.path(NVMET)
                                  .rglob('*localstor-*')))
        self.assertEqual(
            ['allowed_hosts', 'hosts', 'subsystems', 'subsystems'],
            sorted(path.parent.name for path
                   in self.machine.path(NVMET).rglob('*:other')))
        for name, ended in ('localstor-7', True), ('other', False):
            self.assertEqual(ended, self.controller(name).joinpath(
                'delete_controller').exists(), name)

    def assert_released(self, calls):
        """Nothing of the driver's is there, and all that is not is."""
        self.assert_released_over_nvme()
        self.assertEqual(['LVM-abc'], [
            line.split()[1] for line in
            self.machine.path('nodes').read_text().splitlines()])
        sessions = self.machine.path('sessions').read_text()
        self.assertNotIn('localstor', sessions)
        self.assertIn('example', sessions)
        self.assertEqual(
            [], list(self.machine.path('run').rglob('*localstor*')))
        self.assertTrue(any(
            re.fullmatch('localstor-hydrator abort .*/localstor/volume-1',
                         call) for call in calls), calls)

    def assert_clean(self):
        """Only what DevStack's own functions leave is left."""
        self.assertEqual(self.before, {
            name: text for name, text in self.files().items()
            if not name.startswith(('etc/sudoers.d/', 'etc/nova/'))})


class OwnGroupTest(CleanTestCase):

    def test_unstack_and_clean_leave_nothing(self):
        self.run_script('stack')
        self.use(GROUP)

        self.assert_released(self.run_script('unstack'))
        self.assertFalse(self.machine.path('groups/' + GROUP).exists())

        # Also when they are repeated
        for name in ('unstack', 'clean', 'clean'):
            self.run_script(name)
        self.assert_clean()

    def test_clean_does_what_unstack_has_not_done(self):
        self.run_script('stack')
        self.use(GROUP)

        self.assert_released(self.run_script('clean'))
        self.assert_clean()


class GivenGroupTest(CleanTestCase):

    localrc = CONTROLLER + 'LOCALSTOR_VOLUME_GROUP=theirs\n'

    def test_that_is_not_there(self):
        self.assert_group_is_missed('theirs', self.machine.call('stack'))

    def test_of_a_group_that_was_there_only_the_drivers_volumes_go(self):
        group = self.machine.path('groups/theirs')
        group.parent.mkdir()
        group.write_text('  mail theirs\n')
        self.before = self.files()
        calls = self.run_script('stack')
        self.assertEqual('theirs', self.cinder_conf()['local']['volume_group'])
        self.use('theirs')

        calls += self.run_script('unstack')
        self.assert_released(calls)
        self.run_script('clean')

        self.assertEqual([], [call for call in calls
                              if call.startswith('vg')])
        self.assert_clean()


class FilesTest(base.BaseTestCase):
    """What the plugin takes for granted."""

    def admits(self, context):
        """Whether rootwrap starts a helper with Cinder's filters only."""
        command = ['privsep-helper', '--config-file',
                   '/etc/cinder/cinder.conf', '--privsep_context', context,
                   '--privsep_sock_path', '/tmp/tmpabc/privsep.sock']
        return any(
            found.name.startswith('privsep') and found.match(command)
            for found in wrapper.load_filters([str(
                machine.CINDER / 'rootwrap.d')]))

    def test_rootwrap_admits_the_drivers_helpers(self):
        for module in (privileged, lio):
            self.assertTrue(self.admits(module.__name__ + '.CONTEXT'))

    def test_the_same_rust_is_needed_as_by_make(self):
        version = re.search(r'^RUST_VERSION := (\S+)$', (
            machine.REPOSITORY / 'Makefile').read_text(), re.MULTILINE)[1]
        self.assertIn('LOCALSTOR_RUST_VERSION=%s' % shlex.quote(version),
                      LIBRARY.read_text().splitlines())

    def test_what_unstack_removes_is_named_as_the_driver_names_it(self):
        self.assertIn('LOCALSTOR_NQN=%s' % nvme.NAME,
                      LIBRARY.read_text().splitlines())
        self.assertTrue(nvme.HOST_NAME.startswith(nvme.NAME))
