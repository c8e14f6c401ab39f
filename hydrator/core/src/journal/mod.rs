// SPDX-License-Identifier: Apache-2.0

//! The journal: intents, and how they are settled.
//!
//! What a flush has covered is *flushed*. The header of each group of the
//! journal says up to where all is flushed; once such a header is durable, it is
//! *settled*. A checkpoint records the same in the bitmap, or in fewer blocks of
//! the journal, and moves its tail.
//!
//! The parts of it: [`log`] has the ring, [`flushes`] the flushes of both disks,
//! [`condensing`] what is written once more in fewer blocks, [`checkpoint`] how
//! far a checkpoint is. The rest is here: which of it goes when.

mod checkpoint;
mod condensing;
mod flushes;
mod log;

use crate::context::{Context, Job};
use crate::format::bitmap::BLOCKS_PER_BITMAP_BLOCK;
use crate::format::journal::{Entry, Header, encode_header};
use crate::format::superblock::JOURNAL_FIRST;
use crate::io::{Buffer, Device, Failure, Memory, Tag, Time};
use crate::regions::Regions;
use crate::rules::Rule;
use crate::units::{Block, Sequence};
use checkpoint::{CHECKPOINT_EVERY, Checkpoint, Purpose, Step};
use condensing::{Condensed, Condensing};
use flushes::{Flush, Flushes};
use log::Log;

pub(crate) use log::Until;

/// Bitmap blocks written at once.
const BITMAP_WRITES: u32 = 4;
/// Copied blocks are recorded when there are so many (128 MiB).
pub(crate) const COPIED_MOST: u64 = 32768;

/// Blocks of the journal with entries of a request: the first and the last.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Entries(Option<(Sequence, Sequence)>);

impl Entries {
    /// The last of them.
    pub(crate) fn last(self) -> Option<Sequence> {
        self.0.map(|(_, last)| last)
    }

    fn add(&mut self, sequence: Sequence) {
        let first = self.0.map_or(sequence, |(first, _)| first);
        self.0 = Some((first, sequence));
    }
}

/// Intents, and how they are settled.
#[derive(Debug)]
pub(crate) struct Journal {
    log: Log,
    flushes: Flushes,
    condensing: Condensing,
    checkpoint: Checkpoint,
    /// Intents up to this one are durable, and so are their data.
    flushed: Sequence,
    /// A group that says so up to here is written.
    said: Sequence,
    /// Such a group with FUA is in flight.
    being_said: Sequence,
    /// Such a group is durable.
    settled: Sequence,
    /// Requests wait until this one is settled.
    awaited: Sequence,
    /// The next group must not wait.
    urgent: bool,
    /// The open group is not to wait: since another one was handed out, the data
    /// of a write in it have arrived, or the guest has flushed.
    hurries: bool,
    /// All that was answered has its intents in groups up to this one.
    answered: Sequence,
}

impl Journal {
    /// An empty one of so many blocks.
    pub(crate) fn new(blocks: u64, unsettled: usize) -> Self {
        Self {
            log: Log::new(blocks, unsettled),
            flushes: Flushes::new(),
            condensing: Condensing::new(),
            checkpoint: Checkpoint::default(),
            flushed: Sequence(0),
            said: Sequence(0),
            being_said: Sequence(0),
            settled: Sequence(0),
            awaited: Sequence(0),
            urgent: false,
            hurries: false,
            answered: Sequence(0),
        }
    }

    /// Blocks of it in use.
    pub(crate) fn used(&self) -> u64 {
        self.log.used()
    }

    /// No flush is in flight or to be submitted.
    pub(crate) fn has_no_flush(&self) -> bool {
        self.flushes.is_idle()
    }

    pub(crate) fn has_no_checkpoint(&self) -> bool {
        self.checkpoint.is_idle()
    }

    /// All that it was given is written.
    pub(crate) fn is_written(&self) -> bool {
        self.log.writing() == 0 && !self.log.has_open()
    }

