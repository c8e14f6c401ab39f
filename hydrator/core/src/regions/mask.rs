// SPDX-License-Identifier: Apache-2.0

//! Blocks of an extent, one bit each.

/// Blocks of an extent, counted from its first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Mask([u64; 4]);

impl Mask {
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

    /// Those of another one, too.
    pub(crate) fn add(&mut self, other: &Self) {
        for (word, more) in self.0.iter_mut().zip(other.0) {
            *word |= more;
        }
    }

    /// The same blocks, counted from so many blocks before.
    pub(crate) fn shifted(self, by: u64) -> Self {
        let mut shifted = Self::default();
        self.iter().for_each(|bit| shifted.set(bit + by));
        shifted
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0 == [0; 4]
    }

    pub(crate) fn iter(self) -> impl Iterator<Item = u64> {
        (0..).zip(self.0).flat_map(|(at, mut word)| {
            core::iter::from_fn(move || {
                let bit = word.trailing_zeros();
                // The lowest bit is taken away.
                word &= word.wrapping_sub(1);
                (bit < 64).then_some(at * 64 + u64::from(bit))
            })
        })
    }
}
