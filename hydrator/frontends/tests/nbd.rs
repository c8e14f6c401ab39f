// SPDX-License-Identifier: Apache-2.0
//! The NBD server over a file, with the clients that people have.

#![allow(clippy::unwrap_used)]

mod server;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::Duration;

use localstor_hydrator_frontends::nbd::Nbd;
use localstor_hydrator_frontends::nbd::protocol::{Command as Verb, REPLY, RequestHead};
use server::{Kind, Server};

const SIZE: usize = 64 << 20;

fn start(name: &str) -> Server {
    let kind = Kind {
        memory: Nbd::memory,
        listen: Nbd::listen,
    };
    Server::start(name, SIZE, kind)
}

fn uri(server: &Server) -> String {
    format!("nbd+unix:///?socket={}", server.socket.display())
}

/// A client in the transmission phase.
fn connect(server: &Server) -> UnixStream {
    let mut client = UnixStream::connect(&server.socket).unwrap();
    client.read_exact(&mut [0; 18]).unwrap();
    client.write_all(&3u32.to_be_bytes()).unwrap();
    client.write_all(b"IHAVEOPT").unwrap();
    // NBD_OPT_EXPORT_NAME, of no name
    client.write_all(&[0, 0, 0, 1, 0, 0, 0, 0]).unwrap();
    client.read_exact(&mut [0; 10]).unwrap();
    client
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
    let server = start("info");
    let info = run("nbdinfo", &[&uri(&server)]);
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
    assert!(run("nbdinfo", &["--list", &uri(&server)]).contains("export=\"\""));
}

#[test]
fn nbdcopy_reads_and_writes_all_of_it() {
    let server = start("copy");
    let copy = server.image.with_extension("copy");
    run("nbdcopy", &[&uri(&server), copy.to_str().unwrap()]);
    assert!(std::fs::read(&copy).unwrap() == server.content());
    std::fs::write(&copy, vec![0x5c; SIZE]).unwrap();
    run("nbdcopy", &[copy.to_str().unwrap(), &uri(&server)]);
    assert!(server.content() == vec![0x5c; SIZE]);
}

#[test]
fn qemu_writes_zeroes_discards_and_reads_back() {
    let server = start("qemu");
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
    let uri = uri(&server);
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
    let server = start("many");
    let mut client = connect(&server);
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
    let server = start("bad");
    let mut client = connect(&server);
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
    let server = start("noise");
    let mut client = connect(&server);
    client.write_all(&[0x5c; 1000]).unwrap();
    // Closed at once.
    assert_eq!(client.read(&mut [0; 16]).unwrap_or(0), 0);
    // Gone in the middle of a payload, with requests in flight.
    let mut client = connect(&server);
    for cookie in 0..100 {
        let request = head(Verb::Read, cookie, cookie * 4096, 1 << 20);
        client.write_all(&request.encode()).unwrap();
    }
    drop(client);
    let mut client = connect(&server);
    let request = head(Verb::Write, 1, 0, 1 << 20);
    client.write_all(&request.encode()).unwrap();
    client.write_all(&[0x5c; 5000]).unwrap();
    drop(client);
    let mut client = connect(&server);
    client
        .write_all(&head(Verb::Flush, 1, 0, 0).encode())
        .unwrap();
    assert_eq!(reply(&mut client), (0, 1));
    client
        .write_all(&head(Verb::Disconnect, 2, 0, 0).encode())
        .unwrap();
    assert_eq!(client.read(&mut [0; 16]).unwrap(), 0);
}
