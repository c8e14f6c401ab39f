// SPDX-License-Identifier: Apache-2.0
//! The only program of an instance in the lab.
//!
//! It writes numbered stamps on every disk that it sees, flushes them, and reads
//! them again for as long as it lives and whenever it boots.  A stamp that is
//! not what it must be ends it with a panic of its kernel.

pub mod arrival;
pub mod block;
pub mod disk;
pub mod report;
pub mod zone;
