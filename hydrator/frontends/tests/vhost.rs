// SPDX-License-Identifier: Apache-2.0
//! The vhost-user-blk server over a file, with a guest of our own, which also
//! does what a guest must not, and with a driver that people have.

#![allow(clippy::unwrap_used)]

mod guest;
mod server;

use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::time::Duration;

use guest::{
    DISCARD, FAILED, FLUSH, GET_ID, Guest, IN, INDIRECT, NEXT, OK, OUT, REQUESTS, ROOM,
    UNSUPPORTED, WRITE, WRITE_ZEROES,
};
use localstor_hydrator_frontends::vhost::VhostUserBlk;
use proptest::prelude::*;
use server::{Kind, Server};
use vhost::vhost_user::message::{VhostUserHeaderFlag, VhostUserProtocolFeatures};
use vhost::vhost_user::{Frontend as Client, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo};
use virtio_driver::{VhostUser, VirtioBlkQueue, VirtioFeatureFlags, VirtioTransport};

const SIZE: usize = 16 << 20;
const RINGS: usize = 4;

fn start(name: &str) -> Server {
    let kind = Kind {
        memory: VhostUserBlk::memory,
        listen: |socket, geometry, ring, memory| {
            VhostUserBlk::listen(socket, "disk-7", geometry, ring, memory)
        },
    };
    Server::start(&format!("vhost-{name}"), SIZE, kind)
}

fn connected(server: &Server) -> Guest {
    let mut guest = Guest::new();
    guest.connect(&server.socket);
    guest
}

fn word(bytes: &[u8], at: usize) -> u64 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()).into()
}

#[test]
fn a_guest_sees_size_blocks_and_name() {
    let server = start("info");
    let mut guest = Guest::new();
    let configuration = guest.connect(&server.socket);
    assert_eq!(word(&configuration, 0), SIZE as u64 / 512);
    // A request of the longest kind has a buffer.
    let (longest, segments) = (word(&configuration, 8), word(&configuration, 12));
    assert!(longest * segments <= ROOM);
    assert_eq!(word(&configuration, 20), 512);
    let queues = u16::from_le_bytes([configuration[34], configuration[35]]);
    assert!(usize::from(queues) >= RINGS);
    let request = guest.submit(GET_ID, 0, 20);
    assert_eq!(guest.wait(), (request, OK));
    assert_eq!(&guest.content(request, 7), b"disk-7\0");
    assert!(guest.may_block());
}

#[test]
fn a_guest_reads_writes_zeroes_and_discards() {
    let server = start("io");
    let mut guest = connected(&server);
    let mut expected = server.content();
    assert!(guest.seen(SIZE as u64) == expected);
    let request = guest.submit_write(1, &[0x5c; 8192]);
    assert_eq!(guest.wait(), (request, OK));
    let request = guest.submit_range(WRITE_ZEROES, 4096, 128, 1);
    assert_eq!(guest.wait(), (request, OK));
    let request = guest.submit_range(DISCARD, 8192, 128, 0);
    assert_eq!(guest.wait(), (request, OK));
    assert_eq!(guest.ask(FLUSH, 0, 0), OK);
    expected[512..512 + 8192].fill(0x5c);
    expected[2 << 20..(2 << 20) + 65536].fill(0);
    expected[4 << 20..(4 << 20) + 65536].fill(0);
    assert!(guest.seen(SIZE as u64) == expected);
    assert!(server.content() == expected);
    assert_eq!(guest.stop() & 0xffff, 5 + 2 * (SIZE as u32 >> 20) - 1);
}

#[test]
fn a_guest_without_flushes_and_event_indices_is_served() {
    let server = start("plain");
    let mut guest = Guest::new();
    guest.without = 1 << 9 | 1 << 29;
    guest.connect(&server.socket);
    let request = guest.submit_write(0, &[0x5c; 4096]);
    assert_eq!(guest.wait(), (request, OK));
    assert_eq!(server.content()[..4096], [0x5c; 4096]);
}

