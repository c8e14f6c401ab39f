// SPDX-License-Identifier: Apache-2.0
//! A Unix socket at which one client after another is awaited.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use io_uring::{opcode, types};
use localstor_hydrator_disks::{Event, PAUSED, Ring, Token};
use rustix::net::Shutdown;
use tracing::warn;

use crate::block::FrontendError;

/// The socket of a server.
pub(crate) struct Door {
    path: PathBuf,
    listener: OwnedFd,
    // Of the completions that are given to `opened`.
    token: Token,
    closed: bool,
}

impl Door {
    /// Listens on `path`, which must not exist.
    pub(crate) fn new(path: &Path, token: Token) -> Result<Door, FrontendError> {
        let listener = UnixListener::bind(path).map_err(|error| {
            FrontendError::kernel(format!("cannot listen on {}", path.display()), error)
        })?;
        Ok(Door {
            path: path.to_owned(),
            listener: listener.into(),
            token,
            closed: false,
        })
    }

    /// Waits for the next client.
    pub(crate) fn await_client(&self, ring: &mut Ring) {
        let entry = opcode::Accept::new(
            types::Fd(self.listener.as_raw_fd()),
            std::ptr::null_mut(),
            std::ptr::null_mut(),
        )
        .flags(libc::SOCK_CLOEXEC)
        .build();
        // SAFETY: no address is asked for.
        unsafe { ring.push(entry, self.token) };
    }

    /// Takes a completion: the client, if one has come. Otherwise one is waited
    /// for again, unless the door is closed.
    pub(crate) fn opened(&self, ring: &mut Ring, event: Event) -> Option<OwnedFd> {
        if event.result >= 0 {
            // SAFETY: the kernel has just made this descriptor for us.
            return Some(unsafe { OwnedFd::from_raw_fd(event.result) });
        }
        if self.closed {
            return None;
        }
        if event.result == PAUSED {
            self.await_client(ring);
        } else {
            // Who waits outside is still there: at once, it would fail again.
            let error = io::Error::from_raw_os_error(-event.result);
            warn!("{}: cannot accept a client: {error}", self.path.display());
            ring.pause(self.token);
        }
        None
    }

    /// Lets nobody in any more; who waits is sent away.
    pub(crate) fn close(&mut self) {
        self.closed = true;
        let _ = std::fs::remove_file(&self.path);
        let _ = rustix::net::shutdown(&self.listener, Shutdown::Both);
    }
}
