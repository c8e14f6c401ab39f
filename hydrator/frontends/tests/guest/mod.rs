// SPDX-License-Identifier: Apache-2.0
//! A guest of a vhost-user-blk device, as small as can be: memory, one ring,
//! and a driver that puts requests there.

#![allow(clippy::unwrap_used, dead_code, missing_docs)]

use std::fs::File;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::fs::{MemfdFlags, memfd_create};
use vhost::vhost_user::message::{
    VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserInflight, VhostUserProtocolFeatures,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};
use vmm_sys_util::eventfd::EventFd;

pub(crate) const IN: u32 = 0;
pub(crate) const OUT: u32 = 1;
pub(crate) const FLUSH: u32 = 4;
pub(crate) const GET_ID: u32 = 8;
pub(crate) const DISCARD: u32 = 11;
pub(crate) const WRITE_ZEROES: u32 = 13;

pub(crate) const OK: u8 = 0;
pub(crate) const FAILED: u8 = 1;
pub(crate) const UNSUPPORTED: u8 = 2;

pub(crate) const NEXT: u16 = 1;
pub(crate) const WRITE: u16 = 2;
pub(crate) const INDIRECT: u16 = 4;

/// Descriptors of the ring; a request has three of them.
pub(crate) const SIZE: u16 = 64;
/// Requests that fit the ring.
pub(crate) const REQUESTS: u16 = SIZE / 3;
/// Bytes for the data of a request.
pub(crate) const ROOM: u64 = 1 << 20;

const TABLE: u64 = 0;
const AVAILABLE: u64 = 0x1000;
const USED: u64 = 0x2000;
const HEADERS: u64 = 0x3000;
const DATA: u64 = 0x10_0000;
const MEMORY: u64 = DATA + ROOM * REQUESTS as u64;

const VERSION_1: u64 = 1 << 32;
const EVENT_IDX: u64 = 1 << 29;
const PROTOCOL_FEATURES: u64 = 1 << 30;
const PATIENCE: Duration = Duration::from_secs(60);

/// What a guest keeps when the server dies.
pub(crate) struct Guest {
    pub(crate) memory: GuestMemoryMmap,
    /// Without these bits of the device's features.
    pub(crate) without: u64,
    inflight: Option<(VhostUserInflight, File)>,
    available: u16,
    used: u16,
    free: Vec<u16>,
    connection: Option<Connection>,
}

struct Connection {
    client: Frontend,
    kick: EventFd,
    call: EventFd,
}

impl Guest {
    pub(crate) fn new() -> Guest {
        let file: File = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap().into();
        file.set_len(MEMORY).unwrap();
        let range = (
            GuestAddress(0),
            MEMORY as usize,
            Some(FileOffset::new(file, 0)),
        );
        Guest {
            memory: GuestMemoryMmap::from_ranges_with_files([range]).unwrap(),
            without: 0,
            inflight: None,
            available: 0,
            used: 0,
            free: (0..REQUESTS).rev().collect(),
            connection: None,
        }
    }

