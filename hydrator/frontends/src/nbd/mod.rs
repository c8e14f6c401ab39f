// SPDX-License-Identifier: Apache-2.0
//! NBD: a block device for kernels without ublk, and a socket for tools.
//!
//! The kernel's client gets one end of a pair of Unix sockets through netlink
//! and speaks the transmission phase right away. Other clients connect to a
//! socket of ours and go through the handshake first. Either way there is one
//! client at a time.
//!
//! When the process dies, the kernel's client waits for a new socket
//! (`NBD_ATTR_DEAD_CONN_TIMEOUT`), and a successor gives it one
//! (`NBD_CMD_RECONFIGURE`). What was in flight is sent again when its timer has
//! run out, see [`kernel`].

mod connection;
pub mod kernel;
pub mod protocol;

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use localstor_hydrator_core::{Failure, Operation, Request, Tag};
use localstor_hydrator_disks::{Event, Memory, Owner, Ring, Span, Token};
use tracing::{debug, info, warn};

use crate::block::{Arrival, Frontend, FrontendError, Geometry, Outcome, Stage, buffers};
use crate::door::Door;
use connection::Connection;
use protocol::{Command, Export, ReplyError, RequestHead};

/// The longest read or write, in bytes. The protocol wants at least 1 MiB.
const LONGEST: u32 = 1 << 20;

/// Buffers for the data of requests: how many of which size, in bytes.
const BUFFERS: [(usize, usize); 2] = [(128, 16 << 10), (12, LONGEST as usize)];

/// Requests in flight.
const SLOTS: usize = 256;

const RECEIVED: u64 = 0;
const SENT: u64 = 1;
const ACCEPTED: u64 = 2;

fn token(detail: u64) -> Token {
    Token::new(Owner::Frontend, detail)
}

/// A request between its arrival and the end of its reply.
#[derive(Clone, Copy, Debug)]
struct Slot {
    head: RequestHead,
    span: Option<Span>,
    // Which of BUFFERS the span is from.
    class: usize,
    // Its connection is gone; nobody waits for the reply.
    orphan: bool,
}

/// Where the requests of all connections are kept.
struct Slots {
    slots: Vec<Option<Slot>>,
    free: Vec<u32>,
    buffers: [Vec<Span>; BUFFERS.len()],
    // Writes of connections that are gone which are still on their way.
    orphaned_writes: usize,
}

impl Slots {
    fn new(memory: &mut Memory) -> Option<Slots> {
        Some(Slots {
            slots: vec![None; SLOTS],
            free: (0..SLOTS as u32).rev().collect(),
            buffers: buffers(BUFFERS, memory)?,
            orphaned_writes: 0,
        })
    }

    /// Room for a request; None until another one has ended.
    fn take(&mut self, head: RequestHead) -> Option<u32> {
        let (span, class) = match head.command {
            Command::Read | Command::Write => {
                let length = head.length as usize;
                let class = (0..BUFFERS.len())
                    .find(|&class| BUFFERS[class].1 >= length && !self.buffers[class].is_empty())?;
                if self.free.is_empty() {
                    return None;
                }
                let whole = self.buffers[class].pop()?;
                (Some(whole), class)
            }
            _ => (None, 0),
        };
        let number = self.free.pop()?;
        self.slots[number as usize] = Some(Slot {
            head,
            span,
            class,
            orphan: false,
        });
        Some(number)
    }

    fn get(&self, number: u32) -> Option<&Slot> {
        self.slots.get(number as usize)?.as_ref()
    }

    /// The buffer of a request, as long as its data.
    fn data(&self, number: u32) -> Option<Span> {
        let slot = self.get(number)?;
        slot.span?.part(0, slot.head.length as usize)
    }

    fn give_back(&mut self, number: u32) {
        let Some(slot) = self.slots.get_mut(number as usize).and_then(Option::take) else {
            return;
        };
        if slot.orphan && slot.head.command != Command::Read {
            self.orphaned_writes -= 1;
        }
        if let Some(span) = slot.span {
            self.buffers[slot.class].push(span);
        }
        self.free.push(number);
    }

