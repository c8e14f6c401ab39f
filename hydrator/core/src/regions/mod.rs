// SPDX-License-Identifier: Apache-2.0

//! The regions: what is known of each block of the volume.
//!
//! A block is *remote* (reads go to the source), *local* (the destination is
//! right in this run), or *settled* (the metadata say so for good). What lies
//! between is kept by the block: it is being written, its intent is not settled
//! yet, it was copied and is not recorded yet, it is being zeroed with many
//! others, or nobody knows what it holds.

mod copied;
mod map;
mod mask;
mod unsettled;

use std::collections::{BTreeMap, BTreeSet};

pub(crate) use copied::Copied;
pub(crate) use map::Map;
pub(crate) use mask::Mask;
pub(crate) use unsettled::Entry;

use crate::format::bitmap::{BLOCKS_PER_SECTOR, SECTORS_PER_BITMAP_BLOCK, WORDS_PER_SECTOR};
use crate::rules::{Rule, Rules};
use crate::units::{Block, Blocks, Region, Sequence};
use unsettled::Unsettled;

/// What is known of each block of the volume.
#[derive(Debug, Default)]
pub(crate) struct Regions {
    map: Map,
    unsettled: Unsettled,
    copied: Copied,
    /// Remote blocks of which it is not known what they hold.
    unreadable: BTreeSet<Block>,
    /// Blocks that a large discard zeroes: the first, and the end.
    zeroing: BTreeMap<Block, Block>,
    /// Writes in flight over what was read from the destination, though not
    /// settled.
    overwrites: u32,
}

impl Regions {
    /// So many blocks, all remote.
    pub(crate) fn new(blocks: u64, region_blocks: u32) -> Self {
        Self {
            map: Map::new(blocks, region_blocks),
            ..Self::default()
        }
    }

    /// Make room for so many blocks that are not settled.
    pub(crate) fn reserve(&mut self, unsettled: usize) {
        // Twice, so that it need not grow for what was removed.
        self.unsettled.reserve(unsettled * 2);
    }

    /// Which blocks are local, and in which region.
    pub(crate) const fn map(&self) -> &Map {
        &self.map
    }

    /// The same, to be changed by who opens the volume.
    pub(crate) const fn map_mut(&mut self) -> &mut Map {
        &mut self.map
    }

    /// What was copied and is not in the bitmap yet.
    pub(crate) const fn copied(&self) -> &Copied {
        &self.copied
    }

    /// The same, to be recorded.
    pub(crate) const fn copied_mut(&mut self) -> &mut Copied {
        &mut self.copied
    }

    // What is settled.

    /// Whether a block is settled: I/O to it needs no more than the disk.
    #[inline]
    pub(crate) fn is_settled(&self, block: Block, rules: Rules) -> bool {
        let region = self.map.region_of(block);
        self.map.is_local(block)
            && (self.map.region_is_quiet(region)
                || !self.unsettled.contains_key(&block)
                    && (self.copied.is_being_recorded(&self.map, block).is_none()
                        || !rules.keep(Rule::HydratedIsNotSettled)))
    }

    /// Whether all of these are.
    #[inline]
    pub(crate) fn all_settled(&self, blocks: Blocks, rules: Rules) -> bool {
        if !self.map.all_local(blocks) {
            return false;
        }
        let mut regions = self.map.regions_of(blocks);
        regions.all(|region| self.map.region_is_quiet(region))
            || blocks.iter().all(|block| self.is_settled(block, rules))
    }

    /// What is known of a block that is being written or not settled yet.
    pub(crate) fn entry(&self, block: Block) -> Option<&Entry> {
        self.unsettled.get(&block)
    }

    /// How many there are.
    pub(crate) fn unsettled(&self) -> usize {
        self.unsettled.len()
    }

    /// Whether a block holds what this intent stands for.
    pub(crate) fn is_latest(&self, intent: Sequence, block: Block) -> bool {
        self.entry(block)
            .is_some_and(|entry| entry.sequence == intent && entry.content)
    }

    /// A block is settled.
    pub(crate) fn settle(&mut self, block: Block) {
        self.unsettled.remove(&block);
        self.map.entry_removed(block);
    }

    // What is being written.

    /// A request writes this block from now on.
    pub(crate) fn claim(&mut self, block: Block) {
        // A copy is not recorded any more, but read until it is overwritten.
        self.copied.forget(&mut self.map, block);
        let map = &mut self.map;
        let entry = self.unsettled.entry(block).or_insert_with(|| {
            map.entry_added(block);
            Entry {
                busy: false,
                content: false,
                sequence: Sequence(0),
                owed_after: 0,
            }
        });
        entry.busy = true;
    }

