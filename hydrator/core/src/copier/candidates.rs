// SPDX-License-Identifier: Apache-2.0

//! What is to be copied next.
//!
//! First the halves of what could not be read as a whole, then what the source
//! has not answered and it is time for, then what the guest reads most, then
//! region after region.

use std::collections::{BTreeMap, BTreeSet};

use crate::io::Time;
use crate::regions::{Mask, Regions};
use crate::source::FIRST_RETRY;
use crate::units::{Block, Blocks, Offset, Region};

/// Regions that wait as hot ones, at most.
const HOT_MOST: usize = 64;
/// A region is hot when the guest has read it so often from the source.
const HOT_FROM: u8 = 2;
/// Nothing is copied any more when the source can't read so many blocks
/// (64 MiB): its disk is beyond what a copy helps.
const BAD_MOST: usize = 16384;
/// Extents that the source has not answered, at most: of blocks beyond these
/// that are never answered it is not asked again.
const UNANSWERED_MOST: usize = 256;
/// While the source is away it is asked for these only when there are so many,
/// and for halves of them until there are so many.
const UNANSWERED_AWAY: usize = 16;
const HALVES_AWAY: usize = 64;
/// Where it may answer: so many such jumps are all of the volume.
const JUMPS: u64 = 13;
/// How often a block that is never answered is asked for, in nanoseconds.
const UNANSWERED_AGAIN: u64 = 30_000_000_000;

/// What is not to be copied is read with what is, rather than leave so many
/// blocks (64 KiB) out: to ask the source twice takes longer.
const GAP_MOST: u64 = 16;

/// What is to be read at once.
#[derive(Clone, Copy, Debug)]
pub(super) struct Extent {
    pub(super) blocks: Blocks,
    /// Those of them that are to be copied; the first and the last are.
    pub(super) wanted: Mask,
}

/// What a look for something to copy has found.
pub(super) enum Next {
    /// This extent. If the source has not answered it before, after which pause.
    Extent(Extent, Option<u64>),
    /// Nothing yet; not all of the volume was looked at.
    NotSeen,
    /// Nothing on all of the volume that can be copied at present.
    Nothing,
}

/// What a look for something to copy goes by.
#[derive(Clone, Copy, Debug)]
pub(super) struct Look {
    pub(super) now: Time,
    /// The source does not answer.
    pub(super) away: bool,
    /// It is not to be asked yet.
    pub(super) silent: bool,
}

/// An extent that the source has not answered, though it may answer others.
#[derive(Clone, Copy, Debug)]
struct Unanswered {
    count: u64,
    again: Time,
    backoff: u64,
}

/// What is to be copied next, and what cannot be.
#[derive(Debug)]
pub(super) struct Candidates {
    /// Where the source ends.
    source_end: Block,
    hot: Vec<Region>,
    /// Halves of extents that the source could not read as a whole.
    halves: Vec<Blocks>,
    /// Blocks that the source can't read.
    bad: BTreeSet<Block>,
    /// Blocks that differ although they were copied again.
    differing: BTreeSet<Block>,
    /// By their first blocks.
    unanswered: BTreeMap<Block, Unanswered>,
    /// How many blocks these are.
    unanswered_blocks: u64,
    cursor: Region,
    scanned: u64,
}

impl Candidates {
    pub(super) fn new(source_size: u64) -> Self {
        Self {
            source_end: Offset(source_size).block(),
            hot: Vec::with_capacity(HOT_MOST),
            halves: Vec::new(),
            bad: BTreeSet::new(),
            differing: BTreeSet::new(),
            unanswered: BTreeMap::new(),
            unanswered_blocks: 0,
            cursor: Region(0),
            scanned: 0,
        }
    }

    /// Whether a block is there on the source.
    pub(super) fn is_on_source(&self, block: Block) -> bool {
        block < self.source_end
    }

    pub(super) const fn bad(&self) -> &BTreeSet<Block> {
        &self.bad
    }

    pub(super) const fn differing(&self) -> &BTreeSet<Block> {
        &self.differing
    }

    pub(super) const fn unanswered_blocks(&self) -> u64 {
        self.unanswered_blocks
    }

    /// The source is beyond what a copy helps.
    pub(super) fn is_hopeless(&self) -> bool {
        self.bad.len() >= BAD_MOST
    }

    /// The source can't read a block: it is not copied. False if that was known.
    pub(super) fn is_bad(&mut self, block: Block) -> bool {
        self.bad.insert(block)
    }

    /// A block differs although it was copied again: it is left alone.
    pub(super) fn differs(&mut self, block: Block) {
        self.differing.insert(block);
    }

