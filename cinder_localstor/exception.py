# SPDX-License-Identifier: Apache-2.0
"""Errors of the driver.

Each message names the object and says what to do about it.  They are Cinder
exceptions, so that the volume manager passes them on as they are.
"""

from cinder import exception
from cinder.i18n import _


class LocalStorException(exception.VolumeBackendAPIException):
    """Anything that the driver refuses or fails to do."""

    message = _("%(reason)s")


class CommandFailed(LocalStorException):
    """An external command failed; nothing is known of what it has done."""

    message = _("Command '%(command)s' on %(host)s failed: %(reason)s")


class CommandTimedOut(CommandFailed):
    """An external command did not end in its time and was ended."""

    message = _("Command '%(command)s' on %(host)s did not end within "
                "%(seconds)s seconds and was ended. Look for a hanging disk "
                "or a suspended device with 'dmsetup info'.")


class CommandStillRuns(CommandTimedOut):
    """A command of LVM did not end, and was not killed for it."""

    message = _("Command '%(command)s' on %(host)s did not end within "
                "%(seconds)s seconds, nor when it was asked to. It goes on as "
                "process %(pid)s: killed, it could leave devices suspended. "
                "Look for a hanging disk with 'dmesg' and 'cat "
                "/proc/%(pid)s/stack'.")


class VolumeGroupBusy(LocalStorException):
    message = _("Volume group '%(group)s' on %(host)s has been locked for "
                "%(seconds)d seconds by %(holder)s. Nothing is done there "
                "until it ends: killed, it could leave devices suspended. "
                "Look for a hanging disk with 'dmesg'.")


class OutputNotUnderstood(LocalStorException):
    """A tool printed something that its format does not allow."""

    message = _("Line %(line)r of '%(command)s' was not understood.")


class VolumeGroupMissing(LocalStorException):
    message = _("There is no volume group '%(group)s' on %(host)s. Create it "
                "with 'vgcreate %(group)s <disk>', or correct the option "
                "%(option)s.")


class VolumeGroupLost(LocalStorException):
    message = _("Volume group '%(group)s' was on %(host)s, and LVM does not "
                "find it any more: %(reason)s Do not make it anew, for its "
                "volumes may all be there. Look for its disk. Where LVM can't "
                "read its metadata, restore them with 'pvck --repair --file "
                "/etc/lvm/backup/%(group)s <disk>', and start cinder-volume "
                "again.")


class LVMLooksIntoVolumes(LocalStorException):
    message = _("LVM on %(host)s looks for volume groups on devices like "
                "%(path)s, where it would find those of guests. Admit only "
                "the node's own disks by the setting devices/global_filter of "
                "lvm.conf(5), which is now %(filters)s, or let LVM use a "
                "devices file, see lvmdevices(8).")


class PoolDoesNotZero(LocalStorException):
    message = _("Thin pool '%(pool)s' on %(host)s hands out blocks with what "
                "other volumes have left in them, so one tenant could read "
                "another's data. Run 'lvchange --zero y %(pool)s', and wipe "
                "or remove the volumes that were made in it before.")


class VolumeIsShared(LocalStorException):
    message = _("Volume %(volume_id)s is attached to another instance by now, "
                "and follows none of them. Attach it again, over the network.")


class WrongProperty(LocalStorException):
    message = _("Volume type %(volume_type)s can not be heeded: %(reason)s. "
                "Correct it with 'openstack volume type set --property', or "
                "take the property away with 'openstack volume type unset'.")


class NotEnoughSpace(LocalStorException):
    message = _("Volume group or pool '%(group)s' on %(host)s has %(free)s of "
                "the %(needed)s that '%(name)s' needs. Free some space, or "
                "extend the group with 'vgextend', a pool with 'lvextend'.")


class MetadataAreaFull(NotEnoughSpace):
    message = _("LVM's metadata area of volume group '%(group)s' on %(host)s "
                "has no room for '%(name)s': %(reason)s. Delete volumes, or "
                "add a disk with a larger area ('pvcreate --metadatasize "
                "64m', then 'vgextend') and let LVM use that alone "
                "('pvchange --metadataignore y' for the others).")


class DiskMissing(NotEnoughSpace):
    message = _("A disk of volume group '%(group)s' on %(host)s is missing, "
                "so LVM makes, extends and renames nothing there, '%(name)s' "
                "neither: %(reason)s. Look for it with 'pvs'. Bring it back "
                "('vgextend --restoremissing'), or give up what mirrored "
                "volumes had there ('vgreduce --removemissing --mirrorsonly "
                "--force'); see 'When a disk dies' in the documentation.")


