// SPDX-License-Identifier: Apache-2.0

//! Cases that random walks come to too seldom.

use fastrand::Rng;
use localstor_hydrator_core::format::bitmap::{WORDS_PER_SECTOR, encode_sector};
use localstor_hydrator_core::format::journal::{
    Entry, Header, checksum, encode_entry, encode_header,
};
use localstor_hydrator_core::format::superblock::{Superblock, Unreadable, VERSION, VERSION_1};
use localstor_hydrator_core::{Config, Device, Failure, Notice, Operation, Request, Rule, Tag};
use localstor_hydrator_simulation::disk::{Disk, Rot, SECTOR};
use localstor_hydrator_simulation::machine::{Faults, Machine, Sent};

const BLOCK: usize = 4096;
const MOVE: [u8; 16] = [9; 16];

fn config(blocks: usize) -> Config {
    let mut config = Config::new(MOVE, (blocks * BLOCK) as u64, 64 << 20);
    config.region_blocks = 8;
    config
}

fn machine(config: &Config, rule: Option<Rule>, format: bool, metadata: Disk) -> Machine {
    let size = config.size as usize;
    Machine::new(
        config,
        rule,
        format.then_some(8),
        Disk::new(vec![0xdd; size]),
        metadata,
        vec![0x55; config.source_size as usize],
    )
}

fn new_machine(config: &Config, random: &mut Rng) -> Machine {
    let metadata = Disk::new(vec![0xaa; config.metadata_size as usize]);
    let mut machine = machine(config, None, true, metadata);
    machine.open(random).expect("a new volume opens");
    machine
}

fn submit(machine: &mut Machine, tag: u32, operation: Operation, offset: usize, content: Vec<u8>) {
    let request = Request {
        tag: Tag(tag),
        operation,
        offset: offset as u64,
        length: content.len() as u64,
    };
    machine.request(request, content);
}

fn result_of(machine: &mut Machine, tag: u32, random: &mut Rng) -> Result<Vec<u8>, Failure> {
    for _ in 0..100_000 {
        machine.pump(random);
        let found = machine
            .answers
            .iter()
            .position(|(other, _)| *other == Tag(tag));
        if let Some(at) = found {
            let (_, result) = machine.answers.swap_remove(at);
            let buffer = machine.take_buffer(Tag(tag));
            return result.map(|()| buffer);
        }
        machine.step(random);
    }
    panic!("request {tag} does not end");
}

fn write(machine: &mut Machine, offset: usize, content: Vec<u8>, random: &mut Rng) {
    let fua = Operation::Write { fua: true };
    submit(machine, 1, fua, offset, content);
    result_of(machine, 1, random).expect("a write succeeds");
}

/// A journal in which block 3's intent was taken back, and the record of that
/// overwritten after it had been recorded elsewhere; the older one is still
/// there, as the write that went over it was lost.
fn journal_gone_round(random: &mut Rng) -> Disk {
    let config = config(8);
    let mut disk = new_machine(&config, random).metadata;
    let epoch = Superblock::decode(disk.read(BLOCK, 512))
        .expect("the superblock of generation 1")
        .epoch;
    let groups = [
        (
            2,
            1,
            1,
            Entry::Intent {
                block: 3,
                checksum: checksum(epoch, 3, &[0x77; BLOCK]),
            },
        ),
        (
            11,
            8,
            9,
            Entry::Intent {
                block: 5,
                checksum: 0,
            },
        ),
    ];
    for (sequence, settled, tail, entry) in groups {
        let header = Header {
            epoch,
            sequence,
            settled,
            tail,
            entries: 1,
        };
        let mut block = vec![0; BLOCK];
        encode_entry(entry, 0, &mut block);
        encode_header(&MOVE, &header, &mut block);
        disk.set((2 + sequence as usize % 8) * BLOCK, &block);
    }
    disk
}

#[test]
fn blocks_of_the_journal_before_its_tail_do_not_count() {
    for (rule, expected) in [(None, 0x55), (Some(Rule::Tail), 0xdd)] {
        let mut random = Rng::with_seed(1);
        let disk = journal_gone_round(&mut random);
        let mut machine = machine(&config(8), rule, false, disk);
        machine.open(&mut random).expect("the volume opens");
        let content = machine.read_all(&mut random).expect("it can be read");
        assert_eq!(content[3 * BLOCK], expected, "{rule:?}");
    }
}

#[test]
fn a_long_unaligned_write_over_what_is_local_and_remote_survives_a_crash() {
    let mut random = Rng::with_seed(2);
    let mut config = config(1500);
    config.region_blocks = 256;
    let mut machine = new_machine(&config, &mut random);
    let mut expected = vec![0x55; config.size as usize];
    for (offset, length, byte) in [
        (600 * BLOCK, 7 * BLOCK, 1),
        (512, 1400 * BLOCK + 1024, 2),
        (3 * BLOCK, 900 * BLOCK, 3),
        (1499 * BLOCK + 3584, 512, 4),
    ] {
        write(&mut machine, offset, vec![byte; length], &mut random);
        expected[offset..offset + length].fill(byte);
    }
    assert!(machine.read_all(&mut random).expect("it can be read") == expected);
    let (data, metadata) = machine.cut_power_hard(&mut random);
    let source = machine.source.clone();
    let mut after = Machine::new(&config, None, None, data, metadata, source);
    after.open(&mut random).expect("the volume opens");
    assert!(after.read_all(&mut random).expect("it can be read") == expected);
}

