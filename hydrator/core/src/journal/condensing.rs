// SPDX-License-Identifier: Apache-2.0

//! Condensing the journal.
//!
//! Scattered writes that come one by one leave a journal of blocks with one
//! entry each, and a change in nearly as many blocks of the bitmap. To move the
//! tail then, what those blocks say is written once more, side by side in a few
//! blocks at the journal's head. The bitmap follows when there is more to say of
//! each of its blocks, or when it is due anyway.

use crate::context::Context;
use crate::format::journal::{Entry, MAX_ENTRIES};
use crate::io::Memory;
use crate::journal::log::Log;
use crate::regions::Regions;
use crate::rules::Rule;
use crate::units::{Block, Sequence};

/// The most settled blocks that are kept in mind (1 MiB of memory).
const KEPT: usize = 65536;
/// The tail moves by so many blocks at least for each that is written.
const WORTH: u64 = 4;

/// What the journal says and the bitmap does not, in the journal's order.
#[derive(Debug, Default)]
pub(super) struct Condensing {
    /// Blocks that are settled, or covered by a checkpoint that is under way,
    /// each with the number of the journal's block that has its intent.
    settled: Vec<(Sequence, Block)>,
    /// Intents up to this one are among them if they count.
    listed: Sequence,
    /// The last block of the journal with something that is not among them.
    left_out: Sequence,
    /// From where and up to where they are to be written.
    next: usize,
    end: usize,
}

/// How far the writing of it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Condensed {
    /// Something is to be written, or being written.
    Under,
    /// All of it is durable.
    Done,
    /// The journal has no room for it.
    NoRoom,
}

impl Condensing {
    pub(super) fn new() -> Self {
        Self {
            settled: Vec::with_capacity(KEPT),
            ..Self::default()
        }
    }

    /// A block of the journal has something that cannot be condensed.
    pub(super) fn left_out(&mut self, sequence: Sequence) {
        self.left_out = self.left_out.max(sequence);
    }

    /// What this intent stands for is settled.
    pub(super) fn settled(&mut self, sequence: Sequence, block: Block) {
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
    pub(super) fn recorded(&mut self, covers: Sequence) {
        let count = self
            .settled
            .partition_point(|(intent, _)| *intent <= covers);
        self.settled.drain(..count);
    }

    /// The next blocks to be written that lie side by side.
    fn next_run(&mut self) -> Option<Entry> {
        let left = self.settled.get(self.next..self.end)?;
        let (_, block) = *left.first()?;
        let run = (block.0..)
            .zip(left)
            .take_while(|(next, kept)| *next == kept.1.0);
        let count = run.count();
        self.next += count;
        Some(Entry::Local {
            block: block.0,
            count: count as u32,
        })
    }
}

impl Condensing {
    /// Whether the journal is to be condensed up to `covers`, which is flushed;
    /// if so, [`Condensing::advance`] does it.
    pub(super) fn begin(
        &mut self,
        covers: Sequence,
        log: &Log,
        regions: &Regions,
        cx: &Context,
    ) -> bool {
        let covered = log.intents.iter().take_while(|intent| intent.0 <= covers);
        for (intent, block) in covered {
            if regions.is_latest(*intent, *block) {
                self.settled(*intent, *block);
            }
        }
        self.listed = self.listed.max(covers);
        let count = self.settled.len();
        let blocks = count.div_ceil(MAX_ENTRIES);
        let cost = blocks as u64;
        self.next = 0;
        self.end = count;
        self.left_out < log.tail
            && cost.max(1) * WORTH <= covers.next() - log.tail
            && cost * cx.config.condense_above < regions.map().dirty_sectors()
            && log.has_room(blocks + 1)
    }

    /// Add what is to be condensed to the log, as far as there are buffers for
    /// it. Whether there was anything.
    pub(super) fn advance<M: Memory>(
        &mut self,
        log: &mut Log,
        cx: &mut Context,
        memory: &mut M,
    ) -> (Condensed, bool) {
        let fua = cx.rules.keep(Rule::FuaCondensed);
        let mut any = false;
        while self.next < self.end {
            if !log.has_open() && !log.has_room(1) {
                return (Condensed::NoRoom, any);
            }
            let Some(group) = log.open_group(&mut cx.free_blocks) else {
                return (Condensed::Under, any);
            };
            let slot = group.slot;
            let Some(run) = self.next_run() else {
                break;
            };
            log.append(run, None, fua, memory.block_mut(slot));
            any = true;
        }
        if log.condensing == 0 || !cx.rules.keep(Rule::CondensedBeforeTail) {
            (Condensed::Done, any)
        } else {
            (Condensed::Under, any)
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
            condensing.settled(Sequence(sequence), Block(block));
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
            condensing.settled(Sequence(sequence), Block(sequence * 10));
        }
        condensing.recorded(Sequence(2));
        assert_eq!(
            condensing.settled,
            [3, 4].map(|number| (Sequence(number), Block(number * 10)))
        );
    }

    #[test]
    fn an_intent_that_is_listed_already_is_not_listed_again() {
        let mut condensing = Condensing::new();
        condensing.listed = Sequence(5);
        condensing.settled(Sequence(5), Block(50));
        condensing.settled(Sequence(6), Block(60));
        assert_eq!(condensing.settled, [(Sequence(6), Block(60))]);
    }

    #[test]
    fn what_cannot_be_kept_in_mind_is_known_to_be_left_out() {
        let mut condensing = Condensing::new();
        for number in 1..=KEPT as u64 {
            condensing.settled(Sequence(number), Block(number));
        }
        assert_eq!(condensing.left_out, Sequence(0));
        let next = Sequence(KEPT as u64 + 1);
        condensing.settled(next, Block(1));
        assert_eq!(condensing.left_out, next);
        assert_eq!(condensing.settled.len(), KEPT);
    }
}
