// SPDX-License-Identifier: Apache-2.0

//! Hydration: copies of extents from the source to the destination.
//!
//! An extent is a run of remote blocks inside of one region. It is read from
//! the source, and what the guest has not written meanwhile is written to the
//! destination; zeros are not, as far as may be. The blocks are local then (or
//! when they were compared, see [`verification`](crate::verification)); once a
//! flush has followed, a checkpoint records them in the bitmap.

use std::collections::{BTreeMap, BTreeSet};

use crate::flushes::HYDRATED_MOST;
use crate::map::Map;
use crate::rules::Rule;
use crate::source::FIRST_RETRY;
use crate::volume::{io, kind};
use crate::{Action, BLOCK_SIZE, Buffer, Device, Failure, Memory, Notice, Time, Volume};

/// Runs of zeros of so many blocks (64 KiB) are not written as data.
const ZERO_RUN: u64 = 16;
/// Regions that wait as hot ones, at most.
const HOT_MOST: usize = 64;
/// A region is hot when the guest has read it so often from the source.
const HOT_FROM: u8 = 2;
/// Regions that are looked at for remote blocks at a time.
pub(crate) const SCAN_MOST: u64 = 4096;
/// When nothing can be copied at present, in nanoseconds.
const SCAN_AGAIN: u64 = 50_000_000;
/// How often a failing destination is tried again, in nanoseconds.
const FAILED_AGAIN: u64 = 1_000_000_000;
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

/// Blocks of a region.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Mask([u64; 4]);

impl Mask {
    fn run(first: u64, count: u64) -> Self {
        let mut mask = Self::default();
        (first..first + count).for_each(|bit| mask.set(bit));
        mask
    }

    pub(crate) const fn set(&mut self, bit: u64) {
        self.0[(bit / 64) as usize] |= 1 << (bit % 64);
    }

    pub(crate) const fn clear(&mut self, bit: u64) {
        self.0[(bit / 64) as usize] &= !(1 << (bit % 64));
    }

    pub(crate) const fn has(&self, bit: u64) -> bool {
        self.0[(bit / 64) as usize] >> (bit % 64) & 1 == 1
    }

    pub(crate) fn count(&self) -> u64 {
        self.0.iter().map(|word| u64::from(word.count_ones())).sum()
    }
}

/// What is being done with an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// It is read from the source.
    Reading,
    /// It is written to the destination.
    Writing,
    /// It is read from the source again.
    ComparingSource,
    /// It is read from the destination.
    ComparingData,
}

/// An extent that is being copied, or compared.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Copy {
    pub(crate) first: u64,
    pub(crate) count: u64,
    /// Blocks that the guest has written to meanwhile are not in it.
    pub(crate) wanted: Mask,
    pub(crate) stage: Stage,
    /// The source has not answered it before: the pause before this time, in
    /// nanoseconds.
    pub(crate) backoff: Option<u64>,
    /// Writes in flight.
    pending: u32,
    failure: Option<Failure>,
}

impl Copy {
    pub(crate) const fn new(first: u64, count: u64, wanted: Mask, stage: Stage) -> Self {
        Self {
            first,
            count,
            wanted,
            stage,
            backoff: None,
            pending: 0,
            failure: None,
        }
    }

    const fn contains(&self, block: u64) -> bool {
        block >= self.first && block < self.first + self.count
    }
}

/// What a look for something to copy has found.
enum Next {
    /// These blocks: the first, and how many. If the source has not answered
    /// them before, after which pause.
    Extent(u64, u64, Option<u64>),
    /// Nothing yet; not all of the volume was looked at.
    NotSeen,
    /// Nothing on all of the volume that can be copied at present.
    Nothing,
}

/// An extent that the source has not answered, though it may answer others.
#[derive(Clone, Copy, Debug)]
struct Unanswered {
    count: u64,
    again: Time,
    backoff: u64,
}

/// Blocks that were copied and are not in the bitmap yet.
#[derive(Clone, Copy, Debug)]
struct Unrecorded {
    first: u64,
    blocks: Mask,
    /// Flushes submitted when they were written.
    after: u64,
    flushed: bool,
    /// The bitmap with them is being written.
    recording: bool,
}

