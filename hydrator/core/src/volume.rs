// SPDX-License-Identifier: Apache-2.0

//! The state machine: what is asked of it, what comes of each completion, and
//! who of its parts goes when.
//!
//! What is settled is passed through here. The rest is for the parts, each of
//! which owns what it decides by: [`regions`](crate::regions) what is known of
//! each block, [`journal`](crate::journal) the intents and how they are settled,
//! [`source`](crate::source) the reads from the source, [`copier`](crate::copier)
//! hydration and verification, [`requests`](crate::requests) the guest's requests
//! that cannot be passed through, [`superblocks`](crate::superblocks) and
//! [`opening`](crate::opening) their own.

use crate::config::{Config, Rate};
use crate::context::{Context, Job};
use crate::copier::Copier;
use crate::io::{
    Action, Buffer, Device, Failure, Io, Memory, Notice, OpenError, Operation, Request, Time,
};
use crate::journal::Journal;
use crate::opening::{Opened, Opening};
use crate::pace::Kind;
use crate::parts::Parts;
use crate::progress::Progress;
use crate::regions::Regions;
use crate::requests::Requests;
use crate::source::Source;
use crate::superblocks::Superblocks;
use crate::units::{BLOCK_SIZE, Bytes, Offset};

/// Regions that are looked at for something to copy at a time.
const SCAN_MOST: u64 = 4096;

/// Where a volume is in its life.
#[derive(Debug)]
enum State {
    Opening(Box<Opening>),
    Open,
    Closed,
}

/// A moving volume.
#[derive(Debug)]
pub struct Volume {
    state: State,
    parts: Parts,
    copier: Copier,
    requests: Requests,
    superblocks: Superblocks,
    /// Requests passed through that have not ended.
    passing: u64,
    done: bool,
}

impl Volume {
    /// Write new metadata for a move that begins, and open the volume: all of
    /// it is remote.
    ///
    /// # Errors
    /// A figure of the configuration that cannot work.
    pub fn format(config: Config) -> Result<Self, OpenError> {
        let superblock = config.superblock().map_err(OpenError::Config)?;
        Self::format_with_journal(config, superblock.journal_blocks)
    }

    /// Like [`Volume::format`], with a journal of so many blocks instead of
    /// [`journal_blocks`](crate::format::superblock::journal_blocks).
    ///
    /// # Errors
    /// A figure of the configuration that cannot work.
    pub fn format_with_journal(config: Config, journal_blocks: u64) -> Result<Self, OpenError> {
        let mut superblock = config.superblock().map_err(OpenError::Config)?;
        superblock.journal_blocks = journal_blocks;
        if superblock.check().is_err() {
            return Err(OpenError::Config("the journal's length is out of bounds"));
        }
        let (needed, found) = (superblock.metadata_size(), config.metadata_size);
        if found < needed {
            return Err(OpenError::TooSmall { needed, found });
        }
        Self::new(config, Opening::format(superblock))
    }

    /// Read the metadata of a move, recover what it was doing, and open the
    /// volume: [`Notice::Open`] or [`Notice::OpenFailed`] tells the end of it.
    ///
    /// # Errors
    /// A figure of the configuration that cannot work.
    pub fn open(config: Config) -> Result<Self, OpenError> {
        let superblock = config.superblock().map_err(OpenError::Config)?;
        Self::new(config, Opening::recover(superblock))
    }

    fn new(config: Config, opening: Opening) -> Result<Self, OpenError> {
        let superblock = config.superblock().map_err(OpenError::Config)?;
        Ok(Self {
            state: State::Opening(Box::new(opening)),
            copier: Copier::new(&config),
            requests: Requests::new(config.requests),
            superblocks: Superblocks::default(),
            parts: Parts {
                regions: Regions::default(),
                journal: Journal::new(superblock.journal_blocks, config.unsettled),
                source: Source::default(),
                cx: Context::new(config, superblock),
            },
            passing: 0,
            done: false,
        })
    }

