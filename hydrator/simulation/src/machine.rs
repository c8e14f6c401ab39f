// SPDX-License-Identifier: Apache-2.0

//! A volume with its disks, its source and its memory.

use fastrand::Rng;
use localstor_hydrator_core::{
    Action, Buffer, Config, Device, Failure, Io, Memory, Notice, Operation, Request, Rule, Tag,
    Time, Volume,
};

use crate::disk::{Disk, Pending, SECTOR, Survival};

const BLOCK: usize = 4096;
/// The tag that the simulation itself reads with.
pub const OWN_TAG: Tag = Tag(u32::MAX);

/// The caller's memory.
#[derive(Clone, Debug)]
pub struct Buffers {
    blocks: Vec<u8>,
    extents: Vec<u8>,
    extent_size: usize,
    guests: Vec<(Tag, Vec<u8>)>,
}

impl Buffers {
    fn new(config: &Config) -> Self {
        let extent_size = config.extent_size();
        Self {
            blocks: vec![0xbb; usize::from(config.block_slots) * BLOCK],
            extents: vec![0xee; usize::from(config.copies) * extent_size],
            extent_size,
            guests: Vec::new(),
        }
    }

    fn guest(&self, tag: Tag) -> &[u8] {
        let found = self.guests.iter().find(|(other, _)| *other == tag);
        found
            .map(|(_, content)| content.as_slice())
            .expect("a tag in use")
    }

    fn bytes(&self, buffer: Buffer, length: usize) -> &[u8] {
        match buffer {
            Buffer::Guest { tag, offset } => {
                &self.guest(tag)[offset as usize..offset as usize + length]
            }
            Buffer::Block(slot) => &self.block(slot)[..length],
            Buffer::Extent { slot, offset } => {
                &self.extent(slot)[offset as usize..offset as usize + length]
            }
        }
    }

    fn fill(&mut self, buffer: Buffer, content: &[u8]) {
        let (bytes, at) = match buffer {
            Buffer::Guest { tag, offset } => {
                let found = self.guests.iter_mut().find(|(other, _)| *other == tag);
                (&mut found.expect("a tag in use").1, offset as usize)
            }
            Buffer::Block(slot) => (&mut self.blocks, usize::from(slot) * BLOCK),
            Buffer::Extent { slot, offset } => (
                &mut self.extents,
                usize::from(slot) * self.extent_size + offset as usize,
            ),
        };
        bytes[at..at + content.len()].copy_from_slice(content);
    }
}

impl Memory for Buffers {
    fn block(&self, slot: u16) -> &[u8] {
        &self.blocks[usize::from(slot) * BLOCK..][..BLOCK]
    }

    fn block_mut(&mut self, slot: u16) -> &mut [u8] {
        &mut self.blocks[usize::from(slot) * BLOCK..][..BLOCK]
    }

    fn extent(&self, slot: u16) -> &[u8] {
        &self.extents[usize::from(slot) * self.extent_size..][..self.extent_size]
    }

    fn extent_mut(&mut self, slot: u16) -> &mut [u8] {
        &mut self.extents[usize::from(slot) * self.extent_size..][..self.extent_size]
    }

    fn guest_crc32c(&self, tag: Tag, offset: u32, length: u32, crc: u32) -> u32 {
        let content = &self.guest(tag)[offset as usize..(offset + length) as usize];
        crc32c::crc32c_append(crc, content)
    }

    fn guest_to_block(&mut self, tag: Tag, offset: u32, length: u32, slot: u16, at: usize) {
        let content = self.guest(tag)[offset as usize..(offset + length) as usize].to_vec();
        self.block_mut(slot)[at..at + content.len()].copy_from_slice(&content);
    }

    fn zero_guest(&mut self, tag: Tag, offset: u32, length: u32) {
        self.fill(Buffer::Guest { tag, offset }, &vec![0; length as usize]);
    }
}

/// An operation in flight.
#[derive(Clone, Debug)]
pub struct Op {
    io: Io,
    /// It is kept, whatever becomes of the process, until it is written.
    kept: bool,
    /// What it was sent to.
    pub device: Device,
    kind: Kind,
    /// Of a flush of D: what it makes durable of M, if both are on one disk.
    metadata: Option<Pending>,
    /// Flushes of M that are left to it.
    covered: Vec<Io>,
    /// The caller may carry it out piece by piece.
    in_pieces: bool,
}

