// SPDX-License-Identifier: Apache-2.0

//! A copy of the metadata says for its move what the original says for its own.

use localstor_hydrator_core::Part;
use localstor_hydrator_core::format::bitmap::{self, WORDS_PER_SECTOR};
use localstor_hydrator_core::format::copy::MetadataCopy;
use localstor_hydrator_core::format::journal::{
    self, Entry, Header, MAX_ENTRIES, SECTOR, SECTORS, Window,
};
use localstor_hydrator_core::format::superblock::{JOURNAL_FIRST, Superblock, Unreadable, VERSION};
use proptest::prelude::*;

const OLD: [u8; 16] = *b"the move that is";
const NEW: [u8; 16] = *b"the copy's move.";
const JOURNAL: u64 = 8;
const EPOCH: u64 = 5;

fn copy() -> MetadataCopy {
    let original = Superblock {
        version: VERSION,
        move_id: OLD,
        generation: 7,
        epoch: EPOCH,
        size: 1 << 30,
        source_size: 1 << 29,
        logical_block_size: 512,
        journal_blocks: JOURNAL,
        bitmap_blocks: 9,
        started: true,
        complete: false,
        zeroed: true,
        unreadable: Unreadable::default(),
    };
    let window = Window {
        epoch: EPOCH,
        settled: 20,
        tail: 19,
    };
    let copy = MetadataCopy::new(&original, window, NEW);
    let renamed = Superblock {
        move_id: NEW,
        started: false,
        ..original
    };
    assert_eq!(copy.superblock(), &renamed);
    copy
}

/// A block of a journal with so many entries.
fn journal_block(move_id: &[u8; 16], epoch: u64, sequence: u64, entries: u16) -> Vec<u8> {
    let mut block = vec![0; 4096];
    for index in 0..entries {
        let intent = Entry::Intent {
            block: sequence * 1000 + u64::from(index),
            checksum: index.into(),
        };
        journal::encode_entry(intent, usize::from(index), &mut block);
    }
    let header = Header {
        epoch,
        sequence,
        settled: sequence - 1,
        tail: 1,
        entries,
    };
    journal::encode_header(move_id, &header, &mut block);
    block
}

/// All that a block of the journal says for a move.
fn said(move_id: &[u8; 16], place: u64, block: &[u8]) -> Vec<Option<(Header, Vec<Entry>)>> {
    let headers = journal::headers(move_id, place, JOURNAL, block);
    let sectors = block.chunks_exact(SECTOR).enumerate();
    let said = headers.into_iter().zip(sectors);
    said.map(|(header, (index, sector))| {
        header.map(|header| (header, journal::entries(&header, index, sector).collect()))
    })
    .collect()
}

/// What may lie in a sector of the journal.
#[derive(Clone, Copy, Debug)]
enum Lies {
    /// A sector of a block of this epoch and number.
    Of(u64, u64, u16),
    /// The same of the other move, that was here before.
    Foreign(u64, u64, u16),
    Garbage(u8),
}

fn lies() -> impl Strategy<Value = Lies> {
    let figures = || (EPOCH - 2..=EPOCH, 1..40u64, 0..=MAX_ENTRIES as u16);
    prop_oneof![
        4 => figures().prop_map(|(epoch, number, count)| Lies::Of(epoch, number, count)),
        1 => figures().prop_map(|(epoch, number, count)| Lies::Foreign(epoch, number, count)),
        1 => any::<u8>().prop_map(Lies::Garbage),
    ]
}

proptest! {
    #[test]
    fn a_block_of_the_journal_says_the_same_or_is_lost(
        place in 0..JOURNAL,
        all in lies(),
        others in proptest::collection::vec((0..SECTORS, lies()), 0..4),
    ) {
        let mut block = vec![0; 4096];
        let everywhere = (0..SECTORS).map(|index| (index, all));
        for (index, lies) in everywhere.chain(others) {
            let whole = match lies {
                Lies::Of(epoch, number, count) => journal_block(&OLD, epoch, number, count),
                Lies::Foreign(epoch, number, count) => journal_block(&NEW, epoch, number, count),
                Lies::Garbage(byte) => vec![byte; 4096],
            };
            let sector = index * SECTOR..(index + 1) * SECTOR;
            block[sector.clone()].copy_from_slice(&whole[sector]);
        }
        let before = said(&OLD, place, &block);
        let copy = copy();
        let headers = journal::headers(&OLD, place, JOURNAL, &block);
        let window = Window { epoch: EPOCH, settled: 20, tail: 19 };
        let lost = journal::is_lost(&headers, &window, place, JOURNAL);
        let turned = copy.turn(JOURNAL_FIRST + place, &mut block);
        prop_assert_eq!(turned.err(), lost.then_some(Part::Journal(place)));
        if !lost {
            prop_assert_eq!(said(&NEW, place, &block), before);
            prop_assert!(said(&OLD, place, &block).iter().all(Option::is_none));
        }
    }

    #[test]
    fn a_block_of_the_bitmap_has_the_same_bits_or_is_lost(
        number in 0..9u64,
        words in proptest::collection::vec(any::<u64>(), WORDS_PER_SECTOR),
        damage in proptest::option::of((0..4096usize, 1..=255u8)),
    ) {
        let mut block = vec![0; 4096];
        for (index, sector) in (number * 8..).zip(block.chunks_exact_mut(512)) {
            bitmap::encode_sector(&OLD, index, &words, sector);
        }
        if let Some((at, change)) = damage {
            block[at] ^= change;
        }
        let turned = copy().turn(JOURNAL_FIRST + JOURNAL + number, &mut block);
        let lost = damage.map(|(at, _)| Part::Bitmap(number * 8 + at as u64 / 512));
        prop_assert_eq!(turned.err(), lost);
        if lost.is_none() {
            for (index, sector) in (number * 8..).zip(block.chunks_exact(512)) {
                let found = bitmap::decode_sector(&NEW, index, sector);
                prop_assert_eq!(found.map(Vec::from), Ok(words.clone()));
            }
        }
    }
}
