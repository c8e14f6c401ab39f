# SPDX-License-Identifier: Apache-2.0
"""Options of the driver, in the section of each backend."""

import itertools

from cinder import objects

# Cinder's drivers name its objects as soon as they are imported.
objects.register_all()

from cinder.volume import configuration  # noqa: E402
from cinder.volume import driver  # noqa: E402
from cinder.volume.drivers import lvm  # noqa: E402
from oslo_config import cfg  # noqa: E402

# The volume_backend_name of a backend that has none
BACKEND_NAME = 'localstor'

LOCALSTOR_OPTS = [
    cfg.StrOpt('localstor_metadata_group',
               help='Volume group for the region maps of moving volumes, '
                    'best on a fast disk. Default: the volume_group.'),
    cfg.IntOpt('localstor_region_size',
               default=0, min=0, max=1048576,
               help='Size in KiB of the regions in which dm-clone keeps '
                    'track of a move: a power of two from 4 on. 0 chooses '
                    'by the size of the volume, 64 KiB at least. A move '
                    'keeps the size that it began with.'),
    cfg.IntOpt('localstor_hydration_threshold',
               default=16, min=1,
               help='How many batches of regions dm-clone copies at the same '
                    'time.'),
    cfg.IntOpt('localstor_hydration_batch',
               default=8, min=1,
               help='How many adjacent regions dm-clone copies in one go.'),
    cfg.StrOpt('localstor_data_path',
               default='auto',
               choices=[('auto', 'hydrator where it can run, else clone'),
                        ('hydrator', 'the native helper'),
                        ('clone', 'dm-clone')],
               help='What serves a volume while it arrives here. A move keeps '
                    'what it began with.'),
    cfg.StrOpt('localstor_transport',
               default='iscsi',
               choices=[('iscsi', 'by the target that target_helper names'),
                        ('nvme-tcp', 'NVMe/TCP by the kernel, and iSCSI '
                                     'between this node and one that has it '
                                     'not; the driver starts only where the '
                                     'kernel has it'),
                        ('auto', 'NVMe/TCP where both nodes have it, else '
                                 'iSCSI')],
               help='How the data of a volume travels to the node that it '
                    'moves to. It is NVMe/TCP only where kernels have it with '
                    'authentication of hosts. A move keeps what it began '
                    'with.'),
    cfg.PortOpt('localstor_nvme_port',
                default=4420,
                help='Port of the address target_ip_address at which moves '
                     'over NVMe/TCP find their source.'),
    cfg.IntOpt('localstor_hydration_rate',
               default=0, min=0,
               help='How many MiB per second arrive here at most, all volumes '
                    'together. 0 sets no limit. dm-clone does not heed it.'),
    cfg.IntOpt('localstor_max_moves',
               default=0, min=0,
               help='How many volumes are copied to this node at the same '
                    'time. Others that arrive are usable at once, too; the '
                    'copying waits for its turn. A volume whose source is '
                    'away does not count. 0 sets no limit.'),
    cfg.IntOpt('localstor_hydration_min_rate',
               default=10, min=1,
               help='How many MiB per second of a volume arrive here whatever '
                    'its guest does, so that every move ends. dm-clone does '
                    'not heed it.'),
    cfg.IntOpt('localstor_pool_limit',
               default=95, min=1, max=100,
               help='How full in percent a thin pool may get, its data or its '
                    'metadata, by volumes that arrive here. A move that needs '
                    'more is refused. When the pool is as full for another '
                    'reason, nothing is copied until there is space again; '
                    'guests go on.'),
    cfg.StrOpt('localstor_verify',
               default='off',
               choices=[('off', 'nothing'),
                        ('sample', '1 MiB of each 64 MiB'),
                        ('full', 'all of it')],
               help='How much of what is copied to this node is read again, '
                    'here and from the source, and compared before it counts '
                    'as arrived. What differs is copied again; if it differs '
                    'again, the move does not end. dm-clone can not do that: '
                    'unless it is off, the driver starts only where volumes '
                    'move by the native helper.'),
    cfg.IntOpt('localstor_source_timeout',
               default=0, min=0,
               help='Seconds after which a read of what has not arrived fails '
                    'while the source is away. 0 waits for ever. dm-clone '
                    'does not heed it. Encrypted volumes wait for ever, too: '
                    'Nova formats one that it can not read.'),
    cfg.IntOpt('localstor_poll_time',
               default=0, min=0, max=1000,
               help='Microseconds for which a native helper looks for what a '
                    'guest or a disk does next before it sleeps, while that '
                    'comes so fast. A processor of this node is busy '
                    'meanwhile; whether a guest is answered sooner depends '
                    'on disks and processors, so measure it. 0 always '
                    'sleeps.'),
    cfg.IntOpt('localstor_monitor_interval',
               default=5, min=1,
               help='Seconds between two looks at the running moves.'),
    cfg.IntOpt('localstor_command_timeout',
               default=60, min=1,
               help='Seconds after which an external command counts as '
                    'hanging and is ended.'),
    cfg.IntOpt('localstor_peer_timeout',
               default=50, min=1,
               help='Seconds to wait for an answer of a peer. Keep it below '
                    'rpc_response_timeout, so that the user gets our error '
                    'and not a time-out.'),
    cfg.DictOpt('localstor_host_map',
                default={},
                help='Cinder hosts of connectors that have another name: '
                     '"compute7.example.org:node7,10.0.0.7:node7", connector '
                     'host or ip on the left, host of the volume service on '
                     'the right. Connectors with an address of IPv6, which '
                     'has colons of its own, go by their host.'),
    cfg.StrOpt('localstor_unknown_host',
               default='remote',
               choices=[('remote', 'an ordinary remote connection; the '
                                   'volume stays where it is'),
                        ('refuse', 'an error')],
               help='What an instance gets on a host that has no backend of '
                    'this kind.'),
    cfg.BoolOpt('localstor_cross_az_attach',
                default=True,
                help='Whether a volume may follow its instance to a node '
                     'whose volume service is in another availability zone '
                     'than the volume, which belongs to that zone then. Set '
                     'it on all nodes to what cross_az_attach is in section '
                     '[cinder] of nova.conf, which Cinder can not read. Nova '
                     'checks it when a volume is attached; this one is '
                     'checked when an instance migrates, too.'),
    cfg.BoolOpt('localstor_online_extend',
                default=False,
                help='Whether a volume in use may be extended. Set it on '
                     'all nodes when all of them run localstor-nova-compute, '
                     'or a Nova that is patched: with a stock Nova the '
                     'volume grows, and the guest never sees it.'),
    cfg.StrOpt('localstor_no_space',
               default='error',
               choices=[('error', 'an error that names the space'),
                        ('remote', 'an ordinary remote connection; the '
                                   'volume stays where it is')],
               help='What an instance gets on a peer that has too little '
                    'space for the volume.'),
]

