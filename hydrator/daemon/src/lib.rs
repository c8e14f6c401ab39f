// SPDX-License-Identifier: Apache-2.0
//! `localstor-hydrator`: serves a volume while its data moves to this node.
//!
//! [`engine`] carries out what the core decides, [`serve`] is the loop that
//! connects it with a frontend and with who controls it, and [`protocol`] is
//! what these say. [`launcher`] starts a [`supervisor`] in the background, which
//! starts the serving process as often as it takes. [`offline`] reads the
//! metadata of a move that nobody serves. What the guest is answered by before it is
//! on a disk is in a [`spool`].

pub mod arguments;
pub mod client;
mod confinement;
mod control;
mod devices;
mod engine;
pub mod exit;
pub mod launcher;
pub mod leftover;
mod marks;
pub mod offline;
pub mod protocol;
mod rate;
mod runtime;
pub mod serve;
mod spool;
pub mod supervisor;

/// What the line of an error begins with, on stderr.
pub const ERROR_PREFIX: &str = "localstor-hydrator: ";
