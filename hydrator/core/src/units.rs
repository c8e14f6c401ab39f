// SPDX-License-Identifier: Apache-2.0

//! What is counted: blocks, regions, bytes, and blocks of the journal. Each has
//! a type of its own, so that none is taken for another.

use core::ops::{Add, Sub};

/// Size of a block of the map, of the journal and of the bitmap, in bytes.
pub const BLOCK_SIZE: u64 = 4096;

/// A block of the volume, by its number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Block(pub(crate) u64);

impl Block {
    /// Where it begins.
    pub(crate) const fn start(self) -> Offset {
        Offset(self.0 * BLOCK_SIZE)
    }

    /// The one after it.
    pub(crate) const fn next(self) -> Self {
        Self(self.0 + 1)
    }

    /// It alone.
    pub(crate) const fn alone(self) -> Blocks {
        Blocks::new(self, self.next())
    }
}

impl Add<u64> for Block {
    type Output = Self;

    fn add(self, count: u64) -> Self {
        Self(self.0 + count)
    }
}

impl Sub for Block {
    type Output = u64;

    fn sub(self, other: Self) -> u64 {
        self.0 - other.0
    }
}

/// Blocks side by side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Blocks {
    pub(crate) first: Block,
    /// The one after the last.
    pub(crate) end: Block,
}

impl Blocks {
    pub(crate) const fn new(first: Block, end: Block) -> Self {
        Self { first, end }
    }

    /// So many of them.
    pub(crate) const fn run(first: Block, count: u64) -> Self {
        Self::new(first, Block(first.0 + count))
    }

    /// How many they are.
    pub(crate) const fn count(self) -> u64 {
        self.end.0.saturating_sub(self.first.0)
    }

    pub(crate) const fn is_empty(self) -> bool {
        self.count() == 0
    }

    /// How many bytes they have.
    pub(crate) const fn bytes(self) -> u64 {
        self.count() * BLOCK_SIZE
    }

    pub(crate) fn iter(self) -> impl Iterator<Item = Block> {
        (self.first.0..self.end.0).map(Block)
    }

    pub(crate) const fn contains(self, block: Block) -> bool {
        self.first.0 <= block.0 && block.0 < self.end.0
    }

    pub(crate) const fn overlaps(self, other: Self) -> bool {
        self.first.0 < other.end.0 && other.first.0 < self.end.0
    }

    /// Those that are also in `other`.
    pub(crate) fn within(self, other: Self) -> Self {
        Self::new(self.first.max(other.first), self.end.min(other.end))
    }

    /// From this one on.
    pub(crate) const fn from(self, first: Block) -> Self {
        Self::new(first, self.end)
    }
}

/// A place on the volume, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Offset(pub(crate) u64);

impl Offset {
    /// The block that it is in.
    pub(crate) const fn block(self) -> Block {
        Block(self.0 / BLOCK_SIZE)
    }

    /// Whether a block begins there.
    pub(crate) const fn is_aligned(self) -> bool {
        self.0 % BLOCK_SIZE == 0
    }

    /// Where the next block begins, or this one.
    pub(crate) const fn align_up(self) -> Self {
        Self(self.0.next_multiple_of(BLOCK_SIZE))
    }

    /// Where the block that it is in begins.
    pub(crate) const fn align_down(self) -> Self {
        self.block().start()
    }
}

impl Add<u64> for Offset {
    type Output = Self;

    fn add(self, bytes: u64) -> Self {
        Self(self.0 + bytes)
    }
}

impl Sub for Offset {
    type Output = u64;

    fn sub(self, other: Self) -> u64 {
        self.0 - other.0
    }
}

/// Bytes side by side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Bytes {
    pub(crate) from: Offset,
    /// Behind the last.
    pub(crate) to: Offset,
}

impl Bytes {
    pub(crate) const fn new(from: Offset, to: Offset) -> Self {
        Self { from, to }
    }

    /// So many of them.
    pub(crate) const fn run(offset: u64, length: u64) -> Self {
        Self::new(Offset(offset), Offset(offset + length))
    }

    /// How many they are.
    pub(crate) const fn length(self) -> u64 {
        self.to.0 - self.from.0
    }

    /// The blocks that they lie in.
    pub(crate) const fn blocks(self) -> Blocks {
        Blocks::new(self.from.block(), Block(self.to.0.div_ceil(BLOCK_SIZE)))
    }

    /// Those that are in these blocks.
    pub(crate) fn within(self, blocks: Blocks) -> Self {
        let from = self.from.max(blocks.first.start());
        Self::new(from, self.to.min(blocks.end.start()).max(from))
    }
}

/// A region, the unit of hydration, by its number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Region(pub(crate) u64);

/// A block of the journal, by its number in this epoch, from 1 on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Sequence(pub(crate) u64);

impl Sequence {
    /// The one after it.
    pub(crate) const fn next(self) -> Self {
        Self(self.0 + 1)
    }

    /// The one before it; 0 has none.
    pub(crate) const fn before(self) -> Self {
        Self(self.0.saturating_sub(1))
    }
}

impl Sub for Sequence {
    type Output = u64;

    fn sub(self, other: Self) -> u64 {
        self.0.saturating_sub(other.0)
    }
}
