// SPDX-License-Identifier: Apache-2.0

//! Opening a volume: new metadata, or recovery.
//!
//! Recovery flushes both disks, reads superblocks, bitmap and journal, compares
//! the blocks whose intents are not settled with what the destination holds,
//! records in the bitmap what is local, and raises the epoch, which empties the
//! journal. Until the new superblock is written nothing has changed but bits of
//! what is local, so recovery can be interrupted and begun again at any point.

use std::collections::HashMap;

use crate::bitmap::{WORDS_PER_BITMAP_BLOCK, WORDS_PER_SECTOR, decode_sector};
use crate::journal::{Entry, checksum, decode_header, entries};
use crate::log::Log;
use crate::map::Map;
use crate::rules::Rule;
use crate::superblock::{Damage, JOURNAL_FIRST, Superblock};
use crate::volume::{State, io, kind};
use crate::{Action, BLOCK_SIZE, Buffer, Device, Failure, Memory, Notice, OpenError, Volume};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// All of the metadata are zeroed.
    Zero,
    /// The zeros are flushed.
    FlushZeros,
    /// Both disks are flushed.
    Flush,
    /// Both superblocks are read.
    Superblocks,
    /// The bitmap is read.
    Bitmap,
    /// The journal's headers are read.
    Headers,
    /// The journal's entries are read.
    Entries,
    /// The destination's blocks are compared with their intents.
    Compare,
    /// The bitmap is written.
    Bits,
    /// The metadata are flushed.
    Sync,
    /// The new superblock is written.
    Superblock,
}

/// How far the opening of a volume is.
#[derive(Debug)]
pub(crate) struct Opening {
    step: Step,
    begun: bool,
    pending: u32,
    /// The next block of what is being read, or intent that is compared.
    cursor: u64,
    /// What each buffer for an extent is being filled with: first and count.
    chunks: Vec<(u64, u64)>,
    superblocks: [Result<Superblock, Damage>; 2],
    settled: u64,
    tail: u64,
    voids: HashMap<u64, u64>,
    /// Blocks and checksums of intents that are not settled.
    intents: Vec<(u64, u32)>,
    /// Buffers of blocks that are read to be compared.
    comparing: Vec<(u16, u64)>,
}

impl Opening {
    fn new(step: Step) -> Self {
        Self {
            step,
            begun: false,
            pending: 0,
            cursor: 0,
            chunks: Vec::new(),
            superblocks: [Err(Damage::Short); 2],
            settled: 0,
            tail: 0,
            voids: HashMap::new(),
            intents: Vec::new(),
            comparing: Vec::new(),
        }
    }

    pub(crate) fn format() -> Self {
        Self::new(Step::Zero)
    }

    pub(crate) fn recover() -> Self {
        Self::new(Step::Flush)
    }
}

impl Volume {
    fn opening(&mut self) -> Option<&mut Opening> {
        match &mut self.state {
            State::Opening(opening) => Some(opening),
            _ => None,
        }
    }

    fn open_failed(&mut self, error: OpenError) {
        self.state = State::Closed;
        self.actions
            .push_back(Action::Notice(Notice::OpenFailed(error)));
    }

    /// Hand out what the present step of opening needs, or go to the next one.
    pub(crate) fn opening_advance<M: Memory>(&mut self, memory: &mut M) {
        while let Some(opening) = self.opening() {
            let begun = core::mem::replace(&mut opening.begun, true);
            if begun && opening.pending == 0 {
                match opening.step {
                    Step::Bitmap | Step::Headers | Step::Entries | Step::Compare | Step::Bits => {}
                    _ => {
                        self.opening_next();
                        continue;
                    }
                }
            } else if begun {
                return;
            }
            self.opening_begin(memory);
            let Some(opening) = self.opening() else {
                return;
            };
            if opening.pending > 0 {
                return;
            }
            self.opening_next();
        }
    }

    fn opening_io(&mut self, detail: u64) -> crate::Io {
        if let Some(opening) = self.opening() {
            opening.pending += 1;
        }
        io(kind::OPENING, detail)
    }

    fn opening_flush(&mut self, device: Device) {
        let io = self.opening_io(0);
        self.actions.push_back(Action::Flush { io, device });
    }

