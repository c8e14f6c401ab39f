// SPDX-License-Identifier: Apache-2.0

//! Writes to what is not settled.
//!
//! A write *claims* its blocks, reads the rest of those that it covers in part,
//! then sends data and intents at the same time. It ends when its data are
//! written and its intents are *kept*: the end of the process can't take them,
//! as they are handed out. With FUA it ends when both are durable. Where it
//! overwrites what is local already, the data are handed out after the intents.

use crate::context::{Context, Job};
use crate::copier::Copier;
use crate::format::journal::{Entry as Record, checksum, checksum_seed};
use crate::io::{Buffer, Device, Failure, Memory};
use crate::journal::{Entries, Until};
use crate::parts::Parts;
use crate::regions::Entry;
use crate::requests::part::{Next, Part};
use crate::rules::Rule;
use crate::units::{BLOCK_SIZE, Block, Blocks, Bytes, Sequence};

/// Blocks of 4 KiB that copy-ups leave for the metadata.
const RESERVED_SLOTS: usize = 8;

const ZEROS: [u8; BLOCK_SIZE as usize] = [0; BLOCK_SIZE as usize];

/// How far a write is.
#[derive(Clone, Copy, Debug)]
pub(super) enum Write {
    /// Its blocks are to be claimed.
    Claim,
    /// They are claimed; the rest of partly written ones is being read.
    CopyUp(Claimed),
    /// Data and intents are to be sent.
    Ready(Claimed),
    /// They are in flight.
    Writing(Claimed, Sent),
    /// The data could not be written: the intents are to be taken back.
    Void(Claimed, Sent),
    /// That is in flight.
    Voiding(Claimed, Sent, Entries),
}

/// What a write has claimed.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Claimed {
    /// Buffers of the first and the last block, if they are written in part.
    head: Option<u16>,
    tail: Option<u16>,
    /// It overwrites what was read from the destination, though not settled:
    /// such content, or a copy that is not recorded.
    over_local: bool,
}

/// What of a write is in flight.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sent {
    pub(super) intents: Entries,
    /// It overwrites content that is not settled.
    second: bool,
}

impl Write {
    /// Take the next step; nothing of it is in flight.
    pub(super) fn advance<M: Memory>(
        self,
        part: &mut Part,
        copier: &mut Copier,
        parts: &mut Parts,
        memory: &mut M,
    ) -> Next<Self> {
        let intended = matches!(&self, Self::Writing(_, sent) if sent.intents.last().is_some());
        if intended && parts.cx.broken {
            // Its intent may be kept, but will not be durable.
            part.failure.get_or_insert(Failure::Io);
        }
        let failed = part.failure.is_some();
        match self {
            Self::Claim => claim(part, copier, parts, memory),
            Self::CopyUp(claimed) if failed => {
                give_up(part, claimed, None, parts);
                Next::Ended
            }
            Self::CopyUp(claimed) | Self::Ready(claimed) => send(part, claimed, parts, memory),
            Self::Writing(claimed, sent) if failed => {
                clean_up(part, claimed, sent, copier, parts, memory)
            }
            Self::Writing(claimed, sent) => {
                let owed_after = if part.fua {
                    0
                } else {
                    parts.journal.flushes_submitted()
                };
                for block in part.blocks().iter() {
                    if parts.regions.written(block, owed_after) {
                        copier.written(block.alone());
                    }
                }
                release(part, claimed, Some(sent), parts);
                Next::Ended
            }
            Self::Void(claimed, sent) => take_back(part, claimed, sent, parts, memory),
            Self::Voiding(claimed, sent, voids) => voided(part, claimed, sent, voids, parts),
        }
    }
}