    /// Nobody waits for this one any more.
    fn orphan(&mut self, number: u32) {
        if let Some(Some(slot)) = self.slots.get_mut(number as usize) {
            slot.orphan = true;
            if slot.head.command != Command::Read {
                self.orphaned_writes += 1;
            }
        }
    }
}

/// Who the clients are.
enum Clients {
    /// The kernel's, with the number N of its /dev/nbdN.
    Kernel { number: u32, identity: String },
    /// Who comes to a Unix socket.
    Socket(Door),
}

/// An NBD server.
pub struct Nbd {
    clients: Clients,
    path: PathBuf,
    geometry: Geometry,
    slots: Slots,
    // With the engine, and not orphaned.
    pending: Vec<u32>,
    connection: Option<Connection>,
    // Given to each connection in turn.
    input: Span,
    stage: Stage,
    // Until then the device is not ready.
    is_set_up: Arc<AtomicBool>,
}

/// The numbers N of the devices /dev/nbdN of this volume, whoever serves them.
pub fn of(identity: &str) -> Vec<u32> {
    kernel::of(Path::new(kernel::BLOCK), identity)
}

/// Removes a device of the kernel's client whose server died for good; one that
/// is gone is removed.
///
/// # Errors
/// That the device belongs to something else, and what the kernel says.
pub fn remove(number: u32, identity: &str) -> Result<(), FrontendError> {
    if kernel::belongs_to(number, identity)? {
        kernel::disconnect(number)?;
    }
    Ok(())
}

impl Nbd {
    /// The memory that a server needs, in bytes.
    pub fn memory() -> usize {
        let buffers: usize = BUFFERS.iter().map(|(count, size)| count * size).sum();
        buffers + connection::INPUT
    }

    fn new(
        clients: Clients,
        path: PathBuf,
        geometry: Geometry,
        memory: &mut Memory,
    ) -> Result<Nbd, FrontendError> {
        let out = || FrontendError::kernel("no memory for NBD", io::ErrorKind::OutOfMemory);
        Ok(Nbd {
            clients,
            path,
            geometry,
            input: memory.take(connection::INPUT).ok_or_else(out)?,
            slots: Slots::new(memory).ok_or_else(out)?,
            pending: Vec::with_capacity(SLOTS),
            connection: None,
            stage: Stage::Starting,
            is_set_up: Arc::new(AtomicBool::new(true)),
        })
    }

    /// Makes a device of the kernel's client, or takes over that of a
    /// predecessor, and serves it.
    ///
    /// `number` is the N of /dev/nbdN, any if None; `identity` tells this
    /// volume's device from others. `claim` is called with a device's path
    /// before it gets content, and says whether it may be used.
    pub fn kernel(
        number: Option<u32>,
        identity: &str,
        geometry: Geometry,
        ring: &mut Ring,
        memory: &mut Memory,
        mut claim: impl FnMut(&Path) -> io::Result<bool>,
    ) -> Result<Nbd, FrontendError> {
        let (ours, theirs) = pair()?;
        let number = match number {
            Some(number) if kernel::belongs_to(number, identity)? => {
                claimed(&mut claim, number)?;
                kernel::reconnect(number, identity, &theirs)?;
                number
            }
            Some(number) if claimed(&mut claim, number)? => {
                kernel::connect(number, identity, &geometry, &theirs)?;
                number
            }
            Some(number) => return Err(kernel::taken(number)),
            None => connect_any(identity, &geometry, &theirs, &mut claim)?,
        };
        let clients = Clients::Kernel {
            number,
            identity: identity.to_owned(),
        };
        let mut nbd = Nbd::new(clients, path(number), geometry, memory)?;
        nbd.connection = Some(Connection::transmitting(ours, nbd.input));
        nbd.stage = Stage::Ready;
        nbd.is_set_up = kernel::set_up(number, LONGEST)?;
        nbd.advance(ring, &mut Vec::new())?;
        Ok(nbd)
    }

