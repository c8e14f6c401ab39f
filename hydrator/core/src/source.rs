// SPDX-License-Identifier: Apache-2.0

//! Reads from the source for guest requests, and a source that does not
//! answer.

use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use crate::volume::{io, kind};
use crate::{Action, BLOCK_SIZE, Buffer, Device, Failure, Memory, Notice, Time, Volume};

/// How soon what was not answered is asked for again, in nanoseconds.
pub(crate) const FIRST_RETRY: u64 = 100_000_000;
const LAST_RETRY: u64 = 5_000_000_000;

/// A piece of a guest request that is read from the source.
#[derive(Clone, Copy, Debug)]
struct Piece {
    request: u32,
    offset: u64,
    length: u32,
    buffer: Buffer,
    /// When it was wanted.
    since: Time,
    /// When the source did not answer it for the first time.
    failed: Option<Time>,
    backoff: u64,
}

/// When to ask a source that does not answer.
#[derive(Clone, Copy, Debug)]
struct Probe {
    at: Time,
    backoff: u64,
}

impl Probe {
    const fn new(at: Time) -> Self {
        Self {
            at,
            backoff: FIRST_RETRY,
        }
    }

    /// Whether it may be asked now; if so, the next time is later.
    fn is_due(&mut self, now: Time) -> bool {
        let due = now >= self.at;
        if due {
            self.at = now.after(self.backoff);
            self.backoff = (self.backoff * 2).min(LAST_RETRY);
        }
        due
    }
}

/// The source has not answered since then.
#[derive(Clone, Copy, Debug)]
struct Away {
    since: Time,
    /// Guest requests and copies ask it one at a time, each for themselves: one
    /// of them may want nothing but a place that is never answered.
    requests: Probe,
    copies: Probe,
}

/// What is being read from the source for guest requests.
#[derive(Debug, Default)]
pub(crate) struct Source {
    pieces: Vec<Piece>,
    free: Vec<u32>,
    /// Pieces that have not been asked for, because the source is away.
    held: VecDeque<u32>,
    /// Pieces that were not answered, and when to ask for them again.
    unanswered: BTreeSet<(Time, u32)>,
    away: Option<Away>,
}

impl Source {
    pub(crate) const fn is_away(&self) -> bool {
        self.away.is_some()
    }

    /// Pieces that wait.
    pub(crate) fn waiting(&self) -> usize {
        self.held.len() + self.unanswered.len()
    }

    pub(crate) fn wake_at(&self) -> Option<Time> {
        let again = self.unanswered.first().map(|(at, _)| *at);
        match self.away {
            None => again,
            Some(away) if self.held.is_empty() => again.map(|at| at.max(away.requests.at)),
            Some(away) => Some(away.requests.at),
        }
    }

    /// Ask for everything at once.
    pub(crate) fn due_at_once(&mut self) {
        self.unanswered = self
            .unanswered
            .iter()
            .map(|(_, piece)| (Time(0), *piece))
            .collect();
        if let Some(away) = &mut self.away {
            away.requests = Probe::new(Time(0));
            away.copies = Probe::new(Time(0));
        }
    }

    /// When the source may be asked for a copy, if not now.
    pub(crate) fn may_copy_at(&self, now: Time) -> Option<Time> {
        self.away.map(|away| away.copies.at).filter(|at| *at > now)
    }

    /// Whether the source may be asked for a copy: one at a time while it does
    /// not answer.
    pub(crate) fn may_copy(&mut self, now: Time) -> bool {
        match &mut self.away {
            None => true,
            Some(away) => away.copies.is_due(now),
        }
    }

    /// The piece to ask for now: while the source is away, one that nobody
    /// knows anything of first.
    fn next_due(&mut self, now: Time) -> Option<u32> {
        let first = self.unanswered.first().copied();
        let again = first.filter(|(at, _)| now >= *at);
        if let Some(away) = &mut self.away {
            if (self.held.is_empty() && again.is_none()) || !away.requests.is_due(now) {
                return None;
            }
            if let Some(piece) = self.held.pop_front() {
                return Some(piece);
            }
        }
        let again = again?;
        self.unanswered.remove(&again);
        Some(again.1)
    }

    /// Pieces that have waited for this time, in nanoseconds; the source's
    /// silence counts for all.
    fn overdue(&mut self, now: Time, patience: u64) -> Vec<u32> {
        let silent = self.away.map_or(now, |away| away.since);
        let pieces = &self.pieces;
        let is_late = |piece: u32| {
            let since = pieces[piece as usize].since.min(silent);
            now.since(since) >= patience
        };
        let mut late: Vec<_> = self
            .held
            .iter()
            .copied()
            .filter(|at| is_late(*at))
            .collect();
        self.held.retain(|piece| !is_late(*piece));
        self.unanswered.retain(|(_, piece)| {
            if is_late(*piece) {
                late.push(*piece);
            }
            !is_late(*piece)
        });
        late
    }

    fn add(&mut self, piece: Piece) -> u32 {
        if let Some(index) = self.free.pop() {
            self.pieces[index as usize] = piece;
            return index;
        }
        self.pieces.push(piece);
        (self.pieces.len() - 1) as u32
    }
}