class PoolIsNotMirrored(LocalStorException):
    message = _("lvm_mirrors is %(mirrors)d, and thin volumes of %(host)s are "
                "as their pool is: '%(pool)s' is not mirrored by the driver. "
                "Take the option away. To mirror the pool, let LVM do it: "
                "'lvconvert --type raid1 --mirrors %(mirrors)d' for "
                "'%(pool)s_tdata', and for '%(pool)s_tmeta'.")


class SnapshotsLeft(LocalStorException):
    message = _("Logical volume '%(group)s/%(name)s' stays: %(snapshots)s "
                "would be lost with it, as thick snapshots of it. Delete "
                "these snapshots first; one that is not Cinder's with "
                "'lvremove'.")


class OriginInUse(LocalStorException):
    message = _("Volume copy '%(name)s' is in use and thick snapshots lie on "
                "it (%(snapshots)s), so LVM can't extend it. Detach the "
                "volume, or delete its snapshots, and extend it then. "
                "Thin volumes (lvm_type = thin) have no such limit.")


class VolumeHasChanged(LocalStorException):
    message = _("Volume %(volume_id)s has grown, or has moved and come back, "
                "since a clone of it was begun on another node. Clone it "
                "again.")


class OriginIsRead(LocalStorException):
    message = _("Volume copy '%(name)s' can't grow while volumes arrive "
                "that were made from it, because LVM extends none with thick "
                "snapshots that are in use (%(snapshots)s). Extend it when "
                "they have arrived. Thin volumes (lvm_type = thin) have no "
                "such limit.")


class OriginArrives(OriginIsRead):
    message = _("Volume copy '%(name)s' can't grow before it has arrived, "
                "because thick snapshots lie on it. Extend it when "
                "'cinder-localstor status' shows no move of it any more. "
                "Thin volumes (lvm_type = thin) have no such limit.")


class StillArrives(LocalStorException):
    message = _("Copy '%(name)s' of volume %(volume_id)s has not got all of "
                "its content yet, so a snapshot of it would be wrong. Watch "
                "it with 'cinder-localstor status', and take the snapshot "
                "when it has arrived.")


class NotHeld(LocalStorException):
    message = _("On %(host)s, %(names)s could not be kept waiting until the "
                "snapshots of all volumes of the group were made, which may "
                "take %(seconds)d seconds. So they are not of one moment, and "
                "there are none. Take them again when the node has less to "
                "do, or of a smaller group; look for a hanging disk with "
                "'dmesg'.")


class AlreadyThere(LocalStorException):
    message = _("Snapshot '%(name)s' of volume %(volume_id)s is there "
                "already, and not of the moment of the others of its group. "
                "Delete the snapshot of the group, and take another.")


class SourceBusy(LocalStorException):
    message = _("Volume copy '%(name)s' waits for %(count)d regions of the "
                "node that it arrives from, so no snapshot of it is taken. "
                "Take it when that node answers, or when the volume has "
                "arrived. 'cinder-localstor status' shows both.")


class SnapshotArrives(exception.SnapshotIsBusy):
    message = _("Snapshot %(snapshot_id)s is as it was, because it was taken "
                "while its volume arrived, and has not got all of its content "
                "yet. Unmanage it when 'cinder-localstor status' shows no "
                "move of it any more.")


class SnapshotAway(exception.SnapshotIsBusy):
    message = _("Snapshot %(snapshot_id)s lies on %(host)s, whose "
                "cinder-volume is down. It is as it was; %(action)s it when "
                "that is up again.")


class SnapshotsRemain(exception.VolumeIsBusy):
    message = _("Volume %(volume_id)s is as it was, because there are "
                "snapshots of it still: %(snapshots)s. Delete these first; "
                "where that fails, the snapshot's messages tell why.")


class SnapshotIsRead(LocalStorException):
    message = _("Snapshot '%(name)s' stays: a volume that was made from it "
                "still reads it (%(reader)s). It is deleted when all of that "
                "has arrived.")


class SnapshotInvalid(LocalStorException):
    message = _("Snapshot '%(group)s/%(name)s' is invalid: its space was full "
                "or could not be written (look with 'dmesg'), or it was being "
                "deleted. What it had is lost, so nothing can be made from "
                "it. Delete it.")


