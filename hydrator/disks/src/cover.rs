// SPDX-License-Identifier: Apache-2.0
//! When one flush is enough for two disks.
//!
//! A flush of a block device makes durable whatever has completed on it before,
//! by whoever. A logical volume of plain mappings sends each flush to every
//! disk that it lies on; so it covers another volume, too, if that one lies on
//! no other disk.
//!
//! What is not understood covers nothing. That is every mapping of something
//! that is itself mapped or assembled: a thin pool gathers what it has to write
//! first, a mirror leaves out a leg that has failed.

use std::collections::BTreeSet;
use std::ffi::{CStr, CString};
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::path::{Path, PathBuf};

use rustix::fs::{RawDir, SeekFrom};

/// Length of what LVM calls a volume in device-mapper: the two ids of 32
/// characters each. A dash and a layer follow for what is not the whole volume.
const PLAIN: usize = "LVM-".len() + 64;

/// Room for the names of the disks that a volume lies on, in bytes.
const LISTING: usize = 4096;

/// A flush of one device makes durable what has completed on another.
pub struct Cover {
    mappings: [Mapping; 2],
}

/// What a device lies on.
struct Mapping {
    /// Whole disks, as directories of sysfs.
    disks: BTreeSet<PathBuf>,
    /// The directory that names what a logical volume lies on, and what it has
    /// named. A disk or a partition can't move.
    slaves: Option<(File, Vec<CString>)>,
}

impl Cover {
    /// Whether a flush of `device` covers `other`, which are the devices'
    /// numbers, major and minor; None unless that is known for sure. `sysfs`
    /// is where it is mounted.
    pub fn find(sysfs: &Path, device: (u32, u32), other: (u32, u32)) -> Option<Cover> {
        let directory = |(major, minor): (u32, u32)| {
            let link = sysfs.join(format!("dev/block/{major}:{minor}"));
            link.canonicalize().ok()
        };
        let (device, other) = (directory(device)?, directory(other)?);
        // The kernel drops flushes of a device that says it has no cache.
        let queue = whole(&device)?.join("queue/write_cache");
        if std::fs::read_to_string(queue).ok()?.trim() != "write back" {
            return None;
        }
        let mappings = [Mapping::read(&device)?, Mapping::read(&other)?];
        let [device, other] = &mappings;
        other
            .disks
            .is_subset(&device.disks)
            .then_some(Cover { mappings })
    }

    /// Whether both lie where they did. LVM moves a volume in several steps,
    /// with the old disk in all but the last: who asks before each flush sees
    /// the first of them.
    pub fn holds(&self) -> bool {
        self.mappings.iter().all(Mapping::is_unchanged)
    }
}

impl Mapping {
    fn read(device: &Path) -> Option<Mapping> {
        if !device.join("dm").exists() {
            return Some(Mapping {
                disks: BTreeSet::from([leaf(device)?]),
                slaves: None,
            });
        }
        let uuid = std::fs::read_to_string(device.join("dm/uuid")).ok()?;
        if !uuid.starts_with("LVM-") || uuid.trim_end().len() != PLAIN {
            return None;
        }
        let slaves = device.join("slaves");
        let directory = File::open(&slaves).ok()?;
        let mut names = Vec::new();
        each_name(&directory, |name| {
            names.push(name.to_owned());
            true
        })
        .ok()?;
        let disks = names
            .iter()
            .map(|name| leaf(&slaves.join(name.to_str().ok()?).canonicalize().ok()?))
            .collect::<Option<BTreeSet<_>>>()?;
        // Without any it is a volume of errors or zeros.
        (!disks.is_empty()).then_some(Mapping {
            disks,
            slaves: Some((directory, names)),
        })
    }

    fn is_unchanged(&self) -> bool {
        let Some((directory, names)) = &self.slaves else {
            return true;
        };
        let mut expected = names.iter();
        let same = each_name(directory, |name| {
            expected
                .next()
                .is_some_and(|expected| expected.as_c_str() == name)
        });
        same.unwrap_or(false) && expected.next().is_none()
    }
}

/// The disk behind a disk or a partition; None if it is not one, but made of
/// others.
fn leaf(device: &Path) -> Option<PathBuf> {
    let disk = whole(device)?;
    let slaves = std::fs::read_dir(disk.join("slaves"));
    let made_of_others = match slaves {
        Ok(mut slaves) => slaves.next().is_some(),
        Err(error) => error.kind() != io::ErrorKind::NotFound,
    };
    (!made_of_others && !disk.join("dm").exists()).then_some(disk)
}

