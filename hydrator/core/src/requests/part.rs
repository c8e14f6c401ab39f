// SPDX-License-Identifier: Apache-2.0

//! The part of a request that is under way.

use crate::context::{Context, Job};
use crate::io::{Buffer, Failure, Tag};
use crate::units::{Blocks, Bytes, Offset};

/// The part of a request that is under way.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    /// The request's place among those that could not be passed through.
    pub(super) key: u32,
    pub(super) tag: Tag,
    /// It has content of the guest's; else it is zeroed.
    pub(super) is_write: bool,
    pub(super) fua: bool,
    /// Where the request begins.
    pub(super) begin: Offset,
    /// What of it is under way.
    pub(super) bytes: Bytes,
    /// Operations in flight.
    pub(super) pending: u32,
    /// Why it failed, if it has.
    pub(super) failure: Option<Failure>,
}

impl Part {
    /// Whose its operations are.
    pub(super) const fn job(&self) -> Job {
        Job::Request(self.key)
    }

    /// The blocks that it lies in.
    pub(super) const fn blocks(&self) -> Blocks {
        self.bytes.blocks()
    }

    /// Where the guest has this place of the volume.
    pub(super) fn offset_of(&self, at: Offset) -> u32 {
        (at - self.begin) as u32
    }

    /// The same, to read to or write from.
    pub(super) fn buffer_of(&self, at: Offset) -> Buffer {
        Buffer::Guest {
            tag: self.tag,
            offset: self.offset_of(at),
        }
    }

    /// It fails, and has claimed nothing.
    pub(super) fn refuse<S>(&mut self, failure: Failure, cx: &mut Context) -> Next<S> {
        self.failure = Some(failure);
        cx.changed = true;
        Next::Ended
    }
}

/// What has come of a step of a part.
#[derive(Clone, Copy, Debug)]
pub(super) enum Next<S> {
    /// It must wait for something to change.
    Wait(S),
    /// Operations are in flight; the next step is when all have ended.
    Flight(S),
    /// It has ended, and holds nothing any more.
    Ended,
}

impl<S> Next<S> {
    /// The same for what the state is a part of.
    pub(super) fn map<T>(self, of: impl FnOnce(S) -> T) -> Next<T> {
        match self {
            Self::Wait(state) => Next::Wait(of(state)),
            Self::Flight(state) => Next::Flight(of(state)),
            Self::Ended => Next::Ended,
        }
    }
}
