// SPDX-License-Identifier: Apache-2.0

//! The copier: hydration, and verification.
//!
//! An extent has remote blocks of one region, perhaps with others between them
//! that are read and left out. It is read from the source, and what the guest has
//! not written meanwhile is written to the destination; zeros are not, as far as
//! may be. The blocks are local then (or when they were compared, see
//! [`verification`]); once a flush has followed, a checkpoint records them in the
//! bitmap. What is copied when, [`candidates`] knows.

mod candidates;
mod copy;
mod verification;

use crate::config::Config;
use crate::context::{Context, Job};
use crate::io::{Buffer, Device, Failure, Memory, Notice, Time};
use crate::journal::COPIED_MOST;
use crate::parts::Parts;
use crate::regions::{Mask, Regions};
use crate::rules::Rule;
use crate::source::FIRST_RETRY;
use crate::units::{BLOCK_SIZE, Block, Blocks, Bytes, Region};
use candidates::{Candidates, Extent, Look, Next};
use copy::{Copy, Stage};
use verification::Verification;

/// Runs of zeros of so many blocks (64 KiB) are not written as data.
const ZERO_RUN: u64 = 16;
/// When nothing can be copied at present, in nanoseconds.
const SCAN_AGAIN: u64 = 50_000_000;
/// How often a failing destination is tried again, in nanoseconds.
const FAILED_AGAIN: u64 = 1_000_000_000;
/// Nothing is copied any more when so many blocks differ (16 MiB): such a
/// destination is of no use.
const DIFFERING_MOST: usize = 4096;

/// Copies from the source to the destination.
#[derive(Debug)]
pub(crate) struct Copier {
    /// One for each buffer for an extent.
    copies: Vec<Option<Copy>>,
    candidates: Candidates,
    verification: Verification,
    idle_until: Time,
    wake_at: Option<Time>,
    /// Remote blocks of the destination read as zeros.
    pub(crate) holes: bool,
    /// Bytes that were copied.
    pub(crate) copied: u64,
    /// Of these, zeros that were not written.
    pub(crate) zeros: u64,
}

impl Copier {
    pub(crate) fn new(config: &Config) -> Self {
        Self {
            copies: vec![None; usize::from(config.copies)],
            candidates: Candidates::new(config.source_size),
            verification: Verification::new(config),
            idle_until: Time(0),
            wake_at: None,
            holes: false,
            copied: 0,
            zeros: 0,
        }
    }

    /// Nothing is being copied.
    pub(crate) fn is_idle(&self) -> bool {
        self.copies.iter().all(Option::is_none)
    }

    /// When there may be something to copy, if not now.
    pub(crate) const fn wake_at(&self) -> Option<Time> {
        self.wake_at
    }

    /// Blocks that the source can't read.
    pub(crate) fn bad(&self) -> impl ExactSizeIterator<Item = Block> {
        self.candidates.bad().iter().copied()
    }

    /// Blocks that differ although they were copied again.
    pub(crate) fn differing(&self) -> impl ExactSizeIterator<Item = Block> {
        self.candidates.differing().iter().copied()
    }

    /// How many blocks the source has not answered.
    pub(crate) const fn unanswered(&self) -> u64 {
        self.candidates.unanswered_blocks()
    }

    /// Bytes that were compared and were the same.
    pub(crate) const fn verified(&self) -> u64 {
        self.verification.verified
    }

    /// Blocks that were not, each time.
    pub(crate) const fn differences(&self) -> u64 {
        self.verification.differences
    }

    /// Try again what the source could not read.
    pub(crate) fn retry_source(&mut self) {
        self.candidates.retry();
        self.idle_until = Time(0);
    }

    // What requests tell it.

    /// What the guest writes to is neither copied nor compared.
    pub(crate) fn exclude(&mut self, block: Block, regions: &Regions, cx: &Context) {
        if !regions.map().is_copying(regions.map().region_of(block)) {
            return;
        }
        let comparing = cx.rules.keep(Rule::VerifyExcludesWritten);
        for copy in self.copies.iter_mut().flatten() {
            if comparing || !copy.is_being_compared() {
                copy.exclude(block);
            }
        }
        if comparing {
            self.verification.exclude(block);
        }
    }

    /// The same for many blocks.
    pub(crate) fn exclude_all(&mut self, blocks: Blocks, regions: &Regions, cx: &Context) {
        for region in regions.map().regions_of(blocks) {
            if regions.map().is_copying(region) {
                for block in regions.map().blocks_of(region).within(blocks).iter() {
                    self.exclude(block, regions, cx);
                }
            }
        }
    }

