// SPDX-License-Identifier: Apache-2.0

//! Blocks that were copied and are not in the bitmap yet.

use std::collections::BTreeMap;

use crate::regions::map::Map;
use crate::regions::mask::Mask;
use crate::units::{Block, Blocks, Region};

/// Blocks of a region that were copied at about the same time.
#[derive(Clone, Copy, Debug)]
struct Batch {
    /// Blocks that the guest has written to since are not in it.
    blocks: Mask,
    /// Flushes submitted when it was written.
    after: u64,
    /// The bitmap with it is being written.
    recording: bool,
}

/// Blocks that were copied and are not in the bitmap yet, by their regions.
#[derive(Debug, Default)]
pub(crate) struct Copied {
    regions: BTreeMap<Region, Vec<Batch>>,
    /// How many blocks these are.
    count: u64,
}

impl Copied {
    /// How many they are.
    pub(crate) const fn count(&self) -> u64 {
        self.count
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.regions.is_empty()
    }

    /// These of the blocks from `first` on, all of one region, were copied, when
    /// so many flushes had been submitted.
    pub(super) fn add(&mut self, map: &mut Map, first: Block, blocks: Mask, after: u64) {
        let region = map.region_of(first);
        map.set_copied(region, true);
        self.count += blocks.count();
        let blocks = blocks.shifted(first - map.blocks_of(region).first);
        let batches = self.regions.entry(region).or_default();
        match batches.last_mut() {
            Some(last) if last.after == after && !last.recording => last.blocks.add(&blocks),
            _ => batches.push(Batch {
                blocks,
                after,
                recording: false,
            }),
        }
    }

    fn batches(&self, region: Region) -> &[Batch] {
        self.regions.get(&region).map_or(&[], Vec::as_slice)
    }

    /// Whether a block was copied and not recorded; whether it is just being
    /// recorded.
    pub(super) fn is_being_recorded(&self, map: &Map, block: Block) -> Option<bool> {
        let region = map.region_of(block);
        if !map.has_copied(region) {
            return None;
        }
        let bit = block - map.blocks_of(region).first;
        let mut batches = self.batches(region).iter();
        let found = batches.find(|batch| batch.blocks.has(bit));
        found.map(|batch| batch.recording)
    }

    /// Whether any of these blocks is just being recorded.
    pub(super) fn is_any_being_recorded(&self, map: &Map, blocks: Blocks) -> bool {
        let mut found = false;
        self.each_in(map, blocks, true, &mut |_| found = true);
        found
    }

    /// Those of these blocks that are being recorded, or are not.
    fn each_in(&self, map: &Map, blocks: Blocks, recording: bool, each: &mut impl FnMut(Block)) {
        if blocks.is_empty() {
            return;
        }
        let last = Block(blocks.end.0 - 1);
        let regions = map.region_of(blocks.first)..=map.region_of(last);
        for (region, batches) in self.regions.range(regions) {
            let first = map.blocks_of(*region).first;
            for batch in batches.iter().filter(|batch| batch.recording == recording) {
                let copied = batch.blocks.iter().map(|bit| first + bit);
                copied
                    .filter(|block| blocks.contains(*block))
                    .for_each(&mut *each);
            }
        }
    }

    /// A copied block is about to be written by the guest: it is not recorded.
    /// Whether it was among them.
    pub(super) fn forget(&mut self, map: &mut Map, block: Block) -> bool {
        let region = map.region_of(block);
        let Some(batches) = self.regions.get_mut(&region) else {
            return false;
        };
        let bit = block - map.blocks_of(region).first;
        let mut found = batches.iter_mut();
        let Some(at) = found.position(|batch| batch.blocks.has(bit)) else {
            return false;
        };
        batches[at].blocks.clear(bit);
        self.count -= 1;
        if batches[at].blocks.is_empty() {
            batches.swap_remove(at);
        }
        if batches.is_empty() {
            self.regions.remove(&region);
            map.set_copied(region, false);
        }
        true
    }

    /// Whether any were written after this flush was submitted.
    pub(crate) fn has_unflushed(&self, flush: u64) -> bool {
        let mut batches = self.regions.values().flatten();
        batches.any(|batch| batch.after >= flush)
    }

    /// The bitmap will be written with all that was written before this flush.
    pub(crate) fn begin_recording(&mut self, flush: u64) {
        for batch in self.regions.values_mut().flatten() {
            batch.recording = batch.after < flush;
        }
    }

