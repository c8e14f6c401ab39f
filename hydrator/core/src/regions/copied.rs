// SPDX-License-Identifier: Apache-2.0

//! Blocks that were copied and are not in the bitmap yet.

use crate::regions::map::Map;
use crate::regions::mask::Mask;
use crate::units::{Block, Blocks};

/// An extent that was copied.
#[derive(Clone, Copy, Debug)]
struct Extent {
    first: Block,
    /// Blocks that the guest has written to since are not in it.
    blocks: Mask,
    /// Flushes submitted when it was written.
    after: u64,
    /// The bitmap with it is being written.
    recording: bool,
}

impl Extent {
    /// Blocks that may be in it.
    const fn span(&self) -> Blocks {
        Blocks::run(self.first, Mask::BITS)
    }

    const fn contains(&self, block: Block) -> bool {
        self.span().contains(block) && self.blocks.has(block.0 - self.first.0)
    }
}

/// Blocks that were copied and are not in the bitmap yet.
#[derive(Debug)]
pub(crate) struct Copied {
    extents: Vec<Extent>,
    /// How many blocks these are.
    count: u64,
}

impl Default for Copied {
    fn default() -> Self {
        Self {
            extents: Vec::with_capacity(256),
            count: 0,
        }
    }
}

impl Copied {
    /// How many they are.
    pub(crate) const fn count(&self) -> u64 {
        self.count
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.extents.is_empty()
    }

    /// These of the blocks from `first` on were copied, when so many flushes
    /// had been submitted.
    pub(super) fn add(&mut self, map: &mut Map, first: Block, blocks: Mask, after: u64) {
        map.set_copied(map.region_of(first), true);
        self.count += blocks.count();
        self.extents.push(Extent {
            first,
            blocks,
            after,
            recording: false,
        });
    }

    /// Whether a block was copied and not recorded; whether it is just being
    /// recorded.
    pub(super) fn is_being_recorded(&self, map: &Map, block: Block) -> Option<bool> {
        if !map.has_copied(map.region_of(block)) {
            return None;
        }
        self.extents
            .iter()
            .find(|extent| extent.contains(block))
            .map(|extent| extent.recording)
    }

    /// Whether any of these blocks may just be being recorded.
    pub(super) fn is_any_being_recorded(&self, blocks: Blocks) -> bool {
        self.extents
            .iter()
            .any(|extent| extent.recording && extent.span().overlaps(blocks))
    }

    /// A copied block is about to be written by the guest: it is not recorded.
    /// Whether it was among them.
    pub(super) fn forget(&mut self, map: &mut Map, block: Block) -> bool {
        let found = self
            .extents
            .iter_mut()
            .position(|extent| extent.contains(block));
        if let Some(index) = found {
            let extent = &mut self.extents[index];
            extent.blocks.clear(block - extent.first);
            self.count -= 1;
            if extent.blocks.is_empty() {
                self.extents.swap_remove(index);
                self.update_region(map, block);
            }
        }
        found.is_some()
    }

    fn update_region(&self, map: &mut Map, block: Block) {
        let region = map.region_of(block);
        let any = self
            .extents
            .iter()
            .any(|extent| map.region_of(extent.first) == region);
        map.set_copied(region, any);
    }

    /// Whether any were written after this flush was submitted.
    pub(crate) fn has_unflushed(&self, flush: u64) -> bool {
        self.extents.iter().any(|extent| extent.after >= flush)
    }

    /// The bitmap will be written with all that was written before this flush.
    pub(crate) fn begin_recording(&mut self, flush: u64) {
        for extent in &mut self.extents {
            extent.recording = extent.after < flush;
        }
    }

    /// The first block from `from` on that is in an extent being recorded.
    pub(crate) fn next_recording(&self, from: Block) -> Option<Block> {
        let extents = self.extents.iter();
        extents
            .filter(|extent| extent.recording && extent.first >= from)
            .map(|extent| extent.first)
            .min()
    }

    /// The bitmap is durable.
    pub(super) fn recorded(&mut self, map: &mut Map) {
        let mut index = 0;
        while index < self.extents.len() {
            let extent = self.extents[index];
            if extent.recording {
                self.extents.swap_remove(index);
                self.count -= extent.blocks.count();
                self.update_region(map, extent.first);
            } else {
                index += 1;
            }
        }
    }

    /// Which of these blocks were copied and may not be recorded.
    pub(super) fn withheld(&self, blocks: Blocks, withhold: &mut impl FnMut(Block)) {
        for extent in &self.extents {
            if !extent.recording {
                let span = extent.span().within(blocks).iter();
                span.filter(|block| extent.contains(*block))
                    .for_each(&mut *withhold);
            }
        }
    }
}

#[cfg(test)]
mod tests {
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
            copied.withheld(sector, &mut |block| blocks.push(block.0));
            blocks
        };
        assert!(withheld(0, seam).into_iter().eq(3840..seam));
        assert!(withheld(seam, 2 * seam).into_iter().eq(seam..4096));
        assert!(withheld(2 * seam, 3 * seam).is_empty());
    }
}
