// SPDX-License-Identifier: Apache-2.0
//! A disk that was just plugged in.

use std::io;
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::Errno;

const PAUSE: Duration = Duration::from_millis(20);

/// Open a disk that can be seen: for a moment the kernel lets nobody open it and
/// says ENXIO (`device_add_disk` in its block/genhd.c).
///
/// # Errors
///
/// Any other, at once; that one after so long.
pub fn open<T>(attempt: impl Fn() -> io::Result<T>, patience: Duration) -> io::Result<T> {
    let seen = Instant::now();
    loop {
        match attempt() {
            Err(error)
                if Errno::from_io_error(&error) == Some(Errno::NXIO)
                    && seen.elapsed() < patience =>
            {
                thread::sleep(PAUSE);
            }
            answer => return answer,
        }
    }
}

#[cfg(test)]
mod tests;