/// Claim the blocks of a write, and read the rest of those that it covers in
/// part.
fn claim<M: Memory>(
    part: &mut Part,
    copier: &mut Copier,
    parts: &mut Parts,
    memory: &mut M,
) -> Next<Write> {
    let rules = parts.cx.rules;
    let blocks = part.blocks();
    let mut new = 0;
    for block in blocks.iter() {
        if parts.regions.is_settled(block, rules) {
            continue;
        }
        if parts.cx.broken {
            return part.refuse(Failure::Io, &mut parts.cx);
        }
        if is_claimed(block, copier, parts) {
            return Next::Wait(Write::Claim);
        }
        match parts.regions.entry(block).copied() {
            Some(entry) if entry.busy && rules.keep(Rule::OneWriteAtATime) => {
                return Next::Wait(Write::Claim);
            }
            Some(entry) => {
                if must_settle_first(&entry, parts) {
                    return Next::Wait(Write::Claim);
                }
            }
            None => new += 1,
        }
    }
    if parts.regions.unsettled() + new > parts.cx.config.unsettled {
        parts.journal.settle_something();
        return Next::Wait(Write::Claim);
    }
    let (first, last) = (blocks.first, Block(blocks.end.0 - 1));
    let Bytes { from, to } = part.bytes;
    let head = !from.is_aligned() || to < first.next().start();
    let head = head && !parts.regions.is_settled(first, rules);
    let tail = !to.is_aligned() && last > first;
    let tail = tail && !parts.regions.is_settled(last, rules);
    let ends = [(head, first), (tail, last)];
    let in_part = || ends.into_iter().filter(|end| end.0).map(|end| end.1);
    // The rest of a block that is written in part is not known.
    if in_part().any(|block| parts.regions.is_any_unreadable(block.alone())) {
        return part.refuse(Failure::BadSector, &mut parts.cx);
    }
    let slots = in_part().count();
    if slots > 0 && parts.cx.free_blocks.len() < RESERVED_SLOTS + slots {
        return Next::Wait(Write::Claim);
    }
    let mut claimed = Claimed::default();
    for block in blocks.iter() {
        if !parts.regions.is_settled(block, rules) {
            claimed.over_local |= parts.regions.map().is_local(block);
            copier.exclude(block, &parts.regions, &parts.cx);
            parts.regions.claim(block);
        }
    }
    if head {
        claimed.head = parts.cx.free_blocks.pop();
    }
    if tail {
        claimed.tail = parts.cx.free_blocks.pop();
    }
    for (block, slot) in [(first, claimed.head), (last, claimed.tail)] {
        if let Some(slot) = slot {
            copy_up(part, block, slot, parts, memory);
        }
    }
    if part.pending > 0 {
        return Next::Flight(Write::CopyUp(claimed));
    }
    send(part, claimed, parts, memory)
}

/// Whether a block is claimed by something that a write must wait for.
fn is_claimed(block: Block, copier: &Copier, parts: &Parts) -> bool {
    let rules = parts.cx.rules;
    parts.regions.is_being_zeroed(block.alone())
        || rules.keep(Rule::WriteWaitsForCopy) && copier.writes(block, &parts.regions)
        || rules.keep(Rule::HydratedBitInFlight) && parts.regions.is_being_recorded(block)
}

/// Whether a block that holds unsettled content may not be overwritten yet; asks
/// for what it waits for.
fn must_settle_first(entry: &Entry, parts: &mut Parts) -> bool {
    let rules = parts.cx.rules;
    if !entry.content {
        return false;
    }
    // Must the guest find what is there after a crash?
    let owed = if entry.owed_after == 0 {
        rules.keep(Rule::SecondWriteAfterFua)
    } else {
        rules.keep(Rule::SecondWriteWaits) && parts.journal.flushes_submitted() > entry.owed_after
    };
    if owed {
        parts.journal.settle_up_to(entry.sequence);
        return true;
    }
    // A flush that waits for second writes must not wait for ever.
    parts.journal.flush_is_wanted() && rules.keep(Rule::Drain)
}

/// Read a block that is written in part into its buffer.
fn copy_up<M: Memory>(part: &mut Part, block: Block, slot: u16, parts: &mut Parts, memory: &mut M) {
    let local = parts.regions.map().is_local(block);
    let bytes = Bytes::new(block.start(), block.next().start());
    let buffer = Buffer::Block(slot);
    if !parts.cx.rules.keep(Rule::CopyUp)
        || !local && block.start().0 >= parts.cx.superblock.source_size
    {
        memory.block_mut(slot).fill(0);
        return;
    }
    part.pending += 1;
    if local {
        parts.cx.read(part.job(), Device::Data, bytes, buffer);
    } else {
        parts.source.read(part.key, bytes, buffer, &mut parts.cx);
    }
}

/// Send the data and the intents of a write, all at the same time if that may be.
fn send<M: Memory>(
    part: &mut Part,
    mut claimed: Claimed,
    parts: &mut Parts,
    memory: &mut M,
) -> Next<Write> {
    let mut sent = Sent::default();
    let mut intents = 0;
    for block in part.blocks().iter() {
        if let Some(entry) = parts.regions.entry(block).copied() {
            // Nothing is settled any more once a disk has failed.
            if !parts.cx.broken && must_settle_first(&entry, parts) {
                return Next::Wait(Write::Ready(claimed));
            }
            sent.second |= entry.content;
            intents += 1;
        }
    }
    if parts.cx.broken && intents > 0 {
        part.failure = Some(Failure::Io);
        give_up(part, claimed, None, parts);
        return Next::Ended;
    }
    if !parts.journal.has_room(intents, &parts.cx) {
        return Next::Wait(Write::Ready(claimed));
    }
    drop_settled_copies(part, &mut claimed, parts);
    overlay(part, &claimed, memory);
    for block in part.blocks().iter() {
        if parts.regions.entry(block).is_some() {
            intend(part, block, &claimed, &mut sent.intents, parts, memory);
        }
    }
    if sent.second {
        parts.journal.second_write_begun(sent.intents);
    }
    if claimed.over_local {
        parts.regions.overwrite_begun();
    }
    let behind = claimed.over_local && parts.cx.rules.keep(Rule::OverwriteBehindIntent);
    match sent.intents.last().filter(|_| behind) {
        Some(sequence) => {
            part.pending += 1;
            parts.journal.put_behind(sequence, part.key);
        }
        None => send_data(part, &claimed, &mut parts.cx),
    }
    Next::Flight(Write::Writing(claimed, sent))
}

