// SPDX-License-Identifier: Apache-2.0

//! Flushes, the journal's groups, settling, and checkpoints.
//!
//! One flush is in flight at a time and covers what has completed when it is
//! submitted; others wait and share the next one. What a flush has covered is
//! *flushed*. The header of each group of the journal says up to where all is
//! flushed; once such a header is durable, it is *settled*. A checkpoint
//! records the same in the bitmap, or in fewer blocks of the
//! [journal](crate::condensing), and moves the journal's tail.

use crate::bitmap::{
    BLOCKS_PER_BITMAP_BLOCK, BLOCKS_PER_SECTOR, SECTORS_PER_BITMAP_BLOCK, WORDS_PER_SECTOR,
};
use crate::condensing::Condensed;
use crate::journal::{Header, encode_header};
use crate::rules::Rule;
use crate::superblock::JOURNAL_FIRST;
use crate::volume::{io, kind};
use crate::{Action, Device, Failure, Memory, Tag, Time, Volume};

/// Bitmap blocks written at once.
const BITMAP_WRITES: u32 = 4;
/// What is local is recorded at least so often, in nanoseconds.
const CHECKPOINT_EVERY: u64 = 60_000_000_000;
/// Copied blocks are recorded when there are so many (128 MiB).
pub(crate) const HYDRATED_MOST: u64 = 32768;

/// A flush in flight.
#[derive(Debug, Default)]
struct Flush {
    /// Intents up to this one are covered.
    covers: u64,
    /// A settled number that becomes durable with it.
    settles: u64,
    pending: u32,
    failure: Option<Failure>,
}

/// Flushes, and what they have made durable.
#[derive(Debug)]
pub(crate) struct Flushes {
    /// Flushes that have been submitted, from 1 on.
    pub(crate) submitted: u64,
    /// The last of them that has ended.
    ended: u64,
    /// Requests for the next flush, and for the one in flight.
    waiting: Vec<Tag>,
    covered: Vec<Tag>,
    /// The core wants one itself.
    pub(crate) wanted: bool,
    current: Option<Flush>,
    /// The metadata were written to since they were flushed.
    metadata_dirty: bool,
    /// Intents up to this one are durable, and so are their data.
    pub(crate) flushed: u64,
    /// A group that says so up to here is written.
    said: u64,
    /// Such a group with FUA is in flight.
    being_said: u64,
    /// Such a group is durable.
    pub(crate) settled: u64,
    /// Requests wait until this one is settled.
    pub(crate) awaited: u64,
    /// The next group must not wait.
    pub(crate) urgent: bool,
}

impl Default for Flushes {
    fn default() -> Self {
        Self {
            submitted: 1,
            ended: 1,
            waiting: Vec::with_capacity(64),
            covered: Vec::with_capacity(64),
            wanted: false,
            current: None,
            metadata_dirty: false,
            flushed: 0,
            said: 0,
            being_said: 0,
            settled: 0,
            awaited: 0,
            urgent: false,
        }
    }
}

impl Flushes {
    /// A flush is to be submitted.
    pub(crate) fn is_wanted(&self) -> bool {
        self.wanted || !self.waiting.is_empty()
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.current.is_none() && !self.is_wanted()
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Step {
    #[default]
    Idle,
    /// Waits for this flush.
    Flush(u64),
    /// Writes what the journal says once more, in fewer blocks.
    Condense,
    /// Writes the bitmap, from this block of it on.
    Bits(u64),
    /// Flushes the metadata.
    Sync,
}

/// What a checkpoint is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Purpose {
    /// What was copied is recorded, and nothing else.
    #[default]
    Copies,
    /// Room in the journal: its tail moves; the bitmap need not be written.
    Room,
    /// All of the bitmap is written, and the journal's tail moves.
    Bitmap,
}

/// The recording of what is local in the bitmap, or elsewhere in the journal.
#[derive(Debug, Default)]
pub(crate) struct Checkpoint {
    pub(crate) wanted: bool,
    step: Step,
    purpose: Purpose,
    /// Intents up to this one are recorded.
    covers: u64,
    in_flight: u32,
    last: Time,
    pub(crate) wake_at: Option<Time>,
}

impl Checkpoint {
    pub(crate) fn is_idle(&self) -> bool {
        self.step == Step::Idle
    }
}

impl Volume {
    pub(crate) fn flush_requested(&mut self, tag: Tag) {
        self.flushes.waiting.push(tag);
    }

