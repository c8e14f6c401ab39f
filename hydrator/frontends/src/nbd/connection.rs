// SPDX-License-Identifier: Apache-2.0
//! One client's connection: bytes in, requests out, replies back.

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, OwnedFd};

use io_uring::{opcode, types};
use localstor_hydrator_disks::{Ring, Span};
use rustix::net::{SendFlags, Shutdown};
use tracing::{debug, warn};

use super::protocol::{
    self, Command, Export, Handshake, ProtocolError, REPLY, REQUEST, ReplyError, RequestHead, Step,
};
use super::{LONGEST, RECEIVED, SENT, SLOTS, Slots, token};

/// Size of the buffer into which requests are received, in bytes.
pub(super) const INPUT: usize = 64 << 10;

/// Data at least this long are received where they belong, without a copy.
const DIRECT: usize = 8 << 10;

/// Replies that are sent at once.
const BATCH: usize = 32;

enum Phase {
    Handshake(Handshake),
    Transmission,
    // Nothing more is read; what is in flight is answered.
    Closing,
}

/// The data of a write, as they come in.
struct Payload {
    slot: u32,
    target: Span,
    filled: usize,
}

struct Reply {
    slot: u32,
    head: [u8; REPLY],
    data: Option<Span>,
}

impl Reply {
    fn length(&self) -> usize {
        REPLY + self.data.map_or(0, |data| data.len())
    }
}

/// What the kernel looks at while replies are being sent.
struct Message {
    header: libc::msghdr,
    vectors: [libc::iovec; 2 * BATCH],
    heads: [[u8; REPLY]; BATCH],
}

/// A client.
pub(super) struct Connection {
    socket: OwnedFd,
    phase: Phase,
    input: Span,
    // What of the input was received and not yet used.
    from: usize,
    to: usize,
    payload: Option<Payload>,
    // There is no room for the next request before another one ends.
    starved: bool,
    receiving: bool,
    // What is being received is a payload.
    direct: bool,
    sending: bool,
    lost: bool,
    replies: VecDeque<Reply>,
    // So many bytes of the first reply have been sent.
    gone: usize,
    message: Option<Box<Message>>,
}

impl Connection {
    fn new(socket: OwnedFd, input: Span, phase: Phase) -> Connection {
        // SAFETY: all zeros is an empty message: null pointers, no lengths.
        let message = Box::new(unsafe { std::mem::zeroed::<Message>() });
        Connection {
            socket,
            phase,
            input,
            from: 0,
            to: 0,
            payload: None,
            starved: false,
            receiving: false,
            direct: false,
            sending: false,
            lost: false,
            replies: VecDeque::with_capacity(SLOTS),
            gone: 0,
            message: Some(message),
        }
    }

    /// A client that wants to be greeted.
    pub(super) fn greeting(socket: OwnedFd, input: Span, export: Export) -> Connection {
        let mut output = Vec::new();
        let handshake = Handshake::begin(export, &mut output);
        let mut connection = Connection::new(socket, input, Phase::Handshake(handshake));
        connection.send_handshake(&output);
        connection
    }

    /// A client that sends requests at once: the kernel.
    pub(super) fn transmitting(socket: OwnedFd, input: Span) -> Connection {
        Connection::new(socket, input, Phase::Transmission)
    }

    /// What the handshake says is short. Who does not take it is no client.
    fn send_handshake(&mut self, output: &[u8]) {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        if rustix::net::send(&self.socket, output, flags) != Ok(output.len()) {
            debug!("NBD: the client does not take the handshake");
            self.close();
        }
    }

    /// Takes no more requests.
    pub(super) fn close(&mut self) {
        self.phase = Phase::Closing;
        // What is being received ends; replies still go out.
        let _ = rustix::net::shutdown(&self.socket, Shutdown::Read);
    }

    /// Nobody waits for replies any more.
    pub(super) fn abandon(&mut self, slots: &mut Slots) {
        let _ = rustix::net::shutdown(&self.socket, Shutdown::Both);
        if let Some(payload) = self.payload.take_if(|_| !self.receiving) {
            slots.give_back(payload.slot);
        }
        // Those whose data the kernel may be sending are kept.
        let kept = if self.sending { BATCH } else { 0 };
        while self.replies.len() > kept {
            if let Some(reply) = self.replies.pop_back() {
                slots.give_back(reply.slot);
            }
        }
    }

