// SPDX-License-Identifier: Apache-2.0
//! Measures a vhost-user-blk server as its guest:
//! `guest SOCKET PROCESS SECONDS once|again read|write BYTES DEPTH`.
//!
//! Requests of so many bytes go to all of the disk in a random order, always the
//! same, so many at a time, until the seconds are over or, with `once`, each
//! place had its turn. What was written is flushed after that. One line of JSON
//! says what came of it: `requests`; `seconds` from the first to the last;
//! `processor`, the seconds of processor time that the server's process took
//! meanwhile; `p50` and `p99`, the latency of the median request and of the one
//! in a hundred, in nanoseconds.
//!
//! It sleeps until the server interrupts it, and asks for no interrupts while it
//! handles one, as Linux does. Who polls would spare the server its interrupts.
//! What one interrupt makes room for is submitted with one kick at most.

use std::error::Error;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap};
use virtio_driver::{
    EventFd, QueueNotifier, VhostUser, VirtioBlkConfig, VirtioBlkFeatureFlags, VirtioBlkQueue,
    VirtioBlkReqBuf, VirtioFeatureFlags, VirtioTransport,
};

/// Of the queue; a request takes three.
const DESCRIPTORS: u16 = 128;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match run(&arguments) {
        Ok(line) => {
            println!("{line}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("guest: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &[&str]) -> Result<String, Box<dyn Error>> {
    let [socket, process, seconds, turns, way, bytes, depth] = arguments else {
        return Err("usage: guest SOCKET PROCESS SECONDS once|again read|write BYTES DEPTH".into());
    };
    let load = Load {
        limit: Duration::try_from_secs_f64(seconds.parse()?)?,
        once: match *turns {
            "once" => true,
            "again" => false,
            other => return Err(format!("\"{other}\" is neither once nor again").into()),
        },
        write: match *way {
            "read" => false,
            "write" => true,
            other => return Err(format!("\"{other}\" is neither read nor write").into()),
        },
        bytes: bytes.parse()?,
        depth: depth.parse()?,
    };
    let clock = ProcessorClock::of(process.parse()?)?;
    measure(&load, &mut Guest::connect(socket)?, &clock)
}

struct Load {
    limit: Duration,
    // No place has a second turn.
    once: bool,
    write: bool,
    bytes: usize,
    depth: usize,
}

fn measure(
    load: &Load,
    guest: &mut Guest,
    clock: &ProcessorClock,
) -> Result<String, Box<dyn Error>> {
    let mut places = places(guest.transport.get_config()?, load.bytes)?;
    fastrand::Rng::with_seed(1).shuffle(&mut places);
    let most = if load.once { places.len() } else { usize::MAX };
    let mut places = places.into_iter().cycle().take(most);
    let mut buffers: Vec<_> = guest
        .share(load.bytes.checked_mul(load.depth).ok_or("too much")?)?
        .chunks_exact_mut(load.bytes)
        .collect();
    let mut free: Vec<usize> = (0..load.depth).collect();
    let mut latencies = Vec::new();
    let mut requests = 0;

    let (processor, start) = (clock.now()?, Instant::now());
    loop {
        let room = if start.elapsed() < load.limit {
            free.len()
        } else {
            0
        };
        for (place, buffer) in places.by_ref().take(room).zip(free.split_off(0)) {
            let context = (buffer, Instant::now());
            if load.write {
                guest.queue.write(place, buffers[buffer], context)?;
            } else {
                guest.queue.read(place, buffers[buffer], context)?;
            }
            requests += 1;
        }
        guest.kick()?;
        if requests == latencies.len() {
            break;
        }
        guest.answers(|(buffer, since)| {
            latencies.push(since.elapsed().as_nanos());
            free.push(buffer);
        })?;
    }
    let (seconds, processor) = (start.elapsed(), clock.now()? - processor);

    if load.write {
        guest.queue.flush((0, Instant::now()))?;
        guest.kick()?;
        guest.answers(|_| ())?;
    }
    latencies.sort_unstable();
    let rank = |percent: usize| latencies.get(latencies.len().saturating_sub(1) * percent / 100);
    let (Some(p50), Some(p99)) = (rank(50), rank(99)) else {
        return Err("there was no time for a request".into());
    };
    Ok(format!(
        "{{\"requests\": {requests}, \"seconds\": {:.9}, \"processor\": {:.9}, \
         \"p50\": {p50}, \"p99\": {p99}}}",
        seconds.as_secs_f64(),
        processor.as_secs_f64()
    ))
}

/// Where requests of so many bytes can go on a disk.
fn places(disk: VirtioBlkConfig, bytes: usize) -> Result<Vec<u64>, String> {
    let sectors = u64::from(disk.capacity);
    let bytes = bytes as u64;
    if bytes == 0 || bytes % 512 != 0 || bytes / 512 > sectors {
        return Err(format!(
            "a disk of {sectors} sectors has no place for {bytes} bytes"
        ));
    }
    Ok((0..sectors / (bytes / 512))
        .map(|number| number * bytes)
        .collect())
}

/// The buffer of a request, and since when it is on its way.
type Context = (usize, Instant);

struct Guest {
    // It is in the transport's memory, so it goes first.
    queue: VirtioBlkQueue<'static, Context>,
    notifier: Box<dyn QueueNotifier>,
    interrupts: Arc<EventFd>,
    transport: VhostUser<VirtioBlkConfig, VirtioBlkReqBuf>,
}

impl Guest {
    /// With a write cache, as its writes are flushed when all is done.
    fn connect(socket: &str) -> Result<Guest, Box<dyn Error>> {
        let ring = VirtioFeatureFlags::VERSION_1 | VirtioFeatureFlags::RING_EVENT_IDX;
        let features = ring.bits() | VirtioBlkFeatureFlags::FLUSH.bits();
        let mut transport = VhostUser::new(socket, features)?;
        if transport.get_features() & features != features {
            return Err("the server has no flushes or no event indices".into());
        }
        let mut queues = VirtioBlkQueue::setup_queues(&mut transport, 1, DESCRIPTORS)?;
        Ok(Guest {
            queue: queues.pop().ok_or("no queue")?,
            notifier: transport.get_submission_notifier(0),
            interrupts: transport.get_completion_fd(0),
            transport,
        })
    }

    /// Memory that the server sees, too, as long as the process lives.
    fn share(&mut self, bytes: usize) -> Result<&'static mut [u8], Box<dyn Error>> {
        let file: File = memfd_create("guest", MemfdFlags::CLOEXEC)?.into();
        file.set_len(bytes as u64)?;
        // SAFETY: a new mapping of a new file aliases nothing, is as long as the
        // file, and is never unmapped.
        let memory = unsafe {
            let (access, kind) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
            let address = mmap(std::ptr::null_mut(), bytes, access, kind, &file, 0)?;
            std::slice::from_raw_parts_mut(address.cast::<u8>(), bytes)
        };
        // What reads as zeros may be handled in another way.
        memory.fill(0x5c);
        self.transport
            .map_mem_region(memory.as_ptr() as usize, bytes, file.as_raw_fd(), 0)?;
        Ok(memory)
    }

    fn kick(&mut self) -> io::Result<()> {
        if self.queue.avail_notif_needed() {
            self.notifier.notify()?;
        }
        Ok(())
    }

    /// Sleeps until there are answers, and takes them.
    fn answers(&mut self, mut take: impl FnMut(Context)) -> Result<(), Box<dyn Error>> {
        self.queue.set_used_notif_enabled(true);
        while !self.queue.completions().has_next() {
            // Servers make it an eventfd that nobody can wait for by reading.
            poll(&mut [PollFd::new(&*self.interrupts, PollFlags::IN)], None)?;
            self.interrupts.read()?;
        }
        self.queue.set_used_notif_enabled(false);
        for answer in self.queue.completions() {
            if answer.ret != 0 {
                return Err(io::Error::from_raw_os_error(-answer.ret).into());
            }
            take(answer.context);
        }
        Ok(())
    }
}

/// The processor time of a process, with all of its threads.
struct ProcessorClock(libc::clockid_t);

impl ProcessorClock {
    fn of(process: libc::pid_t) -> io::Result<ProcessorClock> {
        let mut clock = 0;
        // SAFETY: it writes the number of a clock to where its argument points.
        match unsafe { libc::clock_getcpuclockid(process, &mut clock) } {
            0 => Ok(ProcessorClock(clock)),
            error => Err(io::Error::from_raw_os_error(error)),
        }
    }

    fn now(&self) -> io::Result<Duration> {
        let mut time = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // SAFETY: it writes a time to where its argument points.
        if unsafe { libc::clock_gettime(self.0, &mut time) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Duration::new(time.tv_sec as u64, time.tv_nsec as u32))
    }
}
