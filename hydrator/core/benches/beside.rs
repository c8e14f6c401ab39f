// SPDX-License-Identifier: Apache-2.0

//! What a guest loses to hydration, and how much of what it leaves hydration
//! uses, on disks and lines of given properties, in a time of its own in which
//! nothing else takes any. `cargo bench -p localstor-hydrator-core --bench
//! beside`; with `-- --over-time` it prints each tenth of a second instead, as
//! comma-separated values.
//!
//! A disk has some channels. A request is cut into pages, and each takes the
//! channel that is free first, for a fixed time and one for each byte; so a large
//! write uses all channels, and who comes later waits. A line to the source
//! carries one byte after the other, at a distance. The guest has so many
//! requests of 4 KiB in flight, seven reads for three writes, to blocks that are
//! settled, and sends the next one the moment it has an answer.
//!
//! Another guest reads what has not arrived, from one end to the other, and gets
//! so much of what it would get of the source itself.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use localstor_hydrator_core::{
    Action, Buffer, Config, Device, Io, Memory, Notice, Operation, Tag, Time, Volume, metadata_size,
};
use null::{Agenda, Random, Zeros};

#[allow(dead_code)]
#[path = "../tests/null/mod.rs"]
mod null;

const GIB: u64 = 1 << 30;
/// The volume's size, in bytes, and how much of it the guest uses.
const SIZE: u64 = 256 * GIB;
const USED: u64 = 4 * GIB;
const BLOCK: u64 = 4096;
const MICROSECOND: u64 = 1000;
const SECOND: u64 = 1_000_000_000;
const TENTH: u64 = SECOND / 10;
/// How long the guest is alone, and with hydration, of which the first part is
/// not counted.
const ALONE: u64 = 3 * SECOND;
const BESIDE: u64 = 26 * SECOND;
const NOT_COUNTED: u64 = 6 * SECOND;
/// How long somebody reads on.
const READ: u64 = 5 * SECOND;
/// How much is drawn, and how much of that the guest is alone.
const DRAWN: u64 = 12 * SECOND;
const DRAWN_ALONE: u64 = 2 * SECOND;

/// A disk, or a line to one.
#[derive(Clone, Copy)]
struct Properties {
    name: &'static str,
    channels: usize,
    /// What takes one channel at the most, in bytes.
    page: u64,
    /// Nanoseconds that a page takes a channel, whatever its size.
    fixed: u64,
    /// Bytes per second of a channel.
    bandwidth: u64,
    /// The same of the line, and nanoseconds there and back.
    line: u64,
    distance: u64,
}

const DISKS: [Properties; 4] = [
    Properties {
        name: "rotating at 10 Gbit/s",
        channels: 1,
        page: 1 << 20,
        fixed: 6000 * MICROSECOND,
        bandwidth: 150_000_000,
        line: 1_250_000_000,
        distance: 100 * MICROSECOND,
    },
    Properties {
        name: "SATA at 10 Gbit/s",
        channels: 8,
        page: 16 << 10,
        fixed: 30 * MICROSECOND,
        bandwidth: 90_000_000,
        line: 1_250_000_000,
        distance: 100 * MICROSECOND,
    },
    Properties {
        name: "NVMe at 10 Gbit/s",
        channels: 32,
        page: 16 << 10,
        fixed: 40 * MICROSECOND,
        bandwidth: 160_000_000,
        line: 1_250_000_000,
        distance: 100 * MICROSECOND,
    },
    Properties {
        name: "NVMe at 100 Gbit/s",
        channels: 32,
        page: 16 << 10,
        fixed: 40 * MICROSECOND,
        bandwidth: 160_000_000,
        line: 12_500_000_000,
        distance: 50 * MICROSECOND,
    },
];

/// What is far away: 10 ms there and back.
const FAR: [Properties; 2] = [
    Properties {
        name: "10 ms at 1 Gbit/s",
        line: 125_000_000,
        distance: 10_000 * MICROSECOND,
        ..DISKS[2]
    },
    Properties {
        name: "10 ms at 10 Gbit/s",
        line: 1_250_000_000,
        distance: 10_000 * MICROSECOND,
        ..DISKS[2]
    },
];

