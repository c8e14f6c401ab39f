// SPDX-License-Identifier: Apache-2.0
//! A disk over a real file, through a real ring.

#![allow(clippy::unwrap_used)]

use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use io_uring::{opcode, squeue, types};
use localstor_hydrator_disks::{
    Access, Discarder, Disk, Event, Memory, OpenError, Owner, Ring, Span, Token,
};

const AT_ONCE: Access = Access::Exclusive(Duration::ZERO);
/// The ring of a run before, too, lets go of a file a moment after its process.
const SOON: Access = Access::Exclusive(Duration::from_secs(10));

/// A file of 1 MiB where O_DIRECT works, which a tmpfs may not offer.
fn file(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::write(&path, vec![0xaa; 1 << 20]).unwrap();
    path
}

fn done(ring: &mut Ring) -> Event {
    loop {
        if let Some(event) = ring.next_event() {
            return event;
        }
        ring.wait(None).unwrap();
    }
}

fn token(detail: u64) -> Token {
    Token::new(Owner::Engine, detail)
}

struct Bench {
    ring: Ring,
    disk: Disk,
    span: Span,
}

fn bench(path: &Path, registered: bool) -> Bench {
    let mut ring = Ring::new(8, false).unwrap();
    let disk = Disk::open(path, SOON, &mut ring).unwrap();
    let mut memory = Memory::new(8192).unwrap();
    if registered {
        ring.register_memory(memory.whole());
    }
    let span = memory.take(8192).unwrap();
    Bench { ring, disk, span }
}

fn write_then_read(registered: bool) {
    let path = file(&format!("write-{registered}"));
    let Bench {
        mut ring,
        disk,
        mut span,
    } = bench(&path, registered);
    // SAFETY: no request is in flight.
    unsafe { span.bytes_mut() }.fill(0x5c);
    // SAFETY: the span is left alone until the completion.
    unsafe { disk.write(&mut ring, span, 4096, true, token(1)) };
    let event = done(&mut ring);
    assert_eq!((event.token, event.result), (token(1), 8192));
    // SAFETY: the write has completed.
    unsafe { span.bytes_mut() }.fill(0);
    let part = span.part(0, 4096).unwrap();
    // SAFETY: the span is left alone until the completion.
    unsafe { disk.read(&mut ring, part, 8192, token(2)) };
    assert_eq!(done(&mut ring).result, 4096);
    // SAFETY: the read has completed.
    assert!(unsafe { part.bytes() }.iter().all(|&byte| byte == 0x5c));
    let content = std::fs::read(&path).unwrap();
    assert!(content[..4096].iter().all(|&byte| byte == 0xaa));
    assert!(content[4096..12288].iter().all(|&byte| byte == 0x5c));
}

#[test]
fn what_is_written_is_read_with_registered_memory() {
    write_then_read(true);
}

#[test]
fn what_is_written_is_read_without_registered_memory() {
    write_then_read(false);
}

#[test]
fn zeroed_and_unmapped_ranges_read_zeros() {
    let path = file("zero");
    let Bench { mut ring, disk, .. } = bench(&path, false);
    disk.zero(&mut ring, 0, 65536, token(1));
    assert_eq!(done(&mut ring).result, 0);
    disk.unmap(&mut ring, 131072, 65536, token(2));
    assert_eq!(done(&mut ring).result, 0);
    disk.flush(&mut ring, token(3));
    assert_eq!(done(&mut ring).result, 0);
    let content = std::fs::read(&path).unwrap();
    assert_eq!(content.len(), 1 << 20);
    assert!(content[..65536].iter().all(|&byte| byte == 0));
    assert!(content[65536..131072].iter().all(|&byte| byte == 0xaa));
    assert!(content[131072..196608].iter().all(|&byte| byte == 0));
}

#[test]
fn discards_that_a_thread_waits_for_are_each_answered() {
    let path = file("discard");
    let Bench { mut ring, disk, .. } = bench(&path, false);
    let mut discarder = Discarder::start(&disk, || {}).unwrap();
    for detail in 0..100 {
        discarder.discard(&mut ring, detail << 12, 4096, token(detail));
    }
    for detail in 0..100 {
        assert_eq!(done(&mut ring).token, token(detail));
        // A file is no device.
        assert_eq!(discarder.answer(&mut ring), -libc::ENOTTY);
    }
}

