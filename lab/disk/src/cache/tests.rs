// SPDX-License-Identifier: Apache-2.0

use std::collections::BTreeSet;

use proptest::prelude::*;
use tempfile::NamedTempFile;

use super::*;

const SECTORS: u64 = 16;
const PLENTY: u64 = 1 << 20;

fn disk(limit: u64) -> (NamedTempFile, Cache) {
    let file = NamedTempFile::new().unwrap();
    file.as_file().set_len(SECTORS * SECTOR).unwrap();
    let cache = Cache::open(file.path(), limit, SECTOR).unwrap();
    (file, cache)
}

fn filled(sectors: u64, byte: u8) -> Content {
    Content::Data(vec![byte; (sectors * SECTOR) as usize])
}

/// The first byte of each sector, as a read sees it.
fn seen(cache: &Cache) -> Vec<u8> {
    let mut buffer = vec![0xee; (SECTORS * SECTOR) as usize];
    cache.read(0, &mut buffer).unwrap();
    for sector in buffer.chunks(SECTOR as usize) {
        assert!(
            sector.iter().all(|byte| *byte == sector[0]),
            "a torn sector"
        );
    }
    buffer
        .chunks(SECTOR as usize)
        .map(|sector| sector[0])
        .collect()
}

fn after_cut(cache: &mut Cache, lose: Lose) -> Vec<u8> {
    cache.cut_power(0, lose).unwrap();
    seen(cache)
}

#[test]
fn reads_see_what_was_not_flushed() {
    let (file, mut cache) = disk(PLENTY);
    cache.write(SECTOR, filled(3, 1)).unwrap();
    cache.write(2 * SECTOR, Content::Zeros(SECTOR)).unwrap();
    assert_eq!([0, 1, 0, 1, 0], seen(&cache)[..5]);
    let durable = std::fs::read(file.path()).unwrap();
    assert!(durable.iter().all(|byte| *byte == 0));
}

#[test]
fn a_flush_covers_what_completed_before_it_and_nothing_else() {
    let (_file, mut cache) = disk(PLENTY);
    cache.write(0, filled(1, 1)).unwrap();
    let submitted = cache.now();
    cache.write(0, filled(2, 2)).unwrap();
    cache.flush(submitted).unwrap();
    assert_eq!([2, 2], seen(&cache)[..2]);
    assert_eq!([1, 0], after_cut(&mut cache, Lose::Drop)[..2]);
}

#[test]
fn a_full_cache_writes_out_its_oldest() {
    let (_file, mut cache) = disk(2 * SECTOR);
    for sector in 0..3 {
        cache.write(sector * SECTOR, filled(1, 7)).unwrap();
    }
    assert_eq!([7, 0, 0], after_cut(&mut cache, Lose::Drop)[..3]);
}

#[test]
fn a_write_larger_than_the_cache_goes_through() {
    let (_file, mut cache) = disk(SECTOR);
    cache.write(0, filled(4, 7)).unwrap();
    assert_eq!(0, cache.held());
    assert_eq!([7, 7, 7, 7, 0], after_cut(&mut cache, Lose::Drop)[..5]);
}

#[test]
fn an_orderly_shutdown_loses_nothing() {
    let (_file, mut cache) = disk(PLENTY);
    cache.write(0, filled(4, 1)).unwrap();
    cache.write_out().unwrap();
    assert_eq!((0, 0), (cache.unflushed(), cache.held()));
    assert_eq!([1; 4], after_cut(&mut cache, Lose::Drop)[..4]);
}

#[test]
fn a_cut_tears_between_sectors() {
    let (_file, mut cache) = disk(PLENTY);
    cache.write(0, filled(SECTORS, 1)).unwrap();
    let losses = cache.cut_power(3, Lose::Tear).unwrap();
    assert_eq!(
        Losses {
            torn: 1,
            ..Losses::default()
        },
        losses
    );
    let left: BTreeSet<u8> = seen(&cache).into_iter().collect();
    assert_eq!(BTreeSet::from([0, 1]), left);
}

#[test]
fn the_same_seed_gives_the_same_disk() {
    let outcome = |seed| {
        let (_file, mut cache) = disk(PLENTY);
        for number in 0..20 {
            cache
                .write(number % 12 * SECTOR, filled(4, number as u8))
                .unwrap();
        }
        cache.cut_power(seed, Lose::Random).unwrap();
        seen(&cache)
    };
    let outcomes: BTreeSet<Vec<u8>> = (0..50).map(outcome).collect();
    assert!(outcomes.len() > 25, "only {} outcomes", outcomes.len());
    assert_eq!(outcome(7), outcome(7));
}

