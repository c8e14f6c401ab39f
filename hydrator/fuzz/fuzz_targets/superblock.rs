// SPDX-License-Identifier: Apache-2.0
#![no_main]

use libfuzzer_sys::fuzz_target;
use localstor_hydrator_core::format::superblock::Superblock;

fuzz_target!(|bytes: &[u8]| {
    let _ = Superblock::decode(bytes);
    // The same with a checksum that fits, so that the figures are looked at.
    if bytes.len() >= 88 {
        let mut block = vec![0; 4096];
        let length = bytes.len().min(504);
        block[8..8 + length - 8].copy_from_slice(&bytes[8..length]);
        block[..8].copy_from_slice(b"LSHYDRAT");
        let version = 1 + u32::from(bytes[8] % 2);
        block[8..12].copy_from_slice(&version.to_le_bytes());
        let crc = crc32c::crc32c(&block[..508]);
        block[508..512].copy_from_slice(&crc.to_le_bytes());
        if let Ok(found) = Superblock::decode(&block) {
            let mut again = vec![0; 4096];
            found.encode(&mut again);
            assert_eq!(Superblock::decode(&again), Ok(found));
            assert!(found.metadata_size() > found.bitmap_first() * 4096);
        }
    }
});
