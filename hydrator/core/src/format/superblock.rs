// SPDX-License-Identifier: Apache-2.0

//! The superblock: whose metadata these are, and where they lie.
//!
//! There are two copies, in the first two 4 KiB blocks of the metadata device.
//! The second is written when the first is durable, and nothing relies on what
//! they say before both are: so either of them may be damaged. All of it lies in
//! the first 512 bytes, so that a write is there or not, never half. `FORMAT.md`
//! has the layout.

use crate::format::bitmap::BLOCKS_PER_BITMAP_BLOCK;
use crate::format::bytes::{u32_at, u64_at};
use crate::units::BLOCK_SIZE;

/// What a superblock begins with.
pub const MAGIC: [u8; 8] = *b"LSHYDRAT";
/// The version of the format of all metadata.
pub const VERSION: u32 = 2;
/// The one before, which is read and replaced when a volume is opened: its
/// superblocks were written in turn, its journal and bitmap began with zeros.
pub const VERSION_1: u32 = 1;
/// Volumes may have so many bytes: 64 TiB.
pub const MAX_SIZE: u64 = 64 << 40;
/// Where the journal begins, in blocks.
pub const JOURNAL_FIRST: u64 = 2;
/// The fewest blocks a journal may have.
pub const MIN_JOURNAL_BLOCKS: u64 = 8;
/// The most blocks a journal may have.
pub const MAX_JOURNAL_BLOCKS: u64 = 1 << 20;

/// The most intents that are kept for blocks of the destination that cannot be
/// read; each of these blocks has one at least.
pub const MAX_UNREADABLE: usize = 21;

const STARTED: u32 = 1;
const COMPLETE: u32 = 2;
const ZEROED: u32 = 4;
const CHECKED: usize = 508;
const UNREADABLE: usize = 88;
const UNREADABLE_LENGTH: usize = 20;

/// Content that a block of the volume may have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Intent {
    /// Number of the block.
    pub block: u64,
    /// The epoch that the checksum is bound to.
    pub epoch: u64,
    /// Of the content.
    pub checksum: u32,
}

/// Intents for blocks of which it is not known what they hold, because the
/// destination could not read them when the volume was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Unreadable {
    count: usize,
    intents: [Intent; MAX_UNREADABLE],
}

impl Unreadable {
    /// Add an intent; false if there is no room.
    #[must_use]
    pub fn push(&mut self, intent: Intent) -> bool {
        let Some(free) = self.intents.get_mut(self.count) else {
            return false;
        };
        *free = intent;
        self.count += 1;
        true
    }

    /// All of them.
    #[must_use]
    pub fn intents(&self) -> &[Intent] {
        &self.intents[..self.count.min(MAX_UNREADABLE)]
    }

    /// Whether it has any for this block.
    #[must_use]
    pub fn has(&self, block: u64) -> bool {
        self.intents().iter().any(|intent| intent.block == block)
    }
}

/// Whose metadata these are, and where they lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Superblock {
    /// Of the format: [`VERSION`] or [`VERSION_1`].
    pub version: u32,
    /// The move they belong to.
    pub move_id: [u8; 16],
    /// Counts the superblocks written; the higher one counts.
    pub generation: u64,
    /// Counts the times the volume was opened; the journal's blocks carry it.
    pub epoch: u64,
    /// Size of the volume, in bytes.
    pub size: u64,
    /// What there is of it on the source, in bytes.
    pub source_size: u64,
    /// 512 or 4096 bytes.
    pub logical_block_size: u32,
    /// Length of the journal, in blocks of 4 KiB; it begins at
    /// [`JOURNAL_FIRST`].
    pub journal_blocks: u64,
    /// Length of the bitmap, in blocks of 4 KiB; it follows the journal.
    pub bitmap_blocks: u64,
    /// The source is immutable: hydration may run.
    pub started: bool,
    /// Everything is local and in the bitmap.
    pub complete: bool,
    /// The destination reads as zeros where it was never written, or was
    /// discarded.
    pub zeroed: bool,
    /// Blocks that could not be read. Those that have become local since count
    /// no more.
    pub unreadable: Unreadable,
}

