// SPDX-License-Identifier: Apache-2.0
//! A disk whose write cache forgets when the power fails.
//!
//! The durable part is a file. What is written goes into the cache and is
//! seen by reads at once. It gets into the file by a flush, because the cache
//! is full (oldest first), in an orderly shutdown, or because a power cut
//! happens to spare it.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, fallocate};
use serde::Serialize;
use thiserror::Error;

use crate::loss::{Fate, Fates, Lose};

/// Bytes of a sector, in which virtio counts; blocks of a disk have one or more.
pub const SECTOR: u64 = 512;

const MAX_BLOCK: u64 = 4096;

/// What may go wrong with a disk.
#[derive(Debug, Error)]
pub enum Error {
    /// The file can't be opened.
    #[error("the disk's file {path} can't be opened: {source}")]
    Open {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// The file is no disk.
    #[error("the disk's file {path} has {size} bytes; it needs a multiple of {block}, and not 0")]
    Size {
        /// The file.
        path: PathBuf,
        /// Its size in bytes.
        size: u64,
        /// The size of a block in bytes.
        block: u64,
    },
    /// Blocks have another size than disks have.
    #[error("a disk has no blocks of {0} bytes, but of 512, 1024, 2048 or 4096")]
    Block(u64),
    /// A request goes beyond the disk, or not by whole blocks.
    #[error(
        "{length} bytes at byte {offset} are not whole blocks of {block} bytes of a disk of \
         {capacity} bytes"
    )]
    Range {
        /// Where it begins, in bytes.
        offset: u64,
        /// Its length in bytes.
        length: u64,
        /// The disk's size in bytes.
        capacity: u64,
        /// The size of a block in bytes.
        block: u64,
    },
    /// The file fails.
    #[error("the disk's file fails: {0}")]
    Io(#[from] io::Error),
}

/// What is written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// These bytes.
    Data(Vec<u8>),
    /// So many bytes of zeros.
    Zeros(u64),
}

impl Content {
    fn length(&self) -> u64 {
        match self {
            Content::Data(data) => data.len() as u64,
            Content::Zeros(length) => *length,
        }
    }

    /// Bytes of the cache that it takes.
    fn cost(&self) -> u64 {
        match self {
            Content::Data(data) => data.len() as u64,
            Content::Zeros(_) => SECTOR,
        }
    }
}

struct Write {
    number: u64,
    offset: u64,
    content: Content,
}

/// A moment: all writes that completed before it, and none after.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moment(u64);

/// What a power cut did to the writes that were not flushed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Losses {
    /// Writes that reached the disk.
    pub kept: u64,
    /// Writes that are gone.
    pub dropped: u64,
    /// Writes of which some blocks reached the disk.
    pub torn: u64,
}

/// The disk.
pub struct Cache {
    file: File,
    capacity: u64,
    block: u64,
    limit: u64,
    // In the order of their completion, which is that of their numbers.
    writes: VecDeque<Write>,
    held: u64,
    next_number: u64,
}

impl Cache {
    /// Take a file as a disk of its size.
    ///
    /// `limit` is how many bytes the cache holds before it writes out by
    /// itself, and `block` how many the disk writes whole or not at all.
    pub fn open(path: &Path, limit: u64, block: u64) -> Result<Self, Error> {
        if !block.is_power_of_two() || !(SECTOR..=MAX_BLOCK).contains(&block) {
            return Err(Error::Block(block));
        }
        let opened = OpenOptions::new().read(true).write(true).open(path);
        let file = opened.map_err(|source| Error::Open {
            path: path.into(),
            source,
        })?;
        let capacity = file.metadata()?.len();
        if capacity == 0 || capacity % block != 0 {
            return Err(Error::Size {
                path: path.into(),
                size: capacity,
                block,
            });
        }
        Ok(Cache {
            file,
            capacity,
            block,
            limit,
            writes: VecDeque::new(),
            held: 0,
            next_number: 0,
        })
    }

    /// The disk's size in bytes.
    pub fn capacity(&self) -> u64 {
        self.capacity
    }

