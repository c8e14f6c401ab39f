// SPDX-License-Identifier: Apache-2.0
//! The one io_uring of the process.

use std::collections::VecDeque;
use std::io;
use std::num::NonZero;
use std::os::fd::{AsRawFd, RawFd};
use std::time::{Duration, Instant};

use io_uring::register::Restriction;
use io_uring::{IoUring, cqueue, opcode, squeue, types};
use tracing::{debug, warn};

use crate::memory::Span;
use crate::polling::Polling;

/// Files that can be registered; a hydrator has three disks and a frontend.
const FILES: u32 = 16;

/// What a ring can be asked for. The rest a filter of system calls would not
/// see: that files are opened, for instance.
const REQUESTS: &[u8] = &[
    opcode::Accept::CODE,
    opcode::AsyncCancel::CODE,
    opcode::Fallocate::CODE,
    opcode::Fsync::CODE,
    opcode::Nop::CODE,
    opcode::PollAdd::CODE,
    opcode::Read::CODE,
    opcode::ReadFixed::CODE,
    opcode::Recv::CODE,
    opcode::SendMsg::CODE,
    opcode::Timeout::CODE,
    opcode::UringCmd16::CODE,
    opcode::Write::CODE,
    opcode::WriteFixed::CODE,
];

/// What can be registered with a ring (linux/io_uring.h): buffers, an eventfd,
/// the places of files, and files in them.
const REGISTRATIONS: &[u8] = &[0, 4, 6, 13];

/// How long [`Ring::pause`] takes.
static PAUSE: types::Timespec = types::Timespec::new().sec(1);

/// The result of a [`Ring::pause`].
pub const PAUSED: i32 = -libc::ETIME;

/// Who gets a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Owner {
    /// Nobody waits for it.
    Nobody = 0,
    /// The engine, for what it asked of a disk.
    Engine = 1,
    /// The guest's side.
    Frontend = 2,
    /// Control connections, signals, timers.
    Control = 3,
}

/// Names a request to the ring: its owner, and 56 bits that mean something to
/// the owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Token(u64);

impl Token {
    const DETAIL: u64 = (1 << 56) - 1;

    /// Bits of `detail` above the 56th are dropped.
    pub fn new(owner: Owner, detail: u64) -> Token {
        Token((owner as u64) << 56 | detail & Token::DETAIL)
    }

    /// Who gets the completion.
    pub fn owner(self) -> Owner {
        match self.0 >> 56 {
            1 => Owner::Engine,
            2 => Owner::Frontend,
            3 => Owner::Control,
            _ => Owner::Nobody,
        }
    }

    /// What the owner has put there.
    pub fn detail(self) -> u64 {
        self.0 & Token::DETAIL
    }
}

/// A completion.
#[derive(Clone, Copy, Debug)]
pub struct Event {
    /// As given with the request.
    pub token: Token,
    /// What the system call would have returned: a count or a negative errno.
    pub result: i32,
    /// Whether the same request will complete again (multishot).
    pub more: bool,
}

/// An io_uring with room for whatever is pushed.
pub struct Ring {
    ring: IoUring,
    // What did not fit the submission queue. It keeps its capacity.
    backlog: VecDeque<squeue::Entry>,
    registered: Option<(usize, usize)>,
    files: Vec<RawFd>,
    fixed_files: bool,
    polling: Option<Polling>,
}

impl Ring {
    /// A ring for about `depth` requests in flight.
    ///
    /// `movable` rings may be used by another thread than the one that made
    /// them, at some cost. Kernels that lack the faster modes get a plain ring;
    /// one that refuses the size for lack of memory, a smaller one.
    pub fn new(depth: u32, movable: bool) -> io::Result<Ring> {
        let mut entries = depth.next_power_of_two().clamp(8, 4096);
        let ring = loop {
            match Ring::build(entries, movable) {
                Ok(ring) => break ring,
                Err(error) if error.raw_os_error() == Some(libc::ENOMEM) && entries > 8 => {
                    entries /= 2;
                    warn!(
                        "no memory for a ring of {} entries, trying {entries}",
                        entries * 2
                    );
                }
                Err(error) => return Err(error),
            }
        };
        enable(&ring, REQUESTS, REGISTRATIONS)?;
        let fixed_files = match ring.submitter().register_files_sparse(FILES) {
            Ok(()) => true,
            Err(error) => {
                debug!("the kernel registers no files: {error}");
                false
            }
        };
        Ok(Ring {
            backlog: VecDeque::with_capacity(entries as usize),
            polling: None,
            ring,
            registered: None,
            files: Vec::new(),
            fixed_files,
        })
    }