    /// This block of the journal has the intent of what is written there.
    pub(crate) fn intended(&mut self, block: Block, sequence: Sequence) {
        if let Some(entry) = self.unsettled.get_mut(&block) {
            entry.sequence = sequence;
        }
    }

    /// The request has written it: it is local, and owed to the guest once more
    /// flushes than these have been submitted. Whether it was not settled.
    pub(crate) fn written(&mut self, block: Block, owed_after: u64) -> bool {
        let Some(entry) = self.unsettled.get_mut(&block) else {
            return false;
        };
        entry.busy = false;
        entry.content = true;
        entry.owed_after = owed_after;
        self.map.set_local(block);
        self.unreadable.remove(&block);
        true
    }

    /// The request has not written it, or not well.
    pub(crate) fn give_up(&mut self, block: Block) {
        let Some(entry) = self.unsettled.get_mut(&block) else {
            return;
        };
        entry.busy = false;
        if !entry.content {
            // A copy that it was to overwrite may be damaged.
            self.map.set_remote(block);
            self.settle(block);
        }
    }

    /// Data are on their way over what was read from the destination.
    pub(crate) const fn overwrite_begun(&mut self) {
        self.overwrites += 1;
    }

    /// They have arrived.
    pub(crate) const fn overwrite_ended(&mut self) {
        self.overwrites -= 1;
    }

    /// Whether a read there must wait for a write.
    pub(crate) fn is_overwritten(&self, blocks: Blocks) -> bool {
        self.overwrites > 0
            && blocks.iter().any(|block| {
                !self.map.region_is_quiet(self.map.region_of(block))
                    && self.map.is_local(block)
                    && self.entry(block).is_some_and(|entry| entry.busy)
            })
    }

    // What is zeroed.

    /// A large discard zeroes these blocks from now on. Copies there are not
    /// recorded, and remote again.
    pub(crate) fn begin_zeroing(&mut self, blocks: Blocks) {
        for region in self.map.regions_of(blocks) {
            if self.map.has_copied(region) {
                for block in self.map.blocks_of(region).within(blocks).iter() {
                    if self.copied.forget(&mut self.map, block) {
                        self.map.set_remote(block);
                    }
                }
            }
        }
        self.zeroing.insert(blocks.first, blocks.end);
    }

    /// It does so no more; these are zeros, or not.
    pub(crate) fn end_zeroing(&mut self, blocks: Blocks, recorded: bool) {
        self.zeroing.remove(&blocks.first);
        if recorded {
            self.map.set_all_local(blocks);
            while let Some(block) = self.unreadable_in(blocks) {
                self.unreadable.remove(&block);
            }
        }
    }

    /// Whether any of these is just being zeroed.
    pub(crate) fn is_being_zeroed(&self, blocks: Blocks) -> bool {
        // They do not overlap: the last one before the end goes furthest.
        let before = self.zeroing.range(..blocks.end).next_back();
        before.is_some_and(|(_, end)| *end > blocks.first)
    }

    // What was copied.

    /// These of the blocks from `first` on are on the destination since so many
    /// flushes had been submitted: they are local from now on.
    pub(crate) fn arrived(&mut self, first: Block, blocks: Mask, after: u64) {
        for bit in blocks.iter() {
            self.map.set_local(first + bit);
        }
        self.copied.add(&mut self.map, first, blocks, after);
    }

    /// Whether a block was copied and is just being recorded.
    pub(crate) fn is_being_recorded(&self, block: Block) -> bool {
        self.copied.is_being_recorded(&self.map, block) == Some(true)
    }

    /// Whether any of these is.
    pub(crate) fn is_any_being_recorded(&self, blocks: Blocks) -> bool {
        self.copied.is_any_being_recorded(&self.map, blocks)
    }

    /// The first block, from `from` on, of a region with something that is being
    /// recorded.
    pub(crate) fn next_recording(&self, from: Block) -> Option<Block> {
        self.copied.next_recording(&self.map, from)
    }

    /// The bitmap is durable.
    pub(crate) fn recorded(&mut self) {
        self.copied.recorded(&mut self.map);
    }

    pub(crate) fn set_copying(&mut self, region: Region, copying: bool) {
        self.map.set_copying(region, copying);
    }

    /// The guest has read the region from the source; how often it has.
    pub(crate) fn warm(&mut self, region: Region) -> u8 {
        self.map.heat(region)
    }

    pub(crate) fn set_hot(&mut self, region: Region, hot: bool) {
        self.map.set_hot(region, hot);
    }

