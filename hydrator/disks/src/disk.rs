// SPDX-License-Identifier: Apache-2.0
//! A block device, or a file in tests, used with O_DIRECT only.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use io_uring::{opcode, squeue, types};
use rustix::fs::{FileType, FlockOperation, Mode, OFlags, major, minor};
use tracing::info;

use crate::cover::Cover;
use crate::memory::Span;
use crate::ring::{Ring, Token};

/// `BLKSSZGET` of linux/fs.h: the size of a logical block, in bytes.
const LOGICAL_BLOCK: libc::c_ulong = 0x1268;
/// `BLKGETSIZE64` of linux/fs.h: the size of the device, in bytes.
const SIZE: libc::c_ulong = 0x8008_1272;

/// `BLOCK_URING_CMD_DISCARD` of linux/blkdev.h since Linux 6.12.
const COMMAND_DISCARD: u32 = 0x1200;

/// How long the lock of a process that has just ended may be kept by its ring.
const RECENT: Duration = Duration::from_secs(1);

/// What goes wrong when a disk is opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// It is not there, or may not be used.
    #[error("cannot open {path}: {cause}")]
    Open {
        /// The disk.
        path: PathBuf,
        /// What the kernel said.
        cause: io::Error,
    },
    /// It is neither a block device nor a file.
    #[error("{path} is neither a block device nor a file")]
    Kind {
        /// The disk.
        path: PathBuf,
    },
    /// Another process holds its lock.
    #[error(
        "{path} is in use: another process has kept it locked for {seconds} s; \
         is a hydrator running for this volume?"
    )]
    Locked {
        /// The disk.
        path: PathBuf,
        /// How long we have waited, in seconds.
        seconds: u64,
    },
}

/// What a disk may be used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reading only; others may use it.
    ReadOnly,
    /// Reading only, while no hydrator uses it.
    Offline,
    /// Reading and writing, as the only hydrator that does, which waits as long
    /// as told for the one before.
    ///
    /// The lock goes with the open file, and the ring of a killed process lets
    /// go of the file when its last request is done: whoever gets the lock
    /// knows that no write of a predecessor is still on its way.
    Exclusive(Duration),
}

enum Handle {
    Fixed(types::Fixed),
    Plain(types::Fd),
}

/// A disk that is open.
pub struct Disk {
    path: PathBuf,
    handle: Handle,
    // Closes it at the end, and with it gives up the lock.
    file: File,
    size: u64,
    logical_block: u32,
    // Of a block device: major and minor.
    number: Option<(u32, u32)>,
}

/// Builds an operation for a registered file or a plain descriptor.
macro_rules! on {
    ($disk:expr, |$target:ident| $entry:expr) => {
        match $disk.handle {
            Handle::Fixed($target) => $entry,
            Handle::Plain($target) => $entry,
        }
    };
}