#[test]
fn what_is_local_goes_on_while_the_source_is_away() {
    let mut random = Rng::with_seed(3);
    let mut machine = new_machine(&config(16), &mut random);
    machine.faults = Faults {
        away: 100,
        ..Faults::default()
    };
    submit(&mut machine, 7, Operation::Read, 0, vec![0; BLOCK]);
    for _ in 0..20 {
        machine.step(&mut random);
    }
    write(&mut machine, BLOCK, vec![1; BLOCK], &mut random);
    submit(&mut machine, 8, Operation::Read, BLOCK, vec![0; BLOCK]);
    let local = result_of(&mut machine, 8, &mut random);
    assert_eq!(local.expect("a local block can be read"), [1; BLOCK]);
    assert!(machine.notices.contains(&Notice::Stalled));
    assert!(machine.volume.progress().stalled);
    machine.faults.away = 0;
    let remote = result_of(&mut machine, 7, &mut random);
    assert_eq!(remote.expect("the source is back"), [0x55; BLOCK]);
    assert!(machine.notices.contains(&Notice::Resumed));
    assert!(!machine.volume.progress().stalled);
}

#[test]
fn writes_in_part_that_wait_for_the_source_do_not_hold_up_whole_ones() {
    let mut random = Rng::with_seed(31);
    let mut config = config(64);
    config.block_slots = 16;
    config.condense_above = 0;
    let mut machine = new_machine(&config, &mut random);
    machine.faults.away = 100;
    // All buffers but those that are kept for the metadata.
    for tag in 10..18 {
        let offset = (tag as usize - 10) * BLOCK;
        let part = Operation::Write { fua: false };
        submit(&mut machine, tag, part, offset, vec![1; 512]);
    }
    for block in 8..64 {
        write(&mut machine, block * BLOCK, vec![2; BLOCK], &mut random);
    }
}

#[test]
fn a_slow_write_does_not_have_the_bitmap_written_again_and_again() {
    let mut random = Rng::with_seed(32);
    let mut machine = new_machine(&config(16), &mut random);
    let plain = Operation::Write { fua: false };
    submit(&mut machine, 7, plain, 0, vec![1; BLOCK]);
    machine.pump(&mut random);
    let slow = machine.ops.iter().position(|op| op.device == Device::Data);
    let slow = machine.ops.remove(slow.expect("data are sent at once"));
    // The journal is more than half full of what can't leave it.
    for block in 1..6 {
        write(&mut machine, block * BLOCK, vec![2; BLOCK], &mut random);
    }
    let (begun, before) = (machine.now, machine.volume.progress().metadata_written);
    while machine.now.since(begun) < 10_000_000_000 {
        machine.step(&mut random);
        let written = machine.volume.progress().metadata_written - before;
        assert!(written < 10 * BLOCK as u64, "{written} bytes");
    }
    machine.ops.push(slow);
    result_of(&mut machine, 7, &mut random).expect("it ends at last");
}

#[test]
fn a_read_fails_when_the_source_was_away_for_too_long() {
    let mut random = Rng::with_seed(4);
    let mut config = config(16);
    config.source_timeout = Some(core::time::Duration::from_secs(30));
    let mut machine = new_machine(&config, &mut random);
    machine.faults.away = 100;
    let begun = machine.now;
    submit(&mut machine, 7, Operation::Read, 0, vec![0; BLOCK]);
    let failure = result_of(&mut machine, 7, &mut random);
    assert_eq!(failure, Err(Failure::Unreachable));
    assert!(machine.now.since(begun) >= 30_000_000_000);
}

#[test]
fn nobody_is_woken_for_a_source_that_is_away_and_not_wanted() {
    let mut random = Rng::with_seed(41);
    let mut config = config(16);
    config.source_timeout = Some(core::time::Duration::from_secs(1));
    let mut machine = new_machine(&config, &mut random);
    machine.faults.away = 100;
    submit(&mut machine, 7, Operation::Read, 0, vec![0; BLOCK]);
    let failure = result_of(&mut machine, 7, &mut random);
    assert_eq!(failure, Err(Failure::Unreachable));
    let (begun, mut turns) = (machine.now, 0);
    while machine.now.since(begun) < 10_000_000_000 && machine.step(&mut random) {
        turns += 1;
        assert!(turns < 100, "it never rests");
    }
}

#[test]
fn a_block_that_is_never_answered_holds_up_nothing_else() {
    let mut random = Rng::with_seed(42);
    let mut machine = new_machine(&config(64), &mut random);
    machine.faults.silent = vec![21];
    let read = Operation::Read;
    // Before anything is copied, too.
    submit(&mut machine, 9, read, 21 * BLOCK, vec![0; BLOCK]);
    for tag in 10..60 {
        let begun = machine.now;
        submit(&mut machine, tag, read, 22 * BLOCK, vec![0; BLOCK]);
        result_of(&mut machine, tag, &mut random).expect("others are answered");
        assert!(machine.now.since(begun) < 1_000_000, "and at once");
        machine.now = machine.now.after(70_000_000);
    }
    let begun = machine.now;
    machine.volume.start();
    while machine.volume.progress().remote > BLOCK as u64 {
        assert!(machine.step(&mut random));
    }
    assert!(machine.now.since(begun) < 2_000_000_000);
    let progress = machine.volume.progress();
    assert_eq!((progress.bad, progress.waiting), (0, 1));
    assert!(progress.stalled);
    while machine.now.since(begun) < 600_000_000_000 {
        assert!(machine.step(&mut random));
    }
    assert_eq!(machine.volume.progress().unanswered, 1);
    // It is asked for again, at once if somebody says so.
    machine.faults.silent.clear();
    let begun = machine.now;
    machine.volume.retry_source();
    let late = result_of(&mut machine, 9, &mut random);
    assert_eq!(late.expect("it is answered at last"), [0x55; BLOCK]);
    while !machine.notices.contains(&Notice::Done) {
        assert!(machine.step(&mut random));
    }
    assert!(machine.now.since(begun) < 200_000_000);
    assert_eq!(machine.volume.progress().unanswered, 0);
}