    // What nobody knows.

    /// Nobody knows what this block holds; false if that was known.
    pub(crate) fn is_not_readable(&mut self, block: Block) -> bool {
        self.unreadable.insert(block)
    }

    /// The first of these blocks of which nobody knows what it holds.
    pub(crate) fn unreadable_in(&self, blocks: Blocks) -> Option<Block> {
        self.unreadable
            .range(blocks.first..blocks.end)
            .next()
            .copied()
    }

    /// Whether it is not known what any of these blocks hold.
    pub(crate) fn is_any_unreadable(&self, blocks: Blocks) -> bool {
        self.unreadable_in(blocks).is_some()
    }

    /// How many there are.
    pub(crate) fn unreadable(&self) -> usize {
        self.unreadable.len()
    }

    // The bitmap.

    /// The next block of the bitmap that is to be written, from `from` on, and
    /// which of its sectors have changed; they count as written from now on.
    pub(crate) fn take_dirty(&mut self, from: u64) -> Option<(u64, u8)> {
        self.map.take_dirty(from)
    }

    /// Compose a block of the bitmap, of whose sectors these have changed: what
    /// is local of it and may be recorded, with intents up to `covers`.
    pub(crate) fn compose(
        &mut self,
        move_id: &[u8; 16],
        (bitmap_block, changed): (u64, u8),
        covers: Sequence,
        block: &mut [u8],
    ) {
        for (index, bytes) in block.chunks_exact_mut(512).enumerate() {
            let sector = bitmap_block * SECTORS_PER_BITMAP_BLOCK + index as u64;
            if changed >> index & 1 == 1 || !self.map.compose_again(sector, bytes) {
                let words = self.recordable(sector, covers);
                self.map.compose(move_id, sector, &words, bytes);
            }
        }
    }

    /// What is local of a sector of the bitmap and may be recorded.
    fn recordable(&self, sector: u64, covers: Sequence) -> [u64; WORDS_PER_SECTOR] {
        let mut words = [0; WORDS_PER_SECTOR];
        words.copy_from_slice(self.map.words(sector));
        let first = Block(sector * BLOCKS_PER_SECTOR);
        let blocks = Blocks::run(first, BLOCKS_PER_SECTOR).within(self.map.blocks());
        let mut withhold = |block: Block| {
            let at = block - first;
            words[(at / 64) as usize] &= !(1 << (at % 64));
        };
        self.copied.withheld(&self.map, blocks, &mut withhold);
        if blocks.is_empty() {
            return words;
        }
        for region in self.map.regions_of(blocks) {
            let mut rest = self.map.blocks_of(region).within(blocks);
            let mut left = self.map.entries_in(region);
            while left > 0 {
                let block = self.map.run_end(rest, false);
                if block == rest.end {
                    break;
                }
                if let Some(entry) = self.entry(block) {
                    left -= 1;
                    if !entry.content || entry.sequence > covers {
                        withhold(block);
                    }
                }
                rest = rest.from(block.next());
            }
        }
        words
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_covered_is_withheld_on_both_sides_of_a_sectors_end() {
        let seam = BLOCKS_PER_SECTOR;
        let mut regions = Regions::new(64 << 20 >> 12, 256);
        let around = Blocks::new(Block(seam - 40), Block(seam + 40));
        regions.map.set_all_local(around);
        let entries = [
            (seam - 30, 8, true),
            (seam - 1, 8, true),
            (seam, 7, false),
            (seam + 1, 7, true),
            (seam + 30, 8, true),
        ];
        for (block, sequence, content) in entries {
            regions.claim(Block(block));
            regions.intended(Block(block), Sequence(sequence));
            if content {
                regions.written(Block(block), 0);
            }
        }
        let sectors = [0, 1].map(|sector| regions.recordable(sector, Sequence(7)));
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

    #[test]
    fn blocks_that_are_being_zeroed_are_found_from_either_side() {
        let mut regions = Regions::new(1024, 256);
        let run = |first, count| Blocks::run(Block(first), count);
        regions.begin_zeroing(run(300, 100));
        regions.begin_zeroing(run(600, 10));
        for (first, count, expected) in [
            (0, 300, false),
            (0, 301, true),
            (399, 1, true),
            (400, 200, false),
            (350, 300, true),
            (610, 5, false),
        ] {
            assert_eq!(regions.is_being_zeroed(run(first, count)), expected);
        }
        regions.end_zeroing(run(300, 100), false);
        assert!(!regions.is_being_zeroed(run(0, 600)));
    }
}