    fn opening_begin<M: Memory>(&mut self, memory: &mut M) {
        let Some(step) = self.opening().map(|opening| opening.step) else {
            return;
        };
        match step {
            Step::Zero => {
                let io = self.opening_io(0);
                self.actions.push_back(Action::Zero {
                    io,
                    device: Device::Metadata,
                    offset: 0,
                    length: self.wanted.metadata_size(),
                    fua: false,
                });
            }
            Step::FlushZeros => self.opening_flush(Device::Metadata),
            Step::Sync => {
                if self.rules.keep(Rule::FlushBeforeNewEpoch) {
                    self.opening_flush(Device::Metadata);
                }
            }
            Step::Flush => {
                if self.rules.keep(Rule::FlushBeforeRecovery) {
                    self.opening_flush(Device::Data);
                    self.opening_flush(Device::Metadata);
                }
            }
            Step::Superblocks => {
                for block in 0..2 {
                    let Some(slot) = self.take_block(0) else {
                        return;
                    };
                    let io = self.opening_io(u64::from(slot) << 8 | block);
                    self.actions.push_back(Action::Read {
                        io,
                        device: Device::Metadata,
                        offset: block * BLOCK_SIZE,
                        length: BLOCK_SIZE as u32,
                        buffer: Buffer::Block(slot),
                    });
                }
            }
            Step::Bitmap | Step::Headers | Step::Entries => {
                for slot in 0..self.config.copies {
                    self.read_chunk(slot);
                }
            }
            Step::Compare => self.begin_comparing(),
            Step::Bits => {
                while self.free_blocks.len() > 8 {
                    let Some((bitmap_block, changed)) = self.map.take_dirty(0) else {
                        return;
                    };
                    let Some(slot) = self.take_block(0) else {
                        return;
                    };
                    self.compose_bitmap(bitmap_block, changed, slot, memory);
                    let io = self.opening_io(u64::from(slot));
                    let at = self.superblock.bitmap_first() + bitmap_block;
                    self.write_metadata(io, at, slot, false);
                }
            }
            Step::Superblock => {
                let Some(slot) = self.take_block(0) else {
                    return;
                };
                self.wanted.encode(memory.block_mut(slot));
                let io = self.opening_io(u64::from(slot));
                self.write_metadata(io, self.wanted.location(), slot, true);
            }
        }
    }

    /// Where the present step reads in the metadata: from, and how many blocks.
    fn chunk_area(&self, step: Step) -> (u64, u64) {
        if step == Step::Bitmap {
            (
                self.superblock.bitmap_first(),
                self.superblock.bitmap_blocks,
            )
        } else {
            (JOURNAL_FIRST, self.superblock.journal_blocks)
        }
    }

    fn read_chunk(&mut self, slot: u16) {
        let Some(step) = self.opening().map(|opening| opening.step) else {
            return;
        };
        let (first, blocks) = self.chunk_area(step);
        let most = u64::from(self.config.region_blocks);
        let copies = usize::from(self.config.copies);
        let Some(opening) = self.opening() else {
            return;
        };
        let at = opening.cursor;
        let count = most.min(blocks - at);
        if count == 0 {
            return;
        }
        opening.cursor += count;
        opening.chunks.resize(copies, (0, 0));
        opening.chunks[usize::from(slot)] = (at, count);
        let io = self.opening_io(u64::from(slot));
        self.actions.push_back(Action::Read {
            io,
            device: Device::Metadata,
            offset: (first + at) * BLOCK_SIZE,
            length: (count * BLOCK_SIZE) as u32,
            buffer: Buffer::Extent { slot, offset: 0 },
        });
    }