    /// Leave out a rule, to see whether the tests notice.
    #[cfg(feature = "mutants")]
    pub fn drop_rule(&mut self, rule: crate::Rule) {
        self.parts.cx.rules.dropped = Some(rule);
    }

    /// A guest's request. Its [`Action::Complete`] follows when it has ended.
    pub fn request<M: Memory>(&mut self, now: Time, request: Request, memory: &mut M) {
        let cx = &mut self.parts.cx;
        cx.now = now;
        if !matches!(self.state, State::Open) || cx.closing {
            return cx.refuse(request.tag, Failure::NotOpen);
        }
        if request.operation == Operation::Flush {
            self.time(&request, Kind::Flush);
            let Parts { cx, journal, .. } = &mut self.parts;
            return journal.flush_requested(request.tag, cx);
        }
        let unit = u64::from(cx.config.logical_block_size);
        let inside = self.is_inside(request.offset, request.length);
        if !inside || (request.offset | request.length) % unit != 0 {
            return self.parts.cx.refuse(request.tag, Failure::Invalid);
        }
        let has_content = matches!(request.operation, Operation::Read | Operation::Write { .. });
        if has_content && u32::try_from(request.length).is_err() {
            return self.parts.cx.refuse(request.tag, Failure::Invalid);
        }
        if request.operation == Operation::Discard {
            return self.handle(discardable(request), memory);
        }
        self.handle(request, memory);
    }

    /// Pass a request through, if no more than the disk is needed; the write
    /// path begins here and goes on in [`requests`](crate::requests).
    fn handle<M: Memory>(&mut self, request: Request, memory: &mut M) {
        if request.length == 0 {
            return self.parts.cx.answer(request.tag, Ok(()));
        }
        let bytes = Bytes::run(request.offset, request.length);
        let regions = &self.parts.regions;
        let (passes, kind) = if request.operation == Operation::Read {
            let local = regions.map().all_local(bytes.blocks());
            let passes = local && !regions.is_overwritten(bytes.blocks());
            (
                passes,
                Some(if passes { Kind::Read } else { Kind::RemoteRead }),
            )
        } else {
            let settled = regions.all_settled(bytes.blocks(), self.parts.cx.rules);
            let timed = matches!(request.operation, Operation::Write { .. });
            (settled, timed.then_some(Kind::Write))
        };
        if let Some(kind) = kind {
            self.time(&request, kind);
        }
        if passes {
            return self.pass(request, bytes);
        }
        let (copier, parts) = (&mut self.copier, &mut self.parts);
        self.requests.begin(request, copier, parts, memory);
    }

    /// Pass a request through.
    fn pass(&mut self, request: Request, bytes: Bytes) {
        self.passing += 1;
        let cx = &mut self.parts.cx;
        let tag = request.tag;
        let buffer = Buffer::Guest { tag, offset: 0 };
        let job = |fua| {
            if fua {
                Job::PassedFua(tag)
            } else {
                Job::Passed(tag)
            }
        };
        match request.operation {
            Operation::Read => cx.read(Job::Passed(tag), Device::Data, bytes, buffer),
            Operation::Write { fua } => cx.write(job(fua), bytes, buffer, fua),
            Operation::WriteZeroes { fua } => cx.zero(job(fua), bytes, fua),
            Operation::Discard | Operation::Flush => cx.zero(job(false), bytes, false),
        }
    }

    /// Note when a request came, to know how long it takes.
    #[inline]
    fn time(&mut self, request: &Request, kind: Kind) {
        let alone = self.copier.is_idle();
        let cx = &mut self.parts.cx;
        cx.pace
            .begun(cx.now, request.tag, kind, request.length, alone);
    }

