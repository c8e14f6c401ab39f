// SPDX-License-Identifier: Apache-2.0
//! The runtime directory: how others find a hydrator, and how it finds the
//! device of its predecessor.

use std::io;
use std::path::{Path, PathBuf};

use anyhow::Context;

use crate::arguments::FrontendKind;

/// The control socket's name.
pub(crate) const CONTROL: &str = "control";
/// The name of the link to the device.
const DEVICE: &str = "device";
/// The name of the NBD socket.
const SOCKET: &str = "nbd";

/// A runtime directory.
pub(crate) struct Runtime {
    directory: PathBuf,
}

impl Runtime {
    /// Makes it, unless it is there.
    pub(crate) fn open(directory: &Path) -> anyhow::Result<Runtime> {
        std::fs::create_dir_all(directory)
            .with_context(|| format!("cannot make {}", directory.display()))?;
        Ok(Runtime {
            directory: directory.to_owned(),
        })
    }

    pub(crate) fn control(&self) -> PathBuf {
        self.directory.join(CONTROL)
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.directory.join(SOCKET)
    }

    /// The device of a predecessor: its kind and number.
    pub(crate) fn predecessor(&self) -> Option<(FrontendKind, u32)> {
        let target = std::fs::read_link(self.directory.join(DEVICE)).ok()?;
        let target = target.to_str()?;
        for (prefix, kind) in [
            ("/dev/ublkb", FrontendKind::Ublk),
            ("/dev/nbd", FrontendKind::Nbd),
        ] {
            if let Some(number) = target.strip_prefix(prefix) {
                return Some((kind, number.parse().ok()?));
            }
        }
        None
    }

    /// Shows the device to others, and to a successor.
    pub(crate) fn show(&self, device: &Path) -> anyhow::Result<()> {
        let draft = self.directory.join(format!("{DEVICE}.new"));
        let shown = self.directory.join(DEVICE);
        remove(&draft)?;
        std::os::unix::fs::symlink(device, &draft)
            .and_then(|()| std::fs::rename(&draft, &shown))
            .with_context(|| format!("cannot make {}", shown.display()))
    }

    /// Removes what is in it, and the directory if nothing else is.
    pub(crate) fn remove(&self) -> anyhow::Result<()> {
        for name in [DEVICE, CONTROL, SOCKET] {
            remove(&self.directory.join(name))?;
        }
        let _ = std::fs::remove_dir(&self.directory);
        Ok(())
    }
}

/// Removes a file that may not be there.
pub(crate) fn remove(path: &Path) -> anyhow::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_successor_finds_the_device() {
        let folder = tempfile::tempdir().unwrap();
        let runtime = Runtime::open(&folder.path().join("volume")).unwrap();
        assert_eq!(runtime.predecessor(), None);
        runtime.show(Path::new("/dev/ublkb7")).unwrap();
        assert_eq!(runtime.predecessor(), Some((FrontendKind::Ublk, 7)));
        runtime.show(Path::new("/dev/nbd12")).unwrap();
        assert_eq!(runtime.predecessor(), Some((FrontendKind::Nbd, 12)));
        runtime.show(Path::new("/run/x/nbd")).unwrap();
        assert_eq!(runtime.predecessor(), None);
        runtime.remove().unwrap();
        assert!(!folder.path().join("volume").exists());
    }
}