    /// Listens on a Unix socket, which must not exist.
    pub fn listen(
        path: &Path,
        geometry: Geometry,
        ring: &mut Ring,
        memory: &mut Memory,
    ) -> Result<Nbd, FrontendError> {
        let clients = Clients::Socket(Door::new(path, token(ACCEPTED))?);
        let mut nbd = Nbd::new(clients, path.to_owned(), geometry, memory)?;
        nbd.await_client(ring)?;
        nbd.stage = Stage::Ready;
        Ok(nbd)
    }

    /// The number N of /dev/nbdN, if the kernel is the client.
    pub fn number(&self) -> Option<u32> {
        match self.clients {
            Clients::Kernel { number, .. } => Some(number),
            Clients::Socket(_) => None,
        }
    }

    fn export(&self) -> Export {
        Export {
            size: self.geometry.size,
            logical_block: self.geometry.logical_block,
            longest: LONGEST,
        }
    }

    /// Waits for the next client.
    fn await_client(&mut self, ring: &mut Ring) -> Result<(), FrontendError> {
        match &self.clients {
            Clients::Socket(door) => door.await_client(ring),
            Clients::Kernel { number, identity } => {
                if !kernel::belongs_to(*number, identity)? {
                    info!("{} was disconnected", self.path.display());
                    self.stage = Stage::Gone;
                    return Ok(());
                }
                warn!(
                    "{} has lost its connection; it gets another",
                    self.path.display()
                );
                let (ours, theirs) = pair()?;
                kernel::reconnect(*number, identity, &theirs)?;
                self.connection = Some(Connection::transmitting(ours, self.input));
            }
        }
        Ok(())
    }

    /// Goes on with what the client has sent, as far as there is room.
    fn advance(
        &mut self,
        ring: &mut Ring,
        arrivals: &mut Vec<Arrival>,
    ) -> Result<(), FrontendError> {
        let Some(connection) = &mut self.connection else {
            return Ok(());
        };
        // What the guest sends again must not be overtaken by its first copy.
        if self.slots.orphaned_writes == 0 {
            while let Some(number) = connection.next(&mut self.slots) {
                let Some(slot) = self.slots.get(number) else {
                    continue;
                };
                match translate(&self.geometry, number, slot) {
                    Ok(request) => {
                        self.pending.push(number);
                        let span = self.slots.data(number);
                        arrivals.push(Arrival { request, span });
                    }
                    Err(error) => connection.reply(&self.slots, number, error),
                }
            }
            connection.receive(ring);
        }
        connection.send(ring);
        if connection.is_over(self.pending.is_empty()) {
            connection.release(&mut self.slots);
            self.connection = None;
            if self.stage == Stage::Stopping {
                self.stage = Stage::Gone;
            } else {
                self.await_client(ring)?;
                return self.advance(ring, arrivals);
            }
        }
        Ok(())
    }

    /// Nobody waits for what is with the engine.
    fn lose(&mut self) {
        for number in self.pending.drain(..) {
            self.slots.orphan(number);
        }
        if let Some(connection) = &mut self.connection {
            connection.abandon(&mut self.slots);
        }
    }
}

fn claimed(
    claim: &mut impl FnMut(&Path) -> io::Result<bool>,
    number: u32,
) -> Result<bool, FrontendError> {
    claim(&path(number))
        .map_err(|error| FrontendError::kernel(format!("cannot claim /dev/nbd{number}"), error))
}

/// Makes a device of the first that is free. The kernel would choose one, too,
/// but tell us only when everybody can look into it.
fn connect_any(
    identity: &str,
    geometry: &Geometry,
    socket: &OwnedFd,
    claim: &mut impl FnMut(&Path) -> io::Result<bool>,
) -> Result<u32, FrontendError> {
    for number in kernel::free() {
        if !claimed(claim, number)? {
            continue;
        }
        match kernel::connect(number, identity, geometry, socket) {
            Ok(()) => return Ok(number),
            Err(FrontendError::Foreign(reason)) => debug!("{reason}"),
            Err(error) => return Err(error),
        }
    }
    Err(FrontendError::Missing(
        "every NBD device is in use".to_owned(),
    ))
}

/// Where the kernel's client shows what it has connected to.
pub fn path(number: u32) -> PathBuf {
    PathBuf::from(format!("/dev/nbd{number}"))
}

