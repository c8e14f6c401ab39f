// SPDX-License-Identifier: Apache-2.0

//! Processor time of a request, with devices that do everything at once:
//! `cargo bench -p localstor-hydrator-core`. The time is that of the thread, so
//! that other load on the machine does not count.

#![allow(missing_docs)] // What criterion generates has none.

use std::hint::black_box;
use std::time::Duration;

use criterion::measurement::{Measurement, ValueFormatter, WallTime};
use criterion::{Criterion, criterion_group, criterion_main};
use localstor_hydrator_core::Operation;
use localstor_hydrator_core::format::journal;
use null::Null;
use rustix::time::{ClockId, clock_gettime};

#[allow(dead_code)]
#[path = "../tests/null/mod.rs"]
mod null;

const TIB: u64 = 1 << 40;
const WRITE: Operation = Operation::Write { fua: false };

struct ProcessorTime;

fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

impl Measurement for ProcessorTime {
    type Intermediate = Duration;
    type Value = Duration;

    fn start(&self) -> Duration {
        processor_time()
    }

    fn end(&self, start: Duration) -> Duration {
        processor_time() - start
    }

    fn add(&self, one: &Duration, other: &Duration) -> Duration {
        *one + *other
    }

    fn zero(&self) -> Duration {
        Duration::ZERO
    }

    fn to_f64(&self, value: &Duration) -> f64 {
        WallTime.to_f64(value)
    }

    fn formatter(&self) -> &dyn ValueFormatter {
        WallTime.formatter()
    }
}

fn scattered(count: &mut u64) -> u64 {
    *count += 1;
    count.wrapping_mul(0x9e37_79b9_7f4a_7c15) % (TIB / 4096) * 4096
}

/// A volume that is made only if it is measured: whoever profiles one benchmark
/// finds nothing of the others'.
#[derive(Default)]
struct Lazy(Option<Null>);

impl Lazy {
    fn remote(&mut self) -> &mut Null {
        self.0.get_or_insert_with(|| Null::new(TIB))
    }

    fn settled(&mut self) -> &mut Null {
        self.0.get_or_insert_with(|| {
            let mut null = Null::new(TIB);
            null.one(Operation::WriteZeroes { fua: false }, 0, TIB);
            null
        })
    }
}

fn requests(criterion: &mut Criterion<ProcessorTime>) {
    let mut count = 0;

    let mut settled = Lazy::default();
    criterion.bench_function("settled: read of 4 KiB", |bencher| {
        let settled = settled.settled();
        bencher.iter(|| settled.one(Operation::Read, scattered(&mut count), 4096));
    });
    criterion.bench_function("settled: write of 4 KiB", |bencher| {
        let settled = settled.settled();
        bencher.iter(|| settled.one(WRITE, scattered(&mut count), 4096));
    });

    let mut remote = Lazy::default();
    criterion.bench_function("remote: read of 4 KiB", |bencher| {
        let remote = remote.remote();
        bencher.iter(|| remote.one(Operation::Read, scattered(&mut count), 4096));
    });
    criterion.bench_function("remote: write of 4 KiB", |bencher| {
        let remote = remote.remote();
        bencher.iter(|| remote.one(WRITE, scattered(&mut count), 4096));
    });
    let mut remote = Lazy::default();
    criterion.bench_function("remote: write of 4 KiB, and flush", |bencher| {
        let remote = remote.remote();
        bencher.iter(|| {
            remote.one(WRITE, scattered(&mut count), 4096);
            remote.one(Operation::Flush, 0, 0);
        });
    });
    let mut remote = Lazy::default();
    criterion.bench_function("remote: 32 writes of 4 KiB at once", |bencher| {
        let remote = remote.remote();
        bencher.iter(|| {
            remote.answered.clear();
            for tag in 0..32 {
                remote.request(tag, WRITE, scattered(&mut count), 4096);
            }
            while remote.answered.len() < 32 {
                remote.round();
            }
        });
    });

    // What each of these writes pays for the checksum of its content alone.
    let content = vec![0x5a; 4096];
    criterion.bench_function("CRC-32C of 4 KiB", |bencher| {
        bencher.iter(|| journal::checksum(1, 2, black_box(&content)));
    });
}

criterion_group! {
    name = benches;
    config = Criterion::default().with_measurement(ProcessorTime);
    targets = requests
}
criterion_main!(benches);
