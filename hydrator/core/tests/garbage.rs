// SPDX-License-Identifier: Apache-2.0

//! What is read from a disk may be anything.

use localstor_hydrator_core::format::bitmap::{
    WORDS_PER_SECTOR, decode_sector, decode_sector_v1, encode_sector,
};
use localstor_hydrator_core::format::journal::{
    Entry, Header, MAX_ENTRIES, SECTORS, Window, decode_header, encode_entry, encode_header,
    entries, is_lost, v1,
};
use localstor_hydrator_core::format::superblock::{
    Damage, Intent, MAX_SIZE, MAX_UNREADABLE, Superblock, Unreadable, Unusable, VERSION, VERSION_1,
    choose, metadata_size,
};

const MOVE: [u8; 16] = *b"one move's own i";

fn superblock() -> Superblock {
    Superblock {
        version: VERSION,
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
        zeroed: true,
        unreadable: Unreadable::default(),
    }
}

#[test]
fn a_superblock_has_room_for_what_cannot_be_read_and_knows_its_bounds() {
    let mut full = superblock();
    for number in 0..MAX_UNREADABLE as u64 {
        let intent = Intent {
            block: number,
            epoch: 2,
            checksum: 77,
        };
        assert!(full.unreadable.push(intent));
    }
    assert!(!full.unreadable.push(Intent::default()));
    let mut block = [0; 4096];
    full.encode(&mut block);
    assert_eq!(Superblock::decode(&block), Ok(full));
    block[68] = MAX_UNREADABLE as u8 + 1;
    let crc = crc32c::crc32c(&block[..508]);
    block[508..512].copy_from_slice(&crc.to_le_bytes());
    assert!(matches!(Superblock::decode(&block), Err(Damage::Bounds(_))));
    let mut outside = superblock();
    let behind = Intent {
        block: outside.blocks(),
        ..Intent::default()
    };
    assert!(outside.unreadable.push(behind));
    outside.encode(&mut block);
    assert!(matches!(Superblock::decode(&block), Err(Damage::Bounds(_))));
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
    for (index, sector) in block.chunks_exact(512).enumerate() {
        assert_eq!(decode_header(&MOVE, index, sector), Ok(header));
        let found: Vec<_> = entries(&header, index, sector).collect();
        assert_eq!(found, if index == 0 { &written[..] } else { &[] });
        assert!(decode_header(b"another move's i", index, sector).is_err());
        assert!(decode_header(&MOVE, (index + 1) % 8, sector).is_err());
        assert!(decode_header(&MOVE, index, &sector[..511]).is_err());
    }
}

#[test]
fn entries_of_a_full_block_are_read_from_all_of_its_sectors() {
    let mut block = [0; 4096];
    let intent = |number| Entry::Intent {
        block: number,
        checksum: number as u32,
    };
    for index in 0..MAX_ENTRIES {
        encode_entry(intent(index as u64), index, &mut block);
    }
    let header = Header {
        epoch: 4,
        sequence: 9,
        settled: 8,
        tail: 3,
        entries: MAX_ENTRIES as u16,
    };
    encode_header(&MOVE, &header, &mut block);
    let found: Vec<_> = block
        .chunks_exact(512)
        .enumerate()
        .flat_map(|(index, sector)| entries(&header, index, sector))
        .collect();
    assert!(found.into_iter().eq((0..MAX_ENTRIES as u64).map(intent)));
}

/// The headers of a block, whose sectors have these epochs and sequence
/// numbers, are damaged (`None`), and have so many entries in all.
fn block_of(sectors: [Option<(u64, u64)>; SECTORS], entries: u16) -> [Option<Header>; SECTORS] {
    sectors.map(|sector| {
        sector.map(|(epoch, sequence)| Header {
            epoch,
            sequence,
            settled: 0,
            tail: 0,
            entries,
        })
    })
}

