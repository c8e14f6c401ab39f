// SPDX-License-Identifier: Apache-2.0
//! The other end of the control socket.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use anyhow::{Context, bail};

use crate::protocol::{Answer, Request, encode};
use crate::runtime::CONTROL;

/// Sends a request to the hydrator in `runtime`, and prints a status.
///
/// # Errors
/// That no hydrator is there, and what it says if it refuses.
pub fn ask(runtime: &Path, request: &Request) -> anyhow::Result<()> {
    let path = runtime.join(CONTROL);
    let mut stream = UnixStream::connect(&path)
        .with_context(|| format!("no hydrator answers at {}", path.display()))?;
    stream.write_all(format!("{}\n", encode(request)).as_bytes())?;
    let mut answer = String::new();
    BufReader::new(stream).read_line(&mut answer)?;
    if answer.is_empty() {
        bail!(
            "the hydrator at {} has ended without an answer",
            path.display()
        );
    }
    match serde_json::from_str(&answer).with_context(|| format!("answer {answer:?}"))? {
        Answer::Status(status) => {
            println!("{}", serde_json::to_string_pretty(&status)?);
            Ok(())
        }
        Answer::Ok { .. } => Ok(()),
        Answer::Error { error } => bail!(error),
    }
}