#[test]
fn a_read_fails_when_its_block_was_not_answered_for_too_long() {
    let mut random = Rng::with_seed(43);
    let mut config = config(64);
    config.source_timeout = Some(core::time::Duration::from_secs(30));
    let mut machine = new_machine(&config, &mut random);
    machine.faults.silent = vec![21];
    machine.volume.start();
    let begun = machine.now;
    submit(&mut machine, 7, Operation::Read, 21 * BLOCK, vec![0; BLOCK]);
    let failure = result_of(&mut machine, 7, &mut random);
    assert_eq!(failure, Err(Failure::Unreachable));
    let waited = machine.now.since(begun);
    assert!((30_000_000_000..40_000_000_000).contains(&waited));
}

/// Until the rest is copied of a volume on whose source these blocks are never
/// answered.
fn without_answers_of(silent: Vec<usize>, random: &mut Rng) -> Machine {
    let mut machine = new_machine(&config(8192), random);
    let left = (silent.len() * BLOCK) as u64;
    machine.faults.silent = silent;
    machine.volume.start();
    let begun = machine.now;
    while machine.volume.progress().remote > left {
        assert!(machine.step(random));
        let progress = machine.volume.progress();
        assert!(machine.now.since(begun) < 600_000_000_000, "{progress:?}");
    }
    machine
}

fn end_when_answered(machine: &mut Machine, random: &mut Rng) {
    machine.faults.silent.clear();
    machine.volume.retry_source();
    while !machine.notices.contains(&Notice::Done) {
        assert!(machine.step(random));
    }
}

#[test]
fn a_part_of_the_source_that_is_gone_holds_up_nothing_else() {
    let mut random = Rng::with_seed(44);
    let mut machine = without_answers_of((1000..3000).collect(), &mut random);
    assert!(machine.volume.progress().stalled);
    end_when_answered(&mut machine, &mut random);
}

#[test]
fn of_many_blocks_that_are_never_answered_some_are_given_up() {
    let mut random = Rng::with_seed(46);
    let silent: Vec<_> = (0..8192).step_by(24).collect();
    let count = silent.len() as u64;
    let mut machine = without_answers_of(silent, &mut random);
    let begun = machine.now;
    while machine.now.since(begun) < 120_000_000_000 {
        assert!(machine.step(&mut random));
    }
    let progress = machine.volume.progress();
    assert_eq!(progress.bad + progress.unanswered, count);
    assert!((1..=256).contains(&progress.unanswered), "{progress:?}");
    end_when_answered(&mut machine, &mut random);
}

#[test]
fn of_bad_sectors_no_more_are_looked_for_than_are_kept_in_mind() {
    let mut random = Rng::with_seed(45);
    let mut config = config(20_000);
    config.region_blocks = 256;
    config.rate.minimum = 1 << 40;
    let mut machine = new_machine(&config, &mut random);
    machine.faults.bad = (0..20_000).collect();
    machine.volume.start();
    let begun = machine.now;
    while machine.now.since(begun) < 60_000_000_000 && machine.step(&mut random) {}
    let found = machine.volume.progress().bad;
    assert!((16384..16384 + 2048).contains(&found), "{found}");
    machine.faults.bad.clear();
    machine.volume.retry_source();
    while !machine.notices.contains(&Notice::Done) {
        assert!(machine.step(&mut random));
    }
}

#[test]
fn a_bad_sector_is_reported_and_fails_only_reads_of_it() {
    let mut random = Rng::with_seed(5);
    let mut machine = new_machine(&config(64), &mut random);
    machine.faults.bad = vec![21];
    machine.volume.start();
    while machine.volume.progress().remote > BLOCK as u64 {
        assert!(machine.step(&mut random));
    }
    for _ in 0..20 {
        machine.step(&mut random);
    }
    let bad = Notice::BadSource {
        offset: 21 * BLOCK as u64,
        length: BLOCK as u32,
    };
    assert_eq!(
        machine
            .notices
            .iter()
            .filter(|notice| **notice == bad)
            .count(),
        1
    );
    assert!(machine.volume.bad_blocks().eq([21 * BLOCK as u64]));
    for (block, readable) in [(20, true), (21, false), (22, true)] {
        submit(
            &mut machine,
            7,
            Operation::Read,
            block * BLOCK,
            vec![0; BLOCK],
        );
        let result = result_of(&mut machine, 7, &mut random);
        assert_eq!(
            result.is_ok(),
            readable,
            "block {block}: {:?}",
            result.err()
        );
    }
    // What the guest writes over it, it can read, and the move ends.
    write(&mut machine, 21 * BLOCK, vec![1; BLOCK], &mut random);
    while !machine.notices.contains(&Notice::Done) {
        assert!(machine.step(&mut random));
    }
}

#[test]
fn a_block_that_can_not_be_copied_is_looked_for_now_and_then_only() {
    // A turn looks at 4096 regions: volumes of fewer, as many, twice as many.
    for regions in [4095, 4096, 8192] {
        let mut random = Rng::with_seed(11);
        let mut config = config(regions);
        config.region_blocks = 1;
        let mut machine = new_machine(&config, &mut random);
        machine.faults.bad = vec![21];
        machine.volume.start();
        while machine.volume.progress().bad == 0
            || machine.volume.progress().remote > BLOCK as u64
            || !machine.ops.is_empty()
        {
            assert!(machine.step(&mut random));
        }
        let (begun, mut turns) = (machine.now, 0);
        while machine.now.since(begun) < 10_000_000_000 && turns < 10_000 {
            assert!(machine.step(&mut random));
            turns += 1;
        }
        // A look at all of it each 50 ms
        assert!(turns < 1000, "{turns} turns for {regions} regions");
    }
}