impl Volume {
    /// Wait for the source no longer: what it does not answer fails, now and
    /// from now on. For a volume that is given up, which has no successor.
    pub const fn give_up_source(&mut self) {
        self.config.source_timeout = Some(Duration::ZERO);
    }

    /// Read bytes of remote blocks for a guest's read.
    pub(crate) fn read_remote<M: Memory>(
        &mut self,
        index: u32,
        from: u64,
        to: u64,
        memory: &mut M,
    ) {
        let slow = self.requests[index as usize];
        let source_end = self.superblock.source_size.clamp(from, to);
        if source_end < to {
            let offset = (source_end - slow.offset) as u32;
            memory.zero_guest(slow.tag, offset, (to - source_end) as u32);
        }
        if from < source_end {
            self.warm(from / BLOCK_SIZE, source_end.div_ceil(BLOCK_SIZE));
            let buffer = Buffer::Guest {
                tag: slow.tag,
                offset: (from - slow.offset) as u32,
            };
            self.read_source(index, from, (source_end - from) as u32, buffer);
        }
    }

    /// Read a remote block that is written in part into its buffer.
    pub(crate) fn copy_up_remote<M: Memory>(
        &mut self,
        index: u32,
        block: u64,
        slot: u16,
        memory: &mut M,
    ) {
        let offset = block * BLOCK_SIZE;
        if offset >= self.superblock.source_size {
            memory.block_mut(slot).fill(0);
        } else {
            self.read_source(index, offset, BLOCK_SIZE as u32, Buffer::Block(slot));
        }
    }

    fn read_source(&mut self, request: u32, offset: u64, length: u32, buffer: Buffer) {
        self.requests[request as usize].pending += 1;
        let piece = self.source.add(Piece {
            request,
            offset,
            length,
            buffer,
            since: self.time(),
            failed: None,
            backoff: FIRST_RETRY,
        });
        if self.source.is_away() {
            self.source.held.push_back(piece);
        } else {
            self.ask_source(piece);
        }
    }

    fn ask_source(&mut self, index: u32) {
        let piece = self.source.pieces[index as usize];
        self.actions.push_back(Action::Read {
            io: io(kind::SOURCE, u64::from(index)),
            device: Device::Source,
            offset: piece.offset,
            length: piece.length,
            buffer: piece.buffer,
        });
    }

    pub(crate) fn source_ended<M: Memory>(
        &mut self,
        now: Time,
        index: u32,
        result: Result<(), Failure>,
        memory: &mut M,
    ) {
        if result != Err(Failure::Unreachable) {
            self.source_answers();
            return self.end_piece(index, result, memory);
        }
        let piece = &mut self.source.pieces[index as usize];
        let known = piece.failed.is_some();
        piece.failed.get_or_insert(now);
        let again = now.after(piece.backoff);
        piece.backoff = (piece.backoff * 2).min(LAST_RETRY);
        self.source.unanswered.insert((again, index));
        if !known {
            self.source_is_away(now);
        }
    }

    fn end_piece<M: Memory>(&mut self, index: u32, result: Result<(), Failure>, memory: &mut M) {
        let request = self.source.pieces[index as usize].request;
        self.source.free.push(index);
        self.data_ended(request, result, memory);
    }

    /// The source has not answered a read of a place of which that was not
    /// known: that may be so with all of it.
    pub(crate) fn source_is_away(&mut self, now: Time) {
        if self.source.away.is_some() {
            return;
        }
        self.source.away = Some(Away {
            since: now,
            requests: Probe::new(now),
            copies: Probe::new(now),
        });
        self.actions.push_back(Action::Notice(Notice::Stalled));
    }

    /// The source has answered a read. What it has left unanswered before it
    /// was away has to do with the place, and is asked for in its own time.
    pub(crate) fn source_answers(&mut self) {
        let Some(away) = self.source.away.take() else {
            return;
        };
        self.actions.push_back(Action::Notice(Notice::Resumed));
        while let Some(piece) = self.source.held.pop_front() {
            self.ask_source(piece);
        }
        let mut again = Vec::new();
        let pieces = &self.source.pieces;
        self.source.unanswered.retain(|(_, piece)| {
            let new = pieces[*piece as usize].failed >= Some(away.since);
            if new {
                again.push(*piece);
            }
            !new
        });
        again.into_iter().for_each(|piece| self.ask_source(piece));
    }

    /// Ask the source again for what it is time for; give up what has waited
    /// for too long, and all of it when a successor will ask.
    pub(crate) fn source_due<M: Memory>(&mut self, now: Time, memory: &mut M) {
        let patience = match self.config.source_timeout {
            _ if self.is_closing() => Some(0),
            timeout => timeout.map(|time| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)),
        };
        if !self.is_closing() {
            while let Some(piece) = self.source.next_due(now) {
                self.ask_source(piece);
            }
        }
        let Some(patience) = patience else {
            return;
        };
        if self.source.waiting() > 0 {
            for piece in self.source.overdue(now, patience) {
                self.end_piece(piece, Err(Failure::Unreachable), memory);
            }
        }
    }
}
