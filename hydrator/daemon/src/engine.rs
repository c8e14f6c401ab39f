// SPDX-License-Identifier: Apache-2.0
//! Carries out on the disks what the core decides.

use localstor_hydrator_core::{
    Action, Buffer, Config, Device, Failure, Io, Memory as CoreMemory, Notice, Tag, Time, Volume,
};
use localstor_hydrator_disks::{
    Cover, Discarder, Disk, Event, Memory, MemoryError, Owner, Ring, Span, Token,
};
use localstor_hydrator_frontends::{Arrival, Outcome};
use tracing::{info, warn};

use crate::confinement;
use crate::spool::Spool;

/// Size of the zeros that are written where a disk can't make them, in bytes.
const ZEROS: usize = 256 << 10;

/// A block slot's size, in bytes.
const BLOCK: usize = localstor_hydrator_core::BLOCK_SIZE as usize;

/// The three disks of a moving volume.
pub(crate) struct Disks {
    pub(crate) data: Disk,
    pub(crate) metadata: Disk,
    pub(crate) source: Disk,
    /// A flush of the data makes the metadata durable, too.
    pub(crate) cover: Option<Cover>,
}

impl Disks {
    /// Tells, and remembers, whether one flush is enough for data and metadata.
    pub(crate) fn new(data: Disk, metadata: Disk, source: Disk) -> Disks {
        let cover = data.cover(&metadata);
        if cover.is_some() {
            info!(
                "{} lies on no disk that {} does not: one flush does for both",
                metadata.path().display(),
                data.path().display()
            );
        }
        Disks {
            data,
            metadata,
            source,
            cover,
        }
    }

    pub(crate) fn get(&self, device: Device) -> &Disk {
        match device {
            Device::Data => &self.data,
            Device::Metadata => &self.metadata,
            Device::Source => &self.source,
        }
    }
}

/// What the core looks into.
struct Buffers {
    guests: Vec<Option<Span>>,
    blocks: Vec<Span>,
    extents: Vec<Span>,
    // Stands in for a slot that is not there, so that nothing panics.
    nothing: Span,
}

impl Buffers {
    fn span(&self, buffer: Buffer, length: usize) -> Option<Span> {
        let (whole, offset) = match buffer {
            Buffer::Guest { tag, offset } => (self.guest(tag)?, offset),
            Buffer::Block(slot) => (*self.blocks.get(usize::from(slot))?, 0),
            Buffer::Extent { slot, offset } => (*self.extents.get(usize::from(slot))?, offset),
        };
        whole.part(offset as usize, length)
    }

    fn guest(&self, tag: Tag) -> Option<Span> {
        self.guests.get(tag.0 as usize).copied().flatten()
    }

    fn piece(&self, tag: Tag, offset: u32, length: u32) -> Span {
        self.guest(tag)
            .and_then(|span| span.part(offset as usize, length as usize))
            .unwrap_or(self.nothing)
    }
}

impl CoreMemory for Buffers {
    fn block(&self, slot: u16) -> &[u8] {
        let span = self.blocks.get(usize::from(slot)).unwrap_or(&self.nothing);
        // SAFETY: the core looks into its slots only while no action names
        // them, so nothing is being read into this one.
        unsafe { span.bytes() }
    }

    fn block_mut(&mut self, slot: u16) -> &mut [u8] {
        let span = self.blocks.get_mut(usize::from(slot));
        // SAFETY: as above; the borrow of all buffers keeps other slices away.
        unsafe { span.unwrap_or(&mut self.nothing).bytes_mut() }
    }

    fn extent(&self, slot: u16) -> &[u8] {
        let span = self.extents.get(usize::from(slot));
        // SAFETY: as above.
        unsafe { span.unwrap_or(&self.nothing).bytes() }
    }

    fn extent_mut(&mut self, slot: u16) -> &mut [u8] {
        let span = self.extents.get_mut(usize::from(slot));
        // SAFETY: as above; the borrow of all buffers keeps other slices away.
        unsafe { span.unwrap_or(&mut self.nothing).bytes_mut() }
    }

    fn guest_crc32c(&self, tag: Tag, offset: u32, length: u32, crc: u32) -> u32 {
        let piece = self.piece(tag, offset, length);
        // SAFETY: a write's buffer is only read until it is answered.
        crc32c::crc32c_append(crc, unsafe { piece.bytes() })
    }

    fn guest_to_block(&mut self, tag: Tag, offset: u32, length: u32, slot: u16, at: usize) {
        let source = self.piece(tag, offset, length);
        let block = self.blocks.get(usize::from(slot));
        if let Some(mut target) = block.and_then(|block| block.part(at, source.len())) {
            // SAFETY: the source is a write's buffer, only read; the target is
            // a slot that no action names.
            unsafe { target.bytes_mut().copy_from_slice(source.bytes()) };
        }
    }

    fn zero_guest(&mut self, tag: Tag, offset: u32, length: u32) {
        let mut piece = self.piece(tag, offset, length);
        // SAFETY: no action of the read fills this piece, or the core would
        // not have it zeroed.
        unsafe { piece.bytes_mut() }.fill(0);
    }
}

