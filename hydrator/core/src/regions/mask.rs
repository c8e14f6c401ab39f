// SPDX-License-Identifier: Apache-2.0

//! Blocks of an extent, one bit each.

/// Blocks of an extent, counted from its first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Mask([u64; 4]);

impl Mask {
    /// How many blocks it has room for.
    pub(crate) const BITS: u64 = 256;

    /// The first so many.
    pub(crate) fn first(count: u64) -> Self {
        let mut mask = Self::default();
        (0..count).for_each(|bit| mask.set(bit));
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

    pub(crate) fn is_empty(&self) -> bool {
        self.0 == [0; 4]
    }

    pub(crate) fn iter(self) -> impl Iterator<Item = u64> {
        (0..Self::BITS).filter(move |bit| self.has(*bit))
    }
}
