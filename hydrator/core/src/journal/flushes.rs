// SPDX-License-Identifier: Apache-2.0

//! Flushes of both disks.
//!
//! One is in flight at a time and covers what has completed when it is
//! submitted; others wait and share the next one. A write may have been answered
//! whose intent has not been written yet. So a guest's flush waits for the blocks
//! of the journal with intents of what had been answered when it came, and for no
//! later ones: it shares a flush only with those that need not wait any longer.

use std::collections::VecDeque;

use crate::context::{Context, Job};
use crate::io::{Device, Failure, Tag};
use crate::rules::Rule;
use crate::units::Sequence;

/// A flush in flight, or one that has ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct Flush {
    /// Intents up to this one are covered.
    pub(super) covers: Sequence,
    /// A settled number that becomes durable with it.
    pub(super) settles: Sequence,
    pub(super) failure: Option<Failure>,
    pending: u32,
}

/// Flushes of both disks.
#[derive(Debug)]
pub(super) struct Flushes {
    /// Flushes that have been submitted, from 1 on.
    pub(super) submitted: u64,
    /// The last of them that has ended.
    pub(super) ended: u64,
    /// The last of them that has succeeded.
    pub(super) succeeded: u64,
    /// Requests that wait, in the order in which they came, each with the block
    /// of the journal that is to be written before; and those of the flush in
    /// flight.
    waiting: VecDeque<(Sequence, Tag)>,
    covered: Vec<Tag>,
    /// The core wants one itself.
    pub(super) wanted: bool,
    current: Option<Flush>,
    /// The metadata were written to since they were flushed.
    pub(super) metadata_dirty: bool,
    /// Writes to the destination in flight over content that is not settled: no
    /// flush may be submitted meanwhile.
    pub(super) second_writes: u32,
    /// The last block of the journal with an intent of such a write: none may be
    /// submitted before it is written.
    pub(super) second_intent: Sequence,
}

impl Flushes {
    pub(super) fn new() -> Self {
        Self {
            submitted: 1,
            ended: 1,
            succeeded: 1,
            waiting: VecDeque::with_capacity(64),
            covered: Vec::with_capacity(64),
            wanted: false,
            current: None,
            metadata_dirty: false,
            second_writes: 0,
            second_intent: Sequence(0),
        }
    }

    /// The guest wants one, after blocks of the journal up to this one.
    pub(super) fn request(&mut self, tag: Tag, after: Sequence) {
        self.waiting.push_back((after, tag));
    }

    /// A flush is to be submitted.
    pub(super) fn is_wanted(&self) -> bool {
        self.wanted || !self.waiting.is_empty()
    }

    pub(super) const fn is_in_flight(&self) -> bool {
        self.current.is_some()
    }

    pub(super) fn is_idle(&self) -> bool {
        self.current.is_none() && !self.is_wanted()
    }

    /// Whether one is to be submitted, and may be, when blocks of the journal up
    /// to this one are written.
    pub(super) fn is_due(&self, written: Sequence, cx: &Context) -> bool {
        let next = self.waiting.front();
        let wanted = self.wanted || next.is_some_and(|(after, _)| *after <= written);
        let ended = self.second_writes == 0 || !cx.rules.keep(Rule::Drain);
        let intended = self.second_intent <= written || !cx.rules.keep(Rule::DrainIntents);
        self.current.is_none() && wanted && ended && intended
    }

    /// There will be none: nothing is recorded any more.
    pub(super) fn give_up(&mut self, cx: &mut Context) {
        self.wanted = false;
        while let Some((_, tag)) = self.waiting.pop_front() {
            cx.answer(tag, Err(Failure::Io));
        }
    }

    /// Submit one. It has ended if no device needs it.
    pub(super) fn submit(
        &mut self,
        covers: Sequence,
        settles: Sequence,
        written: Sequence,
        cx: &mut Context,
    ) -> Option<Flush> {
        let ready = self.waiting.partition_point(|(after, _)| *after <= written);
        let ready = self.waiting.drain(..ready);
        self.covered.extend(ready.map(|(_, tag)| tag));
        let internal = self.covered.is_empty();
        self.wanted = false;
        self.submitted += 1;
        let devices = [
            (Device::Data, internal || cx.rules.keep(Rule::FlushData)),
            (
                Device::Metadata,
                self.metadata_dirty && (internal || cx.rules.keep(Rule::FlushMetadata)),
            ),
        ];
        self.metadata_dirty = false;
        let mut flush = Flush {
            covers,
            settles,
            failure: None,
            pending: 0,
        };
        for (device, _) in devices.into_iter().filter(|(_, wanted)| *wanted) {
            flush.pending += 1;
            cx.flush(Job::Flush(device), device);
        }
        self.current = Some(flush);
        self.take_ended()
    }

    /// A device has flushed, or not; the flush, if it was the last one.
    pub(super) fn device_ended(
        &mut self,
        device: Device,
        result: Result<(), Failure>,
        cx: &mut Context,
    ) -> Option<Flush> {
        let flush = self.current.as_mut()?;
        flush.pending -= 1;
        if let Err(failure) = result {
            flush.failure = Some(failure);
            if cx.rules.keep(Rule::FailedFlushIsFinal) {
                cx.fail(device);
            }
        }
        self.take_ended()
    }

    fn take_ended(&mut self) -> Option<Flush> {
        let flush = self.current.take_if(|flush| flush.pending == 0)?;
        self.ended = self.submitted;
        if flush.failure.is_none() {
            self.succeeded = self.submitted;
        }
        Some(flush)
    }

    /// Answer the guest's requests that this flush was for.
    pub(super) fn answer(&mut self, flush: &Flush, cx: &mut Context) {
        if flush.failure.is_some() && !cx.rules.keep(Rule::FailedFlushIsFinal) {
            for tag in self.covered.drain(..) {
                self.waiting.push_front((Sequence(0), tag));
            }
        }
        for tag in self.covered.drain(..) {
            cx.answer(tag, flush.failure.map_or(Ok(()), Err));
        }
    }
}