    /// Go to the next step; all of the present one has ended.
    fn opening_next(&mut self) {
        let rules = self.rules;
        let Some(opening) = self.opening() else {
            return;
        };
        opening.begun = false;
        opening.cursor = 0;
        let next = match opening.step {
            Step::Zero => Step::FlushZeros,
            Step::FlushZeros => {
                self.superblock = self.wanted;
                self.wanted.generation = 1;
                self.begin_map();
                self.hydration.holes = self.config.destination_zeroed;
                Step::Superblock
            }
            Step::Flush => Step::Superblocks,
            Step::Superblocks => {
                if let Err(error) = self.choose_superblock() {
                    return self.open_failed(error);
                }
                self.begin_map();
                Step::Bitmap
            }
            Step::Bitmap => Step::Headers,
            Step::Headers => Step::Entries,
            Step::Entries => {
                opening.intents.sort_unstable();
                opening.intents.dedup();
                if rules.keep(Rule::Compare) {
                    Step::Compare
                } else {
                    let intents = core::mem::take(&mut opening.intents);
                    for (block, _) in intents {
                        self.map.set_local(block);
                    }
                    Step::Bits
                }
            }
            Step::Compare => {
                if self.rules.keep(Rule::RecordBeforeNewEpoch) {
                    Step::Bits
                } else {
                    Step::Sync
                }
            }
            Step::Bits => Step::Sync,
            Step::Sync => {
                self.wanted = Superblock {
                    generation: self.superblock.generation + 1,
                    epoch: self.superblock.epoch + u64::from(self.rules.keep(Rule::NewEpoch)),
                    complete: self.superblock.complete && self.map.remote() == 0,
                    ..self.superblock
                };
                Step::Superblock
            }
            Step::Superblock => {
                self.superblock = self.wanted;
                self.log = Log::new(self.superblock.journal_blocks, self.config.unsettled);
                // Twice, so that it need not grow for what was removed.
                self.unsettled.reserve(self.config.unsettled * 2);
                if !self.rules.keep(Rule::HolesOnlyWhenNew) {
                    self.hydration.holes = self.config.destination_zeroed;
                }
                self.state = State::Open;
                self.actions.push_back(Action::Notice(Notice::Open));
                self.retry = true;
                return;
            }
        };
        if let Some(opening) = self.opening() {
            opening.step = next;
        }
    }

    fn begin_map(&mut self) {
        self.map = Map::new(self.superblock.blocks(), self.config.region_blocks);
    }

    fn choose_superblock(&mut self) -> Result<(), OpenError> {
        let move_id = self.config.move_id;
        let Some(opening) = self.opening() else {
            return Ok(());
        };
        let found = opening
            .superblocks
            .iter()
            .flatten()
            .filter(|superblock| superblock.move_id == move_id)
            .max_by_key(|superblock| superblock.generation);
        let Some(found) = found.copied() else {
            return Err(match opening.superblocks {
                [Ok(foreign), _] | [_, Ok(foreign)] => OpenError::ForeignMove {
                    found: foreign.move_id,
                },
                [Err(Damage::Magic), Err(damage)] | [Err(damage), _] => {
                    OpenError::Superblock(damage)
                }
            });
        };
        let config = &self.config;
        let figures = [
            (
                "the source's size",
                found.source_size,
                config.source_size,
                found.source_size == config.source_size,
            ),
            (
                "the logical block size",
                u64::from(found.logical_block_size),
                u64::from(config.logical_block_size),
                found.logical_block_size == config.logical_block_size,
            ),
            (
                "the size",
                found.size,
                config.size,
                found.size == config.size,
            ),
        ];
        if let Some((what, found, wanted, _)) = figures.into_iter().find(|figure| !figure.3) {
            return Err(OpenError::Mismatch {
                what,
                found,
                wanted,
            });
        }
        if config.metadata_size < found.metadata_size() {
            return Err(OpenError::TooSmall {
                needed: found.metadata_size(),
                found: config.metadata_size,
            });
        }
        self.superblock = found;
        self.wanted = found;
        Ok(())
    }

    /// An operation of opening has ended.
    pub(crate) fn opening_ended<M: Memory>(
        &mut self,
        detail: u64,
        result: Result<(), Failure>,
        memory: &mut M,
    ) {
        let Some(opening) = self.opening() else {
            return;
        };
        opening.pending -= 1;
        let step = opening.step;
        if let Err(failure) = result {
            let device = match step {
                Step::Compare => Device::Data,
                _ => Device::Metadata,
            };
            return self.open_failed(OpenError::Device(device, failure));
        }
        match step {
            Step::Superblocks => {
                let slot = (detail >> 8) as u16;
                opening.superblocks[(detail & 1) as usize] = Superblock::decode(memory.block(slot));
                self.give_block(slot);
            }
            Step::Bitmap | Step::Headers | Step::Entries => {
                let slot = detail as u16;
                let (first, count) = opening.chunks[usize::from(slot)];
                let content = &memory.extent(slot)[..(count * BLOCK_SIZE) as usize];
                if let Err(error) = self.read_metadata(step, first, content) {
                    self.open_failed(error);
                }
            }
            Step::Compare => self.compare(detail as u16, memory),
            Step::Bits | Step::Superblock => self.give_block(detail as u16),
            _ => {}
        }
    }