    /// The size of a block in bytes.
    pub fn block(&self) -> u64 {
        self.block
    }

    /// How many writes were not flushed.
    pub fn unflushed(&self) -> usize {
        self.writes.len()
    }

    /// How many bytes of the cache are taken.
    pub fn held(&self) -> u64 {
        self.held
    }

    /// Now.
    pub fn now(&self) -> Moment {
        Moment(self.next_number)
    }

    /// Fill the buffer with what is at a byte offset.
    pub fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), Error> {
        let end = self.check(offset, buffer.len() as u64)?;
        self.file.read_exact_at(buffer, offset)?;
        for write in &self.writes {
            let from = offset.max(write.offset);
            let to = end.min(write.offset + write.content.length());
            if from < to {
                let seen = &mut buffer[(from - offset) as usize..(to - offset) as usize];
                match &write.content {
                    Content::Data(data) => seen.copy_from_slice(
                        &data[(from - write.offset) as usize..(to - write.offset) as usize],
                    ),
                    Content::Zeros(_) => seen.fill(0),
                }
            }
        }
        Ok(())
    }

    /// Complete a write at a byte offset.
    pub fn write(&mut self, offset: u64, content: Content) -> Result<(), Error> {
        self.check(offset, content.length())?;
        self.held += content.cost();
        self.writes.push_back(Write {
            number: self.next_number,
            offset,
            content,
        });
        self.next_number += 1;
        while self.held > self.limit {
            self.write_out_oldest()?;
        }
        Ok(())
    }

    /// Make durable what completed before a moment, and nothing else.
    pub fn flush(&mut self, before: Moment) -> Result<(), Error> {
        while self
            .writes
            .front()
            .is_some_and(|write| write.number < before.0)
        {
            self.write_out_oldest()?;
        }
        Ok(())
    }

    /// Make everything durable, as an orderly shutdown does.
    pub fn write_out(&mut self) -> Result<(), Error> {
        self.flush(self.now())
    }

    /// Lose the power: the seed decides which unflushed writes survive.
    pub fn cut_power(&mut self, seed: u64, lose: Lose) -> Result<Losses, Error> {
        let mut fates = Fates::new(seed, lose);
        let mut losses = Losses::default();
        self.held = 0;
        for write in std::mem::take(&mut self.writes) {
            match fates.next((write.content.length() / self.block) as usize) {
                Fate::Kept => {
                    losses.kept += 1;
                    put(&self.file, &write, 0, write.content.length())?;
                }
                Fate::Dropped => losses.dropped += 1,
                Fate::Torn(survivors) => {
                    losses.torn += 1;
                    for (number, survives) in (0..).zip(survivors) {
                        if survives {
                            put(&self.file, &write, number * self.block, self.block)?;
                        }
                    }
                }
            }
        }
        Ok(losses)
    }

    /// The end of a request, in bytes, if it is within the disk.
    fn check(&self, offset: u64, length: u64) -> Result<u64, Error> {
        let out_of_range = Error::Range {
            offset,
            length,
            capacity: self.capacity,
            block: self.block,
        };
        match offset.checked_add(length) {
            Some(end) if end <= self.capacity && (offset | length) % self.block == 0 => Ok(end),
            _ => Err(out_of_range),
        }
    }

    fn write_out_oldest(&mut self) -> Result<(), Error> {
        if let Some(write) = self.writes.front() {
            put(&self.file, write, 0, write.content.length())?;
            self.held -= write.content.cost();
            self.writes.pop_front();
        }
        Ok(())
    }
}

/// Put a part of a write into the file; `from` and `length` are its bytes.
fn put(file: &File, write: &Write, from: u64, length: u64) -> io::Result<()> {
    let offset = write.offset + from;
    match &write.content {
        Content::Data(data) => {
            file.write_all_at(&data[from as usize..(from + length) as usize], offset)
        }
        Content::Zeros(_) if length == 0 => Ok(()),
        Content::Zeros(_) => {
            let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            Ok(fallocate(file, hole, offset, length)?)
        }
    }
}

#[cfg(test)]
mod tests;