/// How Linux is asked to discard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Discard {
    /// By the ring, since 6.12.
    Command,
    /// By the thread that waits.
    Thread,
}

/// How an operation is being carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Read,
    Write { fua: bool },
    Flush,
    // Zeros, by the best means that the disk has not refused.
    // A discard is of so many bytes, whole units, whatever becomes known later.
    Discard { how: Discard, whole: u64, fua: bool },
    Unmap { fua: bool },
    ZeroRange { fua: bool },
    WriteZeros { fua: bool },
}

/// An operation in flight.
#[derive(Clone, Copy, Debug)]
struct Operation {
    io: Io,
    device: Device,
    step: Step,
    // What is left of it.
    offset: u64,
    length: u64,
    span: Option<Span>,
    // The place in the spool where it is kept until it is written.
    kept: Option<u16>,
}

/// The core with its disks and buffers.
pub(crate) struct Engine {
    volume: Volume,
    buffers: Buffers,
    disks: Disks,
    zeros: Span,
    operations: Vec<Option<Operation>>,
    free: Vec<u32>,
    actions: Vec<Action>,
    flushes: Vec<(Io, Device)>,
    // Flushes of the metadata that end with one of the data, by its index.
    covered: Vec<(u32, Io)>,
    // How data discard, in which units: where discarded space reads zeros.
    discards: Option<(Discard, u64)>,
    discarder: Option<Discarder>,
    // Data can't give space back and promise zeros; nor can it make zeros.
    unmaps: bool,
    makes_zeros: bool,
    spool: Spool,
    // Until when nothing is begun, and the guest's requests that wait for it.
    paused: Option<Time>,
    held: Vec<Arrival>,
}

/// The memory for the core's buffers, in bytes.
pub(crate) fn memory_needed(config: &Config) -> usize {
    usize::from(config.block_slots) * BLOCK
        + usize::from(config.copies) * config.extent_size()
        + ZEROS
        + BLOCK
}

impl Engine {
    /// Over a volume that is being opened.
    pub(crate) fn new(
        volume: Volume,
        config: &Config,
        disks: Disks,
        spool: Spool,
        memory: &mut Memory,
    ) -> Result<Engine, MemoryError> {
        let mut take = |length: usize| {
            memory.take(length).ok_or(MemoryError::Map {
                bytes: length,
                cause: std::io::ErrorKind::OutOfMemory.into(),
            })
        };
        let zeros = take(ZEROS)?;
        let nothing = take(BLOCK)?.part(0, 0);
        let blocks = (0..config.block_slots)
            .map(|_| take(BLOCK))
            .collect::<Result<_, _>>()?;
        let extents = (0..config.copies)
            .map(|_| take(config.extent_size()))
            .collect::<Result<_, _>>()?;
        let discards = disks.data.discard_unit();
        Ok(Engine {
            volume,
            buffers: Buffers {
                guests: vec![None; config.requests],
                blocks,
                extents,
                nothing: nothing.unwrap_or(zeros),
            },
            disks,
            zeros,
            operations: Vec::new(),
            free: Vec::new(),
            actions: Vec::new(),
            flushes: Vec::new(),
            covered: Vec::new(),
            discards: discards.map(|unit| (Discard::Command, unit)),
            discarder: None,
            unmaps: true,
            makes_zeros: true,
            spool,
            paused: None,
            held: Vec::with_capacity(config.requests),
        })
    }

    /// The core.
    pub(crate) fn volume(&mut self) -> &mut Volume {
        &mut self.volume
    }

    /// Starts a thread for discards, if there may be some. The volume must be
    /// open. Whether the thread is needed is known when the first is refused,
    /// which is too late to start one: the process is confined by then.
    pub(crate) fn start_discarder(&mut self) -> std::io::Result<()> {
        if self.discarding(Device::Data).is_some() {
            let confine = confinement::confine_discarder;
            self.discarder = Some(Discarder::start(&self.disks.data, confine)?);
        }
        Ok(())
    }

    /// Begins nothing more until `until`, or until [`Engine::resume`]: takes
    /// nothing into the core and nothing out of it. What is in flight goes on to
    /// its end, so that the data and the metadata are then as they would be had
    /// the process been killed now.
    pub(crate) fn pause(&mut self, until: Time) {
        self.paused = Some(until);
    }

    /// Goes on with the next turn; whether there was a pause.
    pub(crate) fn resume(&mut self) -> bool {
        self.paused.take().is_some()
    }

    /// Whether a pause has come to its time. It is over then.
    pub(crate) fn expires(&mut self, now: Time) -> bool {
        self.paused.take_if(|until| *until <= now).is_some()
    }

    /// Whether there is a pause.
    pub(crate) fn is_paused(&self) -> bool {
        self.paused.is_some()
    }

    /// Whether nothing is in flight on the data and the metadata. The source is
    /// only read, and may not answer for long.
    pub(crate) fn is_at_rest(&self) -> bool {
        let mut operations = self.operations.iter().flatten();
        operations.all(|operation| operation.device == Device::Source)
    }

