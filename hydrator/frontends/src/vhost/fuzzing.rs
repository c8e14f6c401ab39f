// SPDX-License-Identifier: Apache-2.0
//! What a client or its guest could say, whatever that is, for the fuzzer.

use std::cell::RefCell;
use std::fs::File;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};

use localstor_hydrator_disks::Memory;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use vhost::vhost_user::BackendReqHandler;
use vhost::vhost_user::message::FrontendReq;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::device::Device;
use super::{Disturbed, Geometry, HEAD, Operation, Session, Slots, VhostUserBlk};

const GEOMETRY: Geometry = Geometry {
    size: 1 << 30,
    logical_block: 512,
};

/// Bytes of a guest's memory.
const MEMORY: usize = 64 << 10;

/// Where its used ring is.
const USED: u64 = 0xf000;

/// Requests that are taken from one ring.
const REQUESTS: usize = 64;

thread_local! {
    static SLOTS: RefCell<Slots> = RefCell::new({
        let memory = Memory::new(VhostUserBlk::memory());
        memory.ok().as_mut().and_then(Slots::new).expect("memory")
    });
}

/// Carries out what is in the ring, as an engine that does nothing would. The
/// guest changes its memory meanwhile.
fn carry_out(device: &mut Device, index: usize) {
    SLOTS.with_borrow_mut(|slots| {
        let mut begun = Vec::new();
        for _ in 0..REQUESTS {
            let (queue, memory) = device.queue(index);
            if !queue.has_next(memory).unwrap_or(false) || !slots.has_room() {
                break;
            }
            match slots.begin(device, index, &GEOMETRY, b"name") {
                Ok(None) => {}
                Ok(Some(arrival)) => {
                    let request = arrival.request;
                    let span = arrival.span.map(|span| span.len() as u64);
                    match request.operation {
                        Operation::Flush => assert_eq!(span, None),
                        Operation::Read | Operation::Write { .. } => {
                            assert_eq!(span, Some(request.length));
                            assert!(GEOMETRY.holds(request.offset, request.length));
                        }
                        _ => assert!(GEOMETRY.holds(request.offset, request.length)),
                    }
                    begun.push(request.tag.0);
                }
                Err(_) => break,
            }
        }
        let _ = device.memory().write_slice(&[0xa5; 256], GuestAddress(0));
        for number in begun {
            if let Some(slot) = slots.end(number) {
                let (queue, memory) = device.queue(slot.queue);
                let written = slot.chain.answer(memory, &[], super::Status::Ok);
                let _ = written.and_then(|written| queue.answered(memory, slot.head, written));
            }
        }
        let (queue, memory) = device.queue(index);
        let _ = queue.listen(memory);
        assert_eq!(slots.in_flight, 0);
        assert!(slots.has_room());
    });
}

/// A guest with this memory: a table of 16 descriptors, the available ring at
/// 256, and whatever. `inflight` is the memory of requests in flight, if any.
pub fn ring(memory: &[u8], inflight: Option<&[u8]>) {
    let guest = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), MEMORY)]).expect("memory");
    let length = memory.len().min(USED as usize);
    let _ = guest.write_slice(&memory[..length], GuestAddress(0));
    let addresses = [0, 0x100, USED].map(GuestAddress);
    let mut device = Device::over(guest, GEOMETRY, 16, addresses, inflight);
    let (queue, memory) = device.queue(0);
    if queue.is_running(memory).unwrap_or(false) {
        carry_out(&mut device, 0);
    }
}

/// A client that sends these messages, with descriptors where they belong.
pub fn messages(bytes: &[u8]) {
    let (ours, client) = UnixStream::pair().expect("sockets");
    let device = Device::new(GEOMETRY).expect("a queue");
    let device = Arc::new(Mutex::new(device));
    let spoken = ours.try_clone().expect("a socket");
    let mut session = Session {
        socket: ours,
        protocol: BackendReqHandler::from_stream(spoken, Arc::clone(&device)),
        device,
        held: Disturbed::None,
    };
    // Answers that nobody reads must not stop us.
    let _ = session.socket.set_nonblocking(true);
    let flags = rustix::fs::MemfdFlags::CLOEXEC;
    let memory: File = rustix::fs::memfd_create("guest", flags)
        .expect("memory")
        .into();
    memory.set_len(MEMORY as u64).expect("memory");
    let mut rest = bytes;
    while rest.len() >= HEAD {
        let size = u32::from_ne_bytes([rest[8], rest[9], rest[10], rest[11]]) as usize;
        let (message, behind) = rest.split_at(rest.len().min(HEAD.saturating_add(size)));
        rest = behind;
        let count = descriptors(message);
        if !send(&client, message, &vec![memory.as_fd(); count]) {
            return;
        }
        match session.message() {
            Ok(Some(_)) => {}
            _ => return,
        }
        if session.protocol.handle_request().is_err() {
            return;
        }
        let mut device = session
            .device
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        while device.take_kick().is_some() {}
        for index in 0..device.given() {
            let (queue, memory) = device.queue(index);
            match queue.is_running(memory) {
                Ok(true) => carry_out(&mut device, index),
                Ok(false) => {}
                Err(_) => return,
            }
        }
    }
}

/// How many descriptors a message is to have.
fn descriptors(message: &[u8]) -> usize {
    let code = u32::from_ne_bytes([message[0], message[1], message[2], message[3]]);
    let is = |request: FrontendReq| request as u32 == code;
    if is(FrontendReq::SET_MEM_TABLE) {
        message.get(HEAD).map_or(0, |count| usize::from(*count % 9))
    } else {
        let one = [
            FrontendReq::SET_VRING_KICK,
            FrontendReq::SET_VRING_CALL,
            FrontendReq::SET_VRING_ERR,
            FrontendReq::SET_INFLIGHT_FD,
            FrontendReq::ADD_MEM_REG,
        ];
        usize::from(one.into_iter().any(is))
    }
}

fn send(client: &UnixStream, message: &[u8], descriptors: &[BorrowedFd<'_>]) -> bool {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(descriptors));
    }
    let sent = rustix::net::sendmsg(
        client,
        &[IoSlice::new(message)],
        &mut control,
        SendFlags::NOSIGNAL | SendFlags::DONTWAIT,
    );
    sent == Ok(message.len())
}
