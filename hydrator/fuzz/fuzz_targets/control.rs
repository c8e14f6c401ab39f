// SPDX-License-Identifier: Apache-2.0
//! Whatever comes on the control socket is a request or a complaint, and what
//! is a request stays one when it is said again.
#![no_main]

use libfuzzer_sys::fuzz_target;
use localstor_hydrator::protocol::parse;

fuzz_target!(|line: &[u8]| {
    if let Ok(request) = parse(line) {
        let again = localstor_hydrator::protocol::encode(&request);
        assert_eq!(parse(again.as_bytes()), Ok(request));
    }
});