class SnapshotLost(LocalStorException):
    message = _("There is nothing of snapshot %(snapshot_id)s on any node: "
                "it was never taken, or is being deleted. Delete it.")


class VolumeHasGrown(exception.InvalidVolume):
    message = _("Volume %(volume_id)s has grown to %(size)d GiB since a clone "
                "of it of %(asked)d GiB was asked for. Clone it again.")


class SnapshotUncertain(LocalStorException):
    message = _("Snapshot %(snapshot_id)s lies on %(host)s, which was asked "
                "to %(action)s it and did not answer (%(reason)s). When it is "
                "up again, have an operator say 'openstack snapshot set "
                "--state error %(snapshot_id)s', and %(action)s it again.")


class LogicalVolumeMissing(LocalStorException):
    message = _("There is no logical volume '%(group)s/%(name)s' on "
                "%(host)s. Compare 'lvs %(group)s' with "
                "'cinder-localstor status'.")


class GivenUp(LocalStorException):
    message = _("The extension of volume %(volume_id)s to %(size)d GiB was "
                "asked for so long ago that it has been given up. Set the "
                "volume's state back with 'openstack volume set --state', "
                "and extend it again.")


class RevertGivenUp(LocalStorException):
    message = _("Volume %(volume_id)s is not reverted to snapshot "
                "%(snapshot_id)s: that was asked for so long ago that it has "
                "been given up. It is %(status)s, and as it was. Ask again.")


class LogicalVolumeInactive(LocalStorException):
    message = _("Logical volume '%(group)s/%(name)s' of volume %(volume_id)s "
                "is not active, so it has no handle. 'lvchange --activate y "
                "%(group)s/%(name)s' tells why: when it says 'No data "
                "available', the thin pool has lost it in a power cut. Then "
                "delete the volume, or restore it from a backup.")


class CopyLost(LocalStorException):
    # It has to fit into a row of metadata.
    message = _("Copy '%(group)s/%(name)s' is not active ('lvchange "
                "--activate y' tells why). It may hold what a guest wrote, so "
                "none is made anew. What was before is on %(source)s.")


class NoDataPath(LocalStorException):
    message = _("The kernel of %(host)s has no device-mapper target "
                "'%(target)s', so volumes could not move there. Install a "
                "kernel that has the module dm-%(target)s, or run "
                "'modprobe dm-%(target)s' to see why it does not load.")


class HydratorMissing(NoDataPath):
    message = _("%(host)s can't run localstor-hydrator: %(reason)s. Install "
                "it with 'pip install cinder-localstor[hydrator]', or set "
                "localstor_data_path = clone.")


class NoUserBlockDevices(NoDataPath):
    message = _("The kernel of %(host)s has neither ublk nor nbd, so "
                "localstor-hydrator can't show a device there. Install a "
                "kernel that has the module ublk_drv or nbd, or set "
                "localstor_data_path = clone.")


class NotVerifiable(NoDataPath):
    message = _("localstor_verify = %(verify)s wants what arrives to be "
                "compared with the source, but volumes would move here by "
                "%(engine)s, which can't do that. Set localstor_verify = off, "
                "or let them move by the native helper "
                "(localstor_data_path = hydrator tells what it lacks).")


class NoTransport(LocalStorException):
    message = _("The kernel of %(host)s can't move volumes over "
                "%(transport)s: %(reason)s. Set localstor_transport = auto to "
                "use it where it can be, or iscsi.")


class BufferedExport(LocalStorException):
    message = _("Backend '%(backend)s' would export its volumes through the "
                "page cache, and a reader could see old data. Set "
                "iscsi_target_flags = direct in its section.")


class StaleSession(LocalStorException):
    message = _("Device %(device)s on %(host)s answers with serial "
                "'%(found)s' where volume copy '%(expected)s' is expected. "
                "An old session is in the way: log out of it with "
                "'iscsiadm -m node -T %(iqn)s --logout', or of an nqn with "
                "'nvme disconnect -n %(iqn)s', and attach again.")


class SourceUnreachable(LocalStorException):
    message = _("%(host)s can't reach the source copy '%(iqn)s' at "
                "%(portal)s: %(reason)s. Check that the node is up and that "
                "port is open between the two nodes.")


class PeerDown(LocalStorException):
    message = _("Peer %(peer)s does not answer (%(reason)s), which %(host)s "
                "asks about %(about)s. Start cinder-volume there. Attach "
                "again then what could not be attached; what has begun goes "
                "on by itself.")


