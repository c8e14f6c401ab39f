// SPDX-License-Identifier: Apache-2.0

//! Requests that cannot be passed through.
//!
//! There are three kinds of them: [`read`]s of what is not all local, [`write`]s
//! to what is not settled, and large discards, recorded as a [`range`]. A request
//! that must wait for something is parked and tried again when something has
//! changed.

mod claims;
mod part;
mod range;
mod read;
mod write;

use std::collections::VecDeque;

use slab::Slab;

use crate::config::Config;
use crate::context::Context;
use crate::copier::Copier;
use crate::io::{Failure, Memory, Operation, Request};
use crate::parts::Parts;
use crate::units::{BLOCK_SIZE, Blocks, Bytes, Offset};
use claims::Claims;
use part::{Next, Part};
use range::Range;
use read::Read;
use write::Write;

/// The most blocks of one write that are claimed at once.
const WRITE_BLOCKS: u64 = 256;
/// The most blocks of a range.
const RANGE_BLOCKS: u64 = 1 << 18;

/// How far a request is, by its kind.
#[derive(Clone, Copy, Debug)]
enum State {
    Read(Read),
    Write(Write),
    Range(Range),
}

/// A request that could not be passed through.
#[derive(Clone, Copy, Debug)]
struct Slow {
    part: Part,
    state: State,
    /// Where the request ends.
    end: Offset,
}

impl Slow {
    /// Turn to the part of a write or a discard that begins here.
    fn begin_part(&mut self, from: Offset, config: &Config) {
        let length = self.end - from;
        let range_from = u64::from(config.range_from) * BLOCK_SIZE;
        let whole = Bytes::new(from, self.end);
        let is_range = |bytes: Bytes| bytes.length() > range_from;
        let bytes = if self.part.is_write {
            Bytes::new(
                from,
                self.end.min(from.align_down() + WRITE_BLOCKS * BLOCK_SIZE),
            )
        } else if length <= range_from {
            whole
        } else if !from.is_aligned() {
            Bytes::new(from, from.align_up())
        } else {
            let most = from + RANGE_BLOCKS * BLOCK_SIZE;
            Bytes::new(from, self.end.align_down().min(most))
        };
        self.part.bytes = bytes;
        self.state = if !self.part.is_write && is_range(bytes) {
            State::Range(Range::Claim)
        } else {
            State::Write(Write::Claim)
        };
    }

    /// The blocks that it is to claim next.
    fn claim(&self) -> Option<Blocks> {
        let claims = matches!(
            self.state,
            State::Write(Write::Claim) | State::Range(Range::Claim)
        );
        claims.then(|| self.part.blocks())
    }
}

/// Requests that cannot be passed through.
#[derive(Debug)]
pub(crate) struct Requests {
    slab: Slab<Slow>,
    /// The most at once.
    most: usize,
    /// Those that wait for something, in the order in which they came.
    parked: VecDeque<u32>,
    /// Where they wait to claim something.
    claims: Claims,
    /// Bytes that the guest has written.
    pub(crate) written: u64,
}

