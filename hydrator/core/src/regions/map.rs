// SPDX-License-Identifier: Apache-2.0

//! What is local, in memory.

use crate::format::bitmap::{
    BLOCKS_PER_BITMAP_BLOCK, BLOCKS_PER_SECTOR, SECTORS_PER_BITMAP_BLOCK, WORDS_PER_BITMAP_BLOCK,
    WORDS_PER_SECTOR, encode_sector, encode_words,
};
use crate::units::{Block, Blocks, Region};

/// Where a sector of the bitmap has what follows its words.
const TRAILER: usize = WORDS_PER_SECTOR * 8;

/// In [`State::pending`]: blocks of the region were copied and have no bit.
const COPIED: u16 = 1 << 15;
/// In [`State::flags`]: a copy of the region is under way.
const COPYING: u8 = 1;
/// In [`State::flags`]: waits among the hot ones.
const HOT: u8 = 2;

/// What is known of a region.
#[derive(Clone, Copy, Debug, Default)]
struct State {
    /// How many blocks have an entry among the unsettled, and [`COPIED`].
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
    regions: Vec<State>,
    /// Sectors of the bitmap that say less than is local, or more.
    dirty: Vec<u64>,
    dirty_count: u64,
    /// For each sector of the bitmap what follows its words, checksum and all,
    /// as it was composed last; zeros if it was not. True of those not dirty.
    trailers: Vec<[u8; 8]>,
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
            regions: vec![State::default(); regions],
            dirty: vec![0; sectors.div_ceil(64)],
            dirty_count: 0,
            trailers: vec![[0; 8]; sectors],
            remote: blocks,
        }
    }

    /// All of them.
    pub(crate) const fn blocks(&self) -> Blocks {
        Blocks::new(Block(0), Block(self.blocks))
    }

    pub(crate) const fn remote(&self) -> u64 {
        self.remote
    }

    pub(crate) fn is_local(&self, block: Block) -> bool {
        self.local[(block.0 / 64) as usize] >> (block.0 % 64) & 1 == 1
    }

    /// Whether all of these are local.
    pub(crate) fn all_local(&self, blocks: Blocks) -> bool {
        self.run_end(blocks, true) == blocks.end
    }

    /// The end of those of these blocks, from the first on, that are local (or
    /// remote) without a gap.
    pub(crate) fn run_end(&self, blocks: Blocks, local: bool) -> Block {
        let (mut block, end) = (blocks.first.0, blocks.end.0);
        while block < end {
            let word = self.local[(block / 64) as usize];
            let same = if local { word } else { !word } >> (block % 64);
            let run = u64::from((!same).trailing_zeros()).min(64 - block % 64);
            block += run;
            if block % 64 != 0 || run == 0 {
                return Block(block.min(end));
            }
        }
        Block(end)
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

    pub(crate) fn set_local(&mut self, Block(block): Block) {
        let word = &mut self.local[(block / 64) as usize];
        let bit = 1 << (block % 64);
        if *word & bit == 0 {
            *word |= bit;
            self.remote -= 1;
        }
        self.set_dirty(block / BLOCKS_PER_SECTOR);
    }

    pub(crate) fn set_all_local(&mut self, blocks: Blocks) {
        let (mut block, end) = (blocks.first.0, blocks.end.0);
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

    pub(crate) fn set_remote(&mut self, Block(block): Block) {
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
        let known = trailer != [0; 8];
        if known {
            encode_words(self.words(sector), bytes);
            bytes[TRAILER..].copy_from_slice(&trailer);
        }
        known
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
        self.trailers[sector as usize].copy_from_slice(&bytes[TRAILER..]);
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
        self.trailers[sector as usize].copy_from_slice(&bytes[TRAILER..]);
    }

    pub(crate) const fn region_of(&self, block: Block) -> Region {
        Region(block.0 >> self.region_shift)
    }

    /// The regions that these blocks lie in.
    pub(crate) fn regions_of(&self, blocks: Blocks) -> impl Iterator<Item = Region> + use<> {
        let shift = self.region_shift;
        (blocks.first.0 >> shift..=(blocks.end.0 - 1) >> shift).map(Region)
    }

    /// The blocks of a region.
    pub(crate) fn blocks_of(&self, region: Region) -> Blocks {
        let end = ((region.0 + 1) << self.region_shift).min(self.blocks);
        Blocks::new(Block(region.0 << self.region_shift), Block(end))
    }

    /// How many regions there are.
    pub(crate) fn regions(&self) -> u64 {
        self.regions.len() as u64
    }

    fn state(&self, region: Region) -> &State {
        &self.regions[region.0 as usize]
    }

    fn state_mut(&mut self, region: Region) -> &mut State {
        &mut self.regions[region.0 as usize]
    }

    /// No block of the region is unsettled though local, or being written.
    pub(crate) fn region_is_quiet(&self, region: Region) -> bool {
        self.state(region).pending == 0
    }

    /// How many blocks of the region have an entry among the unsettled.
    pub(crate) fn entries_in(&self, region: Region) -> u16 {
        self.state(region).pending & !COPIED
    }

    pub(crate) fn entry_added(&mut self, block: Block) {
        self.state_mut(self.region_of(block)).pending += 1;
    }

    pub(crate) fn entry_removed(&mut self, block: Block) {
        self.state_mut(self.region_of(block)).pending -= 1;
    }

    pub(crate) fn has_copied(&self, region: Region) -> bool {
        self.state(region).pending & COPIED != 0
    }

    pub(crate) fn set_copied(&mut self, region: Region, copied: bool) {
        let pending = &mut self.state_mut(region).pending;
        *pending = *pending & !COPIED | if copied { COPIED } else { 0 };
    }

    pub(crate) fn is_copying(&self, region: Region) -> bool {
        self.state(region).flags & COPYING != 0
    }

    pub(crate) fn set_copying(&mut self, region: Region, copying: bool) {
        let flags = &mut self.state_mut(region).flags;
        *flags = *flags & !COPYING | if copying { COPYING } else { 0 };
    }

    /// The guest has read the region from the source; how often it has.
    pub(crate) fn heat(&mut self, region: Region) -> u8 {
        let heat = &mut self.state_mut(region).heat;
        *heat = heat.saturating_add(1);
        *heat
    }

    pub(crate) fn heat_of(&self, region: Region) -> u8 {
        self.state(region).heat
    }

    pub(crate) fn is_hot(&self, region: Region) -> bool {
        self.state(region).flags & HOT != 0
    }

    pub(crate) fn set_hot(&mut self, region: Region, hot: bool) {
        let flags = &mut self.state_mut(region).flags;
        *flags = *flags & !HOT | if hot { HOT } else { 0 };
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
                map.set_local(Block(first));
            }
            let blocks = Blocks::new(Block(first), Block(end));
            together.set_all_local(blocks);
            blocks.iter().for_each(|block| one_by_one.set_local(block));
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
        map.set_local(Block(3 * BLOCKS_PER_SECTOR + 5));
        let words = map.words(3).to_vec();
        map.compose(&[7; 16], 3, &words, &mut first);
        assert!(map.compose_again(3, &mut again));
        assert_eq!(first, again);
    }

    #[test]
    fn a_sector_is_dirty_when_it_changes_and_when_not_all_is_recorded() {
        let mut map = Map::new(20 * BLOCKS_PER_BITMAP_BLOCK, 256);
        let (block, sector) = (9 * BLOCKS_PER_BITMAP_BLOCK, 9 * SECTORS_PER_BITMAP_BLOCK);
        let changes: [fn(&mut Map, Block); 4] = [
            |map, first| map.set_local(first),
            |map, first| map.set_all_local(Blocks::run(first.next(), 2)),
            |map, first| map.set_remote(first),
            |map, first| {
                let sector = first.0 / BLOCKS_PER_SECTOR;
                map.compose(&[7; 16], sector, &[0; WORDS_PER_SECTOR], &mut [0; 512]);
            },
        ];
        for change in changes {
            change(&mut map, Block(block + BLOCKS_PER_SECTOR));
            assert!(map.any_dirty());
            assert_eq!(map.take_dirty(10), None);
            assert_eq!(map.take_dirty(3), Some((9, 0b10)));
            assert!(!map.any_dirty());
        }
        let words = map.words(sector + 1).to_vec();
        map.compose(&[7; 16], sector + 1, &words, &mut [0; 512]);
        assert!(!map.any_dirty());
        for sector in [0, 7, 8] {
            map.set_local(Block(block + sector * BLOCKS_PER_SECTOR));
        }
        assert_eq!(map.take_dirty(0), Some((9, 0b1000_0001)));
        assert_eq!(map.take_dirty(9), Some((10, 1)));
    }
}
