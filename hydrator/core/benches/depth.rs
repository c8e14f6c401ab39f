// SPDX-License-Identifier: Apache-2.0

//! What the core makes of a disk, whatever processor it runs on: its throughput
//! over a disk of a given latency, in a time of its own in which nothing else
//! takes any. `cargo bench -p localstor-hydrator-core --bench depth`.
//!
//! The disk carries out any number of requests at once, a flush as long as a
//! write. The guest has so many writes of 4 KiB in flight, to blocks that it
//! writes once, and sends the next one the moment it has an answer. What it
//! would get from the disk itself is *raw*. What is missing is what requests of
//! the guest wait for beyond their own data; a faster machine does not change it.

use localstor_hydrator_core::{
    Action, Config, Io, Notice, Operation, Tag, Time, Volume, metadata_size,
};
use null::{Agenda, Random, Zeros};

#[allow(dead_code)]
#[path = "../tests/null/mod.rs"]
mod null;

/// The volume's size, in bytes.
const SIZE: u64 = 64 << 30;
const BLOCK: u64 = 4096;
const MICROSECOND: u64 = 1000;

/// A disk's latency, in nanoseconds: between these, each as likely.
#[derive(Clone, Copy)]
struct Latency {
    from: u64,
    to: u64,
}

impl Latency {
    const fn mean(self) -> u64 {
        u64::midpoint(self.from, self.to)
    }
}

/// What each of the guest's threads does, again and again.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Load {
    Write,
    /// The write has FUA.
    Fua,
    /// A flush follows the write.
    Fsync,
    /// The block is settled.
    Settled,
}

impl Load {
    const ALL: [Self; 4] = [Self::Settled, Self::Write, Self::Fua, Self::Fsync];

