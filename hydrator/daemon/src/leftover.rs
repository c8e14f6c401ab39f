// SPDX-License-Identifier: Apache-2.0
//! Ends a move, whether anybody serves it or not.
//!
//! A hydrator that died for good has left its device in the kernel, where
//! requests would wait for a successor for ever.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::bail;
use localstor_hydrator_frontends::{nbd, ublk};

use crate::arguments::FrontendKind;
use crate::client;
use crate::protocol::Request;
use crate::runtime::Runtime;
use crate::serve;

/// How long a supervisor may take to bring its hydrator back.
const PATIENCE: Duration = Duration::from_secs(30);
const INTERVAL: Duration = Duration::from_millis(50);

/// Ends a move as it is: by the hydrator in `runtime`, or without it.
///
/// # Errors
/// That there is no such directory, that the device is in use, and what the
/// hydrator or the kernel says if it refuses.
pub fn abort(runtime: &Path) -> anyhow::Result<()> {
    let start = Instant::now();
    while !client::answers(runtime) {
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
    client::ask(runtime, &Request::Abort)
}

fn remove(directory: &Path) -> anyhow::Result<()> {
    let Some(runtime) = Runtime::find(directory) else {
        bail!("there is no hydrator in {}", directory.display());
    };
    if let (Some((kind, number)), Some(move_id)) = (runtime.predecessor(), runtime.move_id()) {
        if let Some(device) = runtime.device() {
            if let Some(holder) = serve::holder(&device) {
                bail!("{} is in use by {holder}", device.display());
            }
        }
        match kind {
            FrontendKind::Ublk => ublk::remove(number, serve::ublk_identity(move_id))?,
            _ => nbd::remove(number, &serve::nbd_identity(move_id))?,
        }
    }
    runtime.remove()
}
