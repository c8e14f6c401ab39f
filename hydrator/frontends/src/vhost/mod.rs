// SPDX-License-Identifier: Apache-2.0
//! vhost-user-blk: a disk for a virtual machine, without a kernel device.
//!
//! A client, which is QEMU or a driver in user space, connects to a Unix socket
//! and shares the guest's memory with us ([`device`]). The guest puts requests
//! into rings there ([`queue`], [`request`]). The protocol is that of QEMU's
//! `docs/interop/vhost-user.rst`; one client at a time, and as many queues as it
//! sets up, all served by one thread.
//!
//! The data of a write are copied before anybody looks at them, because the
//! guest can change its memory at any time, and a checksum must be of what is
//! written.
//!
//! When the process dies, the client connects to its successor and hands over
//! what tells which requests were not answered ([`inflight`]); they are carried
//! out again. Clients that can't do that lose them.
//!
//! The client is trusted like any that may open the socket: it can take memory
//! away while it is used, which kills the process. Its guest is not.

mod device;
#[cfg(fuzzing)]
pub mod fuzzing;
mod inflight;
mod queue;
mod request;

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use io_uring::{opcode, types};
use localstor_hydrator_core::{Operation, Request, Tag};
use localstor_hydrator_disks::{Event, Memory, Owner, Ring, Span, Token};
use rustix::io::Errno;
use rustix::net::RecvFlags;
use tracing::{info, warn};
use vhost::vhost_user::BackendReqHandler;
use vhost::vhost_user::message::FrontendReq;

use crate::block::{Arrival, Frontend, FrontendError, Geometry, Outcome, Stage, buffers};
use crate::door::Door;
use device::Device;
use queue::MOST_DESCRIPTORS;
use request::{Ask, Chain, LONGEST, MOST_QUEUES, NAME, Status};

/// Requests in flight, of all queues.
const SLOTS: usize = MOST_DESCRIPTORS as usize;

/// Buffers for the data of requests: how many of which size, in bytes.
const BUFFERS: [(usize, usize); 2] = [(128, 16 << 10), (12, LONGEST)];

/// How long a client may take to read an answer to a message.
const PATIENCE: Duration = Duration::from_secs(1);

/// Bytes of a message's head: code, flags and size, 32 bits each; and of what says
/// behind it which queue it is about, if it is about one.
const HEAD: usize = 12;
const QUEUE: usize = 4;

/// What a token's last two bits say; the others count.
const ACCEPTED: u64 = 0;
const TALK: u64 = 1;
const KICKED: u64 = 2;
const MORE: u64 = 3;

/// Requests that are taken at once. The guest can add to them for ever, and
/// others want to be heard, too.
const AT_ONCE: usize = 2 * SLOTS;