    /// Connects, for the first time or again; the device's configuration.
    pub(crate) fn connect(&mut self, path: &Path) -> Vec<u8> {
        let start = Instant::now();
        let mut client = loop {
            match Frontend::connect(path, 1) {
                Ok(client) => break client,
                Err(error) => assert!(start.elapsed() < PATIENCE, "{error}"),
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        client.set_owner().unwrap();
        let features = client.get_features().unwrap();
        let wanted = features & !self.without;
        assert!(features & VERSION_1 != 0 && features & PROTOCOL_FEATURES != 0);
        let offered = client.get_protocol_features().unwrap();
        let needed = VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::INFLIGHT_SHMFD;
        assert!(offered.contains(needed));
        client.set_protocol_features(needed).unwrap();
        client.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        let flags = VhostUserConfigFlags::empty();
        let (_, configuration) = client.get_config(0, 60, flags, &[0; 60]).unwrap();
        client.set_features(wanted).unwrap();
        if self.inflight.is_none() {
            let wanted = VhostUserInflight::new(0, 0, 1, SIZE);
            self.inflight = Some(client.get_inflight_fd(&wanted).unwrap());
        }
        let (inflight, file) = self.inflight.as_ref().unwrap();
        client.set_inflight_fd(inflight, file.as_raw_fd()).unwrap();
        let region = self.memory.find_region(GuestAddress(0)).unwrap();
        let region = VhostUserMemoryRegionInfo::from_guest_region(region).unwrap();
        client.set_mem_table(&[region]).unwrap();
        client.set_vring_num(0, SIZE).unwrap();
        let at = |address: u64| region.userspace_addr + address;
        let ring = VringConfigData {
            queue_max_size: SIZE,
            queue_size: SIZE,
            desc_table_addr: at(TABLE),
            used_ring_addr: at(USED),
            avail_ring_addr: at(AVAILABLE),
            ..VringConfigData::default()
        };
        client.set_vring_addr(0, &ring).unwrap();
        let base: u16 = self.memory.read_obj(GuestAddress(USED + 2)).unwrap();
        client.set_vring_base(0, base).unwrap();
        let (kick, call) = (EventFd::new(0).unwrap(), EventFd::new(0).unwrap());
        client.set_vring_call(0, &call).unwrap();
        client.set_vring_kick(0, &kick).unwrap();
        client.set_vring_enable(0, true).unwrap();
        self.connection = Some(Connection { client, kick, call });
        configuration
    }

    pub(crate) fn disconnect(&mut self) {
        self.connection = None;
    }

    /// Stops the ring; where it stands.
    pub(crate) fn stop(&mut self) -> u32 {
        let connection = self.connection.as_ref().unwrap();
        connection.client.get_vring_base(0).unwrap()
    }

    pub(crate) fn write(&self, address: u64, bytes: &[u8]) {
        self.memory
            .write_slice(bytes, GuestAddress(address))
            .unwrap();
    }

    pub(crate) fn describe(&self, index: u16, address: u64, length: u32, flags: u16, next: u16) {
        let mut bytes = address.to_le_bytes().to_vec();
        bytes.extend(length.to_le_bytes());
        bytes.extend(flags.to_le_bytes());
        bytes.extend(next.to_le_bytes());
        self.write(TABLE + 16 * u64::from(index), &bytes);
    }

    /// Makes a descriptor available.
    pub(crate) fn offer(&mut self, head: u16) {
        let at = AVAILABLE + 4 + 2 * u64::from(self.available % SIZE);
        self.write(at, &head.to_le_bytes());
        self.available = self.available.wrapping_add(1);
        self.write(AVAILABLE + 2, &self.available.to_le_bytes());
    }

    /// Says that `count` more descriptors are available.
    pub(crate) fn pretend(&mut self, count: u16) {
        let index = self.available.wrapping_add(count);
        self.write(AVAILABLE + 2, &index.to_le_bytes());
    }

    pub(crate) fn kick(&self) {
        if let Some(connection) = &self.connection {
            connection.kick.write(1).unwrap();
        }
    }

    /// Where the data of a request are.
    pub(crate) fn data(&self, request: u16) -> u64 {
        DATA + ROOM * u64::from(request)
    }

    fn header(&self, request: u16) -> u64 {
        HEADERS + 64 * u64::from(request)
    }

    fn status(&self, request: u16) -> u64 {
        self.header(request) + 63
    }

    /// Has the server interrupt us after the next answer.
    fn listen(&self) {
        let at = AVAILABLE + 4 + 2 * u64::from(SIZE);
        self.write(at, &self.used.to_le_bytes());
    }

    /// Puts a request with `length` bytes of data into the ring, and kicks: its
    /// number.
    pub(crate) fn submit(&mut self, kind: u32, sector: u64, length: u32) -> u16 {
        let request = self.free.pop().expect("room in the ring");
        let first = request * 3;
        let mut header = kind.to_le_bytes().to_vec();
        header.extend([0; 4]);
        header.extend(sector.to_le_bytes());
        self.write(self.header(request), &header);
        self.write(self.status(request), &[0xff]);
        let from_device = if matches!(kind, IN | GET_ID) {
            WRITE
        } else {
            0
        };
        let second = if length == 0 { first + 2 } else { first + 1 };
        self.describe(first, self.header(request), 16, NEXT, second);
        self.describe(
            first + 1,
            self.data(request),
            length,
            NEXT | from_device,
            first + 2,
        );
        self.describe(first + 2, self.status(request), 1, WRITE, 0);
        self.listen();
        self.offer(first);
        self.kick();
        request
    }

    pub(crate) fn submit_write(&mut self, sector: u64, data: &[u8]) -> u16 {
        let request = *self.free.last().expect("room in the ring");
        self.write(self.data(request), data);
        self.submit(OUT, sector, data.len() as u32)
    }

    /// A range of bytes to be discarded or zeroed.
    pub(crate) fn submit_range(&mut self, kind: u32, sector: u64, count: u32, flags: u32) -> u16 {
        let request = *self.free.last().expect("room in the ring");
        let mut range = sector.to_le_bytes().to_vec();
        range.extend(count.to_le_bytes());
        range.extend(flags.to_le_bytes());
        self.write(self.data(request), &range);
        self.submit(kind, 0, 16)
    }

    /// The next answer that is there: the request and its status.
    pub(crate) fn answer(&mut self) -> Option<(u16, u8)> {
        let index: u16 = self.memory.read_obj(GuestAddress(USED + 2)).unwrap();
        if index == self.used {
            return None;
        }
        let at = USED + 4 + 8 * u64::from(self.used % SIZE);
        let head: u32 = self.memory.read_obj(GuestAddress(at)).unwrap();
        self.used = self.used.wrapping_add(1);
        let request = head as u16 / 3;
        let place = GuestAddress(self.status(request));
        let status: u8 = self.memory.read_obj(place).unwrap();
        assert!(!self.free.contains(&request), "{request} is answered twice");
        self.free.push(request);
        Some((request, status))
    }

    /// Whether a client may wait by reading what calls it.
    pub(crate) fn may_block(&self) -> bool {
        let call = &self.connection.as_ref().unwrap().call;
        // SAFETY: it is open as long as its owner lives.
        let fd = unsafe { BorrowedFd::borrow_raw(call.as_raw_fd()) };
        let flags = rustix::fs::fcntl_getfl(fd).unwrap();
        !flags.contains(rustix::fs::OFlags::NONBLOCK)
    }

    /// Waits for the next answer, by the server's word.
    pub(crate) fn wait(&mut self) -> (u16, u8) {
        loop {
            self.listen();
            // It may have come before we listened.
            if let Some(answer) = self.answer() {
                return answer;
            }
            let call = &self.connection.as_ref().unwrap().call;
            // SAFETY: it is open as long as its owner lives.
            let fd = unsafe { BorrowedFd::borrow_raw(call.as_raw_fd()) };
            let mut poll = [PollFd::new(&fd, PollFlags::IN)];
            let patience = rustix::event::Timespec {
                tv_sec: PATIENCE.as_secs() as i64,
                tv_nsec: 0,
            };
            let told = rustix::event::poll(&mut poll, Some(&patience));
            assert_eq!(told, Ok(1), "the server does not call");
            call.read().unwrap();
        }
    }

    /// Whether a request is answered, or was never asked.
    pub(crate) fn is_free(&self, request: u16) -> bool {
        self.free.contains(&request)
    }

    /// Waits until the server has closed the connection.
    pub(crate) fn dismissed(&mut self) -> bool {
        let connection = self.connection.take().unwrap();
        let start = Instant::now();
        while start.elapsed() < PATIENCE {
            if connection.client.get_features().is_err() {
                return true;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        false
    }

    /// A request and its answer.
    pub(crate) fn ask(&mut self, kind: u32, sector: u64, length: u32) -> u8 {
        let request = self.submit(kind, sector, length);
        let (answered, status) = self.wait();
        assert_eq!(answered, request);
        status
    }

    pub(crate) fn content(&self, request: u16, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        let place = GuestAddress(self.data(request));
        self.memory.read_slice(&mut bytes, place).unwrap();
        bytes
    }

    /// Reads all of a disk of so many bytes.
    pub(crate) fn seen(&mut self, size: u64) -> Vec<u8> {
        let mut all = Vec::new();
        while (all.len() as u64) < size {
            let length = (size - all.len() as u64).min(ROOM) as u32;
            let request = self.submit(IN, all.len() as u64 / 512, length);
            assert_eq!(self.wait(), (request, OK));
            all.extend(self.content(request, length as usize));
        }
        all
    }
}
