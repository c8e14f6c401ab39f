// SPDX-License-Identifier: Apache-2.0
//! Whatever a guest writes into its memory, a request is inside the disk or is
//! refused, and every buffer comes back.
#![no_main]

use libfuzzer_sys::fuzz_target;
use localstor_hydrator_frontends::vhost::fuzzing;

/// Bytes of what is known of requests in flight.
const INFLIGHT: usize = 16 + 16 * 16;

fuzz_target!(|bytes: &[u8]| {
    match bytes.split_at_checked(INFLIGHT) {
        Some((inflight, memory)) if inflight[0] == 1 => fuzzing::ring(memory, Some(inflight)),
        _ => fuzzing::ring(bytes, None),
    }
});
