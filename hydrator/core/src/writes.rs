// SPDX-License-Identifier: Apache-2.0

//! Requests that cannot be passed through.
//!
//! A write to what is not settled *claims* its blocks, reads the rest of those
//! that it covers in part, then sends data and intents at the same time and
//! ends when both have ended. Where it overwrites what is local already, the
//! data follow their intents in the same batch. A large discard claims its range, zeroes it,
//! flushes, and records the range. A request that must wait for something is
//! parked and tried again when something has changed.

use crate::journal::{Entry as Record, checksum, checksum_seed};
use crate::rules::Rule;
use crate::unsettled::Entry;
use crate::volume::{RESERVED_SLOTS, blocks, io, kind};
use crate::{
    Action, BLOCK_SIZE, Buffer, Config, Device, Failure, Memory, Operation, Request, Tag, Volume,
};

/// The most blocks of one write that are claimed at once.
const WRITE_BLOCKS: u64 = 256;
/// The most blocks of a range.
const RANGE_BLOCKS: u64 = 1 << 18;

const ZEROS: [u8; BLOCK_SIZE as usize] = [0; BLOCK_SIZE as usize];

/// What a request waits for or does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// There is none.
    Free,
    /// A read has pieces in flight, or is to be begun.
    Read,
    /// The blocks of this part are to be claimed.
    Claim,
    /// They are claimed; the rest of partly written ones is being read.
    CopyUp,
    /// Data and intents are to be sent.
    Ready,
    /// They are in flight.
    Writing,
    /// The data could not be written: the intents are to be taken back.
    Void,
    /// That is in flight.
    Voiding,
    /// A range is being zeroed.
    Zeroing,
    /// The destination is being flushed.
    Flushing,
    /// The range is to be recorded.
    Record,
    /// The record is in flight.
    Recording,
}

/// A request that could not be passed through.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slow {
    pub(crate) tag: Tag,
    operation: Operation,
    fua: bool,
    /// Where the request begins, in bytes.
    pub(crate) offset: u64,
    /// Where its present part begins and ends.
    at: u64,
    part_end: u64,
    end: u64,
    pub(crate) phase: Phase,
    /// Operations in flight.
    pub(crate) pending: u32,
    pub(crate) failure: Option<Failure>,
    /// Buffers of the first and the last block, if they are written in part.
    head: Option<u16>,
    tail: Option<u16>,
    /// Blocks of the journal with its entries, and with those that take them
    /// back: the first and the last.
    sequences: [Option<(u64, u64)>; 2],
    /// It overwrites content that is not settled.
    second: bool,
    /// It overwrites what was read from the destination, though not settled:
    /// such content, or a copy that is not recorded.
    over_local: bool,
}

impl Slow {
    const fn blocks(&self) -> (u64, u64) {
        blocks(self.at, self.part_end - self.at)
    }

    const fn is_write(&self) -> bool {
        matches!(self.operation, Operation::Write { .. })
    }

    /// Take the next part of the request.
    fn next_part(&mut self, config: &Config) {
        self.part_end = if self.is_write() {
            let most = (self.at / BLOCK_SIZE + WRITE_BLOCKS) * BLOCK_SIZE;
            self.end.min(most)
        } else if self.end - self.at <= u64::from(config.range_from) * BLOCK_SIZE {
            self.end
        } else if self.at % BLOCK_SIZE != 0 {
            self.at.next_multiple_of(BLOCK_SIZE)
        } else {
            let most = self.at + RANGE_BLOCKS * BLOCK_SIZE;
            (self.end / BLOCK_SIZE * BLOCK_SIZE).min(most)
        };
        self.phase = Phase::Claim;
    }

    /// Whether this part is recorded as a range.
    const fn is_range(&self, config: &Config) -> bool {
        !self.is_write() && self.part_end - self.at > config.range_from as u64 * BLOCK_SIZE
    }

    /// The part without what is in buffers of its own.
    fn direct(&self) -> (u64, u64) {
        let from = if self.head.is_some() {
            (self.at / BLOCK_SIZE + 1) * BLOCK_SIZE
        } else {
            self.at
        };
        let to = if self.tail.is_some() {
            self.part_end / BLOCK_SIZE * BLOCK_SIZE
        } else {
            self.part_end
        };
        (from, to.max(from))
    }

