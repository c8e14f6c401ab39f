// SPDX-License-Identifier: Apache-2.0
//! Starts a supervisor in the background, and waits for the device.

use std::ffi::OsString;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

use crate::arguments::{Launch, Settings};
use crate::client;
use crate::exit;
use crate::runtime::Runtime;

/// How often to ask for the device.
const INTERVAL: Duration = Duration::from_millis(20);

/// This program's name, and the arguments of its command `run` that a
/// supervisor and the serving process get, too: as they were given.
pub(crate) fn own_command() -> (OsString, Vec<OsString>) {
    let mut words = std::env::args_os();
    let program = words.next().unwrap_or_default();
    let arguments = words.skip(1).filter(|word| word != "--detach");
    (program, arguments.collect())
}

/// Makes sure that a volume is served in the background, and waits until its
/// device is usable: its path, or None if that takes longer than the patience.
///
/// # Errors
/// What the serving process failed of before the device was usable; that
/// another move is served in this runtime directory.
pub fn launch(launch: &Launch) -> anyhow::Result<Option<String>> {
    let settings = &launch.settings;
    let start = Instant::now();
    let mut supervisor = None;
    let mut log_begin = 0;
    loop {
        match client::status(&settings.runtime) {
            Some(status) => {
                check_move(settings, &status.move_id)?;
                if status.device.is_some() {
                    return Ok(status.device);
                }
            }
            None if supervisor.is_none() && !Runtime::is_supervised(&settings.runtime) => {
                log_begin = Runtime::log_size(&settings.runtime);
                supervisor = Some(start_supervisor()?);
            }
            None => {}
        }
        if let Some(process) = &mut supervisor {
            if let Some(status) = process.try_wait()? {
                judge(&settings.runtime, log_begin, status)?;
                supervisor = None;
            }
        }
        if start.elapsed() > launch.patience {
            eprintln!(
                "the device is not usable after {} s; work on it goes on: see \
                 \"localstor-hydrator status {runtime}\" and {runtime}/log, or wait \
                 by the same command",
                launch.patience.as_secs(),
                runtime = settings.runtime.display(),
            );
            return Ok(None);
        }
        std::thread::sleep(INTERVAL);
    }
}

fn check_move(settings: &Settings, found: &str) -> anyhow::Result<()> {
    if found == settings.move_id.to_string() {
        return Ok(());
    }
    bail!(
        "the hydrator in {} serves the move {found}, not {}: finish or abort that one, \
         or use another runtime directory",
        settings.runtime.display(),
        settings.move_id
    );
}

fn start_supervisor() -> anyhow::Result<Child> {
    let (program, arguments) = own_command();
    Command::new(&program)
        .arg("supervise")
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .with_context(|| format!("cannot start {}", Path::new(&program).display()))
}

/// What it means that our supervisor has ended: an error, unless there is
/// another one.
fn judge(runtime: &Path, log_begin: u64, status: ExitStatus) -> anyhow::Result<()> {
    match status.code().and_then(|code| u8::try_from(code).ok()) {
        Some(exit::SUPERVISED) => Ok(()),
        Some(exit::DONE) => bail!("somebody has ended the move, or the supervisor"),
        _ => match Runtime::last_error(runtime, log_begin) {
            Some(reason) => bail!(reason),
            None => bail!(
                "the supervisor has ended ({status}), see {}/log",
                runtime.display()
            ),
        },
    }
}
