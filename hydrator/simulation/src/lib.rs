// SPDX-License-Identifier: Apache-2.0

//! The core over simulated disks that lose, keep or tear what was not flushed.
//!
//! A [`walk`] plays a guest on a small volume, with disks that complete in any
//! order, and crashes it again and again: the helper alone, or the power. What
//! recovery finds is compared with a [`model`] that knows what a guest may find
//! on its volume. The model knows nothing of journals and bitmaps; it has the
//! three rules that a user has:
//!
//! * durability: what was flushed, or what is newer;
//! * no invention: the source's content or a write; a block that was not
//!   settled is never a mix;
//! * progress: every request ends, and so does the move.

pub mod disk;
pub mod machine;
pub mod model;
pub mod walk;