    fn slot_of(&self, block: u64) -> Option<u16> {
        let (first, end) = self.blocks();
        if block == first && self.head.is_some() {
            self.head
        } else if block + 1 == end {
            self.tail
        } else {
            None
        }
    }
}

impl Volume {
    /// Begin a request that cannot be passed through.
    pub(crate) fn admit<M: Memory>(
        &mut self,
        request: Request,
        fua: bool,
        phase: Phase,
        memory: &mut M,
    ) {
        let mut slow = Slow {
            tag: request.tag,
            operation: request.operation,
            fua,
            offset: request.offset,
            at: request.offset,
            part_end: request.offset + request.length,
            end: request.offset + request.length,
            phase,
            pending: 0,
            failure: None,
            head: None,
            tail: None,
            sequences: [None; 2],
            second: false,
            over_local: false,
        };
        if phase == Phase::Claim {
            slow.next_part(&self.config);
            self.written += request.length;
        }
        let index = if let Some(index) = self.free_requests.pop() {
            self.requests[index as usize] = slow;
            index
        } else if self.requests.len() < self.config.requests {
            self.requests.push(slow);
            (self.requests.len() - 1) as u32
        } else {
            return self.answer(request.tag, Err(Failure::Invalid));
        };
        let overtakes = self
            .parked
            .iter()
            .any(|earlier| self.must_follow(index, *earlier));
        if overtakes || !self.attempt(index, memory) {
            self.parked.push_back(index);
        }
    }

    /// Whether a request must not be tried before an earlier one.
    pub(crate) fn must_follow(&self, index: u32, earlier: u32) -> bool {
        let (slow, earlier) = (
            &self.requests[index as usize],
            &self.requests[earlier as usize],
        );
        slow.phase == Phase::Claim
            && earlier.phase == Phase::Claim
            && slow.blocks().0 < earlier.blocks().1
            && earlier.blocks().0 < slow.blocks().1
    }

    /// Take the next step of a request; false if it must wait.
    pub(crate) fn attempt<M: Memory>(&mut self, index: u32, memory: &mut M) -> bool {
        let slow = self.requests[index as usize];
        match slow.phase {
            Phase::Read => self.attempt_read(index, memory),
            Phase::Claim if slow.is_range(&self.config) => self.claim_range(index, memory),
            Phase::Claim => self.claim(index, memory),
            Phase::Ready => self.send(index, memory),
            Phase::Void => self.void(index, memory),
            Phase::Record => self.record_range(index, memory),
            _ => true,
        }
    }

    /// Whether a read there must wait for a write.
    pub(crate) fn is_overwritten(&self, first: u64, end: u64) -> bool {
        self.overwrites > 0
            && (first..end).any(|block| {
                !self.map.region_is_quiet(self.map.region_of(block))
                    && self.map.is_local(block)
                    && self.unsettled.get(&block).is_some_and(|entry| entry.busy)
            })
    }

    fn attempt_read<M: Memory>(&mut self, index: u32, memory: &mut M) -> bool {
        let slow = self.requests[index as usize];
        let (first, end) = slow.blocks();
        if self.is_overwritten(first, end) {
            return false;
        }
        if self.is_unreadable(first, end) {
            self.requests[index as usize].failure = Some(Failure::BadSector);
            self.part_ended(index, memory);
            return true;
        }
        let mut block = first;
        while block < end {
            let local = self.map.is_local(block);
            let run_end = self.map.run_end(block, end, local);
            let from = (block * BLOCK_SIZE).max(slow.at);
            let to = (run_end * BLOCK_SIZE).min(slow.part_end);
            if local {
                self.requests[index as usize].pending += 1;
                self.actions.push_back(Action::Read {
                    io: io(kind::DATA, u64::from(index)),
                    device: Device::Data,
                    offset: from,
                    length: (to - from) as u32,
                    buffer: Buffer::Guest {
                        tag: slow.tag,
                        offset: (from - slow.offset) as u32,
                    },
                });
            } else {
                self.read_remote(index, from, to, memory);
            }
            block = run_end;
        }
        if self.requests[index as usize].pending == 0 {
            self.part_ended(index, memory);
        }
        true
    }

    /// Whether it is not known what any of these blocks hold.
    fn is_unreadable(&self, first: u64, end: u64) -> bool {
        self.unreadable.range(first..end).next().is_some()
    }