#[test]
fn what_the_guest_reads_is_copied_first() {
    let mut random = Rng::with_seed(10);
    let mut config = config(64);
    config.copies = 1;
    let mut machine = new_machine(&config, &mut random);
    machine.volume.start();
    for _ in 0..4 {
        let read = Operation::Read;
        submit(&mut machine, 7, read, 45 * BLOCK, vec![0; BLOCK]);
        result_of(&mut machine, 7, &mut random).expect("a read succeeds");
    }
    let copied = |machine: &Machine, region: usize| {
        let content = machine.data.read(region * 8 * BLOCK, 8 * BLOCK);
        content.iter().all(|byte| *byte == 0x55)
    };
    while !copied(&machine, 5) {
        assert!(machine.step(&mut random));
    }
    let before = (0..8).filter(|region| copied(&machine, *region)).count() - 1;
    assert!(before < 5, "{before} regions before it");
}

#[test]
fn foreign_and_damaged_metadata_are_refused_and_left_alone() {
    let mut random = Rng::with_seed(7);
    let good = new_machine(&config(16), &mut random).metadata;
    let mut foreign = config(16);
    foreign.move_id = [8; 16];
    let mut smaller = config(15);
    smaller.source_size = 15 * BLOCK as u64;
    let mut damaged_bitmap = good.clone();
    damaged_bitmap.set((2 + 8) * BLOCK + 512, &[1; 512]);
    let nothing = Disk::new(vec![0; good.len()]);
    for (config, disk, words) in [
        (foreign, good.clone(), "ForeignMove"),
        (smaller, good, "Mismatch"),
        (
            config(16),
            damaged_bitmap,
            "Lost { first: Bitmap(1), count: 1 }",
        ),
        (config(16), nothing, "Superblock(Empty)"),
    ] {
        let before = disk.read(0, disk.len()).to_vec();
        let mut machine = machine(&config, None, false, disk);
        let error = machine.open(&mut random).expect_err("it does not open");
        assert!(error.contains(words), "{error}");
        assert!(machine.metadata.read(0, before.len()) == before);
        assert!(machine.ops.is_empty());
    }
}

/// A volume whose guest has written much: its machine, and what it has flushed.
fn used_machine(config: &Config, random: &mut Rng) -> (Machine, Vec<u8>) {
    let mut machine = new_machine(config, random);
    machine.volume.start();
    let mut expected = vec![0x55; config.size as usize];
    for round in 0..10 {
        for block in [3, 7, round] {
            let content = vec![round as u8 + 1; BLOCK];
            expected[block * BLOCK..(block + 1) * BLOCK].copy_from_slice(&content);
            write(&mut machine, block * BLOCK, content, random);
        }
    }
    (machine, expected)
}

#[test]
fn no_rotten_sector_of_the_metadata_takes_what_was_flushed() {
    let mut config = config(32);
    config.metadata_size = 11 * BLOCK as u64;
    let mut outcomes = [0; 2];
    for seed in 0..4 {
        let mut random = Rng::with_seed(seed);
        let (machine, expected) = used_machine(&config, &mut random);
        let (data, metadata) = machine.cut_power_hard(&mut random);
        for sector in 0..metadata.len() / SECTOR {
            for rot in [Rot::Zeros, Rot::Garbage, Rot::Bit, Rot::Unreadable] {
                let mut metadata = metadata.clone();
                metadata.rot(sector, rot, &mut random);
                let before = metadata.read(0, metadata.len()).to_vec();
                let source = machine.source.clone();
                let mut after = Machine::new(&config, None, None, data.clone(), metadata, source);
                match after.open(&mut random) {
                    Ok(()) => {
                        outcomes[0] += 1;
                        let found = after.read_all(&mut random).expect("it can be read");
                        assert!(found == expected, "{rot:?} in sector {sector}");
                    }
                    Err(refusal) => {
                        outcomes[1] += 1;
                        assert!(refusal.contains("Lost"), "{refusal}");
                        assert!(after.metadata.read(0, before.len()) == before);
                    }
                }
            }
        }
    }
    assert!(outcomes.iter().all(|count| *count > 100), "{outcomes:?}");
}

#[test]
fn either_superblock_may_rot_and_is_written_again() {
    let config = config(32);
    for copy in 0..2 {
        let mut random = Rng::with_seed(copy as u64);
        let (machine, expected) = used_machine(&config, &mut random);
        let (data, mut metadata) = machine.cut_power_hard(&mut random);
        metadata.rot(copy * BLOCK / SECTOR, Rot::Garbage, &mut random);
        let source = machine.source.clone();
        let mut after = Machine::new(&config, None, None, data, metadata, source);
        after.open(&mut random).expect("the other one does");
        assert!(after.volume.progress().started);
        assert!(after.read_all(&mut random).expect("it can be read") == expected);
        let copies = [0, 1].map(|copy| Superblock::decode(after.metadata.read(copy * BLOCK, 512)));
        assert!(copies[0].is_ok() && copies[0] == copies[1]);
    }
}