    fn build(entries: u32, movable: bool) -> io::Result<IoUring> {
        if !movable {
            // Completions are prepared only when we ask for them: one thread,
            // no interrupts (Linux 6.1). A flag tells that there are some.
            let fast = IoUring::builder()
                .setup_single_issuer()
                .setup_defer_taskrun()
                .setup_taskrun_flag()
                .setup_cqsize(entries * 4)
                .setup_r_disabled()
                .build(entries);
            match fast {
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                    debug!("the kernel has no deferred completions");
                }
                other => return other,
            }
        }
        IoUring::builder()
            .setup_cqsize(entries * 4)
            .setup_r_disabled()
            .build(entries)
    }

    /// Lets the kernel keep the pages of `span` at hand. Without the permission
    /// (RLIMIT_MEMLOCK) I/O goes on unregistered.
    pub fn register_memory(&mut self, span: Span) {
        let vector = libc::iovec {
            iov_base: span.as_ptr().cast(),
            iov_len: span.len(),
        };
        // SAFETY: the memory behind a span is never unmapped.
        match unsafe { self.ring.submitter().register_buffers(&[vector]) } {
            Ok(()) => {
                let start = span.as_ptr() as usize;
                self.registered = Some((start, start + span.len()));
            }
            Err(error) => warn!("memory is not registered, I/O will cost more: {error}"),
        }
    }

    /// Whether fixed reads and writes may use `span`.
    pub(crate) fn is_registered(&self, span: Span) -> bool {
        let start = span.as_ptr() as usize;
        self.registered
            .is_some_and(|(from, to)| start >= from && start + span.len() <= to)
    }

    /// Registers a file; None if it must be used by its descriptor.
    ///
    /// The ring then holds the file until all of its requests are done, also
    /// when the process is killed.
    pub fn register_file(&mut self, fd: RawFd) -> Option<types::Fixed> {
        if !self.fixed_files || self.files.len() >= FILES as usize {
            return None;
        }
        let slot = self.files.len() as u32;
        match self.ring.submitter().register_files_update(slot, &[fd]) {
            Ok(_) => {
                self.files.push(fd);
                Some(types::Fixed(slot))
            }
            Err(error) => {
                debug!("file is not registered: {error}");
                None
            }
        }
    }

    /// Asks for something; it is submitted with the next [`Ring::wait`].
    ///
    /// # Safety
    /// What the entry points to must stay valid, and untouched where the kernel
    /// writes, until its completion has been seen.
    pub unsafe fn push(&mut self, entry: squeue::Entry, token: Token) {
        let entry = entry.user_data(token.0);
        if !self.backlog.is_empty() || {
            // SAFETY: as promised by the caller.
            unsafe { self.ring.submission().push(&entry) }.is_err()
        } {
            self.backlog.push_back(entry);
        }
    }

    /// Has a request end early, if it can; it completes all the same.
    pub fn cancel(&mut self, token: Token) {
        let entry = opcode::AsyncCancel::new(token.0).build();
        // SAFETY: the entry points to no memory.
        unsafe { self.push(entry, Token::new(Owner::Nobody, 0)) };
    }

    /// Completes after a second, with [`PAUSED`]: for what has failed and would
    /// fail again at once.
    pub fn pause(&mut self, token: Token) {
        self.pause_for(&PAUSE, token);
    }

    fn pause_for(&mut self, time: &'static types::Timespec, token: Token) {
        let entry = opcode::Timeout::new(time).build();
        // SAFETY: the time is never changed, and there as long as the process.
        unsafe { self.push(entry, token) };
    }

    /// Has [`Ring::wait`] look for completions for so long before it sleeps, as
    /// long as waits are that short.
    ///
    /// The processor does nothing else meanwhile, so with a single one it is
    /// left alone; so it is with a kernel before 6.1.
    pub fn poll(&mut self, limit: Duration) {
        let processors = std::thread::available_parallelism().map_or(1, NonZero::get);
        // Only the faster mode tells that something has completed.
        if processors > 1 && self.ring.params().is_setup_single_issuer() {
            self.polling = Some(Polling::new(limit));
        } else {
            warn!("this process sleeps whenever it waits: one processor, or an old kernel");
        }
    }

    /// Submits what was pushed and waits until something has completed, or
    /// `timeout` is over, or a signal came. Zero does not wait.
    pub fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.refill()?;
        let Some(polling) = &self.polling else {
            return self.sleep(timeout);
        };
        let (looks, limit) = (polling.pays(), polling.limit());
        let limit = timeout.unwrap_or(Duration::MAX).min(limit);
        if limit.is_zero() || !self.ring.completion().is_empty() {
            return self.sleep(timeout);
        }
        let start = Instant::now();
        if looks {
            self.look(start, limit)?;
        }
        self.sleep(timeout)?;
        if let Some(polling) = &mut self.polling {
            polling.note(start.elapsed(), looks);
        }
        Ok(())
    }

    /// Submits what was pushed, and looks whether something has completed until
    /// it has or `limit` is over since `start`.
    fn look(&mut self, start: Instant, limit: Duration) -> io::Result<()> {
        Ring::tolerate(self.ring.submit())?;
        while self.ring.completion().is_empty() && !self.ring.submission().taskrun() {
            if start.elapsed() >= limit {
                break;
            }
            std::hint::spin_loop();
        }
        Ok(())
    }

    fn sleep(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        let ready = !self.ring.completion().is_empty();
        let wanted = usize::from(!ready);
        let result = match timeout {
            // Also without waiting: the kernel posts completions only to who
            // asks for some (DEFER_TASKRUN).
            Some(limit) if wanted == 1 => {
                let limit = types::Timespec::from(limit);
                let arguments = types::SubmitArgs::new().timespec(&limit);
                self.ring.submitter().submit_with_args(1, &arguments)
            }
            _ => self.ring.submitter().submit_and_wait(wanted),
        };
        Ring::tolerate(result)
    }

    fn tolerate(result: io::Result<usize>) -> io::Result<()> {
        match result {
            Ok(_) => Ok(()),
            Err(error) => match error.raw_os_error() {
                // EBUSY, EAGAIN: completions must be taken first.
                Some(libc::ETIME | libc::EINTR | libc::EBUSY | libc::EAGAIN) => Ok(()),
                _ => Err(error),
            },
        }
    }

    fn refill(&mut self) -> io::Result<()> {
        while let Some(entry) = self.backlog.front() {
            // SAFETY: promised by who pushed it.
            if unsafe { self.ring.submission().push(entry) }.is_ok() {
                self.backlog.pop_front();
                continue;
            }
            match self.ring.submit() {
                Ok(0) => break,
                Ok(_) => {}
                Err(error) => match error.raw_os_error() {
                    Some(libc::EINTR | libc::EBUSY | libc::EAGAIN) => break,
                    _ => return Err(error),
                },
            }
        }
        Ok(())
    }

    /// The next completion that is there.
    pub fn next_event(&mut self) -> Option<Event> {
        self.ring.completion().next().map(|entry| Event {
            token: Token(entry.user_data()),
            result: entry.result(),
            more: cqueue::more(entry.flags()),
        })
    }

    /// Has `fd`, an eventfd, count completions.
    pub fn register_eventfd(&mut self, fd: RawFd) -> io::Result<()> {
        self.ring.submitter().register_eventfd(fd)
    }
}