    fn read_metadata(&mut self, step: Step, first: u64, content: &[u8]) -> Result<(), OpenError> {
        let blocks = (first..).zip(content.chunks_exact(BLOCK_SIZE as usize));
        for (number, block) in blocks {
            match step {
                Step::Bitmap => self.read_bitmap_block(number, block)?,
                Step::Headers => self.read_header(number, block),
                _ => self.read_entries(number, block),
            }
        }
        Ok(())
    }

    fn read_bitmap_block(&mut self, number: u64, block: &[u8]) -> Result<(), OpenError> {
        for (index, sector) in block.chunks_exact(512).enumerate() {
            let sector_number = number * 8 + index as u64;
            let words =
                decode_sector(&self.config.move_id, sector_number, sector).map_err(|_| {
                    OpenError::Bitmap {
                        sector: sector_number,
                    }
                })?;
            let at = number as usize * WORDS_PER_BITMAP_BLOCK + index * WORDS_PER_SECTOR;
            self.map.load(at, &words);
        }
        Ok(())
    }

    /// The header of a block of the journal that counts.
    fn header(&self, number: u64, block: &[u8]) -> Option<crate::journal::Header> {
        let header = decode_header(&self.config.move_id, block).ok()?;
        let here = header.sequence % self.superblock.journal_blocks == number;
        (here && header.epoch == self.superblock.epoch).then_some(header)
    }

    fn read_header(&mut self, number: u64, block: &[u8]) {
        let Some(header) = self.header(number, block) else {
            return;
        };
        let Some(opening) = self.opening() else {
            return;
        };
        opening.settled = opening.settled.max(header.settled);
        opening.tail = opening.tail.max(header.tail);
        for entry in entries(&header, block) {
            if let Entry::Void { block } = entry {
                let void = opening.voids.entry(block).or_default();
                *void = header.sequence.max(*void);
            }
        }
    }

    fn read_entries(&mut self, number: u64, block: &[u8]) {
        let Some(header) = self.header(number, block) else {
            return;
        };
        let blocks = self.map.blocks();
        let keeps_tail = self.rules.keep(Rule::Tail);
        let keeps_settled = self.rules.keep(Rule::SettledIsLocal);
        let State::Opening(opening) = &mut self.state else {
            return;
        };
        if keeps_tail && header.sequence < opening.tail {
            return;
        }
        for entry in entries(&header, block) {
            match entry {
                Entry::Local { block, count } => {
                    let end = block.saturating_add(u64::from(count)).min(blocks);
                    (block..end).for_each(|block| self.map.set_local(block));
                }
                Entry::Intent { block, checksum } if block < blocks => {
                    let voided = opening
                        .voids
                        .get(&block)
                        .is_some_and(|void| *void > header.sequence);
                    if voided || self.map.is_local(block) {
                        continue;
                    }
                    if keeps_settled && header.sequence <= opening.settled {
                        self.map.set_local(block);
                    } else {
                        opening.intents.push((block, checksum));
                    }
                }
                _ => {}
            }
        }
    }

    /// Read blocks of the destination that have intents.
    fn begin_comparing(&mut self) {
        while self.free_blocks.len() > 8 {
            let State::Opening(opening) = &mut self.state else {
                return;
            };
            let Some((block, _)) = opening.intents.get(opening.cursor as usize).copied() else {
                return;
            };
            while opening
                .intents
                .get(opening.cursor as usize)
                .is_some_and(|(next, _)| *next == block)
            {
                opening.cursor += 1;
            }
            if self.map.is_local(block) {
                continue;
            }
            let Some(slot) = self.free_blocks.pop() else {
                return;
            };
            opening.comparing.push((slot, block));
            let io = self.opening_io(u64::from(slot));
            self.actions.push_back(Action::Read {
                io,
                device: Device::Data,
                offset: block * BLOCK_SIZE,
                length: BLOCK_SIZE as u32,
                buffer: Buffer::Block(slot),
            });
        }
    }

    fn compare<M: Memory>(&mut self, slot: u16, memory: &M) {
        let epoch = self.superblock.epoch;
        let State::Opening(opening) = &mut self.state else {
            return;
        };
        let Some(at) = opening
            .comparing
            .iter()
            .position(|(other, _)| *other == slot)
        else {
            return;
        };
        let (_, block) = opening.comparing.swap_remove(at);
        let found = checksum(epoch, block, memory.block(slot));
        if opening.intents.binary_search(&(block, found)).is_ok() {
            self.map.set_local(block);
        }
        self.give_block(slot);
    }
}
