// SPDX-License-Identifier: Apache-2.0

//! How far a move is.

/// How far the move is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Size of the volume, in bytes.
    pub size: u64,
    /// Still only on the source, in bytes.
    pub remote: u64,
    /// Copied from the source since the volume was opened, in bytes, and
    /// compared where that is to be done.
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
    /// Blocks that were to be copied and that the source does not answer: they
    /// are asked for again.
    pub unanswered: u64,
    /// Of what was copied, compared with the source, in bytes.
    pub verified: u64,
    /// Blocks that were found to differ, each time they were.
    pub differences: u64,
    /// Blocks that differ although they were copied again; they are remote.
    pub differing: u64,
    /// Where the first of these is, in bytes.
    pub first_differing: Option<u64>,
    /// Blocks of which it is not known what they hold, as the destination could
    /// not read them when the volume was opened.
    pub unreadable: u64,
    /// Where the first of these is, in bytes.
    pub first_unreadable: Option<u64>,
    /// Hydration may run: the source is immutable.
    pub started: bool,
    /// The source does not answer, or not everything.
    pub stalled: bool,
    /// Nothing is settled any more, see [`Notice::Broken`](crate::Notice::Broken).
    pub broken: bool,
    /// See [`Notice::Done`](crate::Notice::Done).
    pub done: bool,
}