/// Enables a ring that was made disabled, for these requests and registrations
/// (`IORING_OP_*` and `IORING_REGISTER_*`) only.
///
/// # Errors
/// What the kernel says.
pub fn enable<E: squeue::EntryMarker>(
    ring: &IoUring<E>,
    requests: &[u8],
    registrations: &[u8],
) -> io::Result<()> {
    let requests = requests.iter().copied().map(Restriction::sqe_op);
    let registrations = registrations.iter().copied().map(Restriction::register_op);
    let flags = squeue::Flags::FIXED_FILE | squeue::Flags::ASYNC;
    let flags = Restriction::sqe_flags_allowed(flags.bits());
    let mut allowed: Vec<_> = requests.chain(registrations).chain([flags]).collect();
    ring.submitter().register_restrictions(&mut allowed)?;
    ring.submitter().register_enable_rings()
}

impl AsRawFd for Ring {
    fn as_raw_fd(&self) -> RawFd {
        self.ring.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    static SHORT_PAUSE: types::Timespec = types::Timespec::new().nsec(2_000_000);

    #[test]
    fn a_token_keeps_owner_and_detail() {
        let token = Token::new(Owner::Frontend, 0x00ab_cdef_0123_4567);
        assert_eq!(token.owner(), Owner::Frontend);
        assert_eq!(token.detail(), 0x00ab_cdef_0123_4567);
    }

    #[test]
    fn more_requests_than_entries_all_complete() {
        let mut ring = Ring::new(8, false).unwrap();
        for detail in 0..1000 {
            let nop = opcode::Nop::new().build();
            // SAFETY: a no-op points to nothing.
            unsafe { ring.push(nop, Token::new(Owner::Control, detail)) };
        }
        let mut seen = Vec::new();
        while seen.len() < 1000 {
            ring.wait(Some(Duration::from_secs(10))).unwrap();
            let before = seen.len();
            while let Some(event) = ring.next_event() {
                seen.push(event.token.detail());
            }
            assert!(seen.len() > before, "{} of 1000 completed", seen.len());
        }
        seen.sort_unstable();
        assert!(seen.into_iter().eq(0..1000));
    }

    #[test]
    fn what_no_server_asks_for_is_refused() {
        let mut ring = Ring::new(8, false).unwrap();
        let here = types::Fd(libc::AT_FDCWD);
        let open = opcode::OpenAt::new(here, c"/dev/null".as_ptr()).build();
        // SAFETY: the name is there as long as the program.
        unsafe { ring.push(open, Token::new(Owner::Control, 1)) };
        ring.wait(Some(Duration::from_secs(10))).unwrap();
        let result = ring.next_event().map(|event| event.result);
        assert_eq!(result, Some(-libc::EACCES));
    }

    #[test]
    fn waiting_ends_after_the_timeout() {
        let mut ring = Ring::new(8, false).unwrap();
        ring.wait(Some(Duration::from_millis(1))).unwrap();
        assert!(ring.next_event().is_none());
    }

    #[test]
    fn who_looks_first_sees_what_completes_then_and_later() {
        let (reader, writer) = std::os::unix::net::UnixStream::pair().unwrap();
        let mut ring = Ring::new(8, false).unwrap();
        ring.poll(Duration::from_millis(20));
        for round in 0..40 {
            let poll = opcode::PollAdd::new(types::Fd(reader.as_raw_fd()), libc::POLLIN as u32);
            // SAFETY: a poll points to no memory.
            unsafe { ring.push(poll.build(), Token::new(Owner::Control, round)) };
            let other = std::thread::spawn({
                let mut writer = writer.try_clone().unwrap();
                move || {
                    std::thread::sleep(Duration::from_millis(round));
                    io::Write::write_all(&mut writer, b"x").unwrap();
                }
            });
            ring.wait(Some(Duration::from_secs(10))).unwrap();
            assert_eq!(
                ring.next_event().map(|event| event.token.detail()),
                Some(round)
            );
            other.join().unwrap();
            let mut reader = &reader;
            io::Read::read_exact(&mut reader, &mut [0]).unwrap();
        }
    }

    #[test]
    fn who_looks_first_ends_when_something_completes() {
        const LIMIT: Duration = Duration::from_secs(5);
        let mut ring = Ring::new(8, false).unwrap();
        ring.poll(LIMIT);
        let start = Instant::now();
        for detail in 0..16 {
            ring.pause_for(&SHORT_PAUSE, Token::new(Owner::Control, detail));
            ring.wait(None).unwrap();
            assert_eq!(
                ring.next_event().map(|event| event.token.detail()),
                Some(detail)
            );
        }
        assert!(start.elapsed() < LIMIT);
    }

    #[test]
    fn who_looks_first_ends_after_the_timeout() {
        let mut ring = Ring::new(8, false).unwrap();
        ring.poll(Duration::from_secs(5));
        let start = Instant::now();
        for _ in 0..16 {
            ring.wait(Some(Duration::from_millis(1))).unwrap();
            assert!(ring.next_event().is_none());
        }
        assert!(start.elapsed() < Duration::from_secs(5));
    }

    #[test]
    fn who_does_not_wait_sees_what_has_completed() {
        let (reader, mut writer) = std::os::unix::net::UnixStream::pair().unwrap();
        let mut ring = Ring::new(8, false).unwrap();
        let poll = opcode::PollAdd::new(types::Fd(reader.as_raw_fd()), libc::POLLIN as u32);
        // SAFETY: a poll points to no memory.
        unsafe { ring.push(poll.build(), Token::new(Owner::Control, 7)) };
        ring.wait(Some(Duration::ZERO)).unwrap();
        assert!(ring.next_event().is_none());
        io::Write::write_all(&mut writer, b"x").unwrap();
        ring.wait(Some(Duration::ZERO)).unwrap();
        assert_eq!(ring.next_event().map(|event| event.token.detail()), Some(7));
    }
}
