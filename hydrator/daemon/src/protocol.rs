// SPDX-License-Identifier: Apache-2.0
//! What is said on the control socket: one JSON object on a line each way.
//!
//! ```text
//! {"command": "throttle", "limit": 104857600}
//! {"ok": true}
//! {"command": "dance"}
//! {"error": "unknown variant `dance`, expected one of ..."}
//! ```

use serde::{Deserialize, Serialize};

use crate::arguments::Verify;

/// The longest line, in bytes.
pub const LONGEST_LINE: usize = 4096;

/// What is wanted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "lowercase", deny_unknown_fields)]
pub enum Request {
    /// How far the move is: answered with a [`Status`].
    Status,
    /// The source does not change any more: copy. Answered when it is recorded.
    Start,
    /// How fast to copy, in bytes per second. What is not given goes back to
    /// what the process was started with.
    Throttle {
        /// At most.
        #[serde(default)]
        limit: Option<u64>,
        /// Whatever the guest does.
        #[serde(default)]
        minimum: Option<u64>,
    },
    /// Ask the source again at once, also for what it could not read.
    Retry,
    /// Begin nothing more on the destination and on the metadata, and answer the
    /// guest nothing, so that both can be copied as they are at one moment.
    /// Answered when nothing is in flight on them any more; reads of the source
    /// may be.
    ///
    /// It ends by itself so many seconds after it was asked for, whatever has
    /// become of who asked, and with an end of the move or of the process. If it
    /// does before it is answered, the answer is an error. There is one pause at
    /// a time, and it is nobody's: who resumes must be who has paused.
    Pause {
        /// 1 to [`LONGEST_PAUSE`](crate::arguments::LONGEST_PAUSE), from the request on.
        seconds: u64,
    },
    /// Go on after a pause. An error if it has ended by itself, or was not
    /// answered yet: what was copied meanwhile counts for nothing.
    Resume,
    /// End a move that is complete. Answered when the device is gone.
    Finish,
    /// End a move as it is. Answered when the device is gone.
    Abort,
}

/// An answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Answer {
    /// How far the move is.
    Status(Box<Status>),
    /// It is done.
    Ok {
        /// Always.
        ok: bool,
    },
    /// It is not done.
    Error {
        /// Why.
        error: String,
    },
}

impl Answer {
    /// It is done.
    pub fn ok() -> Answer {
        Answer::Ok { ok: true }
    }

    /// It is not done.
    pub fn error(error: impl ToString) -> Answer {
        Answer::Error {
            error: error.to_string(),
        }
    }

    /// As it is sent.
    pub fn line(&self) -> String {
        let mut line = serde_json::to_string(self)
            .unwrap_or_else(|error| format!("{{\"error\":\"cannot answer: {error}\"}}"));
        line.push('\n');
        line
    }
}

/// What the volume is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// Recovering what an earlier process did.
    Opening,
    /// Usable; the source may still change, nothing is copied.
    Starting,
    /// Copying.
    Migrating,
    /// The source does not answer, or not everything; the rest is served.
    Stalled,
    /// Blocks differ from the source although they were copied again. They stay
    /// there and are read from there; the move does not end.
    Differing,
    /// Everything is local: the table can be swapped.
    Done,
    /// A disk has failed. Restart the process when it is mended.
    Broken,
    /// Ending.
    Closing,
}

