// SPDX-License-Identifier: Apache-2.0

//! Processor time of a request, with devices that do everything at once:
//! `cargo bench -p localstor-hydrator-core`.

#![allow(missing_docs)] // What criterion generates has none.

use criterion::{Criterion, criterion_group, criterion_main};
use localstor_hydrator_core::Operation;
use null::Null;

#[allow(dead_code)]
#[path = "../tests/null/mod.rs"]
mod null;

const TIB: u64 = 1 << 40;
const WRITE: Operation = Operation::Write { fua: false };

fn scattered(count: &mut u64) -> u64 {
    *count += 1;
    count.wrapping_mul(0x9e37_79b9_7f4a_7c15) % (TIB / 4096) * 4096
}

fn requests(criterion: &mut Criterion) {
    let mut count = 0;

    let mut settled = Null::new(TIB);
    let zeroes = Operation::WriteZeroes { fua: false };
    settled.one(zeroes, 0, TIB);
    criterion.bench_function("settled: read of 4 KiB", |bencher| {
        bencher.iter(|| settled.one(Operation::Read, scattered(&mut count), 4096));
    });
    criterion.bench_function("settled: write of 4 KiB", |bencher| {
        bencher.iter(|| settled.one(WRITE, scattered(&mut count), 4096));
    });

    let mut remote = Null::new(TIB);
    criterion.bench_function("remote: read of 4 KiB", |bencher| {
        bencher.iter(|| remote.one(Operation::Read, scattered(&mut count), 4096));
    });
    criterion.bench_function("remote: write of 4 KiB", |bencher| {
        bencher.iter(|| remote.one(WRITE, scattered(&mut count), 4096));
    });
    let mut remote = Null::new(TIB);
    criterion.bench_function("remote: write of 4 KiB, and flush", |bencher| {
        bencher.iter(|| {
            remote.one(WRITE, scattered(&mut count), 4096);
            remote.one(Operation::Flush, 0, 0);
        });
    });
    let mut remote = Null::new(TIB);
    criterion.bench_function("remote: 32 writes of 4 KiB at once", |bencher| {
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
}

criterion_group!(benches, requests);
criterion_main!(benches);
