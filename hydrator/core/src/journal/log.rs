// SPDX-License-Identifier: Apache-2.0

//! The ring as it is being written: groups of entries, and what their sequence
//! numbers say.

use std::collections::VecDeque;

use slab::Slab;

use crate::format::journal::{Entry, MAX_ENTRIES, encode_entry};
use crate::units::{Block, Sequence};

/// A block of the journal that is being filled or written.
#[derive(Debug, Default)]
pub(super) struct Group {
    pub(super) sequence: Sequence,
    /// The buffer it is composed in.
    pub(super) slot: u16,
    pub(super) entries: u16,
    pub(super) fua: bool,
    /// The settled number that it carries, once it has been handed out.
    pub(super) settled: Sequence,
    /// The tail that it carries then.
    pub(super) tail: Sequence,
    /// Requests that wait until it is kept.
    unkept: Vec<u32>,
    /// Requests that wait until it is written.
    unwritten: Vec<u32>,
    /// It has entries of no request.
    condensed: bool,
}

/// What of a block of the journal a request waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Until {
    /// That it is handed out: from then on the end of the process can't take it.
    Kept,
    /// Its end.
    Written,
}

impl Group {
    fn waiting(&mut self, until: Until) -> &mut Vec<u32> {
        match until {
            Until::Kept => &mut self.unkept,
            Until::Written => &mut self.unwritten,
        }
    }
}

/// The ring as it is being written.
#[derive(Debug, Default)]
pub(super) struct Log {
    /// Length of the ring, in blocks.
    pub(super) blocks: u64,
    /// The next sequence number.
    next: Sequence,
    /// The oldest block that still counts.
    pub(super) tail: Sequence,
    /// The tail that a group with FUA carries that is handed out.
    pub(super) telling: Sequence,
    /// The tail that such a group carries that is written: recovery knows that
    /// blocks before it don't count, so that they may be damaged.
    pub(super) told: Sequence,
    /// The group that takes entries.
    open: Option<Group>,
    /// Groups to be handed out.
    pub(super) sealed: VecDeque<Group>,
    /// Groups being written.
    in_flight: Slab<Group>,
    /// Groups with entries of no request that are not written yet.
    pub(super) condensing: usize,
    /// How much keeps each sequence number after `low` from being covered: its
    /// own write, and the requests with entries in it.
    holds: VecDeque<u32>,
    low: Sequence,
    /// Blocks with intents, in the journal's order.
    pub(super) intents: VecDeque<(Sequence, Block)>,
    /// Requests whose data are handed out after the blocks up to this number, in
    /// its order.
    behind: VecDeque<(Sequence, u32)>,
    spare: Vec<Vec<u32>>,
}

impl Log {
    pub(super) fn new(blocks: u64, unsettled: usize) -> Self {
        Self {
            blocks,
            next: Sequence(1),
            tail: Sequence(1),
            telling: Sequence(1),
            told: Sequence(1),
            intents: VecDeque::with_capacity(unsettled * 2),
            holds: VecDeque::with_capacity(1024),
            ..Self::default()
        }
    }

    /// Blocks of the ring in use.
    pub(super) fn used(&self) -> u64 {
        self.next - self.tail
    }

    /// New groups that so many entries may need.
    pub(super) fn groups_for(&self, entries: usize) -> usize {
        let room = self
            .open
            .as_ref()
            .map_or(0, |group| MAX_ENTRIES - usize::from(group.entries));
        entries.saturating_sub(room).div_ceil(MAX_ENTRIES)
    }

    /// Whether the ring has so many blocks left.
    pub(super) fn has_room(&self, groups: usize) -> bool {
        self.used() + groups as u64 <= self.blocks
    }

    /// The same before the tail that is durable, and without what is kept for
    /// records that make room.
    pub(super) fn has_room_for_intents(&self, groups: usize) -> bool {
        self.next - self.told + groups as u64 + self.blocks / 4 <= self.blocks
    }

    /// All numbers up to this one are written, and their requests have ended.
    pub(super) const fn low(&self) -> Sequence {
        self.low
    }

    /// Whether there is something in the ring that need not stay.
    pub(super) fn can_move_tail(&self) -> bool {
        self.low >= self.tail
    }

    /// Whether the tail has moved and its room will be needed.
    pub(super) fn is_tail_to_be_told(&self) -> bool {
        self.telling != self.tail && (self.next - self.told) * 2 > self.blocks
    }

    pub(super) const fn has_open(&self) -> bool {
        self.open.is_some()
    }

    /// How many groups are being written.
    pub(super) fn writing(&self) -> usize {
        self.in_flight.len()
    }

    /// The group that takes entries, or a new one in a slot of these.
    pub(super) fn open_group(&mut self, free: &mut Vec<u16>) -> Option<&mut Group> {
        if self.open.is_none() {
            let slot = free.pop()?;
            self.open = Some(Group {
                sequence: self.next,
                slot,
                ..Group::default()
            });
            self.next = self.next.next();
            self.holds.push_back(1);
        }
        self.open.as_mut()
    }

