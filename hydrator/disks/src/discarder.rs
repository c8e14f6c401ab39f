// SPDX-License-Identifier: Apache-2.0
//! Discards by a thread that waits for them: before 6.12 Linux has no other way.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::thread::{Builder, JoinHandle};

use io_uring::{opcode, types};
use tracing::warn;

use crate::disk::Disk;
use crate::ring::{Ring, Token};

/// `BLKDISCARD` of linux/fs.h: gives a range back, and returns when it is done.
pub const BLKDISCARD: libc::c_ulong = 0x1277;

/// Of the thread's stack, in bytes: all of it may be locked.
const STACK: usize = 256 << 10;

/// Offset and length as `BLKDISCARD` reads them: two u64.
type Range = [u8; 16];

struct Request {
    range: Range,
    token: Token,
}

/// Takes discards of a disk, which the ring completes when the thread has done
/// them.
///
/// The thread has the disk open as long as it is in a discard, also when the
/// process is killed: whoever gets the disk's lock then knows that none is on
/// its way.
pub struct Discarder {
    connection: UnixStream,
    thread: Option<JoinHandle<()>>,
    // The first of them is with the thread.
    requests: VecDeque<Request>,
}

impl Discarder {
    /// Starts the thread, which first does as told by `confine`.
    pub fn start(disk: &Disk, confine: impl FnOnce() + Send + 'static) -> io::Result<Discarder> {
        let (connection, other_end) = UnixStream::pair()?;
        let file = disk.file().try_clone()?;
        let thread = Builder::new()
            .name("discard".to_owned())
            .stack_size(STACK)
            .spawn(move || {
                confine();
                serve(&file, other_end);
            })?;
        Ok(Discarder {
            connection,
            thread: Some(thread),
            requests: VecDeque::new(),
        })
    }

    /// Asks for what [`Disk::discard`] does. When the ring has completed it,
    /// [`Discarder::answer`] says what came of it.
    pub fn discard(&mut self, ring: &mut Ring, offset: u64, length: u64, token: Token) {
        let mut range = [0; 16];
        range[..8].copy_from_slice(&offset.to_ne_bytes());
        range[8..].copy_from_slice(&length.to_ne_bytes());
        self.requests.push_back(Request { range, token });
        if self.requests.len() == 1 {
            self.hand_over(ring);
        }
    }

    /// What came of the discard that the ring has completed: 0 or a negative
    /// errno. To be asked for once.
    pub fn answer(&mut self, ring: &mut Ring) -> i32 {
        let mut answer = [0; 4];
        let read = self.connection.read_exact(&mut answer);
        self.requests.pop_front();
        self.hand_over(ring);
        match read {
            Ok(()) => i32::from_ne_bytes(answer),
            Err(error) => {
                warn!("the thread that discards is gone: {error}");
                -libc::EIO
            }
        }
    }

    /// Gives the first request to the thread, which has none: there is room for
    /// it in the connection. That the thread is gone is seen by the poll.
    fn hand_over(&mut self, ring: &mut Ring) {
        if let Some(Request { range, token }) = self.requests.front() {
            let _ = self.connection.write_all(range);
            let fd = types::Fd(self.connection.as_raw_fd());
            let entry = opcode::PollAdd::new(fd, libc::POLLIN as u32).build();
            // SAFETY: a poll points to no memory.
            unsafe { ring.push(entry, *token) };
        }
    }
}

impl Drop for Discarder {
    /// Waits for a discard that is under way.
    fn drop(&mut self) {
        let _ = self.connection.shutdown(Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Discards until nobody listens any more.
fn serve(file: &File, mut connection: UnixStream) {
    let mut range = [0; 16];
    while connection.read_exact(&mut range).is_ok() {
        let answer = discard(file, &range);
        if connection.write_all(&answer.to_ne_bytes()).is_err() {
            return;
        }
    }
}

fn discard(file: &File, range: &Range) -> i32 {
    // SAFETY: BLKDISCARD reads two u64, of any alignment, from where its argument
    // points, and writes nowhere.
    if unsafe { libc::ioctl(file.as_raw_fd(), BLKDISCARD, range.as_ptr()) } == 0 {
        return 0;
    }
    -io::Error::last_os_error()
        .raw_os_error()
        .unwrap_or(libc::EIO)
}
