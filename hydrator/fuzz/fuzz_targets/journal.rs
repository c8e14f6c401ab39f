// SPDX-License-Identifier: Apache-2.0
#![no_main]

use libfuzzer_sys::fuzz_target;
use localstor_hydrator_core::journal::{MAX_ENTRIES, decode_header, entries};

fuzz_target!(|input: ([u8; 16], Vec<u8>)| {
    let (move_id, bytes) = input;
    let _ = decode_header(&move_id, &bytes);
    // The same with a checksum that fits, so that the figures are looked at.
    let mut block = bytes;
    block.resize(4096, 0);
    let count = usize::from(u16::from_le_bytes([block[4], block[5]])) % (MAX_ENTRIES + 1);
    block[4..6].copy_from_slice(&(count as u16).to_le_bytes());
    let crc = crc32c::crc32c_append(crc32c::crc32c(&move_id), &block[4..64 + 12 * count]);
    block[..4].copy_from_slice(&crc.to_le_bytes());
    if let Ok(header) = decode_header(&move_id, &block) {
        assert!(header.settled < header.sequence);
        assert!(entries(&header, &block).count() <= count);
    }
});
