// SPDX-License-Identifier: Apache-2.0

//! Random walks with crashes, by fixed seeds.

use localstor_hydrator_core::Rule;
use localstor_hydrator_simulation::machine::Shared;
use localstor_hydrator_simulation::walk::{self, Tally};

/// Walks with all rules; about sixty power cuts and forty-five kills of the
/// helper each, and D and M on one disk in half of them. The environment variable
/// `LOCALSTOR_WALKS` asks for another number.
const WALKS: u64 = 3_000;
/// Walks without a rule, at most; nearly all rules are missed in ten.
const WALKS_WITHOUT_RULE: u64 = 2000;

#[test]
fn no_power_cut_and_no_kill_takes_what_it_must_not() {
    let walks = std::env::var("LOCALSTOR_WALKS").map_or(WALKS, |walks| {
        walks.parse().expect("LOCALSTOR_WALKS is a number")
    });
    let mut tally = Tally::default();
    std::thread::scope(|scope| {
        let halves = [0, 1].map(|half| {
            scope.spawn(move || {
                let mut tally = Tally::default();
                for seed in (half..walks).step_by(2) {
                    match walk::walk(seed, None) {
                        Ok(more) => tally.add(more),
                        Err(violation) => panic!("seed {seed}: {violation}"),
                    }
                }
                tally
            })
        });
        for half in halves {
            tally.add(half.join().expect("no walk finds a violation"));
        }
    });
    println!("{tally:?}");
    assert!(tally.crashes > 40 * walks && tally.kills > 30 * walks);
    assert!(
        tally.kills_after_failure > walks / 100,
        "helpers die after failures: {tally:?}"
    );
    assert!(tally.done > walks / 2, "moves come to their end: {tally:?}");
    let failing = [tally.bad, tally.faults, tally.broken];
    assert!(!failing.contains(&0), "devices fail: {tally:?}");
    assert!(
        tally.rotten > 0 && tally.refused > 0 && tally.unreadable > 0,
        "disks rot: {tally:?}"
    );
    assert!(tally.copies > 10 * walks, "metadata are copied: {tally:?}");
    assert!(
        tally.differences > 0 && tally.differing > 0,
        "destinations lie: {tally:?}"
    );
}

#[test]
fn every_rule_is_missed_when_it_is_dropped() {
    // What lies before the tail is seen again only when a write to the journal
    // is lost that had gone round: `recovery.rs` has a test of its own for it.
    let rules = Rule::ALL.into_iter().filter(|rule| *rule != Rule::Tail);
    let mut unnoticed = Vec::new();
    for rule in rules {
        let noticed = (0..WALKS_WITHOUT_RULE)
            .find_map(|seed| Some((seed, walk::walk(seed, Some(rule)).err()?)));
        match noticed {
            Some((seed, violation)) => println!("{rule:?}: seed {seed}: {violation:.120}"),
            None => unnoticed.push(rule),
        }
    }
    assert!(unnoticed.is_empty(), "nobody misses {unnoticed:?}");
}

#[test]
fn what_is_kept_is_missed_when_it_is_forgotten_because_its_write_has_failed() {
    let noticed = (0..WALKS_WITHOUT_RULE).find_map(|seed| walk::walk_forgetting(seed).err());
    println!("{noticed:?}");
    assert!(noticed.is_some(), "nobody misses it");
}

#[test]
fn a_flush_in_flight_does_not_do_for_the_metadata() {
    let noticed = (0..WALKS_WITHOUT_RULE)
        .find_map(|seed| walk::walk_sharing(seed, None, Shared::InFlight).err());
    assert!(noticed.is_some(), "nobody misses what it has not covered");
}