/// Why a superblock is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Damage {
    /// Fewer than 512 bytes.
    #[error("too short")]
    Short,
    /// Zeros.
    #[error("nothing was written there")]
    Empty,
    /// It cannot be read from the disk.
    #[error("it cannot be read")]
    Unreadable,
    /// It does not begin as one.
    #[error("not a superblock of localstor-hydrator")]
    Magic,
    /// The checksum is wrong.
    #[error("damaged: the checksum is wrong")]
    Checksum,
    /// Written by another version.
    #[error("of format version {0}, this program reads up to {VERSION}: use a newer one")]
    Version(u32),
    /// A figure is out of bounds.
    #[error("damaged: its {0} is out of bounds")]
    Bounds(&'static str),
}

impl Superblock {
    /// Where the bitmap begins, in blocks.
    #[must_use]
    pub const fn bitmap_first(&self) -> u64 {
        JOURNAL_FIRST + self.journal_blocks
    }

    /// Number of blocks of the volume.
    #[must_use]
    pub const fn blocks(&self) -> u64 {
        self.size / BLOCK_SIZE
    }

    /// Where version 1 has this one, in blocks.
    #[must_use]
    pub const fn location_v1(&self) -> u64 {
        self.generation & 1
    }

    /// Size that the metadata device must have, in bytes.
    #[must_use]
    pub const fn metadata_size(&self) -> u64 {
        (self.bitmap_first() + self.bitmap_blocks) * BLOCK_SIZE
    }

    /// Into the first 512 bytes of `block`; the rest becomes zeros.
    ///
    /// # Panics
    /// If `block` is shorter than 512 bytes.
    pub fn encode(&self, block: &mut [u8]) {
        block.fill(0);
        block[0..8].copy_from_slice(&MAGIC);
        block[8..12].copy_from_slice(&self.version.to_le_bytes());
        let flags = [
            (self.started, STARTED),
            (self.complete, COMPLETE),
            (self.zeroed, ZEROED),
        ];
        let flags = flags.iter().filter(|(holds, _)| *holds);
        let flags = flags.fold(0, |sum, (_, flag)| sum | flag);
        block[12..16].copy_from_slice(&flags.to_le_bytes());
        block[16..32].copy_from_slice(&self.move_id);
        block[32..40].copy_from_slice(&self.generation.to_le_bytes());
        block[40..48].copy_from_slice(&self.epoch.to_le_bytes());
        block[48..56].copy_from_slice(&self.size.to_le_bytes());
        block[56..64].copy_from_slice(&self.source_size.to_le_bytes());
        block[64..68].copy_from_slice(&self.logical_block_size.to_le_bytes());
        block[72..80].copy_from_slice(&self.journal_blocks.to_le_bytes());
        block[80..88].copy_from_slice(&self.bitmap_blocks.to_le_bytes());
        let unreadable = self.unreadable.intents();
        block[68..72].copy_from_slice(&(unreadable.len() as u32).to_le_bytes());
        let places = block[UNREADABLE..CHECKED].chunks_exact_mut(UNREADABLE_LENGTH);
        for (intent, bytes) in unreadable.iter().zip(places) {
            bytes[0..8].copy_from_slice(&intent.block.to_le_bytes());
            bytes[8..16].copy_from_slice(&intent.epoch.to_le_bytes());
            bytes[16..20].copy_from_slice(&intent.checksum.to_le_bytes());
        }
        let crc = crc32c::crc32c(&block[..CHECKED]);
        block[CHECKED..512].copy_from_slice(&crc.to_le_bytes());
    }

    /// From the first 512 bytes of `block`, whatever they are.
    ///
    /// # Errors
    /// What is wrong with them.
    pub fn decode(block: &[u8]) -> Result<Self, Damage> {
        let sector = block.get(..512).ok_or(Damage::Short)?;
        if sector.iter().all(|byte| *byte == 0) {
            return Err(Damage::Empty);
        }
        if sector[0..8] != MAGIC {
            return Err(Damage::Magic);
        }
        if crc32c::crc32c(&sector[..CHECKED]) != u32_at(sector, CHECKED) {
            return Err(Damage::Checksum);
        }
        let version = u32_at(sector, 8);
        if !matches!(version, VERSION | VERSION_1) {
            return Err(Damage::Version(version));
        }
        let flags = u32_at(sector, 12);
        let mut move_id = [0; 16];
        move_id.copy_from_slice(&sector[16..32]);
        let count = u32_at(sector, 68) as usize;
        let places = sector[UNREADABLE..CHECKED].chunks_exact(UNREADABLE_LENGTH);
        let mut unreadable = Unreadable::default();
        for bytes in places.take(count) {
            let intent = Intent {
                block: u64_at(bytes, 0),
                epoch: u64_at(bytes, 8),
                checksum: u32_at(bytes, 16),
            };
            if !unreadable.push(intent) {
                break;
            }
        }
        if count > MAX_UNREADABLE {
            return Err(Damage::Bounds("number of unreadable blocks"));
        }
        let found = Self {
            version,
            move_id,
            generation: u64_at(sector, 32),
            epoch: u64_at(sector, 40),
            size: u64_at(sector, 48),
            source_size: u64_at(sector, 56),
            logical_block_size: u32_at(sector, 64),
            journal_blocks: u64_at(sector, 72),
            bitmap_blocks: u64_at(sector, 80),
            started: flags & STARTED != 0,
            complete: flags & COMPLETE != 0,
            zeroed: flags & ZEROED != 0,
            unreadable,
        };
        found.check()?;
        Ok(found)
    }

