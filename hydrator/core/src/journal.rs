// SPDX-License-Identifier: Apache-2.0

//! A block of the journal, as it lies on the metadata device.
//!
//! Block `sequence` lies at `sequence` modulo the journal's length. Each block
//! stands for itself: any of them may be missing after a power cut, as they
//! are written in parallel and only flushed when the guest flushes. `FORMAT.md`
//! has the layout.

use crate::superblock::{u32_at, u64_at};

/// Length of the header, in bytes.
pub const HEADER: usize = 64;
/// Length of an entry, in bytes.
pub const ENTRY: usize = 12;
/// The most entries in a block.
pub const MAX_ENTRIES: usize = (crate::BLOCK_SIZE as usize - HEADER) / ENTRY;

const KIND_SHIFT: u32 = 62;
const BLOCK_MASK: u64 = (1 << KIND_SHIFT) - 1;

/// What the head of a block says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The epoch it was written in.
    pub epoch: u64,
    /// Its number, from 1 on in each epoch.
    pub sequence: u64,
    /// Intents in blocks up to this one are local whatever the disk holds.
    pub settled: u64,
    /// Blocks before this one no longer count: the bitmap has it all.
    pub tail: u64,
    /// Number of entries.
    pub entries: u16,
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

/// Why a block of the journal does not count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Stale {
    /// Never written, torn, of another move or of another epoch.
    #[error("it does not have the checksum of this move and epoch")]
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
    let at = HEADER + index * ENTRY;
    block[at..at + 8].copy_from_slice(&(kind << KIND_SHIFT | number & BLOCK_MASK).to_le_bytes());
    block[at + 8..at + 12].copy_from_slice(&value.to_le_bytes());
}

/// Write the header over entries that are in the block already.
///
/// # Panics
/// If `block` is shorter than 4 KiB.
pub fn encode_header(move_id: &[u8; 16], header: &Header, block: &mut [u8]) {
    let end = HEADER + usize::from(header.entries) * ENTRY;
    block[..HEADER].fill(0);
    block[end..].fill(0);
    block[4..6].copy_from_slice(&header.entries.to_le_bytes());
    block[8..16].copy_from_slice(&header.epoch.to_le_bytes());
    block[16..24].copy_from_slice(&header.sequence.to_le_bytes());
    block[24..32].copy_from_slice(&header.settled.to_le_bytes());
    block[32..40].copy_from_slice(&header.tail.to_le_bytes());
    let crc = crc32c::crc32c_append(crc32c::crc32c(move_id), &block[4..end]);
    block[0..4].copy_from_slice(&crc.to_le_bytes());
}

/// Read the header of a block, whatever it holds.
///
/// # Errors
/// If it is none, or not whole.
pub fn decode_header(move_id: &[u8; 16], block: &[u8]) -> Result<Header, Stale> {
    let (Some(head), Some(count)) = (block.get(..HEADER), block.get(4..6)) else {
        return Err(Stale::Bounds);
    };
    let entries = u16::from_le_bytes([count[0], count[1]]);
    let end = HEADER + usize::from(entries) * ENTRY;
    if usize::from(entries) > MAX_ENTRIES {
        return Err(Stale::Checksum);
    }
    let content = block.get(4..end).ok_or(Stale::Bounds)?;
    if u32_at(head, 0) != crc32c::crc32c_append(crc32c::crc32c(move_id), content) {
        return Err(Stale::Checksum);
    }
    let header = Header {
        epoch: u64_at(head, 8),
        sequence: u64_at(head, 16),
        settled: u64_at(head, 24),
        tail: u64_at(head, 32),
        entries,
    };
    if header.sequence == 0 || header.settled >= header.sequence || header.tail > header.sequence {
        return Err(Stale::Bounds);
    }
    Ok(header)
}

/// The entries of a block whose header was read; what cannot be understood is
/// left out.
pub fn entries<'a>(header: &Header, block: &'a [u8]) -> impl Iterator<Item = Entry> + 'a {
    block
        .get(HEADER..)
        .unwrap_or_default()
        .chunks_exact(ENTRY)
        .take(usize::from(header.entries))
        .filter_map(|bytes| {
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