/// Which flushes of M are left to a flush of D, because both are on one disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shared {
    /// None: they are on two disks.
    Nothing,
    /// Those that are asked for together with it.
    SameBatch,
    /// Any while it is in flight. That is wrong: what has completed since it
    /// was submitted is not durable when it ends.
    InFlight,
}

impl Op {
    const fn new(io: Io, device: Device, kind: Kind) -> Self {
        Self {
            io,
            kept: false,
            device,
            kind,
            metadata: None,
            covered: Vec::new(),
            in_pieces: false,
        }
    }

    fn is_flush(&self, device: Device) -> bool {
        self.device == device && matches!(self.kind, Kind::Disk(Pending::Flush { .. }))
    }
}

#[derive(Clone, Debug)]
enum Kind {
    Read {
        offset: usize,
        length: usize,
        buffer: Buffer,
        /// What was there when it was submitted, if that is what it gives.
        early: Option<Vec<u8>>,
    },
    Disk(Pending),
}

/// Data that were sent to the destination for the guest, whole blocks.
#[derive(Clone, Debug)]
pub struct Sent {
    /// Where, in bytes.
    pub offset: usize,
    /// What.
    pub content: Vec<u8>,
}

/// What the devices do wrong.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    /// Of a hundred writes to the destination, so many fail.
    pub data: u8,
    /// Of a hundred writes to the destination with FUA, so many fail.
    pub durable: u8,
    /// Of a hundred writes to the metadata, so many fail.
    pub metadata: u8,
    /// Of a hundred flushes, so many fail.
    pub flushes: u8,
    /// Of a hundred reads of the source, so many find it away.
    pub away: u8,
    /// Blocks of the source that cannot be read.
    pub bad: Vec<usize>,
    /// Blocks of the source that it never answers.
    pub silent: Vec<usize>,
    /// Of a hundred copies that are written to the destination, or read back
    /// from there, so many are not what they should be. Nobody is told.
    pub lies: u8,
    /// Blocks of the destination where copies are never written as they should
    /// be.
    pub liars: Vec<usize>,
}

impl Faults {
    /// Whether this operation fails, and how.
    fn of(&self, pending: &Pending, device: Device, random: &mut Rng) -> Option<Failure> {
        let (failing, failure) = match (pending, device) {
            (Pending::Flush { .. }, _) => (self.flushes, Failure::Io),
            (Pending::Write { fua: true, .. }, Device::Data) => (self.durable, Failure::Io),
            (_, Device::Data) => (self.data, Failure::NoSpace),
            _ => (self.metadata, Failure::Io),
        };
        (failing > 0 && random.u8(0..100) < failing).then_some(failure)
    }
}

/// A volume with its disks, its source and its memory.
#[derive(Debug)]
pub struct Machine {
    /// The state machine.
    pub volume: Volume,
    memory: Buffers,
    /// D.
    pub data: Disk,
    /// M.
    pub metadata: Disk,
    /// S.
    pub source: Vec<u8>,
    /// What is in flight.
    pub ops: Vec<Op>,
    /// The time.
    pub now: Time,
    /// Answers to the guest that were not looked at.
    pub answers: Vec<(Tag, Result<(), Failure>)>,
    /// Notices that were not looked at.
    pub notices: Vec<Notice>,
    /// What was sent for the guest and not looked at.
    pub sent: Vec<Sent>,
    /// What the devices do wrong.
    pub faults: Faults,
    /// Which flushes of M are left to a flush of D.
    pub shared: Shared,
    /// What is kept of writes that have failed is kept on.
    pub keeps_failed: bool,
    /// Such writes.
    failed: Vec<Pending>,
    /// D has failed, or M may have dropped what it had in its cache, and that is
    /// not over: the guest was not told yet, or nothing is recorded any more.
    dropping: bool,
}

impl Machine {
    /// A volume over these disks, to be opened.
    pub fn new(
        config: &Config,
        rule: Option<Rule>,
        format: Option<u64>,
        data: Disk,
        metadata: Disk,
        source: Vec<u8>,
    ) -> Self {
        let volume = match format {
            Some(journal) => Volume::format_with_journal(config.clone(), journal),
            None => Volume::open(config.clone()),
        };
        let mut volume = volume.expect("a configuration that works");
        if let Some(rule) = rule {
            volume.drop_rule(rule);
        }
        Self {
            volume,
            memory: Buffers::new(config),
            data,
            metadata,
            source,
            ops: Vec::new(),
            now: Time(1),
            answers: Vec::new(),
            notices: Vec::new(),
            sent: Vec::new(),
            faults: Faults::default(),
            shared: Shared::Nothing,
            keeps_failed: true,
            failed: Vec::new(),
            dropping: false,
        }
    }