/// Record the intent of a block; the write waits for it.
fn intend<M: Memory>(
    part: &mut Part,
    block: Block,
    claimed: &Claimed,
    intents: &mut Entries,
    parts: &mut Parts,
    memory: &mut M,
) {
    let epoch = parts.cx.superblock.epoch;
    let seed = checksum_seed(epoch, block.0);
    let checksum = if let Some(slot) = claimed.slot_of(block, part.blocks()) {
        checksum(epoch, block.0, memory.block(slot))
    } else if part.is_write {
        let offset = part.offset_of(block.start());
        memory.guest_crc32c(part.tag, offset, BLOCK_SIZE as u32, seed)
    } else {
        crc32c::crc32c_append(seed, &ZEROS)
    };
    let intent = Record::Intent {
        block: block.0,
        checksum,
    };
    let fua = part.fua && parts.cx.rules.keep(Rule::FuaIntent);
    let until = if part.fua && parts.cx.rules.keep(Rule::FuaAfterIntent) {
        Until::Written
    } else {
        Until::Kept
    };
    if let Some(sequence) = record(part, intent, intents, (fua, until), parts, memory) {
        parts.regions.intended(block, sequence);
    }
}

/// Add an entry to the journal; the request waits for it.
pub(super) fn record<M: Memory>(
    part: &mut Part,
    entry: Record,
    entries: &mut Entries,
    (fua, until): (bool, Until),
    parts: &mut Parts,
    memory: &mut M,
) -> Option<Sequence> {
    let whose = (part.key, entries, until);
    let recorded = parts
        .journal
        .record(entry, whose, fua, &mut parts.cx, memory);
    let Some((sequence, first)) = recorded else {
        // There was room for it. A write must not count as recorded if it isn't.
        part.failure.get_or_insert(Failure::Io);
        parts.cx.fail(Device::Metadata);
        return None;
    };
    if first && parts.cx.rules.keep(Rule::IntentBeforeCompletion) {
        part.pending += 1;
    }
    Some(sequence)
}

/// A block may have been settled since its rest was read. Others may write to
/// that rest now, so it must not be written.
fn drop_settled_copies(part: &Part, claimed: &mut Claimed, parts: &mut Parts) {
    let blocks = part.blocks();
    if parts.regions.entry(blocks.first).is_none() {
        parts.cx.free_blocks.extend(claimed.head.take());
    }
    if parts.regions.entry(Block(blocks.end.0 - 1)).is_none() {
        parts.cx.free_blocks.extend(claimed.tail.take());
    }
}

/// Put what the guest writes over what was read of partly written blocks.
fn overlay<M: Memory>(part: &Part, claimed: &Claimed, memory: &mut M) {
    for (block, slot) in claimed.slots(part.blocks()) {
        let bytes = part.bytes.within(block.alone());
        let at = (bytes.from - block.start()) as usize;
        let length = bytes.length();
        if part.is_write {
            let offset = part.offset_of(bytes.from);
            memory.guest_to_block(part.tag, offset, length as u32, slot, at);
        } else {
            memory.block_mut(slot)[at..at + length as usize].fill(0);
        }
    }
}

/// Send the data of a write. Where they overwrite what is local already, their
/// intents are kept before:
///
/// Were the process killed when the kernel has begun with the data and nobody has
/// the intent, recovery would find neither the old content nor a checksum of the
/// new one: the block would be the source's again, though the guest was answered,
/// or has read, what was there. An intent without its data does no harm.
pub(super) fn send_data(part: &mut Part, claimed: &Claimed, cx: &mut Context) {
    let awaited = cx.rules.keep(Rule::DataBeforeCompletion);
    let job = if awaited { part.job() } else { Job::Nobodys };
    let fua = part.fua && cx.rules.keep(Rule::FuaData);
    for (block, slot) in claimed.slots(part.blocks()) {
        part.pending += u32::from(awaited);
        let bytes = Bytes::new(block.start(), block.next().start());
        cx.write(job, bytes, Buffer::Block(slot), fua);
    }
    let bytes = claimed.direct(part.bytes);
    if bytes.length() == 0 {
        return;
    }
    part.pending += u32::from(awaited);
    if part.is_write {
        cx.write(job, bytes, part.buffer_of(bytes.from), fua);
    } else {
        cx.zero(job, bytes, fua);
    }
}