/// Why a client can't be served on.
#[derive(Debug, thiserror::Error)]
enum Broken {
    #[error("the client is gone")]
    Gone,
    #[error("a message of the client's is cut short")]
    CutShort,
    #[error("the client says what makes no sense: {0}")]
    Protocol(#[from] vhost::vhost_user::Error),
    #[error("its socket fails: {0}")]
    Socket(Errno),
    #[error("the queue is not in the guest's memory, or not aligned")]
    Queue,
    #[error("the queue makes no sense: {0}")]
    Ring(#[from] virtio_queue::Error),
    #[error("a request is without a byte for its status")]
    NoStatus,
    #[error("a request has something to read behind what is to be written")]
    Order,
    #[error("a request is shorter than its header")]
    Short,
    #[error("a request is at {address:#x}, which is not the guest's memory: {cause}")]
    Memory { address: u64, cause: String },
    #[error("the queue has no descriptor {0}")]
    Head(u16),
    #[error("the memory of requests in flight can't be used: {0}")]
    Inflight(String),
    #[error("no kick can be read: {0}")]
    Kick(Errno),
    #[error("the guest can't be told of an answer: {0}")]
    Call(io::Error),
}

/// A request between its arrival and its answer.
#[derive(Default)]
struct Slot {
    chain: Chain,
    // Where it has come from.
    queue: usize,
    head: u16,
    // With the engine.
    busy: bool,
    read: bool,
    span: Option<Span>,
    // The buffer that the span is part of, and which of BUFFERS it is from.
    buffer: Option<(Span, usize)>,
    // Its client is gone; nobody waits for the answer.
    orphan: bool,
}

/// Where the requests of all clients are kept.
struct Slots {
    slots: Vec<Slot>,
    free: Vec<u32>,
    buffers: [Vec<Span>; BUFFERS.len()],
    // Requests of the client's that are with the engine, and of which queues.
    in_flight: usize,
    in_flight_of: [usize; MOST_QUEUES as usize],
    // Writes of clients that are gone which are still on their way.
    orphaned_writes: usize,
}

impl Slots {
    fn new(memory: &mut Memory) -> Option<Slots> {
        Some(Slots {
            slots: (0..SLOTS).map(|_| Slot::default()).collect(),
            free: (0..SLOTS as u32).rev().collect(),
            buffers: buffers(BUFFERS, memory)?,
            in_flight: 0,
            in_flight_of: [0; MOST_QUEUES as usize],
            orphaned_writes: 0,
        })
    }

    /// Whether there is room for any request.
    fn has_room(&self) -> bool {
        !self.free.is_empty() && self.buffers.iter().all(|buffers| !buffers.is_empty())
    }

    /// Takes the next request of a queue, answers it if that needs no engine, and
    /// says what the engine is to do otherwise. The caller knows that there is
    /// room.
    fn begin(
        &mut self,
        device: &mut Device,
        index: usize,
        geometry: &Geometry,
        name: &[u8],
    ) -> Result<Option<Arrival>, Broken> {
        let Some(number) = self.free.last().copied() else {
            return Ok(None);
        };
        let slot = &mut self.slots[number as usize];
        let (queue, memory) = device.queue(index);
        let Some(head) = queue.next(memory, &mut slot.chain)? else {
            return Ok(None);
        };
        let asked = slot
            .chain
            .ask(device.memory(), geometry, device.writes_through())?;
        let (data, status) = match asked {
            Ask::Io {
                operation,
                offset,
                length,
            } => {
                let class = usize::from(length > BUFFERS[0].1 as u64);
                let needed = matches!(operation, Operation::Read | Operation::Write { .. });
                let whole = self.buffers[class].last().filter(|_| needed).copied();
                let mut span = whole.and_then(|whole| whole.part(0, length as usize));
                if let (Operation::Write { .. }, Some(span)) = (operation, &mut span) {
                    // SAFETY: the buffer is free, so nobody else has it.
                    let target = unsafe { span.bytes_mut() };
                    slot.chain.take_data(device.memory(), target)?;
                }
                if whole.is_some() {
                    self.buffers[class].pop();
                }
                self.free.pop();
                self.in_flight += 1;
                self.in_flight_of[index] += 1;
                slot.queue = index;
                slot.head = head;
                slot.busy = true;
                slot.read = operation == Operation::Read;
                slot.buffer = whole.map(|whole| (whole, class));
                let request = Request {
                    tag: Tag(number),
                    operation,
                    offset,
                    length,
                };
                slot.span = span;
                return Ok(Some(Arrival { request, span }));
            }
            Ask::Name => (name, Status::Ok),
            Ask::Nothing(status) => (&[][..], status),
        };
        let (queue, memory) = device.queue(index);
        let written = slot.chain.answer(memory, data, status)?;
        queue.answered(memory, head, written)?;
        Ok(None)
    }

    /// A request is done; its slot, if somebody waits for the answer.
    fn end(&mut self, number: u32) -> Option<&mut Slot> {
        let slot = self.slots.get_mut(number as usize)?;
        if !std::mem::take(&mut slot.busy) {
            return None;
        }
        if let Some((whole, class)) = slot.buffer.take() {
            self.buffers[class].push(whole);
        }
        self.free.push(number);
        if std::mem::take(&mut slot.orphan) {
            if !slot.read {
                self.orphaned_writes -= 1;
            }
            return None;
        }
        self.in_flight -= 1;
        self.in_flight_of[slot.queue] -= 1;
        Some(slot)
    }

    /// Nobody waits for what is with the engine any more.
    fn orphan_all(&mut self) {
        for slot in &mut self.slots {
            if slot.busy && !slot.orphan {
                slot.orphan = true;
                if !slot.read {
                    self.orphaned_writes += 1;
                }
            }
        }
        self.in_flight = 0;
        self.in_flight_of.fill(0);
    }

    /// Whether any of these is with the engine.
    fn are_any(&self, disturbed: Disturbed) -> bool {
        match disturbed {
            Disturbed::None => false,
            Disturbed::Of(queue) => self.in_flight_of.get(queue).is_some_and(|count| *count > 0),
            Disturbed::All => self.in_flight > 0,
        }
    }
}

/// A descriptor that the ring looks at: open until it does no more.
struct Watched {
    file: OwnedFd,
    token: Token,
}

/// One client.
struct Session {
    socket: UnixStream,
    protocol: BackendReqHandler<Mutex<Device>>,
    device: Arc<Mutex<Device>>,
    // A message waits until none of these is in flight.
    held: Disturbed,
}

impl Session {
    fn device(&self) -> MutexGuard<'_, Device> {
        // One thread: nobody panics with it locked.
        self.device.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Which requests the message disturbs that is there, if one is.
    fn message(&self) -> Result<Option<Disturbed>, Broken> {
        let mut head = [0; HEAD + QUEUE];
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        let count = match rustix::net::recv(&self.socket, &mut head[..], flags) {
            Ok((count, _)) => count,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
            Err(error) => return Err(Broken::Socket(error)),
        };
        if count == 0 {
            return Err(Broken::Gone);
        }
        let word =
            |at: usize| u32::from_ne_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let length = HEAD as u64 + u64::from(word(8));
        let there = rustix::io::ioctl_fionread(&self.socket).map_err(Broken::Socket)?;
        // Who sends a message in pieces could keep us waiting for the rest.
        if count < HEAD || there < length {
            return Err(Broken::CutShort);
        }
        Ok(Some(Disturbed::by(word(0), word(HEAD) as usize)))
    }
}

/// Requests in flight that rely on what a message changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Disturbed {
    None,
    Of(usize),
    All,
}

impl Disturbed {
    /// By a message of this code; `queue` is what it has first to say.
    ///
    /// A queue begins or ends without those of others: they may wait for long.
    fn by(code: u32, queue: usize) -> Disturbed {
        let is = |message: FrontendReq| message as u32 == code;
        let of_one = [
            FrontendReq::GET_VRING_BASE,
            FrontendReq::SET_VRING_ENABLE,
            FrontendReq::SET_VRING_NUM,
            FrontendReq::SET_VRING_ADDR,
            FrontendReq::SET_VRING_BASE,
        ];
        let of_all = [
            FrontendReq::SET_MEM_TABLE,
            FrontendReq::ADD_MEM_REG,
            FrontendReq::REM_MEM_REG,
            FrontendReq::RESET_OWNER,
            FrontendReq::SET_FEATURES,
            FrontendReq::SET_INFLIGHT_FD,
            FrontendReq::GET_INFLIGHT_FD,
        ];
        if of_one.into_iter().any(is) {
            Disturbed::Of(queue)
        } else if of_all.into_iter().any(is) {
            Disturbed::All
        } else {
            Disturbed::None
        }
    }
}

/// Whether a file has the bytes that a client wants us to map. Others would
/// kill the process when they are touched.
fn has_bytes(file: &File, offset: u64, length: u64) -> io::Result<()> {
    let found = file.metadata()?;
    let end = offset.checked_add(length);
    if found.is_file() && end.is_none_or(|end| end > found.len()) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!(
                "a file of {} bytes has no {length} bytes of memory at {offset}",
                found.len()
            ),
        ));
    }
    Ok(())
}