    /// The guest has written to these blocks as a whole.
    fn is_readable_again(&mut self, first: u64, end: u64) {
        while let Some(block) = self.unreadable.range(first..end).next().copied() {
            self.unreadable.remove(&block);
        }
    }

    /// Whether a block is claimed by something that a write must wait for.
    fn is_claimed(&self, block: u64) -> bool {
        self.ranges
            .iter()
            .any(|(first, end, _)| (*first..*end).contains(&block))
            || self.rules.keep(Rule::WriteWaitsForCopy)
                && self.hydration.is_being_written(&self.map, block)
            || self.rules.keep(Rule::HydratedBitInFlight)
                && self.hydration.is_hydrated(&self.map, block) == Some(true)
    }

    /// Whether the guest must find what a block holds after a crash.
    fn is_owed(&self, entry: &Entry) -> bool {
        entry.content
            && if entry.owed_after == 0 {
                self.rules.keep(Rule::SecondWriteAfterFua)
            } else {
                self.rules.keep(Rule::SecondWriteWaits) && self.flushes.submitted > entry.owed_after
            }
    }

    /// Whether a block that holds unsettled content may not be overwritten
    /// yet; asks for what it waits for.
    fn must_settle_first(&mut self, entry: &Entry) -> bool {
        if !entry.content {
            return false;
        }
        if self.is_owed(entry) {
            self.flushes.awaited = self.flushes.awaited.max(entry.sequence);
            return true;
        }
        // A flush that waits for second writes must not wait for ever.
        self.flushes.is_wanted() && self.rules.keep(Rule::Drain)
    }

    fn claim<M: Memory>(&mut self, index: u32, memory: &mut M) -> bool {
        let slow = self.requests[index as usize];
        let (first, end) = slow.blocks();
        let mut new = 0;
        for block in first..end {
            if self.is_settled(block) {
                continue;
            }
            if self.broken {
                self.requests[index as usize].failure = Some(Failure::Io);
                self.part_ended(index, memory);
                return true;
            }
            if self.is_claimed(block) {
                return false;
            }
            match self.unsettled.get(&block).copied() {
                Some(entry) if entry.busy && self.rules.keep(Rule::OneWriteAtATime) => {
                    return false;
                }
                Some(entry) => {
                    if self.must_settle_first(&entry) {
                        return false;
                    }
                }
                None => new += 1,
            }
        }
        if self.unsettled.len() + new > self.config.unsettled {
            self.settle_something();
            return false;
        }
        let head = slow.at % BLOCK_SIZE != 0 || slow.part_end < (first + 1) * BLOCK_SIZE;
        let head = head && !self.is_settled(first);
        let tail = slow.part_end % BLOCK_SIZE != 0 && end - 1 > first;
        let tail = tail && !self.is_settled(end - 1);
        // The rest of a block that is written in part is not known.
        if head && self.is_unreadable(first, first + 1) || tail && self.is_unreadable(end - 1, end)
        {
            self.requests[index as usize].failure = Some(Failure::BadSector);
            self.part_ended(index, memory);
            return true;
        }
        let slots = usize::from(head) + usize::from(tail);
        if slots > 0 && self.free_blocks.len() < RESERVED_SLOTS + slots {
            return false;
        }
        for block in first..end {
            if !self.is_settled(block) {
                self.requests[index as usize].over_local |= self.map.is_local(block);
                self.claim_block(block);
            }
        }
        if head {
            self.requests[index as usize].head = self.take_block(0);
        }
        if tail {
            self.requests[index as usize].tail = self.take_block(0);
        }
        self.requests[index as usize].phase = Phase::CopyUp;
        if head {
            self.copy_up(index, first, memory);
        }
        if tail {
            self.copy_up(index, end - 1, memory);
        }
        if self.requests[index as usize].pending > 0 {
            return true;
        }
        self.requests[index as usize].phase = Phase::Ready;
        self.send(index, memory)
    }

    fn claim_block(&mut self, block: u64) {
        self.exclude(block);
        // A copy is not recorded any more, but read until it is overwritten.
        self.hydration.forget(&mut self.map, block);
        match self.unsettled.get_mut(&block) {
            Some(entry) => entry.busy = true,
            None => {
                self.map.entry_added(block);
                self.unsettled.insert(
                    block,
                    Entry {
                        busy: true,
                        content: false,
                        sequence: 0,
                        owed_after: 0,
                    },
                );
            }
        }
    }

