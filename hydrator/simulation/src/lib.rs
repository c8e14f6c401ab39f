// SPDX-License-Identifier: Apache-2.0

//! The core over simulated disks that lose, keep or tear what was not flushed.
//!
//! A [`walk`] plays a guest on a small volume, with disks that complete in any
//! order, and crashes it again and again. What is there afterwards is compared
//! with a [`model`] that knows what a guest may find on its volume. The model
//! knows nothing of journals and bitmaps; it has the rules that a user has.
//!
//! After a power cut:
//!
//! * durability: what was flushed, or what is newer;
//! * no invention: the source's content or a write; a block that was not
//!   settled is never a mix.
//!
//! After the death of the helper alone, which is no power cut: the kernel
//! completes what it was given, what the helper still kept to itself is gone,
//! and the guest lives on. It sends again what was not answered, in any order
//! and between new requests, and reads at once:
//!
//! * what was answered is there, or what is newer, and nothing is older than
//!   what was read before; what a later power cut may take is what it might
//!   have taken without the helper's death.
//!
//! At all times:
//!
//! * progress: every request ends, and so does the move.

pub mod copy;
pub mod disk;
pub mod machine;
pub mod model;
pub mod walk;
