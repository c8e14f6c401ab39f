// SPDX-License-Identifier: Apache-2.0
//! The guest's side of the hydrator: how a block device is shown to it.
//!
//! A [`Frontend`] turns what arrives from the guest into requests and takes
//! their results back. It knows nothing of disks; the engine knows nothing of
//! frontends.

mod block;
mod door;
pub mod linear;
pub mod nbd;
pub mod ublk;
pub mod vhost;

pub use block::{Arrival, Frontend, FrontendError, Geometry, Outcome, Stage};
