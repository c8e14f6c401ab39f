// SPDX-License-Identifier: Apache-2.0
//! What is in a block: the same four numbers all over it.
//!
//! What a block must hold is known to the last byte, so that it is compared and
//! never interpreted, except to tell what is there instead.

use std::fmt;

/// Bytes of a block.
pub const SIZE: usize = 4096;
/// Bytes that a disk writes as a whole, or not at all.
const SECTOR: usize = 512;
const WORD: usize = 32;

/// Memory that a disk can read to and write from without a cache between.
#[derive(Clone, PartialEq, Eq)]
#[repr(C, align(4096))]
pub struct Block(pub [u8; SIZE]);

impl Default for Block {
    fn default() -> Self {
        Self([0; SIZE])
    }
}

impl fmt::Debug for Block {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&describe(self))
    }
}

impl Block {
    /// Whether a write of `new` has come here, or was on its way when the power
    /// was cut: some sectors are those of `new`, and all others what was there
    /// before, which may be anything if it is not known.
    pub fn has_some_of(&self, new: &Self, before: Option<&Self>) -> bool {
        let is_new = |at| self.sector(at) == new.sector(at);
        let is_old = |at| before.is_none_or(|before| self.sector(at) == before.sector(at));
        let mut sectors = 0..SIZE / SECTOR;
        sectors.clone().any(is_new) && sectors.all(|at| is_new(at) || is_old(at))
    }

    fn sector(&self, at: usize) -> &[u8] {
        &self.0[at * SECTOR..(at + 1) * SECTOR]
    }
}

/// Which of the two kinds of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The first block of a zone.
    Header,
    /// One of its stamps.
    Stamp,
}

impl Kind {
    const ALL: [Self; 2] = [Self::Header, Self::Stamp];

    fn magic(self) -> u64 {
        u64::from_le_bytes(*match self {
            Self::Header => b"LabGuest",
            Self::Stamp => b"LabStamp",
        })
    }
}

/// What a block says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Content {
    /// Header or stamp.
    pub kind: Kind,
    /// Of the zone: a number by chance, from when it was first used.
    pub identity: u64,
    /// Bytes from the beginning of the disk.
    pub offset: u64,
    /// Of the stamp, or in a header of the last stamp that was flushed.
    pub number: u64,
}

impl Content {
    /// The block that says so.
    pub fn block(&self) -> Block {
        let mut block = Block::default();
        let numbers = [self.kind.magic(), self.identity, self.offset, self.number];
        for word in block.0.chunks_exact_mut(WORD) {
            for (piece, number) in word.chunks_exact_mut(8).zip(numbers) {
                piece.copy_from_slice(&number.to_le_bytes());
            }
        }
        block
    }

    /// What a block says, if it was written by us and is whole.
    pub fn of(block: &Block) -> Option<Self> {
        let content = Self::begins(&block.0)?;
        (content.block() == *block).then_some(content)
    }

    /// What a block says that may be torn: the newer of two that differ by
    /// one in their numbers.
    pub fn newest_of(block: &Block) -> Option<Self> {
        let newest = block
            .0
            .chunks_exact(SECTOR)
            .filter_map(Self::begins)
            .max_by_key(|content| content.number)?;
        let before = Self {
            number: newest.number.saturating_sub(1),
            ..newest
        };
        block
            .has_some_of(&newest.block(), Some(&before.block()))
            .then_some(newest)
    }

    /// What some bytes say that we may have written.
    fn begins(bytes: &[u8]) -> Option<Self> {
        let mut numbers = bytes.chunks_exact(8).map(|piece| {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(piece);
            u64::from_le_bytes(bytes)
        });
        let magic = numbers.next()?;
        Some(Self {
            kind: Kind::ALL.into_iter().find(|kind| kind.magic() == magic)?,
            identity: numbers.next()?,
            offset: numbers.next()?,
            number: numbers.next()?,
        })
    }
}

impl fmt::Display for Content {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            kind,
            identity,
            offset,
            number,
        } = self;
        let kind = match kind {
            Kind::Header => "header",
            Kind::Stamp => "stamp",
        };
        write!(
            formatter,
            "{kind} {number} of offset {offset} of {identity:016x}"
        )
    }
}

/// In words, what is in a block.
pub fn describe(block: &Block) -> String {
    match Content::of(block) {
        Some(content) => content.to_string(),
        None if block.0.iter().all(|byte| *byte == 0) => "zeros".into(),
        None => format!("nothing of ours: {:02x?}...", &block.0[..WORD]),
    }
}

#[cfg(test)]
mod tests;