/// A vhost-user-blk server.
pub struct VhostUserBlk {
    path: PathBuf,
    geometry: Geometry,
    name: [u8; NAME],
    door: Door,
    session: Option<Session>,
    // Counts what the ring looks at.
    count: u64,
    kicks: [Option<Watched>; MOST_QUEUES as usize],
    talk: Option<Watched>,
    // The ring may still look at these.
    retired: Vec<Watched>,
    slots: Slots,
    // There is no room for a request that waits.
    starved: bool,
    // The queue that is looked at first, so that none waits for another for ever.
    first: usize,
    stage: Stage,
}

impl VhostUserBlk {
    /// The memory that a server needs, in bytes.
    pub fn memory() -> usize {
        BUFFERS.iter().map(|(count, size)| count * size).sum()
    }

    /// Listens on a Unix socket, which must not exist. The guest sees the first
    /// 20 bytes of `name` as the disk's serial number.
    ///
    /// # Errors
    /// What the kernel says, and that there is no memory.
    pub fn listen(
        path: &Path,
        name: &str,
        geometry: Geometry,
        ring: &mut Ring,
        memory: &mut Memory,
    ) -> Result<VhostUserBlk, FrontendError> {
        let out = || FrontendError::kernel("no memory for vhost-user", io::ErrorKind::OutOfMemory);
        let slots = Slots::new(memory).ok_or_else(out)?;
        let door = Door::new(path, Token::new(Owner::Frontend, ACCEPTED))?;
        door.await_client(ring);
        let mut short = [0; NAME];
        let length = name.len().min(NAME);
        short[..length].copy_from_slice(&name.as_bytes()[..length]);
        Ok(VhostUserBlk {
            path: path.to_owned(),
            geometry,
            name: short,
            door,
            session: None,
            count: 0,
            kicks: std::array::from_fn(|_| None),
            talk: None,
            retired: Vec::new(),
            slots,
            starved: false,
            first: 0,
            stage: Stage::Ready,
        })
    }

