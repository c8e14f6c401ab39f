// SPDX-License-Identifier: Apache-2.0
#![no_main]

use libfuzzer_sys::fuzz_target;
use localstor_hydrator_core::format::journal::{
    ENTRY, HEADER, MAX_ENTRIES, SECTOR, SECTORS, Window, decode_header, entries, headers, is_lost,
    v1,
};

fuzz_target!(|input: ([u8; 16], u8, Window4, Vec<u8>)| {
    let (move_id, index, (epoch, settled, tail, place), bytes) = input;
    let index = usize::from(index) % SECTORS;
    let _ = decode_header(&move_id, index, &bytes);
    if let Some(header) = v1::decode_header(&move_id, &bytes) {
        assert!(v1::entries(&header, &bytes).count() <= usize::from(header.entries));
    }
    // The same with a checksum that fits, so that the figures are looked at.
    let mut sector = bytes;
    sector.resize(SECTOR, 0);
    let count = usize::from(u16::from_le_bytes([sector[4], sector[5]])) % (MAX_ENTRIES + 1);
    sector[4..6].copy_from_slice(&(count as u16).to_le_bytes());
    sector[40..44].copy_from_slice(&(index as u32).to_le_bytes());
    let here = count.saturating_sub(index * (SECTOR - HEADER) / ENTRY);
    let end = HEADER + here.min((SECTOR - HEADER) / ENTRY) * ENTRY;
    let crc = crc32c::crc32c_append(crc32c::crc32c(&move_id), &sector[4..end]);
    sector[..4].copy_from_slice(&crc.to_le_bytes());
    if let Ok(header) = decode_header(&move_id, index, &sector) {
        assert!(header.settled < header.sequence);
        assert!(entries(&header, index, &sector).count() <= count);
    }
    let window = Window {
        epoch,
        settled: settled.into(),
        tail: tail.into(),
    };
    let mut block = vec![0; SECTOR * SECTORS];
    block[index * SECTOR..(index + 1) * SECTOR].copy_from_slice(&sector);
    let place = u64::from(place % 8);
    let _ = is_lost(&headers(&move_id, place, 8, &block), &window, place, 8);
});

type Window4 = (u64, u32, u32, u8);