    /// Submit the next flush, if one is wanted and may go.
    pub(crate) fn submit_flush(&mut self) {
        let drained = self.second_writes == 0 || !self.rules.keep(Rule::Drain);
        if self.flushes.current.is_some() || !self.flushes.is_wanted() || !drained {
            return;
        }
        if self.broken && !self.unsettled.is_empty() {
            self.flushes.wanted = false;
            while let Some(tag) = self.flushes.waiting.pop() {
                self.answer(tag, Err(Failure::Io));
            }
            return;
        }
        let internal = self.flushes.waiting.is_empty();
        let covers = if self.rules.keep(Rule::SettleBelowInFlight) {
            self.log.low()
        } else {
            self.log.highest()
        };
        let flushes = &mut self.flushes;
        core::mem::swap(&mut flushes.waiting, &mut flushes.covered);
        flushes.wanted = false;
        flushes.submitted += 1;
        let devices = [
            internal || self.rules.keep(Rule::FlushData),
            flushes.metadata_dirty && (internal || self.rules.keep(Rule::FlushMetadata)),
        ];
        flushes.metadata_dirty = false;
        flushes.current = Some(Flush {
            covers,
            settles: flushes.said,
            pending: devices.iter().filter(|wanted| **wanted).count() as u32,
            failure: None,
        });
        for (device, wanted) in [Device::Data, Device::Metadata].into_iter().zip(devices) {
            if wanted {
                self.actions.push_back(Action::Flush {
                    io: io(kind::FLUSH, device as u64),
                    device,
                });
            }
        }
        if devices == [false, false] {
            self.end_flush();
        }
    }

    pub(crate) fn flush_ended(&mut self, device: u64, result: Result<(), Failure>) {
        let Some(flush) = &mut self.flushes.current else {
            return;
        };
        flush.pending -= 1;
        if let Err(failure) = result {
            flush.failure = Some(failure);
        }
        let ended = flush.pending == 0;
        if result.is_err() {
            let data = device == Device::Data as u64;
            self.fail(if data { Device::Data } else { Device::Metadata });
        }
        if ended {
            self.end_flush();
        }
    }

    fn end_flush(&mut self) {
        let Some(flush) = self.flushes.current.take() else {
            return;
        };
        self.flushes.ended = self.flushes.submitted;
        if flush.failure.is_none() {
            self.flushes.flushed = self.flushes.flushed.max(flush.covers);
            self.hydration.flushed(self.flushes.ended);
            self.verification.flushed(self.flushes.ended);
            self.settle(flush.settles);
        }
        let mut covered = core::mem::take(&mut self.flushes.covered);
        for tag in covered.drain(..) {
            self.answer(tag, flush.failure.map_or(Ok(()), Err));
        }
        self.flushes.covered = covered;
        self.retry = true;
    }

    /// Intents up to this one are local for good, whatever happens.
    fn settle(&mut self, sequence: u64) {
        if self.broken {
            return;
        }
        self.flushes.settled = self.flushes.settled.max(sequence);
        while let Some((intent, block)) = self.log.intents.front().copied() {
            if intent > sequence {
                break;
            }
            self.log.intents.pop_front();
            if self.is_latest(intent, block) {
                self.unsettled.remove(&block);
                self.map.entry_removed(block);
                self.condensing.settled(intent, block);
            }
        }
        self.retry = true;
    }

    /// Whether a block holds what this intent stands for.
    pub(crate) fn is_latest(&self, intent: u64, block: u64) -> bool {
        let entry = self.unsettled.get(&block);
        entry.is_some_and(|entry| entry.sequence == intent && entry.content)
    }

    /// There are too many blocks that are not settled.
    pub(crate) fn settle_something(&mut self) {
        self.flushes.awaited = self.flushes.awaited.max(self.log.low());
    }

    /// Requests wait until something is settled: flush it, or say that it is.
    pub(crate) fn settle_what_is_waited_for(&mut self) {
        if self.unsettled.len() * 4 > self.config.unsettled * 3 {
            self.settle_something();
        }
        let flushes = &mut self.flushes;
        if flushes.awaited <= flushes.settled || self.broken {
            return;
        }
        if !self.rules.keep(Rule::SettledRecordDurable) && flushes.flushed >= flushes.awaited {
            let flushed = flushes.flushed;
            self.settle(flushed);
        } else if flushes.flushed >= flushes.awaited {
            if flushes.being_said >= flushes.awaited {
                return;
            }
            if !self.make_group_urgent() {
                self.checkpoint.wanted = true;
            }
        } else if self.log.low() >= flushes.awaited && flushes.current.is_none() {
            flushes.wanted = true;
            self.submit_flush();
        }
    }

