// SPDX-License-Identifier: Apache-2.0

//! The pace beside a guest on a disk that both want.

use proptest::prelude::*;

use super::*;
use crate::metadata_size;

const MILLISECOND: u64 = SECOND / 1000;
const MIB: u64 = 1 << 20;
const EXTENT: u64 = MIB;
const COPIES: usize = 8;
const TAG: Tag = Tag(1);

/// What a guest does: one request at a time, of one kind and size.
#[derive(Clone, Copy, Debug)]
struct Guest {
    kind: Kind,
    length: u64,
    /// From an answer to the next request, in nanoseconds.
    pause: u64,
}

/// A disk that moves one byte after another, for guest and copies, and then
/// takes some time for each request, of any number at once.
#[derive(Clone, Copy, Debug)]
struct Disk {
    /// Bytes per second.
    speed: u64,
    /// Nanoseconds.
    delay: u64,
}

/// What has happened.
#[derive(Debug, Default)]
struct Course {
    requests: u64,
    /// When a copy began: nanoseconds.
    copies: Vec<u64>,
}

impl Course {
    /// Bytes per second copied from `from` to `to`, nanoseconds.
    fn rate(&self, from: u64, to: u64) -> u64 {
        let copies = self.copies.iter().filter(|at| (from..to).contains(*at));
        copies.count() as u64 * EXTENT * SECOND / (to - from)
    }
}

/// Lets `pace` copy beside a guest from one time to another, in nanoseconds.
fn run(pace: &mut Pace, disk: Disk, guest: Option<Guest>, from: u64, to: u64) -> Course {
    let mut course = Course::default();
    // When the disk is free, and when what is in flight ends.
    let mut free = from;
    let mut copies: Vec<u64> = Vec::new();
    let mut request = None;
    let mut next = guest.map(|_| from);
    let mut now = from;
    while now < to {
        if let Some(index) = copies.iter().position(|end| *end <= now) {
            copies.swap_remove(index);
            continue;
        }
        if request.is_some_and(|end| end <= now) {
            request = None;
            pace.ended(Time(now), TAG);
            course.requests += 1;
            next = guest.map(|guest| now + guest.pause);
        }
        if let Some(guest) = guest.filter(|_| next.is_some_and(|at| at <= now)) {
            next = None;
            let alone = copies.is_empty();
            pace.begun(Time(now), TAG, guest.kind, guest.length, alone);
            free = free.max(now) + guest.length * SECOND / disk.speed;
            request = Some(free + disk.delay);
        }
        let mut wake = None;
        while copies.len() < COPIES && wake.is_none() {
            if pace.may_copy(Time(now)) {
                pace.spend(EXTENT);
                course.copies.push(now);
                free = free.max(now) + EXTENT * SECOND / disk.speed;
                copies.push(free + disk.delay);
            } else {
                wake = Some(pace.may_copy_at().0);
                assert!(wake > Some(now), "nobody waits for what is past");
            }
        }
        let events = copies.iter().copied().chain(request).chain(next);
        now = events.chain(wake).min().unwrap_or(to);
    }
    if request.is_some() {
        pace.ended(Time(to), TAG);
    }
    course
}

fn pace(limit: Option<u64>, minimum: u64) -> Pace {
    let mut config = Config::new([1; 16], 1 << 30, metadata_size(1 << 30));
    config.rate = Rate { limit, minimum };
    Pace::new(&config)
}

const SSD: Disk = Disk {
    speed: 500 * MIB,
    delay: 300_000,
};
const WRITES: Guest = Guest {
    kind: Kind::Write,
    length: 4096,
    pause: 0,
};
const READS: Guest = Guest {
    kind: Kind::RemoteRead,
    length: MIB,
    pause: 0,
};

/// What is left to the guest of what it has alone, in percent, in ten seconds
/// after the first one.
fn left_to(guest: Guest, disk: Disk) -> (u64, u64) {
    let second = |pace: &mut Pace| {
        run(pace, disk, Some(guest), 0, SECOND);
        let course = run(pace, disk, Some(guest), SECOND, 11 * SECOND);
        (course.requests, course.rate(SECOND, 11 * SECOND))
    };
    let (alone, _) = second(&mut pace(Some(0), 0));
    let (beside, rate) = second(&mut pace(None, 10 * MIB));
    (beside * 100 / alone, rate / MIB)
}

#[test]
fn a_guest_that_writes_hardly_notices_the_copies() {
    let (left, rate) = left_to(WRITES, SSD);
    assert!(left >= 75, "{left} %, beside {rate} MiB/s");
    assert!(rate >= 10, "{rate} MiB/s");
}