/// The whole disk of a partition, or the device itself.
fn whole(device: &Path) -> Option<PathBuf> {
    let is_partition = device.join("partition").try_exists().ok()?;
    let disk = if is_partition {
        device.parent()?
    } else {
        device
    };
    Some(disk.to_owned())
}

/// Calls `look` with each name in a directory, until it says false; whether it
/// never has.
fn each_name(directory: &File, mut look: impl FnMut(&CStr) -> bool) -> io::Result<bool> {
    rustix::fs::seek(directory, SeekFrom::Start(0))?;
    let mut buffer = [MaybeUninit::uninit(); LISTING];
    let mut entries = RawDir::new(directory, &mut buffer);
    while let Some(entry) = entries.next() {
        let entry = entry?;
        let name = entry.file_name();
        if name != c"." && name != c".." && !look(name) {
            return Ok(false);
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    const DATA: (u32, u32) = (252, 3);
    const METADATA: (u32, u32) = (252, 4);
    const VOLUME: &str = "LVM-WzbsUM9h3T6L1DVHsjNXd8sPAqbXVkvLcFFVAbbJ2SsN0ZwvGYzZ1U8QgpkDoR4T";

    /// A sysfs of the test's own, with the disks vda and vdb and partitions of
    /// both.
    struct Sysfs(tempfile::TempDir);

    impl Sysfs {
        fn new() -> Sysfs {
            let sysfs = Sysfs(tempfile::tempdir().unwrap());
            fs::create_dir_all(sysfs.0.path().join("dev/block")).unwrap();
            for (disk, minor) in [("vda", 0), ("vdb", 16)] {
                sysfs.device(&format!("pci/{disk}"), (254, minor));
                for part in 1..3 {
                    let partition = format!("pci/{disk}/{disk}{part}");
                    sysfs.file(&format!("{partition}/partition"), "1");
                    sysfs.link((254, minor + part), &partition);
                }
            }
            sysfs
        }

        fn file(&self, name: &str, content: &str) {
            let path = self.0.path().join("devices").join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, format!("{content}\n")).unwrap();
        }

        fn link(&self, (major, minor): (u32, u32), device: &str) {
            let link = self.0.path().join(format!("dev/block/{major}:{minor}"));
            symlink(format!("../../devices/{device}"), link).unwrap();
        }

        fn device(&self, name: &str, number: (u32, u32)) {
            self.file(&format!("{name}/queue/write_cache"), "write back");
            fs::create_dir(self.0.path().join(format!("devices/{name}/slaves"))).unwrap();
            self.link(number, name);
        }

        /// A device of device-mapper over others, named from the devices'
        /// directory on.
        fn mapped(&self, number: (u32, u32), uuid: &str, slaves: &[&str]) {
            let name = format!("virtual/dm-{}", number.1);
            self.device(&name, number);
            self.file(&format!("{name}/dm/uuid"), uuid);
            slaves.iter().for_each(|slave| self.add(number, slave));
        }

        fn slave(&self, number: (u32, u32), slave: &str) -> PathBuf {
            let slaves = format!("devices/virtual/dm-{}/slaves", number.1);
            let name = Path::new(slave).file_name().unwrap();
            self.0.path().join(slaves).join(name)
        }

        fn add(&self, number: (u32, u32), slave: &str) {
            let target = Path::new("../../..").join(slave);
            symlink(target, self.slave(number, slave)).unwrap();
        }

        fn cover(&self) -> Option<Cover> {
            Cover::find(self.0.path(), DATA, METADATA)
        }
    }

    #[test]
    fn volumes_on_one_disk_need_one_flush() {
        let sysfs = Sysfs::new();
        sysfs.mapped(DATA, VOLUME, &["pci/vda"]);
        sysfs.mapped(METADATA, VOLUME, &["pci/vda"]);
        assert!(sysfs.cover().unwrap().holds());
    }

    #[test]
    fn a_partition_counts_as_its_disk() {
        let sysfs = Sysfs::new();
        sysfs.mapped(DATA, VOLUME, &["pci/vda/vda1"]);
        sysfs.mapped(METADATA, VOLUME, &["pci/vda/vda2"]);
        assert!(sysfs.cover().is_some());
        let both = |one, other| Cover::find(sysfs.0.path(), (254, one), (254, other)).is_some();
        assert!(both(1, 2));
        assert!(both(0, 1));
        assert!(!both(1, 17));
    }

    #[test]
    fn the_flush_must_reach_every_disk_of_the_other_volume() {
        let sysfs = Sysfs::new();
        sysfs.mapped(DATA, VOLUME, &["pci/vda", "pci/vdb"]);
        sysfs.mapped(METADATA, VOLUME, &["pci/vdb"]);
        assert!(sysfs.cover().is_some());
        let swapped = Cover::find(sysfs.0.path(), METADATA, DATA);
        assert!(swapped.is_none());
    }

    #[test]
    fn what_is_not_a_plain_volume_covers_nothing() {
        let snapshot = format!("{VOLUME}-real");
        for (data, metadata) in [
            (snapshot.as_str(), VOLUME),
            (VOLUME, snapshot.as_str()),
            ("CRYPT-LUKS2-0123", VOLUME),
            ("mpath-0123", VOLUME),
            ("", VOLUME),
        ] {
            let sysfs = Sysfs::new();
            sysfs.mapped(DATA, data, &["pci/vda"]);
            sysfs.mapped(METADATA, metadata, &["pci/vda"]);
            assert!(sysfs.cover().is_none(), "{data} and {metadata}");
        }
    }

    #[test]
    fn thin_volumes_and_mirrors_cover_nothing() {
        // The legs of a mirror look like volumes of their own.
        for below in [&format!("{VOLUME}-tpool"), VOLUME] {
            let sysfs = Sysfs::new();
            sysfs.mapped((252, 1), below, &["pci/vda"]);
            sysfs.mapped(DATA, VOLUME, &["virtual/dm-1"]);
            sysfs.mapped(METADATA, VOLUME, &["pci/vda"]);
            assert!(sysfs.cover().is_none(), "over {below}");
        }
    }

    #[test]
    fn a_disk_made_of_others_covers_nothing() {
        let sysfs = Sysfs::new();
        sysfs.device("virtual/md0", (9, 0));
        let slaves = sysfs.0.path().join("devices/virtual/md0/slaves");
        symlink("../../../pci/vda", slaves.join("vda")).unwrap();
        sysfs.mapped(DATA, VOLUME, &["virtual/md0"]);
        sysfs.mapped(METADATA, VOLUME, &["virtual/md0"]);
        assert!(sysfs.cover().is_none());
        assert!(Cover::find(sysfs.0.path(), (9, 0), (9, 0)).is_none());
    }

    #[test]
    fn volumes_without_a_disk_cover_nothing() {
        let sysfs = Sysfs::new();
        sysfs.mapped(DATA, VOLUME, &[]);
        sysfs.mapped(METADATA, VOLUME, &[]);
        assert!(sysfs.cover().is_none());
    }

    #[test]
    fn a_flush_that_the_kernel_drops_covers_nothing() {
        let sysfs = Sysfs::new();
        sysfs.mapped(DATA, VOLUME, &["pci/vda"]);
        sysfs.mapped(METADATA, VOLUME, &["pci/vda"]);
        sysfs.file("virtual/dm-3/queue/write_cache", "write through");
        assert!(sysfs.cover().is_none());
    }

    #[test]
    fn a_device_that_sysfs_does_not_know_covers_nothing() {
        let sysfs = Sysfs::new();
        sysfs.mapped(DATA, VOLUME, &["pci/vda"]);
        assert!(sysfs.cover().is_none());
    }

    #[test]
    fn a_volume_that_moves_is_noticed() {
        for number in [DATA, METADATA] {
            let sysfs = Sysfs::new();
            sysfs.mapped(DATA, VOLUME, &["pci/vda"]);
            sysfs.mapped(METADATA, VOLUME, &["pci/vda"]);
            let cover = sysfs.cover().unwrap();
            sysfs.add(number, "virtual/dm-9");
            assert!(!cover.holds());
            fs::remove_file(sysfs.slave(number, "virtual/dm-9")).unwrap();
            assert!(cover.holds());
            fs::remove_file(sysfs.slave(number, "pci/vda")).unwrap();
            assert!(!cover.holds());
        }
    }
}