    /// Have a group with FUA handed out at once; false if there can be none.
    fn make_group_urgent(&mut self) -> bool {
        if !self.log.has_open() && !self.log.has_room(1) {
            return false;
        }
        let free = &mut self.free_blocks;
        let Some(group) = self.log.open_group(|| free.pop()) else {
            return false;
        };
        group.fua = true;
        self.flushes.urgent = true;
        true
    }

    /// Hand out the groups of the journal that are full or need not wait.
    pub(crate) fn hand_out_groups<M: Memory>(&mut self, memory: &mut M) {
        if self.broken {
            return self.give_up_groups(memory);
        }
        if self.log.is_tail_to_be_told() {
            // Were a write torn that takes back an intent and lies before the
            // tail, the intent would count again.
            self.make_group_urgent();
        }
        if self.log.has_open()
            && (self.flushes.urgent || self.log.writing < self.config.journal_depth)
        {
            self.log.seal();
            self.flushes.urgent = false;
        }
        while let Some(mut group) = self.log.sealed.pop_front() {
            group.settled = if self.rules.keep(Rule::SettleAfterFlush) {
                self.flushes.flushed
            } else {
                self.log.low()
            };
            // A number is said of earlier groups only.
            group.settled = group.settled.min(group.sequence - 1);
            group.tail = self.log.tail;
            let header = Header {
                epoch: self.superblock.epoch,
                sequence: group.sequence,
                settled: group.settled,
                tail: group.tail,
                entries: group.entries,
            };
            encode_header(&self.config.move_id, &header, memory.block_mut(group.slot));
            let block = JOURNAL_FIRST + group.sequence % self.log.blocks;
            let (slot, fua) = (group.slot, group.fua);
            if fua {
                self.flushes.being_said = self.flushes.being_said.max(group.settled);
                self.log.telling = group.tail;
            }
            let sequence = group.sequence;
            let index = self.log.begun(group);
            self.write_metadata(io(kind::JOURNAL, u64::from(index)), block, slot, fua);
            self.send_data_behind(sequence);
        }
    }

    /// Nothing is recorded any more: the requests that wait for it fail.
    fn give_up_groups<M: Memory>(&mut self, memory: &mut M) {
        self.log.seal();
        self.log.behind.clear();
        while let Some(mut group) = self.log.sealed.pop_front() {
            self.give_block(group.slot);
            for request in group.requests.drain(..) {
                self.intent_ended(request, Err(Failure::Io), memory);
            }
        }
    }

    pub(crate) fn group_ended<M: Memory>(
        &mut self,
        index: u32,
        result: Result<(), Failure>,
        memory: &mut M,
    ) {
        let Some(mut group) = self.log.ended(index) else {
            return;
        };
        self.give_block(group.slot);
        if result.is_err() {
            self.fail(Device::Metadata);
        } else {
            self.flushes.said = self.flushes.said.max(group.settled);
            if group.fua {
                self.settle(group.settled);
                self.log.told = self.log.told.max(group.tail);
            } else {
                self.flushes.metadata_dirty = true;
            }
            self.log.release(group.sequence);
        }
        for request in group.requests.drain(..) {
            self.intent_ended(request, result, memory);
        }
        self.log.recycle(group.requests);
    }

    /// Whether there is something that a checkpoint would record.
    fn has_something_to_record(&self) -> bool {
        self.log.can_move_tail() || self.hydration.unrecorded > 0 || self.map.any_dirty()
    }

    /// Whether all of the bitmap is to be written.
    fn bitmap_is_due(&self, now: Time) -> bool {
        self.map.remote() == 0
            || self.is_closing()
            || now.since(self.checkpoint.last) >= CHECKPOINT_EVERY
    }

    /// Whether the tail is to move, and can.
    fn journal_needs_room(&self) -> bool {
        self.log.can_move_tail()
            && (self.checkpoint.wanted || self.log.used() * 2 > self.log.blocks)
    }