    /// A request of the guest's.
    pub(crate) fn submit(&mut self, now: Time, arrival: Arrival) {
        if self.is_paused() {
            return self.held.push(arrival);
        }
        let index = arrival.request.tag.0 as usize;
        if index >= self.buffers.guests.len() {
            self.buffers.guests.resize(index + 1, None);
        }
        self.buffers.guests[index] = arrival.span;
        self.volume.request(now, arrival.request, &mut self.buffers);
    }

    /// When [`Engine::turn`] is to be called, if nothing happens before.
    pub(crate) fn wake_at(&self) -> Option<Time> {
        self.paused.or_else(|| self.volume.wake_at())
    }

    /// Ends a batch: begins what the core wants done, answers what is
    /// complete, and tells what is to be known. None of that during a pause.
    pub(crate) fn turn(
        &mut self,
        ring: &mut Ring,
        now: Time,
        mut complete: impl FnMut(&mut Ring, Tag, Outcome),
        notices: &mut Vec<Notice>,
    ) {
        if self.is_paused() {
            return;
        }
        let mut held = std::mem::take(&mut self.held);
        for arrival in held.drain(..) {
            self.submit(now, arrival);
        }
        self.held = held;
        let mut actions = std::mem::take(&mut self.actions);
        self.volume
            .actions(now, &mut self.buffers, |action| actions.push(action));
        for action in actions.drain(..) {
            match action {
                Action::Complete { tag, result } => complete(ring, tag, result),
                Action::Notice(notice) => notices.push(notice),
                Action::Read {
                    io,
                    device,
                    offset,
                    length,
                    buffer,
                } => self.begin(
                    ring,
                    now,
                    io,
                    device,
                    Step::Read,
                    offset,
                    length.into(),
                    Some(buffer),
                    None,
                ),
                Action::Write {
                    io,
                    device,
                    offset,
                    length,
                    buffer,
                    fua,
                    kept,
                } => {
                    let step = Step::Write { fua };
                    let kept = match buffer {
                        Buffer::Block(slot) if kept => Some(slot),
                        _ => None,
                    };
                    self.begin(
                        ring,
                        now,
                        io,
                        device,
                        step,
                        offset,
                        length.into(),
                        Some(buffer),
                        kept,
                    );
                }
                Action::Zero {
                    io,
                    device,
                    offset,
                    length,
                    fua,
                } => {
                    let step = self.zeroing(device, offset, length, fua);
                    self.begin(ring, now, io, device, step, offset, length, None, None);
                }
                Action::Flush { io, device } => self.flushes.push((io, device)),
            }
        }
        self.actions = actions;
        self.begin_flushes(ring);
    }

    /// Begins the flushes of a batch, one of data and metadata as a single one
    /// where that does for both.
    ///
    /// Every write to the metadata that such a flush covers has completed: the
    /// core was told of it before it asked for the flush, and the flush of the
    /// data goes to the kernel only now. One that is on its way already would
    /// not do.
    fn begin_flushes(&mut self, ring: &mut Ring) {
        let mut flushes = std::mem::take(&mut self.flushes);
        // Data first.
        flushes.sort_by_key(|(_, device)| *device != Device::Data);
        let mut data = None;
        for (io, device) in flushes.drain(..) {
            if let (Device::Metadata, Some(index)) = (device, data) {
                if self.is_covered() {
                    self.covered.push((index, io));
                    continue;
                }
            }
            let index = self.start(
                ring,
                Operation {
                    io,
                    device,
                    step: Step::Flush,
                    offset: 0,
                    length: 0,
                    span: None,
                    kept: None,
                },
            );
            if device == Device::Data {
                data = Some(index);
            }
        }
        self.flushes = flushes;
    }

    /// Whether a flush of the data still does for the metadata; for good not,
    /// once one of them has moved.
    fn is_covered(&mut self) -> bool {
        let moved = self
            .disks
            .cover
            .as_ref()
            .is_some_and(|cover| !cover.holds());
        if moved {
            info!("data or metadata have moved: each is flushed for itself");
            self.disks.cover = None;
        }
        self.disks.cover.is_some()
    }

    /// Whether what is discarded reads zeros.
    fn reads_zeros(&self, device: Device) -> bool {
        device == Device::Data && self.volume.is_zeroed()
    }

    /// How data discard, if what is discarded reads zeros: a thin pool has no
    /// other way to give space back.
    fn discarding(&self, device: Device) -> Option<(Discard, u64)> {
        self.discards.filter(|_| self.reads_zeros(device))
    }

    /// How to begin to make zeros.
    fn zeroing(&self, device: Device, offset: u64, length: u64, fua: bool) -> Step {
        if let Some((how, unit)) = self.discarding(device) {
            if offset % unit == 0 && length >= unit {
                let whole = length / unit * unit;
                return Step::Discard { how, whole, fua };
            }
            return Step::WriteZeros { fua };
        }
        if self.unmaps {
            Step::Unmap { fua }
        } else if self.makes_zeros {
            Step::ZeroRange { fua }
        } else {
            Step::WriteZeros { fua }
        }
    }