impl Unrecorded {
    const fn contains(&self, block: u64) -> bool {
        block >= self.first && block - self.first < 256 && self.blocks.has(block - self.first)
    }
}

/// What is being copied, and what is to be copied next.
#[derive(Debug)]
pub(crate) struct Hydration {
    copies: Vec<Option<Copy>>,
    unrecorded_extents: Vec<Unrecorded>,
    /// How many blocks these are.
    pub(crate) unrecorded: u64,
    hot: Vec<u64>,
    /// Halves of extents that the source could not read as a whole.
    halves: Vec<(u64, u64)>,
    /// Blocks that the source can't read.
    pub(crate) bad: BTreeSet<u64>,
    /// By their first blocks.
    unanswered: BTreeMap<u64, Unanswered>,
    /// How many blocks these are.
    pub(crate) unanswered_blocks: u64,
    cursor: u64,
    scanned: u64,
    idle_until: Time,
    /// Remote blocks of the destination read as zeros.
    pub(crate) holes: bool,
    pub(crate) copied: u64,
    pub(crate) zeros: u64,
    pub(crate) wake_at: Option<Time>,
}

impl Hydration {
    pub(crate) fn new(copies: u16) -> Self {
        Self {
            copies: vec![None; usize::from(copies)],
            unrecorded_extents: Vec::with_capacity(256),
            unrecorded: 0,
            hot: Vec::with_capacity(HOT_MOST),
            halves: Vec::new(),
            bad: BTreeSet::new(),
            unanswered: BTreeMap::new(),
            unanswered_blocks: 0,
            cursor: 0,
            scanned: 0,
            idle_until: Time(0),
            holes: false,
            copied: 0,
            zeros: 0,
            wake_at: None,
        }
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.copies.iter().all(Option::is_none)
    }

    pub(crate) fn free_slot(&self) -> Option<u16> {
        let free = self.copies.iter().position(Option::is_none);
        free.map(|slot| slot as u16)
    }

    pub(crate) fn begin(&mut self, slot: u16, copy: Copy) {
        self.copies[usize::from(slot)] = Some(copy);
    }

    pub(crate) fn end(&mut self, slot: u16) -> Option<Copy> {
        self.copies[usize::from(slot)].take()
    }

    pub(crate) fn copy_of(&mut self, slot: u16) -> Option<&mut Copy> {
        self.copies.get_mut(usize::from(slot))?.as_mut()
    }

    /// Look for what is to be copied from this region on.
    pub(crate) fn return_to(&mut self, region: u64) {
        self.cursor = region;
        self.scanned = 0;
    }

    /// There may be something to copy again.
    pub(crate) fn look_again(&mut self) {
        self.idle_until = Time(0);
    }

    pub(crate) fn is_recorded(&self) -> bool {
        self.unrecorded_extents.is_empty() && self.is_idle()
    }

    /// Whether a block was copied and not recorded; whether it is just being
    /// recorded.
    pub(crate) fn is_hydrated(&self, map: &Map, block: u64) -> Option<bool> {
        if !map.has_hydrated(map.region_of(block)) {
            return None;
        }
        self.unrecorded_extents
            .iter()
            .find(|extent| extent.contains(block))
            .map(|extent| extent.recording)
    }

    /// A copied block is about to be written by the guest: it is not recorded.
    pub(crate) fn forget(&mut self, map: &mut Map, block: u64) {
        let found = self
            .unrecorded_extents
            .iter_mut()
            .position(|extent| extent.contains(block));
        if let Some(index) = found {
            let extent = &mut self.unrecorded_extents[index];
            extent.blocks.clear(block - extent.first);
            self.unrecorded -= 1;
            if extent.blocks.count() == 0 {
                self.unrecorded_extents.swap_remove(index);
                self.update_region(map, map.region_of(block));
            }
        }
    }

    fn update_region(&self, map: &mut Map, region: u64) {
        let any = self
            .unrecorded_extents
            .iter()
            .any(|extent| map.region_of(extent.first) == region);
        map.set_hydrated(region, any);
    }

