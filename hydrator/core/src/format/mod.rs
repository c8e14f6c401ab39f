// SPDX-License-Identifier: Apache-2.0

//! What lies on the metadata device: `FORMAT.md` has the layout.
//!
//! Numbers of blocks are plain here: what is read from a disk is not yet known
//! to be a block of the volume.

pub mod bitmap;
mod bytes;
pub mod copy;
pub mod journal;
pub mod superblock;
