// SPDX-License-Identifier: Apache-2.0

//! Verification: what was copied is compared before it counts as local.
//!
//! An extent that is to be verified stays remote when it has been written to
//! the destination: reads of it go to the source, and what the guest writes is
//! taken out of it. A flush of the destination follows; then the extent is read
//! again, from the source and from the destination, and the blocks that are the
//! same on both become local. Those that differ stay remote and are copied
//! again, once. If they differ again they are left on the source, and the move
//! does not end.
//!
//! It happens *before* the blocks are local because that is the last moment at
//! which they must be as on the source: a settled block is the guest's, who
//! writes there without a word to us. So what the bitmap says of copied blocks
//! is what was verified, also after a crash: what was not is remote then, and
//! copied and compared anew. Nothing that the guest wrote is ever compared, nor
//! overwritten.

use std::collections::{BTreeSet, VecDeque};

use crate::config::Verify;
use crate::hydration::{Copy, Mask, Stage, remove_range};
use crate::rules::Rule;
use crate::source::FIRST_RETRY;
use crate::volume::{io, kind};
use crate::{Action, BLOCK_SIZE, Buffer, Config, Device, Failure, Memory, Notice, Time, Volume};

/// With [`Verify::Sample`], one region of so many is verified.
const SAMPLE_OF: u64 = 64;
/// The destination is flushed for what waits when there are so many blocks of
/// it (32 MiB),
const FLUSH_BLOCKS: u64 = 8192;
/// or so many extents.
const FLUSH_EXTENTS: usize = 64;
/// Nothing is copied while so many extents wait.
const WAITING_MOST: usize = 4 * FLUSH_EXTENTS;
/// Nothing is copied any more when so many blocks differ (16 MiB): such a
/// destination is of no use.
const DIFFERING_MOST: usize = 4096;

const ZEROS: [u8; BLOCK_SIZE as usize] = [0; BLOCK_SIZE as usize];

/// An extent that was copied and is to be compared.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    first: u64,
    count: u64,
    /// Blocks that the guest has written to meanwhile are not in it.
    wanted: Mask,
    /// Flushes submitted when it was written.
    after: u64,
    flushed: bool,
    /// The source has not answered when it was to be compared.
    unanswered: bool,
}

/// What waits to be compared, and what was found.
#[derive(Debug)]
pub(crate) struct Verification {
    waiting: VecDeque<Waiting>,
    /// Of the source's blocks, for each buffer that is being compared.
    checksums: Vec<u32>,
    /// Blocks that differed once.
    doubtful: BTreeSet<u64>,
    /// Blocks that differed again.
    pub(crate) differing: BTreeSet<u64>,
    /// Bytes that were the same.
    pub(crate) verified: u64,
    /// Blocks that were not, each time.
    pub(crate) differences: u64,
}

impl Verification {
    pub(crate) fn new(config: &Config) -> Self {
        let checksums = match config.verify {
            Verify::Off => 0,
            _ => usize::from(config.copies) * config.region_blocks as usize,
        };
        Self {
            waiting: VecDeque::new(),
            checksums: vec![0; checksums],
            doubtful: BTreeSet::new(),
            differing: BTreeSet::new(),
            verified: 0,
            differences: 0,
        }
    }

    /// What the guest writes to is not compared.
    pub(crate) fn exclude(&mut self, block: u64) {
        for extent in &mut self.waiting {
            if block >= extent.first && block < extent.first + extent.count {
                extent.wanted.clear(block - extent.first);
            }
        }
    }

    /// The guest has written to these blocks.
    pub(crate) fn written(&mut self, first: u64, end: u64) {
        for blocks in [&mut self.doubtful, &mut self.differing] {
            remove_range(blocks, first, end);
        }
    }

    /// This flush has ended.
    pub(crate) fn flushed(&mut self, flush: u64) {
        for extent in &mut self.waiting {
            extent.flushed |= extent.after < flush;
        }
    }