    /// Add an entry of a request, which waits for the group, or of nobody, to the
    /// open group, composed in `block`; the group's number. The second is true if
    /// the request was not in it yet.
    pub(super) fn append(
        &mut self,
        entry: Entry,
        request: Option<(u32, Until)>,
        fua: bool,
        block: &mut [u8],
    ) -> (Sequence, bool) {
        let Some(group) = self.open.as_mut() else {
            unreachable!("a group is opened before an entry is added");
        };
        encode_entry(entry, usize::from(group.entries), block);
        if request.is_none() && !group.condensed {
            group.condensed = true;
            self.condensing += 1;
        }
        group.entries += 1;
        group.fua |= fua;
        let (sequence, entries) = (group.sequence, group.entries);
        if let Entry::Intent { block, .. } = entry {
            self.intents.push_back((sequence, Block(block)));
        }
        let mut first = false;
        if let Some((request, until)) = request {
            let waiting = group.waiting(until);
            first = waiting.last() != Some(&request);
            if first {
                if waiting.capacity() == 0 {
                    *waiting = self.spare.pop().unwrap_or_default();
                }
                waiting.push(request);
                *self.holds_of(sequence) += 1;
            }
        }
        if usize::from(entries) == MAX_ENTRIES {
            self.seal();
        }
        (sequence, first)
    }

    /// The open group takes no more entries.
    pub(super) fn seal(&mut self) {
        self.sealed.extend(self.open.take());
    }

    /// Have the data of a request wait until blocks up to this one are handed out.
    pub(super) fn put_behind(&mut self, sequence: Sequence, request: u32) {
        self.behind.push_back((sequence, request));
    }

    /// The next request whose data need not wait any more: because its intents
    /// are handed out, or for nothing if `all` is lost.
    pub(super) fn take_behind(&mut self, all: bool) -> Option<u32> {
        let (sequence, request) = *self.behind.front()?;
        if !all && sequence > self.handed_out() {
            return None;
        }
        self.behind.pop_front();
        Some(request)
    }

    /// A group is handed out: its index, and the requests that wait for no more.
    pub(super) fn begun(&mut self, mut group: Group) -> (u32, Vec<u32>) {
        let waiting = core::mem::take(&mut group.unkept);
        (self.in_flight.insert(group) as u32, waiting)
    }

    /// All requests that wait for a group which is over.
    pub(super) fn waiting_for(&mut self, group: Group) -> Vec<u32> {
        let (mut waiting, mut others) = (group.unkept, group.unwritten);
        if waiting.is_empty() {
            core::mem::swap(&mut waiting, &mut others);
        }
        waiting.append(&mut others);
        self.recycle(others);
        waiting
    }

    /// The last group that was handed out.
    pub(super) fn handed_out(&self) -> Sequence {
        let next = self.sealed.front().or(self.open.as_ref());
        next.map_or(self.next, |group| group.sequence).before()
    }

    /// All groups up to this one are written.
    pub(super) fn written(&self) -> Sequence {
        let writing = self.in_flight.iter().map(|(_, group)| group.sequence);
        writing
            .min()
            .map_or(self.handed_out(), |sequence| sequence.before())
    }

    /// Whether all that waits for the open group waits for it to be kept only,
    /// with its data in flight.
    pub(super) fn has_patience(&self) -> bool {
        self.open.as_ref().is_some_and(|open| {
            let behind = self.behind.back();
            open.unwritten.is_empty()
                && !open.condensed
                && behind.is_none_or(|(sequence, _)| *sequence < open.sequence)
        })
    }

    /// A group is written.
    pub(super) fn ended(&mut self, index: u32) -> Option<Group> {
        let group = self.in_flight.try_remove(index as usize)?;
        self.condensing -= usize::from(group.condensed);
        Some(group)
    }

    pub(super) fn recycle(&mut self, mut requests: Vec<u32>) {
        requests.clear();
        if requests.capacity() > 0 {
            self.spare.push(requests);
        }
    }

    /// One of the things that keep `sequence` from being covered is gone.
    pub(super) fn release(&mut self, sequence: Sequence) {
        if sequence <= self.low {
            return;
        }
        *self.holds_of(sequence) -= 1;
        while self.holds.front() == Some(&0) {
            self.holds.pop_front();
            self.low = self.low.next();
        }
    }

    fn holds_of(&mut self, sequence: Sequence) -> &mut u32 {
        &mut self.holds[(sequence - self.low) as usize - 1]
    }

    /// The highest number that has been given out.
    pub(super) const fn highest(&self) -> Sequence {
        self.next.before()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intents_have_no_room_before_a_tail_that_is_not_told() {
        let mut log = Log::new(16, 512);
        let mut free = (0..12).collect();
        for _ in 0..12 {
            log.open_group(&mut free);
            log.seal();
        }
        assert!(!log.has_room_for_intents(1));
        log.tail = Sequence(9);
        assert!(log.has_room(12) && !log.has_room_for_intents(1));
        assert!(log.is_tail_to_be_told());
        log.telling = Sequence(9);
        assert!(!log.is_tail_to_be_told() && !log.has_room_for_intents(1));
        log.told = Sequence(9);
        assert!(log.has_room_for_intents(8) && !log.has_room_for_intents(9));
    }
}
