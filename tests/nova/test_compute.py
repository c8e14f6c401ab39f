# SPDX-License-Identifier: Apache-2.0

import os
import subprocess
import sys
import textwrap

from cinderclient import client
import ddt
import fixtures
from keystoneauth1 import session
from nova import test
from nova import version
from nova.virt.libvirt import driver
from nova.volume import cinder
from oslo_utils import importutils

from cinder_localstor.nova import compute
from tests.nova import cloud

STOCK = driver.VOLUME_DRIVERS['local']


@ddt.ddt
class RegisterTest(test.NoDBTestCase):

    @ddt.data('34.0.0', '34.1.0', '34.0.1.dev7')
    def test_release_that_we_know(self, found):
        self.useFixture(cloud.Registered(found))
        self.assertEqual(compute.DRIVER, driver.VOLUME_DRIVERS['local'])

    def test_others_stay(self):
        before = dict(driver.VOLUME_DRIVERS, local=None)
        self.useFixture(cloud.Registered())
        self.assertEqual(before, dict(driver.VOLUME_DRIVERS, local=None))

    @ddt.data('33.0.0', '35.0.0', '0.0.0')
    def test_release_that_we_do_not_know(self, found):
        self.useFixture(cloud.Registered(found))
        self.assertEqual(STOCK, driver.VOLUME_DRIVERS['local'])
        for part in ('WARNING', 'stock nova-compute', found, '34 (2026.2)',
                     'localstor_online_extend'):
            self.assertIn(part, self.stdlog.logger.output)

    def test_release_that_is_installed_is_one_that_we_know(self):
        self.useFixture(cloud.Registered(
            version.version_info.version_string()))
        self.assertTrue(issubclass(
            importutils.import_class(driver.VOLUME_DRIVERS['local']),
            importutils.import_class(STOCK)))


class MadeHereTest(test.NoDBTestCase):
    """A volume that Nova makes."""

    def setUp(self):
        super().setUp()
        self.flags(host='node7')
        self.client = client.Client('3.0', session=session.Session())
        self.asked = self.useFixture(fixtures.MockPatchObject(
            self.client.volumes, '_create')).mock
        self.useFixture(fixtures.MockPatchObject(
            cinder, 'cinderclient', side_effect=lambda *_arguments,
            check_only=False, **_options: None if check_only
            else self.client))

    def made(self, found):
        """What Cinder is asked for."""
        self.useFixture(cloud.Registered(found))
        # What it answers is nothing to Nova here.
        self.useFixture(fixtures.MockPatchObject(
            cinder, '_untranslate_volume_summary_view'))
        cinder.API().create(None, 3, 'name', 'description', image_id='image')
        _url, body, _key = self.asked.call_args.args
        return body

    def test_is_made_on_its_node(self):
        body = self.made('34.0.0')
        self.assertEqual({'localstor:node': 'node7'},
                         body['OS-SCH-HNT:scheduler_hints'])
        self.assertEqual((3, 'image'), (body['volume']['size'],
                                        body['volume']['imageRef']))

    def test_of_another_release_is_made_anywhere(self):
        body = self.made('33.0.0')
        self.assertFalse(body.get('OS-SCH-HNT:scheduler_hints'))

    def test_version_is_asked_for_as_before(self):
        self.useFixture(cloud.Registered())
        self.assertIsNone(cinder.cinderclient(None, '3.44', check_only=True))


class ProgramTest(test.NoDBTestCase):
    """In a process of its own: it chooses what threads are."""

    def python(self, text, *arguments):
        environment = {name: value for name, value in os.environ.items()
                       if not name.startswith('OS_')}
        done = subprocess.run(
            [sys.executable, '-W', 'ignore', '-c', textwrap.dedent(text),
             *arguments], capture_output=True, text=True, check=False,
            timeout=120, env={**environment,
                              'PYTHONPATH': os.pathsep.join(sys.path)})
        self.assertEqual(0, done.returncode, done.stderr)
        return done

    def test_it_is_nova_compute_with_our_class(self):
        done = self.python('''
            import sys
            from cinder_localstor.nova import compute
            from nova.virt.libvirt import driver

            def main():
                print(sys.argv, driver.VOLUME_DRIVERS['local'])

            sys.argv[0] = '/usr/bin/localstor-nova-compute'
            compute.compute.main = main
            compute.main()
            ''', '--config-file', os.devnull)
        log, called = done.stdout.splitlines()
        self.assertIn('INFO cinder_localstor.nova.compute', log)
        self.assertEqual("['/usr/bin/nova-compute', '--config-file', '%s'] "
                         '%s' % (os.devnull, compute.DRIVER), called)

    def test_it_becomes_a_service_of_nova(self):
        done = self.python('''
            from cinder_localstor.nova import compute
            from nova import service
            from nova.virt.libvirt import driver

            def create(binary, **kwargs):
                print(binary, driver.VOLUME_DRIVERS['local'])

            service.Service.create = create
            service.serve = lambda *args, **kwargs: None
            service.wait = lambda: None
            compute.main()
            ''', '--config-file', os.devnull)
        self.assertEqual('nova-compute ' + compute.DRIVER,
                         done.stdout.splitlines()[-1])

    def test_it_takes_nova_computes_arguments(self):
        done = self.python('''
            from cinder_localstor.nova import compute
            compute.main()
            ''', '--version')
        self.assertIn(version.version_string(), done.stdout)

    def test_it_needs_nothing_of_cinders(self):
        self.python('''
            import sys
            from cinder_localstor.nova import compute
            from cinder_localstor.nova import volume
            assert not {'cinder', 'eventlet'} & set(sys.modules)
            ''')
