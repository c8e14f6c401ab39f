// SPDX-License-Identifier: Apache-2.0
//! The control socket: one JSON object a line, one answer a line.
//!
//! | command | answer |
//! | --- | --- |
//! | `{"command": "status"}` | [`Status`] |
//! | `{"command": "power-cut", "seed": 7, "lose": "random"}` | [`PowerCut`] |
//! | `{"command": "obey-flushes", "value": false}` | [`Status`] |
//! | `{"command": "fail", "value": true}` | [`Status`] |
//!
//! `lose` is `keep`, `drop`, `tear` or `random`, which it is without one;
//! without a `seed` the disk takes any and says which. What is no command is
//! answered by `{"error": "..."}`, and changes nothing.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::thread;

use serde::{Deserialize, Serialize};

use crate::cache::{self, Losses};
use crate::disk::{Disk, Status};
use crate::loss::Lose;

// Bytes of a line. Who sends more does not mean us.
const MAX_LINE: u64 = 4096;

/// What a disk can be told.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(tag = "command", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Command {
    /// Tell how it is.
    Status {},
    /// Lose the power.
    PowerCut {
        /// What decides over unflushed writes.
        seed: Option<u64>,
        /// In which way.
        #[serde(default)]
        lose: Lose,
    },
    /// Let flushes do what they promise, or let the disk lie.
    ObeyFlushes {
        /// Whether they do.
        value: bool,
    },
    /// Let everything that the disk is asked for fail, or let it work.
    Fail {
        /// Whether it does.
        value: bool,
    },
}

/// What a power cut did, and how to repeat it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct PowerCut {
    /// The seed that decided.
    pub seed: u64,
    /// In which way.
    pub lose: Lose,
    /// What became of the writes that were not flushed.
    #[serde(flatten)]
    pub losses: Losses,
}

/// What a disk answers.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub enum Answer {
    /// To `status`, `obey-flushes` and `fail`.
    Status(Status),
    /// To `power-cut`.
    PowerCut(PowerCut),
    /// To what is no command, or can't be done.
    Error {
        /// What is wrong, for a reader.
        error: String,
    },
}

/// Answer one line.
pub fn answer(disk: &Disk, line: &[u8]) -> Answer {
    let command = match serde_json::from_slice(line) {
        Ok(command) => command,
        Err(error) => {
            return Answer::Error {
                error: format!("this is no command for a disk: {error}"),
            };
        }
    };
    perform(disk, command).unwrap_or_else(|error| Answer::Error {
        error: error.to_string(),
    })
}

fn perform(disk: &Disk, command: Command) -> Result<Answer, cache::Error> {
    match command {
        Command::Status {} => {}
        Command::PowerCut { seed, lose } => {
            let seed = seed.unwrap_or_else(rand::random);
            let losses = disk.cut_power(seed, lose)?;
            tracing::info!(
                "the power is cut with seed {seed}, {lose:?}: {} unflushed writes are kept, \
                 {} dropped, {} torn",
                losses.kept,
                losses.dropped,
                losses.torn
            );
            return Ok(Answer::PowerCut(PowerCut { seed, lose, losses }));
        }
        Command::ObeyFlushes { value } => {
            tracing::info!("flushes are {}", if value { "obeyed" } else { "ignored" });
            disk.obey_flushes(value);
        }
        Command::Fail { value } => {
            tracing::info!("the disk {}", if value { "dies" } else { "works" });
            disk.fail(value);
        }
    }
    Ok(Answer::Status(disk.status()))
}

/// Answer everybody who connects, for ever.
pub fn serve(disk: &Arc<Disk>, listener: &UnixListener) -> io::Result<()> {
    loop {
        let (connection, _address) = listener.accept()?;
        let disk = disk.clone();
        thread::spawn(move || {
            if let Err(error) = converse(&disk, &connection) {
                tracing::warn!("a conversation on the control socket failed: {error}");
            }
        });
    }
}

