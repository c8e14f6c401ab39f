// SPDX-License-Identifier: Apache-2.0
//! What a guest says on its console: a JSON object a line.

use serde::Serialize;

/// Something that has happened to a disk.
#[derive(Serialize)]
#[serde(tag = "event", rename_all = "lowercase")]
pub enum Report<'a> {
    /// It is used from now on, and how many stamps each zone had.
    Found {
        /// The kernel's name.
        disk: &'a str,
        /// What the host calls it.
        serial: &'a str,
        /// Bytes.
        size: u64,
        /// `null` for a zone without any.
        before: &'a [Option<u64>],
        /// When, in seconds by the guest's clock: no other life says the same.
        at: u64,
    },
    /// It has another size.
    Resized {
        /// The kernel's name.
        disk: &'a str,
        /// What the host calls it.
        serial: &'a str,
        /// Bytes.
        size: u64,
    },
    /// It was told of all that is not needed on it.
    Trimmed {
        /// The kernel's name.
        disk: &'a str,
        /// What the host calls it.
        serial: &'a str,
    },
    /// All is as it should be, about every second.
    Alive {
        /// The kernel's name.
        disk: &'a str,
        /// What the host calls it.
        serial: &'a str,
        /// That were written until now, before this life, too.
        stamps: u64,
    },
    /// It was taken away.
    Gone {
        /// The kernel's name.
        disk: &'a str,
        /// What the host called it.
        serial: &'a str,
    },
    /// Nobody knows any more what it must hold: the end, and not by the disk.
    Forgotten {
        /// The kernel's name.
        disk: &'a str,
        /// What the host calls it.
        serial: &'a str,
        /// In words.
        why: &'a str,
    },
    /// It does not hold what it must, or fails: the end.
    Wrong {
        /// The kernel's name.
        disk: &'a str,
        /// What the host calls it.
        serial: &'a str,
        /// In words.
        why: &'a str,
    },
}

impl Report<'_> {
    /// The line that says so.
    pub fn line(&self) -> String {
        // On a line of its own, whatever the kernel has begun to say.
        format!("\n{}\n", serde_json::to_string(self).unwrap_or_default())
    }
}

#[cfg(test)]
mod tests;
