// SPDX-License-Identifier: Apache-2.0
//! ublk: a block device of the kernel, served through the ring.
//!
//! The interface is that of linux/ublk_cmd.h and of the kernel's
//! Documentation/block/ublk.rst. Control commands go to /dev/ublk-control
//! through a ring of their own, because their entries are twice as long; each
//! of the device's requests has a command on /dev/ublkcN in flight, which
//! completes when the guest has sent one and is given back with the result.
//!
//! The data of a request is fetched and delivered by reads and writes of
//! /dev/ublkcN, before the request goes to the engine and before it is answered
//! (user copy, Linux 6.5). An older kernel copies by itself, from and to our
//! memory, a read's when it is answered: if the process is killed at that
//! moment, the kernel may find the memory gone and have the guest's read fail.
//!
//! When the process dies, the kernel keeps the device and what was in flight
//! (user recovery). A successor that finds the device takes it over, and the
//! kernel sends it what was not answered once more. The device carries an
//! identity of ours, so that nobody takes over another volume's device.
//!
//! There is a library for ublk, libublk. It owns the thread's ring and its
//! loop, panics where we must not, keeps files below /run and waits for the
//! start of a device in a second thread; so this is our own.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::time::{Duration, Instant};

use io_uring::{IoUring, opcode, squeue, types};
use localstor_hydrator_disks::{Event, Memory, Owner, Ring, Span, Token, enable};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use tracing::{debug, info, warn};

use crate::block::{Arrival, Frontend, FrontendError, Geometry, Outcome, Stage, numbers};
use localstor_hydrator_core::{Failure, Operation, Request, Tag};

const CONTROL: &str = "/dev/ublk-control";

/// Where the kernel shows the devices that there are, started or not.
const DEVICES: &str = "/sys/class/ublk-char";

/// How long to wait for the kernel to notice that a predecessor has died.
const TAKE_OVER: Duration = Duration::from_secs(30);

/// A discard or a write of zeros may be this long, in sectors of 512 bytes.
const LONGEST_ZEROES: u32 = (1 << 30) >> 9;

/// The guest is told that the device is made of blocks of 4 KiB.
const PHYSICAL_BLOCK_SHIFT: u8 = 12;

mod abi {
    //! linux/ublk_cmd.h, as far as it is used here.

    /// `_IOWR('u', number, T)`, or `_IOR` with only the reading bit.
    const fn encode(direction: u32, number: u32, size: usize) -> u32 {
        direction << 30 | (size as u32) << 16 | (b'u' as u32) << 8 | number
    }
    const READ: u32 = 2;
    const BOTH: u32 = 3;
    const CONTROL: usize = size_of::<ControlCommand>();

    pub(super) const GET_DEV_INFO: u32 = encode(READ, 0x02, CONTROL);
    pub(super) const ADD_DEV: u32 = encode(BOTH, 0x04, CONTROL);
    pub(super) const DEL_DEV: u32 = encode(BOTH, 0x05, CONTROL);
    pub(super) const START_DEV: u32 = encode(BOTH, 0x06, CONTROL);
    pub(super) const STOP_DEV: u32 = encode(BOTH, 0x07, CONTROL);
    pub(super) const SET_PARAMS: u32 = encode(BOTH, 0x08, CONTROL);
    pub(super) const START_USER_RECOVERY: u32 = encode(BOTH, 0x10, CONTROL);
    pub(super) const END_USER_RECOVERY: u32 = encode(BOTH, 0x11, CONTROL);

    pub(super) const FETCH_REQ: u32 = encode(BOTH, 0x20, size_of::<IoCommand>());
    pub(super) const COMMIT_AND_FETCH_REQ: u32 = encode(BOTH, 0x21, size_of::<IoCommand>());

    pub(super) const F_USER_RECOVERY: u64 = 1 << 3;
    pub(super) const F_USER_RECOVERY_REISSUE: u64 = 1 << 4;
    pub(super) const F_CMD_IOCTL_ENCODE: u64 = 1 << 6;
    pub(super) const F_USER_COPY: u64 = 1 << 7;

    pub(super) const S_DEAD: u16 = 0;

    pub(super) const OP_READ: u8 = 0;
    pub(super) const OP_WRITE: u8 = 1;
    pub(super) const OP_FLUSH: u8 = 2;
    pub(super) const OP_DISCARD: u8 = 3;
    pub(super) const OP_WRITE_ZEROES: u8 = 5;
    /// A bit of `op_flags` as a whole, not of the flags above the operation.
    pub(super) const FLAG_FUA: u32 = 1 << 13;

