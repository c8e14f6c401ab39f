// SPDX-License-Identifier: Apache-2.0

//! Destinations that do not keep what is copied to them.

use fastrand::Rng;
use localstor_hydrator_core::{Config, Notice, Operation, Request, Tag, Verify};
use localstor_hydrator_simulation::disk::Disk;
use localstor_hydrator_simulation::machine::{Faults, Machine};

const BLOCK: usize = 4096;
const OLD: u8 = 0xdd;
const SOURCE: u8 = 0x55;

fn config(blocks: usize, verify: Verify) -> Config {
    let mut config = Config::new([9; 16], (blocks * BLOCK) as u64, 64 << 20);
    config.region_blocks = 8;
    config.verify = verify;
    config
}

/// A new volume, open; the destination holds what it held before.
fn opened(config: &Config, source: u8, random: &mut Rng) -> Machine {
    let size = config.size as usize;
    let mut machine = Machine::new(
        config,
        None,
        Some(8),
        Disk::new(vec![OLD; size]),
        Disk::new(vec![0xaa; 1 << 20]),
        vec![source; size],
    );
    machine.open(random).expect("a new volume opens");
    machine
}

/// Such a volume, its move begun.
fn begun(config: &Config, source: u8, random: &mut Rng) -> Machine {
    let mut machine = opened(config, source, random);
    machine.volume.start();
    machine
}

fn step(machine: &mut Machine, random: &mut Rng) {
    assert!(machine.step(random), "it stands still");
}

fn run_until(machine: &mut Machine, random: &mut Rng, wanted: impl Fn(&Machine) -> bool) {
    for _ in 0..200_000 {
        if wanted(machine) {
            return;
        }
        step(machine, random);
    }
    panic!("it never happens: {:?}", machine.volume.progress());
}

fn run_to_the_end(machine: &mut Machine, random: &mut Rng) {
    run_until(machine, random, |machine| {
        machine.notices.contains(&Notice::Done)
    });
}

fn differs(block: usize, again: bool) -> Notice {
    Notice::Differs {
        offset: (block * BLOCK) as u64,
        length: BLOCK as u32,
        again,
    }
}

fn write(machine: &mut Machine, block: usize, byte: u8) {
    let request = Request {
        tag: Tag(1),
        operation: Operation::Write { fua: false },
        offset: (block * BLOCK) as u64,
        length: BLOCK as u64,
    };
    machine.request(request, vec![byte; BLOCK]);
}

/// All of the volume as the guest sees it.
fn seen(machine: &mut Machine, random: &mut Rng) -> Vec<u8> {
    machine.read_all(random).expect("it can be read")
}

#[test]
fn what_is_compared_gets_faster_beside_a_guest_that_does_not_notice() {
    let mut random = Rng::with_seed(6);
    let mut config = config(4096, Verify::Full);
    config.rate.minimum = 1 << 20;
    config.rate.limit = Some(4 << 20);
    let mut machine = begun(&config, SOURCE, &mut random);
    run_until(&mut machine, &mut random, |machine| {
        machine.volume.progress().verified > 1 << 20
    });
    let mut fastest = 0;
    write(&mut machine, 0, 1);
    let end = machine.now.after(1_000_000_000);
    while machine.now < end {
        step(&mut machine, &mut random);
        if machine.answers.pop().is_some() {
            machine.take_buffer(Tag(1));
            write(&mut machine, 0, 1);
        }
        fastest = fastest.max(machine.volume.progress().rate.unwrap_or(0));
    }
    assert!(fastest > config.rate.minimum);
}

#[test]
fn what_was_written_wrong_is_copied_again() {
    let mut random = Rng::with_seed(1);
    let mut machine = begun(&config(64, Verify::Full), SOURCE, &mut random);
    machine.faults.liars = vec![21];
    run_until(&mut machine, &mut random, |machine| {
        machine.notices.contains(&differs(21, false))
    });
    machine.faults.liars.clear();
    run_to_the_end(&mut machine, &mut random);
    assert!(machine.data.read(0, 64 * BLOCK) == [SOURCE; 64 * BLOCK]);
    let progress = machine.volume.progress();
    assert_eq!((progress.differences, progress.differing), (1, 0));
    assert_eq!(progress.verified, progress.size);
    assert!(!machine.notices.contains(&differs(21, true)));
}

