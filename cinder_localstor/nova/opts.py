# SPDX-License-Identifier: Apache-2.0
"""Options of local volumes in nova.conf."""

from oslo_config import cfg

GROUP = 'localstor'

# Tells LocalStorWeigher of cinder-scheduler which node a volume is made for
NODE_HINT = 'localstor:node'

LOCAL_VOLUME_OPTS = [
    cfg.StrOpt('volume_io',
               default='native',
               choices=[('native', "Linux's asynchronous I/O"),
                        ('io_uring', 'which kernel, QEMU and the security '
                                     'module have to allow'),
                        ('threads', "QEMU's pool of threads, as a stock "
                                    'Nova has it')],
               help='How QEMU reads and writes a local volume. A guest gets '
                    'it when its definition is made: with an attachment, a '
                    'hard reboot, a start.'),
    cfg.IntOpt('volume_timeout',
               default=300, min=0,
               help='Seconds in which the devices of local volumes have to '
                    'be there, all of them, from when nova-compute first '
                    'asks for one. When a node starts, cinder-volume makes '
                    'them. One that is asked for later has to be there.'),
]

SCHEDULER_OPTS = [
    cfg.FloatOpt('volume_weight_multiplier',
                 default=10.0,
                 help='How much nova-scheduler prefers the node that an '
                      "instance's local volumes are on, beside 1.0 for each "
                      "of Nova's own reasons; 0 for not at all. The metadata "
                      'volume_weight_multiplier of an aggregate goes before '
                      'it. Needs LocalVolumeWeigher.'),
]


def list_opts() -> list[tuple[str, list[cfg.Opt]]]:
    """For ``oslo-config-generator --namespace cinder_localstor.nova``."""
    return [(GROUP, LOCAL_VOLUME_OPTS + SCHEDULER_OPTS)]
