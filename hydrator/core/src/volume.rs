// SPDX-License-Identifier: Apache-2.0

//! The state machine.

use std::collections::VecDeque;

use crate::{Action, Config, Failure, Io, Memory, OpenError, Rate, Request, Time};

/// A moving volume.
#[derive(Debug)]
pub struct Volume {
    config: Config,
    actions: VecDeque<Action>,
}

/// How far the move is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Size of the volume, in bytes.
    pub size: u64,
    /// Still only on the source, in bytes.
    pub remote: u64,
    /// Copied from the source since the volume was opened, in bytes.
    pub copied: u64,
    /// Of these, zeros that were not written, in bytes.
    pub zeros: u64,
    /// What hydration may copy at present, in bytes per second; `None` is
    /// without limit.
    pub rate: Option<u64>,
    /// Blocks that are local but not settled.
    pub unsettled: u64,
    /// Blocks of the journal in use.
    pub journal_used: u64,
    /// Length of the journal, in blocks.
    pub journal_blocks: u64,
    /// Bytes of guest writes to blocks that were not settled.
    pub written: u64,
    /// Bytes written to the metadata device.
    pub metadata_written: u64,
    /// Guest requests that wait for another request, the journal or the source.
    pub waiting: u64,
    /// Blocks of the source that cannot be read.
    pub bad: u64,
    /// Hydration may run: the source is immutable.
    pub started: bool,
    /// The source does not answer.
    pub stalled: bool,
    /// Nothing is settled any more, see [`Notice::Broken`].
    pub broken: bool,
    /// See [`Notice::Done`].
    pub done: bool,
}

/// A region that was copied in one piece and not written since.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copied {
    /// Where it begins, in bytes.
    pub offset: u64,
    /// Its length, in bytes.
    pub length: u32,
    /// CRC-32C of what was read from the source.
    pub crc32c: u32,
}

impl Volume {
    /// Write new metadata for a move that begins, and open the volume: all of
    /// it is remote.
    ///
    /// # Errors
    /// A figure of the configuration that cannot work.
    pub fn format(config: Config) -> Result<Self, OpenError> {
        Self::open(config)
    }

    /// Read the metadata of a move, recover what it was doing, and open the
    /// volume: [`Notice::Open`] or [`Notice::OpenFailed`] tells the end of it.
    ///
    /// # Errors
    /// A figure of the configuration that cannot work.
    pub fn open(config: Config) -> Result<Self, OpenError> {
        Ok(Self {
            config,
            actions: VecDeque::new(),
        })
    }

    /// A guest's request. Its [`Action::Complete`] follows when it has ended.
    pub fn request<M: Memory>(&mut self, now: Time, request: Request, memory: &mut M) {
        let _ = (now, memory);
        self.actions.push_back(Action::Complete {
            tag: request.tag,
            result: Err(Failure::NotOpen),
        });
    }

    /// An operation has ended.
    pub fn completed<M: Memory>(
        &mut self,
        now: Time,
        io: Io,
        result: Result<(), Failure>,
        memory: &mut M,
    ) {
        let _ = (now, io, result, memory);
    }

    /// When [`Volume::wake`] is to be called, if nothing happens before.
    #[must_use]
    pub fn wake_at(&self) -> Option<Time> {
        None
    }

    /// The time has come.
    pub fn wake<M: Memory>(&mut self, now: Time, memory: &mut M) {
        let _ = (now, memory);
    }

    /// End a batch, and take what is to be done.
    pub fn actions<M: Memory>(&mut self, now: Time, memory: &mut M, sink: impl FnMut(Action)) {
        let _ = (now, memory);
        self.actions.drain(..).for_each(sink);
    }

    /// Whether I/O there goes straight to the destination: everything is
    /// settled. Once true, it stays so.
    #[must_use]
    pub fn passes_through(&self, offset: u64, length: u64) -> bool {
        let _ = (offset, length);
        false
    }

    /// The source is immutable from now on: hydrate. Ends with
    /// [`Notice::Started`]. It is remembered when the volume is opened anew.
    pub fn start(&mut self) {}

    /// How fast to copy from now on.
    pub fn set_rate(&mut self, rate: Rate) {
        self.config.rate = rate;
    }

    /// The volume has grown to `size` bytes, the metadata device to
    /// `metadata_size`. What is new reads as zeros. Ends with
    /// [`Notice::Extended`].
    ///
    /// # Errors
    /// If the volume would shrink, or the metadata device is too small.
    pub fn extend(&mut self, size: u64, metadata_size: u64) -> Result<(), OpenError> {
        let _ = (size, metadata_size);
        Ok(())
    }

    /// Ask the source again at once, also for what it could not read.
    pub fn retry_source(&mut self) {}

    /// Take no more requests, end what is in flight, record it. Ends with
    /// [`Notice::Closed`].
    pub fn close(&mut self) {}

    /// How far the move is.
    #[must_use]
    pub fn progress(&self) -> Progress {
        Progress::default()
    }

    /// What is known of region `index`: if it was copied in one piece since
    /// the volume was opened and not written to since. For verification: read
    /// D and S there, and compare; if they differ, ask again before you
    /// believe it, the guest may have written meanwhile.
    #[must_use]
    pub fn copied(&self, index: u64) -> Option<Copied> {
        let _ = index;
        None
    }

    /// Blocks of the source that cannot be read, by their offset in bytes.
    pub fn bad_blocks(&self) -> impl Iterator<Item = u64> {
        core::iter::empty()
    }
}