    /// What the guest writes to is not copied.
    fn exclude(&mut self, block: u64, comparing: bool) {
        for copy in self.copies.iter_mut().flatten() {
            let stage = matches!(copy.stage, Stage::Reading | Stage::Writing) || comparing;
            if copy.contains(block) && stage {
                copy.wanted.clear(block - copy.first);
            }
        }
    }

    /// Whether a block is just being written by a copy.
    pub(crate) fn is_being_written(&self, map: &Map, block: u64) -> bool {
        map.is_copying(map.region_of(block))
            && self.copies.iter().flatten().any(|copy| {
                copy.stage == Stage::Writing
                    && copy.contains(block)
                    && copy.wanted.has(block - copy.first)
            })
    }

    pub(crate) fn is_region_being_written(&self, map: &Map, region: u64) -> bool {
        map.is_copying(region)
            && self
                .copies
                .iter()
                .flatten()
                .any(|copy| copy.stage == Stage::Writing && map.region_of(copy.first) == region)
    }

    /// Whether some of these blocks are just being recorded.
    pub(crate) fn is_being_recorded(&self, first: u64, end: u64) -> bool {
        self.unrecorded_extents
            .iter()
            .any(|extent| extent.recording && extent.first < end && first < extent.first + 256)
    }

    /// The guest has written to these blocks.
    pub(crate) fn written(&mut self, first: u64, end: u64) {
        remove_range(&mut self.bad, first, end);
        let inside = |(at, extent): (&u64, &Unanswered)| (*at + extent.count <= end).then_some(*at);
        while let Some(at) = self.unanswered.range(first..end).find_map(inside) {
            self.take_unanswered(at);
        }
    }

    fn add_unanswered(&mut self, first: u64, extent: Unanswered) {
        self.unanswered_blocks += extent.count;
        self.unanswered.insert(first, extent);
    }

    fn take_unanswered(&mut self, first: u64) {
        if let Some(extent) = self.unanswered.remove(&first) {
            self.unanswered_blocks -= extent.count;
        }
    }

    fn is_unanswered(&self, block: u64) -> bool {
        let before = self.unanswered.range(..=block).next_back();
        before.is_some_and(|(first, extent)| block < first + extent.count)
    }

    pub(crate) fn has_unflushed(&self) -> bool {
        self.unrecorded_extents.iter().any(|extent| !extent.flushed)
    }

    /// This flush has ended.
    pub(crate) fn flushed(&mut self, flush: u64) {
        for extent in &mut self.unrecorded_extents {
            extent.flushed |= extent.after < flush;
        }
    }

    /// The bitmap will be written with all that is flushed.
    pub(crate) fn begin_recording(&mut self, all: bool) {
        for extent in &mut self.unrecorded_extents {
            extent.recording = extent.flushed || all;
        }
    }

    /// The first block from `from` on that is in an extent being recorded.
    pub(crate) fn next_recording(&self, from: u64) -> Option<u64> {
        let extents = self.unrecorded_extents.iter();
        extents
            .filter(|extent| extent.recording && extent.first >= from)
            .map(|extent| extent.first)
            .min()
    }

    /// The bitmap is durable.
    pub(crate) fn recorded(&mut self, map: &mut Map) {
        let mut index = 0;
        while index < self.unrecorded_extents.len() {
            let extent = self.unrecorded_extents[index];
            if extent.recording {
                self.unrecorded_extents.swap_remove(index);
                self.unrecorded -= extent.blocks.count();
                self.update_region(map, map.region_of(extent.first));
            } else {
                index += 1;
            }
        }
    }

    /// Blocks from `first` to `end` that were copied and may not be recorded.
    pub(crate) fn unrecorded_in(&self, first: u64, end: u64, withhold: &mut impl FnMut(u64)) {
        for extent in &self.unrecorded_extents {
            if extent.recording || extent.first >= end || extent.first + 256 <= first {
                continue;
            }
            (first.max(extent.first)..end.min(extent.first + 256))
                .filter(|block| extent.contains(*block))
                .for_each(&mut *withhold);
        }
    }

    /// Try again what could not be read.
    pub(crate) fn retry_source(&mut self) {
        self.bad.clear();
        for extent in self.unanswered.values_mut() {
            extent.again = Time(0);
        }
        self.idle_until = Time(0);
    }
}

