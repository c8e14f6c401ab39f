// SPDX-License-Identifier: Apache-2.0
#![no_main]

use libfuzzer_sys::fuzz_target;
use localstor_hydrator_core::format::bitmap::{decode_sector, encode_sector};

fuzz_target!(|input: (u64, [u8; 16], Vec<u8>)| {
    let (index, move_id, bytes) = input;
    if let Ok(words) = decode_sector(&move_id, index, &bytes) {
        let mut again = [0; 512];
        encode_sector(&move_id, index, &words, &mut again);
        assert_eq!(decode_sector(&move_id, index, &again), Ok(words));
    }
});
