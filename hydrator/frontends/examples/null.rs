// SPDX-License-Identifier: Apache-2.0
//! Shows a disk that answers at once through vhost-user-blk: `null BYTES PATH`.
//! It reads as zeros and keeps nothing, so that all that is left is the
//! frontend's. SIGTERM removes it.

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use localstor_hydrator_core::Operation;
use localstor_hydrator_disks::{Memory, Owner, Ring};
use localstor_hydrator_frontends::vhost::VhostUserBlk;
use localstor_hydrator_frontends::{Arrival, Frontend, Geometry, Stage};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let served = match &arguments[..] {
        [size, path] => serve(size, Path::new(path)),
        _ => Err("usage: null BYTES PATH".into()),
    };
    match served {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("null: {error}");
            ExitCode::FAILURE
        }
    }
}

fn serve(size: &str, path: &Path) -> Result<(), Box<dyn std::error::Error>> {
    let ended = Arc::new(AtomicBool::new(false));
    signal_hook::flag::register(signal_hook::consts::SIGTERM, Arc::clone(&ended))?;
    let geometry = Geometry {
        size: size.parse()?,
        logical_block: 512,
    };
    let mut ring = Ring::new(256, false)?;
    let mut memory = Memory::new(VhostUserBlk::memory())?;
    let mut frontend = VhostUserBlk::listen(path, "null", geometry, &mut ring, &mut memory)?;
    let mut arrivals = Vec::new();
    while frontend.stage() != Stage::Gone {
        if ended.swap(false, Ordering::Relaxed) {
            frontend.stop(&mut ring)?;
        }
        ring.wait(Some(Duration::from_millis(100)))?;
        while let Some(event) = ring.next_event() {
            if event.token.owner() == Owner::Frontend {
                frontend.on_event(&mut ring, event, &mut arrivals)?;
            }
            while let Some(Arrival { request, span }) = arrivals.pop() {
                if let (Operation::Read, Some(mut span)) = (request.operation, span) {
                    // SAFETY: the span is ours until the request is answered.
                    unsafe { span.bytes_mut() }.fill(0);
                }
                frontend.complete(&mut ring, request.tag, Ok(()), &mut arrivals);
            }
        }
    }
    Ok(())
}
