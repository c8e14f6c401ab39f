// SPDX-License-Identifier: Apache-2.0

//! The bitmap of settled blocks, as it lies on the metadata device.
//!
//! Each sector of 512 bytes has a checksum of its own: a disk tears writes
//! between sectors, and as bits are only ever set, old and new sectors may
//! stand side by side. A new bitmap is written as one, from end to end: whatever
//! has no checksum is damaged. `FORMAT.md` has the layout.

use crate::format::bytes::{u32_at, u64_at};

/// Words of 64 blocks in a sector.
pub const WORDS_PER_SECTOR: usize = 63;
/// Blocks of the volume in a sector of the bitmap.
pub const BLOCKS_PER_SECTOR: u64 = WORDS_PER_SECTOR as u64 * 64;
/// Words of 64 blocks in a block of the bitmap.
pub const WORDS_PER_BITMAP_BLOCK: usize = WORDS_PER_SECTOR * 8;
/// Sectors in a block of 4 KiB.
pub(crate) const SECTORS_PER_BITMAP_BLOCK: u64 = 8;
/// Blocks of the volume in a block of 4 KiB of the bitmap.
pub const BLOCKS_PER_BITMAP_BLOCK: u64 = BLOCKS_PER_SECTOR * SECTORS_PER_BITMAP_BLOCK;

const MARK: [u8; 4] = *b"LSBM";

/// The sector's words do not have their checksum: damaged, or of another move.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the checksum is wrong")]
pub struct Damaged;

/// Write sector `index` of the bitmap into `sector`.
///
/// # Panics
/// If `words` is not [`WORDS_PER_SECTOR`] or `sector` not 512 bytes long.
pub fn encode_sector(move_id: &[u8; 16], index: u64, words: &[u64], sector: &mut [u8]) {
    assert_eq!(words.len(), WORDS_PER_SECTOR);
    encode_words(words, sector);
    sector[504..508].copy_from_slice(&MARK);
    let crc = checksum(move_id, index, &sector[..508]);
    sector[508..512].copy_from_slice(&crc.to_le_bytes());
}

/// Write the words of a sector, without what follows them.
pub(crate) fn encode_words(words: &[u64], sector: &mut [u8]) {
    for (bytes, word) in sector.chunks_exact_mut(8).zip(words) {
        bytes.copy_from_slice(&word.to_le_bytes());
    }
}

/// Read sector `index` of the bitmap from `sector`, whatever it holds.
///
/// # Errors
/// If it does not have its checksum, or is not 512 bytes long.
pub fn decode_sector(
    move_id: &[u8; 16],
    index: u64,
    sector: &[u8],
) -> Result<[u64; WORDS_PER_SECTOR], Damaged> {
    let mut words = [0; WORDS_PER_SECTOR];
    if sector.len() != 512 {
        return Err(Damaged);
    }
    if sector[504..508] != MARK || u32_at(sector, 508) != checksum(move_id, index, &sector[..508]) {
        return Err(Damaged);
    }
    for (word, bytes) in words.iter_mut().zip(sector.chunks_exact(8)) {
        *word = u64_at(bytes, 0);
    }
    Ok(words)
}

/// The same in version 1 of the format, where a sector of zeros is an empty one.
///
/// # Errors
/// As [`decode_sector`].
pub fn decode_sector_v1(
    move_id: &[u8; 16],
    index: u64,
    sector: &[u8],
) -> Result<[u64; WORDS_PER_SECTOR], Damaged> {
    if sector.iter().all(|byte| *byte == 0) {
        return Ok([0; WORDS_PER_SECTOR]);
    }
    decode_sector(move_id, index, sector)
}

/// Make sector `index` of one move's bitmap that of another's.
///
/// # Errors
/// If it is none of the one's; it is left as it is then.
pub(super) fn rename_sector(
    old: &[u8; 16],
    new: &[u8; 16],
    index: u64,
    sector: &mut [u8],
) -> Result<(), Damaged> {
    decode_sector(old, index, sector)?;
    let crc = checksum(new, index, &sector[..508]);
    sector[508..512].copy_from_slice(&crc.to_le_bytes());
    Ok(())
}

fn checksum(move_id: &[u8; 16], index: u64, bytes: &[u8]) -> u32 {
    let seed = crc32c::crc32c_append(crc32c::crc32c(move_id), &index.to_le_bytes());
    crc32c::crc32c_append(seed, bytes)
}