    /// Whether a disk has failed what is not over: the guest was not told yet,
    /// or nothing is recorded any more.
    pub fn has_failed(&self) -> bool {
        self.dropping || self.volume.progress().broken
    }

    /// Whether a write has failed whose content is kept on.
    pub fn keeps_what_failed(&self) -> bool {
        !self.failed.is_empty()
    }

    /// Whether a disk has failed in such a way that the end of the process may
    /// take what a power cut may.
    pub const fn may_have_dropped(&self) -> bool {
        self.dropping
    }

    /// Feed in a guest's request with its buffer.
    pub fn request(&mut self, request: Request, buffer: Vec<u8>) {
        self.memory.guests.push((request.tag, buffer));
        self.volume.request(self.now, request, &mut self.memory);
    }

    /// Take a request's buffer back.
    pub fn take_buffer(&mut self, tag: Tag) -> Vec<u8> {
        let at = self
            .memory
            .guests
            .iter()
            .position(|(other, _)| *other == tag);
        self.memory.guests.swap_remove(at.expect("a tag in use")).1
    }

    /// Take the volume's actions.
    pub fn pump(&mut self, random: &mut Rng) {
        let mut actions = Vec::new();
        self.volume
            .actions(self.now, &mut self.memory, |action| actions.push(action));
        let before = self.ops.len();
        for action in actions {
            self.take(action, random);
        }
        self.share_flushes(before);
        self.dropping &= !self.ops.is_empty() || self.volume.progress().broken;
    }

    /// Leave the flushes of M among the operations from number `batch` on to
    /// one of D.
    ///
    /// A lone flush of D or M makes nothing durable of the other, which a disk
    /// with both would do; so all crash states of that disk are among those
    /// that are found here, and more.
    fn share_flushes(&mut self, batch: usize) {
        let from = match self.shared {
            Shared::Nothing => return,
            Shared::SameBatch => batch,
            Shared::InFlight => 0,
        };
        if !self.ops[from..].iter().any(|op| op.is_flush(Device::Data)) {
            return;
        }
        let begun = self.ops.split_off(batch).into_iter();
        let (left, rest): (Vec<_>, Vec<_>) = begun.partition(|op| op.is_flush(Device::Metadata));
        self.ops.extend(rest);
        let data = self.ops[from..]
            .iter_mut()
            .find(|op| op.is_flush(Device::Data));
        if let Some(data) = data {
            data.covered.extend(left.iter().map(|op| op.io));
        }
    }

    fn take(&mut self, action: Action, random: &mut Rng) {
        let op = match action {
            Action::Complete { tag, result } => return self.answers.push((tag, result)),
            Action::Notice(notice) => return self.notices.push(notice),
            Action::Read {
                io,
                device,
                offset,
                length,
                buffer,
            } => {
                let (offset, length) = (offset as usize, length as usize);
                let early = random
                    .bool()
                    .then(|| self.content(device, offset, length).to_vec());
                let kind = Kind::Read {
                    offset,
                    length,
                    buffer,
                    early,
                };
                Op::new(io, device, kind)
            }
            Action::Write {
                io,
                device,
                offset,
                length,
                buffer,
                fua,
                kept,
            } => {
                let mut content = self.memory.bytes(buffer, length as usize).to_vec();
                if device == Device::Data && matches!(buffer, Buffer::Extent { .. }) {
                    self.lie(offset as usize, &mut content, random);
                }
                if device == Device::Data && !matches!(buffer, Buffer::Extent { .. }) {
                    self.sent.push(Sent {
                        offset: offset as usize,
                        content: content.clone(),
                    });
                }
                Op {
                    kept,
                    ..Self::write(io, device, offset, content, fua)
                }
            }
            Action::Zero {
                io,
                device,
                offset,
                length,
                fua,
            } => {
                let content = vec![0; length as usize];
                if device == Device::Data {
                    self.sent.push(Sent {
                        offset: offset as usize,
                        content: content.clone(),
                    });
                }
                Op {
                    in_pieces: true,
                    ..Self::write(io, device, offset, content, fua)
                }
            }
            Action::Flush { io, device } => {
                let disk = if device == Device::Data {
                    &self.data
                } else {
                    &self.metadata
                };
                let kind = Kind::Disk(disk.flush());
                let metadata = (device == Device::Data).then(|| self.metadata.flush());
                Op {
                    metadata,
                    ..Op::new(io, device, kind)
                }
            }
        };
        self.ops.push(op);
    }