class PeerDisabled(LocalStorException):
    message = _("Volume %(volume_id)s stays on %(host)s: the volume service "
                "of %(peer)s is disabled (%(reason)s), so no volume moves "
                "there. Start the instance on another node, or have an "
                "operator enable it with 'openstack volume service set "
                "--enable %(peer)s cinder-volume'.")


class PeerInAnotherZone(LocalStorException):
    message = _("Volume %(volume_id)s stays on %(host)s: it is in "
                "availability zone '%(zone)s', and %(peer)s is in "
                "'%(other)s'. Start the instance on a node of its zone; or "
                "let volumes cross zones with localstor_cross_az_attach = "
                "true.")


class PeerFailed(LocalStorException):
    """A peer said no; `kind` is the name of its error's class."""

    message = _("Peer %(peer)s could not do '%(step)s' for %(about)s: "
                "%(reason)s")

    def __init__(self, message=None, kind: str = '', **kwargs) -> None:
        super().__init__(message, **kwargs)
        self.kind = kind


def kind_of(error: Exception) -> type[Exception]:
    """The class of an error: of the peer's own where a peer said no."""
    kind = globals().get(getattr(error, 'kind', ''))
    return kind if isinstance(kind, type) else type(error)


class UnknownHost(exception.InvalidConnectorException):
    message = _("Connector of host '%(host)s' (ip %(ip)s) belongs to no "
                "%(backend)s backend. Known are: %(known)s. Run "
                "cinder-volume with this backend there, name the host in "
                "localstor_host_map, or set localstor_unknown_host = remote.")


class InvalidConnector(exception.InvalidConnectorException):
    message = _("The connector names neither a host nor an ip, so volume "
                "can't be brought there. Attach with a complete connector "
                "(os-brick's get_connector_properties gives one).")


class VolumeIsMoving(exception.InvalidVolume):
    message = _("Volume %(volume_id)s is on its way to %(destination)s "
                "(move %(move_id)s, %(state)s). You can %(action)s when "
                "%(when)s. Watch it with 'cinder-localstor status --watch', "
                "and look for an attachment that nobody uses with 'cinder "
                "attachment-list'.")


class VolumeIsDiscarded(exception.InvalidVolume):
    message = _("Volume %(volume_id)s was deleted while it moved, and its "
                "copies are being removed (move %(move_id)s): you can't "
                "%(action)s any more. Delete it again if it is still shown.")


class DeletedTooEarly(exception.VolumeIsBusy):
    message = _("Volume %(volume_id)s %(reason)s. It is as it was; delete it "
                "again.")


class SnapshotOnItsWay(DeletedTooEarly):
    message = _("Volume %(volume_id)s is as it was, because a snapshot of it "
                "still arrives with it, or is being deleted. Delete the "
                "volume again when 'cinder-localstor status' shows no move "
                "of it any more.")


class UnmanagedTooEarly(exception.VolumeIsBusy):
    message = _("Volume %(volume_id)s %(reason)s, so it is as it was. "
                "Unmanage it again when 'cinder-localstor status' shows no "
                "move of it.")


class VolumeIsRead(exception.VolumeIsBusy):
    message = _("Volume %(volume_id)s is as it was, because volumes that were "
                "made from it still read it (%(snapshots)s). Unmanage it when "
                "these have arrived.")


class SnapshotElsewhere(exception.SnapshotIsBusy):
    message = _("Snapshot %(snapshot_id)s lies on %(host)s, whose "
                "cinder-volume is of an earlier release and unmanages none "
                "for another node. It is as it was. Upgrade that, and "
                "unmanage it then.")


class SnapshotIsNeeded(exception.SnapshotIsBusy):
    message = _("Snapshot %(snapshot_id)s is as it was, because a volume that "
                "was made from it still reads it. Unmanage it when that has "
                "arrived.")


class NotManageable(exception.ManageExistingInvalidReference):
    message = _("Logical volume '%(group)s/%(name)s' on %(host)s is as it "
                "was, and Cinder can't manage it: %(reason)s.")


class VolumeIsBound(exception.InvalidVolume):
    message = _("Volume %(volume_id)s stays on %(host)s as long as it is in "
                "a group, or Cinder migrates it. Take it out of its group, or "
                "wait for the migration, and attach it again.")


class AttachmentUnderWay(exception.InvalidVolume):
    message = _("Volume %(volume_id)s has %(count)d attachments without a "
                "host, and one of them was given a connection on %(host)s. "
                "Attach it again when 'openstack volume attachment list' "
                "shows the host of that one, which 'openstack volume "
                "attachment set --host' gives it where nobody else does; or "
                "delete an attachment that nobody uses.")


