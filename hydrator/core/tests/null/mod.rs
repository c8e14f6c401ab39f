// SPDX-License-Identifier: Apache-2.0

//! A volume over devices that do everything at once and keep nothing.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use localstor_hydrator_core::{
    Action, Config, Device, Failure, Io, Memory, Notice, Operation, Request, Tag, Time, Volume,
    metadata_size,
};

const BLOCK: usize = 4096;

/// A request of a guest.
pub(crate) const fn request(tag: u32, operation: Operation, offset: u64, length: u64) -> Request {
    Request {
        tag: Tag(tag),
        operation,
        offset,
        length,
    }
}

/// Numbers without a pattern, the same in each run.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) const fn new() -> Self {
        Self(1)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }
}

/// What happens next, and when; at the same time in the order in which it was
/// expected.
pub(crate) struct Agenda<Event> {
    events: BinaryHeap<Reverse<(Time, u64, Event)>>,
    ordered: u64,
}

impl<Event: Ord> Agenda<Event> {
    pub(crate) fn new() -> Self {
        Self {
            events: BinaryHeap::new(),
            ordered: 0,
        }
    }

    pub(crate) fn expect(&mut self, at: Time, event: Event) {
        self.ordered += 1;
        self.events.push(Reverse((at, self.ordered, event)));
    }

    pub(crate) fn next(&mut self) -> Option<(Time, Event)> {
        let Reverse((at, _, event)) = self.events.pop()?;
        Some((at, event))
    }
}

/// Buffers of zeros.
pub(crate) struct Zeros {
    blocks: Vec<u8>,
    extent: Vec<u8>,
    content: Vec<u8>,
}

impl Zeros {
    pub(crate) fn new(config: &Config) -> Self {
        Self {
            blocks: vec![0; usize::from(config.block_slots) * BLOCK],
            extent: vec![0; config.extent_size()],
            content: vec![0x5a; 1 << 20],
        }
    }
}

impl Memory for Zeros {
    fn block(&self, slot: u16) -> &[u8] {
        &self.blocks[usize::from(slot) * BLOCK..][..BLOCK]
    }

    fn block_mut(&mut self, slot: u16) -> &mut [u8] {
        &mut self.blocks[usize::from(slot) * BLOCK..][..BLOCK]
    }

    fn extent(&self, _: u16) -> &[u8] {
        &self.extent
    }

    fn extent_mut(&mut self, _: u16) -> &mut [u8] {
        &mut self.extent
    }

    fn guest_crc32c(&self, _: Tag, _: u32, length: u32, crc: u32) -> u32 {
        crc32c::crc32c_append(crc, &self.content[..length as usize])
    }

    fn guest_to_block(&mut self, _: Tag, _: u32, length: u32, slot: u16, at: usize) {
        self.block_mut(slot)[at..at + length as usize].fill(0);
    }

    fn zero_guest(&mut self, _: Tag, _: u32, _: u32) {}
}

/// A volume over such devices.
pub(crate) struct Null {
    pub(crate) volume: Volume,
    memory: Zeros,
    now: Time,
    flight: Vec<Io>,
    landing: Vec<Io>,
    pub(crate) answered: Vec<(Tag, Result<(), Failure>)>,
    pub(crate) open: bool,
    pub(crate) done: bool,
    /// Reads of the source.
    pub(crate) source_reads: u64,
    /// Rounds in which everything in flight was carried out at once.
    pub(crate) rounds: u64,
}

impl Null {
    /// A new volume of so many bytes.
    pub(crate) fn new(size: u64) -> Self {
        Self::with(Config::new([1; 16], size, metadata_size(size)))
    }

    /// A new volume.
    pub(crate) fn with(config: Config) -> Self {
        let memory = Zeros::new(&config);
        let mut null = Self {
            volume: Volume::format(config).expect("a configuration that works"),
            memory,
            now: Time(1),
            flight: Vec::with_capacity(4096),
            landing: Vec::with_capacity(4096),
            answered: Vec::with_capacity(4096),
            open: false,
            done: false,
            source_reads: 0,
            rounds: 0,
        };
        while !null.open {
            null.round();
        }
        null
    }

    pub(crate) fn request(&mut self, tag: u32, operation: Operation, offset: u64, length: u64) {
        let request = request(tag, operation, offset, length);
        self.volume.request(self.now, request, &mut self.memory);
    }

    /// Take the actions; true if anything is in flight.
    pub(crate) fn take_actions(&mut self) -> bool {
        let (flight, answered) = (&mut self.flight, &mut self.answered);
        let (open, done, source_reads) = (&mut self.open, &mut self.done, &mut self.source_reads);
        self.volume
            .actions(self.now, &mut self.memory, |action| match action {
                Action::Read { io, device, .. } => {
                    *source_reads += u64::from(device == Device::Source);
                    flight.push(io);
                }
                Action::Write { io, .. } | Action::Zero { io, .. } | Action::Flush { io, .. } => {
                    flight.push(io)
                }
                Action::Complete { tag, result } => answered.push((tag, result)),
                Action::Notice(notice) => {
                    *open |= notice == Notice::Open;
                    *done |= notice == Notice::Done;
                }
            });
        !self.flight.is_empty()
    }

    /// All that is in flight is carried out, and what follows handed out.
    pub(crate) fn round(&mut self) {
        self.now = self.now.after(1000);
        if self.take_actions() {
            self.rounds += 1;
        }
        core::mem::swap(&mut self.flight, &mut self.landing);
        for io in self.landing.drain(..) {
            self.volume
                .completed(self.now, io, Ok(()), &mut self.memory);
        }
        self.take_actions();
    }

    /// One request, to its end.
    pub(crate) fn one(&mut self, operation: Operation, offset: u64, length: u64) {
        self.request(0, operation, offset, length);
        self.answered.clear();
        while self.answered.is_empty() {
            self.round();
        }
    }
}