/// Take the blocks from `first` to `end` out of a set.
pub(crate) fn remove_range(blocks: &mut BTreeSet<u64>, first: u64, end: u64) {
    while let Some(block) = blocks.range(first..end).next().copied() {
        blocks.remove(&block);
    }
}

impl Volume {
    /// What the guest writes to is neither copied nor compared.
    pub(crate) fn exclude(&mut self, block: u64) {
        if self.map.is_copying(self.map.region_of(block)) {
            let comparing = self.rules.keep(Rule::VerifyExcludesWritten);
            self.hydration.exclude(block, comparing);
            if comparing {
                self.verification.exclude(block);
            }
        }
    }

    /// The guest has read these blocks from the source.
    pub(crate) fn warm(&mut self, first: u64, end: u64) {
        for region in self.map.region_of(first)..=self.map.region_of(end - 1) {
            if self.map.heat(region) < HOT_FROM || self.map.is_hot(region) {
                continue;
            }
            let hot = &mut self.hydration.hot;
            if hot.len() == HOT_MOST {
                let map = &self.map;
                let coldest = (0..HOT_MOST).min_by_key(|at| map.heat_of(hot[*at]));
                if let Some(at) = coldest {
                    let cold = hot.swap_remove(at);
                    self.map.set_hot(cold, false);
                }
            }
            self.hydration.hot.push(region);
            self.map.set_hot(region, true);
        }
    }

    /// Begin as many copies as may be.
    pub(crate) fn hydrate(&mut self, now: Time, budget: &mut u64) {
        self.hydration.wake_at = None;
        let started = self.superblock.started || !self.rules.keep(Rule::NothingBeforeStart);
        if !started || self.broken || self.map.remote() == 0 {
            return;
        }
        self.flush_to_verify(false);
        self.verify(now);
        let full = self.hydration.unrecorded >= 2 * HYDRATED_MOST;
        let hopeless = self.hydration.bad.len() >= BAD_MOST;
        if full || hopeless || self.verification.holds_up() {
            return;
        }
        while let Some(slot) = self.hydration.free_slot() {
            if now < self.hydration.idle_until {
                self.hydration.wake_at = Some(self.hydration.idle_until);
                return;
            }
            if !self.pace.may_copy(now) {
                self.hydration.wake_at = Some(self.pace.may_copy_at());
                return;
            }
            let silent_until = self.source.may_copy_at(now);
            let next = self.next_extent(now, silent_until.is_some(), budget);
            let (first, count, backoff) = match next {
                Next::Extent(first, count, backoff) => (first, count, backoff),
                Next::NotSeen => {
                    self.hydration.wake_at = Some(now);
                    return;
                }
                Next::Nothing => {
                    if self.hydration.is_idle() {
                        self.flush_to_verify(true);
                        self.hydration.idle_until = now.after(SCAN_AGAIN);
                        self.hydration.wake_at = Some(self.hydration.idle_until);
                    }
                    return;
                }
            };
            let on_source = first * BLOCK_SIZE < self.superblock.source_size;
            if on_source && !self.source.may_copy(now) {
                self.hydration.halves.push((first, count));
                self.hydration.wake_at = silent_until;
                return;
            }
            self.begin_copy(slot, first, count, backoff, on_source);
        }
    }

    fn begin_copy(
        &mut self,
        slot: u16,
        first: u64,
        count: u64,
        backoff: Option<u64>,
        on_source: bool,
    ) {
        self.pace.spend(count * BLOCK_SIZE);
        let region = self.map.region_of(first);
        self.map.set_copying(region, true);
        let mut copy = Copy::new(first, count, Mask::run(0, count), Stage::Reading);
        copy.backoff = backoff;
        if on_source {
            self.actions.push_back(Action::Read {
                io: io(kind::COPY_READ, u64::from(slot)),
                device: Device::Source,
                offset: first * BLOCK_SIZE,
                length: (count * BLOCK_SIZE) as u32,
                buffer: Buffer::Extent { slot, offset: 0 },
            });
            self.hydration.begin(slot, copy);
        } else {
            copy.stage = Stage::Writing;
            self.hydration.begin(slot, copy);
            self.copy_zeros(slot, first, count);
            self.end_copy_if_written(slot);
        }
    }

