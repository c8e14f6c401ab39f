// SPDX-License-Identifier: Apache-2.0
//! A guest of a vhost-user-blk device, as small as can be: memory, rings, and a
//! driver that puts requests there.

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

/// Descriptors of a ring; a request has three of them.
pub(crate) const SIZE: u16 = 64;
/// Requests that fit a ring.
pub(crate) const REQUESTS: u16 = SIZE / 3;
/// Bytes for the data of a request.
pub(crate) const ROOM: u64 = 1 << 20;

// In the memory of a ring
const TABLE: u64 = 0;
const AVAILABLE: u64 = 0x1000;
const USED: u64 = 0x2000;
const HEADERS: u64 = 0x3000;
const DATA: u64 = 0x10_0000;
/// Bytes of memory for each ring.
const MEMORY: u64 = DATA + ROOM * REQUESTS as u64;

const VERSION_1: u64 = 1 << 32;
const MULTIQUEUE: u64 = 1 << 12;
const EVENT_IDX: u64 = 1 << 29;
const PROTOCOL_FEATURES: u64 = 1 << 30;
const PATIENCE: Duration = Duration::from_secs(60);

/// What a guest keeps when the server dies.
pub(crate) struct Guest {
    pub(crate) memory: GuestMemoryMmap,
    /// Without these bits of the device's features.
    pub(crate) without: u64,
    /// The ring that is used for whatever is asked from now on.
    pub(crate) ring: usize,
    /// How many of the last rings are not handed over when it connects.
    pub(crate) late: usize,
    inflight: Option<(VhostUserInflight, File)>,
    rings: Vec<Driver>,
    client: Option<Frontend>,
}

/// How far the driver of a ring is.
struct Driver {
    available: u16,
    used: u16,
    free: Vec<u16>,
    descriptors: Option<Descriptors>,
}

struct Descriptors {
    kick: EventFd,
    call: EventFd,
}

impl Guest {
    pub(crate) fn new() -> Guest {
        Guest::with_rings(1)
    }

    pub(crate) fn with_rings(count: usize) -> Guest {
        let file: File = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap().into();
        let size = MEMORY * count as u64;
        file.set_len(size).unwrap();
        let range = (
            GuestAddress(0),
            size as usize,
            Some(FileOffset::new(file, 0)),
        );
        let driver = || Driver {
            available: 0,
            used: 0,
            free: (0..REQUESTS).rev().collect(),
            descriptors: None,
        };
        Guest {
            memory: GuestMemoryMmap::from_ranges_with_files([range]).unwrap(),
            without: 0,
            ring: 0,
            late: 0,
            inflight: None,
            rings: (0..count).map(|_| driver()).collect(),
            client: None,
        }
    }

    /// Where the memory of the ring begins that is used.
    fn base(&self) -> u64 {
        MEMORY * self.ring as u64
    }

    fn driver(&mut self) -> &mut Driver {
        &mut self.rings[self.ring]
    }

    fn descriptors(&self) -> Option<&Descriptors> {
        self.rings[self.ring].descriptors.as_ref()
    }