#[test]
fn every_outcome_that_may_be_comes_about() {
    let outcome = |seed| {
        let (_file, mut cache) = disk(PLENTY);
        cache.write(0, filled(1, 1)).unwrap();
        cache.write(0, filled(2, 2)).unwrap();
        cache.cut_power(seed, Lose::Random).unwrap();
        (seen(&cache)[0], seen(&cache)[1])
    };
    let outcomes: BTreeSet<(u8, u8)> = (0..500).map(outcome).collect();
    assert_eq!(
        BTreeSet::from([(0, 0), (0, 2), (1, 0), (1, 2), (2, 0), (2, 2)]),
        outcomes
    );
}

#[test]
fn requests_beyond_the_disk_are_refused() {
    let (_file, mut cache) = disk(PLENTY);
    for (offset, length) in [
        (SECTORS * SECTOR, SECTOR),
        ((SECTORS - 1) * SECTOR, 2 * SECTOR),
        (u64::MAX - 511, SECTOR),
        (100, SECTOR),
        (0, 100),
    ] {
        let refused = cache.write(offset, Content::Zeros(length));
        assert!(
            matches!(refused, Err(Error::Range { .. })),
            "{offset} {length}"
        );
        let mut buffer = vec![0; length as usize];
        assert!(matches!(
            cache.read(offset, &mut buffer),
            Err(Error::Range { .. })
        ));
    }
    assert_eq!(0, cache.unflushed());
}

#[test]
fn a_file_that_is_no_disk_is_refused() {
    let file = NamedTempFile::new().unwrap();
    for size in [0, 100] {
        file.as_file().set_len(size).unwrap();
        let refused = Cache::open(file.path(), PLENTY, SECTOR).err().unwrap();
        assert!(
            refused.to_string().contains(&format!("{size} bytes")),
            "{refused}"
        );
    }
    let refused = Cache::open(Path::new("/nowhere"), PLENTY, SECTOR)
        .err()
        .unwrap();
    assert!(refused.to_string().contains("/nowhere"), "{refused}");
}

fn disk_with_large_blocks() -> (NamedTempFile, Cache) {
    let file = NamedTempFile::new().unwrap();
    file.as_file().set_len(SECTORS * SECTOR).unwrap();
    let cache = Cache::open(file.path(), PLENTY, 8 * SECTOR).unwrap();
    (file, cache)
}

#[test]
fn a_large_block_is_never_torn() {
    for seed in 0..20 {
        let (_file, mut cache) = disk_with_large_blocks();
        cache.write(0, filled(SECTORS, 1)).unwrap();
        cache.cut_power(seed, Lose::Tear).unwrap();
        for block in seen(&cache).chunks(8) {
            assert!(block.iter().all(|byte| *byte == block[0]), "{block:?}");
        }
    }
}

#[test]
fn requests_for_a_part_of_a_large_block_are_refused() {
    let (_file, mut cache) = disk_with_large_blocks();
    for (offset, length) in [(SECTOR, 8 * SECTOR), (0, SECTOR)] {
        let refused = cache.write(offset, Content::Zeros(length)).unwrap_err();
        assert!(refused.to_string().contains("4096"), "{refused}");
    }
}

#[test]
fn a_disk_has_blocks_of_usual_sizes() {
    let (file, _cache) = disk(PLENTY);
    for block in [0, 256, 513, 8192] {
        let refused = Cache::open(file.path(), PLENTY, block).err().unwrap();
        assert!(matches!(refused, Error::Block(_)), "{block}: {refused}");
    }
    file.as_file().set_len(SECTOR).unwrap();
    assert!(matches!(
        Cache::open(file.path(), PLENTY, 4096),
        Err(Error::Size { .. })
    ));
}

/// Knows the allowed contents of each sector: the durable one, and those
/// written since. The last one is what reads see.
struct Model {
    sectors: Vec<Vec<u8>>,
    // For each sector how many of the contents completed before the moment
    // at which the flush under way was submitted.
    submitted: Vec<usize>,
}

