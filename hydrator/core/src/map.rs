// SPDX-License-Identifier: Apache-2.0

//! What is local, in memory.

use crate::BLOCK_SIZE;
use crate::bitmap::{
    BLOCKS_PER_BITMAP_BLOCK, WORDS_PER_BITMAP_BLOCK, WORDS_PER_SECTOR, encode_sector,
};

/// In [`Region::pending`]: blocks of the region were hydrated and have no bit.
const HYDRATED: u16 = 1 << 15;
/// In [`Region::flags`]: a copy of the region is under way.
const COPYING: u8 = 1;
/// In [`Region::flags`]: waits among the hot ones.
const HOT: u8 = 2;

#[derive(Clone, Copy, Debug, Default)]
struct Region {
    /// How many blocks have an entry among the unsettled, and [`HYDRATED`].
    pending: u16,
    heat: u8,
    flags: u8,
}

/// Which blocks are local in this run, and what is known of their regions.
#[derive(Debug, Default)]
pub(crate) struct Map {
    blocks: u64,
    region_shift: u32,
    local: Vec<u64>,
    regions: Vec<Region>,
    /// Bitmap blocks that say less than is local.
    dirty: Vec<u64>,
    dirty_count: u64,
    remote: u64,
}

impl Map {
    pub(crate) fn new(blocks: u64, region_blocks: u32) -> Self {
        let mut map = Self {
            region_shift: region_blocks.trailing_zeros(),
            ..Self::default()
        };
        map.grow(blocks);
        map
    }

    pub(crate) fn grow(&mut self, blocks: u64) {
        let bitmap_blocks = blocks.div_ceil(BLOCKS_PER_BITMAP_BLOCK) as usize;
        let regions = blocks.div_ceil(1 << self.region_shift) as usize;
        self.local.resize(bitmap_blocks * WORDS_PER_BITMAP_BLOCK, 0);
        self.dirty.resize(bitmap_blocks.div_ceil(64), 0);
        self.regions.resize(regions, Region::default());
        self.remote += blocks - self.blocks;
        self.blocks = blocks;
    }

    pub(crate) const fn blocks(&self) -> u64 {
        self.blocks
    }

    pub(crate) const fn remote(&self) -> u64 {
        self.remote
    }

    pub(crate) fn is_local(&self, block: u64) -> bool {
        self.local[(block / 64) as usize] >> (block % 64) & 1 == 1
    }

    /// Whether all of `first..end` are local.
    pub(crate) fn all_local(&self, first: u64, end: u64) -> bool {
        self.run_end(first, end, true) == end
    }

    /// The end of the blocks from `first` on, below `end`, that are local (or
    /// remote) without a gap.
    pub(crate) fn run_end(&self, first: u64, end: u64, local: bool) -> u64 {
        let mut block = first;
        while block < end {
            let word = self.local[(block / 64) as usize];
            let same = if local { word } else { !word } >> (block % 64);
            let run = u64::from((!same).trailing_zeros()).min(64 - block % 64);
            block += run;
            if block % 64 != 0 || run == 0 {
                return block.min(end);
            }
        }
        end
    }

    /// Words of the bitmap as read from the metadata.
    pub(crate) fn load(&mut self, first_word: usize, words: &[u64]) {
        for (at, word) in (first_word..).zip(words) {
            let Some(slot) = self.local.get_mut(at) else {
                return;
            };
            let below = self.blocks.saturating_sub(at as u64 * 64).min(64);
            let inside = if below == 64 {
                u64::MAX
            } else {
                (1 << below) - 1
            };
            let new = word & inside & !*slot;
            *slot |= new;
            self.remote -= u64::from(new.count_ones());
        }
    }

    pub(crate) fn set_local(&mut self, block: u64) {
        let word = &mut self.local[(block / 64) as usize];
        let bit = 1 << (block % 64);
        if *word & bit == 0 {
            *word |= bit;
            self.remote -= 1;
        }
        self.set_dirty(block / BLOCKS_PER_BITMAP_BLOCK);
    }

    pub(crate) fn set_all_local(&mut self, first: u64, end: u64) {
        let mut block = first;
        while block < end {
            let stop = (block / 64 * 64 + 64).min(end);
            let bits = u64::MAX >> (64 - (stop - block)) << (block % 64);
            let word = &mut self.local[(block / 64) as usize];
            let new = bits & !*word;
            if new != 0 {
                *word |= new;
                self.remote -= u64::from(new.count_ones());
                self.set_dirty(block / BLOCKS_PER_BITMAP_BLOCK);
            }
            block = stop;
        }
    }

    pub(crate) fn set_remote(&mut self, block: u64) {
        let word = &mut self.local[(block / 64) as usize];
        let bit = 1 << (block % 64);
        if *word & bit != 0 {
            *word &= !bit;
            self.remote += 1;
        }
    }

    fn set_dirty(&mut self, bitmap_block: u64) {
        let word = &mut self.dirty[(bitmap_block / 64) as usize];
        let bit = 1 << (bitmap_block % 64);
        if *word & bit == 0 {
            *word |= bit;
            self.dirty_count += 1;
        }
    }

    pub(crate) const fn any_dirty(&self) -> bool {
        self.dirty_count > 0
    }