    /// Whether copies must wait until some of them are compared, or for good.
    pub(crate) fn holds_up(&self) -> bool {
        self.waiting.len() >= WAITING_MOST || self.differing.len() >= DIFFERING_MOST
    }

    fn checksums(&mut self, slot: u16, region_blocks: u32) -> &mut [u32] {
        let region_blocks = region_blocks as usize;
        &mut self.checksums[usize::from(slot) * region_blocks..][..region_blocks]
    }
}

impl Volume {
    /// Whether what is copied of a region is compared.
    pub(crate) fn is_verified(&self, region: u64) -> bool {
        match self.config.verify {
            _ if !self.rules.keep(Rule::VerifyBeforeLocal) => false,
            Verify::Off => false,
            Verify::Full => true,
            Verify::Sample => {
                // Each move looks at other places, so that no pattern on the
                // volume hides from all of them.
                let group = region / SAMPLE_OF;
                let members = (self.map.regions() - group * SAMPLE_OF).min(SAMPLE_OF);
                let seed = crc32c::crc32c(&self.config.move_id);
                let chosen = crc32c::crc32c_append(seed, &group.to_le_bytes());
                region % SAMPLE_OF == u64::from(chosen) % members
            }
        }
    }

    /// An extent was written to the destination: it waits for a flush.
    pub(crate) fn verify_later(&mut self, copy: &Copy) {
        self.verification.waiting.push_back(Waiting {
            first: copy.first,
            count: copy.count,
            wanted: copy.wanted,
            after: self.flushes.submitted,
            flushed: !self.rules.keep(Rule::FlushBeforeVerify),
            unanswered: false,
        });
    }

    /// Flush the destination if enough waits for that, or nothing else is to
    /// be done.
    pub(crate) fn flush_to_verify(&mut self, idle: bool) {
        let submitted = self.flushes.submitted;
        let unflushed = || {
            let waiting = self.verification.waiting.iter();
            waiting.filter(|extent| !extent.flushed && extent.after == submitted)
        };
        let blocks: u64 = unflushed().map(|extent| extent.count).sum();
        if blocks > 0 && (idle || blocks >= FLUSH_BLOCKS || unflushed().count() >= FLUSH_EXTENTS) {
            self.flushes.wanted = true;
            self.submit_flush();
        }
    }

    /// Begin to compare what is flushed, as much as may be.
    pub(crate) fn verify(&mut self, now: Time) {
        while let Some(extent) = self.verification.waiting.front().copied() {
            if !extent.flushed {
                return;
            }
            if extent.wanted.count() == 0 {
                self.verification.waiting.pop_front();
                self.map
                    .set_copying(self.map.region_of(extent.first), false);
                self.retry = true;
                continue;
            }
            let on_source = extent.first * BLOCK_SIZE < self.superblock.source_size;
            let Some(slot) = self.hydration.free_slot() else {
                return;
            };
            if !self.pace.may_copy(now) {
                self.hydration.wake_at = Some(self.pace.may_copy_at());
                return;
            }
            if on_source && !self.source.may_copy(now) {
                self.hydration.wake_at = self.source.may_copy_at(now);
                return;
            }
            self.verification.waiting.pop_front();
            self.pace.spend(extent.count * BLOCK_SIZE);
            let stage = Stage::ComparingSource;
            let mut copy = Copy::new(extent.first, extent.count, extent.wanted, stage);
            copy.backoff = extent.unanswered.then_some(FIRST_RETRY);
            self.hydration.begin(slot, copy);
            if on_source {
                self.read_to_verify(slot, &copy, Device::Source);
            } else {
                let zeros = crc32c::crc32c(&ZEROS);
                let region_blocks = self.config.region_blocks;
                self.verification.checksums(slot, region_blocks).fill(zeros);
                self.read_copy_back(slot, copy);
            }
        }
    }

    fn read_to_verify(&mut self, slot: u16, copy: &Copy, device: Device) {
        self.actions.push_back(Action::Read {
            io: io(kind::VERIFY, u64::from(slot)),
            device,
            offset: copy.first * BLOCK_SIZE,
            length: (copy.count * BLOCK_SIZE) as u32,
            buffer: Buffer::Extent { slot, offset: 0 },
        });
    }