    /// The extent to copy next; none that was not answered while the source
    /// is not to be asked.
    fn next_extent(&mut self, now: Time, silent: bool, budget: &mut u64) -> Next {
        while let Some((first, count)) = self.hydration.halves.pop() {
            if !self.map.is_copying(self.map.region_of(first)) {
                if let Some(run) = self.remote_run(first, first + count) {
                    if run.0 + run.1 < first + count {
                        let rest = run.0 + run.1;
                        self.hydration.halves.push((rest, first + count - rest));
                    }
                    return Next::Extent(run.0, run.1, None);
                }
            }
        }
        if !silent {
            if let Some(next) = self.next_unanswered(now, false) {
                return next;
            }
        }
        while let Some(at) =
            (0..self.hydration.hot.len()).max_by_key(|at| self.map.heat_of(self.hydration.hot[*at]))
        {
            let region = self.hydration.hot[at];
            if let Some(run) = self.run_in_region(region) {
                return Next::Extent(run.0, run.1, None);
            }
            self.hydration.hot.swap_remove(at);
            self.map.set_hot(region, false);
        }
        while *budget > 0 {
            *budget -= 1;
            let region = self.hydration.cursor;
            if let Some(run) = self.run_in_region(region) {
                self.hydration.scanned = 0;
                return Next::Extent(run.0, run.1, None);
            }
            self.hydration.cursor = (region + 1) % self.map.regions();
            self.hydration.scanned += 1;
            if self.hydration.scanned >= self.map.regions() {
                self.hydration.scanned = 0;
                let last = (!silent).then(|| self.next_unanswered(now, true));
                return last.flatten().unwrap_or(Next::Nothing);
            }
        }
        Next::NotSeen
    }

    /// What the source has not answered and it is time to ask for again: by
    /// halves, until it is known which blocks it does not answer.
    fn next_unanswered(&mut self, now: Time, nothing_else: bool) -> Option<Next> {
        let away = self.source.is_away();
        let few = self.hydration.unanswered.len() < UNANSWERED_AWAY;
        if away && few && !nothing_else {
            // Of another extent it may answer.
            return None;
        }
        loop {
            let idle = |first: &u64| !self.map.is_copying(self.map.region_of(*first));
            let (first, extent) = self
                .hydration
                .unanswered
                .iter()
                .filter(|(first, _)| idle(first))
                .min_by_key(|(_, extent)| extent.again)
                .map(|(first, extent)| (*first, *extent))?;
            if now < extent.again {
                return away.then_some(Next::Nothing);
            }
            self.hydration.take_unanswered(first);
            let end = first + extent.count;
            let Some((begin, count)) = self.remote_run(first, end) else {
                continue;
            };
            let whole = away && self.hydration.unanswered.len() >= HALVES_AWAY;
            let taken = if whole { count } else { count.div_ceil(2) };
            if begin + taken < end {
                let rest = Unanswered {
                    count: end - begin - taken,
                    again: now,
                    ..extent
                };
                self.hydration.add_unanswered(begin + taken, rest);
            }
            return Some(Next::Extent(begin, taken, Some(extent.backoff)));
        }
    }

    /// The source has not answered an extent that was to be copied.
    pub(crate) fn copy_unanswered(&mut self, now: Time, copy: &Copy) {
        let backoff = match copy.backoff {
            None => {
                self.source_is_away(now);
                // What is next to it may have the same fate.
                let regions = self.map.regions();
                let region = self.map.region_of(copy.first) + regions / JUMPS + 1;
                self.hydration.return_to(region % regions);
                FIRST_RETRY
            }
            // First it is to be known which block it is.
            Some(_) if copy.count > 1 => FIRST_RETRY,
            Some(_)
                if self.hydration.unanswered.len() >= UNANSWERED_MOST && !self.source.is_away() =>
            {
                return self.is_bad(copy.first);
            }
            Some(before) => (before * 2).min(UNANSWERED_AGAIN),
        };
        let extent = Unanswered {
            count: copy.count,
            again: now.after(backoff),
            backoff,
        };
        self.hydration.add_unanswered(copy.first, extent);
    }