    /// Read a block that is written in part into its buffer.
    fn copy_up<M: Memory>(&mut self, index: u32, block: u64, memory: &mut M) {
        let Some(slot) = self.requests[index as usize].slot_of(block) else {
            return;
        };
        if !self.rules.keep(Rule::CopyUp) {
            memory.block_mut(slot).fill(0);
        } else if self.map.is_local(block) {
            self.requests[index as usize].pending += 1;
            self.actions.push_back(Action::Read {
                io: io(kind::DATA, u64::from(index)),
                device: Device::Data,
                offset: block * BLOCK_SIZE,
                length: BLOCK_SIZE as u32,
                buffer: Buffer::Block(slot),
            });
        } else {
            self.copy_up_remote(index, block, slot, memory);
        }
    }

    /// Send the data and the intents of a part, all at the same time.
    fn send<M: Memory>(&mut self, index: u32, memory: &mut M) -> bool {
        let slow = self.requests[index as usize];
        let (first, end) = slow.blocks();
        let mut intents = 0;
        let mut second = false;
        for block in first..end {
            if let Some(entry) = self.unsettled.get(&block).copied() {
                // Nothing is settled any more once a disk has failed.
                if !self.broken && self.must_settle_first(&entry) {
                    return false;
                }
                second |= entry.content;
                intents += 1;
            }
        }
        if self.broken && intents > 0 {
            self.requests[index as usize].failure = Some(Failure::Io);
            self.part_ended(index, memory);
            return true;
        }
        if !self.has_room_for(intents) {
            return false;
        }
        let slow = self.drop_settled_copies(index);
        self.overlay(&slow, memory);
        let fua = slow.fua && self.rules.keep(Rule::FuaIntent);
        for block in first..end {
            if !self.unsettled.contains_key(&block) {
                continue;
            }
            let seed = checksum_seed(self.superblock.epoch, block);
            let checksum = if let Some(slot) = slow.slot_of(block) {
                checksum(self.superblock.epoch, block, memory.block(slot))
            } else if slow.is_write() {
                let from = (block * BLOCK_SIZE - slow.offset) as u32;
                memory.guest_crc32c(slow.tag, from, BLOCK_SIZE as u32, seed)
            } else {
                crc32c::crc32c_append(seed, &ZEROS)
            };
            let intent = Record::Intent { block, checksum };
            let Some(sequence) = self.append(intent, index, fua, memory) else {
                continue;
            };
            if let Some(entry) = self.unsettled.get_mut(&block) {
                entry.sequence = sequence;
            }
        }
        let request = &mut self.requests[index as usize];
        request.phase = Phase::Writing;
        request.second = second;
        if second {
            self.second_writes += 1;
        }
        if request.over_local {
            self.overwrites += 1;
        }
        let behind = request.over_local && self.rules.keep(Rule::OverwriteBehindIntent);
        match request.sequences[0].filter(|_| behind) {
            Some((_, sequence)) => self.log.behind.push_back((sequence, index)),
            None => self.send_data(index),
        }
        true
    }

    /// A block may have been settled since its rest was read. Others may write
    /// to that rest now, so it must not be written.
    fn drop_settled_copies(&mut self, index: u32) -> Slow {
        let request = &mut self.requests[index as usize];
        let (first, end) = request.blocks();
        if !self.unsettled.contains_key(&first) {
            self.free_blocks.extend(request.head.take());
        }
        if !self.unsettled.contains_key(&(end - 1)) {
            self.free_blocks.extend(request.tail.take());
        }
        *request
    }

    /// Put what the guest writes over what was read of partly written blocks.
    fn overlay<M: Memory>(&self, slow: &Slow, memory: &mut M) {
        let (first, end) = slow.blocks();
        for block in [first, end - 1] {
            let Some(slot) = slow.slot_of(block) else {
                continue;
            };
            let from = (block * BLOCK_SIZE).max(slow.at);
            let to = ((block + 1) * BLOCK_SIZE).min(slow.part_end);
            let at = (from - block * BLOCK_SIZE) as usize;
            let length = (to - from) as usize;
            if slow.is_write() {
                let offset = (from - slow.offset) as u32;
                memory.guest_to_block(slow.tag, offset, length as u32, slot, at);
            } else {
                memory.block_mut(slot)[at..at + length].fill(0);
            }
        }
    }

