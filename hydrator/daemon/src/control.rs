// SPDX-License-Identifier: Apache-2.0
//! The control socket's side of the loop.
//!
//! Connections are polled through the ring and read when something is there:
//! nothing here is on the guest's way.

use std::fs::Permissions;
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use anyhow::Context;
use io_uring::{opcode, types};
use localstor_hydrator_disks::{Event, Owner, Ring, Token};
use tracing::{debug, warn};

use crate::protocol::{Answer, LONGEST_LINE, Request, parse};
use crate::runtime;

/// Connections at the same time; others wait.
const CLIENTS: usize = 16;

const LISTENER: u64 = CLIENTS as u64;

/// Names a client until it is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Client(usize);

struct Connection {
    stream: UnixStream,
    line: Vec<u8>,
}

/// The control socket.
pub(crate) struct Control {
    listener: UnixListener,
    listening: bool,
    connections: [Option<Connection>; CLIENTS],
}

fn poll(ring: &mut Ring, fd: i32, detail: u64) {
    let entry = opcode::PollAdd::new(types::Fd(fd), libc::POLLIN as u32).build();
    // SAFETY: a poll points to no memory.
    unsafe { ring.push(entry, Token::new(Owner::Control, detail)) };
}

impl Control {
    /// Listens on `path`. What a predecessor has left there is removed: the
    /// disk's lock says that it is dead.
    pub(crate) fn listen(path: &Path, ring: &mut Ring) -> anyhow::Result<Control> {
        runtime::remove(path)?;
        let listener = UnixListener::bind(path)
            .and_then(|listener| {
                std::fs::set_permissions(path, Permissions::from_mode(0o600))?;
                listener.set_nonblocking(true).map(|()| listener)
            })
            .with_context(|| format!("cannot listen on {}", path.display()))?;
        let mut control = Control {
            listener,
            listening: false,
            connections: Default::default(),
        };
        control.await_client(ring);
        Ok(control)
    }

    fn await_client(&mut self, ring: &mut Ring) {
        if !self.listening && self.connections.iter().any(Option::is_none) {
            poll(ring, self.listener.as_raw_fd(), LISTENER);
            self.listening = true;
        }
    }

    /// Takes a completion of the ring's; a request, if there is one.
    pub(crate) fn on_event(&mut self, ring: &mut Ring, event: Event) -> Option<(Client, Request)> {
        if event.token.detail() == LISTENER {
            self.listening = false;
            self.accept(ring);
            return None;
        }
        self.read(ring, Client(event.token.detail() as usize))
    }

    fn accept(&mut self, ring: &mut Ring) {
        if let Some(index) = self.connections.iter().position(Option::is_none) {
            match self.listener.accept() {
                Ok((stream, _)) if stream.set_nonblocking(true).is_ok() => {
                    poll(ring, stream.as_raw_fd(), index as u64);
                    self.connections[index] = Some(Connection {
                        stream,
                        line: Vec::new(),
                    });
                }
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => {
                    warn!("control: cannot accept a client: {error}");
                    ring.pause(Token::new(Owner::Control, LISTENER));
                    self.listening = true;
                }
            }
        }
        self.await_client(ring);
    }

    fn read(&mut self, ring: &mut Ring, client: Client) -> Option<(Client, Request)> {
        let connection = self.connections.get_mut(client.0)?.as_mut()?;
        let mut buffer = [0; LONGEST_LINE];
        match connection.stream.read(&mut buffer) {
            Ok(0) => {
                self.drop_client(ring, client);
                return None;
            }
            Ok(count) => connection.line.extend(&buffer[..count]),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => {
                debug!("control: {error}");
                self.drop_client(ring, client);
                return None;
            }
        }
        self.next_request(ring, client)
    }

    /// The next request of what a client has sent; if there is none, more is
    /// waited for.
    fn next_request(&mut self, ring: &mut Ring, client: Client) -> Option<(Client, Request)> {
        loop {
            let connection = self.connections.get_mut(client.0)?.as_mut()?;
            let Some(end) = connection.line.iter().position(|byte| *byte == b'\n') else {
                if connection.line.len() > LONGEST_LINE {
                    let error = format!("the line is longer than {LONGEST_LINE} bytes");
                    self.send(client, &Answer::error(error));
                    self.drop_client(ring, client);
                    return None;
                }
                poll(ring, connection.stream.as_raw_fd(), client.0 as u64);
                return None;
            };
            let line: Vec<u8> = connection.line.drain(..=end).collect();
            match parse(&line[..end]) {
                // Its next one is looked at when this one is answered.
                Ok(request) => return Some((client, request)),
                Err(error) => self.send(client, &Answer::error(error)),
            }
        }
    }

    /// Answers a request; another one of the client's, if it has sent more.
    pub(crate) fn answer(
        &mut self,
        ring: &mut Ring,
        client: Client,
        answer: &Answer,
    ) -> Option<(Client, Request)> {
        self.send(client, answer);
        self.next_request(ring, client)
    }

    /// Who does not take an answer does not get it.
    fn send(&mut self, client: Client, answer: &Answer) {
        if let Some(Some(connection)) = self.connections.get_mut(client.0) {
            if let Err(error) = connection.stream.write_all(answer.line().as_bytes()) {
                debug!("control: the client takes no answer: {error}");
            }
        }
    }

    fn drop_client(&mut self, ring: &mut Ring, client: Client) {
        if let Some(connection) = self.connections.get_mut(client.0) {
            *connection = None;
        }
        self.await_client(ring);
    }
}