#[test]
fn a_damaged_sector_counts_unless_it_said_nothing_or_was_not_needed() {
    const BLOCKS: u64 = 8;
    let window = Window {
        epoch: 5,
        settled: 12,
        tail: 10,
    };
    let all = |epoch, sequence| [Some((epoch, sequence)); SECTORS];
    let but = |sectors: [Option<(u64, u64)>; SECTORS], index: usize, other| {
        let mut sectors = sectors;
        sectors[index] = other;
        sectors
    };
    let nothing = [None; SECTORS];
    for (what, sectors, entries, place, lost) in [
        ("flushed, whole", all(5, 12), 1, 4, false),
        (
            "flushed, its first sector",
            but(all(5, 12), 0, None),
            1,
            4,
            true,
        ),
        (
            "flushed, no entries there",
            but(all(5, 12), 3, None),
            1,
            4,
            false,
        ),
        ("flushed, and there is an older one", all(5, 4), 1, 4, true),
        ("flushed, of another epoch", all(4, 12), 1, 4, true),
        ("flushed, nothing left", nothing, 1, 4, true),
        ("not flushed, whole", all(5, 14), 1, 6, false),
        ("not flushed, an older one", all(5, 6), 1, 6, false),
        ("not flushed, damaged", but(all(5, 14), 0, None), 1, 6, true),
        (
            "not flushed, no entries there",
            but(all(5, 14), 1, None),
            39,
            6,
            false,
        ),
        (
            "not flushed, entries there",
            but(all(5, 14), 1, None),
            40,
            6,
            true,
        ),
        ("not flushed, nothing left", nothing, 1, 6, true),
        ("before the tail", but(all(5, 6), 0, None), 1, 6, false),
        ("of an older epoch", but(all(4, 14), 0, None), 1, 6, false),
        (
            "torn",
            but(but(all(5, 14), 0, None), 7, Some((5, 6))),
            312,
            6,
            false,
        ),
    ] {
        let headers = block_of(sectors, entries);
        assert_eq!(is_lost(&headers, &window, place, BLOCKS), lost, "{what}");
    }
}

#[test]
fn either_superblock_may_be_damaged_as_they_are_written_one_after_the_other() {
    let older = superblock();
    let newer = Superblock {
        generation: 4,
        ..older
    };
    let damaged = Err(Damage::Checksum);
    for (copies, chosen) in [
        ([Ok(newer), Ok(newer)], newer),
        ([Ok(newer), Ok(older)], newer),
        ([Ok(newer), damaged], newer),
        ([damaged, Ok(older)], older),
        ([Err(Damage::Empty), Ok(older)], older),
    ] {
        assert_eq!(choose(&copies), Ok(chosen));
    }
    assert!(matches!(choose(&[damaged; 2]), Err(Unusable::Neither(_))));
}

#[test]
fn a_superblock_of_version_1_beside_a_damaged_one_may_be_the_older() {
    let first = Superblock {
        version: VERSION_1,
        generation: 1,
        ..superblock()
    };
    let later = Superblock {
        generation: 2,
        ..first
    };
    assert_eq!(choose(&[Ok(later), Ok(first)]), Ok(later));
    assert_eq!(choose(&[Err(Damage::Empty), Ok(first)]), Ok(first));
    for copies in [
        [Err(Damage::Checksum), Ok(first)],
        [Ok(later), Err(Damage::Unreadable)],
        [Ok(later), Err(Damage::Empty)],
    ] {
        assert!(matches!(choose(&copies), Err(Unusable::NewerLost(_))));
    }
    // On the way to this version; the new one is the first that is written.
    let new = superblock();
    assert_eq!(choose(&[Ok(new), Ok(later)]), Ok(new));
}

#[test]
fn a_sector_of_the_bitmap_is_read_as_it_was_written() {
    let mut words = [0; WORDS_PER_SECTOR];
    let mut sector = [0xff; 512];
    encode_sector(&MOVE, 8, &words, &mut sector);
    assert_eq!(decode_sector(&MOVE, 8, &sector), Ok(words), "empty");
    assert!(decode_sector(&MOVE, 8, &[0; 512]).is_err(), "zeros");
    assert_eq!(
        decode_sector_v1(&MOVE, 8, &[0; 512]),
        Ok(words),
        "version 1"
    );
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
        assert!(decode_header(&MOVE, 0, &garbage).is_err());
        assert!(v1::decode_header(&MOVE, &garbage).is_none());
        assert!(decode_sector(&MOVE, 0, &garbage).is_err());
        let header = Header {
            epoch: 1,
            sequence: 1,
            settled: 0,
            tail: 0,
            entries: u16::MAX,
        };
        assert!(entries(&header, 0, &garbage).count() <= length / 12);
    }
}

#[test]
fn metadata_are_as_large_as_the_format_says() {
    assert_eq!(metadata_size(1 << 30), (2 + 256 + 9) * 4096);
    assert_eq!(metadata_size(1 << 40), (2 + 16384 + 8323) * 4096);
    assert_eq!(metadata_size(16 << 40), (2 + 16384 + 133_153) * 4096);
}