    #[expect(clippy::too_many_arguments, reason = "an action taken apart")]
    fn begin(
        &mut self,
        ring: &mut Ring,
        now: Time,
        io: Io,
        device: Device,
        step: Step,
        offset: u64,
        length: u64,
        buffer: Option<Buffer>,
        kept: Option<u16>,
    ) {
        let span = buffer.map(|buffer| self.buffers.span(buffer, length as usize));
        // From here on whatever was handed out after it may be begun, and the
        // guest be answered.
        let keeps = kept.is_none_or(|slot| self.spool.keep(slot, self.buffers.block(slot)));
        if span == Some(None) || !keeps {
            warn!("the core has named a buffer that is not there: {buffer:?}");
            self.volume
                .completed(now, io, Err(Failure::Invalid), &mut self.buffers);
            return;
        }
        let operation = Operation {
            io,
            device,
            step,
            offset,
            length,
            span: span.flatten(),
            kept,
        };
        self.start(ring, operation);
    }

    /// Carries out an operation; its index.
    fn start(&mut self, ring: &mut Ring, operation: Operation) -> u32 {
        let index = self.free.pop().unwrap_or_else(|| {
            self.operations.push(None);
            self.operations.len() as u32 - 1
        });
        self.carry_out(ring, index, operation);
        index
    }

    fn carry_out(&mut self, ring: &mut Ring, index: u32, operation: Operation) {
        let Operation { offset, length, .. } = operation;
        let token = Token::new(Owner::Engine, index.into());
        let disk = self.disks.get(operation.device);
        match (operation.step, operation.span) {
            (Step::Read, Some(span)) => {
                // SAFETY: the core gives a buffer to one operation at a time,
                // and leaves it alone until we tell of its completion.
                unsafe { disk.read(ring, span, offset, token) };
            }
            (Step::Write { fua }, Some(span)) => {
                // SAFETY: as above.
                unsafe { disk.write(ring, span, offset, fua, token) };
            }
            (Step::Discard { how, whole, .. }, _) => {
                match self.discarder.as_mut().filter(|_| how == Discard::Thread) {
                    Some(discarder) => discarder.discard(ring, offset, whole, token),
                    None => disk.discard(ring, offset, whole, token),
                }
            }
            (Step::Unmap { .. }, _) => disk.unmap(ring, offset, length, token),
            (Step::ZeroRange { .. }, _) => disk.zero(ring, offset, length, token),
            (Step::WriteZeros { fua }, _) => {
                let count = self.zeros_written(&operation) as usize;
                let span = self.zeros.part(0, count).unwrap_or(self.zeros);
                // SAFETY: nobody ever writes to the zeros.
                unsafe { disk.write(ring, span, offset, fua, token) };
            }
            (Step::Flush | Step::Read | Step::Write { .. }, _) => disk.flush(ring, token),
        }
        self.operations[index as usize] = Some(operation);
    }

    /// A disk has answered.
    pub(crate) fn on_event(&mut self, ring: &mut Ring, now: Time, event: Event) {
        let index = event.token.detail() as u32;
        let Some(operation) = self
            .operations
            .get_mut(index as usize)
            .and_then(Option::take)
        else {
            return;
        };
        let result = match (operation.step, &mut self.discarder) {
            (
                Step::Discard {
                    how: Discard::Thread,
                    ..
                },
                Some(discarder),
            ) => discarder.answer(ring),
            _ => event.result,
        };
        match self.follow_up(&operation, result) {
            Ok(Some(next)) => self.carry_out(ring, index, next),
            Ok(None) => self.finish(now, index, &operation, Ok(())),
            Err(failure) => {
                let disk = self.disks.get(operation.device);
                warn!(
                    "{}: {:?} of {} bytes at {}: {}",
                    disk.path().display(),
                    operation.step,
                    operation.length,
                    operation.offset,
                    std::io::Error::from_raw_os_error(-result)
                );
                self.finish(now, index, &operation, Err(failure));
            }
        }
    }

    fn finish(&mut self, now: Time, index: u32, operation: &Operation, result: Outcome) {
        self.free.push(index);
        // What could not be written is kept on, for a successor.
        if let Some(place) = operation.kept.filter(|_| result.is_ok()) {
            self.spool.release(place);
        }
        self.volume
            .completed(now, operation.io, result, &mut self.buffers);
        let covered = |(flush, _): &(u32, Io)| *flush == index;
        while let Some(at) = self.covered.iter().position(covered) {
            let (_, io) = self.covered.swap_remove(at);
            self.volume.completed(now, io, result, &mut self.buffers);
        }
    }

    /// How many zeros of what is left of an operation are written at once, in
    /// bytes: none of the whole units that can be discarded.
    fn zeros_written(&self, operation: &Operation) -> u64 {
        let Operation { offset, length, .. } = *operation;
        let unit = self
            .discarding(operation.device)
            .map_or(1, |(_, unit)| unit);
        let before = offset.next_multiple_of(unit) - offset;
        let has_unit = length.saturating_sub(before) >= unit;
        let written = if before > 0 && has_unit {
            before
        } else {
            length
        };
        written.min(ZEROS as u64)
    }