    /// Connects, for the first time or again; the device's configuration.
    pub(crate) fn connect(&mut self, path: &Path) -> Vec<u8> {
        let start = Instant::now();
        let mut client = loop {
            match Frontend::connect(path, self.rings.len() as u64) {
                Ok(client) => break client,
                Err(error) => assert!(start.elapsed() < PATIENCE, "{error}"),
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        client.set_owner().unwrap();
        let features = client.get_features().unwrap();
        let wanted = features & !self.without;
        assert!(features & VERSION_1 != 0 && features & PROTOCOL_FEATURES != 0);
        // Without it a driver has no use for a second ring.
        assert!(features & MULTIQUEUE != 0);
        let offered = client.get_protocol_features().unwrap();
        let needed = VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::INFLIGHT_SHMFD;
        assert!(offered.contains(needed));
        client.set_protocol_features(needed).unwrap();
        client.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        let flags = VhostUserConfigFlags::empty();
        let (_, configuration) = client.get_config(0, 60, flags, &[0; 60]).unwrap();
        client.set_features(wanted).unwrap();
        assert!(client.get_queue_num().unwrap() >= self.rings.len() as u64);
        if self.inflight.is_none() {
            let wanted = VhostUserInflight::new(0, 0, self.rings.len() as u16, SIZE);
            self.inflight = Some(client.get_inflight_fd(&wanted).unwrap());
        }
        let (inflight, file) = self.inflight.as_ref().unwrap();
        client.set_inflight_fd(inflight, file.as_raw_fd()).unwrap();
        client.set_mem_table(&[self.region()]).unwrap();
        self.client = Some(client);
        let chosen = self.ring;
        for index in 0..self.rings.len() - self.late {
            self.ring = index;
            self.begin();
        }
        self.ring = chosen;
        configuration
    }

    fn region(&self) -> VhostUserMemoryRegionInfo {
        let region = self.memory.find_region(GuestAddress(0)).unwrap();
        VhostUserMemoryRegionInfo::from_guest_region(region).unwrap()
    }

    /// Hands the ring over.
    pub(crate) fn begin(&mut self) {
        let index = self.ring;
        let place = self.region().userspace_addr;
        let mut client = self.client.take().unwrap();
        client.set_vring_num(index, SIZE).unwrap();
        let at = |address: u64| place + self.base() + address;
        let ring = VringConfigData {
            queue_max_size: SIZE,
            queue_size: SIZE,
            desc_table_addr: at(TABLE),
            used_ring_addr: at(USED),
            avail_ring_addr: at(AVAILABLE),
            ..VringConfigData::default()
        };
        client.set_vring_addr(index, &ring).unwrap();
        let used = GuestAddress(self.base() + USED + 2);
        let base: u16 = self.memory.read_obj(used).unwrap();
        client.set_vring_base(index, base).unwrap();
        let (kick, call) = (EventFd::new(0).unwrap(), EventFd::new(0).unwrap());
        client.set_vring_call(index, &call).unwrap();
        client.set_vring_kick(index, &kick).unwrap();
        client.set_vring_enable(index, true).unwrap();
        self.driver().descriptors = Some(Descriptors { kick, call });
        self.client = Some(client);
    }

    pub(crate) fn disconnect(&mut self) {
        self.client = None;
        for ring in &mut self.rings {
            ring.descriptors = None;
        }
    }

    /// Stops the ring; where it stands.
    pub(crate) fn stop(&mut self) -> u32 {
        let client = self.client.as_ref().unwrap();
        client.get_vring_base(self.ring).unwrap()
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
        self.write(self.base() + TABLE + 16 * u64::from(index), &bytes);
    }

    /// Makes a descriptor available.
    pub(crate) fn offer(&mut self, head: u16) {
        let available = self.driver().available;
        let ring = self.base() + AVAILABLE;
        self.write(
            ring + 4 + 2 * u64::from(available % SIZE),
            &head.to_le_bytes(),
        );
        self.driver().available = available.wrapping_add(1);
        self.write(ring + 2, &available.wrapping_add(1).to_le_bytes());
    }

    /// Says that `count` more descriptors are available.
    pub(crate) fn pretend(&mut self, count: u16) {
        let index = self.driver().available.wrapping_add(count);
        self.write(self.base() + AVAILABLE + 2, &index.to_le_bytes());
    }

    pub(crate) fn kick(&self) {
        if let Some(descriptors) = self.descriptors() {
            descriptors.kick.write(1).unwrap();
        }
    }

    /// Where the data of a request are.
    pub(crate) fn data(&self, request: u16) -> u64 {
        self.base() + DATA + ROOM * u64::from(request)
    }

    fn header(&self, request: u16) -> u64 {
        self.base() + HEADERS + 64 * u64::from(request)
    }

    fn status(&self, request: u16) -> u64 {
        self.header(request) + 63
    }

    /// Has the server interrupt us after the next answer.
    fn listen(&self) {
        let at = self.base() + AVAILABLE + 4 + 2 * u64::from(SIZE);
        self.write(at, &self.rings[self.ring].used.to_le_bytes());
    }

    /// Puts a request with `length` bytes of data into the ring, and kicks: its
    /// number.
    pub(crate) fn submit(&mut self, kind: u32, sector: u64, length: u32) -> u16 {
        let request = self.driver().free.pop().expect("room in the ring");
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
        let request = *self.driver().free.last().expect("room in the ring");
        self.write(self.data(request), data);
        self.submit(OUT, sector, data.len() as u32)
    }

    /// A range of bytes to be discarded or zeroed.
    pub(crate) fn submit_range(&mut self, kind: u32, sector: u64, count: u32, flags: u32) -> u16 {
        let request = *self.driver().free.last().expect("room in the ring");
        let mut range = sector.to_le_bytes().to_vec();
        range.extend(count.to_le_bytes());
        range.extend(flags.to_le_bytes());
        self.write(self.data(request), &range);
        self.submit(kind, 0, 16)
    }

    /// The next answer that is there: the request and its status.
    pub(crate) fn answer(&mut self) -> Option<(u16, u8)> {
        let ring = self.base() + USED;
        let index: u16 = self.memory.read_obj(GuestAddress(ring + 2)).unwrap();
        let used = self.driver().used;
        if index == used {
            return None;
        }
        let at = ring + 4 + 8 * u64::from(used % SIZE);
        let head: u32 = self.memory.read_obj(GuestAddress(at)).unwrap();
        self.driver().used = used.wrapping_add(1);
        let request = head as u16 / 3;
        let place = GuestAddress(self.status(request));
        let status: u8 = self.memory.read_obj(place).unwrap();
        assert!(!self.is_free(request), "{request} is answered twice");
        self.driver().free.push(request);
        Some((request, status))
    }

    /// Whether a client may wait by reading what calls it.
    pub(crate) fn may_block(&self) -> bool {
        let call = &self.descriptors().unwrap().call;
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
            let call = &self.descriptors().unwrap().call;
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
        self.rings[self.ring].free.contains(&request)
    }

    /// Waits until the server has closed the connection.
    pub(crate) fn dismissed(&mut self) -> bool {
        let client = self.client.take().unwrap();
        let start = Instant::now();
        while start.elapsed() < PATIENCE {
            if client.get_features().is_err() {
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