    /// Copy these before anything else.
    pub(super) fn push(&mut self, blocks: Blocks) {
        self.halves.push(blocks);
    }

    /// Look for what is to be copied from this region on.
    pub(super) fn return_to(&mut self, region: Region) {
        self.cursor = region;
        self.scanned = 0;
    }

    /// Try again what could not be read.
    pub(super) fn retry(&mut self) {
        self.bad.clear();
        for extent in self.unanswered.values_mut() {
            extent.again = Time(0);
        }
    }

    /// The guest has written to these blocks.
    pub(super) fn written(&mut self, blocks: Blocks) {
        remove_all(&mut self.bad, blocks);
        remove_all(&mut self.differing, blocks);
        let inside =
            |(at, extent): (&Block, &Unanswered)| (*at + extent.count <= blocks.end).then_some(*at);
        let range = blocks.first..blocks.end;
        while let Some(at) = self.unanswered.range(range.clone()).find_map(inside) {
            self.take_unanswered(at);
        }
    }

    /// The guest has read these blocks from the source.
    pub(super) fn warm(&mut self, blocks: Blocks, regions: &mut Regions) {
        for region in regions.map().regions_of(blocks) {
            if regions.warm(region) < HOT_FROM || regions.map().is_hot(region) {
                continue;
            }
            if self.hot.len() == HOT_MOST {
                let map = regions.map();
                let coldest = (0..HOT_MOST).min_by_key(|at| map.heat_of(self.hot[*at]));
                if let Some(at) = coldest {
                    regions.set_hot(self.hot.swap_remove(at), false);
                }
            }
            self.hot.push(region);
            regions.set_hot(region, true);
        }
    }

    /// The extent to copy next; none that was not answered while the source is
    /// not to be asked. Looks at `budget` regions at most.
    pub(super) fn next(&mut self, look: Look, budget: &mut u64, regions: &mut Regions) -> Next {
        while let Some(half) = self.halves.pop() {
            if !regions
                .map()
                .is_copying(regions.map().region_of(half.first))
            {
                if let Some(extent) = self.extent_in(half, regions) {
                    let rest = half.from(extent.blocks.end);
                    if !rest.is_empty() {
                        self.halves.push(rest);
                    }
                    return Next::Extent(extent, None);
                }
            }
        }
        if !look.silent {
            if let Some(next) = self.next_unanswered(look, false, regions) {
                return next;
            }
        }
        if let Some(extent) = self.next_hot(regions) {
            return Next::Extent(extent, None);
        }
        while *budget > 0 {
            *budget -= 1;
            if let Some(extent) = self.extent_in_region(self.cursor, regions) {
                self.scanned = 0;
                return Next::Extent(extent, None);
            }
            self.cursor = Region((self.cursor.0 + 1) % regions.map().regions());
            self.scanned += 1;
            if self.scanned >= regions.map().regions() {
                self.scanned = 0;
                let last = (!look.silent).then(|| self.next_unanswered(look, true, regions));
                return last.flatten().unwrap_or(Next::Nothing);
            }
        }
        Next::NotSeen
    }

    fn next_hot(&mut self, regions: &mut Regions) -> Option<Extent> {
        loop {
            let heat = |at: &usize| regions.map().heat_of(self.hot[*at]);
            let at = (0..self.hot.len()).max_by_key(heat)?;
            let region = self.hot[at];
            if let Some(extent) = self.extent_in_region(region, regions) {
                return Some(extent);
            }
            self.hot.swap_remove(at);
            regions.set_hot(region, false);
        }
    }

    /// What the source has not answered and it is time to ask for again: by
    /// halves, until it is known which blocks it does not answer.
    fn next_unanswered(
        &mut self,
        look: Look,
        nothing_else: bool,
        regions: &Regions,
    ) -> Option<Next> {
        let few = self.unanswered.len() < UNANSWERED_AWAY;
        if look.away && few && !nothing_else {
            // Of another extent it may answer.
            return None;
        }
        loop {
            let map = regions.map();
            let (first, extent) = self
                .unanswered
                .iter()
                .filter(|(first, _)| !map.is_copying(map.region_of(**first)))
                .min_by_key(|(_, extent)| extent.again)
                .map(|(first, extent)| (*first, *extent))?;
            if look.now < extent.again {
                return look.away.then_some(Next::Nothing);
            }
            self.take_unanswered(first);
            let all = Blocks::run(first, extent.count);
            let Some(mut found) = self.extent_in(all, regions) else {
                continue;
            };
            let whole = look.away && self.unanswered.len() >= HALVES_AWAY;
            if !whole {
                let half = Blocks::run(found.blocks.first, found.blocks.count().div_ceil(2));
                found = self.extent_in(half, regions)?;
            }
            let rest = all.from(found.blocks.end);
            if !rest.is_empty() {
                let rest_of_it = Unanswered {
                    count: rest.count(),
                    again: look.now,
                    ..extent
                };
                self.add_unanswered(rest.first, rest_of_it);
            }
            return Some(Next::Extent(found, Some(extent.backoff)));
        }
    }

