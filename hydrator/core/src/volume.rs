// SPDX-License-Identifier: Apache-2.0

//! The state machine: what is asked of it, and what comes of each completion.
//!
//! The parts of it: [`writes`](crate::writes) for requests to what is not
//! settled, [`source`](crate::source) for what is read from the source,
//! [`flushes`](crate::flushes) for flushes, settling and checkpoints,
//! [`condensing`](crate::condensing) for those that leave the bitmap alone,
//! [`hydration`](crate::hydration) for copies,
//! [`verification`](crate::verification) for what is compared of them,
//! [`opening`](crate::opening) for recovery.

use std::collections::{BTreeSet, VecDeque};

use crate::condensing::Condensing;
use crate::flushes::{Checkpoint, Flushes};
use crate::hydration::{Hydration, SCAN_MOST};
use crate::log::Log;
use crate::map::Map;
use crate::opening::Opening;
use crate::pace::{self, Pace};
use crate::rules::Rules;
use crate::source::Source;
use crate::superblock::{Superblock, bitmap_blocks};
use crate::unsettled::Unsettled;
use crate::verification::Verification;
use crate::writes::{Phase, Slow};
use crate::{
    Action, BLOCK_SIZE, Buffer, Config, Device, Failure, Io, Memory, Notice, OpenError, Operation,
    Rate, Request, Tag, Time,
};

/// What an [`Io`] is for; its upper byte.
pub(crate) mod kind {
    /// Nothing waits for it.
    pub(crate) const NOBODY: u64 = 0;
    pub(crate) const PASS: u64 = 1;
    pub(crate) const DATA: u64 = 2;
    pub(crate) const SOURCE: u64 = 3;
    pub(crate) const JOURNAL: u64 = 4;
    pub(crate) const FLUSH: u64 = 5;
    pub(crate) const BITMAP: u64 = 6;
    pub(crate) const BITMAP_FLUSH: u64 = 7;
    pub(crate) const SUPERBLOCK: u64 = 8;
    pub(crate) const COPY_READ: u64 = 9;
    pub(crate) const COPY_WRITE: u64 = 10;
    pub(crate) const OPENING: u64 = 11;
    pub(crate) const VERIFY: u64 = 12;
    /// As PASS, and durable when it ends.
    pub(crate) const PASS_FUA: u64 = 13;
}

pub(crate) const fn io(kind: u64, detail: u64) -> Io {
    Io(kind << 56 | detail)
}

/// Blocks of 4 KiB that copy-ups leave for the metadata.
pub(crate) const RESERVED_SLOTS: usize = 8;

/// Where a volume is in its life.
#[derive(Debug)]
pub(crate) enum State {
    Opening(Box<Opening>),
    Open,
    Closed,
}

/// A moving volume.
#[derive(Debug)]
pub struct Volume {
    pub(crate) config: Config,
    pub(crate) rules: Rules,
    pub(crate) state: State,
    /// As it is on the metadata device.
    pub(crate) superblock: Superblock,
    /// As it should be there.
    pub(crate) wanted: Superblock,
    /// What is being written, in which buffer, and to which copy.
    writing_superblock: Option<(Superblock, u16, u64)>,
    pub(crate) map: Map,
    pub(crate) unsettled: Unsettled,
    pub(crate) log: Log,
    pub(crate) pace: Pace,
    pub(crate) flushes: Flushes,
    pub(crate) checkpoint: Checkpoint,
    pub(crate) condensing: Condensing,
    pub(crate) hydration: Hydration,
    pub(crate) verification: Verification,
    pub(crate) source: Source,
    pub(crate) actions: VecDeque<Action>,
    pub(crate) requests: Vec<Slow>,
    pub(crate) free_requests: Vec<u32>,
    /// Requests that wait for something, in the order in which they came.
    pub(crate) parked: VecDeque<u32>,
    /// Something has changed that a parked request may wait for.
    pub(crate) retry: bool,
    /// Requests passed through that have not ended.
    passing: u64,
    pub(crate) free_blocks: Vec<u16>,
    /// Writes to the destination in flight over content that is not settled.
    pub(crate) second_writes: u32,
    /// Writes in flight over what was read from the destination, though not
    /// settled: such content, or copies that are not recorded.
    pub(crate) overwrites: u32,
    /// Large discards: the blocks from, to, and the request.
    pub(crate) ranges: Vec<(u64, u64, u32)>,
    /// Remote blocks of which it is not known what they hold.
    pub(crate) unreadable: BTreeSet<u64>,
    pub(crate) broken: bool,
    closing: bool,
    done: bool,
    pub(crate) written: u64,
    pub(crate) metadata_written: u64,
    now: Time,
}