    fn greet(&mut self, socket: OwnedFd, ring: &mut Ring) -> Result<(), Broken> {
        let socket = UnixStream::from(socket);
        let spoken = socket
            .set_write_timeout(Some(PATIENCE))
            .and_then(|()| socket.set_read_timeout(Some(PATIENCE)))
            .and_then(|()| socket.try_clone())
            .map_err(|error| Broken::Protocol(vhost::vhost_user::Error::SocketError(error)))?;
        let device = Arc::new(Mutex::new(Device::new(self.geometry)?));
        self.session = Some(Session {
            protocol: BackendReqHandler::from_stream(spoken, Arc::clone(&device)),
            socket,
            device,
            held: Disturbed::None,
        });
        self.await_message(ring)
    }

    /// Has the ring look at a descriptor.
    fn watch(&mut self, ring: &mut Ring, file: OwnedFd, kind: u64) -> Watched {
        self.count += 1;
        let token = Token::new(Owner::Frontend, self.count << 2 | kind);
        let entry = opcode::PollAdd::new(types::Fd(file.as_raw_fd()), libc::POLLIN as u32).build();
        // SAFETY: a poll points to no memory.
        unsafe { ring.push(entry, token) };
        Watched { file, token }
    }

    fn await_message(&mut self, ring: &mut Ring) -> Result<(), Broken> {
        let Some(session) = &self.session else {
            return Ok(());
        };
        let file = session
            .socket
            .try_clone()
            .map_err(|error| Broken::Protocol(vhost::vhost_user::Error::SocketError(error)))?;
        self.talk = Some(self.watch(ring, file.into(), TALK));
        Ok(())
    }

    /// Has the ring look no more.
    fn retire(&mut self, ring: &mut Ring, watched: Option<Watched>) {
        if let Some(watched) = watched {
            ring.cancel(watched.token);
            self.retired.push(watched);
        }
    }