    /// When the next checkpoint is due.
    pub(crate) const fn wake_at(&self) -> Option<Time> {
        self.checkpoint.wake_at
    }

    // What requests ask of it.

    /// Whether it takes so many entries now; asks for a checkpoint if it does
    /// not.
    pub(crate) fn has_room(&mut self, entries: usize, cx: &Context) -> bool {
        let groups = self.log.groups_for(entries);
        if groups > 0 && !self.log.has_room_for_intents(groups) {
            self.checkpoint.wanted = true;
            return false;
        }
        cx.free_blocks.len() >= groups
    }

    /// The same for entries that take others back, for which room is kept.
    pub(crate) fn has_room_to_take_back(&mut self, entries: usize, cx: &mut Context) -> bool {
        let groups = self.log.groups_for(entries);
        if !self.log.has_room(groups) {
            self.checkpoint.wanted = true;
            if !self.log.can_move_tail() {
                // Nothing can be recorded before this one is.
                cx.fail(Device::Data);
            }
            return false;
        }
        cx.free_blocks.len() >= groups
    }

    /// Add an entry of a request to its others: the block that it is in, and
    /// whether that is the request's first entry there, so that it waits for it.
    /// No flush covers it before the request [lets it go](Journal::release).
    pub(crate) fn record<M: Memory>(
        &mut self,
        entry: Entry,
        (request, entries, until): (u32, &mut Entries, Until),
        fua: bool,
        cx: &mut Context,
        memory: &mut M,
    ) -> Option<(Sequence, bool)> {
        let slot = self.log.open_group(&mut cx.free_blocks)?.slot;
        let block = memory.block_mut(slot);
        let recorded = self.log.append(entry, Some((request, until)), fua, block);
        entries.add(recorded.0);
        if matches!(entry, Entry::Local { .. }) {
            // It is no intent, and is not among what can be condensed.
            self.condensing.left_out(recorded.0);
        }
        Some(recorded)
    }

    /// A request with these entries ends.
    pub(crate) fn release(&mut self, entries: Entries) {
        if let Some((first, last)) = entries.0 {
            self.answered = self.answered.max(last);
            (first.0..=last.0).for_each(|sequence| self.log.release(Sequence(sequence)));
        }
    }

    /// A write with these entries has so many operations left: if these are its
    /// groups only, it waits for nothing else any more.
    pub(crate) fn has_left(&mut self, pending: u32, entries: Entries) {
        if let Some((first, last)) = entries.0 {
            let has_data = u64::from(pending) <= last - first + 1;
            self.hurries |= has_data && last > self.log.handed_out();
        }
    }

    /// Have the data of a request handed out after blocks up to this one.
    pub(crate) fn put_behind(&mut self, sequence: Sequence, request: u32) {
        self.log.put_behind(sequence, request);
    }

    /// The next request whose data need not wait any more, or are not to be sent
    /// at all as nothing is recorded any more.
    pub(crate) fn next_behind(&mut self, cx: &Context) -> Option<u32> {
        self.log.take_behind(cx.broken)
    }

    /// Have this block settled: somebody waits for it.
    pub(crate) fn settle_up_to(&mut self, sequence: Sequence) {
        self.awaited = self.awaited.max(sequence);
    }

    /// There are too many blocks that are not settled.
    pub(crate) fn settle_something(&mut self) {
        self.settle_up_to(self.log.low());
    }

    // Flushes.

    /// The guest wants a flush. What it was answered before may have intents that
    /// are not written yet.
    pub(crate) fn flush_requested(&mut self, tag: Tag, cx: &Context) {
        let after = if cx.rules.keep(Rule::FlushAfterIntents) {
            self.answered
        } else {
            Sequence(0)
        };
        self.flushes.request(tag, after);
        self.hurries = true;
    }

    /// The core wants a flush itself.
    pub(crate) fn flush(&mut self, regions: &mut Regions, cx: &mut Context) {
        self.flushes.wanted = true;
        self.submit_flush(regions, cx);
    }

