// SPDX-License-Identifier: Apache-2.0

//! A block of the journal as version 1 of the format has it: one header and one
//! checksum for all of it. It is only read, by an opening that goes on to the
//! present version.

use super::{Entry, Header, decode_entries};
use crate::format::bytes::{u32_at, u64_at};
use crate::units::BLOCK_SIZE;

const HEADER: usize = 64;
const MAX_ENTRIES: usize = (BLOCK_SIZE as usize - HEADER) / super::ENTRY;

/// Read the header of a block, whatever it holds; `None` if it was never
/// written, is torn, or is of another move.
#[must_use]
pub fn decode_header(move_id: &[u8; 16], block: &[u8]) -> Option<Header> {
    let count = block.get(4..6)?;
    let entries = u16::from_le_bytes([count[0], count[1]]);
    if usize::from(entries) > MAX_ENTRIES {
        return None;
    }
    let content = block.get(4..HEADER + usize::from(entries) * super::ENTRY)?;
    if u32_at(block, 0) != crc32c::crc32c_append(crc32c::crc32c(move_id), content) {
        return None;
    }
    let header = Header {
        epoch: u64_at(block, 8),
        sequence: u64_at(block, 16),
        settled: u64_at(block, 24),
        tail: u64_at(block, 32),
        entries,
    };
    let holds =
        header.sequence > 0 && header.settled < header.sequence && header.tail <= header.sequence;
    holds.then_some(header)
}

/// The entries of a block whose header was read.
pub fn entries<'a>(header: &Header, block: &'a [u8]) -> impl Iterator<Item = Entry> + 'a {
    decode_entries(
        block.get(HEADER..).unwrap_or_default(),
        usize::from(header.entries),
    )
}