    /// Does what the client says, until it says nothing more or must wait.
    fn converse(&mut self, ring: &mut Ring) -> Result<(), Broken> {
        loop {
            let Some(session) = &mut self.session else {
                return Ok(());
            };
            let Some(disturbed) = session.message()? else {
                return self.await_message(ring);
            };
            if self.slots.are_any(disturbed) {
                session.held = disturbed;
                return Ok(());
            }
            session.held = Disturbed::None;
            session.protocol.handle_request()?;
            self.await_kicks(ring);
        }
    }

    /// Has the ring look at new descriptors for kicks, and at old ones no more.
    fn await_kicks(&mut self, ring: &mut Ring) {
        while let Some(session) = &self.session {
            let Some((queue, kick)) = session.device().take_kick() else {
                return;
            };
            let before = self.kicks[queue].take();
            self.retire(ring, before);
            if let Some(file) = kick {
                self.kicks[queue] = Some(self.watch(ring, file.into(), KICKED));
            }
        }
    }

    /// The guest has something to say, or said so to a predecessor.
    fn kicked(&mut self, ring: &mut Ring, token: Token) -> Result<(), Broken> {
        let mut kicks = self.kicks.iter_mut().enumerate();
        let found = kicks.find_map(|(queue, kick)| {
            let watched = kick.take_if(|watched| watched.token == token)?;
            Some((queue, watched))
        });
        let Some((queue, watched)) = found else {
            return Ok(());
        };
        match rustix::io::read(&watched.file, &mut [0; 8]) {
            Ok(8) | Err(Errno::AGAIN) => {}
            Ok(_) => return Err(Broken::Kick(Errno::PIPE)),
            Err(error) => return Err(Broken::Kick(error)),
        }
        self.kicks[queue] = Some(self.watch(ring, watched.file, KICKED));
        Ok(())
    }

    /// Takes the requests that wait, as far as there is room; whether to do so
    /// again soon.
    fn take_requests(&mut self, arrivals: &mut Vec<Arrival>) -> Result<bool, Broken> {
        self.starved = false;
        let Some(session) = &self.session else {
            return Ok(false);
        };
        // What is carried out again must not be overtaken by its first copy.
        let held = session.held;
        if held == Disturbed::All || self.slots.orphaned_writes > 0 || self.stage == Stage::Stopping
        {
            return Ok(false);
        }
        let mut device = session.device();
        let mut most = AT_ONCE;
        let given = device.given();
        for turn in 0..given {
            let index = (self.first + turn) % given;
            let (queue, memory) = device.queue(index);
            if held == Disturbed::Of(index) || !queue.is_running(memory)? {
                continue;
            }
            queue.silence(memory)?;
            loop {
                let (queue, memory) = device.queue(index);
                if !queue.has_next(memory)? && !queue.listen(memory)? {
                    break;
                }
                self.starved = !self.slots.has_room();
                if self.starved || most == 0 {
                    self.first = (self.first + 1) % given;
                    return Ok(!self.starved);
                }
                most -= 1;
                let arrival = (self.slots).begin(&mut device, index, &self.geometry, &self.name)?;
                arrivals.extend(arrival);
            }
        }
        Ok(false)
    }

    /// Gives the guest an answer of the engine's.
    fn answer(&mut self, number: u32, outcome: Outcome) -> Result<(), Broken> {
        let (Some(slot), Some(session)) = (self.slots.end(number), &self.session) else {
            return Ok(());
        };
        let mut device = session.device();
        let data = match (slot.read, &slot.span, outcome) {
            // SAFETY: the engine has answered, and nobody else has the buffer
            // before the next request is taken.
            (true, Some(span), Ok(())) => unsafe { span.bytes() },
            _ => &[],
        };
        let (queue, memory) = device.queue(slot.queue);
        let written = slot.chain.answer(memory, data, outcome.into())?;
        queue.answered(memory, slot.head, written)
    }

