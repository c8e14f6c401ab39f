// SPDX-License-Identifier: Apache-2.0
//! The other end of the control socket.

use std::io::{self, BufRead, BufReader, ErrorKind, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, bail};

use crate::protocol::{Answer, Request, Status, encode};
use crate::runtime::CONTROL;

/// How long a hydrator that is there may take to tell its status.
const PROMPTLY: Duration = Duration::from_secs(1);

/// Sends a request to the hydrator in `runtime`, and prints a status.
///
/// # Errors
/// That no hydrator is there, and what it says if it refuses.
pub fn ask(runtime: &Path, request: &Request) -> anyhow::Result<()> {
    match exchange(runtime, request, None)? {
        Answer::Status(status) => {
            println!("{}", serde_json::to_string_pretty(&status)?);
            Ok(())
        }
        Answer::Ok { .. } => Ok(()),
        Answer::Error { error } => bail!(error),
    }
}

/// Whether nobody was there to take a request, or died before it could.
pub(crate) fn is_gone(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        cause.downcast_ref::<io::Error>().is_some_and(|error| {
            matches!(
                error.kind(),
                ErrorKind::NotFound
                    | ErrorKind::ConnectionRefused
                    | ErrorKind::ConnectionReset
                    | ErrorKind::BrokenPipe
            )
        })
    })
}

/// The status of the hydrator in `runtime`; None if none answers promptly.
pub(crate) fn status(runtime: &Path) -> Option<Status> {
    match exchange(runtime, &Request::Status, Some(PROMPTLY)) {
        Ok(Answer::Status(status)) => Some(*status),
        _ => None,
    }
}

fn exchange(
    runtime: &Path,
    request: &Request,
    patience: Option<Duration>,
) -> anyhow::Result<Answer> {
    let path = runtime.join(CONTROL);
    let mut stream = UnixStream::connect(&path)
        .with_context(|| format!("no hydrator answers at {}", path.display()))?;
    stream.set_read_timeout(patience)?;
    stream.write_all(format!("{}\n", encode(request)).as_bytes())?;
    let mut answer = String::new();
    BufReader::new(stream).read_line(&mut answer)?;
    if answer.is_empty() {
        bail!(
            "the hydrator at {} has ended without an answer",
            path.display()
        );
    }
    serde_json::from_str(&answer).with_context(|| format!("answer {answer:?}"))
}
