// SPDX-License-Identifier: Apache-2.0
//! Whatever a client sends after the handshake, a request is inside the disk
//! or is refused, each is answered, and the next client is served.
#![no_main]

use std::cell::RefCell;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use localstor_hydrator_disks::{Memory, Owner, Ring};
use localstor_hydrator_frontends::nbd::Nbd;
use localstor_hydrator_frontends::{Frontend, Geometry};

const GEOMETRY: Geometry = Geometry {
    size: 1 << 30,
    logical_block: 512,
};

/// Flags, and NBD_OPT_EXPORT_NAME of no name.
const HANDSHAKE: &[u8] = b"\0\0\0\x03IHAVEOPT\0\0\0\x01\0\0\0\0";

struct Server {
    ring: Ring,
    frontend: Nbd,
    path: PathBuf,
}

impl Server {
    fn new() -> Server {
        let path = std::env::temp_dir().join(format!("fuzz-nbd-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let mut ring = Ring::new(64, false).expect("a ring");
        let mut memory = Memory::new(Nbd::memory()).expect("memory");
        let frontend = Nbd::listen(&path, GEOMETRY, &mut ring, &mut memory).expect("a socket");
        Server {
            ring,
            frontend,
            path,
        }
    }

    /// Serves until the client is sent away.
    fn serve(&mut self, client: &mut UnixStream) {
        let mut arrivals = Vec::new();
        let mut answers = [0; 64 << 10];
        loop {
            self.ring
                .wait(Some(Duration::from_millis(1)))
                .expect("the ring");
            while let Some(event) = self.ring.next_event() {
                assert_eq!(event.token.owner(), Owner::Frontend);
                self.frontend
                    .on_event(&mut self.ring, event, &mut arrivals)
                    .expect("the frontend");
            }
            while let Some(arrival) = arrivals.pop() {
                let request = arrival.request;
                if let Some(span) = arrival.span {
                    assert_eq!(span.len() as u64, request.length);
                }
                assert!(request.offset + request.length <= GEOMETRY.size);
                self.frontend
                    .complete(&mut self.ring, request.tag, Ok(()), &mut arrivals);
            }
            match client.read(&mut answers) {
                Ok(0) => return,
                Ok(_) => {}
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(_) => return,
            }
        }
    }
}

thread_local! {
    static SERVER: RefCell<Server> = RefCell::new(Server::new());
}

fuzz_target!(|bytes: &[u8]| {
    SERVER.with_borrow_mut(|server| {
        let mut client = UnixStream::connect(&server.path).expect("a client");
        client.set_nonblocking(true).expect("a client");
        let _ = client.write_all(HANDSHAKE);
        let _ = client.write_all(bytes);
        let _ = client.shutdown(Shutdown::Write);
        server.serve(&mut client);
    });
});