/// How far the move is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Size of the volume, in bytes.
    pub size: u64,
    /// Still only on the source, in bytes.
    pub remote: u64,
    /// Copied from the source since the volume was opened, in bytes, and
    /// compared where that is to be done.
    pub copied: u64,
    /// Of these, zeros that were not written, in bytes.
    pub zeros: u64,
    /// What hydration may copy at present, in bytes per second; `None` is
    /// without limit.
    pub rate: Option<u64>,
    /// Blocks that are local but not settled.
    pub unsettled: u64,
    /// Blocks of the journal in use.
    pub journal_used: u64,
    /// Length of the journal, in blocks.
    pub journal_blocks: u64,
    /// Bytes of guest writes to blocks that were not settled.
    pub written: u64,
    /// Bytes written to the metadata device.
    pub metadata_written: u64,
    /// Guest requests that wait for another request, the journal or the source.
    pub waiting: u64,
    /// Blocks of the source that cannot be read.
    pub bad: u64,
    /// Blocks that were to be copied and that the source does not answer: they
    /// are asked for again.
    pub unanswered: u64,
    /// Of what was copied, compared with the source, in bytes.
    pub verified: u64,
    /// Blocks that were found to differ, each time they were.
    pub differences: u64,
    /// Blocks that differ although they were copied again; they are remote.
    pub differing: u64,
    /// Where the first of these is, in bytes.
    pub first_differing: Option<u64>,
    /// Blocks of which it is not known what they hold, as the destination could
    /// not read them when the volume was opened.
    pub unreadable: u64,
    /// Where the first of these is, in bytes.
    pub first_unreadable: Option<u64>,
    /// Hydration may run: the source is immutable.
    pub started: bool,
    /// The source does not answer, or not everything.
    pub stalled: bool,
    /// Nothing is settled any more, see [`Notice::Broken`].
    pub broken: bool,
    /// See [`Notice::Done`].
    pub done: bool,
}

impl Volume {
    /// Write new metadata for a move that begins, and open the volume: all of
    /// it is remote.
    ///
    /// # Errors
    /// A figure of the configuration that cannot work.
    pub fn format(config: Config) -> Result<Self, OpenError> {
        let needed = crate::metadata_size(config.size);
        if config.metadata_size < needed {
            return Err(OpenError::TooSmall {
                needed,
                found: config.metadata_size,
            });
        }
        Self::new(config, Opening::format)
    }

    /// Like [`Volume::format`], with a journal of so many blocks instead of
    /// [`superblock::journal_blocks`](crate::superblock::journal_blocks).
    ///
    /// # Errors
    /// A figure of the configuration that cannot work.
    pub fn format_with_journal(config: Config, journal_blocks: u64) -> Result<Self, OpenError> {
        let mut volume = Self::new(config, Opening::format)?;
        volume.wanted.journal_blocks = journal_blocks;
        volume
            .wanted
            .check()
            .map_err(|_| OpenError::Config("the journal's length is out of bounds"))?;
        let needed = volume.wanted.metadata_size();
        if volume.config.metadata_size < needed {
            return Err(OpenError::TooSmall {
                needed,
                found: volume.config.metadata_size,
            });
        }
        Ok(volume)
    }

