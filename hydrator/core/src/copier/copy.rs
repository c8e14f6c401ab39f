// SPDX-License-Identifier: Apache-2.0

//! An extent that is being copied, or compared.

use crate::regions::Mask;
use crate::units::{Block, Blocks};

/// What is being done with an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// It is read from the source. If that has not answered it before: the pause
    /// before this time, in nanoseconds.
    Reading(Option<u64>),
    /// It is written to the destination: so many writes are in flight, and
    /// whether one has failed.
    Writing(u32, bool),
    /// It is written, and the destination is looked at where the source has
    /// zeros.
    Looking,
    /// It is read from the source again; whether that has not answered it when
    /// it was to be compared before.
    ComparingSource(bool),
    /// It is read from the destination.
    ComparingData,
}

/// An extent that is being copied, or compared.
#[derive(Clone, Copy, Debug)]
pub(super) struct Copy {
    pub(super) blocks: Blocks,
    /// Blocks that the guest has written to meanwhile are not in it.
    pub(super) wanted: Mask,
    /// What is yet to be written.
    pub(super) data: Mask,
    /// Zeros of the source that the destination may have as well.
    pub(super) zeros: Mask,
    pub(super) stage: Stage,
}

impl Copy {
    /// Whether this block is to be on the destination because of it.
    pub(super) const fn wants(&self, block: Block) -> bool {
        self.blocks.contains(block) && self.wanted.has(block.0 - self.blocks.first.0)
    }

    pub(super) const fn is_being_written(&self) -> bool {
        matches!(self.stage, Stage::Writing(..) | Stage::Looking)
    }

    pub(super) const fn is_being_compared(&self) -> bool {
        matches!(self.stage, Stage::ComparingSource(_) | Stage::ComparingData)
    }

    /// The guest writes to this block.
    pub(super) fn exclude(&mut self, block: Block) {
        if self.blocks.contains(block) {
            self.wanted.clear(block - self.blocks.first);
            self.data.clear(block - self.blocks.first);
        }
    }
}