    /// How many flushes have been submitted.
    pub(crate) const fn flushes_submitted(&self) -> u64 {
        self.flushes.submitted
    }

    /// The last flush that has succeeded, by its number: what was written when
    /// fewer had been submitted is durable.
    pub(crate) const fn last_flush(&self) -> u64 {
        self.flushes.succeeded
    }

    /// A flush is to be submitted.
    pub(crate) fn flush_is_wanted(&self) -> bool {
        self.flushes.is_wanted()
    }

    /// A write over content that is not settled is in flight from now on: no
    /// flush may be submitted meanwhile, nor before its intents are written.
    pub(crate) fn second_write_begun(&mut self, entries: Entries) {
        self.flushes.second_writes += 1;
        let last = entries.last().unwrap_or_default();
        self.flushes.second_intent = self.flushes.second_intent.max(last);
    }

    /// It is no more.
    pub(crate) const fn second_write_ended(&mut self) {
        self.flushes.second_writes -= 1;
    }

    /// Submit the next flush, if one is wanted and may go.
    pub(crate) fn submit_flush(&mut self, regions: &mut Regions, cx: &mut Context) {
        let written = self.log.written();
        if !self.flushes.is_due(written, cx) {
            return;
        }
        if says_nothing(regions, cx) {
            return self.flushes.give_up(cx);
        }
        let covers = if cx.rules.keep(Rule::SettleBelowInFlight) {
            self.log.low()
        } else {
            self.log.highest()
        };
        if let Some(flush) = self.flushes.submit(covers, self.said, written, cx) {
            self.end_flush(flush, regions, cx);
        }
    }

    /// A device has flushed, or not.
    pub(crate) fn flush_ended(
        &mut self,
        device: Device,
        result: Result<(), Failure>,
        regions: &mut Regions,
        cx: &mut Context,
    ) {
        if let Some(flush) = self.flushes.device_ended(device, result, cx) {
            self.end_flush(flush, regions, cx);
        }
    }

    fn end_flush(&mut self, mut flush: Flush, regions: &mut Regions, cx: &mut Context) {
        if says_nothing(regions, cx) {
            // Another one has failed meanwhile.
            flush.failure.get_or_insert(Failure::Io);
        }
        if flush.failure.is_none() {
            self.flushed = self.flushed.max(flush.covers);
            self.settle(flush.settles, regions, cx);
        }
        self.flushes.answer(&flush, cx);
        cx.changed = true;
    }

    // Settling.

    /// Intents up to this one are local for good, whatever happens.
    fn settle(&mut self, sequence: Sequence, regions: &mut Regions, cx: &mut Context) {
        if cx.broken {
            return;
        }
        self.settled = self.settled.max(sequence);
        while let Some((intent, block)) = self.log.intents.front().copied() {
            if intent > sequence {
                break;
            }
            self.log.intents.pop_front();
            if regions.is_latest(intent, block) {
                regions.settle(block);
                self.condensing.settled(intent, block);
            }
        }
        cx.changed = true;
    }

    /// Requests wait until something is settled: flush it, or say that it is.
    pub(crate) fn settle_what_is_waited_for(&mut self, regions: &mut Regions, cx: &mut Context) {
        if regions.unsettled() * 4 > cx.config.unsettled * 3 {
            self.settle_something();
        }
        if self.awaited <= self.settled || cx.broken {
            return;
        }
        if !cx.rules.keep(Rule::SettledRecordDurable) && self.flushed >= self.awaited {
            self.settle(self.flushed, regions, cx);
        } else if self.flushed >= self.awaited {
            if self.being_said < self.awaited && !self.make_group_urgent(cx) {
                self.checkpoint.wanted = true;
            }
        } else if self.log.low() >= self.awaited && !self.flushes.is_in_flight() {
            self.flush(regions, cx);
        }
    }

