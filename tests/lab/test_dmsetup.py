# SPDX-License-Identifier: Apache-2.0
"""What dmsetup says that the driver goes by."""

from cinder_localstor.node import dmsetup
from tests.lab import base

# Nodes that come and go while one command asks for all there are
COMES_AND_GOES = '''\
touch /run/passing
while test -e /run/passing; do
    for number in 1 2 3 4 5 6; do
        dmsetup create passing$number --noudevsync --table '0 8 zero'
    done
    dmsetup remove --noudevsync passing1 passing2 passing3 passing4 passing5 \
        passing6
done >/dev/null 2>&1 &
for look in $(seq 2000); do
    dmsetup %s >/dev/null 2>/run/words || break
done
rm /run/passing
wait
cat /run/words
'''


class WordsTest(base.LabTestCase):

    def test_node_that_goes_is_known_by_what_each_command_says(self):
        for command in ('info --columns', 'status --noflush', 'table'):
            words = self.nodes[0].run(['sh', '-c', COMES_AND_GOES % command],
                                      timeout=2 * base.PATIENCE).stdout
            self.assertRegex(words, dmsetup.GONE, command)
