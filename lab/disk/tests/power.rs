// SPDX-License-Identifier: Apache-2.0
//! The program as the lab uses it: nodes that come and go, and power cuts.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;
use vhost::vhost_user::message::{VhostUserConfigFlags, VhostUserProtocolFeatures};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use virtio_bindings::virtio_blk::{VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT};
use virtio_bindings::virtio_ring::VRING_DESC_F_WRITE;
use virtio_queue::desc::split::Descriptor;
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};
use vmm_sys_util::eventfd::EventFd;

const DISK: u64 = 1 << 20;
const MEMORY: usize = 1 << 20;
// Where the parts of the queue lie, and what the requests speak of.
const DESCRIPTORS: u64 = 0;
const AVAILABLE: u64 = 1 << 12;
const USED: u64 = 1 << 13;
const DATA: u64 = 1 << 19;
const QUEUE: u16 = 16;
const PATIENCE: Duration = Duration::from_secs(20);

/// The program, running.
struct Disk {
    directory: TempDir,
    child: Child,
}

impl Disk {
    fn start() -> Self {
        let directory = TempDir::new().unwrap();
        let file = File::create(directory.path().join("file")).unwrap();
        file.set_len(DISK).unwrap();
        let child = launch(&directory);
        Disk { directory, child }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn durable(&self, sector: usize) -> u8 {
        fs::read(self.path("file")).unwrap()[sector * 512]
    }

    fn tell(&self, line: &str) -> Value {
        let mut connection = patiently(|| UnixStream::connect(self.path("control")).ok());
        connection.write_all(line.as_bytes()).unwrap();
        connection.write_all(b"\n").unwrap();
        let mut answer = String::new();
        BufReader::new(connection).read_line(&mut answer).unwrap();
        serde_json::from_str(&answer).unwrap()
    }

    fn wait_until_unplugged(&self) {
        patiently(|| {
            let status = self.tell(r#"{"command": "status"}"#);
            (status["connected"] == json!(false)).then_some(())
        });
    }

    fn end(&mut self, signal: &str) {
        let pid = self.child.id().to_string();
        Command::new("kill").args([signal, &pid]).status().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn launch(directory: &TempDir) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_localstor-lab-disk"));
    for name in ["file", "socket", "control"] {
        command
            .arg(format!("--{name}"))
            .arg(directory.path().join(name));
    }
    command.stderr(Stdio::null()).spawn().unwrap()
}

fn patiently<T>(look: impl Fn() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(start.elapsed() < PATIENCE, "in vain");
        thread::sleep(Duration::from_millis(10));
    }
}

/// What a node's kernel does; dropping it is the end of the kernel.
struct Node {
    frontend: Frontend,
    memory: GuestMemoryMmap,
    kick: EventFd,
}

impl Node {
    fn connect(disk: &Disk) -> Self {
        let path = disk.path("socket");
        let mut frontend = patiently(|| Frontend::connect(&path, 1).ok());
        frontend.set_owner().unwrap();
        let features = frontend.get_features().unwrap();
        frontend.set_features(features).unwrap();
        let wanted = VhostUserProtocolFeatures::CONFIG | VhostUserProtocolFeatures::REPLY_ACK;
        let offered = frontend.get_protocol_features().unwrap();
        frontend.set_protocol_features(offered & wanted).unwrap();
        let shared = tempfile::tempfile().unwrap();
        shared.set_len(MEMORY as u64).unwrap();
        let memory = GuestMemoryMmap::from_ranges_with_files([(
            GuestAddress(0),
            MEMORY,
            Some(FileOffset::new(shared, 0)),
        )])
        .unwrap();
        let address = memory.get_host_address(GuestAddress(0)).unwrap() as u64;
        let region = memory.find_region(GuestAddress(0)).unwrap();
        let region = VhostUserMemoryRegionInfo::from_guest_region(region).unwrap();
        frontend.set_mem_table(&[region]).unwrap();
        frontend.set_vring_num(0, QUEUE).unwrap();
        let addresses = VringConfigData {
            queue_max_size: QUEUE,
            queue_size: QUEUE,
            flags: 0,
            desc_table_addr: address + DESCRIPTORS,
            used_ring_addr: address + USED,
            avail_ring_addr: address + AVAILABLE,
            log_addr: None,
        };
        frontend.set_vring_addr(0, &addresses).unwrap();
        frontend.set_vring_base(0, 0).unwrap();
        let kick = EventFd::new(0).unwrap();
        frontend
            .set_vring_call(0, &EventFd::new(0).unwrap())
            .unwrap();
        frontend.set_vring_kick(0, &kick).unwrap();
        frontend.set_vring_enable(0, true).unwrap();
        Node {
            frontend,
            memory,
            kick,
        }
    }

    fn capacity(&mut self) -> u64 {
        let flags = VhostUserConfigFlags::empty();
        let (_header, bytes) = self.frontend.get_config(0, 60, flags, &[0; 60]).unwrap();
        u64::from_le_bytes(bytes[..8].try_into().unwrap())
    }

    /// Put requests into the queue together, and wait for all answers; each
    /// must succeed.
    fn submit(&self, requests: &[(u32, u64, u8)]) {
        self.submit_unheard(requests);
        patiently(|| (self.index(USED) == self.index(AVAILABLE)).then_some(()));
        for number in 0..requests.len() as u64 {
            let status: u8 = self.memory.read_obj(status_of(number)).unwrap();
            assert_eq!(0, status, "request {number}");
        }
    }

    fn submit_unheard(&self, requests: &[(u32, u64, u8)]) {
        let first = self.index(AVAILABLE);
        for (number, (kind, sector, byte)) in (0u16..).zip(requests) {
            let base = DATA + u64::from(number) * 2048;
            let header = [&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat();
            self.memory
                .write_slice(&header, GuestAddress(base))
                .unwrap();
            self.memory
                .write_slice(&[*byte; 512], GuestAddress(base + 512))
                .unwrap();
            let written = if *kind == VIRTIO_BLK_T_IN {
                VRING_DESC_F_WRITE
            } else {
                0
            };
            let parts = [
                (base, 16, 0),
                (base + 512, 512, written),
                (status_of(u64::from(number)).0, 1, VRING_DESC_F_WRITE),
            ];
            for (part, (address, length, flags)) in (0u16..).zip(parts) {
                let index = number * 3 + part;
                // VRING_DESC_F_NEXT is 1.
                let (next, more) = if part < 2 { (index + 1, 1) } else { (0, 0) };
                let descriptor = Descriptor::new(address, length, flags as u16 | more, next);
                let place = GuestAddress(DESCRIPTORS + u64::from(index) * 16);
                self.memory.write_obj(descriptor, place).unwrap();
            }
            let place = AVAILABLE + 4 + u64::from((first + number) % QUEUE) * 2;
            self.memory
                .write_obj(number * 3, GuestAddress(place))
                .unwrap();
        }
        let next = first + requests.len() as u16;
        self.memory
            .write_obj(next, GuestAddress(AVAILABLE + 2))
            .unwrap();
        self.kick.write(1).unwrap();
    }

    /// How many requests a ring has seen.
    fn index(&self, ring: u64) -> u16 {
        self.memory.read_obj(GuestAddress(ring + 2)).unwrap()
    }

    fn write(&self, sector: u64, byte: u8) {
        self.submit(&[(VIRTIO_BLK_T_OUT, sector, byte)]);
    }

    fn flush(&self) {
        self.submit(&[(VIRTIO_BLK_T_FLUSH, 0, 0)]);
    }

    fn read(&self, sector: u64) -> u8 {
        self.submit(&[(VIRTIO_BLK_T_IN, sector, 0xee)]);
        self.memory.read_obj(GuestAddress(DATA + 512)).unwrap()
    }
}

fn status_of(number: u64) -> GuestAddress {
    GuestAddress(DATA + number * 2048 + 1536)
}

const DROP: &str = r#"{"command": "power-cut", "seed": 1, "lose": "drop"}"#;

#[test]
fn a_node_finds_its_disk() {
    let disk = Disk::start();
    let mut node = Node::connect(&disk);
    assert_eq!(DISK / 512, node.capacity());
    node.write(5, 1);
    assert_eq!((1, 0), (node.read(5), node.read(6)));
    assert_eq!(0, disk.durable(5));
    node.flush();
    assert_eq!(1, disk.durable(5));
}

#[test]
fn a_node_that_comes_back_finds_what_was_not_flushed() {
    let disk = Disk::start();
    for generation in 1..5 {
        let node = Node::connect(&disk);
        assert_eq!(generation - 1, node.read(0));
        node.write(0, generation);
        drop(node);
        disk.wait_until_unplugged();
    }
    assert_eq!(0, disk.durable(0));
}

#[test]
fn a_node_that_comes_back_after_a_power_cut_finds_what_was_flushed() {
    let disk = Disk::start();
    let node = Node::connect(&disk);
    node.write(0, 1);
    node.flush();
    node.write(0, 2);
    let cut = disk.tell(DROP);
    assert_eq!(
        json!({"seed": 1, "lose": "drop", "kept": 0, "dropped": 1, "torn": 0}),
        cut
    );
    drop(node);
    assert_eq!(1, Node::connect(&disk).read(0));
}

#[test]
fn without_power_nothing_is_answered_or_written() {
    let disk = Disk::start();
    let node = Node::connect(&disk);
    node.write(0, 1);
    disk.tell(DROP);
    node.submit_unheard(&[(VIRTIO_BLK_T_OUT, 0, 2), (VIRTIO_BLK_T_FLUSH, 0, 0)]);
    drop(node);
    disk.wait_until_unplugged();
    assert_eq!(0, Node::connect(&disk).read(0));
}

/// What stands in the queue with a flush had not completed before it.
#[test]
fn a_flush_does_not_cover_what_was_submitted_with_it() {
    let disk = Disk::start();
    let node = Node::connect(&disk);
    node.write(0, 1);
    node.submit(&[(VIRTIO_BLK_T_OUT, 1, 2), (VIRTIO_BLK_T_FLUSH, 0, 0)]);
    assert_eq!((1, 0), (disk.durable(0), disk.durable(1)));
    assert_eq!(2, node.read(1));
}

#[test]
fn an_orderly_end_of_the_disk_loses_nothing() {
    let mut disk = Disk::start();
    Node::connect(&disk).write(0, 1);
    disk.end("-TERM");
    assert_eq!(1, disk.durable(0));
    assert!(!disk.path("socket").exists() && !disk.path("control").exists());
}

#[test]
fn a_disk_that_was_killed_starts_again() {
    let mut disk = Disk::start();
    let node = Node::connect(&disk);
    node.write(0, 1);
    node.flush();
    node.write(0, 2);
    disk.end("-KILL");
    drop(node);
    disk.child = launch(&disk.directory);
    assert_eq!(1, Node::connect(&disk).read(0));
}

#[test]
fn garbage_on_the_sockets_ends_nothing() {
    let disk = Disk::start();
    let told = disk.tell("open sesame");
    assert!(
        told["error"]
            .as_str()
            .unwrap()
            .starts_with("this is no command for a disk")
    );
    let told = disk.tell(&"x".repeat(10_000));
    assert_eq!("a command has at most 4096 bytes", told["error"]);
    let mut stranger = UnixStream::connect(disk.path("socket")).unwrap();
    stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    drop(stranger);
    Node::connect(&disk).write(0, 1);
}

#[test]
fn a_file_that_is_not_there_is_named() {
    let directory = TempDir::new().unwrap();
    let output = launch_with_output(&directory);
    assert!(!output.status.success());
    let said = String::from_utf8(output.stderr).unwrap();
    let file = directory.path().join("file");
    assert!(
        said.contains(&format!("{} can't be opened", file.display())),
        "{said}"
    );
}

fn launch_with_output(directory: &TempDir) -> std::process::Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_localstor-lab-disk"));
    for name in ["file", "socket", "control"] {
        command
            .arg(format!("--{name}"))
            .arg(directory.path().join(name));
    }
    command.output().unwrap()
}