impl Properties {
    /// Nanoseconds that so many bytes take a channel.
    const fn service(&self, length: u64) -> u64 {
        self.fixed + length * SECOND / self.bandwidth
    }

    /// Bytes per second that the disk takes in large writes.
    fn capacity(&self) -> f64 {
        (self.channels as u64 * self.page * SECOND) as f64 / self.service(self.page) as f64
    }
}

/// When things end that are begun in order.
struct Channels {
    free: BinaryHeap<Reverse<Time>>,
    /// Nanoseconds that they were in use, all together.
    used: u64,
}

impl Channels {
    fn new(number: usize) -> Self {
        Self {
            free: (0..number).map(|_| Reverse(Time(0))).collect(),
            used: 0,
        }
    }

    /// When something ends that is there from `now` on and takes one of them.
    fn take(&mut self, now: Time, service: u64) -> Time {
        let Reverse(free) = self.free.pop().expect("there is one");
        let end = free.max(now).after(service);
        self.free.push(Reverse(end));
        self.used += service;
        end
    }
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// An operation ends.
    End(u64),
    /// The volume wants to be asked.
    Wake,
}

/// What the guest got, and what arrived, in some time.
#[derive(Clone, Default)]
struct Got {
    /// Nanoseconds of each of its requests.
    latencies: Vec<u64>,
    arrived: u64,
    nanoseconds: u64,
}

impl Got {
    fn requests_a_second(&self) -> f64 {
        self.latencies.len() as f64 * SECOND as f64 / self.nanoseconds as f64
    }

    /// What 99 of 100 don't exceed, in microseconds.
    fn almost_all(&mut self) -> f64 {
        self.latencies.sort_unstable();
        let number = self.latencies.len();
        match number.checked_sub(1 + number / 100) {
            Some(index) => self.latencies[index] as f64 / MICROSECOND as f64,
            None => 0.0,
        }
    }

    /// Bytes per second that arrived.
    fn rate(&self) -> f64 {
        self.arrived as f64 * SECOND as f64 / self.nanoseconds as f64
    }
}

/// What a guest does.
#[derive(Clone, Copy)]
enum Guest {
    /// It reads and writes blocks that are settled, here and there.
    Busy,
    /// It reads what is remote: so many bytes after those that it read last.
    Reader { length: u64, next: u64 },
}

struct Model {
    properties: Properties,
    guest: Guest,
    volume: Volume,
    memory: Zeros,
    now: Time,
    disk: Channels,
    line: Channels,
    agenda: Agenda<Event>,
    random: Random,
    woken: Option<Time>,
    answered: Vec<Tag>,
    /// When each thread's request was sent.
    sent: Vec<Time>,
    open: bool,
    arrived: u64,
}

impl Model {
    fn new(properties: Properties, guest: Guest, depth: u32) -> Self {
        let config = Config::new([1; 16], SIZE, metadata_size(SIZE));
        let mut model = Self {
            properties,
            guest,
            memory: Zeros::new(&config),
            volume: Volume::format(config).expect("a configuration that works"),
            now: Time(1),
            disk: Channels::new(properties.channels),
            line: Channels::new(1),
            agenda: Agenda::new(),
            random: Random::new(),
            woken: None,
            answered: Vec::new(),
            sent: vec![Time(0); depth as usize],
            open: false,
            arrived: 0,
        };
        model.act();
        while !model.open {
            model.step();
        }
        // Zeros of the source would not be written.
        model.memory.extent_mut(0).fill(0x5a);
        model.request(0, Operation::WriteZeroes { fua: true }, 0, USED);
        model.act();
        while model.answered.pop().is_none() {
            model.step();
        }
        for thread in 0..depth {
            model.send(thread);
        }
        model.act();
        model
    }

    fn request(&mut self, tag: u32, operation: Operation, offset: u64, length: u64) {
        let request = null::request(tag, operation, offset, length);
        self.volume.request(self.now, request, &mut self.memory);
    }