    /// Whether nothing is left to do, given whether all requests are answered.
    pub(super) fn is_over(&self, answered: bool) -> bool {
        let idle = !self.receiving && !self.sending;
        let finished = matches!(self.phase, Phase::Closing) && answered && self.replies.is_empty();
        idle && (self.lost || finished)
    }

    /// Answers a request.
    pub(super) fn reply(&mut self, slots: &Slots, number: u32, error: ReplyError) {
        let Some(slot) = slots.get(number) else {
            return;
        };
        let data = match (slot.head.command, error) {
            (Command::Read, ReplyError::None) => slots.data(number),
            _ => None,
        };
        self.replies.push_back(Reply {
            slot: number,
            head: protocol::reply(slot.head.cookie, error),
            data,
        });
    }

    /// Something was received; false if the client is gone.
    pub(super) fn received(&mut self, result: i32) -> bool {
        self.receiving = false;
        if result > 0 {
            match &mut self.payload {
                Some(payload) if self.direct => payload.filled += result as usize,
                _ => self.to += result as usize,
            }
        } else if !matches!(self.phase, Phase::Closing) {
            debug!("NBD: the client is gone: {result}");
            self.lost = true;
        }
        !self.lost
    }

    /// Replies were sent; false if the client is gone.
    pub(super) fn sent(&mut self, result: i32, slots: &mut Slots) -> bool {
        self.sending = false;
        if result <= 0 {
            debug!("NBD: the client takes no reply: {result}");
            self.lost = true;
        }
        if self.lost {
            return false;
        }
        self.gone += result as usize;
        while let Some(length) = self.replies.front().map(Reply::length) {
            if length > self.gone {
                break;
            }
            self.gone -= length;
            if let Some(reply) = self.replies.pop_front() {
                slots.give_back(reply.slot);
            }
        }
        true
    }

    /// The next request in what was received, data and all.
    pub(super) fn next(&mut self, slots: &mut Slots) -> Option<u32> {
        self.starved = false;
        while !self.lost {
            // The kernel is writing to one of both.
            if self.receiving && (self.direct || self.payload.is_some()) {
                break;
            }
            if self.payload.is_some() {
                match self.fill_payload() {
                    Some(slot) => return Some(slot),
                    None => break,
                }
            }
            match self.phase {
                Phase::Closing => break,
                Phase::Handshake(_) => {
                    if !self.shake_hands() {
                        break;
                    }
                }
                Phase::Transmission => match self.next_head(slots) {
                    Ok(Some(slot)) => return Some(slot),
                    Ok(None) if self.payload.is_some() => {}
                    Ok(None) => break,
                    Err(error) => {
                        warn!("NBD: closing the connection: {error}");
                        self.close();
                    }
                },
            }
        }
        None
    }

    fn available(&self) -> usize {
        self.to - self.from
    }

    /// What was received and not yet used. The caller knows that the kernel
    /// writes behind it, if at all.
    fn unused(&self) -> &[u8] {
        // SAFETY: a receive in flight writes from `to` on.
        unsafe { self.input.bytes_of_part(self.from, self.available()) }
    }

    /// Copies what is there of a payload; the request if it is complete.
    fn fill_payload(&mut self) -> Option<u32> {
        let available = self.available();
        let payload = self.payload.as_mut()?;
        let count = available.min(payload.target.len() - payload.filled);
        if count > 0 {
            let source = self.input.part(self.from, count)?;
            let mut target = payload.target.part(payload.filled, count)?;
            // SAFETY: nothing is being received into either; the target is in
            // the buffer of this request, which nobody else has.
            unsafe { target.bytes_mut().copy_from_slice(source.bytes()) };
            self.from += count;
            payload.filled += count;
        }
        if payload.filled < payload.target.len() {
            return None;
        }
        self.payload.take().map(|payload| payload.slot)
    }

    /// Goes on with the handshake; whether anything may follow it.
    fn shake_hands(&mut self) -> bool {
        let mut output = Vec::new();
        let Phase::Handshake(handshake) = &mut self.phase else {
            return false;
        };
        // SAFETY: a receive in flight writes behind what is looked at.
        let input = unsafe { self.input.bytes_of_part(self.from, self.to - self.from) };
        match handshake.feed(input, &mut output) {
            Ok((used, step)) => {
                self.from += used;
                match step {
                    Step::Continue => {}
                    Step::Transmission => self.phase = Phase::Transmission,
                    Step::End => self.close(),
                }
                if !output.is_empty() {
                    self.send_handshake(&output);
                }
                step == Step::Transmission
            }
            Err(error) => {
                warn!("NBD: closing the connection: {error}");
                self.close();
                false
            }
        }
    }