/// The data of a write could not be written, or its intents.
fn clean_up<M: Memory>(
    part: &mut Part,
    claimed: Claimed,
    sent: Sent,
    copier: &mut Copier,
    parts: &mut Parts,
    memory: &mut M,
) -> Next<Write> {
    if sent.second {
        // What was there is damaged, and its checksum is of no use: it must not
        // become owed.
        parts.cx.fail(Device::Data);
    } else if part
        .blocks()
        .iter()
        .any(|block| is_first_write(block, parts))
    {
        // What is on the destination is unknown.
        copier.holes = false;
        if parts.cx.rules.keep(Rule::FailedWriteIsVoid) && !parts.cx.broken {
            return take_back(part, claimed, sent, parts, memory);
        }
    }
    give_up(part, claimed, Some(sent), parts);
    Next::Ended
}

/// Whether a block had no content that is not settled before this write.
fn is_first_write(block: Block, parts: &Parts) -> bool {
    let entry = parts.regions.entry(block);
    entry.is_some_and(|entry| entry.busy && !entry.content)
}

/// Take back the intents of first writes whose data could not be written.
fn take_back<M: Memory>(
    part: &mut Part,
    claimed: Claimed,
    sent: Sent,
    parts: &mut Parts,
    memory: &mut M,
) -> Next<Write> {
    let blocks = part.blocks();
    if parts.cx.broken {
        give_up(part, claimed, Some(sent), parts);
        return Next::Ended;
    }
    let most = blocks.count() as usize;
    if !parts.journal.has_room_to_take_back(most, &mut parts.cx) {
        return Next::Wait(Write::Void(claimed, sent));
    }
    let mut voids = Entries::default();
    for block in blocks.iter() {
        if is_first_write(block, parts) {
            let void = Record::Void { block: block.0 };
            let durable = (true, Until::Written);
            record(part, void, &mut voids, durable, parts, memory);
        }
    }
    if part.pending == 0 {
        return voided(part, claimed, sent, voids, parts);
    }
    Next::Flight(Write::Voiding(claimed, sent, voids))
}

/// The intents are taken back.
fn voided(
    part: &mut Part,
    claimed: Claimed,
    sent: Sent,
    voids: Entries,
    parts: &mut Parts,
) -> Next<Write> {
    if !parts.cx.broken {
        parts.journal.release(voids);
    }
    give_up(part, claimed, Some(sent), parts);
    Next::Ended
}

/// Give up what a write has claimed: it has not written it.
fn give_up(part: &mut Part, claimed: Claimed, sent: Option<Sent>, parts: &mut Parts) {
    for block in part.blocks().iter() {
        parts.regions.give_up(block);
    }
    release(part, claimed, sent, parts);
}

/// A write holds nothing any more.
fn release(part: &mut Part, claimed: Claimed, sent: Option<Sent>, parts: &mut Parts) {
    if let Some(sent) = sent {
        if !parts.cx.broken {
            parts.journal.release(sent.intents);
        }
        if sent.second {
            parts.journal.second_write_ended();
        }
        if claimed.over_local {
            parts.regions.overwrite_ended();
        }
    }
    part.pending = 0;
    let slots = [claimed.head, claimed.tail];
    parts.cx.free_blocks.extend(slots.into_iter().flatten());
    parts.cx.changed = true;
}

impl Claimed {
    /// The buffers of blocks that are written in part.
    fn slots(&self, blocks: Blocks) -> impl Iterator<Item = (Block, u16)> + use<> {
        let head = self.head.map(|slot| (blocks.first, slot));
        let tail = self.tail.map(|slot| (Block(blocks.end.0 - 1), slot));
        head.into_iter().chain(tail)
    }

    fn slot_of(&self, block: Block, blocks: Blocks) -> Option<u16> {
        let mut slots = self.slots(blocks);
        slots.find_map(|(at, slot)| (at == block).then_some(slot))
    }

    /// These bytes without what is in buffers of its own.
    fn direct(&self, bytes: Bytes) -> Bytes {
        let from = match self.head {
            Some(_) => bytes.from.block().next().start(),
            None => bytes.from,
        };
        let to = match self.tail {
            Some(_) => bytes.to.align_down(),
            None => bytes.to,
        };
        Bytes::new(from, to.max(from))
    }
}