    /// Send the data that waited for these intents to be handed out: those in
    /// blocks of the journal up to this one.
    ///
    /// Were the process killed when the kernel has the data and not the intent,
    /// recovery would find neither the old content nor a checksum of the new
    /// one: the block would be the source's again, though the guest was
    /// answered, or has read, what was there. An intent without its data does no
    /// harm.
    pub(crate) fn send_data_behind(&mut self, sequence: u64) {
        while let Some(index) = self.log.take_behind(sequence) {
            self.send_data(index);
        }
    }

    fn send_data(&mut self, index: u32) {
        let slow = self.requests[index as usize];
        let awaited = self.rules.keep(Rule::DataBeforeCompletion);
        let kind = if awaited { kind::DATA } else { kind::NOBODY };
        let io = io(kind, u64::from(index));
        let fua = slow.fua && self.rules.keep(Rule::FuaData);
        let (first, end) = slow.blocks();
        let slots = [(first, slow.head), (end - 1, slow.tail)];
        for (block, slot) in slots {
            if let Some(slot) = slot {
                self.actions.push_back(Action::Write {
                    io,
                    device: Device::Data,
                    offset: block * BLOCK_SIZE,
                    length: BLOCK_SIZE as u32,
                    buffer: Buffer::Block(slot),
                    fua,
                });
                self.requests[index as usize].pending += u32::from(awaited);
            }
        }
        let (from, to) = slow.direct();
        if from == to {
            return;
        }
        self.requests[index as usize].pending += u32::from(awaited);
        self.actions.push_back(if slow.is_write() {
            Action::Write {
                io,
                device: Device::Data,
                offset: from,
                length: (to - from) as u32,
                buffer: Buffer::Guest {
                    tag: slow.tag,
                    offset: (from - slow.offset) as u32,
                },
                fua,
            }
        } else {
            Action::Zero {
                io,
                device: Device::Data,
                offset: from,
                length: to - from,
                fua,
            }
        });
    }

    /// Whether the journal takes so many entries now; asks for a checkpoint if
    /// it does not.
    fn has_room_for(&mut self, entries: usize) -> bool {
        let groups = self.log.groups_for(entries);
        if groups > 0 && !self.log.has_room_for_intents(groups) {
            self.checkpoint.wanted = true;
            return false;
        }
        self.free_blocks.len() >= groups
    }

    /// Add an entry of a request to the journal; the request waits for it.
    fn append<M: Memory>(
        &mut self,
        entry: Record,
        index: u32,
        fua: bool,
        memory: &mut M,
    ) -> Option<u64> {
        let free = &mut self.free_blocks;
        let slot = self.log.open_group(|| free.pop())?.slot;
        let (sequence, first) = self
            .log
            .append(entry, Some(index), fua, memory.block_mut(slot));
        let request = &mut self.requests[index as usize];
        let sequences = &mut request.sequences[usize::from(request.phase == Phase::Void)];
        let begin = sequences.map_or(sequence, |(begin, _)| begin);
        *sequences = Some((begin, sequence));
        if first && self.rules.keep(Rule::IntentBeforeCompletion) {
            request.pending += 1;
        }
        Some(sequence)
    }

    /// A block of the journal that a request waits for is written, or not.
    pub(crate) fn intent_ended<M: Memory>(
        &mut self,
        index: u32,
        result: Result<(), Failure>,
        memory: &mut M,
    ) {
        if self.rules.keep(Rule::IntentBeforeCompletion) {
            self.data_ended(index, result, memory);
        }
    }

    /// An operation of a request has ended.
    pub(crate) fn data_ended<M: Memory>(
        &mut self,
        index: u32,
        result: Result<(), Failure>,
        memory: &mut M,
    ) {
        let slow = self.requests[index as usize];
        if slow.fua && slow.phase == Phase::Writing {
            self.durable_ended(result);
        }
        let request = &mut self.requests[index as usize];
        request.pending -= 1;
        if let Err(failure) = result {
            request.failure.get_or_insert(failure);
        }
        if request.pending == 0 {
            self.part_ended(index, memory);
        }
    }