    pub(super) const ATTR_VOLATILE_CACHE: u32 = 1 << 2;
    pub(super) const ATTR_FUA: u32 = 1 << 3;
    pub(super) const PARAM_BASIC: u32 = 1 << 0;
    pub(super) const PARAM_DISCARD: u32 = 1 << 1;

    /// Where in /dev/ublkcN the data of a request of queue 0 begins, in bytes.
    pub(super) const fn data_of(tag: u16) -> u64 {
        0x8000_0000 + ((tag as u64) << 25)
    }

    #[repr(C)]
    #[derive(Clone, Copy, Default)]
    pub(super) struct ControlCommand {
        pub(super) dev_id: u32,
        pub(super) queue_id: u16,
        pub(super) len: u16,
        pub(super) addr: u64,
        pub(super) data: u64,
        pub(super) dev_path_len: u16,
        pub(super) pad: u16,
        pub(super) reserved: u32,
    }

    #[repr(C)]
    #[derive(Clone, Copy, Default, Debug)]
    pub(super) struct DeviceInfo {
        pub(super) nr_hw_queues: u16,
        pub(super) queue_depth: u16,
        pub(super) state: u16,
        pub(super) pad0: u16,
        pub(super) max_io_buf_bytes: u32,
        pub(super) dev_id: u32,
        pub(super) ublksrv_pid: i32,
        pub(super) pad1: u32,
        pub(super) flags: u64,
        /// For the server alone: here our identity.
        pub(super) ublksrv_flags: u64,
        pub(super) owner_uid: u32,
        pub(super) owner_gid: u32,
        pub(super) reserved: [u64; 2],
    }

    #[repr(C)]
    #[derive(Clone, Copy, Default)]
    pub(super) struct Parameters {
        pub(super) len: u32,
        pub(super) types: u32,
        pub(super) attrs: u32,
        pub(super) logical_bs_shift: u8,
        pub(super) physical_bs_shift: u8,
        pub(super) io_opt_shift: u8,
        pub(super) io_min_shift: u8,
        pub(super) max_sectors: u32,
        pub(super) chunk_sectors: u32,
        pub(super) dev_sectors: u64,
        pub(super) virt_boundary_mask: u64,
        pub(super) discard_alignment: u32,
        pub(super) discard_granularity: u32,
        pub(super) max_discard_sectors: u32,
        pub(super) max_write_zeroes_sectors: u32,
        pub(super) max_discard_segments: u16,
        pub(super) reserved0: u16,
        pub(super) devt: [u32; 4],
    }

    #[repr(C)]
    #[derive(Clone, Copy, Default)]
    pub(super) struct IoDescriptor {
        pub(super) op_flags: u32,
        pub(super) nr_sectors: u32,
        pub(super) start_sector: u64,
        pub(super) addr: u64,
    }

    #[repr(C)]
    pub(super) struct IoCommand {
        pub(super) q_id: u16,
        pub(super) tag: u16,
        pub(super) result: i32,
        pub(super) addr: u64,
    }
}

/// Whether the kernel has ublk.
pub fn is_there() -> bool {
    Path::new(CONTROL).exists()
}

/// How a device is made.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// The number N of /dev/ublkbN to take over or to make; any if None.
    pub number: Option<u32>,
    /// What tells this volume's device from others.
    pub identity: u64,
    /// What the guest sees.
    pub geometry: Geometry,
    /// Requests in flight.
    pub depth: u16,
    /// The longest read or write, in bytes.
    pub longest: u32,
}

/// The commands to /dev/ublk-control.
struct Control {
    file: File,
    ring: IoUring<squeue::Entry128>,
    // Counts them.
    submitted: u64,
}

