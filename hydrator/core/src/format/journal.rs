// SPDX-License-Identifier: Apache-2.0

//! A block of the journal, as it lies on the metadata device.
//!
//! Block `sequence` lies at `sequence` modulo the journal's length. Each of its
//! eight sectors has header and checksum of its own and stands for itself: any
//! of them may be missing after a power cut, as they are written in parallel
//! and only flushed when the guest flushes, but a disk writes a sector or does
//! not. So a sector that is none, in a journal that was written from end to end
//! when it was new, was not left by a power cut: it is damaged. `FORMAT.md` has
//! the layout.

use crate::format::bytes::{u32_at, u64_at};
use crate::units::BLOCK_SIZE;

pub mod v1;

/// Length of a sector, in bytes.
pub const SECTOR: usize = 512;
/// Sectors in a block.
pub const SECTORS: usize = BLOCK_SIZE as usize / SECTOR;
/// Length of a sector's header, in bytes.
pub const HEADER: usize = 44;
/// Length of an entry, in bytes.
pub const ENTRY: usize = 12;
/// The most entries in a sector.
pub const SECTOR_ENTRIES: usize = (SECTOR - HEADER) / ENTRY;
/// The most entries in a block.
pub const MAX_ENTRIES: usize = SECTORS * SECTOR_ENTRIES;

/// Up to here the header is the same in all sectors of a block.
const COMMON: usize = 40;

const KIND_SHIFT: u32 = 62;
const BLOCK_MASK: u64 = (1 << KIND_SHIFT) - 1;

/// What the head of a sector says; the same in all sectors of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The epoch it was written in; 0 if the journal was new.
    pub epoch: u64,
    /// The block's number, from 1 on in each epoch.
    pub sequence: u64,
    /// Intents in blocks up to this one are local whatever the disk holds.
    pub settled: u64,
    /// Blocks before this one no longer count: the bitmap has it all.
    pub tail: u64,
    /// Number of entries in the block.
    pub entries: u16,
}

impl Header {
    /// Of a block of a new journal, that lies at `place` of so many.
    #[must_use]
    pub const fn new(place: u64, blocks: u64) -> Self {
        Self {
            epoch: 0,
            sequence: place + blocks,
            settled: 0,
            tail: 0,
            entries: 0,
        }
    }

    /// What stands for an epoch in which nothing was written yet.
    pub(crate) const fn of_epoch(epoch: u64) -> Self {
        Self {
            epoch,
            sequence: 1,
            settled: 0,
            tail: 0,
            entries: 0,
        }
    }

    /// How many of the block's entries are in sector `index` of it.
    #[must_use]
    pub fn entries_in(&self, index: usize) -> usize {
        usize::from(self.entries)
            .saturating_sub(index * SECTOR_ENTRIES)
            .min(SECTOR_ENTRIES)
    }
}

/// What is said of a block of the volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// It is being written, and will have this [`checksum`].
    Intent {
        /// Number of the block.
        block: u64,
        /// Of its new content.
        checksum: u32,
    },
    /// These blocks are local, whatever the disk holds.
    Local {
        /// Number of the first.
        block: u64,
        /// How many.
        count: u32,
    },
    /// The write failed: intents in earlier journal blocks don't count.
    Void {
        /// Number of the block.
        block: u64,
    },
}

/// Why a sector of the journal is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Damaged {
    /// Not what was written there.
    #[error("it does not have the checksum of this move and place")]
    Checksum,
    /// Not what this program writes, though the checksum fits.
    #[error("its figures are out of bounds")]
    Bounds,
}

/// CRC-32C of a block's content, bound to block and epoch, before any content.
#[must_use]
pub fn checksum_seed(epoch: u64, block: u64) -> u32 {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&epoch.to_le_bytes());
    bytes[8..].copy_from_slice(&block.to_le_bytes());
    crc32c::crc32c(&bytes)
}

/// CRC-32C of a block's content, bound to block and epoch.
#[must_use]
pub fn checksum(epoch: u64, block: u64, content: &[u8]) -> u32 {
    crc32c::crc32c_append(checksum_seed(epoch, block), content)
}