    /// The source has not answered an extent, for the first time or after this
    /// pause. False if its block is given up.
    pub(super) fn unanswered(
        &mut self,
        blocks: Blocks,
        backoff: Option<u64>,
        look: Look,
        regions: &Regions,
    ) -> bool {
        let backoff = match backoff {
            None => {
                // What is next to it may have the same fate.
                let count = regions.map().regions();
                let next = regions.map().region_of(blocks.first).0 + count / JUMPS + 1;
                self.return_to(Region(next % count));
                FIRST_RETRY
            }
            // First it is to be known which block it is.
            Some(_) if blocks.count() > 1 => FIRST_RETRY,
            Some(_) if self.unanswered.len() >= UNANSWERED_MOST && !look.away => return false,
            Some(before) => (before * 2).min(UNANSWERED_AGAIN),
        };
        let extent = Unanswered {
            count: blocks.count(),
            again: look.now.after(backoff),
            backoff,
        };
        self.add_unanswered(blocks.first, extent);
        true
    }

    fn add_unanswered(&mut self, first: Block, extent: Unanswered) {
        self.unanswered_blocks += extent.count;
        self.unanswered.insert(first, extent);
    }

    fn take_unanswered(&mut self, first: Block) {
        if let Some(extent) = self.unanswered.remove(&first) {
            self.unanswered_blocks -= extent.count;
        }
    }

    fn is_unanswered(&self, block: Block) -> bool {
        let before = self.unanswered.range(..=block).next_back();
        before.is_some_and(|(first, extent)| block < *first + extent.count)
    }

    fn extent_in_region(&self, region: Region, regions: &Regions) -> Option<Extent> {
        let map = regions.map();
        if region.0 >= map.regions() || map.is_copying(region) {
            return None;
        }
        self.extent_in(map.blocks_of(region), regions)
    }

    /// Whether the source may answer when it is asked for a block.
    fn is_readable(&self, block: Block) -> bool {
        !self.bad.contains(&block) && !self.is_unanswered(block)
    }

    fn can_be_copied(&self, block: Block, regions: &Regions) -> bool {
        !regions.map().is_local(block)
            && regions.entry(block).is_none()
            && self.is_readable(block)
            && !self.differing.contains(&block)
            && !regions.is_any_unreadable(block.alone())
            && !regions.is_being_zeroed(block.alone())
    }

    /// The first of these blocks that can be copied.
    fn first_in(&self, blocks: Blocks, regions: &Regions) -> Option<Block> {
        let mut rest = blocks;
        loop {
            let block = regions.map().run_end(rest, true);
            if block >= blocks.end {
                return None;
            }
            if self.can_be_copied(block, regions) {
                return Some(block);
            }
            rest = blocks.from(block.next());
        }
    }

    /// The first of these blocks, all of one region, that can be copied, with
    /// those that follow closely: all on the source, or all beyond its end, where
    /// nothing needs to be read.
    fn extent_in(&self, blocks: Blocks, regions: &Regions) -> Option<Extent> {
        let first = self.first_in(blocks, regions)?;
        let mut rest = blocks.from(first);
        let gap_most = if self.is_on_source(first) {
            rest.end = rest.end.min(self.source_end);
            GAP_MOST
        } else {
            0
        };
        let mut wanted = Mask::default();
        let mut end = first;
        while let Some(next) = self.first_in(rest, regions) {
            let mut gap = Blocks::new(end, next).iter();
            if next - end > gap_most || !gap.all(|block| self.is_readable(block)) {
                break;
            }
            wanted.set(next - first);
            end = next.next();
            rest = rest.from(end);
        }
        let blocks = Blocks::new(first, end);
        Some(Extent { blocks, wanted })
    }
}

/// Take these blocks out of a set.
pub(super) fn remove_all(set: &mut BTreeSet<Block>, blocks: Blocks) {
    while let Some(block) = set.range(blocks.first..blocks.end).next().copied() {
        set.remove(&block);
    }
}
