// SPDX-License-Identifier: Apache-2.0

//! Large discards (and writes of zeroes): they are recorded as a range, after a
//! flush of the destination.

use crate::copier::Copier;
use crate::format::journal::Entry as Record;
use crate::io::{Device, Failure, Memory};
use crate::journal::{Entries, Until};
use crate::parts::Parts;
use crate::requests::part::{Next, Part};
use crate::requests::write::record;
use crate::rules::Rule;

/// How far a large discard is.
#[derive(Clone, Copy, Debug)]
pub(super) enum Range {
    /// Its blocks are to be claimed.
    Claim,
    /// They are being zeroed.
    Zeroing,
    /// The destination is being flushed.
    Flushing,
    /// The range is to be recorded.
    Record,
    /// The record is in flight.
    Recording(Entries),
}

impl Range {
    /// Take the next step; nothing of it is in flight.
    pub(super) fn advance<M: Memory>(
        self,
        part: &mut Part,
        copier: &mut Copier,
        parts: &mut Parts,
        memory: &mut M,
    ) -> Next<Self> {
        let failed = part.failure.is_some();
        match self {
            Self::Claim => claim(part, copier, parts),
            Self::Zeroing if !failed && parts.cx.rules.keep(Rule::FlushBeforeZeroRecord) => {
                part.pending = 1;
                parts.cx.flush(part.job(), Device::Data);
                Next::Flight(Self::Flushing)
            }
            Self::Flushing if failed => {
                parts.cx.fail(Device::Data);
                end(part, None, copier, parts)
            }
            Self::Zeroing | Self::Flushing | Self::Record if !failed => {
                record_range(part, copier, parts, memory)
            }
            Self::Recording(entries) => end(part, Some(entries), copier, parts),
            _ => end(part, None, copier, parts),
        }
    }
}

/// Claim the blocks of a range, and zero them.
fn claim(part: &mut Part, copier: &mut Copier, parts: &mut Parts) -> Next<Range> {
    let blocks = part.blocks();
    if parts.cx.broken {
        return part.refuse(Failure::Io, &mut parts.cx);
    }
    if parts.regions.is_being_zeroed(blocks) || parts.regions.is_any_being_recorded(blocks) {
        return Next::Wait(Range::Claim);
    }
    let map = parts.regions.map();
    for region in map.regions_of(blocks) {
        if copier.writes_to(region, &parts.regions) {
            return Next::Wait(Range::Claim);
        }
        if map.entries_in(region) == 0 {
            continue;
        }
        for block in map.blocks_of(region).within(blocks).iter() {
            match parts.regions.entry(block) {
                Some(entry) if entry.busy => return Next::Wait(Range::Claim),
                Some(entry) if parts.cx.rules.keep(Rule::ZeroWaitsForSettled) => {
                    parts.journal.settle_up_to(entry.sequence);
                    return Next::Wait(Range::Claim);
                }
                _ => {}
            }
        }
    }
    copier.exclude_all(blocks, &parts.regions, &parts.cx);
    parts.regions.begin_zeroing(blocks);
    part.pending = 1;
    parts.cx.zero(part.job(), part.bytes, false);
    Next::Flight(Range::Zeroing)
}

/// Record a range that is durable on the destination.
fn record_range<M: Memory>(
    part: &mut Part,
    copier: &mut Copier,
    parts: &mut Parts,
    memory: &mut M,
) -> Next<Range> {
    if parts.cx.broken {
        part.failure = Some(Failure::Io);
        return end(part, None, copier, parts);
    }
    if !parts.journal.has_room(1, &parts.cx) {
        return Next::Wait(Range::Record);
    }
    let blocks = part.blocks();
    let local = Record::Local {
        block: blocks.first.0,
        count: blocks.count() as u32,
    };
    let mut entries = Entries::default();
    let durable = (true, Until::Written);
    record(part, local, &mut entries, durable, parts, memory);
    if part.pending == 0 {
        return end(part, Some(entries), copier, parts);
    }
    Next::Flight(Range::Recording(entries))
}

/// A range holds nothing any more; it is local if it was recorded.
fn end(
    part: &mut Part,
    recorded: Option<Entries>,
    copier: &mut Copier,
    parts: &mut Parts,
) -> Next<Range> {
    let blocks = part.blocks();
    let local = recorded.is_some() && part.failure.is_none();
    parts.regions.end_zeroing(blocks, local);
    if local {
        copier.written(blocks);
    }
    if !parts.cx.broken {
        parts.journal.release(recorded.unwrap_or_default());
    }
    part.pending = 0;
    parts.cx.changed = true;
    Next::Ended
}