/// Write entry number `index` into the block.
///
/// # Panics
/// If the index is [`MAX_ENTRIES`] or more, or `block` is shorter than 4 KiB.
pub fn encode_entry(entry: Entry, index: usize, block: &mut [u8]) {
    assert!(index < MAX_ENTRIES);
    let (kind, number, value) = match entry {
        Entry::Intent { block, checksum } => (0, block, checksum),
        Entry::Local { block, count } => (1, block, count),
        Entry::Void { block } => (2, block, 0),
    };
    let sector = index / SECTOR_ENTRIES * SECTOR;
    let at = sector + HEADER + index % SECTOR_ENTRIES * ENTRY;
    block[at..at + 8].copy_from_slice(&(kind << KIND_SHIFT | number & BLOCK_MASK).to_le_bytes());
    block[at + 8..at + 12].copy_from_slice(&value.to_le_bytes());
}

/// Write the headers over entries that are in the block already.
///
/// # Panics
/// If `block` is shorter than 4 KiB.
pub fn encode_header(move_id: &[u8; 16], header: &Header, block: &mut [u8]) {
    let mut head = [0; COMMON];
    head[4..6].copy_from_slice(&header.entries.to_le_bytes());
    head[8..16].copy_from_slice(&header.epoch.to_le_bytes());
    head[16..24].copy_from_slice(&header.sequence.to_le_bytes());
    head[24..32].copy_from_slice(&header.settled.to_le_bytes());
    head[32..40].copy_from_slice(&header.tail.to_le_bytes());
    let common = crc32c::crc32c_append(crc32c::crc32c(move_id), &head[4..]);
    for index in 0..SECTORS {
        let sector = &mut block[index * SECTOR..(index + 1) * SECTOR];
        let end = HEADER + header.entries_in(index) * ENTRY;
        sector[..COMMON].copy_from_slice(&head);
        sector[COMMON..HEADER].copy_from_slice(&(index as u32).to_le_bytes());
        sector[end..].fill(0);
        let crc = crc32c::crc32c_append(common, &sector[COMMON..end]);
        sector[0..4].copy_from_slice(&crc.to_le_bytes());
    }
}

/// Read the header of sector `index` of a block, whatever it holds.
///
/// # Errors
/// If it is none.
pub fn decode_header(move_id: &[u8; 16], index: usize, sector: &[u8]) -> Result<Header, Damaged> {
    if sector.len() != SECTOR {
        return Err(Damaged::Bounds);
    }
    let header = Header {
        entries: u16::from_le_bytes([sector[4], sector[5]]),
        epoch: u64_at(sector, 8),
        sequence: u64_at(sector, 16),
        settled: u64_at(sector, 24),
        tail: u64_at(sector, 32),
    };
    let crc = sector_checksum(move_id, index, &header, sector);
    if u32_at(sector, 0) != crc || u32_at(sector, COMMON) as usize != index {
        return Err(Damaged::Checksum);
    }
    if usize::from(header.entries) > MAX_ENTRIES
        || header.sequence == 0
        || header.settled >= header.sequence
        || header.tail > header.sequence
    {
        return Err(Damaged::Bounds);
    }
    Ok(header)
}

fn sector_checksum(move_id: &[u8; 16], index: usize, header: &Header, sector: &[u8]) -> u32 {
    let end = HEADER + header.entries_in(index) * ENTRY;
    crc32c::crc32c_append(crc32c::crc32c(move_id), &sector[4..end])
}

/// Make sector `index` of a block of one move's journal that of another's. What
/// is none of the one's stays as it is, unless that would be one of the other's.
pub(super) fn rename_sector(old: &[u8; 16], new: &[u8; 16], index: usize, sector: &mut [u8]) {
    if let Ok(header) = decode_header(old, index, sector) {
        let crc = sector_checksum(new, index, &header, sector);
        sector[0..4].copy_from_slice(&crc.to_le_bytes());
    } else if decode_header(new, index, sector).is_ok() {
        sector[0] ^= 0xff;
    }
}

/// The entries of sector `index` of a block, whose header was read; what cannot
/// be understood is left out.
pub fn entries<'a>(
    header: &Header,
    index: usize,
    sector: &'a [u8],
) -> impl Iterator<Item = Entry> + 'a {
    decode_entries(
        sector.get(HEADER..).unwrap_or_default(),
        header.entries_in(index),
    )
}

fn decode_entries(bytes: &[u8], count: usize) -> impl Iterator<Item = Entry> + '_ {
    bytes.chunks_exact(ENTRY).take(count).filter_map(|bytes| {
        let word = u64_at(bytes, 0);
        let value = u32_at(bytes, 8);
        let block = word & BLOCK_MASK;
        match word >> KIND_SHIFT {
            0 => Some(Entry::Intent {
                block,
                checksum: value,
            }),
            1 => Some(Entry::Local {
                block,
                count: value,
            }),
            2 => Some(Entry::Void { block }),
            _ => None,
        }
    })
}