/// A request as the engine wants it, or why it is refused.
fn translate(geometry: &Geometry, number: u32, slot: &Slot) -> Result<Request, ReplyError> {
    let RequestHead {
        command,
        fua,
        offset,
        length,
        ..
    } = slot.head;
    let operation = match command {
        Command::Read => Operation::Read,
        Command::Write => Operation::Write { fua },
        Command::Flush => Operation::Flush,
        Command::Trim => Operation::Discard,
        Command::WriteZeroes => Operation::WriteZeroes { fua },
        Command::Disconnect | Command::Other(_) => return Err(ReplyError::NotSupported),
    };
    let (offset, length) = match operation {
        Operation::Flush => (0, 0),
        _ => (offset, u64::from(length)),
    };
    if operation != Operation::Flush && !geometry.holds(offset, length) {
        return Err(ReplyError::Invalid);
    }
    Ok(Request {
        tag: Tag(number),
        operation,
        offset,
        length,
    })
}

fn refusal(failure: Failure) -> ReplyError {
    match failure {
        Failure::NoSpace => ReplyError::NoSpace,
        Failure::Invalid => ReplyError::Invalid,
        Failure::NotOpen => ReplyError::Shutdown,
        Failure::Io | Failure::Unreachable | Failure::BadSector => ReplyError::Io,
    }
}

fn pair() -> Result<(OwnedFd, OwnedFd), FrontendError> {
    rustix::net::socketpair(
        rustix::net::AddressFamily::UNIX,
        rustix::net::SocketType::STREAM,
        rustix::net::SocketFlags::CLOEXEC,
        None,
    )
    .map_err(|error| FrontendError::kernel("cannot make a pair of sockets", error))
}

impl Frontend for Nbd {
    fn on_event(
        &mut self,
        ring: &mut Ring,
        event: Event,
        arrivals: &mut Vec<Arrival>,
    ) -> Result<(), FrontendError> {
        match event.token.detail() {
            ACCEPTED => {
                let Clients::Socket(door) = &self.clients else {
                    return Ok(());
                };
                match door.opened(ring, event) {
                    Some(socket) => {
                        let export = self.export();
                        self.connection = Some(Connection::greeting(socket, self.input, export));
                    }
                    None if self.stage == Stage::Stopping => self.stage = Stage::Gone,
                    None => {}
                }
            }
            RECEIVED | SENT => {
                if let Some(connection) = &mut self.connection {
                    let alive = match event.token.detail() {
                        RECEIVED => connection.received(event.result),
                        _ => connection.sent(event.result, &mut self.slots),
                    };
                    if !alive {
                        self.lose();
                    }
                }
            }
            _ => {}
        }
        self.advance(ring, arrivals)
    }

    fn complete(
        &mut self,
        ring: &mut Ring,
        tag: Tag,
        outcome: Outcome,
        arrivals: &mut Vec<Arrival>,
    ) {
        let number = tag.0;
        match self.slots.get(number) {
            Some(slot) if !slot.orphan => {
                self.pending.retain(|&other| other != number);
                if let Some(connection) = &mut self.connection {
                    let error = outcome.map_or_else(refusal, |()| ReplyError::None);
                    connection.reply(&self.slots, number, error);
                }
            }
            _ => self.slots.give_back(number),
        }
        if let Err(error) = self.advance(ring, arrivals) {
            warn!("{}: {error}", self.path.display());
        }
    }

    fn stop(&mut self, ring: &mut Ring) -> Result<(), FrontendError> {
        self.stage = Stage::Stopping;
        match &mut self.clients {
            Clients::Kernel { number, .. } => kernel::disconnect(*number)?,
            Clients::Socket(door) => door.close(),
        }
        if let Some(connection) = &mut self.connection {
            connection.close();
        } else if self.number().is_some() {
            self.stage = Stage::Gone;
        }
        self.advance(ring, &mut Vec::new())
    }

    fn stage(&self) -> Stage {
        match self.stage {
            Stage::Ready if !self.is_set_up.load(Ordering::Acquire) => Stage::Starting,
            stage => stage,
        }
    }

    fn device(&self) -> &Path {
        &self.path
    }
}