    const fn name(self) -> &'static str {
        match self {
            Self::Settled => "settled",
            Self::Write => "write",
            Self::Fua => "write with FUA",
            Self::Fsync => "write and flush",
        }
    }

    /// Requests to the disk, one after the other, that the guest itself asks for.
    const fn requests(self) -> u64 {
        match self {
            Self::Fsync => 2,
            _ => 1,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// An operation ends.
    End(u64),
    /// The guest's thread begins.
    Begin(u32),
}

/// A volume over a disk in a time of its own.
struct Timed {
    volume: Volume,
    memory: Zeros,
    now: Time,
    latency: Latency,
    random: Random,
    agenda: Agenda<Event>,
    answered: Vec<Tag>,
    open: bool,
    /// Bytes written to the disk.
    written: u64,
}

impl Timed {
    fn new(latency: Latency) -> Self {
        let config = Config::new([1; 16], SIZE, metadata_size(SIZE));
        let mut timed = Self {
            memory: Zeros::new(&config),
            volume: Volume::format(config).expect("a configuration that works"),
            now: Time(1),
            latency,
            random: Random::new(),
            agenda: Agenda::new(),
            answered: Vec::new(),
            open: false,
            written: 0,
        };
        timed.act();
        while !timed.open {
            timed.step();
        }
        timed
    }

    fn request(&mut self, tag: u32, operation: Operation, offset: u64, length: u64) {
        let request = null::request(tag, operation, offset, length);
        self.volume.request(self.now, request, &mut self.memory);
    }

    /// End a batch: give what is to be done to the disk.
    fn act(&mut self) {
        let mut begun = Vec::new();
        let (answered, open, written) = (&mut self.answered, &mut self.open, &mut self.written);
        self.volume
            .actions(self.now, &mut self.memory, |action| match action {
                Action::Write { io, length, .. } => {
                    *written += u64::from(length);
                    begun.push(io);
                }
                Action::Read { io, .. } | Action::Zero { io, .. } | Action::Flush { io, .. } => {
                    begun.push(io);
                }
                Action::Complete { tag, result } => {
                    result.expect("nothing fails");
                    answered.push(tag);
                }
                Action::Notice(notice) => *open |= notice == Notice::Open,
            });
        for io in begun {
            let Latency { from, to } = self.latency;
            let after = from + self.random.next() % (to - from + 1);
            self.agenda
                .expect(self.now.after(after), Event::End(io.to_bits()));
        }
    }

    /// What happens next, alone: a helper that is fast enough meets each event
    /// by itself. The thread that begins, if that is it.
    fn step(&mut self) -> Option<u32> {
        let (at, event) = self.agenda.next()?;
        self.now = at;
        match event {
            Event::Begin(thread) => return Some(thread),
            Event::End(io) => {
                let io = Io::from_bits(io);
                self.volume
                    .completed(self.now, io, Ok(()), &mut self.memory);
            }
        }
        self.act();
        None
    }

    /// So many threads do this until they have written so many blocks: how much
    /// of raw they get, and the bytes written for each byte of theirs.
    fn run(&mut self, load: Load, depth: u32, blocks: u64) -> (f64, f64) {
        if load == Load::Settled {
            self.request(0, Operation::WriteZeroes { fua: true }, 0, SIZE);
            self.act();
            while self.answered.pop().is_none() {
                self.step();
            }
        }
        // They come one by one: together they would stay together.
        let mut flushes = vec![false; depth as usize];
        for thread in 0..depth {
            let at = self.latency.mean() * u64::from(thread) / u64::from(depth);
            self.agenda.expect(self.now.after(at), Event::Begin(thread));
        }
        let (mut done, mut began, mut before) = (0, self.now, self.written);
        // What happens once only is not counted.
        let counted_from = blocks / 10;
        while done < counted_from + blocks {
            let mut begun: Vec<_> = self.step().into_iter().collect();
            while !begun.is_empty() || !self.answered.is_empty() {
                for tag in core::mem::take(&mut self.answered) {
                    let flush = &mut flushes[tag.0 as usize];
                    if load == Load::Fsync && !*flush {
                        *flush = true;
                        self.request(tag.0, Operation::Flush, 0, 0);
                        continue;
                    }
                    *flush = false;
                    begun.push(tag.0);
                    done += 1;
                    if done == counted_from {
                        (began, before) = (self.now, self.written);
                    }
                }
                for thread in begun.drain(..) {
                    let offset = self.random.next() % (SIZE / BLOCK) * BLOCK;
                    let fua = load == Load::Fua;
                    self.request(thread, Operation::Write { fua }, offset, BLOCK);
                }
                self.act();
            }
        }
        let raw = self.now.since(began) * u64::from(depth) / self.latency.mean() / load.requests();
        let written = self.written - before;
        (
            blocks as f64 / raw as f64,
            written as f64 / (blocks * BLOCK) as f64,
        )
    }
}

fn main() {
    // Who looks for tests here finds none.
    if std::env::args().any(|argument| argument == "--list" || argument == "--test") {
        return;
    }
    println!(
        "{:<14} {:>5}  {:<16} {:>6} {:>11} {:>14}",
        "disk", "depth", "load", "of raw", "of settled", "bytes per byte"
    );
    let exact = |latency| Latency {
        from: latency,
        to: latency,
    };
    let disks = [
        ("3 ms", exact(3000 * MICROSECOND)),
        ("0.3 ms", exact(300 * MICROSECOND)),
        ("15 us", exact(15 * MICROSECOND)),
        (
            "0.15..0.45 ms",
            Latency {
                from: 150 * MICROSECOND,
                to: 450 * MICROSECOND,
            },
        ),
    ];
    for (disk, latency) in disks {
        for (depth, blocks) in [(1, 40_000), (32, 400_000)] {
            let mut settled = 0.0;
            for load in Load::ALL {
                let (of_raw, bytes) = Timed::new(latency).run(load, depth, blocks);
                if load == Load::Settled {
                    settled = of_raw;
                }
                println!(
                    "{disk:<14} {depth:>5}  {:<16} {of_raw:>6.3} {:>11.3} {bytes:>14.3}",
                    load.name(),
                    of_raw / settled,
                );
            }
        }
    }
}