    /// Whether a block is just being written by a copy.
    pub(crate) fn writes(&self, block: Block, regions: &Regions) -> bool {
        let copies = self.copies.iter().flatten();
        regions.map().is_copying(regions.map().region_of(block))
            && copies
                .filter(|copy| copy.is_being_written())
                .any(|copy| copy.wants(block))
    }

    /// Whether any block of a region is.
    pub(crate) fn writes_to(&self, region: Region, regions: &Regions) -> bool {
        let map = regions.map();
        let mut copies = self.copies.iter().flatten();
        map.is_copying(region)
            && copies
                .any(|copy| copy.is_being_written() && map.region_of(copy.blocks.first) == region)
    }

    /// The guest has written to these blocks as a whole.
    pub(crate) fn written(&mut self, blocks: Blocks) {
        self.candidates.written(blocks);
        self.verification.written(blocks);
    }

    /// The guest has read these blocks from the source.
    pub(crate) fn warm(&mut self, blocks: Blocks, regions: &mut Regions) {
        self.candidates.warm(blocks, regions);
    }

    // Copies.

    /// Begin as many copies as may be. Looks at `budget` regions at most.
    #[inline]
    pub(crate) fn advance(&mut self, parts: &mut Parts, budget: &mut u64) {
        self.wake_at = None;
        let started = parts.cx.superblock.started || !parts.cx.rules.keep(Rule::NothingBeforeStart);
        if !started || parts.cx.broken || parts.regions.map().remote() == 0 {
            return;
        }
        self.flush_to_verify(false, parts);
        self.verify(parts);
        self.hydrate(parts, budget);
    }

    fn hydrate(&mut self, parts: &mut Parts, budget: &mut u64) {
        if parts.regions.copied().count() >= 2 * COPIED_MOST
            || self.candidates.is_hopeless()
            || self.verification.holds_up()
            || self.candidates.differing().len() >= DIFFERING_MOST
        {
            return;
        }
        while let Some(slot) = self.free_slot() {
            if parts.cx.now < self.idle_until {
                self.wake_at = Some(self.idle_until);
                return;
            }
            if !self.may_copy(&mut parts.cx) {
                return;
            }
            let silent_until = parts.source.may_copy_at(parts.cx.now);
            let look = Look {
                now: parts.cx.now,
                away: parts.source.is_away(),
                silent: silent_until.is_some(),
            };
            let (extent, backoff) = match self.candidates.next(look, budget, &mut parts.regions) {
                Next::Extent(extent, backoff) => (extent, backoff),
                Next::NotSeen => {
                    self.wake_at = Some(parts.cx.now);
                    return;
                }
                Next::Nothing => {
                    if self.is_idle() {
                        self.flush_to_verify(true, parts);
                        self.idle_until = parts.cx.now.after(SCAN_AGAIN);
                        self.wake_at = Some(self.idle_until);
                    }
                    return;
                }
            };
            let Extent { blocks, wanted } = extent;
            let on_source = self.candidates.is_on_source(blocks.first);
            if on_source && !parts.source.may_copy(parts.cx.now) {
                self.candidates.push(blocks);
                self.wake_at = silent_until;
                return;
            }
            parts.cx.pace.spend(blocks.bytes());
            parts
                .regions
                .set_copying(parts.regions.map().region_of(blocks.first), true);
            if on_source {
                self.begin(slot, blocks, wanted, Stage::Reading(backoff));
                read(
                    Job::CopyRead(slot),
                    Device::Source,
                    blocks,
                    slot,
                    &mut parts.cx,
                );
            } else {
                self.begin(slot, blocks, wanted, Stage::Writing(0, false));
                self.copy_zeros(slot, blocks, &mut parts.cx);
                self.end_if_written(slot, parts);
            }
        }
    }

    /// Whether the guest's requests leave room for a copy now.
    fn may_copy(&mut self, cx: &mut Context) -> bool {
        let may = cx.pace.may_copy(cx.now);
        if !may {
            self.wake_at = Some(cx.pace.may_copy_at());
        }
        may
    }

    fn free_slot(&self) -> Option<u16> {
        let free = self.copies.iter().position(Option::is_none);
        free.map(|slot| slot as u16)
    }

    fn begin(&mut self, slot: u16, blocks: Blocks, wanted: Mask, stage: Stage) {
        self.copies[usize::from(slot)] = Some(Copy {
            blocks,
            wanted,
            data: Mask::default(),
            zeros: Mask::default(),
            stage,
        });
    }

    fn copy_in(&mut self, slot: u16) -> Option<&mut Copy> {
        self.copies.get_mut(usize::from(slot))?.as_mut()
    }

