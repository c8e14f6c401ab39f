// SPDX-License-Identifier: Apache-2.0
//! The NBD server over a file, with the clients that people have.

#![allow(clippy::unwrap_used)]

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use localstor_hydrator_disks::{Access, Disk, Memory, Owner, Ring};
use localstor_hydrator_frontends::linear::Linear;
use localstor_hydrator_frontends::nbd::Nbd;
use localstor_hydrator_frontends::nbd::protocol::{Command as Verb, REPLY, RequestHead};
use localstor_hydrator_frontends::{Frontend, Geometry, Stage};

const SIZE: usize = 64 << 20;

struct Server {
    image: PathBuf,
    socket: PathBuf,
    ended: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Serves a file of random bytes.
    fn start(name: &str) -> Server {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let image = folder.join(format!("{name}.img"));
        let socket = folder.join(format!("{name}.sock"));
        let _ = std::fs::remove_file(&socket);
        let mut content = vec![0; SIZE];
        std::fs::File::open("/dev/urandom")
            .unwrap()
            .read_exact(&mut content)
            .unwrap();
        std::fs::write(&image, content).unwrap();
        let ended = Arc::new(AtomicBool::new(false));
        let (ready, listening) = channel();
        let thread = std::thread::spawn({
            let (image, socket, ended) = (image.clone(), socket.clone(), Arc::clone(&ended));
            move || serve(&image, &socket, &ended, &ready)
        });
        listening.recv().expect("a server");
        Server {
            image,
            socket,
            ended,
            thread: Some(thread),
        }
    }

    fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", self.socket.display())
    }

    fn content(&self) -> Vec<u8> {
        std::fs::read(&self.image).unwrap()
    }

    /// A client in the transmission phase.
    fn connect(&self) -> UnixStream {
        let mut client = UnixStream::connect(&self.socket).unwrap();
        client.read_exact(&mut [0; 18]).unwrap();
        client.write_all(&3u32.to_be_bytes()).unwrap();
        client.write_all(b"IHAVEOPT").unwrap();
        // NBD_OPT_EXPORT_NAME, of no name
        client.write_all(&[0, 0, 0, 1, 0, 0, 0, 0]).unwrap();
        client.read_exact(&mut [0; 10]).unwrap();
        client
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        let ended = self.thread.take().map(JoinHandle::join);
        if !std::thread::panicking() {
            ended.unwrap().unwrap();
            assert!(!self.socket.exists());
        }
    }
}

fn serve(image: &Path, socket: &Path, ended: &AtomicBool, ready: &Sender<()>) {
    let mut ring = Ring::new(256, false).unwrap();
    let access = Access::Exclusive(Duration::ZERO);
    let disk = Disk::open(image, access, &mut ring).unwrap();
    let geometry = Geometry {
        size: disk.size(),
        logical_block: disk.logical_block(),
    };
    let mut memory = Memory::new(Nbd::memory()).unwrap();
    let mut frontend = Nbd::listen(socket, geometry, &mut ring, &mut memory).unwrap();
    ready.send(()).unwrap();
    let mut engine = Linear::new(disk);
    let mut arrivals = Vec::new();
    while frontend.stage() != Stage::Gone {
        if frontend.stage() == Stage::Ready && ended.load(Ordering::Relaxed) {
            frontend.stop(&mut ring).unwrap();
        }
        ring.wait(Some(Duration::from_millis(10))).unwrap();
        while let Some(event) = ring.next_event() {
            if event.token.owner() == Owner::Frontend {
                frontend.on_event(&mut ring, event, &mut arrivals).unwrap();
            } else if let Some((tag, outcome)) = engine.on_event(&mut ring, event) {
                frontend.complete(&mut ring, tag, outcome, &mut arrivals);
            }
            for arrival in arrivals.drain(..) {
                engine.submit(&mut ring, arrival);
            }
        }
    }
}

/// Runs a tool, which must succeed; what it prints.
fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program)
        .args(arguments)
        .output()
        .unwrap_or_else(|error| panic!("{program}: {error} (make setup installs it)"));
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program}: {printed} {complained}");
    printed
}

fn head(command: Verb, cookie: u64, offset: u64, length: u32) -> RequestHead {
    RequestHead {
        cookie,
        command,
        fua: false,
        offset,
        length,
    }
}

/// The error and the cookie of the next reply.
fn reply(client: &mut UnixStream) -> (u32, u64) {
    let mut bytes = [0; REPLY];
    client.read_exact(&mut bytes).unwrap();
    assert_eq!(bytes[0..4], 0x6744_6698u32.to_be_bytes());
    let error = u32::from_be_bytes(bytes[4..8].try_into().unwrap());
    let cookie = u64::from_be_bytes(bytes[8..16].try_into().unwrap());
    (error, cookie)
}

#[test]
fn nbdinfo_sees_size_and_abilities() {
    let server = Server::start("info");
    let info = run("nbdinfo", &[&server.uri()]);
    for expected in [
        "export-size: 67108864",
        "can_flush: true",
        "can_fua: true",
        "can_trim: true",
        "can_zero: true",
        "block_size_minimum: 512",
        "block_size_maximum: 1048576",
    ] {
        assert!(info.contains(expected), "{expected} is not in {info}");
    }
    assert!(run("nbdinfo", &["--list", &server.uri()]).contains("export=\"\""));
}

