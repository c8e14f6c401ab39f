// SPDX-License-Identifier: Apache-2.0
//! Ends a move, whether anybody serves it or not.
//!
//! A hydrator that died for good has left its device in the kernel, where
//! requests would wait for a successor for ever.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::bail;

use crate::protocol::Request;
use crate::runtime::Runtime;
use crate::{client, devices};

/// How long a supervisor may take to bring its hydrator back.
const PATIENCE: Duration = Duration::from_secs(30);
const INTERVAL: Duration = Duration::from_millis(50);

/// Ends a move that is complete, by the hydrator in `runtime`.
///
/// # Errors
/// That no hydrator is there, that the device is in use, and what the hydrator
/// says if it refuses.
pub fn finish(runtime: &Path) -> anyhow::Result<()> {
    require_unused(runtime)?;
    client::ask(runtime, &Request::Finish)
}

/// Ends a move as it is: by the hydrator in `runtime`, or without it.
///
/// # Errors
/// That there is no such directory, that the device is in use, and what the
/// hydrator or the kernel says if it refuses.
pub fn abort(runtime: &Path) -> anyhow::Result<()> {
    require_unused(runtime)?;
    let start = Instant::now();
    loop {
        match client::ask(runtime, &Request::Abort) {
            Err(error) if client::is_gone(&error) => {}
            told => return told,
        }
        if !Runtime::is_supervised(runtime) {
            return remove(runtime);
        }
        if start.elapsed() > PATIENCE {
            bail!(
                "the hydrator in {runtime} does not come back; see {runtime}/log, and \
                 end its supervisor, the process in {runtime}/lock",
                runtime = runtime.display()
            );
        }
        std::thread::sleep(INTERVAL);
    }
}

fn require_unused(runtime: &Path) -> anyhow::Result<()> {
    let device = Runtime::find(runtime).and_then(|runtime| runtime.shown());
    device.map_or(Ok(()), |device| devices::require_unused(&device))
}

fn remove(directory: &Path) -> anyhow::Result<()> {
    let Some(runtime) = Runtime::find(directory) else {
        bail!("there is no hydrator in {}", directory.display());
    };
    if let Some(move_id) = runtime.move_id() {
        for device in devices::of(move_id)? {
            devices::remove(device, move_id)?;
        }
    }
    runtime.remove()
}