    // Groups.

    /// Have a group with FUA handed out at once; false if there can be none.
    fn make_group_urgent(&mut self, cx: &mut Context) -> bool {
        if !self.log.has_open() && !self.log.has_room(1) {
            return false;
        }
        let Some(group) = self.log.open_group(&mut cx.free_blocks) else {
            return false;
        };
        group.fua = true;
        self.urgent = true;
        true
    }

    /// The open group takes no more entries if it need not wait.
    pub(crate) fn seal(&mut self, cx: &mut Context) {
        if self.log.is_tail_to_be_told() {
            // Were a write torn that takes back an intent and lies before the
            // tail, the intent would count again.
            self.make_group_urgent(cx);
        }
        if self.log.has_open() && (self.urgent || self.log.writing() < self.depth(cx)) {
            self.log.seal();
            self.urgent = false;
        }
    }

    /// How many groups may be in flight. Writes that wait for no more than that
    /// their intents are kept lose nothing while their data are on their way. So
    /// these gather in the open group. A guest that flushes will wait for the end
    /// of it.
    fn depth(&self, cx: &Context) -> usize {
        if self.log.has_patience() && !self.hurries {
            1
        } else {
            cx.config.journal_depth
        }
    }

    /// Write the next group that takes no more entries: the requests that wait
    /// for no more.
    pub(crate) fn write_group<M: Memory>(
        &mut self,
        cx: &mut Context,
        memory: &mut M,
    ) -> Option<Vec<u32>> {
        let mut group = self.log.sealed.pop_front()?;
        group.settled = if cx.rules.keep(Rule::SettleAfterFlush) {
            self.flushed
        } else {
            self.log.low()
        };
        // A number is said of earlier groups only.
        group.settled = group.settled.min(group.sequence.before());
        group.tail = self.log.tail;
        let header = Header {
            epoch: cx.superblock.epoch,
            sequence: group.sequence.0,
            settled: group.settled.0,
            tail: group.tail.0,
            entries: group.entries,
        };
        encode_header(&cx.config.move_id, &header, memory.block_mut(group.slot));
        self.hurries = !self.flushes.is_idle();
        let (sequence, slot, fua) = (group.sequence, group.slot, group.fua);
        if fua {
            self.being_said = self.being_said.max(group.settled);
            self.log.telling = group.tail;
        }
        let place = Block(JOURNAL_FIRST + sequence.0 % self.log.blocks);
        let (index, waiting) = self.log.begun(group);
        cx.write_kept(Job::Group(index), place.alone(), Buffer::Block(slot), fua);
        Some(waiting)
    }

    /// Nothing is recorded any more: the requests that wait for the next group.
    pub(crate) fn give_up_group(&mut self, cx: &mut Context) -> Option<Vec<u32>> {
        self.log.seal();
        let group = self.log.sealed.pop_front()?;
        cx.give_block(group.slot);
        Some(self.log.waiting_for(group))
    }

    /// A group is written, or not: the requests that wait for it.
    pub(crate) fn group_ended(
        &mut self,
        index: u32,
        result: Result<(), Failure>,
        regions: &mut Regions,
        cx: &mut Context,
    ) -> Vec<u32> {
        let Some(group) = self.log.ended(index) else {
            return Vec::new();
        };
        cx.give_block(group.slot);
        if result.is_err() {
            cx.fail(Device::Metadata);
            return self.log.waiting_for(group);
        }
        self.said = self.said.max(group.settled);
        if group.fua {
            self.settle(group.settled, regions, cx);
            self.log.told = self.log.told.max(group.tail);
        } else {
            self.flushes.metadata_dirty = true;
        }
        self.log.release(group.sequence);
        self.log.waiting_for(group)
    }

    /// The list of requests is no longer needed.
    pub(crate) fn recycle(&mut self, requests: Vec<u32>) {
        self.log.recycle(requests);
    }

    // Checkpoints.