    /// The first block of the bitmap from `from` on that is to be written; it
    /// counts as written from now on.
    pub(crate) fn take_dirty(&mut self, from: u64) -> Option<u64> {
        let mut at = (from / 64) as usize;
        let mut mask = u64::MAX << (from % 64);
        while at < self.dirty.len() {
            let word = self.dirty[at] & mask;
            if word != 0 {
                let bit = word.trailing_zeros();
                self.dirty[at] &= !(1 << bit);
                self.dirty_count -= 1;
                return Some(at as u64 * 64 + u64::from(bit));
            }
            at += 1;
            mask = u64::MAX;
        }
        None
    }

    /// What is local of the blocks that a block of the bitmap stands for.
    pub(crate) fn words(&self, bitmap_block: u64) -> &[u64] {
        let first = bitmap_block as usize * WORDS_PER_BITMAP_BLOCK;
        &self.local[first..first + WORDS_PER_BITMAP_BLOCK]
    }

    /// Compose a block of the bitmap from what may be recorded; it stays dirty
    /// if that is less than what is local.
    pub(crate) fn compose(
        &mut self,
        move_id: &[u8; 16],
        bitmap_block: u64,
        words: &[u64],
        block: &mut [u8],
    ) {
        if words != self.words(bitmap_block) {
            self.set_dirty(bitmap_block);
        }
        for (index, (words, sector)) in words
            .chunks_exact(WORDS_PER_SECTOR)
            .zip(block.chunks_exact_mut(512))
            .enumerate()
        {
            encode_sector(move_id, bitmap_block * 8 + index as u64, words, sector);
        }
    }

    pub(crate) const fn region_of(&self, block: u64) -> u64 {
        block >> self.region_shift
    }

    pub(crate) const fn region_first(&self, region: u64) -> u64 {
        region << self.region_shift
    }

    /// The end of a region, in blocks.
    pub(crate) fn region_end(&self, region: u64) -> u64 {
        ((region + 1) << self.region_shift).min(self.blocks)
    }

    pub(crate) fn regions(&self) -> u64 {
        self.regions.len() as u64
    }

    /// No block of the region is unsettled though local, or being written.
    pub(crate) fn region_is_quiet(&self, region: u64) -> bool {
        self.regions[region as usize].pending == 0
    }

    /// How many blocks of the region have an entry among the unsettled.
    pub(crate) fn entries_in(&self, region: u64) -> u16 {
        self.regions[region as usize].pending & !HYDRATED
    }

    pub(crate) fn entry_added(&mut self, block: u64) {
        self.regions[(block >> self.region_shift) as usize].pending += 1;
    }

    pub(crate) fn entry_removed(&mut self, block: u64) {
        self.regions[(block >> self.region_shift) as usize].pending -= 1;
    }

    pub(crate) fn has_hydrated(&self, region: u64) -> bool {
        self.regions[region as usize].pending & HYDRATED != 0
    }

    pub(crate) fn set_hydrated(&mut self, region: u64, hydrated: bool) {
        let pending = &mut self.regions[region as usize].pending;
        *pending = *pending & !HYDRATED | if hydrated { HYDRATED } else { 0 };
    }

    pub(crate) fn is_copying(&self, region: u64) -> bool {
        self.regions[region as usize].flags & COPYING != 0
    }

    pub(crate) fn set_copying(&mut self, region: u64, copying: bool) {
        let flags = &mut self.regions[region as usize].flags;
        *flags = *flags & !COPYING | if copying { COPYING } else { 0 };
    }

    /// The guest has read the region from the source; how often it has.
    pub(crate) fn heat(&mut self, region: u64) -> u8 {
        let region = &mut self.regions[region as usize];
        region.heat = region.heat.saturating_add(1);
        region.heat
    }

    pub(crate) fn heat_of(&self, region: u64) -> u8 {
        self.regions[region as usize].heat
    }

    pub(crate) fn is_hot(&self, region: u64) -> bool {
        self.regions[region as usize].flags & HOT != 0
    }

    pub(crate) fn set_hot(&mut self, region: u64, hot: bool) {
        let flags = &mut self.regions[region as usize].flags;
        *flags = *flags & !HOT | if hot { HOT } else { 0 };
    }

    pub(crate) const fn size(&self) -> u64 {
        self.blocks * BLOCK_SIZE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_become_local_together_as_they_do_one_by_one() {
        const BLOCKS: u64 = 2 * BLOCKS_PER_BITMAP_BLOCK;
        let seam = BLOCKS_PER_BITMAP_BLOCK;
        for (first, end) in [
            (0, 1),
            (3, 64),
            (63, 65),
            (64, 128),
            (5, 5),
            (seam - 70, seam + 3),
        ] {
            let mut together = Map::new(BLOCKS, 256);
            let mut one_by_one = Map::new(BLOCKS, 256);
            for map in [&mut together, &mut one_by_one] {
                map.set_local(first);
            }
            together.set_all_local(first, end);
            (first..end).for_each(|block| one_by_one.set_local(block));
            assert!(together.local == one_by_one.local, "{first} to {end}");
            assert_eq!(together.remote(), one_by_one.remote());
            assert_eq!(together.dirty, one_by_one.dirty);
        }
    }
}