class VolumeConnectedElsewhere(exception.InvalidVolume):
    message = _("Volume %(volume_id)s has a remote connection to %(host)s, "
                "so it can't move now. Close that connection (a backup, an "
                "image upload or an attachment) and attach again.")


class VolumeInUse(exception.VolumeIsBusy):
    message = _("Volume copy '%(volume_name)s' is still open on %(host)s. "
                "Find its user with 'lsof %(device)s' and "
                "'dmsetup ls --tree'.")


class MoveChanged(LocalStorException):
    """Somebody else took the move to another state in the meantime."""

    message = _("Move %(move_id)s is no longer '%(state)s'.")


class StepTooLate(LocalStorException):
    message = _("Move %(move_id)s is %(state)s and can't do '%(steps)s' any "
                "more. A late request is refused; nothing is to be done.")


class NoSuchMove(LocalStorException):
    message = _("There is no move %(move_id)s: it has ended. "
                "'cinder-localstor status' shows those that run.")


class NotAbandoned(LocalStorException):
    message = _("Move %(move_id)s (%(state)s) can't go on without "
                "%(host)s: %(reason)s.")


class NotDisabled(LocalStorException):
    message = _("%(host)s is not drained: it would take new volumes "
                "meanwhile. Disable its service first, with 'openstack volume "
                "service set --disable --disable-reason <why> %(host)s "
                "cinder-volume'.")


class NotUp(LocalStorException):
    message = _("%(host)s is not drained: its cinder-volume has to be up to "
                "hand its volumes out. Start it. Where the node is lost, its "
                "volumes are, too.")


class NoScheduler(LocalStorException):
    message = _("Nobody says where volumes can go: %(reason)s. Look whether "
                "cinder-scheduler and the message bus are up.")


class NoSuchBackend(LocalStorException):
    message = _("There is no backend %(name)s of this driver on this node, "
                "but %(known)s. See enabled_backends of cinder.conf.")


class NotLost(LocalStorException):
    message = _("%(host)s is not given up: %(reason)s.")


class NotWanted(LocalStorException):
    message = _("Nobody waits for volume %(volume_id)s at %(peer)s any more, "
                "so it stays on %(host)s. Attach it again.")


class VolumeElsewhere(exception.InvalidVolume):
    message = _("Volume %(volume_id)s lives on %(host)s by now, not on "
                "%(asked)s, which was asked. Attach it again.")


class MetadataMissing(LocalStorException):
    message = _("The region map '%(name)s' of move %(move_id)s is gone from "
                "%(host)s. What has arrived of the volume is unknown, so its "
                "handle is not built: nothing is overwritten. Bring the "
                "logical volume back before the volume is used.")


class EngineFailed(LocalStorException):
    message = _("The %(engine)s under %(name)s (move %(move_id)s) on %(host)s "
                "has failed and accepts no more writes: its region map or "
                "its disk can't be written. Look for disk errors with "
                "'dmesg', mend them, then restart cinder-volume after "
                "'dmsetup remove' of the handle and the engine's node.")


class HandleMissing(LocalStorException):
    message = _("Volume copy '%(name)s' has no handle on this node, so it can "
                "be neither attached nor exported. 'cinder-localstor status' "
                "tells what is wrong with it, or what its move waits for.")


class RequestsWait(LocalStorException):
    message = _("%(count)d requests to volume copy '%(name)s' wait for the "
                "node that it arrives from. Its export stays until they are "
                "answered: the target daemon would wait for them, and with "
                "it every other export of this node.")


class GenerationTooOld(LocalStorException):
    message = _("Logical volume '%(name)s' on %(host)s holds generation "
                "%(found)s of volume %(volume_id)s, the present one is "
                "%(expected)s. It is not activated. Keep it: it may be the "
                "only copy there is. Look with 'cinder-localstor status' on "
                "all nodes for the present one.")


class BlockSizesDiffer(LocalStorException):
    message = _("Volume group '%(group)s' on %(host)s has logical blocks of "
                "%(found)s bytes, the volume's are %(expected)s. The volume "
                "can't move there.")


class DatabaseUnreadable(LocalStorException):
    message = _("Cinder's database can't be read: %(reason)s. Check that it "
                "is up, and the option connection in section [database] of "
                "cinder's configuration.")