    /// Nothing more comes of a copy; what is in it may be copied again.
    fn drop_copy(&mut self, slot: u16, parts: &mut Parts) {
        if let Some(copy) = self.copies[usize::from(slot)].take() {
            parts
                .regions
                .set_copying(parts.regions.map().region_of(copy.blocks.first), false);
        }
        parts.cx.changed = true;
    }

    /// The source has not answered an extent that was to be copied, for the
    /// first time or after this pause.
    fn is_unanswered(&mut self, blocks: Blocks, backoff: Option<u64>, parts: &mut Parts) {
        if backoff.is_none() {
            parts.source.went_away(&mut parts.cx);
        }
        let look = Look {
            now: parts.cx.now,
            away: parts.source.is_away(),
            silent: true,
        };
        if !self
            .candidates
            .unanswered(blocks, backoff, look, &parts.regions)
        {
            self.is_bad(blocks.first, &mut parts.cx);
        }
    }

    /// The source can't read a block: it is not copied.
    fn is_bad(&mut self, block: Block, cx: &mut Context) {
        if self.candidates.is_bad(block) {
            cx.notify(Notice::BadSource {
                offset: block.start().0,
                length: BLOCK_SIZE as u32,
            });
        }
    }

    /// An extent was read from the source, or not.
    pub(crate) fn read_ended<M: Memory>(
        &mut self,
        slot: u16,
        result: Result<(), Failure>,
        parts: &mut Parts,
        memory: &M,
    ) {
        let everything = !parts.cx.rules.keep(Rule::CopyExcludesWritten);
        let Some(copy) = self.copy_in(slot) else {
            return;
        };
        let Copy {
            blocks,
            stage: Stage::Reading(backoff),
            ..
        } = *copy
        else {
            return;
        };
        match result {
            Ok(()) => {
                parts.source.answers(&mut parts.cx);
                if everything {
                    copy.wanted = Mask::first(blocks.count());
                }
                copy.stage = Stage::Writing(0, false);
                let copy = *copy;
                let content = &memory.extent(slot)[..blocks.bytes() as usize];
                self.write(slot, &copy, content, &mut parts.cx);
                return self.end_if_written(slot, parts);
            }
            Err(Failure::Unreachable) => {
                self.is_unanswered(blocks, backoff, parts);
            }
            Err(_) => {
                parts.source.answers(&mut parts.cx);
                if blocks.count() > 1 {
                    let middle = blocks.first + blocks.count() / 2;
                    self.candidates.push(blocks.from(middle));
                    self.candidates.push(Blocks::new(blocks.first, middle));
                } else {
                    self.is_bad(blocks.first, &mut parts.cx);
                }
            }
        }
        self.drop_copy(slot, parts);
    }

