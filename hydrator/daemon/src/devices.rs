// SPDX-License-Identifier: Apache-2.0
//! The kernel's devices of a move, as the kernel itself knows them.
//!
//! A device carries the identity of its move from the moment it exists: the
//! call that makes it says so. Whoever is killed right after that call has
//! leaked nothing, because a successor, or an abort, finds the device without
//! any record of ours.

use localstor_hydrator_frontends::{FrontendError, nbd, ublk};

use crate::arguments::{FrontendKind, MoveId};

/// A device: its kind, ublk or NBD, and its number.
pub(crate) type Device = (FrontendKind, u32);

/// What tells a move's device from others, as ublk keeps it.
pub(crate) fn ublk_identity(move_id: MoveId) -> u64 {
    let mut identity = [0; 8];
    identity.copy_from_slice(&move_id.0[..8]);
    u64::from_le_bytes(identity)
}

/// The same, as the kernel's NBD client keeps it.
pub(crate) fn nbd_identity(move_id: MoveId) -> String {
    format!("localstor-{move_id}")
}

/// Those of a move, which predecessors have left.
///
/// # Errors
/// That the kernel does not say.
pub(crate) fn of(move_id: MoveId) -> Result<Vec<Device>, FrontendError> {
    let ublk = ublk::of(ublk_identity(move_id))?;
    let nbd = nbd::of(&nbd_identity(move_id));
    let ublk = ublk.into_iter().map(|number| (FrontendKind::Ublk, number));
    let nbd = nbd.into_iter().map(|number| (FrontendKind::Nbd, number));
    Ok(ublk.chain(nbd).collect())
}

/// What else holds a block device: a device-mapper node, usually.
pub(crate) fn holder(device: &std::path::Path) -> Option<String> {
    let name = device.file_name()?.to_str()?;
    let holders = std::fs::read_dir(format!("/sys/class/block/{name}/holders")).ok()?;
    let holder = holders.filter_map(Result::ok).next()?;
    Some(holder.file_name().to_string_lossy().into_owned())
}

/// Removes a move's device, whose server died for good.
///
/// # Errors
/// That it is in use, and what the kernel says if it refuses.
pub(crate) fn remove((kind, number): Device, move_id: MoveId) -> anyhow::Result<()> {
    let device = match kind {
        FrontendKind::Ublk => ublk::path(number),
        _ => nbd::path(number),
    };
    if let Some(holder) = holder(&device) {
        anyhow::bail!("{} is in use by {holder}", device.display());
    }
    match kind {
        FrontendKind::Ublk => ublk::remove(number, ublk_identity(move_id))?,
        _ => nbd::remove(number, &nbd_identity(move_id))?,
    }
    Ok(())
}
