// SPDX-License-Identifier: Apache-2.0

//! Walks without end: `cargo run --release -p localstor-hydrator-simulation
//! --bin soak -- [first seed]`. Ends with the seed of the first violation.

use std::process::ExitCode;

use localstor_hydrator_simulation::walk::{Tally, walk};

fn main() -> ExitCode {
    let first = match std::env::args().nth(1).map(|seed| seed.parse()) {
        None => 1 << 32,
        Some(Ok(seed)) => seed,
        Some(Err(error)) => {
            eprintln!("soak: the first seed is no number: {error}");
            return ExitCode::from(2);
        }
    };
    let mut tally = Tally::default();
    for seed in first.. {
        match walk(seed, None) {
            Ok(more) => tally.add(more),
            Err(violation) => {
                println!("seed {seed}: {violation}");
                return ExitCode::FAILURE;
            }
        }
        if seed % 1000 == 999 {
            println!("up to seed {seed}: {tally:?}");
        }
    }
    ExitCode::SUCCESS
}
