// SPDX-License-Identifier: Apache-2.0
//! Whatever a client of vhost-user says, it is understood or refused.
#![no_main]

use libfuzzer_sys::fuzz_target;
use localstor_hydrator_frontends::vhost::fuzzing;

fuzz_target!(|bytes: &[u8]| fuzzing::messages(bytes));