#[test]
fn metadata_that_cannot_be_read_at_all_are_no_loss_but_a_failing_disk() {
    let mut random = Rng::with_seed(3);
    let mut config = config(32);
    config.metadata_size = 11 * BLOCK as u64;
    let mut disk = new_machine(&config, &mut random).metadata;
    for sector in 0..disk.len() / SECTOR {
        disk.rot(sector, Rot::Unreadable, &mut random);
    }
    let mut machine = machine(&config, None, false, disk);
    let error = machine.open(&mut random).expect_err("it does not open");
    assert!(error.contains("Superblock(Unreadable)"), "{error}");
}

/// A block of the journal as version 1 of the format has it.
fn journal_v1(header: &Header, entries: &[[u64; 3]]) -> Vec<u8> {
    let mut block = vec![0; BLOCK];
    block[4..6].copy_from_slice(&header.entries.to_le_bytes());
    block[8..16].copy_from_slice(&header.epoch.to_le_bytes());
    block[16..24].copy_from_slice(&header.sequence.to_le_bytes());
    block[24..32].copy_from_slice(&header.settled.to_le_bytes());
    block[32..40].copy_from_slice(&header.tail.to_le_bytes());
    for ([kind, number, value], bytes) in entries.iter().zip(block[64..].chunks_exact_mut(12)) {
        bytes[..8].copy_from_slice(&(kind << 62 | number).to_le_bytes());
        bytes[8..].copy_from_slice(&(*value as u32).to_le_bytes());
    }
    let end = 64 + 12 * entries.len();
    let crc = crc32c::crc32c_append(crc32c::crc32c(&MOVE), &block[4..end]);
    block[..4].copy_from_slice(&crc.to_le_bytes());
    block
}

/// D and M of a move that a helper of version 1 has left, and what the guest
/// finds: blocks 1 (settled), 2 (in the bitmap), 4 (its content has its
/// checksum) and 9 (recorded as a range) are local, 5 and 6 (taken back) are not.
fn left_by_version_1(config: &Config) -> (Disk, Disk, Vec<u8>) {
    const EPOCH: u64 = 3;
    let mut data = vec![0xdd; config.size as usize];
    let mut expected = vec![0x55; config.size as usize];
    for block in [1, 2, 4, 9] {
        let bytes = block * BLOCK..(block + 1) * BLOCK;
        data[bytes.clone()].fill(block as u8);
        expected[bytes].fill(block as u8);
    }
    let mut metadata = Disk::new(vec![0; config.metadata_size as usize]);
    let superblock = Superblock {
        version: VERSION_1,
        move_id: MOVE,
        generation: 6,
        epoch: EPOCH,
        size: config.size,
        source_size: config.source_size,
        logical_block_size: config.logical_block_size,
        journal_blocks: 8,
        bitmap_blocks: 1,
        started: true,
        complete: false,
        zeroed: false,
        unreadable: Unreadable::default(),
    };
    let mut block = vec![0; BLOCK];
    superblock.encode(&mut block);
    metadata.set(0, &block);
    let older = Superblock {
        generation: 5,
        epoch: EPOCH - 1,
        ..superblock
    };
    older.encode(&mut block);
    metadata.set(BLOCK, &block);
    let of = |block: u64, byte: u8| u64::from(checksum(EPOCH, block, &[byte; BLOCK]));
    let groups: [(u64, u64, &[[u64; 3]]); 3] = [
        (1, 0, &[[0, 1, 0], [0, 6, of(6, 0xdd)]]),
        (2, 1, &[[0, 4, of(4, 4)], [0, 5, 0], [2, 6, 0]]),
        (3, 1, &[[1, 9, 1]]),
    ];
    for (sequence, settled, entries) in groups {
        let header = Header {
            epoch: EPOCH,
            sequence,
            settled: settled.min(sequence - 1),
            tail: 0,
            entries: entries.len() as u16,
        };
        metadata.set(
            (2 + sequence as usize) * BLOCK,
            &journal_v1(&header, entries),
        );
    }
    let mut words = [0; WORDS_PER_SECTOR];
    words[0] = 1 << 2;
    let mut sector = [0; SECTOR];
    encode_sector(&MOVE, 0, &words, &mut sector);
    metadata.set(10 * BLOCK, &sector);
    (Disk::new(data), metadata, expected)
}

#[test]
fn metadata_of_version_1_are_read_and_replaced() {
    let mut config = config(32);
    config.metadata_size = 11 * BLOCK as u64;
    let (data, metadata, expected) = left_by_version_1(&config);
    let source = vec![0x55; config.source_size as usize];
    for seed in 0..200 {
        let mut random = Rng::with_seed(seed);
        let (mut data, mut metadata) = (data.clone(), metadata.clone());
        // Interrupted again and again.
        while random.u8(0..4) > 0 {
            let source = source.clone();
            let mut machine = Machine::new(&config, None, None, data, metadata, source);
            for _ in 0..random.usize(0..60) {
                machine.step(&mut random);
            }
            (data, metadata) = if random.bool() {
                machine.kill(&mut random)
            } else {
                machine.cut_power(&mut random)
            };
        }
        let mut machine = Machine::new(&config, None, None, data, metadata, source.clone());
        machine.open(&mut random).expect("it opens");
        assert!(machine.volume.progress().started);
        assert!(machine.read_all(&mut random).expect("it can be read") == expected);
        let found = Superblock::decode(machine.metadata.read(0, SECTOR)).expect("a superblock");
        assert_eq!(found.version, VERSION);
    }
}