    fn read_copy_back(&mut self, slot: u16, mut copy: Copy) {
        copy.stage = Stage::ComparingData;
        self.hydration.begin(slot, copy);
        self.read_to_verify(slot, &copy, Device::Data);
    }

    /// An extent was read again, or not.
    pub(crate) fn verify_read<M: Memory>(
        &mut self,
        now: Time,
        slot: u16,
        result: Result<(), Failure>,
        memory: &mut M,
    ) {
        let Some(copy) = self.hydration.copy_of(slot).copied() else {
            return;
        };
        let content = &memory.extent(slot)[..(copy.count * BLOCK_SIZE) as usize];
        let blocks = content.chunks_exact(BLOCK_SIZE as usize);
        let region_blocks = self.config.region_blocks;
        let checksums = self.verification.checksums(slot, region_blocks);
        if copy.stage == Stage::ComparingData {
            let mut differs = Mask::default();
            for (at, (block, checksum)) in (0..).zip(blocks.zip(checksums)) {
                if copy.wanted.has(at) && (result.is_err() || crc32c::crc32c(block) != *checksum) {
                    differs.set(at);
                }
            }
            return self.compared(slot, &copy, differs);
        }
        match result {
            Ok(()) => {
                for (block, checksum) in blocks.zip(checksums) {
                    *checksum = crc32c::crc32c(block);
                }
                self.source_answers();
                if self.is_closing() {
                    self.drop_copy(slot);
                } else {
                    self.read_copy_back(slot, copy);
                }
            }
            Err(Failure::Unreachable) if copy.backoff.is_none() || self.source.is_away() => {
                if copy.backoff.is_none() {
                    self.source_is_away(now);
                }
                self.hydration.end(slot);
                self.verification.waiting.push_back(Waiting {
                    first: copy.first,
                    count: copy.count,
                    wanted: copy.wanted,
                    after: 0,
                    flushed: true,
                    unanswered: true,
                });
            }
            Err(failure) => {
                // It could be read before: copying it again will tell.
                if failure == Failure::Unreachable {
                    self.copy_unanswered(now, &copy);
                } else {
                    self.source_answers();
                }
                self.drop_copy(slot);
            }
        }
    }

    /// An extent was compared: what is the same is local from now on.
    fn compared(&mut self, slot: u16, copy: &Copy, differs: Mask) {
        self.drop_copy(slot);
        // What else is remote in the region has waited for it.
        self.hydration.look_again();
        let mut same = copy.wanted;
        let mut found = [Found::default(); 2];
        for at in (0..copy.count).filter(|at| copy.wanted.has(*at)) {
            let block = copy.first + at;
            let known = self.verification.doubtful.remove(&block);
            if !differs.has(at) {
                continue;
            }
            if self.rules.keep(Rule::DifferenceStaysRemote) {
                same.clear(at);
            }
            if known {
                self.verification.differing.insert(block);
            } else {
                self.verification.doubtful.insert(block);
            }
            found[usize::from(known)].add(block);
        }
        self.verification.verified += same.count() * BLOCK_SIZE;
        self.arrived(copy.first, same, true);
        for (found, again) in found.iter().zip([false, true]) {
            let Some(first) = found.first else {
                continue;
            };
            self.verification.differences += found.count;
            self.actions.push_back(Action::Notice(Notice::Differs {
                offset: first * BLOCK_SIZE,
                length: (found.count * BLOCK_SIZE) as u32,
                again,
            }));
            // It may not read as zeros where nobody has written, and is copied
            // again before anything else.
            self.hydration.holes = false;
            self.hydration.return_to(self.map.region_of(first));
        }
    }
}

/// Blocks of an extent that differ.
#[derive(Clone, Copy, Debug, Default)]
struct Found {
    first: Option<u64>,
    count: u64,
}

impl Found {
    fn add(&mut self, block: u64) {
        self.first.get_or_insert(block);
        self.count += 1;
    }
}