    /// Read the metadata of a move, recover what it was doing, and open the
    /// volume: [`Notice::Open`] or [`Notice::OpenFailed`] tells the end of it.
    ///
    /// # Errors
    /// A figure of the configuration that cannot work.
    pub fn open(config: Config) -> Result<Self, OpenError> {
        Self::new(config, Opening::recover)
    }

    fn new(config: Config, opening: impl FnOnce() -> Opening) -> Result<Self, OpenError> {
        let superblock = Superblock {
            version: crate::superblock::VERSION,
            move_id: config.move_id,
            generation: 0,
            epoch: 1,
            size: config.size,
            source_size: config.source_size,
            logical_block_size: config.logical_block_size,
            journal_blocks: crate::superblock::journal_blocks(config.size),
            bitmap_blocks: bitmap_blocks(config.size),
            started: false,
            complete: false,
            unreadable: crate::superblock::Unreadable::default(),
        };
        let holds = [
            (
                superblock.check().is_ok(),
                "sizes must be multiples of 4096 bytes, up to 64 TiB, \
                 the source's not the larger, logical blocks of 512 or 4096 bytes",
            ),
            (config.requests > 0, "there must be room for a request"),
            (config.block_slots >= 16, "there must be 16 blocks or more"),
            (config.copies > 0, "there must be a buffer for copies"),
            (
                config.region_blocks.is_power_of_two() && config.region_blocks <= 256,
                "a region's blocks must be a power of two, up to 256",
            ),
            (
                config.range_from > 0 && config.range_from <= 256,
                "a range must begin at 1 to 256 blocks",
            ),
            (
                config.journal_depth > 0 && config.unsettled >= 512,
                "journal depth must be 1, unsettled blocks 512 at least",
            ),
        ];
        if let Some((_, what)) = holds.iter().find(|(holds, _)| !holds) {
            return Err(OpenError::Config(what));
        }
        Ok(Self {
            rules: Rules::default(),
            state: State::Opening(Box::new(opening())),
            superblock,
            wanted: superblock,
            writing_superblock: None,
            map: Map::default(),
            unsettled: Unsettled::default(),
            log: Log::default(),
            pace: Pace::new(config.rate),
            flushes: Flushes::default(),
            checkpoint: Checkpoint::default(),
            condensing: Condensing::new(),
            hydration: Hydration::new(config.copies),
            verification: Verification::new(&config),
            source: Source::default(),
            actions: VecDeque::with_capacity(1024),
            requests: Vec::with_capacity(config.requests),
            free_requests: Vec::with_capacity(config.requests),
            parked: VecDeque::with_capacity(config.requests),
            retry: false,
            passing: 0,
            free_blocks: (0..config.block_slots).rev().collect(),
            second_writes: 0,
            overwrites: 0,
            ranges: Vec::new(),
            unreadable: BTreeSet::new(),
            broken: false,
            closing: false,
            done: false,
            written: 0,
            metadata_written: 0,
            now: Time(0),
            config,
        })
    }

    /// Leave out a rule, to see whether the tests notice.
    #[cfg(feature = "mutants")]
    pub fn drop_rule(&mut self, rule: crate::Rule) {
        self.rules.dropped = Some(rule);
    }

