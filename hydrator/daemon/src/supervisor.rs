// SPDX-License-Identifier: Apache-2.0
//! Runs the serving process, again and again, until the move is ended.
//!
//! The supervisor does so little that it has no reason to die. If it is killed
//! all the same, the serving process lives on, without anybody to restart it.

use std::ffi::OsString;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use rustix::process::{Pid, Signal, kill_process, setsid};
use signal_hook::consts::{SIGCHLD, SIGINT, SIGTERM};
use tracing::{info, warn};

use crate::arguments::Settings;
use crate::launcher::own_command;
use crate::runtime::Runtime;
use crate::{exit, serve};

/// How often to look at the log's size.
const SELDOM: Duration = Duration::from_secs(1);

/// The pause after a failure, and the longest after a row of them.
const PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// How a serving process has ended.
#[derive(Debug, PartialEq, Eq)]
enum Ending {
    /// The move is ended, the device removed.
    Removed,
    /// The device was left to a successor.
    Departed,
    /// It was killed.
    Crashed(i32),
    /// It has given up, or could not be started, and says why.
    Failed(String),
}

/// How long to wait until the next start.
#[derive(Debug, Default)]
struct Pauses {
    next: Duration,
}

impl Pauses {
    /// The device was usable: what went wrong before is over.
    fn forget(&mut self) {
        self.next = Duration::ZERO;
    }

    /// The pause after this ending. Guests wait for the device, so the first
    /// start after a crash comes at once.
    fn after(&mut self, ending: &Ending) -> Duration {
        let least = match ending {
            Ending::Failed(_) => PAUSE,
            _ => Duration::ZERO,
        };
        let pause = self.next.max(least);
        self.next = (pause * 2).clamp(PAUSE, LONGEST_PAUSE);
        pause
    }
}

/// Sleeps until a signal comes.
struct Alarm {
    bell: UnixStream,
    // The supervisor itself shall end.
    leaving: Arc<AtomicBool>,
}

impl Alarm {
    fn set() -> std::io::Result<Alarm> {
        let (bell, rope) = UnixStream::pair()?;
        let leaving = Arc::new(AtomicBool::new(false));
        // In this order: who is woken finds the flag set.
        for signal in [SIGTERM, SIGINT] {
            signal_hook::flag::register(signal, Arc::clone(&leaving))?;
        }
        for signal in [SIGTERM, SIGINT, SIGCHLD] {
            signal_hook::low_level::pipe::register(signal, rope.try_clone()?)?;
        }
        Ok(Alarm { bell, leaving })
    }

    fn is_leaving(&self) -> bool {
        self.leaving.load(Ordering::Relaxed)
    }

    /// Returns after a signal or this time, which must not be zero.
    fn sleep(&mut self, time: Duration) -> anyhow::Result<()> {
        self.bell.set_read_timeout(Some(time))?;
        match self.bell.read(&mut [0; 64]) {
            Err(error)
                if !matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) =>
            {
                Err(error).context("cannot await signals")
            }
            _ => Ok(()),
        }
    }
}

struct Supervisor {
    runtime: Runtime,
    program: OsString,
    arguments: Vec<OsString>,
    alarm: Alarm,
    pauses: Pauses,
    // The device was usable once: with these arguments it can work.
    proven: bool,
    // Of the runtime directory; given up at the end.
    _lock: File,
}

/// Serves a volume by child processes until its end: the exit status.
///
/// # Errors
/// What a serving process failed of before the device was ever usable.
pub fn supervise(settings: &Settings) -> anyhow::Result<u8> {
    setsid().context("cannot begin a session")?;
    let runtime = Runtime::open(&settings.runtime)?;
    let Some(lock) = runtime.lock()? else {
        return Ok(exit::SUPERVISED);
    };
    runtime.take_log()?;
    info!("supervising the move {}", settings.move_id);
    // This keeps the supervisor itself going when memory is short, and what it
    // asks the kernel for waits for no disk: that is inherited by its children.
    // What can't be promised then is their start. The kernel needs pages for a
    // process, and the program's file may have to be read again.
    serve::stay_in_memory();
    let (program, arguments) = own_command();
    let supervisor = Supervisor {
        runtime,
        program,
        arguments,
        alarm: Alarm::set().context("cannot await signals")?,
        pauses: Pauses::default(),
        proven: false,
        _lock: lock,
    };
    supervisor.run()?;
    Ok(exit::DONE)
}