#[test]
fn a_driver_that_people_have_reads_and_writes() {
    let server = start("driver");
    let features = VirtioFeatureFlags::VERSION_1 | VirtioFeatureFlags::RING_EVENT_IDX;
    let mut transport = VhostUser::new(
        server.socket.to_str().unwrap(),
        features.bits() | u64::MAX >> 40,
    )
    .unwrap();
    let mut queues = VirtioBlkQueue::<u64>::setup_queues(&mut transport, 2, 128).unwrap();
    let file: std::fs::File = rustix::fs::memfd_create("data", rustix::fs::MemfdFlags::CLOEXEC)
        .unwrap()
        .into();
    file.set_len(1 << 20).unwrap();
    // SAFETY: a new mapping aliases nothing.
    let memory = unsafe {
        let address = rustix::mm::mmap(
            std::ptr::null_mut(),
            1 << 20,
            rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE,
            rustix::mm::MapFlags::SHARED,
            &file,
            0,
        );
        std::slice::from_raw_parts_mut(address.unwrap().cast::<u8>(), 1 << 20)
    };
    transport
        .map_mem_region(memory.as_ptr() as usize, 1 << 20, file.as_raw_fd(), 0)
        .unwrap();
    let (mine, rest) = memory.split_at_mut(4096);
    mine.fill(0x5c);
    let wait = |queues: &mut [VirtioBlkQueue<u64>], index: usize, context: u64| {
        transport.get_submission_notifier(index).notify().unwrap();
        loop {
            if let Some(done) = queues[index].completions().next() {
                assert_eq!((done.context, done.ret), (context, 0));
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    queues[0].write(8192, mine, 1).unwrap();
    wait(&mut queues, 0, 1);
    queues[0].flush(2).unwrap();
    wait(&mut queues, 0, 2);
    queues[1].read(4096, &mut rest[..65536], 3).unwrap();
    wait(&mut queues, 1, 3);
    let content = server.content();
    assert_eq!(content[8192..12288], [0x5c; 4096]);
    assert!(rest[..65536] == content[4096..4096 + 65536]);
}

/// A guest with a ring for each of four processors.
fn with_rings(server: &Server) -> Guest {
    let mut guest = Guest::with_rings(RINGS);
    guest.connect(&server.socket);
    guest
}

#[test]
fn what_one_ring_has_written_another_one_reads() {
    let server = start("rings");
    let mut guest = with_rings(&server);
    let mut expected = server.content();
    let mut waiting = Vec::new();
    for round in 0..u64::from(REQUESTS) {
        for ring in 0..RINGS {
            guest.ring = ring;
            let sector = (round * RINGS as u64 + ring as u64) * 64;
            let fill = (round + 1) as u8 * 4 + ring as u8;
            waiting.push((ring, guest.submit_write(sector, &[fill; 4096])));
            expected[sector as usize * 512..][..4096].fill(fill);
        }
    }
    for (ring, request) in waiting {
        guest.ring = ring;
        while !guest.is_free(request) {
            assert_eq!(guest.wait().1, OK);
        }
    }
    for ring in 0..RINGS {
        guest.ring = ring;
        assert_eq!(guest.ask(FLUSH, 0, 0), OK);
        assert!(guest.seen(SIZE as u64) == expected, "ring {ring}");
    }
    assert!(server.content() == expected);
}

#[test]
fn a_ring_that_is_stopped_leaves_the_others() {
    let server = start("stopped");
    let mut guest = with_rings(&server);
    guest.ring = 1;
    assert_eq!(guest.ask(FLUSH, 0, 0), OK);
    assert_eq!(guest.stop() & 0xffff, 1);
    let unheard = guest.submit(FLUSH, 0, 0);
    for ring in [0, 2, 3] {
        guest.ring = ring;
        assert_eq!(guest.ask(FLUSH, 0, 0), OK, "ring {ring}");
    }
    guest.ring = 1;
    assert!(!guest.is_free(unheard) && guest.answer().is_none());
}

#[test]
fn a_ring_begins_and_ends_while_a_request_of_another_one_waits() {
    let server = start("waiting");
    let mut guest = Guest::with_rings(2);
    guest.late = 1;
    guest.connect(&server.socket);
    server.away.store(true, Ordering::Relaxed);
    let waiting = guest.submit(IN, SIZE as u64 / 512 - 1, 512);
    assert_eq!(guest.ask(FLUSH, 0, 0), OK);
    guest.ring = 1;
    guest.begin();
    assert_eq!(guest.ask(IN, 0, 4096), OK);
    assert_eq!(guest.stop() & 0xffff, 1);
    guest.ring = 0;
    assert!(!guest.is_free(waiting) && server.away.swap(false, Ordering::Relaxed));
    assert_eq!(guest.wait(), (waiting, OK));
    assert_eq!(guest.stop() & 0xffff, 2);
}

#[test]
fn a_ring_ends_when_its_own_requests_are_answered() {
    let server = start("its-own");
    let mut guest = with_rings(&server);
    server.away.store(true, Ordering::Relaxed);
    let waiting = guest.submit(IN, SIZE as u64 / 512 - 1, 512);
    assert_eq!(guest.ask(FLUSH, 0, 0), OK);
    std::thread::scope(|scope| {
        let away = &server.away;
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(100));
            away.store(false, Ordering::Relaxed);
        });
        assert_eq!(guest.stop() & 0xffff, 2);
        assert!(!away.load(Ordering::Relaxed));
    });
    assert_eq!(guest.answer(), Some((waiting, OK)));
}