    /// Begin a checkpoint if it is due, or take its next step.
    pub(crate) fn advance_checkpoint<M: Memory>(&mut self, now: Time, memory: &mut M) {
        if self.broken {
            self.checkpoint.wake_at = None;
            return;
        }
        if self.checkpoint.step == Step::Idle {
            self.checkpoint.wake_at = None;
            if !self.has_something_to_record() {
                self.checkpoint.wanted = false;
                self.checkpoint.last = now;
                return;
            }
            self.checkpoint.purpose = if self.bitmap_is_due(now) {
                Purpose::Bitmap
            } else if self.journal_needs_room() {
                Purpose::Room
            } else if self.hydration.unrecorded >= HYDRATED_MOST {
                Purpose::Copies
            } else {
                self.checkpoint.wake_at = Some(self.checkpoint.last.after(CHECKPOINT_EVERY));
                return;
            };
            if self.checkpoint.purpose != Purpose::Copies {
                self.checkpoint.wanted = false;
            }
            let flush_first =
                self.flushes.flushed < self.log.low() || self.hydration.has_unflushed();
            self.checkpoint.step = Step::Flush(if flush_first {
                self.flushes.wanted = true;
                self.flushes.submitted + 1
            } else {
                self.flushes.ended
            });
            self.submit_flush();
        }
        if let Step::Flush(number) = self.checkpoint.step {
            if self.flushes.ended < number {
                return;
            }
            self.checkpoint.covers = self.flushes.flushed;
            let for_room = self.checkpoint.purpose == Purpose::Room;
            if for_room && self.begin_condensing(self.checkpoint.covers) {
                self.checkpoint.step = Step::Condense;
            } else {
                self.begin_bitmap(now);
            }
        }
        if self.checkpoint.step == Step::Condense {
            match self.condense(memory) {
                Condensed::Under => return,
                Condensed::Done => {
                    self.checkpoint.step = Step::Idle;
                    // Who has no room yet asks again.
                    self.checkpoint.wanted = false;
                    self.move_tail();
                }
                Condensed::NoRoom => self.begin_bitmap(now),
            }
        }
        while let Step::Bits(from) = self.checkpoint.step {
            if self.checkpoint.in_flight == BITMAP_WRITES || self.free_blocks.is_empty() {
                return;
            }
            let next = if self.checkpoint.purpose != Purpose::Copies {
                self.map.take_dirty(from)
            } else {
                // Blocks that were copied lie side by side; what the guest
                // writes does not, and is safe in the journal.
                let next = self
                    .hydration
                    .next_recording(from * BLOCKS_PER_BITMAP_BLOCK);
                next.and_then(|block| self.map.take_dirty(block / BLOCKS_PER_BITMAP_BLOCK))
            };
            let Some((bitmap_block, changed)) = next else {
                if self.checkpoint.in_flight == 0 {
                    self.sync_bitmap();
                }
                return;
            };
            let Some(slot) = self.take_block(0) else {
                return;
            };
            self.compose_bitmap(bitmap_block, changed, slot, memory);
            self.checkpoint.in_flight += 1;
            self.checkpoint.step = Step::Bits(bitmap_block + 1);
            let at = self.superblock.bitmap_first() + bitmap_block;
            self.write_metadata(io(kind::BITMAP, u64::from(slot)), at, slot, false);
        }
    }

    fn begin_bitmap(&mut self, now: Time) {
        if self.checkpoint.purpose != Purpose::Copies {
            self.checkpoint.last = now;
        }
        let all = !self.rules.keep(Rule::FlushBeforeHydratedBit);
        self.hydration.begin_recording(all);
        if self.rules.keep(Rule::BitmapBeforeTail) {
            self.checkpoint.step = Step::Bits(0);
        } else {
            self.checkpoint.step = Step::Sync;
            while self.map.take_dirty(0).is_some() {}
            self.bitmap_flushed(Ok(()));
        }
    }

    /// What is covered is recorded.
    fn move_tail(&mut self) {
        let covers = self.checkpoint.covers;
        self.settle(covers);
        self.log.tail = self.log.tail.max(covers + 1);
    }

