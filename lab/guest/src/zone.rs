// SPDX-License-Identifier: Apache-2.0
//! A gibibyte of a disk: a header, and stamps all over it.
//!
//! A stamp is written and flushed, and then the header says its number.  So
//! whoever finds a header knows of every slot which stamp it must hold, but for
//! two: the next stamp may have been flushed without the header that follows it,
//! and the one after that may have been on its way.  A power cut tears what is on
//! its way, a stamp or a header, into sectors.
//! Zones know nothing of each other: a disk that grows has some more of them.

use std::io;

use crate::block::{self, Block, Content, Kind};

/// Bytes of a zone.
pub const SIZE: u64 = 1 << 30;
/// Stamps that a zone has place for.
pub const SLOTS: u64 = 256;
const STRIDE: u64 = SIZE / SLOTS;
/// The way from one slot to the next that is written: it meets all of them, and
/// never two neighbours one after the other.
const STEP: u64 = 101;

/// What zones lie on.
pub trait Device {
    /// Read a block at an offset in bytes.
    fn read(&self, offset: u64) -> io::Result<Block>;
    /// Write a block at an offset in bytes.
    fn write(&self, offset: u64, block: &Block) -> io::Result<()>;
    /// Make durable what was written.
    fn flush(&self) -> io::Result<()>;
    /// Say that so many bytes at an offset are not needed.
    fn discard(&self, offset: u64, length: u64) -> io::Result<()>;
}

/// Why a zone can't be used any more.
#[derive(Debug)]
pub enum Trouble {
    /// The disk has failed, or is gone.
    Disk(io::Error),
    /// Something else was read than what was written.
    Wrong(String),
    /// So it was, but by what is left of memory.
    Memory(String),
}

impl From<io::Error> for Trouble {
    fn from(error: io::Error) -> Self {
        Self::Disk(error)
    }
}

/// A zone, and what it must hold.
#[derive(Debug)]
pub struct Zone {
    start: u64,
    identity: u64,
    count: u64,
    /// It says the count, too, and has a page of memory to itself: one of the two
    /// may be lost where a guest is moved by an emulator that forgets to send what
    /// has changed.
    header: Box<Block>,
}

impl Zone {
    /// What was on a disk before, verified in every slot; `None` if nothing of
    /// ours begins at this offset.
    pub fn found(device: &impl Device, start: u64) -> Result<Option<Self>, Trouble> {
        let block = device.read(start)?;
        let Some(header) = Content::newest_of(&block) else {
            return Ok(None);
        };
        if header.kind != Kind::Header || header.offset != start {
            return Err(Trouble::Wrong(format!("{header} is at {start}")));
        }
        let mut zone = Self::counted(start, header.identity, header.number);
        for _not_known in 0..2 {
            let next = zone.stamp(zone.count + 1);
            let before = zone
                .newest_in(slot_of(next.number))
                .map(|number| zone.stamp(number).block());
            let found = device.read(next.offset)?;
            if !found.has_some_of(&next.block(), before.as_ref()) {
                break;
            }
            zone = Self::counted(start, zone.identity, zone.count + 1);
            if found != next.block() {
                device.write(next.offset, &next.block())?;
                break;
            }
        }
        for slot in 0..SLOTS {
            zone.verify(device, slot)?;
        }
        // The next header may be torn, and is known by the one before it.
        if block != *zone.header {
            device.flush()?;
            zone.write_header(device)?;
            device.flush()?;
        }
        Ok(Some(zone))
    }

    /// A zone that begins now.
    pub fn begun(device: &impl Device, start: u64, identity: u64) -> Result<Self, Trouble> {
        let zone = Self::counted(start, identity, 0);
        zone.write_header(device)?;
        device.flush()?;
        Ok(zone)
    }

    fn counted(start: u64, identity: u64, count: u64) -> Self {
        Self {
            start,
            identity,
            count,
            header: Box::new(header(start, identity, count)),
        }
    }

    /// How many stamps it has seen.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Verify the oldest stamp, and write the next in its place; it is durable
    /// then.
    pub fn write_next(&mut self, device: &impl Device) -> Result<(), Trouble> {
        let stamp = self.stamp(self.count + 1);
        self.verify(device, slot_of(stamp.number))?;
        device.write(stamp.offset, &stamp.block())?;
        device.flush()?;
        self.count += 1;
        *self.header = header(self.start, self.identity, self.count);
        self.write_header(device)
    }

    /// Discard all that lies between the places of its stamps.
    pub fn trim(&self, device: &impl Device) -> io::Result<()> {
        // The header and the stamp of the first slot are two blocks.
        let used = 2 * block::SIZE as u64;
        (0..SLOTS)
            .try_for_each(|slot| device.discard(self.start + slot * STRIDE + used, STRIDE - used))
    }

    /// Read a slot, and compare it with what was written last.
    fn verify(&self, device: &impl Device, slot: u64) -> Result<(), Trouble> {
        let Some(number) = self.newest_in(slot) else {
            return Ok(());
        };
        let expected = self.stamp(number);
        let found = device.read(expected.offset)?;
        if found == expected.block() {
            return Ok(());
        }
        if *self.header != header(self.start, self.identity, self.count) {
            return Err(Trouble::Memory(format!(
                "{} stamps were counted, {} was kept",
                self.count,
                block::describe(&self.header)
            )));
        }
        Err(Trouble::Wrong(format!(
            "{expected} was flushed, {} was read",
            block::describe(&found)
        )))
    }

    fn write_header(&self, device: &impl Device) -> Result<(), Trouble> {
        Ok(device.write(self.start, &self.header)?)
    }

    fn stamp(&self, number: u64) -> Content {
        Content {
            kind: Kind::Stamp,
            identity: self.identity,
            // The first block of the zone is the header's.
            offset: self.start + slot_of(number) * STRIDE + block::SIZE as u64,
            number,
        }
    }

    fn newest_in(&self, slot: u64) -> Option<u64> {
        (self.count.saturating_sub(SLOTS - 1).max(1)..=self.count)
            .find(|number| slot_of(*number) == slot)
    }
}

fn header(start: u64, identity: u64, number: u64) -> Block {
    let content = Content {
        kind: Kind::Header,
        identity,
        offset: start,
        number,
    };
    content.block()
}

fn slot_of(number: u64) -> u64 {
    number * STEP % SLOTS
}

#[cfg(test)]
pub(crate) mod tests;
