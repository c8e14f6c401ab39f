// SPDX-License-Identifier: Apache-2.0

//! How far a checkpoint is: what it is for, and what it does.

use crate::io::Time;
use crate::units::Sequence;

/// What is local is recorded at least so often, in nanoseconds.
pub(super) const CHECKPOINT_EVERY: u64 = 60_000_000_000;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Step {
    #[default]
    Idle,
    /// Waits for this flush.
    Flush(u64),
    /// Writes what the journal says once more, in fewer blocks.
    Condense,
    /// Writes the bitmap, from this block of it on.
    Bits(u64),
    /// Flushes the metadata.
    Sync,
}

/// What a checkpoint is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Purpose {
    /// What was copied is recorded, and nothing else.
    #[default]
    Copies,
    /// Room in the journal: its tail moves; the bitmap need not be written.
    Room,
    /// All of the bitmap is written, and the journal's tail moves.
    Bitmap,
}

/// The recording of what is local in the bitmap, or elsewhere in the journal.
#[derive(Debug, Default)]
pub(super) struct Checkpoint {
    /// Somebody needs room in the journal.
    pub(super) wanted: bool,
    pub(super) step: Step,
    pub(super) purpose: Purpose,
    /// Intents up to this one are recorded.
    pub(super) covers: Sequence,
    /// Blocks of the bitmap that are being written.
    pub(super) in_flight: u32,
    /// When all of the bitmap was written.
    pub(super) last: Time,
    pub(super) wake_at: Option<Time>,
}

impl Checkpoint {
    pub(super) fn is_idle(&self) -> bool {
        self.step == Step::Idle
    }
}
