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

use crate::config::{Config, Verify};
use crate::copier::candidates::remove_all;
use crate::copier::copy::Copy;
use crate::io::Failure;
use crate::regions::Mask;
use crate::rules::{Rule, Rules};
use crate::units::{BLOCK_SIZE, Block, Blocks, Region};

/// With [`Verify::Sample`], one region of so many is verified.
const SAMPLE_OF: u64 = 64;
/// The destination is flushed for what waits when there are so many blocks of
/// it (32 MiB),
const FLUSH_BLOCKS: u64 = 8192;
/// or so many extents.
const FLUSH_EXTENTS: usize = 64;
/// Nothing is copied while so many extents wait.
const WAITING_MOST: usize = 4 * FLUSH_EXTENTS;

const ZEROS: [u8; BLOCK_SIZE as usize] = [0; BLOCK_SIZE as usize];

/// An extent that was copied and is to be compared.
#[derive(Clone, Copy, Debug)]
pub(super) struct Waiting {
    pub(super) blocks: Blocks,
    /// Blocks that the guest has written to meanwhile are not in it.
    pub(super) wanted: Mask,
    /// Flushes submitted when it was written.
    after: u64,
    /// The source has not answered when it was to be compared.
    pub(super) unanswered: bool,
}

/// What waits since so many flushes had been submitted.
#[derive(Clone, Copy, Debug, Default)]
struct Unflushed {
    after: u64,
    blocks: u64,
    extents: usize,
}

/// What waits to be compared, and what was found.
#[derive(Debug)]
pub(super) struct Verification {
    wanted: Verify,
    move_id: [u8; 16],
    region_blocks: usize,
    waiting: VecDeque<Waiting>,
    /// What waits since the last flush was submitted.
    unflushed: Unflushed,
    /// Of the source's blocks, for each buffer that is being compared.
    checksums: Vec<u32>,
    /// Blocks that differed once.
    doubtful: BTreeSet<Block>,
    /// Bytes that were the same.
    pub(super) verified: u64,
    /// Blocks that were not, each time.
    pub(super) differences: u64,
}

impl Verification {
    pub(super) fn new(config: &Config) -> Self {
        let region_blocks = config.region_blocks as usize;
        let checksums = match config.verify {
            Verify::Off => 0,
            _ => usize::from(config.copies) * region_blocks,
        };
        Self {
            wanted: config.verify,
            move_id: config.move_id,
            region_blocks,
            waiting: VecDeque::new(),
            unflushed: Unflushed::default(),
            checksums: vec![0; checksums],
            doubtful: BTreeSet::new(),
            verified: 0,
            differences: 0,
        }
    }

    /// Whether what is copied of a region, one of so many, is compared.
    pub(super) fn is_for(&self, Region(region): Region, regions: u64) -> bool {
        match self.wanted {
            Verify::Off => false,
            Verify::Full => true,
            Verify::Sample => {
                // Each move looks at other places, so that no pattern on the
                // volume hides from all of them.
                let group = region / SAMPLE_OF;
                let members = (regions - group * SAMPLE_OF).min(SAMPLE_OF);
                let seed = crc32c::crc32c(&self.move_id);
                let chosen = crc32c::crc32c_append(seed, &group.to_le_bytes());
                region % SAMPLE_OF == u64::from(chosen) % members
            }
        }
    }

    /// An extent waits until what was written when so many flushes had been
    /// submitted is durable.
    pub(super) fn push(&mut self, copy: &Copy, after: u64, unanswered: bool) {
        if self.unflushed.after < after {
            self.unflushed = Unflushed {
                after,
                ..Unflushed::default()
            };
        }
        if self.unflushed.after == after {
            self.unflushed.blocks += copy.blocks.count();
            self.unflushed.extents += 1;
        }
        self.waiting.push_back(Waiting {
            blocks: copy.blocks,
            wanted: copy.wanted,
            after,
            unanswered,
        });
    }

    /// The first extent that waits, if it is durable by this flush.
    pub(super) fn first(&self, last_flush: u64) -> Option<Waiting> {
        let first = self.waiting.front();
        first.filter(|extent| extent.after < last_flush).copied()
    }