#[test]
fn what_is_written_wrong_again_stays_on_the_source_and_holds_the_move() {
    let mut random = Rng::with_seed(2);
    let mut machine = begun(&config(64, Verify::Full), SOURCE, &mut random);
    machine.faults.liars = vec![21];
    run_until(&mut machine, &mut random, |machine| {
        machine.volume.progress().remote == BLOCK as u64
            && machine.notices.contains(&differs(21, true))
    });
    for _ in 0..200 {
        step(&mut machine, &mut random);
    }
    let progress = machine.volume.progress();
    assert!(!progress.done && !progress.broken);
    assert_eq!((progress.differences, progress.differing), (2, 1));
    assert_eq!(progress.first_differing, Some(21 * BLOCK as u64));
    assert!(machine.data.read(21 * BLOCK, BLOCK) != [SOURCE; BLOCK]);
    assert!(seen(&mut machine, &mut random) == [SOURCE; 64 * BLOCK]);
    // What the guest writes over it is its own, and the move ends.
    write(&mut machine, 21, 1);
    run_to_the_end(&mut machine, &mut random);
    assert_eq!(machine.volume.progress().first_differing, None);
    assert!(seen(&mut machine, &mut random)[21 * BLOCK..22 * BLOCK] == [1; BLOCK]);
}

#[test]
fn a_restart_copies_and_compares_what_differed_anew() {
    let mut random = Rng::with_seed(3);
    let config = config(64, Verify::Full);
    let mut machine = begun(&config, SOURCE, &mut random);
    machine.faults.liars = vec![21];
    run_until(&mut machine, &mut random, |machine| {
        machine.notices.contains(&differs(21, true))
    });
    let (data, metadata) = machine.kill(&mut random);
    let source = machine.source.clone();
    let mut successor = Machine::new(&config, None, None, data, metadata, source);
    successor.open(&mut random).expect("the volume opens");
    run_to_the_end(&mut successor, &mut random);
    assert!(successor.data.read(0, 64 * BLOCK) == [SOURCE; 64 * BLOCK]);
}

#[test]
fn nobody_ever_reads_what_was_not_compared() {
    for seed in 0..200 {
        let mut random = Rng::with_seed(seed);
        let config = config(48, Verify::Full);
        let mut machine = begun(&config, SOURCE, &mut random);
        machine.faults = Faults {
            lies: 40,
            liars: vec![3, 30],
            ..Faults::default()
        };
        for _ in 0..random.usize(0..300) {
            step(&mut machine, &mut random);
            if random.u8(0..10) == 0 {
                assert!(seen(&mut machine, &mut random) == [SOURCE; 48 * BLOCK]);
            }
        }
        // Nor after a power cut, whoever reads.
        let (data, metadata) = machine.cut_power(&mut random);
        let source = machine.source.clone();
        let mut after = Machine::new(&config, None, None, data, metadata, source);
        after.open(&mut random).expect("the volume opens");
        assert!(seen(&mut after, &mut random) == [SOURCE; 48 * BLOCK]);
    }
}

#[test]
fn what_the_guest_writes_is_never_overwritten_by_a_copy_that_differed() {
    let mut found = 0;
    for seed in 0..500 {
        let mut random = Rng::with_seed(seed);
        let mut machine = begun(&config(24, Verify::Full), SOURCE, &mut random);
        machine.faults.liars = vec![10];
        for _ in 0..random.usize(0..120) {
            step(&mut machine, &mut random);
        }
        write(&mut machine, 10, 1);
        run_to_the_end(&mut machine, &mut random);
        assert!(machine.answers.iter().all(|(_, result)| result.is_ok()));
        assert!(machine.data.read(10 * BLOCK, BLOCK) == [1; BLOCK], "{seed}");
        found += u64::from(machine.notices.contains(&differs(10, false)));
    }
    assert!(
        found > 50 && found < 450,
        "before and after it was compared"
    );
}