impl Disk {
    /// Opens a disk and registers it with the ring.
    pub fn open(path: &Path, access: Access, ring: &mut Ring) -> Result<Disk, OpenError> {
        let failed = |cause: io::Error| OpenError::Open {
            path: path.to_owned(),
            cause,
        };
        let mode = match access {
            Access::ReadOnly | Access::Offline => OFlags::RDONLY,
            Access::Exclusive(_) => OFlags::RDWR,
        };
        let file: File =
            rustix::fs::open(path, mode | OFlags::DIRECT | OFlags::CLOEXEC, Mode::empty())
                .map_err(|error| failed(error.into()))?
                .into();
        match access {
            Access::ReadOnly => {}
            Access::Offline => lock(&file, path, RECENT)?,
            Access::Exclusive(patience) => lock(&file, path, patience)?,
        }
        let status = rustix::fs::fstat(&file).map_err(|error| failed(error.into()))?;
        let kind = FileType::from_raw_mode(status.st_mode);
        let number =
            (kind == FileType::BlockDevice).then(|| (major(status.st_rdev), minor(status.st_rdev)));
        let (size, logical_block) = match kind {
            FileType::BlockDevice => geometry(&file).map_err(failed)?,
            FileType::RegularFile => (u64::try_from(status.st_size).unwrap_or(0), 512),
            _ => {
                return Err(OpenError::Kind {
                    path: path.to_owned(),
                });
            }
        };
        let fd = file.as_raw_fd();
        let handle = match ring.register_file(fd) {
            Some(slot) => Handle::Fixed(slot),
            None => Handle::Plain(types::Fd(fd)),
        };
        Ok(Disk {
            path: path.to_owned(),
            handle,
            file,
            size,
            logical_block,
            number,
        })
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its size, in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The smallest unit that can be read or written, in bytes.
    pub fn logical_block(&self) -> u32 {
        self.logical_block
    }

    /// What a discard must consist of whole units of to have an effect, in
    /// bytes; None if the disk takes none.
    pub fn discard_unit(&self) -> Option<u64> {
        let (major, minor) = self.number?;
        let device = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
        // A partition's requests go through the queue of the disk that it is
        // a part of, and its directory lies in that one's.
        let queue = if device.join("partition").exists() {
            device.join("../queue")
        } else {
            device.join("queue")
        };
        let figure = |name: &str| {
            let text = std::fs::read_to_string(queue.join(name)).ok()?;
            text.trim().parse().ok()
        };
        let unit: u64 = figure("discard_granularity")?;
        let most: u64 = figure("discard_max_bytes")?;
        (most > 0 && unit >= u64::from(self.logical_block)).then_some(unit)
    }

    /// A flush of this disk makes durable what has completed on `other`; None
    /// unless that is known.
    pub fn cover(&self, other: &Disk) -> Option<Cover> {
        Cover::find(Path::new("/sys"), self.number?, other.number?)
    }

    /// Fills `span` from `offset` (bytes). Completes with the bytes read.
    ///
    /// # Safety
    /// Nothing may touch the span until the completion.
    pub unsafe fn read(&self, ring: &mut Ring, span: Span, offset: u64, token: Token) {
        let length = span.len() as u32;
        let entry = if ring.is_registered(span) {
            on!(self, |target| opcode::ReadFixed::new(
                target,
                span.as_ptr(),
                length,
                0
            )
            .offset(offset)
            .build())
        } else {
            on!(self, |target| opcode::Read::new(
                target,
                span.as_ptr(),
                length
            )
            .offset(offset)
            .build())
        };
        // SAFETY: spans are never unmapped, and this one is left alone.
        unsafe { ring.push(entry, token) };
    }

    /// Writes `span` at `offset` (bytes); with `fua`, it is durable when it
    /// completes. Completes with the bytes written.
    ///
    /// # Safety
    /// Nothing may write to the span until the completion.
    pub unsafe fn write(&self, ring: &mut Ring, span: Span, offset: u64, fua: bool, token: Token) {
        let length = span.len() as u32;
        let flags = if fua { libc::RWF_DSYNC } else { 0 };
        let entry = if ring.is_registered(span) {
            on!(self, |target| opcode::WriteFixed::new(
                target,
                span.as_ptr(),
                length,
                0
            )
            .offset(offset)
            .rw_flags(flags)
            .build())
        } else {
            on!(self, |target| opcode::Write::new(
                target,
                span.as_ptr(),
                length
            )
            .offset(offset)
            .rw_flags(flags)
            .build())
        };
        // SAFETY: spans are never unmapped, and this one is not written to.
        unsafe { ring.push(entry, token) };
    }

    /// Makes durable what was written before. Completes with 0.
    pub fn flush(&self, ring: &mut Ring, token: Token) {
        let entry = on!(self, |target| opcode::Fsync::new(target)
            .flags(types::FsyncFlags::DATASYNC)
            .build());
        push_plain(ring, entry, token);
    }

    /// Writes zeros, `length` bytes at `offset`, without using memory for them.
    /// Completes with 0. Durable after the next flush, as any write.
    pub fn zero(&self, ring: &mut Ring, offset: u64, length: u64, token: Token) {
        self.allocate(
            ring,
            libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE,
            offset,
            length,
            token,
        );
    }

    /// As [`Disk::zero`], and gives the space back. Completes with EOPNOTSUPP
    /// where the disk can't do that and promise zeros.
    pub fn unmap(&self, ring: &mut Ring, offset: u64, length: u64, token: Token) {
        self.allocate(
            ring,
            libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE,
            offset,
            length,
            token,
        );
    }

    /// Gives the space of whole units back; what is read there then is the
    /// disk's affair. Completes with 0, or EOPNOTSUPP if Linux can't do that
    /// (before 6.12) or the disk can't.
    pub fn discard(&self, ring: &mut Ring, offset: u64, length: u64, token: Token) {
        let mut command = [0; 16];
        command[..8].copy_from_slice(&length.to_ne_bytes());
        let entry = on!(self, |target| opcode::UringCmd16::new(
            target,
            COMMAND_DISCARD
        )
        .cmd(command)
        .addr(Some(offset))
        .build());
        // Linux would try first not to wait for anything, and takes a disk that
        // can't promise that, as dm-thin, for one that can't discard.
        push_plain(ring, entry.flags(squeue::Flags::ASYNC), token);
    }

    fn allocate(&self, ring: &mut Ring, mode: i32, offset: u64, length: u64, token: Token) {
        let entry = on!(self, |target| opcode::Fallocate::new(target, length)
            .offset(offset)
            .mode(mode)
            .build());
        push_plain(ring, entry, token);
    }
}

fn push_plain(ring: &mut Ring, entry: squeue::Entry, token: Token) {
    // SAFETY: the entry points to no memory.
    unsafe { ring.push(entry, token) };
}

fn lock(file: &File, path: &Path, patience: Duration) -> Result<(), OpenError> {
    let start = Instant::now();
    let mut waited = false;
    loop {
        match rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {
                if waited {
                    info!(
                        "{} is free now, after {:?}",
                        path.display(),
                        start.elapsed()
                    );
                }
                return Ok(());
            }
            Err(rustix::io::Errno::WOULDBLOCK | rustix::io::Errno::INTR) => {}
            Err(error) => {
                return Err(OpenError::Open {
                    path: path.to_owned(),
                    cause: error.into(),
                });
            }
        }
        if start.elapsed() >= patience {
            return Err(OpenError::Locked {
                path: path.to_owned(),
                seconds: patience.as_secs(),
            });
        }
        waited = true;
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Size and size of a logical block of a block device, in bytes.
fn geometry(file: &File) -> io::Result<(u64, u32)> {
    let mut size = 0u64;
    let mut block: libc::c_int = 0;
    // SAFETY: BLKGETSIZE64 writes one u64 to where its argument points.
    if unsafe { libc::ioctl(file.as_raw_fd(), SIZE, &mut size) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: BLKSSZGET writes one int to where its argument points.
    if unsafe { libc::ioctl(file.as_raw_fd(), LOGICAL_BLOCK, &mut block) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok((size, block as u32))
}
