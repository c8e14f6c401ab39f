// SPDX-License-Identifier: Apache-2.0

//! Condensing the journal.
//!
//! Scattered writes that come one by one leave a journal of blocks with one
//! entry each, and a change in nearly as many blocks of the bitmap. To move the
//! tail then, what those blocks say is written once more, side by side in a few
//! blocks at the journal's head. The bitmap follows when there is more to say of
//! each of its blocks, or when it is due anyway.

use crate::journal::{Entry, MAX_ENTRIES};
use crate::rules::Rule;
use crate::{Memory, Volume};

/// The most settled blocks that are kept in mind (1 MiB of memory).
const KEPT: usize = 65536;
/// The tail moves by so many blocks at least for each that is written.
const WORTH: u64 = 4;

/// What the journal says and the bitmap does not, in the journal's order.
#[derive(Debug, Default)]
pub(crate) struct Condensing {
    /// Blocks that are settled, or covered by a checkpoint that is under way,
    /// each with the number of the journal's block that has its intent.
    settled: Vec<(u64, u64)>,
    /// Intents up to this one are among them if they count.
    listed: u64,
    /// The last block of the journal with something that is not among them.
    left_out: u64,
    /// From where and up to where they are to be written.
    next: usize,
    end: usize,
}

/// How far the writing of it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Condensed {
    /// Something is to be written, or being written.
    Under,
    /// All of it is durable.
    Done,
    /// The journal has no room for it.
    NoRoom,
}

impl Condensing {
    pub(crate) fn new() -> Self {
        Self {
            settled: Vec::with_capacity(KEPT),
            ..Self::default()
        }
    }

    /// A block of the journal has something that cannot be condensed.
    pub(crate) fn left_out(&mut self, sequence: u64) {
        self.left_out = self.left_out.max(sequence);
    }

    /// What this intent stands for is settled.
    pub(crate) fn settled(&mut self, sequence: u64, block: u64) {
        if sequence <= self.listed {
            return;
        }
        if self.settled.len() == KEPT {
            self.left_out(sequence);
        } else {
            self.settled.push((sequence, block));
        }
    }

    /// The bitmap has what intents up to this one stand for.
    pub(crate) fn recorded(&mut self, covers: u64) {
        let count = self
            .settled
            .partition_point(|(intent, _)| *intent <= covers);
        self.settled.drain(..count);
    }

    /// The next blocks to be written that lie side by side.
    fn next_run(&mut self) -> Option<Entry> {
        let left = self.settled.get(self.next..self.end)?;
        let (_, block) = *left.first()?;
        let run = (block..)
            .zip(left)
            .take_while(|(next, kept)| *next == kept.1);
        let count = run.count();
        self.next += count;
        Some(Entry::Local {
            block,
            count: count as u32,
        })
    }
}

impl Volume {
    /// Whether the journal is to be condensed up to `covers`, which is flushed;
    /// if so, [`Volume::condense`] does it.
    pub(crate) fn begin_condensing(&mut self, covers: u64) -> bool {
        for at in 0..self.log.intents.len() {
            let (intent, block) = self.log.intents[at];
            if intent > covers {
                break;
            }
            if self.is_latest(intent, block) {
                self.condensing.settled(intent, block);
            }
        }
        self.condensing.listed = self.condensing.listed.max(covers);
        let count = self.condensing.settled.len();
        let blocks = count.div_ceil(MAX_ENTRIES);
        let cost = blocks as u64;
        self.condensing.next = 0;
        self.condensing.end = count;
        self.condensing.left_out < self.log.tail
            && cost.max(1) * WORTH <= (covers + 1).saturating_sub(self.log.tail)
            && cost * self.config.condense_above < self.map.dirty_sectors()
            && self.log.has_room(blocks + 1)
    }

    /// Write what is to be condensed, as far as there are buffers for it.
    pub(crate) fn condense<M: Memory>(&mut self, memory: &mut M) -> Condensed {
        let fua = self.rules.keep(Rule::FuaCondensed);
        while self.condensing.next < self.condensing.end {
            if !self.log.has_open() && !self.log.has_room(1) {
                return Condensed::NoRoom;
            }
            let free = &mut self.free_blocks;
            let Some(group) = self.log.open_group(|| free.pop()) else {
                return Condensed::Under;
            };
            let slot = group.slot;
            let Some(run) = self.condensing.next_run() else {
                break;
            };
            self.log.append(run, None, fua, memory.block_mut(slot));
            self.retry = true;
            self.flushes.urgent = self.log.has_open();
        }
        if self.log.condensing == 0 || !self.rules.keep(Rule::CondensedBeforeTail) {
            Condensed::Done
        } else {
            Condensed::Under
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_side_by_side_are_one_entry() {
        let mut condensing = Condensing::new();
        for (sequence, block) in [(1, 7), (1, 8), (2, 9), (3, 11), (4, 10)] {
            condensing.settled(sequence, block);
        }
        condensing.end = 5;
        let runs: Vec<_> = std::iter::from_fn(|| condensing.next_run()).collect();
        let local = |block, count| Entry::Local { block, count };
        assert_eq!(runs, [local(7, 3), local(11, 1), local(10, 1)]);
    }

    #[test]
    fn what_the_bitmap_has_is_forgotten_and_nothing_else() {
        let mut condensing = Condensing::new();
        for sequence in 1..=4 {
            condensing.settled(sequence, sequence * 10);
        }
        condensing.recorded(2);
        assert_eq!(condensing.settled, [(3, 30), (4, 40)]);
    }

    #[test]
    fn an_intent_that_is_listed_already_is_not_listed_again() {
        let mut condensing = Condensing::new();
        condensing.listed = 5;
        condensing.settled(5, 50);
        condensing.settled(6, 60);
        assert_eq!(condensing.settled, [(6, 60)]);
    }

    #[test]
    fn what_cannot_be_kept_in_mind_is_known_to_be_left_out() {
        let mut condensing = Condensing::new();
        for number in 1..=KEPT as u64 {
            condensing.settled(number, number);
        }
        assert_eq!(condensing.left_out, 0);
        condensing.settled(KEPT as u64 + 1, 1);
        assert_eq!(condensing.left_out, KEPT as u64 + 1);
        assert_eq!(condensing.settled.len(), KEPT);
    }
}
