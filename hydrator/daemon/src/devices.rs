// SPDX-License-Identifier: Apache-2.0
//! The kernel's devices of a move, as the kernel itself knows them.
//!
//! A device carries the identity of its move from the moment it exists: the
//! call that makes it says so. Whoever is killed right after that call has
//! leaked nothing, because a successor, or an abort, finds the device without
//! any record of ours.

use std::path::Path;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use localstor_hydrator_frontends::{FrontendError, nbd, ublk};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use crate::arguments::{FrontendKind, MoveId};

/// How long it may take to open a device whose server lives.
const CLAIM: Duration = Duration::from_secs(2);

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
pub(crate) fn holder(device: &Path) -> Option<String> {
    let name = device.file_name()?.to_str()?;
    let holders = std::fs::read_dir(format!("/sys/class/block/{name}/holders")).ok()?;
    let holder = holders.filter_map(Result::ok).next()?;
    Some(holder.file_name().to_string_lossy().into_owned())
}

/// Refuses a device that somebody uses alone: device-mapper, a file system,
/// LVM, swap, or whoever else has opened it with `O_EXCL`.
///
/// # Errors
/// That it is in use.
pub(crate) fn require_unused(device: &Path) -> anyhow::Result<()> {
    let shown = device.display();
    if let Some(holder) = holder(device) {
        anyhow::bail!("{shown} is in use by {holder}");
    }
    // Who opens a device first may have to wait for its partition table, which
    // nobody reads if its server is dead. The claim comes before that: who
    // waits for so long has got it.
    let (tell, told) = mpsc::channel();
    let path = device.to_owned();
    thread::spawn(move || {
        let flags = OFlags::RDONLY | OFlags::EXCL | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let _ = tell.send(rustix::fs::open(path, flags, Mode::empty()).map(drop));
    });
    match told.recv_timeout(CLAIM) {
        Ok(Err(Errno::BUSY)) => {
            anyhow::bail!("{shown} is in use: it is mounted, or something else has it for itself")
        }
        _ => Ok(()),
    }
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
    require_unused(&device)?;
    match kind {
        FrontendKind::Ublk => ublk::remove(number, ublk_identity(move_id))?,
        _ => nbd::remove(number, &nbd_identity(move_id))?,
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_device_is_in_use_as_long_as_somebody_has_it_for_himself() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("disk");
        std::fs::write(&file, vec![0; 1 << 20]).unwrap();
        let losetup = |arguments: &[&str]| {
            let output = Command::new("losetup").args(arguments).arg(&file).output();
            let output = output.ok().filter(|output| output.status.success())?;
            Some(String::from_utf8(output.stdout).unwrap())
        };
        let Some(device) = losetup(&["--find", "--show"]) else {
            eprintln!("not tried: it takes a loop device, and root");
            return;
        };
        let device = Path::new(device.trim_end());
        let open = |flags| {
            let flags = OFlags::RDONLY | OFlags::CLOEXEC | flags;
            rustix::fs::open(device, flags, Mode::empty())
        };
        let other = open(OFlags::empty()).unwrap();
        assert!(require_unused(device).is_ok());
        let user = open(OFlags::EXCL).unwrap();
        let complaint = require_unused(device).unwrap_err().to_string();
        assert!(complaint.contains("is in use"), "{complaint}");
        drop((user, other));
        // What another test starts has it, too, until it runs its program.
        let is_unused = || require_unused(device).is_ok();
        let mut looks = (0..100).map(|_| thread::sleep(Duration::from_millis(10)));
        assert!(is_unused() || looks.any(|()| is_unused()));
        let detached = Command::new("losetup").arg("--detach").arg(device).status();
        assert!(detached.unwrap().success());
        assert!(require_unused(Path::new("/dev/no-such-device")).is_ok());
    }
}