    /// What a checkpoint would be for, if one is due.
    fn due(&self, regions: &Regions, cx: &Context) -> Option<Purpose> {
        let map = regions.map();
        let needs_room = self.checkpoint.wanted || self.log.used() * 2 > self.log.blocks;
        if map.remote() == 0 || cx.closing || cx.now.since(self.checkpoint.last) >= CHECKPOINT_EVERY
        {
            Some(Purpose::Bitmap)
        } else if self.log.can_move_tail() && needs_room {
            Some(Purpose::Room)
        } else if regions.copied().count() >= COPIED_MOST {
            Some(Purpose::Copies)
        } else {
            None
        }
    }

    /// Begin a checkpoint if it is due, or take its next step.
    #[inline]
    pub(crate) fn advance_checkpoint<M: Memory>(
        &mut self,
        regions: &mut Regions,
        cx: &mut Context,
        memory: &mut M,
    ) {
        if cx.broken {
            self.checkpoint.wake_at = None;
            return;
        }
        if self.checkpoint.step == Step::Idle && !self.begin_checkpoint(regions, cx) {
            return;
        }
        self.continue_checkpoint(regions, cx, memory);
    }

    fn continue_checkpoint<M: Memory>(
        &mut self,
        regions: &mut Regions,
        cx: &mut Context,
        memory: &mut M,
    ) {
        if let Step::Flush(number) = self.checkpoint.step {
            if self.flushes.ended < number {
                return;
            }
            self.checkpoint.covers = self.flushed;
            let for_room = self.checkpoint.purpose == Purpose::Room;
            if for_room && self.condensing.begin(self.flushed, &self.log, regions, cx) {
                self.checkpoint.step = Step::Condense;
            } else {
                self.begin_bitmap(regions, cx);
            }
        }
        if self.checkpoint.step == Step::Condense {
            let (condensed, any) = self.condensing.advance(&mut self.log, cx, memory);
            if any {
                cx.changed = true;
                self.urgent = self.log.has_open();
            }
            match condensed {
                Condensed::Under => return,
                Condensed::Done => {
                    self.checkpoint.step = Step::Idle;
                    // Who has no room yet asks again.
                    self.checkpoint.wanted = false;
                    self.move_tail(regions, cx);
                }
                Condensed::NoRoom => self.begin_bitmap(regions, cx),
            }
        }
        while let Step::Bits(from) = self.checkpoint.step {
            if !self.write_bits(from, regions, cx, memory) {
                return;
            }
        }
    }

    /// Begin a checkpoint, with a flush if there is anything to be flushed;
    /// false if none is due.
    fn begin_checkpoint(&mut self, regions: &mut Regions, cx: &mut Context) -> bool {
        self.checkpoint.wake_at = None;
        let copied = regions.copied();
        if !self.log.can_move_tail() && copied.count() == 0 && !regions.map().any_dirty() {
            self.checkpoint.wanted = false;
            self.checkpoint.last = cx.now;
            return false;
        }
        let Some(purpose) = self.due(regions, cx) else {
            self.checkpoint.wake_at = Some(self.checkpoint.last.after(CHECKPOINT_EVERY));
            return false;
        };
        self.checkpoint.purpose = purpose;
        if purpose != Purpose::Copies {
            self.checkpoint.wanted = false;
        }
        if self.flushed < self.log.low() || copied.has_unflushed(self.last_flush()) {
            self.checkpoint.step = Step::Flush(self.flushes.submitted + 1);
            self.flush(regions, cx);
        } else {
            self.checkpoint.step = Step::Flush(self.flushes.ended);
            self.submit_flush(regions, cx);
        }
        true
    }