#[test]
fn a_guest_that_reads_much_from_the_source_hardly_notices_the_copies() {
    let (left, rate) = left_to(READS, SSD);
    assert!(left >= 75, "{left} %, beside {rate} MiB/s");
    assert!(rate >= 10, "{rate} MiB/s");
}

#[test]
fn what_nobody_notices_is_not_held_back() {
    let disk = Disk {
        speed: 20_000 * MIB,
        delay: 3 * MILLISECOND,
    };
    let mut pace = pace(None, 10 * MIB);
    let alone = run(&mut pace, disk, None, 0, SECOND).rate(0, SECOND);
    run(&mut pace, disk, Some(WRITES), SECOND, 6 * SECOND);
    let beside = run(&mut pace, disk, Some(WRITES), 6 * SECOND, 9 * SECOND);
    let beside = beside.rate(6 * SECOND, 9 * SECOND);
    assert!(beside * 10 >= alone * 8, "{beside} of {alone} bytes/s");
}

#[test]
fn an_idle_guest_leaves_the_disk_to_the_copies() {
    let mut pace = pace(None, 10 * MIB);
    run(&mut pace, SSD, Some(WRITES), 0, 3 * SECOND);
    let course = run(&mut pace, SSD, None, 3 * SECOND, 4 * SECOND);
    // It takes a moment to be sure that it is idle.
    let rate = course.rate(3 * SECOND + 2 * INTERVAL, 4 * SECOND);
    assert!(rate * 10 >= SSD.speed * 9, "{rate} bytes/s");
}

#[test]
fn the_first_request_brings_the_rate_down_at_once() {
    let mut pace = pace(None, 10 * MIB);
    run(&mut pace, SSD, None, 0, 3 * SECOND);
    let seen = run(&mut pace, SSD, Some(WRITES), 3 * SECOND, 4 * SECOND);
    let rate = seen.rate(3 * SECOND + 20 * MILLISECOND, 3 * SECOND + INTERVAL);
    assert!(rate <= 20 * MIB, "{rate} bytes/s");
}

#[test]
fn a_guest_that_suffers_from_every_copy_gets_the_minimum_all_the_same() {
    let disk = Disk {
        speed: 60 * MIB,
        delay: 300_000,
    };
    let mut pace = pace(None, 20 * MIB);
    let course = run(&mut pace, disk, Some(WRITES), 0, 5 * SECOND);
    for second in 0..5 {
        let rate = course.rate(second * SECOND, (second + 1) * SECOND);
        assert!((19 * MIB..=30 * MIB).contains(&rate), "{rate} bytes/s");
    }
}

#[test]
fn who_comes_late_loses_none_of_the_minimum() {
    let mut pace = pace(None, 100 * MIB);
    pace.begun(Time(0), TAG, Kind::Write, 4096, true);
    let mut copied = 0;
    for now in (0..SECOND).step_by(80_000_000) {
        while pace.may_copy(Time(now)) {
            pace.spend(EXTENT);
            copied += EXTENT;
        }
    }
    assert!(copied >= 95 * MIB, "{copied} bytes");
}

#[test]
fn a_minimum_that_is_raised_holds_at_once() {
    let mut pace = pace(None, 10 * MIB);
    run(&mut pace, SSD, Some(WRITES), 0, SECOND / 2);
    pace.configure(Rate {
        limit: None,
        minimum: 200 * MIB,
    });
    let course = run(&mut pace, SSD, Some(WRITES), SECOND, 2 * SECOND);
    assert!(course.rate(SECOND, 2 * SECOND) >= 190 * MIB);
}

#[test]
fn a_request_that_takes_for_ever_holds_the_rate_down_before_it_ends() {
    let mut pace = pace(None, 10 * MIB);
    let beside = run(&mut pace, SSD, Some(WRITES), 0, 5 * SECOND);
    assert!(beside.rate(4 * SECOND, 5 * SECOND) > 20 * MIB);
    pace.begun(Time(5 * SECOND), TAG, Kind::Write, 4096, true);
    let course = run(&mut pace, SSD, None, 5 * SECOND, 9 * SECOND);
    assert!(course.rate(7 * SECOND, 9 * SECOND) <= 11 * MIB);
}

#[test]
fn ten_minutes_without_trouble_are_no_trouble() {
    let disk = Disk {
        speed: 20_000 * MIB,
        delay: 90 * MILLISECOND,
    };
    let mut pace = pace(None, 10 * MIB);
    let end = 600 * SECOND;
    run(&mut pace, disk, Some(WRITES), 0, end);
    let course = run(&mut pace, disk, Some(WRITES), end, end + SECOND);
    assert!(course.rate(end, end + SECOND) > 50 * MIB);
}