    /// The source can't read a block: it is not copied.
    fn is_bad(&mut self, block: u64) {
        if self.hydration.bad.insert(block) {
            self.actions.push_back(Action::Notice(Notice::BadSource {
                offset: block * BLOCK_SIZE,
                length: BLOCK_SIZE as u32,
            }));
        }
    }

    fn run_in_region(&self, region: u64) -> Option<(u64, u64)> {
        if region >= self.map.regions() || self.map.is_copying(region) {
            return None;
        }
        self.remote_run(self.map.region_first(region), self.map.region_end(region))
    }

    fn can_be_copied(&self, block: u64) -> bool {
        !self.map.is_local(block)
            && !self.unsettled.contains_key(&block)
            && !self.hydration.bad.contains(&block)
            && !self.hydration.is_unanswered(block)
            && !self.verification.differing.contains(&block)
            && !self.unreadable.contains(&block)
            && !self
                .ranges
                .iter()
                .any(|(first, end, _)| (*first..*end).contains(&block))
    }

    /// The first run of blocks from `first` to `end` that can be copied, on
    /// the source or beyond its end.
    fn remote_run(&self, first: u64, end: u64) -> Option<(u64, u64)> {
        let mut begin = self.map.run_end(first, end, true);
        while begin < end && !self.can_be_copied(begin) {
            begin = self.map.run_end(begin + 1, end, true);
        }
        if begin >= end {
            return None;
        }
        let source_end = self.superblock.source_size / BLOCK_SIZE;
        let end = if begin < source_end {
            end.min(source_end)
        } else {
            end
        };
        let stop = (begin..end).find(|block| !self.can_be_copied(*block));
        Some((begin, stop.unwrap_or(end) - begin))
    }

    /// An extent was read from the source, or not.
    pub(crate) fn copy_read<M: Memory>(
        &mut self,
        now: Time,
        slot: u16,
        result: Result<(), Failure>,
        memory: &mut M,
    ) {
        let Some(copy) = self.hydration.copy_of(slot).copied() else {
            return;
        };
        let (first, count) = (copy.first, copy.count);
        match result {
            Ok(()) => self.source_answers(),
            Err(Failure::Unreachable) => {
                self.copy_unanswered(now, &copy);
                return self.drop_copy(slot);
            }
            Err(_) => {
                self.source_answers();
                if count > 1 {
                    let half = count / 2;
                    self.hydration.halves.push((first + half, count - half));
                    self.hydration.halves.push((first, half));
                } else {
                    self.is_bad(first);
                }
                return self.drop_copy(slot);
            }
        }
        let everything = !self.rules.keep(Rule::CopyExcludesWritten);
        let content = &memory.extent(slot)[..(count * BLOCK_SIZE) as usize];
        let Some(copy) = self.hydration.copy_of(slot) else {
            return;
        };
        if everything {
            copy.wanted = Mask::run(0, count);
        }
        copy.stage = Stage::Writing;
        let wanted = copy.wanted;
        self.write_copy(slot, first, count, wanted, content);
        self.end_copy_if_written(slot);
    }

    fn write_copy(&mut self, slot: u16, first: u64, count: u64, wanted: Mask, content: &[u8]) {
        let is_zero = |at: u64| {
            let at = (at * BLOCK_SIZE) as usize;
            let block = &content[at..at + BLOCK_SIZE as usize];
            block.iter().all(|byte| *byte == 0)
        };
        // The end of the run of wanted blocks from `from` on that are zeros,
        // or not.
        let run = |from: u64, zero: bool| {
            (from..count)
                .find(|at| !wanted.has(*at) || is_zero(*at) != zero)
                .unwrap_or(count)
        };
        let mut at = 0;
        while at < count {
            if !wanted.has(at) {
                at += 1;
                continue;
            }
            let zeros = run(at, true);
            if zeros - at >= ZERO_RUN || zeros > at && zeros - at == count {
                self.copy_zeros(slot, first + at, zeros - at);
                at = zeros;
                continue;
            }
            // Short runs of zeros are written with what is around them.
            let mut end = zeros;
            while end < count && wanted.has(end) {
                let data = run(end, false);
                let zeros = run(data, true);
                if zeros - data >= ZERO_RUN {
                    end = data;
                    break;
                }
                end = zeros;
            }
            self.count_copy(slot);
            self.actions.push_back(Action::Write {
                io: io(kind::COPY_WRITE, u64::from(slot)),
                device: Device::Data,
                offset: (first + at) * BLOCK_SIZE,
                length: ((end - at) * BLOCK_SIZE) as u32,
                buffer: Buffer::Extent {
                    slot,
                    offset: (at * BLOCK_SIZE) as u32,
                },
                fua: false,
            });
            at = end;
        }
    }