    /// All operations of a request's present phase have ended.
    pub(crate) fn part_ended<M: Memory>(&mut self, index: u32, memory: &mut M) {
        let slow = self.requests[index as usize];
        let failed = slow.failure.is_some();
        let next = match slow.phase {
            Phase::CopyUp if !failed => Phase::Ready,
            Phase::Writing if failed && slow.second => {
                // What was there is damaged, and its checksum is of no use: it
                // must not become owed.
                self.fail(Device::Data);
                self.release(index);
                return self.part_done(index, memory);
            }
            Phase::Writing if failed && self.has_first_writes(&slow) => {
                // What is on the destination is unknown.
                self.hydration.holes = false;
                if self.rules.keep(Rule::FailedWriteIsVoid) && !self.broken {
                    Phase::Void
                } else {
                    self.release(index);
                    return self.part_done(index, memory);
                }
            }
            Phase::Zeroing if !failed => {
                if self.rules.keep(Rule::FlushBeforeZeroRecord) {
                    self.requests[index as usize].pending = 1;
                    self.actions.push_back(Action::Flush {
                        io: io(kind::DATA, u64::from(index)),
                        device: Device::Data,
                    });
                    Phase::Flushing
                } else {
                    Phase::Record
                }
            }
            Phase::Flushing if !failed => Phase::Record,
            Phase::Flushing => {
                self.fail(Device::Data);
                self.release(index);
                return self.part_done(index, memory);
            }
            _ => {
                self.release(index);
                return self.part_done(index, memory);
            }
        };
        self.requests[index as usize].phase = next;
        if next != Phase::Flushing && !self.attempt(index, memory) {
            self.parked.push_back(index);
        }
    }

    fn has_first_writes(&self, slow: &Slow) -> bool {
        let (first, end) = slow.blocks();
        (first..end).any(|block| {
            self.unsettled
                .get(&block)
                .is_some_and(|entry| entry.busy && !entry.content)
        })
    }

    /// Take back the intents of first writes whose data could not be written.
    fn void<M: Memory>(&mut self, index: u32, memory: &mut M) -> bool {
        let slow = self.requests[index as usize];
        let (first, end) = slow.blocks();
        if self.broken {
            self.release(index);
            self.part_done(index, memory);
            return true;
        }
        let groups = self.log.groups_for((end - first) as usize);
        if !self.log.has_room(groups) {
            self.checkpoint.wanted = true;
            if !self.log.can_move_tail() {
                // Nothing can be recorded before this one is.
                self.fail(Device::Data);
            }
            return false;
        }
        if self.free_blocks.len() < groups {
            return false;
        }
        for block in first..end {
            let first_write = self
                .unsettled
                .get(&block)
                .is_some_and(|entry| entry.busy && !entry.content);
            if first_write {
                self.append(Record::Void { block }, index, true, memory);
            }
        }
        let request = &mut self.requests[index as usize];
        request.phase = Phase::Voiding;
        if request.pending == 0 {
            self.release(index);
            self.part_done(index, memory);
        }
        true
    }

    /// Give up what a part has claimed; what it wrote is local.
    fn release(&mut self, index: u32) {
        let slow = self.requests[index as usize];
        let wrote = slow.failure.is_none() && slow.phase == Phase::Writing;
        match slow.phase {
            Phase::Read => return,
            Phase::Claim => {}
            Phase::Zeroing | Phase::Flushing | Phase::Record | Phase::Recording => {
                self.release_range(index, &slow);
            }
            _ => self.release_blocks(&slow, wrote),
        }
        if !self.broken {
            for (first, last) in slow.sequences.into_iter().flatten() {
                (first..=last).for_each(|sequence| self.log.release(sequence));
            }
        }
        if slow.second {
            self.second_writes -= 1;
        }
        let sent = matches!(slow.phase, Phase::Writing | Phase::Void | Phase::Voiding);
        if slow.over_local && sent {
            self.overwrites -= 1;
        }
        let request = &mut self.requests[index as usize];
        request.sequences = [None; 2];
        request.second = false;
        request.over_local = false;
        request.pending = 0;
        for slot in [request.head.take(), request.tail.take()] {
            self.free_blocks.extend(slot);
        }
        self.retry = true;
    }