    /// A guest's request. Its [`Action::Complete`] follows when it has ended.
    pub fn request<M: Memory>(&mut self, now: Time, request: Request, memory: &mut M) {
        self.now = now;
        if !matches!(self.state, State::Open) || self.closing {
            return self.refuse(request.tag, Failure::NotOpen);
        }
        if request.operation == Operation::Flush {
            self.time_request(&request, pace::Kind::Flush);
            return self.flush_requested(request.tag);
        }
        let size = self.map.size();
        let unit = u64::from(self.config.logical_block_size);
        let Some(end) = request.offset.checked_add(request.length) else {
            return self.refuse(request.tag, Failure::Invalid);
        };
        if end > size || (request.offset | request.length) % unit != 0 {
            return self.refuse(request.tag, Failure::Invalid);
        }
        match request.operation {
            Operation::Read => self.read(request, memory),
            Operation::Write { fua } => self.write(request, fua, memory),
            Operation::Discard => {
                let first = request.offset.next_multiple_of(BLOCK_SIZE);
                let end = end / BLOCK_SIZE * BLOCK_SIZE;
                let inner = Request {
                    offset: first,
                    length: end.saturating_sub(first),
                    ..request
                };
                self.zero(inner, false, memory);
            }
            Operation::WriteZeroes { fua } => self.zero(request, fua, memory),
            Operation::Flush => {}
        }
    }

    pub(crate) const fn time(&self) -> Time {
        self.now
    }

    #[inline]
    fn time_request(&mut self, request: &Request, kind: pace::Kind) {
        let alone = self.hydration.is_idle();
        self.pace
            .begun(self.now, request.tag, kind, request.length, alone);
    }

    fn refuse(&mut self, tag: Tag, failure: Failure) {
        self.actions.push_back(Action::Complete {
            tag,
            result: Err(failure),
        });
    }

    /// Answer the guest; a successor answers what waits for the source.
    #[inline]
    pub(crate) fn answer(&mut self, tag: Tag, result: Result<(), Failure>) {
        self.pace.ended(self.now, tag);
        if self.closing && result == Err(Failure::Unreachable) {
            return;
        }
        self.actions.push_back(Action::Complete { tag, result });
    }

    fn read<M: Memory>(&mut self, request: Request, memory: &mut M) {
        let Ok(length) = u32::try_from(request.length) else {
            return self.refuse(request.tag, Failure::Invalid);
        };
        if length == 0 {
            return self.answer(request.tag, Ok(()));
        }
        let (first, end) = blocks(request.offset, request.length);
        if self.map.all_local(first, end) && !self.is_overwritten(first, end) {
            self.time_request(&request, pace::Kind::Read);
            self.passing += 1;
            self.actions.push_back(Action::Read {
                io: io(kind::PASS, u64::from(request.tag.0)),
                device: Device::Data,
                offset: request.offset,
                length,
                buffer: Buffer::Guest {
                    tag: request.tag,
                    offset: 0,
                },
            });
            return;
        }
        self.time_request(&request, pace::Kind::RemoteRead);
        self.admit(request, false, Phase::Read, memory);
    }

    fn write<M: Memory>(&mut self, request: Request, fua: bool, memory: &mut M) {
        let Ok(length) = u32::try_from(request.length) else {
            return self.refuse(request.tag, Failure::Invalid);
        };
        if length == 0 {
            return self.answer(request.tag, Ok(()));
        }
        self.time_request(&request, pace::Kind::Write);
        let (first, end) = blocks(request.offset, request.length);
        if self.all_settled(first, end) {
            self.passing += 1;
            self.actions.push_back(Action::Write {
                io: passing(&request, fua),
                device: Device::Data,
                offset: request.offset,
                length,
                buffer: Buffer::Guest {
                    tag: request.tag,
                    offset: 0,
                },
                fua,
            });
            return;
        }
        self.admit(request, fua, Phase::Claim, memory);
    }

    fn zero<M: Memory>(&mut self, request: Request, fua: bool, memory: &mut M) {
        if request.length == 0 {
            return self.answer(request.tag, Ok(()));
        }
        let (first, end) = blocks(request.offset, request.length);
        if self.all_settled(first, end) {
            self.passing += 1;
            self.actions.push_back(Action::Zero {
                io: passing(&request, fua),
                device: Device::Data,
                offset: request.offset,
                length: request.length,
                fua,
            });
            return;
        }
        self.admit(request, fua, Phase::Claim, memory);
    }