#[test]
fn a_discard_fails_when_its_thread_is_gone() {
    let path = file("gone");
    let Bench { mut ring, disk, .. } = bench(&path, false);
    let mut discarder = Discarder::start(&disk, || panic!("a bad day")).unwrap();
    for detail in 0..3 {
        discarder.discard(&mut ring, 0, 4096, token(detail));
        assert_eq!(done(&mut ring).token, token(detail));
        assert_eq!(discarder.answer(&mut ring), -libc::EIO);
    }
}

#[test]
fn a_disk_has_one_writer_and_may_have_readers() {
    let path = file("lock");
    let mut ring = Ring::new(8, false).unwrap();
    let first = Disk::open(&path, SOON, &mut ring).unwrap();
    let mut other = Ring::new(8, false).unwrap();
    assert!(matches!(
        Disk::open(&path, AT_ONCE, &mut other),
        Err(OpenError::Locked { .. })
    ));
    Disk::open(&path, Access::ReadOnly, &mut other).unwrap();
    // The ring holds the file as long as requests could be in flight.
    drop(first);
    assert!(Disk::open(&path, AT_ONCE, &mut other).is_err());
    drop(ring);
    Disk::open(&path, SOON, &mut other).unwrap();
}

#[test]
fn what_is_no_disk_is_refused_by_name() {
    let mut ring = Ring::new(8, false).unwrap();
    let error = Disk::open(Path::new("/dev/null"), AT_ONCE, &mut ring)
        .err()
        .unwrap();
    assert!(error.to_string().contains("/dev/null"), "{error}");
    let error = Disk::open(Path::new("/nowhere"), AT_ONCE, &mut ring)
        .err()
        .unwrap();
    assert!(error.to_string().contains("/nowhere"), "{error}");
}

/// The blocks of 4 KiB of a file of which a thread that has ended had submitted
/// writes, by `push`, and then was gone with all of its requests.
fn written_by_a_dead_thread(
    path: &Path,
    blocks: u64,
    push: impl FnOnce(&mut Ring, &Disk, Span) + Send + 'static,
) -> usize {
    std::fs::write(path, vec![0xaa; blocks as usize * 4096]).unwrap();
    let opened = path.to_owned();
    let thread = std::thread::spawn(move || {
        let mut ring = Ring::new(4096, true).unwrap();
        let disk = Disk::open(&opened, SOON, &mut ring).unwrap();
        let mut span = Memory::new(4096).unwrap().take(4096).unwrap();
        // SAFETY: no request is in flight.
        unsafe { span.bytes_mut() }.fill(0x5c);
        push(&mut ring, &disk, span);
        // To the kernel a thread that ends is a process that does; the ring must
        // not be closed before.
        std::mem::forget((ring, disk));
    });
    thread.join().unwrap();
    let content = std::fs::read(path).unwrap();
    content
        .chunks(4096)
        .filter(|block| block[0] == 0x5c)
        .count()
}

#[test]
fn what_was_submitted_is_dropped_if_the_kernel_has_not_begun_with_it() {
    const WRITES: u64 = 2048;
    // Where the thread has to wait for a processor before it ends, the kernel has
    // begun with all of them.
    const ATTEMPTS: u32 = 20;
    let all_written = |attempt| {
        // Those of the threads before are still locked.
        let path = file(&format!("dropped-{attempt}"));
        let opened = path.clone();
        let written = written_by_a_dead_thread(&path, WRITES, move |ring, _, span| {
            let file = std::fs::File::options().write(true).open(&opened).unwrap();
            for block in 0..WRITES {
                // As a write that would have to wait for a free request of the disk.
                let entry = opcode::Write::new(types::Fd(file.as_raw_fd()), span.as_ptr(), 4096)
                    .offset(block * 4096)
                    .build()
                    .flags(squeue::Flags::ASYNC);
                // SAFETY: the memory behind a span is never unmapped.
                unsafe { ring.push(entry, token(block)) };
            }
            ring.wait(Some(Duration::ZERO)).unwrap();
            std::mem::forget(file);
        });
        written == WRITES as usize
    };
    assert!(
        !(0..ATTEMPTS).all(all_written),
        "all of {WRITES} are written, {ATTEMPTS} times"
    );
}
