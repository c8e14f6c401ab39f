// SPDX-License-Identifier: Apache-2.0

//! What is local, in memory.

use crate::BLOCK_SIZE;
use crate::bitmap::{
    BLOCKS_PER_BITMAP_BLOCK, BLOCKS_PER_SECTOR, SECTORS_PER_BITMAP_BLOCK, WORDS_PER_BITMAP_BLOCK,
    WORDS_PER_SECTOR, encode_sector, encode_words,
};
use crate::superblock::u64_at;

/// Where a sector of the bitmap has what follows its words.
const TRAILER: usize = WORDS_PER_SECTOR * 8;

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
    /// Sectors of the bitmap that say less than is local, or more.
    dirty: Vec<u64>,
    dirty_count: u64,
    /// For each sector of the bitmap what follows its words, checksum and all,
    /// as it was composed last; 0 if it was not. True of those not dirty.
    trailers: Vec<u64>,
    remote: u64,
}

impl Map {
    pub(crate) fn new(blocks: u64, region_blocks: u32) -> Self {
        let region_shift = region_blocks.trailing_zeros();
        let bitmap_blocks = blocks.div_ceil(BLOCKS_PER_BITMAP_BLOCK) as usize;
        let sectors = bitmap_blocks * SECTORS_PER_BITMAP_BLOCK as usize;
        let regions = blocks.div_ceil(1 << region_shift) as usize;
        Self {
            blocks,
            region_shift,
            local: vec![0; bitmap_blocks * WORDS_PER_BITMAP_BLOCK],
            regions: vec![Region::default(); regions],
            dirty: vec![0; sectors.div_ceil(64)],
            dirty_count: 0,
            trailers: vec![0; sectors],
            remote: blocks,
        }
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
        self.set_dirty(block / BLOCKS_PER_SECTOR);
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
                self.set_dirty(block / BLOCKS_PER_SECTOR);
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
            self.set_dirty(block / BLOCKS_PER_SECTOR);
        }
    }

    fn set_dirty(&mut self, sector: u64) {
        let word = &mut self.dirty[(sector / 64) as usize];
        let bit = 1 << (sector % 64);
        if *word & bit == 0 {
            *word |= bit;
            self.dirty_count += 1;
        }
    }

    pub(crate) const fn any_dirty(&self) -> bool {
        self.dirty_count > 0
    }

    /// Sectors of the bitmap that are to be written.
    pub(crate) const fn dirty_sectors(&self) -> u64 {
        self.dirty_count
    }

    /// The first block of the bitmap from `from` on that is to be written, and
    /// which of its sectors have changed, one bit each; they count as written
    /// from now on.
    pub(crate) fn take_dirty(&mut self, from: u64) -> Option<(u64, u8)> {
        const BLOCKS: u64 = 64 / SECTORS_PER_BITMAP_BLOCK;
        let mut at = (from / BLOCKS) as usize;
        let mut mask = u64::MAX << (from % BLOCKS * SECTORS_PER_BITMAP_BLOCK);
        while at < self.dirty.len() {
            let word = self.dirty[at] & mask;
            if word != 0 {
                let block = u64::from(word.trailing_zeros()) / SECTORS_PER_BITMAP_BLOCK;
                let shift = block * SECTORS_PER_BITMAP_BLOCK;
                let sectors = (word >> shift) as u8;
                self.dirty[at] &= !(u64::from(sectors) << shift);
                self.dirty_count -= u64::from(sectors.count_ones());
                return Some((at as u64 * BLOCKS + block, sectors));
            }
            at += 1;
            mask = u64::MAX;
        }
        None
    }

    /// What is local of the blocks that a sector of the bitmap stands for.
    pub(crate) fn words(&self, sector: u64) -> &[u64] {
        let first = sector as usize * WORDS_PER_SECTOR;
        &self.local[first..first + WORDS_PER_SECTOR]
    }

    /// Compose a sector of the bitmap that is not dirty, as it was before; false
    /// if it was not composed yet.
    pub(crate) fn compose_again(&self, sector: u64, bytes: &mut [u8]) -> bool {
        let trailer = self.trailers[sector as usize];
        if trailer != 0 {
            encode_words(self.words(sector), bytes);
            bytes[TRAILER..].copy_from_slice(&trailer.to_le_bytes());
        }
        trailer != 0
    }

    /// Compose a sector of the bitmap from what may be recorded; it stays dirty
    /// if that is less than what is local.
    pub(crate) fn compose(
        &mut self,
        move_id: &[u8; 16],
        sector: u64,
        words: &[u64],
        bytes: &mut [u8],
    ) {
        encode_sector(move_id, sector, words, bytes);
        self.trailers[sector as usize] = u64_at(bytes, TRAILER);
        if words != self.words(sector) {
            self.set_dirty(sector);
        }
    }

    /// Compose a sector of the bitmap from all that is local.
    pub(crate) fn compose_all(&mut self, move_id: &[u8; 16], sector: u64, bytes: &mut [u8]) {
        let at = sector as usize * WORDS_PER_SECTOR;
        encode_sector(
            move_id,
            sector,
            &self.local[at..at + WORDS_PER_SECTOR],
            bytes,
        );
        self.trailers[sector as usize] = u64_at(bytes, TRAILER);
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

    #[test]
    fn a_sector_that_has_not_changed_is_composed_as_it_was() {
        let mut map = Map::new(BLOCKS_PER_BITMAP_BLOCK, 256);
        let (mut first, mut again) = ([0; 512], [0; 512]);
        assert!(!map.compose_again(3, &mut again));
        map.set_local(3 * BLOCKS_PER_SECTOR + 5);
        let words = map.words(3).to_vec();
        map.compose(&[7; 16], 3, &words, &mut first);
        assert!(map.compose_again(3, &mut again));
        assert_eq!(first, again);
    }

    #[test]
    fn a_sector_is_dirty_when_it_changes_and_when_not_all_is_recorded() {
        let mut map = Map::new(20 * BLOCKS_PER_BITMAP_BLOCK, 256);
        let (block, sector) = (9 * BLOCKS_PER_BITMAP_BLOCK, 9 * SECTORS_PER_BITMAP_BLOCK);
        let changes: [fn(&mut Map, u64); 4] = [
            |map, first| map.set_local(first),
            |map, first| map.set_all_local(first + 1, first + 3),
            |map, first| map.set_remote(first),
            |map, first| {
                let sector = first / BLOCKS_PER_SECTOR;
                map.compose(&[7; 16], sector, &[0; WORDS_PER_SECTOR], &mut [0; 512]);
            },
        ];
        for change in changes {
            change(&mut map, block + BLOCKS_PER_SECTOR);
            assert!(map.any_dirty());
            assert_eq!(map.take_dirty(10), None);
            assert_eq!(map.take_dirty(3), Some((9, 0b10)));
            assert!(!map.any_dirty());
        }
        let words = map.words(sector + 1).to_vec();
        map.compose(&[7; 16], sector + 1, &words, &mut [0; 512]);
        assert!(!map.any_dirty());
        map.set_local(block);
        map.set_local(block + 7 * BLOCKS_PER_SECTOR);
        map.set_local(block + 8 * BLOCKS_PER_SECTOR);
        assert_eq!(map.take_dirty(0), Some((9, 0b1000_0001)));
        assert_eq!(map.take_dirty(9), Some((10, 1)));
    }
}