/// How far a move is. Sizes are in bytes, rates in bytes per second.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// What it is doing.
    pub state: State,
    /// Id of the move.
    #[serde(rename = "move")]
    pub move_id: String,
    /// The process.
    pub pid: u32,
    /// Its version.
    pub version: String,
    /// The block device or socket; none before it is ready.
    pub device: Option<String>,
    /// Size of the volume.
    pub size: u64,
    /// Of this, on the destination.
    pub local: u64,
    /// Copied since the process was started, and compared where that is to be
    /// done.
    pub copied: u64,
    /// Of this, zeros that were not written.
    pub zeros: u64,
    /// How fast the last ten seconds of copying were.
    pub rate: u64,
    /// How fast it may be; no limit if none.
    pub limit: Option<u64>,
    /// How fast it is whatever the guest does.
    pub minimum: u64,
    /// Seconds until all is local, at this rate; none if that can't be told.
    pub remaining_seconds: Option<u64>,
    /// Requests that wait.
    pub waiting: u64,
    /// Blocks of 4 KiB that the destination could not read when the volume was
    /// opened: reads of them fail until all of a block is written or discarded,
    /// and the move does not end before that.
    #[serde(default)]
    pub unreadable_blocks: u64,
    /// Where the first of these is.
    #[serde(default)]
    pub first_unreadable: Option<u64>,
    /// Written to blocks that were not local for good.
    pub written: u64,
    /// Written to the metadata device.
    pub metadata_written: u64,
    /// Blocks of 4 KiB of the source that can't be read; nothing more is
    /// copied when they are 64 MiB.
    pub bad_blocks: u64,
    /// Blocks that were to be copied and that the source does not answer,
    /// though it may answer others; they are asked for again. A process of an
    /// earlier version does not tell it.
    #[serde(default)]
    pub unanswered_blocks: u64,
    /// How much of what is copied is compared with the source. A process of an
    /// earlier version tells neither this nor what follows.
    #[serde(default)]
    pub verify: Verify,
    /// Of `copied`, compared and found the same.
    #[serde(default)]
    pub verified: u64,
    /// Blocks that were found to differ, each time they were, since the process
    /// was started.
    #[serde(default)]
    pub differences: u64,
    /// Blocks that differ although they were copied again.
    #[serde(default)]
    pub differing_blocks: u64,
    /// Where the first of these is.
    #[serde(default)]
    pub first_differing: Option<u64>,
}

/// A request from a line, without its end.
///
/// # Errors
/// What is wrong with it, in a sentence.
pub fn parse(line: &[u8]) -> Result<Request, String> {
    if line.len() > LONGEST_LINE {
        return Err(format!("the line is longer than {LONGEST_LINE} bytes"));
    }
    serde_json::from_slice(line).map_err(|error| format!("this is no request: {error}"))
}

/// A request as a line, without its end.
pub fn encode(request: &Request) -> String {
    // Strings, numbers and nothing else: this does not fail.
    serde_json::to_string(request).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn requests_are_what_the_command_line_sends() {
        for request in [
            Request::Status,
            Request::Start,
            Request::Throttle {
                limit: Some(1),
                minimum: None,
            },
            Request::Retry,
            Request::Pause { seconds: 5 },
            Request::Resume,
            Request::Finish,
            Request::Abort,
        ] {
            assert_eq!(parse(encode(&request).as_bytes()), Ok(request));
        }
        let request = parse(br#"{"command": "throttle"}"#).unwrap();
        let none = Request::Throttle {
            limit: None,
            minimum: None,
        };
        assert_eq!(request, none);
    }

    #[test]
    fn what_is_no_request_is_told_why() {
        for (line, reason) in [
            (&b""[..], "EOF"),
            (b"{}", "command"),
            (b"status", "expected"),
            (br#"{"command": "dance"}"#, "dance"),
            (br#"{"command": "throttle", "limit": -1}"#, "-1"),
            (br#"{"command": "throttle", "speed": 1}"#, "speed"),
            (br#"{"command": "pause"}"#, "seconds"),
            (br#"{"command": "pause", "seconds": -1}"#, "-1"),
            (b"\xff\xfe", "this is no request"),
        ] {
            let error = parse(line).unwrap_err();
            assert!(error.contains(reason), "{error}");
        }
    }

    proptest! {
        #[test]
        fn whatever_is_sent_is_parsed_or_refused(line: Vec<u8>) {
            let _ = parse(&line);
        }
    }
}