    /// What remains to be done of an operation after the kernel's answer.
    fn follow_up(
        &mut self,
        operation: &Operation,
        result: i32,
    ) -> Result<Option<Operation>, Failure> {
        let flush = |fua: bool| {
            fua.then_some(Operation {
                step: Step::Flush,
                ..*operation
            })
        };
        let refused = matches!(-result, libc::EOPNOTSUPP | libc::EINVAL | libc::ENODEV);
        match operation.step {
            Step::Discard { how, fua, .. } if refused => {
                // Others may have been refused before.
                if let Some((known, unit)) = self.discards.filter(|(known, _)| *known == how) {
                    let waits = known == Discard::Command && self.discarder.is_some();
                    self.discards = waits.then_some((Discard::Thread, unit));
                }
                return Ok(Some(self.zeroing_on(operation, fua)));
            }
            Step::Unmap { fua } if refused => {
                self.unmaps = false;
                return Ok(Some(self.zeroing_on(operation, fua)));
            }
            Step::ZeroRange { fua } if refused => {
                self.makes_zeros = false;
                return Ok(Some(self.zeroing_on(operation, fua)));
            }
            _ => {}
        }
        if result < 0 {
            return Err(failure(operation.device, -result));
        }
        let done = match operation.step {
            Step::Flush => return Ok(None),
            Step::Discard { whole, .. } => whole,
            Step::Unmap { .. } | Step::ZeroRange { .. } => operation.length,
            Step::Read | Step::Write { .. } | Step::WriteZeros { .. } => u64::from(result as u32),
        };
        // Nothing at all: behind the end of the disk. The source was longer, and
        // may be again.
        if done == 0 && operation.device == Device::Source {
            return Err(Failure::Unreachable);
        }
        if done == 0 || done > operation.length {
            return Err(Failure::Io);
        }
        let left = operation.length - done;
        let rest = Operation {
            offset: operation.offset + done,
            length: left,
            span: operation
                .span
                .and_then(|span| span.part(done as usize, left as usize)),
            ..*operation
        };
        Ok(match operation.step {
            Step::Discard { fua, .. } | Step::WriteZeros { fua } if left > 0 => {
                Some(self.zeroing_on(&rest, fua))
            }
            Step::Discard { fua, .. } | Step::Unmap { fua } | Step::ZeroRange { fua } => flush(fua),
            // Some of it may have been discarded.
            Step::WriteZeros { fua } if self.reads_zeros(operation.device) => flush(fua),
            _ => (left > 0).then_some(rest),
        })
    }

    /// Goes on to make zeros of what is left of an operation.
    fn zeroing_on(&self, left: &Operation, fua: bool) -> Operation {
        let step = self.zeroing(left.device, left.offset, left.length, fua);
        Operation { step, ..*left }
    }
}