    /// Whether the figures can be.
    ///
    /// # Errors
    /// Names the first that cannot.
    pub fn check(&self) -> Result<(), Damage> {
        let holds = [
            (self.generation < u64::MAX / 2, "generation"),
            (self.epoch > 0 && self.epoch < u64::MAX / 2, "epoch"),
            (
                self.size > 0 && self.size <= MAX_SIZE && self.size % BLOCK_SIZE == 0,
                "size",
            ),
            (
                self.source_size <= self.size && self.source_size % BLOCK_SIZE == 0,
                "source size",
            ),
            (
                matches!(self.logical_block_size, 512 | 4096),
                "logical block size",
            ),
            (
                (MIN_JOURNAL_BLOCKS..=MAX_JOURNAL_BLOCKS).contains(&self.journal_blocks),
                "journal",
            ),
            (
                self.bitmap_blocks >= bitmap_blocks(self.size)
                    && self.bitmap_blocks <= bitmap_blocks(MAX_SIZE),
                "bitmap",
            ),
        ];
        let inside = |intent: &Intent| intent.block < self.blocks();
        if !self.unreadable.intents().iter().all(inside) {
            return Err(Damage::Bounds("list of unreadable blocks"));
        }
        match holds.iter().find(|(holds, _)| !holds) {
            Some((_, name)) => Err(Damage::Bounds(name)),
            None => Ok(()),
        }
    }
}

/// Why no superblock can be chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unusable {
    /// Neither copy can be understood.
    Neither(Damage),
    /// One of version 1 can; the other cannot, and may have been the newer.
    NewerLost(Box<Superblock>),
}

/// Which of two copies counts.
///
/// # Errors
/// If none does for sure.
pub fn choose(copies: &[Result<Superblock, Damage>; 2]) -> Result<Superblock, Unusable> {
    match copies {
        // The first was written before the second, and nothing relied on it
        // before both were: whichever is there will do.
        [Ok(one), Ok(other)] if one.version == other.version => {
            Ok(if one.generation >= other.generation {
                *one
            } else {
                *other
            })
        }
        [Ok(found), _] if found.version == VERSION => Ok(*found),
        [_, Ok(found)] if found.version == VERSION => Ok(*found),
        // The first one of a new move, before there was a second.
        [Err(Damage::Empty), Ok(found)] if found.generation == 1 => Ok(*found),
        [Ok(found), _] | [_, Ok(found)] => Err(Unusable::NewerLost(Box::new(*found))),
        [Err(Damage::Magic | Damage::Empty), Err(damage)] | [Err(damage), _] => {
            Err(Unusable::Neither(*damage))
        }
    }
}

/// Blocks of the bitmap of a volume of `size` bytes.
#[must_use]
pub const fn bitmap_blocks(size: u64) -> u64 {
    size.div_ceil(BLOCK_SIZE).div_ceil(BLOCKS_PER_BITMAP_BLOCK)
}

/// Blocks of the journal of a volume of `size` bytes: one for 64 MiB, at least
/// 256 (1 MiB), at most 16384 (64 MiB).
///
/// A longer journal spreads the cost of a checkpoint over more writes.
#[must_use]
pub const fn journal_blocks(size: u64) -> u64 {
    let wanted = size >> 26;
    if wanted < 256 {
        256
    } else if wanted > 16384 {
        16384
    } else {
        wanted
    }
}

/// Size of the metadata device for a volume of `size` bytes, in bytes: two
/// superblocks, the journal, and 4 KiB of bitmap for each 126 MiB.
#[must_use]
pub const fn metadata_size(size: u64) -> u64 {
    (JOURNAL_FIRST + journal_blocks(size) + bitmap_blocks(size)) * BLOCK_SIZE
}
