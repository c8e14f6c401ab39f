// SPDX-License-Identifier: Apache-2.0

//! Blocks that are being written or local, but not settled.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use crate::units::{Block, Sequence};

/// What is known of a block that is not settled.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    /// A request writes it.
    pub(crate) busy: bool,
    /// It holds a write of this run that has completed.
    pub(crate) content: bool,
    /// The block of the journal with its latest intent; 0 if there is none.
    pub(crate) sequence: Sequence,
    /// What it holds is owed to the guest once more flushes than these have
    /// been submitted.
    pub(crate) owed_after: u64,
}

/// Multiplies by a number without pattern: block numbers are no one's secret,
/// and the guest that chooses them harms only itself.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct BlockHasher(u64);

impl Hasher for BlockHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u64(&mut self, number: u64) {
        let product = (self.0 ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = product ^ product >> 32;
    }
}

/// Blocks that are being written or local, but not settled.
pub(crate) type Unsettled = HashMap<Block, Entry, BuildHasherDefault<BlockHasher>>;
