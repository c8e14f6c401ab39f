// SPDX-License-Identifier: Apache-2.0

//! Reads from the source for guest requests, and a source that does not
//! answer.

use std::collections::{BTreeSet, VecDeque};

use slab::Slab;

use crate::context::{Context, Job};
use crate::io::{Buffer, Device, Failure, Notice, Time};
use crate::units::Bytes;

/// How soon what was not answered is asked for again, in nanoseconds.
pub(crate) const FIRST_RETRY: u64 = 100_000_000;
const LAST_RETRY: u64 = 5_000_000_000;

/// A piece of a guest request that is read from the source.
#[derive(Clone, Copy, Debug)]
struct Piece {
    request: u32,
    bytes: Bytes,
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
    pieces: Slab<Piece>,
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

    /// Read bytes of remote blocks for a request that could not be passed
    /// through.
    pub(crate) fn read(&mut self, request: u32, bytes: Bytes, buffer: Buffer, cx: &mut Context) {
        let piece = self.pieces.insert(Piece {
            request,
            bytes,
            buffer,
            since: cx.now,
            failed: None,
            backoff: FIRST_RETRY,
        }) as u32;
        if self.is_away() {
            self.held.push_back(piece);
        } else {
            self.ask(piece, cx);
        }
    }

    fn ask(&self, index: u32, cx: &mut Context) {
        let piece = self.pieces[index as usize];
        cx.read(
            Job::Source(index),
            Device::Source,
            piece.bytes,
            piece.buffer,
        );
    }

    /// A piece was read, or not; the request that it is of, if that is the end
    /// of it.
    pub(crate) fn ended(
        &mut self,
        index: u32,
        result: Result<(), Failure>,
        cx: &mut Context,
    ) -> Option<u32> {
        if result != Err(Failure::Unreachable) {
            self.answers(cx);
            return Some(self.end_piece(index));
        }
        let piece = &mut self.pieces[index as usize];
        let known = piece.failed.is_some();
        piece.failed.get_or_insert(cx.now);
        let again = cx.now.after(piece.backoff);
        piece.backoff = (piece.backoff * 2).min(LAST_RETRY);
        self.unanswered.insert((again, index));
        if !known {
            self.went_away(cx);
        }
        None
    }

    /// Nothing more comes of a piece; the request that it is of.
    pub(crate) fn end_piece(&mut self, index: u32) -> u32 {
        self.pieces.remove(index as usize).request
    }

    /// The source has not answered a read of a place of which that was not
    /// known: that may be so with all of it.
    pub(crate) fn went_away(&mut self, cx: &mut Context) {
        if self.away.is_some() {
            return;
        }
        self.away = Some(Away {
            since: cx.now,
            requests: Probe::new(cx.now),
            copies: Probe::new(cx.now),
        });
        cx.notify(Notice::Stalled);
    }

    /// The source has answered a read. What it has left unanswered before it
    /// was away has to do with the place, and is asked for in its own time.
    pub(crate) fn answers(&mut self, cx: &mut Context) {
        let Some(away) = self.away.take() else {
            return;
        };
        cx.notify(Notice::Resumed);
        while let Some(piece) = self.held.pop_front() {
            self.ask(piece, cx);
        }
        let mut again = Vec::new();
        let pieces = &self.pieces;
        self.unanswered.retain(|(_, piece)| {
            let new = pieces[*piece as usize].failed >= Some(away.since);
            if new {
                again.push(*piece);
            }
            !new
        });
        again.into_iter().for_each(|piece| self.ask(piece, cx));
    }

    /// Ask the source again for what it is time for; the pieces to give up:
    /// those that have waited for too long, and all of them when a successor
    /// will ask.
    pub(crate) fn due(&mut self, cx: &mut Context) -> Vec<u32> {
        if self.waiting() == 0 {
            return Vec::new();
        }
        let patience = match cx.config.source_timeout {
            _ if cx.closing => Some(0),
            timeout => timeout.map(|time| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)),
        };
        if !cx.closing {
            while let Some(piece) = self.next_due(cx.now) {
                self.ask(piece, cx);
            }
        }
        patience.map_or_else(Vec::new, |patience| self.overdue(cx.now, patience))
    }
}