#[test]
fn zeros_that_a_new_destination_only_promises_are_found() {
    let mut random = Rng::with_seed(5);
    let mut config = config(64, Verify::Full);
    config.destination_zeroed = true;
    let mut machine = begun(&config, 0, &mut random);
    run_to_the_end(&mut machine, &mut random);
    assert!(machine.data.read(0, 64 * BLOCK) == [0; 64 * BLOCK]);
    assert!(machine.volume.progress().differences > 0);
}

#[test]
fn what_lies_beyond_the_source_is_compared_with_zeros() {
    let mut random = Rng::with_seed(6);
    let mut config = config(64, Verify::Full);
    config.source_size = 40 * BLOCK as u64;
    config.destination_zeroed = true;
    let mut machine = begun(&config, SOURCE, &mut random);
    run_to_the_end(&mut machine, &mut random);
    assert!(machine.data.read(40 * BLOCK, 24 * BLOCK) == [0; 24 * BLOCK]);
    assert_eq!(machine.volume.progress().verified, 64 * BLOCK as u64);
}

#[test]
fn a_sample_is_a_region_of_each_64_and_at_least_one() {
    for (blocks, verify, regions) in [
        (8, Verify::Sample, 1),
        (64, Verify::Sample, 1),
        (130 * 8, Verify::Sample, 3),
        (130 * 8, Verify::Full, 130),
        (130 * 8, Verify::Off, 0),
    ] {
        let mut random = Rng::with_seed(7);
        let mut machine = begun(&config(blocks, verify), SOURCE, &mut random);
        run_to_the_end(&mut machine, &mut random);
        let progress = machine.volume.progress();
        assert_eq!(progress.verified, regions * 8 * BLOCK as u64, "{verify:?}");
        assert_eq!(progress.copied, progress.size);
    }
}

#[test]
fn pieces_of_a_region_follow_each_other_without_a_pause() {
    let mut random = Rng::with_seed(10);
    let mut config = config(64, Verify::Full);
    config.region_blocks = 64;
    let mut machine = opened(&config, SOURCE, &mut random);
    for block in (0..64).step_by(2) {
        write(&mut machine, block, 1);
        run_until(&mut machine, &mut random, |machine| {
            !machine.answers.is_empty()
        });
        machine.answers.clear();
        machine.take_buffer(Tag(1));
    }
    let begun = machine.now;
    machine.volume.start();
    run_to_the_end(&mut machine, &mut random);
    // 32 pieces; a pause is 50 ms.
    assert!(machine.now.since(begun) < 500_000_000);
    assert_eq!(machine.volume.progress().verified, 32 * BLOCK as u64);
}

#[test]
fn a_source_that_goes_away_delays_the_comparison_only() {
    let mut random = Rng::with_seed(8);
    let mut machine = begun(&config(64, Verify::Full), SOURCE, &mut random);
    for round in 0.. {
        machine.faults.away = if round % 20 < 10 { 100 } else { 0 };
        if machine.notices.contains(&Notice::Done) {
            break;
        }
        step(&mut machine, &mut random);
    }
    assert!(machine.notices.contains(&Notice::Stalled));
    let progress = machine.volume.progress();
    assert_eq!(
        (progress.verified, progress.differences),
        (progress.size, 0)
    );
}

#[test]
fn a_destination_that_keeps_nothing_is_given_up() {
    let mut random = Rng::with_seed(9);
    let mut config = config(40_000, Verify::Full);
    config.region_blocks = 256;
    config.rate.minimum = 1 << 40;
    let mut machine = begun(&config, SOURCE, &mut random);
    machine.faults.liars = (0..40_000).collect();
    while machine.step(&mut random) {}
    let progress = machine.volume.progress();
    assert_eq!(progress.remote, progress.size);
    assert!((4096..30_000).contains(&progress.differing), "{progress:?}");
    assert!(seen(&mut machine, &mut random) == vec![SOURCE; 40_000 * BLOCK]);
}
