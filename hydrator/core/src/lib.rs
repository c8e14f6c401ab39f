// SPDX-License-Identifier: Apache-2.0

//! The core of `localstor-hydrator`: a moving volume as a state machine.
//!
//! A moving volume has three devices: the destination *D* ([`Device::Data`]),
//! the metadata *M* ([`Device::Metadata`]) and the source *S*
//! ([`Device::Source`]). The core decides what is read and written where and
//! when; it does none of it. It has no thread, no clock and no file: the caller
//! feeds it with guest requests, completions and the time, and carries out the
//! [`Action`]s that it hands out:
//!
//! ```text
//! loop {
//!     volume.request(now, request, &mut memory);         // for each guest request
//!     volume.completed(now, io, result, &mut memory);    // for each completion
//!     volume.actions(now, &mut memory, |action| ...);    // once for all of these,
//!                                                         // or when `wake_at` has come
//! }
//! ```
//!
//! Everything that is fed in before one call of [`Volume::actions`] is a batch:
//! its intents share a block of the journal.
//!
//! **Before a volume is opened** whatever an earlier process has sent to D and
//! M must have ended: recovery compares what is on D, and a write that lands
//! after that breaks it. A lock (`flock`) on the very descriptors that D and M
//! are written through does it, as writes in flight keep it until they end.

mod config;
mod context;
mod copier;
pub mod format;
mod io;
mod journal;
mod opening;
mod pace;
mod part;
mod parts;
mod progress;
mod regions;
mod requests;
mod rules;
mod source;
mod superblocks;
mod units;
mod volume;

pub use config::{Config, Rate, Verify};
pub use format::superblock::metadata_size;
pub use io::{
    Action, Buffer, Device, Failure, Io, Memory, Notice, OpenError, Operation, Request, Tag, Time,
};
pub use part::{NoPart, Part};
pub use progress::Progress;
#[cfg(feature = "mutants")]
pub use rules::Rule;
pub use units::BLOCK_SIZE;
pub use volume::Volume;