    /// It waits no longer.
    pub(super) fn take_first(&mut self) {
        self.waiting.pop_front();
    }

    /// Whether to flush the destination for what was written since so many
    /// flushes had been submitted: there is enough of it, or nothing else is to
    /// be done.
    pub(super) fn needs_flush(&self, submitted: u64, idle: bool) -> bool {
        let Unflushed {
            after,
            blocks,
            extents,
        } = self.unflushed;
        after == submitted && (idle || blocks >= FLUSH_BLOCKS || extents >= FLUSH_EXTENTS)
    }

    /// Whether copies must wait until some of them are compared.
    pub(super) fn holds_up(&self) -> bool {
        self.waiting.len() >= WAITING_MOST
    }

    /// What the guest writes to is not compared.
    pub(super) fn exclude(&mut self, block: Block) {
        for extent in &mut self.waiting {
            if extent.blocks.contains(block) {
                extent.wanted.clear(block - extent.blocks.first);
            }
        }
    }

    /// The guest has written to these blocks.
    pub(super) fn written(&mut self, blocks: Blocks) {
        remove_all(&mut self.doubtful, blocks);
    }

    fn checksums(&mut self, slot: u16) -> &mut [u32] {
        &mut self.checksums[usize::from(slot) * self.region_blocks..][..self.region_blocks]
    }

    /// What this buffer is compared with is beyond the source's end.
    pub(super) fn expect_zeros(&mut self, slot: u16) {
        self.checksums(slot).fill(crc32c::crc32c(&ZEROS));
    }

    /// What this buffer is compared with.
    pub(super) fn expect(&mut self, slot: u16, content: &[u8]) {
        let blocks = content.chunks_exact(BLOCK_SIZE as usize);
        for (block, checksum) in blocks.zip(self.checksums(slot)) {
            *checksum = crc32c::crc32c(block);
        }
    }

    /// Compare what the destination has of an extent, if it can be read.
    pub(super) fn compare(
        &mut self,
        slot: u16,
        copy: &Copy,
        result: Result<(), Failure>,
        content: &[u8],
        rules: Rules,
    ) -> Compared {
        let mut compared = Compared {
            same: copy.wanted,
            differ: Mask::default(),
            differ_again: Mask::default(),
        };
        let blocks = content.chunks_exact(BLOCK_SIZE as usize);
        let checksums = self.checksums(slot);
        let mut differs = Mask::default();
        for (at, (block, checksum)) in (0..).zip(blocks.zip(checksums)) {
            if copy.wanted.has(at) && (result.is_err() || crc32c::crc32c(block) != *checksum) {
                differs.set(at);
            }
        }
        for at in copy.wanted.iter() {
            let block = copy.blocks.first + at;
            let known = self.doubtful.remove(&block);
            if !differs.has(at) {
                continue;
            }
            if rules.keep(Rule::DifferenceStaysRemote) {
                compared.same.clear(at);
            }
            if known {
                compared.differ_again.set(at);
            } else {
                self.doubtful.insert(block);
                compared.differ.set(at);
            }
            self.differences += 1;
        }
        self.verified += compared.same.count() * BLOCK_SIZE;
        compared
    }
}

/// What a comparison has found, of the extent's blocks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Compared {
    /// They are the same on both sides.
    pub(super) same: Mask,
    /// They differ.
    pub(super) differ: Mask,
    /// They differ again.
    pub(super) differ_again: Mask,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::copier::copy::Stage;
    use crate::format::superblock::metadata_size;

    #[test]
    fn what_the_source_has_not_answered_does_not_hide_what_waits_for_a_flush() {
        let size = 1 << 30;
        let mut config = Config::new([1; 16], size, metadata_size(size));
        config.verify = Verify::Full;
        let mut verification = Verification::new(&config);
        let copy = Copy {
            blocks: Blocks::run(Block(0), 7),
            wanted: Mask::first(7),
            data: Mask::default(),
            zeros: Mask::default(),
            stage: Stage::ComparingData,
        };
        verification.push(&copy, 5, false);
        verification.push(&copy, 0, true);
        assert!(verification.needs_flush(5, true) && !verification.needs_flush(5, false));
        assert!(!verification.needs_flush(6, true));
    }
}