    fn write(io: Io, device: Device, offset: u64, content: Vec<u8>, fua: bool) -> Op {
        assert_ne!(device, Device::Source, "the source is only read");
        let kind = Kind::Disk(Pending::Write {
            offset: offset as usize,
            content,
            fua,
        });
        Op::new(io, device, kind)
    }

    /// Spoil what is copied to the destination: a sector keeps what it had.
    fn lie(&self, offset: usize, content: &mut [u8], random: &mut Rng) {
        let length = content.len();
        let mut spoil = |at: usize| {
            let old = self.data.read(offset + at, SECTOR);
            content[at..at + SECTOR].copy_from_slice(old);
        };
        for liar in &self.faults.liars {
            let at = (liar * BLOCK).wrapping_sub(offset);
            if at < length {
                spoil(at);
            }
        }
        if self.faults.lies > 0 && random.u8(0..100) < self.faults.lies {
            spoil(random.usize(0..length / SECTOR) * SECTOR);
        }
    }

    fn content(&self, device: Device, offset: usize, length: usize) -> &[u8] {
        match device {
            Device::Data => self.data.read(offset, length),
            Device::Metadata => self.metadata.read(offset, length),
            Device::Source => &self.source[offset..offset + length],
        }
    }

    /// Complete operation number `index` of those in flight.
    pub fn complete(&mut self, index: usize, random: &mut Rng) {
        let op = self.ops.swap_remove(index);
        let result = self.carry_out(&op, random);
        self.now = Time(self.now.0 + random.u64(0..200_000));
        if let Some(pending) = op.metadata.filter(|_| !op.covered.is_empty()) {
            self.metadata.complete(&pending);
        }
        for io in [op.io].into_iter().chain(op.covered) {
            self.volume
                .completed(self.now, io, result, &mut self.memory);
        }
    }

    fn carry_out(&mut self, op: &Op, random: &mut Rng) -> Result<(), Failure> {
        match &op.kind {
            Kind::Read {
                offset,
                length,
                buffer,
                early,
            } => {
                let unreadable = match op.device {
                    Device::Source => {
                        self.ask_source(*offset, *length, random)?;
                        false
                    }
                    Device::Data => self.data.is_unreadable(*offset, *length),
                    Device::Metadata => self.metadata.is_unreadable(*offset, *length),
                };
                if unreadable {
                    return Err(Failure::BadSector);
                }
                let mut content = match early {
                    Some(content) => content.clone(),
                    None => self.content(op.device, *offset, *length).to_vec(),
                };
                let read_back =
                    op.device == Device::Data && matches!(buffer, Buffer::Extent { .. });
                if read_back && self.faults.lies > 0 && random.u8(0..100) < self.faults.lies {
                    content[random.usize(0..*length)] ^= 0x10;
                }
                self.memory.fill(*buffer, &content);
            }
            Kind::Disk(pending) => {
                let disk = if op.device == Device::Data {
                    &mut self.data
                } else {
                    &mut self.metadata
                };
                if let Some(failure) = self.faults.of(pending, op.device, random) {
                    disk.fail(pending, random);
                    self.dropping |= op.device == Device::Data || pending.is_durable();
                    if op.kept && self.keeps_failed {
                        self.failed.push(pending.clone());
                    }
                    return Err(failure);
                }
                disk.complete(pending);
            }
        }
        Ok(())
    }

    fn ask_source(&self, offset: usize, length: usize, random: &mut Rng) -> Result<(), Failure> {
        if random.u8(0..100) < self.faults.away {
            return Err(Failure::Unreachable);
        }
        let blocks = offset / BLOCK..(offset + length).div_ceil(BLOCK);
        if self.faults.silent.iter().any(|at| blocks.contains(at)) {
            return Err(Failure::Unreachable);
        }
        if self.faults.bad.iter().any(|bad| blocks.contains(bad)) {
            return Err(Failure::BadSector);
        }
        Ok(())
    }

    /// Complete one operation, or let time pass until something happens; false
    /// if nothing ever will.
    pub fn step(&mut self, random: &mut Rng) -> bool {
        self.pump(random);
        if !self.ops.is_empty() {
            self.complete(random.usize(0..self.ops.len()), random);
        } else if let Some(at) = self.volume.wake_at() {
            self.now = self.now.max(at);
        } else {
            return false;
        }
        self.pump(random);
        true
    }