    /// Takes a request's head; the request, unless data are to follow.
    fn next_head(&mut self, slots: &mut Slots) -> Result<Option<u32>, ProtocolError> {
        let Some(head) = RequestHead::decode(self.unused()).transpose()? else {
            return Ok(None);
        };
        match head.command {
            Command::Disconnect => {
                self.close();
                return Ok(None);
            }
            Command::Read | Command::Write if head.length > LONGEST => {
                return Err(ProtocolError::TooLong(head.length, LONGEST));
            }
            _ => {}
        }
        let Some(number) = slots.take(head) else {
            self.starved = true;
            return Ok(None);
        };
        self.from += REQUEST;
        match slots.data(number) {
            Some(target) if head.command == Command::Write => {
                self.payload = Some(Payload {
                    slot: number,
                    target,
                    filled: 0,
                });
                Ok(None)
            }
            _ => Ok(Some(number)),
        }
    }

    /// Asks the kernel for more, if there is room for it.
    pub(super) fn receive(&mut self, ring: &mut Ring) {
        if self.receiving || self.starved || self.lost || matches!(self.phase, Phase::Closing) {
            return;
        }
        let target = match &self.payload {
            Some(payload)
                if self.from == self.to && payload.target.len() - payload.filled >= DIRECT =>
            {
                self.direct = true;
                let rest = payload.target.len() - payload.filled;
                payload.target.part(payload.filled, rest)
            }
            _ => {
                self.direct = false;
                self.make_room();
                self.input.part(self.to, INPUT - self.to)
            }
        };
        let Some(target) = target else {
            return;
        };
        let entry = opcode::Recv::new(
            types::Fd(self.socket.as_raw_fd()),
            target.as_ptr(),
            target.len() as u32,
        )
        .build();
        // SAFETY: spans are never unmapped, and nothing reads there before the
        // completion.
        unsafe { ring.push(entry, token(RECEIVED)) };
        self.receiving = true;
    }

    /// Moves what is unused to the beginning of the input.
    fn make_room(&mut self) {
        let available = self.available();
        if self.from > 0 && available > 0 {
            // SAFETY: nothing is being received.
            unsafe { self.input.bytes_mut() }.copy_within(self.from..self.to, 0);
        }
        (self.from, self.to) = (0, available);
    }

    /// Sends the replies that wait.
    pub(super) fn send(&mut self, ring: &mut Ring) {
        let Some(message) = &mut self.message else {
            return;
        };
        if self.sending || self.lost || self.replies.is_empty() {
            return;
        }
        let mut skip = self.gone;
        let mut count = 0;
        for (index, reply) in self.replies.iter().take(BATCH).enumerate() {
            message.heads[index] = reply.head;
            let head = (&raw mut message.heads[index]).cast::<u8>();
            let data = reply.data.map(|span| (span.as_ptr(), span.len()));
            for (address, length) in [Some((head, REPLY)), data].into_iter().flatten() {
                let skipped = skip.min(length);
                skip -= skipped;
                if skipped < length {
                    message.vectors[count] = libc::iovec {
                        iov_base: address.wrapping_add(skipped).cast(),
                        iov_len: length - skipped,
                    };
                    count += 1;
                }
            }
        }
        message.header.msg_iov = message.vectors.as_mut_ptr();
        message.header.msg_iovlen = count;
        let entry = opcode::SendMsg::new(
            types::Fd(self.socket.as_raw_fd()),
            &raw const message.header,
        )
        .flags((libc::MSG_NOSIGNAL | libc::MSG_WAITALL) as u32)
        .build();
        // SAFETY: the message is on the heap, changed only when nothing is
        // being sent, and leaked if the connection goes before that; spans are
        // never unmapped.
        unsafe { ring.push(entry, token(SENT)) };
        self.sending = true;
    }

    /// Gives back what is left of the requests of a connection that is over.
    pub(super) fn release(&mut self, slots: &mut Slots) {
        for reply in self.replies.drain(..) {
            slots.give_back(reply.slot);
        }
        if let Some(payload) = self.payload.take() {
            slots.give_back(payload.slot);
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        if self.sending {
            if let Some(message) = self.message.take() {
                Box::leak(message);
            }
        }
    }
}
