// SPDX-License-Identifier: Apache-2.0
//! The program: init of an instance.  It never returns while all is well; when
//! it does, the kernel panics.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};
use std::{process, thread};

use localstor_lab_guest::arrival;
use localstor_lab_guest::block::Block;
use localstor_lab_guest::disk::Disk;
use localstor_lab_guest::report::Report;
use localstor_lab_guest::zone::{Device, Trouble};
use rustix::fs::OFlags;
use rustix::ioctl::{Opcode, Setter, ioctl, opcode};
use rustix::mount::{MountFlags, mount};
use rustix::system::finit_module;

/// Between two stamps of a disk: a guest shares a translated CPU with others.
const PACE: Duration = Duration::from_millis(20);
/// Between two looks for disks, and between two reports.
const INTERVAL: Duration = Duration::from_secs(1);
/// Nova keeps what is said here, whatever the kernel's arguments are.
const CONSOLE: &str = "/dev/ttyS0";
/// What fstrim comes to; not with fallocate, which makes zeros of it.
const BLKDISCARD: Opcode = opcode::none(0x12, 119);
/// Until a disk that is seen can be opened.
const ARRIVAL: Duration = Duration::from_secs(60);
/// Until a disk that fails is seen to be gone.
const DEPARTURE: Duration = Duration::from_secs(5);

struct Node(File);

impl Device for Node {
    fn read(&self, offset: u64) -> io::Result<Block> {
        let mut block = Block::default();
        self.0.read_exact_at(&mut block.0, offset)?;
        Ok(block)
    }

    fn write(&self, offset: u64, block: &Block) -> io::Result<()> {
        self.0.write_all_at(&block.0, offset)
    }

    fn flush(&self) -> io::Result<()> {
        self.0.sync_data()
    }

    fn discard(&self, offset: u64, length: u64) -> io::Result<()> {
        // SAFETY: BLKDISCARD (linux/fs.h) reads two numbers of 64 bits, a start
        // and a length in bytes, and changes nothing in memory.
        #[allow(unsafe_code)]
        unsafe {
            let request = Setter::<BLKDISCARD, [u64; 2]>::new([offset, length]);
            Ok(ioctl(&self.0, request)?)
        }
    }
}

fn main() -> io::Result<()> {
    for (kind, place) in [("devtmpfs", "/dev"), ("proc", "/proc"), ("sysfs", "/sys")] {
        mount(kind, place, kind, MountFlags::empty(), None)?;
    }
    load_modules(Path::new("/modules"))?;
    let console = Arc::new(Mutex::new(File::options().write(true).open(CONSOLE)?));
    let used = Arc::new(Mutex::new(BTreeSet::new()));
    loop {
        for disk in disks()? {
            if locked(&used).insert(disk.clone()) {
                let (console, used) = (Arc::clone(&console), Arc::clone(&used));
                thread::spawn(move || {
                    use_disk(&disk, &console);
                    locked(&used).remove(&disk);
                });
            }
        }
        thread::sleep(INTERVAL);
    }
}

fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Load all that is in a folder, in the order of the names.
fn load_modules(folder: &Path) -> io::Result<()> {
    let mut paths = fs::read_dir(folder)?
        .map(|entry| Ok(entry?.path()))
        .collect::<io::Result<Vec<PathBuf>>>()?;
    paths.sort();
    for path in paths {
        finit_module(File::open(path)?, c"", 0)?;
    }
    Ok(())
}

/// Names of all disks that the host has plugged in.
fn disks() -> io::Result<Vec<String>> {
    Ok(fs::read_dir("/sys/block")?
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| name.starts_with("vd"))
        .collect())
}

fn of_disk(disk: &str, attribute: &str) -> io::Result<String> {
    let text = fs::read_to_string(Path::new("/sys/block").join(disk).join(attribute))?;
    Ok(text.trim().to_string())
}

/// Bytes.
fn size_of(disk: &str) -> io::Result<u64> {
    let sectors: u64 = of_disk(disk, "size")?
        .parse()
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
    Ok(sectors * 512)
}

fn identity() -> u64 {
    let mut bytes = [0; 8];
    // Without it all disks have the same: that is less, not wrong.
    let _ = File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes));
    u64::from_le_bytes(bytes)
}

/// Use a disk until it is gone; when it is wrong, or memory is, everything ends.
fn use_disk(disk: &str, console: &Mutex<File>) {
    let say = |report: Report<'_>| {
        let _ = locked(console).write_all(report.line().as_bytes());
    };
    let serial = of_disk(disk, "serial").unwrap_or_default();
    let serial = serial.as_str();
    let Err(trouble) = write_stamps(disk, serial, &say);
    if matches!(trouble, Trouble::Disk(_)) && is_gone(disk) {
        return say(Report::Gone { disk, serial });
    }
    let (is_memory, why) = match trouble {
        Trouble::Disk(error) => (false, error.to_string()),
        Trouble::Wrong(text) => (false, text),
        Trouble::Memory(text) => (true, text),
    };
    let why = why.as_str();
    say(if is_memory {
        Report::Forgotten { disk, serial, why }
    } else {
        Report::Wrong { disk, serial, why }
    });
    process::exit(1);
}

/// Goes on until something is wrong with the disk.
fn write_stamps(
    disk: &str,
    serial: &str,
    say: &impl Fn(Report<'_>),
) -> Result<Infallible, Trouble> {
    let node = arrival::open(
        || {
            File::options()
                .read(true)
                .write(true)
                .custom_flags(OFlags::DIRECT.bits() as i32)
                .open(Path::new("/dev").join(disk))
        },
        ARRIVAL,
    )?;
    let mut size = size_of(disk)?;
    let mut used = Disk::new(Node(node));
    let before = used.use_all(size, identity)?;
    say(Report::Found {
        disk,
        serial,
        size,
        before: &before,
        at: SystemTime::UNIX_EPOCH
            .elapsed()
            .map_or(0, |since| since.as_secs()),
    });
    loop {
        let reported = Instant::now();
        while reported.elapsed() < INTERVAL {
            used.step()?;
            thread::sleep(PACE);
        }
        say(Report::Alive {
            disk,
            serial,
            stamps: used.stamps(),
        });
        let now = size_of(disk)?;
        if now != size {
            size = now;
            used.use_all(size, identity)?;
            say(Report::Resized { disk, serial, size });
            if of_disk(disk, "queue/discard_max_bytes")? != "0" {
                used.trim()?;
                say(Report::Trimmed { disk, serial });
            }
        }
    }
}

/// Whether the host has taken a disk away, which may be seen a little later.
fn is_gone(disk: &str) -> bool {
    let failed = Instant::now();
    while failed.elapsed() < DEPARTURE {
        if !Path::new("/sys/block").join(disk).exists() {
            return true;
        }
        thread::sleep(PACE);
    }
    false
}
