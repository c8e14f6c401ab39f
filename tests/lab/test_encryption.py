# SPDX-License-Identifier: Apache-2.0
"""Encrypted volumes, whose keys are in Barbican.

The driver sees ciphertext only.  It is the host of an instance that opens a
volume by its key: here cryptsetup with what Barbican says, as os-brick does.
"""

import binascii
import dataclasses
import hashlib
import time

from lab import leftovers
from tests.lab import base
from tests.lab import test_images

PLAIN = 'plain'
ANSWER = '/run/is-luks'
MAGIC = 'LUKS'
# A node has one slow processor; how well a password is stretched does not
# matter here.
FORMAT = ('--batch-mode --type luks1 --cipher aes-xts-plain64 --key-size 256 '
          '--pbkdf-force-iterations 1000')


class EncryptionTestCase(base.LabTestCase):

    find_cloud = staticmethod(base.furnished_cloud)
    volume_type = 'local'

    def setUp(self):
        super().setUp()
        self.here, self.there = self.nodes
        self.keys = self.key_ids()
        self.user.encrypt_type(self.volume_type)

    def clean_up(self):
        super().clean_up()
        self.user.encrypt_type(self.volume_type, False)

    def assert_nothing_left(self, before):
        super().assert_nothing_left(before)
        self.assertEqual(self.keys, self.key_ids())

    def key_ids(self):
        """What Barbican has."""
        found = self.cloud.key_api.get('/v1/secrets?limit=100').json()
        return {secret['secret_ref'].rpartition('/')[2]
                for secret in found['secrets']}

    def key_id(self, volume):
        return self.user.show(volume)['encryption_key_id']

    def crypt(self, attachment, command, *name):
        """Run cryptsetup with the volume's key."""
        key = self.cloud.key_api.get(
            '/v1/secrets/%s/payload' % self.key_id(attachment.volume_id),
            headers={'Accept': 'application/octet-stream'}).content
        attachment.node.run(
            ['sh', '-c', ' '.join((
                'printf %s', binascii.hexlify(key).decode(), '| cryptsetup',
                command, '--key-file -', attachment.device, *name))],
            timeout=base.PATIENCE)

    def open(self, attachment):
        """The same attachment, in plain."""
        self.assertTrue(attachment.connection['encrypted'])
        self.crypt(attachment, 'luksOpen', PLAIN)
        return dataclasses.replace(attachment, connection={
            **attachment.connection, 'device_path': '/dev/mapper/' + PLAIN})

    def close(self, attachment):
        attachment.node.run(['cryptsetup', 'close', PLAIN],
                            timeout=base.PATIENCE)

    def read(self, attachment):
        """Checksum of what it holds in plain, and nobody sees outside."""
        head = attachment.node.run(
            ['sh', '-c', 'dd if=%s bs=4 count=1 status=none'
             % attachment.device], timeout=base.PATIENCE).stdout
        self.assertEqual(MAGIC, head)
        plain = self.open(attachment)
        found = self.checksum(plain)
        self.assertNotEqual(found, self.checksum(attachment))
        self.close(attachment)
        return found


class EncryptionTest(EncryptionTestCase):

    def setUp(self):
        super().setUp()
        self.volume = self.create(volume_type=self.volume_type,
                                  node=self.here)

    def fill(self):
        """Write to the volume, for the first time; its content."""
        attachment = self.attach(self.volume, self.here)
        self.crypt(attachment, 'luksFormat ' + FORMAT)
        self.write(self.open(attachment))
        self.close(attachment)
        content = self.read(attachment)
        self.detach(attachment)
        return content

    def test_it_is_opened_by_the_same_key_wherever_it_goes(self):
        content, key = self.fill(), self.key_id(self.volume)
        attachment = self.attach(self.volume, self.there)
        self.hold_in_mid_move(attachment)
        self.assertEqual(content, self.read(attachment))
        self.let_go()
        self.wait_until_arrived(attachment)
        self.assertEqual(content, self.read(attachment))
        self.assertEqual(key, self.key_id(self.volume))
        self.assertEqual(self.keys | {key}, self.key_ids())
        self.detach(attachment)

    def test_what_is_written_while_it_arrives_is_there_at_the_end(self):
        self.fill()
        attachment = self.attach(self.volume, self.there)
        self.hold_in_mid_move(attachment)
        plain = self.open(attachment)
        self.write(plain)
        content = self.checksum(plain)
        self.let_go()
        self.wait_until_arrived(attachment)
        self.assertEqual(content, self.checksum(plain))
        self.close(attachment)
        self.detach(attachment)

    def test_volume_of_a_snapshot_has_a_key_of_its_own(self):
        content = self.fill()
        snapshot = self.user.request_snapshot(self.volume)
        self.wait_for('it is taken', lambda: (
            self.user.snapshots()[snapshot] == 'available'))
        self.assert_copied(content, snapshot_id=snapshot)
        self.user.request_snapshot_deletion(snapshot)
        self.wait_for('it is deleted', lambda: (
            snapshot not in self.user.snapshots()))

    def test_clone_has_a_key_of_its_own(self):
        self.assert_copied(self.fill(), source_volid=self.volume)

    def assert_copied(self, content, **source):
        volume = self.user.request_volume('copy', 1, self.volume_type,
                                          **source)
        self.volumes.append(volume)
        self.user.wait_for_status(volume, 'available')
        self.assertNotIn(self.key_id(volume),
                         (None, self.key_id(self.volume)))
        for node in self.nodes:
            attachment = self.attach(volume, node)
            self.assertEqual(content, self.read(attachment))
            self.wait_for('it has arrived', lambda: (
                not leftovers.moves(self.cloud)))
            self.detach(attachment)