    fn release_blocks(&mut self, slow: &Slow, wrote: bool) {
        let (first, end) = slow.blocks();
        let owed_after = if slow.fua { 0 } else { self.flushes.submitted };
        for block in first..end {
            let Some(entry) = self.unsettled.get_mut(&block) else {
                continue;
            };
            entry.busy = false;
            if wrote {
                entry.content = true;
                entry.owed_after = owed_after;
                self.map.set_local(block);
                self.is_readable_again(block, block + 1);
                self.hydration.written(block, block + 1);
                self.verification.written(block, block + 1);
            } else if !entry.content {
                // A copy that it was to overwrite may be damaged.
                self.map.set_remote(block);
                self.unsettled.remove(&block);
                self.map.entry_removed(block);
            }
        }
    }

    /// A part has ended: begin the next one, or answer the guest.
    fn part_done<M: Memory>(&mut self, index: u32, memory: &mut M) {
        let slow = &mut self.requests[index as usize];
        if slow.failure.is_none() && slow.phase != Phase::Read && slow.part_end < slow.end {
            slow.at = slow.part_end;
            slow.next_part(&self.config);
            if !self.attempt(index, memory) {
                self.parked.push_back(index);
            }
            return;
        }
        slow.phase = Phase::Free;
        let (tag, failure) = (slow.tag, slow.failure);
        self.free_requests.push(index);
        self.retry = true;
        self.answer(tag, failure.map_or(Ok(()), Err));
    }

    fn claim_range<M: Memory>(&mut self, index: u32, memory: &mut M) -> bool {
        let slow = self.requests[index as usize];
        let (first, end) = slow.blocks();
        if self.broken {
            self.requests[index as usize].failure = Some(Failure::Io);
            self.part_ended(index, memory);
            return true;
        }
        let overlaps = |(from, to, _): &(u64, u64, u32)| *from < end && first < *to;
        if self.ranges.iter().any(overlaps) || self.hydration.is_being_recorded(first, end) {
            return false;
        }
        for region in self.map.region_of(first)..=self.map.region_of(end - 1) {
            let from = self.map.region_first(region).max(first);
            let to = self.map.region_end(region).min(end);
            if self.hydration.is_region_being_written(&self.map, region) {
                return false;
            }
            if self.map.entries_in(region) == 0 {
                continue;
            }
            for block in from..to {
                match self.unsettled.get(&block) {
                    Some(entry) if entry.busy => return false,
                    Some(entry) if self.rules.keep(Rule::ZeroWaitsForSettled) => {
                        self.flushes.awaited = self.flushes.awaited.max(entry.sequence);
                        return false;
                    }
                    _ => {}
                }
            }
        }
        for region in self.map.region_of(first)..=self.map.region_of(end - 1) {
            let from = self.map.region_first(region).max(first);
            let to = self.map.region_end(region).min(end);
            if self.map.is_copying(region) || self.map.has_hydrated(region) {
                for block in from..to {
                    self.exclude(block);
                    if self.hydration.is_hydrated(&self.map, block).is_some() {
                        self.hydration.forget(&mut self.map, block);
                        self.map.set_remote(block);
                    }
                }
            }
        }
        self.ranges.push((first, end, index));
        let request = &mut self.requests[index as usize];
        request.phase = Phase::Zeroing;
        request.pending = 1;
        self.actions.push_back(Action::Zero {
            io: io(kind::DATA, u64::from(index)),
            device: Device::Data,
            offset: slow.at,
            length: slow.part_end - slow.at,
            fua: false,
        });
        true
    }

    fn record_range<M: Memory>(&mut self, index: u32, memory: &mut M) -> bool {
        if self.broken {
            self.requests[index as usize].failure = Some(Failure::Io);
            self.release(index);
            self.part_done(index, memory);
            return true;
        }
        if !self.has_room_for(1) {
            return false;
        }
        let (first, end) = self.requests[index as usize].blocks();
        let local = Record::Local {
            block: first,
            count: (end - first) as u32,
        };
        if let Some(sequence) = self.append(local, index, true, memory) {
            self.condensing.left_out(sequence);
        }
        self.requests[index as usize].phase = Phase::Recording;
        if self.requests[index as usize].pending == 0 {
            self.part_ended(index, memory);
        }
        true
    }

    fn release_range(&mut self, index: u32, slow: &Slow) {
        self.ranges.retain(|(_, _, owner)| *owner != index);
        if slow.phase == Phase::Recording && slow.failure.is_none() {
            let (first, end) = slow.blocks();
            self.map.set_all_local(first, end);
            self.is_readable_again(first, end);
            self.hydration.written(first, end);
            self.verification.written(first, end);
        }
    }
}