    fn count_copy(&mut self, slot: u16) {
        if let Some(copy) = self.hydration.copy_of(slot) {
            copy.pending += 1;
        }
    }

    /// Blocks are zeros on the source.
    fn copy_zeros(&mut self, slot: u16, first: u64, count: u64) {
        self.hydration.zeros += count * BLOCK_SIZE;
        if self.hydration.holes {
            return;
        }
        self.count_copy(slot);
        self.actions.push_back(Action::Zero {
            io: io(kind::COPY_WRITE, u64::from(slot)),
            device: Device::Data,
            offset: first * BLOCK_SIZE,
            length: count * BLOCK_SIZE,
            fua: false,
        });
    }

    /// A piece of a copy was written to the destination, or not.
    pub(crate) fn copy_written(&mut self, slot: u16, result: Result<(), Failure>) {
        let Some(copy) = self.hydration.copy_of(slot) else {
            return;
        };
        copy.pending -= 1;
        if let Err(failure) = result {
            copy.failure = Some(failure);
        }
        self.end_copy_if_written(slot);
    }

    /// Nothing more comes of a copy; what is in it may be copied again.
    pub(crate) fn drop_copy(&mut self, slot: u16) {
        if let Some(copy) = self.hydration.end(slot) {
            self.map.set_copying(self.map.region_of(copy.first), false);
        }
        self.retry = true;
    }

    fn end_copy_if_written(&mut self, slot: u16) {
        let Some(copy) = self.hydration.copy_of(slot).copied() else {
            return;
        };
        if copy.pending > 0 {
            return;
        }
        let region = self.map.region_of(copy.first);
        if copy.failure.is_some() {
            self.drop_copy(slot);
            self.hydration.holes = false;
            self.hydration.idle_until = self.time().after(FAILED_AGAIN);
        } else if self.is_verified(region) {
            // Nobody else copies in the region until it is compared.
            self.hydration.end(slot);
            self.retry = true;
            self.verify_later(&copy);
        } else {
            self.drop_copy(slot);
            self.arrived(copy.first, copy.wanted, false);
        }
    }

    /// These of the blocks from `first` on are on the destination: they are
    /// local from now on.
    pub(crate) fn arrived(&mut self, first: u64, blocks: Mask, flushed: bool) {
        let count = blocks.count();
        self.hydration.copied += count * BLOCK_SIZE;
        if count == 0 {
            return;
        }
        for bit in (0..256).filter(|bit| blocks.has(*bit)) {
            self.map.set_local(first + bit);
        }
        self.map.set_hydrated(self.map.region_of(first), true);
        self.hydration.unrecorded += count;
        self.hydration.unrecorded_extents.push(Unrecorded {
            first,
            blocks,
            after: self.flushes.submitted,
            flushed,
            recording: false,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_extent_is_withheld_on_both_sides_of_a_sectors_end() {
        let mut hydration = Hydration::new(1);
        let extent = Unrecorded {
            first: 3840,
            blocks: Mask::run(0, 256),
            after: 1,
            flushed: false,
            recording: false,
        };
        hydration.unrecorded_extents.push(extent);
        let seam = crate::bitmap::BLOCKS_PER_SECTOR;
        let withheld = |first, end| {
            let mut blocks = Vec::new();
            hydration.unrecorded_in(first, end, &mut |block| blocks.push(block));
            blocks
        };
        assert!(withheld(0, seam).into_iter().eq(3840..seam));
        assert!(withheld(seam, 2 * seam).into_iter().eq(seam..4096));
        assert!(withheld(2 * seam, 3 * seam).is_empty());
    }
}
