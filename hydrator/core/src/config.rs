// SPDX-License-Identifier: Apache-2.0

//! What a volume is opened with.

use core::time::Duration;

use crate::format::superblock::{Superblock, Unreadable, VERSION, bitmap_blocks, journal_blocks};
use crate::units::BLOCK_SIZE;

/// What a volume is opened with.
#[derive(Clone, Debug)]
pub struct Config {
    /// The move's id; metadata of another move are refused.
    pub move_id: [u8; 16],
    /// Size of the volume, in bytes; a multiple of 4096.
    pub size: u64,
    /// What there is of it on the source, in bytes, a multiple of 4096; the
    /// rest reads as zeros.
    pub source_size: u64,
    /// 512 or 4096 bytes; the same on all three devices.
    pub logical_block_size: u32,
    /// Size of the metadata device, in bytes.
    pub metadata_size: u64,
    /// The destination reads as zeros where it was never written, or was
    /// discarded (a thin volume). Only [`Volume::format`](crate::Volume::format)
    /// looks at it: after that the superblock says so.
    pub destination_zeroed: bool,
    /// The most guest requests at once.
    pub requests: usize,
    /// Buffers of 4 KiB: at least 16; 64 are plenty.
    pub block_slots: u16,
    /// The most extents copied at once, and the buffers there are for them.
    pub copies: u16,
    /// Blocks in a region, the unit of hydration: a power of two, 256 at most.
    pub region_blocks: u32,
    /// Blocks of a region that are written at once beside the guest's requests, a
    /// power of two: a disk has channels left for the guest then. They become more
    /// where a disk takes so long for each that less than the minimum is copied.
    pub piece_blocks: u32,
    /// The most journal writes in flight. More of them let a write with FUA start
    /// its intent sooner; fewer put more intents into one. Where nothing waits for
    /// more than that the kernel has them, it is one at a time.
    pub journal_depth: usize,
    /// The most blocks that are local but not settled at once.
    pub unsettled: usize,
    /// The journal is condensed, instead of the bitmap written, if the bitmap
    /// has more changed sectors than this for each block that it takes.
    pub condense_above: u64,
    /// A discard (or write of zeroes) of more blocks than these is recorded as
    /// a range, after a flush of the destination; smaller ones go like writes.
    pub range_from: u32,
    /// How long a read waits for a source that does not answer; for ever if
    /// `None`.
    pub source_timeout: Option<Duration>,
    /// How fast to copy.
    pub rate: Rate,
    /// How much of what was copied is compared with the source.
    pub verify: Verify,
}

/// How much of what was copied is read again, from the destination and from the
/// source, and compared before it counts as local.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Verify {
    /// Nothing.
    #[default]
    Off,
    /// One region of each 64.
    Sample,
    /// All of it.
    Full,
}

/// How fast to copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// Bytes per second; as fast as the guest's latency allows if `None`.
    pub limit: Option<u64>,
    /// Bytes per second that are copied whatever the guest does.
    pub minimum: u64,
}

impl Config {
    /// For a volume of `size` bytes that is there in full on its source.
    #[must_use]
    pub fn new(move_id: [u8; 16], size: u64, metadata_size: u64) -> Self {
        Self {
            move_id,
            size,
            source_size: size,
            logical_block_size: 512,
            metadata_size,
            destination_zeroed: false,
            requests: 256,
            block_slots: 64,
            copies: 8,
            region_blocks: 256,
            piece_blocks: 16,
            journal_depth: 4,
            unsettled: 32768,
            condense_above: 32,
            range_from: 64,
            source_timeout: None,
            rate: Rate {
                limit: None,
                minimum: 10 << 20,
            },
            verify: Verify::Off,
        }
    }

    /// Size of a buffer for an extent, in bytes.
    #[must_use]
    pub const fn extent_size(&self) -> usize {
        self.region_blocks as usize * BLOCK_SIZE as usize
    }

    /// The superblock of a volume that has none yet.
    ///
    /// # Errors
    /// What cannot work.
    pub(crate) fn superblock(&self) -> Result<Superblock, &'static str> {
        let superblock = Superblock {
            version: VERSION,
            move_id: self.move_id,
            generation: 0,
            epoch: 1,
            size: self.size,
            source_size: self.source_size,
            logical_block_size: self.logical_block_size,
            journal_blocks: journal_blocks(self.size),
            bitmap_blocks: bitmap_blocks(self.size),
            started: false,
            complete: false,
            zeroed: self.destination_zeroed,
            unreadable: Unreadable::default(),
        };
        let holds = [
            (
                superblock.check().is_ok(),
                "sizes must be multiples of 4096 bytes, up to 64 TiB, \
                 the source's not the larger, logical blocks of 512 or 4096 bytes",
            ),
            (self.requests > 0, "there must be room for a request"),
            (self.block_slots >= 16, "there must be 16 blocks or more"),
            (self.copies > 0, "there must be a buffer for copies"),
            (
                self.region_blocks.is_power_of_two() && self.region_blocks <= 256,
                "a region's blocks must be a power of two, up to 256",
            ),
            (
                self.piece_blocks.is_power_of_two(),
                "a piece's blocks must be a power of two",
            ),
            (
                self.range_from > 0 && self.range_from <= 256,
                "a range must begin at 1 to 256 blocks",
            ),
            (
                self.journal_depth > 0 && self.unsettled >= 512,
                "journal depth must be 1, unsettled blocks 512 at least",
            ),
        ];
        match holds.iter().find(|(holds, _)| !holds) {
            Some((_, what)) => Err(what),
            None => Ok(superblock),
        }
    }
}
