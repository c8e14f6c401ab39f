// SPDX-License-Identifier: Apache-2.0
//! The disks of the hydrator, and the ring through which all of its I/O goes.
//!
//! One thread owns one [`Ring`]. Everything it waits for arrives there: disks,
//! the guest's requests, control connections, timers. A [`Token`] says whose
//! completion it is. What Linux has no way to ask for without waiting, a
//! [`Discarder`] waits for.

mod cover;
mod discarder;
mod disk;
mod memory;
mod polling;
mod ring;

pub use cover::Cover;
pub use discarder::{BLKDISCARD, Discarder};
pub use disk::{Access, Disk, OpenError};
pub use memory::{Memory, MemoryError, Span};
pub use ring::{Event, Owner, PAUSED, Ring, Token, enable};