#[test]
fn an_older_superblock_of_version_1_is_not_taken_for_a_damaged_newer_one() {
    let mut config = config(32);
    config.metadata_size = 11 * BLOCK as u64;
    let mut random = Rng::with_seed(1);
    for rot in [Rot::Zeros, Rot::Garbage, Rot::Unreadable] {
        let (_, mut metadata, _) = left_by_version_1(&config);
        metadata.rot(0, rot, &mut random);
        let mut machine = machine(&config, None, false, metadata);
        let error = machine.open(&mut random).expect_err("it does not open");
        assert!(error.contains("first: Superblock"), "{rot:?}: {error}");
    }
}

#[test]
fn a_block_that_recovery_cannot_read_fails_alone_until_it_is_written() {
    let mut random = Rng::with_seed(11);
    let config = config(16);
    let mut machine = new_machine(&config, &mut random);
    for block in [3, 4] {
        write(&mut machine, block * BLOCK, vec![1; BLOCK], &mut random);
    }
    let (mut data, metadata) = machine.cut_power_hard(&mut random);
    data.rot(3 * BLOCK / SECTOR, Rot::Unreadable, &mut random);
    let source = machine.source.clone();
    let mut machine = Machine::new(&config, None, None, data, metadata, source);
    machine.open(&mut random).expect("the volume opens");
    let offset = 3 * BLOCK as u64;
    let length = BLOCK as u32;
    assert!(
        machine
            .notices
            .contains(&Notice::UnreadableData { offset, length })
    );
    assert_eq!(machine.volume.progress().first_unreadable, Some(offset));
    let mut ask = |operation, at: usize, content: Vec<u8>| {
        submit(&mut machine, 5, operation, at, content);
        result_of(&mut machine, 5, &mut random)
    };
    let plain = Operation::Write { fua: false };
    assert_eq!(
        ask(Operation::Read, 3 * BLOCK, vec![0; 512]),
        Err(Failure::BadSector)
    );
    // Not what it was not told: the rest of the block is not known.
    assert_eq!(
        ask(plain, 3 * BLOCK + 512, vec![2; 512]),
        Err(Failure::BadSector)
    );
    assert_eq!(
        ask(Operation::Read, 4 * BLOCK, vec![0; BLOCK]),
        Ok(vec![1; BLOCK])
    );
    ask(Operation::Discard, 3 * BLOCK, vec![0; BLOCK]).expect("all of it is discarded");
    assert_eq!(
        ask(Operation::Read, 3 * BLOCK, vec![9; BLOCK]),
        Ok(vec![0; BLOCK])
    );
    assert_eq!(machine.volume.progress().unreadable, 0);
}

#[test]
fn a_destination_that_reads_nothing_is_refused_and_left_alone() {
    let mut random = Rng::with_seed(12);
    let config = config(64);
    let mut machine = new_machine(&config, &mut random);
    let plain = Operation::Write { fua: false };
    submit(&mut machine, 1, plain, 0, vec![1; 30 * BLOCK]);
    result_of(&mut machine, 1, &mut random).expect("a write succeeds");
    let (mut data, metadata) = machine.kill(&mut random);
    for sector in 0..data.len() / SECTOR {
        data.rot(sector, Rot::Unreadable, &mut random);
    }
    let source = machine.source.clone();
    let mut machine = Machine::new(&config, None, None, data, metadata, source);
    let error = machine.open(&mut random).expect_err("it does not open");
    assert!(error.contains("Device(Data, BadSector)"), "{error}");
}

/// All of the volume, as it is after a power cut and a recovery on disks that
/// are well.
fn after_a_power_cut(machine: &Machine, config: &Config, random: &mut Rng) -> Vec<u8> {
    let (data, metadata) = machine.cut_power(random);
    let mut after = Machine::new(config, None, None, data, metadata, machine.source.clone());
    after.open(random).expect("the volume opens");
    after.read_all(random).expect("it can be read")
}

#[test]
fn a_failed_flush_is_told_and_settles_nothing() {
    let mut config = config(16);
    config.metadata_size = 16 * BLOCK as u64;
    for seed in 0..200 {
        let mut random = Rng::with_seed(seed);
        let mut machine = new_machine(&config, &mut random);
        write(&mut machine, 0, vec![1; BLOCK], &mut random);
        let plain = Operation::Write { fua: false };
        submit(&mut machine, 2, plain, BLOCK, vec![2; BLOCK]);
        result_of(&mut machine, 2, &mut random).expect("a write succeeds");
        machine.faults.flushes = 100;
        submit(&mut machine, 3, Operation::Flush, 0, Vec::new());
        let flushed = result_of(&mut machine, 3, &mut random);
        assert_eq!(flushed, Err(Failure::Io));
        assert!(machine.volume.progress().broken);
        assert!(!machine.volume.passes_through(BLOCK as u64, BLOCK as u64));
        // Nor does the next one lie, when the disk is well again.
        machine.faults.flushes = 0;
        submit(&mut machine, 4, Operation::Flush, 0, Vec::new());
        let flushed = result_of(&mut machine, 4, &mut random);
        assert_eq!(flushed, Err(Failure::Io));
        let found = after_a_power_cut(&machine, &config, &mut random);
        assert!(found[..BLOCK] == [1; BLOCK]);
        let second = &found[BLOCK..2 * BLOCK];
        assert!(second == [2; BLOCK] || second == [0x55; BLOCK]);
    }
}