#[test]
fn rings_that_are_full_are_all_served() {
    let server = start("full");
    let mut guest = with_rings(&server);
    for _round in 0..5 {
        for ring in 0..RINGS {
            guest.ring = ring;
            for request in 0..u64::from(REQUESTS) {
                guest.submit(IN, request % 16 * 2048, 1 << 20);
            }
        }
        for ring in (0..RINGS).rev() {
            guest.ring = ring;
            for _ in 0..REQUESTS {
                assert_eq!(guest.wait().1, OK);
            }
        }
    }
}

#[test]
fn a_ring_that_is_always_full_lets_others_in() {
    let server = start("fair");
    let mut guest = with_rings(&server);
    for request in 0..u64::from(REQUESTS) {
        guest.submit(IN, request % 16 * 2048, 1 << 20);
    }
    guest.ring = RINGS - 1;
    guest.submit(FLUSH, 0, 0);
    let mut passed_by = 0;
    while guest.answer().is_none() {
        assert!(passed_by < 500, "others are served for ever");
        passed_by += 1;
        guest.ring = 0;
        assert_eq!(guest.wait().1, OK);
        guest.submit(IN, 0, 1 << 20);
        guest.ring = RINGS - 1;
    }
}

#[test]
fn a_ring_with_more_than_there_are_ends_the_connection() {
    let server = start("no-such");
    let greeted = || {
        let mut client = Client::connect(&server.socket, 1000).unwrap();
        client.set_owner().unwrap();
        client.get_features().unwrap();
        let offered = client.get_protocol_features().unwrap();
        client.set_protocol_features(offered).unwrap();
        client.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        client
    };
    let most = greeted().get_queue_num().unwrap() as usize;
    // This one has not heard how many there are, and asks for whatever we say.
    let client = greeted();
    assert!(client.set_vring_num(most - 1, 64).is_ok());
    assert!(client.set_vring_num(most, 64).is_err());
    assert!(client.get_features().is_err());
    drop(client);
    assert_eq!(connected(&server).ask(FLUSH, 0, 0), OK);
}

#[test]
fn requests_that_make_no_sense_are_refused_and_the_next_is_served() {
    let server = start("bad");
    let mut guest = connected(&server);
    let before = server.content();
    let sectors = SIZE as u64 / 512;
    for (kind, sector, length, status) in [
        (IN, sectors, 512, FAILED),
        (IN, u64::MAX, 512, FAILED),
        (OUT, sectors - 1, 1024, FAILED),
        (OUT, 0, 511, FAILED),
        (IN, 0, 0, FAILED),
        (DISCARD, 0, 8, FAILED),
        (DISCARD, 0, 32, FAILED),
        (77, 0, 512, UNSUPPORTED),
    ] {
        assert_eq!(guest.ask(kind, sector, length), status, "{kind} {sector}");
    }
    for (kind, sector, count, flags, status) in [
        (DISCARD, 0, 8, 1, UNSUPPORTED),
        (WRITE_ZEROES, 0, 8, 2, UNSUPPORTED),
        (WRITE_ZEROES, 0, u32::MAX, 0, FAILED),
        (WRITE_ZEROES, u64::MAX / 2, 8, 0, FAILED),
        (DISCARD, 0, 0, 0, FAILED),
    ] {
        let request = guest.submit_range(kind, sector, count, flags);
        assert_eq!(guest.wait(), (request, status), "{kind} {sector} {count}");
    }
    assert_eq!(guest.ask(FLUSH, 0, 0), OK);
    assert!(server.content() == before);
}