SCHEDULER_OPTS: list[cfg.Opt] = [
    cfg.FloatOpt('localstor_node_weight_multiplier',
                 default=10.0,
                 help='How much cinder-scheduler prefers the node that a '
                      "request names, beside 1.0 for the free space; 0 for "
                      'not at all. Needs LocalStorWeigher among '
                      'scheduler_default_weighers.'),
]

CINDER_OPTS = ('target_ip_address', 'target_helper', 'target_protocol',
               'target_port', 'target_prefix', 'volumes_dir',
               'iscsi_target_flags', 'iscsi_write_cache',
               'volume_clear', 'volume_clear_size', 'volume_clear_ionice',
               'reserved_percentage', 'max_over_subscription_ratio')
LVM_OPTS = ('volume_group', 'lvm_type', 'lvm_mirrors')


def driver_options() -> list[cfg.Opt]:
    """Our options and those of Cinder that the driver heeds."""
    cinder_opts = [opt for opt in itertools.chain(driver.volume_opts,
                                                  lvm.volume_opts)
                   if opt.name in CINDER_OPTS + LVM_OPTS]
    return LOCALSTOR_OPTS + cinder_opts


def register(conf: cfg.ConfigOpts = cfg.CONF) -> None:
    """Make the options known in the section that all backends share."""
    conf.register_opts(LOCALSTOR_OPTS, group=configuration.SHARED_CONF_GROUP)


def list_opts() -> list[tuple[str, list[cfg.Opt]]]:
    """For ``oslo-config-generator --namespace cinder_localstor``."""
    return [(configuration.SHARED_CONF_GROUP, LOCALSTOR_OPTS),
            ('DEFAULT', SCHEDULER_OPTS)]