fn converse(disk: &Disk, connection: &UnixStream) -> io::Result<()> {
    let mut reader = BufReader::new(connection);
    let mut writer = connection;
    loop {
        let mut line = Vec::new();
        if reader
            .by_ref()
            .take(MAX_LINE)
            .read_until(b'\n', &mut line)?
            == 0
        {
            return Ok(());
        }
        let answer = if line.ends_with(b"\n") || (line.len() as u64) < MAX_LINE {
            answer(disk, &line)
        } else {
            reader.skip_until(b'\n')?;
            Answer::Error {
                error: format!("a command has at most {MAX_LINE} bytes"),
            }
        };
        serde_json::to_writer(writer, &answer)?;
        writer.write_all(b"\n")?;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};
    use tempfile::NamedTempFile;

    use super::*;
    use crate::cache::{Cache, Content};

    fn disk() -> (NamedTempFile, Arc<Disk>) {
        let file = NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        let cache = Cache::open(file.path(), 1 << 20, 512).unwrap();
        (file, Arc::new(Disk::new(cache)))
    }

    fn told(disk: &Disk, line: &str) -> Value {
        serde_json::to_value(answer(disk, line.as_bytes())).unwrap()
    }

    #[test]
    fn status_tells_what_was_not_flushed() {
        let (_file, disk) = disk();
        disk.plug_in()
            .write(0, Content::Data(vec![1; 1024]))
            .unwrap();
        let status = json!({
            "capacity": 1 << 20, "connected": false, "obeys_flushes": true,
            "fails": false, "flushes": 0, "unflushed": 1, "held": 1024,
        });
        assert_eq!(status, told(&disk, r#"{"command": "status"}"#));
    }

    #[test]
    fn a_power_cut_tells_what_it_did() {
        let (_file, disk) = disk();
        disk.plug_in()
            .write(0, Content::Data(vec![1; 1024]))
            .unwrap();
        let cut = json!({"seed": 5, "lose": "drop", "kept": 0, "dropped": 1, "torn": 0});
        let line = r#"{"command": "power-cut", "seed": 5, "lose": "drop"}"#;
        assert_eq!(cut, told(&disk, line));
    }

    #[test]
    fn a_power_cut_without_a_seed_tells_which_it_took() {
        let (_file, disk) = disk();
        let seed = || {
            told(&disk, r#"{"command": "power-cut"}"#)["seed"]
                .as_u64()
                .unwrap()
        };
        assert_ne!(seed(), seed());
    }

    #[test]
    fn after_a_power_cut_nobody_who_was_connected_is_answered() {
        let (_file, disk) = disk();
        let plug = disk.plug_in();
        told(&disk, r#"{"command": "power-cut"}"#);
        assert!(plug.write(0, Content::Zeros(512)).is_err());
        assert_eq!(0, disk.status().unflushed);
        disk.plug_in().write(0, Content::Zeros(512)).unwrap();
    }

    #[test]
    fn a_disk_that_lies_loses_what_was_flushed() {
        let (file, disk) = disk();
        told(&disk, r#"{"command": "obey-flushes", "value": false}"#);
        let plug = disk.plug_in();
        plug.write(0, Content::Data(vec![1; 512])).unwrap();
        plug.flush(plug.now().unwrap()).unwrap();
        told(&disk, r#"{"command": "power-cut", "lose": "drop"}"#);
        assert_eq!(0, std::fs::read(file.path()).unwrap()[0]);
    }

    #[test]
    fn a_dead_disk_does_nothing_and_keeps_what_it_has() {
        let (_file, disk) = disk();
        let plug = disk.plug_in();
        plug.write(0, Content::Data(vec![1; 512])).unwrap();
        told(&disk, r#"{"command": "fail", "value": true}"#);
        let mut read = [0; 512];
        assert!(plug.read(0, &mut read).is_err());
        assert!(plug.write(0, Content::Zeros(512)).is_err());
        assert!(plug.flush(plug.now().unwrap()).is_err());
        told(&disk, r#"{"command": "fail", "value": false}"#);
        plug.read(0, &mut read).unwrap();
        assert_eq!([1; 512], read);
    }

    #[test]
    fn a_wrong_command_is_told_what_is_wrong() {
        let (_file, disk) = disk();
        for (line, reason) in [
            ("", "EOF"),
            ("power-cut", "expected value"),
            ("[]", "missing field `command`"),
            (r#"{"command": "explode"}"#, "unknown variant `explode`"),
            (
                r#"{"command": "power-cut", "lose": "half"}"#,
                "unknown variant `half`",
            ),
            (
                r#"{"command": "power-cut", "sead": 1}"#,
                "unknown field `sead`",
            ),
            (r#"{"command": "power-cut", "seed": -1}"#, "invalid value"),
            (r#"{"command": "obey-flushes"}"#, "missing field `value`"),
        ] {
            let error = told(&disk, line)["error"].as_str().unwrap().to_owned();
            assert!(error.contains(reason), "{line}: {error}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

        #[test]
        fn garbage_is_answered_and_changes_nothing(line: Vec<u8>) {
            let (_file, disk) = disk();
            disk.plug_in().write(0, Content::Zeros(512)).unwrap();
            let answered = answer(&disk, &line);
            let is_error = matches!(answered, Answer::Error { .. });
            prop_assert!(is_error);
            prop_assert_eq!(1, disk.status().unflushed);
        }
    }
}