impl Control {
    fn open() -> Result<Control, FrontendError> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .open(CONTROL)
            .map_err(|error| match error.kind() {
                io::ErrorKind::NotFound => FrontendError::Missing(format!(
                    "the kernel has no ublk ({CONTROL} is missing): load the module \
                     ublk_drv, or use the frontend nbd"
                )),
                _ => FrontendError::kernel(format!("cannot open {CONTROL}"), error),
            })?;
        let ring = IoUring::<squeue::Entry128>::builder()
            .setup_r_disabled()
            .build(4)
            .and_then(|ring| enable(&ring, &[opcode::UringCmd80::CODE], &[]).map(|()| ring))
            .map_err(|error| FrontendError::kernel("cannot make a ring for ublk", error))?;
        Ok(Control {
            file,
            ring,
            submitted: 0,
        })
    }

    /// Submits a command without waiting for it; its number.
    ///
    /// # Safety
    /// What `command.addr` points to must be as long as the command's `len`
    /// says, and stay untouched until the command has completed.
    unsafe fn submit(&mut self, operation: u32, command: abi::ControlCommand) -> io::Result<u64> {
        let mut bytes = [0u8; 80];
        // SAFETY: a ControlCommand is plain data of fewer than 80 bytes, with
        // no padding.
        unsafe {
            std::ptr::copy_nonoverlapping(
                (&raw const command).cast::<u8>(),
                bytes.as_mut_ptr(),
                size_of::<abi::ControlCommand>(),
            );
        }
        self.submitted += 1;
        let entry = opcode::UringCmd80::new(types::Fd(self.file.as_raw_fd()), operation)
            .cmd(bytes)
            .build()
            .user_data(self.submitted);
        // SAFETY: promised by the caller; the command itself is in the entry.
        unsafe { self.ring.submission().push(&entry) }
            .map_err(|_| io::Error::from_raw_os_error(libc::EBUSY))?;
        self.ring.submit().map(|_| self.submitted)
    }

    /// The number and the result of a submitted command that has completed.
    fn completed(&mut self) -> Option<(u64, i32)> {
        let entry = self.ring.completion().next()?;
        Some((entry.user_data(), entry.result()))
    }

    /// Waits for the result of the command of this number.
    fn result(&mut self, number: u64) -> io::Result<i32> {
        loop {
            while let Some((completed, result)) = self.completed() {
                if completed == number {
                    return Ok(result);
                }
            }
            match self.ring.submit_and_wait(1) {
                Ok(_) => {}
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Carries a command out that has `value` as its buffer.
    fn call<T: Copy>(
        &mut self,
        operation: u32,
        number: u32,
        value: &mut T,
        data: u64,
    ) -> Result<(), Errno> {
        let length = size_of::<T>() as u16;
        // If there is no waiting for it, the kernel may still write to it at any
        // time: then it is never freed.
        let buffer = Box::into_raw(Box::new(*value));
        let command = abi::ControlCommand {
            dev_id: number,
            queue_id: u16::MAX,
            len: length,
            addr: if length == 0 { 0 } else { buffer as u64 },
            data,
            ..Default::default()
        };
        // SAFETY: addr points to a T, len is its size, and it stays until the
        // command has completed, below.
        let result = unsafe { self.submit(operation, command) }
            .and_then(|number| self.result(number))
            .map_err(errno)?;
        // SAFETY: from into_raw() above; the command has completed.
        *value = *unsafe { Box::from_raw(buffer) };
        match result {
            0.. => Ok(()),
            error => Err(Errno::from_raw_os_error(-error)),
        }
    }
}

fn errno(error: io::Error) -> Errno {
    Errno::from_io_error(&error).unwrap_or(Errno::IO)
}

/// The descriptors of the requests, which the kernel writes.
struct Descriptors {
    address: NonNull<abi::IoDescriptor>,
    count: u16,
}

impl Descriptors {
    fn map(file: &impl std::os::fd::AsFd, count: u16) -> io::Result<Descriptors> {
        // SAFETY: a new shared mapping of the device, read only.
        let address = unsafe {
            mmap(
                std::ptr::null_mut(),
                Descriptors::length(count),
                ProtFlags::READ,
                MapFlags::SHARED | MapFlags::POPULATE,
                file,
                0,
            )
        }?;
        let address = NonNull::new(address.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Descriptors { address, count })
    }

    fn length(count: u16) -> usize {
        (usize::from(count) * size_of::<abi::IoDescriptor>()).next_multiple_of(4096)
    }

    fn get(&self, tag: u16) -> Option<abi::IoDescriptor> {
        if tag >= self.count {
            return None;
        }
        // SAFETY: within the mapping; the kernel does not write to a descriptor
        // between its completion and its commit, and volatile in any case.
        Some(unsafe { self.address.add(usize::from(tag)).read_volatile() })
    }
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        // SAFETY: mapped by map() with this length; nobody else has it.
        if let Err(error) = unsafe {
            munmap(
                self.address.as_ptr().cast(),
                Descriptors::length(self.count),
            )
        } {
            warn!("cannot unmap the descriptors of ublk: {error}");
        }
    }
}

/// What a completion of the frontend's is about: the detail of its token.
const CONTROL_READY: u64 = 1 << 32;

/// A request that is with the engine.
#[derive(Clone, Copy, Default)]
struct Underway {
    // In bytes: the result, if all is well.
    length: u32,
    // What is to be delivered.
    read: Option<Span>,
}

/// A ublk device.
pub struct Ublk {
    number: u32,
    path: PathBuf,
    geometry: Geometry,
    control: Control,
    // In this order: unmapped, then closed.
    descriptors: Option<Descriptors>,
    device: Option<File>,
    spans: Vec<Span>,
    // By tag: what is with the engine.
    underway: Vec<Underway>,
    // Whether the data of requests is ours to fetch and deliver.
    copies: bool,
    // Tags that have a command in the kernel or a request with the engine.
    alive: u16,
    stage: Stage,
}

impl Ublk {
    /// The memory that a device needs, in bytes.
    pub fn memory(settings: &Settings) -> usize {
        usize::from(settings.depth) * settings.longest as usize
    }

    /// Makes a device, or takes over that of a predecessor, and begins to serve
    /// it. It is ready when its stage says so. `announce` is called with the
    /// path of the block device, before there is one that is new.
    pub fn start(
        settings: &Settings,
        ring: &mut Ring,
        memory: &mut Memory,
        announce: impl FnOnce(&Path) -> io::Result<()>,
    ) -> Result<Ublk, FrontendError> {
        let mut control = Control::open()?;
        let found = match settings.number {
            Some(number) => find(&mut control, number, settings.identity)?,
            None => None,
        };
        let (info, recovering) = match found {
            Some(info) => {
                take_over(&mut control, info.dev_id)?;
                (info, true)
            }
            None => (add(&mut control, settings)?, false),
        };
        let number = info.dev_id;
        let made = announce(&path(number))
            .map_err(|error| {
                FrontendError::kernel(format!("cannot announce /dev/ublkb{number}"), error)
            })
            .and_then(|()| Ublk::serve(settings, &info, recovering, control, ring, memory));
        if made.is_err() && !recovering {
            // Nobody would ever remove it.
            delete(&mut Control::open()?, number)?;
        }
        made
    }

    fn serve(
        settings: &Settings,
        info: &abi::DeviceInfo,
        recovering: bool,
        control: Control,
        ring: &mut Ring,
        memory: &mut Memory,
    ) -> Result<Ublk, FrontendError> {
        let number = info.dev_id;
        let failed = |what: &str, error: io::Error| {
            FrontendError::kernel(format!("cannot {what} /dev/ublkc{number}"), error)
        };
        let mut spans = Vec::with_capacity(usize::from(info.queue_depth));
        for _ in 0..info.queue_depth {
            let span = memory.take(info.max_io_buf_bytes as usize);
            let none = || failed("serve", io::Error::from(io::ErrorKind::OutOfMemory));
            spans.push(span.ok_or_else(none)?);
        }
        let device = open_device(number)?;
        let descriptors = Descriptors::map(&device, info.queue_depth)
            .map_err(|error| failed("map the requests of", error))?;
        let mut ublk = Ublk {
            number,
            path: path(number),
            geometry: settings.geometry,
            control,
            descriptors: Some(descriptors),
            device: Some(device),
            underway: vec![Underway::default(); spans.len()],
            spans,
            // A device of a predecessor keeps to what it was made with.
            copies: info.flags & abi::F_USER_COPY != 0,
            alive: info.queue_depth,
            stage: Stage::Starting,
        };
        for tag in 0..info.queue_depth {
            ublk.fetch(ring, abi::FETCH_REQ, tag, 0);
        }
        // The kernel must have seen all of them before it starts the device.
        ring.wait(Some(Duration::ZERO))
            .map_err(|error| failed("serve", error))?;
        // To start it the kernel reads from it: we must not wait for that here.
        let start = if recovering {
            abi::END_USER_RECOVERY
        } else {
            abi::START_DEV
        };
        ublk.command(ring, start, u64::from(std::process::id()))
            .map_err(|error| failed("start", error))?;
        Ok(ublk)
    }

    /// Its number, N of /dev/ublkbN.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Submits a control command without a buffer, and a poll for its end.
    fn command(&mut self, ring: &mut Ring, operation: u32, data: u64) -> io::Result<()> {
        let command = abi::ControlCommand {
            dev_id: self.number,
            queue_id: u16::MAX,
            data,
            ..Default::default()
        };
        // SAFETY: no buffer.
        unsafe { self.control.submit(operation, command) }?;
        let poll = opcode::PollAdd::new(
            types::Fd(self.control.ring.as_raw_fd()),
            libc::POLLIN as u32,
        )
        .build();
        // SAFETY: a poll points to no memory.
        unsafe { ring.push(poll, Token::new(Owner::Frontend, CONTROL_READY)) };
        Ok(())
    }

    /// Gives the kernel a tag to send the next request with, and the result of
    /// the last one.
    fn fetch(&mut self, ring: &mut Ring, operation: u32, tag: u16, result: i32) {
        let (Some(device), Some(span)) = (&self.device, self.spans.get(usize::from(tag))) else {
            return;
        };
        let command = abi::IoCommand {
            q_id: 0,
            tag,
            result,
            addr: if self.copies { 0 } else { span.as_ptr() as u64 },
        };
        let mut bytes = [0u8; 16];
        bytes[0..2].copy_from_slice(&command.q_id.to_ne_bytes());
        bytes[2..4].copy_from_slice(&command.tag.to_ne_bytes());
        bytes[4..8].copy_from_slice(&command.result.to_ne_bytes());
        bytes[8..16].copy_from_slice(&command.addr.to_ne_bytes());
        let entry = opcode::UringCmd16::new(types::Fd(device.as_raw_fd()), operation)
            .cmd(bytes)
            .build();
        // SAFETY: the span is never unmapped; if the kernel fills it at all, then
        // only while the tag is in its hands.
        unsafe { ring.push(entry, Token::new(Owner::Frontend, u64::from(tag))) };
    }

    /// Where the data of requests is; None if the kernel copies it by itself.
    fn content(&self) -> Option<&File> {
        self.device.as_ref().filter(|_| self.copies)
    }

    /// Copies what the guest writes into `span`.
    fn fetch_data(&self, tag: u16, mut span: Span) -> Result<(), Errno> {
        let Some(device) = self.content() else {
            return Ok(());
        };
        // SAFETY: the tag's own memory, which the engine does not have yet.
        let data = unsafe { span.bytes_mut() };
        device.read_exact_at(data, abi::data_of(tag)).map_err(errno)
    }

    /// Copies what was read into `span` to the guest.
    fn deliver_data(&self, tag: u16, span: Span) -> Result<(), Errno> {
        let Some(device) = self.content() else {
            return Ok(());
        };
        // SAFETY: the tag's own memory, which the engine has given back.
        let data = unsafe { span.bytes() };
        device.write_all_at(data, abi::data_of(tag)).map_err(errno)
    }

    fn arrival(&mut self, tag: u16) -> Result<Arrival, Errno> {
        let descriptor = self
            .descriptors
            .as_ref()
            .and_then(|all| all.get(tag))
            .ok_or(Errno::IO)?;
        let fua = descriptor.op_flags & abi::FLAG_FUA != 0;
        let operation = match descriptor.op_flags as u8 {
            abi::OP_READ => Operation::Read,
            abi::OP_WRITE => Operation::Write { fua },
            abi::OP_FLUSH => Operation::Flush,
            abi::OP_DISCARD => Operation::Discard,
            abi::OP_WRITE_ZEROES => Operation::WriteZeroes { fua },
            _ => return Err(Errno::OPNOTSUPP),
        };
        let (offset, length) = match operation {
            Operation::Flush => (0, 0),
            _ => (
                descriptor.start_sector << 9,
                u64::from(descriptor.nr_sectors) << 9,
            ),
        };
        if operation != Operation::Flush && !self.geometry.holds(offset, length) {
            return Err(Errno::INVAL);
        }
        let span = match operation {
            Operation::Read | Operation::Write { .. } => Some(
                self.spans[usize::from(tag)]
                    .part(0, length as usize)
                    .ok_or(Errno::INVAL)?,
            ),
            _ => None,
        };
        if let (Operation::Write { .. }, Some(span)) = (operation, span) {
            self.fetch_data(tag, span)?;
        }
        self.underway[usize::from(tag)] = Underway {
            length: length as u32,
            read: span.filter(|_| operation == Operation::Read),
        };
        let request = Request {
            tag: Tag(tag.into()),
            operation,
            offset,
            length,
        };
        Ok(Arrival { request, span })
    }

    fn commanded(&mut self, ring: &mut Ring, result: i32) -> Result<(), FrontendError> {
        let failed = |what: &str, error| {
            let what = format!("cannot {what} {}", self.path.display());
            FrontendError::kernel(what, error)
        };
        match self.stage {
            Stage::Starting if result >= 0 => {
                info!("{} is ready", self.path.display());
                self.stage = Stage::Ready;
            }
            Stage::Starting => {
                let error = io::Error::from_raw_os_error(-result);
                return Err(failed("start", error));
            }
            // The device is stopped; its commands come back now.
            Stage::Stopping if self.device.is_some() => {
                if result < 0 {
                    return Err(failed("stop", io::Error::from_raw_os_error(-result)));
                }
                self.remove_when_idle(ring)?;
            }
            Stage::Stopping => {
                if result < 0 {
                    return Err(failed("remove", io::Error::from_raw_os_error(-result)));
                }
                info!("{} is removed", self.path.display());
                self.stage = Stage::Gone;
            }
            Stage::Ready | Stage::Gone => debug!("ublk: stray result {result}"),
        }
        Ok(())
    }

    fn remove_when_idle(&mut self, ring: &mut Ring) -> Result<(), FrontendError> {
        if self.stage == Stage::Stopping && self.alive == 0 && self.device.is_some() {
            self.descriptors = None;
            self.device = None;
            self.command(ring, abi::DEL_DEV, 0).map_err(|error| {
                FrontendError::kernel(format!("cannot remove {}", self.path.display()), error)
            })?;
        }
        Ok(())
    }
}

impl Frontend for Ublk {
    fn on_event(
        &mut self,
        ring: &mut Ring,
        event: Event,
        arrivals: &mut Vec<Arrival>,
    ) -> Result<(), FrontendError> {
        if event.token.detail() == CONTROL_READY {
            while let Some((_, result)) = self.control.completed() {
                self.commanded(ring, result)?;
            }
            return Ok(());
        }
        let tag = event.token.detail() as u16;
        if event.result != 0 {
            // The kernel takes the tag away: the device is being stopped.
            debug!("{}: tag {tag} ended: {}", self.path.display(), event.result);
            self.alive = self.alive.saturating_sub(1);
            if self.alive == 0 && self.stage != Stage::Stopping {
                self.stage = Stage::Gone;
            }
            return self.remove_when_idle(ring);
        }
        match self.arrival(tag) {
            Ok(arrival) => arrivals.push(arrival),
            Err(error) => {
                warn!("{}: refused request {tag}: {error}", self.path.display());
                self.fetch(ring, abi::COMMIT_AND_FETCH_REQ, tag, -error.raw_os_error());
            }
        }
        Ok(())
    }

    fn complete(
        &mut self,
        ring: &mut Ring,
        tag: Tag,
        outcome: Outcome,
        _arrivals: &mut Vec<Arrival>,
    ) {
        let tag = tag.0 as u16;
        let Underway { length, read } = self.underway[usize::from(tag)];
        let answer = outcome.map_err(refusal).and_then(|()| match read {
            Some(span) => self.deliver_data(tag, span),
            None => Ok(()),
        });
        let result = match answer {
            Ok(()) => length as i32,
            Err(error) => -error.raw_os_error(),
        };
        self.fetch(ring, abi::COMMIT_AND_FETCH_REQ, tag, result);
    }

    fn stop(&mut self, ring: &mut Ring) -> Result<(), FrontendError> {
        self.stage = Stage::Stopping;
        self.command(ring, abi::STOP_DEV, 0).map_err(|error| {
            FrontendError::kernel(format!("cannot stop {}", self.path.display()), error)
        })
    }

    fn stage(&self) -> Stage {
        self.stage
    }

    fn device(&self) -> &Path {
        &self.path
    }
}

/// Where the kernel puts the block device when it is started.
pub fn path(number: u32) -> PathBuf {
    PathBuf::from(format!("/dev/ublkb{number}"))
}

/// How the block layer is told of a failure.
fn refusal(failure: Failure) -> Errno {
    match failure {
        Failure::NoSpace => Errno::NOSPC,
        // The block layer's word for a medium error.
        Failure::BadSector => Errno::NODATA,
        Failure::Invalid => Errno::INVAL,
        Failure::Io | Failure::Unreachable | Failure::NotOpen => Errno::IO,
    }
}

/// The numbers N of the devices /dev/ublkbN of this volume, whoever serves them.
///
/// # Errors
/// That the kernel does not say.
pub fn of(identity: u64) -> Result<Vec<u32>, FrontendError> {
    if !is_there() {
        return Ok(Vec::new());
    }
    let mut control = Control::open()?;
    belonging(numbers(Path::new(DEVICES), "ublkc"), identity, |number| {
        information(&mut control, number)
    })
}

/// Those of `numbers` that carry this identity.
fn belonging(
    numbers: Vec<u32>,
    identity: u64,
    mut information: impl FnMut(u32) -> Result<Option<abi::DeviceInfo>, FrontendError>,
) -> Result<Vec<u32>, FrontendError> {
    let mut found = Vec::new();
    for number in numbers {
        if information(number)?.is_some_and(|info| info.ublksrv_flags == identity) {
            found.push(number);
        }
    }
    Ok(found)
}

/// Removes a device whose server died for good; one that is gone is removed.
///
/// # Errors
/// That the device belongs to something else, and what the kernel says.
pub fn remove(number: u32, identity: u64) -> Result<(), FrontendError> {
    let mut control = Control::open()?;
    match find(&mut control, number, identity)? {
        Some(_) => delete(&mut control, number),
        None => Ok(()),
    }
}

/// What the kernel knows of a device; None if there is no such device.
fn information(
    control: &mut Control,
    number: u32,
) -> Result<Option<abi::DeviceInfo>, FrontendError> {
    let mut info = abi::DeviceInfo::default();
    match control.call(abi::GET_DEV_INFO, number, &mut info, 0) {
        Ok(()) => Ok(Some(info)),
        Err(Errno::NODEV | Errno::INVAL | Errno::NOENT) => Ok(None),
        Err(error) => {
            let what = format!("cannot ask for ublk device {number}");
            Err(FrontendError::kernel(what, error))
        }
    }
}

/// A predecessor's device, if there is one.
fn find(
    control: &mut Control,
    number: u32,
    identity: u64,
) -> Result<Option<abi::DeviceInfo>, FrontendError> {
    let Some(info) = information(control, number)? else {
        return Ok(None);
    };
    if info.ublksrv_flags != identity {
        return Err(FrontendError::Foreign(format!(
            "/dev/ublkb{number} belongs to something else; choose another number, \
             or none"
        )));
    }
    if info.state == abi::S_DEAD {
        // Made, but never started: nobody can have used it.
        delete(control, number)?;
        return Ok(None);
    }
    Ok(Some(info))
}

fn take_over(control: &mut Control, number: u32) -> Result<(), FrontendError> {
    let start = Instant::now();
    loop {
        match control.call(abi::START_USER_RECOVERY, number, &mut (), 0) {
            Ok(()) => {
                info!("taking over /dev/ublkb{number} after {:?}", start.elapsed());
                return Ok(());
            }
            // The predecessor is not quite dead.
            Err(Errno::BUSY) if start.elapsed() < TAKE_OVER => {
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(error) => {
                let what = format!("cannot take over /dev/ublkb{number}");
                return Err(FrontendError::kernel(what, error));
            }
        }
    }
}

fn add(control: &mut Control, settings: &Settings) -> Result<abi::DeviceInfo, FrontendError> {
    let number = settings.number.unwrap_or(u32::MAX);
    let mut info = abi::DeviceInfo {
        nr_hw_queues: 1,
        queue_depth: settings.depth,
        max_io_buf_bytes: settings.longest,
        dev_id: number,
        ublksrv_pid: std::process::id() as i32,
        // What it does not know the kernel takes away.
        flags: abi::F_USER_RECOVERY
            | abi::F_USER_RECOVERY_REISSUE
            | abi::F_CMD_IOCTL_ENCODE
            | abi::F_USER_COPY,
        ublksrv_flags: settings.identity,
        ..Default::default()
    };
    control
        .call(abi::ADD_DEV, number, &mut info, 0)
        .map_err(|error| FrontendError::kernel("cannot make a ublk device", error))?;
    let mut parameters = parameters(&settings.geometry, settings.longest);
    if let Err(error) = control.call(abi::SET_PARAMS, info.dev_id, &mut parameters, 0) {
        delete(control, info.dev_id)?;
        let what = format!("cannot set the size of /dev/ublkb{}", info.dev_id);
        return Err(FrontendError::kernel(what, error));
    }
    Ok(info)
}

fn delete(control: &mut Control, number: u32) -> Result<(), FrontendError> {
    control
        .call(abi::DEL_DEV, number, &mut (), 0)
        .map_err(|error| FrontendError::kernel(format!("cannot remove /dev/ublkb{number}"), error))
}

fn parameters(geometry: &Geometry, longest: u32) -> abi::Parameters {
    abi::Parameters {
        len: size_of::<abi::Parameters>() as u32,
        types: abi::PARAM_BASIC | abi::PARAM_DISCARD,
        // Without these no flush of the guest ever reaches us.
        attrs: abi::ATTR_VOLATILE_CACHE | abi::ATTR_FUA,
        logical_bs_shift: geometry.logical_block.trailing_zeros() as u8,
        physical_bs_shift: PHYSICAL_BLOCK_SHIFT,
        io_opt_shift: PHYSICAL_BLOCK_SHIFT,
        io_min_shift: PHYSICAL_BLOCK_SHIFT,
        max_sectors: longest >> 9,
        dev_sectors: geometry.size >> 9,
        discard_granularity: 1 << PHYSICAL_BLOCK_SHIFT,
        max_discard_sectors: LONGEST_ZEROES,
        max_write_zeroes_sectors: LONGEST_ZEROES,
        max_discard_segments: 1,
        ..Default::default()
    }
}

/// Opens the device's own node, which appears a moment after it is made.
fn open_device(number: u32) -> Result<File, FrontendError> {
    let path = format!("/dev/ublkc{number}");
    let start = Instant::now();
    loop {
        match OpenOptions::new().read(true).write(true).open(&path) {
            Ok(file) => return Ok(file),
            Err(error) if start.elapsed() > Duration::from_secs(5) => {
                return Err(FrontendError::kernel(format!("cannot open {path}"), error));
            }
            Err(_) => std::thread::sleep(Duration::from_millis(2)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_are_as_long_as_the_kernels() {
        assert_eq!(size_of::<abi::ControlCommand>(), 32);
        assert_eq!(size_of::<abi::DeviceInfo>(), 64);
        assert_eq!(size_of::<abi::IoDescriptor>(), 24);
        assert_eq!(size_of::<abi::IoCommand>(), 16);
        assert_eq!(std::mem::offset_of!(abi::Parameters, attrs), 8);
        assert_eq!(std::mem::offset_of!(abi::Parameters, dev_sectors), 24);
        assert_eq!(std::mem::offset_of!(abi::Parameters, discard_alignment), 40);
        assert_eq!(abi::FETCH_REQ, 0xc010_7520);
        assert_eq!(abi::GET_DEV_INFO, 0x8020_7502);
        assert_eq!(abi::data_of(3), 0x8600_0000);
    }

    #[test]
    fn a_device_is_found_by_the_identity_that_the_kernel_keeps() {
        let devices = tempfile::tempdir().unwrap();
        for name in ["ublkc0", "ublkc1", "ublkc12", "ublkc3", "other"] {
            std::fs::create_dir(devices.path().join(name)).unwrap();
        }
        let identities = [(0, 7), (3, 8), (12, 7)];
        let found = |identity| {
            belonging(numbers(devices.path(), "ublkc"), identity, |number| {
                // Number 1 goes while we look.
                let known = identities.iter().find(|(known, _)| *known == number);
                Ok(known.map(|(_, identity)| abi::DeviceInfo {
                    ublksrv_flags: *identity,
                    ..Default::default()
                }))
            })
            .unwrap()
        };
        assert_eq!(found(7), [0, 12]);
        assert_eq!(found(8), [3]);
        assert!(found(9).is_empty());
    }

    #[test]
    fn the_guest_is_told_to_flush() {
        let geometry = Geometry {
            size: 1 << 30,
            logical_block: 4096,
        };
        let parameters = parameters(&geometry, 1 << 18);
        assert_eq!(parameters.attrs, 0b1100);
        assert_eq!(parameters.logical_bs_shift, 12);
        assert_eq!(parameters.dev_sectors, 1 << 21);
        assert_eq!(parameters.max_sectors, 512);
    }
}