#[test]
fn no_flush_succeeds_after_one_that_has_failed_though_all_is_settled() {
    let mut config = config(16);
    config.metadata_size = 16 * BLOCK as u64;
    let mut random = Rng::with_seed(1);
    let mut machine = new_machine(&config, &mut random);
    let plain = Operation::Write { fua: false };
    write(&mut machine, 0, vec![1; BLOCK], &mut random);
    while !machine.volume.passes_through(0, BLOCK as u64) {
        submit(&mut machine, 2, Operation::Flush, 0, Vec::new());
        result_of(&mut machine, 2, &mut random).expect("a flush succeeds");
        machine.volume.close();
        while machine.step(&mut random) {
            machine.pump(&mut random);
        }
        let (data, metadata) = machine.kill(&mut random);
        let source = machine.source.clone();
        machine = Machine::new(&config, None, None, data, metadata, source);
        machine.open(&mut random).expect("it opens again");
    }
    submit(&mut machine, 3, plain, 0, vec![3; BLOCK]);
    result_of(&mut machine, 3, &mut random).expect("a write succeeds");
    for (tag, failing) in [(4, 100), (5, 0)] {
        machine.faults.flushes = failing;
        submit(&mut machine, tag, Operation::Flush, 0, Vec::new());
        let flushed = result_of(&mut machine, tag, &mut random);
        assert_eq!(flushed, Err(Failure::Io), "{failing} of 100 fail");
    }
}

#[test]
fn a_failed_write_to_the_metadata_is_told_and_takes_nothing_that_was_durable() {
    let mut config = config(16);
    config.metadata_size = 16 * BLOCK as u64;
    for seed in 0..200 {
        let mut random = Rng::with_seed(seed);
        let mut machine = new_machine(&config, &mut random);
        write(&mut machine, 0, vec![1; BLOCK], &mut random);
        machine.faults.metadata = 100;
        let fua = Operation::Write { fua: true };
        for (tag, block) in [(2, 1), (3, 0)] {
            submit(
                &mut machine,
                tag,
                fua,
                block * BLOCK,
                vec![tag as u8; BLOCK],
            );
            let written = result_of(&mut machine, tag, &mut random);
            assert_eq!(written, Err(Failure::Io));
        }
        assert!(machine.volume.progress().broken);
        let found = after_a_power_cut(&machine, &config, &mut random);
        assert!(found[..BLOCK] == [1; BLOCK]);
        let failed = &found[BLOCK..2 * BLOCK];
        assert!(failed == [2; BLOCK] || failed == [0x55; BLOCK]);
    }
}

#[test]
fn a_write_that_waits_for_the_metadata_ends_when_they_fail() {
    let mut random = Rng::with_seed(9);
    let mut machine = new_machine(&config(16), &mut random);
    let plain = Operation::Write { fua: false };
    submit(&mut machine, 1, plain, 0, vec![1; BLOCK]);
    result_of(&mut machine, 1, &mut random).expect("a write succeeds");
    // It was answered before its intent was written.
    while !machine.ops.is_empty() {
        machine.complete(0, &mut random);
        machine.pump(&mut random);
    }
    // The rest of its block is being read when a flush makes that owed.
    submit(&mut machine, 2, plain, 0, vec![2; 512]);
    machine.pump(&mut random);
    assert_eq!(machine.ops.len(), 1);
    submit(&mut machine, 3, Operation::Flush, 0, Vec::new());
    machine.pump(&mut random);
    while machine.ops.len() > 1 {
        machine.complete(1, &mut random);
        machine.pump(&mut random);
    }
    result_of(&mut machine, 3, &mut random).expect("a flush succeeds");
    machine.faults.metadata = 100;
    let written = result_of(&mut machine, 2, &mut random);
    assert_eq!(written, Err(Failure::Io));
}

#[test]
fn a_kill_takes_nothing_that_was_answered_from_a_block_that_is_written_again() {
    let mut config = config(16);
    config.journal_depth = 1;
    config.metadata_size = 16 * BLOCK as u64;
    let plain = Operation::Write { fua: false };
    for (rule, safe) in [(None, true), (Some(Rule::OverwriteBehindIntent), false)] {
        let mut lost = 0;
        for seed in 0..100 {
            let mut random = Rng::with_seed(seed);
            let metadata = Disk::new(vec![0xaa; config.metadata_size as usize]);
            let mut machine = machine(&config, rule, true, metadata);
            machine.open(&mut random).expect("a new volume opens");
            submit(&mut machine, 1, plain, 0, vec![1; BLOCK]);
            result_of(&mut machine, 1, &mut random).expect("a write succeeds");
            // The journal is busy when the block is written again.
            for (tag, block) in [(2, 5), (3, 0)] {
                submit(&mut machine, tag, plain, block * BLOCK, vec![2; BLOCK]);
                machine.pump(&mut random);
            }
            let (data, metadata) = machine.kill(&mut random);
            let source = machine.source.clone();
            let mut after = Machine::new(&config, rule, None, data, metadata, source);
            after.open(&mut random).expect("the volume opens");
            let found = after.read_all(&mut random).expect("it can be read");
            lost += u32::from(![1, 2].contains(&found[0]));
        }
        assert_eq!(lost == 0, safe, "{rule:?}: {lost} of 100");
    }
}

