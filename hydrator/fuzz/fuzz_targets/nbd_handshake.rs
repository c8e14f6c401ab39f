// SPDX-License-Identifier: Apache-2.0
//! A handshake ends the same way, whole or in pieces.
#![no_main]

use libfuzzer_sys::fuzz_target;
use localstor_hydrator_frontends::nbd::protocol::{Export, Handshake, ProtocolError, Step};

const EXPORT: Export = Export {
    size: 1 << 30,
    logical_block: 512,
    longest: 1 << 20,
};

/// What is answered, and how it ends, when the input comes in these pieces.
fn shake(pieces: &[&[u8]]) -> (Vec<u8>, Result<Step, ProtocolError>) {
    let mut output = Vec::new();
    let mut handshake = Handshake::begin(EXPORT, &mut output);
    let mut pending = Vec::new();
    for piece in pieces {
        pending.extend_from_slice(piece);
        match handshake.feed(&pending, &mut output) {
            Ok((used, Step::Continue)) => {
                pending.drain(..used);
            }
            Ok((_, step)) => return (output, Ok(step)),
            Err(error) => return (output, Err(error)),
        }
    }
    (output, Ok(Step::Continue))
}

fuzz_target!(|input: (u8, Vec<u8>)| {
    let (cut, bytes) = input;
    let (first, second) = bytes.split_at(bytes.len().min(usize::from(cut)));
    assert_eq!(shake(&[&bytes]), shake(&[first, second]));
});