#[test]
fn without_a_minimum_the_move_goes_on_beside_a_guest_all_the_same() {
    let disk = Disk {
        speed: 5000 * MIB,
        delay: 3 * MILLISECOND,
    };
    let course = run(&mut pace(None, 0), disk, Some(WRITES), 0, 10 * SECOND);
    assert!(course.rate(5 * SECOND, 10 * SECOND) > MIB);
}

/// Any disk and any guest, or none.
fn circumstances() -> impl Strategy<Value = (Disk, Option<Guest>)> {
    let disk = (1..2000u64, 50..20_000u64).prop_map(|(speed, delay)| Disk {
        speed: speed * MIB,
        delay: delay * 1000,
    });
    let kind = prop_oneof![
        Just(Kind::Read),
        Just(Kind::RemoteRead),
        Just(Kind::Write),
        Just(Kind::Flush)
    ];
    let guest = (kind, 0..2 * MIB, 0..300u64).prop_map(|(kind, length, pause)| Guest {
        kind,
        length,
        pause: pause * MILLISECOND + 1,
    });
    (disk, proptest::option::of(guest))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(50))]

    #[test]
    fn the_limit_is_kept_over_any_second(
        (disk, guest) in circumstances(),
        limit in 1..100u64,
        minimum in 0..200u64,
    ) {
        let mut pace = pace(Some(limit * MIB), minimum * MIB);
        let course = run(&mut pace, disk, guest, 0, 5 * SECOND);
        for from in 0..4 {
            let (from, to) = (from * SECOND, (from + 1) * SECOND);
            let most = limit * MIB * 11 / 10 + EXTENT;
            prop_assert!(course.rate(from, to) <= most, "{:?}", course.rate(from, to));
        }
    }

    #[test]
    fn the_minimum_is_kept_whatever_the_guest_does(
        (disk, guest) in circumstances(),
        minimum in 1..50u64,
        limit in proptest::option::of(50..1000u64),
    ) {
        // What the disk can do beside the guest must suffice.
        prop_assume!(disk.speed >= 4 * minimum * MIB);
        prop_assume!(disk.delay * minimum * MIB / EXTENT < 4 * SECOND);
        let mut pace = pace(limit.map(|limit| limit * MIB), minimum * MIB);
        let course = run(&mut pace, disk, guest, 0, 10 * SECOND);
        for from in 0..9 {
            let rate = course.rate(from * SECOND, (from + 1) * SECOND);
            let least = (minimum * MIB).saturating_sub(EXTENT) * 19 / 20;
            prop_assert!(rate >= least, "{} bytes/s in second {}", rate, from);
        }
    }
}

/// A pace that has seen reads of the guest that took so long alone.
fn seen(minimum: u64, alone: u64) -> (Pace, Time) {
    let mut pace = pace(None, minimum);
    let mut now = Time(1);
    for _ in 0..8 {
        pace.begun(now, TAG, Kind::Read, 4096, true);
        now = now.after(alone);
        pace.ended(now, TAG);
    }
    (pace, now)
}

#[test]
fn pieces_are_for_the_guest() {
    assert_eq!(None, pace(None, MIB).piece());
    assert_eq!(Some(16), seen(MIB, MILLISECOND / 10).0.piece());
}

#[test]
fn there_are_none_where_a_disk_takes_long_for_each_request() {
    assert_eq!(None, seen(MIB, 6 * MILLISECOND).0.piece());
}

#[test]
fn they_grow_until_the_minimum_is_kept_and_shrink_when_the_guest_waits() {
    let (mut pace, mut now) = seen(100 * MIB, MILLISECOND / 10);
    let mut next = |pace: &mut Pace, copied: u64, taken: u64| {
        pace.begun(now, TAG, Kind::Read, 4096, false);
        pace.spend(copied);
        now = now.after(taken);
        pace.ended(now, TAG);
        now = now.after(INTERVAL - taken);
        pace.may_copy(now);
        pace.piece()
    };
    let grown = [32, 64, 128, 256, 256].map(Some);
    assert_eq!(
        grown,
        [(); 5].map(|()| next(&mut pace, 4 * MIB, MILLISECOND / 10))
    );
    for _ in 0..50 {
        next(&mut pace, 20 * MIB, MILLISECOND / 10);
    }
    assert_eq!(Some(256), pace.piece());
    let shrunk = [128, 64, 32, 16, 16].map(Some);
    assert_eq!(
        shrunk,
        [(); 5].map(|()| next(&mut pace, 20 * MIB, MILLISECOND))
    );
}