    /// Find out what of an extent is to be written to the destination, where it
    /// is wanted.
    fn write(&mut self, slot: u16, copy: &Copy, content: &[u8], cx: &mut Context) {
        let (wanted, count) = (copy.wanted, copy.blocks.count());
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
                self.copy_zeros(slot, Blocks::run(copy.blocks.first + at, zeros - at), cx);
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
            if let Some(copy) = self.copy_in(slot) {
                (at..end).for_each(|block| copy.data.set(block));
            }
            at = end;
        }
    }

    /// Write what is left of a copy to the destination, or a piece of it.
    fn write_on(&mut self, slot: u16, cx: &mut Context) {
        let piece = cx.pace.piece();
        while let Some(copy) = self.copy_in(slot) {
            let Some(at) = copy.data.iter().next() else {
                return;
            };
            let most = piece.map_or(copy.blocks.count(), |piece| at + piece);
            let most = most.min(copy.blocks.count());
            let end = (at..most).find(|block| !copy.data.has(*block));
            let end = end.unwrap_or(most);
            (at..end).for_each(|block| copy.data.clear(block));
            let first = copy.blocks.first + at;
            let buffer = Buffer::Extent {
                slot,
                offset: (at * BLOCK_SIZE) as u32,
            };
            let bytes = Bytes::run(first.start().0, (end - at) * BLOCK_SIZE);
            self.count_write(slot);
            cx.write(Job::CopyWrite(slot), bytes, buffer, false);
            if piece.is_some() {
                return;
            }
        }
    }

    fn count_write(&mut self, slot: u16) {
        if let Some(Stage::Writing(pending, _)) = self.copy_in(slot).map(|copy| &mut copy.stage) {
            *pending += 1;
        }
    }

    /// Blocks are zeros on the source.
    fn copy_zeros(&mut self, slot: u16, blocks: Blocks, cx: &mut Context) {
        self.zeros += blocks.bytes();
        if self.holes {
            return;
        }
        if !cx.superblock.zeroed {
            return self.write_zeros(slot, blocks, cx);
        }
        if let Some(copy) = self.copy_in(slot) {
            let first = copy.blocks.first;
            blocks
                .iter()
                .for_each(|block| copy.zeros.set(block - first));
        }
    }

    fn write_zeros(&mut self, slot: u16, blocks: Blocks, cx: &mut Context) {
        self.count_write(slot);
        let bytes = Bytes::new(blocks.first.start(), blocks.end.start());
        cx.zero(Job::CopyWrite(slot), bytes, false);
    }

    /// Zeros that are there already would only take up space: read what the
    /// destination has where the source has zeros.
    fn look(&mut self, slot: u16, cx: &mut Context) {
        if let Some(copy) = self.copy_in(slot) {
            copy.stage = Stage::Looking;
            let blocks = copy.blocks;
            read(Job::CopyLook(slot), Device::Data, blocks, slot, cx);
        }
    }

    /// The destination was looked at, or cannot be read: zeros are written where
    /// it is not known to have them.
    pub(crate) fn looked<M: Memory>(
        &mut self,
        slot: u16,
        result: Result<(), Failure>,
        parts: &mut Parts,
        memory: &M,
    ) {
        let Some(copy) = self.copy_in(slot) else {
            return;
        };
        let blocks = copy.blocks;
        let mut missing = core::mem::take(&mut copy.zeros);
        copy.stage = Stage::Writing(0, false);
        let content = memory.extent(slot).chunks_exact(BLOCK_SIZE as usize);
        for (at, block) in (0..blocks.count()).zip(content) {
            if result.is_ok() && block.iter().all(|byte| *byte == 0) {
                missing.clear(at);
            }
        }
        let mut at = 0;
        while at < blocks.count() {
            let end = (at..blocks.count()).find(|at| !missing.has(*at));
            let end = end.unwrap_or(blocks.count());
            if end > at {
                let run = Blocks::run(blocks.first + at, end - at);
                self.write_zeros(slot, run, &mut parts.cx);
            }
            at = end + 1;
        }
        self.end_if_written(slot, parts);
    }

    /// A piece of a copy was written to the destination, or not.
    pub(crate) fn write_ended(
        &mut self,
        slot: u16,
        result: Result<(), Failure>,
        parts: &mut Parts,
    ) {
        let stage = self.copy_in(slot).map(|copy| &mut copy.stage);
        if let Some(Stage::Writing(pending, failed)) = stage {
            *pending -= 1;
            *failed |= result.is_err();
        }
        self.end_if_written(slot, parts);
    }

    fn end_if_written(&mut self, slot: u16, parts: &mut Parts) {
        let Some(copy) = self.copy_in(slot).copied() else {
            return;
        };
        let Stage::Writing(0, failed) = copy.stage else {
            return;
        };
        if !failed && !copy.data.is_empty() {
            return self.write_on(slot, &mut parts.cx);
        }
        if !failed && !copy.zeros.is_empty() {
            return self.look(slot, &mut parts.cx);
        }
        let region = parts.regions.map().region_of(copy.blocks.first);
        if failed {
            self.drop_copy(slot, parts);
            self.holes = false;
            self.idle_until = parts.cx.now.after(FAILED_AGAIN);
        } else if parts.cx.rules.keep(Rule::VerifyBeforeLocal)
            && self
                .verification
                .is_for(region, parts.regions.map().regions())
        {
            // Nobody else copies in the region until it is compared.
            self.copies[usize::from(slot)] = None;
            parts.cx.changed = true;
            let after = if parts.cx.rules.keep(Rule::FlushBeforeVerify) {
                parts.journal.flushes_submitted()
            } else {
                0
            };
            self.verification.push(&copy, after, false);
        } else {
            self.drop_copy(slot, parts);
            let after = parts.journal.flushes_submitted();
            self.arrived(copy.blocks.first, copy.wanted, after, &mut parts.regions);
        }
    }

    /// These of the blocks from `first` on are on the destination.
    fn arrived(&mut self, first: Block, blocks: Mask, after: u64, regions: &mut Regions) {
        if !blocks.is_empty() {
            self.copied += blocks.count() * BLOCK_SIZE;
            regions.arrived(first, blocks, after);
        }
    }

    // Comparisons.

    /// Flush the destination if enough waits for that, or nothing else is to
    /// be done.
    fn flush_to_verify(&self, idle: bool, parts: &mut Parts) {
        let submitted = parts.journal.flushes_submitted();
        if self.verification.needs_flush(submitted, idle) {
            parts.flush();
        }
    }

    /// Begin to compare what is flushed, as much as may be.
    fn verify(&mut self, parts: &mut Parts) {
        while let Some(extent) = self.verification.first(parts.journal.last_flush()) {
            let blocks = extent.blocks;
            if extent.wanted.is_empty() {
                self.verification.take_first();
                parts
                    .regions
                    .set_copying(parts.regions.map().region_of(blocks.first), false);
                parts.cx.changed = true;
                continue;
            }
            let on_source = self.candidates.is_on_source(blocks.first);
            let Some(slot) = self.free_slot() else {
                return;
            };
            if !self.may_copy(&mut parts.cx) {
                return;
            }
            if on_source && !parts.source.may_copy(parts.cx.now) {
                self.wake_at = parts.source.may_copy_at(parts.cx.now);
                return;
            }
            self.verification.take_first();
            parts.cx.pace.spend(blocks.bytes());
            let stage = if on_source {
                read(
                    Job::Verify(slot),
                    Device::Source,
                    blocks,
                    slot,
                    &mut parts.cx,
                );
                Stage::ComparingSource(extent.unanswered)
            } else {
                self.verification.expect_zeros(slot);
                read(Job::Verify(slot), Device::Data, blocks, slot, &mut parts.cx);
                Stage::ComparingData
            };
            self.begin(slot, blocks, extent.wanted, stage);
        }
    }

    /// An extent was read again, or not.
    pub(crate) fn verify_read_ended<M: Memory>(
        &mut self,
        slot: u16,
        result: Result<(), Failure>,
        parts: &mut Parts,
        memory: &M,
    ) {
        let Some(copy) = self.copy_in(slot).copied() else {
            return;
        };
        let content = &memory.extent(slot)[..copy.blocks.bytes() as usize];
        let Stage::ComparingSource(unanswered) = copy.stage else {
            return self.compare(slot, &copy, result, content, parts);
        };
        match result {
            Ok(()) => {
                self.verification.expect(slot, content);
                parts.source.answers(&mut parts.cx);
                if parts.cx.closing {
                    self.drop_copy(slot, parts);
                } else {
                    self.begin(slot, copy.blocks, copy.wanted, Stage::ComparingData);
                    read(
                        Job::Verify(slot),
                        Device::Data,
                        copy.blocks,
                        slot,
                        &mut parts.cx,
                    );
                }
            }
            Err(Failure::Unreachable) if !unanswered || parts.source.is_away() => {
                if !unanswered {
                    parts.source.went_away(&mut parts.cx);
                }
                self.copies[usize::from(slot)] = None;
                self.verification.push(&copy, 0, true);
            }
            Err(failure) => {
                // It could be read before: copying it again will tell.
                if failure == Failure::Unreachable {
                    self.is_unanswered(copy.blocks, Some(FIRST_RETRY), parts);
                } else {
                    parts.source.answers(&mut parts.cx);
                }
                self.drop_copy(slot, parts);
            }
        }
    }

    /// Compare an extent: what is the same is local from now on.
    fn compare(
        &mut self,
        slot: u16,
        copy: &Copy,
        result: Result<(), Failure>,
        content: &[u8],
        parts: &mut Parts,
    ) {
        self.drop_copy(slot, parts);
        // What else is remote in the region has waited for it.
        self.idle_until = Time(0);
        let verification = &mut self.verification;
        let compared = verification.compare(slot, copy, result, content, parts.cx.rules);
        let first = copy.blocks.first;
        for at in compared.differ_again.iter() {
            self.candidates.differs(first + at);
        }
        self.arrived(first, compared.same, 0, &mut parts.regions);
        let differ = [(compared.differ, false), (compared.differ_again, true)];
        for (blocks, again) in differ {
            let Some(at) = blocks.iter().next() else {
                continue;
            };
            parts.cx.notify(Notice::Differs {
                offset: (first + at).start().0,
                length: (blocks.count() * BLOCK_SIZE) as u32,
                again,
            });
            // It may not read as zeros where nobody has written, and is copied
            // again before anything else.
            self.holes = false;
            self.candidates
                .return_to(parts.regions.map().region_of(first + at));
        }
    }
}

/// Read an extent from either side into its buffer.
fn read(job: Job, device: Device, blocks: Blocks, slot: u16, cx: &mut Context) {
    let bytes = Bytes::new(blocks.first.start(), blocks.end.start());
    cx.read(job, device, bytes, Buffer::Extent { slot, offset: 0 });
}