    fn send(&mut self, thread: u32) {
        self.sent[thread as usize] = self.now;
        match &mut self.guest {
            Guest::Busy => {
                let offset = self.random.next() % (USED / BLOCK) * BLOCK;
                let operation = if self.random.next() % 10 < 3 {
                    Operation::Write { fua: false }
                } else {
                    Operation::Read
                };
                self.request(thread, operation, offset, BLOCK);
            }
            Guest::Reader { length, next } => {
                let (offset, length) = (*next, *length);
                *next += length;
                self.request(thread, Operation::Read, offset, length);
            }
        }
    }

    /// When the disk has carried out a request of so many bytes.
    fn disk(&mut self, length: u64) -> Time {
        let mut end = self.now;
        let mut left = length;
        loop {
            let mean = self.properties.service(left.min(self.properties.page));
            // Between three and five quarters, and now and then four times that
            let random = self.random.next();
            let service = mean * 3 / 4
                + random % (mean / 2)
                + if random >> 32 & 127 == 0 { mean * 3 } else { 0 };
            end = end.max(self.disk.take(self.now, service));
            left = left.saturating_sub(self.properties.page);
            if left == 0 {
                return end;
            }
        }
    }

    /// When so many bytes of the source are here.
    fn line(&mut self, length: u64) -> Time {
        let Properties { line, distance, .. } = self.properties;
        let asked = self.now.after(distance / 2);
        let sent = self.line.take(asked, length * SECOND / line);
        sent.after(distance / 2)
    }

    /// End a batch: give what is to be done to disk and line.
    fn act(&mut self) {
        let mut begun = Vec::new();
        let (answered, open) = (&mut self.answered, &mut self.open);
        self.volume
            .actions(self.now, &mut self.memory, |action| match action {
                Action::Read {
                    io, device, length, ..
                } => {
                    begun.push((io, device, u64::from(length), false));
                }
                Action::Write {
                    io,
                    device,
                    length,
                    buffer,
                    ..
                } => {
                    let copied = matches!(buffer, Buffer::Extent { .. });
                    begun.push((io, device, u64::from(length), copied));
                }
                Action::Zero { io, device, .. } | Action::Flush { io, device } => {
                    begun.push((io, device, 0, false));
                }
                Action::Complete { tag, result } => {
                    result.expect("nothing fails");
                    answered.push(tag);
                }
                Action::Notice(notice) => *open |= notice == Notice::Open,
            });
        for (io, device, length, copied) in begun {
            let end = if device == Device::Source {
                self.line(length)
            } else {
                self.disk(length)
            };
            if copied {
                self.arrived += length;
            }
            self.agenda.expect(end, Event::End(io.to_bits()));
        }
        if let Some(at) = self.volume.wake_at()
            && self
                .woken
                .is_none_or(|woken| woken <= self.now || at < woken)
        {
            self.woken = Some(at);
            self.agenda.expect(at.max(self.now), Event::Wake);
        }
    }

    fn step(&mut self) {
        let (at, event) = self.agenda.next().expect("something happens");
        self.now = at;
        if let Event::End(io) = event {
            self.volume
                .completed(self.now, Io::from_bits(io), Ok(()), &mut self.memory);
        }
        self.act();
    }

    /// What the guest gets, and what arrives, in so many nanoseconds.
    fn run(&mut self, nanoseconds: u64) -> Got {
        let began = self.now;
        let before = self.arrived;
        let mut latencies = Vec::new();
        while self.now.since(began) < nanoseconds {
            self.step();
            while !self.answered.is_empty() {
                for tag in core::mem::take(&mut self.answered) {
                    latencies.push(self.now.since(self.sent[tag.0 as usize]));
                    self.send(tag.0);
                }
                self.act();
            }
        }
        Got {
            latencies,
            arrived: self.arrived - before,
            nanoseconds: self.now.since(began),
        }
    }
}

