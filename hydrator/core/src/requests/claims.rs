// SPDX-License-Identifier: Apache-2.0

//! Where requests wait to claim something.

use crate::units::Blocks;

/// Regions are told apart by so many of them.
const PLACES: u64 = 4096;

/// How many requests wait to claim blocks, by the place of these: a request for
/// blocks elsewhere need not be compared with any of them.
#[derive(Debug)]
pub(super) struct Claims(Vec<u32>);

impl Claims {
    pub(super) fn new() -> Self {
        Self(vec![0; PLACES as usize])
    }

    fn places(blocks: Blocks) -> impl Iterator<Item = usize> {
        let regions = blocks.first.0 >> 8..=blocks.end.0.saturating_sub(1) >> 8;
        regions.map(|region| (region % PLACES) as usize)
    }

    /// One more waits for these.
    pub(super) fn add(&mut self, blocks: Blocks) {
        Self::places(blocks).for_each(|place| self.0[place] += 1);
    }

    /// It waits no longer.
    pub(super) fn remove(&mut self, blocks: Blocks) {
        Self::places(blocks).for_each(|place| self.0[place] -= 1);
    }

    /// Whether any may wait for one of these.
    pub(super) fn may_overlap(&self, blocks: Blocks) -> bool {
        Self::places(blocks).any(|place| self.0[place] > 0)
    }
}
