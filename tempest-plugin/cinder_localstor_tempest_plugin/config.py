# SPDX-License-Identifier: Apache-2.0
"""What tempest.conf says of a cloud with cinder-localstor."""

from oslo_config import cfg

group = cfg.OptGroup('localstor', title='Volumes of cinder-localstor')

options = [
    cfg.DictOpt('hosts', default={},
                help='Nodes that volumes move between: names as Cinder has '
                     'them before the "@", and addresses. With less than two '
                     'there are no tests.'),
    cfg.StrOpt('node_command', default='',
               help='Runs a shell command, which is added as the last word, '
                    'as root on a node: "ssh root@{address}" or "ssh {host} '
                    'sudo". Without it no test reads or writes.'),
    cfg.StrOpt('service_role', default='service',
               help='Role of the user whose token Cinder takes for that of a '
                    'service.'),
    cfg.IntOpt('arrival_timeout', default=600, min=1,
               help='Seconds in which all of a volume has arrived.'),
]
