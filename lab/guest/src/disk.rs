// SPDX-License-Identifier: Apache-2.0
//! A disk that is in use: as many zones as it has whole gibibytes.

use crate::zone::{self, Device, Trouble, Zone};

/// A disk, and how far its user is.
pub struct Disk<D> {
    device: D,
    zones: Vec<Zone>,
    turns: usize,
}

impl<D: Device> Disk<D> {
    /// A disk of which nothing is used yet.
    pub fn new(device: D) -> Self {
        Self {
            device,
            zones: Vec::new(),
            turns: 0,
        }
    }

    /// Use all of a disk of so many bytes; tells for each new zone how many
    /// stamps were on it, `None` where there was nothing of ours.
    pub fn use_all(
        &mut self,
        size: u64,
        identity: impl Fn() -> u64,
    ) -> Result<Vec<Option<u64>>, Trouble> {
        let mut before = Vec::new();
        for number in self.zones.len() as u64..size / zone::SIZE {
            let start = number * zone::SIZE;
            let found = Zone::found(&self.device, start)?;
            before.push(found.as_ref().map(Zone::count));
            self.zones.push(match found {
                Some(zone) => zone,
                None => Zone::begun(&self.device, start, identity())?,
            });
        }
        Ok(before)
    }

    /// Write a stamp in place of the oldest, which is verified; zones take turns.
    pub fn step(&mut self) -> Result<(), Trouble> {
        let zones = self.zones.len();
        if let Some(zone) = self.zones.get_mut(self.turns % zones.max(1)) {
            zone.write_next(&self.device)?;
            self.turns += 1;
        }
        Ok(())
    }

    /// Discard all that has no place for a stamp, as fstrim would.
    pub fn trim(&self) -> Result<(), Trouble> {
        for zone in &self.zones {
            zone.trim(&self.device)?;
        }
        Ok(())
    }

    /// Stamps on the disk, those from before this life among them.
    pub fn stamps(&self) -> u64 {
        self.zones.iter().map(Zone::count).sum()
    }
}

#[cfg(test)]
mod tests;
