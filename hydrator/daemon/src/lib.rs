// SPDX-License-Identifier: Apache-2.0
//! `localstor-hydrator`: serves a volume while its data moves to this node.
//!
//! [`engine`] carries out what the core decides, [`serve`] is the loop that
//! connects it with a frontend and with who controls it, and [`protocol`] is
//! what these say. [`offline`] reads the metadata of a move that nobody serves.

pub mod arguments;
pub mod client;
mod control;
mod engine;
pub mod offline;
pub mod protocol;
mod rate;
mod runtime;
pub mod serve;