#[test]
fn a_failed_write_with_fua_is_a_failed_flush() {
    let mut config = config(16);
    config.metadata_size = 16 * BLOCK as u64;
    let (plain, fua) = (
        Operation::Write { fua: false },
        Operation::Write { fua: true },
    );
    let zeroes = Operation::WriteZeroes { fua: true };
    // To a block that is settled, and to one that is not.
    for (operation, block) in [(fua, 1), (zeroes, 1), (fua, 2), (zeroes, 2)] {
        let mut random = Rng::with_seed(1);
        let mut machine = new_machine(&config, &mut random);
        submit(&mut machine, 1, plain, BLOCK, vec![1; BLOCK]);
        result_of(&mut machine, 1, &mut random).expect("a write succeeds");
        for tag in [2, 3] {
            submit(&mut machine, tag, Operation::Flush, 0, Vec::new());
            result_of(&mut machine, tag, &mut random).expect("a flush succeeds");
            write(&mut machine, 5 * BLOCK, vec![5; BLOCK], &mut random);
        }
        submit(&mut machine, 4, plain, 0, vec![4; BLOCK]);
        result_of(&mut machine, 4, &mut random).expect("a write succeeds");
        machine.faults.durable = 100;
        submit(&mut machine, 6, operation, block * BLOCK, vec![6; BLOCK]);
        let failed = result_of(&mut machine, 6, &mut random);
        assert_eq!(failed, Err(Failure::Io));
        machine.faults.durable = 0;
        submit(&mut machine, 7, Operation::Flush, 0, Vec::new());
        let flushed = result_of(&mut machine, 7, &mut random);
        assert_eq!(flushed, Err(Failure::Io), "{operation:?} {block}");
    }
}

#[test]
fn what_waits_for_the_source_is_left_to_a_successor() {
    let mut random = Rng::with_seed(33);
    let config = config(16);
    let mut machine = new_machine(&config, &mut random);
    machine.faults.away = 100;
    let part = Operation::Write { fua: true };
    let waiting = [
        (10, Operation::Read, 0, vec![0; 2 * BLOCK]),
        (11, part, 3 * BLOCK, vec![1; 512]),
        // It waits for the one before.
        (12, part, 3 * BLOCK + 1024, vec![2; 512]),
        (13, part, 5 * BLOCK + 512, vec![3; 2 * BLOCK]),
    ];
    for (tag, operation, offset, content) in waiting.clone() {
        submit(&mut machine, tag, operation, offset, content);
    }
    for _ in 0..50 {
        machine.step(&mut random);
    }
    write(&mut machine, 9 * BLOCK, vec![4; BLOCK], &mut random);
    // Asked again seldom by now, and being asked.
    let leaving = machine.now;
    machine.volume.close();
    while !machine.notices.contains(&Notice::Closed) {
        assert!(machine.step(&mut random));
    }
    assert_eq!(machine.answers, []);
    assert!(machine.now.since(leaving) < 100_000_000);
    let (data, metadata) = machine.kill(&mut random);
    let source = machine.source.clone();
    let mut successor = Machine::new(&config, None, None, data, metadata, source);
    successor.open(&mut random).expect("the volume opens");
    for (tag, operation, offset, content) in waiting {
        submit(&mut successor, tag, operation, offset, content);
        result_of(&mut successor, tag, &mut random).expect("the source is back");
    }
    let mut expected = vec![0x55; 16 * BLOCK];
    expected[3 * BLOCK..][..512].fill(1);
    expected[3 * BLOCK + 1024..][..512].fill(2);
    expected[5 * BLOCK + 512..][..2 * BLOCK].fill(3);
    expected[9 * BLOCK..][..BLOCK].fill(4);
    assert!(successor.read_all(&mut random).expect("it can be read") == expected);
}

#[test]
fn a_closed_volume_has_nothing_left_to_recover() {
    let mut random = Rng::with_seed(8);
    let config = config(16);
    let mut machine = new_machine(&config, &mut random);
    submit(
        &mut machine,
        1,
        Operation::Write { fua: false },
        0,
        vec![1; BLOCK],
    );
    result_of(&mut machine, 1, &mut random).expect("a write succeeds");
    machine.volume.close();
    while !machine.notices.contains(&Notice::Closed) {
        assert!(machine.step(&mut random));
    }
    let (data, metadata) = machine.cut_power_hard(&mut random);
    let source = machine.source.clone();
    let mut after = Machine::new(&config, None, None, data, metadata, source);
    after.open(&mut random).expect("the volume opens");
    assert!(after.volume.passes_through(0, BLOCK as u64));
}

#[test]
fn zeros_are_written_only_where_a_destination_lacks_them_whatever_a_restart_is_told() {
    const SIZE: usize = 64 * BLOCK;
    // Of a thin destination, and of another: what is to be written in the end.
    for (zeroed, expected) in [(true, vec![9, 10, 63]), (false, (0..64).collect())] {
        let mut random = Rng::with_seed(41);
        let mut config = config(64);
        config.source_size = 40 * BLOCK as u64;
        config.destination_zeroed = zeroed;
        let source = vec![0; 40 * BLOCK];
        let metadata = Disk::new(vec![0xaa; config.metadata_size as usize]);
        let data = Disk::new(vec![0; SIZE]);
        let mut before = Machine::new(&config, None, Some(8), data, metadata, source.clone());
        before.open(&mut random).expect("a new volume opens");
        let (mut data, metadata) = before.kill(&mut random);
        // What a predecessor has left there.
        for block in [9, 10, 63] {
            data.set(block * BLOCK, &[0xdd; BLOCK]);
        }
        config.destination_zeroed = !zeroed;
        let mut machine = Machine::new(&config, None, None, data, metadata, source);
        machine.open(&mut random).expect("it opens again");
        machine.volume.start();
        while !machine.volume.progress().done {
            machine.pump(&mut random);
            machine.step(&mut random);
        }
        let blocks = |sent: &Sent| {
            let end = sent.offset + sent.content.len();
            sent.offset / BLOCK..end / BLOCK
        };
        let mut written: Vec<_> = machine.sent.iter().flat_map(blocks).collect();
        written.sort_unstable();
        assert_eq!(written, expected, "{zeroed}");
        assert!(machine.data.read(0, SIZE) == vec![0; SIZE]);
    }
}