    /// Compose a block of the bitmap in `slot`, of whose sectors these have
    /// changed.
    pub(crate) fn compose_bitmap<M: Memory>(
        &mut self,
        bitmap_block: u64,
        changed: u8,
        slot: u16,
        memory: &mut M,
    ) {
        let block = memory.block_mut(slot);
        for (index, bytes) in block.chunks_exact_mut(512).enumerate() {
            let sector = bitmap_block * SECTORS_PER_BITMAP_BLOCK + index as u64;
            if changed >> index & 1 == 1 || !self.map.compose_again(sector, bytes) {
                let words = self.recordable(sector);
                self.map
                    .compose(&self.config.move_id, sector, &words, bytes);
            }
        }
    }

    /// What is local of a sector of the bitmap and may be recorded.
    fn recordable(&self, sector: u64) -> [u64; WORDS_PER_SECTOR] {
        let mut words = [0; WORDS_PER_SECTOR];
        words.copy_from_slice(self.map.words(sector));
        let first = sector * BLOCKS_PER_SECTOR;
        let end = (first + BLOCKS_PER_SECTOR).min(self.map.blocks());
        let mut withhold = |block: u64| {
            let at = block - first;
            words[(at / 64) as usize] &= !(1 << (at % 64));
        };
        self.hydration.unrecorded_in(first, end, &mut withhold);
        let mut block = first;
        while block < end {
            let region = self.map.region_of(block);
            let region_end = self.map.region_end(region).min(end);
            let mut left = self.map.entries_in(region);
            while left > 0 {
                block = self.map.run_end(block, region_end, false);
                if block == region_end {
                    break;
                }
                if let Some(entry) = self.unsettled.get(&block) {
                    left -= 1;
                    if !entry.content || entry.sequence > self.checkpoint.covers {
                        withhold(block);
                    }
                }
                block += 1;
            }
            block = region_end;
        }
        words
    }

    pub(crate) fn bitmap_block_ended(&mut self, slot: u16, result: Result<(), Failure>) {
        self.give_block(slot);
        self.checkpoint.in_flight -= 1;
        if result.is_err() {
            self.fail(Device::Metadata);
        }
    }

    fn sync_bitmap(&mut self) {
        self.checkpoint.step = Step::Sync;
        if self.rules.keep(Rule::FlushBeforeTail) {
            self.actions.push_back(Action::Flush {
                io: io(kind::BITMAP_FLUSH, 0),
                device: Device::Metadata,
            });
        } else {
            self.bitmap_flushed(Ok(()));
        }
    }

    pub(crate) fn bitmap_flushed(&mut self, result: Result<(), Failure>) {
        if result.is_err() {
            return self.fail(Device::Metadata);
        }
        self.checkpoint.step = Step::Idle;
        if self.checkpoint.purpose != Purpose::Copies {
            self.move_tail();
            self.condensing.recorded(self.checkpoint.covers);
        }
        self.hydration.recorded(&mut self.map);
        self.retry = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::map::Map;
    use crate::unsettled::Entry;
    use crate::{Config, metadata_size};

    #[test]
    fn what_is_not_covered_is_withheld_on_both_sides_of_a_sectors_end() {
        const SIZE: u64 = 64 << 20;
        let config = Config::new([1; 16], SIZE, metadata_size(SIZE));
        let mut volume = Volume::format(config).unwrap();
        volume.map = Map::new(SIZE / crate::BLOCK_SIZE, 256);
        volume.checkpoint.covers = 7;
        let seam = BLOCKS_PER_SECTOR;
        volume.map.set_all_local(seam - 40, seam + 40);
        let entries = [
            (seam - 30, 8, true),
            (seam - 1, 8, true),
            (seam, 7, false),
            (seam + 1, 7, true),
            (seam + 30, 8, true),
        ];
        for (block, sequence, content) in entries {
            volume.map.entry_added(block);
            let entry = Entry {
                busy: false,
                content,
                sequence,
                owed_after: 0,
            };
            volume.unsettled.insert(block, entry);
        }
        let sectors = [volume.recordable(0), volume.recordable(1)];
        let recorded = |block: u64| {
            let (sector, bit) = (block / BLOCKS_PER_SECTOR, block % BLOCKS_PER_SECTOR);
            sectors[sector as usize][(bit / 64) as usize] >> (bit % 64) & 1 == 1
        };
        let withheld: Vec<_> = (seam - 40..seam + 40)
            .filter(|block| !recorded(*block))
            .collect();
        assert_eq!(withheld, [seam - 30, seam - 1, seam, seam + 30]);
        assert!(!recorded(seam - 41) && !recorded(seam + 40));
    }
}