    /// Whether a block is settled: I/O to it needs no more than the disk.
    #[inline]
    pub(crate) fn is_settled(&self, block: u64) -> bool {
        let region = self.map.region_of(block);
        self.map.is_local(block)
            && (self.map.region_is_quiet(region)
                || !self.unsettled.contains_key(&block)
                    && (self.hydration.is_hydrated(&self.map, block).is_none()
                        || !self.rules.keep(crate::rules::Rule::HydratedIsNotSettled)))
    }

    #[inline]
    fn all_settled(&self, first: u64, end: u64) -> bool {
        if !self.map.all_local(first, end) {
            return false;
        }
        let mut regions = self.map.region_of(first)..=self.map.region_of(end - 1);
        regions.all(|region| self.map.region_is_quiet(region))
            || (first..end).all(|block| self.is_settled(block))
    }

    /// An operation has ended.
    pub fn completed<M: Memory>(
        &mut self,
        now: Time,
        io: Io,
        result: Result<(), Failure>,
        memory: &mut M,
    ) {
        self.now = now;
        let detail = io.0 & (u64::MAX >> 8);
        match io.0 >> 56 {
            kind::PASS => {
                self.passing -= 1;
                self.answer(Tag(detail as u32), result);
            }
            kind::PASS_FUA => {
                self.passing -= 1;
                self.durable_ended(result);
                self.answer(Tag(detail as u32), result);
            }
            kind::DATA => self.data_ended(detail as u32, result, memory),
            kind::SOURCE => self.source_ended(now, detail as u32, result, memory),
            kind::JOURNAL => self.group_ended(detail as u32, result, memory),
            kind::FLUSH => self.flush_ended(detail, result),
            kind::BITMAP => self.bitmap_block_ended(detail as u16, result),
            kind::BITMAP_FLUSH => self.bitmap_flushed(result),
            kind::SUPERBLOCK => self.superblock_ended(result),
            kind::COPY_READ => self.copy_read(now, detail as u16, result, memory),
            kind::VERIFY => self.verify_read(now, detail as u16, result, memory),
            kind::COPY_WRITE => self.copy_written(detail as u16, result),
            kind::OPENING => self.opening_ended(detail, result, memory),
            _ => {}
        }
    }

    /// When [`Volume::actions`] is to be called, if nothing happens before.
    #[must_use]
    pub fn wake_at(&self) -> Option<Time> {
        if !matches!(self.state, State::Open) {
            return None;
        }
        [
            self.source.wake_at(),
            // Nothing is copied any more when the volume is being closed.
            self.hydration.wake_at.filter(|_| !self.closing),
            self.checkpoint.wake_at,
        ]
        .into_iter()
        .flatten()
        .min()
    }

    /// End a batch, and take what is to be done.
    pub fn actions<M: Memory>(&mut self, now: Time, memory: &mut M, sink: impl FnMut(Action)) {
        self.now = now;
        match self.state {
            State::Open => self.advance(memory),
            State::Opening(_) => self.opening_advance(memory),
            State::Closed => {}
        }
        self.actions.drain(..).for_each(sink);
    }

    fn advance<M: Memory>(&mut self, memory: &mut M) {
        let mut budget = SCAN_MOST;
        loop {
            self.source_due(self.now, memory);
            self.submit_flush();
            self.settle_what_is_waited_for();
            self.hand_out_groups(memory);
            self.advance_checkpoint(self.now, memory);
            if !self.closing {
                self.hydrate(self.now, &mut budget);
            }
            if !core::mem::take(&mut self.retry) {
                break;
            }
            self.retry_parked(memory);
        }
        self.finish();
        self.write_superblock(memory);
    }