/// What the block layer's errors mean (`blk_errors` of the kernel's
/// block/blk-core.c).
fn failure(device: Device, errno: i32) -> Failure {
    match errno {
        // BLK_STS_MEDIUM, BLK_STS_PROTECTION: the disk has answered.
        libc::ENODATA | libc::EILSEQ => Failure::BadSector,
        // Between the source and us there are a target, a network, an
        // initiator, and perhaps another helper. What they can't say better
        // than EIO, ETIMEDOUT, ENOLINK or EREMOTEIO says nothing of a sector,
        // and may be over in a moment.
        _ if device == Device::Source => Failure::Unreachable,
        libc::ENOSPC => Failure::NoSpace,
        _ => Failure::Io,
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::path::Path;

    use localstor_hydrator_core::{Operation, Request, metadata_size};
    use localstor_hydrator_disks::Access;

    use super::*;

    const SIZE: u64 = 1 << 20;
    const MAPPED: (u32, u32) = (252, 0);
    const DISK: (u32, u32) = (254, 0);

    /// A sysfs with a logical volume on a disk.
    fn sysfs(folder: &Path) {
        let volume = folder.join("devices/dm-0");
        for directory in ["dm", "queue", "slaves"] {
            fs::create_dir_all(volume.join(directory)).unwrap();
        }
        fs::create_dir_all(folder.join("devices/vda")).unwrap();
        fs::create_dir_all(folder.join("dev/block")).unwrap();
        fs::write(volume.join("dm/uuid"), format!("LVM-{:064}\n", 1)).unwrap();
        fs::write(volume.join("queue/write_cache"), "write back\n").unwrap();
        symlink("../../vda", volume.join("slaves/vda")).unwrap();
        for (number, device) in [("252:0", "dm-0"), ("254:0", "vda")] {
            let target = format!("../../devices/{device}");
            symlink(target, folder.join("dev/block").join(number)).unwrap();
        }
    }

    struct Bench {
        folder: tempfile::TempDir,
        ring: Ring,
        engine: Engine,
        buffer: Span,
        answers: Vec<(Tag, Outcome)>,
        notices: Vec<Notice>,
    }

    impl Bench {
        /// An open volume over files, with its data on the logical volume of a
        /// made-up sysfs, and its metadata on the disk below if they are shared.
        fn new(shared: bool) -> Bench {
            let folder = tempfile::tempdir().unwrap();
            sysfs(folder.path());
            let mut bench = Bench::over(folder, Path::new("data"), false);
            if shared {
                bench.engine.disks.cover = Cover::find(bench.folder.path(), MAPPED, DISK);
                assert!(bench.engine.disks.cover.is_some());
            }
            bench
        }

        /// An open volume in a folder, with its data in a file there or on a
        /// device.
        fn over(folder: tempfile::TempDir, data: &Path, zeroed: bool) -> Bench {
            let mut ring = Ring::new(64, false).unwrap();
            let mut open = |name: &Path, size: u64, access: Access| {
                let path = folder.path().join(name);
                fs::write(&path, vec![0xaa; size as usize]).unwrap();
                Disk::open(&path, access, &mut ring).unwrap()
            };
            // The ring of the one before lets go of a device a moment later.
            let exclusive = Access::Exclusive(std::time::Duration::from_secs(10));
            let disks = Disks::new(
                open(data, SIZE, exclusive),
                open(Path::new("metadata"), metadata_size(SIZE), exclusive),
                open(Path::new("source"), SIZE, Access::ReadOnly),
            );
            assert!(disks.cover.is_none(), "files are not disks");
            let mut config = Config::new([3; 16], SIZE, metadata_size(SIZE));
            config.destination_zeroed = zeroed;
            let mut memory = Memory::new(memory_needed(&config) + BLOCK).unwrap();
            let volume = Volume::format(config.clone()).unwrap();
            let buffer = memory.take(BLOCK).unwrap();
            let spool = Spool::open(&folder.path().join("spool"), config.block_slots).unwrap();
            let engine = Engine::new(volume, &config, disks, spool, &mut memory).unwrap();
            let mut bench = Bench {
                folder,
                ring,
                engine,
                buffer,
                answers: Vec::new(),
                notices: Vec::new(),
            };
            bench.turn();
            while !bench.notices.contains(&Notice::Open) {
                bench.wait();
            }
            bench
        }

        fn turn(&mut self) {
            let answers = &mut self.answers;
            self.engine.turn(
                &mut self.ring,
                Time(1),
                |_, tag, outcome| answers.push((tag, outcome)),
                &mut self.notices,
            );
        }

        fn wait(&mut self) {
            self.ring.wait(None).unwrap();
            while let Some(event) = self.ring.next_event() {
                self.engine.on_event(&mut self.ring, Time(1), event);
            }
            self.turn();
        }

        fn submit(&mut self, operation: Operation, length: u64) {
            let span = (length > 0).then_some(self.buffer);
            self.submit_at(0, operation, length, span);
        }

        fn submit_at(
            &mut self,
            offset: u64,
            operation: Operation,
            length: u64,
            span: Option<Span>,
        ) {
            let request = Request {
                tag: Tag(0),
                operation,
                offset,
                length,
            };
            self.engine.submit(Time(1), Arrival { request, span });
            self.turn();
        }

        fn answer(&mut self) -> Outcome {
            loop {
                if let Some((_, outcome)) = self.answers.pop() {
                    return outcome;
                }
                self.wait();
            }
        }

        /// Wait until nothing is on its way.
        fn settle(&mut self) {
            while self.engine.operations.iter().flatten().next().is_some() {
                self.wait();
            }
        }

        /// A write, and a flush that is on its way; which disks are flushed.
        fn write_and_begin_flush(&mut self) -> Vec<Device> {
            self.submit(Operation::Write { fua: false }, BLOCK as u64);
            self.answer().unwrap();
            // It is answered before its intent is written, for which a flush waits.
            self.settle();
            self.submit(Operation::Flush, 0);
            let operations = self.engine.operations.iter().flatten();
            let mut flushed: Vec<_> = operations
                .filter(|operation| operation.step == Step::Flush)
                .map(|operation| operation.device)
                .collect();
            flushed.sort_by_key(|device| *device as u8);
            flushed
        }
    }

    #[test]
    fn data_and_metadata_on_one_disk_are_flushed_at_once() {
        let mut bench = Bench::new(true);
        assert_eq!(bench.write_and_begin_flush(), [Device::Data]);
        assert_eq!(bench.answer(), Ok(()));
    }

    /// The block of the journal in flight: its operation, and where it is kept.
    fn kept(bench: &Bench) -> (u32, u16) {
        let mut operations = bench.engine.operations.iter().zip(0..);
        let found = operations.find_map(|(operation, index)| Some((index, (*operation)?.kept?)));
        found.expect("a block of the journal in flight")
    }

    /// What a successor would find in that place.
    fn spooled(bench: &Bench, place: u16) -> Vec<u8> {
        let spool = std::fs::read(bench.folder.path().join("spool")).unwrap();
        spool[usize::from(place) * BLOCK..][..BLOCK].to_vec()
    }

    #[test]
    fn an_intent_is_kept_before_it_is_submitted_and_until_it_is_written() {
        let mut bench = Bench::new(false);
        bench.submit(Operation::Write { fua: false }, BLOCK as u64);
        let (_, place) = kept(&bench);
        assert!(spooled(&bench, place) == bench.engine.buffers.block(place));
        bench.answer().unwrap();
        bench.settle();
        assert!(spooled(&bench, place)[..512].iter().all(|byte| *byte == 0));
    }

    #[test]
    fn an_intent_that_could_not_be_written_is_kept_on() {
        let mut bench = Bench::new(false);
        bench.submit(Operation::Write { fua: false }, BLOCK as u64);
        let (index, place) = kept(&bench);
        let before = spooled(&bench, place);
        let event = Event {
            token: Token::new(Owner::Engine, index.into()),
            result: -libc::EIO,
            more: false,
        };
        bench.engine.on_event(&mut bench.ring, Time(1), event);
        bench.turn();
        assert!(bench.engine.volume().progress().broken);
        assert!(spooled(&bench, place) == before && before[8] == 1);
    }

    #[test]
    fn data_and_metadata_on_two_disks_are_flushed_each() {
        let mut bench = Bench::new(false);
        let flushed = bench.write_and_begin_flush();
        assert_eq!(flushed, [Device::Data, Device::Metadata]);
        assert_eq!(bench.answer(), Ok(()));
    }

    #[test]
    fn when_the_data_move_the_metadata_are_flushed_again() {
        let mut bench = Bench::new(true);
        let slaves = bench.folder.path().join("devices/dm-0/slaves");
        symlink("../../dm-1", slaves.join("dm-1")).unwrap();
        let flushed = bench.write_and_begin_flush();
        assert_eq!(flushed, [Device::Data, Device::Metadata]);
        assert_eq!(bench.answer(), Ok(()));
    }

    #[test]
    fn a_flush_that_fails_fails_for_both() {
        let mut bench = Bench::new(true);
        bench.write_and_begin_flush();
        let (index, metadata) = bench.engine.covered[0];
        let event = Event {
            token: Token::new(Owner::Engine, index.into()),
            result: -libc::EIO,
            more: false,
        };
        bench.engine.on_event(&mut bench.ring, Time(1), event);
        assert_eq!(bench.engine.covered, [], "{metadata:?} has ended");
        bench.turn();
        assert_eq!(bench.answers.pop(), Some((Tag(0), Err(Failure::Io))));
        assert!(bench.engine.volume().progress().broken);
    }

    #[test]
    fn during_a_pause_nothing_is_begun_and_after_it_all_goes_on() {
        let mut bench = Bench::new(false);
        bench.engine.volume().start();
        while !bench.notices.contains(&Notice::Started) {
            bench.turn();
            bench.wait();
        }
        bench.submit(Operation::Write { fua: true }, BLOCK as u64);
        assert!(!bench.engine.is_at_rest());
        bench.engine.pause(Time(2));
        // Also what is read from the source, so that there is something to write.
        bench.settle();
        let remote = bench.engine.volume().progress().remote;
        assert!(remote > 0, "there is something to copy");
        for tag in 1..4 {
            let request = Request {
                tag: Tag(tag),
                operation: [Operation::Flush, Operation::Read, Operation::Discard]
                    [tag as usize - 1],
                offset: if tag == 1 { 0 } else { 8192 },
                length: if tag == 1 { 0 } else { BLOCK as u64 },
            };
            let span = (tag == 2).then_some(bench.buffer);
            let arrival = Arrival { request, span };
            bench.engine.submit(Time(1), arrival);
            bench.turn();
        }
        assert_eq!(bench.engine.operations.iter().flatten().count(), 0);
        assert_eq!(bench.answers, []);
        assert!(bench.engine.resume());
        bench.turn();
        while bench.answers.len() < 4 || !bench.notices.contains(&Notice::Done) {
            bench.wait();
        }
        assert!(bench.answers.iter().all(|(_, outcome)| outcome.is_ok()));
    }

    #[test]
    fn what_the_source_has_not_answered_does_not_hold_up_a_pause() {
        let mut bench = Bench::new(false);
        bench.submit(Operation::Read, BLOCK as u64);
        let operations = bench.engine.operations.iter().flatten();
        let asked: Vec<_> = operations.map(|operation| operation.device).collect();
        assert_eq!(asked, [Device::Source]);
        bench.engine.pause(Time(2));
        assert!(bench.engine.is_at_rest());
        bench.wait();
        assert_eq!(bench.answers, []);
        bench.engine.resume();
        bench.turn();
        assert_eq!(bench.answer(), Ok(()));
    }

    #[test]
    fn a_pause_ends_by_itself_and_who_resumes_is_told() {
        let mut bench = Bench::new(false);
        assert!(!bench.engine.resume());
        bench.engine.pause(Time(5));
        assert_eq!(bench.engine.wake_at(), Some(Time(5)));
        assert!(!bench.engine.expires(Time(4)));
        assert!(bench.engine.is_paused());
        assert!(bench.engine.expires(Time(5)));
        assert!(!bench.engine.is_paused());
        assert!(!bench.engine.resume());
        bench.submit(Operation::Read, BLOCK as u64);
        assert_eq!(bench.answer(), Ok(()));
    }

    #[test]
    fn a_discard_gives_whole_units_back_and_zeroes_the_rest() {
        const UNIT: u64 = 64 << 10;
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("disk");
        fs::write(&file, vec![0xaa; SIZE as usize]).unwrap();
        let losetup = std::process::Command::new("losetup")
            .args(["--find", "--show", "--direct-io=on"])
            .arg(&file)
            .output();
        let Some(output) = losetup.ok().filter(|output| output.status.success()) else {
            eprintln!("not tried: it takes a loop device, and root");
            return;
        };
        let device = String::from_utf8(output.stdout).unwrap();
        let device = Path::new(device.trim_end());
        for (how, zeroed, offset, length) in [
            (Discard::Command, true, UNIT, 3 * UNIT),
            (Discard::Command, true, UNIT - 8192, 4 * UNIT),
            (Discard::Command, true, 2 * UNIT + 4096, UNIT),
            (Discard::Command, true, 4096, 8192),
            (Discard::Command, false, 0, 2 * UNIT),
            (Discard::Thread, true, UNIT, 3 * UNIT),
            (Discard::Thread, true, UNIT - 8192, 4 * UNIT),
        ] {
            let mut bench = Bench::over(tempfile::tempdir().unwrap(), device, zeroed);
            bench.engine.start_discarder().unwrap();
            assert_eq!(bench.engine.discarder.is_some(), zeroed);
            let (_, least) = bench.engine.discards.unwrap();
            assert!(least <= UNIT);
            bench.engine.discards = Some((how, UNIT));
            bench.submit_at(offset, Operation::Discard, length, None);
            let mut discarded = 0;
            let answer = loop {
                if let Some((_, answer)) = bench.answers.pop() {
                    break answer;
                }
                let pieces = bench.engine.operations.iter().flatten();
                let discards = pieces.map(|operation| match operation.step {
                    Step::Discard { whole, .. } => whole,
                    _ => 0,
                });
                discarded = discards.sum::<u64>().max(discarded);
                bench.wait();
            };
            assert_eq!(answer, Ok(()));
            let (last, _) = bench.engine.discards.unwrap();
            assert!(
                last == how || last == Discard::Thread,
                "Linux before 6.12 has no command"
            );
            let whole = (offset + length) / UNIT * UNIT;
            let whole = whole.saturating_sub(offset.next_multiple_of(UNIT));
            assert_eq!(
                discarded,
                if zeroed { whole } else { 0 },
                "{offset} {length}"
            );
            let mut expected = vec![0xaa; SIZE as usize];
            expected[offset as usize..(offset + length) as usize].fill(0);
            drop(bench);
            assert!(fs::read(device).unwrap() == expected, "{offset} {length}");
        }
        let mut detach = std::process::Command::new("losetup");
        assert!(
            detach
                .arg("--detach")
                .arg(device)
                .status()
                .unwrap()
                .success()
        );
    }

    #[test]
    fn what_a_discard_has_left_is_zeroed_when_another_was_refused_meanwhile() {
        const UNIT: u64 = 64 << 10;
        let mut bench = Bench::over(tempfile::tempdir().unwrap(), Path::new("data"), true);
        let engine = &mut bench.engine;
        engine.discards = Some((Discard::Command, UNIT));
        let discard = super::Operation {
            io: Io::from_bits(1),
            device: Device::Data,
            step: engine.zeroing(Device::Data, 0, UNIT + 4096, true),
            offset: 0,
            length: UNIT + 4096,
            span: None,
            kept: None,
        };
        engine.discards = None;
        let rest = engine.follow_up(&discard, 0).unwrap().unwrap();
        assert_eq!((rest.offset, rest.length), (UNIT, 4096));
        let step = Step::WriteZeros { fua: true };
        let written = super::Operation { step, ..rest };
        let last = engine.follow_up(&written, 4096).unwrap().unwrap();
        assert_eq!(last.step, Step::Flush, "for what was discarded");
    }

    #[test]
    fn only_a_word_of_the_medium_makes_a_bad_sector() {
        let source = |errno| failure(Device::Source, errno);
        for errno in [libc::ENODATA, libc::EILSEQ] {
            assert_eq!(source(errno), Failure::BadSector);
        }
        for errno in [
            libc::EIO,
            libc::EREMOTEIO,
            libc::ETIMEDOUT,
            libc::ENOLINK,
            libc::ENODEV,
            libc::ENXIO,
            libc::EAGAIN,
            libc::ENOMEM,
            libc::EBADE,
        ] {
            assert_eq!(source(errno), Failure::Unreachable, "{errno}");
            assert_eq!(failure(Device::Data, errno), Failure::Io, "{errno}");
        }
        assert_eq!(failure(Device::Data, libc::ENOSPC), Failure::NoSpace);
    }

    #[test]
    fn a_flush_of_the_data_that_is_on_its_way_does_not_do_for_the_metadata() {
        let mut bench = Bench::new(true);
        for (bits, device) in [(1, Device::Data), (2, Device::Metadata)] {
            bench.engine.flushes.push((Io::from_bits(bits), device));
            bench.engine.begin_flushes(&mut bench.ring);
        }
        let operations = bench.engine.operations.iter().flatten();
        let mut flushed: Vec<_> = operations.map(|operation| operation.device).collect();
        flushed.sort_by_key(|device| *device as u8);
        assert_eq!(flushed, [Device::Data, Device::Metadata]);
    }
}