impl Supervisor {
    fn run(mut self) -> anyhow::Result<()> {
        loop {
            let ending = self.serve()?;
            if self.alarm.is_leaving() || ending == Ending::Removed {
                info!("the serving process has ended ({ending:?}): so does its supervisor");
                return Ok(());
            }
            let pause = self.pauses.after(&ending);
            match ending {
                Ending::Failed(reason) if !self.proven => bail!(reason),
                Ending::Failed(reason) => {
                    warn!("the serving process has failed: {reason}; a successor in {pause:?}");
                }
                Ending::Crashed(signal) => {
                    warn!(
                        "the serving process has died of signal {signal}; a successor in {pause:?}"
                    );
                }
                _ => info!("the serving process has left; a successor in {pause:?}"),
            }
            let start = Instant::now();
            while let Some(left) = pause
                .checked_sub(start.elapsed())
                .filter(|left| !left.is_zero())
            {
                self.alarm.sleep(left)?;
                if self.alarm.is_leaving() {
                    return Ok(());
                }
            }
        }
    }

    /// The life of one serving process.
    fn serve(&mut self) -> anyhow::Result<Ending> {
        self.runtime.limit_log();
        let log_begin = Runtime::log_size(self.runtime.directory());
        // By its name: after an upgrade it is the new program.
        let spawned = Command::new(&self.program)
            .arg("run")
            .args(&self.arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn();
        let mut child = match spawned {
            Ok(child) => child,
            Err(error) => {
                let program = Path::new(&self.program).display();
                return Ok(Ending::Failed(format!("cannot start {program}: {error}")));
            }
        };
        let mut told = false;
        let status = loop {
            if let Some(status) = child.try_wait().context("cannot await the child")? {
                break status;
            }
            if self.alarm.is_leaving() && !told {
                end(&child);
                told = true;
            }
            self.alarm.sleep(SELDOM)?;
            self.runtime.limit_log();
        };
        // It prints its device when that is usable, and nothing else.
        let mut printed = Vec::new();
        if let Some(mut pipe) = child.stdout.take() {
            pipe.read_to_end(&mut printed)
                .context("cannot read what the child has printed")?;
        }
        if !printed.is_empty() {
            self.proven = true;
            self.pauses.forget();
        }
        Ok(self.ending(status, log_begin))
    }

    fn ending(&self, status: ExitStatus, log_begin: u64) -> Ending {
        let code = status.code().and_then(|code| u8::try_from(code).ok());
        match (code, status.signal()) {
            (Some(exit::DONE), _) => Ending::Removed,
            (Some(exit::DEPARTED), _) => Ending::Departed,
            (_, Some(signal)) => Ending::Crashed(signal),
            _ => Ending::Failed(
                Runtime::last_error(self.runtime.directory(), log_begin)
                    .unwrap_or_else(|| status.to_string()),
            ),
        }
    }
}

/// Asks a serving process to leave its device to a successor.
fn end(child: &Child) {
    let Some(pid) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) else {
        return;
    };
    if let Err(error) = kill_process(pid, Signal::TERM) {
        warn!("cannot end the serving process {pid:?}: {error}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crash_is_followed_by_a_start_at_once_and_a_row_of_them_by_pauses() {
        let mut pauses = Pauses::default();
        let crash = Ending::Crashed(9);
        let row: Vec<_> = (0..9).map(|_| pauses.after(&crash).as_millis()).collect();
        assert_eq!(row, [0, 100, 200, 400, 800, 1600, 3200, 5000, 5000]);
        pauses.forget();
        assert_eq!(pauses.after(&crash), Duration::ZERO);
    }

    #[test]
    fn a_failure_is_followed_by_a_pause() {
        let mut pauses = Pauses::default();
        let failure = Ending::Failed("no disk".to_owned());
        assert_eq!(pauses.after(&failure), PAUSE);
        assert_eq!(pauses.after(&failure), 2 * PAUSE);
        pauses.forget();
        assert_eq!(pauses.after(&failure), PAUSE);
    }
}