#[test]
fn nbdcopy_reads_and_writes_all_of_it() {
    let server = Server::start("copy");
    let copy = server.image.with_extension("copy");
    run("nbdcopy", &[&server.uri(), copy.to_str().unwrap()]);
    assert!(std::fs::read(&copy).unwrap() == server.content());
    std::fs::write(&copy, vec![0x5c; SIZE]).unwrap();
    run("nbdcopy", &[copy.to_str().unwrap(), &server.uri()]);
    assert!(server.content() == vec![0x5c; SIZE]);
}

#[test]
fn qemu_writes_zeroes_discards_and_reads_back() {
    let server = Server::start("qemu");
    let mut expected = server.content();
    let commands = [
        "write -P 0x5c 512 1M",
        "write -f -P 0x6d 8M 3M",
        "write -z 2M 64k",
        "discard 4M 64k",
        "flush",
        "read -P 0x5c 512 1M",
        "read -P 0 2M 64k",
        "read -P 0 4M 64k",
    ];
    let mut arguments = vec!["-f", "raw"];
    arguments.extend(commands.iter().flat_map(|command| ["-c", command]));
    let uri = server.uri();
    arguments.push(&uri);
    let printed = run("qemu-io", &arguments);
    assert!(!printed.contains("verification failed"), "{printed}");
    expected[512..(1 << 20) + 512].fill(0x5c);
    expected[8 << 20..11 << 20].fill(0x6d);
    expected[2 << 20..(2 << 20) + 65536].fill(0);
    expected[4 << 20..(4 << 20) + 65536].fill(0);
    assert!(server.content() == expected);
}

#[test]
fn more_requests_than_there_is_room_for_are_all_answered() {
    let server = Server::start("many");
    let mut client = server.connect();
    let content = server.content();
    let mut writer = client.try_clone().unwrap();
    // Nobody takes replies until all of them are sent.
    let sender = std::thread::spawn(move || {
        for cookie in 0..2000u64 {
            let offset = cookie * 4096;
            let head = head(Verb::Read, cookie, offset, 4096);
            writer.write_all(&head.encode()).unwrap();
        }
    });
    std::thread::sleep(Duration::from_millis(100));
    let mut seen = vec![false; 2000];
    let mut data = [0; 4096];
    for _ in 0..2000 {
        let (error, cookie) = reply(&mut client);
        assert_eq!(error, 0);
        client.read_exact(&mut data).unwrap();
        let offset = cookie as usize * 4096;
        assert!(data == content[offset..offset + 4096], "block {cookie}");
        assert!(!std::mem::replace(&mut seen[cookie as usize], true));
    }
    sender.join().unwrap();
}

#[test]
fn requests_that_make_no_sense_are_refused_and_the_next_is_served() {
    let server = Server::start("bad");
    let mut client = server.connect();
    let size = SIZE as u64;
    let bad = [
        head(Verb::Read, 1, size, 4096),
        head(Verb::Read, 2, u64::MAX - 511, 512),
        head(Verb::Read, 3, 1, 512),
        head(Verb::Trim, 4, 0, 0),
        head(Verb::Write, 5, size - 512, 1024),
    ];
    for request in bad {
        client.write_all(&request.encode()).unwrap();
        if request.command == Verb::Write {
            client.write_all(&[0xff; 1024]).unwrap();
        }
        assert_eq!(reply(&mut client), (22, request.cookie));
    }
    let unknown = head(Verb::Other(9), 6, 0, 0);
    client.write_all(&unknown.encode()).unwrap();
    assert_eq!(reply(&mut client), (95, 6));
    let good = head(Verb::Flush, 7, 0, 0);
    client.write_all(&good.encode()).unwrap();
    assert_eq!(reply(&mut client), (0, 7));
    assert_eq!(server.content().len(), SIZE);
}

#[test]
fn noise_and_sudden_ends_leave_the_door_open() {
    let server = Server::start("noise");
    let mut client = server.connect();
    client.write_all(&[0x5c; 1000]).unwrap();
    // Closed at once.
    assert_eq!(client.read(&mut [0; 16]).unwrap_or(0), 0);
    // Gone in the middle of a payload, with requests in flight.
    let mut client = server.connect();
    for cookie in 0..100 {
        let request = head(Verb::Read, cookie, cookie * 4096, 1 << 20);
        client.write_all(&request.encode()).unwrap();
    }
    drop(client);
    let mut client = server.connect();
    let request = head(Verb::Write, 1, 0, 1 << 20);
    client.write_all(&request.encode()).unwrap();
    client.write_all(&[0x5c; 5000]).unwrap();
    drop(client);
    let mut client = server.connect();
    client
        .write_all(&head(Verb::Flush, 1, 0, 0).encode())
        .unwrap();
    assert_eq!(reply(&mut client), (0, 1));
    client
        .write_all(&head(Verb::Disconnect, 2, 0, 0).encode())
        .unwrap();
    assert_eq!(client.read(&mut [0; 16]).unwrap(), 0);
}
