// SPDX-License-Identifier: Apache-2.0
//! Marks of the kernel's devices that show a guest's content.
//!
//! Whatever looks into new block devices, like udev's rules for LVM and for
//! file systems, must keep away from these. A rule can tell them by a mark
//! that is there before the device has content: a link with the device's name
//! to the runtime directory of its volume. A mark whose volume is gone counts
//! for nothing, and udev's TEST does not see it.

use std::ffi::OsStr;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use anyhow::Context;

/// The marks of one volume.
pub(crate) struct Marks {
    // None: no marks are wanted.
    directory: Option<PathBuf>,
    volume: PathBuf,
}

impl Marks {
    /// In this directory, which is made if it is missing, for the volume of
    /// this runtime directory, which must be there.
    pub(crate) fn open(directory: Option<&Path>, runtime: &Path) -> anyhow::Result<Marks> {
        if let Some(directory) = directory {
            std::fs::create_dir_all(directory)
                .with_context(|| format!("cannot make {}", directory.display()))?;
        }
        let volume = std::fs::canonicalize(runtime)
            .with_context(|| format!("cannot find {}", runtime.display()))?;
        Ok(Marks {
            directory: directory.map(Path::to_owned),
            volume,
        })
    }

    /// Marks a device that may be another volume's as well; whether it is ours.
    pub(crate) fn claim(&self, device: &Path) -> io::Result<bool> {
        let Some(mark) = self.mark(device) else {
            return Ok(true);
        };
        loop {
            match symlink(&self.volume, &mark) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                made => return made.map(|()| true),
            }
            if self.is_ours(&mark) {
                return Ok(true);
            }
            if mark.exists() {
                return Ok(false);
            }
            remove(&mark)?;
        }
    }

    /// Marks a device that the kernel has given to us.
    pub(crate) fn take(&self, device: &Path) -> io::Result<()> {
        while !self.claim(device)? {
            if let Some(mark) = self.mark(device) {
                remove(&mark)?;
            }
        }
        Ok(())
    }

    /// Removes the volume's marks, all but that of this device.
    pub(crate) fn keep_only(&self, device: Option<&Path>) -> io::Result<()> {
        let Some(directory) = &self.directory else {
            return Ok(());
        };
        let kept = device.and_then(Path::file_name);
        for entry in std::fs::read_dir(directory)? {
            let mark = entry?.path();
            if mark.file_name() != kept && self.is_ours(&mark) {
                remove(&mark)?;
            }
        }
        Ok(())
    }

    fn mark(&self, device: &Path) -> Option<PathBuf> {
        let name: &OsStr = device.file_name()?;
        Some(self.directory.as_ref()?.join(name))
    }

    fn is_ours(&self, mark: &Path) -> bool {
        std::fs::read_link(mark).is_ok_and(|volume| volume == self.volume)
    }
}

/// Removes a mark that may not be there.
fn remove(mark: &Path) -> io::Result<()> {
    match std::fs::remove_file(mark) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn volume(folder: &Path, name: &str) -> Marks {
        let runtime = folder.join(name);
        std::fs::create_dir_all(&runtime).unwrap();
        Marks::open(Some(&folder.join("devices")), &runtime).unwrap()
    }

    #[test]
    fn one_volume_claims_a_device_until_it_is_gone() {
        let folder = tempfile::tempdir().unwrap();
        let first = volume(folder.path(), "first");
        let second = volume(folder.path(), "second");
        let device = Path::new("/dev/nbd3");
        assert!(first.claim(device).unwrap());
        assert!(first.claim(device).unwrap());
        assert!(!second.claim(device).unwrap());
        assert!(folder.path().join("devices/nbd3").exists());
        std::fs::remove_dir(folder.path().join("first")).unwrap();
        assert!(!folder.path().join("devices/nbd3").exists());
        assert!(second.claim(device).unwrap());
    }

    #[test]
    fn what_the_kernel_gives_is_ours() {
        let folder = tempfile::tempdir().unwrap();
        let first = volume(folder.path(), "first");
        let second = volume(folder.path(), "second");
        let device = Path::new("/dev/ublkb0");
        first.take(device).unwrap();
        second.take(device).unwrap();
        assert!(!first.claim(device).unwrap());
    }

    #[test]
    fn a_volume_removes_its_own_marks() {
        let folder = tempfile::tempdir().unwrap();
        let first = volume(folder.path(), "first");
        let second = volume(folder.path(), "second");
        let mark = |name: &str| folder.path().join("devices").join(name).exists();
        for device in ["/dev/nbd0", "/dev/nbd1"] {
            first.take(Path::new(device)).unwrap();
        }
        second.take(Path::new("/dev/nbd2")).unwrap();
        first.keep_only(Some(Path::new("/dev/nbd1"))).unwrap();
        assert_eq!(["nbd0", "nbd1", "nbd2"].map(mark), [false, true, true]);
        first.keep_only(None).unwrap();
        assert_eq!(["nbd0", "nbd1", "nbd2"].map(mark), [false, false, true]);
    }

    #[test]
    fn no_marks_are_made_unless_they_are_wanted() {
        let folder = tempfile::tempdir().unwrap();
        let marks = Marks::open(None, folder.path()).unwrap();
        assert!(marks.claim(Path::new("/dev/nbd0")).unwrap());
        marks.take(Path::new("/dev/nbd0")).unwrap();
        marks.keep_only(None).unwrap();
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