impl Requests {
    pub(crate) fn new(most: usize) -> Self {
        Self {
            slab: Slab::with_capacity(most),
            most,
            parked: VecDeque::with_capacity(most),
            claims: Claims::new(),
            written: 0,
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.slab.is_empty()
    }

    /// How many wait for something other than a disk.
    pub(crate) fn waiting(&self) -> usize {
        self.parked.len()
    }

    /// Begin a request.
    pub(crate) fn begin<M: Memory>(
        &mut self,
        request: Request,
        copier: &mut Copier,
        parts: &mut Parts,
        memory: &mut M,
    ) {
        if self.slab.len() >= self.most {
            return parts.cx.answer(request.tag, Err(Failure::Invalid));
        }
        let bytes = Bytes::run(request.offset, request.length);
        let vacant = self.slab.vacant_entry();
        let key = vacant.key() as u32;
        let mut slow = Slow {
            part: Part {
                key,
                tag: request.tag,
                is_write: matches!(request.operation, Operation::Write { .. }),
                fua: matches!(
                    request.operation,
                    Operation::Write { fua: true } | Operation::WriteZeroes { fua: true }
                ),
                begin: bytes.from,
                bytes,
                pending: 0,
                failure: None,
            },
            state: State::Read(Read::Begin),
            end: bytes.to,
        };
        if request.operation != Operation::Read {
            slow.begin_part(bytes.from, &parts.cx.config);
            self.written += request.length;
        }
        vacant.insert(slow);
        if self.overtakes(key, self.parked.len()) || !self.advance(key, copier, parts, memory) {
            self.park(key);
        }
    }

    fn park(&mut self, key: u32) {
        self.parked.push_back(key);
        if let Some(blocks) = self.slab[key as usize].claim() {
            self.claims.add(blocks);
        }
    }

    fn unpark(&mut self) -> Option<u32> {
        let key = self.parked.pop_front()?;
        if let Some(blocks) = self.slab[key as usize].claim() {
            self.claims.remove(blocks);
        }
        Some(key)
    }

    /// Whether one of the so many last that are parked must be tried before this
    /// one, as it is to claim the same blocks.
    fn overtakes(&self, key: u32, earlier: usize) -> bool {
        let claim = self.slab[key as usize].claim();
        let Some(blocks) = claim.filter(|blocks| self.claims.may_overlap(*blocks)) else {
            return false;
        };
        let mut earlier = self.parked.iter().rev().take(earlier);
        earlier.any(|earlier| {
            let claim = self.slab[*earlier as usize].claim();
            claim.is_some_and(|other| other.overlaps(blocks))
        })
    }

    /// Try again what waits for something.
    pub(crate) fn retry<M: Memory>(
        &mut self,
        copier: &mut Copier,
        parts: &mut Parts,
        memory: &mut M,
    ) {
        let mut kept = 0;
        for _ in 0..self.parked.len() {
            let Some(key) = self.unpark() else {
                return;
            };
            if self.overtakes(key, kept) || !self.advance(key, copier, parts, memory) {
                self.park(key);
                kept += 1;
            }
        }
    }

    /// Take the next steps of a request of which nothing is in flight; false if
    /// it must wait.
    fn advance<M: Memory>(
        &mut self,
        key: u32,
        copier: &mut Copier,
        parts: &mut Parts,
        memory: &mut M,
    ) -> bool {
        loop {
            let Slow { part, state, .. } = &mut self.slab[key as usize];
            let next = match *state {
                State::Read(read) => read.advance(part, copier, parts, memory).map(State::Read),
                State::Write(write) => write.advance(part, copier, parts, memory).map(State::Write),
                State::Range(range) => range.advance(part, copier, parts, memory).map(State::Range),
            };
            match next {
                Next::Wait(waiting) => {
                    *state = waiting;
                    return false;
                }
                Next::Flight(flying) => {
                    *state = flying;
                    return true;
                }
                Next::Ended => {
                    if !self.next_part(key, &mut parts.cx) {
                        return true;
                    }
                }
            }
        }
    }

    /// A part of a request has ended: turn to the next one, or answer the guest.
    fn next_part(&mut self, key: u32, cx: &mut Context) -> bool {
        let slow = &mut self.slab[key as usize];
        let Part {
            tag,
            bytes,
            failure,
            ..
        } = slow.part;
        if failure.is_none() && bytes.to < slow.end {
            slow.begin_part(bytes.to, &cx.config);
            return true;
        }
        self.slab.remove(key as usize);
        cx.changed = true;
        cx.answer(tag, failure.map_or(Ok(()), Err));
        false
    }

    /// Send the data of a write that were to follow its intents; not if nothing
    /// is recorded any more.
    pub(crate) fn send_data<M: Memory>(
        &mut self,
        key: u32,
        copier: &mut Copier,
        parts: &mut Parts,
        memory: &mut M,
    ) {
        let mut sent = Err(Failure::Io);
        if let Slow {
            part,
            state: State::Write(Write::Writing(claimed, _)),
            ..
        } = &mut self.slab[key as usize]
        {
            if !parts.cx.broken {
                write::send_data(part, claimed, &mut parts.cx);
                sent = Ok(());
            }
        }
        self.ended(key, sent, copier, parts, memory);
    }

    /// A block of the journal is as far as a request waits for, or has failed.
    pub(crate) fn recorded<M: Memory>(
        &mut self,
        key: u32,
        result: Result<(), Failure>,
        copier: &mut Copier,
        parts: &mut Parts,
        memory: &mut M,
    ) {
        if parts
            .cx
            .rules
            .keep(crate::rules::Rule::IntentBeforeCompletion)
        {
            self.ended(key, result, copier, parts, memory);
        }
    }

    /// An operation of a request has ended.
    pub(crate) fn ended<M: Memory>(
        &mut self,
        key: u32,
        result: Result<(), Failure>,
        copier: &mut Copier,
        parts: &mut Parts,
        memory: &mut M,
    ) {
        let Slow { part, state, .. } = &mut self.slab[key as usize];
        if part.fua && matches!(state, State::Write(Write::Writing(..))) {
            parts.cx.durable_ended(result);
        }
        part.pending -= 1;
        if let Err(failure) = result {
            part.failure.get_or_insert(failure);
        }
        if let State::Write(Write::Writing(_, sent)) = state {
            parts.journal.has_left(part.pending, sent.intents);
        }
        if part.pending == 0 && !self.advance(key, copier, parts, memory) {
            self.park(key);
        }
    }
}