/// What the guest loses, and hydration gets.
fn compare(properties: Properties, depth: u32) {
    let mut model = Model::new(properties, Guest::Busy, depth);
    let used = model.disk.used;
    let mut alone = model.run(ALONE);
    let busy = (model.disk.used - used) as f64 / (ALONE * properties.channels as u64) as f64;
    model.volume.start();
    model.act();
    model.run(NOT_COUNTED);
    let mut beside = model.run(BESIDE - NOT_COUNTED);
    let left = (properties.capacity() * (1.0 - busy)).min(properties.line as f64);
    // Of a disk that is all the guest's nothing is left.
    let of_left = if busy < 0.95 {
        format!("{:.3}", beside.rate() / left)
    } else {
        "-".to_owned()
    };
    println!(
        "{:<20} {depth:>5} {:>9.0} {:>9.3} {:>8.0} {:>8.3} {:>7.0} {:>7.0} {of_left:>7}",
        properties.name,
        alone.requests_a_second(),
        beside.requests_a_second() / alone.requests_a_second(),
        alone.almost_all(),
        beside.almost_all() / alone.almost_all(),
        left.max(0.0) / 1e6,
        beside.rate() / 1e6,
    );
}

/// What arrives while there is no guest.
fn undisturbed(properties: Properties) {
    let mut model = Model::new(properties, Guest::Busy, 0);
    model.volume.start();
    model.act();
    model.run(SECOND);
    let rate = model.run(2 * SECOND).rate();
    let most = properties.capacity().min(properties.line as f64);
    println!(
        "{:<20} {:>5} {:>44.0} {:>7.0} {:>7.3}",
        properties.name,
        0,
        most / 1e6,
        rate / 1e6,
        rate / most,
    );
}

/// What a reader gets that has so many bytes in each of its requests, beside
/// what the line alone would give it.
fn read_on(properties: Properties, depth: u32, length: u64) {
    let guest = Guest::Reader {
        length,
        next: SIZE / 2,
    };
    let mut model = Model::new(properties, guest, depth);
    model.volume.start();
    model.act();
    let got = model.run(READ);
    let bytes = got.requests_a_second() * length as f64;
    let Properties { line, distance, .. } = properties;
    let turn = (distance + length * SECOND / line) as f64 / SECOND as f64;
    let of_source = (f64::from(depth) * length as f64 / turn).min(line as f64);
    println!(
        "{:<20} {depth:>5} {:>9} {:>9.0} {:>9.0} {:>9.3} {:>9.0}",
        properties.name,
        length >> 10,
        of_source / 1e6,
        bytes / 1e6,
        bytes / of_source,
        got.rate() / 1e6,
    );
}

/// Each tenth of a second, to be drawn.
fn over_time(properties: Properties, depth: u32) {
    let mut model = Model::new(properties, Guest::Busy, depth);
    for tenth in 0..DRAWN / TENTH {
        if tenth == DRAWN_ALONE / TENTH {
            model.volume.start();
            model.act();
        }
        let mut got = model.run(TENTH);
        println!(
            "{},{depth},{:.1},{:.0},{:.0},{:.0}",
            properties.name,
            tenth as f64 / 10.0,
            got.requests_a_second(),
            got.almost_all(),
            got.rate() / 1e6,
        );
    }
}

fn main() {
    let given = |word: &str| std::env::args().any(|argument| argument == word);
    // Who looks for tests here finds none.
    if given("--list") || given("--test") {
        return;
    }
    if given("--over-time") {
        println!("disk,depth,seconds,requests a second,99 of 100 in us,MB/s");
        for properties in DISKS {
            for depth in [1, 4, 32] {
                over_time(properties, depth);
            }
        }
        return;
    }
    println!(
        "{:<20} {:>5} {:>9} {:>9} {:>8} {:>8} {:>7} {:>7} {:>7}",
        "disk and line", "depth", "IOPS", "beside", "p99, us", "beside", "left", "MB/s", "of left"
    );
    for properties in DISKS {
        for depth in [1, 4, 32] {
            compare(properties, depth);
        }
    }
    for properties in DISKS.into_iter().chain(FAR) {
        undisturbed(properties);
    }
    println!(
        "\n{:<20} {:>5} {:>9} {:>9} {:>9} {:>9} {:>9}",
        "disk and line", "depth", "KiB", "source", "reader", "of source", "arrives"
    );
    for properties in DISKS.into_iter().chain(FAR) {
        for (depth, length) in [(1, 128 << 10), (2, 128 << 10), (1, 1 << 20)] {
            read_on(properties, depth, length);
        }
    }
}