    /// Goes on after something has happened; a client that makes no sense is
    /// sent away.
    fn advance(
        &mut self,
        ring: &mut Ring,
        arrivals: &mut Vec<Arrival>,
        happened: Result<(), Broken>,
    ) {
        let before = arrivals.len();
        // What a client asks for in the moment of its end is not carried out:
        // it is asked for again.
        match happened.and_then(|()| self.take_requests(arrivals)) {
            Ok(false) => {}
            Ok(true) => {
                let entry = opcode::Nop::new().build();
                // SAFETY: a no-op points to no memory.
                unsafe { ring.push(entry, Token::new(Owner::Frontend, MORE)) };
            }
            Err(reason) => self.lose(ring, &reason),
        }
        if self.session.is_none() {
            for arrival in arrivals.drain(before..) {
                // It was never begun, so nobody is answered.
                let _ = self.answer(arrival.request.tag.0, Ok(()));
            }
        }
        let idle = self.slots.in_flight == 0;
        if self.stage == Stage::Stopping && self.session.is_some() && idle {
            self.dismiss(ring);
            self.stage = Stage::Gone;
        }
    }

    /// Ends the connection.
    fn dismiss(&mut self, ring: &mut Ring) {
        if let Some(session) = self.session.take() {
            let _ = session.socket.shutdown(std::net::Shutdown::Both);
        }
        let talk = self.talk.take();
        self.retire(ring, talk);
        for queue in 0..self.kicks.len() {
            let kick = self.kicks[queue].take();
            self.retire(ring, kick);
        }
    }

    /// The client is gone, or is sent away.
    fn lose(&mut self, ring: &mut Ring, reason: &Broken) {
        match reason {
            Broken::Gone => info!("{}: {reason}", self.path.display()),
            _ => warn!("{}: closing the connection: {reason}", self.path.display()),
        }
        self.dismiss(ring);
        self.slots.orphan_all();
        if self.stage == Stage::Stopping {
            self.stage = Stage::Gone;
        } else {
            self.door.await_client(ring);
        }
    }
}

impl Frontend for VhostUserBlk {
    fn on_event(
        &mut self,
        ring: &mut Ring,
        event: Event,
        arrivals: &mut Vec<Arrival>,
    ) -> Result<(), FrontendError> {
        self.retired.retain(|watched| watched.token != event.token);
        let happened = match event.token.detail() & 3 {
            ACCEPTED => match self.door.opened(ring, event) {
                Some(socket) => {
                    info!("{}: a client is here", self.path.display());
                    self.greet(socket, ring)
                }
                None => {
                    if self.stage == Stage::Stopping {
                        self.stage = Stage::Gone;
                    }
                    return Ok(());
                }
            },
            TALK => match self.talk.take_if(|watched| watched.token == event.token) {
                Some(_) => self.converse(ring),
                None => return Ok(()),
            },
            KICKED => self.kicked(ring, event.token),
            // There are more requests.
            _ => Ok(()),
        };
        self.advance(ring, arrivals, happened);
        Ok(())
    }

    fn complete(
        &mut self,
        ring: &mut Ring,
        tag: Tag,
        outcome: Outcome,
        arrivals: &mut Vec<Arrival>,
    ) {
        let orphans = self.slots.orphaned_writes;
        let mut happened = self.answer(tag.0, outcome);
        let idle = self.slots.in_flight == 0;
        let held = (self.session.as_ref()).map_or(Disturbed::None, |session| session.held);
        let is_held = held != Disturbed::None;
        if happened.is_ok() && is_held && !self.slots.are_any(held) {
            happened = self.converse(ring);
        }
        let waited = self.starved || is_held || orphans > self.slots.orphaned_writes;
        if happened.is_err() || waited || (self.stage == Stage::Stopping && idle) {
            self.advance(ring, arrivals, happened);
        }
    }

    fn stop(&mut self, ring: &mut Ring) -> Result<(), FrontendError> {
        self.stage = Stage::Stopping;
        self.door.close();
        self.advance(ring, &mut Vec::new(), Ok(()));
        Ok(())
    }

    fn stage(&self) -> Stage {
        self.stage
    }

    fn device(&self) -> &Path {
        &self.path
    }
}