    /// An operation has ended.
    pub fn completed<M: Memory>(
        &mut self,
        now: Time,
        io: Io,
        result: Result<(), Failure>,
        memory: &mut M,
    ) {
        self.parts.cx.now = now;
        let (copier, parts) = (&mut self.copier, &mut self.parts);
        let Parts {
            cx,
            regions,
            journal,
            source,
        } = parts;
        match Job::of(io) {
            Job::Nobodys => {}
            Job::Passed(tag) => {
                self.passing -= 1;
                cx.answer(tag, result);
            }
            Job::PassedFua(tag) => {
                self.passing -= 1;
                cx.durable_ended(result);
                cx.answer(tag, result);
            }
            Job::Request(key) => self.requests.ended(key, result, copier, parts, memory),
            Job::Source(piece) => {
                if let Some(key) = source.ended(piece, result, cx) {
                    self.requests.ended(key, result, copier, parts, memory);
                }
            }
            Job::Group(index) => {
                let waiting = journal.group_ended(index, result, regions, cx);
                self.intended(waiting, result, memory);
            }
            Job::Flush(device) => journal.flush_ended(device, result, regions, cx),
            Job::Bitmap(slot) => journal.bitmap_block_ended(slot, result, cx),
            Job::BitmapFlush => journal.bitmap_flushed(result, regions, cx),
            Job::Superblock => self.superblocks.ended(result, cx),
            Job::CopyRead(slot) => copier.read_ended(slot, result, parts, memory),
            Job::CopyWrite(slot) => copier.write_ended(slot, result, parts),
            Job::CopyLook(slot) => copier.looked(slot, result, parts, memory),
            Job::Verify(slot) => copier.verify_read_ended(slot, result, parts, memory),
            Job::Opening(detail) => {
                if let State::Opening(opening) = &mut self.state {
                    if let Err(error) = opening.ended(detail, result, cx, memory) {
                        self.open_failed(error);
                    }
                }
            }
        }
    }

    /// A group of the journal is handed out, or written, or has failed: send the
    /// data that have waited for it, and go on with the requests that have.
    fn intended<M: Memory>(
        &mut self,
        mut waiting: Vec<u32>,
        result: Result<(), Failure>,
        memory: &mut M,
    ) {
        self.send_data(memory);
        let (copier, parts) = (&mut self.copier, &mut self.parts);
        for key in waiting.drain(..) {
            self.requests.recorded(key, result, copier, parts, memory);
        }
        self.parts.journal.recycle(waiting);
    }

    /// Send data that have waited for their intents and need not any more.
    fn send_data<M: Memory>(&mut self, memory: &mut M) {
        let (copier, parts) = (&mut self.copier, &mut self.parts);
        while let Some(key) = parts.journal.next_behind(&parts.cx) {
            self.requests.send_data(key, copier, parts, memory);
        }
    }

    /// Whether the destination reads as zeros where it was never written, or was
    /// discarded.
    #[must_use]
    pub fn is_zeroed(&self) -> bool {
        self.parts.cx.superblock.zeroed
    }

    /// When [`Volume::actions`] is to be called, if nothing happens before.
    #[must_use]
    pub fn wake_at(&self) -> Option<Time> {
        if !matches!(self.state, State::Open) {
            return None;
        }
        // Nothing is copied any more when the volume is being closed.
        let copier = self.copier.wake_at().filter(|_| !self.parts.cx.closing);
        let times = [
            self.parts.source.wake_at(),
            copier,
            self.parts.journal.wake_at(),
        ];
        times.into_iter().flatten().min()
    }

    /// End a batch, and take what is to be done.
    pub fn actions<M: Memory>(&mut self, now: Time, memory: &mut M, sink: impl FnMut(Action)) {
        self.parts.cx.now = now;
        match &mut self.state {
            State::Open => self.advance(memory),
            State::Opening(opening) => match opening.advance(&mut self.parts.cx, memory) {
                Ok(Some(opened)) => self.opened(opened),
                Ok(None) => {}
                Err(error) => self.open_failed(error),
            },
            State::Closed => {}
        }
        self.parts.cx.hand_out(sink);
    }