    fn retry_parked<M: Memory>(&mut self, memory: &mut M) {
        let mut kept = 0;
        for _ in 0..self.parked.len() {
            let Some(index) = self.parked.pop_front() else {
                return;
            };
            let overtakes = self
                .parked
                .iter()
                .rev()
                .take(kept)
                .any(|earlier| self.must_follow(index, *earlier));
            if overtakes || !self.attempt(index, memory) {
                self.parked.push_back(index);
                kept += 1;
            }
        }
    }

    /// Whether nothing of the guest's is in flight.
    fn is_quiet(&self) -> bool {
        self.passing == 0
            && self.free_requests.len() == self.requests.len()
            && self.flushes.is_idle()
    }

    fn finish(&mut self) {
        let recorded = self.unsettled.is_empty()
            && self.hydration.is_recorded()
            && !self.map.any_dirty()
            && self.checkpoint.is_idle();
        if self.map.remote() == 0 && recorded && !self.broken {
            self.wanted.complete = true;
            if self.superblock.complete && !self.done {
                self.done = true;
                self.actions.push_back(Action::Notice(Notice::Done));
            }
        }
        if self.closing
            && self.is_quiet()
            && self.hydration.is_idle()
            && (recorded || self.broken)
            && self.log.writing == 0
            && !self.log.has_open()
            && self.writing_superblock.is_none()
        {
            self.state = State::Closed;
            self.actions.push_back(Action::Notice(Notice::Closed));
        }
    }

    /// Nothing is recorded any more: a disk has failed what it must not.
    pub(crate) fn fail(&mut self, device: Device) {
        if !self.broken {
            self.broken = true;
            self.actions
                .push_back(Action::Notice(Notice::Broken(device)));
        }
        self.retry = true;
    }

    /// What was to be durable on the destination has ended. If it failed, the
    /// disk may have dropped what it had in its cache, as when a flush fails;
    /// without space there was nothing to flush.
    pub(crate) fn durable_ended(&mut self, result: Result<(), Failure>) {
        if result.is_err_and(|failure| failure != Failure::NoSpace) {
            self.fail(Device::Data);
        }
    }

    /// A block of 4 KiB, if there is one beyond `reserved`.
    pub(crate) fn take_block(&mut self, reserved: usize) -> Option<u16> {
        if self.free_blocks.len() <= reserved {
            return None;
        }
        self.free_blocks.pop()
    }

    pub(crate) fn give_block(&mut self, slot: u16) {
        self.free_blocks.push(slot);
        self.retry = true;
    }

    /// Write a block of 4 KiB of the metadata.
    pub(crate) fn write_metadata(&mut self, io: Io, block: u64, slot: u16, fua: bool) {
        self.metadata_written += BLOCK_SIZE;
        self.actions.push_back(Action::Write {
            io,
            device: Device::Metadata,
            offset: block * BLOCK_SIZE,
            length: BLOCK_SIZE as u32,
            buffer: Buffer::Block(slot),
            fua,
        });
    }

    fn write_superblock<M: Memory>(&mut self, memory: &mut M) {
        let told = (self.superblock.started, self.superblock.complete);
        let wanted = (self.wanted.started, self.wanted.complete);
        if wanted == told || self.writing_superblock.is_some() || self.broken {
            return;
        }
        let Some(slot) = self.take_block(0) else {
            return;
        };
        let next = Superblock {
            generation: self.superblock.generation + 1,
            ..self.wanted
        };
        next.encode(memory.block_mut(slot));
        self.writing_superblock = Some((next, slot, 0));
        self.write_metadata(io(kind::SUPERBLOCK, 0), 0, slot, true);
    }

    fn superblock_ended(&mut self, result: Result<(), Failure>) {
        let Some((written, slot, copy)) = self.writing_superblock.take() else {
            return;
        };
        if result.is_ok() && copy == 0 {
            // Nothing counts before both say it: either may be damaged.
            self.writing_superblock = Some((written, slot, 1));
            return self.write_metadata(io(kind::SUPERBLOCK, 0), 1, slot, true);
        }
        self.give_block(slot);
        if result.is_err() {
            return self.fail(Device::Metadata);
        }
        let before = core::mem::replace(&mut self.superblock, written);
        if written.started && !before.started {
            self.actions.push_back(Action::Notice(Notice::Started));
        }
    }

