// SPDX-License-Identifier: Apache-2.0

//! What a request costs: disk operations in sequence, bytes, allocations.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use localstor_hydrator_core::{Config, Operation, Rate, metadata_size};
use null::Null;
use rustix::time::{ClockId, clock_gettime};

#[allow(dead_code)]
mod null;

const GIB: u64 = 1 << 30;
const WRITE: Operation = Operation::Write { fua: false };

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
    static BYTES: Cell<i64> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: all of it is the system's allocator, which keeps the contract; the
// counter is a thread's own and takes no memory.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        BYTES.with(|bytes| bytes.set(bytes.get() + layout.size() as i64));
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        BYTES.with(|bytes| bytes.set(bytes.get() + layout.size() as i64));
        // SAFETY: the caller keeps the contract of `alloc_zeroed`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        BYTES.with(|bytes| bytes.set(bytes.get() - layout.size() as i64));
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Numbers without a pattern, below `most`.
fn scattered(count: u64, most: u64) -> impl Iterator<Item = u64> {
    (1..=count).map(move |number| number.wrapping_mul(0x9e37_79b9_7f4a_7c15) % most)
}

fn assert_no_error(null: &Null) {
    assert!(null.answered.iter().all(|(_, result)| result.is_ok()));
}

#[test]
fn a_write_with_fua_costs_one_disk_operation() {
    let mut null = Null::new(64 * GIB);
    let before = null.rounds;
    for block in scattered(5000, 64 * GIB / 4096) {
        null.one(Operation::Write { fua: true }, block * 4096, 4096);
        assert_no_error(&null);
    }
    let rounds = null.rounds - before;
    assert!(
        rounds <= 5000 * 105 / 100,
        "{rounds} rounds for 5000 writes"
    );
}

#[test]
fn a_write_and_its_flush_cost_two_disk_operations() {
    let mut null = Null::new(64 * GIB);
    let before = null.rounds;
    for block in scattered(5000, 64 * GIB / 4096) {
        null.one(WRITE, block * 4096, 4096);
        null.one(Operation::Flush, 0, 0);
        assert_no_error(&null);
    }
    let rounds = null.rounds - before;
    assert!(
        rounds <= 10_000 * 105 / 100,
        "{rounds} rounds for 5000 writes and flushes"
    );
}

#[test]
fn at_depth_32_metadata_are_less_than_a_tenth_of_what_is_written() {
    let mut null = Null::new(1024 * GIB);
    let before = null.volume.progress();
    let mut blocks = scattered(100_000, 1024 * GIB / 4096);
    for tag in 0..32 {
        null.request(tag, WRITE, blocks.next().unwrap_or(0) * 4096, 4096);
    }
    'all: loop {
        null.round();
        for (tag, result) in std::mem::take(&mut null.answered) {
            result.expect("a write succeeds");
            let Some(block) = blocks.next() else {
                break 'all;
            };
            null.request(tag.0, WRITE, block * 4096, 4096);
        }
    }
    let after = null.volume.progress();
    let written = after.written - before.written;
    let metadata = after.metadata_written - before.metadata_written;
    assert!(
        metadata * 10 < written,
        "{metadata} bytes of metadata for {written} bytes"
    );
}

#[test]
fn scattered_lone_writes_cost_little_more_than_a_block_of_the_journal_each() {
    const WRITES: u64 = 150_000;
    let mut null = Null::new(1024 * GIB);
    let before = null.volume.progress().metadata_written;
    for block in scattered(WRITES, 1024 * GIB / 4096) {
        null.one(Operation::Write { fua: true }, block * 4096, 4096);
        assert_no_error(&null);
    }
    let blocks = (null.volume.progress().metadata_written - before) / 4096;
    assert!(
        blocks * 100 < WRITES * 120,
        "{blocks} blocks of metadata for {WRITES} writes"
    );
}

#[test]
fn a_volume_of_16_tib_takes_less_than_48_mib_for_each() {
    let before = BYTES.get();
    let mut null = Null::new(16 * 1024 * GIB);
    let last = 16 * 1024 * GIB - 4096;
    null.one(WRITE, last, 4096);
    null.one(Operation::Flush, 0, 0);
    null.one(Operation::Read, last, 4096);
    assert_no_error(&null);
    let mib = (BYTES.get() - before) >> 20;
    assert!(mib < 16 * 48, "{mib} MiB");
}

#[test]
fn in_steady_state_nothing_is_allocated() {
    let mut null = Null::new(64 * GIB);
    let mut one_round = |from: u64| {
        for block in scattered(20_000, 64 * GIB / 4096) {
            null.one(WRITE, (block ^ from) * 4096 % (64 * GIB), 4096);
            null.one(Operation::Flush, 0, 0);
            null.request(1, WRITE, (block ^ from ^ 1) * 4096 % (64 * GIB), 4096);
            let fua = Operation::Write { fua: true };
            null.one(fua, (block ^ from ^ 2) * 4096 % (64 * GIB), 4096);
            null.one(Operation::Read, block * 4096, 4096);
        }
    };
    one_round(0);
    let before = ALLOCATIONS.get();
    one_round(77);
    assert_eq!(ALLOCATIONS.get() - before, 0);
}

#[test]
fn what_the_guest_has_left_of_a_region_is_one_read_of_the_source() {
    const REGIONS: u64 = GIB >> 20;
    let mut null = Null::new(GIB);
    for block in (0..64 * 256).step_by(2) {
        null.one(WRITE, block * 4096, 4096);
    }
    assert_no_error(&null);
    null.volume.set_rate(Rate {
        limit: None,
        minimum: 1 << 40,
    });
    null.volume.start();
    while !null.done {
        null.round();
    }
    let reads = null.source_reads;
    assert!(reads <= REGIONS, "{reads} reads for {REGIONS} regions");
}

/// Processor time of a write that waits among so many, in nanoseconds.
fn time_of_waiting_write(writes: u32) -> i64 {
    let mut config = Config::new([1; 16], 8 * GIB, metadata_size(8 * GIB));
    config.requests = writes as usize;
    let mut null = Null::with(config);
    let mut all_once = || {
        null.answered.clear();
        let before = clock_gettime(ClockId::ThreadCPUTime);
        for tag in 0..writes {
            null.request(tag, WRITE, u64::from(tag) << 20, 4096);
        }
        while null.answered.len() < writes as usize {
            null.round();
        }
        let elapsed = clock_gettime(ClockId::ThreadCPUTime) - before;
        assert_no_error(&null);
        null.one(Operation::Flush, 0, 0);
        elapsed.tv_sec * 1_000_000_000 + elapsed.tv_nsec
    };
    all_once();
    // What was flushed is to be settled before it is overwritten.
    all_once() / i64::from(writes)
}

#[test]
fn a_write_that_waits_is_not_compared_with_all_others_that_do() {
    let least = |writes| {
        (0..5)
            .map(|_| time_of_waiting_write(writes))
            .min()
            .unwrap_or(0)
    };
    let (few, many) = (least(128), least(4096));
    assert!(many < 3 * few, "{few} ns among 128, {many} ns among 4096");
}