#[test]
fn rings_that_make_no_sense_end_the_connection_and_the_next_is_served() {
    let server = start("malformed");
    let before = server.content();
    type Malice = (&'static str, fn(&mut Guest));
    let all: [Malice; 9] = [
        ("no status", |guest| guest.describe(0, 0x3000, 16, 0, 0)),
        ("a short header", |guest| {
            guest.describe(0, 0x3000, 15, NEXT, 1);
            guest.describe(1, 0x3100, 1, WRITE, 0);
        }),
        ("a header that is nowhere", |guest| {
            guest.describe(0, 1 << 60, 16, NEXT, 1);
            guest.describe(1, 0x3100, 1, WRITE, 0);
        }),
        ("a status that is nowhere", |guest| {
            guest.write(0x3000, &[4, 0, 0, 0]);
            guest.describe(0, 0x3000, 16, NEXT, 1);
            guest.describe(1, u64::MAX, 1, WRITE, 0);
        }),
        ("data that are nowhere", |guest| {
            guest.write(0x3000, &[1, 0, 0, 0]);
            guest.write(0x3008, &[0; 8]);
            guest.describe(0, 0x3000, 16, NEXT, 1);
            guest.describe(1, 1 << 50, 4096, NEXT, 2);
            guest.describe(2, 0x3100, 1, WRITE, 0);
        }),
        ("a chain that is a circle", |guest| {
            guest.describe(0, 0x3000, 16, NEXT, 1);
            guest.describe(1, 0x3100, 16, NEXT, 0);
        }),
        ("a table in a table", |guest| {
            guest.describe(0, 0x8000, 16, INDIRECT, 0);
            let mut inner = 0x8000u64.to_le_bytes().to_vec();
            inner.extend([16, 0, 0, 0, INDIRECT as u8, 0, 0, 0]);
            guest.write(0x8000, &inner);
        }),
        ("data to be read behind data to be written", |guest| {
            guest.describe(0, 0x3100, 1, NEXT | WRITE, 1);
            guest.describe(1, 0x3000, 16, 0, 0);
        }),
        ("more requests than descriptors", |guest| {
            guest.pretend(1000)
        }),
    ];
    for (name, malice) in all {
        let mut guest = connected(&server);
        assert_eq!(guest.ask(FLUSH, 0, 0), OK, "before {name}");
        malice(&mut guest);
        if !name.starts_with("more") {
            guest.offer(0);
        }
        guest.kick();
        assert!(guest.dismissed(), "{name}");
    }
    let mut guest = connected(&server);
    guest.offer(60000);
    guest.kick();
    assert!(guest.dismissed());
    assert_eq!(connected(&server).ask(FLUSH, 0, 0), OK);
    assert!(server.content() == before);
}

#[test]
fn memory_that_a_file_does_not_have_is_refused() {
    let server = start("memory");
    let file: std::fs::File = rustix::fs::memfd_create("short", rustix::fs::MemfdFlags::CLOEXEC)
        .unwrap()
        .into();
    file.set_len(4096).unwrap();
    for (mmap_offset, memory_size, is_there) in
        [(0, 4096, true), (0, 8192, false), (4096, 4096, false)]
    {
        let mut client = Client::connect(&server.socket, 1).unwrap();
        client.set_owner().unwrap();
        let features = client.get_features().unwrap();
        client.set_features(features).unwrap();
        client.get_protocol_features().unwrap();
        client
            .set_protocol_features(VhostUserProtocolFeatures::REPLY_ACK)
            .unwrap();
        client.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        let region = VhostUserMemoryRegionInfo {
            memory_size,
            mmap_offset,
            mmap_handle: file.as_raw_fd(),
            ..VhostUserMemoryRegionInfo::default()
        };
        let taken = client.set_mem_table(&[region]);
        assert_eq!(taken.is_ok(), is_there, "{mmap_offset} {taken:?}");
    }
    assert_eq!(connected(&server).ask(FLUSH, 0, 0), OK);
}

#[test]
fn noise_and_sudden_ends_leave_the_door_open() {
    let server = start("noise");
    for noise in [
        &b"GET / HTTP/1.1\r\n\r\n"[..],
        &[0; 12],
        &[1, 0, 0, 0],
        &[0xff; 100],
    ] {
        let mut client = UnixStream::connect(&server.socket).unwrap();
        client.write_all(noise).unwrap();
        assert_eq!(client.read(&mut [0; 16]).unwrap_or(0), 0);
    }
    drop(UnixStream::connect(&server.socket).unwrap());
    let mut guest = connected(&server);
    for _ in 0..REQUESTS {
        guest.submit(IN, 0, 1 << 20);
    }
    guest.disconnect();
    assert_eq!(connected(&server).ask(FLUSH, 0, 0), OK);
}

#[test]
fn more_and_longer_requests_than_there_are_buffers_are_all_answered() {
    let server = start("many");
    let mut guest = connected(&server);
    for round in 0..20u64 {
        let requests: Vec<u16> = (0..u64::from(REQUESTS))
            .map(|request| guest.submit(IN, (round + request) % 16 * 2048, 1 << 20))
            .collect();
        for _ in &requests {
            assert_eq!(guest.wait().1, OK);
        }
    }
}

#[test]
fn what_was_in_flight_is_answered_after_the_client_has_connected_again() {
    let server = start("again");
    let mut guest = with_rings(&server);
    for round in 0..50u8 {
        let mut waiting = Vec::new();
        for request in 0..u64::from(REQUESTS) {
            guest.ring = fastrand::usize(..RINGS);
            let written = guest.submit_write(request * 64, &[round; 32768]);
            waiting.push((guest.ring, written));
        }
        guest.disconnect();
        guest.connect(&server.socket);
        // What is new comes behind what is old.
        for ring in 0..RINGS {
            guest.ring = ring;
            while guest.answer().is_some() {}
        }
        for (ring, request) in waiting {
            guest.ring = ring;
            while !guest.is_free(request) {
                assert_eq!(guest.wait().1, OK);
            }
        }
        let expected = vec![round; 32768 * usize::from(REQUESTS)];
        assert!(guest.seen(expected.len() as u64) == expected, "{round}");
    }
}

/// Where its ring stands does not tell which requests were not answered.
#[test]
fn a_request_that_others_have_overtaken_is_answered_after_a_new_connection() {
    let server = start("overtaken");
    let mut guest = with_rings(&server);
    server.away.store(true, Ordering::Relaxed);
    let mut waiting = Vec::new();
    for ring in 0..RINGS {
        guest.ring = ring;
        waiting.push(guest.submit(IN, SIZE as u64 / 512 - 1, 512));
        for _ in 0..=ring {
            assert_eq!(guest.ask(FLUSH, 0, 0), OK);
        }
    }
    guest.disconnect();
    server.away.store(false, Ordering::Relaxed);
    guest.connect(&server.socket);
    for (ring, request) in waiting.into_iter().enumerate() {
        guest.ring = ring;
        assert_eq!(guest.wait(), (request, OK), "ring {ring}");
        assert_eq!(guest.ask(FLUSH, 0, 0), OK);
        assert!(guest.answer().is_none());
    }
}

#[derive(Clone, Debug)]
enum Step {
    Write(u64, u32, u8),
    Read(u64, u32),
    Zero(u64, u32, bool),
    Flush,
    Settle,
    Reconnect,
    Ring(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let range = || (0..SIZE as u64 / 512 - 256, 1..256u32);
    let step = prop_oneof![
        6 => (range(), any::<u8>()).prop_map(|((at, count), fill)| Step::Write(at, count, fill)),
        6 => range().prop_map(|(at, count)| Step::Read(at, count)),
        2 => (range(), any::<bool>()).prop_map(|((at, count), d)| Step::Zero(at, count, d)),
        1 => Just(Step::Flush),
        2 => Just(Step::Settle),
        1 => Just(Step::Reconnect),
        2 => (0..RINGS).prop_map(Step::Ring),
    ];
    prop::collection::vec(step, 1..60)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, failure_persistence: None, ..Default::default() })]

    /// One request after the other, with connections that end in between.
    #[test]
    fn a_guest_sees_what_it_wrote(steps in steps()) {
        let server = start("model");
        let mut guest = with_rings(&server);
        let mut model = server.content();
        let bytes = |at: u64, count: u32| at as usize * 512..(at as usize + count as usize) * 512;
        for step in steps {
            match step {
                Step::Write(at, count, fill) => {
                    let data = vec![fill; count as usize * 512];
                    let request = guest.submit_write(at, &data);
                    prop_assert_eq!(guest.wait(), (request, OK));
                    model[bytes(at, count)].copy_from_slice(&data);
                }
                Step::Read(at, count) => {
                    let request = guest.submit(IN, at, count * 512);
                    prop_assert_eq!(guest.wait(), (request, OK));
                    let seen = guest.content(request, count as usize * 512);
                    prop_assert!(seen == model[bytes(at, count)]);
                }
                Step::Zero(at, count, discard) => {
                    let kind = if discard { DISCARD } else { WRITE_ZEROES };
                    let request = guest.submit_range(kind, at, count, 0);
                    prop_assert_eq!(guest.wait(), (request, OK));
                    model[bytes(at, count)].fill(0);
                }
                Step::Flush => prop_assert_eq!(guest.ask(FLUSH, 0, 0), OK),
                Step::Settle => prop_assert!(server.content() == model),
                Step::Reconnect => {
                    guest.disconnect();
                    guest.connect(&server.socket);
                }
                Step::Ring(ring) => guest.ring = ring,
            }
        }
        prop_assert!(guest.seen(SIZE as u64) == model);
    }
}