class SourceAwayTest(EncryptionTestCase):
    """Nova asks whether a volume has a header, and formats it when the answer
    is no (hazard H27).
    """

    def setUp(self):
        if base.DATA_PATHS[0] != 'hydrator':
            self.skipTest('dm-clone never lets a read fail')
        super().setUp()
        self.let_reads_fail(after=5)
        self.addCleanup(self.let_reads_fail, after=None)

    def let_reads_fail(self, after):
        """Set the option for it, in seconds."""
        self.there.configure({'local': {'localstor_source_timeout': after}})
        self.restart_cinder_volume(self.there)

    def test_header_that_can_not_be_read_is_waited_for(self):
        volume = self.create(node=self.here)
        first = self.attach(volume, self.here)
        self.crypt(first, 'luksFormat ' + FORMAT)
        # It does not arrive before the first one is gone.
        second = self.user.attach_second(first, self.there)
        self.attachments.append(second)
        self.cloud.cut(self.here.name, self.there.name)
        self.addCleanup(self.cloud.heal)
        self.there.run(['sh', '-c', '(cryptsetup isLuks %s; echo $? >%s) '
                        '>/dev/null 2>&1 </dev/null &'
                        % (second.device, ANSWER)])
        self.addCleanup(self.there.run, ['rm', '-f', ANSWER])
        time.sleep(30)
        self.assertEqual('', self.answer())
        self.cloud.heal()
        self.wait_for('there is an answer', self.answer)
        self.assertEqual('0', self.answer())
        self.detach(second)
        self.wait_for('the move is undone', lambda: (
            not leftovers.moves(self.cloud)))

    def answer(self):
        return self.there.run(['cat', ANSWER], check=False).stdout.strip()


class ThinEncryptionTest(EncryptionTest):

    volume_type = 'thin'


class EncryptedByCinderTest(EncryptionTestCase, test_images.ImageTestCase):
    """Cinder itself encrypts what it writes, by os-brick."""

    other_type = 'thin'

    def assert_holds_it_everywhere(self, volume):
        content = hashlib.sha256(self.content).hexdigest()
        for node in self.nodes:
            attachment = self.attach(volume, node)
            self.assertIn(content, self.read(attachment))
            self.wait_for('it has arrived', lambda: (
                not leftovers.moves(self.cloud)))
            self.detach(attachment)

    def test_volume_of_an_image(self):
        self.assert_holds_it_everywhere(self.create_of(
            self.upload(self.content), self.here, self.volume_type))

    def test_volume_that_becomes_plain(self):
        volume = self.create_of(self.upload(self.content), self.here,
                                self.volume_type)
        # Cinder leaves the key in the manager, whatever driver it is.
        self.keys.add(self.key_id(volume))
        self.user.retype(volume, self.other_type)
        self.wait_for('it is plain', lambda: (
            not self.user.show(volume)['encrypted']
            and self.user.status(volume) == 'available'))
        attachment = self.attach(volume, self.here)
        self.assertIn(hashlib.sha256(self.content).hexdigest(),
                      self.checksum(attachment))
        self.detach(attachment)


class ThinEncryptedByCinderTest(EncryptedByCinderTest):

    volume_type = 'thin'
    other_type = 'local'