/// What a journal says of itself: the newest epoch in it, and of that epoch the
/// highest settled number and the highest tail.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Window {
    /// Of the newest block.
    pub epoch: u64,
    /// Blocks up to this one were flushed.
    pub settled: u64,
    /// Blocks before this one don't count.
    pub tail: u64,
}

impl Window {
    /// Take a header into account; whether it is of an epoch that makes all
    /// that was seen before void.
    pub fn see(&mut self, header: &Header) -> bool {
        let newer = header.epoch > self.epoch;
        if newer {
            *self = Self {
                epoch: header.epoch,
                ..Self::default()
            };
        }
        if header.epoch == self.epoch {
            self.settled = self.settled.max(header.settled);
            self.tail = self.tail.max(header.tail);
        }
        newer
    }

    /// The block that counts, or would, at a place of a journal of so many.
    #[must_use]
    pub const fn sequence_at(&self, place: u64, blocks: u64) -> u64 {
        let tail = if self.tail == 0 { 1 } else { self.tail };
        tail + (place + blocks - tail % blocks) % blocks
    }
}

/// The headers of the sectors of a block that lies at `place` of a journal of
/// so many; `None` for what is none, or belongs elsewhere.
#[must_use]
pub fn headers(
    move_id: &[u8; 16],
    place: u64,
    blocks: u64,
    block: &[u8],
) -> [Option<Header>; SECTORS] {
    let mut headers = [None; SECTORS];
    let sectors = block.chunks_exact(SECTOR).enumerate();
    for (header, (index, sector)) in headers.iter_mut().zip(sectors) {
        *header = decode_header(move_id, index, sector)
            .ok()
            .filter(|header| header.sequence % blocks == place);
    }
    headers
}

/// The number of the block that these bytes are, of a journal of so many blocks:
/// None unless each of its sectors is there, and of this epoch.
#[must_use]
pub fn whole(move_id: &[u8; 16], blocks: u64, epoch: u64, block: &[u8]) -> Option<u64> {
    let first = decode_header(move_id, 0, block.get(..SECTOR)?).ok()?;
    let sequence = first.sequence;
    let headers = headers(move_id, sequence % blocks, blocks, block);
    let same = |header: &Header| (header.epoch, header.sequence) == (epoch, sequence);
    let whole = headers
        .iter()
        .all(|header| header.is_some_and(|header| same(&header)));
    whole.then_some(sequence)
}

/// Whether what is found at the place of a block is of this epoch, and of a later
/// block.
#[must_use]
pub fn is_later(
    move_id: &[u8; 16],
    blocks: u64,
    (epoch, sequence): (u64, u64),
    found: &[u8],
) -> bool {
    let headers = headers(move_id, sequence % blocks, blocks, found);
    let mut there = headers.iter().flatten();
    there.any(|header| header.epoch == epoch && header.sequence > sequence)
}

/// Whether a block may have said something that is lost: the sectors at `place`
/// of a journal of so many blocks have these headers.
///
/// Of a block that was flushed all sectors are there. A power cut leaves some of
/// the other blocks as they were before, or each of their sectors old or new,
/// but never a sector that is none.
#[must_use]
pub fn is_lost(
    headers: &[Option<Header>; SECTORS],
    window: &Window,
    place: u64,
    blocks: u64,
) -> bool {
    let sequence = window.sequence_at(place, blocks);
    let counts = |header: &Header| header.epoch == window.epoch && header.sequence == sequence;
    let entries_in = |index: usize| {
        let sibling = headers.iter().flatten().find(|header| counts(header));
        sibling.map(|header| header.entries_in(index))
    };
    if sequence <= window.settled {
        // What says something is there, or else it is lost.
        return (0..SECTORS).any(|index| {
            !headers[index].is_some_and(|header| counts(&header)) && entries_in(index) != Some(0)
        });
    }
    let mut whole = headers.iter().flatten();
    let Some(first) = whole.next() else {
        return true;
    };
    // Of two blocks: the newer one never arrived, the older one is not needed.
    let torn = whole.any(|header| (header.epoch, header.sequence) != (first.epoch, first.sequence));
    !torn
        && counts(first)
        && (0..SECTORS).any(|index| headers[index].is_none() && first.entries_in(index) > 0)
}