    fn opened(&mut self, opened: Opened) {
        self.parts.regions = opened.regions;
        self.copier.holes = opened.holes;
        self.superblocks.started |= opened.superblock.started;
        self.superblocks.complete = opened.superblock.complete;
        let cx = &mut self.parts.cx;
        self.parts.journal = Journal::new(opened.superblock.journal_blocks, cx.config.unsettled);
        cx.superblock = opened.superblock;
        cx.changed = true;
        cx.notify(Notice::Open);
        self.state = State::Open;
    }

    fn open_failed(&mut self, error: OpenError) {
        self.state = State::Closed;
        self.parts.cx.notify(Notice::OpenFailed(error));
    }

    /// Let all parts go on until nothing changes any more.
    fn advance<M: Memory>(&mut self, memory: &mut M) {
        let mut budget = SCAN_MOST;
        loop {
            self.ask_source(memory);
            let Parts {
                cx,
                regions,
                journal,
                ..
            } = &mut self.parts;
            journal.submit_flush(regions, cx);
            journal.settle_what_is_waited_for(regions, cx);
            self.write_journal(memory);
            let Parts {
                cx,
                regions,
                journal,
                ..
            } = &mut self.parts;
            journal.advance_checkpoint(regions, cx, memory);
            if !cx.closing {
                self.copier.advance(&mut self.parts, &mut budget);
            }
            if !core::mem::take(&mut self.parts.cx.changed) {
                break;
            }
            let (copier, parts) = (&mut self.copier, &mut self.parts);
            self.requests.retry(copier, parts, memory);
        }
        self.finish();
        self.superblocks.advance(&mut self.parts.cx, memory);
    }

    /// Ask the source for what it is time for, and give up what has waited for
    /// too long.
    fn ask_source<M: Memory>(&mut self, memory: &mut M) {
        let (copier, parts) = (&mut self.copier, &mut self.parts);
        for piece in parts.source.due(&mut parts.cx) {
            let key = parts.source.end_piece(piece);
            let silence = Err(Failure::Unreachable);
            self.requests.ended(key, silence, copier, parts, memory);
        }
    }

    /// Hand out the groups of the journal that need not wait; or give them up if
    /// nothing is recorded any more.
    fn write_journal<M: Memory>(&mut self, memory: &mut M) {
        if self.parts.cx.broken {
            self.send_data(memory);
            while let Some(waiting) = self.parts.journal.give_up_group(&mut self.parts.cx) {
                self.intended(waiting, Err(Failure::Io), memory);
            }
            return;
        }
        self.parts.journal.seal(&mut self.parts.cx);
        while let Some(waiting) = self.parts.journal.write_group(&mut self.parts.cx, memory) {
            self.intended(waiting, Ok(()), memory);
        }
    }

    /// Whether nothing of the guest's is in flight.
    fn is_quiet(&self) -> bool {
        self.passing == 0 && self.requests.is_empty() && self.parts.journal.has_no_flush()
    }

    /// Whether all that is local is in the bitmap.
    fn is_recorded(&self) -> bool {
        let regions = &self.parts.regions;
        regions.unsettled() == 0
            && regions.copied().is_empty()
            && self.copier.is_idle()
            && !regions.map().any_dirty()
            && self.parts.journal.has_no_checkpoint()
    }

    fn finish(&mut self) {
        let (broken, closing) = (self.parts.cx.broken, self.parts.cx.closing);
        let all_local = self.parts.regions.map().remote() == 0;
        if !self.done && all_local && !broken && self.is_recorded() {
            self.superblocks.complete = true;
            if self.parts.cx.superblock.complete {
                self.done = true;
                self.parts.cx.notify(Notice::Done);
            }
        }
        if closing
            && (broken || self.is_recorded())
            && self.is_quiet()
            && self.copier.is_idle()
            && self.parts.journal.is_written()
            && self.superblocks.is_idle()
        {
            self.closed();
        }
    }