    /// The first block, from `from` on, of a region with something that is being
    /// recorded.
    pub(super) fn next_recording(&self, map: &Map, from: Block) -> Option<Block> {
        let mut regions = self.regions.range(map.region_of(from)..);
        let found = regions.find(|(_, batches)| batches.iter().any(|batch| batch.recording));
        found.map(|(region, _)| map.blocks_of(*region).first)
    }

    /// The bitmap is durable.
    pub(super) fn recorded(&mut self, map: &mut Map) {
        let count = &mut self.count;
        self.regions.retain(|region, batches| {
            batches.retain(|batch| {
                *count -= if batch.recording {
                    batch.blocks.count()
                } else {
                    0
                };
                !batch.recording
            });
            map.set_copied(*region, !batches.is_empty());
            !batches.is_empty()
        });
    }

    /// Which of these blocks were copied and may not be recorded.
    pub(super) fn withheld(&self, map: &Map, blocks: Blocks, withhold: &mut impl FnMut(Block)) {
        self.each_in(map, blocks, false, withhold);
    }
}

#[cfg(test)]
mod tests {
    use rustix::time::{ClockId, clock_gettime};

    use super::*;
    use crate::format::bitmap::BLOCKS_PER_SECTOR;

    #[test]
    fn an_extent_is_withheld_on_both_sides_of_a_sectors_end() {
        let mut map = Map::new(3 * BLOCKS_PER_SECTOR, 256);
        let mut copied = Copied::default();
        copied.add(&mut map, Block(3840), Mask::first(256), 1);
        let seam = BLOCKS_PER_SECTOR;
        let withheld = |first, end| {
            let mut blocks = Vec::new();
            let sector = Blocks::new(Block(first), Block(end));
            copied.withheld(&map, sector, &mut |block| blocks.push(block.0));
            blocks
        };
        assert!(withheld(0, seam).into_iter().eq(3840..seam));
        assert!(withheld(seam, 2 * seam).into_iter().eq(seam..4096));
        assert!(withheld(2 * seam, 3 * seam).is_empty());
    }

    #[test]
    fn what_is_copied_in_pieces_is_recorded_by_the_flush_that_followed_each() {
        let mut map = Map::new(1024, 256);
        let mut copied = Copied::default();
        for (block, after) in [(300, 1), (302, 1), (301, 2), (600, 2)] {
            copied.add(&mut map, Block(block), Mask::first(1), after);
        }
        assert!(copied.has_unflushed(2) && !copied.has_unflushed(3));
        copied.begin_recording(2);
        let state = [300, 301, 302, 600, 303].map(|block| {
            let block = Block(block);
            copied.is_being_recorded(&map, block)
        });
        let [now, later] = [Some(true), Some(false)];
        assert_eq!(state, [now, later, now, later, None]);
        assert_eq!(copied.next_recording(&map, Block(0)), Some(Block(256)));
        assert_eq!(copied.next_recording(&map, Block(512)), None);
        assert!(copied.forget(&mut map, Block(302)) && !copied.forget(&mut map, Block(302)));
        copied.recorded(&mut map);
        assert_eq!(copied.count(), 2);
        assert!(map.has_copied(Region(1)) && map.has_copied(Region(2)));
        assert!(copied.forget(&mut map, Block(301)));
        assert!(!map.has_copied(Region(1)));
    }

    #[test]
    fn one_of_thirty_thousand_extents_is_found_without_a_look_at_the_others() {
        const EXTENTS: u64 = 30_000;
        let mut map = Map::new(EXTENTS * 256, 256);
        let mut copied = Copied::default();
        for region in 0..EXTENTS {
            copied.add(&mut map, Block(region * 256 + 7), Mask::first(1), region);
        }
        let time = || clock_gettime(ClockId::ThreadCPUTime);
        let before = time();
        for region in (0..EXTENTS).rev() {
            let block = Block(region * 256 + 7);
            assert_eq!(copied.is_being_recorded(&map, block), Some(false));
            assert!(copied.forget(&mut map, block));
        }
        let elapsed = time() - before;
        let each = (elapsed.tv_sec * 1_000_000_000 + elapsed.tv_nsec) / EXTENTS as i64;
        assert!(each < 4000, "{each} ns for each");
    }
}
