// SPDX-License-Identifier: Apache-2.0

//! What is read from a disk may be anything.

use localstor_hydrator_core::bitmap::{WORDS_PER_SECTOR, decode_sector, encode_sector};
use localstor_hydrator_core::journal::{
    Entry, Header, decode_header, encode_entry, encode_header, entries,
};
use localstor_hydrator_core::superblock::{Damage, MAX_SIZE, Superblock, metadata_size};

const MOVE: [u8; 16] = *b"one move's own i";

fn superblock() -> Superblock {
    Superblock {
        move_id: MOVE,
        generation: 3,
        epoch: 2,
        size: 1 << 30,
        source_size: 1 << 29,
        logical_block_size: 512,
        journal_blocks: 256,
        bitmap_blocks: 9,
        started: true,
        complete: false,
    }
}

#[test]
fn a_superblock_is_read_as_it_was_written() {
    let mut block = [0xff; 4096];
    superblock().encode(&mut block);
    assert_eq!(Superblock::decode(&block), Ok(superblock()));
}

#[test]
fn no_changed_bit_of_a_superblock_goes_unnoticed() {
    let mut block = [0; 4096];
    superblock().encode(&mut block);
    for bit in 0..512 * 8 {
        block[bit / 8] ^= 1 << (bit % 8);
        assert!(Superblock::decode(&block).is_err(), "bit {bit}");
        block[bit / 8] ^= 1 << (bit % 8);
    }
}

#[test]
fn figures_out_of_bounds_are_refused_though_the_checksum_fits() {
    let wrong = [
        Superblock {
            size: MAX_SIZE + 4096,
            ..superblock()
        },
        Superblock {
            size: 4095,
            ..superblock()
        },
        Superblock {
            source_size: 2 << 30,
            ..superblock()
        },
        Superblock {
            logical_block_size: 1024,
            ..superblock()
        },
        Superblock {
            journal_blocks: u64::MAX,
            ..superblock()
        },
        Superblock {
            bitmap_blocks: 8,
            ..superblock()
        },
        Superblock {
            epoch: 0,
            ..superblock()
        },
    ];
    for superblock in wrong {
        let mut block = [0; 4096];
        superblock.encode(&mut block);
        let found = Superblock::decode(&block);
        assert!(matches!(found, Err(Damage::Bounds(_))), "{superblock:?}");
    }
}

#[test]
fn a_block_of_the_journal_is_read_as_it_was_written() {
    let written = [
        Entry::Intent {
            block: 77,
            checksum: 0xdead_beef,
        },
        Entry::Local { block: 5, count: 9 },
        Entry::Void { block: 1 << 40 },
    ];
    let header = Header {
        epoch: 4,
        sequence: 9,
        settled: 8,
        tail: 3,
        entries: 3,
    };
    let mut block = [0xff; 4096];
    for (index, entry) in written.into_iter().enumerate() {
        encode_entry(entry, index, &mut block);
    }
    encode_header(&MOVE, &header, &mut block);
    assert_eq!(decode_header(&MOVE, &block), Ok(header));
    assert!(entries(&header, &block).eq(written));
    assert!(decode_header(b"another move's i", &block).is_err());
    for torn in (512..4096).step_by(512) {
        let mut block = block;
        block[..512].copy_from_slice(&[0x33; 512]);
        assert!(decode_header(&MOVE, &block[..torn]).is_err());
    }
}

#[test]
fn a_sector_of_the_bitmap_is_read_as_it_was_written() {
    let mut words = [0; WORDS_PER_SECTOR];
    let mut sector = [0xff; 512];
    encode_sector(&MOVE, 8, &words, &mut sector);
    assert_eq!(decode_sector(&MOVE, 9, &sector), Ok(words), "empty");
    words[62] = 1 << 63;
    encode_sector(&MOVE, 8, &words, &mut sector);
    assert_eq!(decode_sector(&MOVE, 8, &sector), Ok(words));
    assert!(decode_sector(&MOVE, 9, &sector).is_err(), "misplaced");
    assert!(decode_sector(b"another move's i", 8, &sector).is_err());
    sector[100] ^= 1;
    assert!(decode_sector(&MOVE, 8, &sector).is_err(), "damaged");
}

#[test]
fn garbage_of_any_length_is_refused_without_a_panic() {
    let mut state = 1_u64;
    for length in (0..4200).step_by(7) {
        let garbage: Vec<u8> = (0..length)
            .map(|_| {
                state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
                (state >> 56) as u8
            })
            .collect();
        assert!(Superblock::decode(&garbage).is_err());
        assert!(decode_header(&MOVE, &garbage).is_err());
        assert!(decode_sector(&MOVE, 0, &garbage).is_err());
        let header = Header {
            epoch: 1,
            sequence: 1,
            settled: 0,
            tail: 0,
            entries: u16::MAX,
        };
        assert!(entries(&header, &garbage).count() <= length / 12);
    }
}

#[test]
fn metadata_are_as_large_as_the_format_says() {
    assert_eq!(metadata_size(1 << 30), (2 + 256 + 9) * 4096);
    assert_eq!(metadata_size(1 << 40), (2 + 16384 + 8323) * 4096);
    assert_eq!(metadata_size(16 << 40), (2 + 16384 + 133_153) * 4096);
}
