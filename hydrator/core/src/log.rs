// SPDX-License-Identifier: Apache-2.0

//! The journal as it is being written: groups of entries, and what their
//! sequence numbers say.

use std::collections::VecDeque;

use crate::journal::{Entry, MAX_ENTRIES, encode_entry};

/// A block of the journal that is being filled or written.
#[derive(Debug, Default)]
pub(crate) struct Group {
    pub(crate) sequence: u64,
    /// The buffer it is composed in.
    pub(crate) slot: u16,
    pub(crate) entries: u16,
    pub(crate) fua: bool,
    /// The settled number that it carries, once it has been handed out.
    pub(crate) settled: u64,
    /// The tail that it carries then.
    pub(crate) tail: u64,
    /// Requests that wait for it.
    pub(crate) requests: Vec<u32>,
    /// It has entries of no request.
    condensed: bool,
}

/// The journal as it is being written.
#[derive(Debug, Default)]
pub(crate) struct Log {
    /// Length of the ring, in blocks.
    pub(crate) blocks: u64,
    /// The next sequence number.
    next: u64,
    /// The oldest block that still counts.
    pub(crate) tail: u64,
    /// The tail that a group with FUA carries that is handed out.
    pub(crate) telling: u64,
    /// The tail that such a group carries that is written: recovery knows that
    /// blocks before it don't count, so that they may be damaged.
    pub(crate) told: u64,
    /// The group that takes entries.
    open: Option<Group>,
    /// Groups to be handed out.
    pub(crate) sealed: VecDeque<Group>,
    /// Groups being written, by index.
    in_flight: Vec<Option<Group>>,
    pub(crate) writing: usize,
    /// Groups with entries of no request that are not written yet.
    pub(crate) condensing: usize,
    /// How much keeps each sequence number after `low` from being covered: its
    /// own write, and the requests with entries in it.
    holds: VecDeque<u32>,
    low: u64,
    /// Blocks with intents, in the journal's order.
    pub(crate) intents: VecDeque<(u64, u64)>,
    /// Requests whose data are handed out behind the block with this number,
    /// in its order.
    pub(crate) behind: VecDeque<(u64, u32)>,
    spare: Vec<Vec<u32>>,
}

impl Log {
    pub(crate) fn new(blocks: u64, unsettled: usize) -> Self {
        Self {
            blocks,
            next: 1,
            tail: 1,
            telling: 1,
            told: 1,
            intents: VecDeque::with_capacity(unsettled * 2),
            holds: VecDeque::with_capacity(1024),
            ..Self::default()
        }
    }

    /// Blocks of the ring in use.
    pub(crate) const fn used(&self) -> u64 {
        self.next - self.tail
    }

    /// New groups that so many entries may need.
    pub(crate) fn groups_for(&self, entries: usize) -> usize {
        let room = self
            .open
            .as_ref()
            .map_or(0, |group| MAX_ENTRIES - usize::from(group.entries));
        entries.saturating_sub(room).div_ceil(MAX_ENTRIES)
    }

    /// Whether the ring has so many blocks left.
    pub(crate) const fn has_room(&self, groups: usize) -> bool {
        self.used() + groups as u64 <= self.blocks
    }

    /// The same before the tail that is durable, and without what is kept for
    /// records that make room.
    pub(crate) const fn has_room_for_intents(&self, groups: usize) -> bool {
        self.next - self.told + groups as u64 + self.blocks / 4 <= self.blocks
    }

    /// All numbers up to this one are written, and their requests have ended.
    pub(crate) const fn low(&self) -> u64 {
        self.low
    }

    /// Whether there is something in the ring that need not stay.
    pub(crate) const fn can_move_tail(&self) -> bool {
        self.low >= self.tail
    }

    /// Whether the tail has moved and its room will be needed.
    pub(crate) const fn is_tail_to_be_told(&self) -> bool {
        self.telling != self.tail && (self.next - self.told) * 2 > self.blocks
    }

    pub(crate) const fn has_open(&self) -> bool {
        self.open.is_some()
    }

    /// The group that takes entries, or a new one in `slot`.
    pub(crate) fn open_group(&mut self, slot: impl FnOnce() -> Option<u16>) -> Option<&mut Group> {
        if self.open.is_none() {
            let slot = slot()?;
            self.open = Some(Group {
                sequence: self.next,
                slot,
                ..Group::default()
            });
            self.next += 1;
            self.holds.push_back(1);
        }
        self.open.as_mut()
    }

    /// Add an entry of `request`, or of nobody, to the open group, composed in
    /// `block`; the group's number. The second is true if the request was not in
    /// it yet.
    pub(crate) fn append(
        &mut self,
        entry: Entry,
        request: Option<u32>,
        fua: bool,
        block: &mut [u8],
    ) -> (u64, bool) {
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
            self.intents.push_back((sequence, block));
        }
        let first = request.is_some_and(|request| group.requests.last() != Some(&request));
        if first {
            if group.requests.capacity() == 0 {
                group.requests = self.spare.pop().unwrap_or_default();
            }
            group.requests.extend(request);
            self.holds[(sequence - self.low - 1) as usize] += 1;
        }
        if usize::from(entries) == MAX_ENTRIES {
            self.seal();
        }
        (sequence, first)
    }

    /// The open group takes no more entries.
    pub(crate) fn seal(&mut self) {
        self.sealed.extend(self.open.take());
    }

    /// The next request whose data follow the block with this number or an
    /// earlier one.
    pub(crate) fn take_behind(&mut self, sequence: u64) -> Option<u32> {
        let (_, request) = self.behind.front().filter(|next| next.0 <= sequence)?;
        let request = *request;
        self.behind.pop_front();
        Some(request)
    }

    /// A group is handed out; its index.
    pub(crate) fn begun(&mut self, group: Group) -> u32 {
        self.writing += 1;
        if let Some(index) = self.in_flight.iter().position(Option::is_none) {
            self.in_flight[index] = Some(group);
            return index as u32;
        }
        self.in_flight.push(Some(group));
        (self.in_flight.len() - 1) as u32
    }

    /// A group is written.
    pub(crate) fn ended(&mut self, index: u32) -> Option<Group> {
        let group = self.in_flight.get_mut(index as usize)?.take()?;
        self.writing -= 1;
        self.condensing -= usize::from(group.condensed);
        Some(group)
    }

    pub(crate) fn recycle(&mut self, mut requests: Vec<u32>) {
        requests.clear();
        if requests.capacity() > 0 {
            self.spare.push(requests);
        }
    }

    /// One of the things that keep `sequence` from being covered is gone.
    pub(crate) fn release(&mut self, sequence: u64) {
        if sequence <= self.low {
            return;
        }
        self.holds[(sequence - self.low - 1) as usize] -= 1;
        while self.holds.front() == Some(&0) {
            self.holds.pop_front();
            self.low += 1;
        }
    }

    /// The highest number that has been given out and is no longer open.
    pub(crate) const fn highest(&self) -> u64 {
        self.next - 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intents_have_no_room_before_a_tail_that_is_not_told() {
        let mut log = Log::new(16, 512);
        for slot in 0..12 {
            log.open_group(|| Some(slot));
            log.seal();
        }
        assert!(!log.has_room_for_intents(1));
        log.tail = 9;
        assert!(log.has_room(12) && !log.has_room_for_intents(1));
        assert!(log.is_tail_to_be_told());
        log.telling = 9;
        assert!(!log.is_tail_to_be_told() && !log.has_room_for_intents(1));
        log.told = 9;
        assert!(log.has_room_for_intents(8) && !log.has_room_for_intents(9));
    }
}
