// SPDX-License-Identifier: Apache-2.0
//! A virtual disk with a volatile write cache, for power cuts in the lab.
//!
//! A node's kernel reaches it as a vhost-user-blk device. From the bottom up:
//!
//! - [`loss`] decides by a seed what a power cut makes of unflushed writes;
//! - [`cache`] is the disk: a file, and what was not flushed to it;
//! - [`disk`] shares it between the node and who controls it, and gives it a
//!   power switch;
//! - [`request`] carries out the requests of virtio-blk;
//! - [`dialect`] translates what the kernel says otherwise than others;
//! - [`session`] is one connection of a node's kernel;
//! - [`control`] is the socket on which the lab cuts the power.

pub mod cache;
pub mod control;
pub mod dialect;
pub mod disk;
pub mod loss;
pub mod request;
pub mod session;
