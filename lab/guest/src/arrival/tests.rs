// SPDX-License-Identifier: Apache-2.0

use std::cell::Cell;

use super::*;

const LONG: Duration = Duration::from_secs(60);

/// The answer after two of an error, and how often there was one.
fn third(error: Errno, patience: Duration) -> (io::Result<u32>, u32) {
    let asked = Cell::new(0);
    let answer = open(
        || {
            asked.set(asked.get() + 1);
            if asked.get() < 3 {
                return Err(error.into());
            }
            Ok(asked.get())
        },
        patience,
    );
    (answer, asked.get())
}

#[test]
fn a_disk_that_can_not_be_opened_yet_is_waited_for() {
    assert_eq!(3, third(Errno::NXIO, LONG).0.expect("open"));
}

#[test]
fn but_not_for_ever() {
    let (answer, asked) = third(Errno::NXIO, Duration::ZERO);
    assert_eq!(
        Some(Errno::NXIO),
        Errno::from_io_error(&answer.expect_err("not open"))
    );
    assert_eq!(1, asked);
}

#[test]
fn any_other_error_is_told_at_once() {
    assert_eq!(1, third(Errno::IO, LONG).1);
}
