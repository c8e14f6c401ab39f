// SPDX-License-Identifier: Apache-2.0

//! Reads from the source for guest requests, and a source that does not
//! answer.

use std::collections::VecDeque;

use crate::volume::{io, kind};
use crate::{Action, BLOCK_SIZE, Buffer, Device, Failure, Memory, Notice, Time, Volume};

const FIRST_RETRY: u64 = 100_000_000;
const LAST_RETRY: u64 = 5_000_000_000;

/// A piece of a guest request that is read from the source.
#[derive(Clone, Copy, Debug)]
struct Piece {
    request: u32,
    offset: u64,
    length: u32,
    buffer: Buffer,
}

/// Since when the source does not answer, and when to ask it again.
#[derive(Clone, Copy, Debug)]
struct Away {
    since: Time,
    retry_at: Time,
    backoff: u64,
}

/// What is being read from the source for guest requests.
#[derive(Debug, Default)]
pub(crate) struct Source {
    pieces: Vec<Piece>,
    free: Vec<u32>,
    /// Pieces that wait for a source that does not answer.
    waiting: VecDeque<u32>,
    away: Option<Away>,
}

impl Source {
    pub(crate) const fn is_away(&self) -> bool {
        self.away.is_some()
    }

    pub(crate) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    pub(crate) fn wake_at(&self) -> Option<Time> {
        self.away.map(|away| away.retry_at)
    }

    pub(crate) const fn due_at_once(&mut self) {
        if let Some(away) = &mut self.away {
            away.retry_at = Time(0);
            away.backoff = FIRST_RETRY;
        }
    }

    /// Whether the source may be asked for a copy: one at a time while it does
    /// not answer.
    pub(crate) fn may_copy(&mut self, now: Time) -> bool {
        match &mut self.away {
            None => true,
            Some(away) if now >= away.retry_at && self.waiting.is_empty() => {
                away.backoff = (away.backoff * 2).min(LAST_RETRY);
                away.retry_at = now.after(away.backoff);
                true
            }
            Some(_) => false,
        }
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
        });
        if self.source.away.is_some() {
            self.source.waiting.push_back(piece);
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
        if result == Err(Failure::Unreachable) {
            self.source_is_away(now);
            if self.is_closing() {
                self.end_piece(index, result, memory);
            } else {
                self.source.waiting.push_back(index);
            }
            return;
        }
        self.source_answers();
        self.end_piece(index, result, memory);
    }

    fn end_piece<M: Memory>(&mut self, index: u32, result: Result<(), Failure>, memory: &mut M) {
        let request = self.source.pieces[index as usize].request;
        self.source.free.push(index);
        self.data_ended(request, result, memory);
    }

    /// The source has not answered a read.
    pub(crate) fn source_is_away(&mut self, now: Time) {
        if self.source.away.is_some() {
            return;
        }
        self.source.away = Some(Away {
            since: now,
            retry_at: now.after(FIRST_RETRY),
            backoff: FIRST_RETRY,
        });
        self.actions.push_back(Action::Notice(Notice::Stalled));
    }

    /// The source has answered a read.
    pub(crate) fn source_answers(&mut self) {
        if self.source.away.take().is_some() {
            self.actions.push_back(Action::Notice(Notice::Resumed));
            while let Some(piece) = self.source.waiting.pop_front() {
                self.ask_source(piece);
            }
        }
    }

    /// Ask a source that does not answer again, if it is time; give up what
    /// has waited for too long.
    pub(crate) fn source_due<M: Memory>(&mut self, now: Time, memory: &mut M) {
        let closing = self.is_closing();
        let Some(away) = &mut self.source.away else {
            return;
        };
        let due = now >= away.retry_at;
        let patience = self
            .config
            .source_timeout
            .map(|timeout| u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX));
        if closing || patience.is_some_and(|patience| now.since(away.since) >= patience) {
            // One of them asks the source, the others are not kept waiting.
            let kept = usize::from(due && !closing);
            while self.source.waiting.len() > kept {
                if let Some(piece) = self.source.waiting.pop_back() {
                    self.end_piece(piece, Err(Failure::Unreachable), memory);
                }
            }
        }
        if !due {
            return;
        }
        if let (Some(away), Some(piece)) = (&mut self.source.away, self.source.waiting.pop_front())
        {
            away.backoff = (away.backoff * 2).min(LAST_RETRY);
            away.retry_at = now.after(away.backoff);
            self.ask_source(piece);
        }
    }
}