impl Model {
    fn new() -> Self {
        Model {
            sectors: vec![vec![0]; SECTORS as usize],
            submitted: vec![],
        }
    }

    fn write(&mut self, sector: u64, count: u64, byte: u8) {
        for contents in &mut self.sectors[sector as usize..(sector + count) as usize] {
            contents.push(byte);
        }
    }

    fn submit_flush(&mut self) {
        self.submitted = self.sectors.iter().map(Vec::len).collect();
    }

    fn flush(&mut self) {
        for (contents, count) in self.sectors.iter_mut().zip(&self.submitted) {
            contents.drain(..count - 1);
        }
    }

    fn newest(&self) -> Vec<u8> {
        self.sectors
            .iter()
            .map(|contents| contents[contents.len() - 1])
            .collect()
    }

    fn durable(&self) -> Vec<u8> {
        self.sectors.iter().map(|contents| contents[0]).collect()
    }

    fn restart(&mut self, left: &[u8]) {
        for (contents, byte) in self.sectors.iter_mut().zip(left) {
            assert!(contents.contains(byte), "{byte} is none of {contents:?}");
            *contents = vec![*byte];
        }
    }
}

#[derive(Clone, Debug)]
enum Event {
    Write {
        sector: u64,
        count: u64,
    },
    Zero {
        sector: u64,
        count: u64,
    },
    Flush {
        completing_meanwhile: Option<(u64, u64)>,
    },
    Cut {
        seed: u64,
        lose: Lose,
    },
}

fn extent() -> impl Strategy<Value = (u64, u64)> {
    (0..SECTORS).prop_flat_map(|sector| (Just(sector), 1..=SECTORS - sector))
}

fn event() -> impl Strategy<Value = Event> {
    let lose = prop_oneof![
        Just(Lose::Keep),
        Just(Lose::Drop),
        Just(Lose::Tear),
        Just(Lose::Random)
    ];
    prop_oneof![
        6 => extent().prop_map(|(sector, count)| Event::Write { sector, count }),
        2 => extent().prop_map(|(sector, count)| Event::Zero { sector, count }),
        3 => proptest::option::of(extent())
            .prop_map(|completing_meanwhile| Event::Flush { completing_meanwhile }),
        1 => (any::<u64>(), lose).prop_map(|(seed, lose)| Event::Cut { seed, lose }),
    ]
}

fn play(limit: u64, events: Vec<Event>) {
    let (_file, mut cache) = disk(limit);
    let mut model = Model::new();
    for (byte, event) in (1..).zip(events) {
        match event {
            Event::Write { sector, count } => {
                cache.write(sector * SECTOR, filled(count, byte)).unwrap();
                model.write(sector, count, byte);
            }
            Event::Zero { sector, count } => {
                cache
                    .write(sector * SECTOR, Content::Zeros(count * SECTOR))
                    .unwrap();
                model.write(sector, count, 0);
            }
            Event::Flush {
                completing_meanwhile,
            } => {
                let submitted = cache.now();
                model.submit_flush();
                if let Some((sector, count)) = completing_meanwhile {
                    cache.write(sector * SECTOR, filled(count, byte)).unwrap();
                    model.write(sector, count, byte);
                }
                cache.flush(submitted).unwrap();
                model.flush();
            }
            Event::Cut { seed, lose } => {
                let left = after_seeded_cut(&mut cache, seed, lose);
                // A bounded cache may have written out more than it had to.
                if lose == Lose::Keep {
                    assert_eq!(model.newest(), left);
                } else if lose == Lose::Drop && limit == PLENTY {
                    assert_eq!(model.durable(), left);
                }
                model.restart(&left);
            }
        }
        assert_eq!(model.newest(), seen(&cache));
        assert!(cache.held() <= limit);
    }
}

fn after_seeded_cut(cache: &mut Cache, seed: u64, lose: Lose) -> Vec<u8> {
    let waiting = cache.unflushed() as u64;
    let losses = cache.cut_power(seed, lose).unwrap();
    assert_eq!(waiting, losses.kept + losses.dropped + losses.torn);
    seen(cache)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

    #[test]
    fn only_allowed_contents_survive(events in proptest::collection::vec(event(), 1..80)) {
        play(PLENTY, events);
    }

    #[test]
    fn only_allowed_contents_survive_a_small_cache(
        events in proptest::collection::vec(event(), 1..80)
    ) {
        play(20 * SECTOR, events);
    }
}