    fn begin_bitmap(&mut self, regions: &mut Regions, cx: &mut Context) {
        if self.checkpoint.purpose != Purpose::Copies {
            self.checkpoint.last = cx.now;
        }
        let flushed = if cx.rules.keep(Rule::FlushBeforeHydratedBit) {
            self.last_flush()
        } else {
            u64::MAX
        };
        regions.copied_mut().begin_recording(flushed);
        if cx.rules.keep(Rule::BitmapBeforeTail) {
            self.checkpoint.step = Step::Bits(0);
        } else {
            self.checkpoint.step = Step::Sync;
            while regions.take_dirty(0).is_some() {}
            self.bitmap_flushed(Ok(()), regions, cx);
        }
    }

    /// Write the next block of the bitmap, or flush it when there is none;
    /// false if no more is to be written now.
    fn write_bits<M: Memory>(
        &mut self,
        from: u64,
        regions: &mut Regions,
        cx: &mut Context,
        memory: &mut M,
    ) -> bool {
        if self.checkpoint.in_flight == BITMAP_WRITES || cx.free_blocks.is_empty() {
            return false;
        }
        let next = if self.checkpoint.purpose != Purpose::Copies {
            regions.take_dirty(from)
        } else {
            // Blocks that were copied lie side by side; what the guest writes
            // does not, and is safe in the journal.
            let from = Block(from * BLOCKS_PER_BITMAP_BLOCK);
            let next = regions.next_recording(from);
            next.and_then(|block| regions.take_dirty(block.0 / BLOCKS_PER_BITMAP_BLOCK))
        };
        let Some((bitmap_block, changed)) = next else {
            if self.checkpoint.in_flight == 0 {
                self.sync_bitmap(regions, cx);
            }
            return false;
        };
        let Some(slot) = cx.free_blocks.pop() else {
            return false;
        };
        let block = memory.block_mut(slot);
        let covers = self.checkpoint.covers;
        regions.compose(&cx.config.move_id, (bitmap_block, changed), covers, block);
        self.checkpoint.in_flight += 1;
        self.checkpoint.step = Step::Bits(bitmap_block + 1);
        let at = Block(cx.superblock.bitmap_first() + bitmap_block);
        cx.write_metadata(Job::Bitmap(slot), at.alone(), Buffer::Block(slot), false);
        true
    }

    /// A block of the bitmap is written, or not.
    pub(crate) fn bitmap_block_ended(
        &mut self,
        slot: u16,
        result: Result<(), Failure>,
        cx: &mut Context,
    ) {
        cx.give_block(slot);
        self.checkpoint.in_flight -= 1;
        if result.is_err() {
            cx.fail(Device::Metadata);
        }
    }

    fn sync_bitmap(&mut self, regions: &mut Regions, cx: &mut Context) {
        self.checkpoint.step = Step::Sync;
        if cx.rules.keep(Rule::FlushBeforeTail) {
            cx.flush(Job::BitmapFlush, Device::Metadata);
        } else {
            self.bitmap_flushed(Ok(()), regions, cx);
        }
    }

    /// The bitmap is durable, or not.
    pub(crate) fn bitmap_flushed(
        &mut self,
        result: Result<(), Failure>,
        regions: &mut Regions,
        cx: &mut Context,
    ) {
        if result.is_err() || cx.broken {
            // If something else has failed meanwhile, the disk may have dropped
            // what this flush was for.
            return cx.fail(Device::Metadata);
        }
        self.checkpoint.step = Step::Idle;
        if self.checkpoint.purpose != Purpose::Copies {
            self.move_tail(regions, cx);
            self.condensing.recorded(self.checkpoint.covers);
        }
        regions.recorded();
        cx.changed = true;
    }

    /// What is covered is recorded.
    fn move_tail(&mut self, regions: &mut Regions, cx: &mut Context) {
        let covers = self.checkpoint.covers;
        self.settle(covers, regions, cx);
        self.log.tail = self.log.tail.max(covers.next());
    }
}

/// A disk may have dropped what a flush is to make durable, whatever comes of
/// that flush.
fn says_nothing(regions: &Regions, cx: &Context) -> bool {
    cx.dropped || cx.broken && regions.unsettled() > 0
}