    /// Whether I/O there goes straight to the destination: everything is
    /// settled. Once true, it stays so.
    #[must_use]
    pub fn passes_through(&self, offset: u64, length: u64) -> bool {
        let inside = offset
            .checked_add(length)
            .is_some_and(|end| end <= self.map.size());
        if !inside || length == 0 {
            return false;
        }
        let (first, end) = blocks(offset, length);
        self.all_settled(first, end)
    }

    /// The source is immutable from now on: hydrate. Ends with
    /// [`Notice::Started`]. It is remembered when the volume is opened anew.
    pub fn start(&mut self) {
        self.wanted.started = true;
    }

    /// How fast to copy from now on.
    pub fn set_rate(&mut self, rate: Rate) {
        self.config.rate = rate;
        self.pace.configure(rate);
    }

    /// Ask the source again at once, also for what it could not read.
    pub fn retry_source(&mut self) {
        self.hydration.retry_source();
        self.source.due_at_once();
    }

    /// Take no more requests, end what is in flight, record it. Ends with
    /// [`Notice::Closed`]. What waits for a source that does not answer is not
    /// waited for: it has changed nothing, and gets no [`Action::Complete`]. A
    /// successor is sent it once more.
    pub fn close(&mut self) {
        if matches!(self.state, State::Open) {
            self.closing = true;
        } else if matches!(self.state, State::Opening(_)) {
            self.state = State::Closed;
            self.actions.push_back(Action::Notice(Notice::Closed));
        }
    }

    pub(crate) const fn is_closing(&self) -> bool {
        self.closing
    }

    /// How far the move is.
    #[must_use]
    pub fn progress(&self) -> Progress {
        let differing = &self.verification.differing;
        Progress {
            size: self.map.size(),
            remote: self.map.remote() * BLOCK_SIZE,
            copied: self.hydration.copied,
            zeros: self.hydration.zeros,
            rate: self.pace.rate(),
            unsettled: self.unsettled.len() as u64 + self.hydration.unrecorded,
            journal_used: self.log.used(),
            journal_blocks: self.superblock.journal_blocks,
            written: self.written,
            metadata_written: self.metadata_written,
            waiting: self.parked.len() as u64 + self.source.waiting() as u64,
            bad: self.hydration.bad.len() as u64,
            unanswered: self.hydration.unanswered_blocks,
            verified: self.verification.verified,
            differences: self.verification.differences,
            differing: self.verification.differing.len() as u64,
            first_differing: differing.first().map(|block| block * BLOCK_SIZE),
            unreadable: self.unreadable.len() as u64,
            first_unreadable: self.unreadable.first().map(|block| block * BLOCK_SIZE),
            started: self.superblock.started,
            stalled: self.source.is_away()
                || self.source.waiting() > 0
                || self.hydration.unanswered_blocks > 0,
            broken: self.broken,
            done: self.done,
        }
    }

    /// Blocks of the source that cannot be read, by their offset in bytes.
    pub fn bad_blocks(&self) -> impl Iterator<Item = u64> {
        self.hydration.bad.iter().map(|block| block * BLOCK_SIZE)
    }
}

/// The name of what is passed through.
const fn passing(request: &Request, fua: bool) -> Io {
    let kind = if fua { kind::PASS_FUA } else { kind::PASS };
    io(kind, request.tag.0 as u64)
}

/// The blocks that bytes lie in: the first, and the one after the last.
pub(crate) const fn blocks(offset: u64, length: u64) -> (u64, u64) {
    (offset / BLOCK_SIZE, (offset + length).div_ceil(BLOCK_SIZE))
}