    fn closed(&mut self) {
        self.state = State::Closed;
        self.parts.cx.notify(Notice::Closed);
    }

    fn is_inside(&self, offset: u64, length: u64) -> bool {
        let end = offset.checked_add(length).map(Offset);
        end.is_some_and(|end| end <= self.parts.regions.map().blocks().end.start())
    }

    /// Whether I/O there goes straight to the destination: everything is
    /// settled. Once true, it stays so.
    #[must_use]
    pub fn passes_through(&self, offset: u64, length: u64) -> bool {
        let Parts { cx, regions, .. } = &self.parts;
        self.is_inside(offset, length)
            && length > 0
            && regions.all_settled(Bytes::run(offset, length).blocks(), cx.rules)
    }

    /// The source is immutable from now on: hydrate. Ends with
    /// [`Notice::Started`]. It is remembered when the volume is opened anew.
    pub const fn start(&mut self) {
        self.superblocks.started = true;
    }

    /// How fast to copy from now on.
    pub const fn set_rate(&mut self, rate: Rate) {
        self.parts.cx.config.rate = rate;
        self.parts.cx.pace.configure(rate);
    }

    /// Ask the source again at once, also for what it could not read.
    pub fn retry_source(&mut self) {
        self.copier.retry_source();
        self.parts.source.due_at_once();
    }

    /// Wait for the source no longer: what it does not answer fails, now and
    /// from now on. For a volume that is given up, which has no successor.
    pub const fn give_up_source(&mut self) {
        self.parts.cx.config.source_timeout = Some(core::time::Duration::ZERO);
    }

    /// Take no more requests, end what is in flight, record it. Ends with
    /// [`Notice::Closed`]. What waits for a source that does not answer is not
    /// waited for: it has changed nothing, and gets no [`Action::Complete`]. A
    /// successor is sent it once more.
    pub fn close(&mut self) {
        match self.state {
            State::Open => self.parts.cx.closing = true,
            State::Opening(_) => self.closed(),
            State::Closed => {}
        }
    }

    /// How far the move is.
    #[must_use]
    pub fn progress(&self) -> Progress {
        let Parts {
            cx,
            regions,
            journal,
            source,
        } = &self.parts;
        let copier = &self.copier;
        let blocks = regions.map().blocks();
        let unreadable = regions.unreadable_in(blocks);
        let differing = copier.differing().next();
        let waiting = source.waiting() as u64;
        Progress {
            size: blocks.bytes(),
            remote: regions.map().remote() * BLOCK_SIZE,
            copied: copier.copied,
            zeros: copier.zeros,
            rate: cx.pace.rate(),
            unsettled: regions.unsettled() as u64 + regions.copied().count(),
            journal_used: journal.used(),
            journal_blocks: cx.superblock.journal_blocks,
            written: self.requests.written,
            metadata_written: cx.metadata_written,
            waiting: self.requests.waiting() as u64 + waiting,
            bad: copier.bad().len() as u64,
            unanswered: copier.unanswered(),
            verified: copier.verified(),
            differences: copier.differences(),
            differing: copier.differing().len() as u64,
            first_differing: differing.map(|block| block.start().0),
            unreadable: regions.unreadable() as u64,
            first_unreadable: unreadable.map(|block| block.start().0),
            started: cx.superblock.started,
            stalled: source.is_away() || waiting > 0 || copier.unanswered() > 0,
            broken: cx.broken,
            done: self.done,
        }
    }

    /// Blocks of the source that cannot be read, by their offset in bytes.
    pub fn bad_blocks(&self) -> impl Iterator<Item = u64> {
        self.copier.bad().map(|block| block.start().0)
    }
}

/// The whole blocks of a discard: others keep their content.
const fn discardable(request: Request) -> Request {
    let from = Offset(request.offset).align_up();
    let to = Offset(request.offset + request.length).align_down();
    Request {
        offset: from.0,
        length: to.0.saturating_sub(from.0),
        ..request
    }
}