    /// Run until the volume is open.
    ///
    /// # Errors
    /// If it does not open.
    pub fn open(&mut self, random: &mut Rng) -> Result<(), String> {
        loop {
            if let Some(failed) = self
                .notices
                .iter()
                .find(|notice| matches!(notice, Notice::OpenFailed(_)))
            {
                return Err(format!("the volume does not open: {failed:?}"));
            }
            if self.notices.contains(&Notice::Open) {
                return Ok(());
            }
            if !self.step(random) {
                return Err("opening stands still".into());
            }
        }
    }

    /// Read the volume from its beginning to its end.
    ///
    /// # Errors
    /// If that fails.
    pub fn read_all(&mut self, random: &mut Rng) -> Result<Vec<u8>, String> {
        let size = self.volume.progress().size;
        self.carry_through(Operation::Read, 0, vec![0xcc; size as usize], random)?
            .map_err(|failure| format!("reading all of it: {failure}"))
    }

    /// Feed in a request of the simulation's own and run until it is answered:
    /// its buffer.
    ///
    /// # Errors
    /// If it never is.
    pub fn carry_through(
        &mut self,
        operation: Operation,
        offset: u64,
        buffer: Vec<u8>,
        random: &mut Rng,
    ) -> Result<Result<Vec<u8>, Failure>, String> {
        let request = Request {
            tag: OWN_TAG,
            operation,
            offset,
            length: buffer.len() as u64,
        };
        self.request(request, buffer);
        loop {
            self.pump(random);
            if let Some(at) = self.answers.iter().position(|(tag, _)| *tag == OWN_TAG) {
                let (_, result) = self.answers.swap_remove(at);
                let buffer = self.take_buffer(OWN_TAG);
                return Ok(result.map(|()| buffer));
            }
            if !self.step(random) {
                return Err(format!("{operation:?} stands still"));
            }
        }
    }

    fn pending(&self, device: Device) -> impl Iterator<Item = &Pending> {
        self.ops.iter().filter_map(move |op| match &op.kind {
            Kind::Disk(pending) if op.device == device => Some(pending),
            _ => None,
        })
    }

    /// Carry out on M what is kept.
    fn restore(&self, metadata: &mut Disk) {
        let kept = self.ops.iter().filter(|op| op.kept);
        let writing = kept.filter_map(|op| match &op.kind {
            Kind::Disk(pending) => Some(pending),
            Kind::Read { .. } => None,
        });
        for pending in self.failed.iter().chain(writing) {
            metadata.complete(pending);
        }
    }

    /// What a power cut leaves on D and M. What is kept goes with it, or not:
    /// that it is in memory is not counted on.
    pub fn cut_power(&self, random: &mut Rng) -> (Disk, Disk) {
        let (data, metadata) = (Survival::any(random), Survival::any(random));
        let data = self
            .data
            .cut_power(self.pending(Device::Data), data, random);
        let in_flight = self.pending(Device::Metadata);
        let mut metadata = self.metadata.cut_power(in_flight, metadata, random);
        if random.bool() {
            self.restore(&mut metadata);
            // Who cuts the power again finds it kept still.
            metadata.complete(&metadata.flush());
        }
        (data, metadata)
    }

    /// What a power cut leaves that takes all that was not flushed.
    pub fn cut_power_hard(&self, random: &mut Rng) -> (Disk, Disk) {
        let nothing = Survival::Nothing;
        (
            self.data.cut_power([].into_iter(), nothing, random),
            self.metadata.cut_power([].into_iter(), nothing, random),
        )
    }

    /// What the end of the process leaves on D and M, once the kernel has
    /// completed what it goes on with, and what is kept was carried out. Any of
    /// what was in flight may not have been submitted, or was waiting for a thread
    /// of the process to begin with it, and is dropped. The caches stay.
    pub fn kill(&self, random: &mut Rng) -> (Disk, Disk) {
        let (mut data, mut metadata) = (self.data.clone(), self.metadata.clone());
        let drops = random.bool();
        let goes_on = |_: &&Op| !drops || random.bool();
        let mut given: Vec<_> = self.ops.iter().filter(goes_on).collect();
        random.shuffle(&mut given);
        for op in given {
            let Kind::Disk(pending) = &op.kind else {
                continue;
            };
            let disk = if op.device == Device::Data {
                &mut data
            } else {
                &mut metadata
            };
            if op.in_pieces && random.bool() {
                disk.complete_beginning(pending, random);
            } else {
                disk.complete(pending);
                let also = op.metadata.as_ref().filter(|_| !op.covered.is_empty());
                also.into_iter().for_each(|also| metadata.complete(also));
            }
        }
        self.restore(&mut metadata);
        (data, metadata)
    }
}
