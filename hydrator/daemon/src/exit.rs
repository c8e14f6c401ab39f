// SPDX-License-Identifier: Apache-2.0
//! Exit statuses; 1 is a failure that is told on stderr, and 2 wrong arguments.

/// Done; of a serving process: the move is ended, the device is removed.
pub const DONE: u8 = 0;
/// The serving process has left its device to a successor, after SIGTERM.
pub const DEPARTED: u8 = 3;
/// `run --detach`: the device is not usable yet, and work on it goes on.
pub const NOT_YET: u8 = 4;
/// Another supervisor has the runtime directory.
pub const SUPERVISED: u8 = 5;
